// Several groups of layers with windows: resumed and admitted as one.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <set>
#include <type_traits>
#include <utility>
#include <vector>

#include "chunkattn/attention_plan.hpp"
#include "chunkattn/cache/windowed_groups.hpp"
#include "chunkattn/debug/tree.hpp"
#include "chunkattn/prefix_tree.hpp"
#include "tests/support/random.hpp"
#include "tests/support/refused.hpp"
#include "tests/support/steps.hpp"

using namespace chunkattn;
using test::refused;

namespace {

template <class Tree>
class WindowedModel {
 public:
  using Sequence = typename Tree::Sequence;
  using Options = typename WindowedGroups<Tree>::Options;

  Tree tree;
  WindowedGroups<Tree> groups;
  AttentionPlan plan;

  WindowedModel(std::size_t tree_chunks, const std::vector<Options>& options, TreeOptions how = {})
      : tree({.max_chunks = tree_chunks}, how), groups(tree, options) {}

  /// The next rows of a sequence. False where the tree has no chunk for the output, or the groups
  /// none for the rows.
  bool compute(Sequence& sequence, std::size_t rows, int output = 5000) {
    auto step = tree.begin_step();
    if (!step.add(sequence, rows)) {
      REQUIRE(tree.chunks_available() == 0);
      return false;
    }
    const auto view = plan.build(step);
    if (!groups.has_room(step)) return false;
    for (std::size_t i = 0; i < groups.size(); ++i) (void)groups[i].view(view);
    auto finished = std::move(step).finish();
    for (const auto& row : finished.rows()) return finished.commit(row, output), true;
    return true;
  }
  void check() {
    check_invariants(tree);
    for (std::size_t i = 0; i < groups.size(); ++i)
      REQUIRE(detail::WindowAccess::group(groups[i]).is_consistent());
  }
};

std::vector<int> tokens_like(test::Random& random, const std::vector<std::vector<int>>& texts,
                             int max_size) {
  std::vector<int> tokens(static_cast<std::size_t>(random.uniform(1, max_size)));
  for (int& token : tokens) token = random.uniform(0, 1);
  if (!texts.empty() && random.chance(0.8)) {
    const auto& text = texts[random.index(texts.size())];
    std::copy_n(text.begin(), random.index(std::min(text.size(), tokens.size()) + 1),
                tokens.begin());
  }
  return tokens;
}

/// The chunks that no other sequence holds, of a window and a step's rows wherever that begins.
template <class Sequence>
std::size_t most_taken(const Sequence& sequence, std::size_t reads, std::size_t rows,
                       const std::vector<char>& held) {
  std::vector<ChunkIndex> chunk_at(sequence.size());
  sequence.for_each_run({0, static_cast<std::int32_t>(sequence.size())}, [&](const Piece& piece) {
    std::fill_n(chunk_at.begin() + piece.position, piece.length, piece.chunk);
  });
  std::size_t most = 0;
  for (std::size_t next = sequence.num_scheduled(); next < sequence.size(); ++next) {
    std::set<ChunkIndex> taken;
    for (std::size_t p = next - std::min(next, reads); p < std::min(sequence.size(), next + rows);
         ++p)
      if (const auto c = static_cast<std::size_t>(chunk_at[p]); c >= held.size() || !held[c])
        taken.insert(chunk_at[p]);
    most = std::max(most, taken.size());
  }
  return most;
}

/// Admits prompts at random, each computed before the next one joins; some of them stay, or decode.
template <int ChunkSize>
void admit(int stream, const TreeOptions& how, const std::vector<int>& windows,
           std::size_t max_chunks, std::size_t& num_refused, std::size_t& num_exact) {
  using Tree = PrefixTree<int, ChunkSize>;
  test::Random random(static_cast<std::uint64_t>(stream));
  std::vector<typename WindowedModel<Tree>::Options> options;
  for (const int window : windows) options.push_back({.window = window, .max_chunks = max_chunks});
  WindowedModel<Tree> model(60 * 64 / ChunkSize, options, how);
  auto& groups = model.groups;
  std::vector<typename Tree::Sequence> live;
  std::vector<std::vector<int>> texts;
  for (int i = test::scaled(150); i > 0; --i) {
    const auto prompt = tokens_like(random, texts, 600);
    texts.push_back(prompt);
    const auto rows = static_cast<std::size_t>(random.uniform(1, 100));
    InsertOptions join{.compute_last = random.chance(0.8), .share_pending = random.chance(0.8)};
    if (random.chance(0.1)) join.max_reuse = random.index(prompt.size());
    const auto needed = groups.chunks_needed(prompt, rows, join);
    std::vector<std::size_t> before, lowest;
    bool fits = model.tree.chunks_needed(prompt, join) <= model.tree.chunks_available();
    for (std::size_t g = 0; g < groups.size(); ++g) {
      lowest.push_back(groups[g].chunks_available());
      fits = fits && needed[g] <= lowest[g];
      before.push_back(groups[g].stats().used_chunks);
    }
    before.push_back(model.tree.stats().used_chunks);
    const auto found = groups.find(prompt, join);
    std::vector<std::vector<char>> held(groups.size());  // by chunk of the tree
    for (std::size_t g = 0; g < groups.size(); ++g)
      for (std::size_t c = 0; c < model.tree.num_chunks(); ++c)
        held[g].push_back(
            detail::WindowAccess::group(groups[g]).search().is_held(static_cast<ChunkIndex>(c)));
    const auto tree_evicted = model.tree.stats().evicted_chunks;
    auto sequence = groups.try_insert(model.tree, prompt, rows, join);
    REQUIRE(sequence.has_value() == fits);
    model.check();
    if (!sequence) {
      ++num_refused;
      CHECK(model.tree.stats().used_chunks == before.back());
      for (std::size_t g = 0; g < groups.size(); ++g)
        CHECK(groups[g].stats().used_chunks == before[g]);
      if (!live.empty()) std::swap(live.back(), live[random.index(live.size())]), live.pop_back();
      continue;
    }
    REQUIRE(sequence->num_pending() == 0);
    CHECK(groups.is_ready(*sequence));
    CHECK(sequence->num_scheduled() <= found);
    for (std::size_t g = 0; g < groups.size(); ++g) {
      const std::size_t start = sequence->num_scheduled();
      CHECK(groups[g].window_end(*sequence, start) == start);
      // What the tree evicts for the prompt may leave it more room in its first chunk.
      const auto most =
          most_taken(*sequence, static_cast<std::size_t>(windows[g]) - 1, rows, held[g]);
      CHECK(needed[g] >= most);
      CHECK(needed[g] <= most + 1);
      if (model.tree.stats().evicted_chunks == tree_evicted && start < prompt.size())
        num_exact += needed[g] == most;
    }
    const auto available = lowest;
    const auto look = [&] {
      for (std::size_t g = 0; g < groups.size(); ++g)
        lowest[g] = std::min(lowest[g], groups[g].chunks_available());
    };
    look();
    const bool whole_steps = random.chance(0.5);
    while (sequence->num_uncomputed() > 0 && sequence->size() == prompt.size()) {
      const std::size_t most = std::min(rows, sequence->num_uncomputed());
      const bool has_run = model.compute(*sequence, whole_steps ? most : 1 + random.index(most));
      REQUIRE((has_run || model.tree.chunks_available() == 0));
      look();
      if (!has_run) break;
    }
    for (std::size_t g = 0; g < groups.size(); ++g) {
      CHECK(available[g] - lowest[g] <= needed[g]);
    }
    model.check();
    for (int n = random.uniform(0, 40); n > 0 && sequence->num_uncomputed() == 1; --n)
      if (!model.compute(*sequence, 1, random.uniform(0, 1))) break;
    if (random.chance(0.4)) live.push_back(std::move(*sequence));
  }
}

static_assert(!std::is_copy_constructible_v<WindowedGroups<PrefixTree<int, 16>>>);

}  // namespace

