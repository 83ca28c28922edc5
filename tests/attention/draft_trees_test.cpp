// Trees of drafts against the oracle, which is given every row's path as a sequence of its own:
// all shapes, element types, groups and variants, in batches with prefill and decoding, on forked
// tails and shared prefixes, over steps that accept one branch after the other.
#include "support/draft_trees.hpp"

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>
#include <utility>
#include <vector>

#include "support/variant_cases.hpp"

using namespace chunkattn;
using namespace test;

namespace {

constexpr int head_dim = 32, chunk = 16;

struct PlainCase {
  Plain variant;
  ReferenceVariant definition;
  PlainCase(Random&, VariantShape) {}
};

/// What happens in the steps of one engine.
template <class T, class Case>
class Scenario {
 public:
  using Engine = DraftEngine<T, head_dim, chunk>;
  using Chat = typename Engine::Chat;
  struct Added {
    Chat* chat;
    Tokens drafts;
    Parents parents;
  };

  Scenario(Random& random, int num_kv_heads, int group)
      : random_(random),
        engine_(num_kv_heads, group, {.min_run = random.pick({0, 1, chunk})}),
        of_(random, VariantShape{num_kv_heads * group}) {}

  void run() {
    for (int steps = 3; steps > 0; --steps) {
      while (chats_.size() < 2 || (chats_.size() < 5 && random_.chance(0.4))) join();
      if (chats_.size() > 3 && random_.chance(0.3))
        chats_.erase(chats_.begin() + random_.uniform(0, 2));
      run_step();
    }
    for (const Chat& chat : chats_) {
      const std::size_t written = chat.sequence.num_written();
      CHECK(engine_.content(chat, written) ==
            direct_content<T, head_dim>(chat.tokens, written, engine_.num_kv_heads));
    }
  }

 private:
  void join() {
    if (!chats_.empty() && random_.chance(0.4)) {  // on a forked tail
      auto twin = engine_.fork(chats_[random_.index(chats_.size())]);
      chats_.push_back(std::move(twin));
      return;
    }
    Tokens prompt(static_cast<std::size_t>(random_.pick({0, 40, 130})), 7);  // shared
    const int own = random_.uniform(1, 30);
    for (int i = 0; i < own; ++i) prompt.push_back(random_.uniform(100, 10000));
    chats_.push_back(engine_.insert(prompt));
  }

  void run_step() {
    auto step = engine_.tree.begin_step();
    std::vector<Added> added;
    for (Chat& chat : chats_) {
      Added a{&chat, {}, {}};
      if (random_.chance(0.8))
        a.parents = random_parents(random_, random_.uniform(1, random_.pick({4, 20, 64})));
      for (std::size_t i = 0; i < a.parents.size(); ++i)
        a.drafts.push_back(random_.uniform(100, 10000));
      const std::size_t budget =
          random_.chance(0.2) ? static_cast<std::size_t>(random_.uniform(1, 40)) : 1000;
      if (engine_.add(step, chat, budget, a.drafts, a.parents)) added.push_back(std::move(a));
    }
    if (added.empty()) return;  // all are computed: forks of one another
    const auto view = engine_.build(step);
    check(view);
    auto done = engine_.finish(std::move(step));
    for (const StepRow row : done.rows()) {
      const Added& a = added[static_cast<std::size_t>(row.index)];
      const std::int32_t leaf = random_.uniform(-1, row.num_drafts - 1);
      Tokens outputs = branch_tokens(a.parents, a.drafts, leaf);
      outputs.push_back(random_.uniform(100, 10000));
      done.commit(row, outputs, leaf);
      a.chat->tokens.insert(a.chat->tokens.end(), outputs.begin(), outputs.end());
    }
    engine_.tree.check_invariants();
  }

  void check(const LiveView& view) {
    const ApartCase<T> apart(engine_.paths, engine_.num_kv_heads, head_dim);
    const Reference reference = reference_attention(
        apart.kv->view, apart.plan.view(), std::span<const float>(engine_.q), 0, of_.definition);
    static auto modes = variant_modes<head_dim>();
    for (auto& attention : modes) {
      CAPTURE(static_cast<int>(attention.options().reduce));
      CAPTURE(attention.options().min_product_lines);
      std::vector<float> out(engine_.q.size(), std::numeric_limits<float>::quiet_NaN());
      std::vector<float> lse(reference.lse.size(), out[0]);
      attention.run(engine_.kv.layer(0), view, of_.variant, engine_.q, out, lse);
      const Rounding rounding = rounding_in<T>(attention);
      CHECK(compare_with_reference(reference, std::span<const float>(out), rounding).worst <= 1.0);
      CHECK(worst_lse(reference, lse, rounding) <= 1.0);
      if (attention.options().reduce != Reduce::batch_invariant) continue;
      // The bits of a draft are those of its branch as a plain sequence.
      std::vector<float> alone(out.size());
      attention.run(apart.kv->view, apart.plan.view(), of_.variant, engine_.q, alone);
      CHECK(std::memcmp(out.data(), alone.data(), out.size() * sizeof(float)) == 0);
    }
  }

  Random& random_;
  Engine engine_;
  Case of_;
  std::vector<Chat> chats_;
};

template <class T, class Case>
void check_trees(std::uint64_t stream) {
  Random random(stream);
  for (int round = 0; round < scaled(2); ++round)
    for (const int group : {1, 4, 6}) {
      CAPTURE(stream);
      CAPTURE(round);
      CAPTURE(group);
      Scenario<T, Case>(random, random.uniform(1, 2), group).run();
    }
}

}  // namespace

TEST_CASE("trees of drafts in fp32, with every variant") {
  check_trees<float, PlainCase>(1);
  check_trees<float, SoftCapCase>(2);
  check_trees<float, WindowCase>(3);
  check_trees<float, SinksCase>(4);
  check_trees<float, AlibiCase>(5);
  check_trees<float, BiasCase>(6);
  check_trees<float, MaskCase>(7);
  check_trees<float, UserCase>(8);
}
TEST_CASE("trees of drafts in fp16") {
  check_trees<half, PlainCase>(11);
  check_trees<half, PairCase<WindowCase, AlibiCase>>(12);
}
TEST_CASE("trees of drafts in bf16") {
  check_trees<bfloat16, PlainCase>(21);
  check_trees<bfloat16, PairCase<WindowCase, AlibiCase>>(22);
}
TEST_CASE("trees of drafts in int8") {
  check_trees<std::int8_t, PlainCase>(31);
  check_trees<std::int8_t, PairCase<WindowCase, AlibiCase>>(32);
}
