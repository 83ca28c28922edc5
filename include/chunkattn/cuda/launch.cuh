// The one place where kernels are launched.
#pragma once

#include <cstddef>
#include <type_traits>

#include "runtime.cuh"

CHUNKATTN_NAMESPACE_BEGIN
namespace cuda_detail {

#if !defined(CHUNKATTN_CUDA_RUNTIME_PROVIDED)
/// Launches `kernel` on `stream` and reports what the launch itself reports. One argument, by
/// value: kernels take a struct.
template <class Arguments>
void launch(const char* name, void (*kernel)(Arguments), int grid, int threads, int shared_bytes,
            cudaStream_t stream, std::type_identity_t<Arguments> arguments) {
  void* pointers[] = {const_cast<void*>(static_cast<const void*>(&arguments))};
  check_cuda(
      cudaLaunchKernel(reinterpret_cast<const void*>(kernel), dim3(static_cast<unsigned>(grid)),
                       dim3(static_cast<unsigned>(threads)), pointers,
                       static_cast<std::size_t>(shared_bytes), stream),
      name);
}

/// Allows a kernel more than 48 KB of dynamic shared memory.
template <class Kernel>
void allow_shared(Kernel* kernel, int bytes) {
  check_cuda(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                  cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
             "cudaFuncSetAttribute(max dynamic shared memory)");
}
#endif

}  // namespace cuda_detail
CHUNKATTN_NAMESPACE_END
