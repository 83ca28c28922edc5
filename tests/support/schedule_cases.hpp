// The cases that CUDA schedules are measured by: a shared prefix and what follows it, unshared
// sequences, published trees, and prefill.
#pragma once

#include <string>
#include <vector>

#include "chunkattn/detail/cuda/scheduler.hpp"
#include "level_plan.hpp"

namespace test {

struct ScheduleCase {
  std::string name;
  chunkattn::detail::cuda::Geometry geometry;
  std::vector<int> nodes, tokens;  ///< as make_level_plan() has them
  int queries = 1;
  [[nodiscard]] RandomPlan plan() const { return make_level_plan(nodes, tokens, queries); }
};

inline constexpr chunkattn::detail::cuda::Geometry mha{32, 32, 128}, gqa{32, 8, 128},
    mqa{16, 1, 128};

/// "query heads/KV heads b sequences, shared + own tokens".
inline std::vector<ScheduleCase> two_level_cases() {
  std::vector<ScheduleCase> cases;
  const auto add = [&](const chunkattn::detail::cuda::Geometry& geometry, int sequences, int shared,
                       int own) {
    cases.push_back({std::to_string(geometry.num_qo_heads) + "/" +
                         std::to_string(geometry.num_kv_heads) + " b " + std::to_string(sequences) +
                         ", " + std::to_string(shared) + "+" + std::to_string(own),
                     geometry,
                     {1, sequences},
                     {shared, own}});
  };
  for (const int shared : {1024, 2048, 4096}) {
    for (const int own : {0, 64, 512, 1024}) add(mha, 32, shared, own);
    add(mha, 32, 0, shared);
  }
  for (const int sequences : {1, 4, 16, 64, 96}) add(mha, sequences, 2048, 256);
  for (const int sequences : {64, 256})
    for (const int shared : {4096, 32768})
      for (const int own : {64, 512}) add(gqa, sequences, shared, own);
  for (const int sequences : {1, 8, 20, 48, 64, 256}) add(gqa, sequences, 0, 4096);
  return cases;
}

/// "query heads/KV heads b sequences, cached + new tokens", of which the new ones are query rows.
inline std::vector<ScheduleCase> prefill_cases() {
  std::vector<ScheduleCase> cases;
  const auto add = [&](const chunkattn::detail::cuda::Geometry& geometry, int sequences, int cached,
                       int queries) {
    cases.push_back({std::to_string(geometry.num_qo_heads) + "/" +
                         std::to_string(geometry.num_kv_heads) + " b " + std::to_string(sequences) +
                         ", prefill " + std::to_string(cached) + "+" + std::to_string(queries),
                     geometry,
                     {sequences},
                     {cached + queries},
                     queries});
  };
  for (const auto& geometry : {mha, gqa, mqa}) {
    for (const int queries : {512, 2048, 8192}) add(geometry, 1, 0, queries);
    for (const int queries : {128, 512, 2048}) add(geometry, 1, 8192, queries);
    add(geometry, 4, 0, 1024);
  }
  return cases;
}

/// FastTree (MLSys 2025), the trees of its kernel benchmark: "query heads/KV heads tree number:
/// levels".
inline std::vector<ScheduleCase> published_trees() {
  struct Tree {
    std::vector<int> nodes, tokens;
  };
  const Tree trees[] = {
      {{1, 2, 64}, {8, 256, 32}},
      {{1, 4, 256}, {8, 256, 32}},
      {{1, 4, 8, 256}, {8, 256, 256, 32}},
      {{1, 256}, {256, 32}},
      {{1, 1024}, {2048, 32}},
      {{1, 16, 64}, {1024, 256, 32}},
      {{1, 4, 16, 512}, {1024, 256, 128, 32}},
      {{1, 4, 16, 64, 256, 1024}, {256, 8, 256, 64, 32, 256}},
      {{1, 10}, {4000, 400}},
      {{1, 2, 4, 8, 16, 32, 64, 128, 1024}, {16, 16, 16, 16, 16, 16, 16, 16, 16}},
      {{1, 2, 4, 8, 16, 32, 64, 128, 1024}, {256, 128, 64, 16, 16, 16, 16, 16, 16}},
      {{1, 8, 16, 32, 64, 128, 1024}, {256, 128, 64, 16, 16, 16, 16}},
      {{1, 8, 16, 32, 64, 256, 1024}, {256, 128, 64, 16, 16, 16, 16}},
      {{1, 16, 32, 64, 128, 1024}, {256, 128, 64, 16, 16, 16}},
      {{1, 16, 32, 64, 256, 1024}, {256, 128, 64, 16, 16, 16}}};
  std::vector<ScheduleCase> cases;
  for (std::size_t t = 0; t < std::size(trees); ++t)
    for (const auto& geometry : {mha, gqa, mqa}) {
      std::string name = std::to_string(geometry.num_qo_heads) + "/" +
                         std::to_string(geometry.num_kv_heads) + " tree " + std::to_string(t + 1) +
                         ":";
      for (const int nodes : trees[t].nodes) name += " " + std::to_string(nodes);
      cases.push_back({name, geometry, trees[t].nodes, trees[t].tokens});
    }
  return cases;
}

}  // namespace test
