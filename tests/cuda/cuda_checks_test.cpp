// What the CUDA backend refuses, asks the driver and readies ahead: on the fake device.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "chunkattn/debug/attention.hpp"
#include "chunkattn/debug/tree.hpp"
#include "simt/engine.hpp"
#include "support/level_plan.hpp"
#include "support/schedule_cases.hpp"
#include "support/schedule_summary.hpp"

namespace {

using namespace simt;

}  // namespace

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
                                        step.out->span(), {.stream = &engine.stream}),
                  chunkattn::InvalidArgument);
  graph.end();
  engine.steps.clear();
  // So is a step that the advance kernel would make without a copy.
  engine.enqueue();
  engine.submit();
  engine.drain_and_check();
  engine.decode_plan();
  Step& next = engine.new_step();
  const auto uploads = uploads_of(*engine.attention);
  {
    simt::Graph second(engine.stream);
    CHECK_THROWS_WITH_AS(engine.attention->run(engine.cache.layer(0), engine.view, next.q->span(),
                                               next.out->span(), {.stream = &engine.stream}),
                         doctest::Contains("before the capture"), chunkattn::InvalidArgument);
    second.end();
    CHECK(second.size() == 0);
  }
  engine.attention->prepare(engine.view, &engine.stream);
  CHECK(uploads_of(*engine.attention).uploads == uploads.uploads);
  CHECK(uploads_of(*engine.attention).advances == uploads.advances + 1);
  engine.stream.drain();
  engine.steps.clear();
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
                            {.lse = step.lse->span(), .stream = &engine.stream});
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

TEST_CASE("bad input is named, and nothing has changed") {
  simt::Device& device = simt::device();
  const auto make = [](CudaOptions options = {}, CudaOptions::Limits limits = Engine::limits()) {
    return ChunkAttention<Cuda, head_dim>(limits, options);
  };
  SUBCASE("no device") {
    device.count = 0;
    CHECK_THROWS_AS(make(), chunkattn::DeviceError);
    device.count = 2;
  }
  SUBCASE("a device that is too old") {
    device.major = 7;
    CHECK_THROWS_WITH_AS(make(), doctest::Contains("compute capability 7: expected 8.0 or newer"),
                         chunkattn::DeviceError);
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
  SUBCASE("a workspace that is not aligned") {
    const auto bytes = ChunkAttention<Cuda, head_dim>::workspace_size(Engine::limits());
    DeviceArray<unsigned char> memory(bytes + 256);
    CudaOptions options;
    options.workspace = memory.span().data() + 128;
    options.workspace_bytes = bytes;
    CHECK_THROWS_WITH_AS(make(options), doctest::Contains("expected 256-byte alignment"),
                         chunkattn::InvalidArgument);
  }
  SUBCASE("the caller's workspace") {
    const auto bytes = ChunkAttention<Cuda, head_dim>::workspace_size(Engine::limits());
    DeviceArray<unsigned char> memory(bytes);
    CudaOptions options;
    options.workspace = memory.span().data();
    options.workspace_bytes = bytes;
    std::ranges::fill(memory.span(), static_cast<unsigned char>(1));
    const int mallocs = device.calls["cudaMalloc"];
    ChunkAttention<Cuda, head_dim> attention(Engine::limits(), options);
    CHECK(device.calls["cudaMalloc"] == mallocs);
    // Counters and flags are zero already, whatever the memory held: a launch would take an equal
    // flag for its own.
    const auto there = chunkattn::plan_upload_of(attention).memory();
    const auto* const begin = reinterpret_cast<const unsigned char*>(there.counters);
    const auto* const end = reinterpret_cast<const unsigned char*>(there.partial_out);
    CHECK(end - begin > 1000);
    CHECK(std::all_of(begin, end, [](unsigned char byte) { return byte == 0; }));
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
    options.tuning.task_ps = -1;
    CHECK_THROWS_WITH_AS(make(options), doctest::Contains("options.tuning.task_ps = -1"),
                         chunkattn::InvalidArgument);
    options.tuning = {};
    options.tuning.min_split_tokens = 0;
    CHECK_THROWS_WITH_AS(make(options), doctest::Contains("options.tuning.min_split_tokens = 0"),
                         chunkattn::InvalidArgument);
  }
  SUBCASE("limits") {
    CudaOptions::Limits limits = Engine::limits();
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
    limits = Engine::limits();
    limits.max_windows = 8;
    CHECK_THROWS_WITH_AS(make({}, limits), doctest::Contains("limits.max_windows = 8: expected"),
                         chunkattn::InvalidArgument);
    limits.max_windows = 7;
    CHECK_NOTHROW(make({}, limits));
  }
}

TEST_CASE("bad arguments of a step are named, and the next step is right") {
  simt::current_schedule() = {};
  std::vector<half> host(1 << 16);  // where no device memory was that is known by its address
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
    engine.attention->run(layer, engine.view, q, step.out->span(), {.stream = stream});
  };
  REQUIRE(step.q->size <= host.size());
  CHECK_THROWS_WITH_AS(run(std::span<half>(host).first(step.q->size), &engine.stream),
                       doctest::Contains("q = "), chunkattn::InvalidArgument);
  CHECK_THROWS_WITH_AS(run(step.q->span().first(16), &engine.stream),
                       doctest::Contains("q.size() = 16"), chunkattn::InvalidArgument);
  simt::Stream other;
  other.device = 1;
  CHECK_THROWS_WITH_AS(run(step.q->span(), &other), doctest::Contains("stream = 1"),
                       chunkattn::InvalidArgument);
  simt::device().fail("launch", cudaErrorLaunchFailure);
  CHECK_THROWS_AS(run(step.q->span(), &engine.stream), chunkattn::DeviceError);
  engine.steps.clear();
  check_invariants(engine.tree);
  engine.enqueue();
  engine.submit();
  engine.drain_and_check();
}

