// Waiting requests: what the tree says of them, however it has changed since it last did, against
// asking for each again; the order that is made of it; admission.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "chunkattn/attention_plan.hpp"
#include "chunkattn/cache/admission.hpp"
#include "chunkattn/debug/tree.hpp"
#include "chunkattn/prefix_tree.hpp"
#include "tests/support/counted_token.hpp"
#include "tests/support/random.hpp"
#include "tests/support/refused.hpp"
#include "tests/support/retention.hpp"
#include "tests/support/steps.hpp"

using namespace chunkattn;
using test::CountedToken;
using test::iota;
using test::refused;

namespace {

/// Prompts over few letters, which are often equal; some extend those of others.
struct Prompts {
  explicit Prompts(std::uint64_t seed) : random(seed) {}
  std::vector<int> next() {
    std::vector<int> prompt;
    if (!known.empty() && random.uniform(0, 3) > 0) {
      prompt = known[random.index(known.size())];
      prompt.resize(static_cast<std::size_t>(random.uniform(0, static_cast<int>(prompt.size()))));
    }
    for (int more = random.uniform(1, 20); more > 0; --more) prompt.push_back(random.uniform(0, 2));
    known.push_back(prompt);
    return prompt;
  }
  InsertOptions options(std::size_t size) {
    InsertOptions o;
    if (random.uniform(0, 3) == 0)
      o.name_space = {.tenant = static_cast<std::uint64_t>(random.uniform(0, 1))};
    if (random.uniform(0, 2) == 0)
      o.public_length = static_cast<std::size_t>(random.uniform(0, static_cast<int>(size) + 1));
    if (random.uniform(0, 4) == 0) o.max_reuse = 5;
    if (random.uniform(0, 4) == 0) o.share_pending = false;
    return o;
  }
  test::Random random;
  std::vector<std::vector<int>> known;
};

/// Leading tokens of a prompt that any of these has, too, in the same namespace.
template <class Sequence>
std::size_t shared_with(const std::vector<int>& prompt, const InsertOptions& options,
                        const std::vector<Sequence>& sequences) {
  std::size_t longest = 0;
  for (const Sequence& s : sequences) {
    const std::vector<int> tokens = s.tokens();
    const InsertOptions theirs = s.options();
    std::size_t common = 0;
    while (common < std::min(prompt.size(), tokens.size()) && prompt[common] == tokens[common] &&
           (common < options.public_length) == (common < theirs.public_length) &&
           (common < options.public_length || options.name_space == theirs.name_space))
      ++common;
    longest = std::max(longest, common);
  }
  return longest;
}

/// A tree that changes at random while requests wait.
template <int ChunkSize, class Retention>
void check_ranks(std::uint64_t seed, TreeOptions::Sharing sharing) {
  CAPTURE(seed);
  using Tree = PrefixTree<int, ChunkSize, PoolAllocator, Retention>;
  Tree tree(PoolAllocator{.max_chunks = 60}, {.sharing = sharing},
            Retention{RetentionOptions{.max_pinned = 4}});
  Prompts prompts(seed);
  test::Random& random = prompts.random;
  AttentionPlan plan;
  AdmissionQueue<Tree> waiting;
  std::map<std::uint64_t, std::pair<std::vector<int>, InsertOptions>> model;
  std::vector<typename Tree::Sequence> live;
  typename Tree::Pin pin;
  for (int i = 0; i < test::scaled(600); ++i) {
    switch (random.uniform(0, 11)) {
      case 0:
      case 1:
      case 2: {
        auto prompt = prompts.next();
        auto options = prompts.options(prompt.size());
        auto kept = std::pair(std::move(prompt), options);
        const std::span<const int> tokens = kept.first;  // moving a vector leaves its tokens
        const std::uint64_t id = waiting.push({tokens, options});
        model.emplace(id, std::move(kept));
        break;
      }
      case 3:
      case 4:
      case 5: {
        const auto prompt = prompts.next();
        if (auto s = tree.try_insert(prompt, prompts.options(prompt.size())))
          live.push_back(std::move(*s));
        break;
      }
      case 6:
        if (live.empty()) break;
        std::swap(live[random.index(live.size())], live.back());
        live.pop_back();
        break;
      case 7:
        if (auto admitted = waiting.admit(tree, 2)) {
          CHECK(model.erase(admitted->first) == 1);
          live.push_back(std::move(admitted->second));
        }
        break;
      case 8:
        if (model.empty()) break;
        waiting.cancelled(model.begin()->first);
        model.erase(model.begin());
        break;
      case 9:
        if (random.uniform(0, 9) == 0) tree.clear();
        if (!live.empty()) pin = tree.pin(live.back().tokens());
        break;
      default: {
        auto step = tree.begin_step();
        for (auto& s : live) (void)step.add(s, static_cast<std::size_t>(random.uniform(1, 12)));
        if (step.num_rows() == 0) break;
        (void)plan.build(step);
        auto done = std::move(step).finish();
        for (const ScheduledSequence row : done.rows())
          if (random.uniform(0, 3) > 0) done.commit(row, random.uniform(0, 2));
      }
    }
    if (random.uniform(0, 2) == 0) continue;  // several changes between two calls
    const std::size_t half = live.size() / 2;
    const bool is_half = random.uniform(0, 1) == 0;
    if (is_half)
      waiting.rank(tree, std::span(live).first(half));
    else
      waiting.rank(tree);
    REQUIRE(waiting.ranks().size() == model.size());
    auto asked = model.begin();
    for (const auto& rank : waiting.ranks()) {
      const auto& [prompt, options] = asked->second;
      REQUIRE(rank.id == asked->first);
      const auto match = tree.match_prefix(prompt, options);
      CHECK(rank.cached == match.cached);
      CHECK(rank.pending == match.pending);
      CHECK(rank.chunks == tree.chunks_needed(prompt, options));
      CHECK(rank.shared <= rank.cached + rank.pending);
      if (sharing == TreeOptions::Sharing::token && options.public_length == 0 && !is_half)
        CHECK(rank.shared <= shared_with(prompt, options, live));
      ++asked;
    }
  }
  check_invariants(tree);
}

}  // namespace

