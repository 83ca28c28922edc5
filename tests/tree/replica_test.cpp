// Replicas: two trees that are fed the same calls (tensor-parallel ranks) hold the same sequences
// in the same chunks and make the same plans, whatever their addresses.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "chunkattn/attention_plan.hpp"
#include "chunkattn/debug/tree.hpp"
#include "chunkattn/prefix_tree.hpp"
#include "tests/support/random.hpp"
#include "tests/support/steps.hpp"

using namespace chunkattn;

namespace {

using Tree = PrefixTree<int, 4>;

/// Plays random calls; what it does depends only on the stream and on what the tree answers.
class Replica {
 public:
  explicit Replica(std::uint64_t stream) : random_(stream) {}

  /// A hash of everything that can be seen, after each call.
  std::vector<std::uint64_t> play(int calls) {
    std::vector<std::uint64_t> trace;
    for (int i = 0; i < calls; ++i) {
      call(random_.uniform(0, 19));
      see_state();
      if (i % 100 == 0) see_places();
      if (i % 500 == 0) check_invariants(tree_);
      trace.push_back(hash_);
    }
    return trace;
  }

  [[nodiscard]] TreeStats stats() const { return tree_.stats(); }

 private:
  void call(int what) {
    if (live_.size() < 5 || (what < 4 && live_.size() < 60)) return insert();
    Tree::Sequence& s = live_[random_.index(live_.size())];
    if (what < 8) {
      std::swap(s, live_.back());
      live_.pop_back();
    } else if (what == 8) {
      if (auto fork = s.try_fork(1 + random_.index(s.size()))) live_.push_back(std::move(*fork));
    } else if (what == 9) {
      TokenRange range = s.loadable();
      range.length = std::min(range.length, random_.uniform(0, 9));
      if (!range.empty()) s.mark_loaded(range);
    } else if (what == 10) {
      see(s.take_over());
    } else if (what == 11) {
      auto pin = tree_.pin(s.tokens());
      see(pin.size());
      pins_.push_back(std::move(pin));
      if (pins_.size() > 5) pins_.pop_front();
    } else if (what < 16) {
      step();
    } else if (!flying_.empty() && random_.chance(0.9)) {
      finish();
    } else if (!flying_.empty() && random_.chance(0.3)) {
      flying_.clear();  // all are abandoned
      tree_.device_idle();
    }
  }

  void insert() {
    std::vector<int> prompt(static_cast<std::size_t>(random_.uniform(1, 20)));
    for (int& t : prompt) t = random_.uniform(0, 2);
    auto s = tree_.try_insert(prompt, {.priority = random_.uniform(0, 3)});
    see(s.has_value());
    if (s) live_.push_back(std::move(*s));
    noise_ = std::make_unique<int[]>(static_cast<std::size_t>(1 + stats().inserts % 99));
  }

  void step() {
    if (flying_.size() == 4) return;
    auto step = tree_.begin_step();
    const std::vector<int> drafts(random_.index(4), 1);
    for (Tree::Sequence& s : live_) {
      if (random_.chance(0.3)) continue;
      const AddResult result = step.add(s, 1 + random_.index(12), {.tokens = drafts});
      see(static_cast<std::uint64_t>(result.reason()));
      see(static_cast<std::uint64_t>(result.waits_for()));
      see(result.step());
    }
    const auto view = plan_.build(step);
    for (int row = 0; row < view.num_rows; ++row) {
      see(static_cast<std::uint32_t>(view.writes[row].chunk));
      see(static_cast<std::uint32_t>(view.writes[row].offset));
      see(static_cast<std::uint32_t>(view.row_token[row]));
      see(static_cast<std::uint32_t>(view.row_kv_len[row]));
    }
    see(static_cast<std::uint32_t>(view.num_copies));
    if (random_.chance(0.15)) return;  // cancelled
    flying_.push_back(std::move(step).submit());
    if (flying_.size() == 4) finish();
  }

  void finish() {
    auto done = std::move(flying_.front()).finish();
    flying_.pop_front();
    for (const ScheduledSequence row : done.rows()) {
      see(static_cast<std::uint64_t>(row.sequence));
      if (random_.chance(0.1)) continue;  // cancelled
      std::vector<int> outputs(1 + random_.index(static_cast<std::size_t>(row.num_drafts) + 1), 1);
      outputs.back() = random_.uniform(0, 2);
      done.commit(row, outputs);
    }
  }

  void see(std::uint64_t value) { hash_ = (hash_ ^ value) * 0x9e3779b97f4a7c15u + 1; }
  void see_state() {
    const TreeStats s = tree_.stats();
    for (const std::uint64_t value :
         {tree_.version(), std::uint64_t{tree_.num_chunks()},
          std::uint64_t{tree_.chunks_available()}, std::uint64_t{s.nodes}, s.evicted_tokens,
          std::uint64_t{s.stored_tokens}, std::uint64_t{s.leaving_sequences}, s.reassigned_nodes,
          s.merged_tokens})
      see(value);
  }
  void see_places() {
    for (const Tree::Sequence& s : live_)
      s.for_each_run({0, static_cast<std::int32_t>(s.size())}, [&](const Piece& piece) {
        for (const int value : {piece.chunk, piece.begin, piece.length, piece.position})
          see(static_cast<std::uint32_t>(value));
      });
  }

  Tree tree_{
      PoolAllocator{.max_chunks = 200}, {.min_run = 3}, {.max_pinned = 20, .by_priority = true}};
  AttentionPlan plan_;
  std::vector<Tree::Sequence> live_;
  std::deque<Tree::Pin> pins_;
  std::deque<Tree::InFlight> flying_;
  test::Random random_;
  std::unique_ptr<int[]> noise_;  // addresses differ between replicas
  std::uint64_t hash_ = 0;
};

}  // namespace

TEST_CASE("replicas fed the same calls hold the same tree, chunks and plans") {
  const int calls = test::scaled(20000);
  Replica a(11), b(11);
  CHECK(a.play(calls) == b.play(calls));
  const TreeStats stats = a.stats();
  CHECK(stats.evicted_chunks > calls / 200);
  CHECK(stats.steps > calls / 20);
  CHECK(stats.cancelled_steps > calls / 200);
  CHECK(stats.abandoned_steps > 0);
  CHECK(stats.forks_copied > calls / 400);
}
