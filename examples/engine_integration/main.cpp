// How a serving engine wires the library in; docs/integration.md walks through this file. Every way
// is compared with another one, so the program fails when a result differs.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <span>
#include <utility>
#include <vector>

#include "../support/options.hpp"
#include "dispatch.hpp"
#include "engine.hpp"
#include "serve.hpp"

namespace {

using namespace engine;
using chunkattn::AttentionPlan;
using chunkattn::ChunkAttention;
using chunkattn::Cpu;
using chunkattn::LiveView;
using chunkattn::PrefixTree;

constexpr int num_qo_heads = ToyModel::num_qo_heads, num_kv_heads = ToyModel::num_kv_heads;
constexpr int head_dim = ToyModel::head_dim, chunk_size = 16;

void require(bool ok, const char* what) {
  std::printf("%s: %s\n", what, ok ? "ok" : "FAILED");
  if (!ok) std::exit(1);
}

std::size_t count(int rows, int heads) {
  return static_cast<std::size_t>(rows) * static_cast<std::size_t>(heads) * head_dim;
}

std::vector<Token> prompt_of(Token user) {
  std::vector<Token> prompt(
      100);  // a system prompt that all users share, then the user's own words
  for (std::size_t i = 0; i < prompt.size(); ++i) prompt[i] = static_cast<Token>(i);
  for (Token i = 0; i < 10; ++i) prompt.push_back(1000 * user + i);
  return prompt;
}

// --- 1. The loop: chunked prefill, decode, drafts, forks, preemption ----------------------------

void engine_loop() {
  std::printf("\n1. The engine's loop\n");
  std::vector<Request> requests;
  for (Token user = 1; user <= 8; ++user)
    requests.push_back({prompt_of(user), 30 + static_cast<std::size_t>(user % 3) * 10,
                        user % 3 == 0 ? 3 : 1});  // three answers share all of their prompt
  Threads threads(2);
  constexpr std::size_t max_chunks = 20;  // too few for all at once

  ServeStats one, two;
  const Answers answers = SyncServer(requests, max_chunks, threads).run(one);
  const Answers again = AsyncServer(requests, max_chunks, threads).run(two);

  bool complete = true;
  for (std::size_t r = 0; r < requests.size(); ++r)
    for (const auto& answer : answers[r]) complete &= answer.size() == requests[r].new_tokens;
  require(complete, "every request was served");
  require(answers == again, "two steps in flight give the same answers as one at a time");
  require(one.preemptions > 0 && two.preemptions > 0, "some were preempted, and came back");
  require(one.accepted > 0 && one.accepted < one.drafts, "some drafts were right");
  for (const ServeStats* stats : {&one, &two}) {
    std::printf(
        "   %d steps, %llu of %llu prompt tokens from the cache or another sequence,\n",
        stats->steps,
        static_cast<unsigned long long>(stats->tree.cached_tokens + stats->tree.pending_tokens),
        static_cast<unsigned long long>(stats->tree.prompt_tokens));
    std::printf("   %zu of %zu drafts right, %d preemptions, held %zu times for a sequence\n",
                stats->accepted, stats->drafts, stats->preemptions, stats->held_for_sequence);
  }
}

// --- 2. to 4. Own memory, own writes, dispatch at run time, tensor parallel ----------------------

// One prefill of three users over the engine's memory; `attend` computes one layer.
template <class T, class Attend>
std::vector<float> prefill(const Attend& attend) {
  constexpr int num_blocks = 40, lent_out = 8;
  using BlockTree = PrefixTree<Token, chunk_size, BlockManager>;
  BlockTree tree(BlockManager(num_blocks, lent_out));
  LayerMemory<T> memory(num_blocks, num_kv_heads, chunk_size, head_dim);
  AttentionPlan plan;
  ToyModel model;
  std::vector<BlockTree::Sequence> sequences;
  BlockTree::Step step = tree.begin_step();
  for (Token user = 1; user <= 3; ++user) {
    sequences.push_back(tree.insert(prompt_of(user)));
    // After the one that computes what they have in common.
    if (!step.add(sequences.back())) require(false, "every prompt is in the step");
  }
  const auto view = plan.build(step);
  model.project(0, view.tokens(), view.positions());
  attend(memory, view, model);
  (void)std::move(step).finished();
  return model.out;
}

double difference(const std::vector<float>& a, const std::vector<float>& b) {
  double worst = a.size() == b.size() ? 0.0 : 1e30;
  for (std::size_t i = 0; i < a.size() && i < b.size(); ++i)
    worst = std::fmax(worst, std::fabs(static_cast<double>(a[i]) - static_cast<double>(b[i])));
  return worst;
}

template <class T>
void own_parts() {
  Threads threads(2);
  ChunkAttention<Cpu, head_dim, head_dim, Threads> attention(threads);

  const auto expected = prefill<T>([&](auto& memory, const LiveView& plan, ToyModel& model) {
    attention.write(memory.view, plan, model.k, model.v);
    attention.run(memory.view, plan, model.q, model.out);
  });
  std::printf("\n%s K/V in the engine's own memory\n", chunkattn::element_name<T>());

  const auto own_writes = prefill<T>([&](auto& memory, const LiveView& plan, ToyModel& model) {
    write_kv<T>(memory.view, plan, model.k, model.v);
    attention.run(memory.view, plan, model.q, model.out);
  });
  require(difference(expected, own_writes) == 0, "2. the engine's own K/V-writing kernel");

  const auto any = load_attention(head_dim, threads);
  const auto dispatched = prefill<T>([&](auto& memory, const LiveView& plan, ToyModel& model) {
    any->write(memory.view, plan, model.k, model.v);
    any->run(memory.view, plan, model.q, model.out);
  });
  require(difference(expected, dispatched) == 0, "3. head_dim and type chosen at run time");

  const auto parallel = prefill<T>([&](auto& memory, const LiveView& plan, ToyModel& model) {
    write_kv<T>(memory.view, plan, model.k, model.v);
    constexpr int num_ranks = 2, heads = num_qo_heads / num_ranks;
    constexpr int kv_heads = num_kv_heads / num_ranks;
    for (int rank = 0; rank < num_ranks; ++rank) {  // each on its own device
      const int rows = plan.num_rows;
      std::vector<float> q(count(rows, heads)), out(q.size());
      const auto part = [&](int row) { return (row * num_qo_heads + rank * heads) * head_dim; };
      for (int row = 0; row < rows; ++row)
        std::copy_n(model.q.begin() + part(row), heads * head_dim,
                    q.begin() + row * heads * head_dim);
      attention.run(memory.view.heads(rank * kv_heads, kv_heads), plan, q, out);
      for (int row = 0; row < rows; ++row)
        std::copy_n(out.begin() + row * heads * head_dim, heads * head_dim,
                    model.out.begin() + part(row));
    }
  });
  require(difference(expected, parallel) < 1e-5, "4. two tensor-parallel ranks, split by KV heads");
}

int run(int argc, char** argv) {
  examples::Options options("engine_integration", "each way to wire the library into an engine");
  if (!options.parse(argc, argv)) return 0;
  engine_loop();
  own_parts<float>();
  own_parts<chunkattn::half>();
  own_parts<chunkattn::bfloat16>();

  Threads threads(1);
  try {
    (void)load_attention(80, threads);
    require(false, "an unknown head_dim is refused");
  } catch (const chunkattn::InvalidArgument& error) {
    std::printf("\nan unknown head_dim is refused:\n   %s\n", error.what());
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return examples::guarded("engine_integration", [&] { return run(argc, argv); });
}
