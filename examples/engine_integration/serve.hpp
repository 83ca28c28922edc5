// The engine's loop, twice: one step at a time, and with two steps on the device, so that the host
// plans the next step while the device runs this one. Both give the same texts.
#pragma once

#include <algorithm>
#include <array>
#include <chunkattn/chunkattn.hpp>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <numeric>
#include <queue>
#include <span>
#include <stdexcept>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "engine.hpp"

namespace engine {

struct Request {
  std::vector<Token> prompt;
  std::size_t new_tokens = 0;
  int num_samples = 1;  ///< so many answers, which part with their first token
};
/// Answers, without the prompt, by request and sample.
using Answers = std::vector<std::vector<std::vector<Token>>>;

struct ServeStats {
  int steps = 0, preemptions = 0;
  std::size_t drafts = 0, accepted = 0;
  std::size_t held_for_sequence = 0, held_for_step = 0;  ///< times that a sequence had to wait
  chunkattn::TreeStats tree;
};

/// Stands in for a model and its sampling. Queries, K and V are drawn from token, position and
/// layer; the "logits" of a row are some elements of its query and of what attention gives it.
class ToyModel {
 public:
  static constexpr int num_layers = 2, num_qo_heads = 8, num_kv_heads = 4, head_dim = 64;
  static constexpr int vocabulary = 6;

  std::vector<float> q, k, v, out;  ///< [rows][heads][head_dim]

  /// What stands before attention in a layer: normalisation, projection and the rotary embedding of
  /// q and k, for which the positions are there. K goes into the cache rotated.
  void project(int layer, std::span<const Token> tokens, std::span<const std::int32_t> positions) {
    q.clear(), k.clear(), v.clear();
    for (std::size_t row = 0; row < tokens.size(); ++row) {
      std::uint32_t x = static_cast<std::uint32_t>(tokens[row]) * 2654435761u +
                        static_cast<std::uint32_t>(positions[row]) * 40503u +
                        static_cast<std::uint32_t>(layer);
      const auto fill = [&](std::vector<float>& to, int heads) {
        for (int i = 0; i < heads * head_dim; ++i) {
          x = x * 1664525u + 1013904223u;
          to.push_back(static_cast<float>(x >> 8) / 8388608.0f - 1.0f);
        }
      };
      fill(q, num_qo_heads);
      fill(k, num_kv_heads);
      fill(v, num_kv_heads);
    }
    out.assign(q.size(), 0.0f);
  }

  /// The likeliest token after this row, or the next likeliest.
  [[nodiscard]] Token sample(int row, int rank = 0) const {
    const auto at = static_cast<std::size_t>(row) * num_qo_heads * head_dim;
    const auto logit = [&](Token token) {
      const std::size_t i = at + static_cast<std::size_t>(token);
      return q[i] + 8 * out[i];
    };
    std::array<Token, vocabulary> tokens{};
    std::iota(tokens.begin(), tokens.end(), 0);
    std::stable_sort(tokens.begin(), tokens.end(),
                     [&](Token a, Token b) { return logit(a) > logit(b); });
    return tokens[static_cast<std::size_t>(rank)];
  }
};

using Tree = chunkattn::PrefixTree<Token, 16, chunkattn::PoolAllocator, chunkattn::Lru>;
using Cache = chunkattn::KvCache<chunkattn::Cpu, chunkattn::half>;
using Attention =
    chunkattn::ChunkAttention<chunkattn::Cpu, ToyModel::head_dim, ToyModel::head_dim, Threads>;
using LayerViews = std::vector<chunkattn::KvView<chunkattn::half>>;

/// One forward pass over a step's rows.
inline void forward(ToyModel& model, Attention& attention, const LayerViews& layers,
                    const chunkattn::LiveView& view, std::span<const Token> tokens,
                    std::span<const std::int32_t> positions) {
  for (std::size_t layer = 0; layer < layers.size(); ++layer) {
    model.project(static_cast<int>(layer), tokens, positions);
    attention.write(layers[layer], view, model.k, model.v);
    attention.run(layers[layer], view, model.q, model.out);
  }
}

/// What both loops have in common: who waits, who runs, who is done.
class Server {
 public:
  /// \param max_chunks  K/V memory, in chunks of 16 tokens
  Server(std::span<const Request> requests, std::size_t max_chunks, Threads& threads)
      : requests_(requests),
        tree_(chunkattn::PoolAllocator{.max_chunks = max_chunks}),
        cache_(tree_, {.num_layers = ToyModel::num_layers,
                       .num_kv_heads = ToyModel::num_kv_heads,
                       .head_dim = ToyModel::head_dim}),
        // A row's bits do not depend on the batch, so that the two loops can be compared.
        attention_(threads, {.reduce = chunkattn::CpuOptions::Reduce::batch_invariant}) {
    for (std::size_t r = 0; r < requests.size(); ++r) {
      const Request& request = requests[r];
      waiting_.push_back({r, 0, request.prompt, request.prompt.size() + request.new_tokens,
                          request.num_samples - 1});
      answers_.emplace_back(static_cast<std::size_t>(request.num_samples));
    }
  }