TEST_CASE("a rank is what the tree says when it is asked again") {
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    check_ranks<4, RetentionOptions>(seed, TreeOptions::Sharing::token);
    check_ranks<4, RetentionOptions>(seed, TreeOptions::Sharing::chunk);
    check_ranks<4, test::NoRetention>(seed, TreeOptions::Sharing::token);
    check_ranks<16, test::ByPriority>(seed, TreeOptions::Sharing::token);
  }
}

TEST_CASE("what is shared with live sequences, and with some of them") {
  using Tree = PrefixTree<int, 4>;
  Tree tree;
  AdmissionQueue<Tree> waiting;
  auto a = iota(0, 20), b = iota(0, 10);
  b.resize(20, 7);
  std::vector<Tree::Sequence> live;
  live.push_back(tree.insert(a));
  live.push_back(tree.insert(b));
  const auto like_a = iota(0, 15), like_b = std::vector<int>(b.begin(), b.begin() + 13);
  const auto alone = iota(90, 5);
  waiting.push({alone});
  waiting.push({like_a});
  waiting.push({like_b});
  const auto shared = [&] {
    std::vector<std::size_t> all;
    for (const auto& rank : waiting.ranks()) all.push_back(rank.shared);
    return all;
  };
  waiting.rank(tree);
  CHECK(shared() == std::vector<std::size_t>{0, 15, 13});
  waiting.rank(tree, std::span(live).first(1));
  CHECK(shared() == std::vector<std::size_t>{0, 15, 10});
  waiting.rank(tree, std::span(live).last(1));
  CHECK(shared() == std::vector<std::size_t>{0, 10, 13});
  waiting.rank(tree, {});
  CHECK(shared() == std::vector<std::size_t>{0, 0, 0});
  CHECK(waiting.ranks()[1].pending == 15);
  test::load(live[0]);
  live[0].leave();
  waiting.rank(tree);
  CHECK(shared() == std::vector<std::size_t>{0, 10, 13});
  CHECK(waiting.ranks()[1].cached == 15);
  CHECK(waiting.ranks()[1].chunks == tree.chunks_needed(like_a));
}

