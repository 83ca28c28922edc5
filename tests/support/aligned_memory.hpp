// Aligned memory of a test's own, for tests that replace operator new or guard what is behind.
#pragma once

#if defined(_WIN32)
#include <malloc.h>
#endif

#include <cstddef>
#include <cstdlib>

namespace test {

/// Zero or more bytes at a multiple of `alignment`, or nullptr.
inline void* aligned_memory(std::size_t alignment, std::size_t size) {
#if defined(_WIN32)
  return ::_aligned_malloc(size > 0 ? size : 1, alignment);
#else
  return std::aligned_alloc(alignment, (size + alignment - 1) / alignment * alignment);
#endif
}
inline void free_aligned(void* memory) noexcept {
#if defined(_WIN32)
  ::_aligned_free(memory);
#else
  std::free(memory);
#endif
}

}  // namespace test
