# The fast run, `./dev test`: a build of its own (CHUNKATTN_FAST_TESTS), in which each test has the name
# that it has in the full run. tests/not_fast.txt says why the others are left out; the test dev.fast
# compares both with the full run. (tests/mutate reads the programs from here, too.)

# chunkattn_fast_program(<program> [VARIANT <variant>] [OPTIONS <option>...] [SCALE <factor>] TESTS <test>...):
# one executable of many tests, compiled as one source, so that what they share is instantiated once.
# Without a variant it has the kernels for this machine alone. Nothing is timed, so only kernels are
# optimised, which otherwise run for long. SCALE is CHUNKATTN_TEST_SCALE, of the random cases.
set(CHUNKATTN_FAST_PROGRAMS "")
function(chunkattn_fast_program program)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "VARIANT;SCALE" "OPTIONS;TESTS")
  list(REMOVE_ITEM arg_TESTS ${CHUNKATTN_LEFT_OUT_TESTS})
  if(NOT arg_TESTS)
    return()
  endif()
  set(CHUNKATTN_FAST_PROGRAMS ${CHUNKATTN_FAST_PROGRAMS} ${program} PARENT_SCOPE)
  foreach(part VARIANT SCALE OPTIONS TESTS)
    set(fast_${program}_${part} "${arg_${part}}" PARENT_SCOPE)
  endforeach()
endfunction()

# For Windows without those of tests/not_windows.txt.
set(CHUNKATTN_LEFT_OUT_TESTS "")
if(CMAKE_SYSTEM_NAME STREQUAL "Windows")
  file(STRINGS "${CMAKE_CURRENT_LIST_DIR}/not_windows.txt" lines REGEX "^[a-z]")
  foreach(line IN LISTS lines)
    string(REGEX MATCH "^([a-z0-9_]+) +(.*)$" line "${line}")
    list(APPEND CHUNKATTN_LEFT_OUT_TESTS "${CMAKE_MATCH_1}")
    message(STATUS "chunkattn: ${CMAKE_MATCH_1} left out: ${CMAKE_MATCH_2}")
  endforeach()
endif()

# Scripts.
set(CHUNKATTN_FAST_TEST_NAMES
  dev.bare dev.help dev.jobs hygiene.includes hygiene.version)

# The largest first: the last to be compiled has a processor for itself.
chunkattn_fast_program(fast_oracle SCALE 0.3 OPTIONS -Og
  TESTS attention_errors_test attention_oracle_test softmax_state_test)
chunkattn_fast_program(fast_variants OPTIONS -Og
  TESTS attention_nan_test attention_value_dim_test attention_variants_test)
chunkattn_fast_program(fast_engine SCALE 0.7 OPTIONS -O0 TESTS engine_sim_test)
chunkattn_fast_program(fast_tree OPTIONS -O0
  TESTS allocator_test default_policy_test departures_test handle_threads_test limits_test
        pin_test replica_test mirror_test resume_events_test tree_counts_test tree_events_test tree_handles_test
        tree_chunks_test tree_retention_test tree_view_test)
chunkattn_fast_program(fast_cache SCALE 0.3 OPTIONS -O0
  TESTS annotations_test changing_policy_test checkpoint_test expiry_test explain_random_test explain_test learning_test rank_test scored_policy_test tenant_test)
chunkattn_fast_program(fast_steps SCALE 0.3 OPTIONS -Og
  TESTS step_misuse_test step_random_test step_test tree_failure_test tree_memory_test kv_growth_test)
chunkattn_fast_program(fast_plans SCALE 0.3 OPTIONS -Og
  TESTS block_table_test paged_plan_test plan_figure2_test plan_steps_test step_view_test)
chunkattn_fast_program(fast_attention SCALE 0.3 OPTIONS -Og
  TESTS attention_alone_test attention_invariant_test child_process_test head_rows_test kv_scales_test merge_state_test)
chunkattn_fast_program(fast_pages SCALE 0.3 OPTIONS -Og
  TESTS draft_commit_test fork_copies_test paged_attention_test)
