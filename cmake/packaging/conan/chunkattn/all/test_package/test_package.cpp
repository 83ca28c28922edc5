#include <chunkattn/chunkattn.hpp>
#include <cstdio>
#include <utility>
#include <vector>

int main() {
  chunkattn::PrefixTree<int, 4> tree;
  chunkattn::AttentionPlan plan;
  const std::vector<int> prompt{1, 2, 3, 4, 5, 6};
  auto first = tree.insert(prompt);
  auto step = tree.begin_step();
  if (!step.add(first) || !plan.build(step)) return 1;
  const auto done = std::move(step).finish();  // a step without kernels: as if they had run
  auto second = tree.insert(prompt, {.compute_last = false});
  std::printf("%zu of %zu tokens cached\n", second.num_cached(), second.size());
  return second.num_cached() == prompt.size() ? 0 : 1;
}
