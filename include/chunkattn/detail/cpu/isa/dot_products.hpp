// The two products of the chunk-first kernel as dot products of words. As in its loops over floats,
// a few tokens × vectors of lines, or lines × vectors of columns, stay in registers.
//
// A word is 32 bits: `depth` bytes, int16 or bfloat16. Which they are, what multiplies them, and
// what becomes of the sums, a *unit* says (byte_unit.hpp, int16_unit.hpp, pair_unit.hpp):
//
//   Element, depth            of K and V; dims or tokens of a word
//   passes                    over all words, the sums moved on in between
//   max_terms, terms          of a probability in each pass: terms or constants of as many
//   key_step<Vectors>         words of a key between two bursts of prefetches
//   keys_in_place, pack_key   whether words of K may be read where it lies; a row of them
//   Sum<W>                    what words are added up in, W lanes of it
//   dot_key, dot_value        sum + the products of a word of K, or of V, in each lane
//   move_logits, move_values  the sums between two passes
//   query_factor, logit       sums as logits; checked_logits: they may be other than finite
//   value_factor, add_values  sums as a part of the outputs
//   p_words                   from one pass of packed probabilities to the next
//
// and what dot_first.hpp calls.
#ifndef CHUNKATTN_ISA_DOT_PRODUCTS
#define CHUNKATTN_ISA_DOT_PRODUCTS

#include "chunk_first.hpp"
#include "dots.hpp"
#include "line_state.hpp"
#include "line_tile.hpp"
#include "pass.hpp"
#include "rules.hpp"
#include "simd.hpp"

#if defined(CHUNKATTN_PASS_DOTS)
CHUNKATTN_PASS_BEGIN(DOTS)

template <int W>
CHUNKATTN_INLINE simd::Unsigned<W> load_words(const void* from) noexcept {
  simd::Unsigned<W> words;
  __builtin_memcpy(&words, from, sizeof words);
  return words;
}

/// Lines of an output tile with another number of vectors than wide_columns, where lines beyond the
/// last do no harm. With three, which take more registers, as many as with two: tiles have a
/// multiple of these.
template <int Vectors>
inline constexpr int lines_of =
    (std::min)(tile_lines, simd::num_accumulators / (Vectors == 3 ? 2 : Vectors));

/// The columns of outputs as slices of wide_columns vectors. One that would be left over is the
/// last slice's third: in a product of its own, each weight would be loaded for it alone.
template <int ValueDim>
struct ColumnSlices {
  static constexpr int width = simd::width_for<ValueDim>;
  static constexpr int vectors = ValueDim / width;
  static constexpr int count = (std::max)(1, vectors / wide_columns);
  static constexpr int last = (count - 1) * wide_columns;  ///< first vector of the last slice
  static constexpr int last_vectors = vectors - last;

  /// The first vector of the slice that has this one, and how many it has.
  static constexpr int first_of(int vector) noexcept {
    return (std::min)(vector / wide_columns * wide_columns, last);
  }
  static constexpr int vectors_of(int first) noexcept {
    return first == last ? last_vectors : wide_columns;
  }
};

/// Words of V between two bursts of prefetches.
inline constexpr int dot_value_step = 8;

/// Bursts in the products of a block with `count` lines of a tile. With one vector of lines, twice
/// as many tokens go through a step.
template <class Unit>
constexpr int dot_steps(int count) noexcept {
  if (count == 0) return 0;
  constexpr int words = Unit::head_dim / Unit::depth;
  constexpr int group = simd::num_accumulators / 2;
  const int keys = count > simd::native_width
                       ? block_tokens / group * (words / Unit::template key_step<2>)
                       : block_tokens / (2 * group) * (words / Unit::template key_step<1>);
  const int values = (count + group - 1) / group * ColumnSlices<Unit::value_dim>::count *
                     (block_tokens / Unit::depth / dot_value_step);
  return Unit::passes * (keys + values);
}

/// What the products of a block read and write, in the scratch of the kernel over floats: that of
/// widened K or V has room for the words of both, that of the probabilities of two tiles for one.
template <class Unit>
struct DotOperands {
  using Element = typename Unit::Element;
  using State = LineState<Unit::head_dim, Unit::value_dim>;
  static constexpr int key_words = Unit::head_dim / Unit::depth;
  static constexpr int key_bytes = 4 * key_words;
  static constexpr int key_group = simd::num_accumulators / 2;

  const Block<Element>& block;
  const State& state;
  char* k;           ///< [block_tokens][key_words], rows that had to be packed
  std::uint32_t* v;  ///< ColumnSlices, [block_tokens / depth] of each
  float* logits;     ///< [block_tokens][tile_lines], then probabilities
  std::uint32_t* p;  ///< what Unit::pack_probabilities() makes of these

  int num_keys = 0;                                     ///< rows of K that are there, in groups
  const char* keys[block_tokens / key_group + 1] = {};  ///< of each group, the first

