// Layers with windows, in chunks of their own, through the kernels: see
// tests/support/window_engine.hpp.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "chunkattn/attention_plan.hpp"
#include "chunkattn/cache/windowed_layers.hpp"
#include "chunkattn/chunk_attention.hpp"
#include "chunkattn/kv_cache.hpp"
#include "chunkattn/prefix_tree.hpp"
#include "chunkattn/variants.hpp"
#include "tests/support/refused.hpp"
#include "tests/support/steps.hpp"
#include "tests/support/window_drafts.hpp"
#include "tests/support/window_engine.hpp"

using namespace chunkattn;
using test::WindowEngine;
using test::WindowModel;

namespace {

std::size_t to_size(int n) {
  return static_cast<std::size_t>(n);
}

class Kernels {
 public:
  Kernels(CpuOptions::Reduce reduce, int num_threads)
      : attention_(std::make_unique<Attention>(num_threads, CpuOptions{.reduce = reduce})) {}

  void write(const KvView<float>& kv, const LiveView& plan, std::span<const float> k,
             std::span<const float> v) {
    attention_->write(kv, plan, k, v);
  }
  void run(const KvView<float>& kv, const LiveView& plan, int window, std::span<const float> q,
           std::span<float> out) {
    if (window == std::numeric_limits<int>::max())
      attention_->run(kv, plan, q, out);
    else
      attention_->run(kv, plan, SlidingWindow{window}, q, out);
  }

 private:
  using Attention = ChunkAttention<Cpu, WindowModel::head_dim>;
  std::unique_ptr<Attention> attention_;
};

template <int ChunkSize>
void run(WindowModel model, CpuOptions::Reduce reduce, std::uint64_t stream) {
  model.same_bits = reduce != CpuOptions::Reduce::spin_lock;
  WindowEngine<ChunkSize, Kernels> engine(model, stream, Kernels(reduce, 2));
  for (int i = test::scaled(1000); i > 0; --i) engine.operate();
  engine.finish();
  CHECK(engine.counts().rows > 0);
}

/// A model of three layers, the second one without a window. Each layer reads what the one before
/// it has put out, so a row is right only if all rows that it saw were.
class SmallModel {
 public:
  static constexpr int window = 64, dim = WindowModel::head_dim, heads = WindowModel::num_qo_heads;
  using Tree = PrefixTree<int, 16>;
  using Layers = WindowedLayers<Tree>;
  using Hidden = std::vector<float>;  ///< of a row

  using Attention = ChunkAttention<Cpu, dim>;

  SmallModel(Attention& attention, bool gives_back)
      : attention_(attention), full_(tree_, {gives_back ? 1 : 3, 1, dim}) {
    if (gives_back) {
      layers_ =
          std::make_unique<Layers>(tree_, Layers::Options{.window = window, .max_chunks = 100});
      near_ = std::make_unique<KvCache<Cpu, float>>(*layers_, KvCacheOptions{2, 1, dim});
    }
  }
  /// Computes a prompt that then leaves; what each computed row has put out follows `cached`.
  struct Answer {
    std::size_t cached = 0;       ///< tokens that were not computed
    std::size_t full_writes = 0;  ///< rows of K/V that the layer without a window got
    std::vector<Hidden> outputs;
  };
  Answer answer(const std::vector<int>& prompt, std::size_t rows_per_step) {
    auto sequence = tree_.insert(prompt);
    if (layers_) layers_->resume(sequence);
    Answer answer;
    answer.cached = sequence.num_scheduled();
    while (sequence.num_uncomputed() > 0) {
      auto step = tree_.begin_step();
      REQUIRE(step.add(sequence, rows_per_step));
      const auto view = plan_.build(step);
      compute(view, layers_ ? layers_->view(view) : LiveView(view), answer);
      auto finished = std::move(step).finish();
    }
    return answer;
  }

