// The CUDA backend and the driver around it: two devices, captures of other streams, launches that
// overlap, older drivers, errors of others. On the fake device.
#include <doctest/doctest.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "chunkattn/debug/attention.hpp"
#include "simt/engine.hpp"

namespace {

using namespace simt;

CudaOptions watched() {
  CudaOptions options;
  options.check_streams = true;
  return options;
}

/// An engine with two sequences whose prompts are computed, and a decode step planned.
struct Planned : Engine {
  explicit Planned(std::uint64_t number, CudaOptions options = {}) : Engine(number, options) {
    for (int i = 0; i < 2; ++i) {
      sequences.push_back(tree.insert(prompt(40, 4)));
      prefill(sequences.size() - 1);
    }
    drain_and_check();
    decode_plan();
  }
  void run_on(cudaStream_t where, simt::Step& step) {
    attention->run(cache.layer(0), view, step.q->span(), step.out->span(),
                   {.lse = step.lse->span(), .stream = where});
  }
};

}  // namespace

TEST_CASE("a cache and an attention object belong to their device, whichever is current") {
  simt::current_schedule() = {};
  std::unique_ptr<Engine> engine;
  {
    const simt::OnDevice second(1);
    engine = std::make_unique<Engine>(61, watched());
    engine->stream.device = 1;
  }
  for (const int tokens : {10, 60}) {  // the first call of layer() grows the cache
    engine->sequences.push_back(engine->tree.insert(engine->prompt(30, tokens)));
    engine->begin();
    engine->add(engine->sequences.size() - 1, 200);
    engine->build();
    simt::Step* step = nullptr;
    {
      const simt::OnDevice second(1);
      step = &engine->new_step();
    }
    const auto layer = engine->cache.layer(0);
    engine->stream.drain();
    engine->attention->prepare(layer, engine->view, chunkattn::SlidingWindow{1000},
                               &engine->stream);
    engine->attention->write(layer, engine->view, std::span<chunkattn::half>(),
                             std::span<chunkattn::half>(), &engine->stream);
    engine->attention->write(layer, engine->view, step->k->span(), step->v->span(),
                             &engine->stream);
    if (tokens == 60) engine->stream.drain();
    engine->attention->run(
        layer, engine->view, step->q->span(), step->out->span(),
        {.lse = step->lse->span(), .stream = tokens == 10 ? &engine->stream : nullptr});
    CHECK(simt::device().current == 0);
    CHECK(simt::device().default_streams[0].queue.empty());
    engine->stream.drain();  // the default stream of its own device, then
    simt::device().default_streams[1].drain();
    engine->submit();
    engine->drain_and_check();
  }
  CHECK(simt::device().late_loads == 0);
  for (const auto& [address, range] : simt::device().memory)
    CHECK((range.device == 1 || range.type != cudaMemoryTypeDevice));
}

TEST_CASE("an object of few rows leaves a larger one its shared memory") {
  const auto with_rows = [](int rows) {
    CudaOptions::Limits limits = Engine::limits();
    limits.max_rows = rows;
    return limits;
  };
  simt::current_schedule() = {};
  for (const bool small_first : {false, true}) {
    CAPTURE(small_first);
    simt::device().kernels.clear();
    std::optional<ChunkAttention<Cuda, head_dim>> small;
    if (small_first) small.emplace(with_rows(1));
    Planned large(66);
    if (!small_first) small.emplace(with_rows(1));
    CHECK_NOTHROW(large.enqueue());
    CHECK_NOTHROW(large.attention->prepare(large.cache.layer(0), large.view,
                                           chunkattn::SlidingWindow{1000}, &large.stream));
    large.submit();
    large.drain_and_check();
  }
}

TEST_CASE("K/V comes from the host to the cache's device, whichever is current, and back") {
  KvCache<Cuda, half> cache = [] {
    const simt::OnDevice second(1);
    return KvCache<Cuda, half>(16, {1, kv_heads, head_dim}, 4);
  }();
  const auto layer = cache.host_layer(0);
  const std::vector<std::byte> in(64, std::byte{3});
  std::vector<std::byte> out(in.size());
  REQUIRE(simt::device().current == 0);
  CHECK_NOTHROW(cache.copy_in(layer.k_row(3, 1, 5), in.data(), in.size()));
  cache.copy_out(reinterpret_cast<const std::byte*>(layer.k_row(3, 1, 5)), out.data(), out.size());
  CHECK(out == in);
  CHECK(simt::device().current == 0);
}

