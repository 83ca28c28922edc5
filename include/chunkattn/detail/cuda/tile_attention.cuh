// One task: a tile of query rows against a range of path positions, for one KV head.
//
// K and V arrive through a ring of cp.async stages (tile_feed.cuh); S = Q K^T and O += P V run on
// the tensor cores (mma m16n8k16), the online softmax in fp32 registers (paper, Algorithms 1 and 2,
// with the maximum kept in base 2). Both phases run this loop; they differ in how tasks are cut and
// in what becomes of the result (merge.cuh, run_tasks.cuh).
//
// Causality, reserved places and rows of others are position < min(row_kv_len, end of the range).
// Zeros stand for K/V rows that no row of the tile sees: 0 x NaN must not reach PV.
#pragma once

#include "../support/array.hpp"
#include "../support/bit_cast.hpp"
#include "merge.cuh"
#include "running_total.cuh"
#include "tile_feed.cuh"
#include "warp_place.cuh"

CHUNKATTN_NAMESPACE_BEGIN
namespace detail::cuda {

/// The products of one task: its loop over KV tiles.
template <class T, HeadDims Dims, int TileRows, class V>
class TileAttention {
  using Variant = VariantTerms<V>;
  using Layout = SharedLayout<Dims>;
  using Tables = TileTables<most_tile_rows(Dims)>;
  using Warps = WarpLayout<Dims, TileRows, std::is_same_v<V, NoVariant>>;
  using Feed = TileFeed<T, Dims, V>;
  using Narrow = NarrowStages<T, Dims, stored_element<T, V>>;
  using Place = WarpPlace<Warps>;
  using Sums = ValueSums<Dims, Warps, Variant::hides_keys>;
  static constexpr int kv_tile = Warps::kv_tile;
  static constexpr int k_pieces = Dims.k / 8;  // of 16 bytes
  static constexpr int v_pieces = Dims.v / 8;
  static constexpr int k_steps = Dims.k / 16;
  // A warp's rows: as groups of the 16 that mma takes, and these as halves, of which a lane holds a
  // row each: number lane / 4 + half * 8.
  static constexpr int groups = Warps::warp_rows / 16;
  static constexpr int halves = 2 * groups;
  // Query fragments stay in registers where these suffice; elsewhere, and in large tiles, they are
  // read again per tile, 16 KB for each group of 16 rows of a warp.
  static constexpr bool q_in_registers = Dims.k <= 64 && !Warps::whole_rows;

 public:
  /// \param tables  of the task, at which `feed` stands
  CHUNKATTN_DEVICE TileAttention(const AttentionArguments<T, V>& args, Feed& feed,
                                 const Tables& tables, unsigned char* shared)
      : args_(args), feed_(feed), tables_(tables), shared_(shared), range_(tables.range) {
    CHUNKATTN_UNROLL
    for (float& max : max_) max = empty_max;
  }