TEST_CASE("a prompt that was admitted is computed, whatever its steps, and takes what was said") {
  std::size_t num_refused = 0, num_exact = 0;
  admit<16>(1, {}, {40, 100}, 40, num_refused, num_exact);
  admit<16>(2, {}, {1}, 20, num_refused, num_exact);
  admit<64>(3, {}, {100, 7, 300}, 14, num_refused, num_exact);
  admit<4>(4, {.min_run = 1}, {13}, 60, num_refused, num_exact);
  admit<16>(5, {.sharing = TreeOptions::Sharing::chunk}, {50}, 30, num_refused, num_exact);
  CHECK(num_refused > 0);
  CHECK(num_exact > 0);
}

TEST_CASE("a prompt needs its window and the rows of its steps") {
  using Tree = PrefixTree<int, 16>;
  WindowedModel<Tree> model(1000, {{.window = 33, .max_chunks = 100}});
  const auto prompt = test::iota(0, 1000);
  const auto needed = [&](std::size_t rows) {
    return model.groups.chunks_needed(prompt, rows).at(0);
  };
  CHECK(needed(1) == 3);  // 33 positions that begin in a chunk's last slot
  CHECK(needed(16) == 4);
  CHECK(needed(18) == 5);
  CHECK(needed(5000) == 63);
  CHECK(needed(std::numeric_limits<std::size_t>::max()) == 63);
  CHECK(model.groups.chunks_needed({}, 16).at(0) == 0);
  auto one = model.groups.try_insert(model.tree, prompt, 16);
  REQUIRE(one);
  while (one->num_uncomputed() > 0 && one->size() == 1000) REQUIRE(model.compute(*one, 16));
  CHECK(needed(16) == 0);  // a live sequence holds all of it
  one.reset();
  CHECK(needed(16) == 3);  // cached, and so available
}

