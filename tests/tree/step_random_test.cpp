// Random engines: prefill in parts, decoding, drafts, forks, edits, loads, steps cancelled, in
// flight and lost, on a device that checks every read.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <utility>
#include <vector>

#include "chunkattn/attention_plan.hpp"
#include "chunkattn/debug/tree.hpp"
#include "chunkattn/prefix_tree.hpp"
#include "tests/support/random.hpp"
#include "tests/support/retention.hpp"
#include "tests/support/step_device.hpp"

using namespace chunkattn;

namespace {

constexpr int vocabulary = 3;

template <class Tree>
class Engine {
 public:
  Engine(test::Random& random, std::size_t chunks, TreeOptions options)
      : random_(random), tree_(PoolAllocator{.max_chunks = chunks}, options) {}

  void play(int calls) {
    for (int i = 0; i < calls; ++i) {
      call(random_.uniform(0, 99));
      if (i % 20 != 0) continue;
      check_invariants(tree_);
      for (const auto& s : live_) REQUIRE(device_.wrong(s) == 0);
      REQUIRE(device_.wrong_reads() == 0);
    }
    while (!flying_.empty()) finish();
    if (tree_.stats().abandoned_steps > 0) idle();
    live_.clear();
    check_invariants(tree_);
    CHECK(device_.wrong_reads() == 0);
    tree_.clear();  // with a policy that retains, copies into what stays as cache are still wanted
    CHECK(tree_.stats().leaving_sequences == 0);
    CHECK(tree_.stats().used_chunks == 0);
  }

  [[nodiscard]] TreeStats stats() const { return tree_.stats(); }
  [[nodiscard]] int num_rows() const { return device_.num_rows(); }
  std::uint64_t outputs = 0, accepted = 0, held = 0, unknown = 0;

 private:
  using Sequence = typename Tree::Sequence;
  struct Flight {
    typename Tree::InFlight step;
    std::vector<std::pair<SequenceId, std::vector<int>>> drafts;
    int jobs_before;  // queued before it and not run; -1: it has run itself
  };

  void call(int what) {
    if (live_.empty() || (what < 12 && live_.size() < 12)) return insert();
    Sequence& s = live_[random_.index(live_.size())];
    if (what < 20) {
      std::swap(s, live_.back());
      live_.pop_back();
    } else if (what < 26) {
      if (auto fork = s.try_fork(random_.chance(0.5) ? s.size() : 1 + random_.index(s.size())))
        live_.push_back(std::move(*fork));
    } else if (what < 28) {
      if (tree_.chunks_available() > 1) s.truncate(1 + random_.index(s.size()));
    } else if (what < 31) {
      if (s.num_reserved() == 0) (void)s.try_append(tokens(6));
    } else if (what < 33) {
      (void)s.take_over();
    } else if (what < 36) {
      TokenRange range = s.loadable();
      range.length = std::min(range.length, random_.uniform(0, 9));
      if (range.empty()) return;
      device_.load(s, range);
      s.mark_loaded(range);
    } else if (what == 36 && random_.chance(0.2)) {
      tree_.clear();
    } else if (what == 37 && random_.chance(0.5) && !flying_.empty()) {
      const auto lost =
          flying_.begin() + static_cast<std::ptrdiff_t>(random_.index(flying_.size()));
      lost_.push_back(lost->step.number());
      if (lost->jobs_before >= 0 && random_.chance(0.5))
        device_.lose(static_cast<std::size_t>(lost->jobs_before));
      flying_.erase(lost);
    } else if (what == 38 && random_.chance(0.3)) {
      idle();
    } else if (what < 80) {
      step();
    } else if (!flying_.empty()) {
      finish();
    }
  }

  std::vector<int> tokens(int most) {
    std::vector<int> all(static_cast<std::size_t>(random_.uniform(1, most)));
    for (int& t : all) t = random_.uniform(0, 1);
    return all;
  }

  void insert() {
    auto s = tree_.try_insert(tokens(24), {.max_reuse = random_.chance(0.1) ? 3u : 1000u,
                                           .compute_last = random_.chance(0.9),
                                           .share_pending = random_.chance(0.8)});
    if (s) live_.push_back(std::move(*s));
  }

  void idle() {
    if (flying_.empty() && random_.chance(0.5)) device_.reset();
    device_.run_all();
    for (Flight& flight : flying_) flight.jobs_before = -1;
    tree_.device_idle();
    if (flying_.empty()) lost_.clear();  // else some are held until those before them have finished
  }

