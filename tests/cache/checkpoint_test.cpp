// Checkpoints of recurrent layers: where they are wanted, what a sequence finds, and how long they
// are kept. The "model" has one recurrent layer, whose state is a hash of all tokens so far.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "chunkattn/attention_plan.hpp"
#include "chunkattn/cache/checkpoints.hpp"
#include "chunkattn/debug/tree.hpp"
#include "chunkattn/prefix_tree.hpp"
#include "tests/support/random.hpp"
#include "tests/support/steps.hpp"

using namespace chunkattn;
using test::iota;

namespace {

using Tokens = std::vector<int>;
using Tree = PrefixTree<int, 4>;

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

/// A tree with checkpoints.
template <class AnyTree>
struct Cache {
  AnyTree tree;
  Checkpoints<AnyTree> states;

  explicit Cache(typename Checkpoints<AnyTree>::Options options, std::size_t max_chunks = 10000,
                 TreeOptions::Sharing sharing = TreeOptions::Sharing::token)
      : tree({.max_chunks = max_chunks}, {.sharing = sharing}), states(tree, options) {}
};

/// A sequence, and the state of the recurrent layer after what is computed of it.
template <class AnyTree>
struct Run {
  Cache<AnyTree>& in;
  typename AnyTree::Sequence sequence;
  std::uint64_t state = 0;
  std::size_t started_at = 0, wanted = 0;

  Run(Cache<AnyTree>& cache, const Tokens& prompt, const InsertOptions& options = {})
      : in(cache), sequence(cache.tree.insert(prompt, options)) {}
  void start() {
    const auto found = in.states.resume(sequence);
    started_at = found.position;
    if (found.state) state = *static_cast<const std::uint64_t*>(found.state.get());
    CHECK(state == state_of(sequence.tokens(), started_at));
  }
  /// One step, which ends where a checkpoint is wanted. False where nothing was added.
  bool step(std::size_t max_tokens = test::no_limit) {
    AttentionPlan plan;
    const std::size_t begin = sequence.num_scheduled(), next = in.states.next(sequence);
    auto step = in.tree.begin_step();
    if (!step.add(sequence, std::min(max_tokens, next - begin))) return false;
    static_cast<void>(plan.build(step));
    const std::size_t end = std::min(sequence.num_scheduled(), sequence.size());
    auto done = std::move(step).finish();
    for (std::size_t p = begin; p < end; ++p) state = advance(state, sequence.token(p));
    if (end == next) {
      ++wanted;
      CHECK(in.states.save(sequence, end, std::make_shared<const std::uint64_t>(state)));
    }
    for (const auto row : done.rows()) done.commit(row, 7);
    return true;
  }
  void prefill(std::size_t max_tokens = test::no_limit) {
    start();
    const std::size_t size = sequence.size();
    while (sequence.size() == size) REQUIRE(step(max_tokens));
    CHECK(state == state_of(sequence.tokens(), size));
    check_invariants(in.tree);
  }
};

template <class F>
void check_refused(const F& f, const std::string& text) {
  const std::string what = test::refused(f);
  CAPTURE(what);
  CHECK(what.find(text) != std::string::npos);
}

}  // namespace

TEST_CASE("at every fork of a family, the third sibling resumes at the fork itself") {
  const Tokens prompt = iota(0, 30);
  for (const bool live : {false, true})  // whether the others are still there
    for (std::size_t fork = 1; fork <= prompt.size(); ++fork) {
      CAPTURE(fork);
      CAPTURE(live);
      Cache<Tree> cache({.max_count = 10});
      std::optional<Run<Tree>> first(std::in_place, cache, prompt);
      first->prefill(7);
      CHECK(first->started_at == 0);
      if (!live) first.reset();
      std::optional<Run<Tree>> second(std::in_place, cache, sibling(prompt, fork, 100, 9));
      second->prefill(7);
      // The first one's is before its last token.
      CHECK(second->started_at == (fork >= prompt.size() - 1 ? prompt.size() - 1 : 0));
      if (!live) second.reset();
      const Tokens third = sibling(prompt, fork, 200, 9);
      CHECK(cache.tree.match_prefix(third).cached == fork);
      CHECK(cache.states.find(third) == fork);
      Run<Tree> last(cache, third);
      last.prefill(7);
      CHECK(last.started_at == fork);
    }
}

