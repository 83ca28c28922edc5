// The plain model of the chunks of a group of layers with a window: sets of rows, gone over from
// end to end after each operation. What the group holds, caches, evicts, says to have, and where
// sequences can be resumed must be what the model says.
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "chunkattn/cache/windowed_layers.hpp"
#include "chunkattn/detail/tree/core.hpp"

namespace test {

/// Hears of sequences, steps and chunks of the tree as the group does; the engine says what it
/// resumes and plans. Knows of the group which of its chunks stands for one of the tree's, when it
/// was taken, and nothing else.
template <class Layers>
class PlainWindowPool final : public chunkattn::detail::NodeObserver {
  using TreeCore = chunkattn::detail::TreeCore;
  using StepRecord = chunkattn::detail::StepRecord;
  using StepEntry = chunkattn::detail::StepEntry;
  using SequenceIndex = chunkattn::detail::SequenceIndex;
  using NodeIndex = chunkattn::detail::NodeIndex;
  using ChunkIndex = chunkattn::ChunkIndex;
  static constexpr int chunk_size = Layers::chunk_size;

 public:
  PlainWindowPool(TreeCore& core, const Layers& layers)
      : core_(core),
        layers_(layers),
        group_(chunkattn::detail::WindowAccess::group(layers)),
        reads_(layers.options().window - 1) {
    core_.topology.observers.add(*this);
  }
  PlainWindowPool(const PlainWindowPool&) = delete;
  PlainWindowPool& operator=(const PlainWindowPool&) = delete;
  ~PlainWindowPool() override { core_.topology.observers.remove(*this); }

  // ---- what the engine does ------------------------------------------------------------------

