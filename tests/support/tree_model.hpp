// A naive model of PrefixTree and AttentionPlan: plain lists of sequences, and in place of K/V one
// number per (slot, offset), the hash of the token path that was written there. Whatever is shared
// wrongly, read before it was written, overwritten, moved or freed too early is a wrong number.
//
// Operations are drawn from `Choices` (random numbers, or the bytes of a fuzzer), applied to the
// tree and to the model, and compared. tree_model_ops.hpp has the operations.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <set>
#include <span>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "chunkattn/attention_plan.hpp"
#include "chunkattn/prefix_tree.hpp"

namespace test {

using namespace chunkattn;

constexpr int model_chunk = 4;
using ModelToken = std::int32_t;

/// What stands for K/V memory: the hash of the path written at each place, 0 for garbage.
struct ShadowMemory {
  std::vector<std::uint64_t> rows;    // [slot][offset]
  std::vector<std::uint64_t> epochs;  // [slot]: how often the slot was freed
};

/// A user's own allocator: a pool that turns what is freed into garbage.
struct ShadowAllocator {
  PoolAllocator pool;
  ShadowMemory* memory = nullptr;

  SlotIndex allocate() {
    const SlotIndex s = pool.allocate();
    if (s != no_slot && static_cast<std::size_t>(s) >= memory->epochs.size()) {
      memory->epochs.resize(static_cast<std::size_t>(s) + 1);
      memory->rows.resize(memory->epochs.size() * model_chunk);
    }
    return s;
  }
  void free(SlotIndex s) noexcept {
    const auto slot = static_cast<std::size_t>(s);
    ++memory->epochs[slot];
    std::fill_n(memory->rows.begin() + s * model_chunk, model_chunk, 0);
    pool.free(s);
  }
  [[nodiscard]] std::size_t capacity() const noexcept { return pool.capacity(); }
  [[nodiscard]] std::size_t available() const noexcept { return pool.available(); }
  [[nodiscard]] std::size_t high_water() const noexcept { return pool.high_water(); }
};

struct ModelOptions {
  TreeOptions tree{};
  RetentionBudget retention{};
  std::size_t budget = max_slots;
  std::size_t max_live = 220;
  int max_prompt = 22;
  bool many_namespaces = true;
};

/// How often each kind of event happened.
using Counters = std::map<std::string, std::uint64_t>;

using Place = std::pair<SlotIndex, std::int32_t>;

template <class Retention, class Choices>
class TreeModelBase {
 public:
  using Tree = PrefixTree<ModelToken, model_chunk, ShadowAllocator, Retention>;
  using Sequence = typename Tree::Sequence;

  TreeModelBase(Choices& choices, ModelOptions options, Counters& counters)
      : choices_(choices),
        options_(options),
        counters_(counters),
        tree_(ShadowAllocator{{.max_chunks = options.budget}, &memory_}, options.tree,
              Retention{options.retention}) {}

  [[nodiscard]] const Tree& tree() const { return tree_; }

  /// Everything that must hold between operations, at the cost of walking all live sequences.
  void check_all() {
    tree_.check_invariants();
    std::map<Place, std::uint64_t> owner;
    for (auto& [id, live] : live_) {
      check_sequence(live);
      for (std::size_t p = 0; p < live.places.size(); ++p) {
        const bool known = p < live.known;
        const auto [it, fresh] = owner.emplace(live.places[p], known ? live.hash[p] : 0);
        expect(fresh || (known && it->second == live.hash[p]),
               "two sequences share a place only where their paths agree");
      }
    }
    expect(tree_.stats().live_sequences == live_.size(), "every live sequence is counted");
  }

  /// The last operations, for a report.
  [[nodiscard]] std::string history() const {
    std::string text;
    for (const std::string& line : log_) text += line + "\n";
    return text;
  }

