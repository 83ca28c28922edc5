// CudaOptions::Reduce::batch_invariant on the (emulated) device: a row has the bits that it has
// alone, whatever else is in the batch, whatever was cached, wherever its K and V lie.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <random>
#include <span>
#include <utility>
#include <vector>

#include "chunkattn/debug/attention.hpp"
#include "chunkattn/debug/reference.hpp"
#include "simt/attention.hpp"
#include "simt/engine.hpp"
#include "support/attention_case.hpp"
#include "support/level_plan.hpp"
#include "support/row_alone.hpp"
#include "support/schedule_summary.hpp"
#include "support/variant_cases.hpp"

namespace {

using namespace chunkattn;
using detail::cuda::HeadDims;
using detail::cuda::invariant_block;
using detail::cuda::invariant_tile_rows;
using detail::cuda::Scheduler;
using detail::cuda::Task;
using test::Random;
using test::same_bits;
using Reduce = CudaOptions::Reduce;

detail::cuda::CostModel invariant_model() {
  detail::cuda::CostModel model = simt::eager_model();
  model.batch_invariant = true;
  return model;
}

/// Decoding rows, prefills, drafts: paths of up to five blocks, branches anywhere.
test::RandomPlan random_plan(Random& random) {
  test::RandomPlanOptions options;
  options.share = random.pick({test::Share::some, test::Share::all, test::Share::none});
  options.num_sequences = random.uniform(1, 7);
  options.chunk_size = random.pick({16, 24, 64});
  options.max_length = random.pick({90, 500});
  options.max_queries = random.pick({1, 1, 5, 40});
  test::RandomPlan plan = test::make_random_plan(random, options);
  // Some rows see less: their queries lie somewhere in the middle of what others read.
  for (std::int32_t& kv_len : plan.row_kv_len)
    if (random.chance(0.2)) kv_len = random.uniform(1, kv_len);
  random.shuffle(plan.row_token);
  return plan;
}

/// All rows of a plan at once, by any turns of blocks, against the oracle; then rows alone.
template <class T, HeadDims Dims, class E = T, class Case = test::PlainCase>
void check_rows(Random& random, const test::RandomPlan& plan, int most_alone = 4) {
  const int group = random.pick({1, 3, 4, 8, 17});
  const int num_kv_heads = random.uniform(1, 2);
  CAPTURE(Dims.k);
  CAPTURE(group);
  CAPTURE(num_kv_heads);
  test::AttentionCase<E, T> problem(random, plan, Dims.k, num_kv_heads, group,
                                    random.pick({1.0f, 8.0f}), Dims.v);
  const Case variant(random, {problem.num_qo_heads});
  const auto run = [&](const KvView<E>& kv, const LiveView& view, std::span<const T> q) {
    simt::shuffle_turns(random);
    return simt::attention_step<T, Dims>(kv, view, q, invariant_model(), random.uniform(2, 3),
                                         random.uniform(1, 4), 0, variant.variant);
  };
  const LiveView view = problem.plan.view();
  const auto all = run(problem.kv.view, view, problem.q);
  const auto reference = reference_attention(problem.kv.view, view, std::span<const T>(problem.q),
                                             {}, variant.definition);
  CHECK(compare_with_reference(reference, std::span<const T>(all.out), unit_roundoff<T>()).ok());
  CHECK(test::worst_lse(reference, all.lse, unit_roundoff<T>()) <= 1.0);

  const auto heads = static_cast<std::size_t>(problem.num_qo_heads);
  const std::size_t q_size = heads * std::size_t{Dims.k}, out_size = heads * std::size_t{Dims.v};
  for (int i = 0; i < std::min(most_alone, plan.num_rows()); ++i) {
    const int row = random.uniform(0, plan.num_rows() - 1);
    const test::RowAlone<E> alone(random, view, problem.kv.view, row);
    const auto token = static_cast<std::size_t>(plan.row_token[static_cast<std::size_t>(row)]);
    const auto got = run(alone.kv.view, LiveView::unchecked(alone.plan.view()),
                         std::span<const T>(problem.q).subspan(token * q_size, q_size));
    CAPTURE(row);
    CAPTURE(plan.row_kv_len[static_cast<std::size_t>(row)]);
    CHECK(same_bits<T>(got.out, std::span(all.out).subspan(token * out_size, out_size)));
    CHECK(same_bits<float>(got.lse, std::span(all.lse).subspan(token * heads, heads)));
  }
}

template <class T, HeadDims Dims, class E = T, class Case = test::PlainCase>
void check_plans(std::uint64_t seed, int rounds) {
  CAPTURE(seed);
  Random random(seed);
  for (int round = 0; round < rounds; ++round) {
    CAPTURE(round);
    check_rows<T, Dims, E, Case>(random, random_plan(random));
  }
}

}  // namespace

