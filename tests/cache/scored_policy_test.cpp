// Policies with a score of their own: which tokens go next, against a model that knows nothing but
// paths of tokens; pins, watermarks and time as under any other policy.
#include "chunkattn/cache/scored_policy.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "chunkattn/debug/tree.hpp"
#include "chunkattn/prefix_tree.hpp"
#include "tests/support/random.hpp"
#include "tests/support/steps.hpp"

using namespace chunkattn;
using test::iota;

namespace {

// docs/retention.md has these.
struct LeastOftenUsed : ScoredPolicy {
  std::pair<std::uint64_t, std::uint64_t> score(const CachedLeaf& leaf) const noexcept {
    return {leaf.uses, leaf.last_use};
  }
};
struct FirstIn : ScoredPolicy {
  std::uint64_t score(const CachedLeaf& leaf) const noexcept { return leaf.first_use; }
};
struct Segmented : ScoredPolicy {
  std::pair<bool, std::uint64_t> score(const CachedLeaf& leaf) const noexcept {
    return {leaf.uses >= 2, leaf.last_use};
  }
};
struct ByPriority : ScoredPolicy {
  std::pair<int, std::uint64_t> score(const CachedLeaf& leaf) const noexcept {
    return {leaf.priority, leaf.last_use};
  }
};
struct OfTenant : ScoredPolicy {
  std::tuple<std::uint64_t, bool, std::uint64_t> score(const CachedLeaf& leaf) const noexcept {
    return {leaf.name_space.tenant, leaf.name_space.is_public, leaf.last_use};
  }
};

/// What happened to each path of tokens, and who had it. Knows no nodes.
class PathModel {
 public:
  using Path = std::vector<int>;

  void leave(const Path& tokens, int priority, const Namespace& space) {
    ++time_;
    for (std::size_t n = 1; n <= tokens.size(); ++n) {
      CachedLeaf& of = paths_[key(Path(tokens.begin(), tokens.begin() + to(n)), space)];
      if (of.uses++ == 0) of.first_use = time_, of.priority = priority;
      of.last_use = time_;
      of.priority = std::max(of.priority, priority);
    }
  }
  /// Of what is not in the tree any more nothing is known.
  void keep_only(const std::vector<std::pair<Path, Namespace>>& there) {
    std::map<std::string, CachedLeaf> kept;
    for (const auto& [path, space] : there) {
      const auto at = paths_.find(key(path, space));
      if (at != paths_.end()) kept.insert(*at);
    }
    paths_ = std::move(kept);
  }
  [[nodiscard]] CachedLeaf of(const Path& path, const Namespace& space) const {
    return paths_.at(key(path, space));
  }