TEST_CASE("sequences of another tree, and those that have left, are refused") {
  using Tree = PrefixTree<int, 4>;
  Tree one, other;
  AdmissionQueue<Tree> waiting;
  const auto prompt = iota(0, 12);
  waiting.push({prompt});
  std::vector<Tree::Sequence> live;
  live.push_back(one.insert(prompt));
  for (int i = 0; i < 50; ++i)  // nodes with indices that the first tree has not
    live.push_back(other.insert(iota(100 * i, 12)));
  const std::string message = refused([&] { waiting.rank(one, live); });
  CHECK(message.find("running[1] = of another tree") != std::string::npos);
  CHECK(waiting.ranks()[0].pending == 0);
  waiting.rank(one, std::span(live).first(1));
  CHECK(waiting.ranks()[0].shared == 12);
  live[0].leave();
  CHECK(refused([&] { waiting.rank(one, std::span(live).first(1)); }).find("sequence = ") == 0);
}

TEST_CASE("nothing is said to be shared that max_reuse does not let be reused") {
  using Tree = PrefixTree<int, 4>;
  Tree tree;
  const auto prompt = iota(0, 64);
  auto s = tree.insert(prompt);
  AdmissionQueue<Tree> waiting;
  waiting.push({prompt, {.max_reuse = 19}});
  const auto check = [&](std::size_t cached, std::size_t pending) {
    waiting.rank(tree);
    CHECK(waiting.ranks()[0].cached == cached);
    CHECK(waiting.ranks()[0].pending == pending);
    CHECK(waiting.ranks()[0].shared == cached + pending);
    CHECK(tree.match_prefix(prompt, {.max_reuse = 19}).pending == pending);
  };
  check(0, 19);
  s.mark_loaded({0, 7});
  check(7, 12);
  s.mark_loaded({7, 57});
  check(19, 0);
}

TEST_CASE("one queue serves another tree") {
  using Tree = PrefixTree<int, 4>;
  Tree one, other;
  AdmissionQueue<Tree> waiting;
  const auto prompt = iota(0, 12);
  waiting.push({prompt});
  const auto s = one.insert(prompt);
  waiting.rank(one);
  CHECK(waiting.ranks()[0].pending == 12);
  waiting.rank(other);
  CHECK(waiting.ranks()[0].pending == 0);
  waiting.rank(one);
  CHECK(waiting.ranks()[0].pending == 12);
}

TEST_CASE(
    "a request that shares nothing is overtaken by all that share, at most max_overtaken times") {
  for (const std::size_t most : {std::size_t{0}, std::size_t{1}, std::size_t{5}}) {
    CAPTURE(most);
    PrefixTree<int, 4, PoolAllocator, test::NoRetention> tree;
    const std::vector<int> prompt = test::iota(0, 12), other = test::iota(100, 8);
    std::vector<PrefixTree<int, 4, PoolAllocator, test::NoRetention>::Sequence> live;
    live.push_back(tree.insert(prompt));
    AdmissionQueue<PrefixTree<int, 4, PoolAllocator, test::NoRetention>> waiting(most);
    waiting.push({other});
    for (int i = 0; i < 8; ++i) waiting.push({prompt});
    std::size_t before = 0;
    for (auto joined = waiting.admit(tree); joined->first != 1; joined = waiting.admit(tree)) {
      ++before;
      live.push_back(std::move(joined->second));
    }
    CHECK(before == most);
    CHECK(waiting.size() == 8 - most);
  }
}

TEST_CASE("tokens of a request that was ranked are not looked at again while nothing changes") {
  PrefixTree<CountedToken, 4> tree;
  std::vector<CountedToken> prompt(40);
  auto s = tree.insert(prompt);
  for (int i = 1; i < 5; ++i) prompt.push_back({i});  // which the tree does not have
  AdmissionQueue<decltype(tree)> waiting;
  waiting.push({prompt});
  CountedToken::looks = 0;
  waiting.rank(tree);
  CHECK(CountedToken::looks >= 40);
  CountedToken::looks = 0;
  waiting.rank(tree);
  CHECK(CountedToken::looks == 0);
  CHECK(waiting.ranks()[0].pending == 40);
}

