// Numbers at the ends of their types, K/V memory that does not fit the tree: clear errors, and
// nothing has changed.
#include <doctest/doctest.h>

#include <climits>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "chunkattn/cache/admission.hpp"
#include "chunkattn/chunkattn.hpp"
#include "chunkattn/debug/tree.hpp"
#include "chunkattn/transfer/transfer.hpp"
#include "tests/support/pages.hpp"
#include "tests/support/retention.hpp"
#include "tests/support/steps.hpp"

using namespace chunkattn;
using test::iota;
using test::refused;

namespace {

using Tree = PrefixTree<int, 4, PoolAllocator, test::NoRetention>;
using Cache = KvCache<Cpu, float>;
constexpr KvCacheOptions geometry{.num_layers = 2, .num_kv_heads = 1, .head_dim = 8};
constexpr std::size_t most = std::numeric_limits<std::size_t>::max();

bool starts(const std::string& text, const std::string& with) {
  if (text.find(with) != 0) MESSAGE("the text was: " << text);
  return text.find(with) == 0;
}

}  // namespace

TEST_CASE("chunks_needed saturates") {
  Tree tree;
  auto s = tree.insert(iota(0, 6));  // two slots are free
  CHECK(s.chunks_needed(0) == 0);
  CHECK(s.chunks_needed(2) == 0);
  CHECK(s.chunks_needed(3) == 1);
  CHECK(s.chunks_needed(most) == (most - 3) / 4 + 1);
  CHECK(s.chunks_needed(most - 1) <= s.chunks_needed(most));
  s.append(iota(6, 2));
  CHECK(s.chunks_needed(most) == most / 4 + 1);
}

TEST_CASE("what is reused so often that its count ends is reused no more") {
  constexpr std::uint32_t last = std::numeric_limits<std::uint32_t>::max();
  Tree tree;
  auto first = tree.insert(iota(0, 6));
  const SequenceId id = first.id();
  first.leave();
  auto& core = const_cast<detail::TreeCore&>(detail::TreeAccess::core(tree));
  core.sequences[0].generation = last - 2;  // as after so many sequences
  for (int i = 0; i < 5; ++i) {
    auto later = tree.insert(iota(0, 6));
    CHECK(later.id() != id);
    CHECK(!first.is_live());
    later.leave();
    CHECK(!first.is_live());
    CHECK(!later.is_live());
    check_invariants(tree);
  }
  CHECK(core.sequences.num_indices() == 2);
}

TEST_CASE("prompts of more tokens than an int counts") {
  constexpr std::size_t size = (std::size_t{1} << 31) + 5;
  const test::Pages zeros(size, /*writable=*/false);  // of which hardly any is read
  const std::span<const std::uint8_t> prompt(static_cast<const std::uint8_t*>(zeros.data()), size);
  PrefixTree<std::uint8_t, 4, PoolAllocator, test::NoRetention> tree;
  CHECK(tree.chunks_needed(prompt) == size / 4 + 1);
  CHECK(tree.chunks_needed(prompt.first(5)) == 2);
  const auto s = tree.insert(prompt.first(8), {.public_length = most});
  CHECK(tree.match_prefix(prompt, {.public_length = most}).pending == 8);
  CHECK(tree.match_prefix(prompt, {.public_length = size - 1}).pending == 8);
  CHECK(tree.chunks_needed(prompt, {.public_length = most}) == size / 4 - 1);
  CHECK(starts(refused([&] { (void)tree.insert(prompt); }), "prompt.size() = 2147483653"));
}

