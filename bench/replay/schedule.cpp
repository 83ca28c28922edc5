#include "schedule.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chunkattn/attention_plan.hpp>
#include <chunkattn/prefix_tree.hpp>
#include <cstdint>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "cost_model.hpp"
#include "orders.hpp"
#include "trace.hpp"

namespace replay {
namespace {

constexpr int chunk_size = 64;
using Tree = chunkattn::PrefixTree<Token, chunk_size>;

struct Report {
  double seconds = 0;       ///< until the last request ended
  double reuse = 0;         ///< mean over the steps that decode
  double reuse_in_all = 0;  ///< their row tokens / their distinct tokens, summed first
  double hits = 0;          ///< cached or pending tokens / prompt tokens
  double ttft_mean = 0, ttft_p50 = 0, ttft_p99 = 0;
  std::size_t longest_queue = 0;
};

class Simulation {
 public:
  Simulation(std::span<const Request> requests, const CostModel& cost, Tree& tree, Order& order)
      : requests_(requests), cost_(cost), tree_(tree), order_(order) {}

  Report run() {
    while (next_ < requests_.size() || order_.size() > 0 || !running_.empty()) {
      if (order_.size() == 0 && running_.empty()) now_ = std::max(now_, requests_[next_].arrival);
      for (; next_ < requests_.size() && requests_[next_].arrival <= now_; ++next_)
        order_.arrives(next_);
      report_.longest_queue = std::max(report_.longest_queue, order_.size());
      admit();
      step();
    }
    return summary();
  }

 private:
  struct Running {
    Tree::Sequence sequence;
    std::size_t request = 0;
    int left = 0;            ///< tokens to generate
    std::size_t growth = 0;  ///< chunks that its outputs may take
    bool decodes = false;
  };

  /// What joins has room for all its outputs, so that nothing is ever preempted.
  void admit() {
    while (order_.size() > 0 && running_.size() < cost_.max_sequences) {
      const std::size_t r = order_.next();
      const Request& request = requests_[r];
      const auto growth = static_cast<std::size_t>(request.output) / chunk_size + 2;
      if (tree_.chunks_needed(request.prompt) + growth + growth_ > tree_.chunks_available()) {
        if (running_.empty()) throw std::runtime_error("a request has no room by itself");
        return;
      }
      order_.admitted(r);
      running_.push_back({tree_.insert(request.prompt), r, request.output, growth});
      growth_ += growth;
    }
  }

  void step() {
    auto step = tree_.begin_step();
    std::size_t row_tokens = 0, distinct = 0;
    ++mark_;
    for (Running& one : running_) {
      if (!one.decodes) continue;
      if (!step.add(one.sequence)) throw std::runtime_error("out of chunks");
      row_tokens += one.sequence.size();
      distinct += count_distinct(one.sequence);
    }
    std::size_t left = cost_.step_tokens;
    for (Running& one : running_) {
      if (one.decodes || left == 0) continue;
      if (const auto added = step.add(one.sequence, left))
        left -= static_cast<std::size_t>(added.row().num_rows);
    }
    now_ += cost_.seconds(static_cast<std::size_t>(step.num_rows()), distinct);
    if (distinct > 0) {
      reuse_sum_ += double(row_tokens) / double(distinct);
      ++decoding_steps_;
      row_tokens_ += row_tokens;
      distinct_ += distinct;
    }
    (void)plan_.build(step);
    auto finished = std::move(step).finish();
    for (const chunkattn::ScheduledSequence row : finished.rows()) {
      Running& one = *std::find_if(running_.begin(), running_.end(), [&](const Running& other) {
        return other.sequence.id() == row.sequence;
      });
      finished.commit(row, 0x40000000u + static_cast<Token>(one.request));
      if (!one.decodes) ttft_.push_back(now_ - requests_[one.request].arrival);
      one.decodes = true;
      --one.left;
    }
    std::erase_if(running_, [&](Running& one) {
      if (one.left > 0) return false;
      growth_ -= one.growth;
      order_.ended(one.request);
      return true;
    });
  }

