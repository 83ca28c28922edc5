// SharedTree and Handle: what a tree and its handles have in common. The tree proper, the handles
// that were dropped by other threads than the one that uses the tree, a step's record and its rows.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include "../../tree_options.hpp"
#include "../support/array.hpp"
#include "../support/check.hpp"
#include "../support/config.hpp"
#include "chunk_table.hpp"
#include "core.hpp"
#include "step_table.hpp"

CHUNKATTN_NAMESPACE_BEGIN

template <class Tree>
class Finished;

namespace detail {

/// Tells the threads of a process apart, those that have ended too (whose ids and addresses are
/// used again).
inline std::uint64_t thread_number() noexcept {
  static std::atomic<std::uint64_t> threads{0};
  thread_local std::uint64_t number = 0;
  if (number == 0) [[unlikely]]
    number = threads.fetch_add(1, std::memory_order_relaxed) + 1;
  return number;
}

/// What a handle stands for.
enum class HandleKind : std::uint8_t { sequence, step, pin };

/// A handle that another thread dropped than the one that calls the tree.
struct DroppedHandle {
  HandleKind what;
  std::int32_t index;
};
/// Into an order that does not depend on which thread came first.
#if CHUNKATTN_BODIES
CHUNKATTN_FUNCTION void sort(Array<DroppedHandle>& dropped) {
  std::sort(dropped.begin(), dropped.end(), [](const DroppedHandle& a, const DroppedHandle& b) {
    return a.what != b.what ? a.what < b.what : a.index < b.index;
  });
}
#else
void sort(Array<DroppedHandle>& dropped);
#endif

/// Kept alive by the tree and by every handle; `tree` is empty once the tree is gone.
///
/// A handle may be dropped by any thread. On the thread that last called the tree it acts at once.
/// On another one it is put on a list, and acts at the next call that does enter(); docs/cache.md
/// says which do ("Threads"). So the tree itself is only ever touched by the thread that calls it.
template <class Tree>
class SharedTree {
 public:
  template <class... Arguments>
  explicit SharedTree(Arguments&&... arguments)
      : tree(std::in_place, std::forward<Arguments>(arguments)...), owner_(thread_number()) {}

  std::optional<Tree> tree;

  /// The calling thread uses the tree: resolves what other threads dropped meanwhile.
  void enter() {
    owner_.store(thread_number(), std::memory_order_relaxed);
    if (any_dropped_.load(std::memory_order_acquire)) resolve_dropped();
  }

  /// Makes sure that one more handle can be dropped without allocating.
  void expect_handle() {
    if (handles_ < room_) return;
    const std::lock_guard guard(mutex_);
    dropped_.reserve(2 * handles_ + 16);
    room_ = dropped_.capacity();
  }
  /// A handle was made.
  void count_handle() noexcept { ++handles_; }

  template <HandleKind What>
  void drop(std::int32_t index) noexcept {
    if (owner_.load(std::memory_order_relaxed) == thread_number()) [[likely]]
      return act(What, index);
    const std::lock_guard guard(mutex_);
    dropped_.push_back({What, index});
    any_dropped_.store(true, std::memory_order_release);
  }

 private:
  CHUNKATTN_COLD void resolve_dropped() {
    const std::lock_guard guard(mutex_);
    sort(dropped_);
    for (const DroppedHandle& dropped : dropped_) act(dropped.what, dropped.index);
    dropped_.clear();
    any_dropped_.store(false, std::memory_order_relaxed);
  }

  CHUNKATTN_INLINE void act(HandleKind what, std::int32_t index) noexcept {
    --handles_;
    if (!tree) return;
    auto& core = tree->core;
    switch (what) {
      case HandleKind::sequence:
        core.leave(index);
        break;
      case HandleKind::step:
        core.drop_step(index);
        break;
      case HandleKind::pin:
        core.retention.unpin(index);
        break;
    }
  }

  std::atomic<std::uint64_t> owner_;
  std::atomic<bool> any_dropped_{false};
  std::size_t handles_ = 0, room_ = 0;
  std::mutex mutex_;
  Array<DroppedHandle> dropped_;
};

/// Sole ownership of a tree's sequence, pin or step. Its end notifies the tree, if there
/// still is one; until then no other gets the record.
template <class Tree, HandleKind What>
struct Handle {
  std::shared_ptr<SharedTree<Tree>> shared;  ///< null: empty, or moved from
  std::int32_t index = none;                 ///< of its record

  Handle() = default;
  Handle(std::shared_ptr<SharedTree<Tree>> of, std::int32_t record)
      : shared(std::move(of)), index(record) {
    shared->count_handle();
  }
  Handle(Handle&& other) noexcept = default;
  Handle& operator=(Handle&& other) noexcept {
    Handle old(std::move(other));  // after the exchange, which drops it
    shared.swap(old.shared);
    std::swap(index, old.index);
    return *this;
  }
  ~Handle() {
    if (shared) shared->template drop<What>(index);
  }

  /// Whether its tree is still there.
  [[nodiscard]] bool has_tree() const noexcept { return shared && shared->tree; }
  /// Throws InvalidArgument where it is empty, or the tree is gone.
  [[nodiscard]] Tree& tree() const {
    if (!has_tree()) [[unlikely]]
      fail_dead();
    return *shared->tree;
  }

