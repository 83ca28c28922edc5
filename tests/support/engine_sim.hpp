// A simulation of a serving engine on PrefixTree, its steps and AttentionPlan, against a naive
// model: plain lists of sequences, and a ShadowMemory in place of K/V.
//
// Operations are drawn from `Choices` (random numbers, or the bytes of a fuzzer), predicted,
// applied to the tree and to the model, and compared. This file has the model of a sequence and
// what must hold between operations; engine_sim_faults.hpp what fails around the tree,
// engine_sim_plan.hpp the device, engine_sim_steps.hpp the life of a step, engine_sim_ops.hpp what
// becomes of sequences between steps, engine_sim_values.hpp values of tokens,
// engine_sim_checkpoints.hpp states of recurrent layers, engine_sim_handles.hpp moved-from objects
// and other threads, engine_sim_run.hpp the choice of operations.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "chunkattn/attention_plan.hpp"
#include "chunkattn/cache/policy.hpp"
#include "chunkattn/debug/tree.hpp"
#include "chunkattn/prefix_tree.hpp"
#include "tests/support/counted_new.hpp"
#include "tests/support/shadow_memory.hpp"

namespace test {

/// Where decisions come from.
class Choices {
 public:
  Choices() = default;
  Choices(const Choices&) = delete;
  Choices& operator=(const Choices&) = delete;
  virtual ~Choices() = default;
  virtual std::size_t below(std::size_t n) = 0;
};

/// Choices from a seeded generator (splitmix64).
class RandomChoices : public Choices {
 public:
  explicit RandomChoices(std::uint64_t seed) : state_(seed) {}
  std::size_t below(std::size_t n) override {
    std::uint64_t z = state_ += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return static_cast<std::size_t>((z ^ (z >> 31)) % n);
  }

 private:
  std::uint64_t state_;
};

/// What the simulation's policy grants its tenants; it changes from time to time.
struct TenantTable {
  std::uint32_t weights[3] = {1, 2, 3};
  std::size_t quotas[3] = {max_pool_chunks, max_pool_chunks, 5};  ///< in chunks
  std::size_t last[3] = {};     ///< the quota that was answered last
  std::size_t granted[3] = {};  ///< the largest that the tree may still go by

  std::size_t ask(std::uint64_t tenant) noexcept {
    last[tenant] = quotas[tenant];
    granted[tenant] = std::max(granted[tenant], last[tenant]);
    return last[tenant];
  }
  /// The prompt has joined for which the tree asked.
  void joined(std::uint64_t tenant) noexcept { granted[tenant] = last[tenant]; }
};
/// By age or by priority, with a weight and a quota for each of the tenants.
struct TenantPolicy : chunkattn::CachePolicy {
  TenantTable* table = nullptr;
  [[nodiscard]] std::uint32_t weight(std::uint64_t tenant) const noexcept {
    return table->weights[tenant];
  }
  [[nodiscard]] std::size_t quota(std::uint64_t tenant) const noexcept {
    return table->ask(tenant);
  }
};

struct SimOptions {
  TreeOptions tree{};
  chunkattn::RetentionOptions retention{};
  std::size_t max_checkpoints = 0;  // 0: the tree has none
  std::int32_t max_checkpoints_per_path = 8;
  bool learns = false;
  bool fair = false;
  bool by_priority = false;
  std::uint32_t ttl = 1000;
  std::size_t budget = max_pool_chunks;
  std::size_t max_live = 24;
  std::size_t max_prompt = 22;
  std::size_t max_length = 90;
  std::size_t letters = 3;  // of the prompts' alphabet
  bool many_namespaces = true;
  /// The policy with these numbers.
  template <class Retention>
  [[nodiscard]] Retention policy(TenantTable& tenants) const {
    Retention policy;
    if constexpr (requires { policy.table; }) policy.table = &tenants;
    policy.high_watermark = retention.high_watermark;
    policy.low_watermark = retention.low_watermark;
    policy.max_pinned = retention.max_pinned;
    if constexpr (std::is_base_of_v<chunkattn::CachePolicy, Retention>) {
      policy.learns = learns;
      policy.fair = fair;
      policy.by_priority = by_priority;
    }
    if (!policy.learns) policy.ttl = ttl;
    return policy;
  }
};

/// How often each kind of event happened.
using Counters = std::map<std::string, std::uint64_t, std::less<>>;

template <class Retention, int ChunkSize>
class EngineSimBase {
 public:
  using Tree = PrefixTree<SimToken, ChunkSize, ShadowAllocator, Retention>;
  using Sequence = typename Tree::Sequence;

