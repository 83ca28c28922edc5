// Checkpoints of recurrent layers: where they are wanted, what a sequence finds, and how long they
// are kept. The "model" has one recurrent layer, whose state is a hash of all tokens so far.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "chunkattn/attention_plan.hpp"
#include "chunkattn/debug/tree.hpp"
#include "chunkattn/prefix_tree.hpp"
#include "tests/support/random.hpp"
#include "tests/support/steps.hpp"

using namespace chunkattn;
using test::iota;

namespace {

using Tokens = std::vector<int>;
using Tree = PrefixTree<int, 4, PoolAllocator, Lru>;

std::uint64_t advance(std::uint64_t state, int token) {
  return (state ^ static_cast<std::uint64_t>(token + 1)) * 0x9e3779b97f4a7c15u + 1;
}
std::uint64_t state_of(const Tokens& tokens, std::size_t length) {
  std::uint64_t state = 0;
  for (std::size_t p = 0; p < length; ++p) state = advance(state, tokens[p]);
  return state;
}
/// A beginning of `length` tokens of one prompt, then `more` others.
Tokens sibling(const Tokens& prompt, std::size_t length, int first, std::size_t more) {
  Tokens tokens(prompt.begin(), prompt.begin() + static_cast<std::ptrdiff_t>(length));
  for (const int token : iota(first, more)) tokens.push_back(token);
  return tokens;
}

/// A sequence, and the state of the recurrent layer behind what is computed of it.
template <class AnyTree>
struct Run {
  typename AnyTree::Sequence sequence;
  std::uint64_t state = 0;
  std::size_t started_at = 0, wanted = 0;

  Run(AnyTree& tree, const Tokens& prompt, const InsertOptions& options = {})
      : sequence(tree.insert(prompt, options)) {}
  void start() {
    const auto found = sequence.start_at_checkpoint();
    started_at = found.position;
    if (found.state) state = *static_cast<const std::uint64_t*>(found.state.get());
    CHECK(state == state_of(sequence.tokens(), started_at));
  }
  /// One step, which ends where a checkpoint is wanted. False where nothing was added.
  bool step(AnyTree& tree, std::size_t max_tokens = test::no_limit) {
    AttentionPlan plan;
    const std::size_t begin = sequence.num_scheduled(), next = sequence.next_checkpoint();
    auto step = tree.begin_step();
    if (!step.add(sequence, std::min(max_tokens, next - begin))) return false;
    static_cast<void>(plan.build(step));
    const std::size_t end = std::min(sequence.num_scheduled(), sequence.size());
    auto done = std::move(step).finished();
    for (std::size_t p = begin; p < end; ++p) state = advance(state, sequence.token(p));
    if (end == next) {
      ++wanted;
      CHECK(sequence.save_checkpoint(end, std::make_shared<const std::uint64_t>(state)));
    }
    for (const auto row : done.rows()) done.commit(row, 7);
    return true;
  }
  void prefill(AnyTree& tree, std::size_t max_tokens = test::no_limit) {
    start();
    const std::size_t size = sequence.size();
    while (sequence.size() == size) REQUIRE(step(tree, max_tokens));
    CHECK(state == state_of(sequence.tokens(), size));
    check_invariants(tree);
  }
};

template <class F>
void check_refused(const F& f, const std::string& text) {
  const std::string what = test::refused(f);
  CAPTURE(what);
  CHECK(what.find(text) != std::string::npos);
}

TreeOptions with_checkpoints(std::size_t max, std::int32_t per_path = 8,
                             TreeOptions::Sharing sharing = TreeOptions::Sharing::token) {
  return {.sharing = sharing, .max_checkpoints = max, .max_checkpoints_per_path = per_path};
}

}  // namespace

TEST_CASE("at every fork of a family, the third sibling resumes at the fork itself") {
  const Tokens prompt = iota(0, 30);
  for (const bool live : {false, true})  // whether the others are still there
    for (std::size_t fork = 1; fork <= prompt.size(); ++fork) {
      CAPTURE(fork);
      CAPTURE(live);
      Tree tree({.max_chunks = 10000}, with_checkpoints(10));
      std::optional<Run<Tree>> first(std::in_place, tree, prompt);
      first->prefill(tree, 7);
      CHECK(first->started_at == 0);
      if (!live) first.reset();
      std::optional<Run<Tree>> second(std::in_place, tree, sibling(prompt, fork, 100, 9));
      second->prefill(tree, 7);
      // The first one's is before its last token.
      CHECK(second->started_at == (fork >= prompt.size() - 1 ? prompt.size() - 1 : 0));
      if (!live) second.reset();
      const Tokens third = sibling(prompt, fork, 200, 9);
      CHECK(tree.match_prefix(third).cached == fork);
      CHECK(tree.match_prefix(third).checkpoint == fork);
      Run<Tree> last(tree, third);
      last.prefill(tree, 7);
      CHECK(last.started_at == fork);
    }
}

