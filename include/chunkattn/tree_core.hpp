// What happens to sequences in the prefix tree: join, reserve, commit, fork, leave, retire.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <utility>
#include <vector>

#include "config.hpp"
#include "error.hpp"
#include "tree_paths.hpp"

CHUNKATTN_NAMESPACE_BEGIN

namespace detail {

template <TokenType Token, int ChunkSize, ChunkAllocator Allocator, RetentionPolicy Retention>
class TreeCore : public TreePaths<Token, ChunkSize, Allocator, Retention> {
  using Paths = TreePaths<Token, ChunkSize, Allocator, Retention>;
  using Storage = TreeStorage<Token, ChunkSize, Allocator, Retention>;
  using Paths::at, Paths::copies_, Paths::max_length, Paths::sequences_, Paths::slots_;
  using Paths::drop_path, Paths::hand_over, Paths::publish_tail, Paths::use_path;
  using Paths::find, Paths::public_length, Paths::room_at, Paths::space_at, Paths::stats_;
  using typename Paths::Match;
  template <class Core>
  friend class TreeInspector;

 public:
  using Paths::node, Paths::retains, Paths::sequence, Paths::for_each_node;

  TreeCore(Allocator allocator, TreeOptions options, Retention retention)
      : Paths(std::move(allocator), options, std::move(retention)) {
    check_argument(options.min_run >= 0 && options.min_run <= ChunkSize, "min_run", options.min_run,
                   "between 0 and ChunkSize");
    if (this->options_.min_run == 0) this->options_.min_run = std::max(1, ChunkSize / 2);
    check_argument(this->retention_.low_watermark <= this->retention_.high_watermark,
                   "low_watermark", this->retention_.low_watermark, "at most high_watermark");
    this->reserve_level(Storage::pinned_level);
    static std::atomic<std::uint64_t> trees{0};
    id_ = ++trees;
  }

  /// Tells the trees of a process apart, also one that took the place of another in memory. Nothing
  /// is decided by it.
  [[nodiscard]] std::uint64_t id() const noexcept { return id_; }

  // ---- queries -----------------------------------------------------------------------------

  [[nodiscard]] std::uint64_t version() const noexcept { return version_; }
  [[nodiscard]] std::span<const PendingCopy> pending_copies() const noexcept { return copies_; }

  // ---- join --------------------------------------------------------------------------------

  /// The new sequence, or none when the budget is too small; then nothing has changed but what was
  /// cached and not in use.
  SequenceIndex insert(std::span<const Token> prompt, const InsertOptions& options) {
    check_argument(!prompt.empty(), "prompt.size()", 0, "at least one token");
    check_argument(prompt.size() <= at(max_length), "prompt.size()", prompt.size(),
                   "at most 2^30 tokens");
    Match match = find(prompt, options);
    // Everything that may fail comes first: memory for the records, then slots.
    this->reserve_nodes(4);
    this->reserve_level(this->retention_.level(options.priority));
    reserve_sequence();
    if (match.used > 0 && match.used < node(match.last).length)
      match.last = this->split(match.last, match.used);
    struct Pin {
      TreeCore& tree;
      NodeIndex last;
      bool keep = false;
      ~Pin() {
        if (!keep) tree.drop_path(last, &TreeNode::live);
      }
    } pin{*this, match.last};
    use_path(match.last);
    const auto size = static_cast<std::int32_t>(prompt.size());
    const std::int32_t fresh = size - match.length;
    if (!this->acquire(Storage::slots_for(fresh - room_at(match, fresh)))) {
      ++stats_.failed_inserts;
      return none;
    }
    pin.keep = true;

    const SequenceIndex index = new_sequence();
    SequenceRecord& record = sequences_[at(index)];
    record.priority = options.priority;
    record.size = size;
    NodeIndex last = match.last;
    const std::int32_t public_end = public_length(prompt, options);
    const std::int32_t published_end = size - size % this->sharing_unit();
    std::int32_t position = match.length;
    while (position < published_end) {  // at most twice: the public part and the tenant's own
      const std::int32_t end =
          position < public_end ? std::min(public_end, published_end) : published_end;
      last = add_node(last, space_at(options, position, public_end), record, end - position,
                      NodeState::published);
      this->store_tokens(node(last), 0, prompt.subspan(at(position), at(end - position)));
      node(last).writer = index;
      if (node(last).state == NodeState::published) this->publish(last);
      position = end;
    }
    record.tail = add_node(last, options.name_space, record, size - position, NodeState::hidden);
    node(record.tail).tail_of = index;
    node(record.tail).writer = size > position ? index : none;
    this->store_tokens(node(record.tail), 0, prompt.subspan(at(position)));
    this->release_scratch();

    // What a sequence that left had not written is this one's to write now.
    std::int32_t written_end = match.length, own_begin = match.length;
    for (NodeIndex n = match.last; n != root_node; n = node(n).parent) {
      if (node(n).written == node(n).length) continue;
      written_end = node(n).position + node(n).written;
      if (node(n).writer == none) node(n).writer = index;
      if (node(n).writer == index)
        own_begin = written_end;
      else
        record.may_wait = true;
    }
    const auto limit =
        static_cast<std::int32_t>(std::min(options.max_reuse, static_cast<std::size_t>(size)));
    record.cached = std::min(written_end, limit);
    record.cursor = std::min(own_begin, limit);
    ++version_;
    ++stats_.inserts;
    ++stats_.live_sequences;
    stats_.prompt_tokens += at(size);
    stats_.cached_tokens += at(record.cached);
    stats_.pending_tokens += at(own_begin - written_end);
    return index;
  }

