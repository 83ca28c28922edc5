// Values that live with tokens: written by finished steps, shared, forked, split, merged, evicted.
#include "chunkattn/cache/annotations.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "chunkattn/attention_plan.hpp"
#include "chunkattn/debug/tree.hpp"
#include "chunkattn/events/cache_event.hpp"
#include "chunkattn/events/cache_events.hpp"
#include "chunkattn/kv_cache.hpp"
#include "chunkattn/prefix_tree.hpp"
#include "chunkattn/transfer/companion.hpp"
#include "chunkattn/transfer/transfer.hpp"
#include "tests/support/random.hpp"
#include "tests/support/retention.hpp"
#include "tests/support/steps.hpp"

using namespace chunkattn;
using test::iota;

namespace {

using Tree = PrefixTree<int, 4>;
using Column = Annotations<Tree, std::int64_t>;
using Values = std::vector<std::int64_t>;

/// A tree whose steps give each row the value token + 1000.
struct Engine {
  Tree tree;
  AttentionPlan plan;
  Column own{tree};               // of the row's token
  Column next{tree, {.lag = 1}};  // of the token after it

  void compute(Tree::Sequence& sequence, std::size_t max_tokens = test::no_limit,
               std::optional<int> output = {}) {
    auto step = tree.begin_step();
    REQUIRE(step.add(sequence, max_tokens));
    const auto view = plan.build(step);
    Values values;
    for (const int token : view.tokens()) values.push_back(token + 1000);
    auto finished = std::move(step).finish();
    if (output)
      for (const auto& row : finished.rows()) finished.commit(row, *output);
    own.set(finished, values);
    for (std::int64_t& value : values) value += 1;  // tokens count up: that of the next
    next.set(finished, values);
    check_invariants(tree);
  }
  /// A token that was not sampled; what the row before it says of it is known from then on.
  void append(Tree::Sequence& sequence, int token) {
    sequence.append(token);
    next.set(sequence, sequence.size() - 2, token + 1000);
  }
  Tree::Sequence computed(const std::vector<int>& prompt, const InsertOptions& options = {}) {
    auto sequence = tree.insert(prompt, options);
    while (sequence.num_uncomputed() > 0) compute(sequence, 3);
    return sequence;
  }
};
template <class Where>
Values read(const Column& column, const Where& where, std::size_t position, std::size_t count) {
  Values values(count);
  column.read(where, position, values);
  return values;
}
Values counted(std::int64_t first, std::size_t count) {
  Values values;
  for (std::size_t i = 0; i < count; ++i) values.push_back(first + static_cast<std::int64_t>(i));
  return values;
}

TEST_CASE("a prompt finds the values of the tokens that it shares") {
  Engine engine;
  const auto sequence = engine.computed(iota(0, 11));
  CHECK(engine.own.first_missing(sequence) == 11);
  CHECK(engine.next.first_missing(sequence) == 10);  // what follows the last one is not known
  CHECK(read(engine.own, sequence, 2, 9) == counted(1002, 9));
  CHECK(read(engine.next, sequence, 0, 10) == counted(1001, 10));
  CHECK(engine.own.stats().chunks == 3);
  CHECK(engine.own.stats().bytes == 3 * (8 + 4 * 8));

  std::vector<int> other = iota(0, 6);
  other.insert(other.end(), {90, 91});
  CHECK(engine.own.first_missing(other) == 6);
  CHECK(engine.next.first_missing(other) == 5);  // it parts right after the sixth
  CHECK(read(engine.own, other, 0, 6) == counted(1000, 6));
  CHECK(read(engine.next, other, 4, 1) == counted(1005, 1));
  CHECK(engine.own.first_missing(other, 6) == 6);
  CHECK(engine.own.first_missing(other, 100) == 100);
  const auto joined = engine.tree.insert(other);  // splits a node within its chunk
  check_invariants(engine.tree);
  CHECK(engine.own.first_missing(joined) == 6);
  CHECK(engine.next.first_missing(joined) == 5);
  CHECK(read(engine.next, sequence, 0, 10) == counted(1001, 10));
  // Tokens of another tenant are others.
  CHECK(engine.own.first_missing(iota(0, 11), 0, {.name_space = {.tenant = 1}}) == 0);
}

TEST_CASE("reading past what is written says how far it is") {
  Engine engine;
  const auto sequence = engine.computed(iota(0, 7));
  Values out(3);
  CHECK(test::refused([&] { engine.own.read(sequence, 5, out); }) ==
        "position + out.size() = 8: expected at most 7, the first position without a value");
  CHECK(test::refused([&] { engine.next.read(iota(0, 7), 4, out); }) ==
        "position + out.size() = 7: expected at most 6, the first position without a value");
  CHECK(test::refused([&] { engine.own.read(sequence, 100, out); }) ==
        "position + out.size() = 103: expected at most 100, the first position without a value");
  engine.own.read(sequence, 100, std::span<std::int64_t>());
  engine.next.read(sequence, std::size_t{0x7fffffff}, std::span<std::int64_t>());
  CHECK(out == Values(3));
}

TEST_CASE("values are of rows that have been computed, and of known tokens") {
  Engine engine;
  auto sequence = engine.tree.insert(iota(0, 6));
  const Values values(6);
  CHECK(test::refused([&] { engine.own.set(sequence, 0, std::span(values).first(1)); }) ==
        "position + values.size() = 1: expected at most 0, so far rows are computed and their "
        "tokens known");
  engine.compute(sequence, 4);
  engine.own.set(sequence, 1, std::span(values).first(3));
  CHECK(read(engine.own, sequence, 0, 4) == Values{1000, 0, 0, 0});
  engine.own.set(sequence, 2, 7);
  CHECK(read(engine.own, sequence, 0, 4) == Values{1000, 0, 7, 0});
  for (const std::size_t position : std::vector<std::size_t>{0, 4, 5})
    CHECK(test::refused([&] { engine.own.set(sequence, position, values); }).find("most 4") !=
          std::string::npos);
  engine.compute(sequence);
  // The last row is computed, the next token not known.
  engine.own.set(sequence, 5, 1);
  CHECK(test::refused([&] { engine.next.set(sequence, 5, 1); }).find("at most 5") !=
        std::string::npos);
  engine.next.set(sequence, 5, std::span<const std::int64_t>());
}

TEST_CASE("a superseded row has no value, nor one of a sequence that went back") {
  for (const std::size_t size : std::vector<std::size_t>{
           3, 4, 5}) {  // the row of the later step begins a chunk, or does not
    Engine engine;
    const int n = static_cast<int>(size);
    auto sequence = engine.computed(iota(0, size));
    std::optional<Tree::Finished> first;
    auto step = engine.tree.begin_step();
    sequence.append(n);
    REQUIRE(step.add(sequence));
    (void)engine.plan.build(step);
    auto in_flight = std::move(step).submit();
    auto later = engine.tree.begin_step();  // on a token that is not known yet
    REQUIRE(later.add(sequence));
    AttentionPlan plan;
    (void)plan.build(later);
    auto later_in_flight = std::move(later).submit();
    first = std::move(in_flight).finish();
    CHECK(engine.own.set(*first, Values{1000 + n}) == 1);
    CHECK(engine.next.set(*first, Values{1}) == 0);
    first.reset();  // its output is given up
    sequence.append(n + 1);
    const auto superseded = std::move(later_in_flight).finish();
    CHECK(engine.own.set(superseded, Values{-1}) == 0);
    engine.compute(sequence);
    CHECK(engine.own.set(superseded, Values{-1}) == 0);
    CHECK(read(engine.own, sequence, 0, size + 2) == counted(1000, size + 2));

    std::optional<Tree::Finished> gone;
    {
      auto last = engine.tree.begin_step();
      sequence.append(n + 2);
      REQUIRE(last.add(sequence));
      (void)engine.plan.build(last);
      gone = std::move(last).finish();
    }
    sequence.truncate(size);
    CHECK(engine.own.set(*gone, Values{-1}) == 0);
    CHECK(test::refused([&] { engine.own.set(*gone, Values{}); }) ==
          "values.size() = 0: expected one for each of the step's 1 rows");
    Engine other;
    CHECK(test::refused([&] { other.own.set(*gone, Values{1}); }) ==
          "finished = of another tree: expected a step of this tree");
    CHECK(test::refused([&] { (void)other.own.first_missing(sequence); }) ==
          "sequence = of another tree: expected one of this tree");
  }
}

TEST_CASE("rows of a void step have no values") {
  Engine engine;
  auto sequence = engine.tree.insert(iota(0, 6));
  auto step = engine.tree.begin_step();
  REQUIRE(step.add(sequence, 2));
  (void)engine.plan.build(step);
  std::optional<Tree::InFlight> lost = std::move(step).submit();
  AttentionPlan plan;
  auto behind = engine.tree.begin_step();
  REQUIRE(behind.add(sequence, 2));
  (void)plan.build(behind);
  auto in_flight = std::move(behind).submit();
  lost.reset();
  const auto finished = std::move(in_flight).finish();
  CHECK(engine.own.set(finished, Values{1, 2}) == 0);
  CHECK(engine.own.stats().chunks == 0);
}

TEST_CASE("a step's values: decoding rows, parts of prompts, drafts left out") {
  Engine engine;
  auto a = engine.computed(iota(0, 6));
  auto b = engine.tree.insert(iota(50, 9));
  a.append(6);
  auto step = engine.tree.begin_step();
  const std::vector<int> drafts{7, 8, 30};
  REQUIRE(step.add(b, 5));
  REQUIRE(step.add(a, 10, {.tokens = drafts}));
  (void)engine.plan.build(step);
  auto finished = std::move(step).finish();
  finished.commit(*finished.rows().begin(), std::vector<int>{7, 8, 9});
  Values values = counted(1050, 5);
  values.insert(values.end(), {1006, 1007, 1008, -1});
  CHECK(engine.own.set(finished, values) == 5);  // a draft was wrong: by position
  CHECK(engine.own.first_missing(a) == 6);
  engine.own.set(a, 6, std::span(values).subspan(5, 3));
  CHECK(engine.own.first_missing(a) == 9);
  CHECK(test::refused([&] { engine.own.set(a, 9, -1); }).find("at most 9") != std::string::npos);
  CHECK(read(engine.own, a, 0, 9) == counted(1000, 9));
  CHECK(read(engine.own, b, 0, 5) == counted(1050, 5));
  CHECK(engine.next.set(finished, values) == 5);
}

TEST_CASE("each output has its value as the sequence decodes, over chunks' ends") {
  Engine engine;
  auto sequence = engine.computed(iota(0, 3));
  engine.append(sequence, 3);
  for (int token = 4; token < 30; ++token) engine.compute(sequence, test::no_limit, token);
  CHECK(read(engine.own, sequence, 0, 29) == counted(1000, 29));
  CHECK(read(engine.next, sequence, 0, 29) == counted(1001, 29));
  Column far(engine.tree, {.lag = 3});
  sequence.leave();
  auto again = engine.tree.insert(iota(0, 29));
  CHECK(engine.next.first_missing(again) == 28);
  far.set(again, 0, counted(0, 26));
  CHECK(far.first_missing(iota(0, 20)) == 17);
  CHECK(read(far, iota(0, 20), 0, 17) == counted(0, 17));
  CHECK(far.options().lag == 3);
}

TEST_CASE("all that decode at once have their values, whatever came between") {
  Engine engine;
  std::vector<Tree::Sequence> all;
  for (int i = 0; i < 9; ++i) all.push_back(engine.computed(iota(100 * i, 3)));
  for (int i = 0; i < 9; ++i) engine.append(all[static_cast<std::size_t>(i)], 100 * i + 3);
  std::vector<int> outputs(9);
  Values own(9), next(9);
  for (int round = 0; round < 12; ++round) {
    auto step = engine.tree.begin_step();
    REQUIRE(step.add(all));
    (void)engine.plan.build(step);
    for (std::size_t i = 0; i < all.size(); ++i) {
      own[i] = 1000 + all[i].token(all[i].size() - 1);
      next[i] = own[i] + 1;
      outputs[i] = static_cast<int>(next[i]) - 1000;
    }
    auto finished = std::move(step).finish();
    CHECK(engine.next.set(finished, next) == 0);
    if (round % 3 == 0) CHECK(engine.own.set(finished, own) == all.size());
    finished.commit(std::span(outputs).first(all.size()));
    const bool leaves = round % 4 == 1 && all.size() > 5;
    if (leaves) all.erase(all.begin() + round % 3);  // before the values are set
    CHECK(engine.own.set(finished, own) == all.size());
    CHECK(engine.next.set(finished, next) == all.size());
    check_invariants(engine.tree);
    own.resize(all.size());
    next.resize(all.size());
    outputs.resize(all.size());
  }
  for (const auto& sequence : all) {
    const std::size_t size = sequence.size();
    CHECK(read(engine.own, sequence, 0, size - 1) == counted(1000 + sequence.token(0), size - 1));
    CHECK(read(engine.next, sequence, 0, size - 1) == counted(1001 + sequence.token(0), size - 1));
  }
}

TEST_CASE("the first values of a column are those of rows that decode") {
  Engine engine;
  std::vector<Tree::Sequence> all;
  for (int i = 0; i < 30; ++i) all.push_back(engine.tree.insert(iota(100 * i, 5)));
  for (auto& sequence : all) test::load(sequence);
  for (int i = 0; i < 30; ++i) all[static_cast<std::size_t>(i)].append(100 * i + 5);
  Column far(engine.tree, {.lag = 2});
  for (auto& sequence : all) far.set(sequence, 2, 1);
  auto step = engine.tree.begin_step();
  REQUIRE(step.add(all));
  (void)engine.plan.build(step);
  auto finished = std::move(step).finish();
  const Values values = counted(7, 30);
  finished.commit(std::vector<int>(30, 1));
  CHECK(far.set(finished, values) == 0);  // the token after the next is not known
  CHECK(engine.next.set(finished, values) == 30);
  CHECK(engine.own.set(finished, values) == 30);
  check_invariants(engine.tree);
  for (std::size_t i = 0; i < all.size(); ++i) {
    CHECK(read(engine.own, all[i], 5, 1) == Values{7 + static_cast<std::int64_t>(i)});
    CHECK(read(engine.next, all[i], 5, 1) == Values{7 + static_cast<std::int64_t>(i)});
  }
}

TEST_CASE("rows that decode, in chunks of several words, with values of an odd size") {
  using Wide = PrefixTree<int, 256>;
  struct Bytes {
    unsigned char bytes[5];
  };
  test::Random random(4);
  const std::size_t lag = random.index(2);
  Wide tree;
  Annotations<Wide, Bytes> column(tree, {.lag = lag});
  std::vector<Wide::Sequence> all;
  std::vector<std::size_t> begins;  // positions of the first values
  for (int i = 0; i < 13; ++i) {
    begins.push_back(1 + random.index(400));
    all.push_back(tree.insert(iota(10000 * i, begins.back())));
    test::load(all.back());
    all.back().append(0);
  }
  std::vector<std::vector<Bytes>> plain(all.size());
  AttentionPlan plan;
  for (int round = 0; round < 300; ++round) {
    auto step = tree.begin_step();
    REQUIRE(step.add(all));
    (void)plan.build(step);
    auto finished = std::move(step).finish();
    finished.commit(std::vector<int>(all.size(), round));
    std::vector<Bytes> values(all.size());
    for (std::size_t i = 0; i < all.size(); ++i) {
      for (unsigned char& byte : values[i].bytes)
        byte = static_cast<unsigned char>(random.uniform(0, 255));
      plain[i].push_back(values[i]);
    }
    REQUIRE(column.set(finished, values) == all.size());
  }
  check_invariants(tree);
  for (std::size_t i = 0; i < all.size(); ++i) {
    CHECK(column.first_missing(all[i]) == 0);
    REQUIRE(column.first_missing(all[i], begins[i]) == begins[i] + plain[i].size());
    std::vector<Bytes> out(plain[i].size());
    column.read(all[i], begins[i], out);
    for (std::size_t k = 0; k < out.size(); ++k)
      REQUIRE(std::equal(out[k].bytes, out[k].bytes + 5, plain[i][k].bytes));
  }
}

TEST_CASE("who is preempted finds the values of its tokens again, and decodes on") {
  for (const bool retained : {true, false}) {
    CAPTURE(retained);
    Engine engine;
    auto sequence = engine.computed(iota(0, 3));
    engine.append(sequence, 3);
    for (int token = 4; token < 11; ++token) engine.compute(sequence, test::no_limit, token);
    const std::vector<int> tokens = sequence.tokens();
    REQUIRE(tokens.size() == 11);
    sequence.leave();
    if (!retained) engine.tree.trim(0);
    auto back = engine.tree.insert(tokens);
    // The last token was not computed: nothing of it was lost.
    CHECK(back.num_uncomputed() == (retained ? 1 : 11));
    CHECK(engine.own.first_missing(back) == (retained ? 10 : 0));
    CHECK(engine.next.first_missing(back) == (retained ? 9 : 0));
    for (int token = 11; token < 20; ++token) engine.compute(back, test::no_limit, token);
    CHECK(read(engine.own, back, 0, 19) == counted(1000, 19));
    // The transition to the token that was not computed lay at its slot, and went with it.
    CHECK(engine.next.first_missing(back) == (retained ? 9 : 19));
    CHECK(read(engine.next, back, 10, 9) == counted(1011, 9));
  }
}

TEST_CASE("any ranges, in chunks of several words, as in a plain list") {
  using Wide = PrefixTree<int, 256>;
  struct Bytes {
    unsigned char bytes[5];
  };
  test::Random random(3);
  for (int round = 0; round < test::scaled(30); ++round) {
    Wide tree;
    Annotations<Wide, Bytes> column(tree);
    const int size = random.uniform(1, 700);
    auto sequence = tree.insert(iota(0, static_cast<std::size_t>(size)));
    test::load(sequence);
    std::vector<int> plain(static_cast<std::size_t>(size), -1);
    const auto check = [&] {
      check_invariants(tree);
      for (std::size_t p = 0; p < plain.size(); p += random.index(40) + 1) {
        std::size_t end = p;
        while (end < plain.size() && plain[end] >= 0) ++end;
        REQUIRE(column.first_missing(sequence, p) == end);
        std::vector<Bytes> out(end - p);
        column.read(sequence, p, out);
        for (std::size_t i = 0; i < out.size(); ++i) {
          REQUIRE(out[i].bytes[0] == plain[p + i]);
          REQUIRE(out[i].bytes[4] == plain[p + i]);
        }
      }
    };
    for (int i = random.uniform(1, 8); i > 0; --i) {
      const std::size_t begin = random.index(plain.size());
      const std::size_t length = 1 + random.index(std::min<std::size_t>(200, plain.size() - begin));
      std::vector<Bytes> values(length);
      for (std::size_t k = 0; k < length; ++k) {
        const auto value = static_cast<unsigned char>(random.uniform(0, 255));
        std::fill_n(values[k].bytes, 5, value);
        plain[begin + k] = value;
      }
      column.set(sequence, begin, values);
      check();
      // Others take slots after it in the same chunk, and leave them again.
      auto twin =
          random.chance(0.5) ? sequence.fork() : sequence.fork(1 + random.index(plain.size()));
      twin.append(std::vector<int>(1 + random.index(90), 1));
      test::load(twin);
      const std::size_t all = twin.size();
      for (std::size_t p = 0; p < all; ++p)
        if (column.first_missing(twin, p) == p && random.chance(0.3) && p >= plain.size())
          column.set(twin, p, values[0]);
      twin.leave();
      tree.trim(0);
      check();
    }
  }
}

TEST_CASE("a column that ends leaves nothing behind at the tree") {
  Tree tree;
  const auto& observers = detail::TreeAccess::core(tree).topology.observers;
  {
    const Column column(tree);
    CHECK(!observers.empty());
    CHECK(!observers.follow_writes());
    {
      const CacheEvents<Tree> events(tree, [](const CacheEvent&, std::span<const int>) {});
      CHECK(observers.follow_writes());
      const Column later(tree);
      CHECK(observers.follow_writes());
    }
    CHECK(!observers.follow_writes());
  }
  CHECK(observers.empty());
}

TEST_CASE("a fork has the values of what it shares or copies, and none of what it parts from") {
  Engine engine;
  auto sequence = engine.computed(iota(0, 3));
  engine.append(sequence, 3);
  for (int token = 4; token < 6; ++token) engine.compute(sequence, test::no_limit, token);
  for (std::size_t length = 1; length <= sequence.size(); ++length) {
    auto twin = sequence.fork(length);  // private tails of this size are copied
    check_invariants(engine.tree);
    CHECK(engine.own.first_missing(twin) == (std::min)(length, std::size_t{5}));
    CHECK(engine.next.first_missing(twin) == length - 1);
    CHECK(read(engine.next, twin, 0, length - 1) == counted(1001, length - 1));
  }
  CHECK(engine.tree.stats().forks_copied > 0);
  // Of the last token, which is not computed yet, a value that is there before: of its transition.
  CHECK(read(engine.next, sequence, 4, 1) == Values{1005});
  auto twin = sequence.fork();
  twin.leave();
  sequence.truncate(2);
  CHECK(engine.own.first_missing(sequence) == 2);
  CHECK(engine.next.first_missing(sequence) == 1);
}

TEST_CASE("what merges into an equal path leaves its values there") {
  Engine engine;
  Tree::Sequence generated = engine.computed(iota(0, 4));
  engine.append(generated, 4);
  for (int token = 5; token < 12; ++token) engine.compute(generated, test::no_limit, token);
  {
    auto plain = engine.tree.insert(iota(0, 9));  // without values from 4 on
    test::load(plain);
    CHECK(engine.own.first_missing(plain) == 4);
    engine.own.set(plain, 5, 77);
    generated.leave();
    check_invariants(engine.tree);
    CHECK(engine.tree.stats().merged_tokens == 5);
    CHECK(read(engine.own, plain, 0, 9) ==
          Values{1000, 1001, 1002, 1003, 1004, 77, 1006, 1007, 1008});
    CHECK(engine.next.first_missing(plain) == 8);
  }
  CHECK(engine.own.first_missing(iota(0, 12)) == 11);
  CHECK(engine.next.first_missing(iota(0, 12)) == 10);  // that of the last one had no K/V
}

TEST_CASE("values go with eviction and with clear()") {
  Engine engine;
  {
    auto sequence = engine.computed(iota(0, 16));
  }
  CHECK(engine.own.stats().chunks == 4);
  engine.tree.trim(2);
  CHECK(engine.own.stats().chunks == 2);
  CHECK(engine.own.first_missing(iota(0, 16)) == 8);
  auto live = engine.computed(iota(0, 6));
  engine.tree.clear();
  check_invariants(engine.tree);
  CHECK(engine.own.first_missing(iota(0, 16)) == 0);
  CHECK(engine.own.first_missing(live) == 6);  // it keeps its K/V, too
  live.leave();
  CHECK(engine.own.stats().chunks == 0);
  CHECK(engine.own.stats().bytes == 0);
}

TEST_CASE("memory is that of chunks with values") {
  struct Odd {
    char bytes[13];
  };
  Tree tree;
  Annotations<Tree, Odd> column(tree);
  auto sequence = tree.insert(iota(0, 12));
  test::load(sequence);
  column.set(sequence, 11, Odd{});
  CHECK(column.stats().bytes == 8 + 56);  // bits, and 52 bytes in whole words
}

TEST_CASE("values travel with K/V that is swapped out") {
  Engine engine;
  KvCache<Cpu, float> cache(engine.tree, {.num_layers = 1, .num_kv_heads = 1, .head_dim = 8});
  auto goes = engine.computed(iota(0, 11));
  Column third(engine.tree, {.name = "third"});
  for (const std::size_t position : std::vector<std::size_t>{6, 9}) third.set(goes, position, 7);
  const std::vector<KvCompanion<Tree::Sequence>*> columns{&engine.own, &engine.next, &third};
  const auto swapped = swap_out(goes, cache, columns);
  CHECK(swapped.companions[2].ranges == std::vector<TokenRange>{{6, 1}, {9, 1}});
  engine.tree.trim(0);
  CHECK(engine.own.first_missing(iota(0, 11)) == 0);
  {
    const auto back = resume(engine.tree, cache, swapped, columns);
    REQUIRE(back);
    check_invariants(engine.tree);
    CHECK(read(engine.own, *back, 0, 11) == counted(1000, 11));
    CHECK(read(engine.next, *back, 0, 10) == counted(1001, 10));
    for (std::size_t p = 0; p < 11; ++p)
      CHECK((third.first_missing(*back, p) > p) == (p == 6 || p == 9));
    third.set(*back, 6, 8);
  }
  const auto again = resume(engine.tree, cache, swapped, columns);
  CHECK(read(third, *again, 6, 1) == Values{8});  // what is there stays
}

TEST_CASE("values are saved and loaded by hand, and read by no other column") {
  Engine engine, other;
  const auto sequence = engine.computed(iota(0, 11));
  const CompanionRows rows = gather_rows(sequence, {2, 6}, engine.own);
  CHECK(rows.format == "annotations 1, 8 bytes, lag 0, ");
  CHECK(rows.ranges == std::vector<TokenRange>{{2, 6}});
  auto loaded = other.tree.insert(iota(0, 6));
  loaded.append(iota(6, 5));
  test::load(loaded);
  REQUIRE(scatter_rows(loaded, rows, other.own));
  check_invariants(other.tree);
  CHECK(other.own.first_missing(loaded) == 0);
  CHECK(other.own.first_missing(loaded, 2) == 8);
  CHECK(read(other.own, loaded, 2, 6) == counted(1002, 6));
  CHECK(other.own.stats().chunks == 2);
  CHECK(test::refused([&] { (void)scatter_rows(loaded, rows, other.next); }) ==
        "rows.format = annotations 1, 8 bytes, lag 0, : expected the companion's format(), "
        "annotations 1, 8 bytes, lag 1, ");
  Annotations<Tree, std::int32_t> narrow(other.tree, {.lag = 2, .name = "narrow"});
  CHECK(narrow.format() == "annotations 1, 4 bytes, lag 2, narrow");
  CHECK(narrow.options().name == "narrow");
}

TEST_CASE("who came later still reads the values of what is evicted") {
  Engine engine;
  std::size_t evicted = 0, rows = 0;
  const CacheEvents<Tree> events(engine.tree, [&](const CacheEvent& event, std::span<const int>) {
    if (event.kind != CacheEvent::Kind::evicted) return;
    const Piece first{event.first_chunk, event.first_offset,
                      std::min(event.length, 4 - event.first_offset), event.position};
    CompanionRows gathered;
    gathered.bytes_per_token = sizeof(std::int64_t);
    engine.own.gather(std::span(&first, 1), gathered);
    evicted += static_cast<std::size_t>(first.length);
    rows += gathered.bytes.size() / sizeof(std::int64_t);
  });
  engine.computed(iota(0, 14)).leave();
  engine.tree.trim(0);
  CHECK(evicted == 14);
  CHECK(rows == 14);
  CHECK(engine.own.stats().chunks == 0);
}

TEST_CASE("any size of values, of chunks; a tree that moves and ends") {
  struct Value {
    char bytes[13];
  };
  using Wide = PrefixTree<int, 256, PoolAllocator, test::NoRetention>;
  std::optional<Wide> tree(std::in_place);
  Annotations<Wide, Value> column(*tree);
  auto sequence = tree->insert(iota(0, 700));
  std::optional<Wide> moved(std::move(*tree));
  test::load(sequence);
  std::vector<Value> values(700);
  for (std::size_t i = 0; i < values.size(); ++i) values[i].bytes[i % 13] = static_cast<char>(i);
  column.set(sequence, 0, std::span(values).first(200));
  column.set(sequence, 201, std::span(values).subspan(201, 499));
  CHECK(column.first_missing(sequence) == 200);
  CHECK(column.first_missing(sequence, 201) == 700);
  std::vector<Value> out(600);
  CHECK_THROWS_AS(column.read(sequence, 0, out), const InvalidArgument&);
  column.set(sequence, 200, values[200]);
  column.read(sequence, 100, out);
  for (std::size_t i = 0; i < out.size(); ++i)
    CHECK(std::equal(out[i].bytes, out[i].bytes + 13, values[i + 100].bytes));
  moved.reset();
  CHECK(test::refused([&] { (void)column.first_missing(iota(0, 3)); }) ==
        "annotations = orphaned: expected those of a tree that still exists");
  Tree other;
  CHECK(test::refused([&] { Column(other, {.lag = std::size_t{1} << 31}); }) ==
        "lag = 2147483648: expected at most 2^30 tokens");
}

}  // namespace
