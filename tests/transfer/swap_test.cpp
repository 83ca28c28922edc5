// Swapping out and resuming beside others: only what is written is taken, only what is the
// sequence's own is put back, and it comes back as whose it was.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "chunkattn/debug/tree.hpp"
#include "chunkattn/kv_cache.hpp"
#include "chunkattn/prefix_tree.hpp"
#include "chunkattn/transfer/transfer.hpp"
#include "tests/support/random.hpp"
#include "tests/support/retention.hpp"
#include "tests/support/steps.hpp"

using namespace chunkattn;
using test::iota;
using test::refused;

namespace {

using Tree = PrefixTree<int, 8, PoolAllocator, test::ByPriority>;
using Cache = KvCache<Cpu, float>;
constexpr KvCacheOptions geometry{.num_layers = 2, .num_kv_heads = 1, .head_dim = 8};

/// Writes K/V at a range, with a mark of who did.
void put(Tree::Sequence& s, TokenRange range, Cache& cache, float who) {
  for_each_kv_span(s, range, cache, [&](const KvSpan<float>& span) {
    for (int t = 0; t < span.length; ++t)
      for (int i = 0; i < geometry.head_dim; ++i) {
        span.k[t * span.stride_token + i] = who + static_cast<float>(span.position + t);
        span.v[t * span.stride_token + i] = -who - static_cast<float>(span.position + t + i);
      }
  });
}
void compute(Tree::Sequence& s, std::size_t n, Cache& cache, float who) {
  TokenRange range = s.loadable();
  range.length = std::min(range.length, static_cast<std::int32_t>(n));
  put(s, range, cache, who);
  s.mark_loaded(range);
}
/// Who wrote the K/V of the first positions, as far as it is the same.
float putter(const Tree::Sequence& s, TokenRange range, Cache& cache) {
  float who = -1;
  bool same = true;
  for_each_kv_span(s, range, cache, [&](const KvSpan<float>& span) {
    for (int t = 0; t < span.length; ++t) {
      const float found = span.k[t * span.stride_token] - static_cast<float>(span.position + t);
      same = same && (who == -1.0f || who == found);
      who = found;
    }
  });
  return same ? who : -2;
}

struct Bench {
  explicit Bench(std::size_t count = 64) : chunks(count), tree(PoolAllocator{.max_chunks = count}) {
    tree.set_free_sink([this](ChunkIndex chunk) { cache.poison(chunk); });
  }
  /// With no live sequence: one that takes all there is pushes the cache out and leaves none.
  void evict_all() {
    {
      const auto all = tree.insert(std::vector<int>(8 * chunks, -1));
    }
    REQUIRE(tree.stats().used_chunks == 0);
  }
  ~Bench() { tree.set_free_sink({}); }
  std::size_t chunks;
  Tree tree;
  Cache cache{tree, geometry};
  AttentionPlan plan;
};

}  // namespace

TEST_CASE("what another sequence has still to write is not taken for computed") {
  Bench b;
  auto writer = b.tree.insert(iota(0, 30));
  auto waits = b.tree.insert(iota(0, 40));
  CHECK(waits.num_written() == 0);
  CHECK(waits.num_pending() == 30);
  compute(waits, 99, b.cache, 500);  // its own ten, after the pending ones
  CHECK(waits.num_written() == 0);
  compute(writer, 12, b.cache, 100);
  CHECK(waits.num_written() == 12);
  const auto swapped = swap_out(waits, b.cache);
  CHECK(swapped.written == 12);
  CHECK(swapped.shared == 12);
  CHECK(swapped.kv.empty());
  CHECK(swapped.tokens == iota(0, 40));
  {
    auto back = resume(b.tree, b.cache, swapped);
    REQUIRE(back);
    CHECK(back->num_written() == 12);
    CHECK(back->num_pending() == 18);
    CHECK(back->num_uncomputed() == 10);
    CHECK(putter(*back, {0, 12}, b.cache) == 100);
  }
  writer.leave();
  b.evict_all();
  auto back = resume(b.tree, b.cache, swapped);
  REQUIRE(back);
  CHECK(back->num_written() == 0);
  CHECK(back->num_uncomputed() == 40);
}

