// A variant on a tile: its changes of logits, which of them count, and which tiles are left out.
//
// A hidden logit is replaced, as those behind a row's end are. V cannot be treated so: one product
// serves all rows of a warp, and 0 x NaN is NaN. So where some row does not see some token,
// infinities and NaN are taken out of the product, and a second product, of ones where a row sees a
// token and ones where V is no number, tells which outputs are to be NaN. It is there for the warps
// that found any.
#pragma once

#include "../support/array.hpp"
#include "../support/bit_cast.hpp"
#include "merge.cuh"

CHUNKATTN_NAMESPACE_BEGIN
namespace detail::cuda {

/// The part of a tile that one lane holds as mma leaves it: rows lane/4 and lane/4 + 8 of 16, of
/// each group of 8 tokens number 2*(lane%4) and the next.
template <class T, class V, int Tokens>
class VariantTile {
  using Scores = float[to_size(Tokens / 8)][4];

 public:
  /// \param row_len, row_index  of the 16 rows
  /// \param position            path position of the first token
  /// \param end                 no row of the task sees this one or a later one
  CHUNKATTN_DEVICE VariantTile(const AttentionArguments<T, V>& args, const int* row_len,
                               const int* row_index, int lane, int position, int end)
      : args_(args),
        lines_{line_of(args, row_len[lane / 4], row_index[lane / 4]),
               line_of(args, row_len[lane / 4 + 8], row_index[lane / 4 + 8])},
        first_(position + lane % 4 * 2),
        end_(end) {}

  /// S is q k; what the variant makes of it, scaled, takes its place.
  CHUNKATTN_DEVICE void change_logits(Scores& s) const {
    CHUNKATTN_UNROLL
    for (int n = 0; n < Tokens / 8; ++n)
      for (int i = 0; i < 4; ++i)
        s[n][i] = as_real(
            Evaluator{lines_[i / 2], s[n][i] * args_.variant.sm_scale, first_ + n * 8 + i % 2}.of(
                args_.variant.logit));
  }

  /// Logits of tokens that a row does not see become minus infinity. Whether there were any, the
  /// same for all lanes.
  CHUNKATTN_DEVICE bool hide_keys(Scores& s) const {
    bool hidden = false;
    CHUNKATTN_UNROLL
    for (int n = 0; n < Tokens / 8; ++n)
      for (int i = 0; i < 4; ++i)
        if (!sees(i / 2, n * 8 + i % 2)) {
          s[n][i] = detail::bit_cast<float>(0xff800000u);
          hidden = true;
        }
    return ptx::any(hidden);
  }

  /// Whether the lane's row of a half sees a token, counted from its first. Padding sees
  /// everything, so that it hides nothing.
  CHUNKATTN_DEVICE bool sees(int half_tile, int token) const {
    const Line& line = lines_[half_tile];
    const int position = first_ + token;
    if (line.row < 0) return true;
    if (position > line.query || position >= end_) return false;
    return Evaluator{line, 0.0f, position}.of(args_.variant.visible);
  }

 private:
  const AttentionArguments<T, V>& args_;
  Line lines_[2];
  int first_, end_;
};

CHUNKATTN_DEVICE int most_of_warp(int x) {
  for (int mask = 16; mask > 0; mask /= 2) {
    const int other = ptx::shuffle_xor(x, mask);
    x = other > x ? other : x;
  }
  return x;
}
/// Of numbers that are not negative, as `most_of_warp()` takes negative ones, too.
CHUNKATTN_DEVICE int least_of_warp(int x) {
  return -most_of_warp(-x);
}

/// Tiles of a task of which no row sees anything, by what the variant says is hidden. Found from
/// the rows' lengths, so a window moves with them, whenever the task was made.
struct HiddenTiles {
  int first = 0;      ///< of the task's tiles
  int positions = 0;  ///< how many are left out there, in tokens

  /// \param row_len  of the task's rows
  /// \return how many there are
  template <class Skipping>
  CHUNKATTN_DEVICE int find(const Skipping& variant, const int* row_len, int row_count, int begin,
                            int end, int kv_tile) {
    int from = 0;
    int to = open_end;
    for (int i = ptx::thread_index() % 32; i < row_count; i += 32) {
      if (row_len[i] <= 0) continue;                           // it sees nothing
      const KeyRange hidden = variant.masked(row_len[i] - 1);  // to be marked CHUNKATTN_HD
      from = hidden.begin > from ? hidden.begin : from;
      to = hidden.end < to ? hidden.end : to;
    }
    from = most_of_warp(from);
    to = least_of_warp(to);
    first = from > begin ? (from - begin + kv_tile - 1) / kv_tile : 0;
    const int stop = to >= end    ? (end - begin + kv_tile - 1) / kv_tile
                     : to > begin ? (to - begin) / kv_tile
                                  : 0;
    const int count = stop > first ? stop - first : 0;
    positions = count * kv_tile;
    return count;
  }
  /// Positions that are left out before tile `tile` of those that remain.
  CHUNKATTN_DEVICE int before(int tile) const { return tile >= first ? positions : 0; }
};

/// Pairs of 16-bit elements in a register.
template <class T>
struct Pair {
  static constexpr bool is_half = std::is_same_v<T, half>;
  static constexpr std::uint32_t exponents = is_half ? 0x7c007c00u : 0x7f807f80u;
  static constexpr std::uint32_t carry = is_half ? 0x04000400u : 0x00800080u;
  static constexpr std::uint32_t ones = is_half ? 0x3c003c00u : 0x3f803f80u;

  /// All bits of each element that is infinite or NaN.
  CHUNKATTN_DEVICE static std::uint32_t specials(std::uint32_t pair) {
    const std::uint32_t signs = ((pair & exponents) + carry) & 0x80008000u;
    return (signs >> 15) * 0xffffu;
  }
  /// Makes zeros of these. Not 0 if there were any.
  CHUNKATTN_DEVICE static std::uint32_t take_specials(std::uint32_t (&pairs)[4]) {
    std::uint32_t all = 0;
    CHUNKATTN_UNROLL
    for (int i = 0; i < 4; ++i) {
      const std::uint32_t these = specials(pairs[i]);
      pairs[i] &= ~these;
      all |= these;
    }
    return all;
  }
  /// One where a condition holds, else zero.
  CHUNKATTN_DEVICE static std::uint32_t of(bool low, bool high) {
    return ((low ? 0xffffu : 0u) | (high ? 0xffff0000u : 0u)) & ones;
  }
};

}  // namespace detail::cuda
CHUNKATTN_NAMESPACE_END
