// The CUDA kernels against the double-precision oracle, run on the host by tests/simt.
#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <span>
#include <vector>

#include "chunkattn/debug/reference.hpp"
#include "simt/attention.hpp"
#include "support/level_plan.hpp"
#include "support/nan_place.hpp"
#include "support/random.hpp"
#include "support/random_plan.hpp"
#include "support/schedule_summary.hpp"

namespace {

using chunkattn::bfloat16;
using chunkattn::half;
using chunkattn::detail::cuda::HeadDims;
using simt::shuffle_turns;

struct Case {
  test::RandomPlanOptions plan;
  int num_kv_heads = 1;
  int group = 1;
  int num_stages = 2;
  float k_deviation = 1.0f;
  bool never_share = false;
};

template <class T>
std::vector<T> random_queries(test::Random& random, std::size_t size) {
  std::vector<T> q(size);
  random.fill(std::span<T>(q));
  return q;
}

template <class T, HeadDims Dims>
simt::StepResult<T> check(test::Random& random, const Case& c) {
  const test::RandomPlan plan = test::make_random_plan(random, c.plan);
  test::KvStorage<T> storage(plan.num_chunks, c.num_kv_heads, c.plan.chunk_size, Dims.k, Dims.v);
  test::fill_kv(random, plan, storage.view, c.k_deviation);
  const auto q = random_queries<T>(
      random, static_cast<std::size_t>(plan.num_rows() * c.num_kv_heads * c.group * Dims.k));
  chunkattn::detail::cuda::CostModel model = simt::eager_model();
  if (c.never_share) model.wait_ps = std::int64_t{1} << 50;
  // Of few blocks each has more than one task: then tasks that merge stream K/V before.
  if (random.chance(0.5)) model.num_blocks = 8;
  shuffle_turns(random);
  simt::StepResult<T> got = simt::attention_step<T, Dims>(
      storage.view, plan.view(), std::span<const T>(q), model, c.num_stages);
  const auto reference =
      chunkattn::reference_attention(storage.view, plan.view(), std::span<const T>(q));
  const auto report = chunkattn::compare_with_reference(reference, std::span<const T>(got.out),
                                                        chunkattn::unit_roundoff<T>());
  INFO("head_dim ", Dims.k, ", value_dim ", Dims.v, ", kv heads ", c.num_kv_heads, ", group ",
       c.group, ", chunk ", c.plan.chunk_size, ", rows ", plan.num_rows(), ", at ", report.index);
  CHECK(report.worst <= 1.0);
  for (std::size_t i = 0; i < got.lse.size(); ++i) {
    if (std::isinf(reference.lse[i])) {
      CHECK(std::isinf(got.lse[i]));
      continue;
    }
    const double error = std::abs(static_cast<double>(got.lse[i]) - reference.lse[i]);
    const bool close = error <= reference.lse_bound(i);
    CHECK_MESSAGE(close, "lse of line ", i, ": ", got.lse[i], " instead of ", reference.lse[i]);
    if (!close) break;
  }
  CHECK(got.counters.next == 0);
  CHECK(got.counters.left == 0);
  CHECK(got.counters.launches == 7);
  CHECK(got.overlapped == 0);
  return got;
}

Case random_case(test::Random& random) {
  constexpr int chunks[] = {16, 32, 64, 128};
  constexpr int lengths[] = {1, 20, 100, 200};
  constexpr int groups[] = {1, 1, 2, 3, 4, 5, 7, 8, 12, 16};
  constexpr test::Share shares[] = {test::Share::none, test::Share::some, test::Share::all};
  Case c;
  c.plan.share = random.pick(shares);
  c.plan.chunk_size = random.pick(chunks);
  c.plan.num_sequences = random.uniform(1, 6);
  c.plan.max_length = lengths[random.index(4)];
  c.plan.max_queries = random.chance(0.3) ? random.uniform(2, 9) : 1;
  c.group = random.pick(groups);
  c.num_kv_heads = random.uniform(1, 3);
  c.num_stages = random.uniform(2, 3);
  return c;
}

}  // namespace

// Compiling all kernels takes long; tests/cuda/mutate.py does it for each mutant and asks for few.
#if defined(CHUNKATTN_FEW_KERNELS)
using Bfloat16OrHalf = half;
#else
using Bfloat16OrHalf = bfloat16;
#endif

