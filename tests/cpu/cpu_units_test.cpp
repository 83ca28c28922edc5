// Which unit computes a product does not depend on the number of threads either. Row blocks are cut
// into splits of unlike many lines here, on both sides of a matrix unit's threshold, and some
// queries are floats that dot products of pairs cannot hold.
#define CHUNKATTN_SOFTWARE_TILES 48
#define CHUNKATTN_SOFTWARE_DOTS

#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <span>
#include <vector>

#include "support/software_dots.hpp"
#include "support/software_tiles.hpp"
// after these:
#include "chunkattn/chunk_attention.hpp"
#include "chunkattn/debug/attention.hpp"
#include "support/level_plan.hpp"
#include "support/random.hpp"

using namespace chunkattn;

namespace {

constexpr int dim = 32;

// The splits of a row block in which rows are fewer than in all of it.
int num_narrow(const detail::cpu::Schedule& schedule) {
  int count = 0;
  for (const detail::cpu::RowBlock& block : schedule.row_blocks())
    for (int u = block.split_begin; u < block.split_begin + block.split_count; ++u)
      count += schedule.splits()[static_cast<std::size_t>(u)].num_rows() < block.num_rows();
  return count;
}

// Floats that are bfloat16 by value, but for those of some rows.
std::vector<float> make_queries(test::Random& random, int rows, int heads, double inexact) {
  std::vector<float> q(static_cast<std::size_t>(rows * heads * dim));
  random.fill(std::span(q));
  for (int row = 0; row < rows; ++row) {
    if (random.chance(inexact)) continue;
    for (int i = row * heads * dim; i < (row + 1) * heads * dim; ++i) {
      float& x = q[static_cast<std::size_t>(i)];
      x = to_float(to_bfloat16(x));
    }
  }
  return q;
}

template <class T>
void check_bits(test::Random& random, int sequences, double inexact, int& narrow) {
  const int branches = random.uniform(2, 3), heads = random.uniform(1, 2);
  const test::RandomPlan plan = test::make_level_plan(
      {1, branches, sequences}, {64 * random.uniform(20, 60), 64 * random.uniform(60, 140), 0});
  test::KvStorage<T> kv(plan.num_chunks, heads, plan.chunk_size, dim);
  fill_kv(random, plan, kv.view);
  const std::vector<float> q = make_queries(random, sequences, heads, inexact);
  std::vector<float> first;
  for (const int threads : {1, 2, 8}) {
    ChunkAttention<Cpu, dim> attention(threads);
    std::vector<float> out(q.size(), -1);
    attention.run(kv.view, plan.view(), q, out);
    if (first.empty()) first = out;
    CAPTURE(threads);
    CHECK(std::memcmp(out.data(), first.data(), out.size() * sizeof(float)) == 0);
    narrow += num_narrow(schedule_of(attention));
  }
}

}  // namespace

TEST_CASE("tiles or vectors: the same bits for any number of threads") {
  test::Random random(61);
  int narrow = 0;
  for (int i = 0; i < test::scaled(4) || (narrow == 0 && i < 200); ++i) {
    check_bits<half>(random, random.uniform(48, 120), 1, narrow);
    check_bits<bfloat16>(random, random.uniform(48, 120), 0.02, narrow);
  }
  CHECK(narrow > 0);
}

TEST_CASE("dot products of pairs or vectors: the same bits for any number of threads") {
  test::Random random(62);
  int narrow = 0;
  for (int i = 0; i < test::scaled(8) || (narrow == 0 && i < 400); ++i)
    check_bits<bfloat16>(random, random.uniform(26, 47), 0.05, narrow);
  CHECK(narrow > 0);
}
