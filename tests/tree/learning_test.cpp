// Retention that learns: what the model makes of uses, what is remembered of evicted chunks, and
// what a tree keeps by it.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "chunkattn/cache/policy.hpp"
#include "chunkattn/debug/tree.hpp"
#include "chunkattn/prefix_tree.hpp"
#include "tests/support/counted_new.hpp"
#include "tests/support/random.hpp"
#include "tests/support/steps.hpp"

using namespace chunkattn;
using chunkattn::detail::Ghost;
using chunkattn::detail::Ghosts;
using chunkattn::detail::NodeIndex;
using chunkattn::detail::ReuseModel;
using chunkattn::detail::ReuseRecord;
using chunkattn::detail::TreeAccess;
using test::iota;

namespace {

/// Joins, computes everything and leaves. Returns what it found.
template <class Tree>
std::size_t pass(Tree& tree, const std::vector<int>& prompt) {
  auto s = tree.insert(prompt, {.compute_last = false});
  test::load(s);
  return s.num_cached();
}

}  // namespace

TEST_CASE("the least of the candidates is that of least value, of several the oldest") {
  chunkattn::detail::Candidates candidates;
  CHECK(candidates.least() == -1);
  candidates.set(19, 7, 1);
  candidates.set(4, 9, 100);
  CHECK(candidates.least() == 19);
  candidates.set(2, 7, 3);
  candidates.set(11, 7, 2);
  CHECK(candidates.least() == 2);
  candidates.drop(2);
  CHECK(candidates.least() == 11);
  candidates.set(11, 8, 2);
  CHECK(candidates.least() == 19);
  CHECK(candidates.next_stale() == -1);
  candidates.renew(19);
  candidates.renew(3);
  CHECK(candidates.next_stale() == 3);
  CHECK(candidates.next_stale() == 19);
  CHECK(candidates.next_stale() == -1);
  candidates.set(5, 8, 2);
  candidates.drop(19);
  CHECK(candidates.least() == 5);  // of equals the first
  candidates.renew_all(2);
  CHECK(candidates.next_stale() == 0);
  CHECK(candidates.next_stale() == 1);
  CHECK(candidates.next_stale() == -1);
}

TEST_CASE("groups are valued by how often and how soon they are used again") {
  ReuseModel model;
  CHECK(model.value(0, 5) == model.value(3, 5000));  // nothing is known
  // Group 1 is used again at age 100, half of it; group 2 at age 10,000, half of it; group 3 never.
  for (int i = 0; i < 3000; ++i) {
    for (std::uint8_t group = 1; group <= 3; ++group) model.fell_out_of_use(group, 2, 100);
    model.was_used(1, 100, 1);
    model.was_used(2, 10000, 1);
  }
  CHECK(model.value(1, 0) > model.value(2, 0));
  CHECK(model.value(2, 0) > model.value(3, 0));
  CHECK(model.value(3, 0) == 0);
  CHECK(model.value(1, 90) > model.value(1, 0));  // soon
  CHECK(model.value(1, 1000) == 0);               // too late
  CHECK(model.value(2, 9000) > model.value(1, 1000));
  CHECK(model.value(2, 9000) > model.value(2, 0));
}

TEST_CASE("gaps are distinguished at a tenth, three tenths and all of what is in use") {
  for (const auto& [age, gap] : std::map<std::uint32_t, int>{
           {0, 1}, {9, 1}, {10, 2}, {29, 2}, {30, 3}, {99, 3}, {100, 4}, {~0u, 4}}) {
    CAPTURE(age);
    CHECK(int{ReuseModel::gap_of(age, 100)} == gap);
  }
}

