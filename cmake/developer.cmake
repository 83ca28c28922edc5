# Settings shared by tests, examples and benchmarks. Nothing here reaches a consumer.

set(CMAKE_EXPORT_COMPILE_COMMANDS ON)

add_library(chunkattn_developer INTERFACE)
target_link_libraries(chunkattn_developer INTERFACE chunkattn::chunkattn)
target_compile_options(chunkattn_developer INTERFACE
  "$<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra;-Wpedantic;-Wconversion;-Wshadow>")
if(CHUNKATTN_WERROR)
  target_compile_options(chunkattn_developer INTERFACE "$<$<COMPILE_LANGUAGE:CXX>:-Werror>")
endif()
if(CHUNKATTN_SANITIZE)
  target_compile_options(chunkattn_developer INTERFACE
    "$<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${CHUNKATTN_SANITIZE};-fno-sanitize-recover=all;-fno-omit-frame-pointer>")
  target_link_options(chunkattn_developer INTERFACE "-fsanitize=${CHUNKATTN_SANITIZE}")
endif()

# An option for what would take more than 1 GB: g++ then looks for what it no longer needs more often, which takes a
# quarter of its time.
set(chunkattn_spare_memory "$<$<COMPILE_LANG_AND_ID:CXX,GNU>:--param=ggc-min-expand=30>")

# Whether what most units include is compiled once for all of the same options: in a run of all tests. (ccache keeps
# nothing that uses it.)
set(chunkattn_precompile FALSE)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND NOT CMAKE_CROSSCOMPILING AND
   (CHUNKATTN_GROUP_TESTS OR CHUNKATTN_FAST_TESTS))
  set(chunkattn_precompile TRUE)
endif()

# A target of its own, so that tests of another instruction set can leave it out.
add_library(chunkattn_native INTERFACE)
if(CHUNKATTN_ONLY_ISA)
  if(NOT CHUNKATTN_ONLY_ISA MATCHES "^(portable|avx2|avx512|amx|neon)$")
    message(FATAL_ERROR
      "chunkattn: CHUNKATTN_ONLY_ISA is ${CHUNKATTN_ONLY_ISA}; expected portable, avx2, avx512, amx or neon")
  endif()
  target_compile_definitions(chunkattn_native INTERFACE CHUNKATTN_ISA=${CHUNKATTN_ONLY_ISA})
  if(CHUNKATTN_ONLY_ISA STREQUAL "avx2")
    target_compile_options(chunkattn_native INTERFACE "$<$<COMPILE_LANGUAGE:CXX>:-mavx2;-mfma;-mf16c>")
  endif()
elseif(CHUNKATTN_NATIVE)
  include(CheckCXXCompilerFlag)
  check_cxx_compiler_flag(-march=native CHUNKATTN_HAS_MARCH_NATIVE)
  if(CHUNKATTN_HAS_MARCH_NATIVE)
    target_compile_options(chunkattn_native INTERFACE
      "$<$<COMPILE_LANGUAGE:CXX>:-march=native>"
      # clang 19 warns of the features it finds itself on machines with AVX10
      "$<$<COMPILE_LANG_AND_ID:CXX,Clang>:-Wno-unknown-warning-option;-Wno-invalid-feature-combination>")
  endif()
endif()

# Kernels of instruction sets that this machine lacks are left out of what is compiled to run here and nowhere else.
string(REGEX MATCH "x86_64|AMD64" is_x86 "${CMAKE_SYSTEM_PROCESSOR}")
function(chunkattn_leave_other_sets target)  # of another architecture there is one
  if(is_x86 AND NOT CHUNKATTN_ONLY_ISA)
    target_compile_definitions(${target} ${ARGN} CHUNKATTN_ISA=native)
  endif()
endfunction()

# The same for what is to run on other machines, too. Without the tests of the label release, nothing does.
add_library(chunkattn_native_or_all INTERFACE)
if(CHUNKATTN_ONLY_ISA OR NOT (CHUNKATTN_ALL_SETS AND CHUNKATTN_RELEASE_TESTS))
  target_link_libraries(chunkattn_native_or_all INTERFACE chunkattn_native)
  if(CHUNKATTN_ALL_SETS AND CHUNKATTN_NATIVE)
    chunkattn_leave_other_sets(chunkattn_native_or_all INTERFACE)
  endif()
endif()

# What tests, examples and benchmarks use, and the library never does. Nothing here is an error: what
# needs a library that is missing is left out, with a message.
find_package(fmt QUIET CONFIG)

# chunkattn_find_headers(<target> <variable> <header> <package>): a library that is nothing but headers
# as an imported target, where <header> is found; <variable> is the folder, for users to set.
function(chunkattn_find_headers target variable header package)
  set_property(GLOBAL PROPERTY CHUNKATTN_PACKAGE_${target} ${package})
  find_path(${variable} ${header})
  if(NOT ${variable})
    return()
  endif()
  set(folder "${${variable}}")
  # A cross compiler must see this library, not the rest of the host's headers beside it.
  if(CMAKE_CROSSCOMPILING)
    string(REGEX MATCH "^[^/]+" first "${header}")
    set(folder "${PROJECT_BINARY_DIR}/headers/${package}")
    file(MAKE_DIRECTORY "${folder}")
    file(CREATE_LINK "${${variable}}/${first}" "${folder}/${first}" SYMBOLIC)
  endif()
  add_library(${target} INTERFACE IMPORTED GLOBAL)
  target_include_directories(${target} SYSTEM INTERFACE "${folder}")
endfunction()

set_property(GLOBAL PROPERTY CHUNKATTN_PACKAGE_fmt::fmt libfmt-dev)
set_property(GLOBAL PROPERTY CHUNKATTN_PACKAGE_benchmark::benchmark libbenchmark-dev)
chunkattn_find_headers(headers::doctest DOCTEST_INCLUDE_DIR doctest/doctest.h doctest-dev)
chunkattn_find_headers(headers::nlohmann_json NLOHMANN_JSON_INCLUDE_DIR nlohmann/json.hpp nlohmann-json3-dev)
chunkattn_find_headers(headers::cli11 CLI11_INCLUDE_DIR CLI/CLI.hpp libcli11-dev)
chunkattn_find_headers(headers::xxhash XXHASH_INCLUDE_DIR xxhash.h libxxhash-dev)

# chunkattn_have(<result> <program> <target>...): whether all of these were found; says what was not.
function(chunkattn_have result program)
  set(${result} TRUE PARENT_SCOPE)
  foreach(library IN LISTS ARGN)
    if(NOT TARGET ${library})
      get_property(package GLOBAL PROPERTY CHUNKATTN_PACKAGE_${library})
      if(package)
        set(package " (Debian: ${package})")
      endif()
      string(REPLACE "headers::" "" name "${library}")
      message(STATUS "chunkattn: ${program} left out: ${name} not found${package}")
      set(${result} FALSE PARENT_SCOPE)
      return()
    endif()
  endforeach()
endfunction()

# chunkattn_program(<target> SOURCES <file>... [LIBRARIES <target>...]): an example or a benchmark. Left
# out, with a message, where one of the libraries was not found.
function(chunkattn_program target)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "SOURCES;LIBRARIES")
  chunkattn_have(found ${target} ${arg_LIBRARIES})
  if(NOT found)
    return()
  endif()
  add_executable(${target} ${arg_SOURCES})
  target_include_directories(${target} PRIVATE "${PROJECT_SOURCE_DIR}" "${CMAKE_CURRENT_SOURCE_DIR}")
  target_link_libraries(${target} PRIVATE chunkattn_developer chunkattn_native ${arg_LIBRARIES})
endfunction()