TEST_CASE("chunks that are shared as a whole part at chunks, and so do states") {
  using Whole = PrefixTree<int, 4>;
  const Tokens prompt = iota(0, 30);
  for (std::size_t fork = 4; fork < prompt.size(); ++fork) {
    CAPTURE(fork);
    Cache<Whole> cache({.max_count = 10}, 10000, TreeOptions::Sharing::chunk);
    Run<Whole>(cache, prompt).prefill();
    Run<Whole>(cache, sibling(prompt, fork, 100, 9)).prefill();
    Run<Whole> last(cache, sibling(prompt, fork, 200, 9));
    last.prefill();
    CHECK(last.started_at == fork - fork % 4);
  }
}

TEST_CASE("the sequence that computes saves the state at which a waiting one continues") {
  const Tokens prompt = iota(0, 40);
  Cache<Tree> cache({.max_count = 10});
  Run<Tree> writer(cache, prompt);
  writer.start();
  CHECK(writer.step(8));
  CHECK(cache.states.next(writer.sequence) == 39);
  Run<Tree> waiting(cache, sibling(prompt, 21, 100, 5));
  CHECK(waiting.sequence.num_pending() == 13);
  CHECK(cache.states.next(writer.sequence) == 21);
  while (waiting.sequence.num_pending() > 0) CHECK(writer.step(8));
  waiting.prefill();
  CHECK(waiting.started_at == 21);
  CHECK(waiting.sequence.num_written() == 26);
}

TEST_CASE("a prompt that comes again computes its last token only, and the next turn what is new") {
  Cache<Tree> cache({.max_count = 10});
  const Tokens prompt = iota(0, 23);
  Tokens answered;
  {
    Run<Tree> chat(cache, prompt);
    chat.prefill();
    for (int i = 0; i < 5; ++i) CHECK(chat.step());
    CHECK(chat.wanted == 1);  // decoding wants none
    // The engine gives the state away that it has.
    const std::size_t written = chat.sequence.num_written();
    CHECK(written == 28);
    CHECK(cache.states.save(chat.sequence, written,
                            std::make_shared<const std::uint64_t>(chat.state)));
    answered = chat.sequence.tokens();
  }
  Run<Tree> again(cache, prompt);
  again.prefill();
  CHECK(again.started_at == 22);
  Run<Tree> next(cache, sibling(answered, answered.size(), 500, 10));
  next.prefill();
  CHECK(next.started_at == 28);
}

TEST_CASE("K/V that is there is not written again, and no other sequence sees a difference") {
  Cache<Tree> cache({.max_count = 10});
  const Tokens prompt = iota(0, 20);
  Run<Tree>(cache, prompt).prefill();
  Run<Tree> second(cache, sibling(prompt, 10, 100, 4));
  second.start();
  CHECK(second.sequence.num_cached() == 10);
  CHECK(second.sequence.num_uncomputed() == 14);
  AttentionPlan plan;
  auto step = cache.tree.begin_step();
  CHECK(step.add(second.sequence, 12));
  const auto view = plan.build(step);
  CHECK(view.positions() == iota(0, 12));
  int written = 0;
  for (int row = 0; row < view.num_rows; ++row) written += view.writes[row].chunk != no_chunk;
  CHECK(written == 2);  // positions 10 and 11
}

TEST_CASE("a state lives as long as it is kept, or a sequence has found it") {
  std::weak_ptr<const void> watched;
  const Tokens prompt = iota(0, 9);
  std::optional<Cache<Tree>> cache(Checkpoints<Tree>::Options{.max_count = 1});
  const auto save = [&](std::size_t position) {
    auto s = cache->tree.insert(prompt);
    test::load(s);
    const auto state = std::make_shared<const int>(1);
    const bool kept = cache->states.save(s, position, state);
    watched = state;
    return kept;
  };
  CHECK(save(5));
  CHECK(!watched.expired());
  CHECK(!save(5));  // there is one
  CHECK(watched.expired());
  CHECK(cache->states.stats().count == 1);
  CHECK(save(6));  // it replaces that one
  CHECK(cache->states.stats().count == 1);
  CHECK(cache->states.stats().evicted == 1);
  auto reader = cache->tree.insert(prompt);
  auto found = cache->states.resume(reader);
  CHECK(found.position == 6);
  cache->tree.clear();
  CHECK(cache->states.stats().count == 0);
  CHECK(!watched.expired());
  CHECK(!cache->states.save(reader, 3, std::make_shared<const int>(1)));  // of the weights before
  CHECK(cache->states.next(reader) == Tree::Sequence::whole);
  found = {};
  CHECK(watched.expired());
  CHECK(save(6));
  cache.reset();
  CHECK(watched.expired());
}

