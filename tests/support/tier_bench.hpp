// A tree with few chunks over tiers, and a model whose K/V says of which tokens it is.
#pragma once

#include <doctest/doctest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "chunkattn/kv_cache.hpp"
#include "chunkattn/prefix_tree.hpp"
#include "chunkattn/tiers/tiers.hpp"
#include "chunkattn/transfer/transfer.hpp"

namespace test::tier_bench {

using namespace chunkattn;

inline constexpr int chunk = 8;
using Tree = PrefixTree<int, chunk>;
inline constexpr KvCacheOptions geometry{.num_layers = 2, .num_kv_heads = 2, .head_dim = 8};

/// K/V of a token depends on all before it and on whose it is, as a model's does.
template <class T>
struct Model {
  std::uint64_t weights = 1;
  [[nodiscard]] float value(std::uint64_t hash, int layer, int head, int i) const {
    for (const int part : {layer, head, i})
      hash = (hash ^ static_cast<std::uint64_t>(part + 1)) * 0x9e3779b97f4a7c15u;
    return static_cast<float>(static_cast<int>(hash >> 40) % 1000) / 125.0f;
  }
  [[nodiscard]] std::vector<std::uint64_t> hashes(const Tree::Sequence& s) const {
    std::vector<std::uint64_t> all;
    const InsertOptions how = s.options();
    std::uint64_t hash = weights;
    for (std::size_t p = 0; p < s.size(); ++p) {
      const bool is_public = p < how.public_length;
      hash = (hash ^ static_cast<std::uint64_t>(s.token(p) + 1)) * 0x9e3779b97f4a7c15u;
      hash = (hash ^ (is_public ? 0 : how.name_space.tenant + 1)) * 0xc2b2ae3d27d4eb4fu;
      all.push_back(hash ^= hash >> 31);
    }
    return all;
  }
  /// Calls f(element, what it is to be) for K and V of a range.
  template <class F>
  void each(const Tree::Sequence& s, TokenRange range, KvCache<Cpu, T>& cache, const F& f) const {
    const auto all = hashes(s);
    for_each_kv_span(s, range, cache, [&](const KvSpan<T>& span) {
      for (int t = 0; t < span.length; ++t)
        for (int i = 0; i < geometry.head_dim; ++i) {
          const float x =
              value(all[static_cast<std::size_t>(span.position + t)], span.layer, span.kv_head, i);
          f(span.k[t * span.stride_token + i], x);
          f(span.v[t * span.v_stride_token + i], -x);
        }
    });
  }
  /// Computes whatever the sequence has to.
  void compute(Tree::Sequence& s, KvCache<Cpu, T>& cache) const {
    for (auto range = s.loadable(); !range.empty(); range = s.loadable()) {
      each(s, range, cache, [](T& element, float x) { element = from_float<T>(x); });
      s.mark_loaded(range);
    }
  }
  /// The largest difference of what is written from what it is to be; NaN counts as infinite.
  [[nodiscard]] double error(Tree::Sequence& s, KvCache<Cpu, T>& cache) const {
    double largest = 0;
    each(s, {0, static_cast<std::int32_t>(s.num_written())}, cache, [&](T& element, float x) {
      const double off = std::abs(static_cast<double>(to_float(element)) -
                                  static_cast<double>(to_float(from_float<T>(x))));
      largest = std::isnan(off) ? INFINITY : std::max(largest, off);
    });
    return largest;
  }
};

/// A tree with few chunks, whose freed K/V is poisoned, over tiers.
template <class T>
struct BenchOf {
  using Cache = KvCache<Cpu, T>;
  using TreeTiers = Tiers<Tree, Cache>;
  using Options = typename TreeTiers::Options;

  explicit BenchOf(std::vector<std::shared_ptr<TierStore>> stores, Options options = {},
                   std::size_t chunks = 32, TreeOptions sharing = {})
      : num_chunks(chunks), tree(PoolAllocator{.max_chunks = chunks}, sharing) {
    tree.set_free_sink([this](ChunkIndex freed) { cache.poison(freed); });
    if (options.model.empty()) options.model = "m1";
    tiers.emplace(tree, cache, std::move(stores), std::move(options));
  }
  ~BenchOf() {
    tiers.reset();
    tree.set_free_sink({});
  }
  /// A prompt runs and leaves.
  void run(const std::vector<int>& prompt, const InsertOptions& how = {}) {
    auto s = tree.insert(prompt, how);
    model.compute(s, cache);
    CHECK(model.error(s, cache) == 0);
  }
  /// With no live sequence: all that is cached is evicted.
  void evict_all() {
    {
      const auto all = tree.insert(std::vector<int>(chunk * num_chunks, -1));
    }
    REQUIRE(tree.stats().used_chunks == 0);
  }
  /// The prompt joins and loads what its tiers have. Returns how many of its tokens are there.
  std::size_t load(const std::vector<int>& prompt, const InsertOptions& how = {},
                   double tolerance = 0) {
    auto s = tree.insert(prompt, how);
    auto loading = tiers->load(s);
    loading.wait(s);
    const std::size_t found = s.num_written();
    CHECK(model.error(s, cache) <= tolerance);
    model.compute(s, cache);
    CHECK(s.num_written() == s.size());
    CHECK(model.error(s, cache) <= tolerance);
    return found;
  }

  std::size_t num_chunks;
  Tree tree;
  Cache cache{tree, geometry};
  Model<T> model;
  std::optional<TreeTiers> tiers;
};
using Bench = BenchOf<float>;

inline std::shared_ptr<MemoryTier> memory(std::size_t bytes = 1 << 20) {
  return std::make_shared<MemoryTier>(bytes);
}

}  // namespace test::tier_bench
