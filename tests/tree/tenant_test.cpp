// Shares of the cache: what one tenant's flood leaves to others, weights, quotas, what is public.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "chunkattn/cache/detail/tenant_shares.hpp"
#include "chunkattn/cache/policy.hpp"
#include "chunkattn/debug/tree.hpp"
#include "chunkattn/prefix_tree.hpp"
#include "tests/support/counted_new.hpp"
#include "tests/support/random.hpp"
#include "tests/support/steps.hpp"

using namespace chunkattn;
using test::iota;

namespace {

/// A policy of one's own: LRU with weights and quotas by tenant.
struct Shares : CachePolicy {
  std::map<std::uint64_t, std::uint32_t> weights;
  std::map<std::uint64_t, std::size_t> quotas;
  [[nodiscard]] std::uint32_t weight(std::uint64_t tenant) const noexcept {
    const auto at = weights.find(tenant);
    return at == weights.end() ? 1 : at->second;
  }
  [[nodiscard]] std::size_t quota(std::uint64_t tenant) const noexcept {
    const auto at = quotas.find(tenant);
    return at == quotas.end() ? std::numeric_limits<std::size_t>::max() : at->second;
  }
};
template <class Policy = Shares>
using TreeOf = PrefixTree<int, 4, PoolAllocator, Policy>;

InsertOptions of(std::uint64_t tenant, std::size_t public_length = 0) {
  return {.name_space = {.tenant = tenant}, .public_length = public_length, .compute_last = false};
}
/// Joins, is computed, and leaves.
template <class Tree>
void pass(Tree& tree, const std::vector<int>& prompt, const InsertOptions& options) {
  auto s = tree.insert(prompt, options);
  test::load(s);
}
/// The i-th prompt of a tenant, of 3 chunks.
std::vector<int> prompt(int i) {
  return iota(100 * i, 12);
}
template <class Tree>
std::size_t num_cached(const Tree& tree, std::uint64_t tenant, int begin, int end) {
  std::size_t tokens = 0;
  for (int i = begin; i < end; ++i) tokens += tree.match_prefix(prompt(i), of(tenant)).cached;
  return tokens;
}
Shares fair(std::map<std::uint64_t, std::uint32_t> weights = {},
            std::map<std::uint64_t, std::size_t> quotas = {}) {
  Shares policy;
  policy.fair = true;
  policy.weights = std::move(weights);
  policy.quotas = std::move(quotas);
  return policy;
}

}  // namespace

TEST_CASE("the tenant with most for its weight is known whatever changes") {
  using detail::TenantShares;
  const auto join = [](TenantShares& shares, std::uint64_t tenant, std::int32_t tokens) {
    shares.reserve(tenant, {});
    const std::int32_t i = shares.index_of({.tenant = tenant});
    shares.add(i, tokens);
    return i;
  };
  TenantShares two;
  const std::int32_t first = join(two, 1, 10), second = join(two, 2, 8);
  CHECK(two.largest() == first);
  two.reserve(1, {.weight = 2});
  CHECK(two.is_ordered());
  CHECK(two.largest() == second);
  two.reserve(1, {.weight = 1});
  CHECK(two.is_ordered());
  CHECK(two.largest() == first);
  CHECK(two.size() == 3);  // with everybody

  // The last of the heap replaces one that has less, in another branch.
  TenantShares many;
  std::vector<std::pair<std::int32_t, std::int32_t>> all;  // tokens and who has them
  for (const std::int32_t tokens : {100, 10, 90, 9, 8, 80, 70})
    all.emplace_back(tokens, join(many, all.size() + 1, tokens));
  const auto leave = [&](std::size_t at) {
    many.remove(all[at].second, all[at].first);
    all.erase(all.begin() + static_cast<std::ptrdiff_t>(at));
    CHECK(many.is_ordered());
  };
  leave(3);
  std::ranges::sort(all);
  for (; !all.empty(); leave(all.size() - 1)) CHECK(many.largest() == all.back().second);
  CHECK(many.largest() == -1);
}