TEST_CASE("uses are distinguished up to four of them, ages by half octaves") {
  const auto group_of = [](int uses, int gap) {
    return ReuseModel::group_of(static_cast<std::uint8_t>(uses), static_cast<std::uint8_t>(gap));
  };
  for (int gap = 0; gap < 5; ++gap) {
    CAPTURE(gap);
    for (const int uses : {1, 2, 4}) CHECK(group_of(uses - 1, gap) != group_of(uses, gap));
    CHECK(group_of(2, gap) == group_of(3, gap));
    CHECK(group_of(4, gap) == group_of(255, gap));
  }
  ReuseModel model;
  model.was_used(1, 64, 100);
  model.was_used(2, 96, 100);
  for (const std::uint8_t group : {std::uint8_t{1}, std::uint8_t{2}})
    model.fell_out_of_use(group, 5000, 10);
  CHECK(model.value(1, 95) > 0);
  CHECK(model.value(1, 96) == 0);  // all its uses were before
  CHECK(model.value(2, 64) > 0);
  CHECK(model.value(2, 96) > model.value(2, 64));  // it is nearer
  CHECK(model.value(2, 128) == 0);
}

TEST_CASE("uses are counted up to 255") {
  ReuseModel model;
  ReuseRecord record;
  for (int i = 1; i <= 300; ++i) {
    record = model.used_again(record, 0, 1, 100);
    CHECK(record.uses == std::min(i, 255));
  }
}

TEST_CASE("what was long ago counts less") {
  ReuseModel model;
  for (int i = 0; i < 20000; ++i) {
    model.fell_out_of_use(1, 1, 100);
    model.was_used(1, 100, 1);
  }
  const std::uint64_t then = model.value(1, 0);
  for (int i = 0; i < 2000000; ++i) model.fell_out_of_use(1, 1, 100);
  CHECK(model.value(1, 0) < then / 10);
}

TEST_CASE("values are worked out anew once in a while, not with each node") {
  for (const std::size_t used : {std::size_t{100}, std::size_t{20000}}) {
    CAPTURE(used);
    ReuseModel model;
    const std::size_t period = std::max<std::size_t>(4096, used / 2);
    std::uint64_t last = model.value(1, 100);
    for (std::uint32_t round = 1; round <= 4; ++round)
      for (std::size_t i = 1; i <= period; ++i) {
        model.was_used(1, 100, round);  // so that its value is another one each time
        model.fell_out_of_use(1, 1, used);
        const bool is_new = model.value(1, 100) != last;
        last = model.value(1, 100);
        REQUIRE(is_new == (i == period));
      }
  }
}

TEST_CASE("the value is the best ratio of hits and time, as counted by brute force") {
  test::Random random(1);
  for (int round = 0; round < test::scaled(20); ++round) {
    CAPTURE(round);
    // Ages that are beginnings of buckets, so that nothing is rounded.
    std::map<std::uint32_t, int> hits;
    for (int i = random.uniform(1, 5); i > 0; --i)
      hits[std::uint32_t{1} << random.uniform(1, 12)] += random.uniform(1, 400);
    ReuseModel model;
    int all = 0;
    for (const auto& [age, n] : hits) {
      model.was_used(7, age, static_cast<std::uint32_t>(n));
      all += n;
    }
    const int unused = all + random.uniform(4096, 9000);
    model.fell_out_of_use(7, static_cast<std::uint32_t>(unused), 10);
    for (const std::uint32_t age : {0u, 4u, 16u, 256u, 1024u, 8192u}) {
      double best = 0, used = 0, time = 0, left = unused + 2;
      for (const auto& [at, n] : hits)
        if (at < age) left -= n;
      // Buckets are half octaves: uses fall evenly into theirs.
      double begin = age;
      if (age < 2) {  // no use is as early as that
        time += (2 - begin) * left;
        begin = 2;
      }
      for (std::uint32_t octave = 1; octave < 24; ++octave)
        for (const double end : {1.5 * double(1u << octave), 2.0 * double(1u << octave)})
          if (end > begin) {
            const auto found = hits.find(static_cast<std::uint32_t>(begin));
            const double n = found == hits.end() ? 0 : found->second;
            used += n;
            time += (end - begin) * (left - n / 2);
            left -= n;
            best = std::max(best, used / time);
            begin = end;
          }
      const double value = double(model.value(7, age)) / double(1u << 28);
      // Both are far below 1; a value is a whole number of 2^-28.
      CHECK(std::abs(value - best) <= 0.02 * best + 1.0 / double(1u << 28));
    }
  }
}

