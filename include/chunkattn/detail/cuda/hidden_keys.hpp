// Which keys a variant hides from rows for certain, without the variant's type: what schedules are
// made for and kept by.
#pragma once

#include <array>
#include <cstddef>
#include <cstring>
#include <new>
#include <type_traits>

#include "../../variants.hpp"

CHUNKATTN_NAMESPACE_BEGIN
namespace detail::cuda {

struct SkipsNothing {};

/// The part of a variant that hidden() needs: layers that differ in their sinks or slopes only have
/// it in common.
template <class V>
[[nodiscard]] auto skipping_part(const V& variant) {
  if constexpr (SkipsKeys<V>)
    return variant;
  else
    return SkipsNothing{};
}
template <class A, class B>
[[nodiscard]] auto skipping_part(const Both<A, B>& variant) {
  if constexpr (SkipsKeys<A> && SkipsKeys<B>)
    return combine(skipping_part(variant.a), skipping_part(variant.b));
  else if constexpr (SkipsKeys<A>)
    return skipping_part(variant.a);
  else
    return skipping_part(variant.b);
}

/// hidden() of some variant, with its members' values. Two are equal if these are.
class HiddenKeys {
 public:
  /// Nothing is hidden.
  HiddenKeys() = default;
  template <class V>
  explicit HiddenKeys(const V& variant) {
    const auto part = skipping_part(variant);
    using Part = std::remove_const_t<decltype(part)>;
    if constexpr (SkipsKeys<Part>) {
      static_assert(std::is_trivially_copyable_v<Part> && sizeof(Part) <= sizeof(members_),
                    "a struct with hidden() should hold a few numbers: combine() it with others");
      // Bytes that are no member's differ between equal structs: each call would plan anew.
      static_assert(std::is_empty_v<Part> || std::has_unique_object_representations_v<Part>,
                    "a struct with hidden() should hold integers without gaps between them: fill "
                    "the gaps, and combine() it with a struct that holds the rest");
      if constexpr (!std::is_empty_v<Part>) std::memcpy(members_.data(), &part, sizeof(Part));
      range_ = [](const std::byte* members, int query) {
        alignas(Part) std::byte copy[sizeof(Part)];
        std::memcpy(copy, members, sizeof(Part));
        return KeyRange(std::launder(reinterpret_cast<const Part*>(copy))->hidden(query));
      };
    }
  }

  [[nodiscard]] bool none() const noexcept { return range_ == nullptr; }
  /// The keys that are hidden from a row that sees `kv_len` positions at most.
  [[nodiscard]] KeyRange operator()(int kv_len) const {
    if (range_ == nullptr) return {};
    if (kv_len <= 0) return {0, 0x7fffffff};  // sees nothing
    const KeyRange range = range_(members_.data(), kv_len - 1);
    return range.size() > 0 ? range : KeyRange{};
  }
  friend bool operator==(const HiddenKeys& a, const HiddenKeys& b) noexcept {
    return a.range_ == b.range_ && a.members_ == b.members_;
  }

 private:
  KeyRange (*range_)(const std::byte* members, int query) = nullptr;
  std::array<std::byte, 64> members_{};
};

}  // namespace detail::cuda
CHUNKATTN_NAMESPACE_END
