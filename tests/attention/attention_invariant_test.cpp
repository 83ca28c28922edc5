// Reduce::batch_invariant: a row's bits depend on its own tokens alone. What was found in the cache
// gives the bits of a cold run; other modes agree within the oracle's bound.
#include <doctest/doctest.h>

#include <chunkattn/chunkattn.hpp>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <random>
#include <span>
#include <vector>

#include "support/random.hpp"
#include "tests/support/retention.hpp"

namespace {

using namespace chunkattn;
using Reduce = CpuOptions::Reduce;

constexpr int head_dim = 32, num_qo_heads = 6, num_kv_heads = 2;

/// K, V or Q of a token as a model would compute it: a function of the tokens up to it.
void fill(std::span<float> row, std::span<const int> path, std::uint64_t kind) {
  std::uint64_t hash = kind * 0x9e3779b97f4a7c15u;
  for (int token : path) hash = (hash ^ static_cast<std::uint64_t>(token)) * 0xff51afd7ed558ccdu;
  std::mt19937_64 random(hash);
  std::normal_distribution<float> normal;
  for (float& x : row) x = normal(random);
}

/// The outputs of a sequence's tokens, by position; empty where none was computed.
using Outputs = std::vector<std::vector<float>>;

/// Runs the tokens of each sequence that are still to be computed through prefill steps of random
/// size and returns their outputs.
template <class T, class Tree, class Sequence, class V>
std::vector<Outputs> compute(Tree& tree, KvCache<Cpu, T>& kv,
                             ChunkAttention<Cpu, head_dim>& attention, const V& variant,
                             std::vector<Sequence*> sequences, test::Random& random) {
  std::vector<Outputs> outputs(sequences.size());
  AttentionPlan plan;
  while (true) {
    auto step = tree.begin_step();
    std::vector<std::pair<std::size_t, ScheduledSequence>> rows;
    for (std::size_t i = 0; i < sequences.size(); ++i) {
      // A sequence that waits for another's K/V joins once that is in this step or written.
      const auto added = step.add(*sequences[i], 1 + random.index(40));
      if (added) rows.push_back({i, added.row()});
    }
    const auto view = plan.build(step);
    if (!view) return outputs;
    const auto n = static_cast<std::size_t>(view.num_rows);
    std::vector<float> k(n * num_kv_heads * head_dim), v(k.size());
    std::vector<float> q(n * num_qo_heads * head_dim), out(q.size(), -1);
    std::size_t at = 0;
    for (const auto& [i, row] : rows) {
      const auto tokens = sequences[i]->tokens();
      for (std::int32_t p = row.position; p < row.position + row.num_rows; ++p, ++at) {
        const auto path = std::span(tokens).first(static_cast<std::size_t>(p) + 1);
        const std::size_t kv_size = num_kv_heads * head_dim, q_size = num_qo_heads * head_dim;
        fill(std::span(k).subspan(at * kv_size, kv_size), path, 1);
        fill(std::span(v).subspan(at * kv_size, kv_size), path, 2);
        fill(std::span(q).subspan(at * q_size, q_size), path, 3);
      }
    }
    attention.write(kv.layer(0), view, k, v);
    attention.run(kv.layer(0), view, variant, q, out);
    for (const auto& [i, row] : rows) {
      outputs[i].resize(sequences[i]->tokens().size());
      for (std::int32_t r = 0; r < row.num_rows; ++r) {
        constexpr std::ptrdiff_t size = num_qo_heads * head_dim;
        const auto begin = out.begin() + (row.first_row + r) * size;
        outputs[i][static_cast<std::size_t>(row.position + r)].assign(begin, begin + size);
      }
    }
    (void)std::move(step).finish();  // outputs are not wanted
  }
}

template <class T, class V = NoVariant>
void compare_hit_with_cold(Reduce reduce, double tolerance, const V& variant = {},
                           int rounds = 10) {
  test::Random random(tolerance == 0 ? 1 : 2);
  for (int round = 0; round < rounds; ++round) {
    PrefixTree<int, 16> tree;
    KvCache<Cpu, T> kv(tree, {.num_layers = 1, .num_kv_heads = num_kv_heads, .head_dim = head_dim});
    ChunkAttention<Cpu, head_dim> attention(2, {.reduce = reduce});
    // What is freed turns to NaN: one read of a freed chunk would show in every comparison.
    std::size_t freed = 0;
    tree.set_free_sink([&](ChunkIndex chunk) {
      kv.poison(chunk);
      ++freed;
    });
    std::vector<int> shared(20 + random.index(200));
    for (int& token : shared) token = random.uniform(0, 49);
    using Sequence = typename PrefixTree<int, 16>::Sequence;
    std::vector<Sequence> warm;
    std::vector<std::vector<int>> prompts;
    for (int i = 0; i < 6; ++i) {
      auto prompt = shared;
      for (std::size_t n = 1 + random.index(60); n-- > 0;) prompt.push_back(random.uniform(0, 49));
      prompts.push_back(prompt);
    }
    // One request runs first; the others find what it left in the cache.
    auto first = tree.insert(prompts[0]);
    compute(tree, kv, attention, variant, std::vector<Sequence*>{&first}, random);
    first.leave();
    const auto duplicate = [&] {  // leaves a tail that is dropped for the path that is there
      auto equal = tree.insert(prompts[0]);
      std::vector<int> answer(40);
      std::iota(answer.begin(), answer.end(), 0);
      equal.append(answer);
      equal.mark_loaded(equal.loadable());
    };
    duplicate();
    duplicate();
    CHECK(freed > 0);
    std::vector<Sequence*> together;
    for (const auto& prompt : prompts) warm.push_back(tree.insert(prompt));
    for (Sequence& sequence : warm) together.push_back(&sequence);
    CHECK(warm[1].num_cached() >= shared.size());
    const auto check_against_cold = [&] {
      const auto hit = compute(tree, kv, attention, variant, together, random);
      for (std::size_t i = 0; i < together.size(); ++i) {
        PrefixTree<int, 64, PoolAllocator, test::NoRetention> cold_tree;
        KvCache<Cpu, T> cold_kv(
            cold_tree, {.num_layers = 1, .num_kv_heads = num_kv_heads, .head_dim = head_dim});
        auto alone = cold_tree.insert(together[i]->tokens());
        using Alone = typename PrefixTree<int, 64, PoolAllocator, test::NoRetention>::Sequence;
        const Outputs cold =
            compute(cold_tree, cold_kv, attention, variant, std::vector<Alone*>{&alone}, random)[0];
        REQUIRE(hit[i].size() == cold.size());
        REQUIRE(!hit[i].back().empty());
        for (std::size_t position = 0; position < cold.size(); ++position) {
          const std::vector<float>&got = hit[i][position], &expected = cold[position];
          if (got.empty()) continue;  // cached
          REQUIRE(got.size() == expected.size());
          CAPTURE(position);
          if (tolerance == 0) {
            CHECK(std::memcmp(got.data(), expected.data(), got.size() * sizeof(float)) == 0);
          } else {
            for (std::size_t j = 0; j < got.size(); ++j)
              CHECK(got[j] == doctest::Approx(expected[j]).epsilon(tolerance).scale(1));
          }
        }
      }
    };
    check_against_cold();

    // Each goes back to some length and on in another way; forks branch off anywhere.
    std::vector<Sequence> forks;
    const auto extend = [&](Sequence& sequence) {
      std::vector<int> more(1 + random.index(80));
      for (int& token : more) token = random.uniform(0, 49);
      sequence.append(more);
    };
    for (Sequence& sequence : warm) {
      const std::size_t size = sequence.tokens().size();
      if (random.chance(0.5)) forks.push_back(sequence.fork(1 + random.index(size)));
      if (random.chance(0.7)) sequence.truncate(1 + random.index(size));
      extend(sequence);
    }
    for (Sequence& fork : forks) {
      extend(fork);
      together.push_back(&fork);
    }
    check_against_cold();
  }
}

}  // namespace

TEST_CASE("batch-invariant mode: a cache hit gives the bits of a cold run, in any batch") {
  compare_hit_with_cold<float>(Reduce::batch_invariant, 0);
  compare_hit_with_cold<half>(Reduce::batch_invariant, 0);
  compare_hit_with_cold<bfloat16>(Reduce::batch_invariant, 0);
}

TEST_CASE("batch-invariant mode: the same with a window, a cap and sinks") {
  const std::vector<float> sinks{0.5f, -1, 2, 0, 1, -3};
  for (const SlidingWindow window : {SlidingWindow{100}, SlidingWindow{33, 4}})
    compare_hit_with_cold<bfloat16>(Reduce::batch_invariant, 0,
                                    combine(window, SoftCap{5}, Sinks{sinks}), 3);
}

TEST_CASE("other modes: a cache hit agrees with a cold run within rounding") {
  compare_hit_with_cold<float>(Reduce::deterministic, 1e-5);
  compare_hit_with_cold<float>(Reduce::spin_lock, 1e-5);
  compare_hit_with_cold<half>(Reduce::deterministic, 1e-5);
}
