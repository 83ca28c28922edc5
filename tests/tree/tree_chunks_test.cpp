// Forks keep the number of chunks bounded: beam search, parallel sampling, tree of thoughts. Chunks
// stay within ChunkSize / min_run of the need plus one tail per sequence.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <numeric>
#include <set>
#include <utility>
#include <vector>

#include "chunkattn/attention_plan.hpp"
#include "chunkattn/debug/tree.hpp"
#include "chunkattn/prefix_tree.hpp"
#include "tests/support/random.hpp"
#include "tests/support/retention.hpp"
#include "tests/support/steps.hpp"

using namespace chunkattn;

namespace {

constexpr int chunk_size = 16;
using Tree = PrefixTree<int, chunk_size, PoolAllocator, test::NoRetention>;

struct Search {
  explicit Search(int min_run_) : min_run(min_run_), tree({}, {.min_run = min_run_}) {}

  /// Every beam continues.
  void step() {
    test::decode(tree, plan, beams, [&](const ScheduledSequence&) { return token(); });
    check();
  }

  /// Each surviving beam is a continuation of a random one, as top-k over all beams gives.
  void select(std::size_t width) {
    const auto done = test::run_step(tree, plan, beams);
    std::vector<Tree::Sequence> next;
    for (std::size_t i = 0; i < width; ++i) {
      next.push_back(beams[random.index(1 + random.index(beams.size()))].fork());
      next.back().append(token());
    }
    beams = std::move(next);
    check();
  }

  int token() { return random.uniform(0, 50000); }

  /// The need: distinct (chunk, offset) slots that live paths hold, in full chunks.
  void check() {
    check_invariants(tree);
    std::set<std::pair<ChunkIndex, int>> slots;
    for (auto& s : beams)
      s.for_each_run({0, static_cast<int>(s.size())}, [&](const Piece& piece) {
        for (int i = 0; i < piece.length; ++i) slots.emplace(piece.chunk, piece.begin + i);
      });
    const std::size_t need = (slots.size() + chunk_size - 1) / chunk_size;
    // A run of min_run or more tokens takes ceil(length / chunk_size) chunks: at a length of
    // chunk_size + 1 that is two, so the factor is at least 2. Sequences that left stay while they
    // are copied.
    const std::size_t ratio =
        std::max<std::size_t>(2, static_cast<std::size_t>(chunk_size / min_run));
    const TreeStats stats = tree.stats();
    const std::size_t sequences = stats.live_sequences + stats.leaving_sequences;
    worst = std::max(worst, static_cast<std::int64_t>(stats.used_chunks) -
                                static_cast<std::int64_t>(ratio * need + sequences));
  }

  void start(std::size_t prompt_length) {
    std::vector<int> prompt(prompt_length);
    std::iota(prompt.begin(), prompt.end(), 0);
    beams.push_back(tree.insert(prompt));
  }

  int min_run;
  Tree tree;
  AttentionPlan plan;
  std::vector<Tree::Sequence> beams;
  test::Random random{7};
  std::int64_t worst = -1000;  // chunks above the bound
};

}  // namespace

TEST_CASE("beam search: chunks stay bounded while beams fork and drop at each step") {
  for (const int min_run : {4, 8, 16}) {
    CAPTURE(min_run);
    Search search(min_run);
    search.start(37);
    for (int step = 0; step < 300; ++step) search.select(8);
    CHECK(search.worst <= 0);
    CHECK(search.tree.stats().forks_copied > 0);
    search.beams.clear();
    check_invariants(search.tree);
    CHECK(search.tree.stats().used_chunks == 0);
    CHECK(search.tree.stats().leaving_sequences == 0);
  }
}

TEST_CASE("parallel sampling: the prompt is held once") {
  Search search(8);
  search.start(160);
  {
    const auto prefill = test::run_step(search.tree, search.plan, search.beams);
    while (search.beams.size() < 32) search.beams.push_back(search.beams[0].fork());
  }
  CHECK(search.tree.stats().used_chunks == 10);
  CHECK(search.tree.stats().copied_tokens == 0);
  for (auto& s : search.beams) s.append(search.token());
  for (int step = 0; step < 40; ++step) search.step();
  CHECK(search.tree.stats().used_chunks == 10 + 32 * 3);
  CHECK(search.worst <= 0);
}

TEST_CASE("tree of thoughts: branch deep, prune, continue") {
  for (const int min_run : {4, 8}) {
    Search search(min_run);
    search.start(50);
    for (int level = 0; level < 25; ++level) {
      const std::size_t n = search.beams.size();
      for (std::size_t i = 0; i < n; ++i)
        for (int k = 0; k < 2; ++k) search.beams.push_back(search.beams[i].fork());
      const int thought = search.random.uniform(1, 30);
      for (int t = 0; t < thought; ++t) search.step();
      search.random.shuffle(search.beams);
      while (search.beams.size() > 5) search.beams.pop_back();
      search.check();
    }
    CHECK(search.worst <= 0);
  }
}

TEST_CASE("chunks that are freed go to the sink: any callable, until there is none") {
  Tree tree;
  std::vector<ChunkIndex> freed;
  const auto free_one = [&] {
    freed.clear();
    tree.insert({1, 2, 3}).leave();
    return freed.size();
  };
  const auto sink = [&](ChunkIndex chunk) { freed.push_back(chunk); };
  CHECK(free_one() == 0);
  tree.set_free_sink(sink);
  CHECK(free_one() == 1);
  tree.set_free_sink({});
  CHECK(free_one() == 0);
  tree.set_free_sink(std::function<void(ChunkIndex)>(sink));
  CHECK(free_one() == 1);
  tree.set_free_sink(std::function<void(ChunkIndex)>());
  CHECK(free_one() == 0);
}
