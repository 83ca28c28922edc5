// What the tree keeps of a step: which sequences it computes, and how far it has come.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "../../tree_options.hpp"
#include "../base/array.hpp"
#include "../base/config.hpp"
#include "../base/ticket.hpp"
#include "topology.hpp"

CHUNKATTN_NAMESPACE_BEGIN

namespace detail {

/// The rows of one sequence in a step: path positions [begin, begin + length).
struct StepEntry {
  SequenceIndex sequence = none;
  std::uint32_t generation = 0;  ///< of the sequence, when it was added
  std::uint32_t epoch = 0;       ///< the same
  std::int32_t begin = 0;
  std::int32_t length = 0;
  std::int32_t drafts = 0;     ///< of these, the last ones: guesses; the trunk of a tree
  std::int32_t first_row = 0;  ///< in the caller's order
  SlotIndex slot = no_slot;    ///< Decoding: where the K/V of the one row goes; else no_slot
  std::int32_t offset = 0;     ///< in that slot, never the last place
  bool has_output = false;     ///< it reaches the end of the sequence: there is something to sample
  bool drafts_known = false;   ///< the drafts' tokens are stored, to be compared with the outputs

  [[nodiscard]] std::int32_t end() const noexcept { return begin + length; }
  /// Where the first output goes.
  [[nodiscard]] std::int32_t output_position() const noexcept { return end() - drafts; }
};

/// A draft of a tree. The *trunk* of a tree is the first of its longest branches: it stands on the
/// sequence's own places, like drafts that are a chain. The others stand aside, see Drafts.
struct Draft {
  std::int32_t parent = none;  ///< the draft before it; none: the path's last token
  std::int32_t depth = 0;      ///< of how many drafts the branch is that ends with it
  SlotIndex slot = no_slot;    ///< where its K/V goes, and its token
  std::int32_t offset = 0;
};
/// The drafts of an entry that are no chain: `count` of StepRecord::drafts.
struct DraftTree {
  std::int32_t entry = 0;  ///< its index
  std::int32_t first = 0;
  std::int32_t count = 0;
};

/// What became of a sequence that was to be added to a step.
struct AddOutcome {
  HoldReason reason = HoldReason::none;
  SequenceIndex waits_for = none;  ///< HoldReason::waits_for_sequence
  std::uint64_t step = 0;          ///< HoldReason::waits_for_step
};

enum class StepState : std::uint8_t {
  free,
  open,       ///< sequences are added, the plan is built, kernels may run
  in_flight,  ///< submitted to a device
  abandoned,  ///< dropped in flight: the device may still run it
  finished    ///< outputs are to be committed
};

struct StepRecord {
  std::uint64_t number = 0;  ///< counted from 1
  StepState state = StepState::free;
  bool built = false;    ///< a plan was built for it
  bool is_void = false;  ///< it was abandoned, or rests on one that was: nothing of it counts
  std::int32_t num_rows = 0;
  std::int32_t num_outputs = 0;  ///< once it has finished: entries whose output is to come
  /// Once it has finished: each entry has one output to come, which can be committed, until
  /// Sequences::outputs_given_up() is another number.
  bool all_outputs = false;
  std::uint64_t outputs_given_up = 0;
  Array<StepEntry> entries;
  Array<DraftTree> trees;      ///< by entry, of those that have one
  Array<Draft> drafts;         ///< of all trees
  SequenceIndex aside = none;  ///< has the places of drafts that are not on a trunk, see Drafts
  std::shared_ptr<ViewTicket> ticket;  ///< of the plan that was built for it
  std::uint64_t ticket_number = 0;

  /// The drafts of an entry in the caller's order, where they are no chain; else nothing.
  [[nodiscard]] std::span<const Draft> tree_of(const StepEntry& entry) const noexcept {
    if (entry.drafts == 0 || trees.empty()) [[likely]]
      return {};
    return find_tree(static_cast<std::int32_t>(&entry - entries.begin()));
  }

  void invalidate_view() noexcept {
    if (ticket && ticket->current() == ticket_number) ticket->set(0);
    ticket.reset();
  }

 private:
  [[nodiscard, gnu::noinline]] std::span<const Draft> find_tree(std::int32_t entry) const noexcept {
    const DraftTree* const tree =
        std::lower_bound(trees.begin(), trees.end(), entry,
                         [](const DraftTree& t, std::int32_t value) { return t.entry < value; });
    if (tree == trees.end() || tree->entry != entry) return {};
    return {drafts.begin() + tree->first, at(tree->count)};
  }
};

}  // namespace detail

CHUNKATTN_NAMESPACE_END