  // ---- grow --------------------------------------------------------------------------------

  /// `count` further places; false when the budget is too small, with nothing changed.
  bool reserve(SequenceIndex s, std::int32_t count) {
    SequenceRecord& record = sequences_[at(s)];
    look_ahead(s);
    check_argument(count >= 1 && count <= max_length - record.size - record.reserved, "n", count,
                   "at least 1 and a sequence of at most 2^30 tokens");
    check_argument(record.num_reservations < SequenceRecord::max_reservations, "reservations",
                   +record.num_reservations, "fewer than 4 outstanding: commit the oldest first");
    if (!grow_tail(record, count)) return false;
    record.reservations[record.num_reservations++] = count;
    record.reserved += count;
    node(record.tail).writer = s;
    return true;
  }

  /// Known tokens whose K/V is still to be computed.
  bool append(SequenceIndex s, std::span<const Token> tokens) {
    SequenceRecord& record = sequences_[at(s)];
    check_argument(!tokens.empty(), "tokens.size()", 0, "at least one token");
    check_argument(tokens.size() <= at(max_length - record.size), "tokens.size()", tokens.size(),
                   "a sequence of at most 2^30 tokens");
    check_argument(record.reserved == 0, "reserved places", record.reserved,
                   "none: commit the reservation before appending known tokens");
    const auto count = static_cast<std::int32_t>(tokens.size());
    if (!grow_tail(record, count)) return false;
    TreeNode& tail = node(record.tail);
    this->store_tokens(tail, tail.length - count, tokens);
    tail.writer = s;
    record.size += count;
    return true;
  }

  /// The K/V of these known positions is written.
  void commit(SequenceIndex s, TokenRange range) {
    SequenceRecord& record = sequences_[at(s)];
    if (range.begin < 0 || range.begin > record.cursor) [[unlikely]]
      fail_argument("range.begin", range.begin,
                    "at most " + std::to_string(record.cursor) + ", the next position to compute");
    if (range.length < 0 || range.length > record.size - range.begin) [[unlikely]]
      fail_argument("range.length", range.length,
                    "an end within the " + std::to_string(record.size) + " known tokens");
    for_each_node(s, range, [&](NodeIndex index, std::int32_t offset, std::int32_t length) {
      TreeNode& n = node(index);
      if (n.writer != s || n.written < offset) return;
      n.written = std::max(n.written, offset + length);
      if (n.written == n.length) n.writer = none;
    });
    record.cursor = std::max(record.cursor, range.end());
    acknowledge_copies();
  }

