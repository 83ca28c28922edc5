// ChunkAttention on the CPU: chunk-first and sequence-first (Algorithms 1 and 2) over one list of
// tasks.
//
// One worker takes one KV head of one row block and walks the tree's segments parents first: shared
// ones with all their query lines at once, private ones streamed. The state (O, m, d) of its lines
// stays in the core's cache over the whole walk, so nothing is merged and nothing is locked; only
// where heads are too few to keep all workers busy is a walk cut along KV, and then the partial
// results are merged (in order, or under a spin lock).
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "../attention_options.hpp"
#include "../attention_state.hpp"
#include "../concepts.hpp"
#include "block.hpp"
#include "checks.hpp"
#include "chunk_first.hpp"
#include "prefetch.hpp"
#include "schedule.hpp"
#include "sequence_first.hpp"
#include "spin_lock.hpp"
#include "write.hpp"

CHUNKATTN_ISA_NAMESPACE_BEGIN

/// Exact attention over shared prefixes on the CPU. One object serves every layer, every element
/// type of K/V and every number of heads; it is used by one thread at a time. After the largest
/// plan has been seen, nothing is allocated.
///
/// \tparam HeadDim  a multiple of 8, at most 256
/// \tparam Exec     runs the tasks (concept Executor)
template <int HeadDim, class Exec>
class ChunkAttention<Cpu, HeadDim, Exec> {
  static_assert(
      HeadDim > 0 && HeadDim % 8 == 0 && HeadDim <= 256,
      "ChunkAttention<Cpu, HeadDim>: HeadDim must be a multiple of 8 and at most 256; pad "
      "the heads of your model to the next multiple of 8 with zeros");
  static_assert(Executor<Exec>,
                "ChunkAttention<Cpu, HeadDim, Exec>: Exec must offer concurrency() and "
                "parallel_for(n, f), see the concept Executor");

 public:
  /// Runs on `executor`, which must outlive this object.
  explicit ChunkAttention(Exec& executor, AttentionOptions options = {})
      : executor_(&executor), options_(checked(options)) {}

  /// Runs on its own executor of `num_threads` threads; 0: as many as the machine has.
  explicit ChunkAttention(int num_threads = 0,
                          AttentionOptions options = {}) requires std::constructible_from<Exec, int>
      : owned_(std::make_unique<Exec>(num_threads)),
        executor_(owned_.get()),
        options_(checked(options)) {}

  /// Performs the plan's row copies in this layer, then stores K and V of the plan's query tokens.
  /// Rows whose K/V is already written are skipped. Doing it twice is harmless.
  ///
  /// \param layer  K and V memory of the layer
  /// \param plan   an AttentionPlan, or a PlanView
  /// \param k, v   [num_rows][num_kv_heads][HeadDim], the caller's row order; float, half or
  ///               bfloat16, rounded to the layer's type to nearest even
  template <class T, class Plan, cpu::QoRange K, cpu::QoRange V>
  requires CpuKvElement<T>
  void write(const KvView<T>& layer, const Plan& plan, const K& k, const V& v) {
    const PlanView view = cpu::view_of(plan);
    cpu::check_view(layer, view, HeadDim);
    const int heads = layer.num_kv_heads;
    const std::size_t expected =
        static_cast<std::size_t>(view.num_rows) * static_cast<std::size_t>(heads) * HeadDim;
    constexpr const char* shape = "num_rows * num_kv_heads * head_dim";
    cpu::check_size("k", std::ranges::data(k), std::ranges::size(k), expected, shape);
    cpu::check_size("v", std::ranges::data(v), std::ranges::size(v), expected, shape);
    cpu::check_writes(layer, view);

    const auto* const k_rows = std::ranges::data(k);
    const auto* const v_rows = std::ranges::data(v);
    if (view.num_copies > 0) {
      executor_->parallel_for(heads, [&](int head) {
        for (int c = 0; c < view.num_copies; ++c)
          cpu::copy_rows<HeadDim>(layer, view.copies[c], head);
      });
    }
    constexpr int rows_per_call = 8;  // small enough to balance, large enough to be worth a call
    const int calls = (view.num_rows + rows_per_call - 1) / rows_per_call;
    executor_->parallel_for(calls, [&](int call) {
      const int end = std::min(view.num_rows, (call + 1) * rows_per_call);
      for (int row = call * rows_per_call; row < end; ++row) {
        const WriteTarget& target = view.writes[row];
        if (target.slot == no_slot) continue;
        for (int head = 0; head < heads; ++head) {
          const std::ptrdiff_t at = (static_cast<std::ptrdiff_t>(row) * heads + head) * HeadDim;
          cpu::write_row<HeadDim>(layer, target, head, k_rows + at, v_rows + at);
        }
      }
    });
  }