 private:
  [[noreturn]] void fail_dead() const {
    constexpr bool is_step = What == HandleKind::step;
    constexpr const char* name = is_step ? "step" : "sequence";
    if (shared == nullptr)
      fail_argument(name, is_step ? "moved-from" : "empty",
                    is_step ? "a step that was not moved from"
                            : "a live handle, not one moved from or used after leave()");
    fail_argument(name, "orphaned",
                  is_step ? "a step whose tree still exists" : "a handle whose tree still exists");
  }
};

/// Ownership of a step's record, from begin_step() on until its outputs are given up.
template <class Tree>
struct StepHandle : Handle<Tree, HandleKind::step> {
  StepHandle(const std::shared_ptr<SharedTree<Tree>>& of, std::int32_t record)
      : StepHandle::Handle(of, record), number(of->tree->core.steps[record].number) {}

  std::uint64_t number;  ///< of the step

  [[nodiscard]] StepRecord& record() const { return this->tree().core.steps[this->index]; }
  /// The tree's core, with what other threads dropped meanwhile resolved.
  auto& enter() const {
    auto& core = this->tree().core;
    this->shared->enter();
    return core;
  }
};

/// Entry `index` of a step.
inline ScheduledSequence row_of(const StepRecord& step, std::size_t index) noexcept {
  const StepEntry& entry = step.entries[index];
  ScheduledSequence row{entry.id(),      static_cast<std::int32_t>(index),
                        entry.begin,     entry.first_row,
                        entry.length,    entry.drafts,
                        entry.has_output};
  if (const auto tree = step.tree_of(entry); !tree.empty()) {
    row.num_drafts = static_cast<std::int32_t>(tree.size());
    row.num_rows += row.num_drafts - entry.drafts;
  }
  return row;
}

/// A range of the ScheduledSequence whose outputs can be committed, in the order of add(): not
/// those of sequences that have left, of parts of a prompt, or of rows that were computed after a
/// draft that was rejected. What is committed while a loop goes over it is skipped by later loops,
/// and counted no longer. See Finished::rows().
template <class Tree>
class OutputRows {
 public:
  /// Skips rows without output. Valid while the step's Finished is there.
  class iterator {
   public:
    using iterator_concept = std::forward_iterator_tag;  ///< values are made on the fly, so that
    using iterator_category = std::input_iterator_tag;   ///< before C++20 it is no forward iterator
    using value_type = ScheduledSequence;                ///< what it gives
    using difference_type = std::ptrdiff_t;              ///< of positions
    using pointer = const ScheduledSequence*;            ///< not used
    using reference = const ScheduledSequence;  ///< a value; const, so that `auto&` may name it

    /// Of no step.
    iterator() = default;
    /// At the first row from `at` on that has an output.
    iterator(const TreeCore& core, const StepRecord& record, std::size_t at)
        : core_(&core), record_(&record), at_(at) {
      skip();
    }
    /// The row.
    reference operator*() const { return row_of(*record_, at_); }
    /// On to the next.
    iterator& operator++() {
      ++at_;
      skip();
      return *this;
    }
    /// On to the next; where it was.
    iterator operator++(int) {
      iterator before = *this;
      ++*this;
      return before;
    }
    /// Whether both stand at the same row.
    bool operator==(const iterator& other) const { return at_ == other.at_; }
    /// Rows from `first` to `last`; takes as long as going there.
    friend difference_type operator-(iterator last, iterator first) {
      if (last.at_ < first.at_) return -(first - last);
      difference_type count = 0;
      for (; first.at_ < last.at_; ++first) ++count;
      return count;
    }

   private:
    void skip() {
      while (at_ < record_->entries.size() && !core_->has_output(record_->entries[at_])) ++at_;
    }
    const TreeCore* core_ = nullptr;
    const StepRecord* record_ = nullptr;
    std::size_t at_ = 0;
  };
  /// The first row. Throws InvalidArgument where the step's Finished is gone.
  [[nodiscard]] iterator begin() const {
    const StepRecord& step = record();
    return {shared_->tree->core, step, 0};
  }
  /// After the last. Throws as begin() does.
  [[nodiscard]] iterator end() const {
    const StepRecord& step = record();
    return {shared_->tree->core, step, step.entries.size()};
  }
  /// How many rows there are. Takes as long as going over them. Throws as begin() does.
  [[nodiscard]] std::size_t size() const { return to_size(end() - begin()); }
  /// Whether there is none. Throws as begin() does.
  [[nodiscard]] bool empty() const { return begin() == end(); }

 private:
  friend class Finished<Tree>;
  using Shared = SharedTree<Tree>;

  OutputRows(std::shared_ptr<const Shared> shared, const StepRecord& record)
      : shared_(std::move(shared)), record_(&record), number_(record.number) {}

  /// A record lives as long as its tree, and stands for one step after the other.
  [[nodiscard]] const StepRecord& record() const {
    if (!shared_->tree || record_->number != number_ || record_->state != StepState::finished)
        [[unlikely]]
      fail_argument("rows()", "of a step that is over",
                    "a Finished that is still there: keep it while going over its rows");
    return *record_;
  }

  std::shared_ptr<const Shared> shared_;  // the tree may be gone, and the record with it
  const StepRecord* record_;
  std::uint64_t number_;
};

}  // namespace detail

CHUNKATTN_NAMESPACE_END