  /// Tokens accepted for the oldest reservation, K/V written; the rest of it is dropped, and with
  /// any drop the later reservations too, since their positions are no longer theirs.
  void commit(SequenceIndex s, std::span<const Token> tokens) {
    SequenceRecord& record = sequences_[at(s)];
    look_ahead(s);
    check_argument(record.num_reservations > 0, "reserved places", 0,
                   "a reservation: call reserve() first");
    if (tokens.size() > at(record.reservations[0])) [[unlikely]]
      fail_argument("tokens.size()", tokens.size(),
                    "at most the " + std::to_string(record.reservations[0]) +
                        " places of the oldest reservation");
    if (record.cursor < record.size) [[unlikely]]
      fail_argument("computed tokens", record.cursor,
                    "all " + std::to_string(record.size) +
                        " known tokens: commit their range before reserved tokens");
    TreeNode& tail = node(record.tail);
    const auto count = static_cast<std::int32_t>(tokens.size());
    if (count == 1)
      this->store_token(tail, record.size - tail.position, tokens[0]);
    else
      this->store_tokens(tail, record.size - tail.position, tokens);
    record.size += count;
    record.cursor = record.size;
    tail.written = record.size - tail.position;
    if (count == record.reservations[0]) {
      record.reserved -= count;
      --record.num_reservations;
      for (int i = 0; i < record.num_reservations; ++i)
        record.reservations[i] = record.reservations[i + 1];
    } else {
      drop_reserved(record);
    }
    if (tail.written == tail.length) tail.writer = none;
    acknowledge_copies();
  }

  // ---- fork --------------------------------------------------------------------------------

  /// A second sequence with the same tokens; none when the budget is too small for its short tail.
  SequenceIndex fork(SequenceIndex s) {
    this->reserve_nodes(3);
    reserve_sequence();
    const std::int32_t known = sequence(s).size - node(sequence(s).tail).position;
    const std::int32_t written = node(sequence(s).tail).written;
    std::int32_t copied = 0;
    if (this->options_.sharing == Sharing::chunk)
      copied = known % ChunkSize;
    else if (known < this->options_.min_run && written >= known)
      copied = known;
    if (copies_.capacity() - copies_.size() < at(ChunkSize))  // one copy per row at the most
      copies_.reserve(2 * copies_.capacity() + at(ChunkSize));
    if (!this->acquire(copied > 0 ? 1 : 0)) return none;

    // Split what is shared off the tail; its places do not move.
    const std::int32_t shared = known - copied;
    if (shared > 0) {
      SequenceRecord& source = sequences_[at(s)];
      if (shared < node(source.tail).length)
        this->split(source.tail, shared);
      else
        retire_tail(s);
      ++stats_.forks_shared;
    } else if (copied > 0) {
      ++stats_.forks_copied;
    }

    const SequenceIndex index = new_sequence();
    SequenceRecord& twin = sequences_[at(index)];
    const SequenceRecord& source = sequence(s);
    const TreeNode& tail = node(source.tail);
    twin.priority = source.priority;
    twin.size = source.size;
    twin.cached = source.cached;
    twin.may_wait = source.may_wait || source.cursor < source.size;
    const NodeIndex parent = tail.parent;
    use_path(parent);
    twin.tail = add_copied_tail(parent, tail.name_space, twin, copied);
    TreeNode& copy = node(twin.tail);
    copy.tail_of = index;
    copy.written = std::min(copied, tail.written);
    copy.writer = copy.written < copied ? index : none;
    twin.cursor = copy.writer == none ? twin.size : copy.position + copy.written;
    if (copied > 0) {
      copy_tokens(tail, copy, copied);
      emit_copies(s, index, tail, copy, copy.written);
      stats_.copied_tokens += at(copied);
    }
    ++version_;
    ++stats_.forks;
    ++stats_.live_sequences;
    return index;
  }

  // ---- leave -------------------------------------------------------------------------------

