// The engine over a prefix tree of one chunk size.
#pragma once

#include <algorithm>
#include <cmath>
#include <deque>
#include <limits>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "../model/forward.hpp"
#include "attention_cuda.hpp"
#include "engine.hpp"

namespace serve {

template <int ChunkSize>
class TreeEngine final : public Engine {
 public:
  using Tree =
      chunkattn::PrefixTree<std::int32_t, ChunkSize, chunkattn::PoolAllocator, chunkattn::Lru>;
  using Sequence = typename Tree::Sequence;
  using Step = typename Tree::Step;

  TreeEngine(const Model& model, Products& products, const EngineOptions& options)
      : model_(model),
        options_(options),
        tree_(chunkattn::PoolAllocator{.max_chunks = options.max_chunks},
              {.sharing = options.sharing}),
        attention_(
            make_attention(options.kv, tree_, model.config, products.executor(), options.reduce)),
        forward_(model, products) {
    // A step has a row for each that decodes, of which there are no more than chunks.
    if (options.on_gpu)
      on_gpu_ = std::make_unique<AttentionOnGpu<Tree>>(tree_, model.config,
                                                       options.max_chunks + options.step_tokens);
  }

  void submit(Request request) override {
    const auto fail = [&](const char* field, std::size_t value, const std::string& expected) {
      throw std::invalid_argument("request " + std::to_string(request.id) + ": " + field + " = " +
                                  std::to_string(value) + ": expected " + expected);
    };
    const auto positions = static_cast<std::size_t>(model_.config.max_positions);
    const std::size_t size = request.prompt.size();
    if (size < 1 || size > positions)
      fail("tokens of the prompt", size,
           "1 to the model's positions, " + std::to_string(positions));
    if (request.max_length < size)
      fail("max_length", request.max_length,
           "at least the prompt's tokens, " + std::to_string(size));
    // The last token that is generated needs no position: it is not computed.
    request.max_length = std::min(request.max_length, positions + 1);
    if (chunks_alone(request.max_length) + 1 > options_.max_chunks)
      fail("max_length", request.max_length,
           "no more than " + std::to_string((options_.max_chunks - 1) * ChunkSize) +
               ", what max_chunks has room for");
    for (const int token : request.prompt)
      if (token < 0 || token >= model_.config.vocab_size)
        fail("a token of the prompt", static_cast<std::size_t>(token), "a token of the model");
    Live live;
    live.completion.id = request.id;
    live.request = std::move(request);
    waiting_.push_back(std::move(live));
  }

  bool step() override {
    if (waiting_.empty() && decoding_.empty() && prefilling_.empty()) return false;
    admit();
    while (!try_step())
      if (!preempt()) throw std::logic_error("no sequence can run, and none can make room");
    return true;
  }

  std::vector<Completion> take_completions() override { return std::exchange(completions_, {}); }
  [[nodiscard]] const EngineStats& stats() const override { return stats_; }
  [[nodiscard]] std::size_t bytes_per_chunk() const override {
    return (on_gpu_ ? on_gpu_ : attention_)->bytes_per_chunk();
  }

 private:
  /// What the engine knows of a request beside its sequence.
  struct Live {
    Request request;  ///< the prompt of one that was preempted has what it had generated, too
    Completion completion;
    bool joined = false;
    bool preempted = false;
    bool decodes = false;  ///< its prompt is computed
    bool done = false;
    std::size_t keep = 0;  ///< of its tokens, when it is done
  };
  /// Sequences that do the same, side by side as Step::add() takes them, in the order of joining.
  struct Group {
    std::vector<Sequence> sequences;
    std::vector<Live> live;
    [[nodiscard]] std::size_t size() const { return live.size(); }
    [[nodiscard]] bool empty() const { return live.empty(); }
    void push(Sequence sequence, Live one) {
      sequences.push_back(std::move(sequence));
      live.push_back(std::move(one));
    }
  };

  static std::size_t chunks_alone(std::size_t tokens) {
    return (tokens + ChunkSize - 1) / ChunkSize;
  }

  /// Requests join in their order while there is room for them, and a chunk for each to grow.
  void admit() {
    while (!waiting_.empty()) {
      const std::size_t live = decoding_.size() + prefilling_.size();
      Live& next = waiting_.front();
      if (tree_.slots_needed(next.request.prompt) + live + 1 > tree_.slots_available()) return;
      auto sequence = tree_.try_insert(next.request.prompt);
      if (!sequence) return;
      if (!std::exchange(next.joined, true)) next.completion.joined = stats_.steps;
      prefilling_.push(std::move(*sequence), std::move(next));
      waiting_.pop_front();
    }
  }

  [[nodiscard]] bool try_step() {
    Step step = tree_.begin_step();
    if (!fill(step)) return false;
    count_step(step);
    compute(std::move(step));
    return true;
  }

  /// A token of all that decode; then parts of prompts while the budget lasts. False if there is no
  /// room for a token of each, or nothing can run.
  bool fill(Step& step) {
    if (!decoding_.empty() && !step.add(std::span<Sequence>(decoding_.sequences))) return false;
    in_step_.clear();
    logit_rows_.clear();
    for (Live& live : decoding_.live) {
      logit_rows_.push_back(static_cast<int>(in_step_.size()));
      in_step_.push_back(&live);
    }
    std::size_t budget = options_.step_tokens;
    for (std::size_t i = 0; i < prefilling_.size() && budget > 0; ++i) {
      const auto added = step.add(prefilling_.sequences[i], budget);
      if (!added) continue;  // it waits for what another one is to compute, or for a chunk
      Live& live = prefilling_.live[i];
      in_step_.push_back(&live);
      const auto rows = static_cast<std::size_t>(added.row().num_rows);
      if (added.row().has_output) logit_rows_.push_back(added.row().output_row());
      budget -= rows;
      (live.preempted ? stats_.recomputed : live.completion.computed) += rows;
    }
    return step.num_rows() > 0;
  }

