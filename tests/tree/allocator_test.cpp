// One conformance suite that every allocator passes: the library's two and users' own.
#include "chunkattn/allocator.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "chunkattn/debug/tree.hpp"
#include "chunkattn/prefix_tree.hpp"
#include "tests/support/random.hpp"
#include "tests/support/retention.hpp"
#include "tests/support/steps.hpp"

using namespace chunkattn;

namespace {

/// A user's own: always the lowest free index, so that the chunks in use stay dense.
class LowestFirstAllocator {
 public:
  explicit LowestFirstAllocator(std::size_t capacity) : used_(capacity) {}
  ChunkIndex allocate() {
    const auto it = std::find(used_.begin(), used_.end(), false);
    if (it == used_.end()) return no_chunk;
    *it = true;
    ++out_;
    const auto chunk = static_cast<std::size_t>(it - used_.begin());
    high_water_ = std::max(high_water_, chunk + 1);
    return static_cast<ChunkIndex>(chunk);
  }
  void free(ChunkIndex chunk) noexcept {
    used_[static_cast<std::size_t>(chunk)] = false;
    --out_;
  }
  [[nodiscard]] std::size_t capacity() const noexcept { return used_.size(); }
  [[nodiscard]] std::size_t available() const noexcept { return used_.size() - out_; }
  [[nodiscard]] std::size_t high_water() const noexcept { return high_water_; }

 private:
  std::vector<bool> used_;
  std::size_t out_ = 0, high_water_ = 0;
};
static_assert(ChunkAllocator<LowestFirstAllocator>);

/// Two allocators in a row: chunks below `first` come from one, the others from the other.
class TieredAllocator {
 public:
  TieredAllocator(std::size_t first, std::size_t second) : first_(first), second_(second) {}
  ChunkIndex allocate() {
    const ChunkIndex chunk = first_.allocate();
    if (chunk != no_chunk) return chunk;
    const ChunkIndex far = second_.allocate();
    return far == no_chunk ? no_chunk : far + static_cast<ChunkIndex>(first_.capacity());
  }
  void free(ChunkIndex chunk) noexcept {
    const auto border = static_cast<ChunkIndex>(first_.capacity());
    chunk < border ? first_.free(chunk) : second_.free(chunk - border);
  }
  [[nodiscard]] std::size_t capacity() const noexcept {
    return first_.capacity() + second_.capacity();
  }
  [[nodiscard]] std::size_t available() const noexcept {
    return first_.available() + second_.available();
  }
  [[nodiscard]] std::size_t high_water() const noexcept {
    return first_.capacity() + second_.high_water();
  }

 private:
  FixedAllocator first_;
  LowestFirstAllocator second_;
};
static_assert(ChunkAllocator<TieredAllocator>);

constexpr std::size_t budget = 37;

template <class A>
A make();
template <>
PoolAllocator make() {
  return PoolAllocator{.max_chunks = budget};
}
template <>
FixedAllocator make() {
  return FixedAllocator(budget);
}
template <>
LowestFirstAllocator make() {
  return LowestFirstAllocator(budget);
}
template <>
TieredAllocator make() {
  return TieredAllocator(20, budget - 20);
}

}  // namespace