TEST_CASE("a call while another one runs is refused, and the other is right") {
  simt::current_schedule() = {};
  Engine engine(19);
  engine.sequences.push_back(engine.tree.insert(engine.prompt(30, 4)));
  engine.prefill(0);
  engine.drain_and_check();
  engine.decode_plan();
  Step& step = engine.new_step();
  const auto layer = engine.cache.layer(0);
  ChunkAttention<Cuda, head_dim>& attention = *engine.attention;
  const auto prepare = [&] { attention.prepare(engine.view, &engine.stream); };
  const auto prepare_layer = [&] {
    attention.prepare(layer, engine.view, chunkattn::NoVariant{}, &engine.stream);
  };
  const auto write = [&] {
    attention.write(layer, engine.view, step.k->span(), step.v->span(), &engine.stream);
  };
  const auto run = [&] {
    attention.run(layer, engine.view, step.q->span(), step.out->span(), {.stream = &engine.stream});
  };
  int refusals = 0;
  const auto all = [&](const auto& call) {
    for (const auto& function :
         {std::function<void()>(prepare), std::function<void()>(prepare_layer),
          std::function<void()>(write), std::function<void()>(run)})
      call(function);
  };
  all([&](const auto& function) {
    refusals = 0;
    simt::device().interrupt = [&] {
      all([&](const auto& other) {
        CHECK_THROWS_WITH_AS(other(), doctest::Contains("attention = in use by another call: "),
                             chunkattn::InvalidArgument);
      });
      ++refusals;
    };
    function();
    simt::device().interrupt = nullptr;
    CHECK(refusals > 0);
  });
  engine.stream.drain();
  engine.steps.clear();
  check_invariants(engine.tree);
  engine.enqueue();
  engine.submit();
  engine.drain_and_check();
}

TEST_CASE("the cache has rows of V of their own, but not in K's") {
  chunkattn::KvCacheOptions options{
      .num_layers = 3, .num_kv_heads = 2, .head_dim = 128, .value_dim = 128};
  CHECK(KvCache<Cuda, half>(64, options, 1).layer(0).value_dim == 0);
  options.value_dim = 64;
  KvCache<Cuda, half> cache(64, options, 70);
  CHECK(cache.bytes_per_chunk() == std::size_t{3 * 2 * 64 * (128 + 64)} * sizeof(half));
  // Nothing overlaps: each row of each layer holds what it was given.
  const auto each_row = [&](const auto& f) {
    for (int l = 0; l < 3; ++l) {
      const auto layer = cache.layer(l);
      CHECK(layer.value_dim == 64);
      for (const int chunk : {0, 1, 68, 69})
        for (int head = 0; head < 2; ++head)
          for (const int token : {0, 1, 63}) {
            f(std::span(layer.k_row(chunk, head, token), 128));
            f(std::span(layer.v_row(chunk, head, token), 64));
          }
    }
  };
  float next = 1;
  each_row([&](std::span<half> row) {
    for (half& x : row) x = chunkattn::to_half(next);
    ++next;
  });
  next = 1;
  each_row([&](std::span<half> row) {
    CHECK(std::all_of(row.begin(), row.end(),
                      [&](half x) { return chunkattn::to_float(x) == next; }));
    ++next;
  });
  options.v_in_k = true;
  CHECK_THROWS_AS((KvCache<Cuda, half>(64, options, 1)), chunkattn::InvalidArgument);
}

