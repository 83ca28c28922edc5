// What happens to sequences in the prefix tree between steps: join, grow, fork, and the cache as a
// whole. Steps are in tree_steps.hpp, leaving in tree_leaving.hpp.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "../base/config.hpp"
#include "../base/error.hpp"
#include "steps.hpp"

CHUNKATTN_NAMESPACE_BEGIN

namespace detail {

template <TokenType Token, int ChunkSize, ChunkAllocator Allocator, RetentionPolicy Retention>
class TreeCore : public TreeSteps<Token, ChunkSize, Allocator, Retention> {
  using Steps = TreeSteps<Token, ChunkSize, Allocator, Retention>;
  using Storage = TreeStorage<Token, ChunkSize, Allocator, Retention>;
  using Steps::at, Steps::copies_, Steps::max_length, Steps::sequences_, Steps::slots_;
  using Steps::drop_path, Steps::use_path, Steps::version_;
  using Steps::public_length, Steps::room_at, Steps::space_at, Steps::stats_;
  using typename Steps::Match;
  template <class Core>
  friend class TreeInspector;

 public:
  using Steps::for_each_node, Steps::node, Steps::retains, Steps::sequence;
  using token_type = Token;

  TreeCore(Allocator allocator, TreeOptions options, Retention retention)
      : Steps(std::move(allocator), options, std::move(retention)) {
    check_argument(options.min_run >= 0 && options.min_run <= ChunkSize, "min_run", options.min_run,
                   "between 0 and ChunkSize");
    check_argument(options.sharing == Sharing::token || options.sharing == Sharing::chunk,
                   "sharing", static_cast<int>(options.sharing),
                   "Sharing::token or Sharing::chunk");
    if (this->options_.min_run == 0) this->options_.min_run = std::max(1, ChunkSize / 2);
    Retention& policy = this->retention_;
    if (policy.low_watermark == RetentionBudget{}.low_watermark)
      policy.low_watermark = policy.high_watermark;
    check_argument(policy.low_watermark <= policy.high_watermark, "low_watermark",
                   policy.low_watermark, "at most high_watermark");
    this->reserve_level(Storage::pinned_level);
    static std::atomic<std::uint64_t> trees{0};
    id_ = ++trees;
  }

  /// Tells the trees of a process apart, also one that took the place of another in memory. Nothing
  /// is decided by it.
  [[nodiscard]] std::uint64_t id() const noexcept { return id_; }

  // ---- join --------------------------------------------------------------------------------