  /// Streams the task's range, of which the first tiles are on their way. Once all of its K/V is,
  /// and before waiting for the last, calls ahead(), of all threads: from then on `feed` stands at
  /// the next task, whose first tiles take the stages that this one leaves.
  template <class Ahead>
  CHUNKATTN_DEVICE void run(Ahead&& ahead) {
    const int stages = args_.num_stages;
    const int num_tiles = range_.num_tiles;
    const int last_round = num_tiles < stages ? 0 : num_tiles - stages + 1;
    if (!Feed::goes_on) feed_.load_tiles(feed_.tiles_beside(), stages - 1);
    int tile = 0;
    int stage = feed_.first_stage();  // of this tile, and of the one `stages` on
    CHUNKATTN_UNROLL_BY(1)
    for (int part = 0; part < 2; ++part) {
      if (part == 1) {
        ahead();
        if (Feed::goes_on && num_tiles < stages - 1) {  // stages that this task does not need
          ptx::barrier();                               // the next task's tables are made
          feed_.load_tiles(0, stages - 1 - num_tiles);
        }
      }
      const int end = part == 0 ? last_round : num_tiles;
      CHUNKATTN_UNROLL_BY(1)
      while (tile < end) {
        const int window_end = (tile / Sums::window_tiles + 1) * Sums::window_tiles;
        const int stop = window_end < end ? window_end : end;
        CHUNKATTN_UNROLL_BY(1)
        for (; tile < stop; ++tile) {
          ptx::cp_async_wait(stages - 2);
          ptx::barrier();  // everyone's copies of this tile have landed; tile - 1 is used up
          if (tile == 0 && q_in_registers) read_query_fragments();
          const int more = tile + stages - 1 - num_tiles;  // tiles, of the next task
          if (part == 0 || (Feed::goes_on && more < feed_.num_tiles()))
            feed_.load_tile(stage > 0 ? stage - 1 : stages - 1);
          if (part == 0)
            feed_.make_token_table(tables_, position_of(tile + stages), stage, range_.end);
          ptx::cp_async_commit();
          const int position = position_of(tile);
          if constexpr (Dims.stored == 1) {
            Narrow::widen(shared_, stages, stage);
            ptx::barrier();  // the tile of 16 bits is made
          }
          if constexpr (!Variant::hides_keys)
            if (range_.min_len < range_.end && position + kv_tile > range_.min_len)
              take_out_specials(stage, position, range_.end);
          attend(stage, position + Place().first_token, range_.end);
          stage = stage + 1 < stages ? stage + 1 : 0;
        }
        if (num_tiles > Sums::window_tiles && (tile == num_tiles || tile % Sums::window_tiles == 0))
          RunningTotal<Dims, groups, Warps::warp_columns>(
              args_.plan.totals, tables_.rows.index + Place().first_row + Place().lane / 4)
              .add(tile == Sums::window_tiles, tile == num_tiles, max_, args_.scale2, sum_, out_);
      }
    }
  }

  /// Leaves outputs of the task's rows in `accumulators`, which nobody may need any more, and their
  /// stats.
  CHUNKATTN_DEVICE void store_accumulators(int row_count, float* accumulators) {
    if constexpr (Warps::parts < Warps::kv_warps) {
      if (Place().kv_warp > 0) store_rows<false>(row_count, accumulators);
      ptx::barrier();  // results of those who have seen other tokens
      if (Place().kv_warp == 0) store_rows<true>(row_count, accumulators);
    } else {
      store_rows<false>(row_count, accumulators);
    }
  }

  /// Where a warp's results are those of its rows: writes these, `Final` or as partial results.
  template <bool Final>
  CHUNKATTN_DEVICE void write_results(const Task& task) const {
    const Place place;
    CHUNKATTN_UNROLL
    for (int half = 0; half < halves; ++half) {
      const int row = place.first_row + place.lane / 4 + half * 8;
      const SoftmaxState state{scaled_max(half), sum_of_row(half)};
      if (row >= task.row_count) continue;
      std::int64_t line = tables_.rows.index[row];
      if constexpr (!Final)
        line = task.partial_base + row_of_partials(args_, task.row_begin + row, tables_.kv_head);
      if (place.lane % 4 == 0) store_lse<Final>(args_, line, state);
      const float scale = normaliser(state);
      CHUNKATTN_UNROLL
      for (int n = 0; n < Dims.v / 8; ++n) {
        const float* const o = &out_[half / 2][n][half % 2 * 2];
        store_columns<Final>(args_, line * Dims.v + place.lane % 4 * 2 + n * 8,
                             state.empty() ? Float2{} : Float2{o[0] * scale, o[1] * scale});
      }
    }
  }

  /// Whether there was anything to stream.
  CHUNKATTN_DEVICE bool streamed() const { return range_.num_tiles > 0; }

 private:
  // Add: what stands there, of the same rows, is added first.
  template <bool Add>
  CHUNKATTN_DEVICE void store_rows(int row_count, float* accumulators) {
    constexpr int columns = Warps::warp_columns;
    const Place place;
    const int part = Warps::parts > 1 ? place.kv_warp : 0;
    const int first = ((part * (TileRows / 16) + place.first_row / 16) * Warps::column_warps +
                       place.column_warp) *
                      16;
    float* accumulator = accumulators + first * columns;
    SoftmaxState* stats = reinterpret_cast<SoftmaxState*>(shared_ + Layout::stats) + first;
    CHUNKATTN_UNROLL
    for (int half = 0; half < halves; ++half) {
      const int row = place.lane / 4 + half * 8;
      SoftmaxState other;
      if constexpr (Add)  // before lanes meet to add up the sum
        if (place.first_row + row < row_count) other = stats[row];
      const float sum = sum_of_row(half);
      if (place.first_row + row >= row_count) continue;  // nobody reads it
      MergedState merged{{scaled_max(half), sum}, 1.0f, 0.0f};
      if constexpr (Add) merged = merge_states<Base2>(merged.state, other);
      if (place.lane % 4 == 0) stats[row] = merged.state;
      CHUNKATTN_UNROLL
      for (int n = 0; n < columns / 8; ++n) {
        auto& at = *reinterpret_cast<Float2*>(
            accumulator + row * columns +
            accumulator_column(columns, row, n * 8 + place.lane % 4 * 2));
        float* const o = &out_[half / 2][n][half % 2 * 2];
        at = Add ? Float2{merged.weight_a * o[0] + merged.weight_b * at.v[0],
                          merged.weight_a * o[1] + merged.weight_b * at.v[1]}
                 : Float2{o[0], o[1]};
      }
    }
  }

