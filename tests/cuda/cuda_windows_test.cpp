// ChunkAttention<Cuda> with variants: schedules of windows that are kept while plans and lengths
// change, graphs, and what is refused. On the fake device.
#include <doctest/doctest.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "chunkattn/debug/attention.hpp"
#include "chunkattn/debug/reference.hpp"
#include "simt/engine.hpp"
#include "support/attention_case.hpp"
#include "support/level_plan.hpp"

namespace {

using namespace simt;
using chunkattn::combine;
using chunkattn::KeyRange;
using chunkattn::LogitIndex;
using chunkattn::ReferenceVariant;
using chunkattn::Sinks;
using chunkattn::SlidingWindow;

ReferenceVariant definition_of(SlidingWindow window) {
  ReferenceVariant definition;
  definition.visible = [window](LogitIndex at) {
    return at.kv_idx > at.q_idx - window.size || at.kv_idx < window.keep;
  };
  return definition;
}

/// Sequences of some lengths, decoded one step: the plan is ready for more.
void start(Engine& engine, int sequences) {
  for (int i = 0; i < sequences; ++i) {
    engine.sequences.push_back(engine.tree.insert(engine.prompt(70, 5 + 13 * i)));
    engine.prefill(engine.sequences.size() - 1);
  }
  engine.drain_and_check();
}

/// The answers of one call, checked when the stream has been drained.
struct Call {
  DeviceArray<half> out;
  DeviceArray<float> lse;
  ReferenceVariant definition;

  Call(std::size_t rows, ReferenceVariant definition_)
      : out(rows * qo_heads * head_dim), lse(rows * qo_heads), definition(std::move(definition_)) {}

  void check(const chunkattn::KvView<half>& layer, const test::RandomPlan& plan,
             std::span<const half> q) {
    const auto reference = chunkattn::reference_attention(layer, plan.view(), q, {}, definition);
    const auto lines = static_cast<std::size_t>(plan.num_rows() * qo_heads);
    const auto report = chunkattn::compare_with_reference(
        reference, std::span<const half>(out.first(lines * head_dim)), 0x1p-11);
    CHECK(report.worst <= 1.0);
    CHECK(test::worst_lse(reference, lse.first(lines), chunkattn::unit_roundoff<half>()) <= 1.0);
  }
};

std::string refusal(const auto& call) {
  try {
    call();
    return "nothing";
  } catch (const chunkattn::InvalidArgument& error) {
    return error.what();
  }
}

}  // namespace

TEST_CASE("layers with and without a window take turns: planned once, copied once") {
  Engine engine(31);
  shuffled(engine.random.bits());
  start(engine, 4);
  DeviceArray<float> sinks(std::size_t{2} * qo_heads);  // of two layers
  engine.random.fill(sinks.span());
  const SlidingWindow window{40, 3};
  chunkattn::detail::cuda::UploadCounts first;
  for (int step = 0; step < 24; ++step) {
    engine.decode_plan();
    Step& made = engine.new_step();
    const auto layer = engine.cache.layer(0);
    engine.attention->write(layer, engine.view, made.k->span(), made.v->span(), &engine.stream);
    engine.attention->run(layer, engine.view, made.q->span(), made.out->span(),
                          {.lse = made.lse->span(), .stream = &engine.stream});
    const auto after_plain = uploads_of(*engine.attention);
    std::vector<std::unique_ptr<Call>> calls;
    for (std::size_t layers = 0; layers < 4; ++layers) {
      const std::span<const float> logits = sinks.span().subspan(layers % 2 * qo_heads, qo_heads);
      ReferenceVariant definition = definition_of(window);
      definition.sink = [logits](int head) {
        return static_cast<double>(logits[static_cast<std::size_t>(head)]);
      };
      calls.push_back(
          std::make_unique<Call>(static_cast<std::size_t>(engine.view.num_rows), definition));
      engine.attention->run(layer, engine.view, combine(Sinks{logits}, window), made.q->span(),
                            calls.back()->out.span(),
                            {.lse = calls.back()->lse.span(), .stream = &engine.stream});
      engine.attention->run(layer, engine.view, made.q->span(), made.out->span(),
                            {.lse = made.lse->span(), .stream = &engine.stream});
    }
    const auto after = uploads_of(*engine.attention);
    if (step == 0) {  // the window's own list, once
      CHECK(after.schedules == after_plain.schedules + 1);
      CHECK(after.uploads == after_plain.uploads + 1);
      first = after;
    } else {
      CHECK(after.uploads == after_plain.uploads);
    }
    engine.stream.drain();
    for (const auto& call : calls) call->check(layer, made.plan, made.q->span());
    engine.submit();
    engine.drain_and_check();
  }
  // The window has moved on by more than half of itself; new lists are for that.
  const auto last = uploads_of(*engine.attention);
  CHECK(last.schedules - first.schedules <= 6);
  CHECK(last.advances - first.advances == 23);
  CHECK(simt::device().late_loads == 0);
}