TEST_CASE("a row has the bits of the same row alone: K/V of 16 bits") {
  check_plans<half, 16>(301, test::scaled(20));
  check_plans<half, 64>(302, 2);
#if !defined(CHUNKATTN_FEW_KERNELS)
  check_plans<bfloat16, 16>(303, 3);
  check_plans<bfloat16, 128>(304, 1);
  check_plans<half, HeadDims{64, 16}>(306, 1);
  check_plans<half, 256>(307, 1);
#endif
}

#if !defined(CHUNKATTN_FEW_KERNELS)
TEST_CASE("a row has the bits of the same row alone: K/V of 8 bits") {
  check_plans<half, 16, std::int8_t>(311, 4);
  check_plans<half, 16, float8_e4m3>(312, 2);
}

TEST_CASE("a row has the bits of the same row alone: variants") {
  check_plans<half, 16, half, test::WindowCase>(321, test::scaled(12));
  check_plans<half, 16, half, test::SinksCase>(323, 3);
  check_plans<half, 16, std::int8_t, test::WindowCase>(325, 3);
}
#endif

TEST_CASE("a decoding batch of many rows beside one prefix: several tiles") {
  Random random(331);
  for (const int shared : {255, 256, 257, 700}) {
    CAPTURE(shared);
    check_rows<half, 16>(random, test::make_two_level_plan(30, shared, random.uniform(1, 300)), 3);
  }
}

TEST_CASE("rows whose lengths go beyond their paths see all of these") {
  Random random(335);
  test::RandomPlan plan = test::make_two_level_plan(3, 300, 100);
  const test::AttentionCase<half, half> problem(random, plan, 16, 1, 2);
  const auto run = [&] {
    return simt::attention_step<half, 16>(problem.kv.view, plan.view(),
                                          std::span<const half>(problem.q), invariant_model());
  };
  const auto expected = run();
  for (std::int32_t& length : plan.row_kv_len) length += 300;
  CHECK(same_bits<half>(run().out, expected.out));
}

TEST_CASE("what an invariant list streams") {
  const test::RandomPlan plan = test::make_two_level_plan(30, 2 * invariant_block + 188, 20);
  Scheduler list;
  const detail::cuda::Geometry geometry{2, 2, 16};
  list.build(plan.view(), geometry, invariant_model(), {1u << 10, 1u << 10, 1u << 20});
  const test::ScheduleSummary summary = test::summarize(list, geometry);
  CHECK(summary.kv_tokens == 2 * invariant_block + 30 * (188 + 20));
  CHECK(summary.kv_bytes == summary.kv_tokens * 2 * 2 * 16 * 2);
  CHECK(list.num_partials() == 2 * 30 * 2);
  CHECK(summary.partial_bytes == list.num_partials() * 2 * 17 * 4);
}

TEST_CASE("a row has partial results of the blocks before its last, and of no others") {
  test::RandomPlan plan = test::make_two_level_plan(6, 700, 10);
  constexpr int block = invariant_block;
  plan.row_kv_len = {block, block + 1, 2 * block, 2 * block + 1, 300, block};
  Scheduler list;
  list.build(plan.view(), {4, 2, 16}, invariant_model(), {1u << 10, 1u << 10, 1u << 20});
  CHECK(list.num_partials() == (4 + 1) * 4);
  // Rows may see more of their last blocks; whichever enters another one makes the list stale.
  for (std::int32_t& length : plan.row_kv_len) length += length % block == 0 ? 0 : 1;
  CHECK(list.keeps_blocks(plan.view()));
  for (std::int32_t& length : plan.row_kv_len) {
    const std::int32_t before =
        std::exchange(length, length > 2 * block ? length - block : length + block);
    CHECK(!list.keeps_blocks(plan.view()));
    length = before;
  }
}

