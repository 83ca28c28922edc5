// WindowChunks: the chunks of a group of layers with a sliding window. Each stands for a chunk of
// the tree, with the same slots; the pool says which of these slots have K/V, and which chunks go
// when there is no room.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "../../allocator.hpp"
#include "../../detail/support/array.hpp"
#include "../../detail/support/config.hpp"
#include "../../detail/tree/chunk_table.hpp"

CHUNKATTN_NAMESPACE_BEGIN

namespace detail {

/// A chunk is held while a live sequence needs it. A chunk that nobody holds is *cached* if its
/// window was kept, oldest first in a list, and free otherwise. Those whose chunk of the tree is
/// pinned have a list of their own, and go last.
class WindowChunks {
 public:
  WindowChunks(const ChunkTable& tree, std::int32_t chunk_size, std::size_t max_chunks,
               std::size_t max_cached)
      : tree_(tree),
        words_((chunk_size + 63) / 64),
        max_chunks_(max_chunks),
        max_cached_(max_cached) {}

  // ---- counts --------------------------------------------------------------------------------

  /// One more than the largest index that was ever taken.
  [[nodiscard]] std::size_t high_water() const noexcept { return records_.size(); }
  [[nodiscard]] std::size_t max_chunks() const noexcept { return max_chunks_; }
  [[nodiscard]] std::size_t num_used() const noexcept { return num_used_; }
  [[nodiscard]] std::size_t num_cached() const noexcept { return num_cached_; }
  [[nodiscard]] std::size_t peak() const noexcept { return peak_; }
  [[nodiscard]] std::uint64_t num_evicted() const noexcept { return num_evicted_; }
  /// Chunks that take() can give.
  [[nodiscard]] std::size_t num_available() const noexcept {
    return max_chunks_ - num_used_ + num_cached_;
  }

  // ---- chunks --------------------------------------------------------------------------------

  /// The group's chunk for a chunk of the tree, or no_chunk.
  [[nodiscard]] CHUNKATTN_INLINE ChunkIndex find(ChunkIndex of_tree) const noexcept {
    if (to_size(of_tree) >= own_.size()) return no_chunk;
    return (std::max)(own_[to_size(of_tree)], no_chunk);
  }
  /// Changes whenever a chunk of the tree that had a chunk gets another one.
  [[nodiscard]] std::uint64_t version() const noexcept { return version_; }
  /// Changes whenever a chunk of the tree gets a chunk.
  [[nodiscard]] std::uint64_t num_taken() const noexcept { return num_taken_; }
  /// Memory for `count` chunks, so that take() throws nothing, and for those of the tree up to an
  /// index.
  void reserve(std::size_t count, ChunkIndex largest_of_tree) {
    if (to_size(largest_of_tree) >= own_.size())
      own_.resize(to_size(largest_of_tree) + 1, no_chunk);
    const std::size_t records = (std::min)(max_chunks_, records_.size() + count);
    if (records <= records_.capacity()) return;
    const std::size_t capacity = (std::min)(max_chunks_, 2 * records);
    written_.reserve(capacity * to_size(words_));
    planned_.reserve(capacity * to_size(words_));
    records_.reserve(capacity);
  }
  /// A chunk for a chunk of the tree that has none, held once, without K/V. Evicts the oldest
  /// cached chunk where there is no room. Call it num_available() times at most.
  ChunkIndex take(ChunkIndex of_tree) noexcept {
    if (free_ == no_chunk && records_.size() >= max_chunks_) evict();
    ChunkIndex c = free_;
    if (c != no_chunk) {
      free_ = records_[to_size(c)].newer;
    } else {
      c = static_cast<ChunkIndex>(records_.size());
      records_.push_back({});
      written_.resize(records_.size() * to_size(words_));
      planned_.resize(records_.size() * to_size(words_));
    }
    records_[to_size(c)] = {.of_tree = of_tree, .holds = 1};
    std::fill_n(&written_[at({c})], words_, 0);
    if (own_[to_size(of_tree)] == lost) ++version_;
    own_[to_size(of_tree)] = c;
    peak_ = (std::max)(peak_, ++num_used_);
    ++num_taken_;
    return c;
  }
  void hold(ChunkIndex c) noexcept {
    Record& record = records_[to_size(c)];
    if (record.holds++ == 0) unlink(c);
  }
  void release(ChunkIndex c) noexcept {
    Record& record = records_[to_size(c)];
    if (--record.holds > 0) return;
    if (record.of_tree == no_chunk || !record.kept) return free(c);
    link(c);
    if (num_cached_ > max_cached_) evict();
  }
  /// Caches the chunk when nobody holds it any more.
  void keep(ChunkIndex c) noexcept { records_[to_size(c)].kept = true; }
  /// Its chunk of the tree is pinned, or no longer.
  void on_pin(ChunkIndex c) noexcept {
    if (records_[to_size(c)].holds > 0) return;
    unlink(c);
    link(c);
  }
  [[nodiscard]] bool is_kept(ChunkIndex c) const noexcept { return records_[to_size(c)].kept; }
  /// The chunk of the tree is free: what the group has of it is nobody's K/V.
  void detach(ChunkIndex of_tree) noexcept {
    const ChunkIndex c = find(of_tree);
    if (to_size(of_tree) < own_.size()) own_[to_size(of_tree)] = no_chunk;
    if (c == no_chunk) return;
    Record& record = records_[to_size(c)];
    record.of_tree = no_chunk;
    if (record.is_scratch) {
      record.is_scratch = false;
      return release(c);
    }
    if (record.holds > 0) return;
    unlink(c);
    free(c);
  }
  /// A held chunk stays held until the tree frees its own: drafts of a tree may be copied from it.
  void set_scratch(ChunkIndex c) noexcept {
    Record& record = records_[to_size(c)];
    if (!record.is_scratch) ++record.holds;
    record.is_scratch = true;
  }
  /// Is called with each chunk that is about to be free.
  void set_free_sink(std::unique_ptr<FreeSink> sink) { free_sink_ = std::move(sink); }
  /// Another one, or null.
  void set_watch(FreeSink* watch) noexcept { watch_ = watch; }
  /// Frees what is cached.
  void clear() noexcept {
    for (const List& list : lists_)
      while (list.oldest != no_chunk) {
        const ChunkIndex c = list.oldest;
        unlink(c);
        free(c);
      }
  }
  /// The chunk of the tree that it stands for, or no_chunk.
  [[nodiscard]] ChunkIndex of_tree(ChunkIndex c) const noexcept {
    return records_[to_size(c)].of_tree;
  }
  /// Whether it still stands for this chunk of the tree.
  [[nodiscard]] bool stands_for(ChunkIndex c, ChunkIndex of_tree) const noexcept {
    return this->of_tree(c) == of_tree;
  }
  [[nodiscard]] std::int32_t num_holds(ChunkIndex c) const noexcept {
    return records_[to_size(c)].holds;
  }