  EngineSimBase(const EngineSimBase&) = delete;
  EngineSimBase& operator=(const EngineSimBase&) = delete;
  virtual ~EngineSimBase() = default;
  EngineSimBase(Choices& choices, const SimOptions& options, Counters& counters)
      : choices_(choices), options_(options), counters_(counters) {
    memory_.chunk_size = ChunkSize;
    tree_.emplace(ShadowAllocator{{.max_chunks = options.budget}, &memory_}, options.tree,
                  options.policy<Retention>(tenants_));
  }

  /// The last operations, for a report.
  [[nodiscard]] std::string history() const {
    std::string text;
    for (const std::string& line : log_) text += line + "\n";
    return tree_ ? text + to_text(*tree_, 40) : text;
  }

 protected:
  /// What the model knows of a sequence. It outlives the sequence: steps may still have it.
  struct Live {
    Sequence handle;
    std::uint64_t uid = 0;
    SequenceId id{};
    std::vector<SimToken> tokens;     // known ones, then what the device has in reserved places
    std::vector<std::uint64_t> hash;  // of the path up to and including each of them
    std::vector<Place> places;
    std::vector<std::uint8_t> done;                   // surely written
    std::array<std::vector<std::uint8_t>, 2> valued;  // of each column: slots with a value
    bool has_joined = false;                          // so that what it found was looked at
    std::size_t known = 0;
    std::size_t computed = 0;  // end of what finished steps computed, reserved places included
    std::size_t findable = 0;  // tokens of the prompt that a match must find
    std::size_t public_end = 0;
    std::uint32_t drops = 0;  // how often outputs to come were given up
    int steps = 0;            // outstanding steps that have it
    int superseded = 0;       // of these, started on outputs that were given up
    std::uint64_t last_step = 0;
    std::uint64_t weights = 0;
    int priority = 0;
    Namespace name_space{};
    bool gone = false;

    [[nodiscard]] std::size_t reserved() const { return tokens.size() - known; }
  };
  using LivePtr = std::shared_ptr<Live>;

  static void expect(bool ok, const char* what) {
    if (!ok) [[unlikely]]
      throw std::logic_error(what);
  }
  /// f() is refused as a caller's mistake.
  template <class F>
  static void expect_refused(const F& f, const char* what) {
    bool refused = false;
    try {
      f();
    } catch (const InvalidArgument&) {
      refused = true;
    }
    expect(refused, what);
  }
  /// Calls what cannot fail, and so must not need memory.
  template <class F>
  void spare(const F& call) {
    const std::uint64_t before = heap.allocations;
    call();
    expect(sink_allocates_ || heap.allocations == before, "what cannot fail allocates nothing");
  }

  [[nodiscard]] std::size_t below(std::size_t n) { return choices_.below(n); }
  [[nodiscard]] bool one_in(std::size_t n) { return below(n) == 0; }
  void count(std::string_view what, std::uint64_t n = 1) {
    auto it = counters_.find(what);
    if (it == counters_.end()) it = counters_.emplace(what, 0).first;
    it->second += n;
  }
  void log(std::string line) {
    log_.push_back(std::move(line));
    if (log_.size() > 60000) log_.pop_front();
  }
  template <class T>
  static std::string text(T value) {
    return std::to_string(value);
  }
  static std::string name(const Live& live) { return "#" + std::to_string(live.uid); }

  [[nodiscard]] std::size_t unit() const {
    return options_.tree.sharing == TreeOptions::Sharing::token ? 1 : ChunkSize;
  }
  [[nodiscard]] LivePtr any_live() { return live_[below(live_.size())]; }
  [[nodiscard]] SimToken any_token() { return static_cast<SimToken>(below(options_.letters)); }
  [[nodiscard]] LivePtr find_live(SequenceId id) const {
    for (const LivePtr& live : live_)
      if (live->id == id) return live;
    return nullptr;
  }

  // ---- the model of a sequence ---------------------------------------------------------------