TEST_CASE("what other live sequences have is not swapped out; without it, all is computed again") {
  // Which of the others' 30 tokens are there at resume(): all, some, none, or to be written again.
  for (const int there : {30, 20, 0, -1}) {
    CAPTURE(there);
    Bench b;
    auto other = b.tree.insert(iota(0, 30));
    compute(other, 30, b.cache, 100);
    auto goes = b.tree.insert(iota(0, 40));
    compute(goes, 10, b.cache, 200);
    const auto swapped = swap_out(goes, b.cache);
    CHECK(swapped.shared == 30);
    CHECK(swapped.written == 40);
    CHECK(swapped.kv.size() == kv_bytes(b.cache, 10));
    other.leave();
    b.evict_all();
    std::optional<Tree::Sequence> again;
    if (there != 0) {
      again = b.tree.insert(iota(0, there < 0 ? 30 : static_cast<std::size_t>(there)));
      if (there > 0) compute(*again, 30, b.cache, 300);
    }
    auto back = resume(b.tree, b.cache, swapped);
    REQUIRE(back);
    const int written = there < 0 ? 0 : there;
    CHECK(back->num_written() == (there == 30 ? 40u : static_cast<std::size_t>(written)));
    CHECK(back->num_pending() == (there < 0 ? 30u : 0u));
    CHECK((written == 0 || putter(*back, {0, written}, b.cache) == 300));
    if (there == 30) CHECK(putter(*back, {30, 10}, b.cache) == 200);
    check_invariants(b.tree);
  }
}

TEST_CASE("a swapped sequence whose numbers do not fit each other is refused") {
  Bench b;
  auto s = b.tree.insert(iota(0, 30));
  compute(s, 20, b.cache, 100);
  const auto swapped = swap_out(s, b.cache);
  const auto resumed = [&](auto change) {
    auto damaged = swapped;
    change(damaged);
    return refused([&] { (void)resume(b.tree, b.cache, damaged); });
  };
  CHECK(resumed([](auto& d) { d.written = 31; }) ==
        "swapped.written = 31: expected at most the number of tokens");
  CHECK(resumed([](auto& d) { d.shared = 21; }) ==
        "swapped.shared = 21: expected at most swapped.written");
  CHECK(resumed([](auto& d) {
          d.shared = 1;
        }).starts_with("swapped.kv.size() = " + std::to_string(swapped.kv.size())));
  CHECK(b.tree.stats().live_sequences == 0);
}

TEST_CASE("a fork whose copy is not made is swapped out without the rows that were not copied") {
  Bench b;
  auto s = b.tree.insert(iota(0, 9));
  s.append(iota(50, 3));
  compute(s, 12, b.cache, 100);
  auto fork = s.fork();
  CHECK(b.tree.stats().copied_tokens == 3);
  const auto swapped = swap_out(fork, b.cache);
  CHECK(swapped.written == 9);
  CHECK(swapped.tokens.size() == 12);
  auto back = resume(b.tree, b.cache, swapped);
  REQUIRE(back);
  CHECK(back->num_written() == 9);
  CHECK(back->loadable() == TokenRange{9, 3});
  const auto other = swap_out(s, b.cache);  // the source: all of it is there
  CHECK(other.written == 12);
  check_invariants(b.tree);
}

TEST_CASE("outputs to come and tokens in a step are discarded by a swap") {
  Bench b;
  auto s = b.tree.insert(iota(0, 10));
  auto step = b.tree.begin_step();
  REQUIRE(step.add(s, 50, {.tokens = iota(90, 4)}));
  CHECK(b.plan.build(step));
  auto flight = std::move(step).submit();
  const auto swapped = swap_out(s, b.cache);
  CHECK(swapped.written == 0);
  CHECK(swapped.tokens == iota(0, 10));
  auto done = std::move(flight).finish();
  CHECK(done.rows().begin() == done.rows().end());
  auto back = resume(b.tree, b.cache, swapped);
  REQUIRE(back);
  CHECK(back->tokens() == iota(0, 10));
  CHECK(back->num_cached() == 9);  // the step in flight has written them all the same
  CHECK(back->num_uncomputed() == 1);
}

TEST_CASE("an output that was to come when a sequence was swapped out is computed after resume()") {
  for (const std::size_t drafts : {0, 3})
    for (const bool is_finished : {false, true}) {
      Bench b;
      auto s = b.tree.insert(iota(0, 20));
      std::optional step(b.tree.begin_step());
      const std::vector<int> guesses = iota(70, drafts);
      REQUIRE(step->add(s, 99, {.tokens = guesses}));
      (void)b.plan.build(*step);
      std::optional<Tree::Finished> done;
      if (is_finished) {
        (void)b.cache.layer(0);  // grows to the chunks that there are
        put(s, {0, 20}, b.cache, 100);
        done.emplace(std::move(*step).finish());
      }
      const auto swapped = swap_out(s, b.cache);
      CHECK(swapped.written == (is_finished ? 20 : 0));
      done.reset();
      step.reset();
      b.evict_all();
      const auto back = resume(b.tree, b.cache, swapped);
      REQUIRE(back);
      CHECK(back->size() == 20);
      CHECK(back->num_uncomputed() == (is_finished ? 1 : 20));
    }
}

