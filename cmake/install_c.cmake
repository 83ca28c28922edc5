# CHUNKATTN_INSTALL_C: compiles the library for C, libchunkattn.so, and installs it with a pkg-config file,
# chunkattn-c. Its soname is the version of the C interface, and so is the version of its symbols.
enable_language(CXX)
find_package(Threads REQUIRED)
include(GNUInstallDirs)

# Each is HEAD_DIM[:VALUE_DIM]/TYPE_OF_KV/TYPE_OF_Q_AND_OUT, and is compiled by itself.
set(CHUNKATTN_C_KERNELS "64/float/float;64/half/half;128/float/float;128/half/half;128/bfloat16/bfloat16" CACHE STRING
    "Kernels of the C library: HEAD_DIM[:VALUE_DIM]/KV/QO, with types float, half or bfloat16, KV int8 or float8_e4m3, too")

file(STRINGS "${PROJECT_SOURCE_DIR}/include/chunkattn/c/tree.h" line REGEX "^#define CHUNKATTN_C_VERSION [0-9]+$")
string(REGEX MATCH "[0-9]+$" c_version "${line}")

set(c_dir "${PROJECT_BINARY_DIR}/c_library")
set(c_sources "${c_dir}/functions.cpp")
set(c_list "")
foreach(kernel IN LISTS CHUNKATTN_C_KERNELS)
  if(NOT kernel MATCHES "^([0-9]+)(:([0-9]+))?/(float|half|bfloat16|int8|float8_e4m3)/(float|half|bfloat16)$")
    message(FATAL_ERROR "CHUNKATTN_C_KERNELS has ${kernel}: expected HEAD_DIM[:VALUE_DIM]/KV/QO, as 128/half/float")
  endif()
  set(dim "${CMAKE_MATCH_1}")
  set(value_dim "${CMAKE_MATCH_3}")
  if(NOT value_dim)
    set(value_dim "${dim}")
  endif()
  set(arguments "${dim}, ${value_dim}, chunkattn::${CMAKE_MATCH_4}, chunkattn::${CMAKE_MATCH_5}")
  string(REGEX REPLACE "chunkattn::float(,|$)" "float\\1" arguments "${arguments}")
  string(REPLACE "chunkattn::int8" "std::int8_t" arguments "${arguments}")
  string(REGEX REPLACE "[:/]" "_" name "${kernel}")
  string(APPEND c_list " X(${arguments})")
  file(CONFIGURE OUTPUT "${c_dir}/kernel_${name}.cpp"
       CONTENT "#include <chunkattn/c/kernels.ipp>\nCHUNKATTN_C_KERNEL(@arguments@)\n" @ONLY)
  list(APPEND c_sources "${c_dir}/kernel_${name}.cpp")
endforeach()
foreach(size 16 32 64 128)
  file(CONFIGURE OUTPUT "${c_dir}/tree_${size}.cpp"
       CONTENT "#include <chunkattn/c/tree_of_size.ipp>\nCHUNKATTN_C_TREE(@size@)\n" @ONLY)
  list(APPEND c_sources "${c_dir}/tree_${size}.cpp")
endforeach()
file(CONFIGURE OUTPUT "${c_dir}/functions.cpp" CONTENT "#define CHUNKATTN_C_KERNELS(X)@c_list@
#define CHUNKATTN_C_EXTERN_KERNELS
#define CHUNKATTN_C_EXTERN_TREES
#include <chunkattn/c/chunkattn.ipp>\n" @ONLY)

add_library(chunkattn_c SHARED ${c_sources})
target_link_libraries(chunkattn_c PRIVATE chunkattn::chunkattn)
set_target_properties(chunkattn_c PROPERTIES
  OUTPUT_NAME chunkattn VERSION "${c_version}.${PROJECT_VERSION}" SOVERSION "${c_version}"
  CXX_STANDARD 20 CXX_STANDARD_REQUIRED ON CXX_EXTENSIONS OFF
  CXX_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON)
if(CMAKE_SYSTEM_NAME STREQUAL "Linux")
  file(CONFIGURE OUTPUT "${c_dir}/symbols.map"
       CONTENT "CHUNKATTN_@c_version@ {\n  global: chunkattn_*;\n  local: *;\n};\n" @ONLY)
  target_link_options(chunkattn_c PRIVATE "LINKER:--version-script=${c_dir}/symbols.map")
  set_target_properties(chunkattn_c PROPERTIES LINK_DEPENDS "${c_dir}/symbols.map")
endif()
install(TARGETS chunkattn_c
  LIBRARY DESTINATION "${CMAKE_INSTALL_LIBDIR}" RUNTIME DESTINATION "${CMAKE_INSTALL_BINDIR}"
  ARCHIVE DESTINATION "${CMAKE_INSTALL_LIBDIR}")

# The .pc file finds its prefix from its own place, as chunkattn.pc does.
set(c_pc_dir "${CMAKE_INSTALL_LIBDIR}/pkgconfig")
if(IS_ABSOLUTE "${c_pc_dir}")
  set(c_pc_prefix "${CMAKE_INSTALL_PREFIX}")
else()
  file(RELATIVE_PATH c_pc_prefix "/prefix/${c_pc_dir}" "/prefix")
  string(REGEX REPLACE "/$" "" c_pc_prefix "\${pcfiledir}/${c_pc_prefix}")
endif()
foreach(part LIBDIR INCLUDEDIR)
  set(c_pc_${part} "${CMAKE_INSTALL_${part}}")
  if(NOT IS_ABSOLUTE "${c_pc_${part}}")
    set(c_pc_${part} "\${prefix}/${c_pc_${part}}")
  endif()
endforeach()
configure_file("${PROJECT_SOURCE_DIR}/cmake/chunkattn-c.pc.in" "${PROJECT_BINARY_DIR}/chunkattn-c.pc" @ONLY)
install(FILES "${PROJECT_BINARY_DIR}/chunkattn-c.pc" DESTINATION "${c_pc_dir}")