 protected:
  struct Live {
    Sequence handle;
    std::vector<ModelToken> tokens;   // known ones, then the drafts of reserved places
    std::vector<std::uint64_t> hash;  // of the path up to and including each of them
    std::vector<Place> places;
    std::vector<std::uint8_t> done;  // surely written: found so, or committed by this one
    std::size_t known = 0;
    std::size_t prompt_end = 0;  // matchable tokens of the prompt
    std::size_t public_end = 0;
    std::size_t planned = 0;  // asynchronous steps: next position to plan
    std::int32_t next = 0;    // asynchronous steps: next_uncomputed() when last seen
    int running = 0;          // steps in flight that have it
    std::uint64_t drops = 0;  // reservations dropped so far
    std::deque<std::size_t> reservations;
    Namespace name_space{};
    bool stale = false;  // from before clear()
  };

  static void expect(bool ok, const char* what) {
    if (!ok) [[unlikely]]
      throw std::logic_error(what);
  }

  [[nodiscard]] std::size_t below(std::size_t n) { return choices_.below(n); }
  [[nodiscard]] bool one_in(std::size_t n) { return below(n) == 0; }
  void count(const char* what, std::uint64_t n = 1) { counters_[what] += n; }
  void log(std::string line) {
    log_.push_back(std::move(line));
    if (log_.size() > 40) log_.pop_front();
  }

  [[nodiscard]] std::size_t unit() const {
    return options_.tree.sharing == Sharing::token ? 1 : model_chunk;
  }

  static std::uint64_t extend_hash(std::uint64_t hash, const Namespace& space, ModelToken token) {
    for (const std::uint64_t part :
         {space.tenant + 1, space.adapter + 1, std::uint64_t{space.is_public ? 7u : 3u},
          static_cast<std::uint64_t>(token) + 1})
      hash = (hash ^ part) * 0x9e3779b97f4a7c15u + (hash >> 31);
    return hash | 1;  // 0 is garbage
  }
  static Namespace space_at(const Namespace& own, std::size_t position, std::size_t public_end) {
    if (position >= public_end) return own;
    return {.adapter = own.adapter, .is_public = true};
  }
  static std::vector<std::uint64_t> path_hashes(std::span<const ModelToken> tokens,
                                                const Namespace& own, std::size_t public_end) {
    std::vector<std::uint64_t> hashes;
    std::uint64_t hash = 1;
    for (std::size_t p = 0; p < tokens.size(); ++p)
      hashes.push_back(hash = extend_hash(hash, space_at(own, p, public_end), tokens[p]));
    return hashes;
  }
  void push_token(Live& live, ModelToken token) {
    const std::size_t p = live.tokens.size();
    live.tokens.push_back(token);
    live.hash.push_back(extend_hash(p == 0 ? 1 : live.hash[p - 1],
                                    space_at(live.name_space, p, live.public_end), token));
    live.done.push_back(0);
  }
  void truncate(Live& live) {  // drops all that is reserved
    live.tokens.resize(live.known);
    live.hash.resize(live.known);
    live.done.resize(live.known);
    if (live.places.size() > live.known) live.places.resize(live.known);
    live.reservations.clear();
    live.planned = std::min(live.planned, live.known);
    ++live.drops;
  }

  std::uint64_t& row(Place place) {
    return memory_.rows[static_cast<std::size_t>(place.first) * model_chunk +
                        static_cast<std::size_t>(place.second)];
  }

  /// Where the K/V of a place stands now: a fork's copy may still be to come.
  [[nodiscard]] Place resolve(Place place) const {
    for (const auto& copy : tree_.core().pending_copies()) {
      const RowCopy& rows = copy.rows;
      if (rows.target_slot == place.first && place.second >= rows.target_begin &&
          place.second < rows.target_begin + rows.length)
        return {rows.source_slot, rows.source_begin + place.second - rows.target_begin};
    }
    return place;
  }