TEST_CASE("resume never rewrites rows that others share") {
  test::Random random(4);
  for (int round = 0; round < test::scaled(200); ++round) {
    Bench b;
    const int shared = random.uniform(1, 30), own = random.uniform(0, 20);
    std::vector<int> prompt = iota(0, static_cast<std::size_t>(shared));
    const std::vector<int> others = [&] {
      auto tokens = prompt;
      tokens.resize(prompt.size() + random.index(12), 7);
      return tokens;
    }();
    for (int i = 0; i < own; ++i) prompt.push_back(100 + i);
    auto goes = b.tree.insert(prompt);
    const std::size_t written = random.index(prompt.size() + 1);
    compute(goes, written, b.cache, 1000);
    const auto swapped = swap_out(goes, b.cache);
    b.evict_all();
    auto other = b.tree.insert(others);  // computes the shared part again, or some of it
    const std::size_t theirs = random.index(others.size() + 1);
    compute(other, theirs, b.cache, 2000);
    const auto common = static_cast<std::int32_t>(std::min<std::size_t>(theirs, other.size()));
    CAPTURE(shared);
    CAPTURE(written);
    CAPTURE(theirs);

    auto back = resume(b.tree, b.cache, swapped);
    REQUIRE(back);
    REQUIRE((common == 0 || putter(other, {0, common}, b.cache) == 2000));
    const auto kept = std::min(shared, common);
    const auto ready = static_cast<std::int32_t>(back->num_written());
    REQUIRE(ready >= std::max(kept, static_cast<std::int32_t>(written)));
    REQUIRE((kept == 0 || putter(*back, {0, kept}, b.cache) == 2000));
    if (ready > kept) REQUIRE(putter(*back, {kept, ready - kept}, b.cache) == 1000);
    REQUIRE(other.num_written() >= theirs);
    check_invariants(b.tree);
  }
}

TEST_CASE("K/V from before clear() does not come back as that of the new weights") {
  for (const bool swapped_before : {true, false}) {
    CAPTURE(swapped_before);
    Bench b;
    auto s = b.tree.insert(iota(0, 30));
    CHECK(s.weights_epoch() == 1);
    compute(s, 99, b.cache, 100);
    std::optional<SwappedSequence<int>> swapped;
    if (swapped_before) swapped = swap_out(s, b.cache);
    b.tree.clear();
    if (!swapped_before) {
      CHECK(s.weights_epoch() == 0);
      CHECK(s.fork().weights_epoch() == 0);
      swapped = swap_out(s, b.cache);
    }
    CHECK(swapped->written == 30);
    auto back = resume(b.tree, b.cache, *swapped);
    REQUIRE(back);
    CHECK(back->weights_epoch() == 2);
    CHECK(back->tokens() == iota(0, 30));
    CHECK(back->num_written() == 0);
    CHECK(b.tree.match_prefix(iota(0, 30)).cached == 0);
    compute(*back, 99, b.cache, 200);
    CHECK(putter(*back, {0, 30}, b.cache) == 200);
    CHECK(b.tree.match_prefix(iota(0, 30)).cached == 30);
    // In another tree nothing is known of its weights, but what was old there is old anywhere.
    Bench other;
    auto there = resume(other.tree, other.cache, *swapped);
    REQUIRE(there);
    CHECK(there->num_written() == (swapped_before ? 30 : 0));
  }
}

TEST_CASE("scatter_kv and mark_loaded refuse what is not the sequence's to write") {
  Bench b;
  auto a = b.tree.insert(iota(0, 16));
  compute(a, 10, b.cache, 100);
  auto second = b.tree.insert(iota(0, 20));
  std::vector<std::byte> bytes(kv_bytes(b.cache, 20));
  const std::span<const std::byte> buffer(bytes);
  CHECK(second.loadable() == TokenRange{16, 4});
  CHECK(
      refused([&] { scatter_kv(second, {0, 20}, b.cache, buffer); }) ==
      "range.begin = 0: expected positions within the sequence's loadable() range, from 16 to 20");
  CHECK(refused([&] {
          scatter_kv(second, {12, 1}, b.cache, buffer, {0, 20});
        }).find("range.begin = ") == 0);
  CHECK(refused([&] { second.mark_loaded({10, 6}); }) ==
        "range.begin = 10: expected positions that are this sequence's to write; another is to "
        "write position 10: take_over() first");
  CHECK(refused([&] { scatter_kv(a, {10, 2}, b.cache, buffer, {11, 20}); }).find("held = 11") == 0);
  CHECK(refused([&] {
          scatter_kv(a, {10, 2}, b.cache, buffer.first(8), {0, 20});
        }).find("buffer.size() = 8") == 0);
  CHECK(putter(a, {0, 10}, b.cache) == 100);
  CHECK(second.take_over() == 6);
  CHECK(second.loadable() == TokenRange{10, 10});
  CHECK(a.loadable().empty());
  CHECK(a.num_pending() == 6);
  second.mark_loaded({10, 10});
  CHECK(a.num_written() == 16);
  CHECK(a.num_pending() == 0);
  check_invariants(b.tree);
}

