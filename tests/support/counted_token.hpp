// A token that counts how often any is compared or hashed.
#pragma once

#include <cstddef>
#include <functional>

namespace test {

struct CountedToken {
  int value = 0;
  static inline int looks = 0;
  friend bool operator==(const CountedToken& a, const CountedToken& b) noexcept {
    ++looks;
    return a.value == b.value;
  }
};

}  // namespace test

template <>
struct std::hash<test::CountedToken> {
  std::size_t operator()(const test::CountedToken& token) const noexcept {
    ++test::CountedToken::looks;
    return static_cast<std::size_t>(token.value);
  }
};