TEST_CASE("tenants of which nothing is left are forgotten, the others are not") {
  using detail::TenantShares;
  test::Random random(41);
  TenantShares shares;
  std::map<std::uint64_t, std::pair<std::int32_t, std::int32_t>> kept;  // index and tokens
  std::size_t most = 0;
  for (int i = 0; i < 20000; ++i) {
    const auto tenant = static_cast<std::uint64_t>(random.uniform(1, 1'000'000));
    if (shares.is_full(tenant)) {
      Array<char> is_used(shares.size());
      for (const auto& [id, record] : kept) is_used[static_cast<std::size_t>(record.first)] = 1;
      shares.forget_unused(is_used);
    }
    shares.reserve(tenant, {.weight = 1, .quota = 5});
    const std::int32_t index = shares.index_of({.tenant = tenant});
    const int tokens = random.uniform(0, 9);  // of 0 it has nodes that are in use, if it is kept
    if (tokens > 0) shares.add(index, tokens);
    auto& record = kept.try_emplace(tenant, index, 0).first->second;
    REQUIRE(record.first == index);
    record.second += tokens;
    while (kept.size() > 20) {
      auto gone = std::next(kept.begin(), random.uniform(0, 19));
      if (gone->second.second > 0) shares.remove(gone->second.first, gone->second.second);
      kept.erase(gone);
    }
    for (const auto& [id, value] : kept) {
      REQUIRE(shares.index_of({.tenant = id}) == value.first);
      REQUIRE(shares.tokens(value.first) == static_cast<std::uint64_t>(value.second));
    }
    REQUIRE(shares.is_ordered());
    if (const std::int32_t over = shares.above_quota(); over >= 0) REQUIRE(shares.tokens(over) > 5);
    most = std::max(most, shares.size());
  }
  CHECK(most < 100);

  TenantShares all;
  const std::uint64_t before = test::heap.allocations;
  for (std::uint64_t tenant = 1; tenant <= 10000; ++tenant) all.reserve(tenant, {});
  CHECK(test::heap.allocations - before < 100);
}

TEST_CASE("a fair tree keeps records of the tenants that it has, not of all that it had") {
  TreeOf<> tree(PoolAllocator{.max_chunks = 30}, {}, fair({}, {{7, 4}}));
  const auto& order =
      static_cast<const detail::CacheOrder&>(*detail::TreeAccess::core(tree).retention.order());
  std::vector<TreeOf<>::Sequence> live;
  live.push_back(tree.insert(prompt(0), of(1'000'000)));  // has nodes, and nothing cached
  live.push_back(tree.insert({1, 2, 3}, of(1'000'000)));
  auto step = tree.begin_step();
  const std::vector<int> drafts{4, 5};
  const std::vector<std::int32_t> parents{-1, -1};
  REQUIRE(step.add(live[1], 100, {.tokens = drafts, .parents = parents}));  // scratch: of no tenant
  for (int i = 1; i < 3000; ++i) {
    pass(tree, prompt(i), of(static_cast<std::uint64_t>(i)));
    if (i % 100 == 0) check_invariants(tree);
  }
  CHECK(order.num_tenants() < 100);
  CHECK(order.num_lists() < 200);
  test::load(live[0]);
  {
    const auto cancelled = std::move(step);
  }
  live.clear();
  CHECK(num_cached(tree, 1'000'000, 0, 1) == 12);
  CHECK(num_cached(tree, 2999, 2999, 3000) == 12);
  check_invariants(tree);
}

TEST_CASE("a flood leaves other tenants what is within their share") {
  for (const bool learns : {false, true})
    for (const bool shares : {false, true}) {
      CAPTURE(shares);
      CAPTURE(learns);
      TreeOf<CachePolicy> tree(PoolAllocator{.max_chunks = 100}, {},
                               {{.learns = learns, .fair = shares}});
      for (int i = 0; i < 10; ++i) pass(tree, prompt(i), of(1));
      for (int i = 0; i < 15; ++i) pass(tree, prompt(i), of(2));
      for (int i = 0; i < 1000; ++i) {
        pass(tree, prompt(i), of(3));
        check_invariants(tree);
      }
      CHECK(num_cached(tree, 1, 0, 10) == (shares ? 120u : 0u));
      // A third of 400 tokens is 133; the last chunk may be given for another.
      const std::size_t second = num_cached(tree, 2, 0, 15);
      CHECK(second >= (shares ? 132u : 0u));
      CHECK(second <= (shares ? 144u : 0u));
      CHECK(tree.stats().used_chunks == 100);
    }
}

TEST_CASE("tenants have the cache by their weights") {
  TreeOf<> tree(PoolAllocator{.max_chunks = 600}, {}, fair({{1, 1}, {2, 2}, {3, 3}}));
  test::Random random(test::run_seed());
  for (int i = 0; i < 3000; ++i)
    pass(tree, prompt(i), of(static_cast<std::uint64_t>(random.uniform(1, 3))));
  for (std::uint64_t tenant = 1; tenant <= 3; ++tenant) {
    const std::size_t share = 2400 * tenant / 6, cached = num_cached(tree, tenant, 0, 3000);
    CAPTURE(tenant);
    CHECK(cached + 13 > share);
    CHECK(cached < share + 13);
  }
}