TEST_CASE("a captured graph with a window is replayed while sequences grow, join and leave") {
  Engine engine(32);
  shuffled(engine.random.bits());
  start(engine, 3);
  constexpr std::size_t max_rows = 8;
  const SlidingWindow window{30, 2};
  DeviceArray<half> q(max_rows * qo_heads * head_dim);
  DeviceArray<half> k(max_rows * kv_heads * head_dim), v(max_rows * kv_heads * head_dim);
  Call plain(max_rows, {}), local(max_rows, definition_of(window));
  const auto layer = engine.cache.layer(0);
  std::unique_ptr<simt::Graph> captured;
  for (int step = 0; step < 40; ++step) {
    if (step == 15) {
      engine.sequences.push_back(engine.tree.insert(engine.prompt(70, 9)));
      engine.prefill(engine.sequences.size() - 1);
      engine.drain_and_check();
    }
    if (step == 28) engine.sequences.erase(engine.sequences.begin());
    engine.decode_plan();
    const auto rows = static_cast<std::size_t>(engine.view.num_rows);
    engine.random.fill(q.span());
    engine.random.fill(k.span());
    engine.random.fill(v.span());
    const auto queries = q.first(rows * qo_heads * head_dim);
    if (step == 0) {
      engine.attention->prepare(layer, engine.view, window, &engine.stream);
      captured = std::make_unique<simt::Graph>(engine.stream);
      engine.attention->write(layer, engine.view, k.first(rows * kv_heads * head_dim),
                              v.first(rows * kv_heads * head_dim), &engine.stream);
      engine.attention->run(layer, engine.view, queries, plain.out.first(queries.size()),
                            {.lse = plain.lse.first(rows * qo_heads), .stream = &engine.stream});
      engine.attention->run(layer, engine.view, window, queries, local.out.first(queries.size()),
                            {.lse = local.lse.first(rows * qo_heads), .stream = &engine.stream});
      captured->end();
      CHECK(captured->size() == 3);
    } else {
      engine.attention->prepare(engine.view, &engine.stream);
    }
    captured->replay();
    engine.stream.drain();
    const test::RandomPlan plan = snapshot(engine.view);
    plain.check(layer, plan, queries);
    local.check(layer, plan, queries);
    engine.submit();
  }
  CHECK(simt::device().capture_violations == 0);
  CHECK(simt::device().late_loads == 0);
}

