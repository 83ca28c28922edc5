// Paths of the prefix tree: finding one, using and dropping it, what becomes of it when its last
// sequence leaves. Operations on sequences are in tree_core.hpp.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "../base/config.hpp"
#include "topology.hpp"

CHUNKATTN_NAMESPACE_BEGIN

namespace detail {

template <TokenType Token, int ChunkSize, ChunkAllocator Allocator, RetentionPolicy Retention>
class TreePaths : public TreeStorage<Token, ChunkSize, Allocator, Retention> {
  using Storage = TreeStorage<Token, ChunkSize, Allocator, Retention>;

 public:
  using Storage::node;
  static constexpr bool retains = Retention::retains;

  using Storage::Storage;

  [[nodiscard]] const SequenceRecord& sequence(SequenceIndex s) const noexcept {
    return sequences_[at(s)];
  }
  [[nodiscard]] bool is_live(SequenceIndex s, std::uint32_t generation) const noexcept {
    return s >= 0 && at(s) < sequences_.size() && sequence(s).generation == generation &&
           sequence(s).state == SequenceState::live;
  }

  [[nodiscard]] MatchResult match_prefix(std::span<const Token> prompt,
                                         const InsertOptions& options) const {
    const Match match = find(prompt, options);
    std::int32_t written_end = match.length, own_begin = match.length;
    for (Step step = first_step(match); step.index != root_node; step = next_step(step)) {
      const TreeNode& n = node(step.index);
      if (n.written >= step.used) continue;
      written_end = n.position + n.written;
      if (n.writer == none) own_begin = written_end;
    }
    return {std::min(at(written_end), options.max_reuse), at(own_begin - written_end)};
  }

  /// Slots that insert() would at most take from slots_available(): new ones, and cached ones that
  /// it brings back into use.
  [[nodiscard]] std::size_t slots_needed(std::span<const Token> prompt,
                                         const InsertOptions& options) const {
    const Match match = find_shared(prompt, options);
    std::size_t revived = 0;
    SlotIndex below = no_slot;  // where the next node of the path starts, perhaps the same slot
    for (Step step = first_step(match); step.index != root_node; step = next_step(step)) {
      this->for_each_run(node(step.index), 0, step.used,
                         [&](SlotIndex s, std::int32_t, std::int32_t, std::int32_t) {
                           if (slots_[at(s)].active == 0 && s != below) ++revived;
                           return true;
                         });
      below = node(step.index).first_slot;
    }
    const std::int32_t fresh = static_cast<std::int32_t>(prompt.size()) - match.length;
    return revived + at(Storage::slots_for(fresh - room_at(match, fresh)));
  }

  /// Slots that reserve(count) would take from slots_available().
  [[nodiscard]] std::size_t slots_needed(SequenceIndex s, std::size_t count) const {
    const std::size_t room = at(this->room(node(sequence(s).tail)));
    return count <= room ? 0 : (count - room - 1) / ChunkSize + 1;
  }

  /// Calls f(node, offset in the node, length) for the parts of [range.begin, range.end()) that
  /// each node of the path holds, last first.
  template <class F>
  void for_each_node(SequenceIndex s, TokenRange range, const F& f) const {
    for (NodeIndex n = sequence(s).tail; n != root_node && node(n).end() > range.begin;
         n = node(n).parent) {
      const std::int32_t begin = std::max(range.begin, node(n).position);
      const std::int32_t end = std::min(range.end(), node(n).end());
      if (begin < end) f(n, begin - node(n).position, end - begin);
    }
  }

  /// Path positions that another sequence is to write.
  [[nodiscard]] std::int32_t num_pending(SequenceIndex s) const noexcept {
    std::int32_t pending = 0;
    for_each_awaited(s, [&](NodeIndex n) { pending += node(n).length - node(n).written; });
    return pending;
  }

