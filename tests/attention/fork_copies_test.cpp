// The row copies of forks, with real K/V: they are made however many steps that carried them were
// cancelled or lost, and nothing reads their rows before.
#include <doctest/doctest.h>

#include <cstddef>
#include <cstring>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "chunkattn/chunkattn.hpp"
#include "chunkattn/debug/tree.hpp"
#include "chunkattn/transfer/transfer.hpp"
#include "tests/support/random.hpp"
#include "tests/support/retention.hpp"
#include "tests/support/steps.hpp"

using namespace chunkattn;
using test::refused;

namespace {

constexpr int dim = 8, heads = 2, layers = 2;
using Tree = PrefixTree<int, 8, PoolAllocator, test::NoRetention>;
using Row = std::vector<float>;

/// An engine whose K and V are a function of token, position and layer.
struct Engine {
  void run(const LiveView& view, const std::vector<int>& tokens,
           const std::vector<std::int32_t>& positions) {
    for (int layer = 0; layer < layers; ++layer) {
      std::vector<float> k, v;
      for (std::size_t row = 0; row < tokens.size(); ++row)
        for (int i = 0; i < heads * dim; ++i) {
          k.push_back(value(tokens[row], positions[row], layer, i));
          v.push_back(-value(tokens[row], positions[row], layer, i + 100));
        }
      attention.write(kv.layer(layer), view, k, v);
      const std::vector<float> q(k.size(), 0.25f);  // the same for all rows: paths make the outputs
      out.assign(q.size(), 0.0f);
      attention.run(kv.layer(layer), view, q, out);
    }
  }
  template <class View>
  void run(const View& view) {
    run(view, view.tokens(), view.positions());
  }

  /// A sequence with `generated` tokens after its prompt of one, all computed: a short tail, which
  /// forks copy.
  Tree::Sequence start(const std::vector<int>& generated) {
    auto s = tree.insert(std::vector<int>{-1});
    s.append(generated);
    finish({&s});
    return s;
  }
  /// Adds the sequences, builds, and leaves the step as it is.
  Tree::Step carry(std::initializer_list<Tree::Sequence*> sequences, bool write) {
    auto step = tree.begin_step();
    for (auto* s : sequences) REQUIRE(step.add(*s));
    const auto view = plan.build(step);
    copies = view.num_copies;
    if (write) run(view);
    return step;
  }
  /// Runs a step to its end, without outputs.
  void finish(std::initializer_list<Tree::Sequence*> sequences) {
    const auto done = carry(sequences, true).finish();
  }
  /// K and V of the first positions.
  std::vector<std::byte> content(const Tree::Sequence& s, std::size_t length) {
    std::vector<std::byte> bytes(kv_bytes(kv, length));
    gather_kv(s, {0, static_cast<std::int32_t>(length)}, kv, bytes);
    return bytes;
  }

  static float value(int token, int position, int layer, int i) {
    return static_cast<float>((token * 31 + position * 7 + layer * 3 + i) % 97) / 16.0f;
  }

  explicit Engine(std::optional<int> min_run = {}) : tree({}, {.min_run = min_run}) {
    tree.set_free_sink([this](ChunkIndex chunk) { kv.poison(chunk); });
  }
  ~Engine() { tree.set_free_sink({}); }
  Tree tree;
  KvCache<Cpu, float> kv{tree, {.num_layers = layers, .num_kv_heads = heads, .head_dim = dim}};
  ChunkAttention<Cpu, dim> attention{1};
  AttentionPlan plan;
  std::vector<float> out;
  int copies = 0;
};

}  // namespace

TEST_CASE("a fresh fork's copied rows count as written when a step has made them, not before") {
  Engine e;
  auto s = e.start({1, 2, 3});
  auto other = e.tree.insert(std::vector<int>{7, 7, 7, 7});
  auto fork = s.fork();
  CHECK(s.num_written() == 4);
  CHECK(fork.num_written() == 1);
  CHECK(e.tree.stats().copied_tokens == 3);
  std::vector<std::byte> bytes(kv_bytes(e.kv, 4));
  CHECK(refused([&] { gather_kv(fork, {0, 4}, e.kv, bytes); }) ==
        "range.end() = 4: expected at most the sequence's num_written(): K/V after it is to be "
        "computed, or to be copied by the next step");
  e.finish({&other});  // the next step makes the copies
  CHECK(e.copies == 1);
  CHECK(fork.num_written() == 4);
  CHECK(e.content(fork, 4) == e.content(s, 4));
  other.append(8);
  e.finish({&other});
  CHECK(e.copies == 0);
}

TEST_CASE("copies survive steps that were cancelled or lost") {
  test::Random random(1);
  for (int round = 0; round < test::scaled(150); ++round) {
    Engine e(8);
    std::vector<int> tokens(static_cast<std::size_t>(random.uniform(1, 7)));
    for (int& t : tokens) t = random.uniform(0, 50);
    auto s = e.start(tokens);
    auto other = e.tree.insert(std::vector<int>(60, 99));
    const std::size_t n = s.size();
    const auto expected = e.content(s, n);
    std::vector<Tree::Sequence> forks;
    forks.push_back(s.fork());
    std::vector<Tree::InFlight> flying;
    for (int lost = random.uniform(1, 3); lost > 0; --lost) {
      if (random.chance(0.3)) forks.push_back(forks[random.index(forks.size())].fork());
      const bool ran = random.chance(0.3);
      auto step = e.tree.begin_step();
      REQUIRE(step.add(other, 3));
      const auto view = e.plan.build(step);
      CHECK(view.num_copies == static_cast<int>(forks.size()));  // the lost ones' again
      if (ran) e.run(view);
      if (random.chance(0.5)) {
        const auto dropped = std::move(step);
      } else {
        {
          const auto dropped = std::move(step).submit();
        }
        e.tree.device_idle();
      }
      for (const auto& fork : forks) REQUIRE(fork.num_written() == 1);
    }
    if (random.chance(0.5)) s.leave();  // what it has is kept for the copies
    if (forks.size() > 1 && random.chance(0.5)) forks.erase(forks.begin());
    e.finish({&other});
    for (const auto& fork : forks) {
      REQUIRE(fork.num_written() == n);
      REQUIRE(e.content(fork, n) == expected);
    }
    check_invariants(e.tree);
    CHECK(e.tree.stats().leaving_sequences == 0);
  }
}

