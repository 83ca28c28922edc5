// What becomes of a tree of drafts: any branch can be accepted, its K/V gets to the path through
// whatever happens in between, and of the others nothing is left.
#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "chunkattn/debug/tree.hpp"
#include "support/draft_trees.hpp"
#include "support/steps.hpp"
#include "tests/support/retention.hpp"

using namespace chunkattn;
using namespace test;

namespace {

constexpr int dim = 8, heads = 2;

/// n tokens that no other call has given.
Tokens fresh_tokens(std::size_t n) {
  static int last = 100;
  const Tokens tokens = iota(last, n);
  last += static_cast<int>(n);
  return tokens;
}

/// One chat after its prompt, in a step that drafts a tree and has finished.
template <class T, int ChunkSize, class Retention = test::NoRetention>
struct Drafted {
  using Engine = DraftEngine<T, dim, ChunkSize, Retention>;
  Engine engine;
  typename Engine::Chat chat;
  Parents parents;
  Tokens drafts;
  std::optional<typename Engine::Tree::Finished> done;

  Drafted(std::size_t prompt, Parents tree, TreeOptions options = {})
      : engine(heads, 1, options),
        chat(engine.insert(fresh_tokens(prompt))),
        parents(std::move(tree)),
        drafts(fresh_tokens(parents.size())) {}

  void draft() {
    auto step = engine.tree.begin_step();
    REQUIRE(engine.add(step, chat, 1000, drafts, parents));
    (void)engine.build(step);
    done.emplace(engine.finish(std::move(step)));
  }
  void commit(std::int32_t leaf) {
    Tokens outputs = branch_tokens(parents, drafts, leaf);
    outputs.push_back(fresh_tokens(1)[0]);
    done->commit(*done->rows().begin(), outputs, leaf);
    done.reset();
    chat.tokens.insert(chat.tokens.end(), outputs.begin(), outputs.end());
  }
  void append(std::size_t n) {
    const Tokens turn = fresh_tokens(n);
    chat.sequence.append(turn);
    chat.tokens.insert(chat.tokens.end(), turn.begin(), turn.end());
  }
  /// A step that computes what is known of the chat.
  void decode() { engine.prefill({&chat}); }
  void check_content() {
    const std::size_t n = chat.tokens.size();
    CHECK(chat.sequence.tokens() == chat.tokens);
    REQUIRE(chat.sequence.num_written() == n);
    const bool same = engine.content(chat, n) == direct_content<T, dim>(chat.tokens, n, heads);
    CHECK(same);
  }
};

template <class T, int ChunkSize>
void accept_every_branch(Random& random) {
  const auto parents = random_parents(random, random.uniform(1, 20));
  const auto prompt = static_cast<std::size_t>(random.uniform(1, 3 * ChunkSize));
  CAPTURE(ChunkSize);
  CAPTURE(prompt);
  CAPTURE(parents.size());
  for (std::int32_t leaf = -1; leaf < static_cast<std::int32_t>(parents.size()); ++leaf) {
    CAPTURE(leaf);
    Drafted<T, ChunkSize> d(prompt, parents);
    d.draft();
    d.commit(leaf);
    chunkattn::check_invariants(d.engine.tree);
    d.decode();
    d.check_content();
    // After it a second tree, and a turn of the user's.
    d.append(1);
    d.draft();
    d.commit(random.uniform(-1, static_cast<int>(parents.size()) - 1));
    d.append(static_cast<std::size_t>(random.uniform(1, 40)));
    d.decode();
    d.check_content();
    chunkattn::check_invariants(d.engine.tree);
    d.chat.sequence.leave();
    CHECK(d.engine.tree.stats().used_chunks == 0);
  }
}

}  // namespace

TEST_CASE("every branch can be accepted, whatever the chunk borders") {
  Random random(1);
  for (int round = 0; round < scaled(8); ++round) {
    accept_every_branch<float, 4>(random);
    accept_every_branch<std::int8_t, 16>(random);
  }
}

TEST_CASE("rows on the main branch stay where they are, the others are copied") {
  // 0 ── 1 ── 2        the main branch
  // 3 ── 4
  // └─── 5
  const Parents parents{-1, 0, 1, -1, 3, 3};
  const auto copies_after = [&](std::int32_t leaf) {
    Drafted<float, 16> d(10, parents);
    d.draft();
    d.commit(leaf);
    auto step = d.engine.tree.begin_step();
    REQUIRE(d.engine.add(step, d.chat, 1000));
    const auto view = d.engine.build(step);
    std::int32_t rows = 0;
    for (std::int32_t i = 0; i < view.num_copies; ++i) rows += view.copies[i].length;
    return rows;
  };
  CHECK(copies_after(-1) == 0);
  CHECK(copies_after(0) == 0);
  CHECK(copies_after(2) == 0);
  CHECK(copies_after(3) == 1);
  CHECK(copies_after(5) == 2);
}

TEST_CASE("nothing that was rejected is found, nothing that was accepted is missed") {
  const Parents parents{-1, 0, -1, 2, 2};
  for (const std::int32_t leaf : {-1, 0, 1, 2, 3, 4}) {
    CAPTURE(leaf);
    Drafted<float, 4, RetentionOptions> d(6, parents);
    const Tokens prompt = d.chat.tokens;
    d.draft();
    d.commit(leaf);
    d.decode();
    const Tokens whole = d.chat.tokens;
    d.chat.sequence.leave();
    CHECK(d.engine.tree.match_prefix(whole).cached == whole.size());
    for (std::int32_t other = 0; other < 5; ++other) {
      Tokens path = prompt;
      const Tokens branch = branch_tokens(parents, d.drafts, other);
      path.insert(path.end(), branch.begin(), branch.end());
      std::size_t same = 0;
      while (same < path.size() && same + 1 < whole.size() && path[same] == whole[same]) ++same;
      CHECK(d.engine.tree.match_prefix(path).cached == same);
    }
    CHECK(d.engine.tree.stats().used_chunks == d.engine.tree.stats().retained_chunks);
  }
}

