# Defines chunkattn_add_kernels(), which compiles the CPU kernels of a program once.
#
#   chunkattn_add_kernels(<target> HEAD_DIMS <dims>... [ELEMENTS <type>...] [QO <type>...])
#
# makes the static library <target>, with a source file for each of the combinations:
#
#   HEAD_DIMS  heads of K and V, each a number, or 192x128 where V has fewer elements
#   ELEMENTS   of K/V: float, half, bfloat16, int8 or float8_e4m3 (half)
#   QO         of k, v, q and out: float, half or bfloat16 (float)
#
# What links to it refers to these kernels instead of compiling them; one that is missing is an error
# of the linker. It takes the options for the processor from the folder that calls this: programs
# need the same.

function(chunkattn_add_kernels target)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "HEAD_DIMS;ELEMENTS;QO")
  if(NOT arg_HEAD_DIMS OR arg_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "chunkattn_add_kernels(${target} ${ARGN}): expected HEAD_DIMS <dims>... "
                        "[ELEMENTS <type>...] [QO <type>...]")
  endif()
  if(NOT arg_ELEMENTS)
    set(arg_ELEMENTS half)
  endif()
  if(NOT arg_QO)
    set(arg_QO float)
  endif()
  set(type_of_float float)
  set(type_of_half chunkattn::half)
  set(type_of_bfloat16 chunkattn::bfloat16)
  set(type_of_int8 std::int8_t)
  set(type_of_float8_e4m3 chunkattn::float8_e4m3)
  set(sources "")
  foreach(dims IN LISTS arg_HEAD_DIMS)
    if(NOT dims MATCHES "^([0-9]+)(x([0-9]+))?$")
      message(FATAL_ERROR "chunkattn_add_kernels: HEAD_DIMS has ${dims}: expected 128, or 192x128")
    endif()
    set(head_dim ${CMAKE_MATCH_1})
    set(value_dim ${CMAKE_MATCH_3})
    if(NOT value_dim)
      set(value_dim ${head_dim})
    endif()
    foreach(element IN LISTS arg_ELEMENTS)
      foreach(qo IN LISTS arg_QO)
        if(NOT DEFINED type_of_${element} OR NOT qo MATCHES "^(float|half|bfloat16)$")
          message(FATAL_ERROR "chunkattn_add_kernels: ELEMENTS ${element} QO ${qo}: expected float, half, "
                              "bfloat16, int8 or float8_e4m3, and float, half or bfloat16")
        endif()
        set(source "${CMAKE_CURRENT_BINARY_DIR}/${target}/${head_dim}x${value_dim}_${element}_${qo}.cpp")
        set(types "${type_of_${element}}, ${type_of_${qo}}")
        file(CONFIGURE OUTPUT "${source}" CONTENT "#include <chunkattn/kernels.ipp>
CHUNKATTN_KERNELS(${head_dim}, ${value_dim}, ${types});
" @ONLY)
        list(APPEND sources "${source}")
      endforeach()
    endforeach()
  endforeach()
  add_library(${target} STATIC ${sources})
  target_link_libraries(${target} PUBLIC chunkattn::chunkattn)
  target_compile_definitions(${target} PUBLIC CHUNKATTN_EXTERN_KERNELS)
endfunction()
