// AnyAttention on the fake device: the bits of ChunkAttention<Cuda>, on the stream it is given;
// what was not compiled in is refused; without a device nothing is made.
#include <doctest/doctest.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "simt/engine.hpp"
#include "simt/fp16.hpp"
#include "support/steps.hpp"
// After the fakes.
#include "chunkattn/runtime/make_attention.hpp"

namespace {

using namespace chunkattn;
using simt::DeviceArray;
using simt::Engine;
using test::refused;

using Sizes = HeadDims<16, HeadSize(16, 64)>;
using Some = Variants<NoVariant, SlidingWindow>;

/// An engine with one step of three sequences planned, whose attention has the model of the
/// front's.
struct Problem : Engine {
  explicit Problem(std::uint64_t number) : Engine(number, {}, detail::cuda::CostModel{}) {
    simt::current_schedule() = {};
    begin();
    for (int i = 0; i < 3; ++i) {
      sequences.push_back(tree.insert(prompt(20, 1)));
      add(static_cast<std::size_t>(i), 30);
    }
    build();
  }
};

template <class T>
bool same_bits(std::span<const T> a, std::span<const T> b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size_bytes()) == 0;
}

}  // namespace

TEST_CASE("write and run have the bits of the template's, with and without a variant") {
  Problem engine(31);
  simt::Step& step = engine.new_step();
  const auto any = make_attention<Cuda, Sizes, ElementTypes<half>, Some>(16, Engine::limits());
  CHECK(any->device() == std::string_view("cuda"));
  CHECK(any->head_dim() == 16);
  CHECK(any->qo_types().size() == 1);
  CHECK(any->variants().size() == 2);
  const auto cache = any->make_cache(engine.tree, ElementType::half, {1, simt::kv_heads});
  CHECK(cache->bytes_per_chunk() == engine.cache.bytes_per_chunk());
  CHECK(cache->tree_id() == engine.cache.tree_id());

  simt::Stream other;
  DeviceArray<half> out(step.out->size);
  DeviceArray<float> lse(step.lse->size);
  std::vector<std::vector<half>> seen;
  const auto check = [&](const auto& variant) {
    engine.attention->write(engine.cache.layer(0), engine.view, step.k->span(), step.v->span(),
                            &engine.stream);
    engine.attention->run(engine.cache.layer(0), engine.view, variant, step.q->span(),
                          step.out->span(), {.lse = step.lse->span(), .stream = &engine.stream});
    engine.stream.drain();
    any->prepare(engine.view, &other);
    any->prepare(cache->layer(0, &other), engine.view, variant, &other);
    any->write(cache->layer(0, &other), engine.view, step.k->span(), step.v->span(), &other);
    any->run(cache->layer(0, &other), engine.view, step.q->span(), out.span(),
             {.lse = lse.span(), .variant = variant, .stream = &other});
    CHECK(!other.queue.empty());  // on that stream, and nothing waited for
    other.drain();
    CHECK(same_bits<half>(out.span(), step.out->span()));
    CHECK(same_bits<float>(lse.span(), step.lse->span()));
    seen.emplace_back(out.span().begin(), out.span().end());
  };
  check(NoVariant{});
  check(SlidingWindow{4});
  CHECK(!same_bits<half>(seen[0], seen[1]));
#if CHUNKATTN_EXCEPTIONS
  const HeadRows<half> apart{.data = out.span().data(), .num_tokens = engine.view.num_rows};
  const AnyKvView layer = cache->layer(0, &other);
  const std::string text =
      " = HeadRows: expected elements without gaps: kernels of this device take no strides";
  CHECK(refused([&] { any->write(layer, engine.view, apart, step.v->span(), &other); }) ==
        "k" + text);
  CHECK(refused([&] { any->write(layer, engine.view, step.k->span(), apart, &other); }) ==
        "v" + text);
  CHECK(refused([&] { any->run(layer, engine.view, apart, out.span(), {.stream = &other}); }) ==
        "q" + text);
  CHECK(refused([&] { any->run(layer, engine.view, step.q->span(), apart, {.stream = &other}); }) ==
        "out" + text);
#endif
  engine.steps.clear();
}

TEST_CASE("arrays of CUDA's own types are taken as they are") {
  Problem engine(35);
  simt::Step& step = engine.new_step();
  const auto cuda = [](auto span) {
    return std::span(reinterpret_cast<__half*>(span.data()), span.size());
  };
  KvCache<Cuda, __half> cache(engine.tree, {1, simt::kv_heads, simt::head_dim}, 64);
  DeviceArray<half> out(step.out->size), any_out(step.out->size);
  engine.attention->write(cache.layer(0), engine.view, cuda(step.k->span()), cuda(step.v->span()),
                          &engine.stream);
  const std::span<const __half> q = cuda(step.q->span());
  engine.attention->run(cache.layer(0), engine.view, q, cuda(out.span()),
                        {.stream = &engine.stream});
  engine.attention->write(engine.cache.layer(0), engine.view, step.k->span(), step.v->span(),
                          &engine.stream);
  engine.attention->run(engine.cache.layer(0), engine.view, step.q->span(), step.out->span(),
                        {.stream = &engine.stream});
  engine.stream.drain();
  CHECK(same_bits<half>(out.span(), step.out->span()));
  const auto any = make_attention<Cuda, Sizes, ElementTypes<half>>(16, Engine::limits());
  any->write(cache.layer(0), engine.view, cuda(step.k->span()), cuda(step.v->span()),
             &engine.stream);
  any->run(cache.layer(0), engine.view, q, cuda(any_out.span()), {.stream = &engine.stream});
  engine.stream.drain();
  CHECK(same_bits<half>(any_out.span(), step.out->span()));
  CHECK(Elements(cuda(out.span())).type == ElementType::half);
  const auto view = make_kv_view(cuda(step.k->span()).data(), cuda(step.v->span()).data(),
                                 {1, simt::kv_heads, 16, simt::head_dim});
  static_assert(std::is_same_v<decltype(view), const KvView<half>>);
  CHECK(view.k == step.k->span().data());
  engine.steps.clear();
}

