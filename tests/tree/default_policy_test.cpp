// The default policy: what a tree without a policy keeps, and how a caller gets memory back. Which
// options are refused, and where.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "chunkattn/cache/policy.hpp"
#include "chunkattn/cache/scored_policy.hpp"
#include "chunkattn/debug/tree.hpp"
#include "chunkattn/prefix_tree.hpp"
#include "tests/support/random.hpp"
#include "tests/support/refused.hpp"
#include "tests/support/steps.hpp"

using namespace chunkattn;
using test::iota, test::refused;

namespace {

/// Chunks that live sequences use.
template <class Tree>
std::size_t live_chunks(const Tree& tree) {
  return tree.stats().used_chunks - tree.stats().retained_chunks;
}

/// A prompt joins, is computed, and leaves; how much of it was cached.
template <class Tree>
std::size_t pass(Tree& tree, const std::vector<int>& prompt) {
  auto sequence = tree.insert(prompt);
  const std::size_t cached = sequence.num_cached();
  test::load(sequence);
  return cached;
}

/// A chat of 320 common tokens and 40 of its own.
std::vector<int> chat(int number) {
  std::vector<int> prompt = iota(0, 320);
  const std::vector<int> own = iota(1000 * number, 40);
  prompt.insert(prompt.end(), own.begin(), own.end());
  return prompt;
}

}  // namespace

TEST_CASE("chats in turn find what they have in common, in no more chunks than one needs") {
  PrefixTree<int> tree;
  CHECK(pass(tree, chat(1)) == 0);
  const std::size_t needed = tree.num_chunks();
  CHECK(needed == 6);  // 360 tokens in chunks of 64
  for (int i = 2; i <= 200; ++i) CHECK(pass(tree, chat(i)) == 320);
  CHECK(tree.num_chunks() == needed);
  CHECK(tree.stats().used_chunks == needed);
  CHECK(live_chunks(tree) == 0);
  check_invariants(tree);
  static_assert(
      std::is_same_v<PrefixTree<int>, PrefixTree<int, 64, PoolAllocator, RetentionOptions>>);
}

TEST_CASE("without a limit what is cached keeps to what live sequences have needed at once") {
  test::Random random(77);
  PrefixTree<int, 4> tree;
  std::deque<PrefixTree<int, 4>::Sequence> live;
  std::size_t peak = 0;
  for (int i = 0; i < 2000; ++i) {
    if (live.size() < 6 && random.chance(0.6)) {
      std::vector<int> prompt = iota(100 * random.uniform(0, 3), 12);
      const std::vector<int> own = iota(1000 * i, static_cast<std::size_t>(random.uniform(1, 30)));
      prompt.insert(prompt.end(), own.begin(), own.end());
      live.push_back(tree.insert(prompt));
      test::load(live.back());
    } else if (!live.empty()) {
      live.erase(live.begin() + random.uniform(0, static_cast<int>(live.size()) - 1));
    }
    peak = std::max(peak, live_chunks(tree));
    REQUIRE(tree.stats().used_chunks <= peak);
    if (i % 50 == 0) check_invariants(tree);
  }
  CHECK(tree.stats().cached_tokens > 0);
  live.clear();
  CHECK(tree.stats().used_chunks > peak / 2);  // the last ones stay
}

TEST_CASE("a watermark, and a pool with a limit, keep what they say") {
  PrefixTree<int, 4> all({}, {}, RetentionOptions{.high_watermark = max_pool_chunks});
  PrefixTree<int, 4> some({}, {}, RetentionOptions{.high_watermark = 10});
  PrefixTree<int, 4> limited(PoolAllocator{.max_chunks = 30});
  for (int i = 0; i < 40; ++i) {
    const std::vector<int> prompt = iota(100 * i, 8);
    CHECK(pass(all, prompt) == 0);
    CHECK(pass(some, prompt) == 0);
    CHECK(pass(limited, prompt) == 0);
  }
  CHECK(all.stats().retained_chunks == 80);
  CHECK(some.stats().retained_chunks == 10);
  CHECK(limited.stats().retained_chunks == 30);
}

TEST_CASE("one type of tree keeps all, by age or by priority, or nothing, as its options say") {
  const auto left_of = [](const RetentionOptions& options) {
    PrefixTree<int, 4> tree(PoolAllocator{.max_chunks = 2}, {}, options);
    for (const int priority : {2, 1, 0}) {
      auto sequence = tree.insert(iota(100 * priority, 4), {.priority = priority});
      test::load(sequence);
    }
    std::vector<int> left;
    for (const int priority : {0, 1, 2})
      if (tree.match_prefix(iota(100 * priority, 4)).cached > 0) left.push_back(priority);
    check_invariants(tree);
    return left;
  };
  CHECK(left_of({}) == std::vector{0, 1});
  CHECK(left_of({.by_priority = true}) == std::vector{0, 2});
  CHECK(left_of({.retains = false}).empty());
  CHECK(left_of({.retains = false, .by_priority = true}).empty());
}