  CHUNKATTN_INLINE DotOperands(const Block<Element>& block_, const State& state_) noexcept
      : block(block_),
        state(state_),
        k(reinterpret_cast<char*>(state.scratch)),
        v(reinterpret_cast<std::uint32_t*>(state.scratch + block_tokens * key_words)),
        logits(state.p),
        p(reinterpret_cast<std::uint32_t*>(logits + block_tokens * tile_lines)) {}

  /// Adds groups of keys until there are `count`. A group's rows stand one after another: where
  /// they lie, if they do, else packed. This is done where the first tile of lines gets to them, a
  /// group ahead, so that rows come from L2 meanwhile; those of V that far on, and of K if they
  /// are not read yet, go from L2 to L1.
  CHUNKATTN_INLINE void add_keys(int count) noexcept {
    constexpr int line = 64 / sizeof(Element);
    while (num_keys < count) {
      for (int i = 0; i < key_group; ++i) {
        const int token = (std::min)(num_keys + i, block.count - 1);
        if constexpr (Unit::keys_in_place)
          for (int at = 0; at < Unit::head_dim; at += line) prefetch_near(block.k[token] + at);
        for (int at = 0; at < Unit::value_dim; at += line) prefetch_near(block.v[token] + at);
      }
      add_group();
    }
  }

 private:
  // Some rows may be beyond the block's last.
  CHUNKATTN_INLINE void add_group() noexcept {
    const Element* const* const from = block.k + num_keys;
    bool together = Unit::keys_in_place;
    for (int i = 1; i < key_group; ++i)
      together = together && from[i] == from[0] + i * Unit::head_dim;
    keys[num_keys / key_group] = reinterpret_cast<const char*>(from[0]);
    if (!together) {
      char* const to = k + num_keys * key_bytes;
      for (int i = 0; i < key_group; ++i) Unit::pack_key(from[i], to + i * key_bytes);
      keys[num_keys / key_group] = to;
    }
    num_keys += key_group;
  }
};

/// Logits of a tile's first `Vectors` vectors of lines, of the tokens that they see, rounded up to
/// whole groups. Prefetches some lines of `ahead` at each step. Returns whether one is not finite,
/// if the unit checks that.
template <int Vectors, class Unit>
[[gnu::noinline]] bool dot_logits(const Unit& unit, DotOperands<Unit>& operands,
                                  const LineTile<tile_lines>& tile, PrefetchCursor& ahead,
                                  int burst) noexcept {
  using Operands = DotOperands<Unit>;
  constexpr int width = simd::native_width;
  constexpr int group = simd::num_accumulators / Vectors;
  constexpr int part = Operands::key_group;
  constexpr int step = Unit::template key_step<Vectors>;
  using Bits = simd::Unsigned<width>;
  using Sum = typename Unit::template Sum<width>;
  const std::ptrdiff_t stride = operands.state.transposed_stride;
  const float* const queries = operands.state.q_transposed + tile.begin;
  const Block<typename Unit::Element>& block = operands.block;
  float* const logits = operands.logits;
  const int count = tile.seen;
  PrefetchCursor cursor = ahead;
  Bits largest{};
  for (int t = 0; t < count; t += group) {
    operands.add_keys((std::min)(t + 2 * group, count));
    const char* rows[to_size(group / part)];  // any, of groups beyond the last
    CHUNKATTN_UNROLLED
    for (int i = 0; i < group / part; ++i)
      rows[i] = operands.keys[t + i * part < operands.num_keys ? t / part + i : t / part];
    Sum sums[to_size(group)][to_size(Vectors)];
    CHUNKATTN_UNROLLED
    for (int j = 0; j < group; ++j) {
      CHUNKATTN_UNROLLED
      for (int v = 0; v < Vectors; ++v) sums[j][v] = Sum{};
    }
    const float* column = queries;
    for (int pass = 0; pass < Unit::passes; ++pass) {
      if constexpr (Unit::passes > 1)
        if (pass > 0) Unit::template move_logits<group, Vectors>(queries, stride, sums);
      for (int outer = 0; outer < Operands::key_words; outer += step) {
        cursor.advance(burst);
        CHUNKATTN_ROLLED
        for (int i = outer; i < outer + step; ++i, column += stride) {
          Bits query[to_size(Vectors)];
          CHUNKATTN_UNROLLED
          for (int v = 0; v < Vectors; ++v)
            query[v] = simd::loaded_once(load_words<width>(column + v * width));
          CHUNKATTN_UNROLLED
          for (int j = 0; j < group; ++j) {
            std::uint32_t word;
            __builtin_memcpy(&word, rows[j / part] + (j % part) * Operands::key_bytes + 4 * i,
                             sizeof word);
            const auto key = simd::spread<width>(word);
            CHUNKATTN_UNROLLED
            for (int v = 0; v < Vectors; ++v)
              sums[j][v] = Unit::template dot_key<width>(sums[j][v], key, query[v]);
          }
        }
      }
    }
    CHUNKATTN_UNROLLED
    for (int v = 0; v < Vectors; ++v) {
      const auto factor = unit.query_factor(queries + v * width, stride);
      CHUNKATTN_UNROLLED
      for (int j = 0; j < group; ++j) {
        const simd::Float<width> s = Unit::logit(sums[j][v], factor, block, t + j);
        if constexpr (Unit::checked_logits) {
          const Bits size = simd::bits_as<Bits>(s) & 0x7fffffffu;
          largest = largest > size ? largest : size;
        }
        simd::store(logits + (t + j) * tile_lines + v * width, s);
      }
    }
  }
  ahead = cursor;
  return any_of<width>(largest >= 0x7f800000u);
}

