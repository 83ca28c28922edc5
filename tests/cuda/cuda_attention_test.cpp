// ChunkAttention<Cuda> over real trees and plans, on a fake device that does everything as late as
// it may: lazy uploads, double buffering, graph capture, errors.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <deque>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "chunkattn/attention/reference.hpp"
#include "chunkattn/plan/attention_plan.hpp"
#include "chunkattn/tree/prefix_tree.hpp"
#include "simt/runtime.hpp"
#include "support/random.hpp"
#include "support/random_plan.hpp"
// After the fakes, which take the place of the CUDA runtime and of ptx.cuh.
#include "chunkattn/cuda/chunk_attention.cuh"
#include "chunkattn/cuda/kv_cache.cuh"

namespace {

using chunkattn::AttentionPlan;
using chunkattn::ChunkAttention;
using chunkattn::Cuda;
using chunkattn::CudaLimits;
using chunkattn::CudaOptions;
using chunkattn::half;
using chunkattn::KvCache;
using Tree = chunkattn::PrefixTree<int, 16>;

constexpr int head_dim = 16;
constexpr int kv_heads = 2;
constexpr int qo_heads = 6;

chunkattn::CostModel eager_model() {
  chunkattn::CostModel model;
  model.task_ps = 0;
  model.merge_ps = 0;
  model.launch_ps = 0;
  model.min_split_tokens = 64;
  return model;
}

template <class T>
struct DeviceArray {
  chunkattn::cuda_detail::DeviceMemory memory;
  std::size_t size;
  explicit DeviceArray(std::size_t n) : memory(n * sizeof(T)), size(n) {}
  std::span<T> span() { return {reinterpret_cast<T*>(memory.data()), size}; }
  std::span<T> first(std::size_t n) { return span().first(n); }
};

// A plan's arrays as they were, for the oracle later on.
test::RandomPlan snapshot(const chunkattn::PlanView& view) {
  test::RandomPlan plan;
  const auto n = static_cast<std::size_t>(view.num_rows);
  plan.chunk_size = view.chunk_size;
  plan.segments.assign(view.segments, view.segments + view.num_segments);
  plan.pieces.assign(view.pieces, view.pieces + view.num_pieces);
  plan.row_token.assign(view.row_token, view.row_token + n);
  plan.row_kv_len.assign(view.row_kv_len, view.row_kv_len + n);
  plan.row_segment.assign(view.row_segment, view.row_segment + n);
  return plan;
}

struct Step {
  test::RandomPlan plan;
  std::unique_ptr<DeviceArray<half>> q, k, v, out;
  std::unique_ptr<DeviceArray<float>> lse;
};

// An engine of one layer: a tree, a cache, sequences; steps are checked when the stream drained.
struct Engine {
  explicit Engine(std::uint64_t stream_number, CudaOptions options = {}) : random(stream_number) {
    options.model = eager_model();
    attention = std::make_unique<ChunkAttention<Cuda, head_dim>>(limits(), options);
  }
  static CudaLimits limits() {
    CudaLimits limits;
    limits.max_rows = 64;
    limits.num_qo_heads = qo_heads;
    limits.num_kv_heads = kv_heads;
    return limits;
  }
  std::vector<int> prompt(int shared, int own) {
    std::vector<int> tokens;
    for (int i = 0; i < shared; ++i) tokens.push_back(i);
    for (int i = 0; i < own; ++i) tokens.push_back(random.uniform(1000, 1 << 30));
    return tokens;
  }