TEST_CASE("chunks that are shared as a whole part at chunks, and so do states") {
  using Whole = PrefixTree<int, 4, PoolAllocator, Lru>;
  const Tokens prompt = iota(0, 30);
  for (std::size_t fork = 4; fork < prompt.size(); ++fork) {
    CAPTURE(fork);
    Whole tree({.max_chunks = 10000}, with_checkpoints(10, 8, TreeOptions::Sharing::chunk));
    Run<Whole>(tree, prompt).prefill(tree);
    Run<Whole>(tree, sibling(prompt, fork, 100, 9)).prefill(tree);
    Run<Whole> last(tree, sibling(prompt, fork, 200, 9));
    last.prefill(tree);
    CHECK(last.started_at == fork - fork % 4);
  }
}

TEST_CASE("who computes saves the state at which one that waits goes on") {
  const Tokens prompt = iota(0, 40);
  Tree tree({.max_chunks = 10000}, with_checkpoints(10));
  Run<Tree> writer(tree, prompt);
  writer.start();
  CHECK(writer.step(tree, 8));
  CHECK(writer.sequence.next_checkpoint() == 39);
  Run<Tree> waiting(tree, sibling(prompt, 21, 100, 5));
  CHECK(waiting.sequence.num_pending() == 13);
  CHECK(writer.sequence.next_checkpoint() == 21);
  while (waiting.sequence.num_pending() > 0) CHECK(writer.step(tree, 8));
  waiting.prefill(tree);
  CHECK(waiting.started_at == 21);
  CHECK(waiting.sequence.num_written() == 26);
}

TEST_CASE("a prompt that comes again computes its last token only, and the next turn what is new") {
  Tree tree({.max_chunks = 10000}, with_checkpoints(10));
  const Tokens prompt = iota(0, 23);
  Tokens answered;
  {
    Run<Tree> chat(tree, prompt);
    chat.prefill(tree);
    for (int i = 0; i < 5; ++i) CHECK(chat.step(tree));
    CHECK(chat.wanted == 1);  // decoding wants none
    // The engine gives the state away that it has.
    const std::size_t written = chat.sequence.num_written();
    CHECK(written == 28);
    CHECK(
        chat.sequence.save_checkpoint(written, std::make_shared<const std::uint64_t>(chat.state)));
    answered = chat.sequence.tokens();
  }
  Run<Tree> again(tree, prompt);
  again.prefill(tree);
  CHECK(again.started_at == 22);
  Run<Tree> next(tree, sibling(answered, answered.size(), 500, 10));
  next.prefill(tree);
  CHECK(next.started_at == 28);
}

TEST_CASE("K/V that is there is not written again, and no other sequence sees a difference") {
  Tree tree({.max_chunks = 10000}, with_checkpoints(10));
  const Tokens prompt = iota(0, 20);
  Run<Tree>(tree, prompt).prefill(tree);
  Run<Tree> second(tree, sibling(prompt, 10, 100, 4));
  second.start();
  CHECK(second.sequence.num_cached() == 10);
  CHECK(second.sequence.num_uncomputed() == 14);
  AttentionPlan plan;
  auto step = tree.begin_step();
  CHECK(step.add(second.sequence, 12));
  const auto view = plan.build(step);
  CHECK(view.positions() == iota(0, 12));
  int written = 0;
  for (int row = 0; row < view.num_rows; ++row) written += view.writes[row].chunk != no_chunk;
  CHECK(written == 2);  // positions 10 and 11
}

TEST_CASE("a state lives as long as the tree or a sequence has it") {
  std::weak_ptr<const void> watched;
  const Tokens prompt = iota(0, 9);
  std::optional<Tree> tree(std::in_place, PoolAllocator{}, with_checkpoints(1));
  const auto save = [&](std::size_t position) {
    auto s = tree->insert(prompt);
    test::load(s);
    const auto state = std::make_shared<const int>(1);
    const bool kept = s.save_checkpoint(position, state);
    watched = state;
    return kept;
  };
  CHECK(save(5));
  CHECK(!watched.expired());
  CHECK(!save(5));  // there is one
  CHECK(watched.expired());
  CHECK(tree->stats().checkpoints == 1);
  CHECK(save(6));  // in its place
  CHECK(tree->stats().checkpoints == 1);
  CHECK(tree->stats().evicted_checkpoints == 1);
  auto reader = tree->insert(prompt);
  auto found = reader.start_at_checkpoint();
  CHECK(found.position == 6);
  tree->clear();
  CHECK(tree->stats().checkpoints == 0);
  CHECK(!watched.expired());
  CHECK(!reader.save_checkpoint(3, std::make_shared<const int>(1)));  // of the weights before
  CHECK(reader.next_checkpoint() == Tree::Sequence::whole);
  found = {};
  CHECK(watched.expired());
  CHECK(save(6));
  tree.reset();
  CHECK(watched.expired());
}