TEST_CASE_TEMPLATE("emulated kernels agree with the oracle", T, half, Bfloat16OrHalf) {
  test::Random random(std::is_same_v<T, half> ? 1 : 2);
  for (int i = 0; i < test::scaled(24); ++i) check<T, 16>(random, random_case(random));
  for (int i = 0; i < test::scaled(6); ++i) check<T, 64>(random, random_case(random));
#if !defined(CHUNKATTN_FEW_KERNELS)
  for (int i = 0; i < test::scaled(3); ++i)
    check<T, std::is_same_v<T, half> ? 80 : 112>(random, random_case(random));
  for (int i = 0; i < test::scaled(3); ++i) check<T, 96>(random, random_case(random));
  for (int i = 0; i < test::scaled(3); ++i) check<T, 128>(random, random_case(random));
  for (int i = 0; i < test::scaled(3); ++i) check<T, 256>(random, random_case(random));
#endif
}

TEST_CASE("rows of V that are shorter or longer than those of K") {
  test::Random random(15);
  for (int i = 0; i < test::scaled(6); ++i)
    check<half, HeadDims{64, 16}>(random, random_case(random));
#if !defined(CHUNKATTN_FEW_KERNELS)
  for (int i = 0; i < test::scaled(4); ++i) {
    check<half, HeadDims{192, 128}>(random, random_case(random));
    check<bfloat16, HeadDims{256, 64}>(random, random_case(random));
  }
  check<bfloat16, HeadDims{128, 96}>(random, random_case(random));
  check<half, HeadDims{16, 128}>(random, random_case(random));
#endif
}

TEST_CASE("groups of 1 to 16, and the heads of models that are out of the ordinary") {
  test::Random random(14);
  for (int group = 1; group <= 16; ++group) {
    Case c = random_case(random);
    c.group = group;
    check<half, 16>(random, c);
  }
  Case c = random_case(random);
  c.group = 3;
  check<half, 64>(random, c);
#if !defined(CHUNKATTN_FEW_KERNELS)
  c.plan.num_sequences = 2;
  c.group = 6;  // 24 query heads
  c.num_kv_heads = 4;
  check<half, 256>(random, c);
#endif
}

TEST_CASE("prefill of many rows is causal over the path") {
  test::Random random(3);
  for (int i = 0; i < test::scaled(4); ++i) {
    Case c = random_case(random);
    c.plan.max_queries = 90;
    c.plan.num_sequences = 3;
    c.plan.max_length = 150;
    check<half, 64>(random, c);
  }
}

TEST_CASE("with and without sharing the result is the same up to rounding") {
  test::Random random(4);
  for (int i = 0; i < test::scaled(4); ++i) {
    Case c = random_case(random);
    c.plan.share = test::Share::all;
    c.never_share = i % 2 == 0;
    const auto got = check<half, 64>(random, c);
    if (c.never_share)
      CHECK(
          test::summarize(got.scheduler, chunkattn::detail::cuda::Geometry{1, 1, 64}).num_shared ==
          0);
  }
}

TEST_CASE("logits up to +-80 stay exact") {
  test::Random random(5);
  for (int i = 0; i < test::scaled(3); ++i) {
    Case c = random_case(random);
    c.k_deviation = 25.0f;
    check<Bfloat16OrHalf, 64>(random, c);
    check<half, 16>(random, c);
  }
}

TEST_CASE("a scale of any size leaves masked rows alone") {
  test::Random random(12);
  for (const float scale : {1e-30f, 1e-10f, 1e10f, 1e30f}) {
    Case c = random_case(random);
    c.plan.max_queries = 20;  // rows that see nothing of a tile stand beside rows that do
    test::AttentionCase<half, half> problem(random, c.plan, 16, 1, c.group);
    shuffle_turns(random);
    const auto got = simt::attention_step<half, 16>(problem.kv.view, problem.plan.view(),
                                                    std::span<const half>(problem.q),
                                                    simt::eager_model(), 2, 3, scale);
    const auto reference = chunkattn::reference_attention(problem.kv.view, problem.plan.view(),
                                                          std::span<const half>(problem.q), scale);
    CAPTURE(scale);
    int nans = 0;
    for (const half x : got.out) nans += std::isnan(chunkattn::to_float(x));
    CHECK(nans == 0);
    CHECK(
        chunkattn::compare_with_reference(reference, std::span<const half>(got.out), 0x1p-11).ok());
  }
}

