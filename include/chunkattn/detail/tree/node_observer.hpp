// NodeObserver: the hook by which components keep records of their own about nodes, chunks and
// sequences, such as what events have published (events/), states of recurrent layers, K/V of
// windows and values of tokens (cache/).
#pragma once

#include <cstddef>
#include <cstdint>

#include "../../tree_options.hpp"
#include "../support/array.hpp"
#include "../support/config.hpp"
#include "chunk_table.hpp"

CHUNKATTN_NAMESPACE_BEGIN

namespace detail {

using SequenceIndex = std::int32_t;
struct StepRecord;

/// Is notified of changes of nodes, which it knows by their indices, and of what else a component
/// may have to follow. Nothing that it does may call the tree, or throw, but reserve().
class NodeObserver {
 public:
  virtual ~NodeObserver() = default;

  /// There will be nodes up to this index, and no more before the next call. What it throws the
  /// operation throws that needs more nodes, with nothing changed.
  virtual void reserve(std::size_t num_nodes) = 0;
  /// A node was split: `upper`, its new parent, has its first tokens now.
  virtual void on_split(NodeIndex lower, NodeIndex upper) noexcept = 0;
  /// A node is about to lose its slots after the first `keep`. With keep = 0 it may be about to
  /// become another node.
  virtual void on_release(NodeIndex n, std::int32_t keep) noexcept = 0;
  /// A fork has copies of the first `count` tokens of a node at the beginning of another, `to`.
  /// Their K/V follows with a step.
  virtual void on_copy([[maybe_unused]] NodeIndex from, [[maybe_unused]] NodeIndex to,
                       [[maybe_unused]] std::int32_t count) noexcept {}
  /// The whole of a node is about to be dropped, since its sibling `target` has equal tokens at its
  /// end. What was below it is below `target` already.
  virtual void on_merge(NodeIndex duplicate, NodeIndex target) noexcept = 0;
  /// Whether on_written() is to be called: finish() asks each of a step's rows then.
  [[nodiscard]] virtual bool follows_writes() const noexcept { return false; }
  /// More tokens of a node may be found with their K/V: it was published, or K/V was written.
  virtual void on_written(NodeIndex) noexcept {}
  /// Nothing is found any more.
  virtual void on_clear() noexcept = 0;
  /// No node has slots in the chunk any more: the allocator has it back.
  virtual void on_free(ChunkIndex) noexcept {}
  /// A step is over: with `has_run` it has finished, and its outputs are to be committed; else it
  /// was dropped, and will not run any more. The tree itself has counted nothing of it yet.
  virtual void on_step_end(const StepRecord&, [[maybe_unused]] bool has_run) noexcept {}
  /// A step was dropped in flight: it is void until it is over, with those after it.
  virtual void on_void() noexcept {}
  /// K/V of these positions of a sequence has come from elsewhere.
  virtual void on_load(SequenceIndex, TokenRange) noexcept {}
  /// The path to a node has one pin more, or one less.
  virtual void on_pin(NodeIndex) noexcept {}
  /// A sequence has left, and no step and no copy uses it any more. Its path is still there.
  virtual void on_leave(SequenceIndex) noexcept {}
  /// For tests: whether what it keeps is what the tree says.
  [[nodiscard]] virtual bool is_consistent() const = 0;
};

/// The observers of a tree, in the order in which they came. Costs one comparison where there are
/// none.
class NodeObservers {
 public:
  [[nodiscard]] bool empty() const noexcept { return observers_.empty(); }
  /// Whether any of them follows_writes().
  [[nodiscard]] bool follow_writes() const noexcept { return follow_writes_; }
  /// Calls f(observer) for each.
  template <class F>
  CHUNKATTN_INLINE void notify(const F& f) const {
    if (!observers_.empty()) [[unlikely]]
      for (NodeObserver* const observer : observers_) f(*observer);
  }
  /// The same, the last to come first: what it reads of others is still there.
  template <class F>
  CHUNKATTN_INLINE void notify_last_first(const F& f) const {
    for (std::size_t i = observers_.size(); i-- > 0;) f(*observers_[i]);
  }
  void add(NodeObserver& observer) {
    observers_.push_back(&observer);
    follow_writes_ = follow_writes_ || observer.follows_writes();
  }
  void remove(const NodeObserver& observer) noexcept {
    observers_.erase_if([&](const NodeObserver* other) { return other == &observer; });
    follow_writes_ = false;
    notify([this](const NodeObserver& other) {
      follow_writes_ = follow_writes_ || other.follows_writes();
    });
  }

 private:
  Array<NodeObserver*> observers_;
  bool follow_writes_ = false;
};

}  // namespace detail

CHUNKATTN_NAMESPACE_END
