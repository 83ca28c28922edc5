// Every pair of variants at once, against their definitions.
#include <doctest/doctest.h>

#include "support/variant_pairs.hpp"

using namespace test;

TEST_CASE("every pair of variants") {
  for_each_variant_pair([]<class A, class B>(std::uint64_t stream) {
    check_variant<PairCase<A, B>, float, 16>(stream);
  });
}

TEST_CASE("three at once, as Gemma 2 with a mask") {
  check_variant<PairCase<PairCase<SoftCapCase, WindowCase>, MaskCase>, float, 16>(41);
}