TEST_CASE("no request is overtaken more often than was said") {
  using Tree = PrefixTree<int, 4>;
  for (const std::size_t most : {std::size_t{0}, std::size_t{1}, std::size_t{5}}) {
    CAPTURE(most);
    Prompts prompts(most + 3);
    Tree tree(PoolAllocator{.max_chunks = 80});
    AdmissionQueue<Tree> waiting(most);
    std::deque<std::vector<int>> texts;
    std::map<std::uint64_t, std::size_t> overtaken;  // counted again, of those that wait
    std::vector<Tree::Sequence> live;
    std::size_t admitted = 0;
    for (int i = 0; i < test::scaled(2000); ++i) {
      if (prompts.random.uniform(0, 1) == 0) {
        texts.push_back(prompts.next());
        overtaken[waiting.push({texts.back()})] = 0;
      }
      if (prompts.random.uniform(0, 1) == 0 && !live.empty()) live.erase(live.begin());
      if (prompts.random.uniform(0, 9) < 4) continue;  // so that several wait
      waiting.rank(tree);
      if (const auto* next = waiting.next()) {  // the first, where it was overtaken so often
        std::size_t most_shared = 0;
        for (const auto& rank : waiting.ranks()) most_shared = std::max(most_shared, rank.shared);
        if (overtaken.begin()->second >= most)
          REQUIRE(next->id == overtaken.begin()->first);
        else
          REQUIRE(next->shared == most_shared);
      }
      if (auto joined = waiting.admit(tree)) {
        const auto at = overtaken.find(joined->first);
        REQUIRE(at != overtaken.end());
        for (auto older = overtaken.begin(); older != at; ++older) ++older->second;
        overtaken.erase(at);
        live.push_back(std::move(joined->second));
        ++admitted;
      }
      for (const auto& [id, times] : overtaken) REQUIRE(times <= most);
    }
    CHECK(admitted > static_cast<std::size_t>(test::scaled(2000)) / 4);
    CHECK(waiting.size() == overtaken.size());
  }
}

TEST_CASE("the request that shares most with what runs goes first, of equals the oldest") {
  using Tree = PrefixTree<int, 4>;
  Tree tree(PoolAllocator{.max_chunks = 40});
  {
    auto cached = tree.insert(iota(50, 20));
    test::load(cached);
  }
  auto runs = tree.insert(iota(0, 8));
  AdmissionQueue<Tree> waiting;
  const auto first = iota(80, 6), second = iota(50, 16), third = iota(0, 6), fourth = iota(0, 8);
  CHECK(waiting.next() == nullptr);
  for (const auto* prompt : {&first, &second, &third, &fourth}) waiting.push({*prompt});
  std::vector<std::uint64_t> order;
  std::vector<Tree::Sequence> live;
  while (auto joined = waiting.admit(tree)) {
    order.push_back(joined->first);
    live.push_back(std::move(joined->second));
  }
  CHECK(order == std::vector<std::uint64_t>{4, 3, 1, 2});
  CHECK(waiting.empty());
}

TEST_CASE("admission keeps the headroom, and what does not fit waits on") {
  using Tree = PrefixTree<int, 4, PoolAllocator, test::NoRetention>;
  Tree tree(PoolAllocator{.max_chunks = 10});
  AdmissionQueue<Tree> waiting;
  const auto large = iota(0, 30), small = iota(40, 4);
  const auto id = waiting.push({large});
  waiting.push({small});
  CHECK_FALSE(waiting.admit(tree, 3));
  CHECK(waiting.size() == 2);
  const auto joined = waiting.admit(tree, 2);
  REQUIRE(joined);
  CHECK(joined->first == id);
  CHECK(tree.chunks_available() == 2);
  CHECK_FALSE(waiting.admit(tree, 2));
  CHECK_FALSE(waiting.admit(tree, static_cast<std::size_t>(-1)));
  CHECK(waiting.admit(tree, 1));
  CHECK_FALSE(waiting.admit(tree));
}

TEST_CASE("mistakes in using a queue") {
  AdmissionQueue<PrefixTree<int, 4, PoolAllocator, test::NoRetention>> waiting;
  CHECK(refused([&] { waiting.push({}); }) == "prompt.size() = 0: expected at least one token");
  CHECK(waiting.empty());
  const auto prompt = iota(0, 4);
  const auto id = waiting.push({prompt});
  CHECK(id == 1);
  CHECK(waiting.request(id).prompt.size() == 4);
  CHECK(refused([&] { waiting.admitted(2); }) == "id = 2: expected that of a request that waits");
  waiting.cancelled(id);
  CHECK(refused([&] { waiting.cancelled(id); }) == "id = 1: expected that of a request that waits");
  CHECK(waiting.push({prompt}) == 2);
}
