// The simulated device: what a step's plan tells the kernels to do, checked against the naive
// expectation, and what becomes of the shadow memory when they do it, soon, late, or badly.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "tests/support/engine_sim_faults.hpp"

namespace test {

template <class Retention, int ChunkSize>
class EngineSimPlan : public EngineSimFaults<Retention, ChunkSize> {
  using Base = EngineSimFaults<Retention, ChunkSize>;

 public:
  using Base::Base;

 protected:
  using Base::below, Base::one_in, Base::count, Base::expect, Base::memory_, Base::live_;
  using typename Base::Live, typename Base::LivePtr, typename Base::Tree;
  using Step = typename Tree::Step;
  using InFlight = typename Tree::InFlight;
  using Finished = typename Tree::Finished;
  using View = decltype(std::declval<AttentionPlan&>().build(std::declval<Step&>()));

  enum class State : std::uint8_t { open, in_flight, abandoned, finished };
  /// A draft of a tree.
  struct SimDraft {
    std::int32_t parent = -1, depth = 0;
    SimToken token{};
    std::uint64_t hash = 0;  // of its branch
    bool on_trunk = false;
    std::optional<Place> place{};  // from the first plan on
  };
  /// The rows of a sequence in a step: path positions [begin, begin + length). Those of a tree of
  /// drafts are its trunk's.
  struct Entry {
    LivePtr live;
    std::int32_t begin = 0, length = 0, drafts = 0, first_row = 0;
    bool has_output = false, drafts_known = false;
    std::uint32_t drops = 0;  // of the sequence, when it was added
    std::vector<SimDraft> tree{};
    std::vector<std::uint64_t> rows{};  // paths of those before the drafts that counted at the end

    [[nodiscard]] std::int32_t num_drafts() const {
      return tree.empty() ? drafts : static_cast<std::int32_t>(tree.size());
    }
    [[nodiscard]] std::int32_t num_rows() const { return length - drafts + num_drafts(); }
    /// Drafts from the path down to this one.
    [[nodiscard]] std::vector<std::size_t> branch(std::int32_t leaf) const {
      std::vector<std::size_t> all;
      for (; leaf >= 0; leaf = tree[all.back()].parent)
        all.push_back(static_cast<std::size_t>(leaf));
      std::reverse(all.begin(), all.end());
      return all;
    }
    [[nodiscard]] std::int32_t end() const { return begin + length; }
    [[nodiscard]] std::int32_t output_position() const { return end() - drafts; }
    /// The outputs that it rests on were given up.
    [[nodiscard]] bool superseded() const { return drops != live->drops; }
  };
  /// A place that a step writes or reads, and what is to be there.
  struct Touched {
    Place place;
    std::uint64_t hash;   // 0: anything
    std::uint64_t epoch;  // of the chunk, when the plan was built
    std::size_t entry;
  };
  struct Copy {
    PlanView::RowCopy rows;
    std::uint64_t source_epoch, target_epoch;
  };
  struct SimStep {
    std::uint64_t number = 0;
    State state = State::open;
    bool is_void = false, built = false, executed = false;
    bool dropped = false;  // on another thread: takes effect later
    std::optional<Step> open;
    std::optional<InFlight> in_flight;
    std::optional<Finished> finished;
    View view;
    std::vector<Entry> entries;
    std::int32_t num_rows = 0;
    std::size_t aside = 0;  // drafts that stand on no trunk
    std::vector<Copy> copies;
    std::vector<Touched> writes, reads;
  };

  // ---- what the plan says --------------------------------------------------------------------

