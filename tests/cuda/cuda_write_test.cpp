// K/V of new tokens and row copies of forks by one launch, for every head dimension, of V too:
// under the emulator.
#include <doctest/doctest.h>

#include <cstddef>
#include <vector>

#include "simt/emulator.hpp"
#include "simt/executor.hpp"
#include "support/nan_place.hpp"
#include "support/random.hpp"
#include "support/random_plan.hpp"
// After the emulator, which takes the place of ptx.cuh.
#include "chunkattn/detail/cuda/tile_layout.hpp"
#include "chunkattn/detail/cuda/write.cuh"

namespace {

using chunkattn::half;
using chunkattn::KvView;
using namespace chunkattn::detail::cuda;

constexpr int chunk_size = 16;
constexpr int heads = 3;

struct Plan {
  PlanHeader header{};
  std::vector<chunkattn::PlanView::WriteTarget> writes;
  std::vector<chunkattn::PlanView::RowCopy> copies;

  PlanMemory memory() {
    PlanMemory memory{};
    memory.header = &header;
    memory.writes = writes.data();
    memory.copies = copies.data();
    return memory;
  }
};

// Chunks 0..3: copies go from 0 to 1 and within 1, tokens to 2 and 3.
Plan make_plan(int tokens) {
  Plan plan;
  plan.copies = {{0, 3, 1, 5, 7}, {0, 0, 1, 0, 2}};
  for (int t = 0; t < tokens; ++t) plan.writes.push_back({2 + t / chunk_size, t % chunk_size});
  plan.writes[static_cast<std::size_t>(tokens / 2)].chunk = chunkattn::no_chunk;
  plan.header.num_rows = tokens;
  plan.header.num_copies = static_cast<int>(plan.copies.size());
  return plan;
}

}  // namespace

TEST_CASE("tokens and row copies reach their places by one launch") {
  test::Random random(41);
  for (const HeadDims dims :
       {HeadDims{16}, HeadDims{64}, HeadDims{96}, HeadDims{128}, HeadDims{256}, HeadDims{192, 128},
        HeadDims{128, 16}, HeadDims{16, 64}})
    for (const int grid : {1, 3, 20}) {
      CAPTURE(dims.k);
      CAPTURE(dims.v);
      CAPTURE(grid);
      test::KvStorage<half> kv(4, heads, chunk_size, dims.k, dims.v);
      random.fill(std::span(kv.k));
      random.fill(std::span(kv.v));
      const test::KvStorage<half> before = test::copy_of<half>(kv);
      const int tokens = random.uniform(1, 2 * chunk_size);
      Plan plan = make_plan(tokens);
      std::vector<Words4> k(static_cast<std::size_t>(tokens * heads * dims.k / 8));
      std::vector<Words4> v(static_cast<std::size_t>(tokens * heads * dims.v / 8));
      const std::span<half> new_k(reinterpret_cast<half*>(k.data()), k.size() * 8);
      const std::span<half> new_v(reinterpret_cast<half*>(v.data()), v.size() * 8);
      random.fill(new_k);
      random.fill(new_v);
      simt::current_schedule() = {simt::Order::shuffled, simt::Copies::at_wait, random.bits()};
      simt::launch_kernel<WriteArguments<half>>(
          &write_kernel<half>, grid, small_threads, 0,
          {plan.memory(), kv.view, new_k.data(), new_v.data()});

      int wrong = 0;
      const auto expect = [&](int chunk, int head, int row, const half* k_row, const half* v_row) {
        for (int d = 0; d < dims.k; ++d) wrong += !(kv.view.k_row(chunk, head, row)[d] == k_row[d]);
        for (int d = 0; d < dims.v; ++d) wrong += !(kv.view.v_row(chunk, head, row)[d] == v_row[d]);
      };
      for (int head = 0; head < heads; ++head) {
        std::vector<int> written(4 * chunk_size, 0);
        for (int t = 0; t < tokens; ++t) {
          const auto target = plan.writes[static_cast<std::size_t>(t)];
          if (target.chunk == chunkattn::no_chunk) continue;
          const auto line = static_cast<std::size_t>(t * heads + head);
          expect(target.chunk, head, target.offset, &new_k[line * static_cast<std::size_t>(dims.k)],
                 &new_v[line * static_cast<std::size_t>(dims.v)]);
          ++written[static_cast<std::size_t>(target.chunk * chunk_size + target.offset)];
        }
        for (const auto& copy : plan.copies)
          for (int i = 0; i < copy.length; ++i) {
            expect(copy.target_chunk, head, copy.target_begin + i,
                   before.view.k_row(copy.source_chunk, head, copy.source_begin + i),
                   before.view.v_row(copy.source_chunk, head, copy.source_begin + i));
            ++written[static_cast<std::size_t>(copy.target_chunk * chunk_size + copy.target_begin +
                                               i)];
          }
        for (int place = 0; place < 4 * chunk_size; ++place) {  // and nothing else has changed
          if (written[static_cast<std::size_t>(place)] > 0) continue;
          const int chunk = place / chunk_size, row = place % chunk_size;
          expect(chunk, head, row, before.view.k_row(chunk, head, row),
                 before.view.v_row(chunk, head, row));
        }
      }
      CHECK(wrong == 0);
    }
}
