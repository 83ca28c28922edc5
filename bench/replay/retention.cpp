#include "retention.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chunkattn/cache/policy.hpp>
#include <chunkattn/prefix_tree.hpp>
#include <cstdint>
#include <limits>
#include <set>
#include <span>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "other_policies.hpp"
#include "trace.hpp"

namespace replay {
namespace {

constexpr int chunk_size = 64;

/// A trace as paths in a tree of blocks.
struct Paths {
  explicit Paths(const Blocks& prompts) {
    std::unordered_map<std::uint64_t, int> children;  // by parent and block
    for (const auto& prompt : prompts) {
      std::vector<int> path;
      int at = -1;
      for (const std::uint32_t block : prompt) {
        const std::uint64_t key = static_cast<std::uint64_t>(at + 1) << 32 | block;
        const auto [child, is_new] = children.try_emplace(key, static_cast<int>(parents.size()));
        if (is_new) parents.push_back(at);
        at = child->second;
        path.push_back(at);
      }
      references += path.size();
      longest = std::max(longest, path.size());
      paths.push_back(std::move(path));
    }
  }
  [[nodiscard]] std::size_t unbounded_hits() const { return references - parents.size(); }

  std::vector<std::vector<int>> paths;  // blocks, numbered
  std::vector<int> parents;             // by block; -1: none
  std::size_t references = 0, longest = 0;
};

/// Blocks that a cache of so many finds if it always evicts the block that is used again last.
/// What is used before a block's child is the block, so that is a leaf (or ties with one, which is
/// taken): Belady's rule needs no change for a tree. A prompt's own blocks stay while it is there.
std::size_t belady_hits(const Paths& trace, std::size_t capacity) {
  const std::size_t blocks = trace.parents.size();
  constexpr std::size_t never = std::numeric_limits<std::size_t>::max();
  std::vector<std::vector<std::size_t>> uses(blocks);
  for (std::size_t i = 0; i < trace.paths.size(); ++i)
    for (const int b : trace.paths[i]) uses[std::size_t(b)].push_back(i);
  std::vector<std::size_t> used(blocks), next(blocks);
  std::vector<char> cached(blocks);
  std::set<std::tuple<std::size_t, std::size_t, int>> by_next;  // next use, depth, block
  std::size_t hits = 0, size = 0;
  for (const auto& path : trace.paths) {
    bool found = true;
    for (std::size_t depth = 0; depth < path.size(); ++depth) {
      const auto b = static_cast<std::size_t>(path[depth]);
      found = found && cached[b];
      hits += found ? 1 : 0;
      if (cached[b])
        by_next.erase({next[b], depth, path[depth]});
      else
        ++size;
      cached[b] = 1;
    }
    for (; size > capacity; --size) {
      const auto last = std::prev(by_next.end());
      cached[std::size_t(std::get<2>(*last))] = 0;
      by_next.erase(last);
    }
    for (std::size_t depth = 0; depth < path.size(); ++depth) {
      const auto b = static_cast<std::size_t>(path[depth]);
      ++used[b];
      next[b] = used[b] < uses[b].size() ? uses[b][used[b]] : never;
      by_next.emplace(next[b], depth, path[depth]);
    }
  }
  return hits;
}

/// Blocks that the tree finds; each prompt joins, is computed, and leaves.
template <class Retention>
std::size_t tree_hits(const Blocks& prompts, std::size_t capacity, Retention retention) {
  chunkattn::PrefixTree<Token, chunk_size, chunkattn::PoolAllocator, Retention> tree(
      chunkattn::PoolAllocator{.max_chunks = capacity}, {}, retention);
  std::vector<Token> tokens;
  for (const auto& prompt : prompts) {
    tokens.clear();
    for (const std::uint32_t block : prompt)
      for (std::uint32_t i = 0; i < chunk_size; ++i) tokens.push_back(block * chunk_size + i);
    auto sequence = tree.insert(tokens, {.compute_last = false});
    sequence.mark_loaded(sequence.loadable());
  }
  return tree.stats().cached_tokens / chunk_size;
}

void run(const char* name, const Blocks& prompts) {
  if (prompts.empty()) return;
  const Paths trace(prompts);
  const auto all = double(trace.unbounded_hits());
  fmt::print("{}: {} prompts, {} blocks, {} different; an unbounded cache finds {:.1f} %\n", name,
             prompts.size(), trace.references, trace.parents.size(),
             100 * all / double(trace.references));
  for (const std::size_t percent : {5u, 10u, 25u}) {
    const std::size_t capacity = trace.parents.size() * percent / 100;
    if (capacity < trace.longest || all == 0) {
      fmt::print(
          "{}: {} % left out: {} slots, the longest prompt has {} blocks, {} are used again\n",
          name, percent, capacity, trace.longest, all);
      continue;
    }
    const double lru = double(tree_hits(prompts, capacity, chunkattn::RetentionOptions{})) / all;
    const double bound = double(belady_hits(trace, capacity)) / all;
    const double learnt =
        double(tree_hits(prompts, capacity, chunkattn::CachePolicy{{.learns = true}})) / all;
    const auto of_blocks = [&](std::size_t hits) { return 100 * double(hits) / all; };
    fmt::print(
        "| {:<9} | {:>2} % | {:>5.1f} | {:>7.1f} | {:>6.1f} | {:>6.2f} | {:>5.1f} | {:>5.1f} | "
        "{:>5.1f} |\n",
        name, percent, 100 * lru, 100 * learnt, 100 * bound, (learnt - lru) / (bound - lru),
        of_blocks(block_hits<S3Fifo>(trace.paths, trace.parents, capacity)),
        of_blocks(block_hits<Sieve>(trace.paths, trace.parents, capacity)),
        of_blocks(block_hits<Gdsf>(trace.paths, trace.parents, capacity)));
  }
}

}  // namespace

void run_retention(const char* name, std::span<const TracedRequest> trace) {
  fmt::print("trace, slots, LRU, learns, Belady, of the distance, S3-FIFO, SIEVE, GDSF\n");
  run(name, trace_blocks(trace));
  run("agents", agent_blocks());
  run("retrieval", retrieval_blocks());
  run("editor", editor_blocks());
}

}  // namespace replay
