// The walk over K/V, gather and scatter, swapping out and resuming.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "chunkattn/debug/tree.hpp"
#include "chunkattn/kv_cache.hpp"
#include "chunkattn/prefix_tree.hpp"
#include "chunkattn/transfer/transfer.hpp"
#include "support/random.hpp"
#include "tests/support/retention.hpp"

using namespace chunkattn;
using test::Random;

namespace {

using Tree = PrefixTree<int, 8, PoolAllocator, test::NoRetention>;
using CachingTree = PrefixTree<int, 8>;
constexpr KvCacheOptions geometry{.num_layers = 2, .num_kv_heads = 3, .head_dim = 16};

/// The value of one element of the K/V of a path: a function of all tokens up to the position.
float value(const std::vector<int>& tokens, int position, int layer, int head, int is_v, int i) {
  std::uint32_t hash = 2166136261u;
  for (int p = 0; p <= position; ++p)
    hash = (hash ^ static_cast<std::uint32_t>(tokens[static_cast<std::size_t>(p)] + 7)) * 16777619u;
  for (const int n : {layer, head, is_v, i})
    hash = (hash ^ static_cast<std::uint32_t>(n + 3)) * 16777619u;
  return static_cast<float>(hash % 255u) - 127.0f;  // exact in every element type
}

template <class T>
T stored(float x) {
  if constexpr (std::is_same_v<T, std::int8_t>)
    return static_cast<std::int8_t>(x);
  else
    return from_float<T>(x);
}

/// What a model would do: computes the K/V of `range`.
template <class Sequence, class Cache>
void compute(const Sequence& sequence, TokenRange range, Cache& cache) {
  const std::vector<int> tokens = sequence.tokens();
  for_each_kv_span(sequence, range, cache, [&](const auto& span) {
    using T = std::remove_pointer_t<decltype(span.k)>;
    for (int t = 0; t < span.length; ++t) {
      for (int i = 0; i < geometry.head_dim; ++i) {
        const int p = span.position + t;
        span.k[t * span.stride_token + i] =
            stored<T>(value(tokens, p, span.layer, span.kv_head, 0, i));
        span.v[t * span.stride_token + i] =
            stored<T>(value(tokens, p, span.layer, span.kv_head, 1, i));
      }
      if (span.k_scale != nullptr) {
        span.k_scale[t] = static_cast<float>(span.position + t);
        span.v_scale[t] = -static_cast<float>(span.position + t);
      }
    }
  });
}

/// The same for all that is the sequence's to compute.
template <class Sequence, class Cache>
void compute_all(Sequence& sequence, Cache& cache) {
  for (TokenRange range = sequence.loadable(); !range.empty(); range = sequence.loadable()) {
    compute(sequence, range, cache);
    sequence.mark_loaded(range);
  }
}

/// Elements of the K/V of [0, length) that are not what compute() writes.
template <class Sequence, class Cache>
int wrong(const Sequence& sequence, int length, Cache& cache) {
  const std::vector<int> tokens = sequence.tokens();
  int count = 0, seen = 0;
  for_each_kv_span(sequence, {0, length}, cache, [&](const auto& span) {
    using T = std::remove_pointer_t<decltype(span.k)>;
    seen += span.length;
    for (int t = 0; t < span.length; ++t) {
      for (int i = 0; i < geometry.head_dim; ++i) {
        const int p = span.position + t;
        count += span.k[t * span.stride_token + i] !=
                 stored<T>(value(tokens, p, span.layer, span.kv_head, 0, i));
        count += span.v[t * span.stride_token + i] !=
                 stored<T>(value(tokens, p, span.layer, span.kv_head, 1, i));
      }
      if (span.k_scale != nullptr) {
        count += span.k_scale[t] != static_cast<float>(span.position + t);
        count += span.v_scale[t] != -static_cast<float>(span.position + t);
      }
    }
  });
  CHECK(seen == length * geometry.num_layers * geometry.num_kv_heads);
  return count;
}

template <class Cache, class AnyTree>
void poison(Cache& cache, const AnyTree& tree, const std::vector<bool>& keep) {
  for (int l = 0; l < geometry.num_layers; ++l) {
    const auto view = cache.layer(l);
    for (std::size_t s = 0; s < tree.num_chunks(); ++s) {
      if (keep[s]) continue;
      for (int h = 0; h < geometry.num_kv_heads; ++h)
        for (int t = 0; t < 8; ++t) {
          const auto bytes = sizeof(*view.k_row(0, 0, 0)) * std::size_t{16};
          std::memset(static_cast<void*>(view.k_row(static_cast<ChunkIndex>(s), h, t)), 0x7e,
                      bytes);
          std::memset(static_cast<void*>(view.v_row(static_cast<ChunkIndex>(s), h, t)), 0x7e,
                      bytes);
        }
    }
  }
}

template <class Sequence>
void mark(const Sequence& sequence, std::vector<bool>& keep, std::size_t length) {
  sequence.for_each_run({0, static_cast<std::int32_t>(length)}, [&](const Piece& piece) {
    keep[static_cast<std::size_t>(piece.chunk)] = true;
  });
}

std::vector<int> random_prompt(Random& random, int length) {
  std::vector<int> prompt(static_cast<std::size_t>(length));
  for (int& token : prompt) token = random.uniform(0, 1);
  return prompt;
}

}  // namespace