  // Queries, K and V of the planned rows; nothing runs yet.
  Step& new_step() {
    const auto rows = static_cast<std::size_t>(view.num_rows);
    Step& step = steps.emplace_back();
    step.plan = snapshot(view);
    step.q = std::make_unique<DeviceArray<half>>(rows * qo_heads * head_dim);
    step.out = std::make_unique<DeviceArray<half>>(rows * qo_heads * head_dim);
    step.k = std::make_unique<DeviceArray<half>>(rows * kv_heads * head_dim);
    step.v = std::make_unique<DeviceArray<half>>(rows * kv_heads * head_dim);
    step.lse = std::make_unique<DeviceArray<float>>(rows * qo_heads);
    random.fill(step.q->span());
    random.fill(step.k->span());
    random.fill(step.v->span());
    return step;
  }
  void enqueue() {
    Step& step = new_step();
    attention->write(cache.layer(0), view, step.k->span(), step.v->span(), &stream);
    attention->run(cache.layer(0), view, step.q->span(), step.out->span(), step.lse->span(),
                   &stream);
  }
  // The host goes on; the device is as late as it may be.
  void submit() {
    in_flight.push_back(std::move(*open).submitted());
    open.reset();
    if (in_flight.size() == 4) drain_and_check();
  }
  void drain_and_check() {
    stream.drain();
    for (Step& step : steps) {
      const auto reference = chunkattn::reference_attention(cache.layer(0), step.plan.view(),
                                                            std::span<const half>(step.q->span()));
      const auto report = chunkattn::compare_with_reference(
          reference, std::span<const half>(step.out->span()), 0x1p-11);
      CHECK(report.worst <= 1.0);
    }
    steps.clear();
    CHECK(simt::device().early_reuses == 0);
    for (Tree::InFlight& step : in_flight) {
      Tree::Finished finished = std::move(step).finished();
      for (const auto& row : finished.rows()) finished.commit(row, random.uniform(1000, 1 << 30));
    }
    in_flight.clear();
  }

  void begin() { open.emplace(tree.begin_step()); }
  void add(std::size_t index, std::size_t budget = 1) {
    REQUIRE(bool(open->add(sequences[index], budget)));
  }
  void build() { view = plan.build(*open); }

  // 40 tokens at a time.
  void prefill(std::size_t index) {
    while (sequences[index].num_uncomputed() > 0) {
      begin();
      add(index, 40);
      build();
      enqueue();
      submit();
    }
  }
  void decode_plan() {
    begin();
    for (std::size_t i = 0; i < sequences.size(); ++i) add(i);
    build();
  }

  test::Random random;
  simt::Stream stream;
  Tree tree;
  KvCache<Cuda, half> cache{tree, {1, kv_heads, head_dim}};
  std::unique_ptr<ChunkAttention<Cuda, head_dim>> attention;
  AttentionPlan plan;
  Tree::StepView view;
  std::vector<Tree::Sequence> sequences;
  std::deque<Step> steps;
  std::optional<Tree::Step> open;
  std::deque<Tree::InFlight> in_flight;
};

void shuffled(std::uint64_t seed) {
  simt::current_schedule() = {simt::Order::shuffled, simt::Copies::at_wait, seed};
}

}  // namespace

TEST_CASE("decode steps enqueued ahead of the device agree with the oracle") {
  Engine engine(11);
  shuffled(engine.random.bits());
  for (int i = 0; i < 5; ++i) {
    engine.sequences.push_back(engine.tree.insert(engine.prompt(70, 10 * i)));
    engine.prefill(engine.sequences.size() - 1);
  }
  engine.drain_and_check();
  const auto before = engine.attention->counts();
  for (int step = 0; step < test::scaled(60); ++step) {
    engine.decode_plan();
    engine.enqueue();
    engine.submit();
    if (step % 7 == 6) engine.drain_and_check();
    if (step == 20) engine.sequences.push_back(engine.sequences[1].fork());
    if (step == 30) {
      engine.drain_and_check();
      engine.sequences.erase(engine.sequences.begin() + 2);
    }
  }
  engine.drain_and_check();
  const auto after = engine.attention->counts();
  CHECK(after.advances - before.advances > 20);  // most steps are one small kernel
  CHECK(after.schedules - before.schedules < 12);
  CHECK(simt::device().launches.size() > 0);
}