  /// Attention of the plan's rows over their whole paths, causal. num_qo_heads is
  /// q.size() / (num_rows * HeadDim) and must be a multiple of the layer's num_kv_heads; query head
  /// h reads KV head h / (num_qo_heads / num_kv_heads).
  ///
  /// \param q    [num_rows][num_qo_heads][HeadDim], the caller's row order
  /// \param out  the same shape; every element is written
  /// \param lse  [num_rows][num_qo_heads], natural logarithm of the softmax denominator; or empty
  ///
  /// Throws InvalidArgument before anything is touched. If the executor throws, `out` and `lse` are
  /// unspecified and everything else is as before.
  template <class T, class Plan, cpu::QoRange Q, cpu::QoRange Out>
  requires CpuKvElement<T>
  void run(const KvView<T>& layer, const Plan& plan, const Q& q, Out&& out,
           std::span<float> lse = {}) {
    const PlanView view = cpu::view_of(plan);
    const auto query = cpu::span_of(q);
    const auto result = cpu::span_of(out);
    cpu::check_view(layer, view, HeadDim);
    const int num_qo_heads =
        cpu::check_heads("q", query.data(), query.size(), view.num_rows, HeadDim);
    if (num_qo_heads % layer.num_kv_heads != 0) [[unlikely]]
      detail::fail_argument(
          "num_qo_heads", num_qo_heads,
          "a multiple of layer.num_kv_heads, " + std::to_string(layer.num_kv_heads));
    cpu::check_size("out", result.data(), result.size(), query.size(), "q.size()");
    detail::check_argument(lse.empty() || lse.size() == query.size() / HeadDim, "lse.size()",
                           lse.size(), "0 or num_rows * num_qo_heads");
    cpu::check_pieces(layer, view);

    const int group = num_qo_heads / layer.num_kv_heads;
    const bool invariant = options_.reduce == Reduce::batch_invariant;
    if (invariant)
      prepare_rows(view, group);
    else
      prepare<T>(view, layer.num_kv_heads, group);
    using X = std::remove_const_t<std::remove_pointer_t<decltype(query.data())>>;
    using Y = std::remove_pointer_t<decltype(result.data())>;
    const Call<T, X, Y> call{
        layer,        view, query.data(), result.data(), lse.empty() ? nullptr : lse.data(),
        num_qo_heads, group};
    const int jobs = invariant ? view.num_rows : static_cast<int>(schedule_.units().size());
    const int tasks = jobs * layer.num_kv_heads;
    std::atomic<int> next{0};
    executor_->parallel_for(std::min(tasks, static_cast<int>(workers_.size())), [&](int worker) {
      auto& state = workers_[static_cast<std::size_t>(worker)];
      for (int i = next.fetch_add(1, std::memory_order_relaxed); i < tasks;
           i = next.fetch_add(1, std::memory_order_relaxed)) {
        if (invariant)
          run_row(call, i / layer.num_kv_heads, i % layer.num_kv_heads, state,
                  paths_[static_cast<std::size_t>(worker)]);
        else
          run_task(call, schedule_.order()[static_cast<std::size_t>(i / layer.num_kv_heads)],
                   i % layer.num_kv_heads, state);
      }
    });
  }

