// Pages of memory from the operating system: zeros that take no memory until they are read, and a
// page that may not be touched.
#pragma once

#include <doctest/doctest.h>

#include <cstddef>

#if !defined(_WIN32)
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace test {

#if defined(_WIN32)
// What <windows.h> declares, without its macros.
namespace windows {
void* reserve(void* at, std::size_t size, unsigned long type,
              unsigned long protection) __asm__("VirtualAlloc");
int protect(void* at, std::size_t size, unsigned long protection,
            unsigned long* before) __asm__("VirtualProtect");
int release(void* at, std::size_t size, unsigned long type) __asm__("VirtualFree");
}  // namespace windows
#endif

/// Zeros, which may be written if `writable`.
class Pages {
 public:
  Pages(std::size_t size, bool writable) : size_(size) {
#if defined(_WIN32)
    at_ = windows::reserve(nullptr, size, 0x3000, writable ? 0x04 : 0x02);
    REQUIRE(at_ != nullptr);
#else
    at_ = ::mmap(nullptr, size, writable ? PROT_READ | PROT_WRITE : PROT_READ,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    REQUIRE(at_ != MAP_FAILED);
#endif
  }
  ~Pages() {
#if defined(_WIN32)
    windows::release(at_, 0, 0x8000);
#else
    ::munmap(at_, size_);
#endif
  }
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;

  [[nodiscard]] void* data() const { return at_; }
  [[nodiscard]] std::size_t size() const { return size_; }
  /// The first `size` bytes may not be touched.
  void forbid(std::size_t size) {
#if defined(_WIN32)
    unsigned long before = 0;
    REQUIRE(windows::protect(at_, size, 0x01, &before) != 0);
#else
    REQUIRE(::mprotect(at_, size, PROT_NONE) == 0);
#endif
  }
  /// Of one page.
  [[nodiscard]] static std::size_t unit() {
#if defined(_WIN32)
    return 4096;
#else
    return static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
#endif
  }

 private:
  std::size_t size_;
  void* at_ = nullptr;
};

}  // namespace test