TEST_CASE("a layer's rows of V are those that the kernels were compiled for") {
  Engine engine(33);
  engine.sequences.push_back(engine.tree.insert(engine.prompt(20, 3)));
  engine.begin();
  engine.add(0, 100);
  engine.build();
  simt::Step& step = engine.new_step();
  const auto run = [&](auto& attention, const chunkattn::KvView<half>& layer) {
    attention.run(layer, engine.view, step.q->span(), step.out->span(),
                  {.lse = step.lse->span(), .stream = &engine.stream});
  };
  KvCache<Cuda, half> longer(16, {1, simt::kv_heads, simt::head_dim, 64}, 4);
  CHECK_THROWS_WITH_AS(run(*engine.attention, longer.layer(0)),
                       doctest::Contains("layer.value_dim = 64"), chunkattn::InvalidArgument);
  ChunkAttention<Cuda, simt::head_dim, 64> attention(Engine::limits());
  CHECK_THROWS_WITH_AS(run(attention, engine.cache.layer(0)),
                       doctest::Contains("layer.value_dim = 0"), chunkattn::InvalidArgument);
  CHECK_THROWS_WITH_AS(run(attention, longer.layer(0)), doctest::Contains("out.size()"),
                       chunkattn::InvalidArgument);
  auto odd = longer.layer(0);
  odd.v_stride_token += 4;
  CHECK_THROWS_WITH_AS(run(attention, odd), doctest::Contains("strides of V"),
                       chunkattn::InvalidArgument);
}

TEST_CASE("a layer of another tree, without chunks, or with a shifted pointer") {
  Engine engine(41), other(42);
  for (Engine* each : {&engine, &other}) {
    each->sequences.push_back(each->tree.insert(each->prompt(20, 3)));
    each->begin();
    each->add(0, 100);
    each->build();
  }
  simt::Step& step = engine.new_step();
  const auto run = [&](const chunkattn::KvView<half>& layer) {
    engine.attention->run(layer, engine.view, step.q->span(), step.out->span(),
                          {.lse = step.lse->span(), .stream = &engine.stream});
  };
  const auto write = [&](const chunkattn::KvView<half>& layer) {
    engine.attention->write(layer, engine.view, step.k->span(), step.v->span(), &engine.stream);
  };
  const auto refused = [&](const chunkattn::KvView<half>& layer, const char* why) {
    CHECK_THROWS_WITH_AS(run(layer), doctest::Contains(why), chunkattn::InvalidArgument);
    CHECK_THROWS_WITH_AS(write(layer), doctest::Contains(why), chunkattn::InvalidArgument);
  };
  refused(other.cache.layer(0), "layer = of another tree");
  refused(KvCache<Cuda, half>(16, {1, kv_heads, head_dim}).layer(0), "layer.num_chunks = 0");
  half elsewhere{};
  auto shifted = engine.cache.layer(0);
  shifted.k = &elsewhere;
  refused(shifted, "layer.k = non-null: expected null, since K lies in slabs");
  auto overlapping = engine.cache.layer(0);
  overlapping.v_slabs = overlapping.k_slabs;
  CHECK_THROWS_WITH_AS(write(overlapping), doctest::Contains("layer.v = K's memory"),
                       chunkattn::InvalidArgument);
  CHECK(engine.stream.queue.empty());
  simt::DeviceArray<half> own(64 * 16 * kv_heads * head_dim);
  const auto of_chunks = [&](int count) {
    return chunkattn::make_kv_view(own.span().data(), own.span().data() + own.size / 2,
                                   {count, kv_heads, 16, head_dim});
  };
  refused(of_chunks(1),
          "layer.num_chunks = 1: expected at least 2, which this plan needs: memory of your own");
  auto other_chunks = of_chunks(8);
  other_chunks.chunk_size = 32;
  refused(other_chunks, "layer.chunk_size = 32: expected the plan's chunk size, 16");
  CHECK_NOTHROW(write(of_chunks(2)));
  refused(of_chunks(1), "layer.num_chunks = 1");  // checked again, though the plan is known
  KvCache<Cuda, half> free(16, {1, kv_heads, head_dim}, 64);  // follows no tree
  CHECK_NOTHROW(write(free.layer(0)));
  engine.stream.drain();
  engine.steps.clear();
}

