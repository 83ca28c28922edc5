// The checks of a call's arguments at their edges: the last value that is right, the first that is
// not.
#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "chunkattn/detail/attention/qo_heads.hpp"
#include "chunkattn/detail/cpu/checks.hpp"
#include "chunkattn/kv_view.hpp"

using namespace chunkattn;

#if CHUNKATTN_EXCEPTIONS

namespace {

constexpr int chunk_size = 16, chunks = 3, dim = 8;

// What was wrong: the first words of the message, up to the value.
template <class F>
std::string failure(F&& f) {
  try {
    f();
  } catch (const InvalidArgument& error) {
    const std::string text = error.what();
    return text.substr(0, text.find(':'));
  }
  return "";
}

struct Fixture {
  std::vector<float> k = std::vector<float>(std::size_t{chunks} * chunk_size * dim), v = k;
  std::vector<float> k_scale = std::vector<float>(std::size_t{chunks} * chunk_size),
                     v_scale = k_scale;
  std::vector<std::int8_t> k8 = std::vector<std::int8_t>(k.size()), v8 = k8;
  KvView<float> view = make_kv_view(k.data(), v.data(), {chunks, 1, chunk_size, dim});
  KvView<std::int8_t> view8 = make_kv_view(k8.data(), v8.data(), k_scale.data(), v_scale.data(),
                                           {chunks, 1, chunk_size, dim});

  // Two segments of two pieces, the last of which is put to the test.
  std::string of_piece(Piece piece) {
    const std::vector<Piece> pieces{{0, 0, 16, 0}, {1, 0, 16, 16}, {2, 0, 16, 32}, piece};
    const std::vector<PlanView::Segment> segments{{0, 1, 0, 2, 0, 32, -1, 1},
                                                  {0, 1, 2, 2, 32, 20, 0, 1}};
    PlanView plan;
    plan.num_rows = 1;
    plan.num_segments = 2;
    plan.num_pieces = 4;
    plan.chunk_size = chunk_size;
    plan.segments = segments.data();
    plan.pieces = pieces.data();
    return failure([&] { detail::check_pieces(view, plan); });
  }
  std::string of_write(PlanView::WriteTarget target) {
    const std::vector<PlanView::WriteTarget> writes{{no_chunk, 0}, {0, 0}, target};
    PlanView plan;
    plan.num_rows = 3;
    plan.writes = writes.data();
    return failure([&] { detail::check_writes(view, plan); });
  }
  std::string of_copy(PlanView::RowCopy copy) {
    const std::vector<PlanView::RowCopy> copies{{0, 0, 1, 0, 16}, copy};
    PlanView plan;
    plan.num_copies = 2;
    plan.copies = copies.data();
    return failure([&] { detail::check_writes(view, plan); });
  }
  template <class T>
  std::string of_view(const KvView<T>& changed, int num_rows = 1, int head_dim = dim,
                      int value_dim = dim) {
    PlanView plan;
    plan.num_rows = num_rows;
    plan.chunk_size = chunk_size;
    return failure([&] { detail::cpu::check_view(changed, plan, head_dim, value_dim); });
  }
};

}  // namespace

TEST_CASE_FIXTURE(Fixture, "pieces lie in chunks that the view has") {
  CHECK(of_piece({2, 0, 16, 48}) == "");
  CHECK(of_piece({0, 15, 1, 48}) == "");
  CHECK(of_piece({0, 0, 0, 48}) == "");  // nothing, but no harm
  CHECK(of_piece({0, 16, 0, 48}) == "");
  CHECK(of_piece({-1, 0, 16, 48}) == "plan's chunk = -1");
  CHECK(of_piece({3, 0, 16, 48}) == "layer.num_chunks = 3");
  CHECK(of_piece({0, -1, 16, 48}) == "plan's piece.begin = -1");
  CHECK(of_piece({0, 3, -1, 48}) == "plan's piece.begin = 3");
  CHECK(of_piece({0, 1, 16, 48}) == "plan's piece.begin = 1");
}

TEST_CASE_FIXTURE(Fixture, "rows are written and copied within chunks that the view has") {
  CHECK(of_write({no_chunk, 99}) == "");
  CHECK(of_write({0, 0}) == "");
  CHECK(of_write({2, 15}) == "");
  CHECK(of_write({-2, 0}) == "plan's chunk = -2");
  CHECK(of_write({3, 0}) == "layer.num_chunks = 3");
  CHECK(of_write({0, -1}) == "plan's write offset = -1");
  CHECK(of_write({0, 16}) == "plan's write offset = 16");

  CHECK(of_copy({2, 0, 0, 0, 16}) == "");
  CHECK(of_copy({0, 15, 2, 3, 1}) == "");
  CHECK(of_copy({0, 3, 2, 15, 1}) == "");
  CHECK(of_copy({0, 16, 0, 16, 0}) == "");
  CHECK(of_copy({-1, 0, 0, 0, 1}) == "plan's chunk = -1");
  CHECK(of_copy({0, 0, -1, 0, 1}) == "plan's chunk = -1");
  CHECK(of_copy({3, 0, 0, 0, 1}) == "layer.num_chunks = 3");
  CHECK(of_copy({0, 0, 3, 0, 1}) == "layer.num_chunks = 3");
  CHECK(of_copy({0, -1, 1, 0, 2}) == "plan's row copy = 2");
  CHECK(of_copy({0, 0, 1, -1, 2}) == "plan's row copy = 2");
  CHECK(of_copy({0, 15, 1, 0, 2}) == "plan's row copy = 2");
  CHECK(of_copy({0, 0, 1, 15, 2}) == "plan's row copy = 2");
  CHECK(of_copy({0, 0, 1, 0, -1}) == "plan's row copy = -1");
}