TEST_CASE("the order of turns and the time of copies do not change a bit") {
  test::Random random(6);
  // Two levels of shared segments, 84 lines at the root: many partial results, of two tiles, and a
  // sequence whose lines are in both.
  const test::RandomPlan plan = test::make_level_plan({1, 2, 7}, {150, 140, 30});
  test::KvStorage<half> storage(plan.num_chunks, 1, plan.chunk_size, 64);
  test::fill_kv(random, plan, storage.view);
  const auto q = random_queries<half>(random, static_cast<std::size_t>(plan.num_rows() * 12 * 64));
  std::vector<half> first;
  for (const auto order : {simt::Order::forward, simt::Order::reversed, simt::Order::shuffled})
    for (const auto copies : {simt::Copies::at_issue, simt::Copies::at_wait})
      for (const int resident : {1, 2, 3}) {
        simt::current_schedule() = {order, copies, random.bits(), resident};
        const auto got = simt::attention_step<half, 64>(
            storage.view, plan.view(), std::span<const half>(q), simt::eager_model(),
            random.uniform(2, 4), random.uniform(resident, 5));
        CHECK(got.scheduler.num_chunk_first() > 3);
        if (first.empty()) first = got.out;
        CHECK(got.out == first);
      }
}

namespace {

// Answers to the same question: within the oracle's bound, and all of the same bits.
template <class T>
class SameAnswer {
 public:
  explicit SameAnswer(const chunkattn::Reference& reference) : reference_(reference) {}

  void check(const simt::StepResult<T>& got) {
    CHECK(chunkattn::compare_with_reference(reference_, std::span<const T>(got.out),
                                            chunkattn::unit_roundoff<T>())
              .ok());
    if (out_.empty()) {
      out_ = got.out;
      lse_ = got.lse;
    }
    CHECK(got.out == out_);
    CHECK(got.lse == lse_);
  }

 private:
  const chunkattn::Reference& reference_;
  std::vector<T> out_;
  std::vector<float> lse_;
};

}  // namespace

TEST_CASE("pairs of several heads have the same bits, however many blocks there are") {
  test::Random random(17);
  const test::RandomPlan plan = test::make_level_plan({1, 2, 5}, {150, 140, 30});
  constexpr int num_kv_heads = 4, group = 14;  // 70 lines at the root: two tiles
  test::KvStorage<half> storage(plan.num_chunks, num_kv_heads, plan.chunk_size, 16);
  test::fill_kv(random, plan, storage.view);
  const auto q = random_queries<half>(
      random, static_cast<std::size_t>(plan.num_rows() * num_kv_heads * group * 16));
  const auto reference =
      chunkattn::reference_attention(storage.view, plan.view(), std::span<const half>(q));
  SameAnswer<half> same(reference);
  for (const auto order : {simt::Order::forward, simt::Order::reversed, simt::Order::shuffled})
    for (const int resident : {1, 2, 3}) {
      CAPTURE(resident);
      simt::current_schedule() = {
          order, random.chance(0.5) ? simt::Copies::at_issue : simt::Copies::at_wait, random.bits(),
          resident};
      const auto got = simt::attention_step<half, 16>(
          storage.view, plan.view(), std::span<const half>(q), simt::eager_model(),
          random.uniform(2, 4), random.uniform(resident, 12));
      CHECK(got.scheduler.num_chunk_first() > 3);
      same.check(got);
    }
}

namespace {

// Tasks of all kinds, one after the other in a block: of each height, with many KV tiles, one, and
// none (rows of which all is shared and cut merge only). With one block they are all in a row, with
// many each block has few: the same bits, so none has left anything to the next.
template <class T, int HeadDim>
void check_tasks_in_a_row(test::Random& random, const test::RandomPlan& plan, int group) {
  constexpr int num_kv_heads = 2;
  test::KvStorage<T> storage(plan.num_chunks, num_kv_heads, plan.chunk_size, HeadDim);
  test::fill_kv(random, plan, storage.view);
  const auto q = random_queries<T>(
      random, static_cast<std::size_t>(plan.num_rows() * num_kv_heads * group * HeadDim));
  const auto reference =
      chunkattn::reference_attention(storage.view, plan.view(), std::span<const T>(q));
  SameAnswer<T> same(reference);
  for (int stages = 2; stages <= chunkattn::detail::cuda::max_stages(HeadDim); ++stages)
    for (const int grid : {1, 2, 40}) {
      CAPTURE(stages);
      CAPTURE(grid);
      shuffle_turns(random);
      const auto got = simt::attention_step<T, HeadDim>(
          storage.view, plan.view(), std::span<const T>(q), simt::eager_model(), stages, grid);
      same.check(got);
    }
}

}  // namespace

