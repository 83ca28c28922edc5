// The end of a task: the warps' results of each row become one, partial results of other tasks join
// them, and the row is written, normalised. Always in the same order, so always the same bits.
#pragma once

#include "../../kv_view.hpp"
#include "../attention/state.hpp"
#include "device_plan.hpp"
#include "exact_sum.cuh"
#include "ptx.cuh"
#include "tile_layout.hpp"
#include "variant_terms.cuh"

CHUNKATTN_NAMESPACE_BEGIN
namespace detail::cuda {

/// The maximum of a row that has seen nothing, of q k and scaled in base 2. Finite, so that
/// differences are ordinary numbers.
inline constexpr float empty_max = -1.0e30f;
inline constexpr float empty_max2 = -1.0e30f;
inline constexpr float lowest_max2 = -3.0e38f;

/// What the attention kernel is given, whatever the variant. T: half or bfloat16.
template <class T>
struct CallArguments {
  PlanMemory plan;
  KvView<T> kv;
  const T* q;  ///< [num_rows][num_qo_heads][head_dim], the caller's order
  T* out;      ///< [num_rows][num_qo_heads][value_dim]
  float* lse;  ///< [num_rows][num_qo_heads], natural log; may be null
  std::int32_t num_kv_heads;
  std::int32_t group;       ///< query heads per KV head
  std::int32_t num_stages;  ///< cp.async stages, 2..4
  float scale2;             ///< log2(e), times sm_scale unless a variant scales
};

/// The arguments of the attention kernel with a variant; without one it adds nothing.
template <class T, class V = NoVariant>
struct AttentionArguments : CallArguments<T> {
  VariantTerms<V> variant;
};
template <class T>
struct AttentionArguments<T, NoVariant> : CallArguments<T> {};

/// The arguments of the attention kernel for `variant`, whose logit is q·k times `sm_scale`.
template <class T, class V>
[[nodiscard]] AttentionArguments<T, V> with_variant(CallArguments<T> call, const V& variant,
                                                    float sm_scale) {
  constexpr float log2e = 1.4426950408889634f;
  call.scale2 = VariantTerms<V>::changes_logits ? log2e : sm_scale * log2e;
  if constexpr (std::is_same_v<V, NoVariant>)
    return {call};
  else
    return {call, terms_of(variant, sm_scale)};
}

/// Logits, maxima and lse of the kernels are in base 2: one instruction instead of two.
struct Base2 {
  CHUNKATTN_DEVICE static float exp(float x) { return ptx::exp2(x); }
  CHUNKATTN_DEVICE static float log(float x) { return ptx::log2(x); }
};

/// Maximum and sum of a softmax whose parts come together.
struct SoftmaxTotal {
  float max = empty_max2;
  ExactSum sum;

  /// Adds a part that is not empty. Returns how what belongs to it is added.
  CHUNKATTN_DEVICE MergedState add(SoftmaxState part) {
    const MergedState merged = merge_states<Base2>({max, sum.sum}, part);
    max = merged.state.max;
    sum.add(merged.weight_a, part.sum, merged.weight_b);
    return merged;
  }
  CHUNKATTN_DEVICE SoftmaxState state() const { return {max, sum.value()}; }
};

/// Four columns of one row's result, while the parts of its softmax come together.
struct RowResult {
  SoftmaxTotal total;
  ExactSum o[4];  ///< weighted values, not normalised

  /// Adds a part with the weighted values `v`, which count for nothing where it is empty. (By
  /// value: out of shared memory by one load. One for each element would meet in banks.)
  CHUNKATTN_DEVICE void add(SoftmaxState part, Float4 v) {
    if (part.empty()) return;
    const MergedState merged = total.add(part);
    for (int j = 0; j < 4; ++j) o[j].add(merged.weight_a, v.v[j], merged.weight_b);
  }
  CHUNKATTN_DEVICE Float4 values() const {
    return {{o[0].value(), o[1].value(), o[2].value(), o[3].value()}};
  }
};

/// Results of rows in shared memory: in `accumulators`
/// [parts][rows / 16][column_warps][16][warp_columns] floats, not normalised, their maxima and sums
/// in `stats`, likewise without columns.
template <HeadDims Dims, int TileRows, class V>
class SharedResults {
  using Warps = WarpLayout<Dims, TileRows, std::is_same_v<V, NoVariant>>;

 public:
  CHUNKATTN_DEVICE SharedResults(unsigned char* shared, float* accumulators)
      : stats_(reinterpret_cast<SoftmaxState*>(shared + SharedLayout<Dims>::stats)),
        accumulators_(accumulators) {}

