// expect: Variants: a variant is found by its name at run time; give the type a member
#include <chunkattn/runtime/make_attention.hpp>
#include <string_view>

struct Nearby {
#if defined(CHUNKATTN_CONTROL)
  static constexpr std::string_view name = "Nearby";
#endif
  int near;
  auto visible(chunkattn::lanes::At at) const { return at.q_idx - at.kv_idx < near; }
};

template struct chunkattn::Variants<chunkattn::NoVariant, Nearby>;