TEST_CASE("memory of another device is refused") {
  Planned engine(62);
  simt::current_schedule() = {};
  simt::Step& step = engine.new_step();
  const simt::OnDevice second(1);
  KvCache<Cuda, half> other(16, {1, kv_heads, head_dim}, 64);
  CHECK_THROWS_WITH_AS(engine.attention->run(other.layer(0), engine.view, step.q->span(),
                                             step.out->span(), {.stream = &engine.stream}),
                       doctest::Contains(" = 1: expected memory of device 0"),
                       chunkattn::InvalidArgument);
  simt::Stream stream;
  stream.device = 1;
  CHECK_THROWS_WITH_AS(engine.run_on(&stream, step), doctest::Contains("stream = 1"),
                       chunkattn::InvalidArgument);
  const auto bytes = ChunkAttention<Cuda, head_dim>::workspace_size(Engine::limits());
  DeviceArray<unsigned char> workspace(bytes);
  CudaOptions options;
  options.workspace = workspace.span().data();
  options.workspace_bytes = bytes;
  CHECK_NOTHROW((ChunkAttention<Cuda, head_dim>(Engine::limits(), options)));
  simt::device().current = 0;
  CHECK_THROWS_WITH_AS((ChunkAttention<Cuda, head_dim>(Engine::limits(), options)),
                       doctest::Contains("options.workspace = 1: expected memory of device 0"),
                       chunkattn::InvalidArgument);
  engine.steps.clear();
}

TEST_CASE("watching streams does not end the capture of the stream that is used next") {
  Planned engine(63, watched());
  simt::current_schedule() = {};
  simt::Step& step = engine.new_step();
  engine.attention->write(engine.cache.layer(0), engine.view, step.k->span(), step.v->span(),
                          &engine.stream);  // under way
  simt::Stream other;
  simt::Graph graph(other);
  CHECK_NOTHROW(engine.run_on(&other, step));
  CHECK_NOTHROW(graph.end());
  engine.stream.drain();
  graph.replay();
  other.drain();
  engine.submit();
  engine.drain_and_check();
  engine.decode_plan();
  CHECK_NOTHROW(engine.enqueue());  // no event that the graph holds is asked about
  engine.submit();
  engine.drain_and_check();
}

TEST_CASE("no call between begin and end of a capture ends it") {
  simt::current_schedule() = {};
  for (const bool blocking : {false, true}) {
    CAPTURE(blocking);
    Planned engine(64, watched());
    engine.cache.grow(64);
    simt::device().capture_violations = 0;
    simt::Stream captured;
    captured.blocking = blocking;
    std::optional<simt::Graph> graph(std::in_place, captured);
    // Steps of another stream, whose uploads wait for earlier ones.
    for (int i = 0; i < 4; ++i) {
      if (i > 0) {
        engine.sequences.push_back(engine.sequences[0].fork());
        engine.decode_plan();
      }
      engine.enqueue();
      engine.in_flight.push_back(std::move(*engine.open).submit());
    }
    engine.drain_and_check();
    // Then of a third one: what was enqueued on the other has finished.
    engine.decode_plan();
    simt::Stream third;
    CHECK_NOTHROW(engine.attention->prepare(engine.view, &third));
    third.drain();
    // Growth and a new object allocate; where a stream that waits for the default one is captured,
    // that is refused by name.
    KvCache<Cuda, half> made = [&] {
      const simt::Stream* const off = std::exchange(simt::device().capturing, nullptr);
      KvCache<Cuda, half> cache(16, {1, kv_heads, head_dim});
      simt::device().capturing = const_cast<simt::Stream*>(off);
      return cache;
    }();
    const auto construct = [] { ChunkAttention<Cuda, head_dim> unused(Engine::limits()); };
    if (blocking) {
      CHECK_THROWS_WITH_AS(made.grow(64), doctest::Contains("before the capture"),
                           chunkattn::InvalidArgument);
      CHECK(made.num_chunks() == 0);
      CHECK_THROWS_WITH_AS(construct(), doctest::Contains("before the capture"),
                           chunkattn::InvalidArgument);
    } else {
      CHECK_NOTHROW(made.grow(64));
      CHECK_NOTHROW(construct());
    }
    CHECK(simt::device().capture_violations == 0);
    CHECK_NOTHROW(graph->end());
    CHECK(simt::device().capture_mode == cudaStreamCaptureModeGlobal);
    engine.steps.clear();
  }
}