TEST_CASE("a step in flight that rests on a lost one does not count as having made the copies") {
  Engine e;
  auto s = e.start({1, 2, 3});
  auto other = e.tree.insert(std::vector<int>(30, 5));
  auto fork = s.fork();
  auto step = e.tree.begin_step();
  REQUIRE(step.add(other, 4));
  CHECK(e.plan.build(step).num_copies == 1);
  std::optional<Tree::InFlight> lost = std::move(step).submit();
  step = e.tree.begin_step();
  REQUIRE(step.add(other, 4));
  CHECK(e.plan.build(step).num_copies == 0);  // the step before carries it
  auto later = std::move(step).submit();
  lost.reset();
  step = e.tree.begin_step();
  s.append(4);
  REQUIRE(step.add(s));
  CHECK(e.plan.build(step).num_copies == 1);  // carried again: the lost one may never run
  {
    const auto done = std::move(later).finish();
  }
  CHECK(fork.num_written() == 1);
  e.run(e.plan.build(step));
  {
    const auto done = std::move(step).finish();
  }
  CHECK(fork.num_written() == 4);
  CHECK(e.content(fork, 4) == e.content(s, 4));
}

TEST_CASE("a fork of tokens that are not computed has nothing to copy") {
  Engine e;
  auto s = e.start({1, 2, 3});
  auto more = e.tree.insert(std::vector<int>{9, 8, 7});
  more.append(6);
  auto fork = more.fork();
  CHECK(chunkattn::detail::TreeAccess::core(e.tree).pending_copies.empty());
  auto step = e.tree.begin_step();
  REQUIRE(step.add(more));
  CHECK(e.plan.build(step).num_copies == 0);
}

TEST_CASE("copies of a step that ends in vain are carried by the next") {
  Engine e;
  auto s = e.start({1, 2, 3});
  auto other = e.tree.insert(std::vector<int>(30, 5));
  auto step = e.tree.begin_step();
  REQUIRE(step.add(other, 4));
  (void)e.plan.build(step);
  std::optional<Tree::InFlight> lost = std::move(step).submit();
  auto fork = s.fork();
  step = e.tree.begin_step();
  REQUIRE(step.add(other, 4));
  CHECK(e.plan.build(step).num_copies == 1);
  auto later = std::move(step).submit();  // rests on the first, which never runs
  lost.reset();
  {
    const auto done = std::move(later).finish();
  }
  CHECK(fork.num_written() == 1);
  fork.append(4);
  step = e.tree.begin_step();
  REQUIRE(step.add(fork));
  const auto view = e.plan.build(step);
  CHECK(view.num_copies == 1);
  e.run(view);
  {
    const auto done = std::move(step).finish();
  }
  CHECK(e.content(fork, 3) == e.content(s, 3));
}

TEST_CASE("a fork and its source attend alike, also in the step that makes the copy") {
  test::Random random(2);
  for (int round = 0; round < test::scaled(40); ++round) {
    Engine e(random.uniform(1, 8));
    auto s = e.start(std::vector<int>(static_cast<std::size_t>(random.uniform(1, 30)), 3));
    for (int i = random.uniform(0, 9); i > 0; --i) {
      s.append(i);
      e.finish({&s});
    }
    auto fork = s.fork();
    s.append(77);
    fork.append(77);
    for (const bool cancelled : {true, false}) {
      auto step = e.carry({&fork, &s}, true);
      REQUIRE(e.out.size() == std::size_t{2} * heads * dim);
      for (std::size_t i = 0; i < heads * dim; ++i)
        REQUIRE(e.out[i] == doctest::Approx(e.out[heads * dim + i]).epsilon(1e-5));
      if (!cancelled) {
        const auto done = std::move(step).finish();
      }
    }
    REQUIRE(e.content(fork, s.size()) == e.content(s, s.size()));
  }
}

TEST_CASE("a fork that leaves before its copy was made takes it back, and its cache with it") {
  using CachingTree = PrefixTree<int, 8>;
  CachingTree tree;
  auto s = tree.insert(std::vector<int>{1, 2, 3}, {.name_space = {.tenant = 5}});
  s.append(4);
  s.append(5);
  s.mark_loaded({0, 5});
  const TreeStats before = tree.stats();
  {
    auto fork = s.fork();
    CHECK(tree.stats().forks_copied == 1);
    CHECK(fork.num_written() == 3);
    CHECK(tree.stats().used_chunks == before.used_chunks + 1);
  }
  // Its two generated tokens were never copied: they must not be found.
  check_invariants(tree);
  CHECK(tree.stats().used_chunks == before.used_chunks);
  CHECK(tree.match_prefix(std::vector<int>{1, 2, 3, 4, 5}, {.name_space = {.tenant = 5}}).cached ==
        3);
  AttentionPlan plan;
  auto other = tree.insert(std::vector<int>{9});
  auto step = tree.begin_step();
  CHECK(step.add(other));
  CHECK(plan.build(step).num_copies == 0);
}
