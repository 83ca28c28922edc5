#include <chunkattn/chunkattn.hpp>
#include <cstdio>
#include <vector>

int main() {
  chunkattn::PrefixTree<int, 4> tree;
  const std::vector<int> prompt{1, 2, 3, 4, 5, 6};
  auto first = tree.insert(prompt);
  first.commit(first.next_uncomputed());
  auto second = tree.insert(prompt);
  std::printf("%zu of %zu tokens cached\n", second.num_cached(), second.size());
  return second.num_cached() == prompt.size() ? 0 : 1;
}
