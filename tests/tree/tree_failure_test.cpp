// Every heap allocation of a scripted scenario fails once: nothing is lost, leaked or half done.
#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <map>
#include <memory>
#include <new>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "chunkattn/attention_plan.hpp"
#include "chunkattn/cache/admission.hpp"
#include "chunkattn/cache/checkpoints.hpp"
#include "chunkattn/debug/tree.hpp"
#include "chunkattn/prefix_tree.hpp"
#include "chunkattn/transfer/transfer.hpp"
#include "tests/support/counted_new.hpp"
#include "tests/support/retention.hpp"
#include "tests/support/steps.hpp"

using namespace chunkattn;
using test::iota;

namespace {

/// All that a handle says.
struct Said {
  std::vector<int> tokens;
  std::size_t reserved, scheduled, uncomputed, written, pending;
  TokenRange loadable;
  friend bool operator==(const Said&, const Said&) = default;
};

template <class Retention>
struct Scenario {
  using Tree = PrefixTree<int, 4, PoolAllocator, Retention>;
  using Sequence = typename Tree::Sequence;

  explicit Scenario(TreeOptions options)
      : tree(PoolAllocator{.max_chunks = 200}, options,
             Retention{RetentionOptions{.max_pinned = 20}}) {}

  std::map<std::string, Said> all_said() const {
    std::map<std::string, Said> all;
    for (auto& [name, s] : live)
      all[name] = {s.tokens(),      s.num_reserved(), s.num_scheduled(), s.num_uncomputed(),
                   s.num_written(), s.num_pending(),  s.loadable()};
    return all;
  }

  /// Runs `operation`; where an allocation fails, nothing may have changed, and it works again.
  template <class F>
  void attempt(const F& operation) {
    const auto before = all_said();
    const TreeStats stats = tree.stats();
    const std::size_t num_states = states.stats().count;
    const int rows = open ? open->num_rows() : 0;
    test::heap.fail_in = countdown;  // counts on only within operations
    try {
      operation();
      countdown = test::heap.fail_in;
      test::heap.fail_in = -1;
    } catch (const std::bad_alloc&) {
      countdown = test::heap.fail_in = -1;
      check_invariants(tree);
      REQUIRE(all_said() == before);
      const TreeStats now = tree.stats();
      REQUIRE(now.live_sequences == stats.live_sequences);
      REQUIRE(now.leaving_sequences == stats.leaving_sequences);
      REQUIRE(now.stored_tokens == stats.stored_tokens);
      REQUIRE(now.used_chunks == stats.used_chunks);
      REQUIRE(states.stats().count == num_states);
      REQUIRE((open ? open->num_rows() : 0) == rows);
      operation();
    }
    check_invariants(tree);
  }

  void join(const std::string& name, const std::vector<int>& prompt, InsertOptions o = {}) {
    std::optional<Sequence> s;
    attempt([&] { s = tree.try_insert(prompt, o); });
    live.emplace(name, std::move(*s));
  }
  void fork(const std::string& from, const std::string& to, std::size_t shorter = 0) {
    std::optional<Sequence> s;
    const std::size_t length = live.at(from).size() - shorter;
    attempt([&] { s = live.at(from).try_fork(length); });
    live.emplace(to, std::move(*s));
  }