  /// The new sequence, or none when the budget is too small; then nothing has changed but what was
  /// cached and not in use.
  SequenceIndex insert(std::span<const Token> prompt, const InsertOptions& options) {
    check_argument(!prompt.empty(), "prompt.size()", 0, "at least one token");
    check_argument(prompt.size() <= at(max_length), "prompt.size()", prompt.size(),
                   "at most 2^30 tokens");
    Match match = this->find(prompt, options);
    const std::int32_t found = match.length;
    if (!options.share_pending) this->trim_to_written(match);
    // Everything that may fail comes first: memory for the records, then slots.
    this->reserve_nodes(4);
    this->reserve_level(this->retention_.level(options.priority));
    this->reserve_sequence();
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

    const SequenceIndex index = this->new_sequence();
    SequenceRecord& record = sequences_[at(index)];
    record.priority = options.priority;
    record.size = size;
    NodeIndex last = match.last;
    const std::int32_t public_end = public_length(prompt, options);
    // What repeats another's pending tokens cannot be found; it stays private until it leaves.
    const std::int32_t published_end =
        match.length < found ? match.length : size - size % this->sharing_unit();
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
    const auto limit = static_cast<std::int32_t>(
        std::min(options.max_reuse, at(options.compute_last ? size - 1 : size)));
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

  /// Known tokens whose K/V is still to be computed.
  bool append(SequenceIndex s, std::span<const Token> tokens) {
    SequenceRecord& record = sequences_[at(s)];
    check_argument(!tokens.empty(), "tokens.size()", 0, "at least one token");
    check_argument(tokens.size() <= at(max_length - record.size), "tokens.size()", tokens.size(),
                   "a sequence of at most 2^30 tokens");
    check_argument(record.reserved == 0, "outputs to come", record.reserved,
                   "none: commit the outputs of finished steps, or drop them, before append()");
    const auto count = static_cast<std::int32_t>(tokens.size());
    if (!this->grow_tail(record, count)) return false;
    TreeNode& tail = node(record.tail);
    this->store_tokens(tail, tail.length - count, tokens);
    tail.writer = s;
    record.size += count;
    return true;
  }

  /// The topmost run of positions that are this sequence's to write.
  [[nodiscard]] TokenRange loadable(SequenceIndex s) const noexcept {
    const SequenceRecord& record = sequence(s);
    std::int32_t begin = record.size, end = record.size;
    if (record.steps > 0) return {record.size, 0};
    for (NodeIndex n = record.tail; n != root_node; n = node(n).parent) {
      const std::int32_t first = node(n).position + node(n).written;
      const std::int32_t last = std::min(node(n).end(), record.size);
      if (first >= last || node(n).writer != s) continue;
      if (begin != last) end = last;  // not in one run with what stands below
      begin = first;
    }
    return {begin, end - begin};
  }

  /// K/V of these positions has come from elsewhere: a file, another machine, host memory.
  void mark_loaded(SequenceIndex s, TokenRange range) {
    SequenceRecord& record = sequences_[at(s)];
    check_argument(range.end() <= record.size, "range.end()", range.end(),
                   "at most the known tokens");
    check_argument(record.steps == 0, "sequence", "in a step",
                   "a sequence that no open step and no step in flight has");
    for_each_node(s, range, [&](NodeIndex index, std::int32_t offset, std::int32_t length) {
      const TreeNode& n = node(index);
      if (n.written >= offset + length) return;
      if (n.writer != s) [[unlikely]]
        fail_argument("range.begin", range.begin,
                      "positions that are this sequence's to write; another is to write position " +
                          std::to_string(n.position + n.written) + ": take_over() first");
      if (n.written < offset) [[unlikely]]
        fail_argument("range.begin", range.begin,
                      "at most " + std::to_string(n.position + n.written) +
                          ", the first position without K/V");
    });
    for_each_node(s, range, [&](NodeIndex index, std::int32_t offset, std::int32_t length) {
      TreeNode& n = node(index);
      if (n.written >= offset + length) return;
      n.scheduled = offset + length;
      Steps::set_written(n, offset + length);
    });
    if (range.begin <= record.cursor) record.cursor = std::max(record.cursor, range.end());
    record.computed = std::max(record.computed, range.end());
  }

  /// Makes what others are still to write on this path its own job, where no step is at it.
  /// Returns the tokens that it got.
  std::int32_t take_over(SequenceIndex s) noexcept {
    SequenceRecord& record = sequences_[at(s)];
    std::int32_t taken = 0;
    this->for_each_awaited(s, [&](NodeIndex index) {
      TreeNode& n = node(index);
      SequenceRecord& before = sequences_[at(n.writer)];
      if (n.scheduled > n.written || (this->any_void_ && before.steps > 0)) return;
      const std::int32_t first = n.position + n.written;
      if (before.cursor >= first)
        before.cursor = std::max(before.cursor, std::min(n.end(), before.size - 1));
      before.may_wait = true;
      n.writer = s;
      record.cursor = std::min(record.cursor, first);
      taken += n.length - n.written;
    });
    if (taken > 0) ++stats_.hand_overs;
    return taken;
  }

  // ---- fork --------------------------------------------------------------------------------

  /// A second sequence with the first `length` tokens; none when the budget is too small for its
  /// short tail. With `compute_last` the last token is computed again in any case.
  ///
  /// A few last tokens that are not computed yet are the twin's own to compute, so that neither
  /// waits for the other. Of the rest a short private tail is copied, a longer one shared.
  SequenceIndex fork(SequenceIndex s, std::int32_t length, bool compute_last) {
    this->reserve_nodes(3);
    this->reserve_sequence();
    const NodeIndex last = node_of(s, length - 1);
    const std::int32_t known = length - node(last).position;
    const bool whole = length == sequence(s).size;
    const bool in_tail = last == sequence(s).tail;
    const std::int32_t unwritten = std::max(0, known - node(last).written);
    const std::int32_t own = unwritten <= few_tokens ? unwritten : 0;
    std::int32_t copied = own;  // tokens at the end that become the twin's own
    if (this->options_.sharing == Sharing::chunk)
      copied = known % ChunkSize;
    else if (in_tail && known - own < this->options_.min_run && own == unwritten)
      copied = known;
    const std::int32_t rows =  // of these, with K/V to copy
        in_tail ? std::clamp(node(last).written - (known - copied), 0, copied) : 0;
    if (rows > 0 && copies_.capacity() - copies_.size() < at(ChunkSize))  // one per row at the most
      copies_.reserve(2 * copies_.capacity() + at(ChunkSize));
    if (!this->acquire(Storage::slots_for(copied))) return none;

    // Split what is shared off; its places do not move.
    const std::int32_t shared = known - copied;
    NodeIndex parent = last;
    if (shared == 0)
      parent = node(last).parent;
    else if (shared < node(last).length)
      parent = this->split(last, shared);
    else if (in_tail)
      this->retire_tail(s);
    ++(copied > 0 && shared == 0 ? stats_.forks_copied : stats_.forks_shared);

    const SequenceIndex index = this->new_sequence();
    SequenceRecord& twin = sequences_[at(index)];
    const SequenceRecord& source = sequence(s);
    twin.priority = source.priority;
    twin.size = length;
    twin.cached = std::min(source.cached, length);
    twin.may_wait = source.may_wait || source.cursor < source.size || source.steps > 0;
    use_path(parent);
    twin.tail = add_copied_tail(parent, node(source.tail), twin, copied);
    TreeNode& copy = node(twin.tail);
    copy.tail_of = index;
    copy.written = copy.scheduled = rows;
    copy.writer = rows < copied ? index : none;
    // Where all of a whole sequence is computed, its next token is another one.
    const bool computed = whole && !compute_last && source.cursor >= length && copied == rows;
    twin.cursor = std::min(copy.position + rows, computed ? length : length - 1);
    if (copied > 0) {
      const TreeNode& from = node(last);  // the lower part, if it was split
      copy_tokens(from, copy, copied);
      if (rows > 0) this->emit_copies(s, index, from, copy, rows);
      stats_.copied_tokens += at(rows);
    }
    ++version_;
    ++stats_.forks;
    ++stats_.live_sequences;
    return index;
  }

  // ---- the cache as a whole ----------------------------------------------------------------

  /// Forgets everything cached. Live sequences stay, but nothing of theirs is found again.
  void clear() noexcept {
    for (std::size_t i = 0; i < this->pins_.size(); ++i)
      this->unpin(static_cast<std::int32_t>(i), this->pins_[i].generation);
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
      this->forget_copies();
      this->finish_leaving();
    }
    this->notify(CacheEvent{.kind = CacheEvent::Kind::cleared});
  }

