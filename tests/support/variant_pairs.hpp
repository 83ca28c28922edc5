// Every pair of variants, for each backend's test.
#pragma once

#include "variant_cases.hpp"

namespace test {

/// Calls check.operator()<A, B>(stream) for each pair of cases, in an order that a model could
/// have.
template <class Check>
void for_each_variant_pair(const Check& check) {
  check.template operator()<SoftCapCase, WindowCase>(1);
  check.template operator()<SoftCapCase, SinksCase>(2);
  check.template operator()<AlibiCase, SoftCapCase>(3);
  check.template operator()<SoftCapCase, BiasCase>(4);
  check.template operator()<SoftCapCase, MaskCase>(5);
  check.template operator()<SoftCapCase, UserCase>(6);

  check.template operator()<WindowCase, SinksCase>(11);
  check.template operator()<WindowCase, AlibiCase>(12);
  check.template operator()<WindowCase, BiasCase>(13);
  check.template operator()<WindowCase, MaskCase>(14);
  check.template operator()<WindowCase, UserCase>(15);
  check.template operator()<WindowCase, WindowCase>(16);

  check.template operator()<SinksCase, AlibiCase>(21);
  check.template operator()<BiasCase, SinksCase>(22);
  check.template operator()<MaskCase, SinksCase>(23);
  check.template operator()<UserCase, SinksCase>(24);

  check.template operator()<AlibiCase, BiasCase>(31);
  check.template operator()<AlibiCase, MaskCase>(32);
  check.template operator()<AlibiCase, UserCase>(33);
  check.template operator()<BiasCase, MaskCase>(34);
  check.template operator()<BiasCase, UserCase>(35);
  check.template operator()<MaskCase, UserCase>(36);
}

}  // namespace test