  void record(SimStep& step) {
    const View& view = step.view;
    expect(view.is_current(), "a view is current when it was built");
    expect(view.num_rows == step.num_rows, "a row per query token");
    check_inputs(step);
    step.copies.clear();
    for (std::int32_t i = 0; i < view.num_copies; ++i) {
      const PlanView::RowCopy& rows = view.copies[i];
      step.copies.push_back(
          {rows, memory_.epoch(rows.source_chunk), memory_.epoch(rows.target_chunk)});
    }
    step.writes.clear();
    for (std::size_t t = 0; t < queries_.size(); ++t) {
      const auto [e, p, d] = queries_[t];
      const PlanView::WriteTarget w = view.writes[t];
      expect(w.chunk != no_chunk || d < 0 || step.entries[e].superseded(),
             "a draft's K/V is written");
      if (w.chunk == no_chunk) continue;
      if (d >= 0) {
        record_draft(step, e, step.entries[e].tree[static_cast<std::size_t>(d)], p,
                     {w.chunk, w.offset});
        continue;
      }
      const Entry& entry = step.entries[e];
      if (!entry.superseded()) {
        expect(Place(w.chunk, w.offset) == entry.live->places[p], "K/V goes to the token's place");
        expect(!entry.live->done[p], "a written position is not written again");
      }
      step.writes.push_back(touched({w.chunk, w.offset}, entry, e, p));
    }
    check_copies_apart(step);
    record_reads(step);
    for (std::int32_t i = 0; i < view.num_segments; ++i) check_segment(view, i);
  }

  void record_draft(SimStep& step, std::size_t e, SimDraft& draft, std::size_t position,
                    Place place) {
    const Entry& entry = step.entries[e];
    expect(!draft.place || *draft.place == place, "a draft's place never changes");
    draft.place = place;
    if (!entry.superseded()) {
      const auto& places = entry.live->places;
      expect(draft.on_trunk ? places[position] == place
                            : std::find(places.begin(), places.end(), place) == places.end(),
             "a tree's trunk stands on the path, the rest aside");
    }
    step.writes.push_back(
        {place, entry.superseded() ? 0 : draft.hash, memory_.epoch(place.first), e});
  }

  // A backend may copy and write at the same time.
  void check_copies_apart(const SimStep& step) const {
    for (const Copy& copy : step.copies)
      for (const Touched& write : step.writes) {
        const auto inside = [&](ChunkIndex chunk, std::int32_t begin) {
          return write.place.first == chunk && write.place.second >= begin &&
                 write.place.second < begin + copy.rows.length;
        };
        expect(!inside(copy.rows.source_chunk, copy.rows.source_begin) &&
                   !inside(copy.rows.target_chunk, copy.rows.target_begin),
               "no row that a step copies from or to is one that it writes");
      }
  }

  void record_reads(SimStep& step) {
    const View& view = step.view;
    step.reads.clear();
    seen_.assign(queries_.size(), 0);
    for (std::int32_t r = 0; r < view.num_rows; ++r) {
      const auto t = static_cast<std::size_t>(view.row_token[r]);
      expect(t < queries_.size() && !seen_[t]++, "rows are a permutation of the query tokens");
      const auto [e, position, d] = queries_[t];
      const Entry& entry = step.entries[e];
      expect(view.row_kv_len[r] == static_cast<std::int32_t>(position) + 1,
             "a row sees up to itself");
      visible_places(view, r);
      const auto branch = entry.branch(entry.superseded() ? -1 : d);
      const std::size_t path_end = visible_.size() - branch.size();
      if (!entry.superseded()) {
        expect(visible_.size() == position + 1, "all of it");
        expect(
            std::equal(visible_.begin(), visible_.begin() + static_cast<std::ptrdiff_t>(path_end),
                       entry.live->places.begin()),
            "a row reads its own path");
      }
      for (std::size_t p = 0; p < path_end; ++p)
        step.reads.push_back(touched(visible_[p], entry, e, p));
      for (std::size_t i = 0; i < branch.size(); ++i) {
        const SimDraft& draft = entry.tree[branch[i]];
        const Place place = visible_[path_end + i];
        expect(place == draft.place, "a draft reads the drafts of its branch");
        step.reads.push_back(
            {place, entry.superseded() ? 0 : draft.hash, memory_.epoch(place.first), e});
      }
    }
  }

  Touched touched(Place place, const Entry& entry, std::size_t e, std::size_t position) const {
    const std::uint64_t hash = entry.superseded() ? 0 : entry.live->hash[position];
    return {place, hash, memory_.epoch(place.first), e};
  }