TEST_CASE("the tree and its checkpoints may end in any order") {
  const Tokens prompt = iota(0, 9);
  std::weak_ptr<const void> watched;
  const auto save = [&](Checkpoints<Tree>& states, Tree::Sequence& s) {
    const auto state = std::make_shared<const int>(1);
    CHECK(states.save(s, 4, state));
    watched = state;
  };
  std::optional<Tree> tree(std::in_place);
  auto s = tree->insert(prompt);
  test::load(s);
  std::optional<Checkpoints<Tree>> first(std::in_place, *tree, Checkpoints<Tree>::Options{1});
  save(*first, s);
  first.reset();
  CHECK(watched.expired());
  // The tree continues without it: with more nodes, and some that are split.
  std::vector<Tree::Sequence> others;
  for (int i = 0; i < 40; ++i) others.push_back(tree->insert(sibling(prompt, 3, 100 * i + 50, 5)));
  check_invariants(*tree);

  Checkpoints<Tree> states(*tree, {.max_count = 4});  // of a tree that has nodes
  CHECK(states.find(prompt) == 0);
  save(states, s);
  CHECK(states.find(prompt) == 4);
  Tree moved = std::move(*tree);
  CHECK(states.find(prompt) == 4);
  check_refused([&] { Checkpoints<Tree>(*tree, {.max_count = 1}); }, "tree = moved-from");
  tree.reset();
  tree = std::move(moved);
  CHECK(states.find(prompt) == 4);
  tree.reset();
  CHECK(states.stats().count == 1);
  check_refused([&] { static_cast<void>(states.find(prompt)); }, "checkpoints = orphaned");
  check_refused([&] { static_cast<void>(states.next(s)); }, "checkpoints = orphaned");
  check_refused([&] { static_cast<void>(states.resume(s)); }, "checkpoints = orphaned");
  check_refused([&] { static_cast<void>(states.save(s, 3, std::make_shared<int>(1))); },
                "checkpoints = orphaned");
}

TEST_CASE("several have states, budgets and orders of their own") {
  Tree tree;
  Checkpoints one(tree, {.max_count = 100, .max_per_path = 1});
  Checkpoints<Tree> other(tree, {.max_count = 2, .max_per_path = 3});
  const Tokens prompt = iota(0, 20);
  auto s = tree.insert(prompt);
  test::load(s);
  const auto state = std::make_shared<const int>(1);
  for (const std::size_t position : {8u, 12u, 16u}) {
    CHECK(one.save(s, position, state));
    CHECK(other.save(s, position + 1, state));
    check_invariants(tree);
  }
  CHECK(one.stats().count == 1);
  CHECK(one.stats().evicted == 2);
  CHECK(other.stats().count == 2);
  CHECK(other.stats().evicted == 1);
  auto t = tree.insert(sibling(prompt, 14, 100, 3));  // splits what both have
  CHECK(one.find(prompt) == 16);
  CHECK(one.find(t.tokens()) == 0);
  CHECK(other.find(prompt) == 17);
  CHECK(other.find(t.tokens()) == 13);
  CHECK(other.resume(t).position == 13);
  check_invariants(tree);
  tree.clear();
  CHECK(one.stats().count + other.stats().count == 0);
}

TEST_CASE("of all checkpoints those go that were not used for longest") {
  Cache<Tree> cache({.max_count = 3});
  const auto prompt = [](int i) { return iota(100 * i, 10); };
  for (int i = 0; i < 3; ++i) Run<Tree>(cache, prompt(i)).prefill();
  Run<Tree>(cache, prompt(0)).prefill();  // used again
  Run<Tree>(cache, prompt(3)).prefill();
  for (int i = 0; i < 4; ++i) {
    CAPTURE(i);
    CHECK(cache.tree.match_prefix(prompt(i)).cached == 10);
    CHECK(cache.states.find(prompt(i)) == (i == 1 ? 0u : 9u));
  }
  // To save one that is there is to use it.
  const auto s = cache.tree.insert(prompt(2));
  CHECK_FALSE(cache.states.save(s, 9, std::make_shared<const std::uint64_t>(1)));
  Run<Tree>(cache, prompt(4)).prefill();
  for (int i = 0; i < 5; ++i) {
    CAPTURE(i);
    CHECK(cache.states.find(prompt(i)) == (i < 2 ? 0u : 9u));
  }
}