TEST_CASE("the last token of a prompt needs its window, one that is not computed again none") {
  using Tree = PrefixTree<int, 16>;
  WindowedModel<Tree> model(1000, {{.window = 33, .max_chunks = 100}});
  const auto prompt = test::iota(0, 112);  // of 32 keys: from 79 on at 111, from 80 on at 112
  {
    auto one = model.groups.try_insert(model.tree, prompt, 16);
    while (one->size() == 112) REQUIRE(model.compute(*one, 16));
  }
  CHECK(model.groups.chunks_needed(prompt, 16).at(0) == 3);
  CHECK(model.groups.chunks_needed(prompt, 16, {.compute_last = false}).at(0) == 2);
}

TEST_CASE("a prompt of which nothing is computed again needs no chunk for a window of one key") {
  using Tree = PrefixTree<int, 16>;
  WindowedModel<Tree> model(1000, {{.window = 1, .max_chunks = 100}});
  const auto prompt = test::iota(0, 20);
  {
    auto one = model.groups.try_insert(model.tree, prompt, 16);
    while (one->size() == 20) REQUIRE(model.compute(*one, 16));
  }
  CHECK(model.groups.chunks_needed(prompt, 16).at(0) == 1);
  CHECK(model.groups.chunks_needed(prompt, 16, {.compute_last = false}).at(0) == 0);
}

TEST_CASE("prompts are resumed in their own namespace") {
  using Tree = PrefixTree<int, 16>;
  WindowedModel<Tree> model(1000, {{.window = 20, .max_chunks = 100}});
  const auto prompt = test::iota(0, 80);
  const InsertOptions other{.name_space = 7};
  {
    auto one = model.groups.try_insert(model.tree, prompt, 16, other);
    while (one->size() == 80) REQUIRE(model.compute(*one, 16));
  }
  CHECK(model.groups.find(prompt) == 0);
  CHECK(model.groups.find(prompt, other) == 80);
  CHECK(model.groups.chunks_needed(prompt, 1).at(0) == 3);
  CHECK(model.groups.chunks_needed(prompt, 1, other).at(0) == 2);
}

TEST_CASE("a prompt needs no chunk for what fits behind the one that it goes on from") {
  using Tree = PrefixTree<int, 16>;
  WindowedModel<Tree> model(1000, {{.window = 33, .max_chunks = 2}});
  {
    auto one = model.groups.try_insert(model.tree, test::iota(0, 20), 20);
    while (one->size() == 20) REQUIRE(model.compute(*one, 20));
  }
  CHECK(model.groups.chunks_needed(test::iota(0, 32), 32).at(0) == 2);
  CHECK(model.groups.chunks_needed(test::iota(0, 33), 32).at(0) == 3);
  CHECK_FALSE(model.groups.try_insert(model.tree, test::iota(0, 33), 32));
  auto two = model.groups.try_insert(model.tree, test::iota(0, 32), 32);
  REQUIRE(two);
  while (two->num_uncomputed() > 0 && two->size() == 32) REQUIRE(model.compute(*two, 32));
}