TEST_CASE("calls are captured on the stream that they name, readied by prepare") {
  Problem engine(34);
  simt::Step& step = engine.new_step();
  const auto any = make_attention<Cuda, Sizes, ElementTypes<half>, Some>(16, Engine::limits());
  const auto cache = any->make_cache(engine.tree, ElementType::half, {1, simt::kv_heads});
  engine.sequences.push_back(engine.tree.insert(engine.prompt(20, 40)));  // more chunks than memory
  simt::Stream other;
  other.blocking = false;
  {
    simt::Graph graph(other);
    CHECK(refused([&] { (void)cache->layer(0, &other); }).starts_with("num_chunks ="));
    graph.end();
  }
  cache->grow(engine.tree.num_chunks());
  const auto run = [&] {
    any->run(cache->layer(0, &other), engine.view, step.q->span(), step.out->span(),
             {.variant = SlidingWindow{4}, .stream = &other});
  };
  any->prepare(engine.view, &other);
  {
    simt::Graph graph(other);
    CHECK(refused(run).starts_with("stream = capturing"));
    graph.end();
  }
  any->prepare(cache->layer(0), engine.view, SlidingWindow{4}, &other);
  simt::Graph graph(other);
  CHECK_NOTHROW(run());
  graph.end();
  other.drain();
  engine.steps.clear();
}

TEST_CASE("what was not compiled in is refused by naming what was") {
  const auto limits = Engine::limits();
  CHECK(refused([&] { (void)make_attention<Cuda, Sizes, ElementTypes<half>>(64, limits); }) ==
        "head_dim = 64: expected one that this program was built with: 16, 16:64");
  CHECK(refused([&] {
          (void)make_attention<Cuda, Sizes, ElementTypes<half>>(16, CudaOptions::Limits{});
        }).starts_with("limits.max_rows = 0"));
  Problem engine(33);
  simt::Step& step = engine.new_step();
  const auto any = make_attention<Cuda, Sizes, ElementTypes<half>, Some>(16, limits);
  const AnyKvView layer = engine.cache.layer(0);
  const auto run = [&](const AnyKvView& kv, ConstElements q, Elements out,
                       AnyAttention::RunOptions options) {
    options.stream = &engine.stream;
    return refused([&] { any->run(kv, engine.view, q, out, options); });
  };
  const auto q = step.q->span(), out = step.out->span(), k = step.k->span();
  CHECK(
      run(layer, q, out, {.variant = SoftCap{1}}) ==
      "variant = SoftCap: expected one that this program was built with: NoVariant, SlidingWindow");
  CHECK(run(KvView<bfloat16>{}, q, out, {}) ==
        "layer.type() = bfloat16: expected one that this program was built with: half");
  CHECK(run(layer, step.lse->span(), out, {}) ==
        "q.type = float: expected that of the layer, half");
  CHECK(run(layer, q, step.lse->span(), {}) == "out.type = float: expected that of q, half");
  CHECK(run(layer, q.first(1), out, {}).starts_with("q.size() = 1"));
  CHECK(refused([&] { any->write(layer, engine.view, k, step.lse->span()); }) ==
        "v.type = float: expected that of k, half");
  const ConstElements brains(k.data(), ElementType::bfloat16, k.size());
  CHECK(refused([&] { any->write(layer, engine.view, brains, brains); }) ==
        "k.type = bfloat16: expected that of the layer, half");
  CHECK(refused([&] { (void)any->make_cache(engine.tree, ElementType::bfloat16, {1, 2}); }) ==
        "type = bfloat16: expected one that this program was built with: half");
  CHECK(engine.stream.queue.empty());
  engine.steps.clear();
}

TEST_CASE("without a device an object is not made, and the error says why") {
  simt::device().fail("cudaGetDeviceCount", cudaErrorNoDevice);
  const auto make = [] {
    (void)make_attention<Cuda, HeadDims<16>, ElementTypes<half>>(16, Engine::limits());
  };
  try {
    make();
    FAIL("expected a DeviceError");
  } catch (const DeviceError& error) {
    CHECK(error.code() == cudaErrorNoDevice);
    CHECK(std::string_view(error.what()).starts_with("cudaGetDeviceCount failed with code 100"));
  }
  make();  // the device is back
}
