// AnyAttention on the CPU: what it computes has the bits of the template that it calls, for every
// size, type and variant that was compiled in; what was not is refused by naming what was.
#include <doctest/doctest.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "chunkattn/attention_plan.hpp"
#include "chunkattn/cache/windowed_layers.hpp"
#include "chunkattn/prefix_tree.hpp"
#include "chunkattn/runtime/make_attention.hpp"
#include "chunkattn/transfer/transfer.hpp"
#include "support/random.hpp"
#include "support/steps.hpp"
#include "tests/support/retention.hpp"

using namespace chunkattn;
using test::refused;

namespace {

using Tree = PrefixTree<int, 16, PoolAllocator, test::NoRetention>;
constexpr int num_kv_heads = 2, num_qo_heads = 4;

/// A variant of a user's.
struct Nearby {
  static constexpr std::string_view name = "Nearby";
  int near;
  auto visible(lanes::At at) const { return at.q_idx - at.kv_idx < near; }
};
/// One that has taken the name of another.
struct NotTheWindow {
  static constexpr std::string_view name = "SlidingWindow";
  std::int64_t sizes[2];
  auto visible(lanes::At at) const { return at.q_idx - at.kv_idx < 3; }
};
/// What a mask calls.
struct Even {
  static constexpr std::string_view name = "Even";
  bool operator()(LogitIndex at) const { return at.kv_idx % 2 == 0 || at.kv_idx == at.q_idx; }
};

/// An executor of a user's.
struct Counting {
  int calls = 0;
  [[nodiscard]] int concurrency() const { return 1; }
  void parallel_for(int n, auto&& f) {
    ++calls;
    for (int i = 0; i < n; ++i) f(i);
  }
};

using Sizes = HeadDims<16, 24, HeadSize(24, 16)>;
using Types = ElementTypes<float, half, bfloat16, std::int8_t, float8_e4m3>;
using Small = ElementTypes<half>;
using Some =
    Variants<NoVariant, SlidingWindow, decltype(combine(SoftCap{}, Sinks{})), Nearby, Mask<Even>>;

/// Three prompts with a common prefix in one step, and the data of its rows.
struct Problem {
  Tree tree;
  std::vector<Tree::Sequence> sequences;
  Tree::Step step = tree.begin_step();
  AttentionPlan plan;
  LiveView view;
  std::vector<float> q, k, v;