  /// Tokens of its path that no sequence before it in this step has counted.
  std::size_t count_distinct(const Tree::Sequence& sequence) {
    const auto& core = chunkattn::detail::TreeAccess::core(tree_);
    const auto index = static_cast<chunkattn::detail::SequenceIndex>(
        (static_cast<std::uint64_t>(sequence.id()) - 1) & 0xffffffffu);
    marks_.resize(std::max(marks_.size(), core.topology.num_indices()));
    std::size_t count = 0;
    for (auto n = core.sequences[index].tail; n != chunkattn::detail::root_node;
         n = core.topology.node(n).parent) {
      auto& mark = marks_[static_cast<std::size_t>(n)];
      if (mark == mark_) break;
      mark = mark_;
      count += static_cast<std::size_t>(core.topology.node(n).length);
    }
    return count;
  }

  Report summary() {
    std::sort(ttft_.begin(), ttft_.end());
    const auto rank = [&](double p) {
      return ttft_[std::min(ttft_.size() - 1, static_cast<std::size_t>(p * double(ttft_.size())))];
    };
    for (const double t : ttft_) report_.ttft_mean += t / double(ttft_.size());
    report_.ttft_p50 = rank(0.5);
    report_.ttft_p99 = rank(0.99);
    report_.seconds = now_;
    if (decoding_steps_ > 0) {
      report_.reuse = reuse_sum_ / double(decoding_steps_);
      report_.reuse_in_all = double(row_tokens_) / double(distinct_);
    }
    const auto stats = tree_.stats();
    report_.hits = double(stats.cached_tokens + stats.pending_tokens) / double(stats.prompt_tokens);
    return report_;
  }

  std::span<const Request> requests_;
  CostModel cost_;
  Tree& tree_;
  Order& order_;
  chunkattn::AttentionPlan plan_;
  double now_ = 0;
  std::size_t next_ = 0, growth_ = 0;
  std::vector<Running> running_;
  std::vector<std::uint64_t> marks_;  // by node: the step that counted it
  std::uint64_t mark_ = 0;
  double reuse_sum_ = 0;
  std::size_t decoding_steps_ = 0, row_tokens_ = 0, distinct_ = 0;
  std::vector<double> ttft_;
  Report report_;
};

template <class MakeOrder>
void run(const char* workload, const char* order_name, std::span<const Request> requests,
         const CostModel& cost, const MakeOrder& make_order) {
  Tree tree(chunkattn::PoolAllocator{.max_chunks = cost.kv_tokens / chunk_size});
  const std::unique_ptr<Order> order = make_order(tree);
  const Report report = Simulation(requests, cost, tree, *order).run();
  fmt::print(
      "| {:<8} | {:<6} | {:>5.2f} | {:>6.2f} | {:>6.1f} | {:>7.1f} | {:>7.1f} | {:>7.1f} | "
      "{:>7.0f} | {:>7} |\n",
      workload, order_name, report.reuse, report.reuse_in_all, 100 * report.hits, report.ttft_mean,
      report.ttft_p50, report.ttft_p99, report.seconds, report.longest_queue);
}

void run_all(const char* workload, const std::vector<Request>& requests, const CostModel& cost) {
  if (requests.empty()) return;
  run(workload, "fcfs", requests, cost, [](Tree&) { return std::make_unique<Fcfs>(); });
  run(workload, "cache", requests, cost,
      [&](Tree& tree) { return std::make_unique<Cache<Tree>>(tree, requests); });
  run(workload, "greedy", requests, cost,
      [&](Tree&) { return std::make_unique<Greedy>(requests); });
}

}  // namespace

void run_schedules(const char* name, std::span<const TracedRequest> trace) {
  fmt::print(
      "| load     | order  | reuse | in all | hits % |    TTFT |     p50 |     p99 | seconds |"
      "   queue |\n| -------- | ------ | ----: | -----: | -----: | ------: | ------: |"
      " ------: | ------: | ------: |\n");
  run_all("groups", groups_of_users(), CostModel{});
  run_all(name, trace_requests(trace), CostModel{}.scaled(trace_scale));
}

}  // namespace replay