  // A step of everybody, up to `max_tokens` tokens each, with drafts for some, a chain or a tree.
  void begin(std::size_t max_tokens, std::size_t drafts = 0,
             std::vector<std::int32_t> parents = {}) {
    attempt([&] { open.emplace(tree.begin_step()); });
    const std::vector<int> guessed = iota(900, drafts);
    for (int pass = 0; pass < 2; ++pass)  // once more for those that waited for others
      for (auto& [name, sequence] : live) {
        auto& s = sequence;  // clang before 16 captures no structured bindings
        if (s.num_uncomputed() == 0 && s.num_reserved() == 0) continue;
        if (added.count(name) > 0) continue;
        bool is_added = false;
        attempt([&] {
          is_added = static_cast<bool>(
              parents.empty() ? open->add(s, max_tokens, {.tokens = guessed})
                              : open->add(s, max_tokens, {.tokens = guessed, .parents = parents}));
        });
        if (is_added) added.insert({name, 0});
      }
    added.clear();
    attempt([&] { (void)plan.build(*open); });
  }
  void submit() {
    attempt([&] { in_flight.push_back(std::move(*open).submit()); });
    open.reset();
  }
  /// \param leaf  of a tree, the draft that is right, with those before it
  void finish(int output, std::int32_t leaf = -1, const std::vector<int>& branch = {}) {
    std::optional<typename Tree::Finished> finished;
    attempt([&] { finished.emplace(std::move(in_flight.front()).finish()); });
    in_flight.erase(in_flight.begin());
    std::vector<ScheduledSequence> rows;
    for (const ScheduledSequence row : finished->rows()) rows.push_back(row);
    std::vector<int> outputs = branch;
    outputs.push_back(output);
    for (const ScheduledSequence& row : rows)
      attempt([&] { finished->commit(row, outputs, leaf); });
  }
  void step(std::size_t max_tokens, int output) {
    begin(max_tokens);
    submit();
    finish(output);
  }
  void save(const std::string& name, std::size_t position) {
    bool is_kept = false;
    attempt([&] { is_kept = states.save(live.at(name), position, state); });
    REQUIRE(is_kept);
    REQUIRE(states.find(live.at(name).tokens(), live.at(name).options()) >= position);
  }
  void decode(int steps) {
    for (int i = 0; i < steps; ++i) step(100, 1000 + i);
  }

  void run() {
    in_flight.reserve(4);
    join("a", iota(0, 30));
    join("b", iota(0, 17));
    join("equal", iota(0, 30));
    begin(5);
    join("late", iota(0, 8), {.share_pending = false});
    submit();
    begin(100);
    submit();
    finish(1);
    finish(2);
    decode(3);
    for (std::size_t position = 3; position < 28; position += 3) save("equal", position);
    save("b", 16);  // one more than a path may have
    fork("a", "a2");
    fork("a2", "a3");
    fork("equal", "shorter", 12);
    decode(3);
    begin(100);  // dropped before it runs
    attempt([&] { open.reset(); });
    attempt([&] { live.at("b").append(iota(500, 9)); });
    begin(100, 3);  // drafts
    submit();
    begin(100);
    fork("b", "b2");
    submit();
    finish(900);
    finish(7);
    begin(100, 4, {-1, -1, 1, 0});  // of 900 … 903 the main branch is 901, 902
    submit();
    finish(7, 3, {900, 903});
    decode(1);
    join("tenant", iota(0, 30), {.name_space = {.tenant = 3}, .public_length = 10, .priority = 5});
    typename Tree::Pin pin;
    attempt([&] { pin = tree.pin(iota(0, 11)); });
    begin(5);
    submit();
    attempt([&] { in_flight.clear(); });  // dropped in flight
    attempt([&] { tree.device_idle(); });
    for (const char* name : {"a", "equal", "b2"}) attempt([&] { live.erase(name); });
    std::optional<SwappedSequence<int>> swapped;
    KvCache<Cpu, float> cache(tree, {.num_layers = 1, .num_kv_heads = 1, .head_dim = 8});
    attempt([&] { swapped = swap_out(live.at("b"), cache); });
    live.erase("b");
    std::optional<Sequence> back;
    attempt([&] { back = resume(tree, cache, *swapped); });
    live.emplace("b", std::move(*back));
    attempt([&] { live.at("b").truncate(live.at("b").size() - 3); });
    for (int i = 0; i < 12; ++i) join("x" + std::to_string(i), iota(i % 5 * 100, 40));
    attempt([&] { live.at("x3").take_over(); });
    attempt([&] { live.at("x3").mark_loaded(live.at("x3").loadable()); });
    step(100, 3);
    attempt([&] { pin = {}; });
    attempt([&] { tree.clear(); });
    for (int i = 0; i < 12; ++i) attempt([&] { live.erase("x" + std::to_string(i)); });
  }