  explicit Problem(HeadSize size, std::uint64_t stream = 1) {
    for (int i = 0; i < 3; ++i) {
      std::vector<int> prompt = test::iota(0, 40);
      prompt.push_back(100 + i);
      sequences.push_back(tree.insert(prompt));
      REQUIRE(step.add(sequences.back()));
    }
    view = plan.build(step);
    test::Random random(stream);
    const auto rows = static_cast<std::size_t>(view.num_rows);
    q.resize(rows * num_qo_heads * static_cast<std::size_t>(size.head_dim));
    k.resize(rows * num_kv_heads * static_cast<std::size_t>(size.head_dim));
    v.resize(rows * num_kv_heads * static_cast<std::size_t>(size.value_dim));
    for (auto* values : {&q, &k, &v}) random.fill(std::span(*values));
  }
  [[nodiscard]] std::size_t num_lines() const {
    return static_cast<std::size_t>(view.num_rows) * num_qo_heads;
  }
};

template <class X>
struct Result {
  std::vector<X> out;
  std::vector<float> lse;
  Result(const Problem& problem, int value_dim)
      : out(problem.num_lines() * static_cast<std::size_t>(value_dim)), lse(problem.num_lines()) {}
  friend bool operator==(const Result& a, const Result& b) {
    return std::memcmp(a.out.data(), b.out.data(), a.out.size() * sizeof(X)) == 0 &&
           std::memcmp(a.lse.data(), b.lse.data(), a.lse.size() * sizeof(float)) == 0;
  }
};

/// The K and V rows of the first sequence as they stand in memory.
template <class Cache>
std::vector<std::byte> kv_of(Problem& problem, Cache& cache) {
  std::vector<std::byte> bytes;
  const auto view = cache.layer(0);
  problem.sequences[0].for_each_run({0, 41}, [&](const Piece& piece) {
    for (int head = 0; head < num_kv_heads; ++head)
      for (int t = 0; t < piece.length; ++t) {
        const auto* row =
            reinterpret_cast<const std::byte*>(view.k_row(piece.chunk, head, piece.begin + t));
        bytes.insert(bytes.end(), row,
                     row + static_cast<std::size_t>(view.head_dim) * sizeof(*view.k));
        row = reinterpret_cast<const std::byte*>(view.v_row(piece.chunk, head, piece.begin + t));
        bytes.insert(bytes.end(), row,
                     row + static_cast<std::size_t>(view.dim_of_v()) * sizeof(*view.k));
      }
  });
  return bytes;
}

/// The same step by the template and by the front.
template <HeadSize Size, class T>
void check_same_bits() {
  CAPTURE(Size.head_dim);
  CAPTURE(Size.value_dim);
  CAPTURE(element_name<T>());
  Problem problem(Size);
  const KvCacheOptions options{2, num_kv_heads, Size.head_dim, Size.value_dim};

  ChunkAttention<Cpu, Size.head_dim, Size.value_dim> attention(2);
  KvCache<Cpu, T> cache(problem.tree, options);
  Result<float> expected(problem, Size.value_dim);
  attention.write(cache.layer(0), problem.view, problem.k, problem.v);
  attention.run(cache.layer(0), problem.view, problem.q, expected.out, {.lse = expected.lse});

  const auto any = make_attention<Cpu, Sizes, Types>(Size, 2);
  CHECK(any->head_dim() == Size.head_dim);
  CHECK(any->value_dim() == Size.value_dim);
  const auto any_cache = any->make_cache(problem.tree, element_type_of<T>, {2, num_kv_heads});
  CHECK(any_cache->type() == element_type_of<T>);
  CHECK(any_cache->bytes_per_chunk() == cache.bytes_per_chunk());
  Result<float> result(problem, Size.value_dim);
  any->write(any_cache->layer(0), problem.view, problem.k, problem.v);
  any->run(any_cache->layer(0), problem.view, problem.q, result.out, {.lse = result.lse});
  CHECK(result == expected);

  auto typed = any_cache->template as<T>();
  CHECK(kv_of(problem, typed) == kv_of(problem, cache));
  Result<float> without_lse(problem, Size.value_dim);
  any->run(typed.layer(0), problem.view, problem.q, without_lse.out);
  CHECK(without_lse.out == expected.out);
  CHECK(without_lse.lse == std::vector<float>(problem.num_lines()));
}

template <HeadSize Size>
void check_all_types() {
  check_same_bits<Size, float>();
  check_same_bits<Size, half>();
  check_same_bits<Size, bfloat16>();
  check_same_bits<Size, std::int8_t>();
  check_same_bits<Size, float8_e4m3>();
}

}  // namespace

TEST_CASE("write and run have the bits of the template's, for every size and K/V type") {
  check_all_types<16>();
  check_all_types<24>();
  check_all_types<HeadSize(24, 16)>();
}

TEST_CASE("variants are found by their type and run with their members") {
  Problem problem(16);
  ChunkAttention<Cpu, 16> attention(1);
  KvCache<Cpu, half> cache(problem.tree, {1, num_kv_heads, 16});
  attention.write(cache.layer(0), problem.view, problem.k, problem.v);
  const auto any = make_attention<Cpu, HeadDims<16>, Small, Some>(16, 1);
  const std::vector<float> sinks(num_qo_heads, 0.25f);

  std::vector<Result<float>> seen;
  const auto check = [&](const auto& variant) {
    Result<float> expected(problem, 16), result(problem, 16);
    attention.run(cache.layer(0), problem.view, variant, problem.q, expected.out,
                  {.lse = expected.lse});
    any->run(cache.layer(0), problem.view, problem.q, result.out,
             {.lse = result.lse, .variant = variant});
    CHECK(result == expected);
    for (const Result<float>& other : seen) CHECK(!(result == other));
    seen.push_back(result);
  };
  check(NoVariant{});
  check(SlidingWindow{8});
  check(SlidingWindow{8, 2});
  check(combine(SoftCap{2}, Sinks{sinks}));
  check(combine(SoftCap{0.5f}, Sinks{sinks}));
  check(Nearby{5});
  check(Mask{Even{}});

  // An options object outlives the variant that it was made of.
  AnyAttention::RunOptions options;
  options.variant = SlidingWindow{8};
  Result<float> result(problem, 16);
  options.lse = result.lse;
  any->run(cache.layer(0), problem.view, problem.q, result.out, options);
  CHECK(result == seen[1]);
}