  void check_sequence(Live& live) {
    const Sequence& s = live.handle;
    expect(s.is_live(), "a live handle is live");
    expect(s.size() == live.known, "size");
    expect(s.num_reserved() == live.tokens.size() - live.known, "reserved places");
    const std::vector<ModelToken> held = s.tokens();
    expect(std::equal(held.begin(), held.end(), live.tokens.begin()), "tokens");
    std::size_t p = 0;
    s.for_each_run({0, static_cast<std::int32_t>(live.tokens.size())}, [&](const Piece& piece) {
      expect(piece.position == static_cast<std::int32_t>(p), "runs are in path order, no gaps");
      expect(piece.slot >= 0 && static_cast<std::size_t>(piece.slot) < tree_.num_slots() &&
                 piece.begin >= 0 && piece.length > 0 && piece.begin + piece.length <= model_chunk,
             "a run lies within a slot");
      for (std::int32_t i = 0; i < piece.length; ++i, ++p) {
        const Place place{piece.slot, piece.begin + i};
        if (p < live.places.size())
          expect(live.places[p] == place, "a position's place never changes");
        else
          live.places.push_back(place);
      }
    });
    expect(p == live.tokens.size(), "runs cover the path");
    const TokenRange next = s.next_uncomputed();
    expect(next.end() == static_cast<std::int32_t>(live.known), "what is left to compute ends it");
    const bool waits = s.num_pending() > 0;
    for (p = 0; p < live.known; ++p)
      if (live.done[p] || (!waits && p < static_cast<std::size_t>(next.begin)))
        expect(row(resolve(live.places[p])) == live.hash[p], "written K/V stays what it was");
  }

  // ---- steps -------------------------------------------------------------------------------

  struct Touched {
    Place place;
    std::uint64_t hash;
    std::uint64_t epoch;
    std::uint64_t id;  // of the sequence whose row it is
  };
  struct RunEntry {
    std::uint64_t id;
    std::uint64_t drops;
    TokenRange range;
  };
  struct Step {
    std::uint64_t number = 0;
    std::vector<RowCopy> copies;
    std::vector<Touched> writes, reads;
    std::vector<RunEntry> entries;
    bool executed = false;
  };

  /// What the plan tells the kernels to do, checked against the naive expectation.
  Step record_step(const AttentionPlan& plan, const std::vector<RunEntry>& entries) {
    const PlanView view = plan.view();
    Step step;
    step.number = plan.step();
    step.entries = entries;
    step.copies.assign(view.copies, view.copies + view.num_copies);
    struct Query {
      std::uint64_t id;
      Live* live;
      std::int32_t position;
    };
    std::vector<Query> queries;
    for (const RunEntry& e : entries)
      for (std::int32_t p = e.range.begin; p < e.range.end(); ++p)
        queries.push_back({e.id, &live_.at(e.id), p});
    expect(view.num_rows == static_cast<std::int32_t>(queries.size()), "a row per query token");
    for (std::size_t t = 0; t < queries.size(); ++t) {
      const WriteTarget w = view.writes[t];
      const Live& live = *queries[t].live;
      const auto p = static_cast<std::size_t>(queries[t].position);
      if (w.slot == no_slot) continue;
      expect(!live.done[p], "a committed position is not written again");
      expect(Place(w.slot, w.offset) == live.places[p], "K/V goes to the token's own place");
      step.writes.push_back(touched(live.places[p], live.hash[p], queries[t].id));
    }
    std::vector<std::uint8_t> seen(queries.size());
    std::vector<Place> visible;
    for (std::int32_t r = 0; r < view.num_rows; ++r) {
      const auto t = static_cast<std::size_t>(view.row_token[r]);
      expect(t < queries.size() && !seen[t]++, "rows are a permutation of the query tokens");
      const Live& live = *queries[t].live;
      expect(view.row_kv_len[r] == queries[t].position + 1, "a row sees up to itself");
      visible_places(view, r, visible);
      expect(visible.size() == static_cast<std::size_t>(view.row_kv_len[r]), "all of it");
      expect(std::equal(visible.begin(), visible.end(), live.places.begin()),
             "a row reads its own path");
      for (std::size_t p = 0; p < visible.size(); ++p)
        step.reads.push_back(touched(visible[p], live.hash[p], queries[t].id));
    }
    for (std::int32_t i = 0; i < view.num_segments; ++i) check_segment(view, i, queries);
    return step;
  }