  std::int64_t countdown = -1;
  Tree tree;
  Checkpoints<Tree> states{tree, {.max_count = 30, .max_per_path = 9}};
  const std::shared_ptr<const int> state = std::make_shared<const int>(1);
  AttentionPlan plan;
  std::map<std::string, Sequence> live;
  std::map<std::string, int> added;
  std::optional<typename Tree::Step> open;
  std::vector<typename Tree::InFlight> in_flight;
};

template <class Retention>
void fail_everywhere(TreeOptions options) {
  std::uint64_t failures = 0;
  for (std::int64_t at = 0;; ++at) {
    const std::int64_t outstanding = test::heap.outstanding;
    const std::uint64_t failed = test::heap.failures;
    {
      Scenario<Retention> scenario(options);
      scenario.countdown = at;
      scenario.run();
      scenario.live.clear();
      scenario.tree.clear();
      check_invariants(scenario.tree);
      REQUIRE(scenario.tree.stats().used_chunks == 0);
      REQUIRE(scenario.tree.chunks_available() == 200);
    }
    REQUIRE(test::heap.outstanding == outstanding);  // no leak
    if (test::heap.failures == failed) break;        // the scenario has no further allocation
    ++failures;
  }
  CHECK(failures > 50);
  std::printf("%llu allocations failed once each\n", static_cast<unsigned long long>(failures));
}

}  // namespace

TEST_CASE("every allocation of a scenario fails once") {
  fail_everywhere<test::NoRetention>({});
  fail_everywhere<RetentionOptions>({});
  fail_everywhere<test::ByPriority>({.min_run = 4});
  fail_everywhere<RetentionOptions>({.sharing = TreeOptions::Sharing::chunk});
}

TEST_CASE("what is refused changes nothing") {
  using Tree = PrefixTree<int, 4, PoolAllocator, test::NoRetention>;
  Tree tree(PoolAllocator{.max_chunks = 2}, {}, test::NoRetention{{.max_pinned = 1}});
  auto s = tree.insert(iota(0, 7));
  (void)tree.begin_step();
  const std::vector<int> long_prompt = iota(100, 9), unwritten = iota(0, 3);
  const auto refused = [&] {
    CHECK_FALSE(tree.try_insert(long_prompt));
    CHECK_FALSE(tree.pin(unwritten));
    CHECK_FALSE(s.try_fork(3));
  };
  refused();
  const std::uint64_t before = test::heap.allocations;
  for (int i = 0; i < 1000; ++i) refused();
  CHECK(test::heap.allocations - before < 10);
}

TEST_CASE("where another plan fails to be built, the step has the one before, or none") {
  int kept = 0, gone = 0;
  for (std::int64_t at = 0;; ++at) {
    PrefixTree<int, 4, PoolAllocator, test::NoRetention> tree;
    auto source = tree.insert(iota(0, 7));
    source.mark_loaded({0, 7});
    auto s = source.fork();  // whose copies the plan carries
    s.append(9);
    auto step = tree.begin_step();
    REQUIRE(step.add(s));
    AttentionPlan plan, other;
    const auto view = plan.build(step);
    test::heap.fail_in = at;
    bool failed = false;
    try {
      (void)other.build(step);
    } catch (const std::bad_alloc&) {
      failed = true;
    }
    test::heap.fail_in = -1;
    if (!failed) break;
    if (view.is_current()) {
      ++kept;
    } else {
      ++gone;
      CHECK_THROWS_AS((void)std::move(step).submit(), InvalidArgument);
      (void)plan.build(step);
    }
    const auto flight = std::move(step).submit();
    check_invariants(tree);
  }
  CHECK(kept + gone > 3);
  CHECK(gone > 0);
}

