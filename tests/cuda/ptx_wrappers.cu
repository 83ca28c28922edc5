// One kernel for each wrapper of detail/cuda/ptx.cuh, so that check_sass.py can look at what became
// of it. Every operand is loaded from and stored to a place of its own: that tells which register
// is which.
#include "chunkattn/detail/cuda/ptx.cuh"

namespace ptx = chunkattn::detail::ptx;
using chunkattn::bfloat16;
using chunkattn::half;

// d is read at 0, a at 16, b at 32; d is written at 0.
template <class T>
__device__ void multiply(float* d, const std::uint32_t* operands) {
  float sum[4] = {d[0], d[1], d[2], d[3]};
  const std::uint32_t a[4] = {operands[4], operands[5], operands[6], operands[7]};
  ptx::mma<T>(sum, a, operands[8], operands[9]);
  for (int i = 0; i < 4; ++i) d[i] = sum[i];
}

extern "C" {

__global__ void copy_16(const uint4* source, int valid) {
  ptx::cp_async_16(ptx::shared_address(ptx::dynamic_shared()), source, valid != 0);
  ptx::cp_async_commit();
  ptx::cp_async_wait(2);
  ptx::cp_async_wait(1);
  ptx::cp_async_wait(0);
}

__global__ void load_matrices(std::uint32_t* out) {
  std::uint32_t r[4];
  ptx::ldmatrix_x4(r, ptx::shared_address(ptx::dynamic_shared()));
  for (int i = 0; i < 4; ++i) out[i] = r[i];
}
__global__ void load_transposed(std::uint32_t* out) {
  std::uint32_t r[4];
  ptx::ldmatrix_x4_trans(r, ptx::shared_address(ptx::dynamic_shared()));
  for (int i = 0; i < 4; ++i) out[i] = r[i];
}

__global__ void multiply_half(float* d, const std::uint32_t* operands) {
  multiply<half>(d, operands);
}
__global__ void multiply_bfloat16(float* d, const std::uint32_t* operands) {
  multiply<bfloat16>(d, operands);
}

__global__ void pack_half(std::uint32_t* out, const float* low_high) {
  *out = ptx::pack<half>(low_high[0], low_high[1]);
}
__global__ void pack_bfloat16(std::uint32_t* out, const float* low_high) {
  *out = ptx::pack<bfloat16>(low_high[0], low_high[1]);
}
__global__ void power_of_2(float* out, const float* x) {
  *out = ptx::exp2(*x);
}
__global__ void greater(float* out, const float* x) {
  *out = ptx::max(x[0], x[1]);
}
__global__ void rounded_product(float* out, const float* x) {
  *out = ptx::multiply(x[0], x[1]) + x[2];
}
__global__ void multiply_add(float* out, const float* x) {
  *out = ptx::fma(x[0], x[1], x[2]);
}
__global__ void quotient(float* out, const float* x) {
  *out = ptx::divide(x[0], x[1]);
}

__global__ void exchange(float* out, const float* x) {
  *out = ptx::shuffle_xor(x[threadIdx.x], 2);
}
__global__ void vote(int* out, const int* x) {
  *out = ptx::any(*x != 0) ? 3 : 5;
}
__global__ void meet(float* out) {
  reinterpret_cast<float*>(ptx::dynamic_shared())[threadIdx.x] = 1.0f;
  ptx::barrier();
  *out = reinterpret_cast<float*>(ptx::dynamic_shared())[threadIdx.x ^ 1];
}

__global__ void release(std::uint32_t* flag, float* data) {
  ptx::store(data, 1.0f);
  ptx::store_release(flag, 7);
}
__global__ void acquire(const std::uint32_t* flag, const float* data, float* out) {
  while (ptx::load_acquire(flag) != 7) ptx::pause();
  *out = ptx::load(data);
}
__global__ void load_far(float* out, const float* const* data) {
  *out = ptx::load_global(*data);
}
__global__ void order(float* data, int* counter) {
  *data = 1.0f;
  ptx::fence();
  *counter = 2;
}
__global__ void ticket(int* counter, int* out) {
  *out = ptx::atomic_add(counter, 1);
}

}  // extern "C"
