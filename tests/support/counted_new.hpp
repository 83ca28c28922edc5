// Replaces the global operator new of a test program: counts allocations of each thread, and fails
// the one that is asked for. What is freed is overwritten, so that a later read shows.
// Include it in one translation unit only.
#pragma once

#include <malloc.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>

#include "tests/support/aligned_memory.hpp"

namespace test {

struct HeapCounters {
  std::uint64_t allocations = 0;
  std::int64_t outstanding = 0;
  std::int64_t fail_in = -1;  ///< fails the allocation after this many more; -1: none
  std::uint64_t failures = 0;
};
inline thread_local HeapCounters heap;

inline void* counted_new(std::size_t size, std::size_t alignment = 0) {
  ++heap.allocations;
  if (heap.fail_in >= 0 && heap.fail_in-- == 0) {
    ++heap.failures;
    throw std::bad_alloc();
  }
  void* memory =
      alignment == 0 ? std::malloc(size > 0 ? size : 1) : aligned_memory(alignment, size);
  if (memory == nullptr) throw std::bad_alloc();
  ++heap.outstanding;
  return memory;
}
inline void counted_delete(void* memory, std::size_t alignment = 0) noexcept {
  if (memory == nullptr) return;
  --heap.outstanding;
  constexpr std::size_t most = 4096;  // the start of large memory will do
#if defined(_WIN32)
  const std::size_t size = alignment == 0 ? ::_msize(memory) : 0;  // that is all it tells
#else
  const std::size_t size = malloc_usable_size(memory);
#endif
  std::memset(memory, 0xdd, size < most ? size : most);
  if (alignment == 0)
    std::free(memory);
  else
    free_aligned(memory);
}

}  // namespace test

void* operator new(std::size_t size) {
  return test::counted_new(size);
}
void* operator new[](std::size_t size) {
  return test::counted_new(size);
}
// The standard library's own forward to the above, those of a sanitizer do not.
void* operator new(std::size_t size, const std::nothrow_t&) noexcept {
  try {
    return test::counted_new(size);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}
void* operator new[](std::size_t size, const std::nothrow_t& nothrow) noexcept {
  return operator new(size, nothrow);
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
void* operator new(std::size_t size, std::align_val_t alignment) {
  return test::counted_new(size, static_cast<std::size_t>(alignment));
}
void operator delete(void* memory, std::align_val_t alignment) noexcept {
  test::counted_delete(memory, static_cast<std::size_t>(alignment));
}
void operator delete(void* memory, std::size_t, std::align_val_t alignment) noexcept {
  test::counted_delete(memory, static_cast<std::size_t>(alignment));
}