  /// A sequence is to be computed from `position` on; its next row was at `before`.
  void resumed(SequenceIndex s, int position, int before) {
    Held& held = held_[s];
    held = {};
    held.is_used = true;
    held.next = held.end = position;
    held.prompt_end = core_.sequences[s].size - 1;
    for_each_slot(s, begin_of(position), position, [&](int p, ChunkIndex of_tree, int) {
      held.rows[p] = own_of(of_tree);
      for (const auto& copy : core_.pending_copies)
        if (copy.rows.target_chunk == of_tree && is_to_come(copy))
          if (const auto own = own_.find(copy.rows.source_chunk); own != own_.end())
            held.others.insert(own->second);
    });
    recomputed_ += static_cast<std::uint64_t>(before - position);
    check(Event::takes);
  }
  /// view() of a step has returned that plan.
  void viewed(const StepRecord& step, const chunkattn::PlanView& plan) {
    const bool again = writes_.contains(step.number);
    Writes& writes = writes_[step.number];
    for (const Slot& slot : writes.copied) only_of_step_.insert(slot.own);
    for (const auto& entry : writes.rows)
      for (const Slot& slot : entry) only_of_step_.insert(slot.own);
    writes = {};
    for (int i = 0; i < plan.num_copies; ++i)
      for (int t = 0; t < plan.copies[i].length; ++t)
        writes.copied.push_back({plan.copies[i].target_chunk, plan.copies[i].target_begin + t});
    for (const StepEntry& entry : step.entries) {
      Held& held = held_[entry.sequence];
      held.rows.erase(held.rows.lower_bound(entry.begin), held.rows.end());
      held.end = entry.end();
      auto& rows = writes.rows.emplace_back();
      for_each_slot(
          entry.sequence, entry.begin, entry.end(), [&](int p, ChunkIndex of_tree, int offset) {
            held.rows[p] = own_of(of_tree);
            const auto& write = plan.writes[entry.first_row + p - entry.begin];
            if (write.chunk == chunkattn::no_chunk) return;
            expect(write.chunk == held.rows[p], "a row is written to the chunk of its slot");
            expect(write.offset == offset, "a row is written to its slot");
            rows.push_back({write.chunk, write.offset});
          });
    }
    for (const Slot& slot : writes.copied)
      expect(to_size(slot.own) < records_.size(), "copies go to chunks of rows");
    check(again ? Event::plans_again : Event::takes);
  }
  /// Rows of these positions are to come from elsewhere, if there were chunks for them: the
  /// sequence holds these until it is resumed.
  void reserved(SequenceIndex s, const std::vector<chunkattn::TokenRange>& ranges, bool has_room) {
    for (const auto& range : ranges)
      if (!has_room) refused(s, range.begin, range.begin + range.length);
    if (!has_room) return check();
    held_[s].is_used = false;
    for (const auto& range : ranges)
      for_each_slot(s, range.begin, range.begin + range.length,
                    [&](int, ChunkIndex of_tree, int) { held_[s].others.insert(own_of(of_tree)); });
    check(Event::takes);
  }
  /// They have come, where they were not there yet.
  void loaded(SequenceIndex s, const std::vector<chunkattn::TokenRange>& ranges) {
    std::vector<Slot> slots;
    for (const auto& range : ranges)
      for_each_slot(s, range.begin, range.begin + range.length,
                    [&](int, ChunkIndex of_tree, int offset) {
                      if (const auto own = own_.find(of_tree);
                          own != own_.end() && !is_to_write({own->second, offset}))
                        slots.push_back({own->second, offset});
                    });
    write(slots);
    check();
  }
  /// A step has a plan whose view was not taken.
  void not_viewed(const StepRecord& step) {
    if (writes_.contains(step.number)) writes_[step.number].is_stale = true;
  }
  /// There were too few chunks for these rows, or for this window: what is there of them was held
  /// meanwhile.
  void refused(SequenceIndex s, int begin, int end) {
    for_each_slot(s, begin, end, [&](int, ChunkIndex of_tree, int) {
      if (const auto own = own_.find(of_tree); own != own_.end())
        records_[to_size(own->second)].released = now_;
    });
  }
  void refused(const StepRecord& step) {
    for (const StepEntry& entry : step.entries) refused(entry.sequence, entry.begin, entry.end());
    if (!writes_.contains(step.number)) return check();
    for (const Slot& slot : writes_[step.number].copied) only_of_step_.insert(slot.own);
    for (const auto& entry : writes_[step.number].rows)
      for (const Slot& slot : entry) only_of_step_.insert(slot.own);
    writes_.erase(step.number);
    check(Event::plans_again);
  }
  /// The first row of a window, and whether it is there before a position of a sequence, by going
  /// over it.
  [[nodiscard]] int begin_of(int next) const { return std::max(0, next - reads_); }
  [[nodiscard]] int window_end(SequenceIndex s, int limit) const {
    return nearest(core_.sequences[s].tail, std::min(limit, core_.sequences[s].cursor));
  }
  [[nodiscard]] bool is_ready(SequenceIndex s) const {
    const auto held = held_.find(s);
    return held != held_.end() && core_.sequences[s].cursor <= held->second.end &&
           held->second.is_used;
  }

  // ---- what the tree says --------------------------------------------------------------------

