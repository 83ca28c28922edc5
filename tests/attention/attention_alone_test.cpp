// CpuOptions::Reduce::batch_invariant, plan by plan: each row of a random tree has the bits of the
// same row alone, its K and V elsewhere, its path cut in other places; for any number of threads,
// every element type, every instruction set.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <optional>
#include <span>
#include <vector>

#include "chunkattn/chunk_attention.hpp"
#include "chunkattn/debug/reference.hpp"
#include "support/attention_case.hpp"

using namespace chunkattn;
using test::Random;
using test::Share;
using Count = std::optional<int>;

namespace {

template <class T>
void copy_row(const KvView<T>& from, int from_chunk, int from_offset, const KvView<T>& to,
              int to_chunk, int to_offset) {
  const auto bytes = static_cast<std::size_t>(from.head_dim) * sizeof(T);
  for (int head = 0; head < from.num_kv_heads; ++head) {
    std::memcpy(to.k_row(to_chunk, head, to_offset), from.k_row(from_chunk, head, from_offset),
                bytes);
    std::memcpy(to.v_row(to_chunk, head, to_offset), from.v_row(from_chunk, head, from_offset),
                bytes);
    if constexpr (has_row_scales<T>) {
      *to.k_row_scale(to_chunk, head, to_offset) = *from.k_row_scale(from_chunk, head, from_offset);
      *to.v_row_scale(to_chunk, head, to_offset) = *from.v_row_scale(from_chunk, head, from_offset);
    }
  }
}

/// One row of a plan by itself: a plan of one row, with a copy of the K and V that it sees.
template <class T>
struct RowAlone {
  PlanView::Arrays plan;
  test::Storage<T> kv;

  RowAlone(Random& random, const PlanView& all, const KvView<T>& from, int row)
      : RowAlone(random, all, from, row, random.pick({7, 16, 64, 100})) {}

 private:
  RowAlone(Random& random, const PlanView& all, const KvView<T>& from, int row, int chunk_size)
      : kv(all.row_kv_len[row] / chunk_size + 2, from.num_kv_heads, chunk_size, from.head_dim) {
    const int kv_len = all.row_kv_len[row];
    for (std::int32_t s = all.row_segment[row]; s >= 0; s = all.segments[s].parent) {
      const PlanView::Segment& segment = all.segments[s];
      for (int p = 0; p < segment.num_pieces; ++p) {
        const Piece& piece = all.pieces[segment.piece_begin + p];
        for (int t = 0; t < visible_length(piece, kv_len); ++t) {
          const int at = piece.position + t;
          copy_row(from, piece.chunk, piece.begin + t, kv.view, at / chunk_size, at % chunk_size);
        }
      }
    }
    // As one segment, or cut somewhere else.
    for (int begin = 0; begin < kv_len;) {
      const int end = random.chance(0.5) ? kv_len : random.uniform(begin + 1, kv_len);
      const auto piece_begin = static_cast<std::int32_t>(plan.pieces.size());
      for (int at = begin; at < end;) {
        const int count = std::min(end - at, chunk_size - at % chunk_size);
        plan.pieces.push_back({at / chunk_size, at % chunk_size, count, at});
        at += count;
      }
      const auto above = static_cast<std::int32_t>(plan.segments.size()) - 1;
      plan.segments.push_back({0, 1, piece_begin,
                               static_cast<std::int32_t>(plan.pieces.size()) - piece_begin, begin,
                               end - begin, above, 1});
      begin = end;
    }
    plan.chunk_size = chunk_size;
    plan.row_token.push_back(0);
    plan.row_kv_len.push_back(kv_len);
    plan.row_segment.push_back(static_cast<std::int32_t>(plan.segments.size()) - 1);
    plan.writes.push_back({no_chunk, 0});
  }
};

test::RandomPlanOptions random_shape(Random& random, int round) {
  test::RandomPlanOptions options;
  options.share = random.pick({Share::some, Share::all, Share::all});
  options.num_sequences = round % 3 == 0 ? 64 : random.uniform(1, 20);
  options.chunk_size = random.pick({4, 24, 64, 100});
  options.max_length = random.pick({10, 70, 200});
  options.max_queries = round % 3 == 0 ? 1 : random.pick({1, 4, 40});
  return options;
}

template <class T>
bool same_bits(std::span<const T> a, std::span<const T> b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size_bytes()) == 0;
}