TEST_CASE("a prompt needs a chunk for the room that the tree makes behind what it shares") {
  using Tree = PrefixTree<int, 16>;
  WindowedModel<Tree> model(4, {{.window = 1, .max_chunks = 100}});
  for (const int first : {0, 100}) {
    auto one = model.groups.try_insert(model.tree, test::iota(first, 30), 30);
    REQUIRE(one);
    while (one->size() == 30) REQUIRE(model.compute(*one, 30));
  }
  auto prompt = test::iota(0, 20);
  prompt.resize(52, 5000);
  const std::size_t needed = model.groups.chunks_needed(prompt, 52).at(0);
  auto two = model.groups.try_insert(model.tree, prompt, 52);  // what follows 0 to 19 goes for it
  REQUIRE(two);
  REQUIRE(two->num_scheduled() == 20);
  const std::size_t before = model.groups[0].chunks_available();
  REQUIRE(model.compute(*two, 52));
  std::size_t num_chunks = 0;
  two->for_each_run({20, 32}, [&](const Piece&) { ++num_chunks; });
  CHECK(num_chunks == 3);  // 12 slots of a chunk that is there, and two chunks
  CHECK(needed == 3);
  CHECK(before <= model.groups[0].chunks_available() + needed);
}

TEST_CASE("a prompt that waits for nobody needs chunks for what others are to compute") {
  using Tree = PrefixTree<int, 16>;
  WindowedModel<Tree> model(1000, {{.window = 33, .max_chunks = 5}});
  const auto prompt = test::iota(0, 48);
  auto one = model.groups.try_insert(model.tree, prompt, 20);
  REQUIRE(model.compute(*one, 20));
  const InsertOptions alone{.share_pending = false};
  // 16 to 19 are held; what comes after them is in chunks of its own.
  CHECK(model.groups.chunks_needed(prompt, 48, alone).at(0) == 2);
  auto two = model.groups.try_insert(model.tree, prompt, 48, alone);
  REQUIRE(two);
  REQUIRE(two->num_scheduled() == 20);
  const std::size_t before = model.groups[0].stats().used_chunks;
  REQUIRE(model.compute(*two, 48));
  CHECK(model.groups[0].stats().peak_used_chunks == before + 2);
}

TEST_CASE("a prompt that waits for another is resumed when that has computed it") {
  using Tree = PrefixTree<int, 16>;
  WindowedModel<Tree> model(1000,
                            {{.window = 33, .max_chunks = 9}, {.window = 70, .max_chunks = 9}});
  const auto prompt = test::iota(0, 100);
  auto one = model.groups.try_insert(model.tree, prompt, 50);
  auto two = model.groups.try_insert(model.tree, test::iota(0, 101), 50);
  REQUIRE((one && two));
  CHECK_FALSE(model.groups.is_ready(*two));
  CHECK(refused([&] { model.groups.resume(*two); }).starts_with("num_pending() = 100: expected 0"));
  while (one->size() == 100) REQUIRE(model.compute(*one, 50));
  CHECK(model.groups.resume(*two) == 100);
  CHECK(model.groups.is_ready(*two));
}

TEST_CASE("where a group lacks chunks, no group is resumed") {
  using Tree = PrefixTree<int, 16>;
  // A fork's copies take chunks: one, of each group. The second has none left.
  WindowedModel<Tree> model(1000,
                            {{.window = 40, .max_chunks = 9}, {.window = 40, .max_chunks = 3}});
  auto one = model.groups.try_insert(model.tree, test::iota(0, 32 + 5), 37);
  REQUIRE(one);
  for (int i = 0; i < 3; ++i) REQUIRE(model.compute(*one, 37, i));
  auto twin = one->fork();
  const auto stats = model.groups[0].stats();
  const auto scheduled = twin.num_scheduled();
  CHECK_THROWS_AS((void)model.groups.resume(twin), const OutOfChunks&);
  CHECK(twin.num_scheduled() == scheduled);
  CHECK(model.groups[0].stats().used_chunks == stats.used_chunks);
  CHECK(model.groups[0].stats().recomputed_tokens == stats.recomputed_tokens);
  CHECK_FALSE(model.groups[0].is_ready(twin));
  model.check();
}