  void leave(SequenceIndex s) noexcept {
    SequenceRecord& record = sequences_[at(s)];
    drop_reserved(record);
    record.state = SequenceState::leaving;
    ++record.generation;
    record.leave_step = step_;
    --stats_.live_sequences;
    ++stats_.retiring_sequences;
    ++stats_.leaves;
    ++version_;
    if (record.pins > 0 || stats_.live_sequences == 0) cancel_copies(s);
    if constexpr (retains) publish_tail(s, /*may_merge=*/false);
    for (NodeIndex n = record.tail; n != none; n = node(n).parent) {
      --node(n).live;
      ++node(n).held;
      node(n).priority = std::max(node(n).priority, record.priority);
      if (node(n).writer == s) hand_over(n);
    }
    leaving_.push_back(s);  // reserved by reserve_sequence()
    finish_leaving();
  }

  /// Starts a step: the copies that its plan must carry are added to `copies`.
  std::uint64_t begin_step(std::vector<RowCopy>& copies) {
    copies.clear();
    copies.reserve(copies_.size());
    ++step_;
    for (PendingCopy& copy : copies_) {
      if (copy.first_step != 0 && copy.first_step <= retired_) continue;
      copies.push_back(copy.rows);
      if (copy.first_step == 0) copy.first_step = step_;
      copy.last_step = step_;
    }
    return step_;
  }

  /// Steps up to `step` are done on the device.
  void retire(std::uint64_t step) noexcept {
    retired_ = std::max(retired_, std::min(step, step_));
    release_copies(retired_);
    finish_leaving();
  }

  // ---- the cache as a whole ----------------------------------------------------------------

  /// Forgets everything cached. Live sequences stay, but nothing of theirs is found again.
  void clear() noexcept {
    while (this->evict_one_slot()) {
    }
    for (std::size_t i = 1; i < this->nodes_.size(); ++i) {
      const auto n = static_cast<NodeIndex>(i);
      if (node(n).state == NodeState::published)
        this->unpublish(n, NodeState::stale);
      else if (node(n).state == NodeState::hidden)
        node(n).state = NodeState::stale;
    }
    ++version_;
    if (stats_.live_sequences == 0) {
      erase_copies([&](const PendingCopy& copy) { return is_idle(copy); });
      finish_leaving();
    }
    this->notify(CacheEvent{.kind = CacheEvent::Kind::cleared});
  }

  void set_free_sink(std::function<void(SlotIndex)> sink) { this->free_sink_ = std::move(sink); }

  void set_event_sink(std::function<void(const CacheEvent&)> sink) {
    this->event_sink_ = std::move(sink);
  }

 private:
  NodeIndex add_node(NodeIndex parent, Namespace name_space, const SequenceRecord& record,
                     std::int32_t length, NodeState state) noexcept {
    const NodeIndex n = this->new_node(parent, name_space, record.priority, state);
    node(n).live = 1;
    this->extend(n, length);
    return n;
  }

  /// A twin's tail: copied tokens start in a slot of their own.
  NodeIndex add_copied_tail(NodeIndex parent, Namespace name_space, const SequenceRecord& record,
                            std::int32_t length) noexcept {
    const NodeIndex n = this->new_node(parent, name_space, record.priority, NodeState::hidden);
    node(n).live = 1;
    if (length > 0) {
      node(n).first_slot = node(n).last_slot = this->take_scratch(n, no_slot, true);
      this->extend(n, length);
    }
    return n;
  }

  bool grow_tail(SequenceRecord& record, std::int32_t count) {
    TreeNode& tail = node(record.tail);
    if (tail.length > 0 && count <= ChunkSize - this->end_offset(tail)) {
      tail.length += count;  // a tail that holds tokens owns the places behind them
      stats_.stored_tokens += at(count);
      return true;
    }
    const std::int32_t room = this->room(tail);
    if (!this->acquire(Storage::slots_for(count - room))) {
      ++stats_.failed_reserves;
      return false;
    }
    this->extend(record.tail, count);
    this->release_scratch();
    return true;
  }

  /// A step goes over thousands of sequences, which do not fit in a core's cache: asks early for
  /// what those after `s` will touch.
  void look_ahead(SequenceIndex s) const noexcept {
    const std::size_t next = at(s) + 6, later = at(s) + 14;
    if (later >= sequences_.size()) return;
    const NodeIndex tail = sequences_[later].tail;
    if (tail != none) CHUNKATTN_PREFETCH_WRITE(&node(tail));
    const NodeIndex next_tail = sequences_[next].tail;
    if (next_tail != none) this->prefetch_end(node(next_tail));
  }