  // ---- slots ---------------------------------------------------------------------------------

  /// Slots of one word, of a chunk that others may have.
  struct Slots {
    ChunkIndex chunk = no_chunk;
    std::int32_t word = 0;
    std::uint64_t mask = 0;
  };
  /// One slot.
  [[nodiscard]] static Slots slot(ChunkIndex c, std::int32_t offset) noexcept {
    return {c, offset >> 6, std::uint64_t{1} << (offset & 63)};
  }
  /// Calls f(Slots) for the slots [first, first + count) of a chunk, word by word.
  template <class F>
  CHUNKATTN_INLINE static void for_each_word(ChunkIndex c, std::int32_t first, std::int32_t count,
                                             const F& f) {
    for (const std::int32_t end = first + count; first < end;) {
      const std::int32_t bit = first & 63, run = (std::min)(64 - bit, end - first);
      f(Slots{c, first >> 6, ~std::uint64_t{0} >> (64 - run) << bit});
      first += run;
    }
  }
  /// Of these slots, those that have K/V.
  [[nodiscard]] std::uint64_t written(const Slots& s) const noexcept {
    return written_[at(s)] & s.mask;
  }
  /// Of these slots, those that have K/V, or that a step which is not over is to write.
  [[nodiscard]] std::uint64_t known(const Slots& s) const noexcept {
    return (written_[at(s)] | planned_[at(s)]) & s.mask;
  }
  /// A step is to write them.
  void plan(const Slots& s) noexcept { planned_[at(s)] |= s.mask; }
  /// That step is over. With `counts` it has written them.
  void settle(const Slots& s, bool counts) noexcept {
    planned_[at(s)] &= ~s.mask;
    if (counts) written_[at(s)] |= s.mask;
  }
  /// Their K/V is that of no token any more.
  void forget(const Slots& s) noexcept { written_[at(s)] &= ~s.mask; }

  /// No slot has any.
  void forget_all() noexcept { std::fill(written_.begin(), written_.end(), 0); }