TEST_CASE("ghosts are bounded, and the oldest of a set go first") {
  Ghosts ghosts;
  ghosts.add({7, 4, {}});  // no room yet
  CHECK(ghosts.take(7).key == 0);
  ghosts.reserve(1000);
  const std::size_t capacity = ghosts.capacity();
  CHECK(capacity >= 1000);
  CHECK(capacity < 4000);
  const std::uint64_t before = test::heap.allocations;
  constexpr std::uint32_t start = 0u - 5000;  // times may wrap around
  for (std::uint32_t key = 1; key <= 10000; ++key)
    ghosts.add({key, key % 64, {.since = start + key}});
  CHECK(test::heap.allocations == before);
  std::size_t there = 0;
  for (std::uint32_t key = 1; key <= 10000; ++key) {
    const Ghost ghost = ghosts.take(key);
    if (ghost.key == 0) continue;
    CHECK(ghost.length == key % 64);
    CHECK(ghost.reuse.since == start + key);
    CHECK(key > 10000 - capacity);  // keys that follow each other are spread evenly
    CHECK(ghosts.take(key).key == 0);
    ++there;
  }
  CHECK(there == capacity);
  for (const std::uint32_t key : {5u, 6u}) ghosts.add({key, 1, {.since = 1}});
  ghosts.reserve(100000);
  for (const std::uint32_t key : {5u, 6u}) CHECK(ghosts.take(key).length == 1);
}

TEST_CASE("old counts fade alike in all groups") {
  ReuseModel model;
  for (int i = 0; i < 10; ++i) {
    for (std::uint8_t group = 0; group < ReuseModel::num_groups; ++group) {
      model.was_used(group, 1, 10);
      model.fell_out_of_use(group, 100, 10);
    }
    model.fell_out_of_use(ReuseModel::num_groups - 1, 4096, 10);  // now all are looked at
  }
  for (std::uint8_t group = 1; group < ReuseModel::num_groups - 1; ++group)
    CHECK(model.value(group, 0) == model.value(0, 0));
}

TEST_CASE_TEMPLATE("what was evicted is known when it comes again, as far as it went", Size,
                   std::integral_constant<int, 8>, std::integral_constant<int, 4>) {
  using Tree = PrefixTree<int, Size::value, PoolAllocator, CachePolicy>;
  constexpr std::size_t size = Size::value;
  for (const std::size_t above : {std::size_t{0}, size / 8 * 4, size, 5 * size / 8 * 4})
    for (const std::size_t length : {std::size_t{4}, size, std::size_t{28}}) {
      CAPTURE(above);
      CAPTURE(length);
      Tree tree(PoolAllocator{.max_chunks = 100}, {}, CachePolicy{{.learns = true}});
      const auto& topology = TreeAccess::core(tree).topology;
      const auto node = [&](const typename Tree::Sequence& s, std::size_t position) {
        NodeIndex n = TreeAccess::core(tree).sequences[TreeAccess::index(s)].tail;
        while (topology.node(n).position > static_cast<std::int32_t>(position))
          n = topology.node(n).parent;
        return topology.node(n);
      };
      auto prompt = iota(0, above);
      if (above > 0) pass(tree, prompt);
      const std::size_t kept = tree.stats().used_chunks;
      for (const int token : iota(1000, length)) prompt.push_back(token);
      pass(tree, prompt);
      tree.trim(kept);
      const std::size_t cached = tree.match_prefix(prompt, {.compute_last = false}).cached;
      const bool shares_chunk = above % size != 0;
      REQUIRE(cached ==
              (shares_chunk ? std::min(above / size * size + size, prompt.size()) : above));
      for (const int token : iota(2000, 10)) prompt.push_back(token);
      auto s = tree.insert(prompt, {.compute_last = false});
      const std::size_t end = above + length;
      CHECK(node(s, end).position ==
            static_cast<std::int32_t>(end));  // what is new is distinguished
      CHECK(node(s, end).reuse.uses == 0);
      for (std::size_t p = cached; p < end; ++p) CHECK(node(s, p).reuse.uses == 1);
      check_invariants(tree);
    }
}

