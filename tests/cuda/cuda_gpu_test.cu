// The CUDA backend on a GPU: oracle, determinism, graphs. Leaves with 77 where there is none.
#include <doctest/doctest.h>
#include <thrust/copy.h>
#include <thrust/device_vector.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <span>
#include <thread>
#include <vector>

#include "chunkattn/attention_plan.hpp"
#include "chunkattn/cuda.cuh"
#include "chunkattn/debug/reference.hpp"
#include "chunkattn/prefix_tree.hpp"
#include "support/level_plan.hpp"
#include "support/random.hpp"
#include "support/random_plan.hpp"
#include "tests/support/retention.hpp"

namespace {

using chunkattn::bfloat16;
using chunkattn::ChunkAttention;
using chunkattn::Cuda;
using chunkattn::CudaOptions;
using Half = chunkattn::half;  // cuda_fp16.h, which Thrust includes, has a half of its own

// Before any test: without a device nothing here says anything.
const bool has_device = [] {
  int count = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess && count > 0) return true;
  std::printf("SKIPPED: no CUDA device: the CUDA backend was NOT tested on hardware\n");
  std::fflush(stdout);
  std::_Exit(77);
}();

template <class T>
std::span<T> span_of(thrust::device_vector<T>& values) {
  return {thrust::raw_pointer_cast(values.data()), values.size()};
}
template <class T>
std::vector<T> to_host(const thrust::device_vector<T>& values) {
  std::vector<T> host(values.size());
  thrust::copy(values.begin(), values.end(), host.begin());
  return host;
}

struct Case {
  test::RandomPlanOptions plan;
  int num_kv_heads = 2;
  int group = 1;
  float k_deviation = 1.0f;
  bool eager = false;  // share and split wherever it is possible
  CudaOptions::Reduce reduce = CudaOptions::Reduce::deterministic;
};

template <class T, int HeadDim, class V = chunkattn::NoVariant, int ValueDim = HeadDim>
void check(test::Random& random, const Case& c, const V& variant = {},
           const chunkattn::ReferenceVariant& definition = {}) {
  const test::RandomPlan plan = test::make_random_plan(random, c.plan);
  test::KvStorage<T> storage(plan.num_chunks, c.num_kv_heads, c.plan.chunk_size, HeadDim, ValueDim);
  test::fill_kv(random, plan, storage.view, c.k_deviation);
  const thrust::device_vector<T> k(storage.k.begin(), storage.k.end());
  const thrust::device_vector<T> v(storage.v.begin(), storage.v.end());
  const auto lines = static_cast<std::size_t>(plan.num_rows() * c.num_kv_heads * c.group);
  std::vector<T> queries(lines * HeadDim);
  random.fill(std::span<T>(queries));
  thrust::device_vector<T> q(queries.begin(), queries.end());
  const T poison = chunkattn::from_float<T>(NAN);
  thrust::device_vector<T> out(lines * ValueDim, poison), again(out.size(), poison);
  thrust::device_vector<float> lse(lines, NAN);

  CudaOptions::Limits limits;
  limits.max_rows = plan.num_rows();
  limits.num_qo_heads = c.num_kv_heads * c.group;
  limits.num_kv_heads = c.num_kv_heads;
  limits.max_segments = static_cast<int>(plan.segments.size());
  limits.max_pieces = static_cast<int>(plan.pieces.size());
  limits.max_partial_rows = 64 * plan.num_rows();
  CudaOptions options;
  options.reduce = c.reduce;
  if (c.eager) {
    options.tuning.task_ps = options.tuning.merge_ps = options.tuning.wait_ps = 0;
    options.tuning.min_split_tokens = 64;
  }
  ChunkAttention<Cuda, HeadDim, ValueDim> attention(limits, options);
  const auto layer = chunkattn::make_kv_view(
      const_cast<T*>(thrust::raw_pointer_cast(k.data())),
      const_cast<T*>(thrust::raw_pointer_cast(v.data())),
      {plan.num_chunks, c.num_kv_heads, c.plan.chunk_size, HeadDim, ValueDim});
  cudaStream_t stream = nullptr;
  REQUIRE(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
  REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
  attention.run(layer, plan.view(), variant, span_of(q), span_of(out),
                {.lse = span_of(lse), .stream = stream});
  attention.run(layer, plan.view(), variant, span_of(q), span_of(again), {.stream = stream});
  REQUIRE(cudaStreamSynchronize(stream) == cudaSuccess);
  cudaStreamDestroy(stream);

  const auto reference = chunkattn::reference_attention(
      storage.view, plan.view(), std::span<const T>(queries), {}, definition);
  const std::vector<T> got = to_host(out);
  const auto report = chunkattn::compare_with_reference(reference, std::span<const T>(got),
                                                        chunkattn::unit_roundoff<T>());
  INFO("head_dim ", HeadDim, ", group ", c.group, ", chunk ", c.plan.chunk_size, ", rows ",
       plan.num_rows());
  CHECK(report.worst <= 1.0);
  const bool same_bits = got == to_host(again);
  CHECK(same_bits);
  const std::vector<float> got_lse = to_host(lse);
  for (std::size_t i = 0; i < got_lse.size(); ++i) {
    const bool close = std::isinf(reference.lse[i])
                           ? std::isinf(got_lse[i])
                           : std::abs(got_lse[i] - reference.lse[i]) <= reference.lse_bound(i);
    CHECK(close);
    if (!close) break;
  }
}

Case random_case(test::Random& random) {
  constexpr int chunks[] = {16, 32, 64, 128};
  constexpr int groups[] = {1, 2, 3, 4, 5, 7, 8, 12, 16};
  constexpr int lengths[] = {1, 100, 300, 1000};
  constexpr test::Share shares[] = {test::Share::none, test::Share::some, test::Share::all};
  Case c;
  c.plan.share = random.pick(shares);
  c.plan.chunk_size = random.pick(chunks);
  c.plan.num_sequences = random.uniform(1, 12);
  c.plan.max_length = random.pick(lengths);
  c.plan.max_queries = random.chance(0.3) ? random.uniform(2, 100) : 1;
  c.group = random.pick(groups);
  c.num_kv_heads = random.uniform(1, 3);
  c.eager = random.chance(0.6);
  c.k_deviation = random.chance(0.2) ? 20.0f : 1.0f;
  return c;
}

}  // namespace