TEST_CASE("names of variants: the library's, a user's, those of several together") {
  CHECK(AnyVariant().name() == "NoVariant");
  CHECK(AnyVariant(Nearby{3}).name() == "Nearby");
  CHECK(AnyVariant(Mask{Even{}}).name() == "Even");
  CHECK(AnyVariant(combine(SoftCap{1}, Alibi{}, Nearby{1})).name() == "SoftCap + Alibi + Nearby");
  const AnyVariant window = SlidingWindow{7, 2};
  REQUIRE(window.get_if<SlidingWindow>() != nullptr);
  CHECK(window.get_if<SlidingWindow>()->size == 7);
  CHECK(window.get_if<SlidingWindow>()->keep == 2);
  CHECK(window.get_if<NoVariant>() == nullptr);
  CHECK(window.get_if<NotTheWindow>() == nullptr);  // it is of another size
  const AnyVariant copy = window;
  CHECK(copy.get_if<SlidingWindow>()->size == 7);
}

TEST_CASE("q and out of another type, and options of the attention") {
  Problem problem(16);
  const CpuOptions options{.sm_scale = 0.5f, .reduce = CpuOptions::Reduce::batch_invariant};
  ChunkAttention<Cpu, 16> attention(1, options);
  KvCache<Cpu, half> cache(problem.tree, {1, num_kv_heads, 16});
  const auto to_halves = [](const std::vector<float>& values) {
    std::vector<half> halves;
    for (const float value : values) halves.push_back(to_half(value));
    return halves;
  };
  const auto q = to_halves(problem.q), k = to_halves(problem.k), v = to_halves(problem.v);
  const auto any =
      make_attention<Cpu, HeadDims<16>, Small, Variants<NoVariant>, ElementTypes<float, half>>(
          16, 1, options);
  any->write(cache.layer(0), problem.view, k, v);
  Result<half> expected(problem, 16), result(problem, 16);
  attention.run(cache.layer(0), problem.view, q, expected.out, {.lse = expected.lse});
  any->run(cache.layer(0), problem.view, std::span<const half>(q), std::span(result.out),
           {.lse = result.lse});
  CHECK(result == expected);
  // By pointer and count.
  Result<half> again(problem, 16);
  any->run(cache.layer(0), problem.view, {q.data(), ElementType::half, q.size()},
           {again.out.data(), ElementType::half, again.out.size()}, {.lse = again.lse});
  CHECK(again == expected);
}

TEST_CASE("an executor of the caller's runs the tasks") {
  Counting executor;
  Problem problem(16);
  const auto any = make_attention<Cpu, HeadDims<16>, Small>(16, executor);
  const auto cache = any->make_cache(problem.tree, ElementType::half, {1, num_kv_heads});
  any->write(cache->layer(0), problem.view, problem.k, problem.v);
  Result<float> result(problem, 16);
  any->run(cache->layer(0), problem.view, problem.q, result.out);
  CHECK(executor.calls > 0);
}