TEST_CASE("nothing is allocated for what comes again, however many pieces it went in") {
  const auto count = [](bool comes_again) {
    std::uint64_t allocations = 0, num_splits = 0;
    for (std::size_t before = 0; before < 40; ++before) {  // whatever room there is for nodes
      PrefixTree<int, 4, PoolAllocator, CachePolicy> tree(PoolAllocator{.max_chunks = 200}, {},
                                                          CachePolicy{{.learns = true}});
      std::vector<decltype(tree)::Sequence> others;
      for (const std::size_t end : {4, 4, 4, 4, 4, 8, 8, 12}) pass(tree, iota(0, end));
      tree.trim(0);
      for (std::size_t i = 0; i < before; ++i)
        others.push_back(
            tree.insert(iota(-10 * static_cast<int>(i + 1), 2), {.public_length = i % 2}));
      const std::vector<int> prompt = iota(comes_again ? 0 : 1000, 24);
      const std::uint64_t splits = tree.stats().splits, start = test::heap.allocations;
      const auto s = tree.insert(prompt);
      allocations += test::heap.allocations - start;
      num_splits += tree.stats().splits - splits;
      check_invariants(tree);
    }
    CHECK((num_splits > 0) == comes_again);
    return allocations;
  };
  CHECK(count(true) == count(false));
}

TEST_CASE_TEMPLATE("tokens have a key where four stand together on both sides", Size,
                   std::integral_constant<int, 8>, std::integral_constant<int, 4>,
                   std::integral_constant<int, 2>) {
  using chunkattn::detail::GhostKey;
  using Store = chunkattn::detail::TokenStore<int, Size::value>;
  PrefixTree<int, Size::value, PoolAllocator, CachePolicy> tree(PoolAllocator{.max_chunks = 100},
                                                                {}, CachePolicy{{.learns = true}});
  const auto& core = TreeAccess::core(tree);
  std::vector<std::vector<int>> prompts{iota(0, 21), iota(0, 35), iota(0, 13), iota(0, 2),
                                        iota(0, 1)};
  for (std::size_t i = 2; i < prompts.size(); ++i)
    for (const int token : iota(100 * static_cast<int>(i), 20)) prompts[i].push_back(token);
  for (const auto& prompt : prompts) pass(tree, prompt);
  std::size_t num_keys = 0, num_without = 0;
  for (const auto& prompt : prompts) {
    const auto s = tree.insert(prompt, {.compute_last = false});
    for (NodeIndex i = core.sequences[TreeAccess::index(s)].tail; i != chunkattn::detail::root_node;
         i = core.topology.node(i).parent) {
      const auto& n = core.topology.node(i);
      const auto& parent = core.topology.node(n.parent);
      for (std::int32_t first = 0; first < n.length; ++first) {
        const std::int32_t position = n.position + first;
        CAPTURE(position);
        const auto together = [](const auto& node, std::int32_t at) {
          return at >= 0 && at + 4 <= node.length &&
                 (node.begin + at) / Size::value == (node.begin + at + 3) / Size::value;
        };
        const bool has_key = together(n, first) &&
                             (position == 0 || (first > 0 ? together(n, first - 4)
                                                          : together(parent, parent.length - 4)));
        std::uint64_t hash = GhostKey::seed(position, n.name_space);
        const auto add = [&](std::int32_t from) {
          hash = Store::hash(hash, std::span(prompt).subspan(static_cast<std::size_t>(from), 4));
        };
        if (has_key && position > 0) add(position - 4);
        if (has_key) add(position);
        CHECK(GhostKey::of(core.topology, core.prefixes.tokens(), n, first) ==
              (has_key ? GhostKey::finish(hash) : 0));
        (has_key ? num_keys : num_without) += 1;
      }
    }
  }
  CHECK((num_keys > 0) == (Size::value >= 4));
  CHECK(num_without > 0);
}