  Touched touched(Place place, std::uint64_t hash, std::uint64_t id) const {
    return {place, hash, memory_.epochs[static_cast<std::size_t>(place.first)], id};
  }

  template <class Query>
  void check_segment(const PlanView& view, std::int32_t index, const std::vector<Query>& queries) {
    const Segment& s = view.segments[index];
    expect(s.parent < index, "parents stand before children");
    expect(s.row_begin < s.row_end && s.piece_count > 0, "a segment has rows and pieces");
    std::int32_t position = s.position;
    for (std::int32_t i = 0; i < s.piece_count; ++i) {
      const Piece& piece = view.pieces[s.piece_begin + i];
      expect(piece.position == position && piece.length > 0, "pieces stand in path order");
      position += piece.length;
    }
    expect(position == s.position + s.length, "a segment's length is that of its pieces");
    std::set<const Live*> on_it;
    for (std::int32_t r = s.row_begin; r < s.row_end; ++r)
      on_it.insert(queries[static_cast<std::size_t>(view.row_token[r])].live);
    expect(static_cast<std::int32_t>(on_it.size()) == s.num_sequences, "sequences per segment");
    if (s.parent >= 0) {
      const Segment& p = view.segments[s.parent];
      expect(p.row_begin <= s.row_begin && s.row_end <= p.row_end, "intervals nest");
      expect(p.position + p.length == s.position, "a segment continues its parent");
    }
  }

  static void visible_places(const PlanView& view, std::int32_t row, std::vector<Place>& out) {
    out.clear();
    for (std::int32_t s = view.row_segment[row]; s >= 0; s = view.segments[s].parent) {
      const Segment& segment = view.segments[s];
      expect(segment.row_begin <= row && row < segment.row_end, "a row is on its segments");
      for (std::int32_t i = segment.piece_count; i-- > 0;) {
        const Piece& piece = view.pieces[segment.piece_begin + i];
        for (std::int32_t k = visible_length(piece, view.row_kv_len[row]); k-- > 0;)
          out.emplace_back(piece.slot, piece.begin + k);
      }
    }
    std::reverse(out.begin(), out.end());
  }

  /// The kernel's part. Copies run in any order, and some of them twice.
  void execute(Step& step) {
    for (std::size_t i = step.copies.size(); i > 1; --i)
      std::swap(step.copies[i - 1], step.copies[below(i)]);
    for (std::size_t i = 0; i < step.copies.size() + step.copies.size() / 2; ++i) {
      const RowCopy& copy = step.copies[i % step.copies.size()];
      for (std::int32_t k = 0; k < copy.length; ++k)
        row({copy.target_slot, copy.target_begin + k}) =
            row({copy.source_slot, copy.source_begin + k});
      count("rows copied", static_cast<std::uint64_t>(copy.length));
    }
    for (const Touched& w : step.writes) row(w.place) = w.hash;
    for (const Touched& r : step.reads)
      expect(row(r.place) == r.hash, "a row reads what its own path has written");
    check_unfreed(step);
    step.executed = true;
  }

  void check_unfreed(const Step& step) const {
    for (const auto* list : {&step.reads, &step.writes})
      for (const Touched& t : *list)
        expect(memory_.epochs[static_cast<std::size_t>(t.place.first)] == t.epoch,
               "no slot of a running step is freed");
  }

  ShadowMemory memory_;
  Choices& choices_;
  ModelOptions options_;
  Counters& counters_;
  Tree tree_;
  std::map<std::uint64_t, Live> live_;
  std::set<std::uint64_t> remembered_;  // paths that an unbounded cache must still have
  std::array<AttentionPlan, 2> plans_;
  std::deque<Step> in_flight_;
  std::uint64_t next_id_ = 0;
  std::deque<std::string> log_;
};

}  // namespace test
