// The prefix tree's invariants: everything that is kept incrementally is counted again. For tests.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "../base/concepts.hpp"
#include "../base/config.hpp"
#include "../base/error.hpp"
#include "records.hpp"
#include "types.hpp"

CHUNKATTN_NAMESPACE_BEGIN

namespace detail {

/// Reads the records of a TreeCore. Throws Error that names the first difference.
template <class Core>
class TreeInspector {
 public:
  explicit TreeInspector(const Core& tree) : tree_(tree) {}

  void check() const {
    check_storage();
    check_sequences();
  }

 private:
  static constexpr std::size_t chunk_size = Core::chunk_size;

  void check_storage() const {
    std::vector<SlotRecord> counted(tree_.slots_.size());
    std::vector<std::uint8_t> taken(tree_.slots_.size() * chunk_size);
    std::size_t nodes = 0, places = 0, published = 0, retained = 0;
    for (std::size_t i = 0; i < tree_.nodes_.size(); ++i) {
      const TreeNode& n = tree_.nodes_[i];
      const auto index = static_cast<NodeIndex>(i);
      if (n.state == NodeState::unused) continue;
      ++nodes;
      if (index == root_node) continue;
      const TreeNode& parent = tree_.node(n.parent);
      expect(parent.state != NodeState::unused, "a node's parent exists", index);
      expect(n.position == parent.end(), "a node continues its parent", index);
      expect(n.written >= 0 && n.written <= n.length, "written tokens lie within the node", index);
      expect(n.scheduled >= n.written || n.written == n.length, "what is written was scheduled",
             index);
      expect(n.live <= parent.live && n.held <= parent.held, "counts grow towards the root", index);
      expect(n.retained == (!n.active()), "exactly the unused nodes are retained", index);
      expect(!n.retained ||
                 (n.state == NodeState::published && n.length > 0 && n.written == n.length &&
                  tree_.level_of(parent_or_self(n)) >= tree_.level_of(n)),
             "a retained node is published, written, and valued no more than its parent", index);
      expect(n.tail_of != none || n.length > 0, "only tails are empty", index);
      retained += n.retained ? 1 : 0;
      if (n.state == NodeState::published) {
        ++published;
        expect(parent.state == NodeState::published, "a published node has a published parent",
               index);
        expect(tree_.find_child(n.parent, n.name_space, tree_.key_of(n)) == index,
               "published children differ in their key", index);
      }
      places += at(n.length);
      tree_.for_each_run(
          n, 0, n.length, [&](SlotIndex s, std::int32_t offset, std::int32_t run, std::int32_t) {
            for (std::int32_t o = offset; o < offset + run; ++o)
              expect(taken[at(s) * chunk_size + at(o)]++ == 0, "a place has one token", s);
            return true;
          });
      if (n.first_slot == no_slot) continue;
      for (SlotIndex s = n.first_slot;; s = tree_.next_slot(s)) {
        ++counted[at(s)].nodes;
        counted[at(s)].active += n.active() ? 1 : 0;
        counted[at(s)].pinned += n.pins > 0 ? 1 : 0;
        if (s == tree_.last_held_slot(n)) break;
      }
    }
    std::size_t used = 0, cached = 0, pinned = 0;
    for (std::size_t s = 0; s < tree_.slots_.size(); ++s) {
      const auto index = static_cast<SlotIndex>(s);
      expect(counted[s].nodes == tree_.slots_[s].nodes, "nodes per slot", index);
      expect(counted[s].active == tree_.slots_[s].active, "active nodes per slot", index);
      expect(counted[s].pinned == tree_.slots_[s].pinned, "pinned nodes per slot", index);
      pinned += counted[s].pinned > 0 ? 1 : 0;
      used += counted[s].nodes > 0 ? 1 : 0;
      cached += counted[s].nodes > 0 && counted[s].active == 0 ? 1 : 0;
    }
    std::size_t listed = 0;
    for (const auto& level : tree_.levels_)
      for (NodeIndex n = level.oldest; n != none; n = tree_.node(n).newer) ++listed;
    expect(nodes == tree_.stats_.nodes, "number of nodes", static_cast<std::int64_t>(nodes));
    expect(places == tree_.stats_.stored_tokens, "stored tokens",
           static_cast<std::int64_t>(places));
    expect(published == tree_.index_.size(), "published nodes",
           static_cast<std::int64_t>(published));
    expect(retained == listed, "retained nodes", static_cast<std::int64_t>(retained));
    expect(used == tree_.stats_.used_slots, "used slots", static_cast<std::int64_t>(used));
    expect(cached == tree_.stats_.retained_slots, "retained slots",
           static_cast<std::int64_t>(cached));
    expect(pinned == tree_.pinned_slots_, "pinned slots", static_cast<std::int64_t>(pinned));
    check_pins();
    if (tree_.allocator_.capacity() < max_slots)
      expect(used + static_cast<std::size_t>(tree_.allocator_.available()) ==
                 static_cast<std::size_t>(tree_.allocator_.capacity()),
             "used and free slots add up to the budget", static_cast<std::int64_t>(used));
  }