TEST_CASE("tasks in a row in one block have the bits of tasks in many") {
  test::Random random(15);
  // 100 lines at the root, the sequences' own tokens fill a part of a tile, one, or several.
  for (const int own : {5, 64, 300})
    check_tasks_in_a_row<half, 16>(random, test::make_level_plan({1, 3, 10}, {400, 70, own}), 10);
  // All shared, and tokens of a few.
  check_tasks_in_a_row<half, 16>(random, test::make_level_plan({1, 5}, {600, 0}), 5);
  check_tasks_in_a_row<half, 16>(random, test::make_level_plan({1, 2, 5}, {600, 130, 0}), 3);
  check_tasks_in_a_row<half, 256>(random, test::make_level_plan({1, 3}, {100, 40}), 12);
}

TEST_CASE("a task waits for partial results that another block is late with") {
  // Block A takes the prefix, of seven KV tiles, block B a sequence of one: from barrier to barrier
  // in turn, B is done first.
  test::Random random(13);
  const test::RandomPlan plan = test::make_two_level_plan(4, 400, 16);
  test::KvStorage<half> storage(plan.num_chunks, 1, plan.chunk_size, 64);
  test::fill_kv(random, plan, storage.view);
  const auto q = random_queries<half>(random, 4 * 64);
  chunkattn::detail::cuda::CostModel model = simt::eager_model();
  model.min_split_tokens = 400;
  model.num_blocks = 1;  // sequences stream and then merge
  std::vector<half> first;
  for (const int resident : {1, 2, 3}) {
    simt::current_schedule() = {simt::Order::forward, simt::Copies::at_wait, 1, resident};
    const auto before = simt::statistics().pauses;
    const auto got =
        simt::attention_step<half, 64>(storage.view, plan.view(), std::span<const half>(q), model);
    CHECK(got.scheduler.num_chunk_first() == 1);
    if (simt::is_emulated()) CHECK((simt::statistics().pauses > before) == (resident > 1));
    if (first.empty()) first = got.out;
    CHECK(got.out == first);
  }
}

TEST_CASE("a task waits for the partial results of each tile that its rows are in") {
  // Twelve query heads of each of six sequences: the last one's rows are in two tiles of 64.
  test::Random random(14);
  const test::RandomPlan plan = test::make_two_level_plan(6, 400, 16);
  test::KvStorage<half> storage(plan.num_chunks, 1, plan.chunk_size, 64);
  test::fill_kv(random, plan, storage.view);
  const auto q = random_queries<half>(random, 6 * 12 * 64);
  chunkattn::detail::cuda::CostModel model = simt::eager_model();
  model.most_tile_rows = chunkattn::detail::cuda::usual_tile_rows;
  model.num_blocks = 1;
  std::vector<half> first;
  for (const int blocks : {1, 3, 8, 20}) {  // of many the tiles' blocks have nothing else
    simt::current_schedule() = {simt::Order::shuffled, simt::Copies::at_wait, random.bits(),
                                blocks};
    const auto got = simt::attention_step<half, 64>(storage.view, plan.view(),
                                                    std::span<const half>(q), model, 2, blocks);
    int in_two_tiles = 0;
    for (const auto& task : got.scheduler.tasks())
      for (int m = 0; task.chunk_first == 0 && m < task.merge_count; ++m) {
        const auto& merge = got.scheduler.merges()[static_cast<std::size_t>(task.merge_begin + m)];
        const int begin = task.row_begin - merge.row_begin;
        in_two_tiles +=
            (begin >> merge.tile_bits) < ((begin + task.row_count - 1) >> merge.tile_bits);
      }
    CHECK(in_two_tiles > 0);
    if (first.empty()) first = got.out;
    CHECK(got.out == first);
  }
}

