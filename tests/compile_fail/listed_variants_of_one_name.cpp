// expect: Variants: two of them have the same name
#include <chunkattn/runtime/make_attention.hpp>
#include <string_view>

struct Even {
  static constexpr std::string_view name = "Even";
  bool operator()(chunkattn::LogitIndex at) const { return at.kv_idx % 2 == 0; }
};
struct Odd {
#if defined(CHUNKATTN_CONTROL)
  static constexpr std::string_view name = "Odd";
#else
  static constexpr std::string_view name = "Even";
#endif
  bool operator()(chunkattn::LogitIndex at) const { return at.kv_idx % 2 == 1; }
};

template struct chunkattn::Variants<chunkattn::Mask<Even>, chunkattn::Mask<Odd>>;
