// Runs one attention step and checks it: built with -fno-exceptions, -ffast-math, libc++ and so on.
#include <cstdio>

#include "attend.hpp"

int main() {
  hygiene::Tree tree;
  hygiene::Cache cache(tree, {1, hygiene::num_kv_heads, hygiene::head_dim});
  std::vector<hygiene::Tree::Sequence> sequences;
  hygiene::Attend<void> attend;
  attend.run(tree, cache, sequences);
  const double error = attend.error(sequences);
  std::printf("largest error %.3g\n", error);
  return error < 1e-5 ? 0 : 1;
}