TEST_CASE("a block is left out where all of its tokens are hidden, to the first and the last one") {
  constexpr int block = invariant_block;
  const test::RandomPlan plan = test::make_two_level_plan(1, 2 * block, 10);
  const auto partials = [&](KeyRange hidden) {
    Scheduler list;
    list.build(plan.view(), {1, 1, 16}, invariant_model(), {1u << 10, 1u << 10, 1u << 20}, &hidden);
    return list.num_partials();
  };
  CHECK(partials({block, 2 * block}) == 1);
  CHECK(partials({block + 1, 2 * block}) == 2);
  CHECK(partials({block, 2 * block - 1}) == 2);
  CHECK(partials({0, 2 * block}) == 0);
  CHECK(partials({1, 2 * block}) == 1);
  CHECK(partials({0, block - 1}) == 2);
}

TEST_CASE("an invariant list: blocks at multiples of their size, tiles of one height, path order") {
  Random random(341);
  for (int round = 0; round < test::scaled(200); ++round) {
    CAPTURE(round);
    const test::RandomPlan plan = random_plan(random);
    const int group = random.pick({1, 3, 8}), kv_heads = random.uniform(1, 2);
    Scheduler list;
    list.build(plan.view(), {group * kv_heads, kv_heads, 16}, invariant_model(),
               {1u << 16, 1u << 16, 1u << 28});
    const std::vector<Task>& tasks = list.tasks();
    const auto first_last = static_cast<std::size_t>(list.num_chunk_first());
    std::int64_t partials = 0;
    for (std::size_t t = 0; t < tasks.size(); ++t) {
      CHECK(tasks[t].tile_rows == invariant_tile_rows);
      CHECK(tasks[t].position_begin % invariant_block == 0);
      if (t >= first_last) continue;
      CHECK(tasks[t].position_end == tasks[t].position_begin + invariant_block);
      CHECK(tasks[t].flag == static_cast<int>(t));
      partials += tasks[t].row_count * kv_heads;
    }
    CHECK(partials == list.num_partials());
    std::vector<int> written(plan.row_token.size() * static_cast<std::size_t>(group));
    for (std::size_t t = first_last; t < tasks.size(); ++t) {
      const Task& task = tasks[t];
      if (t > first_last) CHECK(task.merge_count <= tasks[t - 1].merge_count);
      CHECK(task.merge_count == task.position_begin / invariant_block);
      for (int packed = task.row_begin; packed < task.row_begin + task.row_count; ++packed) {
        ++written[static_cast<std::size_t>(packed)];
        const int kv_len = plan.row_kv_len[static_cast<std::size_t>(packed / group)];
        CHECK((kv_len - 1) / invariant_block == task.merge_count);
        for (int b = 0; b < task.merge_count; ++b) {  // the task that makes it
          const auto& merge = list.merges()[static_cast<std::size_t>(task.merge_begin + b)];
          const int tile = (packed - merge.row_begin) >> merge.tile_bits;
          const Task& from = tasks[static_cast<std::size_t>(merge.flag + tile)];
          CHECK(from.position_begin == b * invariant_block);
          CHECK(from.partial_base == merge.partial_base);
          CHECK((packed >= from.row_begin && packed < from.row_begin + from.row_count));
        }
      }
    }
    CHECK(std::ranges::all_of(written, [](int times) { return times == 1; }));
  }
}

