// K/V of 8 bits with a float scale for each token and head, in the attention kernel.
//
// Rows arrive as they are stored. When a KV tile has landed, all threads make one tile of 16-bit
// elements of it, from which fragments are read as always: K's stored numbers, each of which 16
// bits hold exactly, so that their scale may wait for the logits in fp32; V's times their scale,
// rounded once. (A probability times the scale would fall among half's subnormal numbers.) So the
// ring of stages has half the bytes, and one tile of 16 bits stands beside it.
#pragma once

#include <cstdint>
#include <type_traits>

#include "../../kv_view.hpp"
#include "merge.cuh"
#include "tile_layout.hpp"

CHUNKATTN_NAMESPACE_BEGIN
namespace detail::cuda {

/// The variant V over K/V of element type E.
template <class E, class V>
struct Quantized {};

template <class E, class V>
struct VariantTerms<Quantized<E, V>> : VariantTerms<V> {};

template <class T, class E, class V>
struct AttentionArguments<T, Quantized<E, V>> : AttentionArguments<T, V> {
  KvView<E> stored;
};

/// Element type of K/V in memory, by a kernel's variant.
template <class T, class V>
struct StoredElement {
  using type = T;
};
template <class T, class E, class V>
struct StoredElement<T, Quantized<E, V>> {
  using type = E;
};
template <class T, class V>
using stored_element = typename StoredElement<T, V>::type;

/// Where K and V lie.
template <class T, class V>
CHUNKATTN_DEVICE const KvView<T>& kv_of(const AttentionArguments<T, V>& args) {
  return args.kv;
}
template <class T, class E, class V>
CHUNKATTN_DEVICE const KvView<E>& kv_of(const AttentionArguments<T, Quantized<E, V>>& args) {
  return args.stored;
}

/// Scales of a token's rows of K and of V.
struct alignas(8) RowScales {
  float k, v;
};

CHUNKATTN_DEVICE float stored_value(std::int8_t x) {
  return static_cast<float>(x);
}
CHUNKATTN_DEVICE float stored_value(float8_e4m3 x) {
  return to_float(x);
}

/// Eight stored elements as T, times `scale`.
template <class T, class E>
CHUNKATTN_DEVICE void widen(const E* from, float scale, unsigned char* to) {
  struct alignas(8) Eight {
    E of[8];
  };
  struct alignas(16) Words {
    std::uint32_t of[4];
  };
  const Eight stored = *reinterpret_cast<const Eight*>(from);
  Words words;
  CHUNKATTN_UNROLL
  for (int i = 0; i < 4; ++i)
    words.of[i] = ptx::pack<T>(stored_value(stored.of[2 * i]) * scale,
                               stored_value(stored.of[2 * i + 1]) * scale);
  *reinterpret_cast<Words*>(to) = words;
}

/// A tile of rows of `Dim` elements of 8 bits, without gaps, as one of 16 bits, swizzled. Rows'
/// scales are at scales[2 * row]; null: 1.
template <class T, int Dim, class E>
CHUNKATTN_DEVICE void widen_tile(const unsigned char* stage, const float* scales, unsigned char* to,
                                 int rows) {
  constexpr int pieces = Dim / 8;
  const int thread = ptx::opaque(ptx::thread_index());  // nothing ahead of the loop of tiles
  CHUNKATTN_UNROLL_BY(2)
  for (int i = thread; i < rows * pieces; i += block_threads) {
    const int row = i / pieces;
    const int piece = i % pieces;
    widen<T>(reinterpret_cast<const E*>(stage) + row * Dim + piece * 8,
             scales != nullptr ? scales[2 * row] : 1.0f, to + swizzled<pieces>(row, piece));
  }
}

}  // namespace detail::cuda
CHUNKATTN_NAMESPACE_END