TEST_CASE("of all checkpoints those go that were not used for longest") {
  Tree tree({.max_chunks = 10000}, with_checkpoints(3));
  const auto prompt = [](int i) { return iota(100 * i, 10); };
  for (int i = 0; i < 3; ++i) Run<Tree>(tree, prompt(i)).prefill(tree);
  Run<Tree>(tree, prompt(0)).prefill(tree);  // used again
  Run<Tree>(tree, prompt(3)).prefill(tree);
  for (int i = 0; i < 4; ++i) {
    CAPTURE(i);
    CHECK(tree.match_prefix(prompt(i)).cached == 10);
    CHECK(tree.match_prefix(prompt(i)).checkpoint == (i == 1 ? 0u : 9u));
  }
}

TEST_CASE("a path has not more than it may, and keeps those where paths part") {
  Tree tree({.max_chunks = 10000}, with_checkpoints(1000, 3));
  Tokens chat = iota(0, 12);
  for (int other = 1; other <= 2; ++other)
    Run<Tree>(tree, sibling(chat, 8, 1000 * other, 6)).prefill(tree);
  for (int turn = 0; turn < 12; ++turn) {
    Run<Tree> run(tree, chat);
    run.prefill(tree);
    CHECK(tree.match_prefix(chat).checkpoint == chat.size() - 1);
    chat = sibling(chat, chat.size(), 100 * turn + 50, 6);
  }
  CHECK(tree.match_prefix(sibling(chat, 8, 5000, 3)).checkpoint == 8);
  std::size_t on_path = 0;
  for (std::size_t end = chat.size(); end > 0; --end)
    on_path += tree.match_prefix(sibling(chat, end, 5000, 1)).checkpoint == end;
  CHECK(on_path == 3);
}

TEST_CASE("a checkpoint between others counts for the paths below it, too") {
  Tree tree({.max_chunks = 10000}, with_checkpoints(1000, 2));
  const Tokens prompt = iota(0, 40);
  auto s = tree.insert(prompt);
  test::load(s);
  auto t = tree.insert(sibling(prompt, 20, 100, 10));
  test::load(t);
  const auto state = std::make_shared<const int>(1);
  CHECK(s.save_checkpoint(25, state));
  CHECK(s.save_checkpoint(30, state));
  CHECK(t.save_checkpoint(20, state));  // on the path of s as well
  check_invariants(tree);
  CHECK(tree.stats().checkpoints == 2);
  CHECK(tree.match_prefix(prompt).checkpoint == 30);
  CHECK(tree.match_prefix(sibling(prompt, 20, 100, 10)).checkpoint == 20);
}

TEST_CASE("checkpoints go with the K/V of their tokens, and not with others'") {
  Tree tree(PoolAllocator{.max_chunks = 10}, with_checkpoints(100));
  const Tokens prompt = iota(0, 40);
  {
    auto s = tree.insert(prompt, {.compute_last = false});
    test::load(s);
    for (std::size_t p = 2; p < 40; p += 5)
      CHECK(s.save_checkpoint(p, std::make_shared<const int>(1)));
  }
  for (std::size_t taken = 1; taken <= 10; ++taken) {
    auto other = tree.insert(iota(1000 * static_cast<int>(taken), 4 * taken));
    check_invariants(tree);
    const auto left = tree.match_prefix(prompt);
    CHECK(left.cached == 40 - 4 * taken);
    const std::size_t expected = left.cached < 2 ? 0 : (left.cached - 2) / 5 * 5 + 2;
    CHECK(left.checkpoint == expected);
    other.leave();  // nothing of it is written
  }
  CHECK(tree.stats().checkpoints == 0);
  CHECK(tree.stats().evicted_checkpoints == 0);  // not for others' sake
}