TEST_CASE("partial results join in the order of the path") {
  using namespace chunkattn::detail::cuda;
  constexpr int most = 9, dim = 16;
  test::Random random(17);
  std::vector<Float4> out(most * dim / 4);
  std::vector<float> lse(most);
  std::vector<Merge> merges;
  for (int i = 0; i < most; ++i) {
    merges.push_back({(i * 5) % most, 0, 0, 0});  // anywhere in memory
    lse[static_cast<std::size_t>(i)] = random.normal();
    for (int c = 0; c < dim / 4; ++c)
      for (float& x : out[static_cast<std::size_t>(i * dim / 4 + c)].v) x = random.normal();
  }
  lse[5] = empty_max2;
  PlanMemory plan{};
  plan.merges = merges.data();
  plan.partial_out = reinterpret_cast<float*>(out.data());
  plan.partial_lse = lse.data();
  simt::current_schedule() = {};
  for (int count = 1; count <= most; ++count) {
    int wrong = 0;
    simt::launch(1, 32, 0, [&] {
      Task task{};
      task.merge_count = count;
      RowResult expected, got;
      for (int i = 0; i < count; ++i) {
        const auto at = static_cast<std::size_t>(merges[static_cast<std::size_t>(i)].partial_base);
        expected.add({lse[at], at == 5 ? 0.0f : 1.0f}, out[at * dim / 4 + 1]);
      }
      add_partials<dim>(plan, task, 0, count, 0, 4, got);
      wrong += std::memcmp(&expected, &got, sizeof got) != 0;
    });
    CAPTURE(count);
    CHECK(wrong == 0);
  }
}

namespace {

// What one query head and its keys leave behind, when `key` has been written to all of `tokens`
// keys: powers of two that were taken, and words of the accumulators' stage that were stored.
struct Traces {
  std::uint64_t powers = 0;
  int stored = 0;
};

template <class F>
Traces traces_of(int tokens, F&& key) {
  test::RandomPlan plan = test::make_two_level_plan(1, 0, tokens);
  test::KvStorage<half> kv(plan.num_chunks, 1, plan.chunk_size, 16);
  for (int position = 0; position < tokens; ++position) {
    const auto& piece = plan.pieces[static_cast<std::size_t>(position / plan.chunk_size)];
    const int offset = position % plan.chunk_size;
    std::fill_n(kv.view.k_row(piece.chunk, 0, offset), 16, chunkattn::to_half(key(position)));
    std::fill_n(kv.view.v_row(piece.chunk, 0, offset), 16, chunkattn::to_half(1.0f));
  }
  const std::vector<half> q(16, chunkattn::to_half(1.0f));
  simt::current_schedule() = {};
  const auto before = simt::statistics().powers;
  Traces traces;
  chunkattn::detail::cuda::CostModel model = simt::eager_model();
  model.min_split_tokens = tokens;  // one task
  const auto got = simt::attention_step<half, 16>(
      kv.view, plan.view(), std::span<const half>(q), model, 2, 1, 0, {}, [&] {
        const auto* words = reinterpret_cast<const std::uint32_t*>(
            chunkattn::detail::ptx::dynamic_shared() +
            chunkattn::detail::cuda::SharedLayout<16>::stages +
            chunkattn::detail::cuda::stage_bytes(16));
        const int all = chunkattn::detail::cuda::stage_bytes(16) / 4;
        if (chunkattn::detail::ptx::thread_index() == 0)
          traces.stored = all - static_cast<int>(std::count(words, words + all, 0xffffffffu));
      });
  CHECK(got.scheduler.num_chunk_first() == 0);
  traces.powers = simt::statistics().powers - before;
  return traces;
}

}  // namespace

TEST_CASE("outputs are rescaled only where a maximum has moved") {
  constexpr int tiles = 5;
  const auto falls =
      traces_of(tiles * 64, [](int position) { return static_cast<float>(-position) / 64; });
  const auto rises =
      traces_of(tiles * 64, [](int position) { return static_cast<float>(position) / 64; });
  // All threads, two rows each, in all tiles but the first.
  CHECK(rises.powers - falls.powers == (tiles - 1) * 128 * 2);
}

TEST_CASE("accumulators of rows that no query stands in are not stored") {
  // One tile, in the first stage; they stand in the one before: four warps, one row each.
  CHECK(traces_of(64, [](int) { return 1.0f; }).stored == 4 * 16);
}

TEST_CASE("one token dropped of many breaks the bound") {
  test::Random random(7);
  test::RandomPlanOptions options;
  options.share = test::Share::none;
  options.num_sequences = 1;
  options.max_length = 1500;
  options.reserve_chance = 0;
  test::RandomPlan plan = test::make_random_plan(random, options);
  test::KvStorage<half> storage(plan.num_chunks, 1, options.chunk_size, 64);
  test::fill_kv(random, plan, storage.view);
  const auto q = random_queries<half>(random, 16 * 64);
  const auto reference =
      chunkattn::reference_attention(storage.view, plan.view(), std::span<const half>(q));
  if (plan.row_kv_len[0] < 2) return;
  --plan.row_kv_len[0];
  simt::current_schedule() = {};
  const auto got = simt::attention_step<half, 64>(storage.view, plan.view(),
                                                  std::span<const half>(q), simt::eager_model());
  CHECK(
      !chunkattn::compare_with_reference(reference, std::span<const half>(got.out), 0x1p-11).ok());
}