 protected:
  static constexpr std::size_t step_tokens = 96;    ///< query tokens of one step
  static constexpr std::size_t prefill_chunk = 48;  ///< of one sequence

  struct Live {
    std::size_t request = 0, sample = 0;
    Tree::Sequence sequence;
    std::size_t end = 0;  ///< tokens at which it is done
    int to_fork = 0;      ///< further samples that part from it
  };
  struct Waiting {
    std::size_t request = 0, sample = 0;
    std::vector<Token> tokens;  ///< the prompt, and what was generated before it was preempted
    std::size_t end = 0;
    int to_fork = 0;
  };

  /// Requests join while there is room for their prompts and one chunk more for each that runs.
  void admit() {
    for (; !waiting_.empty(); waiting_.pop_front()) {
      Waiting& next = waiting_.front();
      const chunkattn::InsertOptions options{.name_space = {.tenant = 7}};
      if (tree_.slots_needed(next.tokens, options) + running_.size() + 1 >
          tree_.slots_available()) {
        if (running_.empty()) throw std::runtime_error("a prompt larger than all of K/V memory");
        return;
      }
      running_.push_back(
          {next.request, next.sample, tree_.insert(next.tokens, options), next.end, next.to_fork});
    }
  }

  /// The one that joined last leaves and waits again. What it had computed stays as cache while
  /// there is room. (swap_out() and resume() keep it in host memory.)
  void preempt() {
    if (running_.size() == 1) throw std::runtime_error("an answer larger than all of K/V memory");
    Live& last = running_.back();
    waiting_.push_front(
        {last.request, last.sample, last.sequence.tokens(), last.end, last.to_fork});
    running_.pop_back();
    ++stats_.preemptions;
  }

  /// Counts why a sequence has no rows in this step. It is tried again in the next.
  void hold(const chunkattn::AddResult& result) {
    switch (result.reason()) {
      case chunkattn::AddResult::Reason::waits_for_sequence:
        // It shares a prefix that result.waits_for() is still to compute and that is not in this
        // step or an earlier one. An engine that knows better than first come, first served can add
        // that sequence first, or let this one take_over() the work.
        ++stats_.held_for_sequence;
        break;
      case chunkattn::AddResult::Reason::waits_for_step:
        ++stats_.held_for_step;  // until result.step() has finished
        break;
      case chunkattn::AddResult::Reason::out_of_chunks:
        out_of_chunks_ = true;
        break;
      case chunkattn::AddResult::Reason::nothing_to_compute:  // its last output was given up:
                                                              // append()
      case chunkattn::AddResult::Reason::none:
        break;
    }
  }

  [[nodiscard]] Live* find(chunkattn::SequenceId id) {
    for (Live& live : running_)
      if (live.sequence.id() == id) return &live;
    return nullptr;
  }

  /// Further samples share all of the prompt and part from it here: before the output is committed.
  /// \param token_of  the token that is so likely
  template <class TokenOf>
  void fork_samples(chunkattn::SequenceId id, const TokenOf& token_of) {
    const int to_fork = std::exchange(find(id)->to_fork, 0);
    for (int rank = 1; rank <= to_fork; ++rank) {
      const Live& from = *find(id);  // running_ grows
      Live twin{from.request, static_cast<std::size_t>(rank), {}, from.end, 0};
      twin.sequence = find(id)->sequence.fork();
      twin.sequence.append(token_of(rank));
      running_.push_back(std::move(twin));
    }
  }