chunkattn_fast_program(fast_kv OPTIONS -O0
  TESTS companion_test kv_cache_test kv_transfer_test kv_view_test quantized_test swap_test write_check_test)
chunkattn_fast_program(fast_tiers OPTIONS -O0
  TESTS stored_records_test tier_companions_test tier_directory_test tier_failing_calls_test tier_files_test tier_fork_test tier_hang_test tier_observer_test tier_spans_test tier_systems_test tier_values_test tiers_test)
chunkattn_fast_program(fast_cuda SCALE 0.3 OPTIONS -Og
  TESTS cuda_write_test cuda_attention_test cuda_emulator_test cuda_front_test cuda_same_code_test)
chunkattn_fast_program(fast_cuda_host SCALE 0.3 OPTIONS -Og
  TESTS cuda_checks_test cuda_driver_test cuda_failures_test cuda_model_test cuda_schedule_test cuda_transfer_test)
chunkattn_fast_program(fast_cuda_kernels SCALE 0.3 OPTIONS -Og
  TESTS cuda_kernels_test cuda_large_tiles_test cuda_quantized_test)
chunkattn_fast_program(fast_cpu SCALE 0.3 OPTIONS -Og
  TESTS array_test element_test executor_test openmp_executor_test waitable_test
        cpu_checks_test cpu_cut_test cpu_schedule_test cpu_walk_test cpu_write_test dots_test
        pairs_test tile_test)
chunkattn_fast_program(fast_batches SCALE 0.3 OPTIONS -Og TESTS step_batch_test plan_arrays_test)
chunkattn_fast_program(fast_windows SCALE 0.3 OPTIONS -Og TESTS window_engine_test window_groups_test
  window_layers_test window_pins_test window_steps_test window_swap_test window_test)
chunkattn_fast_program(fast_plain VARIANT plain SCALE 0.3 OPTIONS -Og TESTS cpu_dispatch_test)
chunkattn_fast_program(fast_tiles VARIANT tiles OPTIONS -Og TESTS attention_variants_test)
# These three define a macro before they include anything.
chunkattn_fast_program(fast_c TESTS c_refusals_test)
chunkattn_fast_program(fast_c_tree SCALE 0.5 OPTIONS -O0 TESTS c_tree_test)
chunkattn_fast_program(fast_threads OPTIONS -Og TESTS attention_threads_test)
chunkattn_fast_program(fast_lock TESTS cpu_lock_test)

# What the full run compiles in the same programs, where CHUNKATTN_GROUP_TESTS is set: what these tests share
# takes most of a compiler's time. Nothing is scaled; fast_cpu, of tests of instruction sets, has all of them.
set(CHUNKATTN_GROUPED_PROGRAMS
  fast_tree fast_cache fast_steps fast_plans fast_attention fast_pages fast_kv fast_tiers fast_cuda fast_cuda_host
  fast_cuda_kernels fast_cpu fast_windows)
set(CHUNKATTN_GROUPED_TESTS "")
if(CHUNKATTN_GROUP_TESTS)
  foreach(program IN LISTS CHUNKATTN_GROUPED_PROGRAMS)
    list(REMOVE_ITEM fast_${program}_TESTS dots_test pairs_test)  # of many shapes: not with all sets
    list(APPEND CHUNKATTN_GROUPED_TESTS ${fast_${program}_TESTS})
  endforeach()
endif()

