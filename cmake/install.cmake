# Installs the headers, find_package(chunkattn) and pkg-config files. All of it is independent of the
# architecture, so it goes below share/.
if(NOT CMAKE_SIZEOF_VOID_P)  # without a compiler GNUInstallDirs cannot know, and nothing goes there
  set(CMAKE_INSTALL_LIBDIR lib)
endif()
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(package_dir "${CMAKE_INSTALL_DATADIR}/cmake/chunkattn")

install(DIRECTORY "${PROJECT_SOURCE_DIR}/include/chunkattn" TYPE INCLUDE
        FILES_MATCHING PATTERN "*.hpp" PATTERN "*.h" PATTERN "*.ipp" PATTERN "*.cuh")
install(TARGETS chunkattn EXPORT chunkattn-targets)
install(EXPORT chunkattn-targets NAMESPACE chunkattn:: DESTINATION "${package_dir}")

if(PROJECT_VERSION_MAJOR EQUAL 0)
  set(compatibility SameMinorVersion)  # before 1.0 a minor version may break
else()
  set(compatibility SameMajorVersion)
endif()
write_basic_package_version_file("${PROJECT_BINARY_DIR}/chunkattn-config-version.cmake"
  VERSION ${PROJECT_VERSION} COMPATIBILITY ${compatibility} ARCH_INDEPENDENT)
configure_package_config_file("${PROJECT_SOURCE_DIR}/cmake/chunkattn-config.cmake.in"
  "${PROJECT_BINARY_DIR}/chunkattn-config.cmake" INSTALL_DESTINATION "${package_dir}"
  NO_SET_AND_CHECK_MACRO)
install(FILES
  "${PROJECT_BINARY_DIR}/chunkattn-config.cmake"
  "${PROJECT_BINARY_DIR}/chunkattn-config-version.cmake"
  "${PROJECT_SOURCE_DIR}/cmake/chunkattn-cuda.cmake"
  "${PROJECT_SOURCE_DIR}/cmake/chunkattn-kernels.cmake"
  DESTINATION "${package_dir}")

# The .pc file finds its prefix from its own place, so an installed tree can be moved.
set(pc_dir "${CMAKE_INSTALL_DATADIR}/pkgconfig")
file(RELATIVE_PATH CHUNKATTN_PC_TO_PREFIX "/prefix/${pc_dir}" "/prefix")
string(REGEX REPLACE "/$" "" CHUNKATTN_PC_TO_PREFIX "${CHUNKATTN_PC_TO_PREFIX}")
configure_file("${PROJECT_SOURCE_DIR}/cmake/chunkattn.pc.in" "${PROJECT_BINARY_DIR}/chunkattn.pc" @ONLY)
install(FILES "${PROJECT_BINARY_DIR}/chunkattn.pc" DESTINATION "${pc_dir}")

install(FILES "${PROJECT_SOURCE_DIR}/LICENSE" DESTINATION "${CMAKE_INSTALL_DATADIR}/licenses/chunkattn")