namespace {

using simt::DeviceArray, simt::head_dim, simt::kv_heads, simt::qo_heads;
template <int ChunkSize>
using TreeOf = PrefixTree<int, ChunkSize>;
using Attention = ChunkAttention<Cuda, head_dim>;

/// K, V or Q of a token as a model would compute it: a function of the tokens up to it.
void fill(std::span<half> row, std::span<const int> path, std::uint64_t kind) {
  std::uint64_t hash = kind * 0x9e3779b97f4a7c15u;
  for (int token : path) hash = (hash ^ static_cast<std::uint64_t>(token)) * 0xff51afd7ed558ccdu;
  std::mt19937_64 random(hash);
  std::normal_distribution<float> normal;
  for (half& x : row) x = to_half(normal(random));
}

/// Outputs and lse (whose bits show more) of a sequence's positions, plain and through a window;
/// those that were computed.
using Outputs = std::vector<std::optional<std::vector<float>>>;

void append_row(std::vector<float>& to, std::span<const half> out, std::span<const float> lse) {
  for (const half x : out) to.push_back(to_float(x));
  to.insert(to.end(), lse.begin(), lse.end());
}

/// A tree and a cache of its own, and one layer with and without a window.
template <int ChunkSize>
struct Engine {
  using Tree = TreeOf<ChunkSize>;
  using Sequence = typename Tree::Sequence;
  static constexpr SlidingWindow window{100, 4};

  Tree tree;
  KvCache<Cuda, half> kv{tree, {1, kv_heads, head_dim}};
  Attention attention;
  simt::Stream stream;
  AttentionPlan plan;

  explicit Engine(int max_rows, Reduce reduce = Reduce::batch_invariant)
      : attention({.max_rows = max_rows,
                   .num_qo_heads = qo_heads,
                   .num_kv_heads = kv_heads,
                   .max_partial_rows = 6 * max_rows},
                  {.reduce = reduce}) {}

  /// Computes what sequences have not, in steps of up to `most` tokens of each.
  std::vector<Outputs> compute(std::vector<Sequence*> sequences, Random& random, int most) {
    std::vector<Outputs> outputs(sequences.size());
    while (true) {
      auto step = tree.begin_step();
      std::vector<std::pair<std::size_t, ScheduledSequence>> rows;
      for (std::size_t i = 0; i < sequences.size(); ++i) {
        const auto added =
            step.add(*sequences[i], 1 + random.index(static_cast<std::size_t>(most)));
        if (added) rows.push_back({i, added.row()});
      }
      const auto view = plan.build(step);
      if (!view) return outputs;
      const auto n = static_cast<std::size_t>(view.num_rows);
      constexpr std::size_t kv_size = kv_heads * head_dim, q_size = qo_heads * head_dim;
      DeviceArray<half> k(n * kv_size), v(n * kv_size), q(n * q_size);
      DeviceArray<half> outs[] = {DeviceArray<half>(n * q_size), DeviceArray<half>(n * q_size)};
      DeviceArray<float> lses[] = {DeviceArray<float>(n * qo_heads),
                                   DeviceArray<float>(n * qo_heads)};
      std::size_t at = 0;
      for (const auto& [i, row] : rows)
        for (std::int32_t p = row.position; p < row.position + row.num_rows; ++p, ++at) {
          const auto tokens = sequences[i]->tokens();
          const auto path = std::span(tokens).first(static_cast<std::size_t>(p) + 1);
          fill(k.span().subspan(at * kv_size, kv_size), path, 1);
          fill(v.span().subspan(at * kv_size, kv_size), path, 2);
          fill(q.span().subspan(at * q_size, q_size), path, 3);
        }
      simt::shuffle_turns(random);
      attention.write(kv.layer(0), view, k.span(), v.span(), &stream);
      const auto out_of = [&](int call, std::size_t first, std::size_t count) {
        return outs[call].span().subspan(first * q_size, count * q_size);
      };
      const auto lse_of = [&](int call, std::size_t first, std::size_t count) {
        return lses[call].span().subspan(first * qo_heads, count * qo_heads);
      };
      attention.run(kv.layer(0), view, q.span(), out_of(0, 0, n),
                    {.lse = lse_of(0, 0, n), .stream = &stream});
      attention.run(kv.layer(0), view, window, q.span(), out_of(1, 0, n),
                    {.lse = lse_of(1, 0, n), .stream = &stream});
      stream.drain();
      for (const auto& [i, row] : rows)
        for (int r = 0; r < row.num_rows; ++r) {
          outputs[i].resize(sequences[i]->tokens().size());
          auto& both = outputs[i][static_cast<std::size_t>(row.position + r)].emplace();
          const auto from = static_cast<std::size_t>(row.first_row + r);
          for (const int call : {0, 1})
            append_row(both, out_of(call, from, 1), lse_of(call, from, 1));
        }
      (void)std::move(step).finish();
    }
  }
};

/// How many of the outputs were computed in `some`, and are not those of `all`.
int differing(const Outputs& some, const Outputs& all, int& compared) {
  int different = 0;
  for (std::size_t p = 0; p < some.size(); ++p) {
    if (!some[p]) continue;
    ++compared;
    different += !same_bits<float>(*some[p], *all.at(p));
  }
  return different;
}

}  // namespace

