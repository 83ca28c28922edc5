// An engine that does at random what engines do (joins, forks, drafts, windows, graphs, steps that
// are given up) on a fake device of which any call may fail. K and V of a token are a function of
// all tokens up to it. So after each step it is known what the cache must have; the device must
// have the plan, and outputs are the oracle's.
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <exception>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "chunkattn/debug/attention.hpp"
#include "simt/engine.hpp"
#include "support/attention_case.hpp"
#include "support/parents.hpp"

namespace simt {

/// What a call of run() hides: nothing, nothing but by a variant that has no large tiles, or what a
/// window does.
struct Shown {
  enum Kind { plain, sinks, window } kind = plain;
  chunkattn::SlidingWindow limits{};
};

class Walk {
  static constexpr std::size_t most_rows = 64;
  static constexpr chunkattn::SlidingWindow captured_window{30, 2};  // and nothing hidden

 public:
  /// What a step does beside computing rows.
  struct Calls {
    std::vector<Shown> runs{Shown{}};
    bool captured = false;  ///< into a graph, which is then launched
    bool replayed = false;  ///< the graph that was captured before, with this step's plan
  };

  explicit Walk(std::uint64_t number) : random(number) {
    random.fill(sinks_.span());
    renew();
  }
  ~Walk() {
    device().any_before_failure = -1;
    for (Stream& one : streams_) one.queue.clear();
  }
  Walk(const Walk&) = delete;
  Walk& operator=(const Walk&) = delete;

  /// A new attention object, whose lists may have large tiles again.
  void renew() {
    settle();
    graph_.reset();
    CudaOptions options;
    options.tuning = engine_model();
    options.check_streams = random.chance(0.5);
    CudaOptions::Limits limits = Engine::limits();
    limits.max_windows = 2;
    attention.emplace(limits, options);
  }

  void join(int shared, int own) {
    std::vector<int> tokens;
    for (int i = 0; i < shared; ++i) tokens.push_back(i);
    for (int i = 0; i < own; ++i) tokens.push_back(random.uniform(1000, 1 << 30));
    sequences.push_back(tree.insert(tokens));
  }
  void fork(std::size_t index) { sequences.push_back(sequences[index].fork()); }
  void leave(std::size_t index) {
    sequences.erase(sequences.begin() + static_cast<std::ptrdiff_t>(index));
  }

  /// Plans a step of those sequences that are `wanted` and can be added. False: of none.
  bool plan_step(const std::vector<bool>& wanted, bool drafts) {
    made_.reset();
    open_.emplace(tree.begin_step());
    auto step = std::make_unique<Made>();
    for (std::size_t i = 0; i < sequences.size(); ++i) {
      auto& sequence = sequences[i];
      const std::size_t left = most_rows - to_size(open_->num_rows());
      const bool waits = std::any_of(made_steps_.begin(), made_steps_.end(), [&](const auto& one) {
        return one->ids.contains(sequence.id());
      });
      if (!wanted[i] || waits || left == 0 || sequence.num_uncomputed() == 0) continue;
      test::Parents parents;
      const std::size_t known = sequence.num_uncomputed();
      if (drafts && known < left && random.chance(0.3))
        parents = test::random_parents(
            random, random.uniform(1, static_cast<int>(std::min<std::size_t>(6, left - known))));
      std::vector<int> guesses(parents.size());
      for (int& guess : guesses) guess = random.uniform(1000, 1 << 30);
      const std::size_t first = sequence.num_scheduled();
      const int before = open_->num_rows();
      if (!open_->add(sequence, left, {.tokens = guesses, .parents = parents})) continue;
      step->ids.insert(sequence.id());
      note_rows(*step, sequence.tokens(), first, to_size(open_->num_rows() - before), guesses,
                parents);
      step->parents.push_back(std::move(parents));
    }
    if (open_->num_rows() == 0) {
      open_.reset();
      return false;
    }
    view = plan_.build(*open_);
    step->plan = snapshot(view);
    made_ = std::move(step);
    return true;
  }