TEST_CASE("a tenant that is alone has everything, and gives it back chunk by chunk") {
  TreeOf<> tree(PoolAllocator{.max_chunks = 90}, {}, fair());
  for (int i = 0; i < 200; ++i) pass(tree, prompt(i), of(1));
  CHECK(num_cached(tree, 1, 0, 200) == 360);
  for (int i = 0; i < 10; ++i) pass(tree, prompt(i), of(2));
  CHECK(num_cached(tree, 1, 0, 200) == 240);
  CHECK(num_cached(tree, 2, 0, 10) == 120);
  for (int i = 10; i < 200; ++i) pass(tree, prompt(i), of(2));
  const std::size_t left = num_cached(tree, 1, 0, 200);  // but for a chunk, as both have as much
  CHECK(left >= 176);
  CHECK(left <= 180);
  CHECK(num_cached(tree, 1, 185, 200) == left);  // the latest
}

TEST_CASE("victims are the oldest of the tenant with most for its weight, as a plain list says") {
  struct Entry {
    std::uint64_t tenant;
    int prompt;
  };
  test::Random random(test::run_seed());
  for (int round = 0; round < test::scaled(20); ++round) {
    const Shares policy = fair({{1, 7}, {2, 11}, {3, 13}, {4, 2}});
    TreeOf<> tree(PoolAllocator{.max_chunks = 60}, {}, policy);
    std::vector<Entry> cached;  // of a chunk each, the oldest first
    for (int i = 0; i < 1500; ++i) {
      const Entry next{static_cast<std::uint64_t>(random.uniform(1, 4)), random.uniform(0, 40)};
      const auto tokens = iota(100 * next.prompt, 4);
      const auto at = std::ranges::find_if(cached, [&](const Entry& e) {
        return e.tenant == next.tenant && e.prompt == next.prompt;
      });
      CHECK(tree.match_prefix(tokens, of(next.tenant)).cached == (at == cached.end() ? 0u : 4u));
      if (at != cached.end()) {
        cached.erase(at);
      } else if (cached.size() == 60) {
        std::map<std::uint64_t, std::uint64_t> counts;
        for (const Entry& e : cached) ++counts[e.tenant];
        std::vector<std::uint64_t> largest;
        for (const auto& [tenant, count] : counts) {
          const auto more = [&](std::uint64_t other) {
            return count * policy.weight(other) > counts[other] * policy.weight(tenant);
          };
          if (largest.empty() || more(largest[0]))
            largest = {tenant};
          else if (count * policy.weight(largest[0]) == counts[largest[0]] * policy.weight(tenant))
            largest.push_back(tenant);
        }
        pass(tree, tokens, of(next.tenant));
        // Where several have as much, either may go.
        bool found = false;
        for (const std::uint64_t tenant : largest) {
          const auto oldest = std::ranges::find(cached, tenant, &Entry::tenant);
          if (found || tree.match_prefix(iota(100 * oldest->prompt, 4), of(tenant)).cached > 0)
            continue;
          cached.erase(oldest);
          found = true;
        }
        REQUIRE(found);
        cached.push_back(next);
        continue;
      }
      pass(tree, tokens, of(next.tenant));
      cached.push_back(next);
    }
    check_invariants(tree);
    for (const Entry& e : cached)
      CHECK(tree.match_prefix(iota(100 * e.prompt, 4), of(e.tenant)).cached == 4);
  }
}

TEST_CASE("no tenant has more cached than its quota, even if there is room") {
  TreeOf<> tree(PoolAllocator{.max_chunks = 1000}, {}, fair({}, {{2, 9}}));
  for (int i = 0; i < 20; ++i) {
    pass(tree, prompt(i), of(1));
    pass(tree, prompt(i), of(2));
    CHECK(num_cached(tree, 2, 0, 20) <= 36);
    check_invariants(tree);
  }
  CHECK(num_cached(tree, 1, 0, 20) == 240);
  CHECK(num_cached(tree, 2, 17, 20) == 36);
  // What a live sequence has is not cached, and nothing of it goes.
  std::vector<TreeOf<>::Sequence> live;
  for (int i = 17; i < 30; ++i) {
    live.push_back(tree.insert(prompt(i), of(2)));
    test::load(live.back());
  }
  CHECK(num_cached(tree, 2, 17, 30) == 156);
  live.clear();
  CHECK(num_cached(tree, 2, 17, 30) == 36);
}

