// Runs CUDA kernels on the host, one fiber per thread, to find wrong results, missing barriers and
// bad addresses without a GPU. Include it before any .cuh of the library: it takes the place of
// detail/cuda/ptx.cuh.
//
// What it checks beyond results:
// - shared memory has the exact size asked for and starts as NaN bytes; addresses of asynchronous
//   copies and of ldmatrix are checked for range and alignment, others by AddressSanitizer;
// - a thread runs until it must wait, blocks, warps and lanes forward, reversed or shuffled, so
// that
//   what a missing barrier allows to go wrong does go wrong in one of the orders;
// - what blocks of a launch exchange is followed from store to release to acquire to load
// (memory.hpp):
//   a load that might give something old is reported, whatever it gave here;
// - an asynchronous copy lands at once or, in the other mode, only when its thread waits for its
//   group: data read before the wait, or overwritten too early, shows;
// - a barrier or a warp operation that not all threads reach, or that they reach at different
// places
//   of the source, is reported; so are copies left under way, and blocks that wait for one another.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "chunkattn/detail/support/config.hpp"
#include "chunkattn/element.hpp"
#include "simt/block.hpp"

#define CHUNKATTN_PTX_PROVIDED 1
#define CHUNKATTN_DEVICE inline
#define CHUNKATTN_KERNEL inline void
#define CHUNKATTN_LAUNCH_BOUNDS(threads, blocks)
#define CHUNKATTN_UNROLL
#define CHUNKATTN_UNROLL_BY(n)

namespace simt {

/// The float of each 16-bit pattern, by table: conversions are most of an emulated mma.
template <class T>
const float* float_table() {
  static const std::vector<float> table = [] {
    std::vector<float> values(65536);
    for (std::size_t i = 0; i < values.size(); ++i)
      values[i] = chunkattn::to_float(T{static_cast<std::uint16_t>(i)});
    return values;
  }();
  return table.data();
}

/// Towards zero, as tensor cores leave a sum of eight products and an accumulator (Fasi, Higham,
/// Mikaitis and Pranesh, "Numerical behavior of NVIDIA tensor cores", PeerJ Computer Science 7,
/// 2021). Long sums in one accumulator all lose the same way.
inline float truncated(double x) {
  const float rounded = static_cast<float>(x);
  return std::abs(double{rounded}) > std::abs(x) ? std::nextafter(rounded, 0.0f) : rounded;
}

}  // namespace simt

