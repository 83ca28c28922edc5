// What was not used for a policy's ttl goes, by a clock of the caller's.
#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <vector>

#include "chunkattn/cache/policy.hpp"
#include "chunkattn/debug/tree.hpp"
#include "chunkattn/prefix_tree.hpp"
#include "tests/support/random.hpp"
#include "tests/support/refused.hpp"
#include "tests/support/retention.hpp"
#include "tests/support/steps.hpp"

using namespace chunkattn;
using test::iota;

namespace {

template <class Tree>
void pass(Tree& tree, const std::vector<int>& prompt, const InsertOptions& options) {
  auto s = tree.insert(prompt, options);
  test::load(s);
}
std::vector<int> with_tail(int first, int tail) {
  auto prompt = iota(first, 10);
  for (const int token : iota(tail, 6)) prompt.push_back(token);
  return prompt;
}

}  // namespace

TEST_CASE("what is used stays, and what is not used for long enough goes") {
  using Tree = PrefixTree<int, 4>;
  Tree tree({.max_chunks = 10000}, {}, {.max_pinned = 10, .ttl = 100});
  const InsertOptions all{.compute_last = false};
  CHECK(tree.expire(1000) == 0);
  pass(tree, with_tail(0, 100), all);
  CHECK(tree.expire(1050) == 0);
  pass(tree, with_tail(0, 200), all);  // uses what both have in common
  pass(tree, with_tail(300, 400), all);
  const auto pin = tree.pin(with_tail(300, 400));
  auto live = tree.insert(with_tail(500, 600));
  test::load(live);
  CHECK(tree.expire(1099) == 0);
  CHECK(tree.expire(1100) == 6);
  CHECK(tree.match_prefix(with_tail(0, 100)).cached == 10);
  CHECK(tree.expire(1149) == 0);
  CHECK(tree.expire(1150) == 16);
  CHECK(tree.expire(5000) == 0);  // what is pinned or live
  CHECK(tree.match_prefix(with_tail(300, 400)).cached == 16);
  CHECK(tree.match_prefix(with_tail(500, 600)).cached == 16);
  live.leave();
  CHECK(tree.expire(5099) == 0);
  CHECK(tree.expire(5100) == 16);
  check_invariants(tree);
}

TEST_CASE("time does not go back, and does not pass for policies that have none") {
  PrefixTree<int, 4> tree({.max_chunks = 10000}, {}, {.ttl = 5});
  CHECK(tree.expire(10) == 0);
  CHECK(test::refused([&] { static_cast<void>(tree.expire(9)); }).find("now = 9") !=
        std::string::npos);
  PrefixTree<int, 4> forever;
  pass(forever, iota(0, 8), {.compute_last = false});
  CHECK(forever.expire(std::numeric_limits<std::uint64_t>::max()) == 0);
  PrefixTree<int, 4, PoolAllocator, test::NoRetention> none;
  CHECK(none.expire(7) == 0);
  using Learning = PrefixTree<int, 4, PoolAllocator, CachePolicy>;
  CHECK(test::refused([&] { (void)Learning({}, {}, {{.learns = true, .ttl = 5}}); }) ==
        "ttl = 5: expected 0 with learns");
}

TEST_CASE("by priorities and tenants, exactly what is older goes") {
  test::Random random(test::run_seed());
  for (const bool fair : {false, true}) {
    PrefixTree<int, 4, PoolAllocator, CachePolicy> tree(
        {.max_chunks = 10000}, {}, {{.fair = fair, .ttl = 50, .by_priority = true}});
    struct Key {
      std::uint64_t tenant;
      int prompt;
      auto operator<=>(const Key&) const = default;
    };
    std::map<Key, std::uint64_t> used;
    std::uint64_t now = (std::uint64_t{1} << 32) - 2000;  // times wrap around in nodes
    CHECK(tree.expire(now) == 0);
    const auto tokens = [](int prompt) { return iota(1000 * prompt, 8); };
    for (int i = 0; i < 3000; ++i) {
      const Key key{static_cast<std::uint64_t>(random.uniform(1, 3)), random.uniform(0, 30)};
      const InsertOptions options{.name_space = {.tenant = key.tenant},
                                  .compute_last = false,
                                  .priority = random.uniform(-1, 1)};
      pass(tree, tokens(key.prompt), options);
      used[key] = now;
      if (!random.chance(0.3)) continue;
      now += static_cast<std::uint64_t>(random.uniform(0, 40));
      std::size_t expected = 0;
      expected +=
          8 * std::erase_if(used, [&](const auto& entry) { return now - entry.second >= 50; });
      CHECK(tree.expire(now) == expected);
      check_invariants(tree);
    }
    for (const auto& [key, when] : used)
      CHECK(tree.match_prefix(tokens(key.prompt), {.name_space = {.tenant = key.tenant}}).cached ==
            8);
    CHECK(tree.expire(now + 50) == 8 * used.size());
    CHECK(tree.stats().used_chunks == 0);
  }
}

