// Instantiates every kernel of the library for one head dimension and element type, for
// the checks of compiled code: nvcc -DHEAD_DIM=128 -DVALUE_DIM=128 -DELEMENT=half -cubin kernels.cu
#include "chunkattn/detail/cuda/append.cuh"
#include "chunkattn/detail/cuda/kernels.cuh"

using chunkattn::ELEMENT;
namespace cuda_detail = chunkattn::cuda_detail;

template __global__ void cuda_detail::attention_kernel<ELEMENT, HEAD_DIM, VALUE_DIM>(
    const cuda_detail::AttentionArguments<ELEMENT>);
template __global__ void cuda_detail::write_kernel<ELEMENT, ELEMENT>(
    const cuda_detail::WriteArguments<ELEMENT, ELEMENT>);
template __global__ void cuda_detail::copy_rows_kernel<ELEMENT>(
    const cuda_detail::CopyArguments<ELEMENT>);
template __global__ void cuda_detail::advance_kernel<>(const cuda_detail::PlanMemory);
