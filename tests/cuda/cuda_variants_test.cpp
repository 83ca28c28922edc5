// Variants of attention on the emulated GPU: the CPU's matrix, trees of drafts among it, against
// the same definitions.
#include <doctest/doctest.h>

#include <algorithm>
#include <span>
#include <vector>

#include "chunkattn/debug/reference.hpp"
#include "simt/variants.hpp"
#include "support/draft_scenario.hpp"

using namespace chunkattn;

namespace {

/// Trees of drafts: the oracle is given the path of every row as a sequence of its own.
template <class T, class Case>
void check_trees(std::uint64_t stream) {
  simt::CudaModes<16> modes;
  test::check_draft_trees<T, Case, 16>(
      stream, [&](auto& engine, const LiveView& view, const Case& of) {
        std::vector<T> q(engine.q.size());
        std::transform(engine.q.begin(), engine.q.end(), q.begin(), from_float<T>);
        const test::ApartCase<T> apart(engine.paths, engine.num_kv_heads, 16);
        const Reference reference = reference_attention(apart.kv->view, apart.plan.view(),
                                                        std::span<const T>(q), {}, of.definition);
        modes.template each_answer<T>(
            engine.kv.layer(0), view, q, of.variant,
            [&](std::span<const T> out, std::span<const float> lse, Rounding rounding) {
              CHECK(compare_with_reference(reference, out, rounding).worst <= 1.0);
              CHECK(test::worst_lse(reference, lse, rounding) <= 1.0);
            });
      });
}

template <class Case>
void check_types(std::uint64_t stream) {
  test::check_variant_on<Case, half>(simt::CudaModes<16>{}, stream);
  test::check_variant_on<Case, bfloat16>(simt::CudaModes<16>{}, stream + 1);
  check_trees<half, Case>(stream + 2);
}

}  // namespace

TEST_CASE("no variant, but trees of drafts") {
  check_trees<half, test::PlainCase>(1);
  check_trees<bfloat16, test::PairCase<test::WindowCase, test::AlibiCase>>(2);
}
TEST_CASE_TEMPLATE("a variant agrees with its definition", Case, TEST_VARIANT_CASES) {
  check_types<Case>(Case::stream);
}

namespace {

/// Fewer problems, since wide heads take long here.
template <class Case, class T, int HeadDim, int ValueDim = HeadDim>
void check_dim(std::uint64_t stream) {
  test::Random random(stream);
  simt::CudaModes<HeadDim, ValueDim> backend;
  for (const int queries : {1, 9}) {
    test::RandomPlanOptions options;
    options.share = test::Share::all;
    options.num_sequences = 3;
    options.max_length = 90;
    options.max_queries = queries;
    const int group = random.pick({1, 4, 6});
    const test::AttentionCase<T, T> problem(random, options, HeadDim, 1, group, 1.0f, ValueDim);
    test::check_variant_case(backend, problem, group, Case(random, {group}));
  }
}

}  // namespace

TEST_CASE("other head dimensions: other ways to share a tile among warps") {
  check_dim<test::MaskCase, half, 64>(91);
  check_dim<test::PairCase<test::SoftCapCase, test::WindowCase>, bfloat16, 256>(92);
  check_dim<test::MaskCase, half, 192, 128>(93);
}
