// Replaces the global operator new of a test program: counts allocations, and fails the one that is
// asked for. Include it in one translation unit only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>

namespace test {

struct HeapCounters {
  std::uint64_t allocations = 0;
  std::int64_t outstanding = 0;
  std::int64_t fail_in = -1;  ///< fails the allocation after this many more; -1: none
  std::uint64_t failures = 0;
};
inline HeapCounters heap;

inline void* counted_new(std::size_t size) {
  ++heap.allocations;
  if (heap.fail_in >= 0 && heap.fail_in-- == 0) {
    ++heap.failures;
    throw std::bad_alloc();
  }
  void* memory = std::malloc(size > 0 ? size : 1);
  if (memory == nullptr) throw std::bad_alloc();
  ++heap.outstanding;
  return memory;
}
inline void counted_delete(void* memory) noexcept {
  if (memory == nullptr) return;
  --heap.outstanding;
  std::free(memory);
}

}  // namespace test

void* operator new(std::size_t size) {
  return test::counted_new(size);
}
void* operator new[](std::size_t size) {
  return test::counted_new(size);
}
void operator delete(void* memory) noexcept {
  test::counted_delete(memory);
}
void operator delete[](void* memory) noexcept {
  test::counted_delete(memory);
}
void operator delete(void* memory, std::size_t) noexcept {
  test::counted_delete(memory);
}
void operator delete[](void* memory, std::size_t) noexcept {
  test::counted_delete(memory);
}
