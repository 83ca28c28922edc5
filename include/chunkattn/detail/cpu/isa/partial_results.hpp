// Partial results of a row block whose walk was cut into units, and how they become one: in order
// (the same bits whoever computed which unit), or as they come under a spin lock.
#ifndef CHUNKATTN_ISA_PARTIAL_RESULTS
#define CHUNKATTN_ISA_PARTIAL_RESULTS

#include "line_state.hpp"
#include "pass.hpp"
#include "simd.hpp"

CHUNKATTN_PASS_BEGIN

/// A partial result is one line's unnormalised output, its maximum and its sum, in `stride` floats.
/// While the sum is 0 the output is not looked at.
template <class State>
class PartialResults {
 public:
  static constexpr int dim = State::value_dim;
  static constexpr int stride = State::partial_stride;

  /// Makes room for what units leave (ordered), or for one result of each row (under locks).
  /// Allocates only beyond what was seen before.
  void reset(const Schedule& schedule, int num_rows, int num_kv_heads, int group, bool ordered) {
    num_kv_heads_ = num_kv_heads;
    group_ = group;
    rows_per_head_ = ordered ? schedule.num_partial_rows() : num_rows;
    const std::size_t blocks = schedule.row_blocks().size();
    const auto heads = static_cast<std::size_t>(num_kv_heads);
    if (num_meetings_ < blocks * heads) {
      num_meetings_ = blocks * heads;
      meetings_ = std::make_unique<Meeting[]>(num_meetings_);
    }
    for (std::size_t b = 0; b < blocks; ++b)
      for (std::size_t h = 0; h < heads; ++h)
        meetings_[b * heads + h].open.store(schedule.row_blocks()[b].unit_count,
                                            std::memory_order_relaxed);
    const auto lines = static_cast<std::size_t>(rows_per_head_ * group) * heads;
    if (memory_.size() < lines * stride) memory_.resize(lines * stride);
    if (!ordered) clear(memory_.data(), static_cast<std::ptrdiff_t>(lines));
  }

  /// Makes `count` results empty.
  static void clear(float* results, std::ptrdiff_t count) noexcept {
    for (std::ptrdiff_t i = 0; i < count; ++i) set(results + i * stride, {empty_max, 0.0f});
  }
  /// What a result says about its line.
  static SoftmaxState softmax_of(const float* result) noexcept {
    return {result[dim], result[dim + 1]};
  }

  /// Merges a unit's lines into state.merged: for a worker that has all units, one after the other.
  static void merge_unit(const Unit& unit, const TaskLines& lines, State& state) noexcept {
    for (int head = lines.head_begin; head < lines.head_end; ++head)
      for (int l = lines.line(head, unit.row_begin); l < lines.line(head, unit.row_end); ++l)
        merge(state.merged_line(l), {state.max[l], state.sum[l]}, state.out + l * dim);
  }

  /// Leaves a unit's lines, of one head.
  void leave(const Unit& unit, const TaskLines& lines, const State& state) noexcept {
    const int first = lines.line(lines.head_begin, unit.row_begin);
    float* to = row(unit.partial_row, lines.head_begin);
    for (int l = first; l < first + unit.num_rows() * group_; ++l, to += stride) {
      std::copy_n(state.out + l * dim, dim, to);
      set(to, {state.max[l], state.sum[l]});
    }
  }
  /// Merges what the units of a row block left for one head, in order: finish(row, query head of
  /// the group, result) for each line.
  template <class Finish>
  void finish_left(const RowBlock& block, const Unit* units, int kv_head,
                   const Finish& finish) noexcept {
    for (int r = block.row_begin; r < block.row_end; ++r) {
      for (int l = 0; l < group_; ++l) {
        float result[stride];
        clear(result, 1);
        for (int u = 0; u < block.unit_count; ++u) {
          if (r < units[u].row_begin || r >= units[u].row_end) continue;
          const float* const from =
              row(units[u].partial_row + r - units[u].row_begin, kv_head) + l * stride;
          merge(result, softmax_of(from), from);
        }
        finish(r, l, result);
      }
    }
  }

  /// Merges a task's lines, of one head, into their rows' results under the lock.
  void merge_under_lock(int block, const TaskLines& lines, const State& state) noexcept {
    float* into = row(lines.row_begin, lines.head_begin);
    SpinLock& lock = meeting(block, lines.head_begin).lock;
    lock.lock();
    for (int l = 0; l < lines.per_head(); ++l, into += stride) {
      const SoftmaxState softmax{state.max[l], state.sum[l]};
      if (softmax.empty()) continue;
      merge(into, softmax, state.out + l * dim);
      CHUNKATTN_SPIN_LOCK_HOOK();
    }
    lock.unlock();
  }
  /// finish(row, query head of the group, result) for each line of a row block and head.
  template <class Finish>
  void finish_rows(const RowBlock& block, int kv_head, const Finish& finish) noexcept {
    for (int r = block.row_begin; r < block.row_end; ++r)
      for (int l = 0; l < group_; ++l) finish(r, l, row(r, kv_head) + l * stride);
  }

  /// Reports `units` units of a row block and head as done; whether they were the last.
  bool is_last(int block, int kv_head, int units) noexcept {
    return meeting(block, kv_head).open.fetch_sub(units, std::memory_order_acq_rel) == units;
  }

 private:
  /// Where the tasks of one row block and KV head meet.
  struct alignas(64) Meeting {
    SpinLock lock;
    std::atomic<int> open{0};  // units still to finish
  };

  static void set(float* result, SoftmaxState softmax) noexcept {
    result[dim] = softmax.max;
    result[dim + 1] = softmax.sum;
  }
  // Merges (softmax, out) of one line into a result.
  static void merge(float* into, SoftmaxState softmax, const float* out) noexcept {
    constexpr int width = simd::width_for<dim>;
    const SoftmaxState old = softmax_of(into);
    const MergedState merged = merge_states(old, softmax);
    if (old.empty()) {
      std::copy_n(out, dim, into);
    } else {
      for (int i = 0; i < dim; i += width)
        simd::store(
            into + i,
            simd::fma(simd::load<width>(out + i), simd::broadcast<width>(merged.weight_b),
                      simd::load<width>(into + i) * simd::broadcast<width>(merged.weight_a)));
    }
    set(into, merged.state);
  }

  // Results are [KV heads][rows][group].
  float* row(std::int64_t index, int kv_head) noexcept {
    return memory_.data() + (rows_per_head_ * kv_head + index) * group_ * stride;
  }
  Meeting& meeting(int block, int kv_head) noexcept {
    return meetings_[static_cast<std::size_t>(block) * static_cast<std::size_t>(num_kv_heads_) +
                     static_cast<std::size_t>(kv_head)];
  }

  Array<float> memory_;
  std::unique_ptr<Meeting[]> meetings_;
  std::size_t num_meetings_ = 0;
  std::int64_t rows_per_head_ = 0;
  int num_kv_heads_ = 1;
  int group_ = 1;
};

CHUNKATTN_PASS_END

#endif  // CHUNKATTN_ISA_PARTIAL_RESULTS
