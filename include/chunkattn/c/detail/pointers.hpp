// Checks of pointers that callers of the C interface give.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../../detail/support/check.hpp"
#include "../../detail/support/config.hpp"

CHUNKATTN_NAMESPACE_BEGIN
namespace detail::c {

/// Memory of an argument, which is not null and begins at a multiple of `alignment`.
inline void check_memory(const void* memory, const char* name, std::size_t alignment,
                         const char* of) {
  if (memory == nullptr) [[unlikely]]
    fail_argument(name, "null", of);
  if (reinterpret_cast<std::uintptr_t>(memory) % alignment != 0) [[unlikely]]
    fail_argument(name, "misaligned", {"an address that is a multiple of ", alignment});
}
template <class T>
T& checked_pointer(T* pointer, const char* name) {
  check_memory(pointer, name, alignof(T), "not null");
  return *pointer;
}

}  // namespace detail::c
CHUNKATTN_NAMESPACE_END