TEST_CASE("a cache follows its tree, and K/V moves through it") {
  const auto any = make_attention<Cpu, Sizes, Types>({24, 16}, 1);
  Tree tree;
  const auto cache = any->make_cache(tree, ElementType::int8, {3, num_kv_heads});
  CHECK(cache->num_chunks() == 0);
  CHECK(cache->options().num_layers == 3);
  CHECK(cache->options().head_dim == 24);
  CHECK(cache->options().value_dim == 16);
  CHECK(cache->tree_id() != 0);
  CHECK(cache->bytes() == 0);
  auto sequence = tree.insert(test::iota(0, 70));
  cache->layer(2).visit([](const auto& view) { CHECK(view.num_chunks == 5); });
  CHECK(cache->num_chunks() == 5);
  CHECK(cache->bytes() >= 5 * cache->bytes_per_chunk());
  cache->grow(1000);
  CHECK(cache->num_chunks() == 1000);

  auto typed = cache->as<std::int8_t>();
  const TokenRange range = sequence.loadable();
  std::vector<std::byte> saved(kv_bytes(typed, static_cast<std::size_t>(range.length)));
  for (std::size_t i = 0; i < saved.size(); ++i) saved[i] = static_cast<std::byte>(i % 251);
  scatter_kv(sequence, range, typed, std::span<const std::byte>(saved));
  sequence.mark_loaded(range);
  std::vector<std::byte> read(saved.size());
  gather_kv(sequence, range, typed, std::span(read));
  CHECK(read == saved);
  Tree another;
  auto stranger = another.insert(test::iota(0, 70));
  CHECK(refused([&] {
          scatter_kv(stranger, range, typed, std::span<const std::byte>(saved));
        }).starts_with("cache = of another tree"));
  CHECK(refused([&] { (void)cache->as<float>(); }) == "cache.type() = int8: expected float");
}

TEST_CASE("a cache of a group of layers with a window follows the group") {
  const auto any =
      make_attention<Cpu, HeadDims<16>, ElementTypes<float>, Variants<SlidingWindow>>(16, 2);
  Tree tree;
  WindowedLayers<Tree> layers(tree, {.window = 20, .max_chunks = 50});
  const auto cache = any->make_cache(layers, ElementType::float32, {1, num_kv_heads});
  const auto of_tree = any->make_cache(tree, ElementType::float32, {1, num_kv_heads});
  auto sequence = tree.insert(test::iota(0, 400));
  layers.resume(sequence);
  AttentionPlan plan;
  test::Random random(2);
  while (sequence.num_uncomputed() > 0) {
    auto step = tree.begin_step();
    REQUIRE(step.add(sequence, 48));
    const auto whole = plan.build(step);
    const LiveView view = layers.view(whole);
    std::vector<float> q(static_cast<std::size_t>(view.num_rows * num_qo_heads * 16)),
        got(q.size());
    std::vector<float> k(static_cast<std::size_t>(view.num_rows * num_kv_heads * 16)), v(k.size());
    for (auto* values : {&q, &k, &v}) random.fill(std::span(*values));
    any->write(cache->layer(0), view, k, v);
    any->write(of_tree->layer(0), whole, k, v);
    any->run(cache->layer(0), view, q, got, {.variant = SlidingWindow{20}});
    std::vector<float> expected(q.size());
    any->run(of_tree->layer(0), whole, q, expected, {.variant = SlidingWindow{20}});
    CHECK(got == expected);
    CHECK(refused([&] { any->write(of_tree->layer(0), view, k, v); }) != "no error");
    auto finished = std::move(step).finish();
  }
  CHECK(cache->num_chunks() == layers.stats().peak_used_chunks);
  CHECK(of_tree->num_chunks() == tree.num_chunks());
}

TEST_CASE("V in K's rows: written by K alone") {
  Problem problem(HeadSize(24, 16));
  const auto any = make_attention<Cpu, Sizes, Types>({24, 16}, 1);
  const auto cache =
      any->make_cache(problem.tree, ElementType::bfloat16,
                      {.num_layers = 1, .num_kv_heads = num_kv_heads, .v_in_k = true});
  any->write(cache->layer(0), problem.view, problem.k, {});
  Result<float> result(problem, 16), expected(problem, 16);
  any->run(cache->layer(0), problem.view, problem.q, result.out, {.lse = result.lse});

  ChunkAttention<Cpu, 24, 16> attention(1);
  KvCache<Cpu, bfloat16> own(problem.tree, {1, num_kv_heads, 24, 16, true});
  attention.write(own.layer(0), problem.view, problem.k);
  attention.run(own.layer(0), problem.view, problem.q, expected.out, {.lse = expected.lse});
  CHECK(result == expected);
  CHECK(refused([&] {
          any->write(cache->layer(0), problem.view, problem.k, problem.v);
        }).starts_with("v = given"));
}

