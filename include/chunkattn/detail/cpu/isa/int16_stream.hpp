// The sequence-first kernel over int8 K and V as dot products of int16, for AVX2, where widening
// bytes to floats takes longer than multiplying them: queries and probabilities are the integers of
// int16_unit.hpp, and sums are exact.
//
// Bytes become words two by two: a word of 16 bits holds an even element and an odd one, which
// shifts take apart. So queries are stored that way, and outputs put in order when a block ends.
#ifndef CHUNKATTN_ISA_INT16_STREAM
#define CHUNKATTN_ISA_INT16_STREAM

#include "dots.hpp"
#include "evaluate.hpp"
#include "integers.hpp"
#include "line_tile.hpp"
#include "pass.hpp"
#include "sequence_first.hpp"
#include "simd.hpp"

#if defined(CHUNKATTN_PASS_AVX2)
CHUNKATTN_PASS_BEGIN(DOTS)

/// Elements of a row that are taken at once, as 16 words of two.
inline constexpr int pair_row = 32;
template <int Dim>
inline constexpr int num_pair_rows = (Dim + pair_row - 1) / pair_row;

typedef std::int16_t Int16s __attribute__((vector_size(32)));

/// `Count` bytes, then zeros.
template <int Count>
CHUNKATTN_INLINE Int16s load_bytes(const std::int8_t* from) noexcept {
  Int16s words{};
  __builtin_memcpy(&words, from, Count);
  return words;
}
CHUNKATTN_INLINE simd::u32x8 even_bytes(Int16s words) noexcept {
  return simd::bits_as<simd::u32x8>((words << 8) >> 8);
}
CHUNKATTN_INLINE simd::u32x8 odd_bytes(Int16s words) noexcept {
  return simd::bits_as<simd::u32x8>(words >> 8);
}
/// f(number, Count<bytes>) for each 32 elements of a row, and for the rest.
template <int Dim, class F>
CHUNKATTN_INLINE void for_pair_rows(const F& f) {
  CHUNKATTN_ROLLED
  for (int i = 0; i < Dim / pair_row; ++i) f(i, Count<pair_row>{});
  if constexpr (Dim % pair_row != 0) f(Dim / pair_row, Count<Dim % pair_row>{});
}

/// Words of a query in LineState::q_words: of each 32 elements the even ones, then the odd ones.
/// Behind them what its integers count; NaN: it has none.
template <int HeadDim>
inline constexpr int stream_query_words = num_pair_rows<HeadDim> * pair_row / 2;

/// The queries of the first lines, once per task.
template <int HeadDim, int ValueDim>
[[gnu::noinline]] void pack_stream_queries(int lines,
                                           LineState<HeadDim, ValueDim>& state) noexcept {
  constexpr int width = simd::width_for<HeadDim>;
  alignas(32) std::uint16_t integers[num_pair_rows<HeadDim> * pair_row] = {};
  for (int line = 0; line < lines; ++line) {
    float* const to = state.q_words + line * state.query_words;
    const auto store = [&](int i, simd::Unsigned<width> x) CHUNKATTN_LAMBDA {
      simd::store_upper_halves<width>(integers + i, simd::bits_as<simd::Float<width>>(x << 16));
    };
    const QueryIntegers<HeadDim> query(state.q + line * HeadDim, store);
    to[stream_query_words<HeadDim>] = query.scale;
    for (int i = 0; i < stream_query_words<HeadDim>; i += 8) {
      const auto pairs = load_words<8>(integers + 2 * i);
      float* const even = to + i / 16 * 16 + i % 16 / 2;
      simd::store_upper_halves<8>(even, simd::bits_as<simd::f32x8>(pairs << 16));
      simd::store_upper_halves<8>(even + 8, simd::bits_as<simd::f32x8>(pairs));
    }
  }
}

