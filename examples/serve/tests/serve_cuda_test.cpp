// What `serve generate --device cuda` does between its forward pass and the kernels - padding heads
// of 8 to 16, fp16, copies to and fro - on the fake device, teacher-forced against the CPU backend.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <span>
#include <string>
#include <vector>

#include "chunkattn/attention_plan.hpp"
#include "chunkattn/chunkattn.hpp"
#include "chunkattn/prefix_tree.hpp"
#include "simt/runtime.hpp"
#include "tests/support/random.hpp"
// After the fakes, which replace the CUDA runtime and ptx.cuh.
#include "examples/support/cuda_attention.cuh"
#include "files.hpp"
#include "model/forward.hpp"
#include "model/load.hpp"

namespace {

using Tree = chunkattn::PrefixTree<std::int32_t, 16>;

/// The recorded texts' model, or random weights of its shape.
serve::Model weights(chunkattn::ThreadPool& executor) {
  const std::string folder = test::stories_folder();
  if (!folder.empty())
    return serve::load_llama2c(folder + "/stories260K.bin", serve::Element::fp32);
  return serve::random_model({64, 172, 4, 8, 4, 512, 512, true, 1e-5f, 10000.0f},
                             serve::Element::fp32, 2024, executor);
}

}  // namespace

TEST_CASE("padded heads of 8 on the fake device give the logits of the CPU") {
  test::Random random(21);
  simt::current_schedule() = {simt::Order::shuffled, simt::Copies::at_wait, random.bits()};
  chunkattn::ThreadPool executor(1);
  const serve::Model model = weights(executor);
  const serve::Config& config = model.config;
  REQUIRE(config.head_dim() == 8);

  Tree tree({}, {}, {.retains = false});
  chunkattn::AttentionPlan plan;
  serve::Products products(executor, serve::ProductKind::own);
  serve::Forward on_host(model, products);
  chunkattn::KvCache<chunkattn::Cpu, float> cache(
      tree, {.num_layers = config.num_layers, .num_kv_heads = config.num_kv_heads, .head_dim = 8});
  chunkattn::ChunkAttention<chunkattn::Cpu, 8> on_cpu(executor);
  examples::CudaAttentionOf<16> on_gpu({.num_layers = config.num_layers,
                                        .num_qo_heads = config.num_qo_heads,
                                        .num_kv_heads = config.num_kv_heads,
                                        .head_dim = 8,
                                        .chunk_size = Tree::chunk_size,
                                        .max_rows = 48});

  std::vector<std::vector<int>> texts(3);
  for (auto& text : texts) {
    text = {1};
    for (int i = 1; i < 37; ++i) text.push_back(3 + i * 7 % 250);  // all begin alike
    for (int i = 0; i < 9; ++i) text.push_back(random.uniform(3, 500));
  }
  std::vector<Tree::Sequence> sequences;
  double worst = 0, largest = 0, shared_or_not = 0;
  const auto compare = [&](const Tree::StepView& view) {
    const std::vector<int> tokens = view.tokens(), positions = view.positions();
    std::vector<int> rows;
    for (std::size_t i = 0; i < tokens.size(); ++i) rows.push_back(static_cast<int>(i));
    const auto logits = on_host.run(tokens, positions, rows,
                                    [&](int l, std::span<const float> q, std::span<const float> k,
                                        std::span<const float> v, std::span<float> out) {
                                      on_cpu.write(cache.layer(l), view, k, v);
                                      on_cpu.run(cache.layer(l), view, q, out);
                                    });
    const std::vector<float> expected(logits.begin(), logits.end());
    const auto actual =
        on_host.run(tokens, positions, rows,
                    [&](int l, std::span<const float> q, std::span<const float> k,
                        std::span<const float> v, std::span<float> out) {
                      on_gpu.write(l, view, tree.num_chunks(), k, v);
                      on_gpu.run(l, view, q, out, true);
                      std::vector<float> paged(out.size());
                      on_gpu.run(l, view, q, paged, false);
                      for (std::size_t i = 0; i < out.size(); ++i)
                        shared_or_not = std::max(shared_or_not,
                                                 std::abs(static_cast<double>(out[i]) - paged[i]));
                    });
    REQUIRE(actual.size() == expected.size());
    for (std::size_t i = 0; i < actual.size(); ++i) {
      const double difference = std::abs(static_cast<double>(actual[i]) - expected[i]);
      if (!(difference <= 1e9)) FAIL("a logit is not a number");
      worst = std::max(worst, difference);
      largest = std::max(largest, std::abs(static_cast<double>(expected[i])));
    }
  };

  const auto run_step = [&] {  // what is "sampled" are the given texts
    Tree::Step step = tree.begin_step();
    for (Tree::Sequence& sequence : sequences) (void)step.add(sequence, 48);
    compare(plan.build(step));
    Tree::Finished finished = std::move(step).finish();
    for (const auto& row : finished.rows()) {
      const auto s = static_cast<std::size_t>(row.index);
      finished.commit(row, texts[s][sequences[s].size()]);
    }
  };
  for (const auto& text : texts) {  // they join one by one, and decode
    sequences.push_back(tree.insert(std::span<const int>(text).first(40)));
    run_step();
  }
  for (int i = 0; i < 3; ++i) run_step();
  std::printf("largest difference of a logit %.2g, largest logit %.3g\n", worst, largest);
  CHECK(worst > 0);  // fp16 is not fp32
  CHECK(worst <= 0.1);
  CHECK(shared_or_not < 0.01);
}
