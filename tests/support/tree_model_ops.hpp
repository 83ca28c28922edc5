// The operations of the tree model: each is drawn, predicted, applied and compared.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <limits>
#include <optional>
#include <random>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/tree_model_steps.hpp"

namespace test {

/// Choices from a seeded generator.
class RandomChoices {
 public:
  explicit RandomChoices(std::uint64_t seed) : engine_(seed) {}
  std::size_t below(std::size_t n) { return static_cast<std::size_t>(engine_() % n); }

 private:
  std::mt19937_64 engine_;
};

template <class Retention, class Choices>
class TreeModel : public TreeModelSteps<Retention, Choices> {
  using Base = TreeModelSteps<Retention, Choices>;
  using Base::any_live, Base::burst, Base::execute_oldest, Base::run_step, Base::below,
      Base::one_in, Base::count, Base::expect, Base::tree_, Base::live_;
  using Base::options_, Base::in_flight_, Base::remembered_;
  using typename Base::Live, typename Base::Sequence;

 public:
  using Base::Base;

  /// One random operation; throws std::logic_error at the first difference.
  void operate() {
    const TreeStats before = tree_.stats();
    const std::size_t kind = below(100);
    if (live_.empty() || (kind < 18 && live_.size() < options_.max_live))
      insert();
    else if (kind < 36)
      live_.size() > options_.max_live / 2 || one_in(3) ? leave() : insert();
    else if (kind < 48)
      reserve();
    else if (kind < 53)
      append();
    else if (kind < 62)
      live_.size() < options_.max_live ? fork() : leave();
    else if (kind < 64)
      pin();
    else if (kind == 64 && one_in(40))
      clear();
    else if (kind < 67 && options_.tree.async_steps)
      execute_oldest();
    else if (kind < 70)
      burst();
    else
      run_step();
    count_events(before);
  }

  /// Lets everybody leave; then nothing may be left but cache, and after clear() nothing at all.
  void finish() {
    while (!in_flight_.empty()) execute_oldest();
    tree_.retire(std::numeric_limits<std::uint64_t>::max());
    while (!live_.empty()) leave();
    tree_.retire(std::numeric_limits<std::uint64_t>::max());
    tree_.check_invariants();
    TreeStats stats = tree_.stats();
    expect(stats.live_sequences == 0, "nobody is left");
    if (tree_.core().pending_copies().empty()) {  // else what is to be copied waits
      expect(stats.retiring_sequences == 0, "nobody waits");
      expect(stats.used_slots == stats.retained_slots, "only cache is left");
    }
    expect(Retention::retains || stats.used_slots == 0, "without retention nothing is left");
    tree_.clear();
    tree_.check_invariants();
    stats = tree_.stats();
    expect(stats.used_slots == 0 && stats.nodes == 1 && stats.retiring_sequences == 0,
           "clear() forgets everything");
  }

 private:
  static std::span<const ModelToken> view(const std::vector<ModelToken>& tokens) { return tokens; }

  std::vector<ModelToken> random_prompt() {
    std::vector<ModelToken> prompt;
    if (!live_.empty() && !one_in(3)) {
      const Live& like = any_live();
      prompt.assign(like.tokens.begin(),
                    like.tokens.begin() + static_cast<std::ptrdiff_t>(below(like.known + 1)));
    }
    const auto max = static_cast<std::size_t>(options_.max_prompt);
    if (prompt.size() > max) prompt.resize(max);
    std::size_t more = below(max - prompt.size() + 1);
    if (prompt.empty() && more == 0) more = 1;
    if (one_in(2)) more = std::min<std::size_t>(more, prompt.empty() ? 1 : below(4));
    while (more-- > 0) prompt.push_back(static_cast<ModelToken>(below(3)));
    return prompt;
  }

  Namespace random_namespace() {
    if (!options_.many_namespaces || !one_in(4)) return {};
    return {.tenant = below(3), .adapter = below(2)};
  }

  // ---- join and leave ------------------------------------------------------------------------