  void drop_reserved(SequenceRecord& record) noexcept {
    record.num_reservations = 0;
    if (record.reserved == 0) return;
    record.reserved = 0;
    TreeNode& tail = node(record.tail);
    const std::int32_t keep = record.size - tail.position;
    if (tail.written == keep) tail.writer = none;
    if (!deferred()) {
      if (this->release_places(record.tail, keep)) ++version_;
      return;
    }
    // A running step may still read the dropped places: the slots stay as the tail's spare ones.
    stats_.stored_tokens -= at(tail.length - keep);
    if (keep > 0)
      tail.last_slot = this->slot_of(tail, tail.begin + keep - 1);
    else
      tail.last_slot = tail.first_slot;
    tail.length = keep;
  }

  /// The whole tail of `s` becomes an inner node; the sequence goes on in an empty one.
  void retire_tail(SequenceIndex s) noexcept {
    SequenceRecord& record = sequences_[at(s)];
    const NodeIndex old = record.tail;
    if (!deferred()) this->release_places(old, node(old).length);
    const SlotIndex spare =
        this->owns_end(node(old)) ? this->next_slot(node(old).last_slot) : no_slot;
    const NodeIndex fresh =
        this->new_node(old, node(old).name_space, record.priority, NodeState::hidden);
    node(fresh).live = 1;
    node(old).tail_of = none;
    node(fresh).tail_of = s;
    record.tail = fresh;
    if (spare == no_slot) return;
    slots_[at(node(old).last_slot)].next = no_slot;
    slots_[at(spare)].prev = no_slot;
    for (SlotIndex i = spare; i != no_slot; i = this->next_slot(i)) slots_[at(i)].owner = fresh;
    node(fresh).first_slot = node(fresh).last_slot = spare;
  }

  void copy_tokens(const TreeNode& from, const TreeNode& to, std::int32_t count) noexcept {
    this->for_each_run(from, 0, count,
                       [&](SlotIndex s, std::int32_t offset, std::int32_t run, std::int32_t done) {
                         this->store_tokens(to, done, {&this->token_at(s, offset), at(run)});
                         return true;
                       });
  }

  /// Asks for the K/V of the first `count` tokens of `from` at `to`. Rows that are themselves still
  /// to be copied are taken from where they come from, so that no copy depends on another.
  void emit_copies(SequenceIndex source, SequenceIndex target, const TreeNode& from,
                   const TreeNode& to, std::int32_t count) noexcept {
    this->for_each_run(
        from, 0, count,
        [&](SlotIndex slot, std::int32_t offset, std::int32_t run, std::int32_t done) {
          const std::size_t older = slots_[at(slot)].pending_copies > 0 ? copies_.size() : 0;
          for (std::int32_t i = 0; i < run;) {
            PendingCopy copy{
                {slot, offset + i, to.first_slot, to.begin + done + i, run - i}, source, target};
            for (std::size_t k = 0; k < older; ++k) {
              const RowCopy& pending = copies_[k].rows;
              if (pending.target_slot != slot) continue;
              const std::int32_t into = offset + i - pending.target_begin;
              if (into >= 0 && into < pending.length) {
                copy.rows.source_slot = pending.source_slot;
                copy.rows.source_begin = pending.source_begin + into;
                copy.rows.length = std::min(run - i, pending.length - into);
                copy.source = copies_[k].source;
                break;
              }
              if (into < 0) copy.rows.length = std::min(copy.rows.length, -into);
            }
            ++sequences_[at(copy.source)].pins;
            ++sequences_[at(copy.target)].pins;
            ++slots_[at(copy.rows.target_slot)].pending_copies;
            copies_.push_back(copy);
            i += copy.rows.length;
          }
          return true;
        });
  }

  [[nodiscard]] bool deferred() const noexcept {
    return this->options_.async_steps && step_ > retired_;
  }

  void acknowledge_copies() noexcept {
    // A commit says that a step is done; without asynchronous steps that is the last one planned.
    if (!copies_.empty() && !this->options_.async_steps) {
      release_copies(step_);
      finish_leaving();
    }
  }

