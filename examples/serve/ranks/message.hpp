// Values as bytes, in the order in which they are put and taken.
#pragma once

#include <cstddef>
#include <cstring>
#include <span>
#include <stdexcept>
#include <type_traits>
#include <vector>

#include "communicator.hpp"

namespace serve {

/// A vector or a string, of values that are copied byte for byte.
template <class C>
concept MessageArray = std::is_trivially_copyable_v<typename C::value_type> &&
                       requires(C& values) { values.resize(values.size()); };

/// What one rank writes and others, of the same program on the same kind of machine, read.
class RankMessage {
 public:
  template <class T>
    requires std::is_trivially_copyable_v<T>
  void put(const T& value) {
    append(&value, sizeof value);
  }
  template <MessageArray C>
  void put(const C& values) {
    put(values.size());
    append(values.data(), values.size() * sizeof(typename C::value_type));
  }
  template <class T>
    requires std::is_trivially_copyable_v<T>
  void take(T& value) {
    std::memcpy(&value, next(sizeof value), sizeof value);
  }
  template <MessageArray C>
  void take(C& values) {
    std::size_t count = 0;
    take(count);
    const std::size_t bytes = count * sizeof(typename C::value_type);
    const std::byte* const from = next(bytes);
    values.resize(count);
    if (count > 0) std::memcpy(values.data(), from, bytes);
  }
  template <class T>
  [[nodiscard]] T take() {
    T value{};
    take(value);
    return value;
  }
  /// Whether everything was taken.
  [[nodiscard]] bool empty() const { return taken_ == bytes_.size(); }
  void append(const RankMessage& other) { append(other.bytes_.data(), other.bytes_.size()); }

  /// The message of all ranks becomes rank 0's.
  void broadcast(Communicator& ranks) {
    std::size_t size = bytes_.size();
    ranks.broadcast(std::as_writable_bytes(std::span(&size, 1)));
    bytes_.resize(size);
    ranks.broadcast(bytes_);
  }

 private:
  void append(const void* from, std::size_t count) {
    const auto* const bytes = static_cast<const std::byte*>(from);
    bytes_.insert(bytes_.end(), bytes, bytes + count);
  }
  const std::byte* next(std::size_t count) {
    if (count > bytes_.size() - taken_) throw std::logic_error("a message that ends too early");
    taken_ += count;
    return bytes_.data() + taken_ - count;
  }

  std::vector<std::byte> bytes_;
  std::size_t taken_ = 0;
};

}  // namespace serve