TEST_CASE("an engine's own memory as a view of a type known at run time") {
  Problem problem(16);
  const KvGeometry geometry{8, num_kv_heads, 16, 16};
  const std::size_t elements = 8 * num_kv_heads * 16 * 16;
  const auto any = make_attention<Cpu, Sizes, Types>(16, 1);
  const auto check = [&]<class T>(T, float* scales) {
    std::vector<T> k(elements), v(elements);
    const AnyKvView view =
        make_any_kv_view(element_type_of<T>, k.data(), v.data(), geometry, scales,
                         scales == nullptr ? nullptr : scales + elements / 16);
    CHECK(view.type() == element_type_of<T>);
    any->write(view, problem.view, problem.k, problem.v);
    Result<float> result(problem, 16), expected(problem, 16);
    any->run(view, problem.view, problem.q, result.out, {.lse = result.lse});
    ChunkAttention<Cpu, 16> attention(1);
    attention.run(view.as<T>(), problem.view, problem.q, expected.out, {.lse = expected.lse});
    CHECK(result == expected);
  };
  std::vector<half> keys(elements), values(elements);
  const AnyKvView both = make_any_kv_view(ElementType::half, keys.data(), values.data(), geometry);
  CHECK(both.heads(1, 1).as<half>().num_kv_heads == 1);
  CHECK(both.heads(1, 1).as<half>().k_row(3, 0, 2) == both.as<half>().k_row(3, 1, 2));
  std::vector<float> scales(2 * elements / 16);
  check(0.0f, nullptr);
  check(half{}, nullptr);
  check(bfloat16{}, nullptr);
  check(std::int8_t{}, scales.data());
  check(float8_e4m3{}, scales.data());

  half* const k = keys.data();
  half* const v = values.data();
  float* const m = scales.data();
  CHECK(refused([&] { (void)make_any_kv_view(ElementType::half, k, v, geometry, m, m); }) ==
        "k_scale = given: expected null: rows of half have no scales");
  CHECK(refused([&] { (void)make_any_kv_view(ElementType::int8, k, v, geometry); }) ==
        "k_scale = null: expected memory of K's scales");
  CHECK(refused([&] { (void)make_any_kv_view(static_cast<ElementType>(9), k, v, geometry); }) ==
        "type = 9: expected an ElementType");
  CHECK(refused([&] { (void)AnyKvView(KvView<half>{}).as<float>(); }) ==
        "layer.type() = half: expected float");
}

