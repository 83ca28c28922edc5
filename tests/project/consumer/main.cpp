// The smallest program that uses the library: every way to install it must build and run this.
#include <chunkattn/chunkattn.hpp>
#include <cstdio>
#include <vector>

int main() {
  chunkattn::PrefixTree<int, 4> tree;
  const std::vector<int> prompt{1, 2, 3, 4, 5, 6};
  auto first = tree.insert(prompt);
  first.mark_loaded(first.loadable());
  auto second = tree.insert(prompt);
  std::printf("%zu of %zu tokens cached\n", second.num_cached(), second.size());
  return second.num_cached() == prompt.size() - 1 ? 0 : 1;  // the last is left to compute
}