TEST_CASE_FIXTURE(Fixture, "the view fits the plan and has memory") {
  CHECK(of_view(view) == "");
  CHECK(of_view(view8) == "");
  CHECK(of_view(view, 0) == "plan.num_rows = 0");
  CHECK(of_view(view, 1, 16) == "layer.head_dim = 8");
  CHECK(of_view(view, 1, dim, 16) == "layer.value_dim = 8");
  KvView<float> changed = view;
  changed.num_kv_heads = 0;
  CHECK(of_view(changed) == "layer.num_kv_heads = 0");
  changed = view;
  changed.chunk_size = 32;
  CHECK(of_view(changed) == "layer.chunk_size = 32");

  // Memory: at an address, or in slabs.
  float* const k_slabs[] = {k.data()};
  float* const v_slabs[] = {v.data()};
  changed = view;
  changed.k = nullptr;
  CHECK(of_view(changed).find("layer.k =") == 0);
  changed.k_slabs = k_slabs;
  CHECK(of_view(changed) == "");
  changed.v = nullptr;
  CHECK(of_view(changed).find("layer.v =") == 0);
  changed.v_slabs = v_slabs;
  CHECK(of_view(changed) == "");
  KvView<std::int8_t> changed8 = view8;
  changed8.k_scale = nullptr;
  CHECK(of_view(changed8).find("layer.k_scale =") == 0);
  changed8.k_scale_slabs = k_slabs;
  CHECK(of_view(changed8) == "");
  changed8.v_scale = nullptr;
  CHECK(of_view(changed8).find("layer.v_scale =") == 0);
  changed8.v_scale_slabs = v_slabs;
  CHECK(of_view(changed8) == "");

  const auto misalign = [](float*& part) {
    part = reinterpret_cast<float*>(reinterpret_cast<char*>(part) + 1);
  };
  misalign((changed = view).k);
  CHECK(of_view(changed) == "layer.k = misaligned");
  misalign((changed = view).v);
  CHECK(of_view(changed) == "layer.v = misaligned");
  misalign((changed8 = view8).k_scale);
  CHECK(of_view(changed8) == "layer.k_scale = misaligned");
  misalign((changed8 = view8).v_scale);
  CHECK(of_view(changed8) == "layer.v_scale = misaligned");
  changed8 = view8;
  ++changed8.k;
  CHECK(of_view(changed8) == "");  // a byte is always aligned
}

TEST_CASE_FIXTURE(Fixture, "a stride that was forgotten is refused by its name") {
  const auto without = [&](auto member, auto changed, const char* name) {
    CAPTURE(name);
    changed.num_kv_heads = 2;
    CHECK(of_view(changed) == "");
    changed.*member = 0;
    CHECK(of_view(changed) == std::string(name) + " = 0");
    changed.num_kv_heads = changed.num_chunks = changed.chunk_size = 1;  // where there is no next
    PlanView plan;
    plan.num_rows = plan.chunk_size = 1;
    CHECK(failure([&] { detail::cpu::check_view(changed, plan, dim, dim); }) == "");
  };
  using View = KvView<float>;
  without(&View::stride_head, view, "layer.stride_head");
  without(&View::stride_token, view, "layer.stride_token");
  without(&View::stride_chunk, view, "layer.stride_chunk");
  View apart = view;
  apart.value_dim = dim;
  CHECK(of_view(apart) == "layer.v_stride_token = 0");
  apart.v_stride_head = apart.stride_head;
  apart.v_stride_token = apart.stride_token;
  apart.v_stride_chunk = apart.stride_chunk;
  without(&View::v_stride_head, apart, "layer.v_stride_head");
  without(&View::v_stride_token, apart, "layer.v_stride_token");
  without(&View::v_stride_chunk, apart, "layer.v_stride_chunk");
  without(&KvView<std::int8_t>::scale_stride_head, view8, "layer.scale_stride_head");
  without(&KvView<std::int8_t>::scale_stride_chunk, view8, "layer.scale_stride_chunk");
}

TEST_CASE("buffers have the size that their shape says") {
  const float data[65] = {};
  const auto of = [](const float* first, std::size_t size) {
    return failure([=] { detail::check_size("q", std::span(first, size), 64, "shape"); });
  };
  CHECK(of(data, 64) == "");
  CHECK(of(data, 63) == "q.size() = 63");
  CHECK(of(data, 65) == "q.size() = 65");
  CHECK(of(nullptr, 64) == "q.data() = null");
  for (const std::uintptr_t shift : {1, 2, 3})
    CHECK(of(reinterpret_cast<const float*>(reinterpret_cast<std::uintptr_t>(data) + shift), 64) ==
          "q.data() = misaligned");
}

#endif

TEST_CASE("the number of query heads is what q's size says, if it says one") {
  CHECK(detail::count_qo_heads(1, 1, 1) == 1);
  CHECK(detail::count_qo_heads(6 * 5 * 4, 5, 4) == 6);
  CHECK(failure([&] { (void)detail::count_qo_heads(0, 1, 1); }).find("q.size() = 0") == 0);
  CHECK(failure([&] { (void)detail::count_qo_heads(8, 0, 8); }).find("q.size() = 8") == 0);
  CHECK(failure([&] { (void)detail::count_qo_heads(7, 1, 8); }).find("q.size() = 7") == 0);
}