TEST_CASE("memory of one's own is checked again when a step reaches a chunk that it has not") {
  Engine engine(45);
  simt::current_schedule() = {};
  engine.sequences.push_back(engine.tree.insert(engine.prompt(20, 3)));
  engine.prefill(0);
  engine.drain_and_check();
  simt::DeviceArray<half> own(2 * 2 * 16 * kv_heads * head_dim);
  const auto layer = chunkattn::make_kv_view(own.span().data(), own.span().data() + own.size / 2,
                                             {2, kv_heads, 16, head_dim});
  for (int step_count = 0, most = 0; most < 3; ++step_count) {
    CAPTURE(step_count);
    engine.decode_plan();
    for (int p = 0; p < engine.view.num_pieces; ++p)
      most = std::max(most, engine.view.pieces[p].chunk + 1);
    REQUIRE((step_count > 0 || most == 2));
    Step& step = engine.new_step();
    const auto write = [&] {
      engine.attention->write(layer, engine.view, step.k->span(), step.v->span(), &engine.stream);
    };
    if (most == 2)
      CHECK_NOTHROW(write());
    else
      CHECK_THROWS_WITH_AS(write(), doctest::Contains("layer.num_chunks = 2: expected at least 3"),
                           chunkattn::InvalidArgument);
    engine.stream.drain();
    engine.steps.clear();
    engine.submit();
    engine.drain_and_check();
  }
}

TEST_CASE("two ranks, each with half of the heads of a layer, whose values differ") {
  Engine engine(43);
  simt::current_schedule() = {};
  engine.sequences.push_back(engine.tree.insert(engine.prompt(20, 3)));
  engine.begin();
  engine.add(0, 100);
  engine.build();
  Step& step = engine.new_step();
  const auto rows = static_cast<std::size_t>(engine.view.num_rows);
  CudaOptions::Limits limits = Engine::limits();
  limits.num_qo_heads = qo_heads / 2;
  limits.num_kv_heads = 1;
  ChunkAttention<Cuda, head_dim> attention(limits, {.tuning = engine_model()});
  const auto share = [&](int rank) { return engine.cache.layer(0).heads(rank, 1); };
  DeviceArray<half> k(rows * head_dim), v(k.size), q(rows * qo_heads / 2 * head_dim), out(q.size);
  std::ranges::fill(k.span(), half{});
  for (int rank = 0; rank < 2; ++rank) {
    std::ranges::fill(v.span(), chunkattn::to_half(static_cast<float>(rank + 1)));
    attention.write(share(rank), engine.view, k.span(), v.span(), &engine.stream);
    engine.stream.drain();
  }
  for (int rank = 0; rank < 2; ++rank) {
    std::ranges::copy(step.q->first(q.size), q.span().begin());
    attention.run(share(rank), engine.view, q.span(), out.span(), {.stream = &engine.stream});
    engine.stream.drain();
    for (const half x : out.span()) REQUIRE(chunkattn::to_float(x) == static_cast<float>(rank + 1));
  }
  engine.steps.clear();
}

TEST_CASE("a step that forgets to write a layer, where that is checked") {
  Engine engine(44);
  simt::current_schedule() = {};
  KvCache<Cuda, half> cache(
      engine.tree,
      {.num_layers = 2, .num_kv_heads = kv_heads, .head_dim = head_dim, .check_writes = true});
  engine.sequences.push_back(engine.tree.insert(engine.prompt(20, 3)));
  engine.begin();
  engine.add(0, 100);
  engine.build();
  Step& step = engine.new_step();
  const auto write = [&](int layer) {
    engine.attention->write(cache.layer(layer), engine.view, step.k->span(), step.v->span(),
                            &engine.stream);
  };
  const auto run = [&](int layer) {
    engine.attention->run(cache.layer(layer), engine.view, step.q->span(), step.out->span(),
                          {.stream = &engine.stream});
  };
  write(0);
  run(0);
  CHECK_THROWS_WITH_AS(run(1),
                       doctest::Contains("layer = 1: expected step 1 to write it before run()"),
                       chunkattn::InvalidArgument);
  CHECK_THROWS_WITH_AS((void)std::move(*engine.open).finish(),
                       doctest::Contains("layer = 1: expected step 1 to write it before finish()"),
                       chunkattn::InvalidArgument);
  mark_written(cache.layer(1), engine.view);  // a graph was launched, say
  run(1);
  engine.stream.drain();
  engine.steps.clear();
  (void)std::move(*engine.open).finish();
  CHECK_THROWS_WITH_AS((KvCache<Cuda, half>(16, cache.options(), 4)),
                       doctest::Contains("options.check_writes = true"),
                       chunkattn::InvalidArgument);
}

