# The port of ../../ports with this checkout in place of a release:
#   vcpkg install chunkattn --classic --overlay-ports=path/to/chunkattn/cmake/packaging/vcpkg/overlay
# vcpkg cannot see that the checkout has changed: add --no-binarycaching to install it again.
function(vcpkg_from_github)
    cmake_parse_arguments(arg "" "OUT_SOURCE_PATH" "" ${ARGN})
    get_filename_component(checkout "${CMAKE_CURRENT_FUNCTION_LIST_DIR}/../../../../.." ABSOLUTE)
    set("${arg_OUT_SOURCE_PATH}" "${checkout}" PARENT_SCOPE)
endfunction()
include("${CMAKE_CURRENT_LIST_DIR}/../../ports/chunkattn/portfile.cmake")
