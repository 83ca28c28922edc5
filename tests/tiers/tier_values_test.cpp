// Values of tokens go to tiers with the K/V of their tokens, and come back with it.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "chunkattn/attention_plan.hpp"
#include "chunkattn/cache/annotations.hpp"
#include "chunkattn/debug/tree.hpp"
#include "chunkattn/kv_cache.hpp"
#include "chunkattn/prefix_tree.hpp"
#include "chunkattn/tiers/tiers.hpp"
#include "tests/support/random.hpp"
#include "tests/support/steps.hpp"

using namespace chunkattn;
using test::iota;

namespace {

using Tree = PrefixTree<int, 16>;
using Column = Annotations<Tree, std::uint64_t>;
using Tokens = std::vector<int>;

/// A number that is that of no other path.
std::uint64_t path_number(std::span<const int> tokens) {
  std::uint64_t number = 1;
  for (const int token : tokens)
    number = (number ^ (number >> 29)) * 0xbf58476d1ce4e5b9u + static_cast<std::uint64_t>(token);
  return number;
}

/// A process with a tree over a store, where each token has a value.
struct Served {
  explicit Served(std::shared_ptr<MemoryTier> store, bool has_columns = true)
      : tier(std::move(store)) {
    Tiers<Tree, KvCache<Cpu, float>>::Options options;
    options.threads = false;
    if (has_columns) options.companions = {&own, &next};
    tiers.emplace(tree, cache, std::vector<std::shared_ptr<TierStore>>{tier}, options);
  }
  void set(Column& column, const Tree::Sequence& sequence) const {
    const Tokens tokens = sequence.tokens();
    const std::size_t lag = column.options().lag;
    for (std::size_t p = column.first_missing(sequence); p + lag < tokens.size(); ++p)
      column.set(sequence, p, path_number(std::span(tokens).first(p + lag + 1)));
  }
  /// Computes a prompt, which leaves.
  void answer(const Tokens& prompt, bool has_values = true) {
    auto sequence = tree.insert(prompt);
    test::load(sequence);
    if (!has_values) return;
    set(own, sequence);
    set(next, sequence);
  }
  void evict() {
    for (int i = 0; i < 2; ++i) {
      const auto all = tree.try_insert(Tokens(16 * tree.chunks_available(), -1 - i));
      REQUIRE(all);
    }
    tiers->flush();
    CHECK(own.stats().chunks == 0);
    CHECK(next.stats().chunks == 0);
  }
  /// What the tier has of a prompt is loaded; tokens with K/V.
  Tree::Sequence load(const Tokens& prompt) {
    auto sequence = tree.insert(prompt);
    auto loading = tiers->load(sequence);
    loading.wait(sequence);
    check_invariants(tree);
    for (const Column* column : {&own, &next}) {
      const std::size_t lag = column->options().lag;
      for (std::size_t p = 0; p + lag < prompt.size(); ++p) {
        if (column->first_missing(sequence, p) == p) continue;
        std::uint64_t value = 0;
        column->read(sequence, p, std::span(&value, 1));
        CHECK(value == path_number(std::span(prompt).first(p + lag + 1)));
      }
    }
    return sequence;
  }

  Tree tree{{.max_chunks = 64}};
  KvCache<Cpu, float> cache{tree, {.num_layers = 1, .num_kv_heads = 1, .head_dim = 8}};
  Column own{tree, {.name = "own"}}, next{tree, {.lag = 1, .name = "next"}};
  std::shared_ptr<MemoryTier> tier;
  std::optional<Tiers<Tree, KvCache<Cpu, float>>> tiers;
};

std::shared_ptr<MemoryTier> memory() {
  return std::make_shared<MemoryTier>(std::size_t{64} << 20);
}

TEST_CASE("values are there after eviction, and after a restart") {
  for (const bool restarted : {false, true}) {
    CAPTURE(restarted);
    const auto store = memory();
    std::optional<Served> first(std::in_place, store);
    first->answer(iota(0, 100));
    first->evict();
    std::optional<Served> second;
    if (restarted) {
      first.reset();
      second.emplace(store);
    }
    Served& now = restarted ? *second : *first;
    Tokens other = iota(0, 40);  // parts from it within a block
    other.insert(other.end(), 40, 7);
    {
      const auto parted = now.load(other);
      CHECK(now.own.first_missing(parted) == 32);
      CHECK(now.next.first_missing(parted) == 31);
    }
    const auto same = now.load(iota(0, 100));
    CHECK(same.num_cached() >= 32);
    CHECK(now.own.first_missing(same) == 96);
    CHECK(now.next.first_missing(same) == 95);
  }
}

TEST_CASE("records without values are none for who has them, and the other way round") {
  for (const bool stored : {false, true}) {
    const auto store = memory();
    {
      Served before(store, stored);
      before.answer(iota(0, 64));
      before.evict();
    }
    Served after(store, !stored);
    const auto sequence = after.load(iota(0, 64));
    CHECK(sequence.num_written() == 0);
    CHECK(after.own.stats().chunks == 0);
  }
}

TEST_CASE("blocks that got their values later are stored again with them") {
  const auto store = memory();
  Served served(store);
  served.answer(iota(0, 64), false);
  served.evict();
  {
    const auto sequence = served.load(iota(0, 64));
    CHECK(sequence.num_written() >= 48);
    CHECK(served.own.first_missing(sequence) == 0);
  }
  served.answer(iota(0, 64));
  served.evict();
  const auto sequence = served.load(iota(0, 64));
  CHECK(served.own.first_missing(sequence) >= 48);
}

TEST_CASE("at random, what comes back are the values that went") {
  test::Random random(17);
  const auto store = memory();
  std::optional<Served> served(std::in_place, store);
  std::vector<Tokens> prompts;
  std::size_t values = 0;
  for (int round = 0; round < test::scaled(120); ++round) {
    Tokens prompt(1 + random.index(150));
    for (int& token : prompt) token = random.uniform(0, 1);
    if (!prompts.empty() && random.chance(0.8)) {
      const Tokens& like = prompts[random.index(prompts.size())];
      std::copy_n(like.begin(), random.index(std::min(like.size(), prompt.size()) + 1),
                  prompt.begin());
    }
    prompts.push_back(prompt);
    served->answer(prompt, random.chance(0.7));
    if (random.chance(0.4)) served->evict();
    if (random.chance(0.1)) served.emplace(store);
    const auto sequence = served->load(prompts[random.index(prompts.size())]);
    values += served->own.first_missing(sequence);
  }
  CHECK(values > 0);
}

}  // namespace