  /// For tests: adds those that set_scratch() holds.
  void count_scratch(Array<std::int32_t>& holds) const {
    for (std::size_t c = 0; c < records_.size(); ++c) holds[c] += records_[c].is_scratch ? 1 : 0;
  }
  /// For tests: whether lists and counts say the same.
  [[nodiscard]] bool is_consistent() const {
    std::size_t used = 0, cached = 0, listed = 0;
    for (std::size_t i = 0; i < records_.size(); ++i) {
      const Record& record = records_[i];
      const auto c = static_cast<ChunkIndex>(i);
      if (record.of_tree != no_chunk && find(record.of_tree) != c) return false;
      const bool is_cached = record.holds == 0 && record.of_tree != no_chunk;
      if (record.holds < 0 || (is_cached && !record.kept)) return false;
      used += record.holds > 0 || is_cached;
      cached += is_cached;
    }
    for (const List& list : lists_)
      for (ChunkIndex c = list.oldest; c != no_chunk; c = records_[to_size(c)].newer, ++listed)
        if ((tree_[records_[to_size(c)].of_tree].pinned > 0) != (&list == &lists_[1])) return false;
    for (std::size_t i = 0; i < own_.size(); ++i)
      if (own_[i] >= 0 && !stands_for(own_[i], static_cast<ChunkIndex>(i))) return false;
    return used == num_used_ && cached == num_cached_ && listed == cached && used <= max_chunks_ &&
           cached <= max_cached_;
  }

 private:
  struct Record {
    ChunkIndex of_tree = no_chunk;
    std::int32_t holds = 0;
    bool kept = false, is_scratch = false;
    bool is_pinned = false;                         ///< cached: which list it is in
    ChunkIndex older = no_chunk, newer = no_chunk;  ///< cached; `newer` links free ones, too
  };

  struct List {
    ChunkIndex oldest = no_chunk, newest = no_chunk;
  };

  [[nodiscard]] std::size_t at(const Slots& s) const noexcept {
    return to_size(s.chunk) * to_size(words_) + to_size(s.word);
  }
  [[gnu::noinline]] void free(ChunkIndex c) noexcept {
    if (free_sink_) [[unlikely]]
      (*free_sink_)(c);
    if (watch_ != nullptr) [[unlikely]]
      (*watch_)(c);
    Record& record = records_[to_size(c)];
    if (record.of_tree != no_chunk) own_[to_size(record.of_tree)] = lost;
    record = {.newer = free_};
    free_ = c;
    --num_used_;
  }
  void evict() noexcept {
    const ChunkIndex c = lists_[lists_[0].oldest == no_chunk ? 1 : 0].oldest;
    unlink(c);
    free(c);
    ++num_evicted_;
  }
  void link(ChunkIndex c) noexcept {
    Record& record = records_[to_size(c)];
    record.is_pinned = tree_[record.of_tree].pinned > 0;
    List& list = lists_[record.is_pinned ? 1 : 0];
    record.older = list.newest;
    record.newer = no_chunk;
    (list.newest == no_chunk ? list.oldest : records_[to_size(list.newest)].newer) = c;
    list.newest = c;
    ++num_cached_;
  }
  void unlink(ChunkIndex c) noexcept {
    const Record& record = records_[to_size(c)];
    List& list = lists_[record.is_pinned ? 1 : 0];
    (record.older == no_chunk ? list.oldest : records_[to_size(record.older)].newer) = record.newer;
    (record.newer == no_chunk ? list.newest : records_[to_size(record.newer)].older) = record.older;
    --num_cached_;
  }

  static constexpr ChunkIndex lost = no_chunk - 1;

  const ChunkTable& tree_;
  const std::int32_t words_;  ///< of bits for each chunk
  const std::size_t max_chunks_, max_cached_;
  Array<Record> records_;
  Array<ChunkIndex> own_;  ///< by chunk of the tree; no_chunk, or `lost`: there was one
  Array<std::uint64_t> written_, planned_;
  ChunkIndex free_ = no_chunk;
  List lists_[2];  ///< of cached chunks: those that are not pinned, and those that are
  std::size_t num_used_ = 0, num_cached_ = 0, peak_ = 0;
  std::uint64_t num_evicted_ = 0, num_taken_ = 0, version_ = 0;
  std::unique_ptr<FreeSink> free_sink_;
  FreeSink* watch_ = nullptr;
};

}  // namespace detail

CHUNKATTN_NAMESPACE_END