 private:
  static std::ptrdiff_t to(std::size_t n) { return static_cast<std::ptrdiff_t>(n); }
  static std::string key(const Path& path, const Namespace& space) {
    std::string text = std::to_string(space.tenant) + (space.is_public ? "p" : "t");
    for (const int token : path) text += ' ' + std::to_string(token);
    return text;
  }
  std::map<std::string, CachedLeaf> paths_;
  std::uint64_t time_ = 0;
};

/// What is cached or in use: each node with the tokens of its whole path.
struct CachedNode {
  std::vector<int> path;
  Namespace space;
  std::int32_t position = 0, length = 0;
  bool cached = false, is_leaf = true;
};
template <class Tree>
const detail::TreeNode& node_record(const Tree& tree, std::int32_t id) {
  return detail::TreeAccess::core(tree).topology.node(id);
}
template <class Tree>
std::map<std::int32_t, CachedNode> cached_nodes(const Tree& tree) {
  std::map<std::int32_t, CachedNode> nodes;
  for_each_node(tree, 1 << 20, [&](const NodeInfo<int>& info) {
    CachedNode node;
    if (info.parent != 0) {
      node.path = nodes.at(info.parent).path;
      nodes.at(info.parent).is_leaf = false;
    }
    node.path.insert(node.path.end(), info.first_tokens.begin(), info.first_tokens.end());
    node.space = info.name_space;
    node.position = info.position, node.length = info.length;
    node.cached = info.cached;
    nodes.emplace(info.id, std::move(node));
  });
  return nodes;
}

/// Chunks of one token, so that each eviction takes the last token of one leaf.
template <class Policy>
void run_against_model(std::uint64_t stream) {
  using Tree = PrefixTree<int, 1, PoolAllocator, Policy>;
  test::Random random(stream);
  std::size_t num_evicted = 0;
  for (int round = 0; round < test::scaled(6); ++round) {
    Policy policy;
    policy.max_pinned = 20;
    Tree tree(PoolAllocator{.max_chunks = 100000}, {}, policy);
    struct Live {
      typename Tree::Sequence sequence;
      int priority;
    };
    std::vector<Live> live;
    std::vector<typename Tree::Pin> pins;
    PathModel model;
    AttentionPlan plan;
    const auto forget = [&] {
      std::vector<std::pair<std::vector<int>, Namespace>> there;
      for (const auto& [id, node] : cached_nodes(tree))
        if (node_record(tree, id).state == detail::NodeState::published)  // else nobody finds it
          for (std::int32_t n = node.position + 1; n <= node.position + node.length; ++n)
            there.emplace_back(std::vector<int>(node.path.begin(), node.path.begin() + n),
                               node.space);
      model.keep_only(there);
    };
    const auto compute = [&] {
      auto step = tree.begin_step();
      for (Live& one : live) static_cast<void>(step.add(one.sequence));
      static_cast<void>(plan.build(step));
      return std::move(step).finish();
    };
    const auto random_prompt = [&] {
      std::vector<int> prompt;
      const int length = random.uniform(1, 12);
      for (int i = 0; i < length; ++i) prompt.push_back(random.uniform(0, i < 4 ? 1 : 2));
      return prompt;
    };
    for (int i = 0; i < 150; ++i) {
      const int what = random.uniform(0, 9);
      if (what < 4) {
        const int priority = random.uniform(-1, 1);
        const auto tenant = static_cast<std::uint64_t>(random.uniform(0, 1));
        live.push_back(
            {tree.insert(random_prompt(), {.name_space = {.tenant = tenant}, .priority = priority}),
             priority});
      } else if (what < 6) {
        auto finished = compute();
        for (const auto row : finished.rows()) finished.commit(row, random.uniform(0, 2));
      } else if (what < 8 && !live.empty()) {
        // What is equal to another's tokens merges with these, if both are computed.
        static_cast<void>(compute());
        const auto at = live.begin() + static_cast<std::ptrdiff_t>(random.index(live.size()));
        const auto space = at->sequence.options().name_space;
        model.leave(at->sequence.tokens(), at->priority, space);
        live.erase(at);
      } else if (what == 8 && random.chance(0.3)) {
        if (!pins.empty() && random.chance(0.5))
          pins.clear();
        else
          pins.push_back(tree.pin(random_prompt()));
      } else {
        for (int evictions = random.uniform(1, 6); evictions > 0; --evictions) {
          const auto before = cached_nodes(tree);
          std::optional<decltype(policy.score(CachedLeaf{}))> least;
          std::vector<std::int32_t> victims;
          for (const auto& [id, node] : before) {
            if (!node.cached || !node.is_leaf || node_record(tree, id).pins > 0) continue;
            CachedLeaf leaf = model.of(node.path, node.space);
            leaf.position = node.position, leaf.length = node.length, leaf.name_space = node.space;
            const auto score = policy.score(leaf);
            if (!least || score < *least) least = score, victims.clear();
            if (!(*least < score)) victims.push_back(id);
          }
          const std::size_t used = tree.stats().used_chunks;
          if (used == 0) break;
          const std::size_t freed = tree.trim(used - 1);
          CHECK(freed == (victims.empty() ? 0 : 1));
          if (freed == 0) break;
          ++num_evicted;
          const auto after = cached_nodes(tree);
          // One of those of the lowest score is shorter by a token, or gone; all else is as it was.
          int changed = 0;
          for (const auto& [id, node] : before) {
            const auto now = after.find(id);
            if (now != after.end() && now->second.path == node.path) continue;
            ++changed;
            CHECK(std::ranges::count(victims, id) == 1);
            CHECK((now == after.end() ? 0 : now->second.length) == node.length - 1);
          }
          CHECK(changed == 1);
          forget();
        }
      }
      forget();
      check_invariants(tree);
    }
  }
  CHECK(num_evicted > 50);
}

}  // namespace