TEST_CASE("what is pinned goes where nothing else is left, whatever was learnt") {
  using Tree = PrefixTree<int, 4, PoolAllocator, CachePolicy>;
  Tree tree(PoolAllocator{.max_chunks = 2}, {}, CachePolicy{{.max_pinned = 2, .learns = true}});
  pass(tree, iota(0, 8));
  const auto pin = tree.pin(iota(0, 8));
  REQUIRE(pin.size() == 8);
  pass(tree, iota(100, 4));
  CHECK(pin.size() == 4);
}

TEST_CASE("what is new is expected to be used again as late as its parent") {
  using Tree = PrefixTree<int, 4, PoolAllocator, CachePolicy>;
  // The last two: an age of 2 chunks is a tenth of the 20 in use, and less than a tenth of 21.
  for (const auto& [before, others, gap] :
       {std::tuple{20, 0, 1}, {20, 4, 2}, {20, 10, 3}, {17, 2, 2}, {18, 2, 1}}) {
    Tree tree(PoolAllocator{.max_chunks = 100}, {}, CachePolicy{{.learns = true}});
    const auto& topology = TreeAccess::core(tree).topology;
    for (int i = 0; i < before; ++i) pass(tree, iota(1000 + 10 * i, 4));
    pass(tree, iota(0, 4));
    for (int i = 0; i < others; ++i) pass(tree, iota(2000 + 10 * i, 4));
    auto s = tree.insert(iota(0, 8), {.compute_last = false});
    test::load(s);
    const NodeIndex n =
        topology.node(TreeAccess::core(tree).sequences[TreeAccess::index(s)].tail).parent;
    s.leave();
    CAPTURE(before);
    CAPTURE(others);
    CHECK(topology.node(n).position == 4);
    CHECK(ReuseModel::gap_of(topology.node(topology.node(n).parent).reuse.group) == gap);
    CHECK(topology.node(n).reuse.group == ReuseModel::group_of(0, static_cast<std::uint8_t>(gap)));
  }
}

TEST_CASE("prompts that come again outlast a flood of those that do not") {
  using Tree = PrefixTree<int, 16, PoolAllocator, CachePolicy>;
  const auto found = [](bool learns) {
    test::Random random(3);
    Tree tree(PoolAllocator{.max_chunks = 400}, {}, CachePolicy{{.learns = learns}});
    std::size_t cached = 0;
    for (int i = 0; i < 6000; ++i) {
      const bool again = i % 8 == 0;
      auto prompt = iota(again ? 1000 * static_cast<int>(random.index(20)) : 100000 + 200 * i, 160);
      const std::size_t hit = pass(tree, prompt);
      if (i > 3000) cached += hit;
    }
    check_invariants(tree);
    return cached;
  };
  const std::size_t lru = found(false), learnt = found(true);
  CHECK(learnt > 40000);  // of 375 prompts of 160
  CHECK(lru < 20000);
}

