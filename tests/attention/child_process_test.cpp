// A child of fork() computes what its parent computes, by threads of its own.
#include <doctest/doctest.h>

#include <cstdio>
#include <optional>
#include <random>
#include <utility>
#include <vector>

#include "chunkattn/attention_plan.hpp"
#include "chunkattn/chunk_attention.hpp"
#include "chunkattn/kv_cache.hpp"
#include "chunkattn/prefix_tree.hpp"
#include "tests/support/retention.hpp"
#include "tests/support/steps.hpp"

#if defined(__linux__)
#include "tests/support/forked.hpp"

using namespace chunkattn;
using test::iota;

namespace {

constexpr int num_qo_heads = 4, num_kv_heads = 2, head_dim = 32;

/// Joins, writes and computes its prompt in one step; the outputs.
template <class Attention>
std::vector<float> outputs(Attention& attention, std::size_t length) {
  PrefixTree<int, 16, PoolAllocator, test::NoRetention> tree;
  KvCache<Cpu, float> cache(tree, {1, num_kv_heads, head_dim});
  AttentionPlan plan;
  auto sequence = tree.insert(iota(0, length));
  auto step = tree.begin_step();
  REQUIRE(step.add(sequence));
  const auto view = plan.build(step);
  const auto rows = static_cast<std::size_t>(view.num_rows);
  std::vector<float> q(rows * num_qo_heads * head_dim), out(q.size());
  std::vector<float> k(rows * num_kv_heads * head_dim), v(k.size());
  std::mt19937 bits(7);
  std::normal_distribution<float> normal;
  for (auto* tensor : {&q, &k, &v})
    for (float& x : *tensor) x = normal(bits);
  attention.write(cache.layer(0), view, k, v);
  attention.run(cache.layer(0), view, q, out);
  (void)std::move(step).finish();
  return out;
}

}  // namespace

TEST_CASE("a child of fork() writes and computes, in its first call and later") {
  if (!test::can_fork) {
    std::printf("skipped: a child of fork(): ThreadSanitizer lets it start no threads\n");
    return;
  }
  for (const int threads : {1, 3}) {
    CAPTURE(threads);
    std::optional<ChunkAttention<Cpu, head_dim>> attention(threads);
    CHECK(test::in_child([&] { return outputs(*attention, 100).empty() ? 1 : 0; }) == 0);
    const auto expected = outputs(*attention, 200);
    const auto same = [&] { return outputs(*attention, 200) == expected ? 0 : 1; };
    CHECK(test::in_child(same) == 0);
    CHECK(test::in_child([&] { return same() + same() + test::in_child(same, 20); }) == 0);
    CHECK(test::in_child([&] {
            attention.reset();
            return 0;
          }) == 0);
    CHECK(same() == 0);
  }
}
#endif