  CHUNKATTN_DEVICE int position_of(int tile) const {
    return range_.begin + tile * kv_tile + Feed::hidden_before(tables_.range, tile);
  }

  // Where a stage's tile is read from, in 16 bits; V follows K.
  static constexpr int bytes_of_k = kv_tile * Dims.k * 2;
  CHUNKATTN_DEVICE static int tile_offset(int stage) {
    return Dims.stored == 1 ? Layout::wide_tile : Layout::stages + stage * stage_bytes(Dims);
  }
  CHUNKATTN_DEVICE ptx::SharedAddress stage_address(int stage) {
    return ptx::shared_address(shared_ + tile_offset(stage));
  }

  CHUNKATTN_DEVICE void read_query_fragment(int start, int step, std::uint32_t (&fragment)[4]) {
    const ptx::SharedAddress q = ptx::shared_address(shared_ + Layout::queries(args_.num_stages));
    ptx::ldmatrix_x4(fragment, q + at_step<k_pieces>(start, step));
  }

  CHUNKATTN_DEVICE void read_query_fragments() {
    const Place place;
    const int start = swizzled<k_pieces>(place.first_row + place.lane % 16, place.lane / 16);
    CHUNKATTN_UNROLL
    for (int group = 0; group < groups; ++group) CHUNKATTN_UNROLL
    for (int step = 0; step < k_steps; ++step)
      read_query_fragment(start + group * bytes_of_16_rows<k_pieces>, step, query_[group][step]);
  }

  // For tiles of which some rows see more than others. An infinity or NaN in V must not reach rows
  // that do not see it, and 0 x NaN is NaN: zeros take their place, and the rows that see the first
  // one of a column become NaN there.
  CHUNKATTN_DEVICE void take_out_specials(int stage, int position, int end) {
    const Place place;
    const int thread = place.thread;
    std::uint32_t* first_specials = reinterpret_cast<std::uint32_t*>(shared_ + Layout::stats);
    if (thread < Dims.v / 2) {  // two columns
      unsigned char* v = shared_ + tile_offset(stage) + bytes_of_k;
      std::uint32_t first = 0xffffffffu;  // none in either column
      CHUNKATTN_UNROLL_BY(1)
      for (int token = kv_tile; token-- > 0;) {
        std::uint32_t& word = *reinterpret_cast<std::uint32_t*>(
            v + swizzled<v_pieces>(token, thread / 4) + thread % 4 * 4);
        const std::uint32_t special = Pair<T>::specials(word);
        word &= ~special;
        first = (first & ~special) | (static_cast<std::uint32_t>(token) * 0x10001u & special);
      }
      first_specials[thread] = first;
    }
    ptx::barrier();  // taken out, noted
    const int* row_len = tables_.rows.len + place.first_row;
    CHUNKATTN_UNROLL
    for (int half = 0; half < halves; ++half) {
      const int len = row_len[place.lane / 4 + half * 8];
      const int left = (len < end ? len : end) - position;
      const int seen = left < kv_tile ? left : kv_tile;  // below what stands for none
      CHUNKATTN_UNROLL
      for (int n = 0; n < Warps::warp_columns / 8; ++n) {
        const int column = place.column_warp * Warps::warp_columns + n * 8 + place.lane % 4 * 2;
        const std::uint32_t first = first_specials[column / 2];
        for (int j = 0; j < 2; ++j)
          if (static_cast<int>(first >> (16 * j) & 0xffffu) < seen)
            out_[half / 2][n][half % 2 * 2 + j] = detail::bit_cast<float>(0x7fc00000u);
      }
    }
  }

