# Installs the headers, find_package(chunkattn) and pkg-config files. All of it is independent of the
# architecture, so it goes below share/. A folder of GNUInstallDirs that is relative moves with the prefix, an
# absolute one stays where it is.
if(NOT CMAKE_SIZEOF_VOID_P)  # without a compiler GNUInstallDirs cannot know, and nothing goes there
  set(CMAKE_INSTALL_LIBDIR lib)
endif()
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(package_dir "${CMAKE_INSTALL_DATADIR}/cmake/chunkattn")

install(DIRECTORY "${PROJECT_SOURCE_DIR}/include/chunkattn" DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}"
        FILES_MATCHING PATTERN "*.hpp" PATTERN "*.h" PATTERN "*.ipp" PATTERN "*.cuh")
install(TARGETS chunkattn EXPORT chunkattn-targets INCLUDES DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}")
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

# The .pc file finds its prefix from its own place, so an installed tree can be moved, unless that place is absolute.
set(pc_dir "${CMAKE_INSTALL_DATADIR}/pkgconfig")
if(IS_ABSOLUTE "${pc_dir}")
  set(CHUNKATTN_PC_PREFIX "${CMAKE_INSTALL_PREFIX}")
else()
  file(RELATIVE_PATH CHUNKATTN_PC_PREFIX "/prefix/${pc_dir}" "/prefix")
  string(REGEX REPLACE "/$" "" CHUNKATTN_PC_PREFIX "\${pcfiledir}/${CHUNKATTN_PC_PREFIX}")
endif()
set(CHUNKATTN_PC_INCLUDEDIR "${CMAKE_INSTALL_INCLUDEDIR}")
if(NOT IS_ABSOLUTE "${CHUNKATTN_PC_INCLUDEDIR}")
  set(CHUNKATTN_PC_INCLUDEDIR "\${prefix}/${CHUNKATTN_PC_INCLUDEDIR}")
endif()
configure_file("${PROJECT_SOURCE_DIR}/cmake/chunkattn.pc.in" "${PROJECT_BINARY_DIR}/chunkattn.pc" @ONLY)
install(FILES "${PROJECT_BINARY_DIR}/chunkattn.pc" DESTINATION "${pc_dir}")

install(FILES "${PROJECT_SOURCE_DIR}/LICENSE" DESTINATION "${CMAKE_INSTALL_DATADIR}/licenses/chunkattn")
