// The run-time switches of planted faults, included before everything else in instrumented
// programs.
//
// CHUNKATTN_MUTANT=N turns fault N on. CHUNKATTN_MUTANT_REACHED=FILE leaves all off and writes to
// FILE the numbers of those that were asked for. The operators are distinguished by types, so that
// no operand has to be found in the text: in `a < Less<7>{} < b` precedence does it.
#pragma once

#include <concepts>
#include <cstdio>
#include <cstdlib>
#include <type_traits>

namespace mutant {

inline constexpr int capacity = 1 << 15;

class Switches {
 public:
  enum State : unsigned char { off, on, recorded };

  Switches() noexcept {
    const char* const chosen = std::getenv("CHUNKATTN_MUTANT");
    record_ = std::getenv("CHUNKATTN_MUTANT_REACHED");
    if (record_ != nullptr)
      for (unsigned char& s : state) s = recorded;
    else if (chosen != nullptr)
      state[std::atoi(chosen) % capacity] = on;
  }
  ~Switches() {
    std::FILE* const file = record_ != nullptr ? std::fopen(record_, "w") : nullptr;
    if (file == nullptr) return;
    for (int id = 0; id < capacity; ++id)
      if (state[id] == off) std::fprintf(file, "%d\n", id);
    std::fclose(file);
  }

  /// What fault `id` is asked for when it is not simply off. Any thread may ask.
  [[gnu::noinline, gnu::cold]] bool ask(int id) noexcept {
    if (state[id] == on) return true;
    state[id] = off;
    return false;
  }

  unsigned char state[capacity] = {};

 private:
  const char* record_ = nullptr;
};
inline Switches switches;

template <int id>
[[gnu::always_inline]] constexpr bool on() noexcept {
  if (std::is_constant_evaluated()) return false;
  return switches.state[id] != Switches::off && switches.ask(id);
}

template <int id>
[[gnu::always_inline]] constexpr int off(int by) noexcept {
  return on<id>() ? by : 0;
}

template <class T>
concept Number = (std::is_arithmetic_v<T> && !std::same_as<T, bool>) || std::is_pointer_v<T>;

template <int id, Number T>
[[gnu::always_inline]] constexpr T shift(T value, int by) noexcept {
  return on<id>() ? static_cast<T>(value + by) : value;
}

/// `other` in the place of an argument of type T: itself where the types allow, else converted.
template <int id, class T, class Other>
[[gnu::always_inline]] constexpr decltype(auto) as(Other&& other) noexcept {
  using Value = std::remove_cvref_t<T>;
  if constexpr (std::is_lvalue_reference_v<T> && std::is_lvalue_reference_v<Other> &&
                std::same_as<Value, std::remove_cvref_t<Other>>) {
    return static_cast<Other&&>(other);
  } else {
    static_assert(std::convertible_to<Other, Value>, "mutant: these arguments cannot be swapped");
    return static_cast<Value>(static_cast<Other&&>(other));
  }
}

#define CHUNKATTN_MUTANT_COMPARISON(Name, usual, fault)                                        \
  template <int id>                                                                            \
  struct Name {};                                                                              \
  template <int id, class A>                                                                   \
  struct Name##Of {                                                                            \
    const A& left;                                                                             \
  };                                                                                           \
  template <class A, int id>                                                                   \
  [[gnu::always_inline]] constexpr Name##Of<id, A> operator usual(const A & a, Name<id>) {     \
    return {a};                                                                                \
  }                                                                                            \
  template <int id, class A, class B>                                                          \
  [[gnu::always_inline]] constexpr auto operator usual(const Name##Of<id, A>& a, const B& b) { \
    return on<id>() ? a.left fault b : a.left usual b;                                         \
  }
CHUNKATTN_MUTANT_COMPARISON(Less, <, <=)
CHUNKATTN_MUTANT_COMPARISON(LessEqual, <=, <)
CHUNKATTN_MUTANT_COMPARISON(Greater, >, >=)
CHUNKATTN_MUTANT_COMPARISON(GreaterEqual, >=, >)
CHUNKATTN_MUTANT_COMPARISON(Equal, ==, !=)
CHUNKATTN_MUTANT_COMPARISON(NotEqual, !=, ==)
#undef CHUNKATTN_MUTANT_COMPARISON

}  // namespace mutant
