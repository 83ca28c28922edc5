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

# A target of its own, so that tests of another instruction set can leave it out.
add_library(chunkattn_native INTERFACE)
if(CHUNKATTN_NATIVE)
  include(CheckCXXCompilerFlag)
  check_cxx_compiler_flag(-march=native CHUNKATTN_HAS_MARCH_NATIVE)
  if(CHUNKATTN_HAS_MARCH_NATIVE)
    target_compile_options(chunkattn_native INTERFACE
      "$<$<COMPILE_LANGUAGE:CXX>:-march=native>"
      # clang 19 warns of the features it finds itself on machines with AVX10
      "$<$<COMPILE_LANG_AND_ID:CXX,Clang>:-Wno-unknown-warning-option;-Wno-invalid-feature-combination>")
  endif()
endif()

# fmt is used by examples and benchmarks only, never by the library.
find_package(fmt QUIET CONFIG)

# chunkattn_program(<target> SOURCES <file>... [LIBRARIES <target>...]): an example or a benchmark. Left
# out, with a message, where one of the libraries was not found.
function(chunkattn_program target)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "SOURCES;LIBRARIES")
  foreach(library IN LISTS arg_LIBRARIES)
    if(NOT TARGET ${library})
      message(STATUS "chunkattn: ${target} left out: ${library} not found")
      return()
    endif()
  endforeach()
  add_executable(${target} ${arg_SOURCES})
  target_include_directories(${target} PRIVATE "${PROJECT_SOURCE_DIR}" "${CMAKE_CURRENT_SOURCE_DIR}")
  target_link_libraries(${target} PRIVATE chunkattn_developer chunkattn_native ${arg_LIBRARIES})
endfunction()
