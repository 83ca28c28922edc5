// One step of attention under the emulator, straight from a plan: schedule, kernel, results.
#pragma once

#include <algorithm>
#include <cmath>
#include <span>
#include <stdexcept>
#include <vector>

#include "simt/emulator.hpp"
#include "simt/executor.hpp"
#include "support/random.hpp"
// After the emulator, which takes the place of ptx.cuh.
#include "chunkattn/detail/cuda/run_tasks.cuh"
#include "chunkattn/detail/cuda/scheduler.hpp"

namespace simt {

/// A cost model under which small test plans are shared and split.
inline chunkattn::detail::cuda::CostModel eager_model() {
  chunkattn::detail::cuda::CostModel model;
  model.num_blocks = 64;
  model.most_tile_rows = chunkattn::detail::cuda::max_tile_rows;  // where the kernel has such
  model.task_ps = 0;
  model.merge_ps = 0;
  model.wait_ps = 0;
  model.min_split_tokens = 64;
  return model;
}

/// Threads, blocks and copies in some order.
inline void shuffle_turns(test::Random& random) {
  constexpr Order orders[] = {Order::forward, Order::reversed, Order::shuffled};
  current_schedule() = {random.pick(orders),
                        random.chance(0.5) ? Copies::at_issue : Copies::at_wait, random.bits(),
                        random.uniform(1, 3)};
}

template <class T>
struct StepResult {
  std::vector<T> out;
  std::vector<float> lse;
  chunkattn::detail::cuda::Scheduler scheduler;
  chunkattn::detail::cuda::Counters counters{};
  std::uint32_t overlapped = 0;
};

/// What a variant hides from each row of a plan.
template <class V>
std::vector<chunkattn::KeyRange> hidden_ranges(const chunkattn::PlanView& plan, const V& variant) {
  const chunkattn::detail::cuda::HiddenKeys hidden(variant);
  std::vector<chunkattn::KeyRange> ranges;
  for (int row = 0; row < plan.num_rows; ++row) ranges.push_back(hidden(plan.row_kv_len[row]));
  return ranges;
}

/// Runs the plan over K/V in host memory, of T or of 8 bits. Outputs and workspace start as NaN.
/// Each thread calls after() when it has done its part of the kernel; then the emulator runs it.
template <class T, chunkattn::detail::cuda::HeadDims Dims, class V = chunkattn::NoVariant,
          class After = void (*)(), class E>
StepResult<T> attention_step(const chunkattn::KvView<E>& kv, chunkattn::PlanView plan,
                             std::span<const T> q, chunkattn::detail::cuda::CostModel model,
                             int num_stages = 2, int grid = 3, float sm_scale = 0,
                             const V& variant = {}, const After& after = {}) {
  using namespace chunkattn::detail::cuda;
  constexpr bool wide = std::is_same_v<E, T>;
  using Kind = std::conditional_t<wide, V, Quantized<E, V>>;
  if (!large_tiles<Kind, Dims>) model.most_tile_rows = usual_tile_rows;
  StepResult<T> result;
  const auto rows = static_cast<std::size_t>(plan.num_rows);
  const int num_qo_heads = static_cast<int>(q.size() / rows / static_cast<std::size_t>(Dims.k));
  result.scheduler.build(plan, {num_qo_heads, kv.num_kv_heads, Dims.k, Dims.v}, model,
                         {std::size_t{1} << 20, std::size_t{1} << 20, std::size_t{1} << 28},
                         hidden_ranges(plan, variant).data());
  const Scheduler& schedule = result.scheduler;
  const PlanHeader header{plan.num_rows, 0, static_cast<int>(schedule.tasks().size())};
  const auto partials = static_cast<std::size_t>(schedule.num_partials());
  std::vector<Float4> partial_out(partials * Dims.v / 4, Float4{{NAN, NAN, NAN, NAN}});
  std::vector<float> partial_lse(partials, NAN);
  std::vector<float> totals(static_cast<std::size_t>(grid) * total_bytes(Dims) / 4, NAN);
  result.counters.launches = 6;  // the last of which has set all flags
  std::vector<std::uint32_t> flags(
      static_cast<std::size_t>(schedule.num_chunk_first() * kv.num_kv_heads), 6);
  std::vector<std::int32_t> kv_len(plan.row_kv_len, plan.row_kv_len + rows);
  const std::size_t lines = q.size() / Dims.k;
  // A line beyond each end is nobody's.
  constexpr Words2 unwritten{{0xffffffffu, 0xffffffffu}};
  std::vector<Words2> out((lines + 2) * Dims.v / 4, unwritten);
  std::vector<float> lse(lines + 2, NAN);

  CallArguments<T> call{};
  call.plan = {&header,
               schedule.tasks().data(),
               schedule.merges().data(),
               plan.segments,
               plan.pieces,
               plan.row_token,
               kv_len.data(),
               plan.row_segment,
               nullptr,
               plan.copies,
               &result.counters,
               flags.data(),
               reinterpret_cast<float*>(partial_out.data()),
               partial_lse.data(),
               totals.data(),
               &result.overlapped};
  if constexpr (std::is_same_v<E, T>) call.kv = kv;
  call.q = q.data();
  T* const written = reinterpret_cast<T*>(out.data()) + Dims.v;
  call.out = written;
  call.lse = lse.data() + 1;
  call.num_kv_heads = kv.num_kv_heads;
  call.group = num_qo_heads / kv.num_kv_heads;
  call.num_stages = num_stages;
  if (sm_scale == 0) sm_scale = 1.0f / std::sqrt(static_cast<float>(Dims.k));
  AttentionArguments<T, Kind> args{};
  static_cast<AttentionArguments<T, V>&>(args) = with_variant(call, variant, sm_scale);
  if constexpr (!wide) args.stored = kv;
  constexpr HeadDims stored{Dims.k, Dims.v, static_cast<int>(sizeof(E))};
  // Room for no more queries than a tile may have, as for an object with limits of just this plan.
  int tile_rows = std::min(model.most_tile_rows, tile_rows_for(plan.num_rows * call.group));
  if (model.batch_invariant) tile_rows = invariant_tile_rows;
  const auto shared = static_cast<std::size_t>(shared_bytes(stored, num_stages, tile_rows));
  if constexpr (std::is_same_v<After, void (*)()>)
    launch_kernel<AttentionArguments<T, Kind>>(&attention_kernel<T, Dims.k, Dims.v, Kind>, grid,
                                               block_threads, shared, args);
  else
    launch(grid, block_threads, shared, [&] {
      attention_kernel<T, Dims.k, Dims.v, Kind>(args);
      after();
    });
  const auto is_unwritten = [&](const Words2& words) {
    return words.v[0] == unwritten.v[0] && words.v[1] == unwritten.v[1];
  };
  if (!std::all_of(out.begin(), out.begin() + Dims.v / 4, is_unwritten) ||
      !std::all_of(out.end() - Dims.v / 4, out.end(), is_unwritten) || !std::isnan(lse.front()) ||
      !std::isnan(lse.back()))
    throw std::logic_error("the kernel has written results of a line that there is not");
  result.out.assign(written, written + lines * Dims.v);
  result.lse.assign(lse.begin() + 1, lse.end() - 1);
  return result;
}

}  // namespace simt
