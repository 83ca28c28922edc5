# One source file of kernels for each size of heads, so that they compile side by side, and one that
# chooses among them; the projects that include this have the templates in their src/.

# kernel_units(OUT TYPES SIZE...): writes kernels.cpp and kernels_SIZE.cpp into the build folder.
#
# SIZE: DIM, or DIM:DIM_OF_V. TYPES: of K and V, as C++ writes a list of them. OUT becomes the list of
# the files by size; kernels.cpp, which needs no option for an instruction set, is not in it.
function(kernel_units out types)
  set(units "")
  foreach(dim IN LISTS ARGN)
    string(REPLACE ":" "_" name "${dim}")
    string(REPLACE ":" ", " size "${dim}")
    configure_file(src/kernels_of_size.cpp.in kernels_${name}.cpp @ONLY)
    list(APPEND units "${CMAKE_CURRENT_BINARY_DIR}/kernels_${name}.cpp")
    string(APPEND declarations
      "std::unique_ptr<AnyAttention> make_attention_${name}(Workers&, const CpuOptions&);\n")
    string(APPEND sizes "HeadSize(${size}), ")
    string(APPEND choices
      "  if (size == HeadSize(${size})) return make_attention_${name}(workers, options);\n")
  endforeach()
  configure_file(src/kernels.cpp.in kernels.cpp @ONLY)
  set(${out} "${units}" PARENT_SCOPE)
endfunction()
