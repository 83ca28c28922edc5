// TaskQueue: which worker computes what in one call. Jobs (row blocks of the schedule, or rows)
// times KV heads times the parts of a job are given to the workers on request, the most expensive
// jobs first.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "../support/array.hpp"
#include "../support/config.hpp"
#include "../support/instruction_sets.hpp"

CHUNKATTN_ISA_DETAIL_BEGIN
namespace cpu {

/// KV heads [head_begin, head_end) and parts [part_begin, part_end) of a job: several heads with
/// all parts, or one head with some.
struct Task {
  std::int32_t job;
  std::int32_t head_begin;
  std::int32_t head_end;
  std::int32_t part_begin;
  std::int32_t part_end;
};

/// The size of a job, for the queue.
struct JobSize {
  double cost;             ///< of all parts, for one KV head
  std::int32_t parts;      ///< of about equal cost
  std::int32_t max_heads;  ///< that one worker can take at once
};

/// Memory holds the KV heads of a chunk one after the other, so a worker that takes several heads
/// of a job reads long stretches; one that takes several parts of a head merges them in its own
/// cache. Towards the end tasks become small, so that all workers end together.
class TaskQueue {
 public:
  /// \param size  size(job) is its JobSize
  template <class Size>
  void reset(int num_jobs, int num_heads, int threads, const Size& size) {
    num_heads_ = num_heads;
    threads_ = threads;
    jobs_.resize(static_cast<std::size_t>(num_jobs));
    for (int j = 0; j < num_jobs; ++j) jobs_[static_cast<std::size_t>(j)] = {size(j), j, 0, 0};
    line_up();
  }

  /// Jobs times heads times parts: no more tasks than this.
  [[nodiscard]] int size() const noexcept { return size_; }

  /// Takes the next task; false if none is left. Any number of threads may call it at once, with
  /// one counter that begins at 0.
  bool take(std::atomic<int>& next, Task& task) const noexcept {
    int at = next.load(std::memory_order_relaxed);
    int end;
    do {
      if (at >= size_) return false;
      const Job& job = *(std::upper_bound(jobs_.begin(), jobs_.end(), at,
                                          [](int i, const Job& j) { return i < j.begin; }) -
                         1);
      end = at + choose(job, at - job.begin, task);
    } while (!next.compare_exchange_weak(at, end, std::memory_order_relaxed));
    return true;
  }

 private:
  struct Job {
    JobSize size;
    std::int32_t index;
    std::int32_t begin;  // among all jobs' heads and parts
    double left;         // cost of this job and all that follow, all heads
  };

  // Puts the jobs in the order in which they are handed out.
  void line_up() {
    std::sort(jobs_.begin(), jobs_.end(), [](const Job& a, const Job& b) {
      return a.size.cost != b.size.cost ? a.size.cost > b.size.cost : a.index < b.index;
    });
    size_ = 0;
    for (Job& job : jobs_) {
      job.begin = size_;
      size_ += num_heads_ * job.size.parts;
    }
    double left = 0;
    for (std::size_t j = jobs_.size(); j-- > 0;) {
      left += jobs_[j].size.cost * num_heads_;
      jobs_[j].left = left;
    }
  }

  // The task that begins at part `at`, counted over all heads; returns how many parts it has.
  int choose(const Job& job, int at, Task& task) const noexcept {
    const int parts = job.size.parts;
    const int head = at / parts;
    const int part = at % parts;
    const double part_cost = job.size.cost / parts;
    // Half of the worker's fair share of what is left.
    const double share = (job.left - part_cost * at) / (2.0 * threads_);
    // At most `most` pieces of `cost` each, at least one.
    const auto within_share = [&](int most, double cost) {
      return cost * most <= share ? most : (std::max)(1, static_cast<int>(share / cost));
    };
    if (part == 0 && (parts == 1 || job.size.cost <= share)) {
      const int heads =
          within_share((std::min)(job.size.max_heads, num_heads_ - head), job.size.cost);
      task = {job.index, head, head + heads, 0, parts};
      return heads * parts;
    }
    const int count = within_share(parts - part, part_cost);
    task = {job.index, head, head + 1, part, part + count};
    return count;
  }

  Array<Job> jobs_;
  int size_ = 0;
  int num_heads_ = 1;
  int threads_ = 1;
};

}  // namespace cpu
CHUNKATTN_ISA_DETAIL_END