  void step() {
    if (flying_.size() + lost_.size() >= 4) {
      if (flying_.empty()) idle();
      if (!flying_.empty()) finish();
      return;
    }
    auto step = tree_.begin_step();
    std::vector<ScheduledSequence> rows;
    std::vector<std::pair<SequenceId, std::vector<int>>> drafts;
    for (Sequence& s : live_) {
      if (random_.chance(0.2)) continue;
      const std::vector<int> guess = random_.chance(0.3) ? tokens(4) : std::vector<int>{};
      const AddResult result = step.add(s, 1 + random_.index(15), {.tokens = guess});
      held += result.reason() == AddResult::Reason::waits_for_sequence ? 1 : 0;
      if (!result) continue;
      rows.push_back(result.row());
      drafts.emplace_back(s.id(), guess);
    }
    if (random_.chance(0.1)) return;  // cancelled before a plan was built
    const auto view = plan_.build(step);
    if (random_.chance(0.1)) return;  // and after
    if (random_.chance(0.1) && !live_.empty()) live_.pop_back();
    unknown += view ? view.unknown_tokens().size() : 0;
    const auto before = static_cast<int>(device_.num_queued());
    device_.queue(view);
    for (const ScheduledSequence& row : rows) device_.name(row);
    if (random_.chance(0.4) && flying_.empty()) {
      device_.run_all();
      if (random_.chance(0.1)) return;  // the kernels ran, and it is dropped all the same
      lost_.clear();
      commit(std::move(step).finish(), drafts);
    } else {
      flying_.push_back({std::move(step).submit(), std::move(drafts), before});
    }
  }

  void finish() {
    Flight flight = std::move(flying_.front());
    flying_.pop_front();
    for (int i = 0; i <= flight.jobs_before; ++i) device_.run_next();
    for (Flight& later : flying_)
      if (later.jobs_before >= 0) later.jobs_before -= flight.jobs_before + 1;
    std::erase_if(lost_, [&](std::uint64_t number) { return number < flight.step.number(); });
    commit(std::move(flight.step).finish(), flight.drafts);
  }

  void commit(typename Tree::Finished done,
              const std::vector<std::pair<SequenceId, std::vector<int>>>& drafts) {
    for (const ScheduledSequence row : done.rows()) {
      if (random_.chance(0.05)) {  // discarded
        device_.supersede(row.sequence);
        continue;
      }
      const auto& guess = std::find_if(drafts.begin(), drafts.end(), [&](const auto& d) {
                            return d.first == row.sequence;
                          })->second;
      std::vector<int> sampled;
      for (int i = 0; i <= row.num_drafts; ++i) {
        sampled.push_back(device_.sampled(row, i));
        if (i < row.num_drafts && guess[static_cast<std::size_t>(i)] != sampled.back()) break;
      }
      if (sampled.size() <= static_cast<std::size_t>(row.num_drafts))
        device_.supersede(row.sequence);
      ++outputs, accepted += sampled.size() - 1;
      done.commit(row, sampled);
    }
  }

  test::Random& random_;
  Tree tree_;
  test::StepDevice<Tree> device_{tree_, vocabulary};
  AttentionPlan plan_;
  std::vector<Sequence> live_;
  std::deque<Flight> flying_;
  std::vector<std::uint64_t> lost_;  // numbers of steps that were dropped in flight
};

}  // namespace

TEST_CASE_TEMPLATE("every row of every step reads its own path, written", Retention,
                   test::NoRetention, RetentionOptions) {
  std::uint64_t outputs = 0, accepted = 0, held = 0, unknown = 0, abandoned = 0, cancelled = 0;
  std::uint64_t copied = 0;
  const int rounds = test::scaled(60);
  for (int round = 0; round < rounds; ++round) {
    CAPTURE(round);
    test::Random random(static_cast<std::uint64_t>(round));
    Engine<PrefixTree<int, 4, PoolAllocator, Retention>> engine(
        random, static_cast<std::size_t>(random.uniform(15, 80)),
        {.sharing = random.chance(0.3) ? TreeOptions::Sharing::chunk : TreeOptions::Sharing::token,
         .min_run = random.uniform(1, 4)});
    engine.play(600);
    outputs += engine.outputs, accepted += engine.accepted, held += engine.held;
    unknown += engine.unknown, abandoned += engine.stats().abandoned_steps;
    cancelled += engine.stats().cancelled_steps, copied += engine.stats().copied_tokens;
  }
  const auto n = static_cast<std::uint64_t>(rounds);
  CHECK(outputs > 100 * n);
  CHECK(accepted > 2 * n);
  CHECK(held > n);
  CHECK(unknown > 5 * n);
  CHECK(abandoned > n / 2);
  CHECK(cancelled > 5 * n);
  CHECK(copied > 2 * n);
}