  // Logits, then probabilities, of a warp's rows with its tokens of a tile, as mma leaves them: of
  // each group of 16 this lane holds rows lane/4 and lane/4 + 8, tokens 2*(lane%4) and the next of
  // each 8.
  using Scores = float[to_size(groups)][to_size(Warps::warp_tokens / 8)][4];

  // One warp's part of a tile: its rows x warp_tokens tokens from path position `position` on.
  CHUNKATTN_DEVICE void attend(int stage, int position, int end) {
    if (position >= end) return;  // the same for all lanes
    const ptx::SharedAddress k = stage_address(stage);
    const ptx::SharedAddress v = k + bytes_of_k;
    Scores s;
    multiply_keys(k, s);
    if constexpr (Dims.stored == 1)
      Narrow::scale_logits(shared_, args_.num_stages, stage, Place().first_token, Place().lane, s);
    if constexpr (Variant::changes_logits) {
      CHUNKATTN_UNROLL
      for (int group = 0; group < groups; ++group)
        variant_tile(group, position, end).change_logits(s[group]);
    }
    if constexpr (Variant::hides_keys) {
      bool hidden = false;
      CHUNKATTN_UNROLL
      for (int group = 0; group < groups; ++group)
        if (variant_tile(group, position, end).hide_keys(s[group])) hidden = true;
      softmax(s);
      if (!hidden)
        add_values(v, s);
      else if (ptx::any(add_values<true>(v, s) != 0))
        add_specials(v, position, end);
    } else {
      if (position + Warps::warp_tokens > range_.min_len || position + Warps::warp_tokens > end)
        mask(position, end, s);
      softmax(s);
      add_values(v, s);
    }
  }

  // S = Q K^T.
  CHUNKATTN_DEVICE void multiply_keys(ptx::SharedAddress k, Scores& s) {
    constexpr int tokens = Warps::warp_tokens;
    const Place place;  // no registers for addresses while P V needs them
    const int lane = place.lane;
    const int q_start = swizzled<k_pieces>(place.first_row + lane % 16, lane / 16);
    const int k_start =
        swizzled<k_pieces>(place.first_token + lane / 16 * 8 + lane % 8, lane / 8 % 2);
    CHUNKATTN_UNROLL
    for (int i = 0; i < groups * tokens / 2; ++i)
      s[i / (tokens / 2)][i / 4 % (tokens / 8)][i % 4] = 0.0f;
    CHUNKATTN_UNROLL
    for (int step = 0; step < k_steps; ++step) {
      ptx::hold_loads(Warps::holds_loads);
      std::uint32_t fragment[to_size(groups)][4];
      CHUNKATTN_UNROLL
      for (int group = 0; group < groups; ++group)
        if constexpr (!q_in_registers)
          read_query_fragment(q_start + group * bytes_of_16_rows<k_pieces>, step, fragment[group]);
      CHUNKATTN_UNROLL
      for (int n = 0; n < tokens / 16; ++n) {
        // Matrices: tokens 0-7 and columns 0-7, then columns 8-15; tokens 8-15 likewise.
        std::uint32_t b[4];
        ptx::ldmatrix_x4(b,
                         k + (at_step<k_pieces>(k_start, step) + n * bytes_of_16_rows<k_pieces>));
        CHUNKATTN_UNROLL
        for (int group = 0; group < groups; ++group) {
          const std::uint32_t(&a)[4] =
              q_in_registers ? query_[group][q_in_registers ? step : 0] : fragment[group];
          ptx::mma<T>(s[group][2 * n], a, b[0], b[1]);
          ptx::mma<T>(s[group][2 * n + 1], a, b[2], b[3]);
        }
      }
    }
  }