TEST_CASE("the workspace has room for what schedules use, not for what rows of prompts might") {
  using namespace chunkattn::detail::cuda;
  CudaOptions::Limits limits;
  limits.num_qo_heads = 32;
  limits.num_kv_heads = 8;
  const auto bytes = [&](int rows) {
    limits.max_rows = rows;
    return ChunkAttention<Cuda, 128>::workspace_size(limits);
  };
  const auto totals = static_cast<std::size_t>(simt::device().sms) * 2 * total_bytes(128);
  CHECK(bytes(256) - totals < 24'000'000);
  CHECK(bytes(8192) - totals < 85'000'000);
  // The bound takes nothing from any schedule of the figures' cases and trees.
  limits.max_rows = 8192;
  for (const auto& cases : {test::two_level_cases(), test::published_trees()})
    for (const test::ScheduleCase& c : cases) {
      CAPTURE(c.name);
      limits.num_qo_heads = c.geometry.num_qo_heads;
      limits.num_kv_heads = c.geometry.num_kv_heads;
      const test::RandomPlan plan = c.plan();
      Scheduler bounded, free;
      bounded.build(plan.view(), c.geometry, CostModel{},
                    WorkspaceLayout(completed(limits), 128, 264).capacity);
      free.build(plan.view(), c.geometry, CostModel{}, {1u << 20, 1u << 20, 1u << 30});
      CHECK(bounded.num_partials() == free.num_partials());
      CHECK(bounded.tasks().size() == free.tasks().size());
    }
}

