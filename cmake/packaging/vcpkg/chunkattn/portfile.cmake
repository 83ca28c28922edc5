# An overlay port of the checkout it stands in:
#   vcpkg install chunkattn --overlay-ports=path/to/chunkattn/cmake/packaging/vcpkg
# A port in a registry would fetch a release into SOURCE_PATH instead; the rest stays as it is.
get_filename_component(SOURCE_PATH "${CMAKE_CURRENT_LIST_DIR}/../../../.." ABSOLUTE)
if(NOT EXISTS "${SOURCE_PATH}/include/chunkattn/version.hpp")
  message(FATAL_ERROR "This port must stay in a chunkattn checkout, below cmake/packaging/vcpkg")
endif()

set(VCPKG_BUILD_TYPE release)  # header-only

vcpkg_cmake_configure(
  SOURCE_PATH "${SOURCE_PATH}"
  OPTIONS
    -DCHUNKATTN_BUILD_TESTS=OFF
    -DCHUNKATTN_BUILD_EXAMPLES=OFF
    -DCHUNKATTN_BUILD_BENCH=OFF
    -DCHUNKATTN_CUDA=OFF  # nothing is compiled here: the feature only brings in the toolkit
)
vcpkg_cmake_install()
vcpkg_cmake_config_fixup(CONFIG_PATH share/cmake/chunkattn)
vcpkg_fixup_pkgconfig()

file(REMOVE_RECURSE "${CURRENT_PACKAGES_DIR}/lib" "${CURRENT_PACKAGES_DIR}/share/licenses")
file(INSTALL "${CMAKE_CURRENT_LIST_DIR}/usage" DESTINATION "${CURRENT_PACKAGES_DIR}/share/${PORT}")
vcpkg_install_copyright(FILE_LIST "${SOURCE_PATH}/LICENSE")