  void set_free_sink(std::function<void(SlotIndex)> sink) { this->free_sink_ = std::move(sink); }

  void set_event_sink(std::function<void(const CacheEvent&)> sink) {
    this->event_sink_ = std::move(sink);
  }

 private:
  /// Tokens that two sequences compute each for itself rather than one for both.
  static constexpr std::int32_t few_tokens = 4;

  /// The node of the path that holds this position.
  [[nodiscard]] NodeIndex node_of(SequenceIndex s, std::int32_t position) const noexcept {
    NodeIndex n = sequence(s).tail;
    while (node(n).position > position) n = node(n).parent;
    return n;
  }

  NodeIndex add_node(NodeIndex parent, Namespace name_space, const SequenceRecord& record,
                     std::int32_t length, NodeState state) noexcept {
    const NodeIndex n = this->new_node(parent, name_space, record.priority, state);
    node(n).live = 1;
    this->extend(n, length);
    return n;
  }

  /// A twin's tail, of the same namespace as the source's, and as old: stale stays stale. Copied
  /// tokens start in a slot of their own.
  NodeIndex add_copied_tail(NodeIndex parent, const TreeNode& source, const SequenceRecord& record,
                            std::int32_t length) noexcept {
    const NodeIndex n = this->new_node(parent, source.name_space, record.priority, source.state);
    node(n).live = 1;
    if (length > 0) {
      node(n).first_slot = node(n).last_slot = this->take_scratch(n, no_slot);
      this->extend(n, length);
    }
    return n;
  }

  void copy_tokens(const TreeNode& from, const TreeNode& to, std::int32_t count) noexcept {
    this->for_each_run(from, 0, count,
                       [&](SlotIndex s, std::int32_t offset, std::int32_t run, std::int32_t done) {
                         this->store_tokens(to, done, {&this->token_at(s, offset), at(run)});
                         return true;
                       });
  }

  std::uint64_t id_ = 0;
};

}  // namespace detail

CHUNKATTN_NAMESPACE_END