TEST_CASE("a step without a new piece uploads nothing") {
  Engine engine(12);
  simt::current_schedule() = {};
  engine.sequences.push_back(engine.tree.insert(engine.prompt(20, 3)));
  engine.prefill(0);
  engine.decode_plan();
  engine.enqueue();
  engine.submit();
  engine.drain_and_check();
  const auto before = engine.attention->counts();
  const int copies = simt::device().calls["cudaMemcpyAsync"];
  const int mallocs = simt::device().calls["cudaMallocHost"];
  int quiet_steps = 0;
  for (int step = 0; step < 32; ++step) {
    const auto uploads = engine.attention->counts().uploads;
    engine.decode_plan();
    engine.attention->prepare(engine.view, &engine.stream);
    if (engine.attention->counts().uploads == uploads) ++quiet_steps;
    engine.enqueue();
    engine.submit();
  }
  engine.drain_and_check();
  const auto after = engine.attention->counts();
  CHECK(after.advances - before.advances == 32);
  CHECK(quiet_steps >= 28);  // two chunks fill in 32 steps; each new piece is one upload
  CHECK(simt::device().calls["cudaMemcpyAsync"] - copies <= 8);
  CHECK(simt::device().calls["cudaMallocHost"] == mallocs);
}

TEST_CASE("a captured graph is replayed while sequences grow, join and leave") {
  Engine engine(13);
  shuffled(engine.random.bits());
  for (int i = 0; i < 3; ++i) {
    engine.sequences.push_back(engine.tree.insert(engine.prompt(50, 5)));
    engine.prefill(engine.sequences.size() - 1);
  }
  engine.drain_and_check();

  // Fixed places for inputs and outputs, as an engine with graphs has them.
  constexpr std::size_t max_rows = 8;
  DeviceArray<half> q(max_rows * qo_heads * head_dim), out(max_rows * qo_heads * head_dim);
  DeviceArray<half> k(max_rows * kv_heads * head_dim), v(max_rows * kv_heads * head_dim);
  DeviceArray<float> lse(max_rows * qo_heads);
  const auto layer = engine.cache.layer(0);
  std::unique_ptr<simt::Graph> captured;
  for (int step = 0; step < 30; ++step) {
    if (step == 10) {
      engine.sequences.push_back(engine.tree.insert(engine.prompt(50, 5)));
      engine.prefill(engine.sequences.size() - 1);
      engine.drain_and_check();
    }
    if (step == 20) engine.sequences.erase(engine.sequences.begin());
    engine.decode_plan();
    const auto rows = static_cast<std::size_t>(engine.view.num_rows);
    engine.random.fill(q.span());
    engine.random.fill(k.span());
    engine.random.fill(v.span());
    engine.attention->prepare(engine.view, &engine.stream);
    if (step == 0) {
      captured = std::make_unique<simt::Graph>(engine.stream);
      engine.attention->write(layer, engine.view, k.first(rows * kv_heads * head_dim),
                              v.first(rows * kv_heads * head_dim), &engine.stream);
      engine.attention->run(layer, engine.view, q.first(rows * qo_heads * head_dim),
                            out.first(rows * qo_heads * head_dim), lse.first(rows * qo_heads),
                            &engine.stream);
      captured->end();
      CHECK(captured->size() == 4);  // copies, write, two phases
    }
    captured->replay();
    engine.stream.drain();
    const auto reference =
        chunkattn::reference_attention(engine.cache.layer(0), engine.view,
                                       std::span<const half>(q.first(rows * qo_heads * head_dim)));
    const auto report = chunkattn::compare_with_reference(
        reference, std::span<const half>(out.first(rows * qo_heads * head_dim)), 0x1p-11);
    CHECK(report.worst <= 1.0);
    engine.submit();
  }
  CHECK(simt::device().capture_violations == 0);
}

TEST_CASE("an upload inside a capture is refused") {
  Engine engine(15);
  simt::current_schedule() = {};
  engine.sequences.push_back(engine.tree.insert(engine.prompt(20, 4)));
  engine.prefill(0);
  engine.drain_and_check();
  engine.decode_plan();
  Step& step = engine.new_step();
  simt::Graph graph(engine.stream);
  CHECK_THROWS_AS(engine.attention->run(engine.cache.layer(0), engine.view, step.q->span(),
                                        step.out->span(), {}, &engine.stream),
                  chunkattn::InvalidArgument);
  graph.end();
  engine.steps.clear();
}

