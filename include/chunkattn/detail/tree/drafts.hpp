// Trees of drafts: where each draft of a step stands, and how an accepted branch gets to its path.
//
// A tree's trunk stands where its tokens would be if they were accepted. All other drafts of a step
// stand *aside*: on places of a sequence that only the step knows of, and that has left already. So
// what leaves late, and gives up its places when no step and no copy uses them, has one mechanism.
// No row is copied over one that may still be read, and every copy can be made again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "../base/check.hpp"
#include "../base/config.hpp"
#include "copies.hpp"
#include "departures.hpp"
#include "prefixes.hpp"
#include "sequences.hpp"
#include "step_record.hpp"
#include "topology.hpp"

CHUNKATTN_NAMESPACE_BEGIN

namespace detail {

/// Drafts that are to be added behind a sequence's last token.
struct NewDrafts {
  std::int32_t count = 0;
  bool known = true;                        ///< their tokens are given, and stored by the caller
  std::span<const std::int32_t> parents{};  ///< [count], see Step::add(); empty: a chain
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

class Drafts {
 public:
  Drafts(Topology& topology, Prefixes& prefixes, Sequences& sequences, Copies& copies,
         Departures& departures)
      : topology_(topology),
        prefixes_(prefixes),
        sequences_(sequences),
        copies_(copies),
        departures_(departures) {}

  /// Makes room for what trees need, so that only slots may be wanting. Moves the tree's records.
  void reserve() {
    prefixes_.reserve_nodes(1);
    sequences_.reserve();
    departures_.reserve();
  }

  /// The drafts of an entry that is being added. Until keep() nothing has happened.
  class Addition {
   public:
    Addition(Drafts& drafts, StepRecord& step, const NewDrafts& added, std::int32_t count)
        : drafts_(drafts), step_(step), trunk_(count), before_(step.drafts.size()) {
      if (added.parents.empty() || count == 0) return;
      const auto parents = added.parents.first(at(count));
      std::int32_t next = -1;  // of a chain
      for (const std::int32_t parent : parents) is_tree_ = is_tree_ || parent != next++;
      if (is_tree_) plant(parents);
    }
    Addition(const Addition&) = delete;
    Addition& operator=(const Addition&) = delete;
    ~Addition() {
      if (!is_tree_ || kept_) return;
      step_.drafts.resize(before_);
      if (taken_ > 0) drafts_.give_back(step_, taken_);
      if (first_of_step_) drafts_.close(step_);
    }

    /// Drafts that stand on the sequence's own places.
    [[nodiscard]] std::int32_t trunk() const noexcept { return trunk_; }
    /// Takes places for the others; false where the budget is spent.
    bool take_places() {
      if (!is_tree_) return true;
      first_of_step_ = step_.aside == none;
      const auto aside = static_cast<std::int32_t>(step_.drafts.size() - before_) - trunk_;
      if (!drafts_.take(step_, aside)) return false;
      taken_ = aside;
      return true;
    }
    /// The step's next entry has the drafts, its trunk from this place of the tail on. Returns how
    /// many stand aside.
    std::int32_t keep(const TreeNode& tail, std::int32_t first) noexcept {
      if (!is_tree_) return 0;
      kept_ = true;
      step_.trees.push_back({static_cast<std::int32_t>(step_.entries.size()),
                             static_cast<std::int32_t>(before_), trunk_ + taken_});
      drafts_.place({step_.drafts.begin() + before_, step_.drafts.size() - before_}, deepest_, tail,
                    first, sequences().tail(step_.aside));
      return taken_;
    }

   private:
    [[nodiscard]] Sequences& sequences() const noexcept { return drafts_.sequences_; }

    void plant(std::span<const std::int32_t> parents) {
      if (step_.trees.size() == step_.trees.capacity())
        step_.trees.reserve(2 * step_.trees.size() + 8);
      if (step_.drafts.capacity() - before_ < parents.size())
        step_.drafts.reserve(2 * (before_ + parents.size()));
      trunk_ = 0;
      for (std::size_t i = 0; i < parents.size(); ++i) {
        const std::int32_t parent = parents[i];
        const std::int32_t depth =
            parent == none ? 1 : step_.drafts[before_ + at(parent)].depth + 1;
        step_.drafts.push_back({parent, depth, no_slot, 0});
        if (depth <= trunk_) continue;
        trunk_ = depth;
        deepest_ = static_cast<std::int32_t>(i);
      }
    }

    Drafts& drafts_;
    StepRecord& step_;
    std::int32_t trunk_, deepest_ = none, taken_ = 0;
    std::size_t before_;  // drafts of other entries
    bool is_tree_ = false, first_of_step_ = false, kept_ = false;
  };

