// Attention over an engine's own pages by plans from its page tables, in the layouts of vLLM,
// FlashInfer and SGLang, against the double-precision oracle over each sequence alone.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "chunkattn/chunk_attention.hpp"
#include "chunkattn/debug/reference.hpp"
#include "chunkattn/interop/paged_plan.hpp"
#include "chunkattn/interop/paged_view.hpp"
#include "support/attention_case.hpp"
#include "support/page_batch.hpp"
#include "support/random.hpp"
#include "support/refused.hpp"

using namespace chunkattn;
using test::PageBatch;

namespace {

constexpr int head_dim = 16;

// How engines lay out K and V of one layer.
enum class Layout {
  hnd,              // [page][head][token][dim], K and V apart: vLLM, FlashInfer
  nhd,              // [page][token][head][dim], K and V apart: vLLM, SGLang
  interleaved_nhd,  // [page][2][token][head][dim]: FlashInfer, vLLM
  interleaved_hnd,  // [page][2][head][token][dim]: FlashInfer
  halves_hnd,       // [page][head][K of all tokens, V of all tokens][dim]: vLLM on CPUs
  apart_v,          // K as hnd, V as nhd
};
constexpr Layout layouts[]{
    Layout::hnd,        Layout::nhd,    Layout::interleaved_nhd, Layout::interleaved_hnd,
    Layout::halves_hnd, Layout::apart_v};

// Memory in one of them, NaN all over.
template <class T>
struct PagedMemory {
  std::vector<T> memory;
  KvView<T> view;