TEST_CASE("an answer that is dropped for an equal one leaves its checkpoints there") {
  Tree tree({.max_chunks = 10000}, with_checkpoints(100));
  const Tokens prompt = iota(0, 6);
  std::vector<Run<Tree>> twins;
  for (int i = 0; i < 2; ++i) {
    twins.emplace_back(tree, prompt);
    twins.back().prefill(tree);
  }
  for (auto& twin : twins)
    for (int i = 0; i < 9; ++i) CHECK(twin.step(tree));
  CHECK(twins[0].sequence.save_checkpoint(9, std::make_shared<const int>(1)));
  CHECK(twins[1].sequence.save_checkpoint(9, std::make_shared<const int>(1)));
  CHECK(twins[1].sequence.save_checkpoint(14, std::make_shared<const int>(1)));
  const Tokens all = twins[0].sequence.tokens();
  twins[0].sequence.leave();
  CHECK(tree.match_prefix(all).checkpoint == 9);
  twins[1].sequence.leave();
  check_invariants(tree);
  CHECK(tree.stats().merged_tokens == 9);
  CHECK(tree.match_prefix(all).checkpoint == 14);
  CHECK(tree.stats().checkpoints == 3);  // 5, 9, 14
}

TEST_CASE("tenants have checkpoints of their own, and public ones") {
  Tree tree({.max_chunks = 10000}, with_checkpoints(100));
  const Tokens prompt = iota(0, 24);
  const auto of = [](std::uint64_t tenant) {
    return InsertOptions{.name_space = {.tenant = tenant}, .public_length = 10};
  };
  Run<Tree>(tree, prompt, of(1)).prefill(tree);
  CHECK(tree.match_prefix(prompt, of(1)).checkpoint == 23);
  Run<Tree> other(tree, prompt, of(2));
  other.prefill(tree);
  CHECK(other.started_at == 10);  // where the public part ends
  CHECK(tree.match_prefix(prompt, {.name_space = {.tenant = 1}}).checkpoint == 0);
}

TEST_CASE("who wants his prompt's logits begins with a checkpoint before them") {
  Tree tree({.max_chunks = 10000}, with_checkpoints(100));
  const Tokens prompt = iota(0, 24);
  Run<Tree>(tree, sibling(prompt, 12, 100, 3)).prefill(tree);
  Run<Tree>(tree, prompt).prefill(tree);
  CHECK(tree.match_prefix(prompt, {.max_reuse = 18}).checkpoint == 12);
  Run<Tree> logits(tree, prompt, {.max_reuse = 18});
  logits.prefill(tree);
  CHECK(logits.started_at == 12);
}

TEST_CASE("a sequence that was truncated goes on at a checkpoint") {
  Tree tree({.max_chunks = 10000}, with_checkpoints(100));
  const Tokens prompt = iota(0, 24);
  Run<Tree>(tree, sibling(prompt, 12, 100, 3)).prefill(tree);
  Run<Tree> run(tree, prompt);
  run.prefill(tree);
  run.sequence.truncate(20);
  CHECK(run.sequence.num_uncomputed() == 1);
  run.state = 0;
  run.start();
  CHECK(run.started_at == 12);
  CHECK(run.sequence.num_uncomputed() == 8);
  run.prefill(tree);
}

TEST_CASE("what makes no sense is refused before anything changes") {
  Tree plain;
  auto s = plain.insert(iota(0, 8));
  test::load(s);
  const auto state = std::make_shared<const int>(1);
  check_refused([&] { static_cast<void>(s.save_checkpoint(4, state)); },
                "TreeOptions::max_checkpoints = 0");
  CHECK(s.next_checkpoint() == Tree::Sequence::whole);
  CHECK(s.start_at_checkpoint().position == 0);  // a cold start
  CHECK(s.num_uncomputed() == 8);
  check_refused([&] { static_cast<void>(Tree({}, with_checkpoints(4, 0))); },
                "max_checkpoints_per_path = 0");

  Tree tree({.max_chunks = 10000}, with_checkpoints(4));
  auto t = tree.insert(iota(0, 8));
  check_refused([&] { static_cast<void>(t.save_checkpoint(1, state)); },
                "position = 1: expected 1 to num_written(), 0");
  test::load(t);
  check_refused([&] { static_cast<void>(t.save_checkpoint(0, state)); }, "position = 0");
  check_refused([&] { static_cast<void>(t.save_checkpoint(9, state)); }, "position = 9");
  check_refused([&] { static_cast<void>(t.save_checkpoint(4, nullptr)); }, "state = null");
  auto u = tree.insert(iota(0, 9));
  auto step = tree.begin_step();
  CHECK(step.add(u));
  check_refused([&] { static_cast<void>(u.start_at_checkpoint()); }, "sequence = in a step");
  CHECK(tree.stats().checkpoints == 0);
}