TEST_CASE("a path has not more than it may, and keeps those where paths part") {
  Cache<Tree> cache({.max_count = 1000, .max_per_path = 3});
  Tokens chat = iota(0, 12);
  for (int other = 1; other <= 2; ++other)
    Run<Tree>(cache, sibling(chat, 8, 1000 * other, 6)).prefill();
  for (int turn = 0; turn < 12; ++turn) {
    Run<Tree> run(cache, chat);
    run.prefill();
    CHECK(cache.states.find(chat) == chat.size() - 1);
    chat = sibling(chat, chat.size(), 100 * turn + 50, 6);
  }
  CHECK(cache.states.find(sibling(chat, 8, 5000, 3)) == 8);
  std::size_t on_path = 0;
  for (std::size_t end = chat.size(); end > 0; --end)
    on_path += cache.states.find(sibling(chat, end, 5000, 1)) == end;
  CHECK(on_path == 3);
}

TEST_CASE("a checkpoint between others counts for the paths through it, too") {
  Cache<Tree> cache({.max_count = 1000, .max_per_path = 2});
  const Tokens prompt = iota(0, 40);
  auto s = cache.tree.insert(prompt);
  test::load(s);
  auto t = cache.tree.insert(sibling(prompt, 20, 100, 10));
  test::load(t);
  const auto state = std::make_shared<const int>(1);
  CHECK(cache.states.save(s, 25, state));
  CHECK(cache.states.save(s, 30, state));
  CHECK(cache.states.save(t, 20, state));  // on the path of s as well
  check_invariants(cache.tree);
  CHECK(cache.states.stats().count == 2);
  CHECK(cache.states.find(prompt) == 30);
  CHECK(cache.states.find(sibling(prompt, 20, 100, 10)) == 20);
}

TEST_CASE("they go in whichever order, and no path has too many") {
  test::Random random(test::run_seed());
  Cache<Tree> cache({.max_count = 12, .max_per_path = 3}, 200);
  const auto any_prompt = [&] {  // parts from others of its family anywhere
    const int family = random.uniform(0, 5);
    return sibling(iota(1000 * family, 20), static_cast<std::size_t>(random.uniform(0, 20)),
                   random.uniform(100, 102), static_cast<std::size_t>(random.uniform(1, 10)));
  };
  std::vector<Tree::Sequence> live;
  for (int i = 0; i < 1000; ++i) {
    live.push_back(cache.tree.insert(any_prompt()));
    test::load(live.back());
    auto& s = live[random.index(live.size())];
    const std::size_t position = 1 + random.index(s.size());
    static_cast<void>(cache.states.save(s, position, std::make_shared<const int>(1)));
    check_invariants(cache.tree);
    Tokens tokens = s.tokens();
    tokens.resize(position);
    CHECK(cache.states.find(tokens) == position);
    if (live.size() > 6) {
      std::swap(s, live.back());
      live.pop_back();
    }
    check_invariants(cache.tree);
  }
}

TEST_CASE("what is saved is kept, also in place of one where paths part") {
  Cache<Tree> cache({.max_count = 1000, .max_per_path = 1});
  const Tokens prompt = iota(0, 40);
  auto s = cache.tree.insert(prompt);
  test::load(s);
  auto t = cache.tree.insert(sibling(prompt, 20, 100, 10));
  const auto state = std::make_shared<const int>(1);
  CHECK(cache.states.save(s, 20, state));
  CHECK(cache.states.save(s, 30, state));
  CHECK(cache.states.find(prompt) == 30);
  CHECK(cache.states.find(t.tokens()) == 0);
}

TEST_CASE("checkpoints go with the K/V of their tokens, and not with others'") {
  Cache<Tree> cache({.max_count = 100}, 10);
  const Tokens prompt = iota(0, 40);
  {
    auto s = cache.tree.insert(prompt, {.compute_last = false});
    test::load(s);
    for (std::size_t p = 2; p < 40; p += 5)
      CHECK(cache.states.save(s, p, std::make_shared<const int>(1)));
  }
  for (std::size_t taken = 1; taken <= 10; ++taken) {
    auto other = cache.tree.insert(iota(1000 * static_cast<int>(taken), 4 * taken));
    check_invariants(cache.tree);
    const auto left = cache.tree.match_prefix(prompt);
    CHECK(left.cached == 40 - 4 * taken);
    const std::size_t expected = left.cached < 2 ? 0 : (left.cached - 2) / 5 * 5 + 2;
    CHECK(cache.states.find(prompt) == expected);
    other.leave();  // nothing of it is written
  }
  CHECK(cache.states.stats().count == 0);
  CHECK(cache.states.stats().evicted == 0);  // not for others' sake
}

