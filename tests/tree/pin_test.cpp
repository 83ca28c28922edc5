// Pins: counted handles on written prefixes, evicted last, within a budget of chunks.
#include <doctest/doctest.h>

#include <climits>
#include <cstddef>
#include <set>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "chunkattn/attention_plan.hpp"
#include "chunkattn/cache/policy.hpp"
#include "chunkattn/debug/tree.hpp"
#include "chunkattn/prefix_tree.hpp"
#include "tests/support/random.hpp"
#include "tests/support/retention.hpp"
#include "tests/support/steps.hpp"

using namespace chunkattn;
using test::iota;

namespace {

using Tree = PrefixTree<int, 4>;

/// Joins, computes everything and leaves.
template <class AnyTree>
void pass(AnyTree& tree, const std::vector<int>& prompt, const InsertOptions& options = {}) {
  auto s = tree.insert(prompt, options);
  test::load(s);
}

Tree make(std::size_t chunks, std::size_t max_pinned) {
  return Tree(PoolAllocator{.max_chunks = chunks}, {}, RetentionOptions{.max_pinned = max_pinned});
}

/// Fills the whole budget with other cache, which evicts all that may be.
template <class AnyTree>
void flood(AnyTree& tree, const InsertOptions& options = {}) {
  static int next = 1'000'000;
  const auto chunks = static_cast<int>(tree.allocator().capacity());
  for (int i = 0; i < chunks; ++i) pass(tree, iota(next += 100, 4), options);
  check_invariants(tree);
}

template <class AnyTree>
std::size_t cached(const AnyTree& tree, const std::vector<int>& prompt) {
  return tree.match_prefix(prompt).cached;
}

}  // namespace

TEST_CASE("pinned once: kept; dropped: evicted like any other") {
  Tree tree = make(8, 4);
  pass(tree, iota(0, 10));
  pass(tree, iota(500, 4));
  {
    const auto pin = tree.pin(iota(0, 12));
    CHECK(pin);
    CHECK(pin.size() == 10);
    flood(tree);
    CHECK(cached(tree, iota(0, 10)) == 10);
    CHECK(cached(tree, iota(500, 4)) == 0);
    CHECK(pin.size() == 10);
  }
  flood(tree);
  CHECK(cached(tree, iota(0, 10)) == 0);
}

TEST_CASE_TEMPLATE("watermarks evict nothing that is pinned: only a need for chunks does", Policy,
                   RetentionOptions, CachePolicy) {
  Policy policy;
  policy.high_watermark = 5, policy.low_watermark = 1, policy.max_pinned = 4;
  if constexpr (std::is_same_v<Policy, CachePolicy>) policy.learns = true;
  PrefixTree<int, 4, PoolAllocator, Policy> tree(PoolAllocator{.max_chunks = 12}, {}, policy);
  pass(tree, iota(0, 10));
  const auto pin = tree.pin(iota(0, 10));
  pass(tree, iota(500, 4));
  auto live = tree.insert(iota(700, 16));  // with what is pinned 7 chunks, more than either mark
  test::load(live);
  pass(tree, iota(900, 4));
  CHECK(cached(tree, iota(500, 4)) == 0);
  CHECK(cached(tree, iota(900, 4)) == 0);
  CHECK(pin.size() == 10);
  CHECK(cached(tree, iota(0, 10)) == 10);
  check_invariants(tree);
  auto large = tree.insert(iota(2000, 28));
  CHECK(pin.size() < 10);
}

TEST_CASE("pins are counted, and each undoes itself alone, in any order") {
  test::Random random(1);
  for (int round = 0; round < test::scaled(30); ++round) {
    Tree tree = make(12, 8);
    pass(tree, iota(0, 16));
    std::vector<Tree::Pin> pins;
    for (int i = 0; i < 5; ++i) {
      const std::size_t n = 1 + random.index(16);
      pins.push_back(tree.pin(iota(0, n)));
      CHECK(pins.back().size() == n);
    }
    pins.push_back(std::move(pins[1]));
    CHECK(pins[1].size() == 0);  // NOLINT(bugprone-use-after-move)
    pins[1] = Tree::Pin();
    while (!pins.empty()) {
      std::size_t longest = 0;
      for (const auto& pin : pins) longest = std::max(longest, pin.size());
      flood(tree);
      REQUIRE(cached(tree, iota(0, 16)) == longest);
      std::swap(pins[random.index(pins.size())], pins.back());
      pins.pop_back();
    }
    flood(tree);
    CHECK(cached(tree, iota(0, 16)) == 0);
  }
}

