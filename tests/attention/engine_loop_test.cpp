// A whole engine with real K/V: requests join while there is room, prompts are computed in parts,
// samples part from each other by fork(), sequences are preempted, and the kernels run on a thread
// of their own while the host changes the tree. However many steps are in flight, the answers are
// the same.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <future>
#include <map>
#include <memory>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

#include "chunkattn/chunkattn.hpp"
#include "chunkattn/debug/tree.hpp"
#include "tests/support/random.hpp"

using namespace chunkattn;

namespace {

constexpr int num_layers = 2, num_qo_heads = 4, num_kv_heads = 2, head_dim = 32, num_samples = 3;
using Tree = PrefixTree<int, 16>;

struct Request {
  std::vector<int> prompt;
  std::size_t new_tokens = 0;
  int samples = 1;  // so many answers, which part with their first token
};
// Without the prompt, by request and sample.
using Answers = std::map<std::pair<std::size_t, int>, std::vector<int>>;

class Engine {
 public:
  int preemptions = 0, held_for_sequence = 0, unknown_rows = 0;

  Engine(std::span<const Request> requests, std::size_t max_chunks, std::size_t max_in_flight)
      : requests_(requests),
        max_in_flight_(max_in_flight),
        tree_(PoolAllocator{.max_chunks = max_chunks}),
        plans_(max_in_flight) {
    for (std::size_t r = 0; r < requests.size(); ++r)
      waiting_.push_back({r, 0, requests[r].samples - 1, requests[r].prompt});
  }

  Answers serve() {
    while (!waiting_.empty() || !running_.empty()) {
      admit();
      const bool launched = launch();
      if (in_flight_.size() == max_in_flight_ || (!launched && !in_flight_.empty()))
        finish_oldest();
      else if (!launched)
        preempt();
      collect();
    }
    while (!in_flight_.empty()) finish_oldest();
    check_invariants(tree_);
    return std::move(answers_);
  }
  [[nodiscard]] TreeStats stats() const { return tree_.stats(); }

 private:
  static constexpr std::size_t step_tokens = 96, prefill_tokens = 48;

  struct Waiting {
    std::size_t request;
    int sample, to_fork;
    std::vector<int> tokens;  // the prompt, and what was generated before it was preempted
    bool preempted = false;
  };
  struct Running {
    std::size_t request;
    int sample, to_fork;
    Tree::Sequence sequence;
  };
  // What goes to the device, and what comes back.
  struct Job {
    LiveView view;
    std::vector<KvView<half>> layers;
    std::vector<int> tokens, positions;
    std::vector<std::pair<int, SequenceId>> unknown, outputs;    // rows whose token is its latest
    std::map<SequenceId, std::array<int, num_samples>> sampled;  // the likeliest first
  };
  struct Submitted {
    Tree::InFlight step;
    std::shared_ptr<Job> job;
    std::shared_future<void> done;
  };

  [[nodiscard]] std::size_t end_of(std::size_t request) const {
    return requests_[request].prompt.size() + requests_[request].new_tokens;
  }

  void admit() {
    for (; !waiting_.empty(); waiting_.pop_front()) {
      Waiting& next = waiting_.front();
      if (tree_.chunks_needed(next.tokens) + running_.size() + 1 > tree_.chunks_available()) break;
      running_.push_back({next.request, next.sample, next.to_fork,
                          tree_.insert(next.tokens, {.preempted = next.preempted})});
    }
  }

  void preempt() {
    REQUIRE(out_of_chunks_);
    REQUIRE(running_.size() > 1);
    Running& last = running_.back();
    waiting_.push_front({last.request, last.sample, last.to_fork, last.sequence.tokens(), true});
    running_.pop_back();
    ++preemptions;
  }

  // Plans a step and queues it. False if no sequence has rows.
  bool launch() {
    Tree::Step step = tree_.begin_step();
    auto job = std::make_shared<Job>();
    std::size_t budget = step_tokens;
    out_of_chunks_ = false;
    for (Running& r : running_) {
      if (budget == 0) break;
      if (r.sequence.size() + r.sequence.num_reserved() >= end_of(r.request)) continue;
      const AddResult added = step.add(r.sequence, std::min(budget, prefill_tokens));
      held_for_sequence += added.reason() == AddResult::Reason::waits_for_sequence;
      out_of_chunks_ |= added.reason() == AddResult::Reason::out_of_chunks;
      if (!added) continue;
      budget -= static_cast<std::size_t>(added.row().num_rows);
      if (added.row().has_output)
        job->outputs.push_back({added.row().output_row(), added.row().sequence});
    }
    const auto view = plans_[step.number() % plans_.size()].build(step);
    if (!view) return false;
    job->view = view;
    for (int layer = 0; layer < num_layers; ++layer) job->layers.push_back(cache_.layer(layer));
    job->tokens = view.tokens(/*placeholder=*/0);
    job->positions = view.positions();
    for (const auto& unknown : view.unknown_tokens())
      job->unknown.push_back({unknown.row, unknown.sequence});
    unknown_rows += static_cast<int>(job->unknown.size());
    const auto before = in_flight_.empty() ? std::shared_future<void>() : in_flight_.back().done;
    auto done = std::async(std::launch::async, [this, job, before] {
      if (before.valid()) before.wait();
      compute(*job);
    });
    in_flight_.push_back({std::move(step).submit(), std::move(job), done.share()});
    return true;
  }

