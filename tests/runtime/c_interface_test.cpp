// The C interface computes the bits of the C++ front, over an engine's pages in vLLM's layout for
// CPUs. What it refuses: c_refusals_test.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <type_traits>
#include <vector>

#define CHUNKATTN_C_KERNELS(X)                        \
  X(16, 16, float, float)                             \
  X(16, 24, chunkattn::half, float)                   \
  X(16, 16, chunkattn::bfloat16, chunkattn::bfloat16) \
  X(16, 16, std::int8_t, float) X(16, 16, chunkattn::float8_e4m3, float)
#include "chunkattn/attention_plan.hpp"
#include "chunkattn/c/chunkattn.ipp"
#include "chunkattn/chunk_attention.hpp"
#include "chunkattn/kv_cache.hpp"
#include "chunkattn/prefix_tree.hpp"
#include "support/page_batch.hpp"
#include "support/random.hpp"

using namespace chunkattn;

namespace {

using Attention = std::unique_ptr<chunkattn_attention, void (*)(chunkattn_attention*)>;
using Plan = std::unique_ptr<chunkattn_plan, void (*)(chunkattn_plan*)>;

Attention make(const chunkattn_config& config) {
  return {chunkattn_attention_create(&config), chunkattn_attention_destroy};
}
Plan make_plan(int page_size, int num_pages, int null_page = -1) {
  return {chunkattn_plan_create(page_size, num_pages, null_page), chunkattn_plan_destroy};
}

chunkattn_tables tables_of(const test::PageBatch& batch) {
  return {batch.table.data(), batch.stride, batch.seq_lens.data(), batch.query_start_loc.data(),
          static_cast<std::int32_t>(batch.sequences.size())};
}

constexpr int num_qo_heads = 4, num_kv_heads = 2;

/// K and V of one layer as vLLM has them on CPUs, [page][head][K of all tokens, V of all tokens],
/// or apart where rows differ in length; and how C and C++ see them.
template <class Kv, int HeadDim, int ValueDim>
struct Memory {
  std::vector<Kv> memory;
  chunkattn_layer layer{};
  KvView<Kv> view;

  explicit Memory(const PageGeometry& pages, bool v_apart = false) {
    const std::int64_t k_rows = std::int64_t{pages.page_size} * HeadDim;
    const std::int64_t head = k_rows + std::int64_t{pages.page_size} * ValueDim;
    memory.resize(static_cast<std::size_t>(head * num_kv_heads * pages.num_pages),
                  from_float<Kv>(std::numeric_limits<float>::quiet_NaN()));
    view = {.k = memory.data(),
            .v = memory.data() + k_rows,
            .num_chunks = pages.num_pages,
            .num_kv_heads = num_kv_heads,
            .head_dim = HeadDim,
            .chunk_size = pages.page_size,
            .stride_chunk = head * num_kv_heads,
            .stride_head = head,
            .stride_token = HeadDim};
    std::int64_t v_strides[]{view.stride_chunk, head, ValueDim};
    if (v_apart) {
      view.stride_chunk = k_rows * num_kv_heads;
      view.stride_head = k_rows;
      view.v = memory.data() + view.stride_chunk * pages.num_pages;
      v_strides[0] = std::int64_t{pages.page_size} * num_kv_heads * ValueDim;
      v_strides[1] = ValueDim;
      v_strides[2] = num_kv_heads * ValueDim;
    }
    if (v_apart || HeadDim != ValueDim) {
      view.value_dim = ValueDim;
      view.v_stride_chunk = v_strides[0];
      view.v_stride_head = v_strides[1];
      view.v_stride_token = v_strides[2];
    }
    layer = {view.k,
             view.v,
             pages.num_pages,
             pages.page_size,
             {view.stride_chunk, view.stride_head, HeadDim},
             {v_strides[0], v_strides[1], v_strides[2]},
             nullptr,
             nullptr,
             0,
             {}};
  }
  /// Fills all of it, as of tokens that came before.
  void fill(test::Random& random) {
    for (Kv& element : memory) element = from_float<Kv>(random.normal());
  }
};

/// Rows of `size` elements with gaps of NaN between them.
template <class T>
struct Gapped {
  std::int64_t stride;
  std::vector<T> strided, dense;