TEST_CASE_TEMPLATE("kernels agree with the oracle", T, Half, bfloat16) {
  test::Random random(std::is_same_v<T, Half> ? 101 : 102);
  for (int i = 0; i < test::scaled(20); ++i) {
    check<T, 16>(random, random_case(random));
    check<T, 64>(random, random_case(random));
    check<T, 96>(random, random_case(random));
    check<T, 128>(random, random_case(random));
    check<T, 256>(random, random_case(random));
  }
}

TEST_CASE_TEMPLATE("batch-invariant results agree with the oracle", T, Half, bfloat16) {
  test::Random random(std::is_same_v<T, Half> ? 107 : 108);
  for (int i = 0; i < test::scaled(20); ++i) {
    Case c = random_case(random);
    c.reduce = CudaOptions::Reduce::batch_invariant;
    check<T, 64>(random, c);
    check<T, 128>(random, c);
  }
}

TEST_CASE("a batch-invariant row has the same bits alone as behind a shared prefix") {
  constexpr int head_dim = 128, kv_heads = 2, qo_heads = 8, sequences = 6;
  test::Random random(109);
  const test::RandomPlan together = test::make_two_level_plan(sequences, 700, 150);
  test::KvStorage<Half> storage(together.num_chunks, kv_heads, together.chunk_size, head_dim);
  test::fill_kv(random, together, storage.view, 1.0f);
  thrust::device_vector<Half> k(storage.k.begin(), storage.k.end());
  thrust::device_vector<Half> v(storage.v.begin(), storage.v.end());
  constexpr std::size_t row = std::size_t{qo_heads} * head_dim;
  std::vector<Half> queries(sequences * row);
  random.fill(std::span<Half>(queries));
  CudaOptions::Limits limits;
  limits.max_rows = sequences;
  limits.num_qo_heads = qo_heads;
  limits.num_kv_heads = kv_heads;
  ChunkAttention<Cuda, head_dim> attention(
      limits, CudaOptions{.reduce = CudaOptions::Reduce::batch_invariant});
  const auto layer = chunkattn::make_kv_view(
      thrust::raw_pointer_cast(k.data()), thrust::raw_pointer_cast(v.data()),
      {together.num_chunks, kv_heads, together.chunk_size, head_dim});
  const auto run = [&](const test::RandomPlan& plan, std::size_t first_row) {
    const auto begin = queries.begin() + static_cast<std::ptrdiff_t>(first_row * row);
    thrust::device_vector<Half> q(begin,
                                  begin + static_cast<std::ptrdiff_t>(plan.num_rows() * row));
    thrust::device_vector<Half> out(q.size());
    attention.run(layer, plan.view(), span_of(q), span_of(out), {});
    REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
    return to_host(out);
  };
  const std::vector<Half> all = run(together, 0);
  for (std::size_t s = 0; s < sequences; ++s) {
    test::RandomPlan alone = together;
    alone.segments = {together.segments[0], together.segments[1 + s]};
    for (auto& segment : alone.segments) {
      segment.row_begin = 0;
      segment.row_end = segment.num_sequences = 1;
    }
    alone.row_segment = {1};
    alone.row_token = {0};
    alone.row_kv_len = {850};
    alone.writes.resize(1);
    ++alone.segments_version;
    const bool same_bits =
        std::equal(all.begin() + static_cast<std::ptrdiff_t>(s * row),
                   all.begin() + static_cast<std::ptrdiff_t>((s + 1) * row), run(alone, s).begin());
    CHECK(same_bits);
  }
}

