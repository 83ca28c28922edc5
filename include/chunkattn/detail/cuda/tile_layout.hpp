// The layout of tiles in shared memory, and how the warps of a block divide one: plain arithmetic,
// shared by the kernels, the host's scheduler and the tests.
#pragma once

#include <cstdint>
#include <tuple>

#include "../support/array.hpp"
#include "../support/config.hpp"

CHUNKATTN_NAMESPACE_BEGIN
namespace detail::cuda {

inline constexpr int block_threads = 128;
inline constexpr int block_warps = block_threads / 32;
inline constexpr int max_tile_rows = 128;
inline constexpr int usual_tile_rows = 64;  ///< at most, of all tiles but large ones
inline constexpr int min_stages = 2;

/// As many elements as one access moves.
template <class E, int Count>
struct alignas(Count * sizeof(E)) Vector {
  E v[to_size(Count)];
};
using Words2 = Vector<std::uint32_t, 2>;
using Words4 = Vector<std::uint32_t, 4>;
using Float2 = Vector<float, 2>;
using Float4 = Vector<float, 4>;

/// Elements per row of K and Q, and of V and the output.
struct HeadDims {
  int k;
  int v;
  int stored;  ///< bytes of an element of K and V in memory; 1: with scales (quantized.cuh)
  CHUNKATTN_HD constexpr HeadDims(int k_dim, int v_dim, int stored_bytes = 2) noexcept
      : k(k_dim), v(v_dim), stored(stored_bytes) {}
  /// As many of each.
  CHUNKATTN_HD constexpr HeadDims(int dim) noexcept
      : HeadDims(dim, dim) {}  // NOLINT: 128 says it all
};

/// Heads of the layers that a schedule serves.
struct Geometry {
  std::int32_t num_qo_heads = 0;  ///< query heads
  std::int32_t num_kv_heads = 0;  ///< heads of K and of V
  std::int32_t head_dim = 0;      ///< elements per head of K
  std::int32_t value_dim = 0;     ///< elements per head of V; 0: head_dim
  std::int32_t stored_bytes = 2;  ///< of an element of K and V
  /// Query heads that read the same K and V.
  [[nodiscard]] constexpr std::int32_t group() const noexcept {
    return num_qo_heads / num_kv_heads;
  }
  /// Elements of K and of V.
  [[nodiscard]] constexpr HeadDims dims() const noexcept {
    return {head_dim, value_dim != 0 ? value_dim : head_dim, stored_bytes};
  }
};

/// What the kernels are built for. 16 serves tiny models (zero-padded) and tests. Beyond 128 two
/// warps share V's columns, so that these must be a power of two.
constexpr bool supported_head_dims(HeadDims dims) noexcept {
  if (dims.stored == 1 && (dims.k > 128 || dims.v > dims.k)) return false;
  if (dims.k == dims.v && (dims.k == 80 || dims.k == 112)) return true;
  const auto small = [](int dim) { return dim == 16 || dim == 64 || dim == 96 || dim == 128; };
  if (small(dims.k)) return small(dims.v);
  return (dims.k == 192 || dims.k == 256) && dims.v <= dims.k &&
         (dims.v == 64 || dims.v == 128 || dims.v == 256);
}

/// Tokens of K and V that one pipeline stage holds.
CHUNKATTN_HD constexpr int kv_tile_tokens(HeadDims dims) noexcept {
  return dims.k <= 128 ? 64 : 32;
}

/// The deepest ring. At 256 elements each, three stages have 64 KB under way, with one block.
constexpr int max_stages(HeadDims dims) noexcept {
  return dims.k + dims.v < 512 ? 4 : 3;
}

/// Blocks of the attention kernel that a multiprocessor is to hold.
constexpr int wanted_blocks(HeadDims dims) noexcept {
  return dims.v <= 128 ? 2 : 1;
}

/// Whether the kernel without a variant has tiles of 128 rows: four warps of 32 rows, each with all
/// tokens and columns. Where V is longer than K, and on sm_100a where both have 112 elements, its
/// registers do not suffice for that; beyond 128 a stage has too few tokens.
CHUNKATTN_HD constexpr bool has_large_tiles(HeadDims dims) noexcept {
  return dims.stored == 2 && dims.k <= 128 && dims.v <= dims.k && dims.k != 112;
}
CHUNKATTN_HD constexpr int most_tile_rows(HeadDims dims) noexcept {
  return has_large_tiles(dims) ? max_tile_rows : usual_tile_rows;
}

/// Additions that a running output takes before it goes to its total (RunningTotal): of 96, equal
/// values come out within 1.8e-6 of themselves.
inline constexpr int window_sums = 96;

/// Floats of a thread's part of it (RunningTotal): three for each of its outputs and sums, and two
/// for each row, of which it has parts of two in 16, and of tall tiles' (WarpLayout) of four in 32.
CHUNKATTN_HD constexpr int total_values(HeadDims dims) noexcept {
  const int rows = kv_tile_tokens(dims) == 64 && dims.v <= dims.k ? 4 : 2;
  return rows * (3 * (dims.v / 4 + 1) + 2);
}
/// Bytes of the totals of a block.
constexpr std::size_t total_bytes(HeadDims dims) noexcept {
  return sizeof(float) * block_threads * static_cast<std::size_t>(total_values(dims));
}

/// Blocks that a multiprocessor holds at most, for each of which there is a total: at least as many
/// as registers suffice for.
constexpr int most_blocks(HeadDims dims) noexcept {
  return 256 / dims.v;
}

/// The height of a tile that holds `rows` packed rows.
constexpr int tile_rows_for(int rows) noexcept {
  return rows > 64 ? 128 : rows > 32 ? 64 : rows > 16 ? 32 : 16;
}

/// Tiles of at most `most` packed rows that `rows` of them take.
constexpr int num_tiles(int rows, int most = usual_tile_rows) noexcept {
  return (rows + most - 1) / most;
}

/// Packed rows of a task that streams nothing and merges only: those whose columns the threads of a
/// block hold at once, four each.
constexpr int merge_rows(int value_dim) noexcept {
  const int rows = block_threads * 4 / value_dim;
  return rows < 1 ? 1 : rows > 16 ? 16 : rows;
}

/// Partial results of a row that a thread reads at a time.
inline constexpr int merges_at_once = 4;

/// log2 of the groups of threads that share the partial results of a task's rows: where the rows'
/// columns, four per thread, leave half of a block idle, and each group still has a read's worth of
/// them. Each group leaves a result for each row among the accumulators of rows that no query
/// stands in; of 16 to a warp eight suffice.
CHUNKATTN_HD constexpr int merge_group_bits(int rows, int value_dim, int merges) noexcept {
  int bits = 0;
  if (rows > 8) return bits;
  while ((rows * value_dim << (bits + 1)) <= block_threads * 4 && merges_at_once << bits < merges)
    ++bits;
  return bits;
}

/// Partial results that a thread adds one after the other for a task. Groups of threads share them;
/// putting the groups together (a barrier, then their results out of shared memory) is as long as
/// one more.
constexpr int merges_in_a_row(int rows, int value_dim, int merges) noexcept {
  const int bits = merge_group_bits(rows, value_dim, merges);
  if (bits > 0) return ((merges - 1) >> bits) + 2;
  const int rounds = (rows * value_dim + block_threads * 4 - 1) / (block_threads * 4);
  return rounds * merges;
}

/// Bytes of the queries of a tile, 16-bit elements.
constexpr int query_bytes(HeadDims dims, int tile_rows) noexcept {
  return tile_rows * dims.k * 2;
}
/// Bytes of K in one stage; V follows.
CHUNKATTN_HD constexpr int stage_bytes_of_k(HeadDims dims) noexcept {
  return kv_tile_tokens(dims) * dims.k * dims.stored;
}
/// Bytes of one stage: K and V of a tile.
CHUNKATTN_HD constexpr int stage_bytes(HeadDims dims) noexcept {
  return kv_tile_tokens(dims) * (dims.k + dims.v) * dims.stored;
}

/// Bytes of the tile of 16-bit elements that is made of a stage of 8-bit ones.
CHUNKATTN_HD constexpr int wide_tile_bytes(HeadDims dims) noexcept {
  return dims.stored == 1 ? kv_tile_tokens(dims) * (dims.k + dims.v) * 2 : 0;
}

/// Bytes of the addresses of these rows: a pair of pointers for each token, and, for 8-bit ones,
/// scales in the table and in the stage.
CHUNKATTN_HD constexpr int token_table_bytes(HeadDims dims) noexcept {
  return kv_tile_tokens(dims) * (dims.stored == 1 ? 32 : 16);
}

/// Which 16-byte piece of row `row` holds logical piece `piece`, so that the 8 rows that one
/// ldmatrix phase reads stand in 8 different groups of 4 banks. A row has dim/8 pieces.
CHUNKATTN_HD constexpr int swizzle(int dim, int row, int piece) noexcept {
  const int pieces = dim / 8;
  if (pieces % 8 == 0) return piece ^ (row & 7);         // a row starts in bank 0
  if (pieces % 4 == 0) return piece ^ ((row >> 1) & 3);  // rows start in banks 0 and 16 in turn
  return piece ^ ((row >> 2) & 1);  // 2, 10 or 14 pieces: every fourth row starts in the same bank
}

/// Rows after which the swizzle repeats, whatever their length.
inline constexpr int swizzle_period = 8;

/// Where a piece of a row of `Pieces` lies in a stage or among the queries, in bytes.
template <int Pieces>
CHUNKATTN_HD constexpr int swizzled(int row, int piece) noexcept {
  return (row * Pieces + swizzle(Pieces * 8, row, piece)) * 16;
}

/// Where piece p + 2 * step of a row lies, from where piece p = 0 or 1 does: the swizzle is an
/// exclusive or over the pieces of 64 or 128 bytes.
template <int Pieces>
CHUNKATTN_HD constexpr int at_step(int start, int step) noexcept {
  if (Pieces % 4 == 2) return start + step * 32;  // over two pieces
  constexpr bool one_period = Pieces >= 8 && (Pieces & (Pieces - 1)) == 0;
  constexpr int steps = one_period ? Pieces / 2 : Pieces % 8 == 0 ? 4 : 2;
  return (start ^ (step % steps * 32)) + step / steps * (steps * 32);
}

/// 16 rows on, from any piece: the swizzle repeats after 8.
template <int Pieces>
inline constexpr int bytes_of_16_rows = 16 * Pieces * 16;

/// Which column of a row of `columns` floats holds column `column` of an accumulator: groups of
/// eight change places with the row, so that the four rows that half a warp stores at a time, eight
/// columns each, stand in different banks. Groups of four columns stay together.
CHUNKATTN_HD constexpr int accumulator_column(int columns, int row, int column) noexcept {
  const int group = columns % 32 == 0 ? row % 4 : row / 2 % 2;  // of 16: rows start in two banks
  return column ^ (group * 8);
}

/// How the four warps share a tile of `TileRows` query rows: along rows first, then along the
/// tokens of the tile, with tiles of 32 also along the columns of V (so that an accumulator of 16
/// rows by 256 columns fits the registers).
///
/// Tall: a warp has 32 rows of tiles of 64. Each fragment of K and V that it reads serves twice
/// then, and shared memory is what such tiles wait for; but the registers hold outputs and little
/// else, so that none are left where V is longer than K. So it has of tiles of 128, all tokens of
/// which it sees.
template <HeadDims Dims, int TileRows, bool Tall>
struct WarpLayout {
  static constexpr int kv_tile = kv_tile_tokens(Dims);
  static constexpr int warp_rows =
      Tall && kv_tile == 64 && TileRows >= 64 && Dims.v <= Dims.k ? 32 : 16;
  static constexpr int row_warps = TileRows / warp_rows;
  static constexpr int column_warps = kv_tile == 32 && TileRows < 64 ? 2 : 1;
  static constexpr int kv_warps = block_warps / (row_warps * column_warps);
  static constexpr int warp_tokens = kv_tile / kv_warps;
  static constexpr int warp_columns = Dims.v / column_warps;
  /// Tokens of which a warp adds up the values apart from its outputs. ptxas spills for more, but
  /// where a tile of 8 bits is widened for fewer.
  static constexpr int sum_tokens = Dims.stored == 2 && warp_tokens > 32 ? 32 : warp_tokens;
  /// KV tiles after which outputs go to their totals.
  static constexpr int window_tiles = window_sums / (warp_tokens / sum_tokens);
  /// For so many tokens ptxas loads too much ahead: see ptx::hold_loads().
  static constexpr bool holds_loads = warp_tokens == 64 && TileRows != max_tile_rows;
  /// A warp's results are those of its rows: they need no accumulators.
  static constexpr bool whole_rows = TileRows == max_tile_rows;
  /// Accumulators of 16 rows that the block leaves for each row: of each warp, or, where these have
  /// 32, of the first, which has added the other's.
  static constexpr int parts = warp_rows == 32 ? 1 : kv_warps;
  static_assert(TileRows == 16 || TileRows == 32 || TileRows == 64 || TileRows == 128,
                "tiles are 16, 32, 64 or 128 rows");
  static_assert(row_warps * column_warps * kv_warps == block_warps);
  static_assert(whole_rows ? kv_warps * column_warps == 1
                           : parts * TileRows / 16 * column_warps <= block_warps);
  static_assert(warp_tokens % 16 == 0 && warp_columns % 16 == 0);
};

/// What the rows of a tile are. Rows past a task's row_count see everything, so that they never
/// force the masked path; their queries are zeros and their results are dropped.
template <int Rows>
struct RowTable {
  std::int32_t len[to_size(Rows)];    ///< a row sees the positions below
  std::int32_t index[to_size(Rows)];  ///< line of q and out; -1: no row
};

/// Bytes of TileTables (tile_feed.cuh) and LaunchState (run_tasks.cuh).
template <int Rows>
inline constexpr int table_bytes = int{sizeof(RowTable<Rows>)} + 8 * 4;
inline constexpr int launch_bytes = 3 * 4;

/// Offsets into the dynamic shared memory of the attention kernels, in bytes: what lies there
/// whatever the head dimensions, for tiles of at most so many rows. What a task is made of stands
/// twice or three times: the next one's is made while one runs.
template <int Rows>
struct SharedTables {
  static constexpr int tables = 0;  // this task's TileTables, the next's
  static constexpr int stats = tables + 2 * table_bytes<Rows>;  // [64] {max, sum}
  static constexpr int tasks = stats + usual_tile_rows * 8;     // this Task and the next two
  static constexpr int pairs = tasks + 3 * 48;                  // ints, likewise
  static constexpr int launch = pairs + 3 * 4;                  // LaunchState
  static constexpr int end = (launch + launch_bytes + 127) / 128 * 128;
};

/// The stages follow, for each of these a table of its tokens, and last, since how many rows a tile
/// may have is up to the device, the queries of a tile, [rows][k].
///
/// After the loop the first stages are used for the warps' accumulators: 4 warps x 16 rows x
/// warp_columns floats. The first K/V of the next task goes into the others. (Of 8-bit K/V the tile
/// of 16-bit elements is used for that.)
template <HeadDims Dims>
struct SharedLayout : SharedTables<most_tile_rows(Dims)> {
  static constexpr int wide_tile = SharedLayout::end;  // of 8-bit stages
  static constexpr int stages = wide_tile + wide_tile_bytes(Dims);
  CHUNKATTN_HD static constexpr int token_tables(int num_stages) noexcept {
    return stages + num_stages * stage_bytes(Dims);
  }
  CHUNKATTN_HD static constexpr int queries(int num_stages) noexcept {
    return token_tables(num_stages) + num_stages * token_table_bytes(Dims);
  }
  static constexpr int accumulator_bytes = block_warps * 16 * Dims.v * 4;
  static constexpr int accumulator_stages =
      Dims.stored == 1 ? 1 : (accumulator_bytes + stage_bytes(Dims) - 1) / stage_bytes(Dims);
  static_assert(Dims.stored == 2 || accumulator_bytes <= wide_tile_bytes(Dims));
  static_assert(accumulator_stages <= min_stages);
};

/// Dynamic shared memory of a block whose tiles have at most `tile_rows`, in bytes.
constexpr int shared_bytes(HeadDims dims, int num_stages, int tile_rows) noexcept {
  const int tables =
      has_large_tiles(dims) ? SharedTables<max_tile_rows>::end : SharedTables<usual_tile_rows>::end;
  return tables + wide_tile_bytes(dims) +
         num_stages * (stage_bytes(dims) + token_table_bytes(dims)) + query_bytes(dims, tile_rows);
}

/// Stages and blocks per multiprocessor for a device's shared memory.
struct Occupancy {
  int num_stages = 0;  ///< 0: the kernel does not fit this device
  int blocks_per_sm = 0;
  int bytes_in_flight = 0;  ///< per multiprocessor: (stages - 1) tiles of every block
  int tile_rows = 0;        ///< most rows of a tile whose queries have room
};

/// Bytes that must be under way per multiprocessor. Little's law asks for 4.3 TB/s / 132 x ~0.9 us
/// = 29 KB on an H200; 48 KB leaves room for blocks that are between tasks.
inline constexpr int enough_in_flight = 48 * 1024;

/// Chooses stages beside the queries of tiles of `tile_rows`: first enough bytes in flight, then
/// blocks (their loads run on during each other's softmax), then more bytes in flight. The runtime
/// keeps 1 KB of every block for itself.
///
/// head_dim 128 on 228 KB: 2 stages of 32 KB and 2 blocks, 64 KB in flight.
constexpr Occupancy choose_stages(HeadDims dims, int tile_rows, int shared_per_block,
                                  int shared_per_sm, int max_blocks) noexcept {
  Occupancy best;
  std::tuple<bool, int, int> best_rank;
  for (int stages = min_stages; stages <= max_stages(dims); ++stages) {
    const int bytes = shared_bytes(dims, stages, tile_rows);
    if (bytes > shared_per_block) break;
    int blocks = shared_per_sm / (bytes + 1024);
    if (blocks > max_blocks) blocks = max_blocks;
    if (blocks < 1) continue;
    const int in_flight = blocks * (stages - 1) * stage_bytes(dims);
    const bool enough = in_flight >= enough_in_flight;
    const std::tuple rank(enough, enough ? blocks : 0, in_flight);
    if (rank <= best_rank) continue;
    best_rank = rank;
    best = {stages, blocks, in_flight, tile_rows};
  }
  return best;
}

/// Chooses stages for a device and for plans of at most `rows` packed rows, which leave room for
/// more stages where they are few: for 32, head_dim 128 and 228 KB a third one. And whether there
/// are large tiles: where their queries cost no block, and of bytes in flight none that are needed.
/// (On sm_80 and at head_dim 128 they take the fourth stage.)
constexpr Occupancy choose_occupancy(HeadDims dims, int rows, int shared_per_block,
                                     int shared_per_sm, int max_blocks = 4) noexcept {
  const auto with = [&](int tile_rows) {
    return choose_stages(dims, tile_rows, shared_per_block, shared_per_sm, max_blocks);
  };
  if (rows <= usual_tile_rows) return with(tile_rows_for(rows));
  const Occupancy usual = with(usual_tile_rows);
  if (!has_large_tiles(dims)) return usual;
  const Occupancy large = with(max_tile_rows);
  const bool costs =
      large.blocks_per_sm < usual.blocks_per_sm ||
      (large.bytes_in_flight < usual.bytes_in_flight && large.bytes_in_flight < enough_in_flight);
  return costs ? usual : large;
}

}  // namespace detail::cuda
CHUNKATTN_NAMESPACE_END
