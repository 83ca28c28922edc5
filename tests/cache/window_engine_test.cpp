// Layers with windows in a random engine: see tests/support/window_engine.hpp.
#include "tests/support/window_engine.hpp"

#include <doctest/doctest.h>

#include <cstdint>

#include "tests/support/window_engine_rounds.hpp"

using namespace chunkattn;
using test::PlainAttention;
using test::WindowEngine;
using test::WindowModel;

namespace {

/// Adds to `seen` what happened.
template <int ChunkSize>
void run(test::WindowCounts& seen, const WindowModel& model, std::uint64_t stream, int operations) {
  WindowEngine<ChunkSize, PlainAttention> engine(model, stream);
  for (int i = 0; i < operations; ++i) engine.operate();
  engine.finish();
  seen.add(engine.counts());
}

TEST_CASE("a random engine gives each row its window") {
  const int n = test::scaled(1500);
  test::WindowCounts seen;
  run<16>(seen, {.windows = {40}, .max_chunks = 110, .max_window_chunks = 60, .has_tiers = true}, 1,
          n);
  run<16>(seen,
          {.windows = {100, 7}, .max_chunks = 150, .max_window_chunks = 90, .has_tiers = true}, 2,
          n);
  run<16>(seen, {.windows = {1}, .max_chunks = 200, .max_window_chunks = 40, .max_cached = 9}, 3,
          n);
  run<16>(seen, {.windows = {40}, .max_chunks = 110, .max_window_chunks = 26, .has_tiers = true}, 4,
          n);
  run<4>(seen,
         {.windows = {13}, .max_chunks = 500, .max_window_chunks = 120, .tree = {.min_run = 4}}, 5,
         n);
  run<64>(seen, {.windows = {72}, .max_chunks = 60, .max_window_chunks = 50}, 6, n);
  run<128>(seen,
           {.windows = {50}, .max_chunks = 40, .max_window_chunks = 30, .tree = {.min_run = 1}}, 7,
           n);
  run<16>(seen,
          {.windows = {2, 9}, .max_chunks = 110, .max_window_chunks = 60, .tree = {.min_run = 16}},
          9, n);
  run<16>(seen,
          {.windows = {20},
           .max_chunks = 110,
           .max_window_chunks = 60,
           .tree = {.sharing = TreeOptions::Sharing::chunk}},
          8, n);
  for (std::uint64_t round = 1; round <= 10; ++round) test::run_window_round(seen, round, n);
  if (n < 1500) return;  // fewer operations may not have it all
  CHECK(seen.resumed_early > 0);
  CHECK(seen.rejected > 0);
  CHECK(seen.lost > 0);
  CHECK(seen.copies > 0);
  CHECK(seen.swapped > 0);
  CHECK(seen.swapped_with_windows > 0);
  CHECK(seen.loaded > 0);
  CHECK(seen.groups > 0);
  CHECK(seen.not_viewed > 0);
  CHECK(seen.evicted > 0);
  CHECK(seen.resume.early > 0);  // by events
  CHECK(seen.resume.by_state > 0);
  CHECK(seen.resume.missed > 0);
  CHECK(seen.resume.ended > 0);
}

}  // namespace