TEST_CASE("a quota that changes holds from the next time on that a sequence leaves") {
  struct Changing : CachePolicy {
    const std::map<std::uint64_t, std::size_t>* quotas = nullptr;
    [[nodiscard]] std::size_t quota(std::uint64_t tenant) const { return quotas->at(tenant); }
  };
  test::Random random(test::run_seed());
  std::map<std::uint64_t, std::size_t> quotas{{1, 0}, {2, 0}, {3, 0}}, told = quotas;
  for (const bool learns : {false, true}) {
    CAPTURE(learns);
    Changing policy;
    policy.fair = true;
    policy.learns = learns;
    policy.quotas = &quotas;
    TreeOf<Changing> tree(PoolAllocator{.max_chunks = 1000}, {}, policy);
    struct Live {
      std::uint64_t tenant;
      int prompt;
      TreeOf<Changing>::Sequence sequence;
    };
    std::vector<Live> live;
    const auto is_live = [&](std::uint64_t tenant, int i) {
      return std::ranges::any_of(
          live, [&](const Live& l) { return l.tenant == tenant && l.prompt == i; });
    };
    const auto cached = [&](std::uint64_t tenant) {
      std::size_t tokens = 0;
      for (int i = 0; i < 8; ++i)
        if (!is_live(tenant, i)) tokens += num_cached(tree, tenant, i, i + 1);
      return tokens;
    };
    for (int i = 0; i < test::scaled(1000); ++i) {
      const auto tenant = static_cast<std::uint64_t>(random.uniform(1, 3));
      if (const int p = random.uniform(0, 7); random.chance(0.5) && !is_live(tenant, p)) {
        if (random.chance(0.5)) quotas[tenant] = static_cast<std::size_t>(random.uniform(0, 20));
        told[tenant] = quotas[tenant];
        live.push_back({tenant, p, tree.insert(prompt(p), of(tenant))});
        test::load(live.back().sequence);
      } else if (!live.empty()) {
        std::swap(live[random.index(live.size())], live.back());
        std::map<std::uint64_t, std::size_t> most;
        for (const auto& [t, quota] : told) most[t] = cached(t);
        most[live.back().tenant] += 12;
        live.pop_back();
        for (const auto& [t, quota] : told) REQUIRE(cached(t) == std::min(most[t], 4 * quota));
      }
      check_invariants(tree);
    }
  }
}

TEST_CASE("a tenant's terms are those of its last prompt") {
  TreeOf<> tree(PoolAllocator{.max_chunks = 1000}, {}, fair());
  CHECK_THROWS_AS((void)TreeOf<>({}, {}, fair({{1, 0}})).insert(prompt(0), of(1)), InvalidArgument);
  CHECK_THROWS_AS((void)TreeOf<>({}, {}, fair({{1, 2u << 20}})).insert(prompt(0), of(1)),
                  InvalidArgument);
}

TEST_CASE("what is public counts for no tenant, and stays while a path extends it") {
  TreeOf<> tree(PoolAllocator{.max_chunks = 60}, {}, fair());
  const auto with_public = [](int first, int i) {
    std::vector<int> tokens = iota(first, 80);
    for (const int token : iota(1000 * i, 12)) tokens.push_back(token);
    return tokens;
  };
  for (int i = 1; i <= 4; ++i) pass(tree, with_public(0, i), of(1, 80));
  for (int i = 0; i < 200; ++i) {
    pass(tree, prompt(i), of(2));
    check_invariants(tree);
  }
  // 20 chunks are public; of the other 40 the first has its 12, though the second floods.
  for (int i = 1; i <= 4; ++i) CHECK(tree.match_prefix(with_public(0, i), of(1, 80)).cached == 92);
  // Who floods what is public evicts that.
  for (int i = 1; i <= 100; ++i) pass(tree, iota(10000 * i, 16), of(3, 16));
  CHECK(tree.match_prefix(with_public(0, 4), of(1, 80)).cached == 92);
  CHECK(num_cached(tree, 2, 190, 200) > 0);
}