namespace {

/// What hides where it has not hidden before, which no window does.
struct EveryOther {
  struct Shows {
    CHUNKATTN_HD bool operator()(LogitIndex at) const {
      return at.q_idx % 2 == 0 || at.kv_idx >= at.q_idx - 5;
    }
  };
  auto visible(chunkattn::lanes::At) const { return chunkattn::lanes::per_lane(Shows{}); }
  CHUNKATTN_HD KeyRange masked(int query) const {
    return query % 2 == 0 ? KeyRange{} : KeyRange{0, query - 5};
  }
};

/// Runs `variant` over one tree whose rows become longer and shorter.
template <class V>
void check_lengths(test::Random& random, const V& variant, const ReferenceVariant& definition) {
  test::RandomPlanOptions options;
  options.share = test::Share::all;
  options.num_sequences = random.uniform(2, 6);
  options.max_length = 120;
  options.reserve_chance = 0;
  test::RandomPlan plan = test::make_random_plan(random, options);
  CudaOptions cuda;
  cuda.tuning = engine_model();
  ChunkAttention<Cuda, head_dim> attention(Engine::limits(), cuda);
  KvCache<Cuda, half> cache(options.chunk_size, {1, kv_heads, head_dim},
                            static_cast<std::size_t>(plan.num_chunks));
  const auto layer = cache.layer(0);
  test::fill_kv(random, plan, layer);
  const auto longest = plan.row_kv_len;
  Stream stream;
  const auto rows = static_cast<std::size_t>(plan.num_rows());
  for (int step = 0; step < 12; ++step) {
    for (std::size_t row = 0; row < rows; ++row)
      plan.row_kv_len[row] = std::clamp(plan.row_kv_len[row] + random.uniform(-6, 6),
                                        random.chance(0.1) ? 0 : 1, longest[row]);
    DeviceArray<half> q(rows * qo_heads * head_dim);
    random.fill(q.span());
    Call call(rows, definition);
    shuffled(random.bits());
    attention.run(layer, plan.view(), variant, q.span(), call.out.span(),
                  {.lse = call.lse.span(), .stream = &stream});
    stream.drain();
    call.check(layer, plan, q.span());
  }
}

}  // namespace

TEST_CASE("a list serves as long as what it leaves out is hidden") {
  test::Random random(33);
  for (int i = 0; i < test::scaled(6); ++i) {
    const SlidingWindow window{random.pick({1, 20, 64, 500}), random.pick({0, 3})};
    check_lengths(random, window, definition_of(window));
    ReferenceVariant definition;
    definition.visible = EveryOther::Shows{};
    check_lengths(random, EveryOther{}, definition);
  }
}

namespace {

/// Hides what is neither near nor far: the first hidden key moves, too.
struct Between {
  struct Shows {
    CHUNKATTN_HD bool operator()(LogitIndex at) const {
      return at.kv_idx < at.q_idx - 300 || at.kv_idx >= at.q_idx - 100;
    }
  };
  auto visible(chunkattn::lanes::At) const { return chunkattn::lanes::per_lane(Shows{}); }
  CHUNKATTN_HD KeyRange masked(int query) const { return {query - 300, query - 100}; }
};

}  // namespace

TEST_CASE(
    "a kept list serves while all that it leaves out is hidden and lengths are about the same") {
  using namespace chunkattn::detail::cuda;
  const auto kept = [](const auto& hidden) {
    KeptSchedule list;
    list.hidden = HiddenKeys(hidden);
    list.build(test::make_two_level_plan(2, 0, 1000).view(), {8, 8, 128}, CostModel{},
               {1u << 10, 1u << 10, 1u << 20});
    return list;
  };
  const auto serves = [](const KeptSchedule& list, int more_seen, int more_stored = 0) {
    test::RandomPlan plan = test::make_two_level_plan(2, 0, 1000);
    plan.row_kv_len[1] += more_seen;
    plan.segments.back().length += more_stored;
    return list.serves(plan.view());
  };
  const KeptSchedule window = kept(SlidingWindow{100}), between = kept(Between{});
  CHECK(serves(window, 0));
  CHECK(serves(window, 1));
  CHECK_FALSE(serves(window, -1));
  CHECK(serves(window, -1000));  // sees nothing
  CHECK(serves(between, 0));
  CHECK_FALSE(serves(between, 1));
  CHECK_FALSE(serves(between, -1));
  KeptSchedule all;
  all.build(test::make_two_level_plan(2, 0, 1000).view(), {8, 8, 128}, CostModel{},
            {1u << 10, 1u << 10, 1u << 20});
  CHECK(serves(all, -500));
  CHECK(serves(all, 0, 250));  // an eighth of all
  CHECK_FALSE(serves(all, 0, 251));
  CHECK(serves(all, 0, -250));
  CHECK_FALSE(serves(all, 0, -251));
}