template <int HeadDim, class T>
void check_rows(std::uint64_t stream, int rounds) {
  Random random(stream);
  for (int round = 0; round < test::scaled(rounds); ++round) {
    const auto options = random_shape(random, round);
    const int group = random.pick({1, 1, 3, 4, 8});
    const int num_kv_heads = random.uniform(1, 2);
    test::AttentionCase<T> problem(random, options, HeadDim, num_kv_heads, group,
                                   random.pick({1.0f, 8.0f}));
    // Some rows see less: their queries lie somewhere in the middle of what others read.
    for (std::int32_t& kv_len : problem.plan.row_kv_len)
      if (random.chance(0.2)) kv_len = random.uniform(1, kv_len);
    CAPTURE(HeadDim);
    CAPTURE(group);
    CAPTURE(num_kv_heads);
    CAPTURE(options.num_sequences);
    CAPTURE(options.chunk_size);
    CAPTURE(options.max_length);
    CAPTURE(options.max_queries);
    const PlanView plan = problem.plan.view();
    problem.reference =
        reference_attention(problem.kv.view, plan, std::span<const float>(problem.q));
    for (const InstructionSet set : detail::cpu::compiled_sets) {
      if (!detail::cpu::is_supported(set)) continue;
      CAPTURE(name_of(set));
      test::Answer<float> together(problem);
      for (int threads = 1; threads <= 7; ++threads) {
        CAPTURE(threads);
        test::Answer<float> answer(problem);
        ChunkAttention<Cpu, HeadDim> attention(
            threads, {.reduce = CpuOptions::Reduce::batch_invariant,
                      .instruction_set = set,
                      .tuning = {.min_tasks = random.pick<Count>({{}, {}, 1, 50}),
                                 .max_task_heads = random.pick<Count>({{}, 1}),
                                 .min_product_lines = random.pick<Count>({{}, 1, 20, 1000})}});
        attention.run(problem.kv.view, problem.plan.view(), problem.q, answer.out,
                      {.lse = answer.lse});
        if (threads == 1) together = answer;
        CHECK(same_bits<float>(answer.out, together.out));
        CHECK(same_bits<float>(answer.lse, together.lse));
      }
      CHECK(compare_with_reference(problem.reference, std::span<const float>(together.out)).ok());
      CHECK(test::worst_lse(problem.reference, together.lse) <= 1.0);

      ChunkAttention<Cpu, HeadDim> attention(
          1, {.reduce = CpuOptions::Reduce::batch_invariant, .instruction_set = set});
      const auto heads = static_cast<std::size_t>(problem.num_qo_heads);
      std::vector<float> out(heads * HeadDim), lse(heads);
      for (int row = 0; row < plan.num_rows; ++row) {
        if (plan.num_rows > 100 && random.chance(0.8)) continue;
        CAPTURE(row);
        const RowAlone<T> alone(random, plan, problem.kv.view, row);
        const auto token = static_cast<std::size_t>(plan.row_token[row]);
        const auto q = std::span(problem.q).subspan(token * out.size(), out.size());
        attention.run(alone.kv.view, LiveView::unchecked(alone.plan.view()), q, out, {.lse = lse});
        CHECK(
            same_bits<float>(out, std::span(together.out).subspan(token * out.size(), out.size())));
        CHECK(same_bits<float>(lse, std::span(together.lse).subspan(token * heads, heads)));
      }
    }
  }
}

// A variant for a lesser machine has the shapes in which it may differ: they compile for minutes.
#if defined(CHUNKATTN_ISA)
constexpr bool is_variant = true;
#else
constexpr bool is_variant = false;
#endif
template <int HeadDim, class T>
void check_more_rows(std::uint64_t stream, int rounds) {
  if constexpr (!is_variant) check_rows<HeadDim, T>(stream, rounds);
}

}  // namespace

TEST_CASE("a row has the bits of the same row alone: fp32 K/V") {
  check_more_rows<64, float>(91, 10);
  check_rows<80, float>(92, 10);
  check_more_rows<128, float>(93, 10);
  check_more_rows<256, float>(94, 5);
}

TEST_CASE("a row has the bits of the same row alone: 16-bit K/V") {
  check_rows<24, half>(95, 10);
  check_more_rows<128, half>(96, 10);
  check_rows<64, bfloat16>(97, 10);
  check_more_rows<80, bfloat16>(98, 10);
}

TEST_CASE("a row has the bits of the same row alone: 8-bit K/V") {
  check_rows<64, std::int8_t>(99, 10);
  check_more_rows<64, float8_e4m3>(101, 5);
  check_more_rows<128, std::int8_t>(100, 10);
}
