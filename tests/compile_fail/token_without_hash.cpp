// Children are found through std::hash of their first token.
// expect: TokenType
#include <chunkattn/prefix_tree.hpp>

struct ImageToken {
  int token = 0, image = 0;
  friend bool operator==(const ImageToken&, const ImageToken&) = default;
};

#ifdef CHUNKATTN_CONTROL
template <>
struct std::hash<ImageToken> {
  std::size_t operator()(const ImageToken& t) const noexcept {
    return std::hash<int>{}(t.token) ^ (std::hash<int>{}(t.image) << 1);
  }
};
#endif
chunkattn::PrefixTree<ImageToken, 64> tree;
