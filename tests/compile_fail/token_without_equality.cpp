// Only comparison decides whether two prompts share a token; a hash does not.
// expect: TokenType
#include <chunkattn/prefix_tree.hpp>

struct Opaque {
  int value = 0;
#ifdef CHUNKATTN_CONTROL
  friend bool operator==(const Opaque&, const Opaque&) = default;
#endif
};
template <>
struct std::hash<Opaque> {
  std::size_t operator()(const Opaque& t) const noexcept { return std::hash<int>{}(t.value); }
};
chunkattn::PrefixTree<Opaque, 64> tree;
