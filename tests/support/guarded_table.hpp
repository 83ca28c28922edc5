// Memory that notices reads in front of it.
#pragma once

#include <doctest/doctest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <span>

namespace test {

/// Floats in front of which nothing may be read.
class GuardedTable {
 public:
  GuardedTable() {
    void* const pages =
        mmap(nullptr, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    REQUIRE(pages != MAP_FAILED);
    pages_ = static_cast<char*>(pages);
    REQUIRE(mprotect(pages_, page, PROT_NONE) == 0);
  }
  ~GuardedTable() { munmap(pages_, 2 * page); }
  GuardedTable(const GuardedTable&) = delete;
  GuardedTable& operator=(const GuardedTable&) = delete;

  [[nodiscard]] std::span<float> values() const {
    return {reinterpret_cast<float*>(pages_ + page), page / sizeof(float)};
  }

 private:
  const std::size_t page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  char* pages_ = nullptr;
};

}  // namespace test
