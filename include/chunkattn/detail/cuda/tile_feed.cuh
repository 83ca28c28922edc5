// The feed of a task into shared memory: what its rows are and see, where its K/V rows lie, then
// queries, K and V.
//
// The tables of a task are made while the one before it still waits for its last K/V. Then the ring
// of stages goes on: a stage that this one has used up takes K/V of the next. Queries follow when
// it has no more products to make. So this is not part of the loop over a task
// (tile_attention.cuh), and outlives it.
#pragma once

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
template <int Rows>
struct alignas(16) TileTables {
  RowTable<Rows> rows;
  TileRange range;
  int kv_head;
  int segment;  ///< the deepest of its path
};
static_assert(sizeof(TileTables<usual_tile_rows>) == table_bytes<usual_tile_rows>);

/// Walks the pieces of a path: where is the K/V row of a position? Keeps little: registers are for
/// outputs.
class PieceCursor {
 public:
  CHUNKATTN_DEVICE explicit PieceCursor(const PlanMemory& plan) : plan_(plan) {}

  /// Goes to the begin of a path.
  CHUNKATTN_DEVICE void restart() { segment_end_ = 0; }

  /// The piece that holds `position`, which lies on the path that ends with `deepest` and never
  /// goes back. Steps of up to `stride` are expected.
  CHUNKATTN_DEVICE Piece seek(int position, int deepest, int stride) {
    if (position >= segment_end_ || position >= piece_end_ + stride)
      enter_segment(position, deepest);
    Piece piece = read_piece(index_);
    while (position >= piece.position + piece.length) piece = read_piece(++index_);
    piece_end_ = piece.position + piece.length;
    return piece;
  }

 private:
  // All of it by one load: it begins at a multiple of its 16 bytes.
  CHUNKATTN_DEVICE Piece read_piece(int index) const {
    const auto words = *reinterpret_cast<const Vector<std::int32_t, 4>*>(plan_.pieces + index);
    static_assert(sizeof(words) == sizeof(Piece));
    return {words.v[0], words.v[1], words.v[2], words.v[3]};
  }

  // From the deepest segment up: paths are short, and this happens once per segment.
  CHUNKATTN_DEVICE void enter_segment(int position, int deepest) {
    const Segment* segment = &plan_.segments[deepest];
    while (position < segment->position) segment = &plan_.segments[segment->parent];
    segment_end_ = segment->position + segment->length;
    const int first = segment->piece_begin;
    index_ = find_piece(plan_.pieces, first, first + segment->num_pieces - 1, position);
  }

  const PlanMemory& plan_;
  int segment_end_ = 0;
  int index_ = 0;      // of the piece that was found last
  int piece_end_ = 0;  // where it ends
};

/// Feeds a block with one task after the other.
template <class T, HeadDims Dims, class V>
class TileFeed {
  using Variant = VariantTerms<V>;
  using Layout = SharedLayout<Dims>;
  using Tables = TileTables<most_tile_rows(Dims)>;
  static constexpr int kv_tile = kv_tile_tokens(Dims);
  static constexpr int k_pieces = Dims.k / 8;  // of 16 bytes
  static constexpr int v_pieces = Dims.v / 8;
  using Stored = stored_element<T, V>;
  using Narrow = NarrowStages<T, Dims, Stored>;
  static constexpr bool is_wide = Dims.stored == 2;

 public:
  CHUNKATTN_DEVICE TileFeed(const AttentionArguments<T, V>& args, unsigned char* shared)
      : args_(args),
        shared_(shared),
        cursor_(args.plan),
        first_stage_(goes_on ? 0 : Layout::accumulator_stages % args.num_stages) {}