  void check_pins() const {
    std::vector<std::int32_t> pins(tree_.nodes_.size());
    for (const PinRecord& pin : tree_.pins_)
      for (NodeIndex n = pin.last; n != none && n != root_node; n = tree_.node(n).parent)
        ++pins[at(n)];
    for (std::size_t i = 0; i < pins.size(); ++i)
      expect(tree_.nodes_[i].pins == pins[i], "pins of paths through a node",
             static_cast<std::int64_t>(i));
  }

  void check_sequences() const {
    std::vector<TreeNode> counted(tree_.nodes_.size());
    std::vector<std::int32_t> copies_of(tree_.sequences_.size()), copies(tree_.slots_.size());
    std::vector<std::int32_t> steps(tree_.sequences_.size()), superseded(steps.size());
    std::size_t live = 0, leaving = 0;
    for (const auto& step : tree_.steps_) {
      if (!tree_.is_outstanding(*step)) continue;
      for (const StepEntry& entry : step->entries) {
        ++steps[at(entry.sequence)];
        superseded[at(entry.sequence)] +=
            entry.epoch != tree_.sequence(entry.sequence).epoch ? 1 : 0;
      }
    }
    for (const PendingCopy& copy : tree_.copies_) {
      ++copies[at(copy.rows.target_slot)];
      ++copies_of[at(copy.source)];
      ++copies_of[at(copy.target)];
      expect(tree_.slots_[at(copy.rows.source_slot)].nodes > 0 &&
                 tree_.slots_[at(copy.rows.target_slot)].nodes > 0,
             "a pending copy is between slots in use", copy.rows.target_slot);
    }
    for (std::size_t i = 0; i < tree_.slots_.size(); ++i)
      expect(tree_.slots_[i].pending_copies == copies[i], "pending copies into a slot",
             static_cast<std::int64_t>(i));
    for (std::size_t i = 0; i < tree_.sequences_.size(); ++i) {
      const SequenceRecord& record = tree_.sequences_[i];
      if (record.state == SequenceState::unused) continue;
      const auto s = static_cast<SequenceIndex>(i);
      expect(record.copies == copies_of[i], "pending copies from or to a sequence", s);
      expect(record.steps == steps[i] && record.superseded == superseded[i],
             "outstanding steps of a sequence", s);
      const bool is_live = record.state == SequenceState::live;
      (is_live ? live : leaving) += 1;
      const TreeNode& tail = tree_.node(record.tail);
      expect(!is_live || (tail.tail_of == s && tail.first_child == none),
             "a live sequence has a tail of its own", s);
      expect(!is_live || tail.length == 0 || tree_.owns_end(tail),
             "a live tail owns the places behind its tokens", s);
      expect(tail.end() == record.size + record.reserved, "the path holds exactly the sequence", s);
      expect(record.cursor <= record.size + record.reserved, "what is computed has a place", s);
      std::int32_t covered = 0;
      for (NodeIndex n = record.tail; n != none; n = tree_.node(n).parent) {
        (is_live ? counted[at(n)].live : counted[at(n)].held) += 1;
        covered += tree_.node(n).length;
        if (is_live && n != root_node && tree_.node(n).written < tree_.node(n).length)
          expect(tree_.node(n).writer != none && is_writing(tree_.sequence(tree_.node(n).writer)),
                 "pending K/V has a writer, live or kept for a step", n);
      }
      expect(covered == tail.end(), "the path has no gaps", s);
    }
    for (std::size_t i = 0; i < counted.size(); ++i) {
      const auto n = static_cast<NodeIndex>(i);
      if (tree_.node(n).state == NodeState::unused) continue;
      expect(tree_.node(n).live == counted[i].live && tree_.node(n).held == counted[i].held,
             "sequences per node", n);
    }
    expect(live == tree_.stats_.live_sequences, "live sequences", static_cast<std::int64_t>(live));
    expect(leaving == tree_.stats_.leaving_sequences, "leaving sequences",
           static_cast<std::int64_t>(leaving));
  }

  static bool is_writing(const SequenceRecord& record) noexcept {
    return record.state == SequenceState::live ||
           (record.state == SequenceState::leaving && record.steps > 0);
  }

  static void expect(bool ok, const char* what, std::int64_t index) {
    if (!ok) [[unlikely]]
      fail(Error("prefix tree invariant broken: " + std::string(what) + " (at " +
                 std::to_string(index) + ")"));
  }

  [[nodiscard]] const TreeNode& parent_or_self(const TreeNode& n) const noexcept {
    return n.parent == root_node ? n : tree_.node(n.parent);
  }

  static constexpr std::size_t at(std::int32_t index) noexcept {
    return static_cast<std::size_t>(index);
  }

  const Core& tree_;
};

}  // namespace detail

CHUNKATTN_NAMESPACE_END
