// The message of a call that is refused.
#pragma once

#include <string>

#include "chunkattn/error.hpp"

namespace test {

/// what() of the InvalidArgument that f throws.
template <class F>
std::string refused(const F& f) {
  try {
    f();
  } catch (const chunkattn::InvalidArgument& error) {
    return error.what();
  }
  return "no error";
}

}  // namespace test