TEST_CASE("what was not used for longer than 32 bits count goes, too") {
  const std::uint64_t wrap = std::uint64_t{1} << 32;
  for (const std::uint64_t gap : {wrap, wrap + 5, 3 * wrap, ~std::uint64_t{0} - 7}) {
    CAPTURE(gap);
    PrefixTree<int, 4> tree({.max_chunks = 10000}, {}, {.ttl = 100});
    CHECK(tree.expire(7) == 0);
    pass(tree, iota(0, 8), {.compute_last = false});
    CHECK(tree.expire(7 + gap) == 8);
  }
  // The longest ttl: asked in between, too.
  PrefixTree<int, 4> tree({.max_chunks = 10000}, {}, {.ttl = 0xffffffff});
  CHECK(tree.expire(5) == 0);
  pass(tree, iota(0, 8), {.compute_last = false});
  CHECK(tree.expire(5 + wrap / 2) == 0);
  pass(tree, iota(100, 8), {.compute_last = false});
  CHECK(tree.expire(5 + wrap - 2) == 0);
  CHECK(tree.expire(5 + wrap + 10) == 8);
  CHECK(tree.match_prefix(iota(100, 8)).cached == 8);
  CHECK(tree.expire(5 + wrap / 2 + wrap - 1) == 8);
}

TEST_CASE("what is public goes after what continues it") {
  PrefixTree<int, 4, PoolAllocator, CachePolicy> tree({.max_chunks = 10000}, {},
                                                      {{.fair = true, .ttl = 50}});
  for (std::uint64_t tenant = 1; tenant <= 3; ++tenant)
    pass(tree, with_tail(0, static_cast<int>(100 * tenant)),
         {.name_space = {.tenant = tenant}, .public_length = 10, .compute_last = false});
  CHECK(tree.expire(50) == 28);
  check_invariants(tree);
  CHECK(tree.stats().used_chunks == 0);
}

TEST_CASE("what eviction passes over is not younger by that") {
  // Ten public beginnings of 8 tokens, that each continue with 4 of a tenant.
  PrefixTree<int, 4, PoolAllocator, CachePolicy> tree({.max_chunks = 34}, {},
                                                      {{.fair = true, .ttl = 100}});
  CHECK(tree.expire(1000) == 0);
  const auto of = [](std::uint64_t tenant) {
    return InsertOptions{.name_space = {.tenant = tenant}, .compute_last = false};
  };
  for (int i = 0; i < 10; ++i) {
    auto options = of(static_cast<std::uint64_t>(i));
    options.public_length = 8;
    pass(tree, iota(100 * i, 12), options);
  }
  CHECK(tree.expire(1060) == 0);
  // Public is most of what is cached, continues everywhere, and is passed over.
  for (int i = 0; i < 3; ++i) pass(tree, iota(5000 + 100 * i, 12), of(99));
  CHECK(tree.stats().evicted_tokens == 20);  // of the tenant with the largest share
  check_invariants(tree);
  CHECK(tree.expire(1099) == 0);
  CHECK(tree.expire(1100) == 120);
  CHECK(tree.match_prefix(iota(5200, 12), of(99)).cached == 12);
  check_invariants(tree);
  CHECK(tree.expire(1160) == 16);
  CHECK(tree.stats().used_chunks == 0);
}

TEST_CASE("what is old goes, wherever eviction stopped to look") {
  PrefixTree<int, 4, PoolAllocator, CachePolicy> tree({.max_chunks = 33}, {},
                                                      {{.fair = true, .ttl = 100}});
  CHECK(tree.expire(1000) == 0);
  const auto begin = [&](int i) {
    pass(tree, iota(100 * i, 12),
         {.name_space = {.tenant = static_cast<std::uint64_t>(i)},
          .public_length = 8,
          .compute_last = false});
  };
  for (int i = 0; i < 10; ++i) begin(i);
  CHECK(tree.expire(1060) == 0);
  for (int i = 0; i < 3; ++i)  // six times, eight of the ten are passed over
    pass(tree, iota(5000 + 100 * i, 12), {.name_space = {.tenant = 99}, .compute_last = false});
  CHECK(tree.stats().evicted_tokens == 24);
  begin(8);  // where eviction would continue
  begin(9);
  CHECK(tree.expire(1100) == 8 * 12);
  check_invariants(tree);
  CHECK(tree.expire(1160) == 2 * 12 + 12);
  CHECK(tree.stats().used_chunks == 0);
}
