// A model split over ranks, which are threads here: the same logits as in one piece, the same texts
// in any company, equal steps on all ranks, and refusals of what cannot be split. And a context
// that is split.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "context_check.hpp"
#include "model/forward.hpp"
#include "model/load.hpp"
#include "parallel/parallel_engine.hpp"
#include "parallel/split_model.hpp"
#include "ranks/agreement.hpp"
#include "tests/support/random.hpp"
#include "thread_ranks.hpp"

using namespace serve;

namespace {

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
  if (random.chance(0.3)) c.head_size = 8, c.dim = 8 * random.uniform(1, 12);
  if (random.chance(0.3)) c.window = random.uniform(1, 20);
  if (random.chance(0.3)) c.global_every = 2, c.local_rope_base = 500, c.embedding_scale = 3;
  c.gelu = random.chance(0.3);
  return c;
}

/// What some models have beside matrices: biases, and norms of heads and after blocks.
void adorn(Model& model, test::Random random) {
  const Config& c = model.config;
  const auto fill = [&random](std::vector<float>& values, int size) {
    values.resize(to_size(size));
    for (float& value : values) value = 1 + 0.3f * random.normal();
  };
  for (Layer& layer : model.layers) {
    if (random.chance(0.5)) fill(layer.qkv_bias, c.q_dim() + 2 * c.kv_dim());
    if (random.chance(0.5)) fill(layer.q_norm, c.head_dim()), fill(layer.k_norm, c.head_dim());
    if (random.chance(0.5)) fill(layer.attention_post_norm, c.dim);
    if (random.chance(0.5)) fill(layer.ffn_post_norm, c.dim);
  }
}

/// The logits of all positions of a prompt that is run in two steps.
std::vector<float> logits_of(const Model& model, Products& products,
                             const std::vector<int>& prompt) {
  chunkattn::PrefixTree<int, 16> tree({}, {}, {.retains = false});
  chunkattn::AttentionPlan plan;
  Forward forward(model, products);
  const auto attention = make_attention(KvType::fp32, tree, model.config, products.executor(),
                                        chunkattn::CpuOptions{});
  std::vector<float> all;
  auto sequence = tree.insert(prompt);
  for (const std::size_t max_tokens : {(prompt.size() + 1) / 2, prompt.size()}) {
    auto step = tree.begin_step();
    std::size_t left = max_tokens;
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
    std::move(step).finish().commit(std::vector<int>(added.row().has_output ? 1 : 0, 0));
  }
  return all;
}

/// Runs script(engine) on rank 0 of `size`, with the others after it. All ranks' counts are the
/// same in the end.
template <class Script>
void run_engines(int size, const Config& config, const EngineOptions& options,
                 const Script& script) {
  std::vector<EngineStats> stats(to_size(size));
  test::run_ranks(size, [&](Communicator& ranks) {
    chunkattn::ThreadPool pool(1);
    const Model part =
        part_of(random_model(config, Element::fp32, 3, pool), ranks.rank(), ranks.size());
    Products products(pool, ProductKind::own, ranks);
    auto engine = make_engine(part, products, options);
    check_setup(ranks, part, options);
    const Engine& own = *engine;
    if (ranks.rank() == 0) {
      const auto leader = lead(ranks, std::move(engine));
      script(*leader);
      stats[0] = own.stats();
    } else {
      follow(ranks, *engine);
      stats[to_size(ranks.rank())] = own.stats();
    }
  });
  for (const EngineStats& other : stats) {
    CHECK(other.steps == stats[0].steps);
    CHECK(other.rows == stats[0].rows);
    CHECK(other.generated_tokens == stats[0].generated_tokens);
    CHECK(other.preemptions == stats[0].preemptions);
    CHECK(other.swapped_tokens == stats[0].swapped_tokens);
    CHECK(other.peak_chunks == stats[0].peak_chunks);
  }
}

/// What choices of requests said, and that each has ended.
using Texts = std::map<std::pair<RequestId, int>, std::vector<int>>;
void listen(Engine& engine, Texts& texts, int& open) {
  for (const Event& event : engine.take_events()) {
    if (event.token >= 0) texts[{event.id, event.choice}].push_back(event.token);
    if (event.finish != Finish::none) --open;
  }
}

