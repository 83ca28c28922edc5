// Trees of drafts against the oracle, which is given every row's path as a sequence of its own:
// all shapes, element types, groups and variants, in batches with prefill and decoding, on forked
// tails and shared prefixes, over steps that accept one branch after the other.
#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>
#include <vector>

#include "chunkattn/debug/reference.hpp"
#include "support/draft_scenario.hpp"

using namespace chunkattn;
using namespace test;

namespace {

constexpr int head_dim = 32;

template <class T, class Case>
void check_step(const std::vector<Tokens>& paths, int num_kv_heads, std::span<const float> q,
                const KvView<T>& kv, const LiveView& view, const Case& of) {
  const ApartCase<T> apart(paths, num_kv_heads, head_dim);
  const Reference reference =
      reference_attention(apart.kv->view, apart.plan.view(), q, {}, of.definition);
  static auto modes = variant_modes<head_dim>();
  for (auto& attention : modes) {
    CAPTURE(static_cast<int>(attention.options().reduce));
    CAPTURE(attention.options().tuning.min_product_lines);
    std::vector<float> out(q.size(), std::numeric_limits<float>::quiet_NaN());
    std::vector<float> lse(reference.lse.size(), out[0]);
    attention.run(kv, view, of.variant, q, out, {.lse = lse});
    const Rounding rounding = rounding_in<T>(attention);
    CHECK(compare_with_reference(reference, std::span<const float>(out), rounding).worst <= 1.0);
    CHECK(worst_lse(reference, lse, rounding) <= 1.0);
    if (attention.options().reduce != CpuOptions::Reduce::batch_invariant) continue;
    // The bits of a draft are those of its branch as a plain sequence.
    std::vector<float> alone(out.size());
    attention.run(apart.kv->view, apart.plan.view(), of.variant, q, alone);
    CHECK(std::memcmp(out.data(), alone.data(), out.size() * sizeof(float)) == 0);
  }
}

template <class T, class Case>
void check_trees(std::uint64_t stream) {
  check_draft_trees<T, Case, head_dim>(
      stream, [](auto& engine, const LiveView& view, const Case& of) {
        check_step<T>(engine.paths, engine.num_kv_heads, engine.q, engine.kv.layer(0), view, of);
      });
}

}  // namespace

TEST_CASE("trees of drafts in fp32, with every variant") {
  check_trees<float, PlainCase>(1);
  check_trees<float, SoftCapCase>(2);
  check_trees<float, WindowCase>(3);
  check_trees<float, SinksCase>(4);
  check_trees<float, AlibiCase>(5);
  check_trees<float, BiasCase>(6);
  check_trees<float, MaskCase>(7);
  check_trees<float, UserCase>(8);
}
TEST_CASE("trees of drafts in fp16") {
  check_trees<half, PlainCase>(11);
  check_trees<half, PairCase<WindowCase, AlibiCase>>(12);
}
TEST_CASE("trees of drafts in bf16") {
  check_trees<bfloat16, PlainCase>(21);
  check_trees<bfloat16, PairCase<WindowCase, AlibiCase>>(22);
}
TEST_CASE("trees of drafts in int8") {
  check_trees<std::int8_t, PlainCase>(31);
  check_trees<std::int8_t, PairCase<WindowCase, AlibiCase>>(32);
}