TEST_CASE_TEMPLATE("an allocator hands out each chunk of its budget once", A, PoolAllocator,
                   FixedAllocator, LowestFirstAllocator, TieredAllocator) {
  test::Random random(1);
  A allocator = make<A>();
  REQUIRE(static_cast<std::size_t>(allocator.capacity()) == budget);
  REQUIRE(static_cast<std::size_t>(allocator.available()) == budget);
  std::set<ChunkIndex> out;
  std::size_t high_water = 0;
  for (int i = 0; i < 20000; ++i) {
    if (random.chance(i / 1000 % 2 == 0 ? 0.7 : 0.3)) {
      const ChunkIndex chunk = allocator.allocate();
      REQUIRE((chunk == no_chunk) == (out.size() == budget));
      if (chunk != no_chunk) {
        REQUIRE(chunk >= 0);
        REQUIRE(static_cast<std::size_t>(chunk) < static_cast<std::size_t>(allocator.high_water()));
        REQUIRE(out.insert(chunk).second);
      }
    } else if (!out.empty()) {
      auto it = out.begin();
      std::advance(it, static_cast<std::ptrdiff_t>(random.index(out.size())));
      allocator.free(*it);
      out.erase(it);
    }
    REQUIRE(static_cast<std::size_t>(allocator.available()) == budget - out.size());
    REQUIRE(static_cast<std::size_t>(allocator.high_water()) >= high_water);
    high_water = static_cast<std::size_t>(allocator.high_water());
    REQUIRE(high_water <= budget);
  }
}

TEST_CASE_TEMPLATE("an allocator moves with what it has handed out", A, PoolAllocator,
                   FixedAllocator, LowestFirstAllocator, TieredAllocator) {
  A first = make<A>();
  std::set<ChunkIndex> out;
  for (int i = 0; i < 5; ++i) out.insert(first.allocate());
  A second = std::move(first);
  for (std::size_t i = 5; i < budget; ++i) CHECK(out.insert(second.allocate()).second);
  CHECK(second.allocate() == no_chunk);
  for (const ChunkIndex chunk : out) second.free(chunk);
  CHECK(static_cast<std::size_t>(second.available()) == budget);
}

TEST_CASE_TEMPLATE("a tree over any allocator uses the whole budget and gives all back", A,
                   PoolAllocator, FixedAllocator, LowestFirstAllocator, TieredAllocator) {
  PrefixTree<int, 4, A, test::NoRetention> tree(make<A>());
  test::Random random(2);
  for (int round = 0; round < 20; ++round) {
    std::vector<typename PrefixTree<int, 4, A, test::NoRetention>::Sequence> live;
    for (int id = 0;; ++id) {
      const std::vector<int> prompt(static_cast<std::size_t>(random.uniform(1, 12)), id);
      const bool fits = tree.chunks_needed(prompt) <= tree.chunks_available();
      auto sequence = tree.try_insert(prompt);
      REQUIRE(sequence.has_value() == fits);
      check_invariants(tree);
      if (!sequence) break;
      live.push_back(std::move(*sequence));
    }
    while (tree.chunks_available() > 0)
      live.push_back(tree.insert(std::vector<int>{-1 - round, static_cast<int>(live.size())}));
    CHECK(tree.stats().used_chunks == budget);
    CHECK_THROWS_AS(live.push_back(tree.insert(std::vector<int>{77777})), OutOfChunks);
    random.shuffle(live);
    while (!live.empty()) {
      live.pop_back();
      check_invariants(tree);
    }
    CHECK(tree.stats().used_chunks == 0);
    CHECK(tree.chunks_available() == budget);
  }
}

TEST_CASE("the pool allocator without a budget grows on demand and reuses the warmest chunk") {
  PoolAllocator pool;
  CHECK(pool.capacity() == max_pool_chunks);
  CHECK(pool.high_water() == 0);
  for (int i = 0; i < 100; ++i) CHECK(pool.allocate() == i);
  CHECK(pool.high_water() == 100);
  pool.free(17);
  pool.free(3);
  CHECK(pool.allocate() == 3);
  CHECK(pool.allocate() == 17);
  CHECK(pool.allocate() == 100);
}

TEST_CASE("the fixed allocator knows its memory from the start") {
  FixedAllocator fixed(9);
  CHECK(fixed.high_water() == 9);
  CHECK(fixed.allocate() == 0);
  CHECK_THROWS_AS(FixedAllocator(0), InvalidArgument);
  try {
    FixedAllocator none(0);
    FAIL("no error");
  } catch (const InvalidArgument& error) {
    CHECK(std::string(error.what()) == "num_chunks = 0: expected between 1 and 2^31 - 1");
  }
}

