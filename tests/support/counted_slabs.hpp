// Replaces the aligned operator new of a test program: counts large allocations, which are slabs of
// K/V. Include it in one translation unit only.
#pragma once

#include <cstddef>
#include <new>

#include "tests/support/aligned_memory.hpp"

namespace test {

inline int num_slabs = 0;  // so far

}  // namespace test

[[gnu::noinline]] void* operator new(std::size_t size, std::align_val_t alignment) {
  const auto boundary = static_cast<std::size_t>(alignment);
  test::num_slabs += size >= std::size_t{4} << 20 ? 1 : 0;
  void* const memory = test::aligned_memory(boundary, size);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
[[gnu::noinline]] void operator delete(void* memory, std::align_val_t) noexcept {
  test::free_aligned(memory);
}
[[gnu::noinline]] void operator delete(void* memory, std::size_t, std::align_val_t) noexcept {
  test::free_aligned(memory);
}