  /// Who is to write the first of these positions; none where there are none.
  [[nodiscard]] SequenceIndex waits_for(SequenceIndex s) const noexcept {
    SequenceIndex writer = none;
    for_each_awaited(s, [&](NodeIndex n) { writer = node(n).writer; });
    return writer;
  }

  /// Calls f for the nodes of the path that another sequence has still to write, last first.
  template <class F>
  void for_each_awaited(SequenceIndex s, const F& f) const {
    if (!sequence(s).may_wait) return;
    for (NodeIndex n = sequence(s).tail; n != root_node; n = node(n).parent)
      if (node(n).writer != s && node(n).written < node(n).length) f(n);
  }

  /// Leading tokens whose K/V can be read now: written, and not waiting for a fork's copy.
  [[nodiscard]] std::int32_t readable_length(SequenceIndex s) const noexcept {
    const SequenceRecord& record = sequence(s);
    std::int32_t end = std::min(written_end(record.tail), record.size);
    if (copies_.empty()) return end;
    for (NodeIndex n = record.tail; n != root_node; n = node(n).parent) {
      const SlotIndex slot = node(n).first_slot;  // what is copied starts a slot of its own
      if (slot == no_slot || slots_[at(slot)].pending_copies == 0) continue;
      for (const PendingCopy& copy : copies_)
        if (copy.rows.target_slot == slot)
          end =
              std::min(end, node(n).position + std::max(0, copy.rows.target_begin - node(n).begin));
    }
    return end;
  }

  /// Leading tokens of the path that every tenant of the adapter may share.
  [[nodiscard]] std::int32_t public_length_of(SequenceIndex s) const noexcept {
    NodeIndex n = sequence(s).tail;
    while (n != root_node && !node(n).name_space.is_public) n = node(n).parent;
    return node(n).end();
  }

  [[nodiscard]] const Token& token(SequenceIndex s, std::int32_t position) const {
    const Token* found = nullptr;
    for_each_node(s, {position, 1}, [&](NodeIndex n, std::int32_t offset, std::int32_t) {
      this->for_each_run(node(n), offset, 1,
                         [&](SlotIndex slot, std::int32_t o, std::int32_t, std::int32_t) {
                           found = &this->token_at(slot, o);
                           return false;
                         });
    });
    return *found;
  }

  /// Marks the written prefix of these tokens to be evicted last; counted, so that each pin is
  /// undone by itself. Returns the pin's index, or none where nothing of them is written or more
  /// than the policy's max_pinned slots would be pinned.
  std::int32_t pin(std::span<const Token> tokens, const InsertOptions& options) {
    Match match = find(tokens, options);
    trim_to_written(match);
    if (match.length == 0) return none;
    this->reserve_nodes(1);
    if (free_pins() == none) this->pins_.reserve(2 * this->pins_.size() + 8);
    std::size_t needed = 0;
    SlotIndex below = no_slot;  // where the next node of the path starts, perhaps the same slot
    for (Step step = first_step(match); step.index != root_node; step = next_step(step)) {
      this->for_each_run(node(step.index), 0, step.used,
                         [&](SlotIndex s, std::int32_t, std::int32_t, std::int32_t) {
                           if (slots_[at(s)].pinned == 0 && s != below) ++needed;
                           return true;
                         });
      below = node(step.index).first_slot;
    }
    if (this->pinned_slots_ + needed > this->retention_.max_pinned) return none;
    if (match.used < node(match.last).length) match.last = this->split(match.last, match.used);
    for (NodeIndex n = match.last; n != root_node; n = node(n).parent) change_pins(n, 1);
    std::int32_t pin = free_pins();
    if (pin == none) {
      pin = static_cast<std::int32_t>(this->pins_.size());
      this->pins_.emplace_back();
    }
    this->pins_[at(pin)].last = match.last;
    return pin;
  }