TEST_CASE("bytes of K/V beyond what an address can reach") {
  Cache cache(4, geometry);
  CHECK(kv_bytes(cache, 5) == 640);
  CHECK(starts(refused([&] { (void)kv_bytes(cache, (std::size_t{1} << 57) + 1); }),
               "length = 144115188075855873: expected "));
  CHECK(starts(refused([&] { (void)kv_bytes(cache, most); }), "length = 18446744073709551615"));
  std::vector<float> memory(2 << 10);
  const int big = 1 << 30;
  const auto view = [&](KvGeometry shape) {
    return refused([&] { (void)make_kv_view(memory.data(), memory.data() + (1 << 10), shape); });
  };
  CHECK(view({1, 1, 1, 8}) == "no error");
  CHECK(view({1 << 20, 64, 64, 1 << 10}) == "no error");
  CHECK(starts(view({big, big, big, 8}), "geometry.num_chunks = 1073741824"));
  CHECK(starts(view({0, big, 1 << 29, 8}), "geometry.num_chunks = 0"));
  CHECK(starts(view({1, 1 << 20, 1 << 20, 8, 1 << 26}), "geometry.num_chunks = 1"));
}

TEST_CASE("ranges at the ends of int, negative ones too") {
  Tree tree;
  Cache cache(tree, geometry);
  auto s = tree.insert(iota(0, 6));
  std::vector<std::byte> bytes(kv_bytes(cache, 6));
  const std::span<const std::byte> buffer(bytes);
  const auto check = [&](TokenRange range, const std::string& text) {
    CAPTURE(range.begin);
    CAPTURE(range.length);
    CHECK(starts(refused([&] { s.mark_loaded(range); }), text));
    CHECK(starts(refused([&] { s.for_each_run(range, [](const Piece&) { FAIL("called"); }); }),
                 text));
    CHECK(starts(refused([&] {
                   for_each_kv_span(s, range, cache, [](const KvSpan<float>&) { FAIL("called"); });
                 }),
                 text));
    CHECK(starts(refused([&] { gather_kv(s, range, cache, bytes); }), text));
    CHECK(starts(refused([&] { scatter_kv(s, range, cache, buffer); }), text));
    CHECK(starts(refused([&] { scatter_kv(s, range, cache, buffer, {0, 6}); }), text));
  };
  check({INT_MAX, INT_MAX}, "range.begin = 2147483647: expected ");
  check({INT_MAX, 0}, "range.begin = 2147483647: expected ");
  check({7, 1}, "range.begin = 7: expected ");
  check({-1, 3}, "range.begin = -1: expected ");
  check({-1, -1}, "range.begin = -1: expected ");
  check({INT_MIN, INT_MIN}, "range.begin = -2147483648: expected ");
  check({INT_MIN, INT_MAX}, "range.begin = -2147483648: expected ");
  check({0, INT_MAX}, "range.length = 2147483647: expected ");
  check({6, INT_MAX}, "range.length = 2147483647: expected ");
  check({2, -1}, "range.length = -1: expected ");
  check({6, INT_MIN}, "range.length = -2147483648: expected ");
  for (const TokenRange held : {TokenRange{INT_MAX, INT_MAX}, TokenRange{1, 6}, TokenRange{0, 5},
                                TokenRange{INT_MIN, INT_MAX}, TokenRange{-5, 6}})
    CHECK(starts(refused([&] { scatter_kv(s, {0, 6}, cache, buffer, held); }), "held"));
  CHECK(s.num_written() == 0);
  CHECK(s.loadable() == TokenRange{0, 6});
  check_invariants(tree);
}