TEST_CASE("an answer that is dropped for an equal one leaves its checkpoints there") {
  Cache<Tree> cache({.max_count = 100});
  const Tokens prompt = iota(0, 6);
  std::vector<Run<Tree>> runs;
  for (int i = 0; i < 2; ++i) {
    runs.emplace_back(cache, prompt);
    runs.back().prefill();
  }
  for (auto& run : runs)
    for (int i = 0; i < 9; ++i) CHECK(run.step());
  CHECK(cache.states.save(runs[0].sequence, 9, std::make_shared<const int>(1)));
  CHECK(cache.states.save(runs[1].sequence, 9, std::make_shared<const int>(1)));
  CHECK(cache.states.save(runs[1].sequence, 14, std::make_shared<const int>(1)));
  const Tokens all = runs[0].sequence.tokens();
  runs[0].sequence.leave();
  CHECK(cache.states.find(all) == 9);
  runs[1].sequence.leave();
  check_invariants(cache.tree);
  CHECK(cache.tree.stats().merged_tokens == 9);
  CHECK(cache.states.find(all) == 14);
  CHECK(cache.states.stats().count == 3);  // 5, 9, 14
}

TEST_CASE("an answer that extends an equal one takes its checkpoints along") {
  for (const std::size_t position : {9u, 13u}) {  // of what both have, of what only one has
    CAPTURE(position);
    Cache<Tree> cache({.max_count = 100});
    std::vector<Run<Tree>> runs;
    for (int i = 0; i < 2; ++i) {
      runs.emplace_back(cache, iota(0, 6));
      runs.back().prefill();
    }
    for (int i = 0; i < 5; ++i) CHECK(runs[0].step());
    for (int i = 0; i < 9; ++i) CHECK(runs[1].step());
    CHECK(cache.states.save(runs[1].sequence, position, std::make_shared<const int>(1)));
    const Tokens all = runs[1].sequence.tokens();
    runs[0].sequence.leave();
    CHECK(cache.states.find(all) == 5);  // of the prompt
    runs[1].sequence.leave();
    check_invariants(cache.tree);
    CHECK(cache.tree.stats().merged_tokens == 5);
    CHECK(cache.states.find(all) == position);
    cache.tree.trim(0);
    check_invariants(cache.tree);
    CHECK(cache.states.stats().count == 0);
  }
}

TEST_CASE("where an answer was dropped for an equal one, paths part no longer") {
  for (const bool is_one_above : {false, true}) {
    CAPTURE(is_one_above);
    Cache<Tree> cache({.max_count = 100, .max_per_path = is_one_above ? 3 : 2});
    const Tokens prompt = iota(0, 6);
    std::vector<Run<Tree>> runs;
    for (int i = 0; i < 2; ++i) {
      runs.emplace_back(cache, prompt);
      runs.back().prefill();
    }
    for (auto& run : runs)
      for (int i = 0; i < 9; ++i) CHECK(run.step());
    const auto state = std::make_shared<const int>(1);
    CHECK(cache.states.save(runs[0].sequence, 6, state));  // where their answers begin
    if (is_one_above) CHECK(cache.states.save(runs[0].sequence, 3, state));
    CHECK(cache.states.save(runs[0].sequence, 9, state));
    CHECK(cache.states.save(runs[1].sequence, 14, state));
    const Tokens all = runs[0].sequence.tokens();
    runs[0].sequence.leave();
    CHECK(cache.states.find(sibling(all, 8, 100, 1)) == 6);
    runs[1].sequence.leave();
    check_invariants(cache.tree);
    CHECK(cache.states.find(sibling(all, 8, 100, 1)) == (is_one_above ? 3 : 0));  // the oldest went
    CHECK(cache.states.find(sibling(all, 12, 100, 1)) == 9);
    CHECK(cache.states.find(all) == 14);
  }
}

