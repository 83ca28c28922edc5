# The port of ../../ports with this checkout in place of a release:
#   vcpkg install chunkattn --classic --editable --overlay-ports=CHECKOUT/cmake/packaging/vcpkg/overlay
# vcpkg cannot see that a checkout has changed: without --editable it may install what it has cached
# of an older one. What is installed already has to be removed first (vcpkg remove chunkattn).
function(vcpkg_from_github)
    cmake_parse_arguments(arg "" "OUT_SOURCE_PATH" "" ${ARGN})
    get_filename_component(checkout "${CMAKE_CURRENT_FUNCTION_LIST_DIR}/../../../../.." ABSOLUTE)
    set("${arg_OUT_SOURCE_PATH}" "${checkout}" PARENT_SCOPE)
endfunction()
include("${CMAKE_CURRENT_LIST_DIR}/../../ports/chunkattn/portfile.cmake")