  /// The one that joined last leaves and waits again, with what it has generated as its prompt;
  /// its K/V stays as cache for as long as there is room.
  bool preempt() {
    Group& group = prefilling_.empty() ? decoding_ : prefilling_;
    if (decoding_.size() + prefilling_.size() < 2) return false;
    Live live = std::move(group.live.back());
    live.request.prompt = group.sequences.back().tokens();
    live.decodes = false;
    live.preempted = true;
    group.live.pop_back();
    group.sequences.pop_back();
    waiting_.push_front(std::move(live));
    ++stats_.preemptions;
    return true;
  }

  void count_step(const Step& step) {
    ++stats_.steps;
    stats_.rows += static_cast<std::size_t>(step.num_rows());
    stats_.peak_sequences = std::max(stats_.peak_sequences, decoding_.size() + prefilling_.size());
    std::size_t tokens = 0, chunks = 0;
    for (const Group* group : {&decoding_, &prefilling_})
      for (const Sequence& sequence : group->sequences) {
        tokens += sequence.size();
        chunks += chunks_alone(sequence.size() + 1);  // its output has a place already
      }
    if (chunks < stats_.unshared_chunks) return;
    const chunkattn::TreeStats tree = tree_.stats();
    stats_.unshared_chunks = chunks;
    stats_.unshared_tokens = tokens;
    stats_.chunks = tree.used_slots - tree.retained_slots;
  }

  void compute(Step step) {
    const auto view = plan_.build(step);
    const std::vector<int> tokens = view.tokens(), positions = view.positions();
    const auto logits_by = [&](Attention& attention) {
      return forward_.run(tokens, positions, logit_rows_,
                          [&](int layer, std::span<const float> q, std::span<const float> k,
                              std::span<const float> v,
                              std::span<float> out) { attention.run(layer, view, q, k, v, out); });
    };
    std::span<const float> logits = logits_by(*attention_);
    if (on_gpu_) {
      const std::vector<float> expected(logits.begin(), logits.end());
      logits = logits_by(*on_gpu_);
      compare(logits, expected);
    }
    stats_.plan_rebuilds = plan_.num_rebuilds();
    sample(std::move(step).finished(), logits);
  }

  void compare(std::span<const float> logits, std::span<const float> expected) {
    stats_.compared_logits += logits.size();
    for (std::size_t i = 0; i < logits.size(); ++i) {
      const double difference = std::abs(static_cast<double>(logits[i]) - expected[i]);
      stats_.largest_difference =
          std::max(stats_.largest_difference,
                   std::isnan(difference) ? std::numeric_limits<double>::infinity() : difference);
    }
  }

  void sample(typename Tree::Finished finished, std::span<const float> logits) {
    const auto vocabulary = static_cast<std::size_t>(model_.config.vocab_size);
    bool changed = false;
    outputs_.clear();
    for (const chunkattn::StepRow& row : finished.rows()) {
      const int next = argmax(logits.subspan(outputs_.size() * vocabulary, vocabulary));
      outputs_.push_back(next);
      Live& live = *in_step_[static_cast<std::size_t>(row.index)];
      const bool stops =
          std::find(options_.stop.begin(), options_.stop.end(), next) != options_.stop.end();
      const auto length = static_cast<std::size_t>(row.position + row.num_rows) + 1;
      live.done = stops || length >= live.request.max_length;
      live.keep = stops ? length - 1 : std::min(length, live.request.max_length);
      changed |= live.done || !live.decodes;
      live.decodes = true;
    }
    finished.commit(outputs_);  // those that leave get theirs too, and nobody computes it
    if (changed) regroup();
  }

  /// Those that are done leave; those whose prompts are computed decode from now on.
  void regroup() {
    Group decoding, prefilling;
    for (Group* group : {&decoding_, &prefilling_})
      for (std::size_t i = 0; i < group->size(); ++i) {
        Live& live = group->live[i];
        if (live.done)
          complete(group->sequences[i], live);
        else
          (live.decodes ? decoding : prefilling)
              .push(std::move(group->sequences[i]), std::move(live));
      }
    decoding_ = std::move(decoding);
    prefilling_ = std::move(prefilling);
  }

  void complete(const Sequence& sequence, Live& live) {
    live.completion.tokens = sequence.tokens();
    live.completion.tokens.resize(live.keep);
    live.completion.left = stats_.steps;
    completions_.push_back(std::move(live.completion));
  }

  const Model& model_;
  EngineOptions options_;
  Tree tree_;
  std::unique_ptr<Attention> attention_, on_gpu_;
  Forward forward_;
  chunkattn::AttentionPlan plan_;
  std::deque<Live> waiting_;
  Group decoding_, prefilling_;
  std::vector<Live*> in_step_;  // by StepRow::index
  std::vector<int> logit_rows_, outputs_;
  std::vector<Completion> completions_;
  EngineStats stats_;
};

}  // namespace serve