TEST_CASE("what is public goes from its end, also after it was passed over") {
  for (const bool learns : {false, true}) {
    CAPTURE(learns);
    Shares policy = fair();
    policy.learns = learns;
    TreeOf<> tree(PoolAllocator{.max_chunks = 100}, {}, policy);
    const auto own = [](std::vector<int> tokens, int first, int count) {
      for (const int token : iota(first, static_cast<std::size_t>(count))) tokens.push_back(token);
      return tokens;
    };
    const auto common = iota(0, 16);
    {
      auto last = tree.insert(common, of(1, 16));
      test::load(last);
      // A tenant extends a public branch of it, which is older than the rest.
      pass(tree, own(own(common, 100, 8), 200, 60), of(1, 24));
      pass(tree, iota(1000, 40), of(1, 40));  // public, by itself
    }
    check_invariants(tree);
    // Chunk by chunk, all is evicted: first the branch is passed over.
    std::vector<TreeOf<>::Sequence> live;
    for (int i = 0; i < 25; ++i) {
      live.push_back(tree.insert(iota(10000 * (i + 1), 16), of(2)));
      check_invariants(tree);
    }
    CHECK(tree.stats().retained_chunks == 0);
  }
}

TEST_CASE("pins hold against shares, and count for no tenant") {
  Shares policy = fair();
  policy.max_pinned = 50;
  TreeOf<> tree(PoolAllocator{.max_chunks = 60}, {}, policy);
  for (int i = 0; i < 10; ++i) pass(tree, prompt(i), of(1));
  std::vector<TreeOf<>::Pin> pins;
  for (int i = 0; i < 10; ++i) pins.push_back(tree.pin(prompt(i), of(1)));
  for (int i = 0; i < 100; ++i) pass(tree, prompt(i), of(1));
  CHECK(num_cached(tree, 1, 0, 10) == 120);
  CHECK(num_cached(tree, 1, 10, 100) == 120);
  pins.clear();
  check_invariants(tree);
  for (int i = 0; i < 100; ++i) pass(tree, prompt(i), of(2));
  CHECK(num_cached(tree, 1, 0, 100) >= 116);
}

TEST_CASE("what goes of a pin where nothing else is left counted for no tenant") {
  Shares policy = fair();
  policy.max_pinned = 8;
  TreeOf<> tree(PoolAllocator{.max_chunks = 4}, {}, policy);
  pass(tree, prompt(0), of(1));
  const auto pin = tree.pin(prompt(0), of(1));
  REQUIRE(pin.size() == 12);
  const auto live = tree.insert(iota(1000, 8), of(2));
  CHECK(pin.size() == 8);
  check_invariants(tree);
}

TEST_CASE("what follows public tokens that were passed over is weighed again") {
  Shares policy = fair();
  policy.learns = true;
  policy.high_watermark = 45;
  policy.low_watermark = 44;
  TreeOf<> tree({}, {}, policy);
  const auto cached = [&](int first, std::size_t count) {
    return tree.match_prefix(iota(first, count), of(1, 4)).cached;
  };
  auto live = tree.insert(iota(5000, 160), of(9));  // 40 chunks, beside which all gaps are short
  test::load(live);
  pass(tree, iota(0, 4), of(1, 4));
  pass(tree, iota(100, 8), of(1, 4));                              // continues as a tenant's
  pass(tree, iota(100, 4), of(1, 4));                              // used again, …
  for (int i = 0; i < 2; ++i) pass(tree, iota(200, 4), of(1, 4));  // … as this is,
  for (int i = 0; i < 3; ++i) pass(tree, iota(300, 4), of(1, 4));  // and this more often
  pass(tree, iota(400, 4), of(7));                                 // two chunks too many
  check_invariants(tree);
  CHECK(tree.stats().evicted_chunks == 2);
  CHECK(cached(0, 4) == 0);
  CHECK(cached(100, 8) == 8);
  CHECK(cached(200, 4) == 0);  // older than what is worth as much
  CHECK(cached(300, 4) == 4);
}

TEST_CASE("only leaves go, whether what is cached is public or not") {
  test::Random random(test::run_seed());
  for (const bool learns : {false, true})
    for (int round = 0; round < test::scaled(20); ++round) {
      TreeOf<CachePolicy> tree(PoolAllocator{.max_chunks = 30}, {},
                               {{.learns = learns, .fair = true}});
      for (int i = 0; i < 200; ++i) {
        std::vector<int> tokens(static_cast<std::size_t>(random.uniform(1, 24)));
        for (int& token : tokens) token = random.uniform(0, 1);
        // Now and then, for a while, no tenant has anything of its own.
        const auto public_length =
            static_cast<std::size_t>(i % 100 < 50 ? random.uniform(0, 20) : 24);
        pass(tree, tokens, of(static_cast<std::uint64_t>(random.uniform(1, 3)), public_length));
        if (random.chance(0.02))
          pass(tree, std::vector<int>(120, 7), of(1, random.chance(0.5) ? 120 : 0));
        check_invariants(tree);
      }
    }
}