# chunkattn_add_fast_programs(): the programs of the fast run, after chunkattn_test has declared all tests.
function(chunkattn_add_fast_programs)
  foreach(program IN LISTS CHUNKATTN_FAST_PROGRAMS)
    set(variant "${fast_${program}_VARIANT}")
    if(variant STREQUAL "avx2" AND NOT is_x86)
      continue()
    endif()
    chunkattn_write_fast_source(source ${program})
    chunkattn_add_test_program(${program} "${source}")
    target_compile_options(${program} PRIVATE ${fast_${program}_OPTIONS})
    if(variant)
      chunkattn_set_variant(${program} ${variant})
    else()
      target_link_libraries(${program} PRIVATE chunkattn_native)
      if(NOT CHUNKATTN_ONLY_ISA)
        target_compile_definitions(${program} PRIVATE CHUNKATTN_ISA=native)
      endif()
      if(fast_${program}_OPTIONS STREQUAL "-Og")
        chunkattn_precompile(${program} "${source}")
      endif()
    endif()
    foreach(test IN LISTS fast_${program}_TESTS)
      get_property(labels GLOBAL PROPERTY CHUNKATTN_LABELS_OF_${test})
      set(name ${test})
      if(variant)
        set(name ${test}_${variant})
      endif()
      set(environment "")
      if(fast_${program}_SCALE)
        set(environment CHUNKATTN_TEST_SCALE=${fast_${program}_SCALE})
      endif()
      if(variant MATCHES "portable|avx2")
        list(APPEND environment CHUNKATTN_CPU_ISA=)
      endif()
      chunkattn_run_fast_test(${name} ${program} ${test} "${labels}" ${environment})
    endforeach()
  endforeach()
endfunction()

# chunkattn_add_grouped_programs(): those of the full run.
function(chunkattn_add_grouped_programs)
  foreach(program IN LISTS CHUNKATTN_GROUPED_PROGRAMS)
    chunkattn_write_fast_source(source ${program})
    string(REPLACE "fast_" "grouped_" target ${program})
    chunkattn_add_test_program(${target} "${source}" chunkattn_native)
    target_compile_options(${target} PRIVATE ${fast_${program}_OPTIONS})
    if(NOT program STREQUAL fast_cpu)
      chunkattn_leave_other_sets(${target} PRIVATE)
      if(fast_${program}_OPTIONS STREQUAL "-Og")
        chunkattn_precompile(${target} "${source}")
      endif()
    endif()
    foreach(test IN LISTS fast_${program}_TESTS)
      get_property(labels GLOBAL PROPERTY CHUNKATTN_LABELS_OF_${test})
      chunkattn_run_fast_test(${test} ${target} ${test} "${labels}")
    endforeach()
  endforeach()
endfunction()

# One test of a program. doctest calls it a success when no case has been selected.
function(chunkattn_run_fast_test name program test labels)
  chunkattn_run_test(${name} "${labels}" COMMAND ${program} --source-file=*/${test}.cpp)
  set_tests_properties(${name} PROPERTIES
    ENVIRONMENT "${ARGN}" FAIL_REGULAR_EXPRESSION "test cases: +0 ")
endfunction()

# chunkattn_write_fast_source(<variable> <program>): the source of a program. First all that its tests
# include, so that nothing is left to include where each then stands, in a namespace of its own.
function(chunkattn_write_fast_source variable program)
  set(includes "")
  set(tests "")
  foreach(test IN LISTS fast_${program}_TESTS)
    get_property(source GLOBAL PROPERTY CHUNKATTN_SOURCE_OF_${test})
    if(NOT source)
      message(FATAL_ERROR "chunkattn: ${program} has ${test}, which tests/CMakeLists.txt does not declare")
    endif()
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${source}")
    file(STRINGS "${source}" lines REGEX "^#include ")
    # Windows lacks some of the system's.
    list(TRANSFORM lines REPLACE "^#include (<.*>)" "#if __has_include(\\1)\n#include \\1\n#endif")
    list(APPEND includes ${lines})
    string(APPEND tests "namespace ${test} {\n#include \"${source}\"\n}\n")
  endforeach()
  list(LENGTH fast_${program}_TESTS count)
  if(count EQUAL 1)
    set(${variable} "${source}" PARENT_SCOPE)
    return()
  endif()
  list(REMOVE_DUPLICATES includes)
  list(JOIN includes "\n" includes)
  set(file "${CMAKE_CURRENT_BINARY_DIR}/${program}.cpp")
  file(CONFIGURE OUTPUT "${file}" CONTENT "${includes}\n${tests}" @ONLY)
  set(${variable} "${file}" PARENT_SCOPE)
endfunction()
