// expect: AnyVariant: a variant must be trivially copyable and have at most 128 bytes; let it point
// to
#include <chunkattn/runtime/any_attention.hpp>
#include <string_view>

struct Slopes {
  static constexpr std::string_view name = "Slopes";
#if defined(CHUNKATTN_CONTROL)
  float of_head[32];
#else
  float of_head[33];
#endif
  auto logit(auto s, chunkattn::lanes::At at) const {
    return s + chunkattn::lanes::table(of_head, at.head);
  }
};

chunkattn::AnyVariant variant(const Slopes& slopes) {
  return slopes;
}