  static void push_token(Live& live, SimToken token) {
    const std::size_t p = live.tokens.size();
    live.tokens.push_back(token);
    live.hash.push_back(extend_hash(p == 0 ? empty_hash(live.weights) : live.hash[p - 1],
                                    space_at(live.name_space, p, live.public_end), token));
    live.done.push_back(0);
    for (auto& valued : live.valued) valued.push_back(0);
  }
  static void set_tokens(Live& live, std::span<const SimToken> tokens) {
    live.tokens.clear();
    live.hash.clear();
    live.done.clear();
    for (auto& valued : live.valued) valued.clear();
    for (const SimToken token : tokens) push_token(live, token);
    live.known = tokens.size();
  }
  static void cut(Live& live, std::size_t length) {
    live.tokens.resize(length);
    live.hash.resize(length);
    live.done.resize(length);
    for (auto& valued : live.valued) valued.resize(length);
    live.computed = std::min(live.computed, length);
    if (live.places.size() > length) live.places.resize(length);
  }
  /// Outputs that are to come are given up.
  static void give_up_outputs(Live& live) {
    if (live.reserved() == 0) return;
    cut(live, live.known);
    ++live.drops;
    live.superseded = live.steps;
  }
  static void mark_done(Live& live, std::size_t end) {
    for (std::size_t p = 0; p < std::min(end, live.known); ++p) live.done[p] = 1;
  }
  [[nodiscard]] static std::size_t leading_done(const Live& live) {
    std::size_t n = 0;
    while (n < live.known && live.done[n]) ++n;
    return n;
  }

  /// A new sequence of the tree enters the model.
  LivePtr adopt(Live&& live, Sequence&& handle) {
    live.handle = std::move(handle);
    live.uid = ++last_uid_;
    live.id = live.handle.id();
    for (const LivePtr& other : live_) expect(other->id != live.id, "ids are never given twice");
    auto added = std::make_shared<Live>(std::move(live));
    live_.push_back(added);
    check_sequence(*added);
    return added;
  }
  void forget(const LivePtr& live) {
    for (auto& other : live_)
      if (other == live) {
        std::swap(other, live_.back());
        live_.pop_back();
        return;
      }
  }

  // ---- what must hold between operations -----------------------------------------------------

  /// Where the K/V of a place stands now: a fork's copy may still be to come.
  [[nodiscard]] Place resolve(Place place) const {
    for (const auto& copy : chunkattn::detail::TreeAccess::core(*tree_).pending_copies) {
      const PlanView::RowCopy& rows = copy.rows;
      if (rows.target_chunk == place.first && place.second >= rows.target_begin &&
          place.second < rows.target_begin + rows.length)
        return {rows.source_chunk, rows.source_begin + place.second - rows.target_begin};
    }
    return place;
  }

  void check_sequence(Live& live) {
    try {
      check_handle(live);
      check_places(live);
      check_written(live);
      check_values(live);
    } catch (const std::logic_error&) {
      look_at(live);
      throw;
    }
  }
  /// Of columns beside the tree, where it has some.
  virtual void check_values(Live&) {}
  /// For the report of a failure.
  void look_at(const Live& live) {
    std::string done, places;
    for (const auto one : live.done) done += one ? '1' : '0';
    for (const Place& place : live.places)
      places += " " + text(place.first) + "[" + text(place.second) + "]";
    log("this is about " + name(live) + ", #" +
        text((static_cast<std::uint64_t>(live.id) - 1) & 0xffffffffu) + " in the tree, " +
        text(live.known) + " known of " + text(live.tokens.size()) + ", written " + done + ", at" +
        places);
  }

  void check_handle(const Live& live) {
    const Sequence& s = live.handle;
    expect(s.is_live(), "a live handle is live");
    expect(s.id() == live.id, "a sequence keeps its id");
    expect(s.size() == live.known, "size");
    expect(s.num_reserved() == live.reserved(), "reserved places");
    const std::vector<SimToken> held = s.tokens();
    expect(std::equal(held.begin(), held.end(), live.tokens.begin()), "tokens");
    const InsertOptions options = s.options();
    expect(options.name_space == live.name_space && options.priority == live.priority &&
               options.public_length == live.public_end,
           "a sequence keeps its namespace, public length and priority");
    const std::size_t scheduled = s.num_scheduled();
    expect(scheduled <= live.tokens.size(), "what is scheduled has a place");
    expect(s.num_uncomputed() == (scheduled < live.known ? live.known - scheduled : 0),
           "known tokens are scheduled or to be computed");
    expect((s.num_pending() > 0) == (s.waits_for() != SequenceId::none),
           "what is pending is somebody's job");
  }