  void insert() {
    const std::vector<ModelToken> prompt = random_prompt();
    InsertOptions o;
    o.name_space = random_namespace();
    if (options_.many_namespaces && one_in(3)) o.public_length = below(prompt.size() + 2);
    o.priority = static_cast<int>(below(3));
    const MatchResult found = tree_.match_prefix(prompt, o);
    if (one_in(3)) o.max_reuse = one_in(2) ? prompt.size() - 1 : below(prompt.size() + 1);
    const MatchResult limited = tree_.match_prefix(prompt, o);
    expect(
        limited.cached == std::min(found.cached, o.max_reuse) && limited.pending == found.pending,
        "max_reuse bounds what is reused, not what is found");
    const std::size_t needed = tree_.slots_needed(prompt, o), free = tree_.slots_available();
    const std::size_t pending_before = tree_.stats().pending_tokens;

    Live live;
    live.name_space = o.name_space;
    live.public_end = std::min(o.public_length, prompt.size());
    live.public_end -= live.public_end % this->unit();
    live.hash = this->path_hashes(prompt, o.name_space, live.public_end);
    live.tokens = prompt;
    live.known = prompt.size();
    live.prompt_end = prompt.size() - prompt.size() % this->unit();
    live.done.assign(prompt.size(), 0);
    std::fill_n(live.done.begin(), found.cached, 1);
    check_match(live, found);
    this->log("insert " + std::to_string(this->next_id_) + " of " + std::to_string(prompt.size()) +
              ", cached " + std::to_string(found.cached) + ", pending " +
              std::to_string(found.pending));

    std::optional<Sequence> s;
    if (one_in(2)) {
      s = tree_.try_insert(prompt, o);
    } else {
      try {
        s = tree_.insert(prompt, o);
      } catch (const OutOfChunks&) {
      }
    }
    expect(s.has_value() || needed > free, "what admission promised is there");
    if (!s) {
      count("insert failed");
      return;
    }
    expect(needed <= free, "what admission refused is refused");
    expect(free - tree_.slots_available() <= needed, "no more slots than admission said");
    expect(s->num_cached() == limited.cached, "cached as predicted");
    expect(tree_.stats().pending_tokens - pending_before == found.pending, "pending as predicted");
    const auto next = s->next_uncomputed(3);
    expect(static_cast<std::size_t>(next.begin) <= o.max_reuse && next.length <= 3, "max_reuse");
    live.handle = std::move(*s);
    live.planned = static_cast<std::size_t>(next.begin);
    this->check_sequence(live);
    live_.emplace(this->next_id_++, std::move(live));
    count("insert");
    if (found.cached > 0) count("insert found cached");
    if (found.pending > 0) count("insert found pending");
  }

  /// A match is at least the longest prefix shared with a live sequence, and without retention no
  /// more; what others have surely written is found written.
  void check_match(const Live& joining, const MatchResult& found) {
    std::size_t longest = 0, written = 0;
    for (const auto& [id, other] : live_) {
      if (other.stale) continue;
      const std::size_t limit = std::min(other.prompt_end, joining.known);
      std::size_t common = 0;
      while (common < limit && other.hash[common] == joining.hash[common]) ++common;
      common -= common % this->unit();
      longest = std::max(longest, common);
      std::size_t done = 0;
      while (done < common && other.done[done]) ++done;
      written = std::max(written, done);
    }
    if (!remembered_.empty()) {
      std::size_t known = 0;
      while (known < joining.known && remembered_.count(joining.hash[known]) > 0) ++known;
      known -= known % this->unit();
      expect(found.cached >= known, "an unbounded cache forgets nothing");
      if (known > 0) count("found again after leaving");
    }
    expect(found.cached + found.pending <= joining.known, "a match lies within the prompt");
    expect(found.cached >= written, "what a live sequence has written is found");
    if (!Retention::retains && tree_.stats().retiring_sequences == 0)
      expect(found.cached + found.pending <= longest, "nothing is found that is not there");
  }

  void leave() {
    std::uint64_t id = 0;
    (void)any_live(&id);
    for (int i = 0; i < 8 && one_in(2) && live_.at(id).handle.next_uncomputed().empty(); ++i)
      (void)any_live(&id);  // cancelled prefills more often
    Live& live = live_.at(id);
    this->log("leave " + std::to_string(id));
    if (live.handle.num_pending() > 0) count("left while waiting for another");
    if (live.handle.next_uncomputed().length > 0) count("left in the middle of a prefill");
    if (Retention::retains && options_.budget == max_slots && !live.stale &&
        options_.retention.high_watermark > max_slots) {
      std::size_t p = 0;
      while (p < live.prompt_end && live.done[p]) remembered_.insert(live.hash[p++]);
    }
    const std::size_t way = below(3);
    if (way == 0) {
      live.handle.leave();
      expect(!live.handle.is_live(), "a handle that left is empty");
    } else if (way == 1) {
      live.handle = Sequence();
    }
    live_.erase(id);
    count("leave");
  }

  void fork() {
    std::uint64_t id = 0;
    Live& live = any_live(&id);
    const bool was_full = tree_.slots_available() == 0;
    std::optional<Sequence> s;
    if (one_in(2)) {
      s = live.handle.try_fork();
    } else {
      try {
        s = live.handle.fork();
      } catch (const OutOfChunks&) {
      }
    }
    this->log("fork " + std::to_string(id) + " into " + std::to_string(this->next_id_));
    if (!s) {
      expect(was_full, "a fork takes at most one slot");
      count("fork failed");
      return;
    }
    Live twin;
    const auto known = static_cast<std::ptrdiff_t>(live.known);
    twin.handle = std::move(*s);
    twin.tokens.assign(live.tokens.begin(), live.tokens.begin() + known);
    twin.hash.assign(live.hash.begin(), live.hash.begin() + known);
    twin.done.assign(live.done.begin(), live.done.begin() + known);
    twin.known = live.known;
    twin.prompt_end = live.prompt_end;
    twin.public_end = live.public_end;
    twin.name_space = live.name_space;
    twin.stale = live.stale;
    twin.planned = static_cast<std::size_t>(twin.handle.next_uncomputed().begin);
    this->check_sequence(live);
    this->check_sequence(twin);
    if (!live.reservations.empty()) count("fork beside a reservation");
    live_.emplace(this->next_id_++, std::move(twin));
    count("fork");
  }

