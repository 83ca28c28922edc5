// Every device primitive the kernels use, and nothing else: thread indices, barriers, asynchronous
// copies, ldmatrix, mma. The kernels hold no inline assembly of their own, so a test that defines
// CHUNKATTN_PTX_PROVIDED and these same functions runs the same kernel source on the host.
//
// Instruction meanings: PTX ISA 7.0, sections on cp.async, ldmatrix, mma.m16n8k16, ex2, ld and st.
// libcu++ wraps none of the first four (its cuda::ptx starts with sm_90's bulk copies), hence the
// few lines of assembly here. tests/cuda/check_sass.py looks at what becomes of each.
#pragma once

#include <cstdint>
#include <type_traits>

#include "../../element.hpp"
#include "../support/config.hpp"

#if !defined(CHUNKATTN_PTX_PROVIDED)
#if !defined(__CUDACC__)
#error "chunkattn: the CUDA kernels need nvcc; include the .hpp headers from host code"
#endif

#define CHUNKATTN_DEVICE __device__ __forceinline__
#define CHUNKATTN_KERNEL __global__ void
#define CHUNKATTN_LAUNCH_BOUNDS(threads, blocks) __launch_bounds__(threads, blocks)
#define CHUNKATTN_UNROLL _Pragma("unroll")
#define CHUNKATTN_UNROLL_BY(n) CHUNKATTN_UNROLL_TEXT(unroll n)
#define CHUNKATTN_UNROLL_TEXT(text) _Pragma(#text)

CHUNKATTN_NAMESPACE_BEGIN
namespace detail::ptx {

/// An address in the shared memory window.
struct SharedAddress {
  std::uint32_t value;
  CHUNKATTN_DEVICE SharedAddress operator+(int bytes) const {
    return {value + static_cast<std::uint32_t>(bytes)};
  }
};

CHUNKATTN_DEVICE int thread_index() {
  return static_cast<int>(threadIdx.x);
}
CHUNKATTN_DEVICE int block_index() {
  return static_cast<int>(blockIdx.x);
}
CHUNKATTN_DEVICE int grid_size() {
  return static_cast<int>(gridDim.x);
}

/// `value`, which the compiler no longer knows: what depends on it is computed where it stands, and
/// not ahead of a loop in registers that are needed elsewhere.
CHUNKATTN_DEVICE int opaque(int value) {
  asm volatile("" : "+r"(value));
  return value;
}

/// The block's dynamic shared memory, 128-byte aligned.
CHUNKATTN_DEVICE unsigned char* dynamic_shared() {
  extern __shared__ __align__(128) unsigned char chunkattn_shared[];
  return chunkattn_shared;
}

CHUNKATTN_DEVICE SharedAddress shared_address(const void* pointer) {
  return {static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer))};
}

/// All threads of the block arrive before any leaves; what they wrote before is then visible.
CHUNKATTN_DEVICE void barrier() {
  __syncthreads();
}

/// `value` of the lane whose index differs by `mask`. All 32 lanes take part.
template <class V>
CHUNKATTN_DEVICE V shuffle_xor(V value, int mask) {
  return __shfl_xor_sync(0xffffffffu, value, mask);
}

/// Whether `condition` holds in any lane. All 32 lanes take part.
CHUNKATTN_DEVICE bool any(bool condition) {
  return __any_sync(0xffffffffu, condition) != 0;
}

/// Where `here`, ptxas moves no load of shared memory across: for compute capability 10 and above
/// it would load so far ahead that it spills. All 32 lanes take part.
CHUNKATTN_DEVICE void hold_loads([[maybe_unused]] bool here) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
  if (here) __syncwarp();
#endif
}

CHUNKATTN_DEVICE int atomic_add(int* target, int value) {
  return atomicAdd(target, value);
}

