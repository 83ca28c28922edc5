# Defines chunkattn_add_cuda_target(), which makes chunkattn::cuda out of chunkattn::chunkattn and an
# already found CUDAToolkit. Used by the build and by the installed package: what it decides depends
# on the consumer's CMake and toolkit, so it cannot be exported as a finished target.

macro(chunkattn_add_cuda_target)
  if(NOT TARGET chunkattn::cuda)
    add_library(chunkattn::cuda INTERFACE IMPORTED GLOBAL)
    target_link_libraries(chunkattn::cuda INTERFACE chunkattn::chunkattn CUDA::cudart)
    # Before 3.26 CMake does not know that nvcc has C++20, and leaves the option out without a word.
    if(CMAKE_VERSION VERSION_LESS 3.26)
      target_compile_options(chunkattn::cuda INTERFACE
        "$<$<COMPILE_LANG_AND_ID:CUDA,NVIDIA>:-std=c++20>")
    else()
      target_compile_features(chunkattn::cuda INTERFACE cuda_std_20)
    endif()
  endif()
endmacro()
