// An engine for a model whose middle layer is a linear attention: its state is kept in
// checkpoints, so that who shares a prompt's beginning starts there. Whatever is found in the
// cache, evicted or preempted, each output has the bits of a cold run of its own.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "chunkattn/cache/checkpoints.hpp"
#include "chunkattn/chunkattn.hpp"
#include "chunkattn/debug/tree.hpp"
#include "tests/support/random.hpp"

using namespace chunkattn;

namespace {

constexpr int size = 32;  // of a hidden vector, which is one head of each layer
using Vector = std::vector<float>;
using Tree = PrefixTree<int, 8>;

/// Attention, linear attention, attention: the last one's K/V depend on the state before.
struct Model {
  std::vector<Vector> weights;  // [3 layers][q, k, v], square

  explicit Model(std::uint64_t seed) : weights(9) {
    test::Random random(seed);
    for (Vector& matrix : weights) {
      matrix.resize(size * size);
      random.fill(std::span(matrix));
    }
  }
  /// Of every row of `x`.
  [[nodiscard]] Vector project(const Vector& x, int layer, int which) const {
    const Vector& matrix = weights[static_cast<std::size_t>(3 * layer + which)];
    Vector y(x.size());
    for (std::size_t i = 0; i < x.size(); ++i) {
      float sum = 0;
      for (std::size_t j = 0; j < size; ++j)
        sum += matrix[i % size * size + j] * x[i - i % size + j];
      y[i] = sum / 8;
    }
    return y;
  }
  static void embed(int token, int position, std::span<float> x) {
    test::Random random(static_cast<std::uint64_t>(token * 4096 + position));
    random.fill(x);
  }
  /// One token of the linear attention: the state forgets, takes k v^T in and answers q.
  static void advance(Vector& state, const float* q, const float* k, const float* v, float* x) {
    for (std::size_t i = 0; i < size; ++i) {
      float out = 0;
      for (std::size_t j = 0; j < size; ++j) {
        float& s = state[i * size + j];
        s = 0.9f * s + v[i] * k[j];
        out += s * q[j];
      }
      x[i] += out / size;
    }
  }
};

struct Answer {
  std::vector<int> tokens;
  std::vector<Vector> hidden;  // what each of them was sampled from
};

class Engine {
 public:
  std::size_t rows = 0, started_late = 0, preemptions = 0, started_at_forks = 0;

  /// \param options  nothing: it keeps no states, as when each sequence begins with its first token
  Engine(const Model& model, std::size_t max_chunks, std::size_t max_live,
         std::optional<Checkpoints<Tree>::Options> options, std::size_t preempt_every = 0)
      : model_(model),
        max_live_(max_live),
        preempt_every_(preempt_every),
        tree_(PoolAllocator{.max_chunks = max_chunks}) {
    if (options) states_.emplace(tree_, *options);
  }

  std::vector<Answer> serve(std::span<const std::vector<int>> prompts, std::size_t new_tokens) {
    answers_.resize(prompts.size());
    for (std::size_t r = 0; r < prompts.size(); ++r) waiting_.push_back({r, prompts[r]});
    while (!waiting_.empty() || !running_.empty()) {
      REQUIRE(++steps_ < 20000);
      admit();
      step();
      for (std::size_t i = running_.size(); i-- > 0;)
        if (answers_[running_[i].request].tokens.size() == new_tokens) end(i);
      if (preempt_every_ > 0 && steps_ % preempt_every_ == 0 && running_.size() > 1) preempt();
      check_invariants(tree_);
    }
    return answers_;
  }
  [[nodiscard]] std::uint64_t evicted() const { return states_->stats().evicted; }

 private:
  struct Waiting {
    std::size_t request;
    std::vector<int> tokens;
  };
  struct Running {
    std::size_t request;
    Tree::Sequence sequence;
    bool started = false;
    Vector state = Vector(size * size);
  };
  struct Added {
    Running* run;
    ScheduledSequence row;
    std::size_t wanted;
  };