TEST_CASE("options that a tree cannot have are refused by name") {
  const auto of_plain = [](const RetentionOptions& options) {
    return refused([&] { PrefixTree<int, 4> bad({}, {}, options); });
  };
  struct Oldest : ScoredPolicy {
    std::uint64_t score(const CachedLeaf& leaf) const noexcept { return leaf.last_use; }
  };
  const auto of_scored = [](const RetentionOptions& options) {
    return refused([&] { PrefixTree<int, 4, PoolAllocator, Oldest> bad({}, {}, {{options}}); });
  };
  const std::string expected =
      " = 1: expected false, or a tree with CachePolicy of chunkattn/cache/policy.hpp";
  CHECK(of_plain({.learns = true}) == "learns" + expected);
  CHECK(of_plain({.fair = true}) == "fair" + expected);
  CHECK(of_scored({.learns = true}) == "learns" + expected);
  CHECK(of_scored({.fair = true}) == "fair" + expected);
  CHECK(of_plain({.low_watermark = 3}) ==
        "low_watermark = 3: expected none without high_watermark");
  CHECK(of_plain({.high_watermark = 3, .low_watermark = 4}) ==
        "low_watermark = 4: expected at most high_watermark, 3");
  CHECK(of_plain({.high_watermark = 3, .low_watermark = 3, .ttl = 1, .by_priority = true}) ==
        "no error");
}

TEST_CASE("pins come beside what live sequences have needed") {
  PrefixTree<int, 4> tree({}, {}, RetentionOptions{.max_pinned = 8});
  (void)pass(tree, iota(0, 16));
  const auto pin = tree.pin(iota(0, 16));
  REQUIRE(pin.size() == 16);
  for (int i = 1; i < 10; ++i) (void)pass(tree, iota(100 * i, 16));
  CHECK(pin.size() == 16);
  CHECK(tree.stats().retained_chunks == 8);
  CHECK(tree.match_prefix(iota(900, 16)).cached == 16);  // the last one
  CHECK(tree.match_prefix(iota(800, 16)).cached == 0);
}

TEST_CASE("trim() and clear() give chunks back after a spike") {
  for (const bool clears : {false, true}) {
    CAPTURE(clears);
    PrefixTree<int, 4> tree;
    {
      std::vector<PrefixTree<int, 4>::Sequence> spike;
      for (int i = 0; i < 20; ++i) {
        spike.push_back(tree.insert(iota(100 * i, 8)));
        test::load(spike.back());
      }
    }
    CHECK(tree.stats().retained_chunks == 40);
    const auto running = tree.insert(iota(0, 8));
    if (clears) {
      tree.clear();
      CHECK(tree.stats().used_chunks == 2);
    } else {
      CHECK(tree.trim(50) == 0);
      CHECK(tree.trim(11) == 29);
      CHECK(tree.stats().used_chunks == 11);
      CHECK(tree.match_prefix(iota(1900, 8)).cached == 8);  // the least recently used went first
      CHECK(tree.match_prefix(iota(100, 8)).cached == 0);
      CHECK(tree.trim(0) == 9);
      CHECK(tree.trim(0) == 0);
    }
    CHECK(tree.stats().used_chunks == 2);  // of the live sequence
    // The spike is forgotten: one more request's chunks are all that is kept beside.
    for (int i = 0; i < 20; ++i) (void)pass(tree, iota(5000 + 100 * i, 8));
    CHECK(tree.stats().used_chunks == 4);
    check_invariants(tree);
  }
}

TEST_CASE("trim() leaves pins, and what they pin") {
  PrefixTree<int, 4> tree(PoolAllocator{.max_chunks = 20}, {}, RetentionOptions{.max_pinned = 8});
  for (int i = 0; i < 5; ++i) (void)pass(tree, iota(100 * i, 8));
  const auto pin = tree.pin(iota(200, 8));
  CHECK(tree.trim(0) == 8);
  CHECK(pin.size() == 8);
  CHECK(tree.stats().retained_chunks == 2);
}

TEST_CASE("trim() to more chunks than are used leaves what live sequences have needed") {
  PrefixTree<int, 4> tree;
  {
    std::vector<PrefixTree<int, 4>::Sequence> spike;  // never computed: nothing of it is cached
    for (int i = 0; i < 20; ++i) spike.push_back(tree.insert(iota(100 * i, 8)));
  }
  CHECK(tree.stats().used_chunks == 0);
  CHECK(tree.trim(30) == 0);
  for (int i = 0; i < 20; ++i) (void)pass(tree, iota(5000 + 100 * i, 8));
  CHECK(tree.stats().retained_chunks == 30);
}