  /// Gets ready what the calls of the planned step need.
  void choose(const Calls& calls) {
    Made& step = *made_;
    const bool graph = calls.captured || calls.replayed;
    if (graph) drain();  // its buffers are used again
    if (!graph && step.own == nullptr) step.own = std::make_unique<Buffers>();
    step.buffers = graph ? &graph_buffers_ : step.own.get();
    step.buffers->fill(random, step.hashes);
    cache.grow(tree.num_chunks());
    calls_ = calls;
  }
  /// Makes the calls that were chosen. Throws what they throw; may be called again.
  void call() {
    const Calls& calls = calls_;
    const bool graph = calls.captured || calls.replayed;
    Made& step = *made_;
    step.runs = graph ? std::vector<Shown>{{}, {Shown::window, captured_window}} : calls.runs;
    step.outputs.clear();
    const auto layer = cache.layer(0, stream);
    if (calls.captured) {
      attention->prepare(layer, view, captured_window, stream);
      graph_.reset();
      auto made = std::make_unique<Capture>(*stream);
      enqueue(step);
      made->end();
      graph_ = std::move(made);
    } else if (calls.replayed) {
      attention->prepare(view, stream);
    } else {
      enqueue(step);
    }
    if (graph) graph_->replay(*stream);
  }
  void call(const Calls& calls) {
    choose(calls);
    call();
  }
  [[nodiscard]] bool has_graph() const { return graph_ != nullptr; }

  /// The calls were made.
  void submit() {
    made_->flight.emplace(std::move(*open_).submit());
    open_.reset();
    made_steps_.push_back(std::move(made_));
    device_has_view_ = true;
  }
  /// Gives the planned step up, whose calls were made in part.
  void cancel() {
    open_.reset();
    if (made_ == nullptr) return;
    given_up_.push_back(std::move(made_));
    device_has_view_ = false;
  }

  /// Waits for the device and checks all that was done.
  void settle() {
    drain();
    if (device_has_view_) check_plan();
    device_has_view_ = false;
    given_up_.clear();
    for (const auto& step : made_steps_) {
      check_outputs(*step);
      auto finished = std::move(*step->flight).finish();
      for (const auto& row : finished.rows()) {
        const test::Parents& parents = step->parents[to_size(row.index)];
        const std::int32_t leaf = random.uniform(-1, row.num_drafts - 1);
        std::vector<int> outputs;
        for (const std::size_t draft : test::branch_of(parents, leaf))
          outputs.push_back(step->guesses[to_size(row.index)][draft]);
        outputs.push_back(random.uniform(1000, 1 << 30));
        finished.commit(row, outputs, leaf);
      }
    }
    made_steps_.clear();
    check_cache();
    CHECK(device().early_reuses == 0);
    CHECK(device().late_loads == 0);
  }
  /// Goes on with the other stream.
  void change_stream() {
    drain();
    stream = stream == &streams_[0] ? &streams_[1] : &streams_[0];
  }

  test::Random random;
  Tree tree;
  KvCache<Cuda, half> cache{tree, {1, kv_heads, head_dim}, 256};
  std::optional<ChunkAttention<Cuda, head_dim>> attention;
  std::vector<Tree::Sequence> sequences;
  Tree::StepView view;

 private:
  using Hash = std::uint64_t;
  static std::size_t to_size(std::integral auto n) { return static_cast<std::size_t>(n); }

  static Hash mixed(Hash a, Hash b) {
    a = (a ^ b) * 0x9e3779b97f4a7c15ull;
    return a ^ (a >> 29);
  }
  /// An element of K (head after head), then of V, of the token that ends what has this hash.
  static half element(Hash hash, std::size_t index) {
    const auto bits = static_cast<double>(mixed(hash, index + 1) >> 43);  // 21 of them
    return chunkattn::from_float<half>(static_cast<float>(bits * 0x1p-19 - 2.0));
  }

