// expect: AttentionVariant
#include <chunkattn/variants.hpp>

struct Misspelt {
  auto visable(chunkattn::lanes::At at) const { return at.kv_idx < 5; }
};

#ifdef CHUNKATTN_CONTROL
const auto both = chunkattn::combine(chunkattn::SoftCap{1.0f}, chunkattn::SlidingWindow{1});
#else
const auto both = chunkattn::combine(chunkattn::SoftCap{1.0f}, Misspelt{});
#endif