  [[nodiscard]] std::uint32_t pin_generation(std::int32_t pin) const noexcept {
    return this->pins_[at(pin)].generation;
  }
  /// Tokens that the pin still holds: fewer than at first where even pinned chunks were evicted.
  [[nodiscard]] std::int32_t pinned_length(std::int32_t pin,
                                           std::uint32_t generation) const noexcept {
    const PinRecord& record = this->pins_[at(pin)];
    return record.generation == generation && record.last != none ? node(record.last).end() : 0;
  }

  void unpin(std::int32_t pin, std::uint32_t generation) noexcept {
    PinRecord& record = this->pins_[at(pin)];
    if (record.generation != generation || record.last == none) return;
    // Bottom-up: a parent must stay younger than its children.
    for (NodeIndex n = record.last; n != root_node; n = node(n).parent) change_pins(n, -1);
    record.last = none;
    ++record.generation;
  }

 protected:
  using Storage::at, Storage::copies_, Storage::sequences_, Storage::slots_, Storage::stats_;

  static constexpr std::int32_t max_length = 1 << 30;

  struct Match {
    NodeIndex last = root_node;  ///< deepest node reached
    std::int32_t used = 0;       ///< tokens of it that matched
    std::int32_t length = 0;     ///< tokens matched in all
  };
  struct Step {
    NodeIndex index;
    std::int32_t used;
  };
  static Step first_step(const Match& match) noexcept { return {match.last, match.used}; }
  Step next_step(Step step) const noexcept {
    const NodeIndex parent = node(step.index).parent;
    return {parent, node(parent).length};
  }

  [[nodiscard]] std::int32_t public_length(std::span<const Token> prompt,
                                           const InsertOptions& options) const noexcept {
    const auto length = static_cast<std::int32_t>(std::min(options.public_length, prompt.size()));
    return length - length % this->sharing_unit();
  }

  static Namespace space_at(const InsertOptions& options, std::int32_t position,
                            std::int32_t public_end) noexcept {
    if (position >= public_end) return options.name_space;
    return {.adapter = options.name_space.adapter, .is_public = true};
  }

  [[nodiscard]] Match find(std::span<const Token> prompt, const InsertOptions& options) const {
    const std::int32_t unit = this->sharing_unit();
    const std::int32_t public_end = public_length(prompt, options);
    const auto size = static_cast<std::int32_t>(std::min(prompt.size(), at(max_length)));
    Match match;
    while (size - match.length >= unit) {
      const std::int32_t end = match.length < public_end ? public_end : size;
      const NodeIndex child = this->find_child(
          match.last, space_at(options, match.length, public_end), prompt.data() + match.length);
      if (child == none) break;
      std::int32_t common = this->common_length(
          node(child), prompt.subspan(at(match.length), at(end - match.length)));
      common -= common % unit;
      match.last = child;
      match.used = common;
      match.length += common;
      if (common < node(child).length) break;
    }
    return match;
  }

  /// What a prompt shares: all that is found, or, if it is to wait for nobody, what is written.
  [[nodiscard]] Match find_shared(std::span<const Token> prompt,
                                  const InsertOptions& options) const {
    Match match = find(prompt, options);
    if (!options.share_pending) trim_to_written(match);
    return match;
  }

  /// Shortens a match to what is written, in units of sharing.
  void trim_to_written(Match& match) const noexcept {
    std::int32_t end = match.length;
    for (Step step = first_step(match); step.index != root_node; step = next_step(step))
      if (node(step.index).written < step.used)
        end = node(step.index).position + node(step.index).written;
    match.length = end - end % this->sharing_unit();
    while (match.last != root_node && node(match.last).position >= match.length) {
      match.last = node(match.last).parent;
      match.used = node(match.last).length;
    }
    match.used = std::min(match.used, match.length - node(match.last).position);
  }

  /// Free places that the first `fresh` tokens behind a match could take in its last slot.
  [[nodiscard]] std::int32_t room_at(const Match& match, std::int32_t fresh) const noexcept {
    if (fresh == 0 || match.used < node(match.last).length) return 0;
    return this->room_behind(match.last);
  }