  // The online softmax: S becomes P, outputs and sums are rescaled where a maximum has moved. The
  // maximum is that of the logits as mma left them, and subtracted before they are scaled: of a
  // large one the product is rounded by more than exp2 can stand. A NaN does not move it, but stays
  // in P.
  CHUNKATTN_DEVICE void softmax(Scores& s) {
    constexpr int tokens = Warps::warp_tokens;
    float max[to_size(halves)];
    bool moved = false;
    CHUNKATTN_UNROLL
    for (int half = 0; half < halves; ++half) {
      max[half] = max_[half];
      CHUNKATTN_UNROLL
      for (int n = 0; n < tokens / 8; ++n)
        for (int j = 0; j < 2; ++j)
          max[half] = (ptx::max)(max[half], s[half / 2][n][half % 2 * 2 + j]);
      for (int lanes = 1; lanes <= 2; lanes *= 2)
        max[half] = (ptx::max)(max[half], ptx::shuffle_xor(max[half], lanes));
      moved = moved || max[half] > max_[half];
    }
    if (ptx::any(moved)) rescale(max);
    CHUNKATTN_UNROLL
    for (int half = 0; half < halves; ++half) {
      float sum = 0.0f;  // of the tile: one addition to the running one
      CHUNKATTN_UNROLL
      for (int i = 0; i < tokens / 4; ++i) {
        float& x = s[half / 2][i / 2][half % 2 * 2 + i % 2];
        x = ptx::exp2((x - max_[half]) * args_.scale2);
        sum = i == 0 ? x : sum + x;
      }
      sum_[half] += sum;
    }
  }

  // Logits of tokens that a row does not see become minus infinity, whatever they were: products
  // with K rows that hold NaN are replaced, not multiplied by zero.
  CHUNKATTN_DEVICE void mask(int position, int end, Scores& s) {
    const Place place;
    const int lane = place.lane;
    const int* row_len = tables_.rows.len + place.first_row;
    CHUNKATTN_UNROLL
    for (int half = 0; half < halves; ++half) {
      const int len = row_len[lane / 4 + half * 8];
      const int limit = (len < end ? len : end) - position - lane % 4 * 2;
      CHUNKATTN_UNROLL
      for (int n = 0; n < Warps::warp_tokens / 8; ++n)
        for (int j = 0; j < 2; ++j)
          if (n * 8 + j >= limit)
            s[half / 2][n][half % 2 * 2 + j] = detail::bit_cast<float>(0xff800000u);
    }
  }

  // This lane's part of a group of rows and one warp's tokens, as the variant sees it.
  CHUNKATTN_DEVICE auto variant_tile(int group, int position, int end) {
    const Place place;
    const int first = place.first_row + group * 16;
    return VariantTile<T, V, Warps::warp_tokens>(
        args_, tables_.rows.len + first, tables_.rows.index + first, place.lane, position, end);
  }

  // Brings outputs and sums to the new maxima.
  CHUNKATTN_DEVICE void rescale(const float (&max)[to_size(halves)]) {
    CHUNKATTN_UNROLL
    for (int half = 0; half < halves; ++half) {
      // One that has not moved has the factor 1, infinity too.
      const float moved = max[half] > max_[half] ? max_[half] - max[half] : 0.0f;
      const float correction = ptx::exp2(moved * args_.scale2);
      max_[half] = max[half];
      sum_[half] *= correction;
      CHUNKATTN_UNROLL
      for (int n = 0; n < Warps::warp_columns / 8; ++n)
        for (int j = 0; j < 2; ++j) out_[half / 2][n][half % 2 * 2 + j] *= correction;
    }
  }

  // In base 2, and finite from below even where a large scale meets a row that has seen nothing.
  CHUNKATTN_DEVICE float scaled_max(int half) const {
    return (ptx::max)(max_[half] * args_.scale2, lowest_max2);
  }
  // All four lanes of the row take part.
  CHUNKATTN_DEVICE float sum_of_row(int half) const {
    float sum = sum_[half];
    for (int mask = 1; mask <= 2; mask *= 2) sum += ptx::shuffle_xor(sum, mask);
    return sum;
  }