TEST_CASE("rows of V that are shorter than those of K") {
  test::Random random(106);
  for (int i = 0; i < test::scaled(20); ++i)
    check<Half, 192, chunkattn::NoVariant, 128>(random, random_case(random));
}

namespace {

struct ThirdsOfKeys {
  CHUNKATTN_HD bool operator()(chunkattn::LogitIndex at) const {
    return (at.kv_idx + at.head) % 3 != 1;
  }
};

}  // namespace

TEST_CASE("variants agree with their definitions") {
  using namespace chunkattn;
  test::Random random(105);
  for (int i = 0; i < test::scaled(20); ++i) {
    Case c = random_case(random);
    const int heads = c.num_kv_heads * c.group;
    std::vector<float> numbers(static_cast<std::size_t>(heads));
    random.fill(std::span(numbers));
    const thrust::device_vector<float> on_device(numbers.begin(), numbers.end());
    const std::span<const float> per_head(thrust::raw_pointer_cast(on_device.data()),
                                          numbers.size());
    const auto number = [&](int head) {
      return static_cast<double>(numbers[static_cast<std::size_t>(head)]);
    };
    const SlidingWindow window{random.pick({1, 64, 200}), random.pick({0, 4})};
    ReferenceVariant capped, sunk, biased;
    capped.logit = [](double s, LogitIndex) { return 5 * std::tanh(s / 5); };
    capped.visible = sunk.visible = [window](LogitIndex at) {
      return at.kv_idx > at.q_idx - window.size || at.kv_idx < window.keep;
    };
    sunk.sink = number;
    biased.logit = [&](double s, LogitIndex at) {
      return s + number(at.head) * (at.kv_idx - at.q_idx);
    };
    biased.visible = ThirdsOfKeys{};
    check<Half, 128>(random, c, combine(SoftCap{5.0f}, window), capped);
    check<Half, 128>(random, c, combine(Sinks{per_head}, window), sunk);
    check<Half, 128>(random, c, combine(Alibi{per_head}, Mask{ThirdsOfKeys{}}), biased);
  }
}

