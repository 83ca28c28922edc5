// Every pair of variants at once on the emulated GPU, against their definitions.
#include <doctest/doctest.h>

#include "simt/variants.hpp"
#include "support/variant_pairs.hpp"

using namespace test;

TEST_CASE("every pair of variants") {
  for_each_variant_pair([]<class A, class B>(std::uint64_t stream) {
    check_variant_on<PairCase<A, B>, chunkattn::half>(simt::CudaModes<16>{}, stream);
  });
}