namespace {

/// Throws at the call of allocate() that `countdown` names.
struct ThrowingAllocator {
  FixedAllocator chunks{64};
  int* countdown = nullptr;

  ChunkIndex allocate() {
    if (countdown != nullptr && (*countdown)-- == 0) throw std::runtime_error("no luck");
    return chunks.allocate();
  }
  void free(ChunkIndex chunk) noexcept { chunks.free(chunk); }
  [[nodiscard]] std::size_t capacity() const noexcept { return chunks.capacity(); }
  [[nodiscard]] std::size_t available() const noexcept { return chunks.available(); }
  [[nodiscard]] std::size_t high_water() const noexcept { return chunks.high_water(); }
};

}  // namespace

TEST_CASE("an allocator that throws: the operation has not happened") {
  int countdown = -1;
  using Tree = PrefixTree<int, 4, ThrowingAllocator, test::NoRetention>;
  Tree tree(ThrowingAllocator{.countdown = &countdown}, {.min_run = 4});
  auto a = tree.insert(std::vector<int>{1, 2, 3, 4, 5});
  a.append(6);
  a.mark_loaded(a.loadable());
  a.append(7);
  const std::vector<int> drafts(20, 1);
  std::vector<std::int32_t> parents;
  for (int i = 0; i < 20; ++i) parents.push_back(i < 4 ? -1 : i - 4);
  auto step = tree.begin_step();
  const std::vector<int> before = a.tokens();
  const auto unchanged = [&] {
    check_invariants(tree);
    CHECK(a.tokens() == before);
    CHECK(tree.stats().live_sequences == 1);
    CHECK(tree.stats().used_chunks == 2);
    CHECK(tree.chunks_available() == 62);
  };
  for (int at = 0; at < 3; ++at) {
    countdown = at;
    CHECK_THROWS_AS((void)tree.insert(std::vector<int>{1, 2, 3, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9}),
                    std::runtime_error);
    unchanged();
    countdown = at;
    CHECK_THROWS_AS((void)tree.try_insert(std::vector<int>(20, 8)), std::runtime_error);
    unchanged();
    countdown = at;
    CHECK_THROWS_AS((void)step.add(a, 100, {.tokens = drafts}), std::runtime_error);
    CHECK(step.num_sequences() == 0);
    unchanged();
    countdown =
        at;  // 15 of the drafts are in scratch slots, in 4 chunks, 5 on 6 slots of the sequence
    CHECK_THROWS_AS((void)step.add(a, 100, {.tokens = drafts, .parents = parents}),
                    std::runtime_error);
    CHECK(step.num_sequences() == 0);
    CHECK(tree.stats().leaving_sequences == 0);
    unchanged();
    countdown = 4;
    CHECK_THROWS_AS((void)step.add(a, 100, {.tokens = drafts, .parents = parents}),
                    std::runtime_error);
    unchanged();
    countdown = at;
    CHECK_THROWS_AS((void)a.try_append(drafts), std::runtime_error);
    unchanged();
    countdown = at;
    CHECK_THROWS_AS(a.append(drafts), std::runtime_error);
    unchanged();
  }
  countdown = 0;
  CHECK_THROWS_AS((void)a.fork(), std::runtime_error);
  unchanged();
  countdown = -1;
  auto fork = a.fork();
  check_invariants(tree);
  CHECK(fork.tokens() == before);
}

namespace {

/// Answers `lie` at the call of allocate() that `countdown` names.
struct LyingAllocator {
  struct Script {
    int countdown = -1;
    ChunkIndex lie = 0;
    std::vector<ChunkIndex> freed;
  };
  FixedAllocator chunks{64};
  Script* script = nullptr;