TEST_CASE("budgets, drafts and lengths beyond what there can be") {
  Tree tree(PoolAllocator{.max_chunks = 100});
  AttentionPlan plan;
  auto s = tree.insert(iota(0, 6));
  {
    auto step = tree.begin_step();
    const ScheduledSequence row = step.add(s, most, {.count = 5}).row();
    CHECK(row.num_rows == 11);
    CHECK(row.num_drafts == 5);
  }
  {
    auto step = tree.begin_step();
    const ScheduledSequence row = step.add(s, 10, {.count = most}).row();
    CHECK(row.num_rows == 10);
    CHECK(row.num_drafts == 4);
  }
  {
    auto step = tree.begin_step();
    const ScheduledSequence row = step.add(s, 8, {.tokens = iota(50, 20)}).row();
    CHECK(row.num_drafts == 2);
    CHECK(plan.build(step).tokens() == std::vector<int>{0, 1, 2, 3, 4, 5, 50, 51});
  }
  {
    auto step = tree.begin_step();
    CHECK(step.add(s, 6, {.tokens = iota(50, 20)}).row().num_drafts == 0);
  }
  {
    auto step = tree.begin_step();
    const ScheduledSequence row =
        step.add(s, 3, {.tokens = iota(50, 20)}).row();  // it does not reach the end
    CHECK(row.num_drafts == 0);
    CHECK_FALSE(row.has_output);
    CHECK(s.num_reserved() == 0);
  }
  auto step = tree.begin_step();
  CHECK(starts(refused([&] { (void)step.add(s, most, {.count = most}); }),
               "tokens of the sequence = 6: expected at most 2^30"));
  const auto failed = tree.stats().failed_adds;
  CHECK(step.add(s, most, {.count = 1 << 29}).reason() == AddResult::Reason::out_of_chunks);
  CHECK(tree.stats().failed_adds == failed + 1);
  CHECK(starts(refused([&] { s.truncate(most); }), "length = 18446744073709551615: expected 1 to"));
  CHECK(s.num_reserved() == 0);
  CHECK(step.num_rows() == 0);

  auto t = tree.insert(iota(0, 6), {.public_length = most, .max_reuse = most});
  CHECK(t.options().public_length == 6);
  CHECK(t.chunks_needed(most) > 100);
  const std::vector<int> prompt = iota(30, 6);
  AdmissionQueue<Tree> waiting(most);
  waiting.push({prompt});
  waiting.push({prompt});
  CHECK_FALSE(waiting.admit(tree, most));
  const auto first = waiting.admit(tree, 90), second = waiting.admit(tree, 90);
  CHECK((first && second));
  check_invariants(tree);
}

TEST_CASE("K/V memory beyond what an address can reach is refused") {
  const auto make = [](KvCacheOptions options, int chunk_size, std::size_t chunks) {
    return refused([&] { Cache cache(chunk_size, options, chunks); });
  };
  const int big = 1 << 30;
  CHECK(starts(make({.num_layers = big, .num_kv_heads = big, .head_dim = 8}, 1, 1),
               "options.num_kv_heads = 1073741824: expected num_layers, num_kv_heads"));
  CHECK(starts(make({.num_layers = 1, .num_kv_heads = big, .head_dim = big}, 4, 1),
               "options.num_kv_heads = 1073741824"));
  CHECK(starts(make({.num_layers = INT_MAX, .num_kv_heads = INT_MAX, .head_dim = INT_MAX - 7},
                    INT_MAX, most),
               "options.num_kv_heads = 2147483647"));
  CHECK(starts(make(geometry, 4, most), "num_chunks = 18446744073709551615: expected at most"));
  CHECK(starts(make(geometry, 4, std::size_t{1} << 31), "num_chunks = 2147483648"));
  Cache cache(4, geometry, 3);
  CHECK(starts(refused([&] { cache.grow(most); }), "num_chunks = 18446744073709551615"));
  CHECK(starts(refused([&] { cache.grow(std::size_t{1} << 32); }), "num_chunks = 4294967296"));
  CHECK(cache.num_chunks() == 3);
  cache.grow(5);
  CHECK(cache.layer(1).num_chunks == 5);
  KvCache<Cpu, float> wide(1024, {.num_layers = 1 << 12, .num_kv_heads = 1 << 14, .head_dim = 8});
  CHECK(starts(refused([&] { wide.grow(1 << 24); }), "num_chunks = 16777216"));
}