  void collect() {
    std::erase_if(running_, [&](Live& live) {  // a handle that dies leaves
      if (live.sequence.size() < live.end) return false;
      const auto tokens = live.sequence.tokens();
      const auto prompt = static_cast<std::ptrdiff_t>(requests_[live.request].prompt.size());
      answers_[live.request][live.sample].assign(
          tokens.begin() + prompt, tokens.begin() + static_cast<std::ptrdiff_t>(live.end));
      return true;
    });
  }

  [[nodiscard]] LayerViews layers() {  // anew in each step: the cache grows with the tree
    LayerViews views;
    for (int layer = 0; layer < ToyModel::num_layers; ++layer) views.push_back(cache_.layer(layer));
    return views;
  }

  std::span<const Request> requests_;
  Tree tree_;
  Cache cache_;
  Attention attention_;
  ToyModel model_;
  std::deque<Waiting> waiting_;
  std::vector<Live> running_;
  Answers answers_;
  ServeStats stats_;
  bool out_of_chunks_ = false;
};

/// One step at a time, with drafts.
class SyncServer : private Server {
 public:
  using Server::Server;

  Answers run(ServeStats& stats) {
    while (!waiting_.empty() || !running_.empty()) {
      admit();
      run_step();
      collect();
      ++stats_.steps;
    }
    tree_.check_invariants();
    stats = stats_;
    stats.tree = tree_.stats();
    return std::move(answers_);
  }

 private:
  void run_step() {
    Tree::Step step = tree_.begin_step();
    out_of_chunks_ = false;
    std::size_t budget = step_tokens;
    for (Live& live : running_) {  // any order, any part of them
      if (budget == 0) break;
      // A guess of what comes next: here the latest token again, twice.
      const std::vector<Token> drafts(2, live.sequence.token(live.sequence.size() - 1));
      const auto added =
          step.add(live.sequence, std::min(budget, prefill_chunk), {.tokens = drafts});
      if (added)
        budget -= static_cast<std::size_t>(added.row().num_rows);
      else
        hold(added);
    }
    const auto view = plan_.build(step);  // once for all layers
    if (!view) {                          // nobody has rows, so nothing will become free by itself
      if (out_of_chunks_) preempt();
      return;
    }
    const std::vector<Token> tokens = view.tokens();  // row by row, in the order of add()
    forward(model_, attention_, layers(), view, tokens, view.positions());

    Tree::Finished finished = std::move(step).finished();    // the kernels have run
    for (const chunkattn::StepRow& row : finished.rows()) {  // parts of a prompt are not among them
      fork_samples(row.sequence, [&](int rank) { return model_.sample(row.output_row(), rank); });
      // Greedy verification: drafts are right as long as they are what is sampled anyway.
      std::vector<Token> outputs{model_.sample(row.output_row())};
      const Live& live = *find(row.sequence);
      for (int draft = 1; draft <= row.num_drafts; ++draft) {
        if (tokens[static_cast<std::size_t>(row.output_row() + draft)] != outputs.back()) break;
        outputs.push_back(model_.sample(row.output_row() + draft));
      }
      stats_.drafts += static_cast<std::size_t>(row.num_drafts);
      stats_.accepted += outputs.size() - 1;
      outputs.resize(std::min(outputs.size(), live.end - live.sequence.size()));
      finished.commit(row, outputs);
    }
  }

  chunkattn::AttentionPlan plan_;
};

/// The queue of a device: jobs run one after the other, while the host goes on. (A CUDA stream is
/// this.)
class Device {
 public:
  Device() : thread_([this] { work(); }) {}
  ~Device() {
    enqueue({});
    thread_.join();
  }
  void enqueue(std::function<void()> job) {
    const std::lock_guard lock(mutex_);
    jobs_.push(std::move(job));
    ready_.notify_one();
  }

 private:
  void work() {
    for (;;) {
      std::unique_lock lock(mutex_);
      ready_.wait(lock, [&] { return !jobs_.empty(); });
      const std::function<void()> job = std::move(jobs_.front());
      jobs_.pop();
      lock.unlock();
      if (!job) return;
      job();
    }
  }
  std::mutex mutex_;
  std::condition_variable ready_;
  std::queue<std::function<void()>> jobs_;
  std::thread thread_;
};

/// Two steps on the device: while it runs one, the host plans the next, whose input tokens are the
/// outputs of the first, known to the device alone.
class AsyncServer : private Server {
 public:
  using Server::Server;