TEST_CASE("row copies of forks reach every layer by one launch") {
  simt::current_schedule() = {};
  test::Random random(16);
  constexpr int layers = 3;
  KvCache<Cuda, half> cache(16, {layers, kv_heads, head_dim}, 4);
  for (int l = 0; l < layers; ++l)
    for (int slot = 0; slot < 4; ++slot) {
      const auto view = cache.layer(l);
      for (int i = 0; i < kv_heads * 16 * head_dim; ++i) {
        view.k_row(slot, 0, 0)[i] = chunkattn::to_half(random.normal());
        view.v_row(slot, 0, 0)[i] = chunkattn::to_half(random.normal());
      }
    }
  test::RandomPlanOptions options;
  options.share = test::Share::none;
  options.num_sequences = 1;
  test::RandomPlan plan = test::make_random_plan(random, options);
  plan.copies = {{0, 3, 2, 5, 7}, {1, 0, 3, 0, 16}};
  simt::Stream stream;
  ChunkAttention<Cuda, head_dim> attention(Engine::limits());
  const auto launches = simt::device().launches.size();
  attention.copy_rows(cache.layer(0), cache.device_layers(), layers, plan.view(), &stream);
  CHECK(simt::device().launches.size() - launches == 1);
  stream.drain();
  int wrong = 0;
  for (int l = 0; l < layers; ++l)
    for (const auto& copy : plan.copies)
      for (int head = 0; head < kv_heads; ++head)
        for (int i = 0; i < copy.length; ++i)
          for (int d = 0; d < head_dim; ++d) {
            const auto view = cache.layer(l);
            wrong += !(view.k_row(copy.target_slot, head, copy.target_begin + i)[d] ==
                       view.k_row(copy.source_slot, head, copy.source_begin + i)[d]);
            wrong += !(view.v_row(copy.target_slot, head, copy.target_begin + i)[d] ==
                       view.v_row(copy.source_slot, head, copy.source_begin + i)[d]);
          }
  CHECK(wrong == 0);
}

TEST_CASE("pending row copies are uploaded once per step, and write() may be captured") {
  Engine engine(19);
  simt::current_schedule() = {};
  engine.sequences.push_back(engine.tree.insert(engine.prompt(20, 3)));
  engine.prefill(0);
  for (int i = 0; i < 4; ++i) {  // outputs of its own, too few to be shared by forks
    engine.drain_and_check();
    engine.decode_plan();
    engine.enqueue();
    engine.submit();
  }
  engine.drain_and_check();
  for (int i = 0; i < 2; ++i) {  // twice the same: what is known of the last step's is not enough
    engine.sequences.push_back(engine.sequences[0].fork());
    engine.decode_plan();
    REQUIRE(engine.view.num_copies > 0);
    const auto before = engine.attention->counts().uploads;
    const int waits = simt::device().calls["cudaEventSynchronize"];
    Step& step = engine.new_step();
    const auto layer = engine.cache.layer(0);
    const auto write_and_run = [&] {
      engine.attention->write(layer, engine.view, step.k->span(), step.v->span(), &engine.stream);
      engine.attention->run(layer, engine.view, step.q->span(), step.out->span(), step.lse->span(),
                            &engine.stream);
    };
    for (int layers = 0; layers < 8; ++layers) write_and_run();
    CHECK(engine.attention->counts().uploads - before == 1);
    CHECK(simt::device().calls["cudaEventSynchronize"] - waits == 1);
    simt::Graph graph(engine.stream);
    CHECK_NOTHROW(write_and_run());
    graph.end();
    graph.replay();
    engine.submit();
    engine.drain_and_check();
  }
}

TEST_CASE("the driver is asked about an address once, however many layers there are") {
  Engine engine(20);
  simt::current_schedule() = {};
  constexpr int layers = 80;
  KvCache<Cuda, half> cache(engine.tree, {layers, kv_heads, head_dim});
  engine.sequences.push_back(engine.tree.insert(engine.prompt(20, 3)));
  engine.begin();
  engine.add(0, 40);
  engine.build();
  Step& step = engine.new_step();
  const auto run_layers = [&] {
    for (int l = 0; l < layers; ++l) {
      engine.attention->write(cache.layer(l), engine.view, step.k->span(), step.v->span(),
                              &engine.stream);
      engine.attention->run(cache.layer(l), engine.view, step.q->span(), step.out->span(),
                            step.lse->span(), &engine.stream);
    }
  };
  int& queries = simt::device().calls["cudaPointerGetAttributes"];
  queries = 0;
  run_layers();
  CHECK(queries == 2 * layers + 5);  // tables of K and of V; q, k, v, out, lse
  run_layers();
  CHECK(queries == 2 * layers + 5);
  engine.stream.drain();
  engine.steps.clear();
}