std::vector<Request> random_requests(test::Random& random, int count, int vocabulary) {
  std::vector<Request> requests(to_size(count));
  for (int i = 0; i < count; ++i) {
    Request& request = requests[to_size(i)];
    request.id = to_size(i);
    request.tenant = random.chance(0.2) ? 1 : 0;
    request.prompt.assign(to_size(random.uniform(1, 20)), 4);
    for (int n = random.uniform(0, 8); n > 0; --n)
      request.prompt.push_back(random.uniform(0, vocabulary - 1));
    request.max_length = request.prompt.size() + to_size(random.uniform(0, 20));
    request.choices = random.chance(0.7) ? 1 : random.uniform(2, 3);
    if (random.chance(0.5)) request.sampling = {1.5, 0.9, random.bits(), 20, 0.01, 1, 0.5};
    if (random.chance(0.3)) request.logit_bias = {{random.uniform(0, vocabulary - 1), 5}};
    if (random.chance(0.3)) request.logprobs = 2;
  }
  return requests;
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
    const test::Random adornments(100 + static_cast<std::uint64_t>(round));
    Model whole = random_model(config, element, seed, pool);
    adorn(whole, adornments);
    Products products(pool, ProductKind::own);
    const std::vector<float> expected = logits_of(whole, products, prompt);

    std::vector<std::vector<float>> logits(to_size(size));
    std::vector<std::size_t> bytes(to_size(size));
    test::run_ranks(size, [&](Communicator& ranks) {
      chunkattn::ThreadPool own_pool(1);
      Model copy = random_model(config, element, seed, own_pool);
      adorn(copy, adornments);
      const Model part = part_of(std::move(copy), ranks.rank(), ranks.size());
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

TEST_CASE("a rank whose model or options differ gets an error") {
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

TEST_CASE("in any company, and with whatever ends early, each choice says what it says alone") {
  test::Random random(2);
  const int size = random.uniform(2, 3);
  const Config config{48, 40, 2, 6, size == 3 ? 3 : 2, 50, 128, true, 1e-5f, 10000.0f};
  const auto requests = random_requests(random, 8, config.vocab_size);
  EngineOptions options;
  options.chunk_size = 8;
  options.reduce = chunkattn::CpuOptions::Reduce::batch_invariant;
  Texts alone;
  run_engines(size, config, options, [&](Engine& engine) {
    for (const Request& request : requests) {
      int open = request.choices;
      engine.submit(request);
      while (engine.step(0)) {
      }
      listen(engine, alone, open);
      CHECK(open == 0);
    }
  });
  for (const auto preempt : {Preempt::recompute, Preempt::swap}) {
    options.preempt = preempt;
    options.max_chunks = to_size(random.uniform(8, 16));  // the longest alone needs 7
    options.step_tokens = to_size(random.uniform(1, 40));
    const auto cancelled = random.index(requests.size()), stopped = random.index(requests.size());
    Texts texts;
    run_engines(size, config, options, [&](Engine& engine) {
      int open = 0;
      double now = 0;
      for (const Request& request : requests) {  // two steps after one another
        Request with_deadline = request;
        if (request.id == 5) with_deadline.deadline = now + 10;
        engine.submit(with_deadline);
        open += request.choices;
        for (int i = 0; i < 2; ++i) engine.step(now++);
        if (request.id == 6) {
          engine.cancel(cancelled);
          engine.stop(stopped, 0);
        }
      }
      Request wrong = requests[0];
      wrong.id = 99;
      wrong.choices = 0;
      CHECK_THROWS_AS(engine.submit(wrong), std::invalid_argument);  // and no rank gets it
      while (engine.step(now++)) {
      }
      listen(engine, texts, open);
      CHECK(open == 0);
      CHECK(engine.snapshot().chunks_used == 0);
    });
    for (const Request& request : requests)
      for (int choice = 0; choice < request.choices; ++choice) {
        const auto& text = texts[{request.id, choice}];
        const auto& whole = alone[{request.id, choice}];
        CAPTURE(request.id);
        REQUIRE(text.size() <= whole.size());
        CHECK(std::equal(text.begin(), text.end(), whole.begin()));
        if (request.id != 5 && request.id != cancelled && (request.id != stopped || choice > 0))
          CHECK(text.size() == whole.size());
      }
  }
}

TEST_CASE("attention over a context on 1, 2 and 4 ranks is attention over all of it") {
  for (int round = 0; round < test::scaled(10); ++round)
    for (const int size : {1, 2, 4})
      test::run_ranks(size, [round](Communicator& ranks) {
        test::ContextRank(ranks, 1000 + static_cast<std::uint64_t>(round)).run();  // may throw
      });
}

TEST_CASE("a context with rows to be copied between chunks is refused") {
  chunkattn::PlanView plan;
  plan.num_copies = 2;
  CHECK_THROWS_WITH(ContextPart(alone()).over(plan),
                    "plan.num_copies = 2: expected 0: chunks lie on several ranks");
}
