# The few functions of vcpkg that the port calls, for machines without vcpkg: enough to run the
# portfile and to see what it installs.
#   cmake -DPORT_DIR=... -DCURRENT_PACKAGES_DIR=... -DWORK_DIR=... -P vcpkg_stand_in.cmake
cmake_minimum_required(VERSION 3.22)

file(READ "${PORT_DIR}/vcpkg.json" manifest)  # a malformed manifest stops here
string(JSON PORT GET "${manifest}" name)
string(JSON version GET "${manifest}" version-semver)
string(JSON cuda GET "${manifest}" features cuda description)
message(STATUS "${PORT} ${version}, feature cuda: ${cuda}")

function(run)
  execute_process(COMMAND ${ARGN} COMMAND_ERROR_IS_FATAL ANY OUTPUT_QUIET)
endfunction()

function(vcpkg_cmake_configure)
  cmake_parse_arguments(arg "" "SOURCE_PATH" "OPTIONS" ${ARGN})
  if(arg_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "vcpkg_cmake_configure: unknown ${arg_UNPARSED_ARGUMENTS}")
  endif()
  run("${CMAKE_COMMAND}" -S "${arg_SOURCE_PATH}" -B "${WORK_DIR}/build"
      "-DCMAKE_INSTALL_PREFIX=${CURRENT_PACKAGES_DIR}" -DCMAKE_BUILD_TYPE=Release ${arg_OPTIONS})
endfunction()

function(vcpkg_cmake_install)
  run("${CMAKE_COMMAND}" --build "${WORK_DIR}/build" --target install)
endfunction()

# Moves the package files to share/PORT; the prefix they compute is one folder nearer from there.
function(vcpkg_cmake_config_fixup)
  cmake_parse_arguments(arg "" "PACKAGE_NAME;CONFIG_PATH" "" ${ARGN})
  set(from "${CURRENT_PACKAGES_DIR}/${arg_CONFIG_PATH}")
  set(to "${CURRENT_PACKAGES_DIR}/share/${PORT}")
  if(NOT EXISTS "${from}")
    message(FATAL_ERROR "vcpkg_cmake_config_fixup: ${from} does not exist")
  endif()
  file(MAKE_DIRECTORY "${to}")
  file(GLOB files "${from}/*")
  foreach(file IN LISTS files)
    get_filename_component(name "${file}" NAME)
    file(RENAME "${file}" "${to}/${name}")
  endforeach()
  file(REMOVE_RECURSE "${CURRENT_PACKAGES_DIR}/share/cmake")
  file(GLOB files "${to}/*.cmake")
  foreach(file IN LISTS files)
    file(READ "${file}" text)
    string(REPLACE "\${CMAKE_CURRENT_LIST_DIR}/../../../" "\${CMAKE_CURRENT_LIST_DIR}/../../" text "${text}")
    # Exported targets climb one folder at a time from share/cmake/PORT: one step less now.
    string(REPLACE "get_filename_component(_IMPORT_PREFIX \"\${CMAKE_CURRENT_LIST_FILE}\" PATH)\n"
      "get_filename_component(_IMPORT_PREFIX \"\${CMAKE_CURRENT_LIST_DIR}\" PATH)\n" text "${text}")
    string(REGEX REPLACE
      "(get_filename_component\\(_IMPORT_PREFIX \"\\\${_IMPORT_PREFIX}\" PATH\\)\n)(get_filename_component\\(_IMPORT_PREFIX \"\\\${_IMPORT_PREFIX}\" PATH\\)\n)+"
      "\\1" text "${text}")
    file(WRITE "${file}" "${text}")
  endforeach()
endfunction()

function(vcpkg_fixup_pkgconfig)
  if(NOT EXISTS "${CURRENT_PACKAGES_DIR}/share/pkgconfig/${PORT}.pc")
    message(FATAL_ERROR "vcpkg_fixup_pkgconfig: there is no ${PORT}.pc")
  endif()
endfunction()

function(vcpkg_install_copyright)
  cmake_parse_arguments(arg "" "" "FILE_LIST" ${ARGN})
  file(INSTALL ${arg_FILE_LIST} DESTINATION "${CURRENT_PACKAGES_DIR}/share/${PORT}" RENAME copyright)
endfunction()

file(REMOVE_RECURSE "${CURRENT_PACKAGES_DIR}" "${WORK_DIR}/build")
include("${PORT_DIR}/portfile.cmake")