TEST_CASE("K/V memory that was moved from") {
  Tree tree;
  auto s = tree.insert(iota(0, 6));
  Cache cache(tree, geometry);
  cache.layer(0).k_row(0, 0, 0)[0] = 7;
  Cache moved = std::move(cache);
  const std::string text = "layer = 0: expected a cache that was not moved from";
  CHECK(refused([&] { (void)cache.layer(0); }) == text);  // NOLINT(bugprone-use-after-move)
  CHECK(refused([&] { for_each_kv_span(s, {0, 6}, cache, [](const auto&) {}); }) == text);
  cache.poison(0);
  CHECK(moved.layer(0).k_row(0, 0, 0)[0] == 7);
  CHECK(
      starts(refused([&] { (void)moved.layer(2); }), "layer = 2: expected 0 to num_layers - 1, 1"));
  CHECK(starts(refused([&] { (void)moved.layer(-1); }),
               "layer = -1: expected 0 to num_layers - 1, 1"));
  cache = std::move(moved);
  CHECK(cache.layer(0).k_row(0, 0, 0)[0] == 7);
}

TEST_CASE("K/V memory follows its tree when it is moved, and stays when the tree is gone") {
  std::optional<Tree> tree(std::in_place);
  Cache cache(*tree, geometry);
  auto s = tree->insert(iota(0, 6));
  CHECK(cache.layer(0).num_chunks == 2);
  std::optional<Tree> moved(std::move(*tree));
  tree.reset();
  auto t = moved->insert(iota(100, 40));
  CHECK(cache.layer(0).num_chunks == 12);
  CHECK(cache.tree_id() == t.tree_id());
  const auto layer = cache.layer(1);
  layer.v_row(11, 0, 3)[7] = 5;
  moved.reset();
  CHECK(cache.num_chunks() == 12);
  CHECK(layer.v_row(11, 0, 3)[7] == 5);
  CHECK(starts(refused([&] { for_each_kv_span(s, {0, 6}, cache, [](const auto&) {}); }),
               "sequence = orphaned"));
  Tree next;
  auto other = next.insert(iota(0, 6));  // perhaps at the old one's address
  CHECK(starts(refused([&] { for_each_kv_span(other, {0, 6}, cache, [](const auto&) {}); }),
               "cache = of another tree: expected the K/V memory of the sequence's tree"));
}

TEST_CASE("K/V memory of another tree, of another chunk size, or too little of it") {
  Tree tree, other;
  Cache theirs(other, geometry);
  auto s = tree.insert(iota(0, 6));
  auto foreign = other.insert(iota(0, 60));
  std::vector<std::byte> bytes(kv_bytes(theirs, 6));
  const auto walk = [&](Cache& cache) {
    return refused(
        [&] { for_each_kv_span(s, {0, 6}, cache, [](const auto&) { FAIL("called"); }); });
  };
  CHECK(walk(theirs) == "cache = of another tree: expected the K/V memory of the sequence's tree");
  CHECK(starts(refused([&] { scatter_kv(s, {0, 6}, theirs, std::span<const std::byte>(bytes)); }),
               "cache = of another tree"));
  CHECK(starts(refused([&] { (void)swap_out(s, theirs); }), "cache = of another tree"));
  CHECK(s.is_live());
  Cache pages(16, geometry, 100), few(4, geometry, 1), enough(4, geometry, 2);
  CHECK(walk(pages) == "cache.chunk_size = 16: expected the ChunkSize of the sequence's tree");
  CHECK(starts(walk(few), "cache.num_chunks = 1: expected memory for every chunk of the sequence"));
  scatter_kv(s, {0, 6}, enough, std::span<const std::byte>(bytes));
  SwappedSequence<int> swapped{.tokens = iota(0, 6),
                               .written = 6,
                               .kv = std::vector<std::byte>(bytes.size()),
                               .options = {}};
  swapped.written = most;
  CHECK(starts(refused([&] { (void)resume(tree, enough, swapped); }),
               "swapped.written = 18446744073709551615: expected at most"));
  swapped.written = 5;
  CHECK(starts(refused([&] { (void)resume(tree, enough, swapped); }), "swapped.kv.size() = "));
  CHECK(tree.stats().live_sequences == 1);
}