  PagedMemory(Layout layout, const PageGeometry& geometry, int num_kv_heads) {
    const std::int64_t tokens = geometry.page_size, heads = num_kv_heads;
    const std::int64_t half = tokens * heads * head_dim, pages = geometry.num_pages;
    memory.resize(static_cast<std::size_t>(2 * half * pages),
                  from_float<T>(std::numeric_limits<float>::quiet_NaN()));
    T* const k = memory.data();
    view = {.k = k,
            .num_chunks = geometry.num_pages,
            .num_kv_heads = num_kv_heads,
            .head_dim = head_dim,
            .chunk_size = geometry.page_size};
    const bool token_first = layout == Layout::nhd || layout == Layout::interleaved_nhd;
    view.stride_head = token_first ? head_dim : tokens * head_dim;
    view.stride_token = token_first ? heads * head_dim : head_dim;
    const bool apart = layout == Layout::hnd || layout == Layout::nhd || layout == Layout::apart_v;
    view.stride_chunk = apart ? half : 2 * half;
    view.v = k + (apart ? half * pages : half);
    if (layout == Layout::halves_hnd) {
      view.stride_head = 2 * tokens * head_dim;
      view.v = k + tokens * head_dim;
    }
    if (layout == Layout::apart_v) {
      view.value_dim = head_dim;
      view.v_stride_chunk = half;
      view.v_stride_head = head_dim;
      view.v_stride_token = heads * head_dim;
    }
  }
  [[nodiscard]] bool joins() const {
    return view.chunk_size == 1 || view.stride_chunk == view.chunk_size * view.stride_token;
  }
};

// Each sequence by itself, page by page: a plan that nothing can be wrong with.
PlanView::Arrays plain_plan(const PageBatch& batch) {
  PlanView::Arrays plan;
  plan.chunk_size = batch.geometry.page_size;
  for (std::size_t i = 0; i < batch.sequences.size(); ++i) {
    const PageBatch::Sequence& s = batch.sequences[i];
    if (s.num_queries == 0) continue;
    const auto row = static_cast<std::int32_t>(plan.row_token.size());
    const auto piece = static_cast<std::int32_t>(plan.pieces.size());
    const auto segment = static_cast<std::int32_t>(plan.segments.size());
    for (int p = 0; p < batch.pages_of(s); ++p)
      plan.pieces.push_back(
          {s.pages[static_cast<std::size_t>(p)], 0, plan.chunk_size, p * plan.chunk_size});
    if (s.seq_len > 0)
      plan.segments.push_back({row, row + s.num_queries, piece, batch.pages_of(s), 0,
                               batch.pages_of(s) * plan.chunk_size, -1, 1});
    for (int q = 0; q < s.num_queries; ++q) {
      plan.row_token.push_back(batch.query_start_loc[i] + q);
      plan.row_kv_len.push_back(std::max(0, s.seq_len - s.num_queries + q + 1));
      plan.row_segment.push_back(s.seq_len > 0 ? segment : -1);
    }
  }
  plan.writes.resize(plan.row_token.size());
  return plan;
}

// Fills in what the batch's rows see, but for what the window hides.
template <class T>
void fill_seen(test::Random& random, const PageBatch& batch, const KvView<T>& kv, int window) {
  for (const PageBatch::Sequence& s : batch.sequences) {
    if (s.num_queries == 0) continue;
    const int first = window < 0 ? 0 : std::max(0, s.seq_len - s.num_queries - window + 1);
    for (int position = first; position < s.seq_len; ++position) {
      const std::int64_t slot = batch.slot(s, position);
      const auto page = static_cast<ChunkIndex>(slot / kv.chunk_size);
      const int offset = static_cast<int>(slot % kv.chunk_size);
      for (int head = 0; head < kv.num_kv_heads; ++head) {
        random.fill(std::span(kv.k_row(page, head, offset), head_dim));
        random.fill(std::span(kv.v_row(page, head, offset), head_dim));
      }
    }
  }
}

struct Seen {
  int cases = 0, shared = 0, windows = 0, written = 0, joined = 0;
};

// Writes K and V of the query tokens if each has a slot of its own.
template <class T>
bool write_queries(test::Random& random, ChunkAttention<Cpu, head_dim>& attention,
                   const PageBatch& batch, const KvView<T>& pages, const KvView<T>& kv,
                   const LiveView& plan) {
  std::vector<std::int64_t> slots;
  for (const PageBatch::Sequence& s : batch.sequences)
    for (int q = 0; q < s.num_queries; ++q)
      slots.push_back(s.seq_len == 0 ? -1 : batch.slot(s, s.seq_len - s.num_queries + q));
  std::set<std::int64_t> distinct;
  for (const std::int64_t slot : slots)
    if (slot >= 0 &&
        (!distinct.insert(slot).second || slot / pages.chunk_size == batch.geometry.null_page))
      return false;
  const auto row = static_cast<std::size_t>(pages.num_kv_heads) * head_dim;
  std::vector<float> k(slots.size() * row), v(k.size());
  random.fill(std::span(k));
  random.fill(std::span(v));
  attention.write(kv, plan, k, v);
  for (std::size_t i = 0; i < slots.size(); ++i) {
    if (slots[i] < 0) continue;
    const auto page = static_cast<ChunkIndex>(slots[i] / pages.chunk_size);
    const int offset = static_cast<int>(slots[i] % pages.chunk_size);
    for (int head = 0; head < pages.num_kv_heads; ++head)
      for (int d = 0; d < head_dim; ++d) {
        const std::size_t at = i * row + static_cast<std::size_t>(head * head_dim + d);
        REQUIRE(to_float(pages.k_row(page, head, offset)[d]) == to_float(from_float<T>(k[at])));
        REQUIRE(to_float(pages.v_row(page, head, offset)[d]) == to_float(from_float<T>(v[at])));
      }
  }
  return true;
}

template <class T, class X>
void check_random(std::uint64_t stream, int rounds, Seen& seen) {
  test::Random random(stream);
  ChunkAttention<Cpu, head_dim> in_order(2);
  ChunkAttention<Cpu, head_dim> alone(2, {.reduce = CpuOptions::Reduce::batch_invariant});
  for (int round = 0; round < rounds; ++round) {
    auto& attention = random.chance(0.7) ? in_order : alone;
    test::PageBatches batches(random, {.max_sequences = random.chance(0.2) ? 40 : 8,
                                       .max_tokens = 80,
                                       .max_queries = 20,
                                       .num_pages = 0});
    PageBatch batch = batches.make();
    if (batch.num_rows() == 0) continue;
    const Layout layout = random.pick(layouts);
    const int num_kv_heads = random.uniform(1, 2), group = random.pick({1, 2, 4, 5});
    PagedMemory<T> memory(layout, batch.geometry, num_kv_heads);
    batch.geometry.joined = memory.joins() && random.chance(0.7);
    batch.slot_mapping.clear();
    REQUIRE(can_join_pages(memory.view) == memory.joins());
    const KvView<T> kv = batch.geometry.joined ? join_pages(memory.view) : memory.view;

    PagedPlan plan(batch.geometry);
    const LiveView view = random.chance(0.5) ? plan.build(batch.tables()) : plan.build(batch.csr());
    // The largest window that freed pages are outside of; what it hides is NaN.
    int window = -1;
    for (const PageBatch::Sequence& s : batch.sequences)
      for (int p = 0; s.num_queries > 0 && p < batch.pages_of(s); ++p)
        if (s.pages[static_cast<std::size_t>(p)] == batch.geometry.null_page) {
          const int room =
              std::max(0, s.seq_len - s.num_queries + 1 - (p + 1) * batch.geometry.page_size);
          window = window < 0 ? room : std::min(window, room);
        }
    if (window == 0) continue;  // a query's own page was freed
    fill_seen(random, batch, memory.view, window);
    seen.written += write_queries(random, attention, batch, memory.view, kv, view);

    std::vector<X> q(static_cast<std::size_t>(batch.num_rows() * num_kv_heads * group * head_dim));
    random.fill(std::span(q));
    std::vector<X> out(q.size(), from_float<X>(std::numeric_limits<float>::quiet_NaN()));
    std::vector<float> lse(q.size() / head_dim, std::numeric_limits<float>::quiet_NaN());
    ReferenceVariant variant;
    if (window >= 0) {
      attention.run(kv, view, SlidingWindow{window}, q, out, {.lse = lse});
      variant.visible = [window](LogitIndex at) { return at.q_idx - at.kv_idx < window; };
    } else {
      attention.run(kv, view, q, out, {.lse = lse});
    }
    const auto plain = plain_plan(batch);
    const Reference reference =
        reference_attention(memory.view, plain.view(), std::span<const X>(q), {}, variant);
    const Rounding rounding = test::rounding_in<T>(attention);
    const OracleReport report =
        compare_with_reference(reference, std::span<const X>(out), rounding);
    CAPTURE(round);
    CAPTURE(batch.geometry.page_size);
    CAPTURE(static_cast<int>(layout));
    CAPTURE(window);
    REQUIRE(report.worst <= 1);
    REQUIRE(test::worst_lse(reference, lse, rounding) <= 1);
    ++seen.cases;
    seen.windows += window >= 0;
    seen.joined += batch.geometry.joined;
    for (int s = 0; s < view.num_segments; ++s)
      if (view.segments[s].num_sequences > 1) {
        ++seen.shared;
        break;
      }
  }
}

}  // namespace