TEST_CASE("where partial results do not fit, what saves most by them is shared") {
  using namespace chunkattn::detail::cuda;
  const Geometry geometry{32, 8, 128};
  // Two sequences in each of 64 groups: 8,192 tokens that all share, 512 that two do.
  const test::RandomPlan plan = test::make_level_plan({1, 64, 128}, {8192, 512, 32});
  const auto build = [&](std::size_t partial_rows) {
    Scheduler scheduler;
    scheduler.build(plan.view(), geometry, CostModel{}, {1u << 20, 1u << 20, partial_rows * 32});
    return test::summarize(scheduler, geometry);
  };
  CHECK(build(1 << 20).num_shared == 65);
  const auto some = build(128);  // one partial result for each row
  CHECK(some.num_shared == 1);
  CHECK(some.kv_tokens < 300'000);  // without any sharing a million
  CHECK(build(100).num_shared == 0);
}

TEST_CASE("only the kernels that a program launches are its own") {
  using namespace chunkattn::detail::cuda;
  // This program launches nothing of these dimensions.
  CHECK(UsedKernels<64, 96>::first == nullptr);
  int attention = 0, all = 0;
  for (const UsedKernel* kernel = UsedKernels<head_dim, head_dim>::first; kernel != nullptr;
       kernel = kernel->next) {
    ++all;
    attention += kernel->address ==
                 reinterpret_cast<const void*>(&attention_kernel<half, head_dim, head_dim>);
  }
  CHECK(attention == 1);
  CHECK(all >= 4);
}

TEST_CASE("the cache grows without moving a chunk") {
  KvCache<Cuda, half> cache(64, {2, 8, 128}, 3);
  const auto before = cache.layer(1);
  const half* place = before.k_row(2, 3, 4);
  const auto per_slab = cache.bytes() / cache.bytes_per_chunk();
  cache.grow(per_slab + 1);
  CHECK(before.k_row(2, 3, 4) == place);
  CHECK(cache.layer(1).k_slabs == before.k_slabs);
  CHECK(cache.bytes() == 2 * per_slab * cache.bytes_per_chunk());
  // A growth by two slabs that fails at any call: nothing of it stays.
  const auto held = simt::device().memory.size();
  const auto fails = [&](const char* call, int after) {
    simt::device().fail(call, cudaErrorMemoryAllocation, after);
    CHECK_THROWS_AS(cache.grow(4 * per_slab), chunkattn::DeviceError);
    CHECK(cache.bytes() == 2 * per_slab * cache.bytes_per_chunk());
    CHECK(cache.num_chunks() == per_slab + 1);
    CHECK(simt::device().memory.size() == held);
  };
  for (const int after : {0, 1}) fails("cudaMalloc", after);
  fails("cudaMemcpy", 0);
  const int copies = simt::device().calls["cudaMemcpy"];
  cache.grow(3 * per_slab);
  CHECK(simt::device().calls["cudaMemcpy"] - copies == 1);  // two layers, K and V of each
  const auto layer = cache.layer(1);
  for (const std::size_t chunk : {std::size_t{0}, 2 * per_slab, 3 * per_slab - 1})
    CHECK(simt::device().find(layer.v_row(static_cast<int>(chunk), 7, 63)) != nullptr);
  // The host knows where all of them lie, too.
  const auto on_host = cache.host_layer(1);
  for (const std::size_t chunk : {std::size_t{0}, per_slab, 3 * per_slab - 1})
    CHECK(on_host.v_row(static_cast<int>(chunk), 7, 63) ==
          layer.v_row(static_cast<int>(chunk), 7, 63));
  CHECK_NOTHROW(cache.grow(1));  // fewer than there are: nothing changes
  CHECK(cache.num_chunks() == 3 * per_slab);
  CHECK(cache.bytes() == 3 * per_slab * cache.bytes_per_chunk());
}

TEST_CASE("every kernel is loaded and set up by the constructor") {
  simt::Device& device = simt::device();
  device.kernels.clear();
  device.late_loads = 0;
  Engine engine(21);
  simt::current_schedule() = {};
  const int sets = device.calls["cudaFuncSetAttribute"];
  engine.sequences.push_back(engine.tree.insert(engine.prompt(20, 4)));
  engine.prefill(0);
  for (int step = 0; step < 2; ++step) {  // the second is what the first foretells
    engine.decode_plan();
    engine.enqueue();
    engine.submit();
    engine.drain_and_check();
  }
  // Both element types, and row copies without tokens.
  engine.decode_plan();
  Step& step = engine.new_step();
  ChunkAttention<Cuda, head_dim>& attention = *engine.attention;
  KvCache<Cuda, chunkattn::bfloat16> other(16, {1, kv_heads, head_dim}, 64);
  DeviceArray<chunkattn::bfloat16> k(step.k->size), v(step.v->size), q(step.q->size),
      out(step.out->size);
  const auto run_with = [&]<class T>(KvCache<Cuda, T>& cache, std::span<T> keys,
                                     std::span<T> values, const auto& queries,
                                     const auto& outputs) {
    const auto layer = cache.layer(0);
    attention.write(layer, engine.view, std::span<T>(), std::span<T>(), &engine.stream);
    attention.write(layer, engine.view, keys, values, &engine.stream);
    attention.run(layer, engine.view, queries, outputs, {.stream = &engine.stream});
  };
  attention.prepare(engine.view, &engine.stream);
  engine.stream.drain();
  {
    simt::Graph graph(engine.stream);  // in which row copies are launched where there are none, too
    run_with(engine.cache, step.k->span(), step.v->span(), step.q->span(), step.out->span());
    run_with(other, k.span(), v.span(), q.span(), out.span());
    graph.end();
    CHECK(graph.size() == 6);
  }
  CHECK(device.late_loads == 0);
  CHECK(device.calls["cudaFuncSetAttribute"] == sets);
  engine.steps.clear();
}

TEST_CASE("a kernel that could not be loaded is loaded by the next call") {
  simt::Device& device = simt::device();
  Engine engine(24);
  simt::current_schedule() = {};
  engine.sequences.push_back(engine.tree.insert(engine.prompt(20, 4)));
  engine.begin();
  engine.add(0, 100);
  engine.build();
  const auto prepare = [&] {
    engine.attention->prepare(engine.cache.layer(0), engine.view, chunkattn::SlidingWindow{10},
                              &engine.stream);
  };
  int& sets = device.calls["cudaFuncSetAttribute"];
  device.fail("cudaFuncSetAttribute", cudaErrorMemoryAllocation);
  CHECK_THROWS_AS(prepare(), chunkattn::DeviceError);
  for (const int made : {2, 0}) {  // once it is loaded, no more
    const int before = sets;
    CHECK_NOTHROW(prepare());
    CHECK(sets == before + made);
  }
  engine.stream.drain();
}

TEST_CASE("shared memory beyond what every kernel has is asked for, and must be there") {
  using namespace chunkattn::detail::cuda;
  struct Arguments {};
  constexpr auto kernel = +[](Arguments) {};
  simt::Device& device = simt::device();
  device.kernels.clear();
  simt::Stream stream;
  constexpr int bytes = 64 * 1024;
  load_kernel(kernel);
  CHECK(blocks_per_sm(kernel, 32, bytes) == 0);
  CHECK_THROWS_AS(launch("kernel", kernel, 1, 32, bytes, &stream, {}), chunkattn::DeviceError);
  CHECK_NOTHROW(launch("kernel", kernel, 1, 32, 48 * 1024, &stream, {}));
  allow_shared(kernel);
  CHECK_NOTHROW(launch("kernel", kernel, 1, 32, bytes, &stream, {}));
  CHECK_NOTHROW(launch("kernel", kernel, 1, 32, device.shared_per_block, &stream, {}));
  CHECK_THROWS_AS(launch("kernel", kernel, 1, 32, device.shared_per_block + 1, &stream, {}),
                  chunkattn::DeviceError);
  stream.drain();
}

// The device may still read what it holds, so no object is ever moved from.
static_assert(!std::is_copy_constructible_v<ChunkAttention<Cuda, head_dim>> &&
              !std::is_move_constructible_v<ChunkAttention<Cuda, head_dim>>);
static_assert(!std::is_copy_assignable_v<ChunkAttention<Cuda, head_dim>> &&
              !std::is_move_assignable_v<ChunkAttention<Cuda, head_dim>>);

TEST_CASE("the driver says how many blocks run at the same time") {
  simt::Device& device = simt::device();
  const auto blocks = [] { return ChunkAttention<Cuda, head_dim>(Engine::limits()).num_blocks(); };
  CHECK(blocks() == 2 * device.sms);
  device.blocks_by_registers = 1;
  CHECK(blocks() == device.sms);
  device.blocks_by_registers = 1000;  // as many as all of the shared memory holds, L1 has none
  const ChunkAttention<Cuda, head_dim> attention(Engine::limits());
  using namespace chunkattn::detail::cuda;
  const int bytes = shared_bytes(head_dim, attention.num_stages(), max_tile_rows) + 1024;
  CHECK(attention.num_blocks() == device.sms * (device.shared_per_sm / bytes));
  // The workspace has totals for so many blocks, and for no more.
  const int per_sm = std::exchange(device.shared_per_sm, 1 << 20);
  REQUIRE(device.shared_per_sm / bytes > most_blocks(head_dim));
  CHECK(blocks() == device.sms * most_blocks(head_dim));
  device.shared_per_sm = per_sm;
  device.blocks_by_registers = 0;
  CHECK_THROWS_WITH_AS(blocks(), doctest::Contains("HeadDim = 16"), chunkattn::InvalidArgument);
  device.blocks_by_registers = 2;
}

TEST_CASE("an object for few lines has room for the queries of so many") {
  Engine engine(52);
  shuffled(engine.random.bits());
  CudaOptions::Limits limits = Engine::limits();
  limits.max_rows = 10;  // 30 lines
  CudaOptions options;
  options.tuning = engine_model();
  engine.attention = std::make_unique<ChunkAttention<Cuda, head_dim>>(limits, options);
  for (std::size_t i = 0; i < 10; ++i) {
    engine.sequences.push_back(engine.tree.insert(engine.prompt(150, 5)));
    while (engine.sequences[i].num_uncomputed() > 0) {
      engine.begin();
      engine.add(i, 10);
      engine.build();
      engine.enqueue();
      engine.submit();
    }
  }
  for (int step = 0; step < 20; ++step) {
    engine.decode_plan();
    engine.enqueue();
    engine.submit();
  }
  engine.drain_and_check();
}

TEST_CASE("layer() does not grow inside a capture") {
  Tree tree;
  KvCache<Cuda, half> cache(tree, {1, kv_heads, head_dim});
  std::vector<int> tokens(40);
  Tree::Sequence sequence = tree.insert(tokens);
  for (const bool blocking : {true, false}) {
    simt::Stream stream;
    stream.blocking = blocking;
    simt::Graph graph(stream);
    const auto bytes = cache.bytes();
    // Nothing tells of a non-blocking stream's capture but the stream itself.
    CHECK_THROWS_WITH_AS(blocking ? cache.layer(0) : cache.layer(0, &stream),
                         doctest::Contains("before the capture"), chunkattn::InvalidArgument);
    CHECK(cache.bytes() == bytes);
    graph.end();
    CHECK(simt::device().capture_violations == 0);
  }
  CHECK(cache.layer(0).num_chunks > 0);
  simt::Stream stream;
  simt::Graph graph(stream);
  CHECK_NOTHROW((void)cache.layer(0, &stream));  // large enough now
  graph.end();
}

TEST_CASE("two streams at the same time are refused where streams are watched") {
#if defined(NDEBUG)
  CHECK(!CudaOptions{}.check_streams);
#else
  CHECK(CudaOptions{}.check_streams);
#endif
  for (const bool watched : {true, false}) {
    CudaOptions options;
    options.check_streams = watched;
    Engine engine(22, options);
    simt::current_schedule() = {};
    engine.sequences.push_back(engine.tree.insert(engine.prompt(20, 4)));
    engine.prefill(0);
    engine.drain_and_check();
    engine.decode_plan();
    engine.enqueue();
    simt::Stream other;
    Step& step = engine.steps.front();
    const auto run_on_other = [&] {
      engine.attention->run(engine.cache.layer(0), engine.view, step.q->span(), step.out->span(),
                            {.stream = &other});
    };
    if (watched) {
      CHECK_THROWS_WITH_AS(run_on_other(),
                           doctest::Contains("stream = non-null: expected the stream"),
                           chunkattn::InvalidArgument);
      engine.stream.drain();
    }
    CHECK_NOTHROW(run_on_other());
    engine.stream.drain();
    other.drain();
    engine.submit();
    engine.drain_and_check();
    // What prepare() alone has enqueued is watched, too.
    engine.decode_plan();
    engine.attention->prepare(engine.view, &engine.stream);
    const auto prepare_on_other = [&] { engine.attention->prepare(engine.view, &other); };
    if (watched)
      CHECK_THROWS_WITH_AS(prepare_on_other(),
                           doctest::Contains("stream = non-null: expected the stream"),
                           chunkattn::InvalidArgument);
    engine.stream.drain();
    CHECK_NOTHROW(prepare_on_other());
  }
}

TEST_CASE("after a failed upload its buffer is used again only when its copies have landed") {
  for (const bool copies_first : {true, false}) {
    const char* failing = copies_first ? "cudaMemcpyAsync" : "cudaEventRecord";
    CAPTURE(copies_first);
    Engine engine(23);
    simt::current_schedule() = {};
    simt::device().early_reuses = 0;
    engine.sequences.push_back(engine.tree.insert(engine.prompt(40, 4)));
    engine.prefill(0);
    engine.drain_and_check();
    // Plans with rows far apart in the workspace: several copies each, of which the second
    // fails, or the event behind them.
    for (int i = 0; i < 4; ++i) {
      engine.decode_plan();
      if (i == 0) simt::device().fail(failing, cudaErrorLaunchFailure, copies_first ? 1 : 0);
      try {
        engine.attention->prepare(engine.view, &engine.stream);
      } catch (const chunkattn::DeviceError&) {
        CHECK(i == 0);
      }
      engine.open.reset();  // cancelled
      if (i < 3) engine.sequences.push_back(engine.sequences[0].fork());
    }
    CHECK(simt::device().failing_call.empty());
    engine.stream.drain();
    CHECK(simt::device().early_reuses == 0);
  }
}

TEST_CASE("an address that was refused is refused again") {
  chunkattn::detail::cuda::CallChecks checks(0, true, false);
  alignas(16) const float host[4] = {};
  for (int i = 0; i < 2; ++i)
    CHECK_THROWS_WITH_AS(checks.pointer("q", host), doctest::Contains("this is host memory"),
                         chunkattn::InvalidArgument);
}

TEST_CASE("known addresses are forgotten when there are too many, and the driver is asked again") {
  chunkattn::detail::cuda::CallChecks checks(0, true, false);
  constexpr std::size_t known = 1536;
  DeviceArray<float> memory(4 * (known + 1));
  int& queries = simt::device().calls["cudaPointerGetAttributes"];
  const auto asked = [&](std::size_t i) {
    const int before = queries;
    checks.pointer("q", memory.span().data() + 4 * i);
    return queries > before;
  };
  for (std::size_t i = 0; i < known; ++i) REQUIRE(asked(i));
  CHECK(!asked(0));
  CHECK(asked(known));  // takes the place of all others
  CHECK(!asked(known));
  CHECK(asked(0));
}

TEST_CASE("a cache has the layers that it was made with, until it is moved from") {
  KvCache<Cuda, half> cache(16, {2, kv_heads, head_dim}, 4);
  for (const int layer : {-1, 2})
    CHECK_THROWS_WITH_AS((void)cache.layer(layer), doctest::Contains("layer = "),
                         chunkattn::InvalidArgument);
  const KvCache<Cuda, half> moved(std::move(cache));
  CHECK_THROWS_WITH_AS((void)cache.layer(0), doctest::Contains("was not moved from"),
                       chunkattn::InvalidArgument);
  CHECK(moved.num_chunks() == 4);
}
