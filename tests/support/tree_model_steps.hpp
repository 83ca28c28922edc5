// The tree model's steps: which rows run, what their plan must say, when the device runs them, and
// what is committed after that.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/tree_model.hpp"

namespace test {

template <class Retention, class Choices>
class TreeModelSteps : public TreeModelBase<Retention, Choices> {
  using Base = TreeModelBase<Retention, Choices>;

 protected:
  using Base::below, Base::one_in, Base::count, Base::expect, Base::tree_, Base::live_;
  using Base::options_, Base::in_flight_, Base::plans_;
  using typename Base::Live, typename Base::RunEntry, typename Base::Step;

 public:
  using Base::Base;

 protected:
  Live& any_live(std::uint64_t* id = nullptr) {
    auto it = live_.begin();
    std::advance(it, static_cast<std::ptrdiff_t>(below(live_.size())));
    if (id != nullptr) *id = it->first;
    return it->second;
  }

  std::optional<TokenRange> choose_queries(Live& live, bool whole) {
    const auto size = static_cast<std::int32_t>(live.known);
    const auto all = static_cast<std::int32_t>(live.tokens.size());
    const TokenRange next = live.handle.next_uncomputed();
    if (live.running == 0 || next.begin < live.next)  // or the job of one that left came to it
      live.planned = static_cast<std::size_t>(next.begin);
    live.next = next.begin;
    std::int32_t begin = next.begin;
    if (options_.tree.async_steps) begin = static_cast<std::int32_t>(live.planned);
    if (begin >= all) {  // nothing to compute: look again at what is there
      if (options_.tree.async_steps && live.running > 0) return std::nullopt;
      begin = static_cast<std::int32_t>(below(live.known));
      return TokenRange{begin, 1};
    }
    if (next.length > 0 && !options_.tree.async_steps && !whole && one_in(30))
      begin += static_cast<std::int32_t>(below(static_cast<std::size_t>(next.length)));
    std::int32_t end = begin < size && !whole && one_in(2) ? size : all;
    if (!whole && one_in(2))
      end = begin + 1 + static_cast<std::int32_t>(below(static_cast<std::size_t>(end - begin)));
    return TokenRange{begin, end - begin};
  }

  void run_step() {
    if (options_.tree.async_steps && in_flight_.size() >= 3) execute_oldest();
    if (live_.empty()) return;
    std::set<std::uint64_t> chosen;
    const bool everybody = one_in(60);
    if (everybody) {
      for (const auto& [id, live] : live_) chosen.insert(id);
    } else {
      for (std::size_t n = 1 + below(7); n > 0; --n) {
        std::uint64_t id = 0;
        (void)any_live(&id);
        chosen.insert(id);
      }
    }
    std::vector<RunEntry> entries;
    for (const std::uint64_t id : chosen) {
      const auto range = choose_queries(live_.at(id), everybody);
      if (range) entries.push_back({id, live_.at(id).drops, *range});
    }
    for (std::size_t i = entries.size(); i > 1; --i) std::swap(entries[i - 1], entries[below(i)]);
    AttentionPlan& plan = plans_[below(plans_.size())];
    std::string line = "step of";
    for (const RunEntry& e : entries)
      line += " " + std::to_string(e.id) + " [" + std::to_string(e.range.begin) + ", " +
              std::to_string(e.range.end()) + ")";
    this->log(std::move(line));
    if (!update(plan, entries, everybody)) {
      // Without those that wait for others, and those that run ahead, it must work.
      std::erase_if(entries, [&](const RunEntry& e) { return waits(e) || runs_ahead(e); });
      expect(update(plan, entries, true), "a step of sequences that wait for nobody is accepted");
    }
    if (entries.empty()) return;
    Step step = this->record_step(plan, entries);
    count("step");
    if (options_.tree.async_steps) {
      for (const RunEntry& e : entries) {
        Live& live = live_.at(e.id);
        ++live.running;
        live.planned = std::max(live.planned, static_cast<std::size_t>(e.range.end()));
      }
      in_flight_.push_back(std::move(step));
      return;
    }
    this->execute(step);
    if (one_in(25)) {
      count("step lost before its commit");
      return;
    }
    commit(step);
  }

  bool waits(const RunEntry& e) { return live_.at(e.id).handle.num_pending() > 0; }
  bool runs_ahead(const RunEntry& e) {
    const TokenRange next = live_.at(e.id).handle.next_uncomputed();
    return !options_.tree.async_steps && next.length > 0 && e.range.begin > next.begin;
  }

  bool update(AttentionPlan& plan, const std::vector<RunEntry>& entries, bool must) {
    if (entries.empty()) return true;
    plan.clear();
    for (const RunEntry& e : entries) plan.add(live_.at(e.id).handle, e.range);
    const std::uint64_t rebuilds = plan.num_rebuilds(), version = tree_.version();
    const bool async = options_.tree.async_steps;
    try {
      plan.update(tree_);
      count(plan.num_rebuilds() == rebuilds ? "plan advanced" : "plan rebuilt");
    } catch (const InvalidArgument& error) {
      this->log(error.what());
      // Refused: somebody must be waiting or running ahead. If all run everything, nobody waits.
      bool reason = false;
      for (const RunEntry& e : entries) reason = reason || waits(e) || runs_ahead(e);
      expect(reason && (!must || async), "a step is refused only where K/V is missing");
      expect(plan.num_rebuilds() == rebuilds && tree_.version() == version,
             "a refused step changes nothing");
      count("plan refused");
      return false;
    }
    return true;
  }