TEST_CASE("a resumed sequence is still its tenant's, with its public part and its priority") {
  Bench b(6);
  const InsertOptions options{
      .name_space = {.tenant = 7, .adapter = 2}, .public_length = 8, .priority = 5};
  auto s = b.tree.insert(iota(0, 20), options);
  compute(s, 20, b.cache, 100);
  const auto swapped = swap_out(s, b.cache);
  CHECK(swapped.options.name_space == options.name_space);
  CHECK(swapped.options.public_length == 8);
  CHECK(swapped.options.priority == 5);
  for (const bool evicted : {false, true}) {
    CAPTURE(evicted);
    if (evicted) b.evict_all();
    auto back = resume(b.tree, b.cache, swapped);
    REQUIRE(back);
    CHECK(back->options().name_space == options.name_space);
    CHECK(back->options().public_length == 8);
    CHECK(back->options().priority == 5);
    back->leave();
    CHECK(b.tree.match_prefix(iota(0, 20), options).cached == 20);
    for (const std::uint64_t tenant : {0u, 1u, 2u, 7u})
      for (const std::uint64_t adapter : {0u, 2u, 7u}) {
        if (tenant == 7 && adapter == 2) continue;
        const InsertOptions all{.name_space = {.tenant = tenant, .adapter = adapter}};
        CHECK(b.tree.match_prefix(iota(0, 20), all).cached == 0);
        InsertOptions part = all;
        part.public_length = 8;
        CHECK(b.tree.match_prefix(iota(0, 20), part).cached == (adapter == 2 ? 8u : 0u));
      }
  }
  // Its priority still keeps what it leaves: lower ones go first.
  {
    auto low = b.tree.insert(iota(500, 24), {.priority = 4});
    test::load(low);
  }
  {
    auto more = b.tree.insert(iota(900, 24), {.priority = 4});
    test::load(more);
  }
  CHECK(b.tree.match_prefix(iota(0, 20), options).cached == 20);
}

TEST_CASE("a preempted sequence that resumes is counted apart") {
  Bench b;
  const std::vector<int> prompt = iota(0, 160);
  auto s = b.tree.insert(prompt);
  compute(s, 159, b.cache, 1000);
  const InsertOptions options = s.options();
  s.leave();
  s = b.tree.insert(prompt, options);
  TreeStats stats = b.tree.stats();
  CHECK(stats.inserts == 2);
  CHECK(stats.prompt_tokens == 160);
  CHECK(stats.cached_tokens == 0);
  CHECK(stats.pending_tokens == 0);
  CHECK(stats.preempted_inserts == 1);
  CHECK(stats.preempted_tokens == 160);
  CHECK(stats.preempted_cached_tokens == 159);
  auto swapped = swap_out(s, b.cache);
  auto back = resume(b.tree, b.cache, swapped);
  REQUIRE(back);
  stats = b.tree.stats();
  CHECK(stats.prompt_tokens == 160);
  CHECK(stats.cached_tokens == 0);
  CHECK(stats.preempted_inserts == 2);
  CHECK(stats.preempted_tokens == 320);
  CHECK(stats.preempted_cached_tokens == 318);
  // What another has to compute is found, too; who is new is counted as ever.
  const std::vector<int> other = iota(1000, 40);
  const auto first = b.tree.insert(other);
  const auto second = b.tree.insert(other, {.preempted = true}), third = b.tree.insert(other);
  stats = b.tree.stats();
  CHECK(stats.prompt_tokens == 240);
  CHECK(stats.pending_tokens == 40);
  CHECK(stats.preempted_tokens == 360);
  CHECK(stats.preempted_cached_tokens == 318 + 40);
}

TEST_CASE("K/V beyond what is written, or beyond what a buffer holds, is refused") {
  Bench b;
  auto s = b.tree.insert(iota(0, 30));
  (void)b.cache.layer(0);
  std::vector<std::byte> ten(kv_bytes(b.cache, 10));
  CHECK(refused([&] { gather_kv(s, {0, 10}, b.cache, ten); }).starts_with("range.end() = 10"));
  CHECK(refused([&] { scatter_kv(s, {5, 10}, b.cache, ten, {0, 10}); }).starts_with("held = 0"));
  CHECK(s.num_written() == 0);
}

TEST_CASE("another tree's calls of clear() say nothing of a swapped sequence's K/V") {
  Bench from, to;
  from.tree.clear();
  auto s = from.tree.insert(iota(0, 20));
  compute(s, 20, from.cache, 100);
  const auto swapped = swap_out(s, from.cache);
  const auto back = resume(to.tree, to.cache, swapped);
  REQUIRE(back);
  CHECK(back->num_written() == 20);
  CHECK(putter(*back, {0, 20}, to.cache) == 100);
}