TEST_CASE("spans cover a range once per layer and head, inside their chunks") {
  Tree tree;
  KvCache<Cpu, float> cache(tree, geometry);
  auto a = tree.insert(std::vector<int>{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11});
  auto b = tree.insert(std::vector<int>{1, 2, 3, 0, 0});
  std::vector<KvSpan<float>> spans;
  for_each_kv_span(b, {1, 3}, cache, [&](const KvSpan<float>& span) { spans.push_back(span); });
  REQUIRE(spans.size() == 2 * 2 * 3);  // two pieces, two layers, three heads
  CHECK(spans[0].position == 1);
  CHECK(spans[0].length == 2);
  CHECK(spans[0].chunk == 0);
  CHECK(spans[3].position == 3);
  CHECK(spans[3].length == 1);
  CHECK(spans[3].chunk == 2);
  CHECK(spans[3].begin == 0);
  CHECK(spans[6].layer == 1);
  CHECK(spans[6].k == cache.layer(1).k_row(0, 0, 1));
  CHECK_THROWS_AS(for_each_kv_span(b, {0, 6}, cache, [](const auto&) {}), InvalidArgument);
  CHECK_THROWS_AS(for_each_kv_span(b, {-1, 2}, cache, [](const auto&) {}), InvalidArgument);
}

TEST_CASE_TEMPLATE("gather and scatter are inverse, whatever the chunk size", T, float, half,
                   bfloat16, std::int8_t, float8_e4m3) {
  Random random(1);
  const auto prompt = random_prompt(random, 53);
  Tree tree;
  KvCache<Cpu, T> cache(tree, geometry);
  auto sequence = tree.insert(prompt);
  compute_all(sequence, cache);
  const TokenRange range{5, 41};
  std::vector<std::byte> buffer(kv_bytes(cache, 41));
  gather_kv(sequence, range, cache, buffer);

  PrefixTree<int, 16, PoolAllocator, test::NoRetention>
      other;  // another page size reads the same buffer
  KvCache<Cpu, T> other_cache(other, geometry);
  auto copy = other.insert(prompt);
  compute(copy, {0, 5}, other_cache);
  copy.mark_loaded({0, 5});
  scatter_kv(copy, range, other_cache, std::span<const std::byte>(buffer));
  CHECK(wrong(copy, 46, other_cache) == 0);
  buffer.pop_back();
  CHECK_THROWS_AS(gather_kv(sequence, range, cache, buffer), InvalidArgument);
  CHECK_THROWS_AS(scatter_kv(copy, range, other_cache, std::span<const std::byte>(buffer)),
                  InvalidArgument);
}