  /// Adds what the warps of the block left of a row.
  CHUNKATTN_DEVICE void add_warps(int row, int column, RowResult& result) const {
    for (int part = 0; part < Warps::parts; ++part) add(part, row, column, result);
  }
  /// Leaves what a group of threads has of one of the task's `row_count` rows, for add_groups().
  CHUNKATTN_DEVICE void put_group(int group, int row_count, int row, int column,
                                  const RowResult& result) const {
    const int part = group % Warps::parts;
    row += row_of_group(group, row_count);
    *values(part, row, column) = result.values();
    if (column % Warps::warp_columns == 0) stats_[place(part, row, column)] = result.total.state();
  }
  /// Adds what all groups but the first left of a row.
  CHUNKATTN_DEVICE void add_groups(int groups, int row_count, int row, int column,
                                   RowResult& result) const {
    for (int group = 1; group < groups; ++group)
      add(group % Warps::parts, row + row_of_group(group, row_count), column, result);
  }

 private:
  // Groups stand beside one another where warps do, behind the rows that these have left.
  CHUNKATTN_DEVICE static int row_of_group(int group, int row_count) {
    return (1 + group / Warps::parts) * row_count;
  }
  // Of a row's accumulator, counted in rows of a warp's columns.
  CHUNKATTN_DEVICE static int place(int part, int row, int column) {
    const int unit =
        (part * (TileRows / 16) + row / 16) * Warps::column_warps + column / Warps::warp_columns;
    return unit * 16 + row % 16;
  }
  CHUNKATTN_DEVICE Float4* values(int part, int row, int column) const {
    return reinterpret_cast<Float4*>(
        accumulators_ + place(part, row, column) * Warps::warp_columns +
        accumulator_column(Warps::warp_columns, row, column % Warps::warp_columns));
  }
  CHUNKATTN_DEVICE void add(int part, int row, int column, RowResult& result) const {
    result.add(stats_[place(part, row, column)], *values(part, row, column));
  }