  void check_places(Live& live) {
    std::size_t p = 0;
    const auto end = static_cast<std::int32_t>(live.tokens.size());
    live.handle.for_each_run({0, end}, [&](const Piece& piece) {
      expect(piece.position == static_cast<std::int32_t>(p), "runs are in path order, no gaps");
      expect(piece.chunk >= 0 && static_cast<std::size_t>(piece.chunk) < tree_->num_chunks() &&
                 piece.begin >= 0 && piece.length > 0 && piece.begin + piece.length <= ChunkSize,
             "a run lies within a chunk");
      for (std::int32_t i = 0; i < piece.length; ++i, ++p) {
        const Place place{piece.chunk, piece.begin + i};
        if (p < live.places.size())
          expect(live.places[p] == place, "a position's place never changes");
        else
          live.places.push_back(place);
      }
    });
    expect(p == live.tokens.size(), "runs cover the path");
  }

  void check_written(const Live& live) {
    const std::size_t written = live.handle.num_written();
    expect(written <= live.known, "only known tokens are written");
    for (std::size_t p = 0; p < written; ++p)
      expect(memory_.row(live.places[p]) == live.hash[p], "what is said to be written is there");
    bool copied = false;
    const bool any_copies = !chunkattn::detail::TreeAccess::core(*tree_).pending_copies.empty();
    for (std::size_t p = 0; p < live.known && live.done[p]; ++p) {
      const Place at = any_copies ? resolve(live.places[p]) : live.places[p];
      copied = copied || at != live.places[p];
      expect(copied || p < written, "what is surely written is said to be written");
      expect(memory_.row(at) == live.hash[p], "written K/V stays what it was");
    }
  }

  /// Everything that must hold between operations, at the cost of walking all live sequences.
  void check_all_sequences() {
    owner_.assign(memory_.rows.size(), 0);
    for (const LivePtr& live : live_) {
      check_sequence(*live);
      for (std::size_t p = 0; p < live->tokens.size(); ++p) {
        std::uint64_t& owner = owner_[memory_.index(live->places[p])];
        const std::uint64_t hash = p < live->known ? live->hash[p] : live->uid << 1;
        expect(owner == 0 || owner == hash,
               "two sequences share a place only where their paths agree");
        owner = hash;
      }
    }
    expect(tree_->stats().live_sequences == live_.size() + deferred_sequences_,
           "every live sequence is counted");
  }

  // ---- handles that are dropped --------------------------------------------------------------

  /// In the tree's order.
  enum class Dropped : std::uint8_t { sequence, step, finished, pin };

  /// Drops a handle. The effect comes at once on the thread that last called the tree, and
  /// elsewhere with the next call that changes the tree. Returns whether it came at once.
  template <class Handle, class Effect>
  bool drop_handle(Dropped what, Handle& handle, bool elsewhere, Effect&& effect) {
    if (elsewhere) {
      bool allocates = false;
      std::thread([taken = std::move(handle), &allocates]() mutable {
        const std::uint64_t before = heap.allocations;
        taken = Handle();
        allocates = heap.allocations != before;
      }).join();
      expect(!allocates, "what cannot fail allocates nothing");
    }
    spare([&] { handle = Handle(); });
    if (!elsewhere && owned_) {
      effect();
      return true;
    }
    if (!elsewhere) count("dropped while the tree was another thread's");
    if (what == Dropped::sequence) ++deferred_sequences_;
    deferred_.emplace_back(what, std::forward<Effect>(effect));
    return false;
  }

  /// Effects of handles that were dropped on another thread than the tree's: they come with the
  /// next call that changes the tree, which is this thread's from then on.
  void entering() {
    owned_ = true;
    auto effects = std::move(deferred_);
    deferred_.clear();
    std::stable_sort(effects.begin(), effects.end(),
                     [](const auto& a, const auto& b) { return a.first < b.first; });
    for (auto& [order, effect] : effects) effect();
    deferred_sequences_ = 0;
  }

  /// Has them now, by a call that does nothing else.
  void settle() {
    if (deferred_.empty() && owned_) return;
    entering();
    expect(!tree_->pin({}), "nothing is pinned");
  }

  Choices& choices_;
  SimOptions options_;
  Counters& counters_;
  ShadowMemory memory_;
  TenantTable tenants_;
  std::optional<Tree> tree_;
  std::vector<LivePtr> live_;
  std::vector<std::pair<Dropped, std::function<void()>>> deferred_;
  std::size_t deferred_sequences_ = 0;
  bool sink_allocates_ = false;  // who hears of events copies what is evicted
  bool owned_ = true;            // this thread was the last that called the tree
  std::uint64_t weights_ = 0;    // changes with clear()
  std::uint64_t last_uid_ = 0;

 private:
  std::vector<std::uint64_t> owner_;
  std::deque<std::string> log_;
};

}  // namespace test