  void use_path(NodeIndex last) noexcept {
    for (NodeIndex n = last; n != none; n = node(n).parent) {
      if (!node(n).active()) {
        if (node(n).retained) this->unretain(n);
        this->set_slots_active(node(n), true);
      }
      ++node(n).live;
    }
  }

  /// Undoes one use of a path by a live or held sequence, keeping or removing what nobody uses.
  void drop_path(NodeIndex last, std::int32_t TreeNode::*count) noexcept {
    const std::int32_t keep_end = written_end(last);
    for (NodeIndex n = last; n != none;) {
      const NodeIndex parent = node(n).parent;
      TreeNode& record = node(n);
      --(record.*count);
      if (!record.active() && n != root_node) {
        this->set_slots_active(record, false);
        const std::int32_t keep = kept_length(record, keep_end);
        if (keep == 0) {
          this->remove_node(n);
        } else {
          if (keep < record.length) this->release_places(n, keep);
          this->retain(n);
          this->notify(CacheEvent{CacheEvent::Kind::stored, record.name_space, record.position,
                                  record.length, record.first_slot});
        }
      }
      n = parent;
    }
  }

  /// Leading tokens of an unused node that stay as cache.
  [[nodiscard]] std::int32_t kept_length(const TreeNode& n, std::int32_t keep_end) const noexcept {
    if constexpr (!retains) return 0;
    if (n.state != NodeState::published || n.position >= keep_end) return 0;
    const std::int32_t keep = std::min(n.written, keep_end - n.position);
    return keep - keep % this->sharing_unit();
  }

  /// The first path position whose K/V is not written.
  [[nodiscard]] std::int32_t written_end(NodeIndex last) const noexcept {
    std::int32_t end = node(last).end();
    for (NodeIndex n = last; n != root_node; n = node(n).parent)
      if (node(n).written < node(n).length) end = node(n).position + node(n).written;
    return end;
  }

  /// Gives a pending node to a live sequence below it.
  void hand_over(NodeIndex pending) noexcept {
    node(pending).writer = none;
    if (node(pending).written == node(pending).length || node(pending).live == 0) return;
    NodeIndex n = pending;
    SequenceIndex heir = none;
    while (heir == none) {
      heir = node(n).tail_of;
      if (heir != none && sequence(heir).state == SequenceState::live) break;
      heir = none;
      NodeIndex child = node(n).first_child;
      while (node(child).live == 0) child = node(child).next_sibling;
      n = child;
      // The writer below goes on, so that one sequence writes a run from its start to its end.
      const SequenceIndex writer = node(n).writer;
      if (writer != none && sequence(writer).state == SequenceState::live) heir = writer;
    }
    node(pending).writer = heir;
    SequenceRecord& record = sequences_[at(heir)];
    record.cursor = std::min(record.cursor, node(pending).position + node(pending).written);
    ++stats_.hand_overs;
  }

