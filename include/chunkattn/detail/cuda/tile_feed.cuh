// What a task is made of, on its way into shared memory: what its rows are and see, where its K/V
// rows lie, then queries, K and V.
//
// The tables of a task are made while the one before it still waits for its last K/V. Then the ring
// of stages goes on: a stage that this one has used up takes K/V of the next. Queries follow when
// it has no more products to make. So this is not part of the loop over a task
// (tile_attention.cuh), and outlives it.
#pragma once

#include "piece_cursor.cuh"
#include "quantized.cuh"
#include "variant_tile.cuh"

CHUNKATTN_NAMESPACE_BEGIN
namespace detail::cuda {

/// The part of a task's range that its rows see, in KV tiles.
struct TileRange {
  int begin;           ///< first position
  int end;             ///< no row of the tile sees this position or a later one
  int min_len;         ///< all rows see the positions below this one
  int num_tiles;       ///< to stream
  HiddenTiles hidden;  ///< left out among them
};

/// What a task keeps in shared memory from one task before it on.
struct alignas(16) TileTables {
  RowTable rows;
  TileRange range;
  int kv_head;
};
static_assert(sizeof(TileTables) == table_bytes);

/// Feeds a block with one task after the other.
template <class T, HeadDims Dims, class V>
class TileFeed {
  using Variant = VariantTerms<V>;
  using Layout = SharedLayout<Dims>;
  static constexpr int kv_tile = kv_tile_tokens(Dims);
  static constexpr int k_pieces = Dims.k / 8;  // of 16 bytes
  static constexpr int v_pieces = Dims.v / 8;
  using Stored = stored_element<T, V>;
  static constexpr bool is_wide = Dims.stored == 2;

 public:
  CHUNKATTN_DEVICE TileFeed(const AttentionArguments<T, V>& args, unsigned char* shared)
      : args_(args),
        shared_(shared),
        cursor_(args.plan),
        first_stage_(goes_on ? 0 : Layout::accumulator_stages % args.num_stages) {}

  /// Goes to the next task: fills its RowTable, while other tables are in use.
  CHUNKATTN_DEVICE void make_row_table(TileTables& tables, const Task& task, int kv_head) {
    end_ = end_of_range(task);
    if (ptx::thread_index() == 0) tables.kv_head = kv_head;
    RowTable& table = tables.rows;
    const int num_qo_heads = args_.num_kv_heads * args_.group;
    for (int i = ptx::thread_index(); i < task.tile_rows; i += block_threads) {
      const bool valid = i < task.row_count;
      const int packed = task.row_begin + (valid ? i : 0);
      const int row = packed / args_.group;
      const int head = kv_head * args_.group + packed % args_.group;
      table.len[i] = valid ? args_.plan.row_kv_len[row] : open_end;
      table.index[i] = valid ? args_.plan.row_token[row] * num_qo_heads + head : -1;
    }
  }
  /// Behind a barrier: its range, and where the rows of its first `num_stages` tiles lie. Nothing
  /// of the task before may be loaded any more.
  CHUNKATTN_DEVICE void make_token_tables(TileTables& tables, const Task& task) {
    const TileRange range = find_range(tables.rows, task);
    if (ptx::thread_index() == 0) tables.range = range;
    if constexpr (goes_on) first_stage_ = (first_stage_ + num_tiles_) % args_.num_stages;
    num_tiles_ = range.num_tiles;
    cursor_.restart(task.segment);
    if (num_tiles_ == 0) return;
    CHUNKATTN_UNROLL_BY(1)
    for (int tile = 0; tile < args_.num_stages; ++tile)
      make_token_table(tables, range.begin + tile * kv_tile + hidden_before(range, tile),
                       stage_of(tile), range.end);
  }
  /// There is no next task.
  CHUNKATTN_DEVICE void end() { num_tiles_ = 0; }

  /// Behind another one: begins to copy tiles [first, last) of the task, as far as there are such,
  /// in a group each.
  CHUNKATTN_DEVICE void load_tiles(int first, int last) {
    CHUNKATTN_UNROLL_BY(1)
    for (int tile = first; tile < last; ++tile) {
      if (tile < num_tiles_) load_tile(stage_of(tile));
      ptx::cp_async_commit();
    }
  }
  /// Behind a barrier: begins to copy the task's queries, which join the next group.
  CHUNKATTN_DEVICE void load_queries(const TileTables& tables, const Task& task) {
    if (num_tiles_ == 0) return;
    const ptx::SharedAddress q = ptx::shared_address(shared_ + Layout::q);
    CHUNKATTN_UNROLL_BY(1)
    for (int i = ptx::thread_index(); i < task.tile_rows * k_pieces; i += block_threads) {
      const int row = i / k_pieces;
      const int piece = i % k_pieces;
      const int line = tables.rows.index[row];
      const T* source = args_.q + (line < 0 ? 0 : static_cast<std::int64_t>(line) * Dims.k);
      ptx::cp_async_16(q + swizzled<k_pieces>(row, piece), source + piece * 8, line >= 0);
    }
  }