TEST_CASE("launches that overlap are told of by the next call, and the one after that is right") {
  int told = 0, silent = 0;
  simt::device().sms = 32;  // a captured launch has 64 blocks
  for (std::uint64_t seed = 0; seed < 12; ++seed) {
    CAPTURE(seed);
    CudaOptions unwatched;
    unwatched.check_streams = false;
    Planned engine(70 + seed, unwatched);
    simt::current_schedule() = {};
    simt::Step& step = engine.new_step();
    engine.attention->write(engine.cache.layer(0), engine.view, step.k->span(), step.v->span(),
                            &engine.stream);
    engine.stream.drain();
    // Two branches of a graph: one launch as captured, of all blocks, one for the plan's tasks.
    simt::Stream other;
    {
      simt::Graph graph(other);
      engine.run_on(&other, step);
      graph.end();
      graph.replay();
    }
    engine.run_on(&engine.stream, step);
    std::vector<simt::Launch> launches;
    simt::device().gathered = &launches;
    other.drain();
    engine.stream.drain();
    simt::device().gathered = nullptr;
    REQUIRE(launches.size() == 2);
    REQUIRE(launches[0].grid != launches[1].grid);
    simt::current_schedule() = {simt::Order::shuffled, simt::Copies::at_wait, seed, 3};
    simt::launch_together(launches);
    simt::current_schedule() = {};
    engine.steps.clear();
    engine.submit();
    for (auto& flight : engine.in_flight) {
      auto finished = std::move(flight).finish();
      for (const auto& row : finished.rows()) finished.commit(row, 7);
    }
    engine.in_flight.clear();

    engine.decode_plan();
    try {
      engine.enqueue();
      ++silent;
    } catch (const chunkattn::InvalidArgument& error) {
      CHECK(std::string(error.what()).starts_with("stream = "));
      ++told;
      engine.stream.drain();
      engine.steps.clear();
      engine.enqueue();
    }
    engine.submit();
    engine.drain_and_check();  // by the oracle
  }
  MESSAGE(told << " told, " << silent << " harmless");
  CHECK(told > 0);
  simt::device().sms = 2;
}

TEST_CASE("a launch that finds its counters wrong says so, and prepare() sets them") {
  Planned engine(65);
  simt::current_schedule() = {};
  engine.enqueue();
  engine.submit();
  engine.drain_and_check();
  auto* const counters =
      chunkattn::detail::AttentionAccess::state(*engine.attention).upload_.memory().counters;
  // What overlapping launches may leave: nothing is drawn, nobody is the last to leave.
  counters->next = 1000;
  counters->left = 5;
  engine.decode_plan();
  engine.enqueue();  // prepare() has set them
  engine.submit();
  engine.drain_and_check();
  engine.decode_plan();
  simt::Step& step = engine.new_step();
  const auto prepare = [&] { engine.attention->prepare(engine.view, &engine.stream); };
  CHECK_THROWS_WITH_AS(prepare(), doctest::Contains("overlapped"), chunkattn::InvalidArgument);
  prepare();
  const auto launches = simt::device().launches.size();
  prepare();  // the tickets are set once
  CHECK(simt::device().launches.size() == launches);
  engine.stream.drain();
  counters->next = 1000;
  counters->left = 5;
  engine.run_on(&engine.stream, step);
  engine.stream.drain();
  CHECK_THROWS_WITH_AS(engine.run_on(&engine.stream, step), doctest::Contains("overlapped"),
                       chunkattn::InvalidArgument);
  engine.attention->write(engine.cache.layer(0), engine.view, step.k->span(), step.v->span(),
                          &engine.stream);
  engine.run_on(&engine.stream, step);
  engine.submit();
  engine.drain_and_check();
}

TEST_CASE("a driver that is older than the toolkit cannot tell a stream's device") {
  simt::device().driver_version = 12000;
  {
    Planned engine(66, watched());
    simt::current_schedule() = {};
    engine.enqueue();
    engine.submit();
    engine.drain_and_check();
    CHECK(cudaPeekAtLastError() == cudaSuccess);
  }
  simt::device().driver_version = 13000;
}

TEST_CASE("an object that is destroyed waits for its uploads") {
  simt::current_schedule() = {};
  simt::device().early_reuses = 0;
  simt::Stream stream;
  DeviceArray<unsigned char> workspace(
      ChunkAttention<Cuda, head_dim>::workspace_size(Engine::limits()));
  CudaOptions options;
  options.workspace = workspace.span().data();
  options.workspace_bytes = workspace.size;
  test::Random random(67);
  test::RandomPlan plan = test::make_random_plan(random, {});
  {
    ChunkAttention<Cuda, head_dim> attention(Engine::limits(), options);
    attention.prepare(plan.view(), &stream);
    CHECK(!stream.queue.empty());
  }
  stream.drain();
  CHECK(simt::device().early_reuses == 0);
}

TEST_CASE("errors of others stay where they are, errors of ours do not") {
  simt::current_schedule() = {};
  Planned engine(68, watched());
  simt::Stream other;
  simt::device().last_error = cudaErrorInvalidValue;  // of a kernel of the caller, say
  simt::Step& step = engine.new_step();
  engine.attention->write(engine.cache.layer(0), engine.view, step.k->span(), step.v->span(),
                          &engine.stream);
  engine.stream.drain();
  engine.run_on(&other, step);  // asks whether the other stream's work is done
  other.drain();
  CHECK(cudaGetLastError() == cudaErrorInvalidValue);
  engine.run_on(&other, step);
  CHECK_THROWS_AS(engine.run_on(&engine.stream, step), chunkattn::InvalidArgument);  // it is not
  CHECK(cudaGetLastError() == cudaSuccess);
  simt::device().fail("launch", cudaErrorLaunchFailure);
  CHECK_THROWS_AS(engine.run_on(&other, step), chunkattn::DeviceError);
  CHECK(cudaGetLastError() == cudaSuccess);
  other.drain();
  engine.submit();
  engine.drain_and_check();
}