  ChunkIndex allocate() {
    if (script->countdown-- == 0) return script->lie;
    return chunks.allocate();
  }
  void free(ChunkIndex chunk) noexcept {
    script->freed.push_back(chunk);
    chunks.free(chunk);
  }
  [[nodiscard]] std::size_t capacity() const noexcept { return chunks.capacity(); }
  [[nodiscard]] std::size_t available() const noexcept { return chunks.available(); }
  [[nodiscard]] std::size_t high_water() const noexcept { return chunks.high_water(); }
};

}  // namespace

TEST_CASE("an allocator that answers what is no free chunk is named, and nothing has changed") {
  using Tree = PrefixTree<int, 4, LyingAllocator>;
  LyingAllocator::Script script;
  script.freed.reserve(1000);
  Tree tree(LyingAllocator{.script = &script}, {.min_run = 4});
  auto a = tree.insert(std::vector<int>{1, 2, 3, 4, 5});  // chunks 0 and 1
  a.mark_loaded(a.loadable());
  a.append(6);
  a.append(7);
  {
    auto cached = tree.insert(std::vector<int>{8, 8, 8, 8});  // chunk 2, of no sequence from now on
    cached.mark_loaded(cached.loadable());
  }
  const std::vector<int> before = a.tokens(), fresh(20, 9);
  auto step = tree.begin_step();
  const auto refused = [&](ChunkIndex lie, int countdown, const std::string& why,
                           const auto& operation) {
    CAPTURE(lie);
    CAPTURE(countdown);
    script.lie = lie;
    script.countdown = countdown;
    script.freed.clear();
    CHECK(test::refused(operation) ==
          "allocator.allocate() = " + std::to_string(lie) + ": expected " + why);
    script.countdown = -1;
    // What it had answered rightly it has back; what it should not have answered was not given.
    CHECK(script.freed.size() == static_cast<std::size_t>(countdown));
    CHECK(tree.chunks_available() == 62);
    CHECK(a.tokens() == before);
    CHECK(a.num_reserved() == 0);
    CHECK(step.num_rows() == 0);
    CHECK(tree.stats().live_sequences == 1);
    CHECK(tree.stats().leaving_sequences == 0);
    CHECK(tree.stats().used_chunks == 3);
    CHECK(tree.match_prefix(std::vector<int>{8, 8, 8, 8}).cached == 4);
    check_invariants(tree);
  };
  const auto everywhere = [&](ChunkIndex lie, int countdown, const std::string& why) {
    refused(lie, countdown, why, [&] { (void)tree.insert(fresh); });
    refused(lie, countdown, why, [&] { (void)tree.try_insert(fresh); });
    refused(lie, countdown, why, [&] { a.append(fresh); });
    refused(lie, countdown, why, [&] { (void)step.add(a, 100, {.tokens = fresh}); });
    if (countdown == 0) refused(lie, countdown, why, [&] { (void)a.fork(); });
  };
  const std::string range = "a chunk from 0 on, below its high_water(), 64, or no_chunk, -1";
  for (const int countdown : {0, 1, 3}) {
    for (const ChunkIndex lie : {-2, -1000000, 64, 0x7fffffff}) everywhere(lie, countdown, range);
    everywhere(0, countdown, "a free chunk; the tree has this one already");  // of a live sequence
    everywhere(2, countdown, "a free chunk; the tree has this one already");  // cached
  }
  // Twice in one call.
  const ChunkIndex next = [&] {
    auto other = tree.insert(std::vector<int>{70});
    ChunkIndex chunk = no_chunk;
    other.for_each_run({0, 1}, [&](const Piece& piece) { chunk = piece.chunk; });
    return chunk;
  }();
  for (const int countdown : {1, 3})
    everywhere(next, countdown, "a free chunk; the tree has this one already");

  auto fork = a.fork();  // it all works once the allocator does
  auto b = tree.insert(fresh);
  REQUIRE(step.add(b, 100, {.tokens = fresh}));
  check_invariants(tree);
}