TEST_CASE("addresses beyond what the table holds are asked about again, and no others are known") {
  chunkattn::cuda_detail::KnownPointers known;
  std::vector<char> memory(1 << 16);
  std::size_t remembered = 0;
  for (std::size_t i = 0; i < memory.size(); i += 16) {
    CHECK(!known.contains(&memory[i]));
    known.insert(&memory[i]);
    CHECK(known.contains(&memory[i]));
  }
  for (std::size_t i = 0; i < memory.size(); i += 16) remembered += known.contains(&memory[i]);
  CHECK(remembered > 0);
  CHECK(remembered < memory.size() / 16);
  CHECK(!known.contains(nullptr));
}

TEST_CASE("float K and V are rounded on the way in") {
  Engine engine(17);
  simt::current_schedule() = {};
  engine.sequences.push_back(engine.tree.insert(engine.prompt(5, 0)));
  engine.begin();
  engine.add(0, 5);
  engine.build();
  DeviceArray<float> k(5 * kv_heads * head_dim), v(5 * kv_heads * head_dim);
  engine.random.fill(k.span());
  engine.random.fill(v.span());
  engine.attention->write(engine.cache.layer(0), engine.view, k.span(), v.span(), &engine.stream);
  engine.stream.drain();
  const auto view = engine.cache.layer(0);
  for (int t = 0; t < 5; ++t) {
    const auto target = engine.view.writes[t];
    const auto at = static_cast<std::size_t>((t * kv_heads + 1) * head_dim + 3);
    CHECK(view.k_row(target.slot, 1, target.offset)[3] == chunkattn::to_half(k.span()[at]));
    CHECK(view.v_row(target.slot, 1, target.offset)[3] == chunkattn::to_half(v.span()[at]));
  }
}