 private:
  void compute(const Tree::StepView& view, const LiveView& near_view, Answer& answer) {
    const auto rows = to_size(view.num_rows);
    const std::size_t width = to_size(dim) * heads;
    std::vector<float> x(rows * width), k(rows * dim), v(k), out(x.size());
    const std::vector<int> tokens = view.tokens(-1);
    for (std::size_t i = 0; i < x.size(); ++i)
      x[i] = test::element(test::extended(1, tokens[i / width]), 0, 0, static_cast<int>(i % width));
    for (int layer = 0; layer < 3; ++layer) {
      for (std::size_t row = 0; row < rows; ++row)
        for (std::size_t i = 0; i < dim; ++i) {
          k[row * dim + i] = x[row * width + 2 * i] - 0.5f * x[row * width + (i + 3) % width];
          v[row * dim + i] = x[row * width + i] + x[row * width + (3 * i + 7) % width];
        }
      const bool has_window = layer != 1;
      const auto kv =
          has_window && near_ ? near_->layer(layer / 2) : full_.layer(near_ ? 0 : layer);
      const LiveView& plan = has_window ? near_view : view;
      attention_.write(kv, plan, k, v);
      if (has_window)
        attention_.run(kv, plan, SlidingWindow{window}, x, out);
      else
        attention_.run(kv, plan, x, out);
      for (std::size_t i = 0; i < x.size(); ++i) x[i] = 0.7f * x[i] + out[i ^ 1];
    }
    for (std::size_t row = 0; row < rows; ++row) {
      answer.full_writes += view.writes[row].chunk != no_chunk;
      answer.outputs.emplace_back(&x[row * width], &x[row * width] + width);
    }
  }