  /// Makes the generated tokens of a sequence that left matchable, from the first hidden node down.
  /// Where an equal path is already there the duplicate is dropped (if it may be: its places must
  /// not be in use) and the rest moves below that path.
  void publish_tail(SequenceIndex s, bool may_merge) noexcept {
    const std::int32_t end = written_end(sequence(s).tail);
    while (true) {
      NodeIndex n = none;  // the first hidden node below published ones
      for (NodeIndex i = sequence(s).tail; i != root_node; i = node(i).parent)
        if (node(i).state == NodeState::stale)
          return;
        else if (node(i).state == NodeState::hidden)
          n = i;
      if (n == none || node(n).length == 0) return;
      const std::int32_t unit = this->sharing_unit();
      std::int32_t usable = std::min(node(n).length, end - node(n).position);
      usable -= std::max(0, usable) % unit;
      if (usable < unit) return;
      const NodeIndex parent = node(n).parent;
      const NodeIndex twin = this->find_child(parent, node(n).name_space, this->key_of(node(n)));
      if (twin == none) {
        stats_.published_tokens += at(usable);
        this->publish(n);
        continue;
      }
      const bool shared = node(n).live > 0 || node(n).held > 1;
      if (!may_merge || shared) return;
      std::int32_t common = 0;
      this->for_each_run(node(n), 0, usable,
                         [&](SlotIndex slot, std::int32_t offset, std::int32_t run, std::int32_t) {
                           const std::int32_t same = common_at(
                               node(twin), common, {&this->token_at(slot, offset), at(run)});
                           common += same;
                           return same == run;
                         });
      common -= common % unit;
      if (node(twin).written < common || !this->has_nodes(2)) return;
      merge_into(s, n, twin, common);
    }
  }

  /// Leading tokens of `tokens` equal to the node's from `first` on.
  [[nodiscard]] std::int32_t common_at(const TreeNode& n, std::int32_t first,
                                       std::span<const Token> tokens) const noexcept {
    const std::int32_t limit = std::min(n.length - first, static_cast<std::int32_t>(tokens.size()));
    std::int32_t common = 0;
    this->for_each_run(n, first, limit,
                       [&](SlotIndex s, std::int32_t offset, std::int32_t run, std::int32_t done) {
                         const Token* held = &this->token_at(s, offset);
                         common += static_cast<std::int32_t>(
                             std::mismatch(held, held + run, tokens.data() + done).first - held);
                         return common == done + run;
                       });
    return common;
  }

  /// Replaces the first `common` tokens of `n`, which only the leaving sequence `s` uses, by those
  /// of its published sibling `twin`; what follows moves below it.
  void merge_into(SequenceIndex s, NodeIndex n, NodeIndex twin, std::int32_t common) noexcept {
    const NodeIndex target = common < node(twin).length ? this->split(twin, common) : twin;
    const NodeIndex duplicate = common < node(n).length ? this->split(n, common) : n;
    const NodeIndex rest = node(duplicate).first_child;  // at most one: nobody else is below
    if (!node(target).active()) {
      if (node(target).retained) this->unretain(target);
      this->set_slots_active(node(target), true);
    }
    ++node(target).held;
    node(target).priority = std::max(node(target).priority, node(duplicate).priority);
    if (rest != none) {
      this->unlink_child(rest);
      this->link_child(target, rest);
    } else {
      sequences_[at(s)].tail = target;
    }
    this->set_slots_active(node(duplicate), false);
    node(duplicate).held = 0;
    this->remove_node(duplicate);
    stats_.merged_tokens += at(common);
  }

  [[nodiscard]] std::int32_t free_pins() const noexcept {
    for (std::size_t i = 0; i < this->pins_.size(); ++i)
      if (this->pins_[i].last == none) return static_cast<std::int32_t>(i);
    return none;
  }

  /// Moves the node to the young end even where it stays pinned: a parent must stay younger than
  /// the child that was moved just before it.
  void change_pins(NodeIndex index, std::int32_t by) noexcept {
    TreeNode& n = node(index);
    const bool retained = n.retained, was_pinned = n.pins > 0;
    if (retained) this->unretain(index);
    n.pins += by;
    if (was_pinned != (n.pins > 0)) {
      this->for_each_run(n, 0, n.length,
                         [&](SlotIndex s, std::int32_t, std::int32_t, std::int32_t) {
                           std::int32_t& pinned = slots_[at(s)].pinned;
                           if (was_pinned ? --pinned == 0 : pinned++ == 0)
                             this->pinned_slots_ += was_pinned ? std::size_t{0} - 1 : 1;
                           return true;
                         });
    }
    if (retained) this->retain(index);
  }
};

}  // namespace detail

CHUNKATTN_NAMESPACE_END
