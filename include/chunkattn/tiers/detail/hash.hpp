// Names and sums of what lies in tiers: 128 bits over bytes. They find records and damage; what a
// record holds is decided by comparing its tokens.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include "../../detail/support/config.hpp"
#include "../tier_store.hpp"

CHUNKATTN_NAMESPACE_BEGIN
namespace detail {

/// A hash that can be extended: two lanes, each a bijection of itself for every word, so
/// that one changed word changes the result.
class TierHash {
 public:
  void add(std::span<const std::byte> bytes) noexcept {
    std::size_t at = 0;
    for (; at + sizeof(std::uint64_t) <= bytes.size(); at += sizeof(std::uint64_t)) {
      std::uint64_t word = 0;
      std::memcpy(&word, bytes.data() + at, sizeof(word));
      add(word);
    }
    std::uint64_t rest = 0;
    if (at < bytes.size()) std::memcpy(&rest, bytes.data() + at, bytes.size() - at);
    add(rest ^ (std::uint64_t{bytes.size()} << 56));
    length_ += bytes.size();
  }
  [[nodiscard]] TierStore::Key key() const noexcept {
    return {mixed(a_ ^ length_, b_), mixed(b_ + length_, a_)};
  }
  /// Of these bytes alone.
  [[nodiscard]] static TierStore::Key of(std::span<const std::byte> bytes) noexcept {
    TierHash hash;
    hash.add(bytes);
    return hash.key();
  }

 private:
  static constexpr std::uint64_t k1 = 0x9e3779b97f4a7c15u, k2 = 0xc2b2ae3d27d4eb4fu,
                                 k3 = 0x165667b19e3779f9u, k4 = 0xd6e8feb86659fd93u;

  void add(std::uint64_t word) noexcept {
    a_ = std::rotl(a_ ^ (word * k1), 31) * k2;
    b_ = std::rotl(b_ + (word ^ k3) * k4, 27) * k1;
  }
  [[nodiscard]] static std::uint64_t mixed(std::uint64_t x, std::uint64_t y) noexcept {
    x += std::rotl(y, 32) * k3;
    x = (x ^ (x >> 32)) * k4;
    x = (x ^ (x >> 29)) * k2;
    return x ^ (x >> 32);
  }

  std::uint64_t a_ = k3, b_ = k4, length_ = 0;
};

struct TierKeyHash {
  std::size_t operator()(const TierStore::Key& key) const noexcept {
    return key.high ^ (key.low >> 7);
  }
};

}  // namespace detail
CHUNKATTN_NAMESPACE_END