TEST_CASE("rows apart: the bits of rows without gaps, and what is wrong by its name") {
  Problem problem{HeadSize(24, 16)};
  const auto any = make_attention<Cpu, HeadDims<HeadSize(24, 16)>, Small, Variants<NoVariant>,
                                  ElementTypes<float, half>>(HeadSize(24, 16), 1);
  const auto cache = any->make_cache(problem.tree, ElementType::half, {1, num_kv_heads});
  const auto other = any->make_cache(problem.tree, ElementType::half, {1, num_kv_heads});
  const int rows = problem.view.num_rows;
  const auto apart = [rows](std::vector<float>& memory, const std::vector<float>& dense, int heads,
                            int dim) {
    memory.assign(static_cast<std::size_t>(rows * heads * (dim + 1)), 7.0f);
    const HeadRows<float> made{.data = memory.data(),
                               .num_tokens = rows,
                               .num_heads = heads,
                               .head_dim = dim,
                               .stride_token = dim + 1,
                               .stride_head = std::int64_t{rows} * (dim + 1)};
    for (int row = 0; row < rows; ++row)
      for (int head = 0; head < heads; ++head)
        std::copy_n(dense.begin() + (row * heads + head) * dim, dim, made.row(row, head));
    return made;
  };
  std::vector<float> memory[4];
  const HeadRows<float> q = apart(memory[0], problem.q, num_qo_heads, 24),
                        k = apart(memory[1], problem.k, num_kv_heads, 24),
                        v = apart(memory[2], problem.v, num_kv_heads, 16);
  any->write(cache->layer(0), problem.view, problem.k, problem.v);
  any->write(other->layer(0), problem.view, k, v);
  auto cache_kv = cache->as<half>(), other_kv = other->as<half>();
  CHECK(kv_of(problem, cache_kv) == kv_of(problem, other_kv));
  Result<float> expected(problem, 16), got(problem, 16);
  const HeadRows<float> out = apart(memory[3], got.out, num_qo_heads, 16);
  any->run(cache->layer(0), problem.view, problem.q, expected.out, {.lse = expected.lse});
  any->run(other->layer(0), problem.view, q, out, {.lse = got.lse});
  std::vector<float> expected_memory;
  (void)apart(expected_memory, expected.out, num_qo_heads, 16);
  CHECK(memory[3] == expected_memory);
  CHECK(got.lse == expected.lse);
  any->run(other->layer(0), problem.view, ConstElements(Elements(q)), got.out, {.lse = got.lse});
  CHECK(got.out == expected.out);

  HeadRows<float> broken = q;
  broken.stride_head = 0;
  CHECK(refused([&] { any->run(other->layer(0), problem.view, broken, out); }) ==
        "q.stride_head = 0: expected at least the row's 24 elements");
  broken = v;
  broken.num_tokens = 1;
  CHECK(refused([&] { any->write(other->layer(0), problem.view, k, broken); }) ==
        "v.num_tokens = 1: expected the plan's query tokens, " + std::to_string(rows));
  const HeadRows<half> halves{};
  CHECK(refused([&] { any->run(other->layer(0), problem.view, q, halves); }) ==
        "out.type = half: expected that of q, float");
  CHECK(refused([&] { any->write(other->layer(0), problem.view, halves, {}); }) ==
        "k.num_tokens = 0: expected the plan's query tokens, " + std::to_string(rows));
  CHECK(refused([&] {
          any->write(other->layer(0), problem.view, problem.k, HeadRows<const float>{});
        }) == "v.num_tokens = 0: expected the plan's query tokens, " + std::to_string(rows));
}

