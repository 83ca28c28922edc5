// Random operations on the tree and the plan against the naive model, over many configurations.
// CHUNKATTN_TEST_SCALE=10 is a run of 1,000,000 operations, after which every kind of event must
// have happened at least 1,000 times.
#include <doctest/doctest.h>

#include <cstdint>
#include <cstdio>
#include <exception>
#include <string>

#include "tests/support/random.hpp"
#include "tests/support/tree_model_ops.hpp"

using namespace chunkattn;

namespace {

test::Counters totals;
std::uint64_t operations = 0, trees = 0;

template <class Retention>
void run(const char* name, const test::ModelOptions& options, int ops) {
  ops = test::scaled(ops);
  const int rounds = ops > 20000 ? ops / 20000 : 1;  // fresh trees now and then
  for (int round = 0; round < rounds; ++round) {
    test::RandomChoices choices(test::run_seed() + 0x9e3779b97f4a7c15u * ++trees);
    test::TreeModel<Retention, test::RandomChoices> model(choices, options, totals);
    int i = 0;
    try {
      for (; i < ops / rounds; ++i) {
        model.operate();
        if (i % 64 == 0)
          model.check_all();
        else
          model.tree().check_invariants();
        ++operations;
      }
      model.check_all();
      model.finish();
    } catch (const std::exception& error) {
      FAIL(std::string(name) << ", round " << round << ", operation " << i << ": " << error.what()
                             << "\n"
                             << model.history());
    }
  }
}

template <class Retention>
void run_all(const char* name, int ops) {
  test::ModelOptions o;
  for (const Sharing sharing : {Sharing::token, Sharing::chunk})
    for (const bool async : {false, true})
      for (const int min_run : {0, 1, 4}) {
        if (sharing == Sharing::chunk && min_run != 0) continue;
        o = {};
        o.tree = {.sharing = sharing, .min_run = min_run, .async_steps = async};
        o.retention.max_pinned = 40;
        run<Retention>(name, o, ops);  // no limit
        o.budget = 700;
        run<Retention>(name, o, ops);  // cache is evicted
        o.budget = 240;
        o.retention.max_pinned = 12;
        run<Retention>(name, o, ops);  // live sequences run out of slots
        o.budget = 900;
        o.retention.high_watermark = 500;
        o.retention.low_watermark = 430;
        if (Retention::retains) run<Retention>(name, o, ops / 2);
      }
}

}  // namespace

TEST_CASE("random operations agree with the naive model: NoRetention") {
  run_all<NoRetention>("NoRetention", 1300);
}
TEST_CASE("random operations agree with the naive model: Lru") {
  run_all<Lru>("Lru", 1600);
}
TEST_CASE("random operations agree with the naive model: Priority") {
  run_all<Priority>("Priority", 1300);
}

TEST_CASE("every kind of event happened") {
  std::printf("%llu operations\n", static_cast<unsigned long long>(operations));
  for (const auto& [what, n] : totals)
    std::printf("  %-40s %10llu\n", what.c_str(), static_cast<unsigned long long>(n));
  const std::uint64_t least = operations >= 1000000 ? 1000 : 1;
  if (operations < 10000) return;
  for (const char* what : {"split inside a slot",
                           "split between slots",
                           "fork copied its tail",
                           "fork shared its tail",
                           "fork beside a reservation",
                           "fork failed",
                           "hand-over",
                           "merged tokens",
                           "published tokens",
                           "evicted slots",
                           "insert failed",
                           "insert found cached",
                           "insert found pending",
                           "reserve failed",
                           "append failed",
                           "append refused",
                           "reserve refused",
                           "plan refused",
                           "plan advanced",
                           "plan rebuilt",
                           "draft dropped",
                           "draft and later reservations dropped",
                           "commit of a part",
                           "left while waiting for another",
                           "left in the middle of a prefill",
                           "pin",
                           "pin refused",
                           "found again after leaving",
                           "retire",
                           "rows copied",
                           "step lost before its commit"}) {
    CAPTURE(what);
    CHECK(totals[what] >= least);
  }
}