/// Global memory by which blocks of one launch tell one another something: what a thread stores,
/// and what others of its block have stored before a barrier, is there for whoever loads after it
/// has acquired what this thread released then.
template <class V>
CHUNKATTN_DEVICE V load(const V* source) {
  return *source;
}
template <class V>
CHUNKATTN_DEVICE void store(V* target, std::type_identity_t<V> value) {
  *target = value;
}
/// A float in global memory, of which the compiler cannot tell that it lies there.
CHUNKATTN_DEVICE float load_global(const float* source) {
  float value;
  asm("ld.global.f32 %0, [%1];" : "=f"(value) : "l"(__cvta_generic_to_global(source)));
  return value;
}
CHUNKATTN_DEVICE std::uint32_t load_acquire(const std::uint32_t* source) {
  std::uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];"
               : "=r"(value)
               : "l"(__cvta_generic_to_global(source))
               : "memory");
  return value;
}
CHUNKATTN_DEVICE void store_release(std::uint32_t* target, std::uint32_t value) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(__cvta_generic_to_global(target)),
               "r"(value)
               : "memory");
}

/// What this thread knows to have happened, others of the device know where they see what it does
/// to memory from here on; and what it sees from here on is no older than what it has seen.
CHUNKATTN_DEVICE void fence() {
  __threadfence();
}

/// Between two looks at what another block is to store.
CHUNKATTN_DEVICE void pause() {
  __nanosleep(32);
}

/// Copies 16 bytes from global to shared memory in the background, or writes 16 zero bytes where
/// not `valid` (nothing is read then). Both addresses are multiples of 16.
CHUNKATTN_DEVICE void cp_async_16(SharedAddress target, const void* source, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(target.value),
               "l"(__cvta_generic_to_global(source)), "r"(valid ? 16 : 0)
               : "memory");
}

/// Closes the group of this thread's copies issued so far.
CHUNKATTN_DEVICE void cp_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

/// Waits until at most `pending` of this thread's groups are under way. `pending` is uniform, 0..2.
CHUNKATTN_DEVICE void cp_async_wait(int pending) {
  if (pending >= 2)
    asm volatile("cp.async.wait_group 2;" ::: "memory");
  else if (pending == 1)
    asm volatile("cp.async.wait_group 1;" ::: "memory");
  else
    asm volatile("cp.async.wait_group 0;" ::: "memory");
}

/// Four 8x8 matrices of 16-bit elements; lane i gives the address of row i%8 of matrix i/8. Lane l
/// receives elements (l/4, 2*(l%4)) and its right neighbour of each.
CHUNKATTN_DEVICE void ldmatrix_x4(std::uint32_t (&r)[4], SharedAddress row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row.value));
}

/// Four 8x8 matrices of 16-bit elements, each transposed: lane i gives the address of row i%8 of
/// matrix i/8. Lane l receives element (2*(l%4), l/4) and the one below it of each.
CHUNKATTN_DEVICE void ldmatrix_x4_trans(std::uint32_t (&r)[4], SharedAddress row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row.value));
}

/// d[16x8] += a[16x16] b[16x8], fp32 accumulation; T is half or bfloat16.
template <class T>
CHUNKATTN_DEVICE void mma(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                          std::uint32_t b1) {
  if constexpr (std::is_same_v<T, half>)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// Two floats rounded to T in one register, `low` in the lower half.
template <class T>
CHUNKATTN_DEVICE std::uint32_t pack(float low, float high) {
  std::uint32_t packed;
  if constexpr (std::is_same_v<T, half>)
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

/// 2^x to about 2^-22; 0 for very negative x.
CHUNKATTN_DEVICE float exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// The greater one; `a` where `b` is NaN and the other way round.
CHUNKATTN_DEVICE float(max)(float a, float b) {
  return fmaxf(a, b);
}

/// a * b, rounded, whatever it is added to.
CHUNKATTN_DEVICE float multiply(float a, float b) {
  return __fmul_rn(a, b);
}

/// a * b + c, rounded once.
CHUNKATTN_DEVICE float fma(float a, float b, float c) {
  return fmaf(a, b, c);
}

CHUNKATTN_DEVICE float log2(float x) {
  return log2f(x);
}

/// a / b within two units in the last place, for |b| between 2^-126 and 2^126.
CHUNKATTN_DEVICE float divide(float a, float b) {
  return __fdividef(a, b);
}

}  // namespace detail::ptx
CHUNKATTN_NAMESPACE_END

#endif  // CHUNKATTN_PTX_PROVIDED