  // O += P V. P's accumulator layout is the A operand's: two groups of 8 tokens make a step of 16.
  // What some steps sum up to is added to O as a whole: it may have become so large that each of
  // them would lose digits, and tensor cores truncate.
  // Where some row does not see some token (`Mixed`), without infinities and NaN of V: not 0 if
  // there are any.
  template <bool Mixed = false>
  CHUNKATTN_DEVICE std::uint32_t add_values(ptx::SharedAddress v, const Scores& s) {
    constexpr int columns = Warps::warp_columns;
    constexpr int steps = Warps::sum_tokens / 16;
    const int v_start = first_value();
    std::uint32_t special = 0;
    CHUNKATTN_UNROLL
    for (int first = 0; first < Warps::warp_tokens / 16; first += steps) {
      std::uint32_t p[to_size(steps)][to_size(groups)][4];
      CHUNKATTN_UNROLL
      for (int i = 0; i < steps * groups * 4; ++i) {
        const int step = i / (4 * groups);
        const float* const pair = &s[i / 4 % groups][2 * (first + step) + i % 4 / 2][i % 2 * 2];
        p[step][i / 4 % groups][i % 4] = ptx::pack<T>(pair[0], pair[1]);
      }
      CHUNKATTN_UNROLL
      for (int n = 0; n < columns / 16; ++n) {
        float sums[to_size(groups)][2][4] = {};
        CHUNKATTN_UNROLL
        for (int step = 0; step < steps; ++step) {
          ptx::hold_loads(Warps::holds_loads);
          std::uint32_t b[4];
          ptx::ldmatrix_x4_trans(
              b, v + (at_step<v_pieces>(v_start, n) + (first + step) * bytes_of_16_rows<v_pieces>));
          if constexpr (Mixed) special |= Pair<T>::take_specials(b);
          CHUNKATTN_UNROLL
          for (int i = 0; i < groups * 2; ++i)
            ptx::mma<T>(Sums::apart ? sums[i / 2][i % 2] : out_[i / 2][2 * n + i % 2],
                        p[step][i / 2], b[i % 2 * 2], b[i % 2 * 2 + 1]);
        }
        CHUNKATTN_UNROLL
        for (int i = 0; Sums::apart && i < groups * 8; ++i)
          out_[i / 8][2 * n + i / 4 % 2][i % 4] += sums[i / 8][i / 4 % 2][i % 4];
      }
    }
    return special;
  }

  // Where this lane finds its row of the first matrix of V that its warp multiplies by.
  CHUNKATTN_DEVICE int first_value() {
    const Place place;
    return at_step<v_pieces>(
        swizzled<v_pieces>(place.first_token + place.lane % 16, place.lane / 16),
        place.column_warp * (Warps::warp_columns / 16));
  }

  // Makes NaN of the outputs of rows that see an infinity or NaN of their column. Rare: it may be
  // slow, but must not need more registers than the rest.
  CHUNKATTN_DEVICE void add_specials(ptx::SharedAddress v, int position, int end) {
    const int v_start = first_value();
    CHUNKATTN_UNROLL
    for (int i = 0; i < groups * Warps::warp_columns / 16; ++i) {
      const int group = i % groups;
      const int n = i / groups;
      float found[2][4] = {};
      CHUNKATTN_UNROLL_BY(1)
      for (int step = 0; step < Warps::warp_tokens / 16; ++step) {
        const auto tile = variant_tile(group, position + step * 16, end);
        std::uint32_t seen[4];
        CHUNKATTN_UNROLL
        for (int j = 0; j < 4; ++j)
          seen[j] = Pair<T>::of(tile.sees(j % 2, j / 2 * 8), tile.sees(j % 2, j / 2 * 8 + 1));
        std::uint32_t b[4];
        ptx::ldmatrix_x4_trans(
            b, v + (at_step<v_pieces>(v_start, n) + step * bytes_of_16_rows<v_pieces>));
        CHUNKATTN_UNROLL
        for (int j = 0; j < 4; ++j) b[j] = Pair<T>::specials(b[j]) & Pair<T>::ones;
        ptx::mma<T>(found[0], seen, b[0], b[1]);
        ptx::mma<T>(found[1], seen, b[2], b[3]);
      }
      CHUNKATTN_UNROLL
      for (int j = 0; j < 8; ++j)
        if (found[j / 4][j % 4] > 0)
          out_[group][2 * n + j / 4][j % 4] = detail::bit_cast<float>(0x7fc00000u);
    }
  }

  const AttentionArguments<T, V>& args_;
  Feed& feed_;
  const Tables& tables_;
  unsigned char* shared_;
  const TileRange& range_;  // in shared memory: registers are for outputs
  std::uint32_t query_[to_size(groups)][to_size(q_in_registers ? k_steps : 1)][4];
  float out_[to_size(groups)][to_size(Warps::warp_columns / 8)][4] = {};
  float max_[to_size(halves)];  // of q k, not scaled
  float sum_[to_size(halves)] = {};
};

}  // namespace detail::cuda
CHUNKATTN_NAMESPACE_END
