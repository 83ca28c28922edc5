// The one place where kernels are set up and launched.
#pragma once

#include <cstddef>
#include <type_traits>

#include "runtime.cuh"

CHUNKATTN_NAMESPACE_BEGIN
namespace detail::cuda {

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
#endif

/// Loads a kernel on the current device, which its first launch would do otherwise.
template <class Arguments>
void load_kernel(void (*kernel)(Arguments)) {
  const OutsideCaptures outside;
  cudaFuncAttributes attributes{};
  check_cuda(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel)),
             "cudaFuncGetAttributes");
}

/// Allows a kernel `bytes` of dynamic shared memory and asks for as much of it per multiprocessor
/// as there is: the kernels keep nothing in L1.
template <class Arguments>
void allow_shared(void (*kernel)(Arguments), int bytes) {
  const OutsideCaptures outside;
  const void* const function = reinterpret_cast<const void*>(kernel);
  check_cuda(cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
             "cudaFuncSetAttribute(max dynamic shared memory)");
  check_cuda(cudaFuncSetAttribute(function, cudaFuncAttributePreferredSharedMemoryCarveout,
                                  cudaSharedmemCarveoutMaxShared),
             "cudaFuncSetAttribute(shared memory carve-out)");
}

/// Blocks of a kernel that a multiprocessor of the current device holds.
template <class Arguments>
[[nodiscard]] int blocks_per_sm(void (*kernel)(Arguments), int threads, int shared_bytes) {
  int blocks = 0;
  check_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(
                 &blocks, reinterpret_cast<const void*>(kernel), threads,
                 static_cast<std::size_t>(shared_bytes)),
             "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
  return blocks;
}

}  // namespace detail::cuda
CHUNKATTN_NAMESPACE_END