  struct Buffers {
    DeviceArray<half> q{most_rows * qo_heads * head_dim}, k{most_rows * kv_heads * head_dim},
        v{most_rows * kv_heads * head_dim};
    struct Output {
      DeviceArray<half> out{most_rows * qo_heads * head_dim};
      DeviceArray<float> lse{most_rows * qo_heads};
    };
    std::deque<Output> outputs{3};

    void fill(test::Random& random, const std::vector<Hash>& hashes) {
      random.fill(q.span());
      for (std::size_t row = 0; row < hashes.size(); ++row)
        for (std::size_t i = 0; i < kv_heads * head_dim; ++i) {
          k.span()[row * kv_heads * head_dim + i] = element(hashes[row], i);
          v.span()[row * kv_heads * head_dim + i] = element(hashes[row], kv_heads * head_dim + i);
        }
    }
  };

  /// A step whose calls are made.
  struct Made {
    std::set<chunkattn::SequenceId> ids;
    std::vector<Hash> hashes;  // of each row
    std::vector<test::Parents> parents;
    std::vector<std::vector<int>> guesses;
    test::RandomPlan plan;
    std::unique_ptr<Buffers> own;
    Buffers* buffers = nullptr;
    std::vector<Shown> runs;
    std::vector<Buffers::Output*> outputs;
    std::optional<Tree::InFlight> flight;
  };

  /// A capture that ends whatever happens in it.
  class Capture : public Graph {
   public:
    explicit Capture(Stream& stream) : Graph(stream) {}
    ~Capture() {
      if (open_) stop();
    }
    void end() {
      open_ = false;
      Graph::end();
    }

   private:
    void stop() noexcept {
      try {
        Graph::end();
      } catch (const std::exception&) {
      }
    }
    bool open_ = true;
  };

  static void note_rows(Made& step, const std::vector<int>& tokens, std::size_t first,
                        std::size_t rows, const std::vector<int>& guesses,
                        const test::Parents& parents) {
    Hash hash = 0;
    const std::size_t known = first + rows - guesses.size();
    for (std::size_t i = 0; i < known; ++i) {
      hash = mixed(hash, to_size(tokens[i]));
      if (i >= first) step.hashes.push_back(hash);
    }
    std::vector<Hash> of_guess;
    for (std::size_t d = 0; d < guesses.size(); ++d) {
      const Hash before = parents[d] < 0 ? hash : of_guess[to_size(parents[d])];
      of_guess.push_back(mixed(before, to_size(guesses[d])));
    }
    step.hashes.insert(step.hashes.end(), of_guess.begin(), of_guess.end());
    step.guesses.push_back(guesses);
  }

  void enqueue(Made& step) {
    const std::size_t rows = step.hashes.size();
    const auto layer = cache.layer(0, stream);
    Buffers& buffers = *step.buffers;
    attention->write(layer, view, buffers.k.first(rows * kv_heads * head_dim),
                     buffers.v.first(rows * kv_heads * head_dim), stream);
    for (const Shown& shown : step.runs) {
      Buffers::Output& to = buffers.outputs[step.outputs.size()];
      step.outputs.push_back(&to);
      const auto q = buffers.q.first(rows * qo_heads * head_dim);
      const auto out = to.out.first(rows * qo_heads * head_dim);
      const chunkattn::RunOptions<Cuda> options{.lse = to.lse.first(rows * qo_heads),
                                                .stream = stream};
      if (shown.kind == Shown::plain)
        attention->run(layer, view, q, out, options);
      else if (shown.kind == Shown::sinks)
        attention->run(layer, view, chunkattn::Sinks{sinks_.span()}, q, out, options);
      else
        attention->run(layer, view, shown.limits, q, out, options);
    }
  }

  void drain() {
    for (Stream& one : streams_) one.drain();
  }