TEST_CASE_TEMPLATE("gather and scatter with rows of V shorter or longer than K's, or in K", T, half,
                   float8_e4m3) {
  Random random(4);
  for (const auto& shape : {std::pair(8, false), {24, false}, {8, true}}) {
    const int value_dim = shape.first;
    const bool v_in_k = shape.second;
    const KvCacheOptions uneven{.num_layers = 2,
                                .num_kv_heads = 3,
                                .head_dim = 16,
                                .value_dim = value_dim,
                                .v_in_k = v_in_k};
    const int v_elements = v_in_k ? 0 : value_dim;  // apart from K
    const auto prompt = random_prompt(random, 41);
    Tree tree;
    PrefixTree<int, 16, PoolAllocator, test::NoRetention> other;
    KvCache<Cpu, T> cache(tree, uneven), other_cache(other, uneven);
    auto sequence = tree.insert(prompt);
    auto copy = other.insert(prompt);
    std::vector<T> rows;  // of all spans, K and V of a token after each other
    for_each_kv_span(sequence, {0, 41}, cache, [&](const auto& span) {
      for (int t = 0; t < span.length; ++t) {
        for (int i = 0; i < 16; ++i)
          rows.push_back(span.k[t * span.stride_token + i] = from_float<T>(random.normal()));
        for (int i = 0; i < v_elements; ++i)
          rows.push_back(span.v[t * span.v_stride_token + i] = from_float<T>(random.normal()));
        if (span.k_scale != nullptr) {
          span.v_scale[t] = -static_cast<float>(span.position + t);
          span.k_scale[t] = static_cast<float>(span.position + t);
        }
      }
    });
    sequence.mark_loaded({0, 41});
    const std::size_t scales = has_row_scales<T> ? (v_in_k ? 1 : 2) * sizeof(float) : 0;
    const auto row_bytes = static_cast<std::size_t>(16 + v_elements) * sizeof(T) + scales;
    CHECK(kv_bytes(cache, 41) == 41 * 2 * 3 * row_bytes);
    CHECK(cache.bytes_per_chunk() == 8 * 2 * 3 * row_bytes);
    std::vector<std::byte> buffer(kv_bytes(cache, 41));
    gather_kv(sequence, {0, 41}, cache, buffer);
    scatter_kv(copy, {0, 41}, other_cache, std::span<const std::byte>(buffer));

    // Chunks of 16 tokens are twice those of 8: tokens are compared one by one.
    std::size_t at = 0;
    int wrong_rows = 0;
    for_each_kv_span(sequence, {0, 41}, cache, [&](const auto& from) {
      for (int t = 0; t < from.length; ++t) {
        for_each_kv_span(copy, {from.position + t, 1}, other_cache, [&](const auto& to) {
          if (to.layer != from.layer || to.kv_head != from.kv_head) return;
          const auto dim = static_cast<std::ptrdiff_t>(16);
          wrong_rows +=
              !std::equal(to.k, to.k + dim, rows.begin() + static_cast<std::ptrdiff_t>(at));
          wrong_rows += !std::equal(to.v, to.v + v_elements,
                                    rows.begin() + static_cast<std::ptrdiff_t>(at) + dim);
          if (to.k_scale != nullptr) {
            wrong_rows += to.k_scale[0] != static_cast<float>(from.position + t);
            wrong_rows += to.v_scale[0] != (v_in_k ? to.k_scale[0] : -to.k_scale[0]);
          }
          at += static_cast<std::size_t>(16 + v_elements);
        });
      }
    });
    CHECK(at == rows.size());
    CHECK(wrong_rows == 0);
  }
}

TEST_CASE_TEMPLATE("swapping out and resuming is exact", T, half, std::int8_t) {
  Random random(2);
  for (int round = 0; round < test::scaled(60); ++round) {
    CachingTree tree(PoolAllocator{.max_chunks = 24});
    KvCache<Cpu, T> cache(tree, geometry);
    auto stays = tree.insert(random_prompt(random, random.uniform(1, 40)));
    compute_all(stays, cache);
    auto goes = tree.insert(random_prompt(random, random.uniform(1, 60)),
                            {.name_space = {.adapter = random.bits() % 2}, .priority = 3});
    TokenRange first = goes.loadable();
    first.length = std::min(first.length, random.uniform(0, 60));
    compute(goes, first, cache);
    goes.mark_loaded(first);
    const auto tokens = goes.tokens();
    const auto computed = goes.num_written();

    const SwappedSequence<int> swapped = swap_out(goes, cache);
    CHECK(!goes.is_live());
    CHECK(swapped.tokens == tokens);
    CHECK(swapped.written == computed);
    // What others do meanwhile evicts none, some or all of what it left.
    {
      auto pressure = tree.try_insert(random_prompt(random, random.uniform(1, 150)));
      if (pressure) {
        std::vector<bool> keep(tree.num_chunks());
        mark(stays, keep, stays.size());
        mark(*pressure, keep, pressure->num_written());  // cache that it found, its last token too
        if (tree.stats().retained_chunks == 0) poison(cache, tree, keep);
      }
    }
    auto back = resume(tree, cache, swapped);
    REQUIRE(back);
    CHECK(back->tokens() == tokens);
    CHECK(back->num_written() >= computed);
    CHECK(back->options().name_space == swapped.options.name_space);
    CHECK(back->options().priority == 3);
    CHECK(wrong(*back, static_cast<int>(computed), cache) == 0);
    CHECK(wrong(stays, static_cast<int>(stays.size()), cache) == 0);
    check_invariants(tree);
  }
}

TEST_CASE("resume waits for room, then works; nothing is lost by trying") {
  Tree tree(PoolAllocator{.max_chunks = 4});
  KvCache<Cpu, float> cache(tree, geometry);
  auto goes = tree.insert(std::vector<int>(24, 1));
  compute_all(goes, cache);
  const auto swapped = swap_out(goes, cache);
  CHECK(tree.stats().used_chunks == 0);
  auto other = tree.insert(std::vector<int>(16, 2));
  poison(cache, tree, std::vector<bool>(tree.num_chunks()));
  CHECK(!resume(tree, cache, swapped));
  other.leave();
  auto back = resume(tree, cache, swapped);
  REQUIRE(back);
  CHECK(back->num_cached() == 0);
  CHECK(back->num_uncomputed() == 0);
  CHECK(wrong(*back, 24, cache) == 0);
  auto damaged = swapped;
  damaged.kv.pop_back();
  CHECK_THROWS_AS((void)resume(tree, cache, damaged), InvalidArgument);
  CHECK(tree.stats().live_sequences == 1);
}