  void admit() {
    while (!waiting_.empty() && running_.size() < max_live_) {
      if (!running_.empty() &&
          tree_.chunks_needed(waiting_.front().tokens) + running_.size() > tree_.chunks_available())
        return;
      auto joined = tree_.try_insert(waiting_.front().tokens);
      if (!joined) return;
      running_.push_back({waiting_.front().request, std::move(*joined)});
      waiting_.pop_front();
    }
  }
  void start(Running& run) {
    if (run.started || run.sequence.num_pending() > 0) return;
    run.started = true;
    if (!states_) return;
    const auto [position, state] = states_->resume(run.sequence);
    if (position == 0) return;
    run.state = *static_cast<const Vector*>(state.get());
    ++started_late;
    started_at_forks += position == run.sequence.num_cached();
  }
  void step() {
    auto step = tree_.begin_step();
    std::vector<Added> added;
    for (Running& run : running_) {
      start(run);
      if (!run.started) continue;
      const std::size_t wanted = states_ ? states_->next(run.sequence) : Tree::Sequence::whole;
      const auto result =
          step.add(run.sequence, std::min<std::size_t>(20, wanted - run.sequence.num_scheduled()));
      if (result) added.push_back({&run, result.row(), wanted});
    }
    if (added.empty()) {
      static_cast<void>(Tree::Step(std::move(step)));  // dropped
      return preempt();
    }
    const auto view = plan_.build(step);
    const Vector x = compute(view, added);
    auto done = std::move(step).finish();
    for (const Added& a : added) {
      const auto end = static_cast<std::size_t>(a.row.position + a.row.num_rows);
      if (end == a.wanted)  // of two that compute the same, one is kept
        static_cast<void>(
            states_->save(a.run->sequence, end, std::make_shared<const Vector>(a.run->state)));
    }
    for (const ScheduledSequence& row : done.rows()) {
      const auto a =
          std::ranges::find(added, row.index, [](const Added& b) { return b.row.index; });
      const auto first = x.begin() + row.output_row() * size;
      Answer& answer = answers_[a->run->request];
      answer.hidden.emplace_back(first, first + size);
      answer.tokens.push_back(static_cast<int>(std::max_element(first, first + size) - first));
      done.commit(row, answer.tokens.back());
    }
  }
  [[nodiscard]] Vector compute(const Tree::StepView& view, std::span<const Added> added) {
    const auto tokens = view.tokens(), positions = view.positions();
    rows += tokens.size();
    Vector x(tokens.size() * size);
    for (std::size_t row = 0; row < tokens.size(); ++row)
      Model::embed(tokens[row], positions[row], std::span(x).subspan(row * size, size));
    for (int layer = 0; layer < 3; ++layer) {
      const Vector q = model_.project(x, layer, 0), k = model_.project(x, layer, 1),
                   v = model_.project(x, layer, 2);
      if (layer == 1) {
        for (const Added& a : added)
          for (int row = a.row.first_row; row < a.row.first_row + a.row.num_rows; ++row)
            Model::advance(a.run->state, &q[at(row)], &k[at(row)], &v[at(row)], &x[at(row)]);
        continue;
      }
      Vector out(x.size());
      const auto kv = cache_.layer(layer / 2);
      attention_.write(kv, view, k, v);
      attention_.run(kv, view, q, out);
      for (std::size_t i = 0; i < x.size(); ++i) x[i] += out[i];
    }
    return x;
  }
  static std::size_t at(int row) { return static_cast<std::size_t>(row) * size; }

  void preempt() {
    REQUIRE(running_.size() > 1);
    Running& last = running_.back();
    waiting_.push_front({last.request, last.sequence.tokens()});
    running_.pop_back();
    ++preemptions;
  }
  void end(std::size_t i) {  // its state is there anyway
    Running& run = running_[i];
    if (states_)
      static_cast<void>(states_->save(run.sequence, run.sequence.num_written(),
                                      std::make_shared<const Vector>(std::move(run.state))));
    running_.erase(running_.begin() + static_cast<std::ptrdiff_t>(i));
  }

