// Trees of drafts over steps that accept one branch after the other, for each backend's test: on
// forked tails and shared prefixes, in batches with prefill and decoding.
#pragma once

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "chunkattn/debug/tree.hpp"
#include "draft_trees.hpp"
#include "variant_cases.hpp"

namespace test {

/// Steps of one engine in which chats join, fork, leave, draft trees, and accept one branch each.
template <class T, int HeadDim>
class DraftScenario {
 public:
  static constexpr int chunk_size = 16;
  using Engine = DraftEngine<T, HeadDim, chunk_size>;

  DraftScenario(Random& random, int num_kv_heads, int group)
      : random_(random),
        engine_(num_kv_heads, group,
                {.min_run = random.pick<std::optional<int>>({{}, 1, chunk_size})}) {}

  /// \param check  check(engine, view) holds the attention of each step against the oracle
  template <class Check>
  void run(const Check& check) {
    for (int steps = 3; steps > 0; --steps) {
      while (chats_.size() < 2 || (chats_.size() < 5 && random_.chance(0.4))) join();
      if (chats_.size() > 3 && random_.chance(0.3))
        chats_.erase(chats_.begin() + random_.uniform(0, 2));
      run_step(check);
    }
    for (const Chat& chat : chats_) {
      const std::size_t written = chat.sequence.num_written();
      CHECK(engine_.content(chat, written) ==
            direct_content<T, HeadDim>(chat.tokens, written, engine_.num_kv_heads));
    }
  }

 private:
  using Chat = typename Engine::Chat;
  struct Added {
    Chat* chat;
    Tokens drafts;
    Parents parents;
  };

  void join() {
    if (!chats_.empty() && random_.chance(0.4)) {  // on a forked tail
      auto fork = engine_.fork(chats_[random_.index(chats_.size())]);
      chats_.push_back(std::move(fork));
      return;
    }
    Tokens prompt(static_cast<std::size_t>(random_.pick({0, 40, 130})), 7);  // shared
    const int own = random_.uniform(1, 30);
    for (int i = 0; i < own; ++i) prompt.push_back(random_.uniform(100, 10000));
    chats_.push_back(engine_.insert(prompt));
  }

  template <class Check>
  void run_step(const Check& check) {
    auto step = engine_.tree.begin_step();
    std::vector<Added> added;
    for (Chat& chat : chats_) {
      Added a{&chat, {}, {}};
      if (random_.chance(0.8))
        a.parents = random_parents(random_, random_.uniform(1, random_.pick({4, 20, 64})));
      for (std::size_t i = 0; i < a.parents.size(); ++i)
        a.drafts.push_back(random_.uniform(100, 10000));
      const std::size_t max_tokens =
          random_.chance(0.2) ? static_cast<std::size_t>(random_.uniform(1, 40)) : 1000;
      if (engine_.add(step, chat, max_tokens, a.drafts, a.parents)) added.push_back(std::move(a));
    }
    if (added.empty()) return;  // all are computed: forks of one another
    const auto view = engine_.build(step);
    check_side_by_side(view);
    check(engine_, view);
    auto done = engine_.finish(std::move(step));
    for (const chunkattn::ScheduledSequence row : done.rows()) {
      const Added& a = added[static_cast<std::size_t>(row.index)];
      const std::int32_t leaf = random_.uniform(-1, row.num_drafts - 1);
      Tokens outputs = branch_tokens(a.parents, a.drafts, leaf);
      outputs.push_back(random_.uniform(100, 10000));
      done.commit(row, outputs, leaf);
      a.chat->tokens.insert(a.chat->tokens.end(), outputs.begin(), outputs.end());
    }
    chunkattn::check_invariants(engine_.tree);
  }

  /// The rows of a segment stand side by side: tasks of a GPU are ranges of rows.
  static void check_side_by_side(const chunkattn::PlanView& plan) {
    std::vector<int> last(static_cast<std::size_t>(plan.num_segments), -1);
    for (int row = 0; row < plan.num_rows; ++row) {
      int& before = last[static_cast<std::size_t>(plan.row_segment[row])];
      CHECK((before < 0 || before == row - 1));
      before = row;
    }
  }

  Random& random_;
  Engine engine_;
  std::vector<Chat> chats_;
};

/// Steps with trees of drafts, a variant, and groups of 1, 4 and 6.
/// \param check  check(engine, view, of) holds the attention of each step against the oracle
template <class T, class Case, int HeadDim, class Check>
void check_draft_trees(std::uint64_t stream, const Check& check) {
  Random random(stream);
  for (int round = 0; round < scaled(2); ++round)
    for (const int group : {1, 4, 6}) {
      CAPTURE(stream);
      CAPTURE(round);
      CAPTURE(group);
      const int num_kv_heads = random.uniform(1, 2);
      DraftScenario<T, HeadDim> scenario(random, num_kv_heads, group);
      const Case of(random, VariantShape{num_kv_heads * group});
      scenario.run([&](auto& engine, const chunkattn::LiveView& view) { check(engine, view, of); });
    }
}

}  // namespace test