  void on_step_end(const StepRecord& step, bool has_run) noexcept override {
    const auto known = writes_.find(step.number);
    const bool is_planned = known != writes_.end() && !(has_run && known->second.is_stale);
    if (is_planned && has_run) write(known->second.copied);
    for (std::size_t e = 0; e < step.entries.size(); ++e) {
      const StepEntry& entry = step.entries[e];
      if (!has_run || entry.epoch != core_.sequences[entry.sequence].epoch) continue;
      if (!is_planned || e >= known->second.rows.size()) {
        give_up(entry.sequence, entry.begin);
        const int begin = std::max<int>(entry.begin, written_end(entry.sequence));
        forget(entry.sequence, begin, entry.end());  // what the tree had the group still has
        continue;
      }
      write(known->second.rows[e]);
      advance(entry);
    }
    if (has_run && !is_planned)
      for (const auto& copy : core_.pending_copies)
        if (copy.step == step.number) lose(copy.rows);
    if (known != writes_.end()) writes_.erase(known);
  }
  void on_load(SequenceIndex s, chunkattn::TokenRange range) noexcept override {
    give_up(s, range.begin);
    forget(s, range.begin, range.begin + range.length);
  }
  void on_leave(SequenceIndex s) noexcept override {
    const auto held = held_.find(s);
    if (held == held_.end()) return;
    if (held->second.is_used) keep(held->second, held->second.next);
    held_.erase(held);
  }
  void on_free(ChunkIndex of_tree) noexcept override {
    const auto own = own_.find(of_tree);
    if (own == own_.end()) return;
    Record& record = records_[to_size(own->second)];
    freed_ += record.kept;
    record.of_tree = chunkattn::no_chunk;
    own_.erase(own);
  }
  void on_pin(NodeIndex last) noexcept override {
    const auto& n = core_.topology.node(last);
    const int begin = begin_of(n.end());
    for_each_slot_of(last, 0, n.end(), [&](int p, ChunkIndex of_tree, int) {
      const auto own = own_.find(of_tree);
      if (own == own_.end() || group_.chunks().find(of_tree) != own->second) return true;
      Record& record = records_[to_size(own->second)];
      record.kept = record.kept || (n.pins > 0 && p >= begin);
      if (group_.chunks().num_holds(own->second) == 0) record.released = now_;
      return true;
    });
  }
  void on_clear() noexcept override { is_cleared_ = true; }
  void reserve(std::size_t) override {}
  void on_release(NodeIndex, std::int32_t) noexcept override {}
  void on_split(NodeIndex, NodeIndex) noexcept override {}
  void on_merge(NodeIndex, NodeIndex) noexcept override {}
  void on_written(NodeIndex) noexcept override {}
  [[nodiscard]] bool is_consistent() const override { return true; }

  // ---- the comparison ------------------------------------------------------------------------

  enum class Event : std::uint8_t { other, takes, plans_again };

  void check(Event event = Event::other) {
    const auto& chunks = group_.chunks();
    const auto stats = layers_.stats();
    ++now_;
    // Of all chunks, how many are held, and which of the cached ones have gone.
    std::vector<char> is_held(records_.size());
    for (const auto& [s, held] : held_) {
      for (const auto& [p, own] : held.rows) is_held[to_size(own)] = 1;
      for (const ChunkIndex own : held.others) is_held[to_size(own)] = 1;
    }
    for (const auto& [number, writes] : writes_) {
      for (const Slot& slot : writes.copied) is_held[to_size(slot.own)] = 1;
      for (const auto& entry : writes.rows)
        for (const Slot& slot : entry) is_held[to_size(slot.own)] = 1;
    }
    expect(chunks.high_water() == records_.size(), "chunks are taken for rows alone");
    std::size_t num_held = 0, num_cached = 0;
    std::uint64_t oldest = std::numeric_limits<std::uint64_t>::max(), newest_gone = gone_newest_;
    std::uint64_t gone = gone_;
    bool released = false;
    for (std::size_t i = 0; i < records_.size(); ++i) {
      Record& record = records_[i];
      const auto own = static_cast<ChunkIndex>(i);
      expect((chunks.num_holds(own) > 0) == (is_held[i] != 0),
             "what windows and steps need is held, and nothing else");
      if (record.was_held && !is_held[i]) record.released = now_, released = true;
      record.was_held = is_held[i] != 0;
      num_held += is_held[i] != 0;
      if (record.of_tree == chunkattn::no_chunk) continue;
      const bool is_there = chunks.find(record.of_tree) == own;
      if (is_held[i]) {
        expect(is_there, "what is held stands for its chunk of the tree");
      } else if (is_there) {  // cached
        expect(record.kept, "only windows before junctions are cached");
        expect(!is_cleared_, "nothing is cached after clear()");
        // What was held until now may have been when another had to go, a pinned one even.
        if (record.released != now_) oldest = std::min(oldest, turn_of(record));
        ++num_cached;
      } else {
        if (record.kept && !is_cleared_) {
          ++gone;
          newest_gone = std::max(newest_gone, turn_of(record));
        }
        own_.erase(record.of_tree);
        record.of_tree = chunkattn::no_chunk;
        continue;
      }
      check_slots(record, own, event);
    }
    expect(stats.used_chunks == num_held + num_cached, "used chunks");
    expect(stats.cached_chunks == num_cached, "cached chunks");
    expect(stats.recomputed_tokens == recomputed_, "recomputed tokens");
    const std::uint64_t evicted = stats.evicted_chunks - evicted_;
    if (event == Event::plans_again) {  // what the first plan alone had may have gone and come back
      expect(evicted >= gone, "what has gone was evicted");
      expect(evicted <= gone + only_of_step_.size(), "what was evicted has gone");
    } else {
      expect(evicted >= gone, "what has gone was evicted");
      expect(evicted <= gone + freed_,
             "what was evicted has gone");  // some may have gone before the tree's went
      if (gone > 0)
        expect(newest_gone <= oldest, "the least recently used goes first, what is pinned last");
    }
    // The most that were used at once.
    if (event == Event::other) {
      expect(stats.peak_used_chunks == peak_, "the peak");
    } else if (event == Event::takes && !released) {
      expect(stats.peak_used_chunks == std::max(peak_, stats.used_chunks),
             "the peak where chunks were taken");
      if (evicted > 0)
        expect(stats.used_chunks == layers_.options().max_chunks,
               "nothing is evicted while there is room");
    } else {
      expect(stats.peak_used_chunks >= std::max(peak_, stats.used_chunks), "the peak, at least");
      expect(stats.peak_used_chunks <= std::max(peak_, used_ + fresh_), "the peak, at most");
    }
    evicted_ = stats.evicted_chunks;
    peak_ = stats.peak_used_chunks;
    used_ = stats.used_chunks;
    fresh_ = 0;
    gone_ = gone_newest_ = freed_ = 0;
    is_cleared_ = false;
    only_of_step_.clear();
  }

