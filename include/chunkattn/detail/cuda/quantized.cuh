// K/V of 8 bits with a float scale for each token and head, in the attention kernel.
//
// Rows arrive as they are stored. When a KV tile has landed, all threads make one tile of 16-bit
// elements of it, from which fragments are read as always: K's stored numbers, each of which 16
// bits hold exactly, so that their scale may wait for the logits in fp32; V's times their scale,
// rounded once. (A probability times the scale would fall among half's subnormal numbers.) So the
// ring of stages has half the bytes, and one tile of 16 bits stands beside it.
#pragma once

#include <cstddef>
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

/// The variant of the kernel for K/V of element type E.
template <class E, class V>
using KernelVariant = std::conditional_t<has_row_scales<E>, Quantized<E, V>, V>;

/// What it is given: `call` with K/V, and `variant`.
template <class T, class E, class V>
[[nodiscard]] AttentionArguments<T, KernelVariant<E, V>> attention_arguments(CallArguments<T> call,
                                                                             const KvView<E>& layer,
                                                                             const V& variant,
                                                                             float sm_scale) {
  if constexpr (has_row_scales<E>) {
    return {with_variant(call, variant, sm_scale), layer};
  } else {
    call.kv = layer;
    return with_variant(call, variant, sm_scale);
  }
}

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
  const auto stored = *reinterpret_cast<const Vector<E, 8>*>(from);
  Words4 words;
  CHUNKATTN_UNROLL
  for (int i = 0; i < 4; ++i)
    words.v[i] = ptx::pack<T>(stored_value(stored.v[2 * i]) * scale,
                              stored_value(stored.v[2 * i + 1]) * scale);
  *reinterpret_cast<Words4*>(to) = words;
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

/// Rows of K and V of a token of a KV tile.
template <class T>
struct TokenRows {
  const T* k;
  const T* v;  ///< null: nothing to read, zeros
};

/// The stages of 8-bit K/V, and where their scales lie: beside the token tables a table of scales
/// that wait for their stage, and one of those of the stage, in turn.
template <class T, HeadDims Dims, class E>
struct NarrowStages {
  using Layout = SharedLayout<Dims>;
  static constexpr int kv_tile = kv_tile_tokens(Dims);

  /// What make_token_table() found for a token.
  CHUNKATTN_DEVICE static void note_scales(unsigned char* shared, int num_stages, int stage,
                                           int token, float k, float v) {
    table_scales(shared, num_stages, stage)[token] = {k, v};
  }
  /// Begins to copy a tile, and takes over its scales.
  CHUNKATTN_DEVICE static void load(unsigned char* shared, int num_stages, int stage,
                                    const TokenRows<E>* table, ptx::SharedAddress k,
                                    ptx::SharedAddress v) {
    constexpr int k_parts = Dims.k / 16, v_parts = Dims.v / 16;  // of 16 bytes
    CHUNKATTN_UNROLL_BY(2)
    for (int i = ptx::thread_index(); i < kv_tile * k_parts; i += block_threads) {
      const int token = i / k_parts;
      const int part = i % k_parts;
      const bool valid = table[token].v != nullptr;
      ptx::cp_async_16(k + i * 16, table[token].k + part * 16, valid);
      if (part < v_parts)
        ptx::cp_async_16(v + (token * v_parts + part) * 16,
                         valid ? table[token].v + part * 16 : table[token].k, valid);
    }
    const int token = ptx::thread_index();
    if (token < kv_tile)
      stage_scales(shared, num_stages, stage)[token] =
          table_scales(shared, num_stages, stage)[token];
  }
  /// Behind a barrier, when a stage's tile has landed: makes the tile of 16 bits of it. Its readers
  /// wait for another barrier.
  CHUNKATTN_DEVICE static void widen(unsigned char* shared, int num_stages, int stage) {
    const unsigned char* from = shared + Layout::stages + stage * stage_bytes(Dims);
    unsigned char* to = shared + Layout::wide_tile;
    widen_tile<T, Dims.k, E>(from, nullptr, to, kv_tile);
    widen_tile<T, Dims.v, E>(from + stage_bytes_of_k(Dims),
                             &stage_scales(shared, num_stages, stage)->v, to + kv_tile * Dims.k * 2,
                             kv_tile);
  }
  /// The scales of K, on a warp's logits with the tokens from `first_token` of the tile on.
  template <std::size_t Groups, std::size_t Eights>
  CHUNKATTN_DEVICE static void scale_logits(unsigned char* shared, int num_stages, int stage,
                                            int first_token, int lane,
                                            float (&s)[Groups][Eights][4]) {
    const RowScales* scales = stage_scales(shared, num_stages, stage) + first_token + lane % 4 * 2;
    CHUNKATTN_UNROLL
    for (int n = 0; n < int{Eights}; ++n)
      for (int i = 0; i < 4 * int{Groups}; ++i) s[i / 4][n][i % 4] *= scales[n * 8 + i % 2].k;
  }

 private:
  CHUNKATTN_DEVICE static RowScales* table_scales(unsigned char* shared, int num_stages,
                                                  int stage) {
    return reinterpret_cast<RowScales*>(shared + Layout::token_tables(num_stages) +
                                        num_stages * kv_tile * int{sizeof(TokenRows<E>)}) +
           2 * stage * kv_tile;
  }
  CHUNKATTN_DEVICE static RowScales* stage_scales(unsigned char* shared, int num_stages,
                                                  int stage) {
    return table_scales(shared, num_stages, stage) + kv_tile;
  }
};

}  // namespace detail::cuda
CHUNKATTN_NAMESPACE_END
