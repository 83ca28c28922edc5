// An engine of one layer on the fake device: a tree, a cache, sequences; steps are checked against
// the oracle when the stream has been drained.
#pragma once

#include <doctest/doctest.h>

#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "chunkattn/attention_plan.hpp"
#include "chunkattn/debug/reference.hpp"
#include "chunkattn/prefix_tree.hpp"
#include "simt/runtime.hpp"
#include "support/random.hpp"
#include "support/random_plan.hpp"
// After the fakes, which take the place of the CUDA runtime and of ptx.cuh.
#include "chunkattn/cuda.cuh"
#include "tests/support/retention.hpp"

namespace simt {

using chunkattn::AttentionPlan;
using chunkattn::ChunkAttention;
using chunkattn::Cuda;
using chunkattn::CudaOptions;
using chunkattn::half;
using chunkattn::KvCache;
using Tree = chunkattn::PrefixTree<int, 16, chunkattn::PoolAllocator, test::NoRetention>;

inline constexpr int head_dim = 16;
inline constexpr int kv_heads = 2;
inline constexpr int qo_heads = 6;

inline chunkattn::detail::cuda::CostModel engine_model() {
  chunkattn::detail::cuda::CostModel model;
  model.task_ps = 0;
  model.merge_ps = 0;
  model.wait_ps = 0;
  model.min_split_tokens = 64;
  return model;
}

template <class T>
struct DeviceArray {
  chunkattn::detail::cuda::DeviceMemory memory;
  std::size_t size;
  explicit DeviceArray(std::size_t n) : memory(n * sizeof(T)), size(n) {}
  std::span<T> span() { return {reinterpret_cast<T*>(memory.data()), size}; }
  std::span<T> first(std::size_t n) { return span().first(n); }
};

// A plan's arrays as they were, for the oracle later on.
inline test::RandomPlan snapshot(const chunkattn::PlanView& view) {
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
// E: the elements of the cache.
template <int ValueDim, class E = half>
struct EngineOf {
  using Attention = ChunkAttention<Cuda, head_dim, ValueDim>;

  explicit EngineOf(std::uint64_t stream_number, CudaOptions options = {},
                    const chunkattn::detail::cuda::CostModel& model = engine_model())
      : random(stream_number) {
    options.tuning = model;
    attention = std::make_unique<Attention>(limits(), options);
  }
  ~EngineOf() { stream.queue.clear(); }  // tests may end before the device does
  EngineOf(const EngineOf&) = delete;
  EngineOf& operator=(const EngineOf&) = delete;

  static CudaOptions::Limits limits() {
    CudaOptions::Limits limits;
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
    step.out = std::make_unique<DeviceArray<half>>(rows * qo_heads * ValueDim);
    step.k = std::make_unique<DeviceArray<half>>(rows * kv_heads * head_dim);
    step.v = std::make_unique<DeviceArray<half>>(rows * kv_heads * ValueDim);
    step.lse = std::make_unique<DeviceArray<float>>(rows * qo_heads);
    random.fill(step.q->span());
    random.fill(step.k->span());
    random.fill(step.v->span());
    return step;
  }
  void enqueue() {
    Step& step = new_step();
    attention->write(cache.layer(0), view, step.k->span(), step.v->span(), &stream);
    attention->run(cache.layer(0), view, step.q->span(), step.out->span(),
                   {.lse = step.lse->span(), .stream = &stream});
  }
  // The host goes on; the device is as late as it may be.
  void submit() {
    in_flight.push_back(std::move(*open).submit());
    open.reset();
    if (in_flight.size() == 4) drain_and_check();
  }
  void drain_and_check() {
    check_steps();
    for (Tree::InFlight& step : in_flight) {
      Tree::Finished finished = std::move(step).finish();
      for (const auto& row : finished.rows()) finished.commit(row, random.uniform(1000, 1 << 30));
    }
    in_flight.clear();
  }
  // Runs what is enqueued and holds it against the oracle.
  void check_steps() {
    stream.drain();
    for (Step& step : steps) {
      const auto reference = chunkattn::reference_attention(cache.layer(0), step.plan.view(),
                                                            std::span<const half>(step.q->span()));
      const auto report = chunkattn::compare_with_reference(
          reference, std::span<const half>(step.out->span()), 0x1p-11);
      CHECK(report.worst <= 1.0);
    }
    steps.clear();
    CHECK(device().early_reuses == 0);
  }

  void begin() { open.emplace(tree.begin_step()); }
  void add(std::size_t index, std::size_t max_tokens = 1) {
    REQUIRE(bool(open->add(sequences[index], max_tokens)));
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
  Stream stream;
  Tree tree;
  KvCache<Cuda, E> cache{tree, {1, kv_heads, head_dim, ValueDim}};
  std::unique_ptr<Attention> attention;
  AttentionPlan plan;
  Tree::StepView view;
  std::vector<Tree::Sequence> sequences;
  std::deque<Step> steps;
  std::optional<Tree::Step> open;
  std::deque<Tree::InFlight> in_flight;
};

using Engine = EngineOf<head_dim>;

inline void shuffled(std::uint64_t seed) {
  current_schedule() = {Order::shuffled, Copies::at_wait, seed};
}

}  // namespace simt