  // On the device's thread. Stands in for a model and its sampling: the "logits" of a row are some
  // elements of its query and of what attention gives for it.
  void compute(Job& job) {
    for (const auto& [row, sequence] : job.unknown)
      job.tokens[static_cast<std::size_t>(row)] = latest_.at(sequence);
    std::vector<float> q, k, v, out;
    for (int layer = 0; layer < num_layers; ++layer) {
      for (auto* tensor : {&q, &k, &v}) tensor->clear();
      for (std::size_t row = 0; row < job.tokens.size(); ++row) {
        test::Random random(static_cast<std::uint64_t>(
            (job.tokens[row] * 1000 + job.positions[row]) * num_layers + layer));
        const auto fill = [&](std::vector<float>& tensor, int heads) {
          tensor.resize(tensor.size() + static_cast<std::size_t>(heads * head_dim));
          random.fill(std::span(tensor).last(static_cast<std::size_t>(heads * head_dim)));
        };
        fill(q, num_qo_heads), fill(k, num_kv_heads), fill(v, num_kv_heads);
      }
      out.assign(q.size(), 0.0f);
      const auto& kv = job.layers[static_cast<std::size_t>(layer)];
      attention_.write(kv, job.view, k, v);
      attention_.run(kv, job.view, q, out);
    }
    for (const auto& [row, sequence] : job.outputs) {
      const auto first = static_cast<std::size_t>(row * num_qo_heads * head_dim);
      const auto logit = [&](int token) {
        const std::size_t at = first + static_cast<std::size_t>(token);
        return q[at] + 8 * out[at];
      };
      std::array<int, head_dim> tokens{};
      std::iota(tokens.begin(), tokens.end(), 0);
      std::ranges::stable_sort(tokens, std::greater(), logit);
      std::copy_n(tokens.begin(), num_samples, job.sampled[sequence].begin());
      latest_[sequence] = tokens[0];
    }
  }

  void finish_oldest() {
    Submitted oldest = std::move(in_flight_.front());
    in_flight_.pop_front();
    oldest.done.get();
    Tree::Finished finished = std::move(oldest.step).finish();
    for (const ScheduledSequence& row : finished.rows()) {  // not of those that have left meanwhile
      const auto& sampled = oldest.job->sampled.at(row.sequence);
      const auto source = std::ranges::find(running_, row.sequence,
                                            [](const Running& r) { return r.sequence.id(); });
      REQUIRE(source != running_.end());
      std::vector<Running> forks;
      for (; source->to_fork > 0; --source->to_fork) {
        forks.push_back({source->request, source->to_fork, 0, source->sequence.fork()});
        forks.back().sequence.append(sampled[static_cast<std::size_t>(source->to_fork)]);
      }
      finished.commit(row, sampled[0]);
      std::ranges::move(forks, std::back_inserter(running_));
    }
  }

  void collect() {
    std::erase_if(running_, [&](const Running& r) {  // a handle that dies leaves
      if (r.sequence.size() < end_of(r.request)) return false;
      const auto tokens = r.sequence.tokens();
      answers_[{r.request, r.sample}].assign(
          tokens.begin() + static_cast<std::ptrdiff_t>(requests_[r.request].prompt.size()),
          tokens.begin() + static_cast<std::ptrdiff_t>(end_of(r.request)));
      return true;
    });
  }

  std::span<const Request> requests_;
  std::size_t max_in_flight_;
  Tree tree_;
  KvCache<Cpu, half> cache_{tree_, {num_layers, num_kv_heads, head_dim}};
  // A row's bits do not depend on what is computed beside it, so that answers can be compared.
  ChunkAttention<Cpu, head_dim> attention_{2, {.reduce = CpuOptions::Reduce::batch_invariant}};
  std::vector<AttentionPlan> plans_;  // a view ends when its plan builds the next
  std::deque<Waiting> waiting_;
  std::vector<Running> running_;
  std::deque<Submitted> in_flight_;
  std::map<SequenceId, int> latest_;  // the device's
  Answers answers_;
  bool out_of_chunks_ = false;
};

}  // namespace

TEST_CASE("one, two and four steps in flight give the same answers") {
  std::vector<Request> requests;
  for (int user = 1; user <= 8; ++user) {
    Request request{
        {}, 30 + static_cast<std::size_t>(user % 3) * 10, user % 3 == 0 ? num_samples : 1};
    for (int i = 0; i < 100; ++i) request.prompt.push_back(i);  // what all of them have in common
    for (int i = 0; i < 10; ++i) request.prompt.push_back(1000 * user + i);
    requests.push_back(std::move(request));
  }
  constexpr std::size_t max_chunks = 20;  // too few for all at once
  Answers expected;
  for (const std::size_t max_in_flight : {1u, 2u, 4u}) {
    CAPTURE(max_in_flight);
    Engine engine(requests, max_chunks, max_in_flight);
    const Answers answers = engine.serve();
    CHECK(answers.size() == 12);
    for (const auto& [who, answer] : answers)
      CHECK(answer.size() == requests[who.first].new_tokens);
    if (max_in_flight == 1) expected = answers;
    CHECK(answers == expected);
    CHECK(answers.at({2, 0}) != answers.at({2, 1}));
    CHECK(engine.preemptions > 0);
    CHECK((engine.unknown_rows > 0) == (max_in_flight > 1));
    CHECK(engine.held_for_sequence > 0);
    const TreeStats stats = engine.stats();
    CHECK(stats.forks > 0);
    CHECK(stats.cached_tokens + stats.pending_tokens > 500);
    std::size_t prompts = 0;
    for (const auto& request : requests) prompts += request.prompt.size();
    CHECK(stats.prompt_tokens == prompts);
    CHECK(stats.preempted_inserts == static_cast<std::size_t>(engine.preemptions));
    CHECK(stats.evicted_tokens > 0);
  }
}
