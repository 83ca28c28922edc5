// One function over the device: what an engine does in a layer, written once for the CPU and for a
// GPU (the emulated one).
#include <doctest/doctest.h>

#include <cmath>
#include <cstddef>
#include <span>
#include <vector>

#include "chunkattn/chunk_attention.hpp"
#include "chunkattn/kv_cache.hpp"
#include "simt/engine.hpp"

using namespace chunkattn;

namespace {

/// Writes K and V of the step's rows in a layer, and computes attention: with a soft cap, then
/// without, whose results stay.
template <class Device, int HeadDim, class T>
void attend(ChunkAttention<Device, HeadDim>& attention, KvCache<Device, T>& cache, int layer,
            const LiveView& view, std::span<const T> k, std::span<const T> v, std::span<const T> q,
            std::span<T> out, std::span<float> lse, DeviceStream<Device> stream) {
  const KvView<T> memory = cache.layer(layer, stream);
  attention.write(memory, view, k, v, stream);
  attention.run(memory, view, SoftCap{2.0f}, q, out, {.stream = stream});
  attention.run(memory, view, q, out, {.lse = lse, .stream = stream});
}

}  // namespace

TEST_CASE("one function over the device computes the same on both") {
  simt::Engine engine(41);
  simt::Tree tree;
  KvCache<Cpu, half> cache(tree, engine.cache.options());
  ChunkAttention<Cpu, simt::head_dim> attention(2);
  AttentionPlan plan;
  std::vector<simt::Tree::Sequence> sequences;
  for (int i = 0; i < 3; ++i) {
    const std::vector<int> prompt = engine.prompt(20, 9);
    engine.sequences.push_back(engine.tree.insert(prompt));
    sequences.push_back(tree.insert(prompt));
  }
  engine.begin();
  for (std::size_t i = 0; i < 3; ++i) engine.add(i, 100);
  engine.build();
  auto step = tree.begin_step();
  REQUIRE(step.add(sequences));
  const auto view = plan.build(step);
  REQUIRE(view.tokens().size() == 20 + 3 * 9);

  simt::Step& data = engine.new_step();  // device memory is the host's here
  const std::span<const half> k = data.k->span(), v = data.v->span(), q = data.q->span();
  std::vector<half> out(q.size());
  std::vector<float> lse(q.size() / simt::head_dim);
  const std::span<half> device_out = data.out->span();
  const std::span<float> device_lse = data.lse->span();
  attend<Cuda>(*engine.attention, engine.cache, 0, engine.view, k, v, q, device_out, device_lse,
               &engine.stream);
  engine.stream.drain();
  attend<Cpu>(attention, cache, 0, view, k, v, q, std::span(out), std::span(lse), {});
  for (std::size_t i = 0; i < out.size(); ++i)
    REQUIRE(std::abs(to_float(out[i]) - to_float(device_out[i])) <= 4e-3f);
  for (std::size_t i = 0; i < lse.size(); ++i)
    REQUIRE(std::abs(lse[i] - device_lse[i]) <= 1e-4f * (1 + std::abs(lse[i])));
  engine.steps.clear();
  (void)std::move(step).finish();
}
