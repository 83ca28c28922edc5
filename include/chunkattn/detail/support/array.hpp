// A growable array of plain records, in place of std::vector, which takes compilers much longer for
// each element type, in every source file that includes this library. to_size() for its indices.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <new>
#include <utility>

#include "config.hpp"

CHUNKATTN_NAMESPACE_BEGIN

namespace detail {

/// A signed number that is known not to be negative, as a size or an index.
[[nodiscard]] CHUNKATTN_HD constexpr std::size_t to_size(std::int64_t n) noexcept {
  return static_cast<std::size_t>(n);
}

inline void release_array(void* memory, std::size_t alignment) noexcept {
  if (alignment > __STDCPP_DEFAULT_NEW_ALIGNMENT__)
    ::operator delete(memory, std::align_val_t{alignment});
  else
    ::operator delete(memory);
}

/// Throws what operator new throws for more bytes than there can be.
[[noreturn]] CHUNKATTN_COLD inline void fail_allocation() {
#if CHUNKATTN_EXCEPTIONS
  throw std::bad_alloc();
#else
  std::abort();
#endif
}

/// Memory of `bytes`, with the first `used` of `old`, which is released. Throws std::bad_alloc, and
/// then `old` is as it was.
[[nodiscard]] inline void* regrown_array(void* old, std::size_t used, std::size_t bytes,
                                         std::size_t alignment) {
  void* const memory = alignment > __STDCPP_DEFAULT_NEW_ALIGNMENT__
                           ? ::operator new(bytes, std::align_val_t{alignment})
                           : ::operator new(bytes);
  if (used > 0) std::memcpy(memory, old, used);
  release_array(old, alignment);
  return memory;
}

}  // namespace detail

/// std::vector<T> for trivially copyable T, with the same names and guarantees.
template <class T>
class Array {
  static_assert(__is_trivially_copyable(T), "Array<T> is for plain records; take std::vector<T>");

 public:
  using value_type = T;
  using iterator = T*;
  using const_iterator = const T*;

  Array() = default;
  explicit Array(std::size_t size) { resize(size); }
  Array(std::initializer_list<T> values) { assign(values.begin(), values.end()); }
  Array(const Array& other) { assign(other.begin(), other.end()); }
  Array(Array&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)),
        size_(std::exchange(other.size_, 0)),
        capacity_(std::exchange(other.capacity_, 0)) {}
  Array& operator=(const Array& other) {
    if (this != &other) assign(other.begin(), other.end());
    return *this;
  }
  Array& operator=(Array&& other) noexcept {
    Array(std::move(other)).swap(*this);  // `other` is left empty, what was here is released
    return *this;
  }
  ~Array() { detail::release_array(data_, alignof(T)); }
  void swap(Array& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    std::swap(capacity_, other.capacity_);
  }

  [[nodiscard]] std::size_t size() const noexcept { return size_; }
  [[nodiscard]] std::size_t capacity() const noexcept { return capacity_; }
  [[nodiscard]] bool empty() const noexcept { return size_ == 0; }
  [[nodiscard]] T* data() noexcept { return data_; }
  [[nodiscard]] const T* data() const noexcept { return data_; }
  [[nodiscard]] T* begin() noexcept { return data_; }
  [[nodiscard]] const T* begin() const noexcept { return data_; }
  [[nodiscard]] T* end() noexcept { return data_ + size_; }
  [[nodiscard]] const T* end() const noexcept { return data_ + size_; }
  [[nodiscard]] T& operator[](std::size_t i) noexcept {
    check(i < size_);
    return data_[i];
  }
  [[nodiscard]] const T& operator[](std::size_t i) const noexcept {
    check(i < size_);
    return data_[i];
  }
  [[nodiscard]] T& front() noexcept { return (*this)[0]; }
  [[nodiscard]] const T& front() const noexcept { return (*this)[0]; }
  [[nodiscard]] T& back() noexcept { return (*this)[size_ - 1]; }
  [[nodiscard]] const T& back() const noexcept { return (*this)[size_ - 1]; }

  void reserve(std::size_t capacity) {
    if (capacity > capacity_) grow(capacity);
  }
  /// Makes room for `count` more elements, so that appending them cannot fail.
  void reserve_more(std::size_t count) {
    if (capacity_ - size_ < count) [[unlikely]]
      grow((std::max)(size_ + count, 2 * size_));
  }
  /// New elements are T{}, or `value`.
  void resize(std::size_t size, const T& value = T{}) {
    if (size > size_) {
      const T copy = value;  // it may lie in this array
      if (size > capacity_) grow((std::max)(size, 2 * size_));
      while (size_ < size) data_[size_++] = copy;
    }
    size_ = size;
  }
  void clear() noexcept { size_ = 0; }
  /// Appends `count` elements that the caller has written after the last one, within capacity().
  void take(std::size_t count) noexcept {
    check(count <= capacity_ - size_);
    size_ += count;
  }
  CHUNKATTN_INLINE void push_back(const T& value) {
    if (size_ == capacity_) [[unlikely]] {
      const T copy = value;
      grow((std::max)(std::size_t{1}, 2 * size_));
      data_[size_++] = copy;
      return;
    }
    data_[size_++] = value;
  }
  void pop_back() noexcept {
    check(size_ > 0);
    --size_;
  }
  void insert(const T* before, const T& value) {
    const T copy = value;
    const auto at = static_cast<std::size_t>(before - data_);
    push_back(copy);
    for (std::size_t i = size_ - 1; i > at; --i) data_[i] = data_[i - 1];
    data_[at] = copy;
  }
  void assign(std::size_t size, const T& value) {
    clear();
    resize(size, value);
  }
  /// Replaces the elements by copies of others.
  void assign(const T* first, const T* last) {
    clear();
    const auto size = static_cast<std::size_t>(last - first);
    reserve(size);
    if (size > 0) std::memcpy(static_cast<void*>(data_), first, size * sizeof(T));
    size_ = size;
  }
  /// Drops the elements of which this is true; the others keep their order.
  template <class Predicate>
  void erase_if(const Predicate& predicate) {
    std::size_t kept = 0;
    for (std::size_t i = 0; i < size_; ++i)
      if (!predicate(std::as_const(data_[i]))) data_[kept++] = data_[i];
    size_ = kept;
  }

  friend bool operator==(const Array& a, const Array& b) {
    return std::equal(a.begin(), a.end(), b.begin(), b.end());
  }

 private:
  // Where the standard library's containers are checked, this one is.
  static void check([[maybe_unused]] bool ok) noexcept {
#if defined(_GLIBCXX_ASSERTIONS) || defined(_LIBCPP_HARDENING_MODE)
    if (!ok) __builtin_trap();
#endif
  }

  __attribute__((noinline)) void grow(std::size_t capacity) {
    constexpr auto most = static_cast<std::size_t>((std::numeric_limits<std::ptrdiff_t>::max)());
    if (capacity > most / sizeof(T)) [[unlikely]]
      detail::fail_allocation();
    data_ = static_cast<T*>(
        detail::regrown_array(data_, size_ * sizeof(T), capacity * sizeof(T), alignof(T)));
    capacity_ = capacity;
  }

  T* data_ = nullptr;
  std::size_t size_ = 0;
  std::size_t capacity_ = 0;
};

CHUNKATTN_NAMESPACE_END
