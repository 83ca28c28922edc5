# Defines chunkattn_add_cuda_target(), which makes chunkattn::cuda out of chunkattn::chunkattn and an
# already found CUDAToolkit. Used by the build and by the installed package: what it decides depends
# on the consumer's CMake and toolkit, so it cannot be exported as a finished target.

macro(chunkattn_add_cuda_target)
  if(NOT TARGET chunkattn::cuda)
    add_library(chunkattn::cuda INTERFACE IMPORTED GLOBAL)
    target_link_libraries(chunkattn::cuda INTERFACE chunkattn::chunkattn CUDA::cudart)
    # nvcc finds CCCL by itself; a host compiler that includes a .hpp beside it does not.
    foreach(_chunkattn_dir IN LISTS CUDAToolkit_INCLUDE_DIRS)
      if(EXISTS "${_chunkattn_dir}/cccl")
        target_include_directories(chunkattn::cuda SYSTEM INTERFACE "${_chunkattn_dir}/cccl")
      endif()
    endforeach()
    # Before 3.26 CMake does not know that nvcc has C++20, and leaves the option out without a word.
    if(CMAKE_VERSION VERSION_LESS 3.26)
      target_compile_options(chunkattn::cuda INTERFACE
        "$<$<COMPILE_LANG_AND_ID:CUDA,NVIDIA>:-std=c++20>")
    else()
      target_compile_features(chunkattn::cuda INTERFACE cuda_std_20)
    endif()
  endif()
endmacro()
