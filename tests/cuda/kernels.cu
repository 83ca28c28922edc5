// Instantiates every kernel of the library for one head dimension and element type, for
// the checks of compiled code: nvcc -DHEAD_DIM=128 -DVALUE_DIM=128 -DELEMENT=half -cubin kernels.cu
#include "chunkattn/detail/cuda/run_tasks.cuh"
#include "chunkattn/detail/cuda/write.cuh"

using chunkattn::ELEMENT;
namespace cuda = chunkattn::detail::cuda;

template __global__ void cuda::attention_kernel<ELEMENT, HEAD_DIM, VALUE_DIM>(
    const cuda::AttentionArguments<ELEMENT>);
template __global__ void cuda::write_kernel<ELEMENT>(const cuda::WriteArguments<ELEMENT>);
template __global__ void cuda::begin_step_kernel<false>(const cuda::PlanMemory);
template __global__ void cuda::begin_step_kernel<true>(const cuda::PlanMemory);
