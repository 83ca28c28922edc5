// Layers with windows, in chunks of their own, through the kernels: see
// tests/support/window_engine.hpp.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>

#include "chunkattn/chunk_attention.hpp"
#include "chunkattn/variants.hpp"
#include "tests/support/refused.hpp"
#include "tests/support/steps.hpp"
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
    engine.answer(prompt, random.uniform(5, 60));
    CHECK(engine.counts().resumed_early == 1);
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

}  // namespace