  Answers run(ServeStats& stats) {
    while (!waiting_.empty() || !running_.empty()) {
      admit();
      const bool launched = launch();
      if (in_flight_.size() == 2 || (!launched && !in_flight_.empty()))
        finish_oldest();
      else if (!launched && out_of_chunks_)
        preempt();
      collect();
    }
    while (!in_flight_.empty()) finish_oldest();
    tree_.check_invariants();
    stats = stats_;
    stats.tree = tree_.stats();
    return std::move(answers_);
  }

 private:
  /// What goes to the device, and what comes back.
  struct Job {
    chunkattn::LiveView view;
    LayerViews layers;
    std::vector<Token> tokens;
    std::vector<std::int32_t> positions;
    std::vector<std::pair<int, chunkattn::SequenceId>> unknown;  ///< rows that want its last token
    std::vector<std::pair<int, chunkattn::SequenceId>> outputs;  ///< rows to sample from
    std::vector<std::array<Token, 3>> sampled;                   ///< of each, by likelihood
    std::promise<void> done;
  };
  struct Submitted {
    Tree::InFlight step;
    std::shared_ptr<Job> job;
  };

  /// Plans a step and queues it. False if nobody has rows.
  bool launch() {
    Tree::Step step = tree_.begin_step();
    out_of_chunks_ = false;
    auto job = std::make_shared<Job>();
    std::size_t budget = step_tokens;
    for (Live& live : running_) {
      if (budget == 0) break;
      // Enough outputs are known or on their way.
      if (live.sequence.size() + live.sequence.num_reserved() >= live.end) continue;
      const auto added = step.add(live.sequence, std::min(budget, prefill_chunk));
      if (!added) {
        hold(added);
        continue;
      }
      budget -= static_cast<std::size_t>(added.row().num_rows);
      if (added.row().has_output)
        job->outputs.push_back({added.row().output_row(), added.row().sequence});
    }
    // Views of a plan end when it builds the next: as many plans as steps in flight. (The CUDA
    // backend takes what it needs while the step is queued; there one plan is enough.)
    const auto view = plans_[step.number() % 2].build(step);
    if (!view) return false;  // the step is dropped: nothing has happened
    job->view = view;
    job->layers = layers();  // here: the tree is not to be asked while it changes
    job->tokens = view.tokens(/*placeholder=*/0);
    job->positions = view.positions();
    for (const auto& unknown : view.unknown_tokens())
      job->unknown.push_back({unknown.row, unknown.sequence});
    device_.enqueue([this, job] { run_on_device(*job); });
    in_flight_.push_back({std::move(step).submitted(), std::move(job)});
    return true;
  }

  void run_on_device(Job& job) {  // on the device's thread, which alone touches these members
    for (const auto& [row, sequence] : job.unknown)
      job.tokens[static_cast<std::size_t>(row)] = last_token_.at(sequence);
    forward(model_, attention_, job.layers, job.view, job.tokens, job.positions);
    for (const auto& [row, sequence] : job.outputs) {
      job.sampled.push_back({model_.sample(row, 0), model_.sample(row, 1), model_.sample(row, 2)});
      last_token_[sequence] = job.sampled.back()[0];
    }
    job.done.set_value();
  }

  void finish_oldest() {
    Submitted oldest = std::move(in_flight_.front());
    in_flight_.pop_front();
    oldest.job->done.get_future().wait();
    Tree::Finished finished = std::move(oldest.step).finished();
    ++stats_.steps;
    std::size_t output = 0;
    for (const chunkattn::StepRow& row : finished.rows()) {  // not those that have left meanwhile
      while (oldest.job->outputs[output].second != row.sequence) ++output;
      const auto& sampled = oldest.job->sampled[output];
      fork_samples(row.sequence, [&](int rank) { return sampled[static_cast<std::size_t>(rank)]; });
      finished.commit(row, sampled[0]);
    }
  }

  std::array<chunkattn::AttentionPlan, 2> plans_;
  std::deque<Submitted> in_flight_;
  std::unordered_map<chunkattn::SequenceId, Token> last_token_;
  Device device_;  // last: its thread ends before what it uses does
};

}  // namespace engine