TEST_CASE("rows that see nothing give zeros and minus infinity") {
  test::Random random(8);
  test::RandomPlanOptions options;
  options.share = test::Share::all;
  options.num_sequences = 4;
  test::RandomPlan plan = test::make_random_plan(random, options);
  plan.row_kv_len[1] = 0;
  test::KvStorage<half> storage(plan.num_chunks, 1, options.chunk_size, 16);
  test::fill_kv(random, plan, storage.view);
  const auto q = random_queries<half>(random, static_cast<std::size_t>(plan.num_rows() * 3 * 16));
  simt::current_schedule() = {};
  const auto got = simt::attention_step<half, 16>(storage.view, plan.view(),
                                                  std::span<const half>(q), simt::eager_model());
  const auto line = static_cast<std::size_t>(plan.row_token[1]) * 3;
  for (std::size_t i = 0; i < 3 * 16; ++i)
    CHECK(chunkattn::to_float(got.out[line * 16 + i]) == 0.0f);
  for (std::size_t i = 0; i < 3; ++i) CHECK(std::isinf(got.lse[line + i]));
}

namespace {

// Plans for the next test, three kinds in turn, so that no seed goes without one of them.
enum class Kind { merged, mixed, decode };

test::RandomPlan plan_of(Kind kind, test::Random& random, Case& c) {
  if (kind == Kind::merged) {  // a prefix that is long enough to be shared by any group
    c.plan.chunk_size = 64;
    test::RandomPlan plan = test::make_two_level_plan(
        random.uniform(4, 6), random.uniform(150, 200), random.uniform(1, 60));
    random.shuffle(plan.row_token);
    return plan;
  }
  c.plan.max_queries = 1;
  if (kind == Kind::decode) return test::make_random_plan(random, c.plan);
  c.plan.max_queries = 40;
  c.plan.max_length = 200;
  while (
      true) {  // until two rows of a sequence stand beside one another, which see different tokens
    test::RandomPlan plan = test::make_random_plan(random, c.plan);
    for (std::size_t row = 1; row < plan.row_segment.size(); ++row)
      if (plan.row_segment[row] == plan.row_segment[row - 1] &&
          plan.row_kv_len[row] == plan.row_kv_len[row - 1] + 1)
        return plan;
  }
}

template <class T, HeadDims Dims>
void check_nans(std::uint64_t stream) {
  test::Random random(stream);
  for (int i = 0; i < test::scaled(10); ++i)
    for (const Kind kind : {Kind::merged, Kind::mixed, Kind::decode}) {
      Case c = random_case(random);
      const test::AttentionCase<T, T> clean(random, plan_of(kind, random, c), Dims.k,
                                            c.num_kv_heads, c.group, 1.0f, Dims.v);
      for (const auto where : {test::NanPlace::q, test::NanPlace::k, test::NanPlace::v}) {
        const test::KvStorage<T> kv = test::copy_of<T>(clean.kv);
        std::vector<T> q = clean.q;
        const test::NanPlace nan(random, where, clean.plan, kv.view, std::span(q));
        CAPTURE(where);
        shuffle_turns(random);
        const auto got = simt::attention_step<T, Dims>(
            kv.view, clean.plan.view(), std::span<const T>(q), simt::eager_model(), c.num_stages);
        CHECK(test::wrong_elements(nan, clean.plan, clean.reference, c.num_kv_heads,
                                   std::span<const T>(got.out), got.lse,
                                   chunkattn::unit_roundoff<T>()) == 0);
        if (kind == Kind::merged) CHECK(got.scheduler.num_partials() > 0);
      }
    }
}

}  // namespace

TEST_CASE("a NaN reaches every line that sees it, and no other") {
  check_nans<half, 16>(9);
  check_nans<Bfloat16OrHalf, 16>(10);
  check_nans<half, HeadDims{64, 16}>(16);
}

