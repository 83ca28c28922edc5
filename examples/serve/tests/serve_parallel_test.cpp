// A model split over ranks, which are threads here: the same logits as in one piece, the same texts
// in any company, equal steps on all ranks, and refusals of what cannot be split.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "model/forward.hpp"
#include "model/load.hpp"
#include "parallel/agreement.hpp"
#include "parallel/parallel_engine.hpp"
#include "parallel/split_model.hpp"
#include "tests/support/random.hpp"
#include "thread_ranks.hpp"

using namespace serve;

namespace {

std::size_t to_size(int n) {
  return static_cast<std::size_t>(n);
}

/// Any shape whose K/V heads can be split over `ranks`.
Config random_config(test::Random& random, int ranks) {
  Config c;
  c.num_kv_heads = ranks * random.uniform(1, 2);
  c.num_qo_heads = c.num_kv_heads * random.uniform(1, 3);
  c.dim = 8 * c.num_qo_heads;
  c.hidden_dim = random.uniform(ranks, 100);
  c.num_layers = random.uniform(1, 3);
  c.vocab_size = random.uniform(5, 200);
  c.max_positions = 128;
  c.tied = random.chance(0.5);
  return c;
}

/// The logits of all positions of a prompt that is run in two steps.
std::vector<float> logits_of(const Model& model, Products& products,
                             const std::vector<int>& prompt) {
  chunkattn::PrefixTree<int, 16> tree;
  chunkattn::AttentionPlan plan;
  Forward forward(model, products);
  const auto attention = make_attention(KvType::fp32, tree, model.config, products.executor(),
                                        chunkattn::Reduce::deterministic);
  std::vector<float> all;
  auto sequence = tree.insert(prompt);
  for (const std::size_t budget : {(prompt.size() + 1) / 2, prompt.size()}) {
    auto step = tree.begin_step();
    std::size_t left = budget;
    const auto added = step.add(sequence, left);
    if (!added) break;
    std::vector<int> rows(to_size(added.row().num_rows));
    for (std::size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<int>(i);
    const auto view = plan.build(step);
    const auto logits = forward.run(
        view.tokens(), view.positions(), rows,
        [&](int layer, std::span<const float> q, std::span<const float> k, std::span<const float> v,
            std::span<float> out) { attention->run(layer, view, q, k, v, out); });
    all.insert(all.end(), logits.begin(), logits.end());
    std::move(step).finished().commit(std::vector<int>(added.row().has_output ? 1 : 0, 0));
  }
  return all;
}

}  // namespace

TEST_CASE("parts of a model give its logits together") {
  test::Random random(1);
  for (int round = 0; round < test::scaled(30); ++round) {
    const int size = random.uniform(1, 4);
    const Config config = random_config(random, size);
    const Element element = random.chance(0.5) ? Element::fp32 : Element::bf16;
    std::vector<int> prompt(to_size(random.uniform(1, 40)));
    for (int& token : prompt) token = random.uniform(0, config.vocab_size - 1);
    const std::uint64_t seed = random.bits();
    chunkattn::ThreadPool pool(1);
    const Model whole = random_model(config, element, seed, pool);
    Products products(pool, ProductKind::own);
    const std::vector<float> expected = logits_of(whole, products, prompt);

    std::vector<std::vector<float>> logits(to_size(size));
    std::vector<std::size_t> bytes(to_size(size));
    test::run_ranks(size, [&](Communicator& ranks) {
      chunkattn::ThreadPool own_pool(1);
      const Model part =
          part_of(random_model(config, element, seed, own_pool), ranks.rank(), ranks.size());
      Products own_products(own_pool, ProductKind::own, ranks);
      logits[to_size(ranks.rank())] = logits_of(part, own_products, prompt);
      bytes[to_size(ranks.rank())] = part.weight_bytes();
    });
    REQUIRE(logits[0].size() == expected.size());
    double largest = 1;
    for (const float logit : expected) largest = std::max(largest, std::abs(double(logit)));
    for (std::size_t i = 0; i < expected.size(); ++i)
      CHECK(std::abs(double(logits[0][i]) - expected[i]) <= 1e-4 * largest);
    for (std::size_t r = 1; r < logits.size(); ++r)
      CHECK(logits[r] == std::vector<float>(expected.size(), 0.0f));
    if (size == 1) CHECK(bytes[0] == whole.weight_bytes());
  }
}

TEST_CASE("what cannot be split is refused with both numbers") {
  chunkattn::ThreadPool pool(1);
  const auto refusal = [&](const Config& config, int size) -> std::string {
    try {
      (void)part_of(random_model(config, Element::fp32, 1, pool), 0, size);
    } catch (const std::invalid_argument& error) {
      return error.what();
    }
    return "";
  };
  Config config{64, 40, 1, 8, 4, 50, 64, true, 1e-5f, 10000.0f};
  CHECK(refusal(config, 3) ==
        "num_kv_heads = 4 on 3 ranks: expected a number of ranks that divides it");
  CHECK(refusal(config, 8).find("num_kv_heads = 4 on 8 ranks") == 0);
  config.hidden_dim = 3;
  CHECK(refusal(config, 4) == "hidden_dim = 3 on 4 ranks: expected at least one for each");
  CHECK(refusal(config, 2).empty());
}

TEST_CASE("a rank whose model or options are others is told so") {
  test::run_ranks(3, [](Communicator& ranks) {
    chunkattn::ThreadPool pool(1);
    const Config config{48, 40, 1, 6, 3, 50, 64, true, 1e-5f, 10000.0f};
    const Model model = part_of(random_model(config, Element::fp32, 1, pool), ranks.rank(), 3);
    EngineOptions options;
    CHECK_NOTHROW(check_setup(ranks, model, options));
    if (ranks.rank() == 2) options.max_chunks = 5;
    if (ranks.rank() == 2)
      CHECK_THROWS_AS(check_setup(ranks, model, options), std::logic_error);
    else
      CHECK_NOTHROW(check_setup(ranks, model, options));
    const int value = 5;
    if (ranks.rank() == 1)
      CHECK_THROWS_WITH(check_agreement(ranks, "the step", Digest().add(value + 1)),
                        doctest::Contains("the step: digest = "));
    else
      CHECK_NOTHROW(check_agreement(ranks, "the step", Digest().add(value)));
  });
}