TEST_CASE(
    "a sequence that leaves before the accepted rows were copied leaves only what is written") {
  Drafted<float, 4, RetentionOptions> d(6, {-1, -1, 1});  // the main branch is 1, 2
  d.draft();
  d.commit(0);
  const Tokens whole = d.chat.tokens;
  CHECK(d.chat.sequence.num_written() == 6);
  d.chat.sequence.leave();
  chunkattn::check_invariants(d.engine.tree);
  CHECK(d.engine.tree.match_prefix(whole).cached == 6);
  CHECK(d.engine.tree.stats().leaving_sequences == 0);
}

TEST_CASE("accepted rows are copied however many steps that carried them were lost") {
  Random random(2);
  for (int round = 0; round < scaled(60); ++round) {
    Drafted<float, 8> d(static_cast<std::size_t>(random.uniform(1, 20)),
                        random_parents(random, random.uniform(2, 12)));
    d.draft();
    d.commit(random.uniform(0, static_cast<int>(d.parents.size()) - 1));
    auto other = d.engine.insert(Tokens(100, 99));
    std::vector<typename decltype(d)::Engine::Chat> forks;
    for (int lost = random.uniform(0, 3); lost > 0; --lost) {
      if (random.chance(0.4)) forks.push_back(d.engine.fork(d.chat));
      auto step = d.engine.tree.begin_step();
      REQUIRE(d.engine.add(step, random.chance(0.5) ? other : d.chat, 3));
      if (random.chance(0.5)) {
        (void)d.engine.build(step);
      } else {
        (void)d.engine.plan.build(step);
      }
      d.engine.paths.clear();
      if (random.chance(0.5)) {
        const auto cancelled = std::move(step);
      } else {
        {
          const auto abandoned = std::move(step).submit();
        }
        d.engine.tree.device_idle();
      }
      chunkattn::check_invariants(d.engine.tree);
    }
    d.decode();
    d.check_content();
    for (auto& fork : forks) {
      d.engine.prefill({&fork});
      const std::size_t n = fork.tokens.size();
      REQUIRE(fork.sequence.num_written() == n);
      const bool same =
          d.engine.content(fork, n) == direct_content<float, dim>(fork.tokens, n, heads);
      CHECK(same);
      fork.sequence.leave();
    }
    d.chat.sequence.leave();
    other.sequence.leave();
    d.engine.tree.device_idle();
    CHECK(d.engine.tree.stats().used_chunks == 0);
  }
}

TEST_CASE("a fork while a tree is in flight, and one before its branch was copied") {
  for (const std::int32_t leaf : {0, 2, 3}) {
    CAPTURE(leaf);
    Drafted<float, 8> d(20, {-1, 0, -1, 2});  // a long tail, which forks share
    d.engine.prefill({&d.chat});
    d.chat.sequence.append(7);
    d.chat.tokens.push_back(7);
    d.draft();
    auto early = d.engine.fork(d.chat);
    d.commit(leaf);
    auto late = d.engine.fork(d.chat);
    chunkattn::check_invariants(d.engine.tree);
    for (auto* chat : {&early, &late, &d.chat}) {
      chat->sequence.append(static_cast<int>(chat->tokens.size()));
      chat->tokens.push_back(static_cast<int>(chat->tokens.size()));
    }
    d.engine.prefill({&d.chat, &late, &early});
    for (auto* chat : {&early, &late, &d.chat}) {
      const std::size_t n = chat->tokens.size();
      REQUIRE(chat->sequence.num_written() == n);
      const bool same =
          d.engine.content(*chat, n) == direct_content<float, dim>(chat->tokens, n, heads);
      CHECK(same);
    }
  }
}

TEST_CASE("two tenants draft in one step: neither finds what the other has") {
  DraftEngine<float, dim, 4, RetentionOptions> engine(heads, 1);
  const Tokens prompt = fresh_tokens(5), drafts = fresh_tokens(4);
  const Parents parents{-1, -1, 0, 0};
  auto a = engine.insert(prompt, {.name_space = {.tenant = 1}});
  auto b = engine.insert(prompt, {.name_space = {.tenant = 2}});
  auto step = engine.tree.begin_step();
  REQUIRE(engine.add(step, a, 100, drafts, parents));
  REQUIRE(engine.add(step, b, 100, drafts, parents));
  (void)engine.build(step);
  auto done = engine.finish(std::move(step));
  for (const ScheduledSequence row : done.rows())
    if (row.sequence == a.sequence.id()) done.commit(row, Tokens{drafts[1], 9}, 1);
  a.tokens.insert(a.tokens.end(), {drafts[1], 9});
  engine.prefill({&a});
  a.sequence.leave();
  b.sequence.leave();
  const auto cached = [&](std::uint64_t tenant, int draft) {
    Tokens path = prompt;
    path.push_back(draft);
    return engine.tree.match_prefix(path, {.name_space = {.tenant = tenant}}).cached;
  };
  CHECK(cached(1, drafts[1]) == 6);
  CHECK(cached(1, drafts[0]) == 5);
  CHECK(cached(2, drafts[1]) == 5);
}