 private:
  static constexpr int words = (chunk_size + 63) / 64;
  using Bits = std::array<std::uint64_t, words>;

  struct Slot {
    ChunkIndex own;
    int offset;
  };
  /// A chunk of the group.
  struct Record {
    ChunkIndex of_tree = chunkattn::no_chunk;
    bool kept = false, was_held = false;
    std::uint64_t released = 0;  ///< when nobody held it any more
    Bits written{};
  };
  /// Of a live sequence: its rows that it holds, by path position.
  struct Held {
    std::map<int, ChunkIndex> rows;
    /// Sources of copies that have not been made, and chunks for rows that come from elsewhere.
    std::set<ChunkIndex> others;
    bool is_used = false;
    int next = 0, end = 0, prompt_end = 0;
  };
  /// Of a step that is not over.
  struct Writes {
    std::vector<Slot> copied;
    std::vector<std::vector<Slot>> rows;  ///< by entry
    bool is_stale = false;
  };

  static std::size_t to_size(std::int64_t n) { return static_cast<std::size_t>(n); }
  static std::uint64_t bit(int offset) { return std::uint64_t{1} << (offset & 63); }
  static std::uint64_t& bits(Bits& all, int offset) { return all[to_size(offset >> 6)]; }

  static void expect(bool ok, const char* what) {
    if (!ok) [[unlikely]]
      FAIL(std::string(what));
  }
  // f(path position, chunk of the tree, offset) for positions of a path, last first.
  template <class F>
  void for_each_slot_of(NodeIndex last, int begin, int end, const F& f) const {
    for (NodeIndex i = last; i != chunkattn::detail::root_node; i = core_.topology.node(i).parent) {
      const auto& n = core_.topology.node(i);
      for (int p = std::min<int>(end, n.end()) - 1; p >= std::max<int>(begin, n.position); --p) {
        const int slot = n.begin + p - n.position;
        if (!f(p, core_.topology.chunk_of(n, slot), core_.topology.geometry.offset(slot))) return;
      }
      if (n.position <= begin) return;
    }
  }
  template <class F>
  void for_each_slot(SequenceIndex s, int begin, int end, const F& f) const {
    for_each_slot_of(core_.sequences[s].tail, begin, end, [&](int p, ChunkIndex c, int offset) {
      f(p, c, offset);
      return true;
    });
  }
  // The group's chunk for one of the tree's, which may have been taken just now.
  ChunkIndex own_of(ChunkIndex of_tree) {
    const ChunkIndex own = group_.chunks().find(of_tree);
    expect(own != chunkattn::no_chunk, "a row that is held has a chunk");
    const auto [known, is_new] = own_.insert({of_tree, own});
    if (!is_new && known->second == own) return own;
    if (!is_new) {  // it has gone, and another one was taken
      Record& old = records_[to_size(known->second)];
      if (old.of_tree == of_tree) forget(old);
      known->second = own;
    }
    if (to_size(own) >= records_.size()) records_.resize(to_size(own) + 1);
    Record& record = records_[to_size(own)];
    if (record.of_tree != chunkattn::no_chunk) {  // for another one before
      own_.erase(record.of_tree);
      forget(record);
    }
    record = {.of_tree = of_tree};
    ++fresh_;
    return own;
  }
  // What is less goes first.
  [[nodiscard]] std::uint64_t turn_of(const Record& record) const {
    const bool is_pinned = core_.chunk_table[record.of_tree].pinned > 0;
    return record.released + (is_pinned ? std::uint64_t{1} << 62 : 0);
  }
  void forget(Record& record) {
    if (only_of_step_.empty()) expect(record.kept, "only windows before junctions are cached");
    gone_ += record.kept;
    gone_newest_ = std::max(gone_newest_, turn_of(record));
    record.of_tree = chunkattn::no_chunk;
  }
  // The sequence has to be resumed before it goes on after this position.
  void give_up(SequenceIndex s, int position) noexcept {
    if (const auto held = held_.find(s); held != held_.end())
      held->second.end = std::min(held->second.end, std::max(held->second.next, position));
  }
  // Copies were made for the tree alone: whoever counts on their rows has to be resumed again.
  void lose(const chunkattn::PlanView::RowCopy& rows) noexcept {
    const auto own = own_.find(rows.target_chunk);
    if (own == own_.end()) return;
    for (int i = 0; i < rows.length; ++i)
      bits(records_[to_size(own->second)].written, rows.target_begin + i) &=
          ~bit(rows.target_begin + i);
    for (auto& [s, held] : held_)
      for (const auto& [p, c] : held.rows)
        if (c == own->second) held.end = -1;
  }
  void forget(SequenceIndex s, int begin, int end) noexcept {
    for_each_slot(s, begin, end, [&](int, ChunkIndex of_tree, int offset) {
      if (const auto own = own_.find(of_tree); own != own_.end())
        bits(records_[to_size(own->second)].written, offset) &= ~bit(offset);
    });
  }
  [[nodiscard]] int written_end(SequenceIndex s) const {
    return core_.topology.written_end(core_.sequences[s].tail);
  }
  // Whether a step that may run is to write it.
  [[nodiscard]] bool is_to_write(const Slot& slot) const {
    const auto is_same = [&](const Slot& other) {
      return other.own == slot.own && other.offset == slot.offset;
    };
    for (const auto& [number, writes] : writes_) {
      if (core_.steps.is_void(number)) continue;
      if (std::ranges::any_of(writes.copied, is_same)) return true;
      for (const auto& entry : writes.rows)
        if (std::ranges::any_of(entry, is_same)) return true;
    }
    return false;
  }
  void write(const std::vector<Slot>& slots) noexcept {
    for (const Slot& slot : slots)
      bits(records_[to_size(slot.own)].written, slot.offset) |= bit(slot.offset);
  }
  void keep(const Held& held, int position) noexcept {
    for (int p = begin_of(position); p < position; ++p)
      if (const auto row = held.rows.find(p); row != held.rows.end())
        records_[to_size(row->second)].kept = true;
  }
  void advance(const StepEntry& entry) noexcept {
    Held& held = held_[entry.sequence];
    const int next = entry.output_position();
    if (next <= held.next) return;
    for (NodeIndex i = core_.sequences[entry.sequence].tail; i != chunkattn::detail::root_node;
         i = core_.topology.node(i).parent) {
      const int position = core_.topology.node(i).position;  // where prompts part
      if (position <= held.next || position > next) continue;
      keep(held, position - 1);  // for who wants what the last shared row says of its next token
      keep(held, position);
    }
    if (held.prompt_end > held.next && held.prompt_end <= next) keep(held, held.prompt_end);
    held.next = next;
    held.others.clear();
    held.rows.erase(held.rows.begin(), held.rows.lower_bound(begin_of(next)));
  }
  [[nodiscard]] int nearest(NodeIndex last, int limit) const {
    int position = limit;
    for_each_slot_of(last, 0, limit, [&](int p, ChunkIndex of_tree, int offset) {
      if (p < begin_of(position)) return false;
      if (!is_there(of_tree, offset)) position = p;
      return true;
    });
    return position;
  }
  // No step carries it that may run.
  [[nodiscard]] bool is_to_come(const chunkattn::detail::PendingCopy& copy) const {
    return copy.step == 0 || core_.steps.is_void(copy.step);
  }
  // Whether a row is there, or is brought by a copy that no step has yet.
  [[nodiscard]] bool is_there(ChunkIndex of_tree, int offset) const {
    const auto has = [&](ChunkIndex chunk, int at) {
      const auto own = own_.find(chunk);
      if (own == own_.end()) return false;
      return (records_[to_size(own->second)].written[to_size(at >> 6)] & bit(at)) != 0;
    };
    if (has(of_tree, offset)) return true;
    for (const auto& copy : core_.pending_copies) {
      const auto& rows = copy.rows;
      if (is_to_come(copy) && rows.target_chunk == of_tree && offset >= rows.target_begin &&
          offset < rows.target_begin + rows.length &&
          has(rows.source_chunk, rows.source_begin + offset - rows.target_begin))
        return true;
    }
    return false;
  }
  // What the group says it has, and what it is to get.
  void check_slots(Record& record, ChunkIndex own, Event event) {
    Bits planned{};
    const auto add = [&](const std::vector<Slot>& slots) {
      for (const Slot& slot : slots)
        if (slot.own == own) bits(planned, slot.offset) |= bit(slot.offset);
    };
    for (const auto& [number, writes] : writes_) {
      if (core_.steps.is_void(number)) continue;
      add(writes.copied);
      for (const auto& entry : writes.rows) add(entry);
    }
    for (int w = 0; w < words; ++w) {
      const auto& chunks = group_.chunks();
      const std::uint64_t written = chunks.written({own, w, ~std::uint64_t{0}});
      if (event == Event::plans_again && only_of_step_.contains(own)) {
        expect((written & ~record.written[to_size(w)]) == 0, "rows that were not written");
        record.written[to_size(w)] = written;
      }
      expect(written == record.written[to_size(w)], "rows that are there");
      const std::uint64_t known = chunks.known({own, w, ~std::uint64_t{0}});
      expect(known == (written | planned[to_size(w)]), "rows that steps are to write");
    }
  }

  TreeCore& core_;
  const Layers& layers_;
  const chunkattn::detail::WindowGroup& group_;
  const int reads_;                       ///< rows before its own that a row reads
  std::map<ChunkIndex, ChunkIndex> own_;  ///< by chunk of the tree
  std::vector<Record> records_;
  std::map<SequenceIndex, Held> held_;
  std::map<std::uint64_t, Writes> writes_;  ///< by step
  // Since the last comparison.
  std::size_t fresh_ = 0;
  std::uint64_t gone_ = 0, gone_newest_ = 0;
  std::uint64_t freed_ = 0;            ///< chunks of the tree
  std::set<ChunkIndex> only_of_step_;  ///< chunks that a plan which was made again had
  bool is_cleared_ = false;
  // At that time.
  std::uint64_t now_ = 0, evicted_ = 0, recomputed_ = 0;
  std::size_t peak_ = 0, used_ = 0;
};

}  // namespace test