/// q·k of `Lines` lines with the tokens that they see, but for the scales of K's rows.
template <int HeadDim, int Lines>
[[gnu::noinline]] void int16_stream_logits(const Block<std::int8_t>& block, int count,
                                           const float* const* queries,
                                           float (*logits)[padded_block_tokens],
                                           PrefetchCursor& ahead) noexcept {
  constexpr int together = 8 / Lines;  // tokens
  constexpr int rows = num_pair_rows<HeadDim>;
  constexpr int burst = (together * cache_lines_per_row<HeadDim, std::int8_t> + rows - 1) / rows;
  simd::f32x8 scale{};
  for (int i = 0; i < 8; ++i) scale[i] = queries[i / together][stream_query_words<HeadDim>];
  const float* q[to_size(Lines)];
  std::copy_n(queries, Lines, q);
  PrefetchCursor cursor = ahead;
  for (int t = 0; t < count; t += together) {
    simd::u32x8 sums[to_size(Lines * together)] = {};
    for_pair_rows<HeadDim>([&]<int Bytes>(int i, Count<Bytes>) CHUNKATTN_LAMBDA {
      cursor.advance(burst);
      Int16s words[to_size(together)];
      CHUNKATTN_UNROLLED
      for (int r = 0; r < together; ++r)
        words[r] = simd::loaded_once(load_bytes<Bytes>(block.k[t + r] + i * pair_row));
      CHUNKATTN_UNROLLED
      for (int half = 0; half < 2; ++half) {
        simd::u32x8 key[to_size(together)];
        CHUNKATTN_UNROLLED
        for (int r = 0; r < together; ++r)
          key[r] = half == 0 ? even_bytes(words[r]) : odd_bytes(words[r]);
        CHUNKATTN_UNROLLED
        for (int l = 0; l < Lines; ++l) {
          const auto query = simd::loaded_once(load_words<8>(q[l] + 16 * i + 8 * half));
          CHUNKATTN_UNROLLED
          for (int r = 0; r < together; ++r)
            sums[l * together + r] =
                simd::loaded_once(dot_int16<8>(sums[l * together + r], key[r], query));
        }
      }
    });
    const auto result = as_real<8>(simd::bits_as<simd::Int<8>>(simd::sum_lanes<8>(sums))) * scale;
    CHUNKATTN_UNROLLED
    for (int l = 0; l < Lines; ++l) {
      for (int r = 0; r < together; ++r) logits[l][t + r] = result[l * together + r];
    }
  }
  ahead = cursor;
}

/// Probabilities as integers of 15 bits, two tokens to a word.
struct StreamWeights {
  alignas(32) std::uint32_t words[stream_lines][block_tokens / 2];
  simd::f32x4 scale;  ///< of lines; 0: theirs are not all finite and positive

  [[gnu::noinline]] StreamWeights(const StreamLines& lines,
                                  float (*p)[padded_block_tokens]) noexcept {
    using Scales = ProbabilityScales<15, stream_lines>;
    simd::u32x4 top{};
    for (int l = 0; l < lines.count; ++l) {
      simd::u32x8 most{};
      for (int t = 0; t < lines.seen; t += 8) {
        const auto bits = seen_bits(p[l] + t, lines.visible[l] - t);
        simd::store(p[l] + t, simd::bits_as<simd::f32x8>(bits));
        most = most > bits ? most : bits;
      }
      for (int i = 0; i < 8; ++i) top[l] = (std::max)(top[l], most[i]);
    }
    const Scales scales(top);
    scale = scales.scale;
    for (int l = 0; l < lines.count; ++l) {
      for (int t = 0; t < lines.seen; t += 8) {
        const auto x = ProbabilityScales<15, 8>::integers(simd::load<8>(p[l] + t),
                                                          simd::broadcast<8>(scales.factor[l]));
        simd::store_upper_halves<8>(words[l] + t / 2, simd::bits_as<simd::f32x8>(x << 16));
      }
    }
  }

 private:
  // 0 where a line does not see the token.
  CHUNKATTN_INLINE static simd::u32x8 seen_bits(const float* p, int visible) noexcept {
    const simd::f32x8 x = simd::load<8>(p);
    const simd::Int<8> mask = (simd::iota<8>() < visible) & ~is_hidden<8>(x);
    return simd::bits_as<simd::u32x8>(x) & simd::bits_as<simd::u32x8>(mask);
  }
};

