// Why a prompt is not found: each reason by an example, what a tenant learns, and what is refused.
#include "chunkattn/cache/explain.hpp"

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "chunkattn/attention_plan.hpp"
#include "chunkattn/cache/checkpoints.hpp"
#include "chunkattn/debug/tree.hpp"
#include "chunkattn/prefix_tree.hpp"
#include "chunkattn/tiers/tiers.hpp"
#include "tests/support/counted_token.hpp"
#include "tests/support/steps.hpp"
#include "tests/support/tier_bench.hpp"

using namespace chunkattn;
using test::iota;

namespace {

using Tokens = std::vector<int>;
using ExplainedTree = PrefixTree<int, 4>;
using Explainer = CacheExplainer<ExplainedTree>;

/// "found 0+5, evicted 5+3 space 12 ago", and where the prompt parts from what is cached.
template <class Explanation>
std::string text_of(const Explanation& explanation) {
  std::string text;
  for (const ExplainedRange& one : explanation.ranges) {
    if (!text.empty()) text += ", ";
    text += std::string(name_of(one.reason)) + " " + std::to_string(one.range.begin) + "+" +
            std::to_string(one.range.length);
    if (one.reason == CacheReason::evicted)
      text += " " + std::string(name_of(one.cause)) + " " + std::to_string(one.tokens_ago) + " ago";
    if (one.reason == CacheReason::in_tier) text += " " + std::to_string(one.tier);
  }
  if (const auto& parting = explanation.parting) {
    text += "; parts at " + std::to_string(parting->position);
    if (parting->cached) text += " from " + std::to_string(*parting->cached);
  }
  return text;
}

struct Run {
  ExplainedTree tree;
  Explainer explainer;
  AttentionPlan plan;