  /// Goes to the next task: fills its RowTable, while other tables are in use. Returns the end of
  /// its range, whatever rows see.
  CHUNKATTN_DEVICE int make_row_table(Tables& tables, const Task& task, int kv_head) {
    const int end = end_of_range(task);
    if (ptx::thread_index() == 0) {
      tables.kv_head = kv_head;
      tables.segment = task.segment;
    }
    auto& table = tables.rows;
    const int num_qo_heads = args_.num_kv_heads * args_.group;
    // `opaque` here and below: no address of a thread's own is kept from task to task.
    for (int i = ptx::opaque(ptx::thread_index()); i < task.tile_rows; i += block_threads) {
      const bool valid = i < task.row_count;
      const int packed = task.row_begin + (valid ? i : 0);
      const int row = packed / args_.group;
      const int head = kv_head * args_.group + packed % args_.group;
      table.len[i] = valid ? args_.plan.row_kv_len[row] : open_end;
      table.index[i] = valid ? args_.plan.row_token[row] * num_qo_heads + head : -1;
    }
    return end;
  }
  /// Behind a barrier: its range, and where the rows of its first `num_stages` tiles lie. Nothing
  /// of the task before may be loaded any more.
  CHUNKATTN_DEVICE void make_token_tables(Tables& tables, const Task& task, int end) {
    const TileRange range = find_range(tables.rows.len, task, end);
    if (ptx::thread_index() == 0) tables.range = range;
    if constexpr (goes_on) first_stage_ = (first_stage_ + num_tiles_) % args_.num_stages;
    num_tiles_ = range.num_tiles;
    cursor_.restart();
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
  CHUNKATTN_DEVICE void load_queries(const Tables& tables, const Task& task) {
    if (num_tiles_ == 0) return;
    const ptx::SharedAddress q = ptx::shared_address(shared_ + Layout::queries(args_.num_stages));
    CHUNKATTN_UNROLL_BY(1)
    for (int i = ptx::opaque(ptx::thread_index()); i < task.tile_rows * k_pieces;
         i += block_threads) {
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
  CHUNKATTN_DEVICE void make_token_table(const Tables& tables, int tile_begin, int stage, int end) {
    const int token = ptx::thread_index();
    if (token >= kv_tile) return;
    const int position = tile_begin + token;
    TokenRows<Stored> rows{reinterpret_cast<const Stored*>(args_.q), nullptr};  // is not read
    if (position < end) {
      const Piece piece = cursor_.seek(position, tables.segment, kv_tile);
      const int offset = piece.begin + position - piece.position;
      const auto& kv = kv_of(args_);
      rows.k = kv.k_row(piece.chunk, tables.kv_head, offset);
      rows.v = Dims.k == Dims.v ? kv.v_row_as_k(piece.chunk, tables.kv_head, offset)
                                : kv.v_row(piece.chunk, tables.kv_head, offset);
      if constexpr (!is_wide)
        Narrow::note_scales(shared_, args_.num_stages, stage, token,
                            ptx::load_global(kv.k_row_scale(piece.chunk, tables.kv_head, offset)),
                            ptx::load_global(kv.v_row_scale(piece.chunk, tables.kv_head, offset)));
    } else if constexpr (!is_wide) {
      Narrow::note_scales(shared_, args_.num_stages, stage, token, 0.0f, 0.0f);
    }
    token_table(stage)[token] = rows;
  }

  CHUNKATTN_DEVICE void load_tile(int stage) {
    const TokenRows<Stored>* table = token_table(stage);
    const ptx::SharedAddress k =
        ptx::shared_address(shared_ + Layout::stages) + stage * stage_bytes(Dims);
    const ptx::SharedAddress v = k + stage_bytes_of_k(Dims);
    if constexpr (!is_wide) return Narrow::load(shared_, args_.num_stages, stage, table, k, v);
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

 private:
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

  CHUNKATTN_DEVICE TileRange find_range(const int* row_len, const Task& task, int end) const {
    int most = 0;
    int least = open_end;
    for (int i = ptx::thread_index() % 32; i < task.row_count; i += 32) {
      most = row_len[i] > most ? row_len[i] : most;
      least = row_len[i] < least ? row_len[i] : least;
    }
    most = most_of_warp(most);
    least = least_of_warp(least);
    TileRange range{task.position_begin, most < end ? most : end, least, 0, {}};
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
  int first_stage_;
  int num_tiles_ = 0;
};

}  // namespace detail::cuda
CHUNKATTN_NAMESPACE_END