  /// The query tokens of the view: none that were added later.
  void list_queries(const SimStep& step) {
    queries_.clear();
    for (std::size_t e = 0; e < step.entries.size(); ++e) {
      const Entry& entry = step.entries[e];
      if (entry.first_row >= step.view.num_rows) break;
      const std::int32_t end = entry.tree.empty() ? entry.end() : entry.output_position();
      for (std::int32_t p = entry.begin; p < end; ++p)
        queries_.push_back({e, static_cast<std::size_t>(p), -1});
      for (std::size_t d = 0; d < entry.tree.size(); ++d)
        queries_.push_back(
            {e, static_cast<std::size_t>(entry.output_position() + entry.tree[d].depth - 1),
             static_cast<std::int32_t>(d)});
    }
  }

  /// Token ids and positions for the model, of a view that is not out of date. Rows that count for
  /// nothing any more have what their sequence has got at their positions.
  void check_inputs(const SimStep& step) {
    list_queries(step);
    constexpr SimToken placeholder = -7;
    const std::vector<SimToken> tokens = step.view.tokens(placeholder);
    const std::vector<std::int32_t> positions = step.view.positions();
    const auto unknown = step.view.unknown_tokens();
    expect(tokens.size() == queries_.size() && positions.size() == queries_.size(),
           "inputs per query token");
    bool any_unknown = false;
    std::size_t listed = 0;
    for (std::size_t t = 0; t < queries_.size(); ++t) {
      const auto [e, p, d] = queries_[t];
      const Entry& entry = step.entries[e];
      expect(positions[t] == static_cast<std::int32_t>(p), "positions");
      const bool is_listed =
          listed < unknown.size() && unknown[listed].row == static_cast<std::int32_t>(t);
      any_unknown = any_unknown || is_listed;
      const bool draft =
          entry.drafts_known && p >= static_cast<std::size_t>(entry.output_position());
      const bool given = draft && !entry.superseded();
      const bool known = given || p < entry.live->known;
      if (draft)
        count(given ? step.is_void ? "known draft behind a step that was dropped" : "known draft"
                    : "known draft that was given up");
      const SimToken token = !known            ? placeholder
                             : given && d >= 0 ? entry.tree[static_cast<std::size_t>(d)].token
                                               : entry.live->tokens[p];
      expect(is_listed == !known, "exactly what is not known is listed as unknown");
      expect(tokens[t] == token, "token ids");
      if (!is_listed) continue;
      expect(unknown[listed].sequence == entry.live->id && unknown[listed].position == positions[t],
             "unknown tokens are named");
      ++listed;
      count("unknown token");
    }
    expect(listed == unknown.size(), "no token is unknown twice");
    if (any_unknown)
      this->expect_refused([&] { (void)step.view.tokens(); }, "unknown tokens need a placeholder");
    else
      expect(step.view.tokens() == tokens, "known tokens");
  }

  /// What the views of outstanding steps say, whatever has happened since they were built.
  void check_views() {
    for (const auto& step : steps_)
      if (step->view && step->view.is_current()) check_inputs(*step);
  }

  void check_segment(const View& view, std::int32_t index) {
    const PlanView::Segment& s = view.segments[index];
    expect(s.parent < index, "parents stand before children");
    expect(s.row_begin < s.row_end && s.num_pieces > 0, "a segment has rows and pieces");
    std::int32_t position = s.position;
    for (std::int32_t i = 0; i < s.num_pieces; ++i) {
      const Piece& piece = view.pieces[s.piece_begin + i];
      expect(piece.position == position && piece.length > 0, "pieces stand in path order");
      position += piece.length;
    }
    expect(position == s.position + s.length, "a segment's length is that of its pieces");
    std::set<std::size_t> on_it;
    for (std::int32_t r = s.row_begin; r < s.row_end; ++r)
      on_it.insert(queries_[static_cast<std::size_t>(view.row_token[r])].entry);
    expect(static_cast<std::int32_t>(on_it.size()) == s.num_sequences, "sequences per segment");
    if (s.parent >= 0) {
      const PlanView::Segment& p = view.segments[s.parent];
      expect(p.row_begin <= s.row_begin && s.row_end <= p.row_end, "intervals nest");
      expect(p.position + p.length == s.position, "a segment continues its parent");
    }
  }