  // prepare()'s promise.
  void check_plan() const {
    const auto& upload = chunkattn::plan_upload_of(*attention);
    const auto memory = upload.memory();
    const chunkattn::PlanView& now = view;
    const auto equal = [](const auto* on_device, const auto* here, std::int32_t count) {
      return count == 0 || std::memcmp(on_device, here, to_size(count) * sizeof(*here)) == 0;
    };
    CHECK(memory.header->num_rows == now.num_rows);
    CHECK(memory.header->num_copies == now.num_copies);
    CHECK(equal(memory.segments, now.segments, now.num_segments));
    CHECK(equal(memory.pieces, now.pieces, now.num_pieces));
    CHECK(equal(memory.row_token, now.row_token, now.num_rows));
    CHECK(equal(memory.row_segment, now.row_segment, now.num_rows));
    CHECK(equal(memory.row_kv_len, now.row_kv_len, now.num_rows));
    CHECK(equal(memory.copies, now.copies, now.num_copies));
    for (int token = 0; token < now.num_rows; ++token) {
      CHECK(memory.writes[token].chunk == now.writes[token].chunk);
      CHECK(memory.writes[token].offset == now.writes[token].offset);
    }
    const auto& list = upload.scheduler();
    CHECK(memory.header->num_tasks == static_cast<int>(list.tasks().size()));
    CHECK(equal(memory.tasks, list.tasks().data(), memory.header->num_tasks));
    CHECK(equal(memory.merges, list.merges().data(),
                static_cast<std::int32_t>(list.merges().size())));
  }

  void check_outputs(const Made& step) {
    const auto layer = cache.layer(0);
    const std::size_t rows = step.hashes.size();
    const std::span<const half> q = step.buffers->q.first(rows * qo_heads * head_dim);
    for (std::size_t i = 0; i < step.runs.size(); ++i) {
      const Shown shown = step.runs[i];
      chunkattn::ReferenceVariant definition;
      if (shown.kind == Shown::window)
        definition.visible = [window = shown.limits](chunkattn::LogitIndex at) {
          return at.kv_idx > at.q_idx - window.size || at.kv_idx < window.keep;
        };
      if (shown.kind == Shown::sinks)
        definition.sink = [this](int head) {
          return static_cast<double>(sinks_.span()[to_size(head)]);
        };
      const auto reference =
          chunkattn::reference_attention(layer, step.plan.view(), q, {}, definition);
      auto& output = step.buffers->outputs[i];
      const auto report = chunkattn::compare_with_reference(
          reference, std::span<const half>(output.out.first(q.size())), 0x1p-11);
      CHECK(report.worst <= 1.0);
      CHECK(test::worst_lse(reference, output.lse.first(rows * qo_heads),
                            chunkattn::unit_roundoff<half>()) <= 1.0);
    }
  }

  // Every row that counts as written has the K and V of its tokens.
  void check_cache() {
    const auto layer = cache.layer(0);
    int wrong = 0;
    for (const auto& sequence : sequences) {
      const std::vector<int> tokens = sequence.tokens();
      std::vector<Hash> hashes;
      for (const int token : tokens)
        hashes.push_back(mixed(hashes.empty() ? 0 : hashes.back(), to_size(token)));
      const auto written = static_cast<std::int32_t>(sequence.num_written());
      sequence.for_each_run({0, written}, [&](const chunkattn::Piece& piece) {
        for (int i = 0; i < piece.length; ++i)
          for (std::size_t e = 0; e < kv_heads * head_dim; ++e) {
            const int head = static_cast<int>(e / head_dim), at = piece.begin + i;
            const Hash hash = hashes[to_size(piece.position + i)];
            wrong += !(layer.k_row(piece.chunk, head, at)[e % head_dim] == element(hash, e));
            wrong += !(layer.v_row(piece.chunk, head, at)[e % head_dim] ==
                       element(hash, kv_heads * head_dim + e));
          }
      });
    }
    CHECK(wrong == 0);
  }

  Stream streams_[2];
  AttentionPlan plan_;
  DeviceArray<float> sinks_{qo_heads};
  Buffers graph_buffers_;
  std::unique_ptr<Capture> graph_;
  std::optional<Tree::Step> open_;
  Calls calls_;
  std::unique_ptr<Made> made_;
  std::vector<std::unique_ptr<Made>> made_steps_, given_up_;
  bool device_has_view_ = false;

 public:
  cudaStream_t stream = &streams_[0];
};

}  // namespace simt
