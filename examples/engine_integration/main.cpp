// How a serving engine wires the library in; docs/integration.md walks through this file. Every way
// is compared with another one, so the program fails when a result differs.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "../support/only_help.hpp"
#include "dispatch.hpp"
#include "engine.hpp"

namespace {

using namespace engine;
using chunkattn::AttentionPlan;
using chunkattn::ChunkAttention;
using chunkattn::Cpu;
using chunkattn::PrefixTree;

constexpr int num_layers = 2, num_qo_heads = 8, num_kv_heads = 4, head_dim = 64, chunk_size = 16;

void require(bool ok, const char* what) {
  std::printf("%s: %s\n", what, ok ? "ok" : "FAILED");
  if (!ok) std::exit(1);
}

std::size_t count(int rows, int heads) {
  return static_cast<std::size_t>(rows) * static_cast<std::size_t>(heads) * head_dim;
}

// Stands in for the model: some q, k and v of a layer for the plan's rows, in the caller's order.
struct Activations {
  std::vector<float> q, k, v, out;
  void compute(int layer, int num_rows) {
    std::uint32_t x = 12345u + static_cast<std::uint32_t>(layer);
    const auto fill = [&](std::vector<float>& values, int heads) {
      values.resize(count(num_rows, heads));
      for (float& value : values) {
        x = x * 1664525u + 1013904223u;
        value = static_cast<float>(x >> 8) / 8388608.0f - 1.0f;
      }
    };
    fill(q, num_qo_heads);
    fill(k, num_kv_heads);
    fill(v, num_kv_heads);
    out.assign(q.size(), 0.0f);
  }
};

std::vector<Token> prompt_of(Token user) {
  std::vector<Token> prompt(
      100);  // a system prompt that all users share, then the user's own words
  for (std::size_t i = 0; i < prompt.size(); ++i) prompt[i] = static_cast<Token>(i);
  for (Token i = 0; i < 10; ++i) prompt.push_back(1000 * user + i);
  return prompt;
}

// --- 1. The loop: admission, chunked prefill, decode, speculation, forks, leaving
// ------------------

void engine_loop() {
  std::printf("\n1. The engine's loop\n");
  using Tree = PrefixTree<Token, chunk_size, chunkattn::PoolAllocator, chunkattn::Lru>;
  Tree tree(chunkattn::PoolAllocator{.max_chunks = 64}, {.async_steps = true});
  chunkattn::KvCache<Cpu, chunkattn::half> kv(
      tree, {.num_layers = num_layers, .num_kv_heads = num_kv_heads, .head_dim = head_dim});
  Threads threads(2);
  ChunkAttention<Cpu, head_dim, Threads> attention(threads);
  AttentionPlan plan;
  Activations model;

  std::deque<std::vector<Token>> waiting;
  for (Token user = 1; user <= 6; ++user) waiting.push_back(prompt_of(user));
  std::vector<Tree::Sequence> running;

  for (int step = 0; step < 40 && !(waiting.empty() && running.empty()); ++step) {
    while (!waiting.empty() && tree.slots_needed(waiting.front()) + 1 <= tree.slots_available()) {
      const auto& prompt = waiting.front();
      running.push_back(
          tree.insert(prompt, {.name_space = {.tenant = 7}, .max_reuse = prompt.size() - 1}));
      waiting.pop_front();
    }

    struct Row {
      Tree::Sequence* sequence;
      chunkattn::TokenRange range;
      bool prefill;
    };
    std::vector<Row> rows;  // the engine's choice: any subset of the sequences, in any order
    plan.clear();
    for (auto& sequence : running) {
      if (sequence.num_pending() > 0) continue;  // another sequence is still writing its prefix
      const bool prefill = !sequence.next_uncomputed().empty();
      const auto range = prefill ? sequence.next_uncomputed(48)  // a chunk of the prompt, or
                                 : sequence.reserve(2);          // the next token and a draft
      rows.push_back({&sequence, range, prefill});
      plan.add(sequence, range);
    }
    plan.update(tree);
    for (int layer = 0; layer < num_layers; ++layer) {
      model.compute(layer, plan.num_rows());
      attention.write(kv.layer(layer), plan, model.k, model.v);
      attention.run(kv.layer(layer), plan, model.q, model.out);
    }
    for (const Row& row : rows) {
      const Token next = 5000 + 2 * step;
      if (row.prefill)
        row.sequence->commit(row.range);  // these prompt tokens' K/V is written
      else if (step % 2 == 0)
        row.sequence->commit(next);  // the draft was rejected: its place is dropped
      else
        row.sequence->commit(std::vector<Token>{next, next + 1});
    }
    if (step == 12 && !running.empty()) running.push_back(running.front().fork());
    if (step > 14 && !running.empty()) running.erase(running.begin());  // done: leaves
    tree.retire(plan.step());  // the device is done with this step: what it read may be reused
  }
  tree.check_invariants();
  require(waiting.empty() && running.empty(), "every request was served");
  const auto stats = tree.stats();
  std::printf("   %llu of %llu prompt tokens came from the cache or a sequence of the same step\n",
              static_cast<unsigned long long>(stats.cached_tokens + stats.pending_tokens),
              static_cast<unsigned long long>(stats.prompt_tokens));
}

// --- 2. to 4. Own memory, own writes, dispatch at run time, tensor parallel
// ------------------------

// One prefill of three users over the engine's memory; `attend` computes one layer.
template <class T, class Attend>
std::vector<float> prefill(const Attend& attend) {
  constexpr int num_blocks = 40, lent_out = 8;
  PrefixTree<Token, chunk_size, BlockManager> tree(BlockManager(num_blocks, lent_out));
  LayerMemory<T> memory(num_blocks, num_kv_heads, chunk_size, head_dim);
  AttentionPlan plan;
  Activations model;
  std::vector<PrefixTree<Token, chunk_size, BlockManager>::Sequence> sequences;
  for (Token user = 1; user <= 3; ++user) sequences.push_back(tree.insert(prompt_of(user)));
  for (auto& sequence : sequences) plan.add(sequence, sequence.next_uncomputed());
  plan.update(tree);
  model.compute(0, plan.num_rows());
  attend(memory, plan, model);
  for (auto& sequence : sequences) sequence.commit(sequence.next_uncomputed());
  return model.out;
}

double difference(const std::vector<float>& a, const std::vector<float>& b) {
  double worst = a.size() == b.size() ? 0.0 : 1e30;
  for (std::size_t i = 0; i < a.size() && i < b.size(); ++i)
    worst = std::fmax(worst, std::fabs(static_cast<double>(a[i]) - static_cast<double>(b[i])));
  return worst;
}

template <class T>
void own_parts(KvType type) {
  Threads threads(2);
  ChunkAttention<Cpu, head_dim, Threads> attention(threads);

  const auto expected = prefill<T>([&](auto& memory, auto& plan, Activations& model) {
    attention.write(memory.view, plan, model.k, model.v);
    attention.run(memory.view, plan, model.q, model.out);
  });
  std::printf("\n%s K/V in the engine's own memory\n", chunkattn::element_name<T>());

  const auto own_writes = prefill<T>([&](auto& memory, auto& plan, Activations& model) {
    write_kv<T>(memory.view, plan.view(), model.k, model.v);
    attention.run(memory.view, plan, model.q, model.out);
  });
  require(difference(expected, own_writes) == 0, "2. the engine's own K/V-writing kernel");

  const auto any = make_attention(head_dim, type, threads);
  const auto dispatched = prefill<T>([&](auto& memory, auto& plan, Activations& model) {
    const LayerPointers layer{memory.k.data(), memory.v.data(), memory.view.num_slots, num_kv_heads,
                              chunk_size};
    any->write(layer, plan, model.k, model.v);
    any->run(layer, plan, model.q, model.out);
  });
  require(difference(expected, dispatched) == 0, "3. head_dim and type chosen at run time");

  const auto parallel = prefill<T>([&](auto& memory, auto& plan, Activations& model) {
    write_kv<T>(memory.view, plan.view(), model.k, model.v);
    constexpr int num_ranks = 2, heads = num_qo_heads / num_ranks;
    for (int rank = 0; rank < num_ranks; ++rank) {  // each on its own device
      const int rows = plan.num_rows();
      std::vector<float> q(count(rows, heads)), out(q.size());
      const auto part = [&](int row) { return (row * num_qo_heads + rank * heads) * head_dim; };
      for (int row = 0; row < rows; ++row)
        std::copy_n(model.q.begin() + part(row), heads * head_dim,
                    q.begin() + row * heads * head_dim);
      attention.run(heads_of_rank(memory.view, rank, num_ranks), plan, q, out);
      for (int row = 0; row < rows; ++row)
        std::copy_n(out.begin() + row * heads * head_dim, heads * head_dim,
                    model.out.begin() + part(row));
    }
  });
  require(difference(expected, parallel) < 1e-5, "4. two tensor-parallel ranks, split by KV heads");
}

}  // namespace

int main(int argc, char** argv) {
  if (const auto status = examples::only_help(argc, argv, "engine_integration",
                                              "each way to wire the library into an engine"))
    return *status;
  engine_loop();
  own_parts<float>(KvType::fp32);
  own_parts<chunkattn::half>(KvType::fp16);
  own_parts<chunkattn::bfloat16>(KvType::bf16);

  Threads threads(1);
  try {
    make_attention(80, KvType::fp32, threads);
    require(false, "an unknown head_dim is refused");
  } catch (const chunkattn::InvalidArgument& error) {
    std::printf("\nan unknown head_dim is refused:\n   %s\n", error.what());
  }
}