/// Columns of the outputs of a tile's lines, from `out` on and ValueDim apart: rescaled, += P·V
/// over `words` times `depth` tokens. `v`: Vectors vectors of columns of each.
template <int Vectors, int Terms, class Unit>
[[gnu::noinline]] void dot_values(const Unit& unit, const std::uint32_t* p, const std::uint32_t* v,
                                  int words, int count, const float* rescale, PrefetchCursor& ahead,
                                  int burst, float* out) noexcept {
  constexpr int width = simd::width_for<Unit::value_dim>;
  constexpr int lines_at_once = lines_of<Vectors>;
  using Bits = simd::Unsigned<width>;
  using Real = simd::Float<width>;
  using Sum = typename Unit::template Sum<width>;
  PrefetchCursor cursor = ahead;
  for (int line = 0; line < count; line += lines_at_once) {
    Sum sums[to_size(lines_at_once)][to_size(Vectors)];
    CHUNKATTN_UNROLLED
    for (int l = 0; l < lines_at_once; ++l) {
      CHUNKATTN_UNROLLED
      for (int i = 0; i < Vectors; ++i) sums[l][i] = Sum{};
    }
    for (int pass = 0; pass < Unit::passes; ++pass) {
      if constexpr (Unit::passes > 1)
        if (pass > 0) Unit::template move_values<lines_at_once, Vectors>(p + line, sums);
      const std::uint32_t* weights = p + pass * Unit::p_words + line;
      const std::uint32_t* values = v;
      for (int word = 0; word < words; ++word) {
        if (word % dot_value_step == 0) cursor.advance(burst);
        Bits value[to_size(Vectors)];
        CHUNKATTN_UNROLLED
        for (int i = 0; i < Vectors; ++i)
          value[i] = simd::loaded_once(load_words<width>(values + i * width));
        CHUNKATTN_UNROLLED
        for (int term = 0; term < Terms; ++term) {
          CHUNKATTN_UNROLLED
          for (int l = 0; l < lines_at_once; ++l) {
            const auto weight = simd::spread<width>(weights[term * tile_lines + l]);
            CHUNKATTN_UNROLLED
            for (int i = 0; i < Vectors; ++i)
              sums[l][i] = Unit::template dot_value<width>(sums[l][i], weight, value[i]);
          }
        }
        values += Vectors * width;
        weights += Terms * tile_lines;
      }
    }
    CHUNKATTN_UNROLLED
    for (int l = 0; l < lines_at_once; ++l) {
      if (line + l >= count) break;
      const Real rescaling = simd::broadcast<width>(rescale[line + l]);
      const Real factor = simd::broadcast<width>(unit.value_factor(line + l));
      CHUNKATTN_UNROLLED
      for (int i = 0; i < Vectors; ++i)
        Unit::template add_values<width>(sums[l][i], factor, rescaling,
                                         out + (line + l) * Unit::value_dim + i * width);
    }
  }
  ahead = cursor;
}

/// P·V of all columns of a tile: `out` is [line][ValueDim].
template <int Terms, class Unit>
CHUNKATTN_INLINE void dot_columns(const Unit& unit, const DotOperands<Unit>& operands,
                                  const LineTile<tile_lines>& tile, PrefetchCursor& ahead,
                                  int burst, float* out) noexcept {
  using Slices = ColumnSlices<Unit::value_dim>;
  const int words = (tile.seen + Unit::depth - 1) / Unit::depth;
  const auto slice = [&]<int Vectors>(std::integral_constant<int, Vectors>,
                                      int at) CHUNKATTN_LAMBDA {
    dot_values<Vectors, Terms>(unit, operands.p, operands.v + at * (block_tokens / Unit::depth),
                               words, tile.count, operands.state.rescale, ahead, burst, out + at);
  };
  if constexpr (Slices::count > 1)
    for (int first = 0; first < Slices::last; first += wide_columns)
      slice(std::integral_constant<int, wide_columns>{}, first * Slices::width);
  slice(std::integral_constant<int, Slices::last_vectors>{}, Slices::last * Slices::width);
}

CHUNKATTN_PASS_END
#endif

#endif  // CHUNKATTN_ISA_DOT_PRODUCTS
