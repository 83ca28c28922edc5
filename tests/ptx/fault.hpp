// What a device would not forgive, or what the machine does not know.
#pragma once

#include <stdexcept>

namespace ptxrun {

struct Fault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

}  // namespace ptxrun