  /// How the last run() was cut into tasks.
  [[nodiscard]] const cpu::Schedule& schedule() const noexcept { return schedule_; }
  /// The options, with sm_scale resolved.
  [[nodiscard]] const AttentionOptions& options() const noexcept { return options_; }

 private:
  using State = cpu::LineState<HeadDim>;

  template <class T, class X, class Y>
  struct Call {
    const KvView<T>& kv;
    const PlanView& plan;
    const X* q;
    Y* out;
    float* lse;
    int num_qo_heads;
    int group;
  };

  /// Where the tasks of one (row block, KV head) meet, if there are several.
  struct alignas(64) Meeting {
    SpinLock lock;
    std::atomic<int> open{0};  // tasks still to finish
  };

  // Lines of one task: their state (queries twice, outputs) should fit in half of a usual L2.
  static constexpr int max_lines = HeadDim <= 128 ? 256 : 128;
  // From this many lines on, matrix products beat streaming the lines a few at a time.
  template <class T>
  static constexpr int min_product_lines = sizeof(T) == 4 ? 5 : 9;
  static constexpr int partial_stride = HeadDim + 16;  // out, max, sum

  static AttentionOptions checked(AttentionOptions options) {
    detail::check_argument(options.min_tasks >= 0, "options.min_tasks", options.min_tasks,
                           "a count, or 0 for the default");
    detail::check_argument(options.sm_scale >= 0, "options.sm_scale", options.sm_scale,
                           "a positive factor, or 0 for 1 / sqrt(HeadDim)");
    if (options.sm_scale == 0)
      options.sm_scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(HeadDim)));
    return options;
  }

  // Derives the tasks and makes room for them. Allocates only beyond what was seen before.
  template <class T>
  void prepare(const PlanView& plan, int num_kv_heads, int group) {
    const int threads = std::max(1, static_cast<int>(executor_->concurrency()));
    const int min_tasks = options_.min_tasks > 0                     ? options_.min_tasks
                          : options_.reduce == Reduce::deterministic ? 64
                                                                     : 4 * threads;
    cpu::CostModel cost;
    cost.bytes_per_token = 2.0 * HeadDim * static_cast<double>(sizeof(T));
    cost.flops_per_token_line = 4.0 * HeadDim;
    schedule_.derive(plan, num_kv_heads, group, max_lines, min_product_lines<T>, cpu::tile_lines,
                     min_tasks, cost);

    if (workers_.size() < static_cast<std::size_t>(threads))
      workers_.resize(static_cast<std::size_t>(threads));
    for (State& worker : workers_) worker.reserve(schedule_.max_block_rows() * group);
    if (schedule_.num_partial_rows() == 0) return;

    const auto heads = static_cast<std::size_t>(num_kv_heads);
    const std::size_t blocks = schedule_.row_blocks().size();
    if (num_meetings_ < blocks * heads) {
      num_meetings_ = blocks * heads;
      meetings_ = std::make_unique<Meeting[]>(num_meetings_);
    }
    for (std::size_t b = 0; b < blocks; ++b)
      for (std::size_t h = 0; h < heads; ++h)
        meetings_[b * heads + h].open.store(schedule_.row_blocks()[b].unit_count,
                                            std::memory_order_relaxed);
    // Deterministic: a place for each unit's rows. Under locks: one for each row.
    const bool ordered = options_.reduce == Reduce::deterministic;
    const std::size_t rows = ordered ? static_cast<std::size_t>(schedule_.num_partial_rows())
                                     : static_cast<std::size_t>(plan.num_rows);
    const std::size_t lines = rows * static_cast<std::size_t>(group) * heads;
    if (partials_.size() < lines * partial_stride) partials_.resize(lines * partial_stride);
    if (!ordered) {
      for (std::size_t line = 0; line < lines; ++line) {
        partials_[line * partial_stride + HeadDim] = empty_max;
        partials_[line * partial_stride + HeadDim + 1] = 0.0f;
      }
    }
  }

  // The same for Reduce::batch_invariant, where every row is a task of its own.
  void prepare_rows(const PlanView& plan, int group) {
    const auto threads = static_cast<std::size_t>(std::max(1, executor_->concurrency()));
    if (workers_.size() < threads) workers_.resize(threads);
    if (paths_.size() < threads) paths_.resize(threads);
    for (State& worker : workers_) worker.reserve(group);
    for (auto& path : paths_) path.reserve(static_cast<std::size_t>(plan.num_segments));
  }

  // One row and KV head, by itself, in blocks that begin at multiples of block_tokens.
  template <class T, class X, class Y>
  void run_row(const Call<T, X, Y>& call, int row, int kv_head, State& state,
               std::vector<std::int32_t>& path) noexcept {
    state.clear(0, call.group);
    load_queries(call, row, row + 1, kv_head, false, state);
    cpu::PathWalk walk(call.plan, row, path);
    cpu::Prefetcher<HeadDim, T, cpu::PathWalk> ahead(
        call.kv, kv_head, cpu::ItemWalk(call.plan, nullptr, nullptr), walk);
    ahead.start();
    cpu::Block<T> block;
    while (block.read(walk, call.kv, kv_head)) {
      ahead.grant_stream(block.count);
      cpu::sequence_first_block<HeadDim>(block, 0, call.group, state, ahead.cursor);
      ahead.settle();
    }
    for (int line = 0; line < call.group; ++line)
      finish_line(call, row, line, kv_head, {state.max[line], state.sum[line]},
                  state.out + line * HeadDim);
  }

  template <class T, class X, class Y>
  void run_task(const Call<T, X, Y>& call, std::int32_t unit_index, int kv_head,
                State& state) noexcept {
    const cpu::Unit& unit = schedule_.units()[static_cast<std::size_t>(unit_index)];
    const cpu::RowBlock& rows = schedule_.row_blocks()[static_cast<std::size_t>(unit.row_block)];
    const bool alone = rows.unit_count == 1;
    const int row_begin = alone ? rows.row_begin : unit.row_begin;
    const int row_end = alone ? rows.row_end : unit.row_end;
    const int lines = (row_end - row_begin) * call.group;
    const cpu::WorkItem* const items = schedule_.items().data();
    cpu::ItemWalk products(call.plan, items + unit.item_begin, items + unit.stream_begin);
    cpu::ItemWalk streams(call.plan, items + unit.stream_begin, items + unit.item_end);
    cpu::Prefetcher<HeadDim, T, cpu::ItemWalk> ahead(call.kv, kv_head, products, streams);
    ahead.start();
    state.clear(0, lines);
    load_queries(call, row_begin, row_end, kv_head, unit.stream_begin > unit.item_begin, state);
    cpu::Block<T> block;
    const auto line0 = [&] { return (block.row_begin - row_begin) * call.group; };
    const auto num_lines = [&] { return (block.row_end - block.row_begin) * call.group; };
    while (block.read(products, call.kv, kv_head)) {
      ahead.grant_product(block.count, num_lines());
      cpu::chunk_first_block<HeadDim>(block, line0(), num_lines(), state, ahead.cursor);
      ahead.settle();
    }
    while (block.read(streams, call.kv, kv_head)) {
      ahead.grant_stream(block.count);
      cpu::sequence_first_block<HeadDim>(block, line0(), num_lines(), state, ahead.cursor);
      ahead.settle();
    }

    if (alone) {
      for (int line = 0; line < lines; ++line)
        finish_line(call, row_begin, line, kv_head, {state.max[line], state.sum[line]},
                    state.out + line * HeadDim);
    } else if (options_.reduce == Reduce::deterministic) {
      leave_partial(call, unit, kv_head, state);
    } else {
      merge_under_lock(call, unit, kv_head, state);
    }
  }

  // Queries of the task's lines as scaled floats, and transposed where a product will need them.
  template <class T, class X, class Y>
  void load_queries(const Call<T, X, Y>& call, int row_begin, int row_end, int kv_head,
                    bool transposed, State& state) noexcept {
    constexpr int width = simd::width_for<HeadDim>;
    for (int row = row_begin; row < row_end; ++row) {
      const X* from =
          call.q + (static_cast<std::ptrdiff_t>(call.plan.row_token[row]) * call.num_qo_heads +
                    kv_head * call.group) *
                       HeadDim;
      const int line = (row - row_begin) * call.group;
      for (int l = 0; l < call.group; ++l) {
        state.kv_len[line + l] = call.plan.row_kv_len[row];
        for (int i = 0; i < HeadDim; i += width)
          simd::store(state.q + (line + l) * HeadDim + i,
                      simd::load_widened<width>(from + l * HeadDim + i) *
                          simd::broadcast<width>(options_.sm_scale));
      }
    }
    if (!transposed) return;
    const int lines = (row_end - row_begin) * call.group;
    constexpr int block = simd::native_width;
    constexpr int whole = HeadDim / block * block;
    for (int line = 0; line < lines; line += block) {  // lines beyond the last are nobody's
      float* const to = state.q_transposed + line;
      for (int i = 0; i < whole; i += block) {
        simd::Float<block> rows[block];
        simd::repeat<block>([&](auto l) CHUNKATTN_LAMBDA {
          rows[l] = simd::load<block>(state.q + (line + l) * HeadDim + i);
        });
        simd::transpose<block>(rows);
        simd::repeat<block>([&](auto d) CHUNKATTN_LAMBDA {
          simd::store(to + (i + d) * state.transposed_stride, rows[d]);
        });
      }
      for (int i = whole; i < HeadDim; ++i)
        for (int l = 0; l < block; ++l)
          to[i * state.transposed_stride + l] = state.q[(line + l) * HeadDim + i];
    }
  }

  // Normalises one line and writes it where the caller wants it.
  template <class T, class X, class Y>
  void finish_line(const Call<T, X, Y>& call, int row_begin, int line, int kv_head,
                   SoftmaxState softmax, const float* from) noexcept {
    constexpr int width = simd::width_for<HeadDim>;
    const int row = row_begin + line / call.group;
    const std::ptrdiff_t to =
        static_cast<std::ptrdiff_t>(call.plan.row_token[row]) * call.num_qo_heads +
        kv_head * call.group + line % call.group;
    const float factor = normaliser(softmax);
    for (int i = 0; i < HeadDim; i += width)
      simd::store_narrowed<width>(call.out + to * HeadDim + i,
                                  simd::load<width>(from + i) * simd::broadcast<width>(factor));
    if (call.lse != nullptr) call.lse[to] = log_sum_exp(softmax);
  }

  /// Merges (max, sum, out) of one line into a partial result.
  static void merge_line(float* into, SoftmaxState softmax, const float* out) noexcept {
    constexpr int width = simd::width_for<HeadDim>;
    const SoftmaxState old{into[HeadDim], into[HeadDim + 1]};
    const MergedState merged = merge_states(old, softmax);
    if (old.empty()) {  // what `into` holds then is not a result
      std::copy_n(out, HeadDim, into);
    } else {
      for (int i = 0; i < HeadDim; i += width)
        simd::store(
            into + i,
            simd::fma(simd::load<width>(out + i), simd::broadcast<width>(merged.weight_b),
                      simd::load<width>(into + i) * simd::broadcast<width>(merged.weight_a)));
    }
    into[HeadDim] = merged.state.max;
    into[HeadDim + 1] = merged.state.sum;
  }

  /// Partial results of `unit` for one KV head: [rows of the unit * group][partial_stride].
  float* partial(const cpu::Unit& unit, int kv_head, int group) noexcept {
    return partials_.data() +
           (schedule_.num_partial_rows() * kv_head + unit.partial_row) * group * partial_stride;
  }

  // Leaves the unit's result; the last unit of its row block and head merges them all in order.
  template <class T, class X, class Y>
  void leave_partial(const Call<T, X, Y>& call, const cpu::Unit& unit, int kv_head,
                     State& state) noexcept {
    const int lines = (unit.row_end - unit.row_begin) * call.group;
    float* const mine = partial(unit, kv_head, call.group);
    for (int line = 0; line < lines; ++line) {
      float* const to = mine + static_cast<std::ptrdiff_t>(line) * partial_stride;
      std::copy_n(state.out + line * HeadDim, HeadDim, to);
      to[HeadDim] = state.max[line];
      to[HeadDim + 1] = state.sum[line];
    }
    if (meeting(call, unit, kv_head).open.fetch_sub(1, std::memory_order_acq_rel) != 1) return;

    const cpu::RowBlock& block = schedule_.row_blocks()[static_cast<std::size_t>(unit.row_block)];
    for (int row = block.row_begin; row < block.row_end; ++row) {
      for (int l = 0; l < call.group; ++l) {
        float merged[partial_stride];
        std::fill_n(merged, HeadDim, 0.0f);
        merged[HeadDim] = empty_max;
        merged[HeadDim + 1] = 0.0f;
        for (int u = 0; u < block.unit_count; ++u) {
          const cpu::Unit& other =
              schedule_.units()[static_cast<std::size_t>(block.unit_begin + u)];
          if (row < other.row_begin || row >= other.row_end) continue;
          const float* const from =
              partial(other, kv_head, call.group) +
              static_cast<std::ptrdiff_t>((row - other.row_begin) * call.group + l) *
                  partial_stride;
          merge_line(merged, {from[HeadDim], from[HeadDim + 1]}, from);
        }
        finish_line(call, block.row_begin, (row - block.row_begin) * call.group + l, kv_head,
                    {merged[HeadDim], merged[HeadDim + 1]}, merged);
      }
    }
  }

  // Merges the unit's result into its rows' under the lock; the last one writes them out.
  template <class T, class X, class Y>
  void merge_under_lock(const Call<T, X, Y>& call, const cpu::Unit& unit, int kv_head,
                        State& state) noexcept {
    const int lines = (unit.row_end - unit.row_begin) * call.group;
    const auto row_partial = [&](int row) {
      return partials_.data() + (static_cast<std::ptrdiff_t>(call.plan.num_rows) * kv_head + row) *
                                    call.group * partial_stride;
    };
    Meeting& met = meeting(call, unit, kv_head);
    float* const into = row_partial(unit.row_begin);
    met.lock.lock();
    for (int line = 0; line < lines; ++line) {
      if (state.sum[line] == 0.0f) continue;
      merge_line(into + static_cast<std::ptrdiff_t>(line) * partial_stride,
                 {state.max[line], state.sum[line]}, state.out + line * HeadDim);
      CHUNKATTN_SPIN_LOCK_HOOK();
    }
    met.lock.unlock();
    if (met.open.fetch_sub(1, std::memory_order_acq_rel) != 1) return;

    const cpu::RowBlock& block = schedule_.row_blocks()[static_cast<std::size_t>(unit.row_block)];
    for (int row = block.row_begin; row < block.row_end; ++row) {
      for (int l = 0; l < call.group; ++l) {
        float* const from = row_partial(row) + l * partial_stride;
        const SoftmaxState softmax{from[HeadDim], from[HeadDim + 1]};
        if (softmax.empty()) std::fill_n(from, HeadDim, 0.0f);
        finish_line(call, block.row_begin, (row - block.row_begin) * call.group + l, kv_head,
                    softmax, from);
      }
    }
  }

  template <class T, class X, class Y>
  Meeting& meeting(const Call<T, X, Y>& call, const cpu::Unit& unit, int kv_head) noexcept {
    return meetings_[static_cast<std::size_t>(unit.row_block) *
                         static_cast<std::size_t>(call.kv.num_kv_heads) +
                     static_cast<std::size_t>(kv_head)];
  }

  std::unique_ptr<Exec> owned_;
  Exec* executor_;
  AttentionOptions options_;
  cpu::Schedule schedule_;
  std::vector<State> workers_;
  std::vector<std::vector<std::int32_t>> paths_;  // per worker, for Reduce::batch_invariant
  std::unique_ptr<Meeting[]> meetings_;
  std::size_t num_meetings_ = 0;
  std::vector<float> partials_;
};

CHUNKATTN_ISA_NAMESPACE_END