// A block has waited for all copies when a task begins: only tiles behind those that were begun by
// then show whether the loop waits for the right one.
TEST_CASE("a ring of any depth over many tiles") {
  test::Random random(19);
  test::AttentionCase<half, half> problem(random, test::make_level_plan({1}, {700}), 16, 1, 3);
  chunkattn::detail::cuda::CostModel model = simt::eager_model();
  model.num_blocks = 1;  // one task
  for (int stages = 2; stages <= 4; ++stages) {
    CAPTURE(stages);
    shuffle_turns(random);
    const auto got = simt::attention_step<half, 16>(
        problem.kv.view, problem.plan.view(), std::span<const half>(problem.q), model, stages, 1);
    CHECK(got.scheduler.tasks().size() == 1);
    CHECK(chunkattn::compare_with_reference(problem.reference, std::span<const half>(got.out),
                                            chunkattn::unit_roundoff<half>())
              .ok());
  }
}

// Where a tile has no K/V row, copies have an address in q, of which nothing may be read.
TEST_CASE("a NaN in the first row of q stays in that row") {
  test::Random random(18);
  const test::RandomPlan plan = test::make_level_plan({1, 3}, {70, 5});
  test::AttentionCase<half, half> problem(random, plan, 16, 1, 2);
  const auto run = [&](int stages) {
    shuffle_turns(random);
    return simt::attention_step<half, 16>(problem.kv.view, plan.view(),
                                          std::span<const half>(problem.q), simt::eager_model(),
                                          stages);
  };
  const auto clean = run(2);
  for (std::size_t i = 0; i < 2 * 16; ++i) problem.q[i] = test::some_nan<half>(random);
  for (int stages = 2; stages <= 4; ++stages) {
    const auto got = run(stages);
    for (std::size_t i = 0; i < got.out.size(); ++i) {
      const float x = chunkattn::to_float(got.out[i]);
      CHECK((i < 2 * 16 ? std::isnan(x) : x == chunkattn::to_float(clean.out[i])));
    }
  }
}

namespace {

// A prefix in `pieces` partial results, merged by tasks of one row or of a few: `group` of each of
// three sequences, which stream tokens of their own before, or of all where there are none.
template <class T, HeadDims Dims>
void check_shared_merges(test::Random& random, int group, int pieces, int own) {
  CAPTURE(Dims.v);
  CAPTURE(group);
  CAPTURE(pieces);
  CAPTURE(own);
  const test::RandomPlan plan = test::make_two_level_plan(3, 64 * pieces, own);
  test::AttentionCase<T, T> problem(random, plan, Dims.k, 1, group, 1.0f, Dims.v);
  // The sequences' own tokens beside the pieces would make a second wave.
  chunkattn::detail::cuda::CostModel model = simt::eager_model();
  model.num_blocks = pieces + 2;
  model.ps_per_kib = model.alone_ps_per_kib;
  const auto run = [&](const test::KvStorage<T>& kv, const std::vector<T>& q) {
    shuffle_turns(random);
    auto got = simt::attention_step<T, Dims>(kv.view, plan.view(), std::span<const T>(q), model,
                                             random.uniform(2, 3));
    CHECK((got.scheduler.tasks().back().segment >= 0) == (own > 0));
    CHECK(got.scheduler.tasks().back().merge_count == pieces);
    return got;
  };
  const auto first = run(problem.kv, problem.q);
  CHECK(chunkattn::compare_with_reference(problem.reference, std::span<const T>(first.out),
                                          chunkattn::unit_roundoff<T>())
            .ok());
  CHECK(test::worst_lse(problem.reference, first.lse) <= 1.0);
  for (int i = 0; i < 2; ++i) {  // other turns, the same bits
    const auto again = run(problem.kv, problem.q);
    CHECK(again.out == first.out);
    CHECK(again.lse == first.lse);
  }
  for (const auto where : {test::NanPlace::k, test::NanPlace::v}) {
    const test::KvStorage<T> kv = test::copy_of<T>(problem.kv);
    std::vector<T> q = problem.q;
    const test::NanPlace nan(random, where, plan, kv.view, std::span(q));
    CAPTURE(where);
    const auto got = run(kv, q);
    CHECK(test::wrong_elements(nan, plan, problem.reference, 1, std::span<const T>(got.out),
                               got.lse, chunkattn::unit_roundoff<T>()) == 0);
  }
  // Pieces of which no row sees anything, those of a whole group of threads among them.
  for (std::size_t at = 0; at < problem.q.size(); at += Dims.k)
    problem.q[at] = chunkattn::from_float<T>(0.5f + std::abs(chunkattn::to_float(problem.q[at])));
  const int seen = random.uniform(0, pieces - 1);
  for (int position = 0; position < 64 * pieces; ++position)
    if (position / 64 != seen || own > 0) {
      const auto place = test::place_of(plan, 0, position);
      problem.kv.view.k_row(place.chunk, 0, place.begin)[0] =
          chunkattn::from_float<T>(-std::numeric_limits<float>::infinity());
    }
  const auto got = run(problem.kv, problem.q);
  const auto reference =
      chunkattn::reference_attention(problem.kv.view, plan.view(), std::span<const T>(problem.q));
  CHECK(chunkattn::compare_with_reference(reference, std::span<const T>(got.out),
                                          chunkattn::unit_roundoff<T>())
            .ok());
  CHECK(test::worst_lse(reference, got.lse) <= 1.0);
}

}  // namespace

