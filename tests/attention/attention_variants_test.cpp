// Variants of attention against their definitions: each with every element type, and what happens
// at seams, where others had bugs.
#include <doctest/doctest.h>

#include "support/variant_cases.hpp"

using namespace chunkattn;
using test::Random;
using test::Share;

// Builds for one instruction set or a matrix unit in software run a few: kernels take long to
// compile.
#if defined(CHUNKATTN_ISA) || defined(CHUNKATTN_SOFTWARE_TILES)
constexpr bool all_types = false;
#else
constexpr bool all_types = true;
#endif

namespace {

template <class Case>
void check_types(std::uint64_t stream) {
  if constexpr (all_types) {
    test::check_variant<Case, float>(stream);
    test::check_variant<Case, half>(stream + 1);
    test::check_variant<Case, std::int8_t>(stream + 3);
    test::check_variant<Case, float8_e4m3>(stream + 4);
  }
  test::check_variant<Case, bfloat16>(stream + 2);
}

}  // namespace

TEST_CASE_TEMPLATE("a variant agrees with its definition", Case, TEST_VARIANT_CASES) {
  check_types<Case>(Case::stream);
}