TEST_CASE("1,000 graph replays with staggered lengths equal eager steps") {
  constexpr int head_dim = 128, kv_heads = 2, qo_heads = 8, sequences = 6;
  test::Random random(103);
  chunkattn::PrefixTree<int, 64, chunkattn::PoolAllocator, test::NoRetention> tree;
  chunkattn::KvCache<Cuda, Half> cache(64, {1, kv_heads, head_dim}, 256);
  CudaOptions::Limits limits;
  limits.max_rows = 512;
  limits.num_qo_heads = qo_heads;
  limits.num_kv_heads = kv_heads;
  ChunkAttention<Cuda, head_dim> graphed(limits), eager(limits);
  cudaStream_t stream = nullptr;
  REQUIRE(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
  thrust::device_vector<Half> q(512 * qo_heads * head_dim), k(512 * kv_heads * head_dim);
  thrust::device_vector<Half> v(k.size()), out(q.size()), expected(q.size());
  const auto refill = [&](thrust::device_vector<Half>& values) {
    std::vector<Half> host(values.size());
    random.fill(std::span<Half>(host));
    thrust::copy(host.begin(), host.end(), values.begin());
  };
  refill(q);
  refill(k);
  refill(v);
  using Tree = chunkattn::PrefixTree<int, 64, chunkattn::PoolAllocator, test::NoRetention>;
  chunkattn::AttentionPlan plan;
  std::vector<Tree::Sequence> live;
  const auto layer = cache.layer(0);
  const auto commit = [&](Tree::Step step) {
    auto finished = std::move(step).finish();
    for (const auto& row : finished.rows()) finished.commit(row, random.uniform(10, 1 << 30));
  };
  for (int i = 0; i < sequences; ++i) {
    std::vector<int> prompt(200, 7);
    for (int t = 0; t < 13 * i; ++t) prompt.push_back(random.uniform(10, 1 << 30));
    live.push_back(tree.insert(prompt));
    Tree::Step step = tree.begin_step();
    REQUIRE(bool(step.add(live.back())));
    const auto view = plan.build(step);
    const auto n = static_cast<std::size_t>(view.num_rows);
    eager.write(layer, view, span_of(k).first(n * kv_heads * head_dim),
                span_of(v).first(n * kv_heads * head_dim), stream);
    REQUIRE(cudaStreamSynchronize(stream) == cudaSuccess);
    commit(std::move(step));
  }
  cudaGraphExec_t graph = nullptr;
  const std::size_t rows = sequences;
  const auto run = [&](auto& attention, const chunkattn::LiveView& view, auto& to) {
    attention.write(layer, view, span_of(k).first(rows * kv_heads * head_dim),
                    span_of(v).first(rows * kv_heads * head_dim), stream);
    attention.run(layer, view, span_of(q).first(rows * qo_heads * head_dim),
                  span_of(to).first(rows * qo_heads * head_dim), {.stream = stream});
  };
  int wrong = 0;
  for (int i = 0; i < test::scaled(1000); ++i) {
    Tree::Step step = tree.begin_step();
    for (auto& sequence : live) REQUIRE(bool(step.add(sequence)));
    const auto view = plan.build(step);
    cache.grow(static_cast<std::size_t>(tree.num_chunks()));
    graphed.prepare(view, stream);
    if (i % 20 == 0) {  // captured anew, it is an update of the one before
      cudaGraph_t captured = nullptr;
      REQUIRE(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
      run(graphed, view, out);
      REQUIRE(cudaStreamEndCapture(stream, &captured) == cudaSuccess);
      cudaGraphExecUpdateResultInfo result;
      if (graph == nullptr)
        REQUIRE(cudaGraphInstantiate(&graph, captured, 0) == cudaSuccess);
      else
        REQUIRE(cudaGraphExecUpdate(graph, captured, &result) == cudaSuccess);
      cudaGraphDestroy(captured);
    }
    REQUIRE(cudaGraphLaunch(graph, stream) == cudaSuccess);
    run(eager, view, expected);
    REQUIRE(cudaStreamSynchronize(stream) == cudaSuccess);
    if (i % 50 == 0) wrong += to_host(out) != to_host(expected);
    commit(std::move(step));
  }
  CHECK(wrong == 0);
  cudaGraphExecDestroy(graph);
  cudaStreamDestroy(stream);
}

TEST_CASE("threads with streams of their own, on two devices where there are as many") {
  int devices = 0;
  REQUIRE(cudaGetDeviceCount(&devices) == cudaSuccess);
  if (devices == 1) std::printf("one device: a second one was NOT tried\n");
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i)
    threads.emplace_back([i, devices] {
      CHECK(cudaSetDevice(i % 2 % devices) == cudaSuccess);
      test::Random random(static_cast<std::uint64_t>(110 + i));
      for (int n = 0; n < test::scaled(10); ++n) check<Half, 128>(random, random_case(random));
    });
  for (std::thread& thread : threads) thread.join();
}

TEST_CASE("host memory where device memory is meant is refused") {
  CudaOptions::Limits limits;
  limits.max_rows = 4;
  limits.num_qo_heads = limits.num_kv_heads = 1;
  ChunkAttention<Cuda, 64> attention(limits);
  test::Random random(104);
  test::RandomPlanOptions options;
  options.num_sequences = 1;
  const test::RandomPlan plan = test::make_random_plan(random, options);
  test::KvStorage<Half> storage(plan.num_chunks, 1, options.chunk_size, 64);
  std::vector<Half> q(static_cast<std::size_t>(plan.num_rows()) * 64);
  CHECK_THROWS_AS(attention.run(storage.view, plan.view(), std::span<Half>(q), std::span<Half>(q),
                                {.stream = nullptr}),
                  chunkattn::InvalidArgument);
}