TEST_CASE("few rows merge many partial results, by groups of threads") {
  test::Random random(17);
  for (int pieces = 1; pieces <= 20; ++pieces)
    for (const int group : {1, 2, random.uniform(3, 10)})
      check_shared_merges<half, 16>(random, group, pieces, pieces == 1 || pieces % 2 == 0 ? 40 : 0);
  for (const int pieces : {4, 5, 9, 16, 20}) {
    const int own = random.chance(0.5) ? 40 : 0;
    const int group = random.uniform(1, 4);
    check_shared_merges<half, HeadDims{64, 16}>(random, 9 - group, pieces, own);
    check_shared_merges<half, 64>(random, group, pieces, own);
#if !defined(CHUNKATTN_FEW_KERNELS)
    check_shared_merges<bfloat16, HeadDims{128, 96}>(random, 1 + group / 2, pieces, own);
    check_shared_merges<half, 128>(random, 1 + group % 2, pieces, own);
    check_shared_merges<half, HeadDims{192, 128}>(random, 1, pieces, 0);
    check_shared_merges<bfloat16, HeadDims{256, 64}>(random, group, pieces, 0);
#endif
    check_shared_merges<half, 256>(random, 1, pieces, 0);  // KV tiles of 32: other pieces, with own
  }
}

TEST_CASE("infinite logits: -inf has no weight, +inf gives NaN") {
  test::Random random(11);
  const float inf = std::numeric_limits<float>::infinity();
  for (int i = 0; i < test::scaled(10); ++i) {
    Case c = random_case(random);
    test::AttentionCase<half, half> problem(random, c.plan, 16, 1, c.group);
    const test::RandomPlan& plan = problem.plan;
    for (std::size_t at = 0; at < problem.q.size(); at += 16)  // so that K decides the sign
      problem.q[at] = chunkattn::to_half(0.5f + std::abs(chunkattn::to_float(problem.q[at])));
    const auto set_logit = [&](std::size_t row, int position, float logit) {
      const auto place = test::place_of(plan, row, position);
      problem.kv.view.k_row(place.chunk, 0, place.begin)[0] = chunkattn::to_half(logit);
    };
    const auto run = [&] {
      shuffle_turns(random);
      return simt::attention_step<half, 16>(problem.kv.view, plan.view(),
                                            std::span<const half>(problem.q), simt::eager_model());
    };
    // Some tokens, then all tokens of a row: the oracle knows both answers.
    const std::size_t row = random.index(plan.row_token.size());
    const auto first = static_cast<std::size_t>(plan.row_token[row] * c.group);
    for (const bool all : {false, true}) {
      for (int position = 0; position < plan.row_kv_len[row]; ++position)
        if (all || random.chance(0.3)) set_logit(row, position, -inf);
      const auto reference = chunkattn::reference_attention(problem.kv.view, plan.view(),
                                                            std::span<const half>(problem.q));
      const auto got = run();
      CHECK(chunkattn::compare_with_reference(reference, std::span<const half>(got.out), 0x1p-11)
                .ok());
      CHECK(test::worst_lse(reference, got.lse) <= 1.0);
      if (!all) continue;
      CHECK(got.lse[first] == -inf);
      CHECK(chunkattn::to_float(got.out[first * 16]) == 0.0f);
      // Nor has its value, where nothing else of the row has a weight.
      const auto place = test::place_of(plan, row, random.uniform(0, plan.row_kv_len[row] - 1));
      problem.kv.view.v_row(place.chunk, 0, place.begin)[3] = chunkattn::to_half(inf);
      CHECK(chunkattn::to_float(run().out[first * 16 + 3]) == 0.0f);
    }
    set_logit(row, random.uniform(0, plan.row_kv_len[row] - 1), inf);
    const auto got = run();
    CHECK(std::isnan(got.lse[first]));
    for (std::size_t d = 0; d < 16; ++d)
      CHECK(std::isnan(chunkattn::to_float(got.out[first * 16 + d])));
  }
}