  Gapped(test::Random& random, int rows, int size)
      : stride(size + (random.chance(0.5) ? random.uniform(1, 9) : 0)) {
    strided.resize(static_cast<std::size_t>(rows * stride + 1),
                   from_float<T>(std::numeric_limits<float>::quiet_NaN()));
    for (int row = 0; row < rows; ++row)
      for (int i = 0; i < size; ++i) {
        dense.push_back(from_float<T>(random.normal()));
        strided[static_cast<std::size_t>(row * stride + i)] = dense.back();
      }
  }
};

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

template <int HeadDim, int ValueDim, class Kv, class Qo>
void check_against_cpp(std::uint64_t stream, std::int32_t kv_type, std::int32_t qo_type,
                       bool one_term = false) {
  test::Random random(stream);
  const chunkattn_config config{.version = CHUNKATTN_C_VERSION,
                                .head_dim = HeadDim,
                                .value_dim = ValueDim == HeadDim ? 0 : ValueDim,
                                .num_qo_heads = num_qo_heads,
                                .num_kv_heads = num_kv_heads,
                                .kv_type = kv_type,
                                .qo_type = qo_type,
                                .num_threads = 1,  // slots may be written twice
                                .scale = 0.3f,
                                .accuracy = one_term ? CHUNKATTN_ONE_TERM : CHUNKATTN_TWO_TERMS};
  const Attention attention = make(config);
  REQUIRE_MESSAGE(attention, std::string(chunkattn_error()));
  ChunkAttention<Cpu, HeadDim, ValueDim> expected_of(
      1, {.sm_scale = 0.3f,
          .accuracy = one_term ? CpuOptions::Accuracy::one_term : CpuOptions::Accuracy::two_terms});
  const std::vector<float> per_head{-1, 0.5f, 0.25f, 2};
  const std::vector<float> slopes{0.5f, 0.25f, 0.125f, 0.0625f};
  test::PageBatches batches(random,
                            {.page_sizes = {1, 3, 16, 32}, .max_tokens = 60, .num_pages = 0});
  for (int round = 0; round < test::scaled(40); ++round) {
    test::PageBatch batch = batches.make();
    batch.geometry.joined = false;
    const int rows = batch.num_rows();
    const PageGeometry& pages = batch.geometry;
    const bool v_behind = random.chance(0.5);
    Memory<Kv, HeadDim, ValueDim> ours(pages, v_behind), theirs(pages, v_behind);
    ours.fill(random);
    theirs.memory = ours.memory;
    const std::vector<Kv> before = ours.memory;

    const Plan plan = make_plan(pages.page_size, pages.num_pages, pages.null_page);
    REQUIRE(plan);
    const chunkattn_tables tables = tables_of(batch);
    REQUIRE_MESSAGE(chunkattn_plan_build(plan.get(), &tables) == 0, std::string(chunkattn_error()));
    PagedPlan reference(pages);
    PageTables with_slots = batch.tables();
    if (!random.chance(0.5)) with_slots.slot_mapping = {};
    const LiveView view = reference.build(with_slots);
    REQUIRE(view.num_rows == rows);

    const Gapped<Qo> q(random, rows, num_qo_heads * HeadDim),
        k(random, rows, num_kv_heads * HeadDim), v(random, rows, num_kv_heads * ValueDim);
    if (with_slots.slot_mapping.empty())
      REQUIRE_MESSAGE(chunkattn_write(attention.get(), plan.get(), &ours.layer, k.strided.data(),
                                      k.stride, v.strided.data(), v.stride, rows) == 0,
                      std::string(chunkattn_error()));
    else
      REQUIRE_MESSAGE(
          chunkattn_write_slots(attention.get(), &ours.layer, with_slots.slot_mapping.data(),
                                k.strided.data(), k.stride, v.strided.data(), v.stride, rows) == 0,
          std::string(chunkattn_error()));
    if (rows > 0) expected_of.write(theirs.view, view, k.dense, v.dense);
    CHECK(same_bits(ours.memory, theirs.memory));

    // Freed pages are read by rows without a window: whatever they hold, it is the same on both
    // sides.
    const int window = random.uniform(1, 50);
    const int kind = random.uniform(0, 6);
    const bool windowed = kind == 1 || kind == 3 || kind == 5;
    const chunkattn_variant variant{windowed ? window : 0, kind == 2 || kind == 3 ? 1.5f : 0.0f,
                                    kind >= 4 && kind <= 5 ? per_head.data() : nullptr,
                                    kind == 6 ? slopes.data() : nullptr};
    const std::size_t lines = static_cast<std::size_t>(rows * num_qo_heads);
    const std::vector<Qo> poison(lines * ValueDim, from_float<Qo>(1e30f));
    std::vector<Qo> out = poison, expected = poison;
    std::vector<float> lse(lines), expected_lse(lines);
    REQUIRE_MESSAGE(
        chunkattn_run(attention.get(), plan.get(), &ours.layer, kind == 0 ? nullptr : &variant,
                      q.strided.data(), q.stride, rows, out.data(), lse.data()) == 0,
        std::string(chunkattn_error()));
    if (rows == 0) continue;
    const auto run = [&](const auto& what) {
      expected_of.run(theirs.view, view, what, q.dense, expected, {.lse = expected_lse});
    };
    const SlidingWindow seen{windowed ? window : std::numeric_limits<std::int32_t>::max()};
    if (kind == 0) run(NoVariant{});
    if (kind == 1) run(seen);
    if (kind == 2 || kind == 3) run(combine(SoftCap{1.5f}, seen));
    if (kind == 4 || kind == 5) run(combine(Sinks{per_head}, seen));
    if (kind == 6) run(Alibi{slopes});
    CHECK(same_bits(out, expected));
    CHECK(same_bits(lse, expected_lse));

    // All four with heads first, a gap of one element behind each row.
    const auto apart = [rows](const std::vector<Qo>& dense, int heads, int dim) {
      std::vector<Qo> rows_apart(static_cast<std::size_t>(heads * rows * (dim + 1)),
                                 from_float<Qo>(std::numeric_limits<float>::quiet_NaN()));
      for (int row = 0; row < rows; ++row)
        for (int head = 0; head < heads; ++head)
          std::copy_n(dense.begin() + (row * heads + head) * dim, dim,
                      rows_apart.begin() + (head * rows + row) * (dim + 1));
      return rows_apart;
    };
    const auto given = [rows](std::vector<Qo>& memory, int dim) {
      return chunkattn_rows{memory.data(), dim + 1, std::int64_t{rows} * (dim + 1)};
    };
    std::vector<Qo> q_apart = apart(q.dense, num_qo_heads, HeadDim),
                    k_apart = apart(k.dense, num_kv_heads, HeadDim),
                    v_apart = apart(v.dense, num_kv_heads, ValueDim),
                    out_apart = apart(poison, num_qo_heads, ValueDim);
    const chunkattn_rows q_rows = given(q_apart, HeadDim), k_rows = given(k_apart, HeadDim),
                         v_rows = given(v_apart, ValueDim), out_rows = given(out_apart, ValueDim);
    if (with_slots.slot_mapping.empty()) {
      Memory<Kv, HeadDim, ValueDim> again(pages, v_behind);
      again.memory = before;
      REQUIRE(chunkattn_write_rows(attention.get(), plan.get(), &again.layer, &k_rows, &v_rows,
                                   rows) == 0);
      CHECK(same_bits(again.memory, theirs.memory));
    }
    REQUIRE(chunkattn_run_rows(attention.get(), plan.get(), &ours.layer,
                               kind == 0 ? nullptr : &variant, &q_rows, rows, &out_rows,
                               lse.data()) == 0);
    CHECK(same_bits(out_apart, apart(expected, num_qo_heads, ValueDim)));
    CHECK(same_bits(lse, expected_lse));
  }
}

TEST_CASE("freed pages are neither read nor shared, what is behind them is") {
  const std::vector<std::int32_t> table{0, 1, 2, 0, 1, 3}, seq_lens{9, 9}, starts{0, 1, 2};
  const chunkattn_tables tables{table.data(), 3, seq_lens.data(), starts.data(), 2};
  const Plan plan = make_plan(4, 4, 0);
  REQUIRE(chunkattn_plan_build(plan.get(), &tables) == 0);
  chunkattn_sharing sharing{};
  REQUIRE(chunkattn_plan_sharing(plan.get(), &sharing) == 0);
  CHECK(sharing.pages_read == 3);
  CHECK(sharing.pages_alone == 4);
}

TEST_CASE("the C interface computes the bits of the C++ front") {
  check_against_cpp<16, 16, float, float>(1, CHUNKATTN_FLOAT32, CHUNKATTN_FLOAT32);
  check_against_cpp<16, 24, half, float>(2, CHUNKATTN_FLOAT16, CHUNKATTN_FLOAT32);
  check_against_cpp<16, 16, bfloat16, bfloat16>(3, CHUNKATTN_BFLOAT16, CHUNKATTN_BFLOAT16);
  check_against_cpp<16, 16, bfloat16, bfloat16>(4, CHUNKATTN_BFLOAT16, CHUNKATTN_BFLOAT16, true);
}

template <class T>
void check_eight_bits(std::uint64_t stream, std::int32_t kv_type) {
  constexpr int dim = 16;
  test::Random random(stream);
  chunkattn_config config{};
  config.version = CHUNKATTN_C_VERSION, config.head_dim = dim, config.num_threads = 1;
  config.num_qo_heads = num_qo_heads, config.num_kv_heads = num_kv_heads;
  config.kv_type = kv_type;
  const Attention attention = make(config);
  REQUIRE_MESSAGE(attention, std::string(chunkattn_error()));
  ChunkAttention<Cpu, dim> expected_of(1);
  test::PageBatches batches(random, {.page_sizes = {1, 3, 16}, .max_tokens = 60, .num_pages = 0});
  for (int round = 0; round < test::scaled(30); ++round) {
    const test::PageBatch batch = batches.make();
    PageGeometry pages = batch.geometry;
    pages.joined = false;
    const int rows = batch.num_rows();
    if (rows == 0) continue;
    // NHD; scales [head][page][token], with a gap.
    const auto count = static_cast<std::size_t>(pages.num_pages * pages.page_size * num_kv_heads);
    std::vector<T> k(count * dim), v(count * dim);
    std::vector<float> k_scale(count + 5), v_scale(count + 5);
    for (auto* elements : {&k, &v})
      for (T& e : *elements) {
        if constexpr (std::is_same_v<T, std::int8_t>)
          e = static_cast<std::int8_t>(random.uniform(-127, 127));
        else
          e = from_float<T>(3 * random.normal());
      }
    for (auto* scales : {&k_scale, &v_scale})
      for (float& scale : *scales) scale = 0.001f * static_cast<float>(random.uniform(1, 30));
    const int kind = random.uniform(0, 2);
    const std::int64_t token = num_kv_heads * dim, page = pages.page_size * token;
    chunkattn_layer layer{k.data(),        v.data(),           pages.num_pages,
                          pages.page_size, {page, dim, token}, {page, dim, token},
                          k_scale.data(),  v_scale.data(),     kind,
                          {0, 0}};
    if (kind == 0) {
      layer.scale_strides[0] = pages.page_size;
      layer.scale_strides[1] = std::int64_t{pages.page_size} * pages.num_pages + 5;
    }
    const KvView<T> view{.k = k.data(),
                         .v = v.data(),
                         .num_chunks = pages.num_pages,
                         .num_kv_heads = num_kv_heads,
                         .head_dim = dim,
                         .chunk_size = pages.page_size,
                         .stride_chunk = page,
                         .stride_head = dim,
                         .stride_token = token,
                         .k_scale = k_scale.data(),
                         .v_scale = v_scale.data(),
                         .scale_stride_chunk = layer.scale_strides[0],
                         .scale_stride_head = layer.scale_strides[1],
                         .scales = static_cast<KvScales>(kind)};
    const Plan plan = make_plan(pages.page_size, pages.num_pages, pages.null_page);
    const chunkattn_tables tables = tables_of(batch);
    REQUIRE(chunkattn_plan_build(plan.get(), &tables) == 0);
    PagedPlan reference(pages);
    PageTables without_slots = batch.tables();
    without_slots.slot_mapping = {};
    const LiveView expected_plan = reference.build(without_slots);
    std::vector<float> q(static_cast<std::size_t>(rows) * num_qo_heads * dim), out(q.size()),
        expected(q.size()), keys(static_cast<std::size_t>(rows) * token);
    for (auto* values : {&q, &keys})
      for (float& x : *values) x = random.normal();
    const std::vector<T> k_before = k, v_before = v;
    const std::vector<float> scales_before = k_scale;
    const int written =
        chunkattn_write(attention.get(), plan.get(), &layer, keys.data(), 0, keys.data(), 0, rows);
    if (kind != 0) {
      CHECK(written == CHUNKATTN_FAILED);
      CHECK(std::string(chunkattn_error()) ==
            "layer.scales = " + std::to_string(kind) +
                ": expected CHUNKATTN_SCALES_PER_ROW = 0, to be written: each row gets a scale of "
                "its own");
      const std::int64_t slot = 0;
      CHECK(chunkattn_write_slots(attention.get(), &layer, &slot, keys.data(), 0, keys.data(), 0,
                                  1) == CHUNKATTN_FAILED);
      CHECK(same_bits(k, k_before));
      CHECK(same_bits(k_scale, scales_before));
    } else {
      REQUIRE_MESSAGE(written == 0, std::string(chunkattn_error()));
      const std::vector<T> k_after = k, v_after = v;
      const std::vector<float> ks_after = k_scale, vs_after = v_scale;
      k = k_before, v = v_before;
      expected_of.write(view, expected_plan, keys, keys);
      CHECK(same_bits(k, k_after));
      CHECK(same_bits(v, v_after));
      CHECK(same_bits(k_scale, ks_after));
      CHECK(same_bits(v_scale, vs_after));
    }
    expected_of.run(view, expected_plan, q, expected);
    REQUIRE_MESSAGE(chunkattn_run(attention.get(), plan.get(), &layer, nullptr, q.data(), 0, rows,
                                  out.data(), nullptr) == 0,
                    std::string(chunkattn_error()));
    CHECK(same_bits(out, expected));

    const auto refused = [&](const chunkattn_layer& bad, float* lse) {
      const bool failed = chunkattn_run(attention.get(), plan.get(), &bad, nullptr, q.data(), 0,
                                        rows, out.data(), lse) == CHUNKATTN_FAILED;
      return failed ? std::string(chunkattn_error()) : "no error";
    };
    chunkattn_layer bad = layer;
    bad.scales = random.pick({-1, 3});
    CHECK(refused(bad, nullptr) ==
          "layer.scales = " + std::to_string(bad.scales) +
              ": expected CHUNKATTN_SCALES_PER_ROW = 0, CHUNKATTN_SCALES_PER_HEAD = 1 or "
              "CHUNKATTN_SCALES_PER_LAYER = 2");
    for (const bool of_v : {false, true}) {
      const std::string name = of_v ? "layer.v_scale" : "layer.k_scale";
      bad = layer;
      float*& scale = of_v ? bad.v_scale : bad.k_scale;
      scale = nullptr;
      CHECK(refused(bad, nullptr) == name + " = null: expected not null");
      scale = reinterpret_cast<float*>(
          reinterpret_cast<std::uintptr_t>(of_v ? v_scale.data() : k_scale.data()) + 2);
      CHECK(refused(bad, nullptr) ==
            name + " = misaligned: expected an address that is a multiple of 4");
      CHECK(refused(layer, of_v ? v_scale.data() : k_scale.data()) ==
            "lse = memory of " + name + ": expected memory of its own");
    }
    for (const int i : {0, 1}) {
      bad = layer;
      const std::string name = "layer.scale_strides[" + std::to_string(i) + "]";
      const std::int64_t huge = std::numeric_limits<std::int64_t>::max();
      if (kind != 0) {
        bad.scale_strides[i] = 7;
        CHECK(refused(bad, nullptr) ==
              name + " = 7: expected 0 where rows have no scales of their own");
      } else if (i == 1 || pages.num_pages > 1) {
        bad.scale_strides[i] = 0;  // forgotten
        CHECK(refused(bad, nullptr) == name +
                                           " = 0: expected at least the scales of a page's "
                                           "tokens, " +
                                           std::to_string(pages.page_size));
        bad.scale_strides[i] = huge;
        CHECK(refused(bad, nullptr) ==
              name + " = " + std::to_string(huge) + ": expected rows within the address space");
      }
    }
    if (kind == 0) {
      bad = layer;
      bad.v_scale = bad.k_scale;
      CHECK(chunkattn_write(attention.get(), plan.get(), &bad, keys.data(), 0, keys.data(), 0,
                            rows) == CHUNKATTN_FAILED);
      CHECK(std::string(chunkattn_error()) ==
            "layer.v_scale = memory of layer.k_scale: expected memory of V's scales of its own");
    }
  }
}

TEST_CASE("K and V of 8 bits, with scales of rows, heads and layers: the bits of C++") {
  check_eight_bits<std::int8_t>(21, CHUNKATTN_INT8);
  check_eight_bits<float8_e4m3>(22, CHUNKATTN_FLOAT8_E4M3);
}

TEST_CASE("slots alone are written, and tokens behind the plan's are not looked at") {
  const Attention attention = make({.version = CHUNKATTN_C_VERSION,
                                    .head_dim = 16,
                                    .value_dim = 0,
                                    .num_qo_heads = 4,
                                    .num_kv_heads = 2,
                                    .kv_type = CHUNKATTN_FLOAT32,
                                    .qo_type = CHUNKATTN_FLOAT32,
                                    .num_threads = 1,
                                    .scale = 0,
                                    .accuracy = CHUNKATTN_TWO_TERMS});
  const Plan plan = make_plan(4, 3);
  REQUIRE((attention && plan));
  CHECK(chunkattn_c_version() == CHUNKATTN_C_VERSION);
  CHECK(std::string(chunkattn_describe(attention.get())).ends_with(", 1 threads"));
  CHECK(std::string(chunkattn_describe(nullptr)).empty());
  chunkattn_attention_destroy(nullptr);
  chunkattn_plan_destroy(nullptr);

  Memory<float, 16, 16> memory({.page_size = 4, .num_pages = 3});
  test::Random random(4);
  memory.fill(random);
  const auto untouched = memory.memory;
  const std::vector<float> k(2 * 32, 1);
  const std::int64_t slots[]{11, -1};
  REQUIRE(chunkattn_write_slots(attention.get(), &memory.layer, slots, k.data(), 0, k.data(), 0,
                                2) == 0);
  std::size_t changed = 0;
  for (std::size_t i = 0; i < untouched.size(); ++i) changed += memory.memory[i] != untouched[i];
  CHECK(changed == 2 * num_kv_heads * 16);  // K and V of one token

  const std::vector<std::int32_t> table{0, 1, 0, 2}, lens{5, 6}, starts{0, 1, 2};
  const chunkattn_tables tables{table.data(), 2, lens.data(), starts.data(), 2};
  REQUIRE(chunkattn_plan_build(plan.get(), &tables) == 0);
  const std::vector<float> q(2 * 64, 1);
  std::vector<float> out(3 * 64, 7);
  REQUIRE(chunkattn_run(attention.get(), plan.get(), &memory.layer, nullptr, q.data(), 0, 100,
                        out.data(), nullptr) == 0);
  CHECK(std::count(out.begin(), out.end(), 7.0f) == 64);
}

TEST_CASE("steps of a tree in C, forks' copies included, compute the bits of C++") {
  constexpr int chunk = 16, chunks = 24, dim = 16, rows_max = 64;
  chunkattn_config config{};
  config.version = CHUNKATTN_C_VERSION, config.head_dim = dim, config.num_threads = 2;
  config.num_qo_heads = num_qo_heads, config.num_kv_heads = num_kv_heads;
  const Attention attention = make(config);
  REQUIRE(attention);
  chunkattn_tree_config tree_config{};
  tree_config.version = CHUNKATTN_C_VERSION, tree_config.chunk_size = chunk;
  tree_config.max_chunks = chunks;
  chunkattn_tree* const tree = chunkattn_tree_create(&tree_config);
  const Plan plan(chunkattn_step_plan_create(), chunkattn_plan_destroy);
  REQUIRE((tree != nullptr && plan));
  Memory<float, dim, dim> memory({.page_size = chunk, .num_pages = chunks});
  test::Random random(9);
  memory.fill(random);

  // The same in C++, with the tree that stands behind the handle.
  PrefixTree<std::int32_t, chunk> twin(PoolAllocator{.max_chunks = chunks});
  KvCache<Cpu, float> cache(twin, {.num_kv_heads = num_kv_heads, .head_dim = dim});
  ChunkAttention<Cpu, dim> expected_attention;
  AttentionPlan twin_plan;

  std::vector<std::int32_t> prompt(21);
  for (auto& token : prompt) token = random.uniform(0, 9);
  std::vector<chunkattn_sequence*> sequences(1);
  std::vector<PrefixTree<std::int32_t, chunk>::Sequence> twins;
  REQUIRE(chunkattn_tree_insert(tree, prompt.data(), 21, nullptr, &sequences[0]) == 0);
  twins.push_back(twin.insert(prompt));
  int num_copies = 0;
  for (int round = 0; round < 8; ++round) {
    if (round == 2 || round == 4) {  // of a private tail that is short: its K/V is copied
      sequences.push_back(nullptr);
      REQUIRE(chunkattn_sequence_fork(sequences[0], -1, &sequences.back()) == 0);
      twins.push_back(twins[0].fork());
    }
    chunkattn_step* const step = chunkattn_step_begin(tree);
    auto twin_step = twin.begin_step();
    for (std::size_t i = 0; i < sequences.size(); ++i) {
      chunkattn_added added{};
      REQUIRE(chunkattn_step_add(step, sequences[i], 0, nullptr, nullptr, 0, &added) == 0);
      REQUIRE(static_cast<bool>(twin_step.add(twins[i])) == (added.reason == CHUNKATTN_ADDED));
    }
    REQUIRE(chunkattn_step_build(step, plan.get()) == 0);
    const auto view = twin_plan.build(twin_step);
    const int rows = view.num_rows;
    REQUIRE(chunkattn_step_num_rows(step) == rows);
    REQUIRE(rows <= rows_max);
    num_copies += view.num_copies;
    std::vector<float> q(static_cast<std::size_t>(rows) * num_qo_heads * dim);
    std::vector<float> k(static_cast<std::size_t>(rows) * num_kv_heads * dim), v(k.size());
    for (auto* values : {&q, &k, &v})
      for (float& x : *values) x = random.normal();
    std::vector<float> out(q.size(), 5), expected(q.size(), 6);
    REQUIRE(chunkattn_write(attention.get(), plan.get(), &memory.layer, k.data(), 0, v.data(), 0,
                            rows) == 0);
    REQUIRE(chunkattn_run(attention.get(), plan.get(), &memory.layer, nullptr, q.data(), 0, rows,
                          out.data(), nullptr) == 0);
    expected_attention.write(cache.layer(0), view, k, v);
    expected_attention.run(cache.layer(0), view, q, expected);
    CHECK(out == expected);
    chunkattn_layer other = memory.layer;
    other.page_size = 32;
    CHECK(chunkattn_run(attention.get(), plan.get(), &other, nullptr, q.data(), 0, rows, out.data(),
                        nullptr) == CHUNKATTN_FAILED);
    CHECK(std::string(chunkattn_error()) == "layer.page_size = 32: expected that of the plan, 16");
    other.page_size = chunk, other.num_pages = 0;
    CHECK(chunkattn_run(attention.get(), plan.get(), &other, nullptr, q.data(), 0, rows, out.data(),
                        nullptr) == CHUNKATTN_FAILED);
    REQUIRE(chunkattn_step_finish(step) == 0);
    std::vector<std::int32_t> outputs(sequences.size(), 3);
    auto finished = std::move(twin_step).finish();
    finished.commit(outputs);
    REQUIRE(chunkattn_step_commit_all(step, outputs.data(),
                                      static_cast<std::int64_t>(outputs.size())) == 0);
    chunkattn_step_destroy(step);
    CHECK(chunkattn_run(attention.get(), plan.get(), &memory.layer, nullptr, q.data(), 0, rows,
                        out.data(), nullptr) == CHUNKATTN_FAILED);
    CHECK(std::string(chunkattn_error()).starts_with("plan = out of date: expected the view"));
  }
  CHECK(num_copies >= 2);
  for (chunkattn_sequence* sequence : sequences) chunkattn_sequence_destroy(sequence);
  chunkattn_tree_destroy(tree);
}

}  // namespace
