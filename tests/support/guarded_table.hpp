// Memory that notices reads in front of it.
#pragma once

#include <cstddef>
#include <span>

#include "tests/support/pages.hpp"

namespace test {

/// Floats in front of which nothing may be read.
class GuardedTable {
 public:
  GuardedTable() { pages_.forbid(page); }

  [[nodiscard]] std::span<float> values() const {
    return {reinterpret_cast<float*>(static_cast<char*>(pages_.data()) + page),
            page / sizeof(float)};
  }

 private:
  const std::size_t page = Pages::unit();
  Pages pages_{2 * page, /*writable=*/true};
};

}  // namespace test