TEST_CASE("arrays that could not be rebuilt are not taken for those of the step before") {
  int failures = 0;
  for (const bool again : {false, true})
    for (std::int64_t at = 0;; ++at) {
      PrefixTree<int, 16, PoolAllocator, test::NoRetention> tree;
      std::vector<PrefixTree<int, 16, PoolAllocator, test::NoRetention>::Sequence> all;
      for (const int first : {0, 100, 200, 300}) {  // two short ones, and two long ones
        all.push_back(tree.insert(iota(first, first < 200 ? 3 : 40)));
        all.back().append(iota(first + 50, 2));
        if (first < 200) all.back().mark_loaded({0, 4});
      }
      AttentionPlan plan, fresh;
      const auto short_step = [&] {
        auto step = tree.begin_step();
        REQUIRE(step.add(std::span(all).first(2)));
        return step;
      };
      const auto check = [&](auto& step) {
        const auto view = plan.build(step);
        const std::vector<std::int32_t> row_kv_len(view.row_kv_len,
                                                   view.row_kv_len + view.num_rows);
        const std::vector<std::int32_t> row_token(view.row_token, view.row_token + view.num_rows);
        const int num_segments = view.num_segments;
        REQUIRE(static_cast<int>(row_kv_len.size()) == step.num_rows());
        const auto right = fresh.build(step);
        REQUIRE(num_segments == right.num_segments);
        REQUIRE(row_kv_len ==
                std::vector<std::int32_t>(right.row_kv_len, right.row_kv_len + right.num_rows));
        REQUIRE(row_token ==
                std::vector<std::int32_t>(right.row_token, right.row_token + right.num_rows));
      };
      {
        auto step = short_step();
        (void)plan.build(step);
        auto done = std::move(step).finish();
        done.commit(std::vector<int>{1, 2});
      }
      bool failed = false;
      const std::uint64_t version = tree.version();
      {
        auto step = tree.begin_step();
        REQUIRE(step.add(std::span(all).last(2)));
        test::heap.fail_in = at;
        try {
          (void)plan.build(step);
        } catch (const std::bad_alloc&) {
          failed = true;
        }
        test::heap.fail_in = -1;
        if (again) check(step);
      }
      REQUIRE(tree.version() == version);  // so that the plan could be one of the short step
      auto step = short_step();
      check(step);
      if (!failed) break;
      ++failures;
    }
  CHECK(failures > 5);
}

TEST_CASE("a constructor that runs out of memory leaks nothing") {
  using Tree = PrefixTree<int, 4, PoolAllocator, test::ByPriority>;
  for (std::int64_t at = 0;; ++at) {
    const std::int64_t outstanding = test::heap.outstanding;
    test::heap.fail_in = at;
    bool failed = false;
    try {
      Tree tree;
      Checkpoints states(tree, {.max_count = 1});
    } catch (const std::bad_alloc&) {
      failed = true;
    }
    test::heap.fail_in = -1;
    REQUIRE(test::heap.outstanding == outstanding);
    if (!failed) break;
    CHECK(at < 20);
  }
}