  explicit Run(std::size_t max_chunks = 10, Explainer::Options options = {.max_tokens = 64})
      : tree(PoolAllocator{.max_chunks = max_chunks}, {}, {.ttl = 5}),
        explainer(tree, std::move(options)) {}
  /// A prompt joins, is computed and leaves.
  void run(const Tokens& prompt, const InsertOptions& options = {}) {
    auto sequence = tree.insert(prompt, options);
    test::load(sequence);
  }
  [[nodiscard]] std::string explain(const Tokens& prompt, const InsertOptions& options = {}) const {
    return text_of(explainer.explain(prompt, options));
  }
  [[nodiscard]] std::string across(const Tokens& prompt, const InsertOptions& options = {}) const {
    return text_of(explainer.explain_across_tenants(prompt, options));
  }
};
Tokens joined(Tokens tokens, const Tokens& more) {
  tokens.insert(tokens.end(), more.begin(), more.end());
  return tokens;
}

TEST_CASE("a prompt is found, never seen, or parts from what is cached") {
  Run r;
  CHECK(r.explain(iota(0, 6)) == "never_seen 0+6");
  r.run(iota(0, 12));
  CHECK(r.explain(iota(0, 12)) == "found 0+11, above_max_reuse 11+1");
  CHECK(r.explain(iota(0, 12), {.compute_last = false}) == "found 0+12");
  CHECK(r.explain(iota(0, 12), {.max_reuse = 5}) == "found 0+5, above_max_reuse 5+7");
  CHECK(r.explain(joined(iota(0, 5), {9, 9})) == "found 0+5, never_seen 5+2; parts at 5 from 5");
  CHECK(r.explain(joined(iota(0, 12), {9})) == "found 0+12, never_seen 12+1");
  CHECK(r.explain({7, 8}) == "never_seen 0+2");  // it has nothing in common with what is cached
  const auto told = r.explainer.explain(joined(iota(0, 5), {9, 9}));
  CHECK(told.count(CacheReason::found) == 5);
  CHECK(told.count(CacheReason::never_seen) == 2);
  CHECK(told.count(CacheReason::evicted) == 0);
}

TEST_CASE("what was evicted says why, and for how many tokens") {
  Run r;
  r.run(iota(0, 16));
  r.run(iota(100, 24));
  CHECK(r.explain(iota(0, 16)) == "found 0+15, above_max_reuse 15+1");
  r.run(iota(200, 8));  // two chunks of the first one go
  CHECK(r.explain(iota(0, 16)) == "found 0+8, evicted 8+8 space 0 ago");
  r.run(iota(300, 16));
  CHECK(r.explain(iota(0, 16)) == "evicted 0+16 space 8 ago");
  r.tree.expire(1);
  r.run(iota(200, 8));  // used again: it may stay for longer
  r.tree.expire(5);
  CHECK(r.explain(iota(200, 8)) == "found 0+7, above_max_reuse 7+1");
  CHECK(r.explain(iota(300, 4)) == "evicted 0+4 ttl 0 ago");
  r.tree.trim(0);
  CHECK(r.explain(iota(200, 8)) == "evicted 0+8 trim 0 ago");
  r.run(iota(0, 16));
  r.tree.clear();
  CHECK(r.explain(iota(0, 17)) == "evicted 0+16 clear 0 ago, never_seen 16+1");
  CHECK(r.explain(iota(300, 16)).starts_with("evicted 0+"));
  for (int i = 0; i < 4; ++i) r.run(iota(400 + 100 * i, 24));
  CHECK(r.explain(iota(100, 25)) == "forgotten 0+24, never_seen 24+1");
  CHECK(r.explainer.stats().evicted_tokens > 64);
  CHECK(r.explainer.stats().known_tokens == 64);
}

TEST_CASE("tokens that another sequence computes are pending, and those that it generates unseen") {
  Run r;
  auto writer = r.tree.insert(iota(0, 12));
  CHECK(r.explain(iota(0, 16)) == "pending 0+12, never_seen 12+4");
  auto step = r.tree.begin_step();
  REQUIRE(step.add(writer, 5));
  (void)r.plan.build(step);
  (void)std::move(step).finish();
  CHECK(r.explain(iota(0, 16)) == "found 0+5, pending 5+7, never_seen 12+4");
  writer.leave();
  CHECK(r.explain(iota(0, 16)) == "found 0+5, never_seen 5+11");
}

TEST_CASE("a prompt whose state is missing is not resumable") {
  ExplainedTree tree;
  Checkpoints<ExplainedTree> states(tree, {.max_count = 10});
  Explainer explainer(tree, {.resume = [&](std::span<const int> prompt, const InsertOptions& how) {
                        return states.find(prompt, how);
                      }});
  auto sequence = tree.insert(iota(0, 12));
  test::load(sequence);
  CHECK(text_of(explainer.explain(iota(0, 12))) == "not_resumable 0+11, above_max_reuse 11+1");
  REQUIRE(states.save(sequence, 7, std::make_shared<const int>(1)));
  CHECK(text_of(explainer.explain(iota(0, 12))) ==
        "found 0+7, not_resumable 7+4, above_max_reuse 11+1");
  REQUIRE(states.save(sequence, 12, std::make_shared<const int>(1)));  // after what is reused
  CHECK(text_of(explainer.explain(iota(0, 12))) ==
        "found 0+7, not_resumable 7+4, above_max_reuse 11+1");
  CHECK(text_of(explainer.explain(iota(0, 12), {.max_reuse = 6})) ==
        "not_resumable 0+6, above_max_reuse 6+6");
}

TEST_CASE("a tier has what was evicted, as far as whole blocks go") {
  using namespace test::tier_bench;
  const auto slow = memory();
  auto fast = memory(3000);  // for some blocks only
  Bench b({fast, slow});
  CacheExplainer<Tree> explainer(
      b.tree, {.tiers = [&](std::span<const int> prompt, const InsertOptions& how,
                            std::size_t begin) { return b.tiers->find(prompt, how, begin); }});
  const auto prompt = iota(0, 45);
  b.run(prompt);
  CHECK(text_of(explainer.explain(prompt)) == "found 0+44, above_max_reuse 44+1");
  b.evict_all();
  b.tiers->flush();
  CHECK(text_of(explainer.explain(prompt)).starts_with("in_tier 0+8 0"));
  CHECK(explainer.explain(prompt).count(CacheReason::in_tier) == 40);
  CHECK(explainer.explain(prompt).count(CacheReason::evicted) == 5);
  CHECK(text_of(explainer.explain(prompt)).find(" 1, evicted 40+5") != std::string::npos);
  CHECK(explainer.explain(prompt, {.name_space = {.tenant = 1}}).count(CacheReason::in_tier) == 0);
  b.run(iota(0, 12));  // a part of a block
  CHECK(text_of(explainer.explain(prompt)).starts_with("found 0+12, in_tier 12+"));
  CHECK(explainer.explain(prompt).count(CacheReason::in_tier) == 28);
  for (std::size_t block = 0; block < 5; ++block) {
    const auto tiers = b.tiers->find(prompt, {}, block * 8);
    CHECK(tiers.size() == 5 - block);
  }
}

TEST_CASE("what a tier has lost, or must not give, is in no tier") {
  using namespace test::tier_bench;
  Bench probe({memory()});  // how large a record is
  probe.run(iota(0, 8));
  probe.evict_all();
  probe.tiers->flush();
  const std::size_t bytes = probe.tiers->stats().tiers[0].stored_bytes;

  struct Keys final : TierStore::Subscriber {
    std::vector<TierStore::Key> stored;
    void changed(const TierStore::Key& key, bool is_there) noexcept override {
      if (is_there) stored.push_back(key);
    }
  };
  const auto keys = std::make_shared<Keys>();
  const auto tier = memory(3 * bytes + 150);  // each has the tokens before it, too
  tier->subscribe(keys);
  Bench b({tier});
  const auto find = [&](const Tokens& prompt, std::size_t begin, const InsertOptions& how = {}) {
    return b.tiers->find(prompt, how, begin).size();
  };
  b.run(iota(0, 24));
  b.evict_all();
  b.tiers->flush();
  CHECK(find(iota(0, 24), 0) == 3);
  b.run(iota(100, 8));
  b.evict_all();
  b.tiers->flush();
  CHECK(find(iota(0, 24), 0) == 2);  // the block that was stored first is the last one
  CHECK(find(iota(0, 24), 16) == 0);
  REQUIRE(keys->stored.size() == 4);
  tier->erase(keys->stored[2]);      // the first block
  CHECK(find(iota(0, 24), 0) == 0);  // what comes after a gap is of no use
  CHECK(find(iota(0, 24), 8) == 1);

  const InsertOptions shared{.name_space = {.tenant = 1}, .public_length = 8};
  b.run(iota(300, 16), shared);
  b.evict_all();
  b.tiers->flush();
  CHECK(find(iota(300, 16), 0, shared) == 2);
  CHECK(find(iota(300, 16), 0, {.name_space = {.tenant = 2}, .public_length = 8}) == 1);
  CHECK(find(iota(300, 16), 0, {.name_space = {.tenant = 1}}) == 0);
  b.tree.clear();
  CHECK(find(iota(300, 16), 0, shared) == 0);
  b.tiers->reopen("m1");
  b.run(iota(400, 8));
  b.evict_all();
  b.tiers->flush();
  CHECK(find(iota(400, 8), 0) == 1);
}

TEST_CASE("a long text that goes piece by piece is hashed a few times, not with each piece") {
  using test::CountedToken;
  using CountedTree = PrefixTree<CountedToken, 4, PoolAllocator>;
  std::vector<CountedToken> prompt(4000);
  for (std::size_t i = 0; i < prompt.size(); ++i) prompt[i].value = static_cast<int>(i);
  for (const bool splits : {false, true}) {
    CountedTree tree(PoolAllocator{.max_chunks = 2000});
    const CacheExplainer<CountedTree> explainer(tree);
    const auto run = [&](std::size_t length) {
      auto sequence = tree.insert(std::span(prompt).first(length));
      test::load(sequence);
    };
    run(prompt.size());
    CountedToken::looks = 0;
    for (std::size_t chunks = 999; chunks > 0; --chunks) {
      tree.trim(chunks);
      if (splits && chunks % 100 == 0) {
        const int before = CountedToken::looks;
        auto other = std::vector(prompt.begin(), prompt.begin() + 1020 - std::ptrdiff_t(chunks));
        other.push_back({-static_cast<int>(chunks)});
        auto sequence = tree.insert(other);  // cuts the text's last part
        CountedToken::looks = before;
      }
    }
    CHECK(CountedToken::looks < 4 * static_cast<int>(prompt.size()));
  }
}

TEST_CASE("a tenant learns nothing of others, and who may know does") {
  Run r;
  const InsertOptions ann{.name_space = {.tenant = 1}}, bob{.name_space = {.tenant = 2}};
  r.run(iota(0, 8), ann);
  CHECK(r.explain(iota(0, 9), bob) == "never_seen 0+9");
  CHECK(r.across(iota(0, 9), bob) == "other_tenant 0+8, never_seen 8+1");
  CHECK(r.explain(iota(0, 9), {.name_space = {1, 5}}) == "other_adapter 0+8, never_seen 8+1");
  CHECK(r.across(iota(0, 9), {.name_space = {2, 5}}) == "other_tenant 0+8, never_seen 8+1");
  // What others lose counts for who may know of them.
  r.run(iota(50, 8), bob);
  r.run(iota(100, 28), {.name_space = {.tenant = 3}});
  CHECK(r.explain(iota(0, 8), ann) == "found 0+4, evicted 4+4 space 0 ago");
  r.run(iota(200, 16), {.name_space = {.tenant = 3}});
  CHECK(r.explain(iota(0, 8), ann) == "evicted 0+8 space 0 ago");  // in two parts, which bob's tell
  CHECK(r.across(iota(0, 8), ann) == "evicted 0+8 space 12 ago");
  CHECK(r.explain(iota(50, 8), bob) == "evicted 0+8 space 0 ago");
  CHECK(r.across(iota(50, 8), ann) == "never_seen 0+8");  // it is cached by nobody
}

TEST_CASE("whether others send a tenant's own texts or their own, it is told the same") {
  for (int round = 0; round < 20; ++round) {
    Run same(20), different(20);
    const InsertOptions own{.name_space = {.tenant = 1}};
    for (int i = 0; i < 12; ++i) {
      const Tokens text = iota(10 * (i % 4), 10 + static_cast<std::size_t>(i * round % 7));
      same.run(text, own);
      different.run(text, own);
      const auto length = static_cast<std::size_t>(3 + (5 * i + round) % 20);
      const InsertOptions others{.name_space = {2 + static_cast<std::uint64_t>(i) % 2}};
      same.run(iota(10 * (i % 3), length), others);
      different.run(iota(500 + 10 * (i % 3), length), others);
      for (const int first : {0, 10, 20, 30}) {
        CHECK(same.explain(iota(first, 16), own) == different.explain(iota(first, 16), own));
        CHECK(same.explain(iota(first, 16)) == "never_seen 0+16");
      }
    }
  }
}

TEST_CASE("public tokens are everybody's, but nobody is told whose text goes on after them") {
  Run r(100);
  const InsertOptions ann{.name_space = {.tenant = 1}, .public_length = 6};
  const InsertOptions bob{.name_space = {.tenant = 2}, .public_length = 6};
  r.run(joined(iota(0, 6), {7, 7, 7}), ann);
  CHECK(r.explain(joined(iota(0, 6), {7, 7, 9}), bob) == "found 0+6, never_seen 6+3");
  CHECK(r.across(joined(iota(0, 6), {7, 7, 9}), bob) ==
        "found 0+6, other_tenant 6+2, never_seen 8+1");
  CHECK(r.explain(joined(iota(0, 6), {7, 7, 9}), ann) ==
        "found 0+8, never_seen 8+1; parts at 8 from 7");
  CHECK(r.explain(joined(iota(0, 3), {9, 9, 9}), bob) == "found 0+3, never_seen 3+3");
  CHECK(r.across(joined(iota(0, 3), {9, 9, 9}), bob) == "found 0+3, never_seen 3+3; parts at 3");
  // The tenant's own text, but sent without a public part: not another adapter's.
  CHECK(r.across(iota(0, 6), {.name_space = {.tenant = 1}}) == "never_seen 0+6");
  CHECK(r.across(iota(0, 6), {.name_space = {1, 4}, .public_length = 6}) == "other_adapter 0+6");
}

TEST_CASE("an explainer refuses what cannot be, and a tree that is gone") {
  std::optional<ExplainedTree> tree(std::in_place);
  CHECK_THROWS_WITH(Explainer(*tree, {.max_tokens = 0}), doctest::Contains("max_tokens = 0"));
  CHECK_THROWS_WITH(Explainer(*tree, {.tier_block = -1}), doctest::Contains("tier_block = -1"));
  Explainer explainer(*tree, {.max_tokens = 8});
  CHECK_THROWS_WITH((void)explainer.explain(Tokens{}), doctest::Contains("prompt.size() = 0"));
  {
    auto sequence = tree->insert(iota(0, 8));
    test::load(sequence);
  }
  ExplainedTree moved = std::move(*tree);
  CHECK(text_of(explainer.explain(iota(0, 8))) == "found 0+7, above_max_reuse 7+1");
  moved.trim(0);
  CHECK(text_of(explainer.explain(iota(0, 8))) == "evicted 0+8 trim 0 ago");
  moved = ExplainedTree();
  CHECK_THROWS_WITH((void)explainer.explain(iota(0, 8)), doctest::Contains("orphaned"));
  CHECK(explainer.stats().evicted_tokens == 8);
}

TEST_CASE("a tree without an explainer knows of none, and memory is taken once") {
  Run r(10);
  const std::size_t bytes = r.explainer.stats().bytes;
  CHECK(bytes <= 48 * 64 + 1024);
  for (int i = 0; i < 50; ++i) {
    r.run(iota(100 * i, 24));
    check_invariants(r.tree);
  }
  CHECK(r.explainer.stats().bytes == bytes);
}

}  // namespace