TEST_CASE("bad input is named, and nothing has changed") {
  simt::Device& device = simt::device();
  const auto make = [](CudaOptions options = {}, CudaLimits limits = Engine::limits()) {
    return ChunkAttention<Cuda, head_dim>(limits, options);
  };
  SUBCASE("no device") {
    device.count = 0;
    CHECK_THROWS_AS(make(), chunkattn::DeviceError);
    device.count = 1;
  }
  SUBCASE("a device that is too old") {
    device.major = 7;
    CHECK_THROWS_WITH_AS(make(), doctest::Contains("compute capability = 7"),
                         chunkattn::InvalidArgument);
    device.major = 9;
  }
  SUBCASE("too little shared memory") {
    device.shared_per_block = 8192;
    CHECK_THROWS_WITH_AS(make(), doctest::Contains("HeadDim = 16"), chunkattn::InvalidArgument);
    device.shared_per_block = 232448;
  }
  SUBCASE("out of device memory") {
    device.fail("cudaMalloc", cudaErrorMemoryAllocation);
    CHECK_THROWS_WITH_AS(make(), doctest::Contains("cudaMalloc("), chunkattn::DeviceError);
    const auto held = device.memory.size();
    device.fail("cudaMallocHost", cudaErrorMemoryAllocation);
    CHECK_THROWS_AS(make(), chunkattn::DeviceError);
    CHECK(device.memory.size() == held);  // nothing leaks
  }
  SUBCASE("a workspace that is too small") {
    DeviceArray<unsigned char> memory(4096);
    CudaOptions options;
    options.workspace = memory.span().data();
    options.workspace_bytes = 4096;
    CHECK_THROWS_WITH_AS(make(options), doctest::Contains("workspace_bytes = 4096"),
                         chunkattn::InvalidArgument);
  }
  SUBCASE("the caller's workspace") {
    const auto bytes = ChunkAttention<Cuda, head_dim>::workspace_size(Engine::limits());
    DeviceArray<unsigned char> memory(bytes);
    CudaOptions options;
    options.workspace = memory.span().data();
    options.workspace_bytes = bytes;
    const int mallocs = device.calls["cudaMalloc"];
    (void)make(options);
    CHECK(device.calls["cudaMalloc"] == mallocs);
  }
  SUBCASE("options") {
    for (const float scale :
         {-1.0f, std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
      CudaOptions options;
      options.sm_scale = scale;
      CHECK_THROWS_WITH_AS(make(options), doctest::Contains("options.sm_scale = "),
                           chunkattn::InvalidArgument);
    }
    CudaOptions options;
    options.model.task_ps = -1;
    CHECK_THROWS_WITH_AS(make(options), doctest::Contains("options.model.task_ps = -1"),
                         chunkattn::InvalidArgument);
    options.model = {};
    options.model.min_split_tokens = 0;
    CHECK_THROWS_WITH_AS(make(options), doctest::Contains("options.model.min_split_tokens = 0"),
                         chunkattn::InvalidArgument);
  }
  SUBCASE("limits") {
    CudaLimits limits = Engine::limits();
    limits.num_qo_heads = 5;
    CHECK_THROWS_WITH_AS(make({}, limits), doctest::Contains("num_qo_heads = 5"),
                         chunkattn::InvalidArgument);
    limits = Engine::limits();
    limits.max_rows = 1 << 20;
    limits.num_kv_heads = 1 << 10;
    limits.num_qo_heads = 1 << 11;
    CHECK_THROWS_WITH_AS(make({}, limits), doctest::Contains("limits.num_qo_heads = 2048"),
                         chunkattn::InvalidArgument);
    limits = Engine::limits();
    limits.max_rows = 0;
    CHECK_THROWS_AS(make({}, limits), chunkattn::InvalidArgument);
  }
}

TEST_CASE("bad arguments of a step are named, and the next step is right") {
  simt::current_schedule() = {};
  Engine engine(18);
  for (int i = 0; i < 2; ++i) {
    engine.sequences.push_back(engine.tree.insert(engine.prompt(30, 4)));
    engine.prefill(engine.sequences.size() - 1);
  }
  engine.drain_and_check();
  engine.decode_plan();
  Step& step = engine.new_step();
  const auto layer = engine.cache.layer(0);
  const auto run = [&](auto q, simt::Stream* stream) {
    engine.attention->run(layer, engine.view, q, step.out->span(), {}, stream);
  };
  std::vector<half> host(step.q->size);
  CHECK_THROWS_WITH_AS(run(std::span<half>(host), &engine.stream), doctest::Contains("q = "),
                       chunkattn::InvalidArgument);
  CHECK_THROWS_WITH_AS(run(step.q->span().first(16), &engine.stream),
                       doctest::Contains("q.size() = 16"), chunkattn::InvalidArgument);
  simt::Stream other;
  other.device = 1;
  CHECK_THROWS_WITH_AS(run(step.q->span(), &other), doctest::Contains("stream = 1"),
                       chunkattn::InvalidArgument);
  simt::device().fail("launch", cudaErrorLaunchFailure);
  CHECK_THROWS_AS(run(step.q->span(), &engine.stream), chunkattn::DeviceError);
  engine.steps.clear();
  engine.tree.check_invariants();
  engine.enqueue();
  engine.submit();
  engine.drain_and_check();
}

TEST_CASE("the cache grows without moving a slot") {
  KvCache<Cuda, half> cache(64, {2, 8, 128}, 3);
  const auto before = cache.layer(1);
  const half* place = before.k_row(2, 3, 4);
  const auto per_slab = cache.bytes() / cache.bytes_per_slot();
  cache.grow(per_slab + 1);
  CHECK(before.k_row(2, 3, 4) == place);
  CHECK(cache.layer(1).k_slabs == before.k_slabs);
  CHECK(cache.bytes() == 2 * per_slab * cache.bytes_per_slot());
  simt::device().fail("cudaMalloc", cudaErrorMemoryAllocation);
  CHECK_THROWS_AS(cache.grow(2 * per_slab + 1), chunkattn::DeviceError);
  CHECK(cache.num_slots() == per_slab + 1);
  cache.grow(2 * per_slab + 1);
}