TEST_CASE("a tree of drafts for which chunks are missing changes nothing") {
  using Tree = PrefixTree<int, 4>;
  Tree tree(PoolAllocator{.max_chunks = 6});
  tree.insert(iota(100, 4)).mark_loaded({0, 4});  // stays cached
  auto many = tree.insert(iota(0, 8)), first = tree.insert({50, 51}),
       second = tree.insert({60, 61});
  AttentionPlan plan;
  auto step = tree.begin_step();
  const TreeStats before = tree.stats();
  const std::uint64_t version = tree.version();
  // One chunk is free and one is cached. This takes one for the tail, and two beside it.
  const std::vector<int> drafts = {1, 2, 3, 4, 5, 6, 7};
  const std::vector<std::int32_t> parents = {-1, 0, -1, -1, -1, -1, -1};
  const AddResult result = step.add(many, 100, {.tokens = drafts, .parents = parents});
  CHECK(result.reason() == AddResult::Reason::out_of_chunks);
  CHECK(tree.version() == version);
  CHECK(tree.stats().leaving_sequences == 0);
  CHECK(tree.stats().failed_adds == before.failed_adds + 1);
  CHECK(tree.chunks_available() == 2);
  check_invariants(tree);
  // These fit: two tails have room, and their other drafts share a chunk.
  const auto two = [&](std::size_t begin) {
    return Drafts<int>{.tokens = std::span(drafts).subspan(begin, 2),
                       .parents = std::span(parents).last(2)};
  };
  REQUIRE(step.add(first, 100, two(0)));
  REQUIRE(step.add(second, 100, two(2)));
  CHECK(step.num_rows() == 8);
  CHECK(tree.chunks_available() == 1);
  CHECK(tree.stats().evicted_chunks == 0);
  const auto view = plan.build(step);
  CHECK(view.tokens() == std::vector<int>{50, 51, 1, 2, 60, 61, 3, 4});
  CHECK(view.positions() == std::vector<std::int32_t>{0, 1, 2, 2, 0, 1, 2, 2});
  const auto& copies = chunkattn::detail::TreeAccess::core(tree).pending_copies;
  {
    auto done = std::move(step).finish();
    std::vector<ScheduledSequence> rows(done.rows().begin(), done.rows().end());
    done.commit(rows[0], std::vector<int>{1, 7}, 0);
    CHECK(copies.empty());  // the main branch stands there already
    done.commit(rows[1], std::vector<int>{4, 7}, 1);
    CHECK(copies.size() == 1);
  }
  CHECK(first.tokens() == std::vector<int>{50, 51, 1, 7});
  CHECK(second.tokens() == std::vector<int>{60, 61, 4, 7});
  CHECK(tree.match_prefix(iota(100, 4)).cached == 4);
  check_invariants(tree);
}

TEST_CASE("a tree of drafts gives back a chunk that an eviction has made needless") {
  using Tree = PrefixTree<int, 4>;
  Tree tree(PoolAllocator{.max_chunks = 3});
  tree.insert(iota(0, 4)).mark_loaded({0, 4});
  auto s = tree.insert({0, 1});  // the slots after these are what is cached of that
  tree.insert(iota(100, 4)).mark_loaded({0, 4});  // cached, and younger
  CHECK(tree.chunks_available() == 2);
  const std::vector<int> drafts = {5, 6};
  const std::vector<std::int32_t> parents = {-1, -1};
  auto step = tree.begin_step();
  REQUIRE(step.add(s, 100, {.tokens = drafts, .parents = parents}));
  CHECK(tree.chunks_available() == 1);
  CHECK(tree.match_prefix(iota(0, 4)).cached == 2);
  CHECK(tree.match_prefix(iota(100, 4)).cached == 0);
  check_invariants(tree);
}

TEST_CASE("a request that there is no memory to queue leaves the queue as it was") {
  using Tree = PrefixTree<int, 4>;
  const Tree tree;
  const std::vector<int> short_one = iota(0, 4), long_one = iota(0, 12);
  int failures = 0;
  for (int queued = 0; queued < 20; ++queued)
    for (int fail_in = 0; fail_in < 2; ++fail_in) {
      AdmissionQueue<Tree> waiting;
      for (int i = 0; i < queued; ++i) waiting.push({long_one});
      test::heap.fail_in = fail_in;
      try {
        waiting.push({short_one});
      } catch (const std::bad_alloc&) {
        ++failures;
        REQUIRE(waiting.size() == static_cast<std::size_t>(queued));
      }
      test::heap.fail_in = -1;
      waiting.push({long_one});
      waiting.rank(tree);
      for (const AdmissionQueue<Tree>::Rank& rank : waiting.ranks())
        REQUIRE(rank.chunks == waiting.request(rank.id).prompt.size() / 4);
      REQUIRE(waiting.ranks().back().chunks == 3);
    }
  CHECK(failures > 4);
}
