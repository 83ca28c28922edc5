// Your K/V memory: a tree says where K and V lie, kernels of yours write them there and read them
// through a block table. ChunkAttention reads the same memory.
#include <algorithm>
#include <chunkattn/all.hpp>
#include <cmath>
#include <cstdio>
#include <numeric>
#include <vector>

using namespace chunkattn;
constexpr int num_pages = 8, page_size = 16, head_dim = 32;
using Tree = PrefixTree<int, page_size, FixedAllocator>;  // never a page beyond your memory

int main() {
  Tree tree(FixedAllocator(num_pages),
            {.sharing = TreeOptions::Sharing::chunk});  // whole pages are shared
  std::vector<float> k_memory(num_pages * page_size * head_dim), v_memory(k_memory);
  const auto layer =
      make_kv_view(k_memory.data(), v_memory.data(), {num_pages, 1, page_size, head_dim});

  Tree::Sequence chats[]{tree.insert(std::vector(40, 7)), tree.insert(std::vector(38, 7))};
  auto step = tree.begin_step();
  BlockTable table;
  for (auto& chat : chats) table.add(chat, step.add(chat).row());
  AttentionPlan plan;
  const auto view = plan.build(step);

  std::vector<float> x, out(std::size_t(view.num_rows * head_dim));  // q, k and v: your model's
  while (x.size() < out.size()) x.push_back(2 * std::sin(float(x.size() * x.size())));

  // Your kernel that writes. A slot is page * page_size + offset; forks would ask for view.copies.
  const auto chunks = BlockTable::slot_mapping(view);
  for (std::size_t row = 0; row < chunks.size(); ++row)
    if (chunks[row] >= 0)  // else its K and V are there already
      for (auto* memory : {&k_memory, &v_memory})
        std::copy_n(&x[row * head_dim], head_dim, &(*memory)[chunks[row] * head_dim]);
  ChunkAttention<Cpu, head_dim>(1).run(layer, view, x, out);

  // Your kernel that reads: a row sees the positions up to its own, through the pages of its chat.
  double worst = 0;
  for (int chat = 0, row = 0; chat < 2; ++chat) {
    const int* const pages = &table.indices()[table.indptr()[chat]];
    std::printf("pages %d %d %d\n", pages[0], pages[1], pages[2]);
    for (; row < table.qo_indptr()[chat + 1]; ++row) {
      const float* const q = &x[row * head_dim];
      double sum = 0, mean[head_dim] = {};
      for (int p = 0; p <= view.positions()[row]; ++p) {
        const int at = (pages[p / page_size] * page_size + p % page_size) * head_dim;
        const double dot = std::inner_product(q, q + head_dim, &k_memory[at], 0.0);
        const double weight = std::exp(dot / std::sqrt(head_dim));
        sum += weight;
        for (int i = 0; i < head_dim; ++i) mean[i] += weight * v_memory[at + i];
      }
      for (int i = 0; i < head_dim; ++i)
        worst = std::max(worst, std::abs(mean[i] / sum - out[row * head_dim + i]));
    }
  }
  std::printf("%d rows, off by less than 1e-5: %s\n", view.num_rows, worst < 1e-5 ? "yes" : "NO");
  return worst < 1e-5 ? 0 : 1;
}
