// Partial results of a row block whose walk was cut into splits, and how they become one: in order
// (the same bits whoever computed which split), or as they come under a spin lock.
#ifndef CHUNKATTN_ISA_PARTIAL_RESULTS
#define CHUNKATTN_ISA_PARTIAL_RESULTS

#include "line_state.hpp"
#include "pass.hpp"
#include "simd.hpp"

CHUNKATTN_PASS_BEGIN(VECTORS)

/// A partial result is what a split leaves of a line, unnormalised output, maximum and sum, or what
/// several have become: its LineTotal. While its sum is 0 the output is not looked at.
template <class State>
class PartialResults {
 public:
  using Total = typename State::Total;
  static constexpr int dim = State::value_dim;
  static constexpr int stored_stride = dim + 16;

  /// Makes room for what splits store (ordered), or for one result of each row (under locks).
  /// Allocates only beyond what was seen before.
  void reset(const Schedule& schedule, int num_rows, int num_kv_heads, int group, bool ordered) {
    num_kv_heads_ = num_kv_heads;
    group_ = group;
    rows_per_head_ = ordered ? schedule.num_partial_rows() : num_rows;
    const std::size_t blocks = schedule.row_blocks().size();
    const auto heads = to_size(num_kv_heads);
    if (num_meetings_ < blocks * heads) {
      num_meetings_ = blocks * heads;
      meetings_ = std::make_unique<Meeting[]>(num_meetings_);
    }
    for (std::size_t b = 0; b < blocks; ++b)
      for (std::size_t h = 0; h < heads; ++h)
        meetings_[b * heads + h].open.store(schedule.row_blocks()[b].split_count,
                                            std::memory_order_relaxed);
    const auto lines = to_size(rows_per_head_ * group) * heads;
    stride_ = ordered ? stored_stride : Total::stride;
    const std::size_t size = lines * to_size(stride_);
    if (memory_.size() < size) memory_.resize(size);
    if (!ordered) clear(memory_.data(), static_cast<std::ptrdiff_t>(lines));
  }

  /// Fills all results, between calls: see LineState::poison().
  void poison(float value) noexcept { std::fill(memory_.begin(), memory_.end(), value); }

  /// Makes `count` results empty.
  static void clear(float* results, std::ptrdiff_t count) noexcept {
    for (std::ptrdiff_t i = 0; i < count; ++i) Total{results + i * Total::stride}.clear();
  }

  /// Merges a split's lines into state.merged: for a worker that has all splits, one after the
  /// other.
  static void merge_split(const Split& split, const TaskLines& lines, State& state) noexcept {
    for (int head = lines.head_begin; head < lines.head_end; ++head)
      for (int l = lines.line(head, split.row_begin); l < lines.line(head, split.row_end); ++l)
        merge(state.merged_line(l), state.softmax(l), state.out + l * dim, state.merged_line(l));
  }

  /// Stores a split's lines, of one head.
  void store_split(const Split& split, const TaskLines& lines, const State& state) noexcept {
    const int first = lines.line(lines.head_begin, split.row_begin);
    float* to = row(split.partial_row, lines.head_begin);
    for (int l = first; l < first + split.num_rows() * group_; ++l, to += stored_stride) {
      std::copy_n(state.out + l * dim, dim, to);
      to[dim] = state.max[l];
      to[dim + 1] = state.sum[l];
    }
  }
  /// Merges what the splits of a row block have stored for one head, in order: finish(row, query
  /// head of the group, result) for each line.
  template <class Finish>
  void finish_stored(const RowBlock& block, const Split* splits, int kv_head,
                     const Finish& finish) noexcept {
    alignas(64) float memory[Total::stride] = {};
    const Total result{memory};
    for (int r = block.row_begin; r < block.row_end; ++r) {
      for (int l = 0; l < group_; ++l) {
        result.clear();
        for (int u = 0; u < block.split_count; ++u) {
          if (r < splits[u].row_begin || r >= splits[u].row_end) continue;
          const float* const from =
              row(splits[u].partial_row + r - splits[u].row_begin, kv_head) + l * stored_stride;
          merge(result, {from[dim], from[dim + 1]}, from, result);
        }
        finish(r, l, result);
      }
    }
  }

  /// Reports `splits` splits of a row block and head as done and, but for the last ones, merges
  /// their task's lines into their rows' results, under the lock. Returns whether they were the
  /// last.
  bool merge_under_lock(int block, int splits, const TaskLines& lines,
                        const State& state) noexcept {
    Meeting& meeting = this->meeting(block, lines.head_begin);
    meeting.lock.lock();
    const bool last = report_finished(block, lines.head_begin, splits);
    float* into = row(lines.row_begin, lines.head_begin);
    for (int l = 0; l < lines.per_head() && !last; ++l, into += Total::stride) {
      if (state.softmax(l).empty()) continue;
      merge({into}, state.softmax(l), state.out + l * dim, {into});
      CHUNKATTN_SPIN_LOCK_HOOK();
    }
    meeting.lock.unlock();
    return last;
  }
  /// The last task's lines with what the others made of theirs: finish(row, query head of the
  /// group, result) for each line of the row block.
  template <class Finish>
  void finish_last(const RowBlock& block, const TaskLines& lines, const State& state,
                   const Finish& finish) noexcept {
    alignas(64) float memory[Total::stride] = {};
    for (int r = block.row_begin; r < block.row_end; ++r) {
      const bool own = r >= lines.row_begin && r < lines.row_end;
      for (int l = 0; l < group_; ++l) {
        Total result{row(r, lines.head_begin) + l * Total::stride};
        const int line = lines.line(lines.head_begin, r) + l;
        if (own) {
          merge(result, state.softmax(line), state.out + line * dim, {memory});
          result = {memory};
        }
        finish(r, l, result);
      }
    }
  }

  /// Reports `splits` splits of a row block and head as done; whether they were the last.
  bool report_finished(int block, int kv_head, int splits) noexcept {
    return meeting(block, kv_head).open.fetch_sub(splits, std::memory_order_acq_rel) == splits;
  }

 private:
  /// Where the tasks of one row block and KV head meet.
  struct alignas(64) Meeting {
    SpinLock lock;
    std::atomic<int> open{0};  // splits still to finish
  };

  // A result and another part of it: together they are `to`, which may be the same result.
  static void merge(Total result, SoftmaxState softmax, const float* out, Total to) noexcept {
    if (result.softmax().empty())
      to.start(softmax, out);
    else
      result.add(softmax, out, to);
  }

  // Results are [KV heads][rows][group].
  float* row(std::int64_t index, int kv_head) noexcept {
    return memory_.data() + (rows_per_head_ * kv_head + index) * group_ * stride_;
  }
  Meeting& meeting(int block, int kv_head) noexcept {
    return meetings_[to_size(block) * to_size(num_kv_heads_) + to_size(kv_head)];
  }

  Array<float> memory_;
  std::unique_ptr<Meeting[]> meetings_;
  std::size_t num_meetings_ = 0;
  std::int64_t rows_per_head_ = 0;
  int num_kv_heads_ = 1;
  int group_ = 1;
  int stride_ = stored_stride;  // floats of a result
};

CHUNKATTN_PASS_END

#endif  // CHUNKATTN_ISA_PARTIAL_RESULTS
