#include "ptx/allocations.hpp"

#include <atomic>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <mutex>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "ptx/fault.hpp"

namespace ptxrun {
namespace {

// The map's own nodes come from malloc: they are not noted.
template <class T>
struct Unwatched {
  using value_type = T;
  Unwatched() = default;
  template <class U>
  explicit Unwatched(const Unwatched<U>&) {}
  T* allocate(std::size_t n) { return static_cast<T*>(std::malloc(n * sizeof(T))); }
  void deallocate(T* pointer, std::size_t) { std::free(pointer); }
  bool operator==(const Unwatched&) const { return true; }
};
using Sizes = std::map<std::uintptr_t, std::size_t, std::less<>,
                       Unwatched<std::pair<const std::uintptr_t, std::size_t>>>;

std::atomic<bool> watching = false;
std::mutex mutex;
Sizes& sizes() {
  alignas(Sizes) static unsigned char memory[sizeof(Sizes)];  // never destroyed: others free later
  static Sizes* const made = new (memory) Sizes;
  return *made;
}
std::atomic<unsigned> changes = 0;  // of what is allocated

struct Range {
  std::uintptr_t begin = 0, end = 0;
  bool holds(std::uintptr_t address) const { return begin <= address && address < end; }
};

std::vector<Range> mappings;  // that were looked up during this launch

// The stack, static data, what others have mapped: a readable mapping in which operator new has
// nothing.
Range mapping(std::uintptr_t address) {
  for (const Range& range : mappings)
    if (range.holds(address)) return range;
  Range found;
  std::FILE* const file = std::fopen("/proc/self/maps", "r");
  char line[512], mode = 0;
  while (file != nullptr && std::fgets(line, sizeof line, file) != nullptr) {
    Range range;
    if (std::sscanf(line, "%lx-%lx %c", &range.begin, &range.end, &mode) != 3 ||
        !range.holds(address))
      continue;
    const std::lock_guard lock(mutex);
    const auto next = sizes().lower_bound(range.begin);
    if (mode == 'r' && (next == sizes().end() || next->first >= range.end)) found = range;
  }
  if (file != nullptr) std::fclose(file);
  if (found.end != 0) mappings.push_back(found);
  return found;
}

Range range_of(std::uintptr_t address) {
  {
    const std::lock_guard lock(mutex);
    auto next = sizes().upper_bound(address);
    if (next != sizes().begin()) {
      --next;
      const Range range{next->first, next->first + next->second};
      if (range.holds(address)) return range;
    }
  }
  return mapping(address);
}

void* noted(void* pointer, std::size_t bytes) noexcept {
  if (pointer != nullptr && watching.load(std::memory_order_relaxed)) {
    const std::lock_guard lock(mutex);
    sizes()[reinterpret_cast<std::uintptr_t>(pointer)] = bytes;
    ++changes;
  }
  return pointer;
}
void forget(void* pointer) noexcept {
  if (pointer != nullptr && watching.load(std::memory_order_relaxed)) {
    const std::lock_guard lock(mutex);
    sizes().erase(reinterpret_cast<std::uintptr_t>(pointer));
    ++changes;
  }
  std::free(pointer);
}
void* allocated(std::size_t bytes, std::size_t alignment) noexcept {
  void* pointer = nullptr;
  if (posix_memalign(&pointer, alignment < sizeof(void*) ? sizeof(void*) : alignment,
                     bytes > 0 ? bytes : 1) != 0)
    return nullptr;
  return noted(pointer, bytes);
}
void* allocated_or_throw(std::size_t bytes, std::size_t alignment) {
  void* const pointer = allocated(bytes, alignment);
  if (pointer == nullptr) throw std::bad_alloc();
  return pointer;
}

}  // namespace

void watch_allocations() {
  watching = true;
}

void begin_launch() {
  mappings.clear();
}

void check_global(std::uintptr_t address, std::size_t bytes, const char* what) {
  if (address % bytes != 0)
    throw Fault(std::string(what) + ": misaligned: " + std::to_string(bytes) + " bytes at " +
                std::to_string(address));
  static thread_local Range last;
  static thread_local unsigned last_changes = 0;
  if (last_changes != changes || !last.holds(address)) {
    last_changes = changes;
    last = range_of(address);
  }
  if (address + bytes > last.end)
    throw Fault(std::string(what) + ": " + std::to_string(bytes) + " bytes at " +
                std::to_string(address) +
                (last.end == 0 ? ": no memory" : ": beyond their memory's end"));
}

}  // namespace ptxrun

// NOLINTBEGIN: each form of operator new there is.
void* operator new(std::size_t n) {
  return ptxrun::allocated_or_throw(n, alignof(std::max_align_t));
}
void* operator new[](std::size_t n) {
  return ptxrun::allocated_or_throw(n, alignof(std::max_align_t));
}
void* operator new(std::size_t n, std::align_val_t a) {
  return ptxrun::allocated_or_throw(n, static_cast<std::size_t>(a));
}
void* operator new[](std::size_t n, std::align_val_t a) {
  return ptxrun::allocated_or_throw(n, static_cast<std::size_t>(a));
}
void* operator new(std::size_t n, const std::nothrow_t&) noexcept {
  return ptxrun::allocated(n, alignof(std::max_align_t));
}
void* operator new(std::size_t n, std::align_val_t a, const std::nothrow_t&) noexcept {
  return ptxrun::allocated(n, static_cast<std::size_t>(a));
}
void operator delete(void* p) noexcept {
  ptxrun::forget(p);
}
void operator delete[](void* p) noexcept {
  ptxrun::forget(p);
}
void operator delete(void* p, std::size_t) noexcept {
  ptxrun::forget(p);
}
void operator delete[](void* p, std::size_t) noexcept {
  ptxrun::forget(p);
}
void operator delete(void* p, std::align_val_t) noexcept {
  ptxrun::forget(p);
}
void operator delete[](void* p, std::align_val_t) noexcept {
  ptxrun::forget(p);
}
void operator delete(void* p, std::size_t, std::align_val_t) noexcept {
  ptxrun::forget(p);
}
void operator delete[](void* p, std::size_t, std::align_val_t) noexcept {
  ptxrun::forget(p);
}
// NOLINTEND