TEST_CASE("groups of different windows are resumed where all have theirs") {
  using Tree = PrefixTree<int, 16>;
  WindowedModel<Tree> model(1000,
                            {{.window = 20, .max_chunks = 100}, {.window = 60, .max_chunks = 100}});
  const auto prompt = test::iota(0, 200);
  {
    auto one = model.groups.try_insert(model.tree, prompt, 200);
    while (one->size() == 200) REQUIRE(model.compute(*one, 30));
  }
  // Of 199 the windows stay, by whole chunks: from 176 and from 128 on.
  auto shorter = prompt;
  shorter.resize(196);
  CHECK(model.groups[0].find(shorter) == 196);
  CHECK(model.groups[1].find(shorter) == 196);
  shorter.resize(186);
  shorter.push_back(5);
  CHECK(model.groups[0].find(shorter) == 0);
  CHECK(model.groups[1].find(shorter) == 0);
  CHECK(model.groups.find(shorter) == 0);
  shorter.resize(190);
  std::copy_n(prompt.begin(), 190, shorter.begin());
  shorter.resize(195);
  const auto near = model.groups[0].find(shorter), far = model.groups[1].find(shorter);
  CHECK(model.groups.find(shorter) == std::min(near, far));
  auto two = model.groups.try_insert(model.tree, shorter, 200);
  REQUIRE(two);
  CHECK(two->num_scheduled() == std::min(near, far));
}

TEST_CASE("a position is one that all groups have, also those that were asked first") {
  using Tree = PrefixTree<int, 16>;
  // Of the first group a window stays at the end alone, of the second one at 55, too.
  WindowedModel<Tree> model(1000, {{.window = 20, .max_chunks = 100, .max_cached_chunks = 2},
                                   {.window = 40, .max_chunks = 100}});
  const auto prompt = test::iota(0, 200);
  const auto parting_at = [&](std::size_t at) {
    std::vector<int> other(prompt.begin(), prompt.begin() + static_cast<std::ptrdiff_t>(at));
    other.push_back(5000);
    return other;
  };
  {
    auto one = model.groups.try_insert(model.tree, prompt, 200);
    auto two = model.tree.insert(parting_at(55));
    while (one->size() == 200) REQUIRE(model.compute(*one, 30));
  }
  const auto other = parting_at(196);
  REQUIRE(model.groups[0].find(other) == 196);
  REQUIRE(model.groups[1].find(other) > 20);
  REQUIRE(model.groups[1].find(other) < 190);
  CHECK(model.groups.find(other) == 0);
  auto three = model.groups.try_insert(model.tree, other, 200);
  REQUIRE(three);
  CHECK(three->num_scheduled() == 0);
  for (std::size_t i = 0; i < 2; ++i)
    CHECK(model.groups[i].window_end(*three, three->num_scheduled()) == three->num_scheduled());
}

TEST_CASE("a model without windows has no group, one with windows alone no K/V of the tree") {
  using Tree = PrefixTree<int, 16>;
  WindowedModel<Tree> model(10, {});
  CHECK(model.groups.size() == 0);
  auto one = model.groups.try_insert(model.tree, test::iota(0, 100), 7);
  REQUIRE(one);
  CHECK(model.groups.is_ready(*one));
  CHECK(model.groups.resume(*one) == 0);
  while (one->size() == 100) REQUIRE(model.compute(*one, 7));
  CHECK(model.groups.find(test::iota(0, 100)) == 100);
  CHECK_FALSE(model.groups.try_insert(model.tree, test::iota(200, 100), 7));
}

TEST_CASE("what groups refuse") {
  using Tree = PrefixTree<int, 16>;
  WindowedModel<Tree> model(10, {{.window = 20, .max_chunks = 100}});
  Tree other;
  CHECK(refused([&] { (void)model.groups.try_insert(other, test::iota(0, 9), 7); }) ==
        "tree = another: expected that of the groups");
  CHECK(refused([&] { (void)model.groups.try_insert(model.tree, test::iota(0, 9), 0); }) ==
        "max_tokens = 0: expected at least 1 row");
  CHECK(refused([&] { (void)model.groups.try_insert(model.tree, std::vector<int>{}, 1); }) ==
        "prompt.size() = 0: expected at least one token");
  CHECK(refused([&] { (void)model.groups[1]; }) == "group = 1: expected below size(), 1");
  CHECK(model.tree.stats().inserts == 0);
  std::optional<Tree> tree(std::in_place);
  WindowedGroups<Tree> groups(*tree, {{.window = 20, .max_chunks = 100}});
  tree.reset();
  CHECK(refused([&] {
          (void)groups.find(test::iota(0, 9));
        }).starts_with("windowed groups = orphaned"));
}