  void execute_oldest() {
    if (in_flight_.empty()) return;
    auto it = in_flight_.begin();
    while (it != in_flight_.end() && it->executed) ++it;
    if (it != in_flight_.end()) {
      this->execute(*it);
      commit(*it);
    }
    // retire() lags behind: until then nothing that the step used may be freed.
    while (!in_flight_.empty() && in_flight_.front().executed &&
           (in_flight_.size() > 4 || one_in(3) || it == in_flight_.end())) {
      this->check_unfreed(in_flight_.front());
      tree_.retire(in_flight_.front().number);
      in_flight_.pop_front();
      count("retire");
      if (in_flight_.empty()) return;
    }
  }

  void commit(const Step& step) {
    for (const RunEntry& e : step.entries) {
      const auto found = live_.find(e.id);
      if (found == live_.end()) continue;
      Live& live = found->second;
      if (options_.tree.async_steps) --live.running;
      if (live.drops != e.drops) continue;
      const auto size = static_cast<std::int32_t>(live.known);
      const std::int32_t known_end = std::min(e.range.end(), size);
      const TokenRange next = live.handle.next_uncomputed();
      if (e.range.begin > next.begin && next.length > 0) {
        count("commit overtaken by a hand-over");
        continue;
      }
      std::int32_t done_end = e.range.begin;
      if (e.range.begin < known_end) {
        const std::int32_t length = known_end - e.range.begin;
        const std::int32_t part =
            !options_.tree.async_steps && one_in(6)
                ? static_cast<std::int32_t>(below(static_cast<std::size_t>(length) + 1))
                : length;
        live.handle.commit(TokenRange{e.range.begin, part});
        done_end += part;
        mark_done(live, step, e, done_end);
        count(part < length ? "commit of a part" : "commit of a range");
      }
      if (e.range.end() > size && live.handle.next_uncomputed().empty() && one_in(20) == false)
        commit_reserved(live, step, e);
      this->check_sequence(live);
    }
  }

  void mark_done(Live& live, const Step& step, const RunEntry& e, std::int32_t end) {
    for (const auto& w : step.writes)
      for (std::int32_t p = e.range.begin; p < end; ++p)
        if (w.id == e.id && live.places[static_cast<std::size_t>(p)] == w.place)
          live.done[static_cast<std::size_t>(p)] = 1;
  }

  void commit_reserved(Live& live, const Step& step, const RunEntry& e) {
    if (e.range.begin > static_cast<std::int32_t>(live.known)) return;  // an earlier one is missing
    const std::size_t ran = static_cast<std::size_t>(e.range.end()) - live.known;
    const std::size_t most = std::min(ran, live.reservations.front());
    const std::size_t accepted = one_in(3) ? below(most + 1) : most;
    const std::size_t first = live.known;
    const std::size_t wanted = live.reservations.front();
    if (accepted == 1 && one_in(2))
      live.handle.commit(live.tokens[first]);
    else
      live.handle.commit(std::span<const ModelToken>(live.tokens).subspan(first, accepted));
    live.known += accepted;
    mark_done(live, step, e, static_cast<std::int32_t>(live.known));
    if (accepted == wanted) {
      live.reservations.pop_front();
      count("reservation accepted");
    } else {
      count(live.reservations.size() > 1 ? "draft and later reservations dropped"
                                         : "draft dropped");
      this->truncate(live);
    }
  }

  /// Some decode steps of the same sequences in the same order: the plan advances and is rebuilt
  /// only where the tree changed, or where a tail got its first place.
  void burst() {
    if (options_.tree.async_steps) return run_step();
    std::set<std::uint64_t> chosen;
    for (std::size_t n = 1 + below(6); n > 0; --n) {
      std::uint64_t id = 0;
      const Live& live = any_live(&id);
      if (live.reservations.empty() && live.handle.next_uncomputed().empty() &&
          live.handle.num_pending() == 0 && live.known < 90)
        chosen.insert(id);
    }
    if (chosen.empty()) return;
    AttentionPlan& plan = plans_[below(plans_.size())];
    std::uint64_t version = 0;
    for (std::size_t n = 1 + below(14), i = 0; i < n; ++i) {
      this->log("burst of " + std::to_string(chosen.size()));
      std::vector<RunEntry> entries;
      bool first_place = false;
      for (const std::uint64_t id : chosen) {
        Live& live = live_.at(id);
        if (!live.handle.try_reserve(1)) return truncate_all(chosen);
        this->push_token(live, static_cast<ModelToken>(below(3)));
        live.reservations.push_back(1);
        this->check_sequence(live);
        entries.push_back({id, live.drops, {static_cast<std::int32_t>(live.known), 1}});
        const auto& core = tree_.core();
        first_place |= core.node(core.sequence(live.handle.index()).tail).length == 1;
      }
      const std::uint64_t rebuilds = plan.num_rebuilds();
      const bool same = i > 0 && version == tree_.version();
      expect(update(plan, entries, true), "a decode step runs");
      const bool rebuilt = plan.num_rebuilds() != rebuilds;
      expect(!same || first_place || !rebuilt, "no rebuild while nothing changes");
      version = tree_.version();
      Step step = this->record_step(plan, entries);
      this->execute(step);
      commit(step);
      count("decode step");
      for (const std::uint64_t id : chosen)
        if (!live_.at(id).reservations.empty()) return truncate_all(chosen);
    }
  }

  /// Rejects what is reserved.
  void truncate_all(const std::set<std::uint64_t>& chosen) {
    for (const std::uint64_t id : chosen) {
      Live& live = live_.at(id);
      if (live.reservations.empty()) continue;
      live.handle.commit(std::span<const ModelToken>());
      this->truncate(live);
      this->check_sequence(live);
    }
  }
};

}  // namespace test