  void visible_places(const View& view, std::int32_t row) {
    visible_.clear();
    for (std::int32_t s = view.row_segment[row]; s >= 0; s = view.segments[s].parent) {
      const PlanView::Segment& segment = view.segments[s];
      expect(segment.row_begin <= row && row < segment.row_end, "a row is on its segments");
      for (std::int32_t i = segment.num_pieces; i-- > 0;) {
        const Piece& piece = view.pieces[segment.piece_begin + i];
        for (std::int32_t k = visible_length(piece, view.row_kv_len[row]); k-- > 0;)
          visible_.emplace_back(piece.chunk, piece.begin + k);
      }
    }
    std::reverse(visible_.begin(), visible_.end());
  }

  // ---- what the device does ------------------------------------------------------------------

  /// Copies run in any order, some of them twice. `broken`: the kernels fail half-way and leave
  /// garbage where they write.
  void execute(SimStep& step, bool broken = false) {
    if (!step.is_void) device_lost_ = false;
    const bool garbage = broken || (step.is_void && device_lost_);
    if (broken) device_lost_ = true;
    guard_.assign(memory_.rows.size(), 0);
    for (const LivePtr& live : live_)
      for (std::size_t p = 0; p < live->known; ++p)
        if (live->done[p]) guard_[memory_.index(live->places[p])] = live->hash[p];
    copy_rows(step);
    const auto spoils = [&](const Entry& entry) { return garbage || entry.superseded(); };
    const std::uint64_t noise = garbage || one_in(2) ? 2 * below(1000) + 2 : 0;
    for (const Touched& w : step.writes) {
      expect(memory_.epoch(w.place.first) == w.epoch, "no chunk that a step writes is freed");
      expect(guard_[memory_.index(w.place)] == 0, "what is written is never written again");
      const bool spoil = spoils(step.entries[w.entry]) && (noise != 0 || w.hash == 0);
      memory_.row(w.place) = spoil ? noise : w.hash;
    }
    for (const Touched& r : step.reads) {
      expect(memory_.epoch(r.place.first) == r.epoch, "no chunk that a step reads is freed");
      const Entry& entry = step.entries[r.entry];
      if (spoils(entry) || memory_.row(r.place) == r.hash) continue;
      this->look_at(*entry.live);
      this->log("step " + this->text(step.number) + ", place " + this->text(r.place.first) + "[" +
                this->text(r.place.second) + "]");
      expect(false, "a row reads what its own path has written");
    }
    if (garbage) count("step with garbage");
    step.executed = true;
  }

  void copy_rows(SimStep& step) {
    for (std::size_t i = step.copies.size(); i > 1; --i)
      std::swap(step.copies[i - 1], step.copies[below(i)]);
    for (std::size_t i = 0; i < step.copies.size() + step.copies.size() / 2; ++i) {
      const Copy& copy = step.copies[i % step.copies.size()];
      const PlanView::RowCopy& rows = copy.rows;
      expect(memory_.epoch(rows.source_chunk) == copy.source_epoch &&
                 memory_.epoch(rows.target_chunk) == copy.target_epoch,
             "no chunk of a copy is freed");
      for (std::int32_t k = 0; k < rows.length; ++k) {
        const std::uint64_t value = memory_.row({rows.source_chunk, rows.source_begin + k});
        const Place target{rows.target_chunk, rows.target_begin + k};
        const std::uint64_t guard = guard_[memory_.index(target)];
        expect(guard == 0 || guard == value, "a copy spoils nothing");
        memory_.row(target) = value;
      }
      count("rows copied", static_cast<std::uint64_t>(rows.length));
    }
  }

  /// While a step is outstanding, nothing that it uses is freed.
  void check_unfreed(const SimStep& step) const {
    for (const auto* list : {&step.reads, &step.writes})
      for (const Touched& t : *list)
        expect(memory_.epoch(t.place.first) == t.epoch, "no chunk of an outstanding step is freed");
  }

  std::vector<std::unique_ptr<SimStep>> steps_;     // outstanding, in the order of their numbers
  std::vector<std::unique_ptr<SimStep>> finished_;  // with outputs to commit
  bool device_lost_ = false;  // a step that was dropped in flight did not run as it should

 private:
  struct Query {
    std::size_t entry, position;
    std::int32_t draft;  // of the entry's tree, -1: a token of the path
  };
  std::vector<Query> queries_;
  std::vector<std::uint8_t> seen_;
  std::vector<Place> visible_;
  std::vector<std::uint64_t> guard_;  // by place: the hash that some sequence surely has there
};

}  // namespace test