  Attention& attention_;
  Tree tree_;
  std::unique_ptr<Layers> layers_;
  KvCache<Cpu, float> full_;
  std::unique_ptr<KvCache<Cpu, float>> near_;
  AttentionPlan plan_;
};

TEST_CASE("texts that part anywhere have the bits of cold runs") {
  test::Random random(43);
  constexpr int window = SmallModel::window, chunk = SmallModel::Tree::chunk_size;
  SmallModel::Attention attention(2, {.reduce = CpuOptions::Reduce::batch_invariant});
  std::vector<int> prompt(300);
  for (int& token : prompt) token = random.uniform(0, 1000);
  for (std::size_t fork = 0; fork <= prompt.size(); ++fork) {
    SmallModel model(attention, /*gives_back=*/true);
    CHECK(model.answer(prompt, 512).cached == 0);
    // Of the first text the rows are there that the chunks of its last window have.
    std::vector<char> there(prompt.size());
    const std::size_t first = prompt.size() - 1 - (window - 1);
    std::fill(there.begin() + static_cast<std::ptrdiff_t>(first / chunk * chunk), there.end(),
              true);
    const auto longest = [&](std::size_t limit) {
      const auto has_window = [&](std::size_t position) {
        const std::size_t begin = position < window ? 0 : position - (window - 1);
        return std::all_of(there.data() + begin, there.data() + position,
                           [](char row) { return row != 0; });
      };
      while (!has_window(limit)) --limit;
      return limit;
    };
    for (int text = 1; text <= 2; ++text) {
      std::vector<int> tokens(prompt.begin(), prompt.begin() + static_cast<std::ptrdiff_t>(fork));
      for (int n = random.uniform(1, 40); n > 0; --n)
        tokens.push_back(1000 * text + random.uniform(1, 900));
      const std::size_t expected = longest(fork);
      const auto warm = model.answer(tokens, to_size(random.uniform(40, 400)));
      CHECK(warm.cached == expected);
      CHECK(warm.full_writes == tokens.size() - fork);
      SmallModel cold_model(attention, /*gives_back=*/false);
      auto cold = cold_model.answer(tokens, 512);
      cold.outputs.erase(cold.outputs.begin(),
                         cold.outputs.begin() + static_cast<std::ptrdiff_t>(expected));
      CHECK(warm.outputs == cold.outputs);
      // Now the window before the position at which the texts part is there, too.
      for (std::size_t i = fork < window ? 0 : fork - (window - 1); i < fork; ++i) there[i] = 1;
    }
  }
}

TEST_CASE("a variant that does not hide what the plan lacks is refused") {
  using Tree = PrefixTree<int, 16>;
  constexpr int dim = WindowModel::head_dim;
  Tree tree;
  WindowedLayers<Tree> layers(tree, {.window = 20, .max_chunks = 100});
  KvCache<Cpu, float> cache(layers, {1, 1, dim});
  ChunkAttention<Cpu, dim> attention(1);
  AttentionPlan plan;
  const auto attend = [&](std::size_t length, const auto& variant) {
    auto one = tree.insert(test::iota(0, length));
    layers.resume(one);
    auto step = tree.begin_step();
    REQUIRE(step.add(one));
    const LiveView view = layers.view(plan.build(step));
    const std::vector<float> rows(to_size(view.num_rows * dim));
    std::vector<float> out(rows.size());
    attention.write(cache.layer(0), view, rows, rows);
    return test::refused([&] { attention.run(cache.layer(0), view, variant, rows, out); });
  };
  const char* const refusal =
      "variant = without the window of the plan's layers: expected SlidingWindow{20}, or a smaller "
      "one, with keep = 0";
  CHECK(attend(21, NoVariant{}) == refusal);
  CHECK(attend(22, SlidingWindow{21}) == refusal);
  CHECK(attend(23, SlidingWindow{20, 1}) == refusal);
  CHECK(attend(24, SoftCap{30}) == refusal);
  CHECK(attend(25, SlidingWindow{20}) == "no error");
  CHECK(attend(26, SlidingWindow{3}) == "no error");
  CHECK(attend(27, combine(SoftCap{30}, SlidingWindow{20})) == "no error");
  tree.clear();
  CHECK(attend(20, NoVariant{}) == "no error");  // all keys are there
}

TEST_CASE("rows that are computed again end before the segments of their path do") {
  test::Random random(40);
  using Reduce = CpuOptions::Reduce;
  for (const Reduce reduce : {Reduce::deterministic, Reduce::batch_invariant}) {
    WindowModel model{
        .windows = {72}, .max_chunks = 300, .max_window_chunks = 300, .max_text = 500};
    model.same_bits = true;
    WindowEngine<16, Kernels> engine(model, 41, Kernels(reduce, 2));
    std::vector<int> prompt(to_size(random.uniform(300, 400)));
    for (int& token : prompt) token = random.uniform(0, 2);
    engine.answer(prompt, 64);
    prompt.resize(prompt.size() - to_size(random.uniform(100, 200)));
    prompt.push_back(7);
    const auto before = engine.counts();  // the first one resumes where a step took no view
    engine.answer(prompt, random.uniform(5, 60));
    const auto skipped = engine.counts().not_viewed - before.not_viewed;
    const auto early = engine.counts().resumed_early - before.resumed_early;
    CHECK(early >= 1);
    CHECK(early <= 1 + skipped);
  }
}

TEST_CASE("kernels read short plans as whole ones") {
  using Reduce = CpuOptions::Reduce;
  std::uint64_t stream = 20;
  for (const Reduce reduce : {Reduce::deterministic, Reduce::batch_invariant, Reduce::spin_lock}) {
    run<16>({.windows = {40}, .max_chunks = 110, .max_window_chunks = 60}, reduce, ++stream);
    run<16>({.windows = {100, 1}, .max_chunks = 150, .max_window_chunks = 90}, reduce, ++stream);
    run<64>({.windows = {72, 200}, .max_chunks = 90, .max_window_chunks = 50, .max_text = 600},
            reduce, ++stream);
  }
}

TEST_CASE("drafts that are a tree have their windows") {
  using Reduce = CpuOptions::Reduce;
  std::uint64_t stream = 60, copied = 0, branches = 0, refused = 0;
  const auto chat = [&](auto engine) {
    for (int i = test::scaled(1500); i > 0; --i) engine.operate();
    engine.end();
    copied += engine.copied, branches += engine.branches, refused += engine.refused;
    CHECK(engine.recomputed > 0);
  };
  for (const Reduce reduce : {Reduce::deterministic, Reduce::batch_invariant}) {
    chat(test::WindowDrafts<16, Kernels>(40, 22, ++stream, Kernels(reduce, 2)));
    chat(test::WindowDrafts<64, Kernels>(20, 30, ++stream, Kernels(reduce, 2)));
    chat(test::WindowDrafts<4, Kernels>(9, 200, ++stream, Kernels(reduce, 2)));
  }
  CHECK(copied > 0);
  CHECK(branches > 0);
  CHECK(refused > 0);
}

}  // namespace