CHUNKATTN_NAMESPACE_BEGIN
namespace detail::ptx {

struct SharedAddress {
  std::uint32_t value;
  SharedAddress operator+(int bytes) const { return {value + static_cast<std::uint32_t>(bytes)}; }
};

inline simt::Block& block() {
  return *simt::current_thread()->block;
}
inline int thread_index() {
  return simt::current_thread()->index;
}
inline int block_index() {
  return block().dim().block;
}
inline int grid_size() {
  return block().dim().grid;
}
inline int opaque(int value) {
  return value;
}
inline unsigned char* dynamic_shared() {
  return block().shared();
}
inline SharedAddress shared_address(const void* pointer) {
  return {block().offset_of(pointer)};
}
using Place = chunkattn::detail::SourceLocation;

inline void barrier(Place where = Place::current()) {
  block().barrier(where);
}

template <class V>
V shuffle_xor(V value, int mask, Place where = Place::current()) {
  return block().template collective<V, V>(where, value, [mask](const V* in, V* out) {
    for (int lane = 0; lane < 32; ++lane) out[lane] = in[lane ^ mask];
  });
}

inline bool any(bool condition, Place where = Place::current()) {
  return block().template collective<bool, bool>(where, condition, [](const bool* in, bool* out) {
    std::fill(out, out + 32, std::find(in, in + 32, true) != in + 32);
  });
}

inline void hold_loads(bool) {}

inline void fence() {
  block().fence();
}
inline int atomic_add(int* target, int value) {
  block().atomic(target);
  const int old = *target;
  *target += value;
  return old;
}

inline void complain(std::string wrong) {
  if (!wrong.empty()) block().fail(std::move(wrong));
}
template <class V>
V load(const V* source) {
  complain(block().memory().read(source, sizeof(V), block().now()));
  return *source;
}
template <class V>
void store(V* target, std::type_identity_t<V> value) {
  complain(block().memory().wrote(target, sizeof(V), block().now()));
  *target = value;
}
inline float load_global(const float* source) {
  return *source;
}
inline std::uint32_t load_acquire(const std::uint32_t* source) {
  block().memory().acquired(source, block().now());
  return *source;
}
inline void store_release(std::uint32_t* target, std::uint32_t value) {
  block().memory().released(target, block().now());
  *target = value;
}
inline void pause() {
  block().pause();
}

inline void cp_async_16(SharedAddress target, const void* source, bool valid) {
  ++simt::statistics().cp_async;
  simt::PendingCopy copy{block().shared_at(target.value, 16, "cp.async"), {}, nullptr};
  if (valid) {
    if (reinterpret_cast<std::uintptr_t>(source) % 16 != 0)
      block().fail("simt: cp.async from an address that is no multiple of 16");
    copy.source = source;
  }
  if (block().schedule().copies == simt::Copies::at_issue) {
    if (valid)
      std::memcpy(copy.target, source, 16);
    else
      std::memset(copy.target, 0, 16);
    copy.target = nullptr;
  }
  simt::current_thread()->open.push_back(copy);
}

inline void cp_async_commit() {
  simt::Thread& self = *simt::current_thread();
  self.groups.push_back(std::move(self.open));
  self.open.clear();
}

inline void cp_async_wait(int pending) {
  simt::Thread& self = *simt::current_thread();
  while (self.groups.size() > static_cast<std::size_t>(pending)) {
    for (const simt::PendingCopy& copy : self.groups.front()) {
      if (copy.target == nullptr) continue;
      if (copy.source != nullptr)
        std::memcpy(copy.target, copy.source, 16);
      else
        std::memset(copy.target, 0, 16);
    }
    self.groups.erase(self.groups.begin());
  }
}

struct Quad {
  std::uint32_t r[4];
};

inline void ldmatrix(std::uint32_t (&r)[4], SharedAddress row, bool transposed, Place where) {
  simt::Block& self = block();
  self.shared_at(row.value, 16, "ldmatrix");
  const Quad quad = self.collective<std::uint32_t, Quad>(
      where, row.value, [&](const std::uint32_t* rows, Quad* out) {
        for (int m = 0; m < 4; ++m) {
          std::uint16_t matrix[8][8];
          for (int i = 0; i < 8; ++i) std::memcpy(matrix[i], self.shared() + rows[8 * m + i], 16);
          for (int lane = 0; lane < 32; ++lane) {
            const int i = lane / 4, j = 2 * (lane % 4);
            const std::uint32_t low = transposed ? matrix[j][i] : matrix[i][j];
            const std::uint32_t high = transposed ? matrix[j + 1][i] : matrix[i][j + 1];
            out[lane].r[m] = low | (high << 16);
          }
        }
      });
  for (int m = 0; m < 4; ++m) r[m] = quad.r[m];
}
inline void ldmatrix_x4(std::uint32_t (&r)[4], SharedAddress row, Place where = Place::current()) {
  ldmatrix(r, row, false, where);
}
inline void ldmatrix_x4_trans(std::uint32_t (&r)[4], SharedAddress row,
                              Place where = Place::current()) {
  ldmatrix(r, row, true, where);
}

struct MmaIn {
  std::uint32_t a[4], b[2];
  float c[4];
};
struct MmaOut {
  float d[4];
};

template <class T>
void mma(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1,
         Place where = Place::current()) {
  const MmaIn mine{{a[0], a[1], a[2], a[3]}, {b0, b1}, {d[0], d[1], d[2], d[3]}};
  const MmaOut result =
      block().template collective<MmaIn, MmaOut>(where, mine, [](const MmaIn* in, MmaOut* out) {
        ++simt::statistics().mma;
        const float* table = simt::float_table<T>();
        float am[16][16], bm[8][16];  // bm: by column
        for (int lane = 0; lane < 32; ++lane) {
          const int g = lane / 4, t = 2 * (lane % 4);
          for (int i = 0; i < 4; ++i) {
            am[g + 8 * (i % 2)][t + 8 * (i / 2)] = table[in[lane].a[i] & 0xffffu];
            am[g + 8 * (i % 2)][t + 8 * (i / 2) + 1] = table[in[lane].a[i] >> 16];
          }
          for (int i = 0; i < 2; ++i) {
            bm[g][t + 8 * i] = table[in[lane].b[i] & 0xffffu];
            bm[g][t + 8 * i + 1] = table[in[lane].b[i] >> 16];
          }
        }
        for (int lane = 0; lane < 32; ++lane) {
          const int g = lane / 4, t = 2 * (lane % 4);
          for (int i = 0; i < 4; ++i) {
            const float* row = am[g + 8 * (i / 2)];
            const float* column = bm[t + i % 2];
            float sum = in[lane].c[i];
            for (int k = 0; k < 16; k += 8) {
              double eight = sum;
              for (int j = k; j < k + 8; ++j) eight += double{row[j]} * column[j];
              sum = simt::truncated(eight);
            }
            out[lane].d[i] = sum;
          }
        }
      });
  for (int i = 0; i < 4; ++i) d[i] = result.d[i];
}

template <class T>
std::uint32_t pack(float low, float high) {
  return from_float<T>(low).bits | (static_cast<std::uint32_t>(from_float<T>(high).bits) << 16);
}

inline float exp2(float x) {
  ++simt::statistics().powers;
  return std::exp2(x);
}
inline float max(float a, float b) {
  return std::fmax(a, b);
}
inline float multiply(float a, float b) {
  const volatile float product = a * b;  // no compiler makes one rounding of it and an addition
  return product;
}
inline float fma(float a, float b, float c) {
  return std::fma(a, b, c);
}
inline float log2(float x) {
  return std::log2(x);
}
inline float divide(float a, float b) {
  return a / b;
}

}  // namespace detail::ptx
CHUNKATTN_NAMESPACE_END