  /// The step has ended, and no output of it is to come: what stands aside is given up by
  /// Departures::finish_all() as soon as no copy needs it.
  void release(StepRecord& step) noexcept {
    if (step.aside == none) return;
    --sequences_[step.aside].steps;
    step.aside = none;
  }
  /// The same at once.
  void close(StepRecord& step) noexcept {
    if (step.aside == none) return;
    release(step);
    departures_.finish_all();
  }

  // ---- commit --------------------------------------------------------------------------------

  /// How many drafts the branch has that ends with draft `leaf` of the entry; none: 0. Throws
  /// InvalidArgument where there is no such draft.
  static std::int32_t depth_of(const StepEntry& entry, std::span<const Draft> tree,
                               std::int32_t leaf) {
    const std::int32_t count = tree.empty() ? entry.drafts : static_cast<std::int32_t>(tree.size());
    if (leaf != none && count == 0) [[unlikely]]
      fail_argument("leaf", leaf, "-1: the row has no drafts");
    if (leaf < none || leaf >= count) [[unlikely]]
      fail_argument("leaf", leaf, {"-1, none, or one of the row's drafts, below ", count});
    if (leaf == none) return 0;
    return tree.empty() ? leaf + 1 : tree[at(leaf)].depth;
  }
  /// Makes room, so that move() cannot fail.
  void reserve_moves(std::int32_t count) { copies_.reserve(at(count)); }
  /// Asks for copies of what an accepted branch has aside to the places behind the known tokens.
  /// Returns whether there is any.
  bool move(const StepRecord& step, const StepEntry& entry, std::span<const Draft> tree,
            std::int32_t leaf) noexcept {
    const SequenceIndex s = entry.sequence;
    const TreeNode& tail = sequences_.tail(s);
    bool any = false;
    for (std::int32_t i = leaf; i != none; i = tree[at(i)].parent) {
      const Draft& draft = tree[at(i)];
      const std::int32_t position = entry.output_position() + draft.depth - 1;
      const std::int32_t place = tail.begin + position - tail.position;
      const SlotIndex slot = topology_.slot_of(tail, place);
      const std::int32_t offset = topology_.chunk.offset(place);
      if (slot == draft.slot && offset == draft.offset) continue;  // of the trunk
      copies_.request(step.aside, s, {draft.slot, draft.offset, slot, offset, 1}, position);
      any = true;
    }
    return any;
  }

 private:
  /// `count` more places aside; false where the budget is spent.
  bool take(StepRecord& step, std::int32_t count) {
    if (step.aside == none) step.aside = add_sequence();
    SequenceRecord& record = sequences_[step.aside];
    if (!sequences_.grow_tail(record, count)) return false;
    record.reserved += count;
    return true;
  }
  void give_back(StepRecord& step, std::int32_t count) noexcept {
    SequenceRecord& record = sequences_[step.aside];
    sequences_.shrink_reserved(record, record.reserved - count, /*keep_slots=*/false);
  }
  /// A sequence without tokens, found by nobody, that has left and that one step uses.
  SequenceIndex add_sequence() noexcept {
    const SequenceIndex s = sequences_.add();
    prefixes_.use_path(root_node);
    sequences_.add_tail(s, root_node, {});
    sequences_[s].steps = 1;
    departures_.retire(s);
    return s;
  }

  /// Gives every draft its place: those of the trunk, which ends with `deepest`, behind `first` of
  /// the tail, the others the last ones aside.
  void place(std::span<Draft> drafts, std::int32_t deepest, const TreeNode& tail,
             std::int32_t first, const TreeNode& aside) const noexcept {
    std::int32_t num_aside = static_cast<std::int32_t>(drafts.size());
    for (std::int32_t i = deepest; i != none; i = drafts[at(i)].parent, --num_aside) {
      const std::int32_t place = tail.begin + first + drafts[at(i)].depth - 1;
      drafts[at(i)].slot = topology_.slot_of(tail, place);
      drafts[at(i)].offset = topology_.chunk.offset(place);
    }
    Draft* next = drafts.data();
    topology_.for_each_run(
        aside, aside.length - num_aside, num_aside,
        [&](SlotIndex slot, std::int32_t offset, std::int32_t run, std::int32_t) {
          for (const std::int32_t end = offset + run; offset < end; ++offset, ++next) {
            while (next->slot != no_slot) ++next;
            next->slot = slot;
            next->offset = offset;
          }
          return true;
        });
  }

  Topology& topology_;
  Prefixes& prefixes_;
  Sequences& sequences_;
  Copies& copies_;
  Departures& departures_;
};

}  // namespace detail

CHUNKATTN_NAMESPACE_END