TEST_CASE("no priority is as high as a pin") {
  using Tree = PrefixTree<int, 4>;
  Tree tree(PoolAllocator{.max_chunks = 6}, {}, {.max_pinned = 2, .by_priority = true});
  pass(tree, iota(0, 8), {.priority = INT_MIN});
  const auto pin = tree.pin(iota(0, 8));
  CHECK(pin.size() == 8);
  flood(tree, {.priority = INT_MAX});
  CHECK(cached(tree, iota(0, 8)) == 8);
  pass(tree, iota(500, 16), {.priority = INT_MAX});  // all that is not pinned
  CHECK(cached(tree, iota(500, 16)) == 16);
  CHECK(pin.size() == 8);
}

TEST_CASE("only what is written is pinned") {
  Tree tree = make(16, 10);
  auto s = tree.insert(iota(0, 12));
  CHECK_FALSE(tree.pin(iota(0, 12)));
  CHECK_FALSE(tree.pin(iota(900, 3)));
  CHECK_FALSE(Tree::Pin());
  {
    const auto nothing = tree.pin(iota(900, 3));
    s.mark_loaded({0, 1});
    const auto first = tree.pin(iota(0, 1));
    CHECK(first.size() == 1);
    CHECK(nothing.size() == 0);
  }
  s.mark_loaded({1, 5});
  auto pin = tree.pin(iota(0, 12));
  CHECK(pin.size() == 6);
  check_invariants(tree);
  s.mark_loaded({6, 6});
  CHECK(pin.size() == 6);  // not what came later
  s.leave();
  flood(tree);
  CHECK(cached(tree, iota(0, 12)) == 6);
  pin = tree.pin(iota(0, 12), {.name_space = {.tenant = 1}});
  CHECK_FALSE(pin);  // another tenant's; and the old one is undone by the assignment
  flood(tree);
  CHECK(cached(tree, iota(0, 12)) == 0);
}

TEST_CASE("the budget is counted in chunks, each once") {
  Tree tree = make(100, 3);
  pass(tree, iota(0, 10));  // three chunks
  std::vector<int> branch = iota(0, 6);
  branch.insert(branch.end(), {70, 71, 72});
  pass(tree, branch);  // two more, from the middle of the second
  const auto all = tree.pin(iota(0, 10));
  CHECK(all.size() == 10);
  CHECK_FALSE(tree.pin(branch));
  const auto part = tree.pin(iota(0, 6));  // no further chunk
  CHECK(part.size() == 6);
  check_invariants(tree);

  // Against a count of the chunks where the tokens lie.
  test::Random random(2);
  for (int round = 0; round < test::scaled(60); ++round) {
    const std::size_t limit = 1 + random.index(11);
    Tree many = make(400, limit);
    std::vector<std::vector<int>> prompts;
    for (int i = 0; i < 20; ++i) {
      std::vector<int> prompt(static_cast<std::size_t>(random.uniform(1, 14)));
      for (int& t : prompt) t = random.uniform(0, 1);
      pass(many, prompt);
      prompts.push_back(prompt);
    }
    std::vector<std::pair<Tree::Pin, std::set<ChunkIndex>>> pins;
    for (int i = 0; i < 40; ++i) {
      if (!pins.empty() && random.chance(0.3)) {
        std::swap(pins[random.index(pins.size())], pins.back());
        pins.pop_back();
        continue;
      }
      const auto& prompt = prompts[random.index(prompts.size())];
      std::set<ChunkIndex> chunks, taken;
      {
        const auto s = many.insert(prompt);
        s.for_each_run({0, static_cast<int>(prompt.size())},
                       [&](const Piece& piece) { chunks.insert(piece.chunk); });
      }
      for (const auto& [pin, held] : pins) taken.insert(held.begin(), held.end());
      taken.insert(chunks.begin(), chunks.end());
      auto pin = many.pin(prompt);
      REQUIRE(pin.size() == (taken.size() <= limit ? prompt.size() : 0));
      if (pin) pins.emplace_back(std::move(pin), std::move(chunks));
      check_invariants(many);
    }
  }
}

TEST_CASE("clear() makes pins void and gives their budget back") {
  Tree tree = make(8, 2);
  pass(tree, iota(0, 8));
  auto live = tree.insert(iota(0, 8));
  auto old = tree.pin(iota(0, 8));
  CHECK(old.size() == 8);
  tree.clear();
  CHECK_FALSE(old);
  CHECK(cached(tree, iota(0, 8)) == 0);
  live.leave();
  check_invariants(tree);
  pass(tree, iota(500, 8));
  const auto fresh = tree.pin(iota(500, 8));  // all of the budget
  CHECK(fresh.size() == 8);
  old = Tree::Pin();  // undoes nothing
  flood(tree);
  CHECK(cached(tree, iota(500, 8)) == 8);
  CHECK(fresh.size() == 8);
}

