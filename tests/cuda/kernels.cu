// Instantiates every kernel of the library for one head dimension and element type, for
// the checks of compiled code: nvcc -DHEAD_DIM=128 -DVALUE_DIM=128 -DELEMENT=half -cubin kernels.cu
#include "chunkattn/detail/cuda/append.cuh"
#include "chunkattn/detail/cuda/kernels.cuh"

using chunkattn::ELEMENT;
namespace detail::cuda = chunkattn::detail::cuda;

template __global__ void detail::cuda::attention_kernel<ELEMENT, HEAD_DIM, VALUE_DIM>(
    const detail::cuda::AttentionArguments<ELEMENT>);
template __global__ void detail::cuda::write_kernel<ELEMENT, ELEMENT>(
    const detail::cuda::WriteArguments<ELEMENT, ELEMENT>);
template __global__ void detail::cuda::copy_rows_kernel<ELEMENT>(
    const detail::cuda::CopyArguments<ELEMENT>);
template __global__ void detail::cuda::advance_kernel<>(const detail::cuda::PlanMemory);