TEST_CASE("windows beyond the limit take the place of others, but of none that a graph uses") {
  Engine engine(34);
  simt::current_schedule() = {};
  CudaOptions::Limits limits = Engine::limits();
  limits.max_windows = 1;
  engine.attention = std::make_unique<ChunkAttention<Cuda, head_dim>>(limits);
  start(engine, 2);
  engine.decode_plan();
  Step& made = engine.new_step();
  const auto layer = engine.cache.layer(0);
  engine.attention->write(layer, engine.view, made.k->span(), made.v->span(), &engine.stream);
  const auto run = [&](SlidingWindow window) {
    Call call(static_cast<std::size_t>(engine.view.num_rows), definition_of(window));
    engine.attention->run(layer, engine.view, window, made.q->span(), call.out.span(),
                          {.lse = call.lse.span(), .stream = &engine.stream});
    if (engine.stream.capture != nullptr) return;
    engine.stream.drain();
    call.check(layer, made.plan, made.q->span());
  };
  for (const int size : {10, 30, 10, 50}) run({size});
  {
    simt::Graph graph(engine.stream);
    run({50});  // prepared by the last call
    const std::string message = refusal([&] { run({10}); });
    CHECK(
        message.starts_with("stream = capturing: expected prepare(layer, plan, variant, stream)"));
    graph.end();
  }
  CHECK(refusal([&] { run({10}); }) ==
        "limits.max_windows = 1: expected more: captured graphs use a window each");
  run({50});
  engine.attention->run(layer, engine.view, made.q->span(), made.out->span(),
                        {.lse = made.lse->span(), .stream = &engine.stream});
  engine.submit();
  engine.drain_and_check();
}

TEST_CASE("the list that was not used for longest is replaced, and never one of a graph") {
  chunkattn::detail::cuda::ScheduleCache cache(4);
  CHECK(cache.in_use(0));
  for (int i = 1; i < 4; ++i) {
    CHECK(cache.replaceable() == i);  // free
    cache.use(i, false);
  }
  CHECK(cache.replaceable() == 1);
  cache.use(1, false);
  CHECK(cache.replaceable() == 2);
  cache.use(2, true);
  cache.use(2, false);  // by a call beside the graph
  CHECK(cache.replaceable() == 3);
  cache.drop_unused();  // other rows, twice: one list is used for the first
  CHECK(cache.in_use(3));
  cache.use(1, false);
  cache.drop_unused();
  CHECK(cache.in_use(0));
  CHECK(cache.in_use(1));
  CHECK(cache.in_use(2));
  CHECK_FALSE(cache.in_use(3));
  CHECK(cache.replaceable() == 3);
  cache.use(1, true);
  cache.use(3, true);
  CHECK(cache.replaceable() == -1);
}