TEST_CASE("a cache hit gives the bits of a cold run, in any batch, prefilled or decoded") {
  for (std::uint64_t seed = 351; seed < 351 + static_cast<std::uint64_t>(test::scaled(2)); ++seed) {
    CAPTURE(seed);
    Random random(seed);
    Engine<16> warm(250);
    std::vector<int> shared(200 + random.index(400));
    const auto draw = [&](std::vector<int>& tokens) {
      for (int& token : tokens) token = random.uniform(0, 49);
    };
    draw(shared);
    {
      auto first = warm.tree.insert(shared);
      (void)warm.compute({&first}, random, 200);
    }  // leaves its K and V in the cache
    std::vector<Engine<16>::Sequence> sequences;
    for (int i = 0; i < 4; ++i) {
      std::vector<int> own(i == 0 ? 1 : 1 + random.index(300));
      draw(own);
      std::vector<int> prompt = shared;
      prompt.insert(prompt.end(), own.begin(), own.end());
      sequences.push_back(warm.tree.insert(prompt));
    }
    CHECK(sequences[1].num_cached() >= shared.size() / 16 * 16);
    std::vector<Outputs> hit(5);
    const auto compute = [&](int most) {
      std::vector<Engine<16>::Sequence*> together;
      for (auto& sequence : sequences) together.push_back(&sequence);
      const auto outputs = warm.compute(together, random, most);
      for (std::size_t i = 0; i < together.size(); ++i) {
        hit[i].resize(together[i]->tokens().size());
        for (std::size_t p = 0; p < outputs[i].size(); ++p)
          if (outputs[i][p]) hit[i][p] = outputs[i][p];
      }
    };
    int compared = 0;
    const auto compare = [&] {
      for (std::size_t i = 0; i < sequences.size(); ++i) {
        Engine<64> cold(60);
        auto alone = cold.tree.insert(sequences[i].tokens());
        CHECK(differing(hit[i], cold.compute({&alone}, random, 60)[0], compared) == 0);
        hit[i].clear();
      }
    };
    compute(60);
    compare();
    // Forks anywhere, shorter ones; then single tokens over the next multiple of a block.
    sequences.push_back(sequences[1].fork(1 + random.index(sequences[1].tokens().size())));
    sequences[2].truncate(1 + random.index(sequences[2].tokens().size()));
    for (auto& sequence : sequences) {
      constexpr std::size_t block{invariant_block};
      std::vector<int> more((2 * block - 5 - sequence.tokens().size() % block) % block + 1);
      draw(more);
      sequence.append(more);
    }
    compute(50);
    const auto before = uploads_of(warm.attention);
    for (int i = 0; i < 9; ++i) {
      for (auto& sequence : sequences) sequence.append(random.uniform(0, 49));
      compute(1);
    }
    CHECK(uploads_of(warm.attention).advances > before.advances);
    compare();
    CHECK(compared > 500);
  }
  CHECK(simt::device().late_loads == 0);
}

TEST_CASE("by default the same rows do differ") {
  Random random(361);
  Engine<16> warm(250, Reduce::deterministic);
  Engine<64> cold(60, Reduce::deterministic);
  std::vector<int> tokens(700);
  for (int& token : tokens) token = random.uniform(0, 49);
  auto sequence = warm.tree.insert(tokens);
  auto alone = cold.tree.insert(tokens);
  int compared = 0;
  CHECK(differing(warm.compute({&sequence}, random, 200)[0], cold.compute({&alone}, random, 60)[0],
                  compared) > 0);
}

