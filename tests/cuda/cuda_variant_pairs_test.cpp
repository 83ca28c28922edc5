// Every pair of variants at once on the emulated GPU, against their definitions.
#include <doctest/doctest.h>

#include "simt/variants.hpp"

using namespace test;

namespace {

template <class A, class B>
void check_pair(std::uint64_t stream) {
  check_variant_on<PairCase<A, B>, chunkattn::half>(simt::CudaModes<16>{}, stream);
}

}  // namespace

TEST_CASE("soft cap with every other") {
  check_pair<SoftCapCase, WindowCase>(1);
  check_pair<SoftCapCase, SinksCase>(2);
  check_pair<AlibiCase, SoftCapCase>(3);
  check_pair<SoftCapCase, BiasCase>(4);
  check_pair<SoftCapCase, MaskCase>(5);
  check_pair<SoftCapCase, UserCase>(6);
}

TEST_CASE("window with every other") {
  check_pair<WindowCase, SinksCase>(11);
  check_pair<WindowCase, AlibiCase>(12);
  check_pair<WindowCase, BiasCase>(13);
  check_pair<WindowCase, MaskCase>(14);
  check_pair<WindowCase, UserCase>(15);
  check_pair<WindowCase, WindowCase>(16);
}

TEST_CASE("sinks with every other") {
  check_pair<SinksCase, AlibiCase>(21);
  check_pair<BiasCase, SinksCase>(22);
  check_pair<MaskCase, SinksCase>(23);
  check_pair<UserCase, SinksCase>(24);
}

TEST_CASE("the rest") {
  check_pair<AlibiCase, BiasCase>(31);
  check_pair<AlibiCase, MaskCase>(32);
  check_pair<AlibiCase, UserCase>(33);
  check_pair<BiasCase, MaskCase>(34);
  check_pair<BiasCase, UserCase>(35);
  check_pair<MaskCase, UserCase>(36);
}
