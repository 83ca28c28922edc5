vcpkg_from_github(
    OUT_SOURCE_PATH SOURCE_PATH
    REPO chunkattn/chunkattn
    REF "v${VERSION}"
    SHA512 0
    HEAD_REF main
)

set(VCPKG_BUILD_TYPE release) # header-only

vcpkg_cmake_configure(
    SOURCE_PATH "${SOURCE_PATH}"
    OPTIONS
        -DCHUNKATTN_BUILD_TESTS=OFF
        -DCHUNKATTN_BUILD_EXAMPLES=OFF
        -DCHUNKATTN_BUILD_BENCH=OFF
        -DCHUNKATTN_CUDA=OFF # nothing is compiled here: the feature only brings in the toolkit
)
vcpkg_cmake_install()
vcpkg_cmake_config_fixup(CONFIG_PATH share/cmake/chunkattn)

# vcpkg allows share/pkgconfig only to files without "Libs:"; ours links with -pthread.
file(MAKE_DIRECTORY "${CURRENT_PACKAGES_DIR}/lib")
file(RENAME "${CURRENT_PACKAGES_DIR}/share/pkgconfig" "${CURRENT_PACKAGES_DIR}/lib/pkgconfig")
vcpkg_fixup_pkgconfig()

file(REMOVE_RECURSE "${CURRENT_PACKAGES_DIR}/share/licenses")
file(INSTALL "${CMAKE_CURRENT_LIST_DIR}/usage" DESTINATION "${CURRENT_PACKAGES_DIR}/share/${PORT}")
vcpkg_install_copyright(FILE_LIST "${SOURCE_PATH}/LICENSE")
