// NewDrafts: drafts that are added to a step, and where in the tree's slots each of them goes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "../support/check.hpp"
#include "../support/config.hpp"
#include "../support/to_size.hpp"
#include "step_table.hpp"
#include "topology.hpp"

CHUNKATTN_NAMESPACE_BEGIN

namespace detail {

/// Drafts that are to be added after a sequence's last token.
struct NewDrafts {
  std::int32_t count = 0;
  bool known = true;                        ///< their tokens are given, and stored by the caller
  std::span<const std::int32_t> parents{};  ///< of `count` drafts, or more; empty: a chain
};

/// Throws InvalidArgument unless each parent stands before its child.
inline void check_parents(std::span<const std::int32_t> parents, std::size_t num_drafts) {
  if (parents.size() != num_drafts) [[unlikely]]
    fail_argument("parents.size()", parents.size(),
                  {"one for each of the ", num_drafts, " drafts"});
  for (std::size_t i = 0; i < parents.size(); ++i)
    if (parents[i] < -1 || parents[i] >= static_cast<std::int32_t>(i)) [[unlikely]]
      fail_argument(joined({"parents[", i, "]"}), parents[i],
                    {"-1, the sequence's last token, or an earlier draft, below ", i});
}

/// The drafts of an entry that is being added: which of them stand on the main branch, which have
/// scratch slots. Until keep() nothing has happened.
class DraftPlacement {
 public:
  /// \param count  of the drafts, how many the step has rows for
  DraftPlacement(StepRecord& step, const NewDrafts& added, std::int32_t count)
      : step_(step), main_branch_(count), before_(step.drafts.size()) {
    if (added.parents.empty() || count == 0) return;
    const auto parents = added.parents.first(to_size(count));
    std::int32_t next = -1;  // of a chain
    for (const std::int32_t parent : parents) is_tree_ = is_tree_ || parent != next++;
    if (is_tree_) plant(parents);
  }
  DraftPlacement(const DraftPlacement&) = delete;
  DraftPlacement& operator=(const DraftPlacement&) = delete;
  ~DraftPlacement() {
    if (is_tree_) step_.drafts.resize(before_);
  }

  /// Drafts that stand on the sequence's own slots.
  [[nodiscard]] std::int32_t main_branch() const noexcept { return main_branch_; }
  /// Drafts that have scratch slots; 0 where they are a chain.
  [[nodiscard]] std::int32_t num_scratch() const noexcept {
    return is_tree_ ? static_cast<std::int32_t>(step_.drafts.size() - before_) - main_branch_ : 0;
  }
  /// The step's next entry has the drafts, its main branch from slot `first` of the tail on, the
  /// others on the last scratch slots.
  void keep(const Topology& topology, const TreeNode& tail, std::int32_t first,
            const TreeNode& scratch) noexcept {
    const std::span<Draft> drafts{step_.drafts.begin() + before_, step_.drafts.size() - before_};
    step_.trees.push_back({static_cast<std::int32_t>(step_.entries.size()),
                           static_cast<std::int32_t>(before_),
                           static_cast<std::int32_t>(drafts.size())});
    assign_slots(drafts, deepest_, topology, tail, first, scratch);
    is_tree_ = false;
  }

 private:
  void plant(std::span<const std::int32_t> parents) {
    if (step_.trees.size() == step_.trees.capacity())
      step_.trees.reserve(2 * step_.trees.size() + 8);
    if (step_.drafts.capacity() - before_ < parents.size())
      step_.drafts.reserve(2 * (before_ + parents.size()));
    main_branch_ = 0;
    for (std::size_t i = 0; i < parents.size(); ++i) {
      const std::int32_t parent = parents[i];
      const std::int32_t depth =
          parent == none ? 1 : step_.drafts[before_ + to_size(parent)].depth + 1;
      step_.drafts.push_back({parent, depth, no_chunk, 0});
      if (depth <= main_branch_) continue;
      main_branch_ = depth;
      deepest_ = static_cast<std::int32_t>(i);
    }
  }
  /// Gives every draft its slot: those of the main branch, which ends with `deepest`, after
  /// `first` of the tail, the others the last scratch slots.
  static void assign_slots(std::span<Draft> drafts, std::int32_t deepest, const Topology& topology,
                           const TreeNode& tail, std::int32_t first,
                           const TreeNode& scratch) noexcept {
    std::int32_t num_scratch = static_cast<std::int32_t>(drafts.size());
    for (std::int32_t i = deepest; i != none; i = drafts[to_size(i)].parent, --num_scratch) {
      const std::int32_t slot = tail.begin + first + drafts[to_size(i)].depth - 1;
      drafts[to_size(i)].chunk = topology.chunk_of(tail, slot);
      drafts[to_size(i)].offset = topology.geometry.offset(slot);
    }
    Draft* next = drafts.data();
    topology.for_each_run(
        scratch, scratch.length - num_scratch, num_scratch,
        [&](ChunkIndex chunk, std::int32_t offset, std::int32_t run, std::int32_t) {
          for (const std::int32_t end = offset + run; offset < end; ++offset, ++next) {
            while (next->chunk != no_chunk) ++next;
            next->chunk = chunk;
            next->offset = offset;
          }
          return true;
        });
  }

  StepRecord& step_;
  std::int32_t main_branch_, deepest_ = none;
  std::size_t before_;  // drafts of other entries
  bool is_tree_ = false;
};

}  // namespace detail

CHUNKATTN_NAMESPACE_END