  // ---- grow --------------------------------------------------------------------------------

  void reserve() {
    std::uint64_t id = 0;
    (void)any_live(&id);
    reserve(id);
    for (int i = 0; one_in(6) && i < 4; ++i)
      for (int k = 0; k < 2; ++k) reserve(id);
  }

  void reserve(std::uint64_t id) {
    Live& live = live_.at(id);
    const std::size_t n = 1 + (one_in(2) ? 0 : below(9));
    if (live.known > 90) return;
    this->log("reserve " + std::to_string(n) + " for " + std::to_string(id));
    if (live.reservations.size() == 4) {
      bool refused = false;
      try {
        (void)live.handle.reserve(n);
      } catch (const InvalidArgument&) {
        refused = true;
      }
      expect(refused, "a fifth reservation is refused");
      count("reserve refused");
      return;
    }
    const std::size_t needed = live.handle.slots_needed(n), free = tree_.slots_available();
    const auto range = live.handle.try_reserve(n);
    expect(range.has_value() == (needed <= free), "reserve succeeds where slots_needed says so");
    if (!range) {
      count("reserve failed");
      return;
    }
    expect(range->begin == static_cast<std::int32_t>(live.tokens.size()) &&
               range->length == static_cast<std::int32_t>(n),
           "a reservation starts behind the last");
    expect(free - tree_.slots_available() <= needed, "no more slots than slots_needed said");
    for (std::size_t i = 0; i < n; ++i) this->push_token(live, static_cast<ModelToken>(below(3)));
    live.reservations.push_back(n);
    this->check_sequence(live);
    count(live.reservations.size() > 1 ? "reserve on top of a reservation" : "reserve");
  }

  void append() {
    Live& live = any_live();
    std::vector<ModelToken> tokens(1 + below(5));
    for (auto& token : tokens) token = static_cast<ModelToken>(below(3));
    if (live.known > 90) return;
    this->log("append " + std::to_string(tokens.size()));
    const std::size_t needed = live.handle.slots_needed(tokens.size());
    const std::size_t free = tree_.slots_available();
    try {
      const TokenRange range = live.handle.append(tokens);
      expect(live.reservations.empty() && needed <= free, "append where it may");
      expect(range.begin == static_cast<std::int32_t>(live.known), "appended at the end");
    } catch (const OutOfChunks&) {
      expect(needed > free, "append fails only without slots");
      count("append failed");
      return;
    } catch (const InvalidArgument&) {
      expect(!live.reservations.empty(), "append is refused only beside a reservation");
      count("append refused");
      return;
    }
    for (const ModelToken token : tokens) this->push_token(live, token);
    live.known += tokens.size();
    this->check_sequence(live);
    count("append");
  }

  // ---- the cache as a whole ------------------------------------------------------------------

  void pin() {
    const std::vector<ModelToken> prompt = random_prompt();
    const InsertOptions o{.name_space = random_namespace()};
    if (one_in(3)) {
      tree_.unpin(prompt, o);
      count("unpin");
      return;
    }
    const MatchResult found = tree_.match_prefix(prompt, o);
    const std::size_t pinned = tree_.pin(prompt, o);
    this->log("pin " + std::to_string(pinned) + " of " + std::to_string(prompt.size()));
    expect(pinned == 0 || pinned >= found.cached + found.pending, "all that matches is pinned");
    if (found.cached > 0) count(pinned > 0 ? "pin" : "pin refused");
  }

  void clear() {
    this->log("clear");
    tree_.clear();
    for (auto& [id, live] : live_) live.stale = true;
    remembered_.clear();
    const InsertOptions o{};
    const std::vector<ModelToken> prompt = random_prompt();
    const MatchResult found = tree_.match_prefix(prompt, o);
    expect(found.cached + found.pending == 0, "nothing is found after clear()");
    count("clear");
  }

  void count_events(const TreeStats& before) {
    const TreeStats now = tree_.stats();
    const auto more = [&](const char* what, std::uint64_t a, std::uint64_t b) {
      if (b > a) count(what, b - a);
    };
    more("split inside a slot", before.splits_inside_slot, now.splits_inside_slot);
    more("split between slots", before.splits - before.splits_inside_slot,
         now.splits - now.splits_inside_slot);
    more("fork copied its tail", before.forks_copied, now.forks_copied);
    more("fork shared its tail", before.forks_shared, now.forks_shared);
    more("hand-over", before.hand_overs, now.hand_overs);
    more("merged tokens", before.merged_tokens, now.merged_tokens);
    more("published tokens", before.published_tokens, now.published_tokens);
    more("evicted slots", before.evicted_slots, now.evicted_slots);
    more("evicted tokens", before.evicted_tokens, now.evicted_tokens);
  }
};

}  // namespace test
