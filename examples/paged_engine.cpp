// A paged engine's own page tables and K/V memory, without a tree: the pages that sequences have in
// common are found, and read once for all of them.
#include <chunkattn/all.hpp>
#include <cmath>
#include <cstdio>
#include <vector>

using namespace chunkattn;
constexpr int page_size = 16, num_pages = 64, stride = 20, num_heads = 4, dim = 32;

int main() {
  // The engine's memory, [page][token][dim] of one KV head. Page 0 stands for pages that were
  // freed.
  std::vector<float> k_pages(num_pages * page_size * dim), v_pages(k_pages);
  for (std::size_t i = 0; i < k_pages.size(); ++i) v_pages[i] = k_pages[i] = std::sin(float(i * i));
  const auto layer = make_kv_view(k_pages.data(), v_pages.data(), {num_pages, 1, page_size, dim});

  // What vLLM knows of a batch: four chats behind a system prompt, the last two with a document.
  std::vector<int> table(4 * stride), seq_lens{200, 190, 290, 300}, query_start_loc{0, 1, 2, 3, 23};
  for (int chat = 0, next = 17; chat < 4; ++chat)
    for (int p = 0; p < stride; ++p)  // pages 1 to 10 are the prompt, 11 to 16 the document
      table[chat * stride + p] = p < 10 || (p < 16 && chat >= 2) ? p + 1 : next++ % num_pages;

  ChunkAttention<Cpu, dim> attention(2);
  PagedPlan plan({.page_size = page_size, .num_pages = num_pages, .null_page = 0});
  double worst = 0;
  for (int step = 0; step < 3; ++step) {
    const auto view = plan.build(PageTables{table, stride, seq_lens, query_start_loc});
    std::vector<float> k(view.num_rows * dim), q(k.size() * num_heads), out(q.size());
    for (std::size_t i = 0; i < q.size(); ++i) q[i] = k[i / num_heads] = std::cos(float(i * i));
    attention.write(layer, view, k, k);  // in each layer: into the engine's pages, then
    attention.run(layer, view, q, out);  // all rows over their contexts

    int reads = 0, alone = 0;
    for (int s = 0; s < view.num_segments; ++s) {
      reads += view.segments[s].num_pieces;
      alone += view.segments[s].num_pieces * view.segments[s].num_sequences;
    }
    std::printf("%2d rows read %d pages, not %d; built anew: %d\n", view.num_rows, reads, alone,
                int(plan.num_rebuilds()));
    for (int chat = 0; chat < 4; ++chat) {  // the same by softmax, for each head of the last rows
      const int row = query_start_loc[chat + 1] - 1;
      for (std::size_t line = row * num_heads; line < std::size_t(row + 1) * num_heads; ++line) {
        double sum = 0, mean = 0;
        for (int p = 0; p < seq_lens[chat]; ++p) {
          const int page = table[chat * stride + p / page_size];
          const float* const at = &k_pages[(page * page_size + p % page_size) * dim];
          double dot = 0;
          for (int i = 0; i < dim; ++i) dot += double(q[line * dim + i]) * at[i];
          sum += std::exp(dot / std::sqrt(dim));
          mean += std::exp(dot / std::sqrt(dim)) * at[7];
        }
        worst = std::max(worst, std::abs(mean / sum - out[line * dim + 7]));
      }
      ++seq_lens[chat], query_start_loc[chat + 1] = chat + 1;  // all decode from now on
    }
  }
  std::printf("off by less than 1e-5: %s\n", worst < 1e-5 ? "yes" : "NO");
  return worst < 1e-5 ? 0 : 1;
}