  const Model& model_;
  std::size_t max_live_, preempt_every_, steps_ = 0;
  Tree tree_;
  std::optional<Checkpoints<Tree>> states_;
  KvCache<Cpu, half> cache_{tree_, {.num_layers = 2, .num_kv_heads = 1, .head_dim = size}};
  ChunkAttention<Cpu, size> attention_{1, {.reduce = CpuOptions::Reduce::batch_invariant}};
  AttentionPlan plan_;
  std::deque<Waiting> waiting_;
  std::vector<Running> running_;
  std::vector<Answer> answers_;
};

bool same_bits(const Vector& a, const Vector& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

}  // namespace

TEST_CASE("each output of a model with a recurrent layer has the bits of a cold run") {
  const Model model(test::run_seed());
  test::Random random(test::run_seed());
  std::vector<std::vector<int>> prompts;
  for (int i = 0; i < 40; ++i) {  // two families, which part anywhere, some twice
    const int family = i % 2;
    std::vector<int> prompt;
    const int common = i % 5 == 4 ? 60 : random.uniform(1, 60);
    for (int t = 0; t < common; ++t) prompt.push_back(100 * family + t % 37);
    if (i % 5 == 4) prompt.push_back(4 + i);  // no two of these continue alike
    for (int t = random.uniform(0, 12); t > 0; --t) prompt.push_back(random.uniform(0, 3));
    prompts.push_back(std::move(prompt));
  }
  constexpr std::size_t new_tokens = 9;
  std::vector<Answer> cold;  // of trees without checkpoints, and without anybody else
  std::size_t cold_rows = 0;
  for (const auto& prompt : prompts) {
    Engine engine(model, 100, 1, std::nullopt);
    cold.push_back(engine.serve(std::span(&prompt, 1), new_tokens)[0]);
    cold_rows += engine.rows;
  }
  struct Case {
    std::size_t max_chunks, max_live, max_checkpoints;
    std::int32_t per_path;
  };
  for (const Case& c : {Case{1000, 6, 1000, 8}, Case{1000, 1, 1000, 8}, Case{16, 5, 1000, 8},
                        Case{1000, 6, 5, 2}, Case{16, 5, 5, 1}}) {
    CAPTURE(c.max_chunks);
    CAPTURE(c.max_live);
    CAPTURE(c.max_checkpoints);
    Engine engine(model, c.max_chunks, c.max_live,
                  {{.max_count = c.max_checkpoints, .max_per_path = c.per_path}},
                  c.max_chunks < 1000 ? 5 : 0);
    const std::vector<Answer> answers = engine.serve(prompts, new_tokens);
    for (std::size_t r = 0; r < prompts.size(); ++r) {
      CAPTURE(r);
      CHECK(answers[r].tokens == cold[r].tokens);
      REQUIRE(answers[r].hidden.size() == new_tokens);
      for (std::size_t i = 0; i < new_tokens; ++i)
        CHECK(same_bits(answers[r].hidden[i], cold[r].hidden[i]));
    }
    CHECK(engine.started_late > 0);
    if (c.max_checkpoints == 1000) CHECK(engine.started_at_forks > 0);
    if (c.max_chunks == 1000) CHECK(engine.rows < cold_rows);
    if (c.max_chunks == 1000 && c.max_checkpoints == 1000) CHECK(engine.rows < cold_rows * 2 / 3);
    if (c.max_chunks < 1000) CHECK(engine.preemptions > 0);
    if (c.max_checkpoints < 1000) CHECK(engine.evicted() > 0);
    MESSAGE(engine.rows << " rows, cold " << cold_rows << "; " << engine.started_late
                        << " started late, " << engine.started_at_forks << " where they part");
  }
}