  SoftmaxState* stats_;
  float* accumulators_;
};

/// Where the result of a packed row stands among partial results.
template <class T>
CHUNKATTN_DEVICE int row_of_partials(const CallArguments<T>& args, int packed, int kv_head) {
  const int row = packed / args.group;
  return (row * args.num_kv_heads + kv_head) * args.group + packed - row * args.group;
}

/// Of a row's output, which is `Final`, or of one of its partial results.
template <bool Final, class T>
CHUNKATTN_DEVICE void store_lse(const CallArguments<T>& args, std::int64_t line,
                                SoftmaxState state) {
  if constexpr (!Final)
    ptx::store(args.plan.partial_lse + line,
               state.empty() ? empty_max2 : log_sum_exp<Base2>(state));
  else if (args.lse != nullptr)
    args.lse[line] = log_sum_exp<Base2>(state) * 0.6931471805599453f;
}
/// Likewise some of its columns, normalised, from element `at` on.
template <bool Final, class T, int Columns>
CHUNKATTN_DEVICE void store_columns(const CallArguments<T>& args, std::int64_t at,
                                    const Vector<float, Columns>& values) {
  if constexpr (Final) {
    Vector<std::uint32_t, Columns / 2> pairs;
    CHUNKATTN_UNROLL
    for (int i = 0; i < Columns / 2; ++i)
      pairs.v[i] = ptx::pack<T>(values.v[2 * i], values.v[2 * i + 1]);
    *reinterpret_cast<Vector<std::uint32_t, Columns / 2>*>(args.out + at) = pairs;
  } else {
    ptx::store(reinterpret_cast<Vector<float, Columns>*>(args.plan.partial_out + at), values);
  }
}

/// Adds partial results [begin, end) of those that a task merges, in path order. They are read a
/// few at a time: one after the other, each read would wait for the one before.
template <int ValueDim>
CHUNKATTN_DEVICE void add_partials(const PlanMemory& plan, const Task& task, int begin, int end,
                                   int row_partial, int column, RowResult& result) {
  constexpr int at_once = merges_at_once;
  const Merge* merges = plan.merges + task.merge_begin;
  for (int first = begin; first < end; first += at_once) {
    float lse[at_once];
    Float4 values[at_once];
    CHUNKATTN_UNROLL
    for (int i = 0; i < at_once; ++i) {
      const int p = first + i < end ? first + i : first;
      const std::int64_t index = merges[p].partial_base + row_partial;
      lse[i] = ptx::load(plan.partial_lse + index);
      values[i] =
          ptx::load(reinterpret_cast<const Float4*>(plan.partial_out + index * ValueDim + column));
    }
    CHUNKATTN_UNROLL
    for (int i = 0; i < at_once; ++i) {
      const bool none = first + i >= end || lse[i] <= empty_max2;  // a NaN is not empty
      result.add({lse[i], none ? 0.0f : 1.0f}, values[i]);
    }
  }
}

/// The place of a row of a tile, with what its RowTable says of it.
template <class T>
CHUNKATTN_DEVICE Line line_of(const CallArguments<T>& args, int row_len, int row_index) {
  if (row_index < 0) return {-1, -1, 0};
  const int num_qo_heads = args.num_kv_heads * args.group;
  const int row = row_index / num_qo_heads;
  return {row_len - 1, row, row_index - row * num_qo_heads};
}

/// Adds the variant's logit without a value: by the one task that writes the row, so once.
template <class T, class V>
CHUNKATTN_DEVICE void add_sink(const AttentionArguments<T, V>& args, int row_len, int row_index,
                               RowResult& result) {
  Line line = line_of(args, row_len, row_index);
  if (line.query < 0) line.query = 0;  // a row that sees nothing has its sink
  const float sink2 = as_real(Evaluator{line, 0.0f, 0}.of(args.variant.sink)) * 1.4426950408889634f;
  result.add({sink2, sink2 <= empty_max2 ? 0.0f : 1.0f}, Float4{});  // a NaN is not empty
}

/// Reduces and writes the rows of a task. All threads of the block call it.
///
/// Final: adds the partials task.merge_* in path order and writes q-typed output rows. Where rows
/// are few, groups of threads share their partials, each with a part of the path; the first one has
/// the rest to do.
/// Otherwise: writes one normalised fp32 partial per row.
/// \param accumulators  of the task's warps, if it has streamed anything
template <class T, HeadDims Dims, int TileRows, bool Final, class V>
CHUNKATTN_DEVICE void write_rows(const AttentionArguments<T, V>& args, const Task& task,
                                 int kv_head, const RowTable<most_tile_rows(Dims)>& rows,
                                 unsigned char* shared, float* accumulators, bool streamed) {
  constexpr int vectors = Dims.v / 4;
  const SharedResults<Dims, TileRows, V> results(shared, accumulators);
  const int threads = task.row_count * vectors;
  int bits = 0;
  if constexpr (Final && TileRows == 16)
    bits = merge_group_bits(task.row_count, Dims.v, task.merge_count);
  RowResult part;  // of the thread's group
  if (bits > 0) {
    const int thread = ptx::opaque(ptx::thread_index());
    const int group = (thread << bits) / block_threads;
    const int i = thread & ((block_threads >> bits) - 1);
    const int row = i / vectors;
    const int column = i % vectors * 4;
    if (i < threads) {
      add_partials<Dims.v>(args.plan, task, task.merge_count * group >> bits,
                           task.merge_count * (group + 1) >> bits,
                           row_of_partials(args, task.row_begin + row, kv_head), column, part);
      if (group > 0) results.put_group(group, task.row_count, row, column, part);
    }
    ptx::barrier();  // the groups' results
  }

  for (int i = ptx::thread_index(); i < threads; i += block_threads) {  // the first group
    const int row = i / vectors;
    const int column = i % vectors * 4;
    const int partial = row_of_partials(args, task.row_begin + row, kv_head);
    RowResult result = part;
    if constexpr (Final) {
      if (bits > 0)
        results.add_groups(1 << bits, task.row_count, row, column, result);
      else
        add_partials<Dims.v>(args.plan, task, 0, task.merge_count, partial, column, result);
    }
    if (streamed) results.add_warps(row, column, result);
    if constexpr (Final && VariantTerms<V>::has_sinks)
      add_sink(args, rows.len[row], rows.index[row], result);
    const SoftmaxState state = result.total.state();
    const float scale = normaliser(state);
    Float4 values = result.values();
    float(&o)[4] = values.v;
    for (int j = 0; j < 4; ++j) o[j] *= scale;
    const std::int64_t line = Final ? rows.index[row] : task.partial_base + partial;
    store_columns<Final>(args, line * Dims.v + column, values);
    if (column == 0) store_lse<Final>(args, line, state);
  }
}

}  // namespace detail::cuda
CHUNKATTN_NAMESPACE_END