TEST_CASE("the leaf of the lowest score goes, token by token") {
  run_against_model<LeastOftenUsed>(1);
  run_against_model<FirstIn>(2);
  run_against_model<Segmented>(3);
  run_against_model<ByPriority>(4);
  run_against_model<OfTenant>(5);
}

namespace {

/// Joins, is computed and leaves.
template <class Tree>
void join_and_leave(Tree& tree, const std::vector<int>& prompt) {
  auto sequence = tree.insert(prompt, {.compute_last = false});
  test::load(sequence);
}
template <class Tree>
std::size_t found_of(const Tree& tree, const std::vector<int>& prompt) {
  return tree.match_prefix(prompt).cached;
}

}  // namespace

TEST_CASE("a leaf that grows shorter is asked for again, one that is split is not") {
  struct Longest : ScoredPolicy {
    std::int32_t score(const CachedLeaf& leaf) const noexcept { return -leaf.length; }
  };
  using Tree = PrefixTree<int, 4, PoolAllocator, Longest>;
  Tree tree(PoolAllocator{.max_chunks = 100});
  join_and_leave(tree, iota(0, 20));
  join_and_leave(tree, iota(100, 16));
  tree.trim(8);
  CHECK(found_of(tree, iota(0, 20)) == 16);
  tree.trim(7);  // both have 16 tokens: the one that was a leaf first
  CHECK(found_of(tree, iota(0, 20)) == 12);
  tree.trim(6);
  CHECK(found_of(tree, iota(100, 16)) == 12);
  auto user = tree.insert(iota(0, 4));  // splits the first, whose end keeps its score
  tree.trim(5);
  CHECK(found_of(tree, iota(0, 20)) == 8);
  check_invariants(tree);
}

TEST_CASE("what a leaf was is not what the next node of its index is") {
  using Tree = PrefixTree<int, 4, PoolAllocator, LeastOftenUsed>;
  Tree tree(PoolAllocator{.max_chunks = 100});
  for (int i = 0; i < 5; ++i) join_and_leave(tree, iota(0, 4));
  tree.clear();
  join_and_leave(tree, iota(50, 4));
  join_and_leave(tree, iota(60, 4));
  join_and_leave(tree, iota(60, 4));
  tree.trim(1);
  CHECK(found_of(tree, iota(50, 4)) == 0);
  CHECK(found_of(tree, iota(60, 4)) == 4);
}

TEST_CASE("the last of the cache is pinned, and goes when live sequences need it") {
  LeastOftenUsed policy;
  policy.max_pinned = 10;
  PrefixTree<int, 4, PoolAllocator, LeastOftenUsed> tree(PoolAllocator{.max_chunks = 4}, {},
                                                         policy);
  join_and_leave(tree, iota(0, 8));
  auto pin = tree.pin(iota(0, 8));
  join_and_leave(tree, iota(50, 8));
  for (int i = 0; i < 3; ++i) join_and_leave(tree, iota(50, 8));
  tree.trim(0);
  CHECK(found_of(tree, iota(0, 8)) == 8);
  CHECK(found_of(tree, iota(50, 8)) == 0);
  auto needs_all = tree.insert(iota(100, 16));
  CHECK(pin.size() == 0);
  check_invariants(tree);
}

TEST_CASE("watermarks and time are as of other policies") {
  LeastOftenUsed policy;
  policy.high_watermark = 3;
  policy.low_watermark = 2;
  policy.ttl = 10;
  PrefixTree<int, 4, PoolAllocator, LeastOftenUsed> tree(PoolAllocator{.max_chunks = 100}, {},
                                                         policy);
  join_and_leave(tree, iota(0, 4));
  join_and_leave(tree, iota(0, 4));
  join_and_leave(tree, iota(50, 4));
  join_and_leave(tree, iota(60, 4));
  CHECK(tree.stats().used_chunks == 3);
  join_and_leave(tree, iota(70, 4));
  CHECK(tree.stats().used_chunks == 2);
  CHECK(found_of(tree, iota(0, 4)) == 4);  // used twice
  CHECK(found_of(tree, iota(70, 4)) == 4);
  CHECK(tree.expire(9) == 0);
  CHECK(tree.expire(10) == 8);
  CHECK(tree.stats().used_chunks == 0);
  check_invariants(tree);
}