/// out[line] = rescale[line] * out[line] + P·V of `Lines` lines over the first `count` tokens.
template <int ValueDim, int Lines>
[[gnu::noinline]] void int16_stream_values(const Block<std::int8_t>& block,
                                           const StreamLines& lines, const StreamWeights& p,
                                           PrefetchCursor& ahead) noexcept {
  // AVX2 has registers for the sums of half a row's words of four lines.
  constexpr int halves = Lines == 4 ? 1 : 2;
  constexpr int step = 4;  // tokens
  constexpr int passes = num_pair_rows<ValueDim> * 2 / halves;
  constexpr int burst = (step * cache_lines_per_row<ValueDim, std::int8_t> + passes - 1) / passes;
  PrefetchCursor cursor = ahead;
  const int count = lines.seen;
  const auto pass = [&]<int First, int Bytes>(Count<First>, int i, Count<Bytes>) CHUNKATTN_LAMBDA {
    simd::u32x8 sums[to_size(Lines)][to_size(halves)][2] = {};
    const auto add_pair = [&](int t) CHUNKATTN_LAMBDA {
      // The last row again beyond the last: with probabilities of 0.
      const Int16s a = load_bytes<Bytes>(block.v[t] + i * pair_row);
      const Int16s b = load_bytes<Bytes>(block.v[t + 1] + i * pair_row);
      CHUNKATTN_UNROLLED
      for (int h = 0; h < halves; ++h) {
        const Int16s both = First + h == 0
                                ? simd::bits_as<Int16s>(_mm256_unpacklo_epi16(
                                      simd::bits_as<__m256i>(a), simd::bits_as<__m256i>(b)))
                                : simd::bits_as<Int16s>(_mm256_unpackhi_epi16(
                                      simd::bits_as<__m256i>(a), simd::bits_as<__m256i>(b)));
        const auto even = even_bytes(both), odd = odd_bytes(both);
        CHUNKATTN_UNROLLED
        for (int l = 0; l < Lines; ++l) {
          const auto weight = simd::spread<8>(p.words[l][t / 2]);
          sums[l][h][0] = dot_int16<8>(sums[l][h][0], weight, even);
          sums[l][h][1] = dot_int16<8>(sums[l][h][1], weight, odd);
        }
      }
    };
    for (int t = 0; t < count; t += step) {
      cursor.advance(burst);
      CHUNKATTN_UNROLLED
      for (int u = 0; u < step; u += 2) add_pair(t + u);
    }
    CHUNKATTN_UNROLLED
    for (int l = 0; l < Lines; ++l) {
      const auto factor = simd::broadcast<8>(p.scale[l]),
                 rescale = simd::broadcast<8>(lines.rescale[l]);
      CHUNKATTN_UNROLLED
      for (int h = 0; h < halves; ++h) {
        const auto even = as_real<8>(simd::bits_as<simd::Int<8>>(sums[l][h][0]));
        const auto odd = as_real<8>(simd::bits_as<simd::Int<8>>(sums[l][h][1]));
        const auto add = [&](int dim, simd::f32x8 sum) CHUNKATTN_LAMBDA {
          if (dim >= ValueDim) return;
          float* const out = lines.out[l] + dim;
          simd::store(out, simd::fma(sum, factor, simd::load<8>(out) * rescale));
        };
        using std::integer_sequence;
        const int dim = i * pair_row + (First + h) * 8;
        add(dim, simd::shuffle<8>(even, odd, integer_sequence<int, 0, 8, 1, 9, 2, 10, 3, 11>{}));
        add(dim + 16,
            simd::shuffle<8>(even, odd, integer_sequence<int, 4, 12, 5, 13, 6, 14, 7, 15>{}));
      }
    }
  };
  for_pair_rows<ValueDim>([&]<int Bytes>(int i, Count<Bytes> bytes) CHUNKATTN_LAMBDA {
    pass(Count<0>{}, i, bytes);
    if constexpr (halves == 1 && Bytes > 8) pass(Count<1>{}, i, bytes);
  });
  ahead = cursor;
}

/// In fp32: the logits of lines whose queries have no integers.
template <int HeadDim>
[[gnu::noinline]] void repair_stream_logits(const Block<std::int8_t>& block,
                                            const StreamLines& lines, const float* const* queries,
                                            float (*logits)[padded_block_tokens]) noexcept {
  for (int l = 0; l < lines.count; ++l)
    if (!is_finite(queries[l][stream_query_words<HeadDim>]))
      logits_in_fp32<HeadDim>(block, lines.seen, lines.q[l], logits[l], 1);
}
/// … and the values of those whose probabilities have none.
template <int ValueDim>
[[gnu::noinline]] void repair_stream_values(const Block<std::int8_t>& block,
                                            const StreamLines& lines, const StreamWeights& weights,
                                            const float (*p)[padded_block_tokens]) noexcept {
  for (int l = 0; l < lines.used; ++l)
    for (int t = 0; weights.scale[l] == 0 && t < lines.seen; ++t)
      add_value<ValueDim>(p[l][t], block.v[t], lines.out[l]);
}

/// One block for lines [first, first + used), at most stream_lines.
template <int HeadDim, int ValueDim, class Rules>
[[gnu::noinline]] void int16_stream_block(const Block<std::int8_t>& block, int first, int used,
                                          LineState<HeadDim, ValueDim>& state,
                                          PrefetchCursor& ahead, Rules rules) noexcept {
  alignas(64) float logits[stream_lines][padded_block_tokens];
  StreamLines lines(block, first, used, state);
  if (lines.seen == 0) return;
  const float* q[stream_lines];
  for (int l = 0; l < lines.count; ++l) q[l] = state.q_words + lines.line(l) * state.query_words;
  lines.with_count([&]<int N>(Count<N>) CHUNKATTN_LAMBDA {
    int16_stream_logits<HeadDim, N>(block, lines.seen, q, logits, ahead);
  });
  repair_stream_logits<HeadDim>(block, lines, q, logits);
  stream_softmax(block, lines, logits, state, rules);
  const StreamWeights weights(lines, logits);
  lines.with_count([&]<int N>(Count<N>) CHUNKATTN_LAMBDA {
    int16_stream_values<ValueDim, N>(block, lines, weights, ahead);
  });
  repair_stream_values<ValueDim>(block, lines, weights, logits);
}

/// One block for lines [line0, line0 + num_lines), a few at a time.
template <class State, class Rules>
void int16_sequence_first_block(const Block<std::int8_t>& block, int line0, int num_lines,
                                State& state, PrefetchCursor& ahead, Rules rules) noexcept {
  for (int line = 0; line < num_lines; line += stream_lines)
    int16_stream_block(block, line0 + line, (std::min)(stream_lines, num_lines - line), state,
                       ahead, rules);
}

CHUNKATTN_PASS_END
#endif

#endif  // CHUNKATTN_ISA_INT16_STREAM
