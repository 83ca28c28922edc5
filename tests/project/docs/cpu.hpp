// What docs/cpu.md takes for granted: a tree, a plan's view of one token, and its latent K and
// queries.
#include <chunkattn/chunkattn.hpp>
#include <cmath>
#include <cstdio>
#include <vector>

using namespace chunkattn;

inline PrefixTree<int, 4> tree;
inline auto sequence = tree.insert(std::vector<int>{1});
inline auto step = tree.begin_step();
inline const bool added = bool(step.add(sequence));
inline AttentionPlan plan;
inline const auto view = plan.build(step);
inline std::vector<float> k(576, 0.5f), q(2 * 576, 0.5f), out(2 * 512);