TEST_CASE("what was not compiled in is refused by naming what was") {
  using Dims = HeadDims<16, HeadSize(24, 16)>;
  CHECK(refused([] { (void)make_attention<Cpu, Dims, Small>(80); }) ==
        "head_dim = 80: expected one that this program was built with: 16, 24:16");
  CHECK(refused([] { (void)make_attention<Cpu, Dims, Small>({16, 24}); }) ==
        "head_dim = 16:24: expected one that this program was built with: 16, 24:16");
  CHECK(refused([] {
          (void)make_attention<Cpu, Dims, Small>(16, -1);
        }).starts_with("num_threads = -1"));
  CHECK(refused([] {
          (void)make_attention<Cpu, Dims, Small>(16, 1, {.tuning = {.min_tasks = -1}});
        }).starts_with("options.tuning.min_tasks = -1"));

  Problem problem(16);
  const auto any = make_attention<Cpu, HeadDims<16>, Small, Some>(16, 1);
  const auto cache = any->make_cache(problem.tree, ElementType::half, {1, num_kv_heads});
  const AnyKvView layer = cache->layer(0);
  const KvView<std::int8_t> bytes;
  std::vector<float> out(problem.q.size(), 7.0f);
  std::vector<half> halves(problem.q.size());
  const std::string variants = "NoVariant, SlidingWindow, SoftCap + Sinks, Nearby, Even";
  const auto run = [&](const AnyKvView& kv, ConstElements q, Elements result,
                       AnyAttention::RunOptions options) {
    return refused([&] { any->run(kv, problem.view, q, result, options); });
  };
  CHECK(run(layer, problem.q, out, {.variant = SoftCap{1}}) ==
        "variant = SoftCap: expected one that this program was built with: " + variants);
  CHECK(run(bytes, problem.q, out, {}) ==
        "layer.type() = int8: expected one that this program was built with: half");
  CHECK(run(layer, halves, halves, {}) ==
        "q.type = half: expected one that this program was built with: float");
  CHECK(run(layer, problem.q, halves, {}) == "out.type = half: expected that of q, float");
  CHECK(run(layer, problem.q, out, {.stream = out.data()}) ==
        "stream = non-null: expected null: the CPU has no streams");
  CHECK(run(layer, {}, out, {}).starts_with("q.size() = 0"));
  CHECK(run(layer, problem.q, std::span(out).first(3), {}).starts_with("out.size() = 3"));
  CHECK(run(layer, problem.q, out, {.lse = std::span(out).first(1)}).starts_with("lse.size()"));
  CHECK(run({}, problem.q, out, {}).starts_with("layer.type() = float"));
  CHECK(run(KvView<half>{}, problem.q, out, {}).starts_with("layer."));
  CHECK(run(layer, problem.q, out, {.variant = SlidingWindow{0}})
            .starts_with("SlidingWindow::size = 0"));
  CHECK(out == std::vector<float>(problem.q.size(), 7.0f));

  const auto write = [&](const AnyKvView& kv, ConstElements k, ConstElements v, void* stream) {
    return refused([&] { any->write(kv, problem.view, k, v, stream); });
  };
  CHECK(write(bytes, problem.k, problem.v, nullptr) ==
        "layer.type() = int8: expected one that this program was built with: half");
  CHECK(write(layer, halves, halves, nullptr) ==
        "k.type = half: expected one that this program was built with: float");
  CHECK(write(layer, problem.k, halves, nullptr) == "v.type = half: expected that of k, float");
  CHECK(write(layer, problem.k, {}, nullptr).starts_with("v = not given"));
  CHECK(write(layer, problem.k, problem.v, out.data()).starts_with("stream = non-null"));

  const auto make = [&](ElementType type, KvCacheOptions options) {
    return refused([&] { (void)any->make_cache(problem.tree, type, options); });
  };
  CHECK(make(ElementType::float32, {1, 1}) ==
        "type = float: expected one that this program was built with: half");
  CHECK(make(ElementType::half, {1, 1, 24}) ==
        "options.head_dim = 24: expected that of the attention, 16, or none for it");
  CHECK(make(ElementType::half, {1, 1, 16, 8}) ==
        "options.value_dim = 8: expected that of the attention, 16, or none for it");
  CHECK(make(ElementType::half, {0, 1}).starts_with("options.num_layers = 0"));
  CHECK(refused([&] { (void)cache->layer(1); }) == "layer = 1: expected 0 to num_layers - 1, 0");
  CHECK(refused([&] { (void)cache->layer(0, out.data()); }).starts_with("stream = non-null"));

  any->prepare(problem.view);
  any->prepare(layer, problem.view, SlidingWindow{4});
  CHECK(refused([&] {
          any->prepare(layer, problem.view, SoftCap{4});
        }).starts_with("variant = SoftCap"));
  CHECK(refused([&] {
          any->prepare(bytes, problem.view, NoVariant{});
        }).starts_with("layer.type() = int8"));
  const LiveView stale = problem.view;
  problem.view = problem.plan.build(problem.step);
  CHECK(refused([&] { any->prepare(stale); }).starts_with("plan = out of date"));
  CHECK(refused([&] { any->run(layer, stale, problem.q, out); }).starts_with("plan = out of date"));
}

TEST_CASE("an object says what it is") {
  const auto any = make_attention<Cpu, Sizes, ElementTypes<half, std::int8_t>,
                                  Variants<NoVariant, SlidingWindow>>(
      {24, 16}, 1, {.instruction_set = detail::cpu::compiled_sets[0]});
  const std::string set = name_of(detail::cpu::compiled_sets[0]);
  CHECK(any->device() == std::string_view("cpu"));
  CHECK(any->instruction_set() == set);
  CHECK(any->kv_types().size() == 2);
  CHECK(any->kv_types()[1] == ElementType::int8);
  CHECK(any->qo_types().size() == 1);
  CHECK(any->variants()[1] == "SlidingWindow");
  CHECK(describe(*any) == "cpu (" + set +
                              "), head_dim 24, value_dim 16, K/V half, int8, q and out float, "
                              "variants NoVariant, SlidingWindow");
  CHECK(std::string_view(name_of(ElementType::bfloat16)) == "bfloat16");
  CHECK(std::string_view(name_of(ElementType::float8_e4m3)) == "float8_e4m3");
}
