// The engine simulation of engine_sim_test for larger chunks, and for a tree that caches nothing. A
// test of its own, as either takes a compiler close to a gigabyte.
#include <doctest/doctest.h>

#include "tests/support/engine_sim_all.hpp"
#include "tests/support/retention.hpp"

using namespace chunkattn;

namespace {

test::SimTotals totals;

}  // namespace

TEST_CASE("an engine without retention, chunks of 16") {
  test::run_all<test::NoRetention, 16>(totals, "no retention", 1200);
}
TEST_CASE("an engine whose tree has a level for each priority, chunks of 64") {
  test::run_all<test::TenantPolicy, 64>(totals, "priority", 600, true);
}

TEST_CASE("report") {
  test::report(totals);
}