  /// Whether the ring goes on from task to task: where one stage holds a task's accumulators, that
  /// of its last tile does. Elsewhere they take the first stages, and each task begins behind them.
  static constexpr bool goes_on = Layout::accumulator_stages == 1;
  /// Where a task leaves its accumulators, once it has no more products to make.
  CHUNKATTN_DEVICE float* accumulators() const {
    if (!is_wide) return reinterpret_cast<float*>(shared_ + Layout::wide_tile);
    const int stage = !goes_on ? 0 : (first_stage_ > 0 ? first_stage_ : args_.num_stages) - 1;
    return reinterpret_cast<float*>(shared_ + Layout::stages + stage * stage_bytes(Dims));
  }
  /// Where the ring does not go on: tiles that have a stage beside the accumulators of the task
  /// before.
  CHUNKATTN_DEVICE int tiles_beside() const {
    return goes_on ? 0 : args_.num_stages - Layout::accumulator_stages;
  }
  /// Tiles of the task whose tables were made last.
  CHUNKATTN_DEVICE int num_tiles() const { return num_tiles_; }
  /// Where its first tile lies; the others follow.
  CHUNKATTN_DEVICE int first_stage() const { return first_stage_; }

  /// Positions that are left out before tile number `tile`.
  CHUNKATTN_DEVICE static int hidden_before(const TileRange& range, int tile) {
    if constexpr (Variant::skips_keys) return range.hidden.before(tile);
    return 0;
  }

  /// Where the rows of a tile lie: one token per thread, the ring of tables one round ahead of the
  /// copies that use it. Positions only grow.
  CHUNKATTN_DEVICE void make_token_table(const TileTables& tables, int tile_begin, int stage,
                                         int end) {
    const int token = ptx::thread_index();
    if (token >= kv_tile) return;
    const int position = tile_begin + token;
    TokenRows<Stored> rows{reinterpret_cast<const Stored*>(args_.q), nullptr};  // is not read
    RowScales scales{0.0f, 0.0f};
    if (position < end) {
      const Piece& piece = cursor_.seek(position);
      const int offset = piece.begin + position - piece.position;
      const auto& kv = kv_of(args_);
      rows.k = kv.k_row(piece.chunk, tables.kv_head, offset);
      rows.v = Dims.k == Dims.v ? kv.v_row_as_k(piece.chunk, tables.kv_head, offset)
                                : kv.v_row(piece.chunk, tables.kv_head, offset);
      if constexpr (!is_wide)
        scales = {*kv.k_row_scale(piece.chunk, tables.kv_head, offset),
                  *kv.v_row_scale(piece.chunk, tables.kv_head, offset)};
    }
    token_table(stage)[token] = rows;
    if constexpr (!is_wide) table_scales(stage)[token] = scales;
  }

  CHUNKATTN_DEVICE void load_tile(int stage) {
    const TokenRows<Stored>* table = token_table(stage);
    const ptx::SharedAddress k =
        ptx::shared_address(shared_ + Layout::stages) + stage * stage_bytes(Dims);
    const ptx::SharedAddress v = k + stage_bytes_of_k(Dims);
    if constexpr (!is_wide) return load_stored_tile(stage, table, k, v);
    constexpr int most_pieces = k_pieces > v_pieces ? k_pieces : v_pieces;
    constexpr int tokens_at_once = block_threads / most_pieces;
    if constexpr (block_threads % most_pieces == 0 && tokens_at_once % swizzle_period == 0) {
      // A thread copies one piece of every so many rows: in shared memory they are as far apart.
      const int token = ptx::thread_index() / most_pieces;
      const int piece = ptx::thread_index() % most_pieces;
      const ptx::SharedAddress first_k = k + swizzled<k_pieces>(token, piece);
      const ptx::SharedAddress first_v = v + swizzled<v_pieces>(token, piece);
      table += token;
      CHUNKATTN_UNROLL_BY(4)
      for (int i = 0; i < kv_tile; i += tokens_at_once)
        copy_piece(first_k + i * (k_pieces * 16), first_v + i * (v_pieces * 16), table[i], piece);
    } else {
      CHUNKATTN_UNROLL_BY(2)
      for (int i = ptx::thread_index(); i < kv_tile * most_pieces; i += block_threads) {
        const int token = i / most_pieces;
        const int piece = i % most_pieces;
        copy_piece(k + swizzled<k_pieces>(token, piece), v + swizzled<v_pieces>(token, piece),
                   table[token], piece);
      }
    }
  }