TEST_CASE("decode steps: a new list where a row enters a block, else the one there is; graphs") {
  simt::shuffled(371);
  Random random(371);
  Engine<512> engine(8), plain(8);  // no chunk ends with the block
  std::vector<int> tokens(invariant_block - 6);
  for (int& token : tokens) token = random.uniform(0, 49);
  auto sequence = engine.tree.insert(tokens);
  auto other = plain.tree.insert(tokens);
  (void)engine.compute({&sequence}, random, 8);
  (void)plain.compute({&other}, random, 8);
  constexpr std::size_t kv_size = kv_heads * head_dim, q_size = qo_heads * head_dim;
  DeviceArray<half> k(kv_size), v(kv_size), q(q_size), out(q_size), windowed(q_size);
  DeviceArray<float> lse(qo_heads), windowed_lse(qo_heads);
  std::unique_ptr<simt::Graph> captured;
  for (int i = 0; i < 16; ++i) {
    const int token = random.uniform(0, 49);
    sequence.append(token);
    other.append(token);
    auto step = engine.tree.begin_step();
    REQUIRE(bool(step.add(sequence, 1)));
    const auto view = engine.plan.build(step);
    const auto path = sequence.tokens();
    fill(k.span(), path, 1);
    fill(v.span(), path, 2);
    fill(q.span(), path, 3);
    const auto lists = uploads_of(engine.attention).schedules;
    engine.attention.prepare(view, &engine.stream);
    if (i == 0) {
      captured = std::make_unique<simt::Graph>(engine.stream);
      engine.attention.write(engine.kv.layer(0), view, k.span(), v.span(), &engine.stream);
      engine.attention.run(engine.kv.layer(0), view, q.span(), out.span(),
                           {.lse = lse.span(), .stream = &engine.stream});
      captured->end();
    } else if (path.size() == invariant_block + 1) {
      CHECK(uploads_of(engine.attention).schedules > lists);
    } else {
      CHECK(uploads_of(engine.attention).schedules == lists);
    }
    captured->replay();
    engine.attention.run(engine.kv.layer(0), view, engine.window, q.span(), windowed.span(),
                         {.lse = windowed_lse.span(), .stream = &engine.stream});
    engine.stream.drain();
    (void)std::move(step).finish();
    const auto expected = plain.compute({&other}, random, 1)[0];
    std::vector<float> got;
    append_row(got, out.span(), lse.span());
    append_row(got, windowed.span(), windowed_lse.span());
    CHECK(same_bits<float>(got, *expected.back()));
    if (i < 15) continue;
    Engine<512> cold(64);  // `plain` has kept lists, too
    auto whole = cold.tree.insert(path);
    CHECK(same_bits<float>(got, *cold.compute({&whole}, random, 64)[0].back()));
  }
  CHECK(simt::device().capture_violations == 0);
}

TEST_CASE("what it cannot hold is refused by name, and nothing has changed") {
  constexpr int blocks = 1200;  // more tasks and merges than other lists have room for
  const test::RandomPlan small = test::make_two_level_plan(3, 200, 20);
  const test::RandomPlan large = test::make_two_level_plan(3, blocks * invariant_block, 20);
  simt::Stream stream;
  const auto limits = [](int partial_rows) {
    return CudaOptions::Limits{.max_rows = 3,
                               .num_qo_heads = qo_heads,
                               .num_kv_heads = kv_heads,
                               .max_segments = 8,
                               .max_pieces = 8000,
                               .max_partial_rows = partial_rows};
  };
  Attention exact(limits(3 * blocks), {.reduce = Reduce::batch_invariant});
  CHECK_NOTHROW(exact.prepare(large.view(), &stream));
  stream.drain();
  Attention attention(limits(3 * blocks - 1), {.reduce = Reduce::batch_invariant});
  attention.prepare(small.view(), &stream);
  const auto before = uploads_of(attention);
  CHECK_THROWS_WITH_AS(attention.prepare(large.view(), &stream),
                       doctest::Contains("limits.max_partial_rows = 3599: expected at least 3600"),
                       InvalidArgument);
  attention.prepare(small.view(), &stream);
  CHECK(uploads_of(attention).uploads == before.uploads);  // the device still has it
  stream.drain();
  CHECK_THROWS_WITH_AS(Attention(limits(9), {.reduce = static_cast<Reduce>(7)}),
                       doctest::Contains("options.reduce = 7: expected Reduce::deterministic or"),
                       InvalidArgument);
}
