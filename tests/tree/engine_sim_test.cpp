// A simulated engine on the tree agrees with a naive model, over many configurations; ./dev fuzz is
// the same for longer, engine_sim_sizes_test for other policies and sizes of chunks.
#include <doctest/doctest.h>

#include <cstdint>

#include "tests/support/engine_sim_all.hpp"

using namespace chunkattn;

namespace {

test::SimTotals totals;

}  // namespace

TEST_CASE("an engine whose tree has one level, chunks of 4") {
  test::run_all<test::TenantPolicy, 4>(totals, "one level", 1800);
}
TEST_CASE("an engine whose tree has a level for each priority, chunks of 4") {
  test::run_all<test::TenantPolicy, 4>(totals, "priority", 1200, true);
}
#if !defined(CHUNKATTN_TEST_ONE_POLICY)
TEST_CASE("an engine on LRU, chunks of 1") {
  test::run_all<RetentionOptions, 1>(totals, "LRU", 600);
}
#endif

TEST_CASE("every kind of event happened") {
  test::report(totals);
  if (totals.operations < 80000) return;  // a part of the tests was run
  const std::uint64_t least = totals.operations >= 800000 ? 100 : 1;
  for (const char* what : test::sim_events) {
    CAPTURE(what);
    CHECK(totals.counters[what] >= least);
  }
}
