// ChunkAttention<Cuda> over real trees and plans, on a fake device that does everything as late as
// it may: lazy uploads, double buffering, graph capture.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "chunkattn/debug/attention.hpp"
#include "chunkattn/debug/reference.hpp"
#include "simt/engine.hpp"
#include "support/parents.hpp"
#include "support/schedule_summary.hpp"

namespace {

using namespace simt;

}  // namespace

TEST_CASE("rows of V that are longer than those of K: written, copied, attended to") {
  EngineOf<64> engine(21);
  shuffled(engine.random.bits());
  for (int i = 0; i < 4; ++i) {
    engine.sequences.push_back(engine.tree.insert(engine.prompt(70, 10 * i)));
    engine.prefill(engine.sequences.size() - 1);
  }
  CHECK(engine.cache.layer(0).dim_of_v() == 64);
  for (int step = 0; step < std::max(20, test::scaled(20)); ++step) {
    engine.decode_plan();
    engine.enqueue();
    engine.submit();
    if (step % 6 == 5) engine.drain_and_check();
    if (step % 8 == 4) engine.sequences[0] = engine.sequences[1].fork();  // copies of rows
  }
  engine.drain_and_check();
}

TEST_CASE("decode steps enqueued ahead of the device agree with the oracle") {
  Engine engine(11);
  shuffled(engine.random.bits());
  for (int i = 0; i < 5; ++i) {
    engine.sequences.push_back(engine.tree.insert(engine.prompt(70, 10 * i)));
    engine.prefill(engine.sequences.size() - 1);
  }
  engine.drain_and_check();
  const auto before = uploads_of(*engine.attention);
  for (int step = 0; step < std::max(60, test::scaled(60)); ++step) {
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
  const auto after = uploads_of(*engine.attention);
  CHECK(after.advances - before.advances > 20);  // most steps are one small kernel
  CHECK(after.schedules - before.schedules < 12);
  CHECK(simt::device().launches.size() > 0);
}

TEST_CASE("out may be q, and overlaps it no other way") {
  Engine engine(16);
  shuffled(engine.random.bits());
  for (int i = 0; i < 5; ++i) {
    engine.sequences.push_back(engine.tree.insert(engine.prompt(200, 150)));
    engine.prefill(engine.sequences.size() - 1);
  }
  engine.drain_and_check();
  engine.decode_plan();
  simt::Step& step = engine.new_step();
  const auto layer = engine.cache.layer(0);
  const auto run = [&](std::span<const half> q, std::span<half> out) {
    engine.attention->run(layer, engine.view, q, out, {.stream = &engine.stream});
    engine.stream.drain();
  };
  engine.attention->write(layer, engine.view, step.k->span(), step.v->span(), &engine.stream);
  run(step.q->span(), step.out->span());
  CHECK(test::summarize(plan_upload_of(*engine.attention).scheduler(),
                        plan_upload_of(*engine.attention).geometry())
            .partial_bytes > 0);  // of rows whose queries several tasks read
  const std::size_t size = step.q->size;
  DeviceArray<half> memory(2 * size);
  std::ranges::copy(step.q->span(), memory.span().begin());
  run(memory.first(size), memory.first(size));
  CHECK(std::ranges::equal(memory.first(size), step.out->span()));
  CHECK_THROWS_WITH_AS(run(memory.first(size), memory.span().subspan(8, size)),
                       doctest::Contains("out = memory of q"), chunkattn::InvalidArgument);
  CHECK_NOTHROW(run(memory.first(size), memory.span().subspan(size)));
  engine.steps.clear();
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
  const auto before = uploads_of(*engine.attention);
  const int copies = simt::device().calls["cudaMemcpyAsync"];
  const int mallocs = simt::device().calls["cudaMallocHost"];
  int quiet_steps = 0;
  for (int step = 0; step < 32; ++step) {
    const auto uploads = uploads_of(*engine.attention).uploads;
    engine.decode_plan();
    engine.attention->prepare(engine.view, &engine.stream);
    if (uploads_of(*engine.attention).uploads == uploads) ++quiet_steps;
    engine.enqueue();
    engine.submit();
  }
  engine.drain_and_check();
  const auto after = uploads_of(*engine.attention);
  CHECK(after.advances - before.advances == 32);
  CHECK(quiet_steps >= 28);  // two chunks fill in 32 steps; each new piece is one upload
  CHECK(simt::device().calls["cudaMemcpyAsync"] - copies <= 8);
  CHECK(simt::device().calls["cudaMallocHost"] == mallocs);
}

TEST_CASE("the first plan of all may get a piece") {
  test::Random random(18);
  test::RandomPlan plan = test::make_random_plan(random, {});
  simt::Stream stream;
  ChunkAttention<Cuda, head_dim> attention(Engine::limits());
  attention.prepare(plan.view(), &stream);
  ++plan.pieces_version;
  attention.prepare(plan.view(), &stream);
  CHECK(uploads_of(attention).uploads == 2);
}

TEST_CASE("the host waits for an upload only when both buffers are being copied from") {
  test::Random random(20);
  test::RandomPlan plan = test::make_random_plan(random, {});
  simt::Stream stream;
  ChunkAttention<Cuda, head_dim> attention(Engine::limits());
  std::vector<std::size_t> queued;
  for (int uploads = 0; uploads < 3; ++uploads) {
    ++plan.segments_version;
    attention.prepare(plan.view(), &stream);
    queued.push_back(stream.queue.size());
  }
  CHECK(queued[1] == 2 * queued[0]);  // nothing has run
  CHECK(queued[2] < 3 * queued[0]);   // the first upload has
  stream.drain();
  CHECK(simt::device().early_reuses == 0);
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
                            out.first(rows * qo_heads * head_dim),
                            {.lse = lse.first(rows * qo_heads), .stream = &engine.stream});
      captured->end();
      CHECK(captured->size() == 2);  // copies and writes, attention
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

TEST_CASE("a captured graph has blocks for any plan, not for that of its capture") {
  if (!simt::is_emulated()) return;  // which counts blocks
  Engine engine(24);
  simt::current_schedule() = {};
  engine.sequences.push_back(engine.tree.insert(engine.prompt(20, 3)));
  engine.prefill(0);
  engine.drain_and_check();
  engine.decode_plan();  // one row
  Step& step = engine.new_step();
  const auto layer = engine.cache.layer(0);
  struct Blocks {
    int write, run;
  };
  const auto blocks_of = [&](auto& attention, bool captured) {
    attention.prepare(engine.view, &engine.stream);
    const auto count = [&](const auto& call) {
      engine.stream.drain();
      const auto before = simt::statistics().blocks;
      if (captured) {
        simt::Graph graph(engine.stream);
        call();
        graph.end();
        graph.replay();
        engine.stream.drain();
      } else {
        call();
        engine.stream.drain();
      }
      return static_cast<int>(simt::statistics().blocks - before);
    };
    return Blocks{count([&] {
                    attention.write(layer, engine.view, step.k->span(), step.v->span(),
                                    &engine.stream);
                  }),
                  count([&] {
                    attention.run(layer, engine.view, step.q->span(), step.out->span(),
                                  {.stream = &engine.stream});
                  })};
  };
  CHECK(blocks_of(*engine.attention, false).write == 1);
  CHECK(blocks_of(*engine.attention, false).run == kv_heads);
  CHECK(blocks_of(*engine.attention, true).run == engine.attention->num_blocks());
  CudaOptions::Limits limits = Engine::limits();
  limits.max_copies = 6;
  ChunkAttention<Cuda, head_dim> many_copies(limits);
  CHECK(blocks_of(many_copies, true).write == 6 * kv_heads);
  limits.max_copies = 1;
  limits.max_rows = 640;  // 128 pairs of a row and a KV head at once
  ChunkAttention<Cuda, head_dim> many_rows(limits);
  CHECK(blocks_of(many_rows, true).write == 10);
  engine.steps.clear();
}

TEST_CASE("row copies of forks are made where an engine stores K and V itself") {
  simt::current_schedule() = {};
  test::Random random(16);
  constexpr int layers = 3;
  KvCache<Cuda, half> cache(16, {layers, kv_heads, head_dim}, 4);
  for (int l = 0; l < layers; ++l)
    for (int chunk = 0; chunk < 4; ++chunk) {
      const auto view = cache.layer(l);
      for (int i = 0; i < kv_heads * 16 * head_dim; ++i) {
        view.k_row(chunk, 0, 0)[i] = chunkattn::to_half(random.normal());
        view.v_row(chunk, 0, 0)[i] = chunkattn::to_half(random.normal());
      }
    }
  test::RandomPlanOptions options;
  options.share = test::Share::none;
  options.num_sequences = 1;
  test::RandomPlan plan = test::make_random_plan(random, options);
  plan.copies = {{0, 3, 2, 5, 7}, {1, 0, 3, 0, 16}};
  simt::Stream stream;
  ChunkAttention<Cuda, head_dim> attention(Engine::limits());
  attention.prepare(plan.view(), &stream);
  for (int l = 0; l < layers; ++l)
    attention.write(cache.layer(l), plan.view(), std::span<half>(), std::span<half>(), &stream);
  stream.drain();
  int wrong = 0;
  for (int l = 0; l < layers; ++l)
    for (const auto& copy : plan.copies)
      for (int head = 0; head < kv_heads; ++head)
        for (int i = 0; i < copy.length; ++i)
          for (int d = 0; d < head_dim; ++d) {
            const auto view = cache.layer(l);
            wrong += !(view.k_row(copy.target_chunk, head, copy.target_begin + i)[d] ==
                       view.k_row(copy.source_chunk, head, copy.source_begin + i)[d]);
            wrong += !(view.v_row(copy.target_chunk, head, copy.target_begin + i)[d] ==
                       view.v_row(copy.source_chunk, head, copy.source_begin + i)[d]);
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
    const auto before = uploads_of(*engine.attention).uploads;
    const int waits = simt::device().calls["cudaEventSynchronize"];
    Step& step = engine.new_step();
    const auto layer = engine.cache.layer(0);
    const auto write_and_run = [&] {
      engine.attention->write(layer, engine.view, step.k->span(), step.v->span(), &engine.stream);
      engine.attention->run(layer, engine.view, step.q->span(), step.out->span(),
                            {.lse = step.lse->span(), .stream = &engine.stream});
    };
    for (int layers = 0; layers < 8; ++layers) write_and_run();
    CHECK(uploads_of(*engine.attention).uploads - before == 1);
    CHECK(simt::device().calls["cudaEventSynchronize"] - waits == 1);
    simt::Graph graph(engine.stream);
    CHECK_NOTHROW(write_and_run());
    graph.end();
    graph.replay();
    engine.submit();
    engine.drain_and_check();
  }
}

TEST_CASE("trees of drafts agree with the oracle, and accepted branches get to their paths") {
  using chunkattn::Piece, chunkattn::ScheduledSequence;
  Engine engine(15);
  shuffled(engine.random.bits());
  for (int i = 0; i < 3; ++i) {
    engine.sequences.push_back(engine.tree.insert(engine.prompt(i < 2 ? 70 : 0, 5 + 20 * i)));
    engine.prefill(engine.sequences.size() - 1);
  }
  engine.drain_and_check();
  struct Accepted {
    std::size_t sequence;
    std::int32_t position;
    std::vector<half> k;  // of head 0
  };
  std::vector<Accepted> accepted;
  const auto check_accepted = [&] {
    const auto layer = engine.cache.layer(0);
    for (const Accepted& one : accepted)
      engine.sequences[one.sequence].for_each_run({one.position, 1}, [&](const Piece& piece) {
        CHECK(std::equal(one.k.begin(), one.k.end(), layer.k_row(piece.chunk, 0, piece.begin)));
      });
    accepted.clear();
  };
  for (int step = 0; step < std::max(12, test::scaled(12)); ++step) {
    if (step == 6) engine.sequences[2] = engine.sequences[0].fork();  // on a forked tail
    engine.begin();
    std::vector<test::Parents> parents;
    for (auto& sequence : engine.sequences) {
      parents.push_back(test::random_parents(engine.random, engine.random.uniform(1, 16)));
      const std::vector<int> drafts(parents.back().size(), 1);
      REQUIRE(bool(engine.open->add(sequence, 100, {.tokens = drafts, .parents = parents.back()})));
    }
    engine.build();
    engine.enqueue();
    const Step& now = engine.steps.back();
    auto flight = std::move(*engine.open).submit();
    engine.open.reset();
    engine.stream.drain();
    check_accepted();  // this step has copied them
    std::vector<half> k(now.k->span().begin(), now.k->span().end());
    engine.check_steps();
    auto finished = std::move(flight).finish();
    for (const ScheduledSequence row : finished.rows()) {
      const auto index = static_cast<std::size_t>(row.index);
      const std::int32_t leaf = engine.random.uniform(-1, row.num_drafts - 1);
      const auto branch = test::branch_of(parents[index], leaf);
      std::vector<int> outputs(branch.size(), 1);
      outputs.push_back(engine.random.uniform(1000, 1 << 30));
      finished.commit(row, outputs, leaf);
      std::int32_t position = row.position + row.num_rows - row.num_drafts;
      for (const std::size_t draft : branch) {
        const auto r = static_cast<std::size_t>(row.output_row()) + 1 + draft;
        const auto first = k.begin() + static_cast<std::ptrdiff_t>(r * kv_heads * head_dim);
        accepted.push_back({index, position++, {first, first + head_dim}});
      }
    }
    if (step == 5) {  // the one that will be replaced
      std::erase_if(accepted, [](const Accepted& one) { return one.sequence == 2; });
    }
  }
  engine.drain_and_check();
}