  void release_copies(std::uint64_t step) noexcept {
    erase_copies(
        [&](const PendingCopy& copy) { return copy.first_step != 0 && copy.last_step <= step; });
  }

  /// No running step may have it.
  [[nodiscard]] bool is_idle(const PendingCopy& copy) const noexcept {
    return copy.first_step == 0 || !this->options_.async_steps || copy.last_step <= retired_;
  }

  template <class F>
  void erase_copies(const F& done) noexcept {
    std::erase_if(copies_, [&](const PendingCopy& copy) {
      if (!done(copy)) return false;
      --sequences_[at(copy.source)].pins;
      --sequences_[at(copy.target)].pins;
      --slots_[at(copy.rows.target_slot)].pending_copies;
      return true;
    });
  }

  /// A twin that leaves before its tail was copied takes the copy back, unless a running step may
  /// have it or another shares the tail. With the last sequence nobody wants any copy, except the
  /// cache.
  void cancel_copies(SequenceIndex s) noexcept {
    if (!retains && stats_.live_sequences == 0)
      return erase_copies([&](const PendingCopy& copy) { return is_idle(copy); });
    TreeNode& tail = node(sequence(s).tail);
    erase_copies([&](const PendingCopy& copy) {
      if (copy.target != s || copy.rows.target_slot != tail.first_slot || !is_idle(copy))
        return false;
      tail.written = 0;
      return true;
    });
  }

  void finish_leaving() noexcept {
    // One that goes may release the last copy that another waits for: repeat while any goes.
    for (std::size_t before = 0; before != leaving_.size() && !leaving_.empty();) {
      before = leaving_.size();
      std::size_t kept = 0, i = 0;
      for (; i < before; ++i) {
        const SequenceIndex s = leaving_[i];
        // In the order of their last steps: where one has to wait, so have all behind it.
        if (this->options_.async_steps && sequence(s).leave_step > retired_) break;
        if (sequence(s).pins > 0)
          leaving_[kept++] = s;
        else
          finish(s);
      }
      if (kept < i)
        leaving_.erase(leaving_.begin() + static_cast<std::ptrdiff_t>(kept),
                       leaving_.begin() + static_cast<std::ptrdiff_t>(i));
    }
    if constexpr (retains) {
      if (stats_.used_slots > this->retention_.high_watermark)
        while (stats_.used_slots > this->retention_.low_watermark && this->evict_one_slot()) {
        }
    }
  }

  void finish(SequenceIndex s) noexcept {
    if constexpr (retains) publish_tail(s, /*may_merge=*/true);
    SequenceRecord& record = sequences_[at(s)];
    TreeNode& tail = node(record.tail);
    if (tail.tail_of == s) {  // published, perhaps with others below it: a node like any other
      this->release_places(record.tail, tail.length);
      tail.tail_of = none;
    }
    drop_path(record.tail, &TreeNode::held);
    record.tail = none;
    record.state = SequenceState::unused;
    record.next_free = free_sequences_;
    free_sequences_ = s;
    --stats_.retiring_sequences;
  }

  void reserve_sequence() {
    if (sequences_.size() + 1 > sequences_.capacity())
      sequences_.reserve(std::max<std::size_t>(16, 2 * sequences_.capacity()));
    if (leaving_.capacity() < sequences_.capacity()) leaving_.reserve(sequences_.capacity());
  }

  SequenceIndex new_sequence() noexcept {
    SequenceIndex s = free_sequences_;
    if (s != none) {
      free_sequences_ = sequences_[at(s)].next_free;
      const std::uint32_t generation = sequences_[at(s)].generation;
      sequences_[at(s)] = SequenceRecord{};
      sequences_[at(s)].generation = generation;
    } else {
      s = static_cast<SequenceIndex>(sequences_.size());
      sequences_.emplace_back();
    }
    sequences_[at(s)].state = SequenceState::live;
    return s;
  }

  std::vector<SequenceIndex> leaving_;
  SequenceIndex free_sequences_ = none;
  std::uint64_t id_ = 0;
  std::uint64_t version_ = 1;
  std::uint64_t step_ = 0, retired_ = 0;
};

}  // namespace detail

CHUNKATTN_NAMESPACE_END