TEST_CASE("the record of a pin that is gone is the next one's") {
  Tree tree = make(8, 4);
  pass(tree, iota(0, 8));
  const detail::Retention& retention = detail::TreeAccess::core(tree).retention;
  {
    const auto first = tree.pin(iota(0, 8));
    CHECK(retention.pinned(0) != detail::none);
  }
  CHECK(retention.pinned(0) == detail::none);
  const auto second = tree.pin(iota(0, 8));
  CHECK(retention.pinned(0) != detail::none);
}

TEST_CASE("pins survive splits, on both sides") {
  Tree tree = make(20, 4);
  pass(tree, iota(0, 16));
  auto pin = tree.pin(iota(0, 16));
  const std::uint64_t splits = tree.stats().splits;
  for (const std::size_t at : {6u, 2u, 13u}) {
    std::vector<int> prompt = iota(0, at);
    prompt.push_back(-static_cast<int>(at));
    pass(tree, prompt);
    check_invariants(tree);
  }
  CHECK(tree.stats().splits == splits + 3);
  CHECK(pin.size() == 16);
  flood(tree);
  CHECK(cached(tree, iota(0, 16)) == 16);
  pin = Tree::Pin();
  check_invariants(tree);
  flood(tree);
  CHECK(cached(tree, iota(0, 16)) == 0);
}

TEST_CASE("pinned chunks go only when nothing else is left, children before parents") {
  Tree tree = make(6, 6);
  pass(tree, iota(0, 8));
  const auto parent = tree.pin(iota(0, 4)), child = tree.pin(iota(0, 8));
  check_invariants(tree);
  pass(tree, iota(500, 16));
  CHECK(child.size() == 8);
  {
    auto big = tree.insert(iota(700, 20));
    CHECK(child.size() == 4);  // its end is gone, what is before it stays pinned
    CHECK(parent.size() == 4);
    check_invariants(tree);
  }
  test::Random random(3);
  int shrunk = 0;
  for (int round = 0; round < test::scaled(40); ++round) {
    Tree many = make(static_cast<std::size_t>(random.uniform(8, 20)), 12);
    std::vector<Tree::Pin> pins;
    std::vector<Tree::Sequence> live;
    for (int i = 0; i < 80; ++i) {
      std::vector<int> prompt(static_cast<std::size_t>(random.uniform(1, 20)));
      for (int& t : prompt) t = random.uniform(0, 1);
      std::vector<std::size_t> sizes;
      for (const auto& pin : pins) sizes.push_back(pin.size());
      auto s = many.try_insert(prompt);
      bool lost = false;
      for (std::size_t p = 0; p < pins.size(); ++p) lost = lost || pins[p].size() < sizes[p];
      if (lost) {
        ++shrunk;
        const std::string text = to_text(many);
        CAPTURE(text);
        REQUIRE(text.find("(cached)") == std::string::npos);  // every cached node is pinned
      }
      check_invariants(many);
      if (!s) {
        live.clear();
        continue;
      }
      test::load(*s);
      if (random.chance(0.5)) pins.push_back(many.pin(prompt));
      if (pins.size() > 4) pins.erase(pins.begin());
      if (random.chance(0.4)) live.push_back(std::move(*s));
    }
  }
  CHECK(shrunk > 0);
}

TEST_CASE("a pin outlives its sequence, its tree and its position in the tree's list") {
  Tree::Pin orphan;
  {
    Tree tree = make(8, 8);
    pass(tree, iota(0, 8));
    orphan = tree.pin(iota(0, 8));
    Tree moved = std::move(tree);
    CHECK(orphan.size() == 8);
    flood(moved);
    CHECK(cached(moved, iota(0, 8)) == 8);
  }
  CHECK_FALSE(orphan);
  orphan = Tree::Pin();
}

TEST_CASE("pin() is refused where no pin could ever hold anything") {
  const auto refusal = [](auto& tree) {
    auto s = tree.insert(iota(0, 8));
    test::load(s);
    return test::refused([&] { (void)tree.pin(iota(0, 8)); });
  };
  PrefixTree<int, 4> usual;
  PrefixTree<int, 4, PoolAllocator, test::NoRetention> nothing_kept;
  PrefixTree<int, 4, PoolAllocator, CachePolicy> learning({}, {}, {{.learns = true}});
  const std::string text =
      "max_pinned = 0: expected at least 1 in the tree's retention policy: pins may cover no chunk";
  CHECK(refusal(usual) == text);
  CHECK(refusal(nothing_kept) == text);
  CHECK(refusal(learning) == text);
}