TEST_CASE("random page tables in engines' layouts equal each sequence alone") {
  Seen seen;
  check_random<float, float>(81, test::scaled(500), seen);
  check_random<half, half>(82, test::scaled(300), seen);
  check_random<bfloat16, bfloat16>(83, test::scaled(300), seen);
  check_random<bfloat16, float>(84, test::scaled(200), seen);
  MESSAGE(seen.cases, " cases: ", seen.shared, " share, ", seen.windows, " with freed pages, ",
          seen.written, " written, ", seen.joined, " joined");
  CHECK(seen.shared > seen.cases / 4);
  CHECK(seen.joined > seen.cases / 10);
  CHECK(seen.written > seen.cases / 10);
  CHECK(seen.windows > test::scaled(10));
}

TEST_CASE("consecutive pages are one chunk, with the same rows") {
  const auto check = [](const auto& pages) {
    REQUIRE(can_join_pages(pages));
    const auto joined = join_pages(pages);
    REQUIRE(joined.num_chunks == 1);
    REQUIRE(joined.chunk_size == pages.num_chunks * pages.chunk_size);
    for (int page = 0; page < pages.num_chunks; ++page)
      for (int head = 0; head < pages.num_kv_heads; ++head)
        for (int t = 0; t < pages.chunk_size; ++t) {
          const int slot = page * pages.chunk_size + t;
          REQUIRE(joined.k_row(0, head, slot) == pages.k_row(page, head, t));
          REQUIRE(joined.v_row(0, head, slot) == pages.v_row(page, head, t));
          if constexpr (requires { *pages.k_row_scale(page, head, t); }) {
            REQUIRE(joined.k_row_scale(0, head, slot) == pages.k_row_scale(page, head, t));
            REQUIRE(joined.v_row_scale(0, head, slot) == pages.v_row_scale(page, head, t));
          }
        }
  };
  for (const Layout layout : layouts) {
    check(PagedMemory<float>(layout, {.page_size = 1, .num_pages = 5}, 3).view);
    const PagedMemory<float> memory(layout, {.page_size = 4, .num_pages = 5}, 3);
    if (layout == Layout::nhd) {
      check(memory.view);
      continue;
    }
    CHECK_FALSE(can_join_pages(memory.view));
    CHECK(test::refused([&] { (void)join_pages(memory.view); }).find("pages = not joined") == 0);
  }

  PagedMemory<float> memory(Layout::nhd, {.page_size = 4, .num_pages = 5}, 3);
  KvView<float> view = memory.view;
  view.value_dim = 8;
  view.v_stride_head = 8;
  view.v_stride_token = 24;
  view.v_stride_chunk = 96;
  check(view);
  view.v_stride_chunk = 97;
  CHECK_FALSE(can_join_pages(view));
  view.value_dim = 1;
  CHECK_FALSE(can_join_pages(view));
  view = PagedMemory<float>(Layout::nhd, {.page_size = 1, .num_pages = 5}, 3).view;
  view.num_chunks = std::numeric_limits<std::int32_t>::max();
  CHECK(can_join_pages(view));
  const PagedMemory<float> single(Layout::interleaved_nhd, {.page_size = 1, .num_pages = 5}, 3);
  view = single.view;  // of which a part of V's rows is used
  view.value_dim = 8;
  view.v_stride_head = view.stride_head;
  view.v_stride_chunk = view.stride_chunk;
  check(view);
  view = memory.view;
  view.num_chunks = std::numeric_limits<std::int32_t>::max() / 4;
  CHECK(can_join_pages(view));
  ++view.num_chunks;
  CHECK_FALSE(can_join_pages(view));
  float* const slab = memory.memory.data();
  view = memory.view;
  view.k_slabs = &slab;
  CHECK_FALSE(can_join_pages(view));
  view = memory.view;
  view.v_slabs = &slab;
  CHECK_FALSE(can_join_pages(view));

  std::vector<std::int8_t> bytes(4 * 5 * 3 * head_dim), values(bytes);
  std::vector<float> scales(4 * 5 * 3);
  KvView<std::int8_t> scaled =
      make_kv_view(bytes.data(), values.data(), scales.data(), scales.data(), {5, 3, 4, head_dim});
  scaled.stride_head = head_dim;
  scaled.stride_token = 3 * head_dim;
  CHECK_FALSE(can_join_pages(scaled));  // scales are page by page
  scaled.scale_stride_chunk = 4;
  scaled.scale_stride_head = 20;
  check(scaled);
  float* const scale_slab = scales.data();
  scaled.k_scale_slabs = &scale_slab;
  CHECK_FALSE(can_join_pages(scaled));
  scaled.k_scale_slabs = nullptr;
  scaled.v_scale_slabs = &scale_slab;
  CHECK_FALSE(can_join_pages(scaled));
}

TEST_CASE("a plan of joined pages and memory that is not are refused by name") {
  const PageGeometry geometry{.page_size = 4, .num_pages = 5, .joined = true};
  PagedMemory<float> memory(Layout::nhd, geometry, 1);
  PagedPlan plan(geometry);
  const std::vector<std::int32_t> table{3}, seq_lens{2}, query_start_loc{0, 1};
  const LiveView view = plan.build(PageTables{table, 1, seq_lens, query_start_loc});
  const std::vector<float> q(head_dim, 1.0f);
  std::vector<float> out(q.size());
  ChunkAttention<Cpu, head_dim> attention(1);
  CHECK(test::refused([&] {
          attention.run(memory.view, view, q, out);
        }).find("layer.chunk_size = 4: expected the plan's chunk size, 20") == 0);
  (void)plan.build(PageTables{table, 1, seq_lens, query_start_loc});
  CHECK(test::refused([&] {
          attention.run(join_pages(memory.view), view, q, out);
        }).find("plan = out of date") == 0);
}