TEST_CASE("a parent may go as soon as its children are gone") {
  using Tree = PrefixTree<int, 4, PoolAllocator, CachePolicy>;
  Tree tree({}, {}, CachePolicy{{.high_watermark = 3, .low_watermark = 2, .learns = true}});
  pass(tree, iota(0, 8));
  pass(tree, iota(0, 4));                                // a part, used again: of another group
  for (int i = 0; i < 3; ++i) pass(tree, iota(100, 4));  // younger, and of a third one
  pass(tree, iota(200, 4));                              // two chunks too many
  CHECK(tree.match_prefix(iota(0, 4), {.compute_last = false}).cached == 0);
  CHECK(tree.match_prefix(iota(100, 4), {.compute_last = false}).cached == 4);
  CHECK(tree.stats().evicted_chunks == 2);
}

TEST_CASE("eviction does not continue with what was pinned meanwhile") {
  using Tree = PrefixTree<int, 4, PoolAllocator, CachePolicy>;
  Tree tree(PoolAllocator{.max_chunks = 4}, {}, CachePolicy{{.max_pinned = 4, .learns = true}});
  const auto cached = [&](int first, std::size_t count) {
    return tree.match_prefix(iota(first, count), {.compute_last = false}).cached;
  };
  pass(tree, iota(0, 12));
  pass(tree, iota(100, 4));
  pass(tree, iota(200, 4));  // for which the end of the first goes
  REQUIRE(cached(0, 12) == 8);
  {
    const auto pin = tree.pin(iota(0, 8));
    REQUIRE(pin);
  }
  pass(tree, iota(300, 4));  // what was pinned is the youngest
  CHECK(cached(0, 12) == 8);
  CHECK(cached(100, 4) == 0);
}

TEST_CASE(
    "a tree reports to its model all chunks that are used again, and evicts what is worth least") {
  using Tree = PrefixTree<int, 4, PoolAllocator, CachePolicy>;
  struct Prompt {
    int first = 0;
    std::size_t length = 0;
    std::uint32_t period = 0;  // is used again after so many chunks or more
    ReuseRecord record;
  };
  test::Random random(7);
  Tree tree(PoolAllocator{.max_chunks = 100000}, {}, CachePolicy{{.learns = true}});
  ReuseModel model;             // gets the same
  std::vector<Prompt> prompts;  // the one that was used last stands last
  std::size_t tokens = 0;
  const auto now = [&] { return static_cast<std::uint32_t>(tokens / 4); };
  const auto chunks = [](const Prompt& p) {
    return static_cast<std::uint32_t>((p.length + 3) / 4);
  };
  const auto use = [&](Prompt p) {
    if (pass(tree, iota(p.first, p.length)) == 0)
      tokens += p.length;
    else
      p.record =
          model.used_again(p.record, now() - p.record.since, chunks(p), tree.stats().used_chunks);
    p.record.since = now();
    model.fell_out_of_use(p.record.group, chunks(p), tree.stats().used_chunks);
    prompts.push_back(p);
  };
  // Half of them again and again, and long ones later than short ones.
  for (int i = 0; i < 3000; ++i) {
    for (std::size_t at = 0, end = prompts.size(); at < end;) {
      const Prompt p = prompts[at];
      if (now() - p.record.since < p.period || random.chance(0.6)) {
        ++at;
        continue;
      }
      prompts.erase(prompts.begin() + static_cast<std::ptrdiff_t>(at));
      --end;
      use(p);
    }
    const bool is_long = random.chance(0.3), comes_again = random.chance(0.5);
    use({.first = 100 * i,
         .length = is_long ? random.index(40) + 20 : random.index(6) + 1,
         .period = comes_again ? 1u << random.uniform(3, is_long ? 13 : 9) : 1000000u,
         .record = {}});
  }
  REQUIRE(tree.stats().evicted_chunks == 0);
  while (!prompts.empty()) {
    std::map<std::uint8_t, std::size_t> oldest;  // of each group
    for (std::size_t i = prompts.size(); i-- > 0;) oldest[prompts[i].record.group] = i;
    chunkattn::detail::Candidates candidates;
    for (const auto& [group, i] : oldest) {
      const std::uint32_t age = now() - prompts[i].record.since;
      candidates.set(group, model.value(group, age), age);
    }
    const std::size_t next = oldest[static_cast<std::uint8_t>(candidates.least())];
    const Prompt p = prompts[next];
    prompts.erase(prompts.begin() + static_cast<std::ptrdiff_t>(next));
    tree.trim(tree.stats().used_chunks - chunks(p));
    REQUIRE(tree.match_prefix(iota(p.first, p.length), {.compute_last = false}).cached == 0);
  }
}