TEST_CASE("a variant without a window takes the large tiles out of the list of plain calls") {
  simt::Device& device = simt::device();
  const int sms = std::exchange(device.sms, 1);  // a task for every block
  {
    Engine engine(36);
    shuffled(engine.random.bits());
    start(engine, 24);  // 72 lines
    DeviceArray<half> q(24 * qo_heads * head_dim);
    DeviceArray<half> k(24 * kv_heads * head_dim), v(24 * kv_heads * head_dim);
    DeviceArray<float> sinks(qo_heads);
    engine.random.fill(sinks.span());
    ReferenceVariant with_sinks;
    with_sinks.sink = [&](int head) {
      return static_cast<double>(sinks.span()[static_cast<std::size_t>(head)]);
    };
    Call plain(24, {}), sunk(24, with_sinks);
    const auto layer = engine.cache.layer(0);
    const auto has_large_tiles = [&] {
      const auto& tasks =
          chunkattn::detail::AttentionAccess::state(*engine.attention).upload_.scheduler().tasks();
      return std::any_of(tasks.begin(), tasks.end(),
                         [](const auto& task) { return task.tile_rows > 64; });
    };
    std::unique_ptr<simt::Graph> captured;
    for (int step = 0; step < 5; ++step) {
      engine.decode_plan();
      engine.random.fill(q.span());
      engine.random.fill(k.span());
      engine.random.fill(v.span());
      engine.attention->prepare(engine.view, &engine.stream);
      CHECK(has_large_tiles() == (step < 3));
      if (step == 0) {
        captured = std::make_unique<simt::Graph>(engine.stream);
        engine.attention->write(layer, engine.view, k.span(), v.span(), &engine.stream);
        engine.attention->run(layer, engine.view, q.span(), plain.out.span(),
                              {.lse = plain.lse.span(), .stream = &engine.stream});
        captured->end();
      }
      captured->replay();
      if (step == 2) {  // before the captured calls of the step have run, and after them
        const auto before = uploads_of(*engine.attention).schedules;
        for (int call = 0; call < 2; ++call)
          engine.attention->run(layer, engine.view, Sinks{sinks.span()}, q.span(), sunk.out.span(),
                                {.lse = sunk.lse.span(), .stream = &engine.stream});
        CHECK(uploads_of(*engine.attention).schedules == before + 1);
        CHECK_FALSE(has_large_tiles());
        captured->replay();
      }
      engine.stream.drain();
      const test::RandomPlan plan = snapshot(engine.view);
      plain.check(layer, plan, q.span());
      if (step == 2) sunk.check(layer, plan, q.span());
      engine.submit();
    }
    CHECK(device.capture_violations == 0);
    CHECK(device.late_loads == 0);
  }
  device.sms = sms;
}

TEST_CASE("variants that make no sense are refused before anything has changed") {
  Engine engine(35);
  simt::current_schedule() = {};
  start(engine, 1);
  engine.decode_plan();
  Step& made = engine.new_step();
  const auto layer = engine.cache.layer(0);
  const auto before = uploads_of(*engine.attention);
  const std::size_t queued = engine.stream.queue.size();
  const auto message = [&](const auto& variant) {
    return refusal([&] {
      engine.attention->run(layer, engine.view, variant, made.q->span(), made.out->span(),
                            {.stream = &engine.stream});
    });
  };
  const std::vector<float> host(qo_heads);
  CHECK(message(SlidingWindow{0}) == "SlidingWindow::size = 0: expected at least 1 key");
  CHECK(message(Sinks{std::span(host).first(2)}) ==
        "Sinks::logits.size() = 2: expected num_qo_heads = 6");
  const std::string wrong = message(Sinks{host});
  CHECK(wrong.starts_with("a table of variant.sink = "));
  CHECK(wrong.ends_with("expected device memory, this is host memory"));
  CHECK(uploads_of(*engine.attention).uploads == before.uploads);
  CHECK(engine.stream.queue.size() == queued);
  {
    DeviceArray<float> device(qo_heads);
    simt::Graph graph(engine.stream);
    const std::string late = message(Sinks{device.span()});
    graph.end();
    CHECK(late ==
          "stream = capturing: expected prepare(plan, stream) before the capture: an "
          "upload inside it would be replayed with stale contents");
  }
  CudaOptions::Limits limits = Engine::limits();
  limits.max_windows = 8;
  CHECK(refusal([&] { (void)ChunkAttention<Cuda, head_dim>::workspace_size(limits); }) ==
        "limits.max_windows = 8: expected 0 to 7");
  engine.steps.clear();
}
