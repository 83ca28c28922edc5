// Streaming chat: a conversation is one sequence. Each turn appends the user's words and computes
// these and the answer, nothing else; truncate() takes a turn back.
#include <algorithm>
#include <chunkattn/chunkattn.hpp>
#include <cstdio>
#include <vector>

using namespace chunkattn;
enum Word { stop, Mary, had, a, little, lamb, its, fleece, was, white };
const char* const spelling[]{".",    "Mary", "had",    "a",   "little",
                             "lamb", "its",  "fleece", "was", "white"};
using Tree = PrefixTree<Word, 4>;
constexpr int head_dim = 16;  // a dimension for each word

int main() {
  Tree tree;
  KvCache<Cpu, float> cache(tree, {.num_layers = 1, .num_kv_heads = 1, .head_dim = head_dim});
  ChunkAttention<Cpu, head_dim> attention(1, {.sm_scale = 20});
  AttentionPlan plan;

  // Stands in for a model: attention finds where this word stood before and what came next there.
  // K names the word before a row's and V the row's own, so `out` has a weight for each word.
  const auto next_word = [&](Tree::Sequence& chat) {
    auto step = tree.begin_step();
    const auto row = step.add(chat).row();
    std::vector<float> q(std::size_t(row.num_rows * head_dim)), k(q), v(q), out(q);
    for (int i = 0, p = row.position; i < row.num_rows; ++i, ++p) {
      q[i * head_dim + chat.token(p)] = v[i * head_dim + chat.token(p)] = 1;
      if (p > 0) k[i * head_dim + chat.token(p - 1)] = 1;
    }
    const auto view = plan.build(step);
    attention.write(cache.layer(0), view, k, v);
    attention.run(cache.layer(0), view, q, out);
    const auto weights = out.end() - head_dim;  // those of the last row
    const auto word = Word(std::max_element(weights, out.end()) - weights);
    auto finished = std::move(step).finish();
    finished.commit(row, word);
    return word;
  };

  bool same = true;
  auto chat = tree.insert({Mary, had, a, little, lamb, stop, its, fleece, was, white, stop});
  const auto turn = [&](Word user) {
    chat.append(user);
    std::printf("%s (computes %zu of %zu words):", spelling[user], chat.num_uncomputed(),
                chat.size());
    // Another tenant shares nothing: to it the whole conversation is new.
    auto recomputed = tree.insert(chat.tokens(), {.name_space = {.tenant = 1}});
    for (Word word = user; word != stop; std::printf(" %s", spelling[word])) {
      word = next_word(chat);
      same &= next_word(recomputed) == word;
    }
    std::puts("");
  };
  turn(fleece);
  turn(Mary);
  chat.truncate(chat.size() - 6);  // the user asks something else instead
  turn(its);
  return same ? 0 : 1;
}