TEST_CASE(
    "what is wanted before the last token does not count among the positions where paths part") {
  Cache<Tree> cache({.max_count = 100, .max_per_path = 2});
  const Tokens prompt = iota(0, 10);
  std::vector<Tree::Sequence> others;
  for (const std::size_t common : {5u, 9u}) {
    others.push_back(cache.tree.insert(sibling(prompt, common, 100, 4)));
    test::load(others.back());
  }
  const auto s = cache.tree.insert(prompt, {.max_reuse = 0});
  CHECK(cache.states.next(s) == 5);
}

TEST_CASE("tenants have checkpoints of their own, and public ones") {
  Cache<Tree> cache({.max_count = 100});
  const Tokens prompt = iota(0, 24);
  const auto of = [](std::uint64_t tenant) {
    return InsertOptions{.name_space = {.tenant = tenant}, .public_length = 10};
  };
  Run<Tree>(cache, prompt, of(1)).prefill();
  CHECK(cache.states.find(prompt, of(1)) == 23);
  Run<Tree> other(cache, prompt, of(2));
  other.prefill();
  CHECK(other.started_at == 10);  // where the public part ends
  CHECK(cache.states.find(prompt, {.name_space = {.tenant = 1}}) == 0);
}

TEST_CASE("a sequence that needs its prompt's logits begins with a checkpoint before them") {
  Cache<Tree> cache({.max_count = 100});
  const Tokens prompt = iota(0, 24);
  Run<Tree>(cache, sibling(prompt, 12, 100, 3)).prefill();
  Run<Tree>(cache, prompt).prefill();
  CHECK(cache.states.find(prompt, {.max_reuse = 18}) == 12);
  Run<Tree> logits(cache, prompt, {.max_reuse = 18});
  logits.prefill();
  CHECK(logits.started_at == 12);
}

TEST_CASE("a sequence that was truncated continues at a checkpoint") {
  Cache<Tree> cache({.max_count = 100});
  const Tokens prompt = iota(0, 24);
  Run<Tree>(cache, sibling(prompt, 12, 100, 3)).prefill();
  Run<Tree> run(cache, prompt);
  run.prefill();
  run.sequence.truncate(20);
  CHECK(run.sequence.num_uncomputed() == 1);
  run.state = 0;
  run.start();
  CHECK(run.started_at == 12);
  CHECK(run.sequence.num_uncomputed() == 8);
  run.prefill();
}

TEST_CASE("what makes no sense is refused before anything changes") {
  check_refused([&] { Cache<Tree>({.max_count = 0}); }, "max_count = 0: expected at least 1");
  check_refused([&] { Cache<Tree>({.max_count = 4, .max_per_path = 0}); },
                "max_per_path = 0: expected at least 1");

  Cache<Tree> cache({.max_count = 4});
  const auto state = std::make_shared<const int>(1);
  auto t = cache.tree.insert(iota(0, 8));
  check_refused([&] { static_cast<void>(cache.states.save(t, 1, state)); },
                "position = 1: expected 1 to num_written(), 0");
  test::load(t);
  check_refused([&] { static_cast<void>(cache.states.save(t, 0, state)); }, "position = 0");
  check_refused([&] { static_cast<void>(cache.states.save(t, 9, state)); }, "position = 9");
  check_refused([&] { static_cast<void>(cache.states.save(t, 4, nullptr)); }, "state = null");
  auto u = cache.tree.insert(iota(0, 9));
  auto step = cache.tree.begin_step();
  CHECK(step.add(u));
  const char* const going = "sequence = in a step, or its outputs are to come";
  check_refused([&] { static_cast<void>(cache.states.resume(u)); }, going);
  AttentionPlan plan;
  CHECK(plan.build(step));
  {
    auto finished = std::move(step).finish();
    check_refused([&] { static_cast<void>(cache.states.resume(u)); }, going);
    for (const auto row : finished.rows()) finished.commit(row, 9);
  }
  CHECK(u.num_uncomputed() == 1);
  CHECK(cache.states.resume(u).position == 0);
  CHECK(u.num_uncomputed() == 10);

  Tree other;
  auto stranger = other.insert(iota(0, 8));
  test::load(stranger);
  const char* const text = "sequence = of another tree";
  check_refused([&] { static_cast<void>(cache.states.resume(stranger)); }, text);
  check_refused([&] { static_cast<void>(cache.states.next(stranger)); }, text);
  check_refused([&] { static_cast<void>(cache.states.save(stranger, 4, state)); }, text);
  stranger.leave();
  check_refused([&] { static_cast<void>(cache.states.next(stranger)); }, "sequence = empty");
  CHECK(cache.states.stats().count == 0);
}
