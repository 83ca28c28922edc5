// The matrix of variants over K/V of 8 bits on the emulated GPU, against the same definitions as
// all others.
#include <doctest/doctest.h>

#include <cstdint>
#include <type_traits>

#include "simt/variants.hpp"

TEST_CASE_TEMPLATE("a variant over K/V of 8 bits agrees with its definition", Case,
                   TEST_VARIANT_CASES) {
  using E = std::conditional_t<Case::stream / 10 % 2 == 0, std::int8_t, chunkattn::float8_e4m3>;
  test::check_variant_on<Case, E>(simt::CudaModes<16>{}, Case::stream + 500);
}
