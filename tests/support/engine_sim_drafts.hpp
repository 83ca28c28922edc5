// Trees of drafts in the engine simulation: what a step takes of one, and what becomes of its
// branches.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "tests/support/engine_sim_plan.hpp"

namespace test {

template <class Retention, int ChunkSize>
class EngineSimDrafts : public EngineSimPlan<Retention, ChunkSize> {
  using Base = EngineSimPlan<Retention, ChunkSize>;

 public:
  using Base::Base;

 protected:
  using Base::below, Base::one_in, Base::count, Base::expect, Base::expect_refused, Base::log;
  using Base::text, Base::name;
  using typename Base::Entry, typename Base::SimStep, typename Base::SimDraft;
  using typename Base::Live;

  /// The drafts that a step takes, as a tree; nothing where they are a chain.
  std::vector<SimDraft> planted(const Live& live, std::span<const SimToken> drafts,
                                const std::vector<std::int32_t>& parents) {
    std::vector<SimDraft> tree;
    bool chain = true;
    std::size_t deepest = 0;
    const std::size_t size = live.tokens.size();
    for (std::size_t i = 0; i < drafts.size(); ++i) {
      const std::int32_t parent = parents[i];
      const SimDraft* above = parent < 0 ? nullptr : &tree[static_cast<std::size_t>(parent)];
      chain = chain && parent + 1 == static_cast<std::int32_t>(i);
      const std::int32_t depth = above != nullptr ? above->depth + 1 : 1;
      const std::uint64_t hash = above != nullptr ? above->hash : live.hash.back();
      const auto position = size + static_cast<std::size_t>(depth) - 1;
      const std::uint64_t own =
          extend_hash(hash, space_at(live.name_space, position, live.public_end), drafts[i]);
      tree.push_back({parent, depth, drafts[i], own});
      if (depth > tree[deepest].depth) deepest = i;
    }
    if (chain) return {};
    for (auto i = static_cast<std::int32_t>(deepest); i >= 0;) {
      SimDraft& draft = tree[static_cast<std::size_t>(i)];
      draft.on_trunk = true;
      i = draft.parent;
    }
    return tree;
  }

  /// One branch of a tree, or nothing of it.
  void commit_branch(SimStep& step, const ScheduledSequence& row, Entry& entry) {
    Live& live = *entry.live;
    const auto first = static_cast<std::size_t>(entry.output_position());
    const auto leaf = static_cast<std::int32_t>(below(entry.tree.size() + 1)) - 1;
    const std::vector<std::size_t> branch = entry.branch(leaf);
    std::vector<SimToken> outputs;
    std::size_t on_trunk = 0;
    for (const std::size_t d : branch) {
      outputs.push_back(entry.tree[d].token);
      on_trunk += entry.tree[d].on_trunk ? 1 : 0;
    }
    const bool all_right =
        on_trunk == branch.size() && on_trunk == static_cast<std::size_t>(entry.drafts);
    outputs.push_back(all_right ? live.tokens[first + on_trunk] : this->any_token());
    const auto refused = [&](const std::vector<SimToken>& tokens, std::int32_t end,
                             const char* what) {
      expect_refused([&] { step.finished->commit(row, tokens, end); }, what);
    };
    const auto commit = [&] {
      if (leaf < 0 && one_in(2))
        step.finished->commit(row, outputs);
      else
        step.finished->commit(row, outputs, leaf);
    };
    log("commit branch " + text(leaf) + " of " + text(branch.size()) + " drafts to " + name(live));
    if (first != live.known) {
      expect_refused(commit, "outputs in order");
      return count("commit out of order");
    }
    if (one_in(10)) {
      auto tokens = outputs;
      tokens.push_back(0);
      refused(tokens, leaf, "a branch and one more");
      refused(outputs, static_cast<std::int32_t>(entry.tree.size()), "a draft of the row");
      refused(outputs, -2, "a draft of the row");
      if (!branch.empty()) {
        expect_refused([&] { step.finished->commit(row, outputs); }, "which branch");
        tokens = outputs;
        tokens[below(branch.size())] += 1;
        if (entry.drafts_known) refused(tokens, leaf, "accepted drafts are the drafts");
      }
      count("commit of a branch refused");
    }
    this->insist("commit of a branch", commit);
    entry.has_output = false;
    if (all_right) {
      live.known = first + on_trunk + 1;
      count("trunk right");
    } else {
      this->cut(live, first + on_trunk);
      for (std::size_t i = on_trunk; i < outputs.size(); ++i) this->push_token(live, outputs[i]);
      live.computed = first + branch.size();
      live.known = live.tokens.size();
      ++live.drops;
      live.superseded = live.steps;
      count(branch.empty()              ? "no branch right"
            : on_trunk == branch.size() ? "a part of the trunk right"
                                        : "a branch aside right");
      if (live.steps > 0) count("draft wrong under later steps");
    }
    this->mark_done(live, live.computed);
    expect_refused([&] { step.finished->commit(row, outputs, leaf); },
                   "outputs are committed once");
    if (live.handle.is_live()) this->check_sequence(live);
  }
};

}  // namespace test