  /// Behind a barrier, when a stage's 8-bit tile has landed: makes the tile of 16 bits of it. Its
  /// readers wait for another barrier.
  CHUNKATTN_DEVICE void widen_stage(int stage) {
    const unsigned char* from = shared_ + Layout::stages + stage * stage_bytes(Dims);
    unsigned char* to = shared_ + Layout::wide_tile;
    widen_tile<T, Dims.k, Stored>(from, nullptr, to, kv_tile);
    widen_tile<T, Dims.v, Stored>(from + stage_bytes_of_k(Dims), &stage_scales(stage)->v,
                                  to + kv_tile * Dims.k * 2, kv_tile);
  }
  /// Scales of the tokens of a stage.
  CHUNKATTN_DEVICE RowScales* stage_scales(int stage) const {
    return table_scales(stage) + kv_tile;
  }

 private:
  // Scales that wait beside the token table for their stage, then those of the stage.
  CHUNKATTN_DEVICE RowScales* table_scales(int stage) const {
    return reinterpret_cast<RowScales*>(token_table(args_.num_stages)) + 2 * stage * kv_tile;
  }
  CHUNKATTN_DEVICE void load_stored_tile(int stage, const TokenRows<Stored>* table,
                                         ptx::SharedAddress k, ptx::SharedAddress v) {
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
    if (ptx::thread_index() < kv_tile)
      stage_scales(stage)[ptx::thread_index()] = table_scales(stage)[ptx::thread_index()];
  }

  // One piece of a token's rows, as far as they have so many.
  CHUNKATTN_DEVICE static void copy_piece(ptx::SharedAddress k, ptx::SharedAddress v,
                                          const TokenRows<Stored>& rows, int piece) {
    const bool valid = rows.v != nullptr;
    if (k_pieces >= v_pieces || piece < k_pieces) ptx::cp_async_16(k, rows.k + piece * 8, valid);
    if (v_pieces >= k_pieces || piece < v_pieces)
      ptx::cp_async_16(v, valid ? rows.v + piece * 8 : rows.k, valid);
  }

  CHUNKATTN_DEVICE int end_of_range(const Task& task) const {
    if (task.segment < 0) return task.position_begin;
    const Segment& last = args_.plan.segments[task.segment];
    const int end = last.position + last.length;
    return task.position_end < end ? task.position_end : end;
  }

  CHUNKATTN_DEVICE TileRange find_range(const RowTable& rows, const Task& task) const {
    const int* row_len = rows.len;
    int most = 0;
    int least = open_end;
    for (int i = ptx::thread_index() % 32; i < task.row_count; i += 32) {
      most = row_len[i] > most ? row_len[i] : most;
      least = row_len[i] < least ? row_len[i] : least;
    }
    for (int mask = 16; mask > 0; mask /= 2) {
      const int other_most = ptx::shuffle_xor(most, mask);
      const int other_least = ptx::shuffle_xor(least, mask);
      most = other_most > most ? other_most : most;
      least = other_least < least ? other_least : least;
    }
    TileRange range{task.position_begin, most < end_ ? most : end_, least, 0, {}};
    if (range.end <= range.begin) return range;
    range.num_tiles = (range.end - range.begin + kv_tile - 1) / kv_tile;
    if constexpr (Variant::skips_keys)
      range.num_tiles -= range.hidden.find(args_.variant.skipping, row_len, task.row_count,
                                           range.begin, range.end, kv_tile);
    return range;
  }

  CHUNKATTN_DEVICE int stage_of(int tile) const {
    const int stage = first_stage_ + tile;
    return stage < args_.num_stages ? stage : stage - args_.num_stages;
  }

  CHUNKATTN_DEVICE TokenRows<Stored>* token_table(int stage) const {
    return reinterpret_cast<TokenRows<Stored>*>(shared_ + Layout::token_tables(args_.num_stages)) +
           stage * kv_tile;
  }

  const AttentionArguments<T, V>& args_;
  unsigned char* shared_;
  PieceCursor cursor_;
  int end_ = 0;  // of the task's range, whatever rows see
  int first_stage_;
  int num_tiles_ = 0;
};

}  // namespace detail::cuda
CHUNKATTN_NAMESPACE_END
