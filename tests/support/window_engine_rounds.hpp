// Rounds of the random engine with windows: each draws its model, its pools and its operations.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "chunkattn/prefix_tree.hpp"
#include "tests/support/random.hpp"
#include "tests/support/window_engine.hpp"

namespace test {

/// A model whose sequences fit into its pools, but not all at once.
inline WindowModel random_window_model(Random& random, int chunk_size) {
  const auto chunks = [&](int tokens) { return static_cast<std::size_t>(tokens / chunk_size + 3); };
  WindowModel model;
  const int most = chunk_size < 16 ? 30 : 100;
  for (int n = random.pick({1, 1, 1, 2, 2, 3}); n > 0; --n)
    model.windows.push_back(random.uniform(1, random.pick({3, most, most})));
  model.max_text = random.uniform(40, 200);
  model.max_chunks = static_cast<std::size_t>(random.uniform(3, 12)) * chunks(model.max_text + 30);
  model.max_window_chunks = static_cast<std::size_t>(random.uniform(1, 8)) * chunks(most + 50);
  if (random.chance(0.3)) model.max_cached = random.index(20);
  if (random.chance(0.7)) model.tree.min_run = random.uniform(1, chunk_size);
  if (random.chance(0.2)) model.tree.sharing = chunkattn::TreeOptions::Sharing::chunk;
  model.has_tiers = random.chance(0.3);
  return model;
}
template <int ChunkSize>
void run_window_round(WindowCounts& seen, Random& random, std::uint64_t stream, int operations) {
  const WindowModel model = random_window_model(random, ChunkSize);
  WindowEngine<ChunkSize, PlainAttention> engine(model, stream);
  for (int i = 0; i < operations; ++i) engine.operate();
  engine.finish();
  seen.add(engine.counts());
}
/// The round with this number of a run.
inline void run_window_round(WindowCounts& seen, std::uint64_t number, int operations) {
  Random random(2 * number);
  const std::uint64_t stream = 2 * number + 1;
  switch (random.uniform(0, 5)) {
    case 0:
      return run_window_round<4>(seen, random, stream, operations);
    case 1:
      return run_window_round<64>(seen, random, stream, operations);
    case 2:
      return run_window_round<128>(seen, random, stream, operations);
    default:
      return run_window_round<16>(seen, random, stream, operations);
  }
}

}  // namespace test