TEST_CASE("at a watermark the same goes that would go chunk by chunk") {
  using Tree = PrefixTree<int, 4, PoolAllocator, CachePolicy>;
  test::Random random(test::run_seed());
  for (int round = 0; round < test::scaled(10); ++round) {
    Tree at_once({}, {}, {{.high_watermark = 40, .low_watermark = 25, .learns = true}});
    Tree one_by_one({}, {}, {{.high_watermark = max_pool_chunks, .learns = true}});
    std::vector<std::vector<int>> prompts;
    for (int i = 0; i < 20; ++i)
      prompts.push_back(iota(100 * (i / 2), 4 * random.index(6) + (i % 2 == 0 ? 4 : 30)));
    for (int i = 0; i < 300; ++i) {
      const auto& prompt = prompts[random.index(prompts.size())];
      pass(at_once, prompt);
      pass(one_by_one, prompt);
      if (one_by_one.stats().used_chunks > 40) one_by_one.trim(25);
      check_invariants(at_once);
      for (const auto& any : prompts)
        REQUIRE(at_once.match_prefix(any).cached == one_by_one.match_prefix(any).cached);
    }
    CHECK(at_once.stats().evicted_chunks > 50);
  }
}

TEST_CASE("two trees with the same calls keep the same") {
  using Tree = PrefixTree<int, 4, PoolAllocator, CachePolicy>;
  Tree a(PoolAllocator{.max_chunks = 200}, {}, CachePolicy{{.learns = true, .by_priority = true}});
  Tree b(PoolAllocator{.max_chunks = 200}, {}, CachePolicy{{.learns = true, .by_priority = true}});
  test::Random random(5);
  std::vector<std::vector<int>> known;
  for (int i = 0; i < test::scaled(8000); ++i) {
    std::vector<int> prompt;
    if (!known.empty() && random.uniform(0, 2) > 0) prompt = known[random.index(known.size())];
    if (random.uniform(0, 1) == 0) prompt.resize(random.index(prompt.size() + 1));
    for (int more = random.uniform(1, 30); more > 0 && prompt.size() < 100; --more)
      prompt.push_back(random.uniform(0, 9));
    if (prompt.empty()) continue;
    if (known.size() < 100) known.push_back(prompt);
    const InsertOptions options{.compute_last = false, .priority = random.uniform(0, 1)};
    auto x = a.insert(prompt, options), y = b.insert(prompt, options);
    REQUIRE(x.num_cached() == y.num_cached());
    test::load(x);
    test::load(y);
    if (i % 64 == 0) {
      check_invariants(a);
      CHECK(to_text(a) == to_text(b));
    }
  }
  CHECK(a.stats().evicted_chunks > 1000);
}

TEST_CASE("a lower priority goes first, whatever was learnt") {
  for (const int low : {-1, 0, 3}) {
    CAPTURE(low);
    PrefixTree<int, 4, PoolAllocator, CachePolicy> tree(PoolAllocator{.max_chunks = 2}, {},
                                                        {{.learns = true, .by_priority = true}});
    const auto use = [&](int first, int priority) {
      auto s = tree.insert(iota(first, 4), {.compute_last = false, .priority = priority});
      test::load(s);
    };
    use(100, low + 1);
    for (int i = 0; i < 3; ++i) use(200, low);  // younger, and used again
    use(300, low + 1);
    CHECK(tree.match_prefix(iota(100, 4)).cached == 4);
    CHECK(tree.match_prefix(iota(200, 4)).cached == 0);
  }
}
