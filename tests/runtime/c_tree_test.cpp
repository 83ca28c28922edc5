// The tree in C does what the tree in C++ does: the same random calls to both, of each chunk size
// and policy, and all that they say compared. What it refuses: by exact texts.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "chunkattn/c/tree.ipp"
#include "chunkattn/cache/policy.hpp"
#include "chunkattn/debug/tree.hpp"
#include "chunkattn/events/mirror.hpp"
#include "tests/support/random.hpp"

using namespace chunkattn;

namespace {

using TokenList = std::vector<std::int32_t>;

/// Tenant 1 has weight 3 and a quota of 2 chunks; others have none.
struct TestPolicy : CachePolicy {
  [[nodiscard]] int weight(std::uint64_t tenant) const noexcept { return tenant == 1 ? 3 : 1; }
  [[nodiscard]] std::uint64_t quota(std::uint64_t tenant) const noexcept {
    return tenant == 1 ? 2 : std::numeric_limits<std::uint64_t>::max();
  }
};

/// The same options for both.
struct Setup {
  chunkattn_tree_config config{};
  TreeOptions options;
  TestPolicy policy;
};

Setup random_setup(test::Random& random, int chunk_size) {
  Setup s;
  s.config.version = CHUNKATTN_C_VERSION;
  s.config.chunk_size = chunk_size;
  s.config.max_chunks = random.uniform(4, 60);
  if (random.chance(0.3)) {
    s.config.sharing = CHUNKATTN_SHARE_CHUNKS;
    s.options.sharing = TreeOptions::Sharing::chunk;
  }
  if (random.chance(0.3)) s.options.min_run = s.config.min_run = random.uniform(1, chunk_size);
  s.config.no_retention = random.chance(0.3);
  s.policy.retains = s.config.no_retention == 0;
  s.config.by_priority = random.chance(0.3);
  s.policy.by_priority = s.config.by_priority != 0;
  if (random.chance(0.3)) {
    s.config.high_watermark = random.uniform(1, 30);
    s.policy.high_watermark = static_cast<std::size_t>(s.config.high_watermark);
    if (random.chance(0.5)) {
      s.config.low_watermark = random.uniform(1, static_cast<int>(s.config.high_watermark));
      s.policy.low_watermark = static_cast<std::size_t>(s.config.low_watermark);
    }
  }
  s.config.max_pinned = random.uniform(0, 8);
  s.policy.max_pinned = static_cast<std::size_t>(s.config.max_pinned);
  s.config.fair = s.policy.fair = random.chance(0.3);
  if (random.chance(0.3)) {
    s.config.learns = s.policy.learns = true;
  } else if (random.chance(0.5)) {
    s.config.ttl = random.uniform(1, 50);
    s.policy.ttl = static_cast<std::uint32_t>(s.config.ttl);
  }
  return s;
}

/// A tree in C and one in C++, called alike.
template <int ChunkSize>
class Twins {
  using Tree = PrefixTree<std::int32_t, ChunkSize, PoolAllocator, TestPolicy>;

 public:
  Twins(test::Random& random, const Setup& setup)
      : random_(random),
        cpp_(PoolAllocator{.max_chunks = static_cast<std::size_t>(setup.config.max_chunks)},
             setup.options, setup.policy),
        c_(chunkattn_tree_create(&setup.config)),
        plan_(chunkattn_step_plan_create()),
        mirror_(chunkattn_mirror_create(ChunkSize, setup.config.sharing)),
        can_pin_(setup.config.max_pinned > 0),
        shares_chunks_(setup.config.sharing == CHUNKATTN_SHARE_CHUNKS) {
    REQUIRE(c_ != nullptr);
    if (setup.config.fair != 0) {
      REQUIRE(chunkattn_tree_set_tenant(c_, 1, 3, 2) == 0);
      REQUIRE(chunkattn_tree_set_tenant(c_, 2, 1, -1) == 0);
    }
    events_ = chunkattn_events_create(c_, &Twins::on_event, this, 77);
    REQUIRE(events_ != nullptr);
  }
  Twins(const Twins&) = delete;
  Twins& operator=(const Twins&) = delete;
  ~Twins() {
    for (auto& twin : live_) chunkattn_sequence_destroy(twin.c);
    for (auto& pin : pins_) chunkattn_pin_destroy(pin.c);
    chunkattn_events_destroy(events_);
    chunkattn_mirror_destroy(mirror_);
    chunkattn_plan_destroy(plan_);
    chunkattn_tree_destroy(c_);
  }

  void run(int operations) {
    for (int i = 0; i < operations; ++i) {
      switch (random_.uniform(0, 15)) {
        case 0:
        case 1:
        case 2:
          insert();
          break;
        case 3:
          if (!live_.empty()) leave(random_.index(live_.size()));
          break;
        case 4:
          fork();
          break;
        case 5:
          append();
          break;
        case 6:
          truncate();
          break;
        case 7:
          pin();
          break;
        case 8:
          evict();
          break;
        case 9:
          load();
          break;
        default:
          step();
      }
      compare();
    }
  }

 private:
  struct Sequences {
    typename Tree::Sequence cpp;
    chunkattn_sequence* c;
  };
  struct Pins {
    typename Tree::Pin cpp;
    chunkattn_pin* c;
  };

  static void on_event(void* context, const chunkattn_event* event, const std::int32_t* tokens) {
    std::int32_t result = -1;
    auto& self = *static_cast<Twins*>(context);
    CHECK(chunkattn_mirror_apply(self.mirror_, event, tokens, &result) == 0);
    CHECK(result == CHUNKATTN_CHANGED);
    CHECK(event->stream == 77);
    ++self.num_events_;
  }

  TokenList random_prompt() {
    TokenList tokens;
    const int length = random_.uniform(1, 5 * ChunkSize);
    const int family = random_.uniform(0, 2);
    const int common = random_.uniform(0, 3 * ChunkSize);
    for (int i = 0; i < length; ++i)
      tokens.push_back(i < common ? 1000 * family + i : random_.uniform(0, 3));
    return tokens;
  }
  struct Options {
    InsertOptions cpp;
    chunkattn_insert_options c;
  };
  Options random_options() {
    Options o{{}, {}};
    o.cpp.name_space.tenant = o.c.tenant = static_cast<std::uint64_t>(random_.uniform(0, 2));
    o.cpp.name_space.adapter = o.c.adapter = random_.chance(0.1) ? 5 : 0;
    if (random_.chance(0.3)) {
      o.c.public_length = random_.uniform(0, 2 * ChunkSize);
      o.cpp.public_length = static_cast<std::size_t>(o.c.public_length);
    }
    if (random_.chance(0.2)) {
      o.c.max_reuse = random_.chance(0.5) ? -1 : random_.uniform(1, 3 * ChunkSize);
      o.cpp.max_reuse = o.c.max_reuse < 0 ? 0 : static_cast<std::size_t>(o.c.max_reuse);
    }
    o.cpp.priority = o.c.priority = random_.uniform(-2, 2);
    o.c.no_output = random_.chance(0.2);
    o.cpp.compute_last = o.c.no_output == 0;
    o.c.compute_pending = random_.chance(0.2);
    o.cpp.share_pending = o.c.compute_pending == 0;
    o.cpp.preempted = random_.chance(0.2);
    o.c.preempted = o.cpp.preempted;
    return o;
  }
  static std::int64_t size(const TokenList& tokens) {
    return static_cast<std::int64_t>(tokens.size());
  }

  void insert() {
    const TokenList tokens = random_prompt();
    const Options options = random_options();
    chunkattn_match found{-1, -1};
    CHECK(chunkattn_tree_match(c_, tokens.data(), size(tokens), &options.c, &found) == 0);
    const auto expected = cpp_.match_prefix(tokens, options.cpp);
    CHECK(found.cached == static_cast<std::int64_t>(expected.cached));
    CHECK(found.pending == static_cast<std::int64_t>(expected.pending));
    const auto mirrored = chunkattn_mirror_match(mirror_, tokens.data(), size(tokens), &options.c);
    CHECK((shares_chunks_ ? mirrored <= found.cached : mirrored == found.cached));
    CHECK(chunkattn_tree_chunks_needed(c_, tokens.data(), size(tokens), &options.c) ==
          static_cast<std::int64_t>(cpp_.chunks_needed(tokens, options.cpp)));
    chunkattn_sequence* joined = nullptr;
    const int result = chunkattn_tree_insert(c_, tokens.data(), size(tokens), &options.c, &joined);
    auto twin = cpp_.try_insert(tokens, options.cpp);
    REQUIRE(result == (twin ? 0 : CHUNKATTN_OUT_OF_CHUNKS));
    CHECK((joined != nullptr) == twin.has_value());
    if (twin) live_.push_back({*std::move(twin), joined});
  }
  void leave(std::size_t i) {
    chunkattn_sequence_destroy(live_[i].c);
    live_[i].cpp.leave();
    live_.erase(live_.begin() + static_cast<std::ptrdiff_t>(i));
  }
  void fork() {
    if (live_.empty()) return;
    Sequences& from = live_[random_.index(live_.size())];
    const bool whole = random_.chance(0.5);
    const int length = random_.uniform(1, static_cast<int>(from.cpp.size()));
    chunkattn_sequence* forked = nullptr;
    const int result = chunkattn_sequence_fork(from.c, whole ? -1 : length, &forked);
    auto twin = whole ? from.cpp.try_fork() : from.cpp.try_fork(static_cast<std::size_t>(length));
    REQUIRE(result == (twin ? 0 : CHUNKATTN_OUT_OF_CHUNKS));
    if (twin) live_.push_back({*std::move(twin), forked});
  }
  void append() {
    if (live_.empty()) return;
    Sequences& to = live_[random_.index(live_.size())];
    if (to.cpp.num_reserved() > 0) return;
    const TokenList tokens = random_prompt();
    const int result = chunkattn_sequence_append(to.c, tokens.data(), size(tokens));
    REQUIRE(result == (to.cpp.try_append(tokens) ? 0 : CHUNKATTN_OUT_OF_CHUNKS));
  }
  void truncate() {
    if (live_.empty()) return;
    Sequences& of = live_[random_.index(live_.size())];
    const int length = random_.uniform(1, static_cast<int>(of.cpp.size()));
    const int result = chunkattn_sequence_truncate(of.c, length);
    try {
      of.cpp.truncate(static_cast<std::size_t>(length));
      REQUIRE(result == 0);
    } catch (const OutOfChunks&) {
      REQUIRE(result == CHUNKATTN_OUT_OF_CHUNKS);
    }
  }
  void pin() {
    if (!can_pin_) return;
    if (!pins_.empty() && random_.chance(0.5)) {
      chunkattn_pin_destroy(pins_.front().c);
      pins_.erase(pins_.begin());
      return;
    }
    const TokenList tokens = random_prompt();
    const Options options = random_options();
    chunkattn_pin* pinned = nullptr;
    REQUIRE(chunkattn_tree_pin(c_, tokens.data(), size(tokens), &options.c, &pinned) == 0);
    auto twin = cpp_.pin(tokens, options.cpp);
    CHECK((pinned != nullptr) == static_cast<bool>(twin));
    if (twin) pins_.push_back({std::move(twin), pinned});
  }
  void evict() {
    switch (random_.uniform(0, 5)) {
      case 0:
        CHECK(chunkattn_tree_clear(c_) == 0);
        cpp_.clear();
        break;
      case 1: {
        const int chunks = random_.uniform(0, 20);
        CHECK(chunkattn_tree_trim(c_, chunks) ==
              static_cast<std::int64_t>(cpp_.trim(static_cast<std::size_t>(chunks))));
        break;
      }
      default:
        now_ += static_cast<std::uint64_t>(random_.uniform(0, 20));
        CHECK(chunkattn_tree_expire(c_, now_) == static_cast<std::int64_t>(cpp_.expire(now_)));
    }
  }
  void load() {
    if (live_.empty()) return;
    Sequences& of = live_[random_.index(live_.size())];
    if (random_.chance(0.3)) {
      CHECK(chunkattn_sequence_take_over(of.c) == static_cast<std::int64_t>(of.cpp.take_over()));
      return;
    }
    std::int64_t begin = -1, length = -1;
    REQUIRE(chunkattn_sequence_loadable(of.c, &begin, &length) == 0);
    const TokenRange range = of.cpp.loadable();
    CHECK(begin == range.begin);
    CHECK(length == range.length);
    if (range.empty()) return;
    const int loaded = random_.uniform(1, range.length);
    try {
      of.cpp.mark_loaded({range.begin, loaded});
      CHECK(chunkattn_sequence_mark_loaded(of.c, range.begin, loaded) == 0);
    } catch (const InvalidArgument& refused) {
      CHECK(chunkattn_sequence_mark_loaded(of.c, range.begin, loaded) == CHUNKATTN_FAILED);
      CHECK(chunkattn_error() == std::string(refused.what()));
    }
  }

  static void check_added(const chunkattn_added& added, const AddResult& expected, bool one) {
    REQUIRE((added.reason == CHUNKATTN_ADDED) == static_cast<bool>(expected));
    CHECK(added.reason == static_cast<int>(expected.reason()));
    CHECK(added.blocked_index == static_cast<std::int64_t>(expected.blocked_index()));
    if (expected.reason() == AddResult::Reason::waits_for_sequence)
      CHECK(added.waits_for == static_cast<std::uint64_t>(expected.waits_for()));
    if (expected.reason() == AddResult::Reason::waits_for_step)
      CHECK(added.waits_for == expected.step());
    if (expected && one) check_row(added.row, expected.row());
  }
  static void check_row(const chunkattn_row& row, const ScheduledSequence& expected) {
    CHECK(row.sequence == static_cast<std::uint64_t>(expected.sequence));
    CHECK(row.index == expected.index);
    CHECK(row.position == expected.position);
    CHECK(row.first_row == expected.first_row);
    CHECK(row.num_rows == expected.num_rows);
    CHECK(row.num_drafts == expected.num_drafts);
    CHECK(row.has_output == (expected.has_output ? 1 : 0));
  }

  void step() {
    if (live_.empty()) return;
    auto step = cpp_.begin_step();
    chunkattn_step* const c = chunkattn_step_begin(c_);
    REQUIRE(c != nullptr);
    drafts_.clear();
    const bool all = random_.chance(0.3);
    const int max_tokens = random_.chance(0.5) ? 0 : random_.uniform(1, 2 * ChunkSize);
    const std::size_t limit = max_tokens == 0 ? std::numeric_limits<std::size_t>::max()
                                              : static_cast<std::size_t>(max_tokens);
    if (all) {
      std::vector<typename Tree::Sequence*> handles;
      std::vector<chunkattn_sequence*> c_handles;
      for (auto& twin : live_) handles.push_back(&twin.cpp), c_handles.push_back(twin.c);
      chunkattn_added added{};
      REQUIRE(chunkattn_step_add_all(c, c_handles.data(),
                                     static_cast<std::int64_t>(c_handles.size()), max_tokens,
                                     &added) == 0);
      check_added(added, step.add(std::span<typename Tree::Sequence* const>(handles), limit),
                  false);
    } else {
      for (auto& twin : live_) {
        if (random_.chance(0.3)) continue;
        TokenList drafts;
        std::vector<std::int32_t> parents;
        const int num_drafts = random_.chance(0.3) ? random_.uniform(1, 4) : 0;
        const bool is_tree = random_.chance(0.5);
        for (int d = 0; d < num_drafts; ++d) {
          drafts.push_back(random_.uniform(0, 3));
          if (is_tree) parents.push_back(random_.uniform(-1, d - 1));
        }
        drafts_[twin.cpp.id()] = {drafts, parents};
        chunkattn_added added{};
        REQUIRE(chunkattn_step_add(c, twin.c, max_tokens, drafts.data(),
                                   parents.empty() ? nullptr : parents.data(), num_drafts,
                                   &added) == 0);
        check_added(added, step.add(twin.cpp, limit, {.tokens = drafts, .parents = parents}), true);
      }
    }
    CHECK(chunkattn_step_num_rows(c) == step.num_rows());
    if (random_.chance(0.1)) return chunkattn_step_destroy(c);  // both are cancelled
    const auto view = cpp_plan_.build(step);
    REQUIRE(chunkattn_step_build(c, plan_) == 0);
    check_plan(view, c);
    if (random_.chance(0.2)) {
      auto in_flight = std::move(step).submit();
      REQUIRE(chunkattn_step_submit(c) == 0);
      if (random_.chance(0.3)) {  // both are dropped in flight
        chunkattn_step_destroy(c);
        {
          const auto dropped = std::move(in_flight);
        }
        cpp_.device_idle();
        CHECK(chunkattn_tree_device_idle(c_) == 0);
        return;
      }
      finish(std::move(in_flight).finish(), c);
    } else {
      finish(std::move(step).finish(), c);
    }
  }
  void check_plan(const typename Tree::StepView& view, chunkattn_step* c) {
    const auto rows = static_cast<std::size_t>(view.num_rows);
    TokenList tokens(rows), positions(rows);
    CHECK(chunkattn_step_tokens(c, -5, tokens.data(), view.num_rows) == 0);
    CHECK(chunkattn_step_positions(c, positions.data(), view.num_rows) == 0);
    CHECK(tokens == view.tokens(-5));
    CHECK(positions == view.positions());
    std::vector<std::int64_t> slots(rows);
    CHECK(chunkattn_plan_slots(plan_, slots.data(), view.num_rows) == 0);
    CHECK(slots == BlockTable::slot_mapping(view));
    std::vector<chunkattn_copy> copies(static_cast<std::size_t>(view.num_copies));
    CHECK(chunkattn_plan_copies(plan_, copies.data(), view.num_copies) == view.num_copies);
    for (std::size_t i = 0; i < copies.size(); ++i) {
      CHECK(copies[i].source_chunk == view.copies[i].source_chunk);
      CHECK(copies[i].source_begin == view.copies[i].source_begin);
      CHECK(copies[i].target_chunk == view.copies[i].target_chunk);
      CHECK(copies[i].target_begin == view.copies[i].target_begin);
      CHECK(copies[i].length == view.copies[i].length);
    }
  }
  void finish(typename Tree::Finished&& finished, chunkattn_step* c) {
    REQUIRE(chunkattn_step_finish(c) == 0);
    std::vector<ScheduledSequence> expected;
    for (const auto& row : finished.rows()) expected.push_back(row);
    std::vector<chunkattn_row> rows(expected.size() + 3);
    const auto count = chunkattn_step_rows(c, rows.data(), static_cast<std::int64_t>(rows.size()));
    REQUIRE(count == static_cast<std::int64_t>(expected.size()));
    CHECK(chunkattn_step_rows(c, nullptr, 0) == count);
    bool has_drafts = false;
    for (std::size_t i = 0; i < expected.size(); ++i) {
      check_row(rows[i], expected[i]);
      has_drafts = has_drafts || expected[i].num_drafts > 0;
    }
    if (!has_drafts && random_.chance(0.5)) {
      TokenList outputs;
      for (std::size_t i = 0; i < expected.size(); ++i) outputs.push_back(random_.uniform(0, 3));
      finished.commit(outputs);
      CHECK(chunkattn_step_commit_all(c, outputs.data(), count) == 0);
    } else {
      for (std::size_t i = 0; i < expected.size(); ++i) {
        if (random_.chance(0.1)) continue;
        const auto& [drafts, parents] = drafts_[expected[i].sequence];
        const std::int32_t leaf = random_.uniform(-1, expected[i].num_drafts - 1);
        TokenList outputs = {random_.uniform(0, 3)};
        for (std::int32_t d = leaf; d >= 0;) {
          outputs.insert(outputs.begin(), drafts[static_cast<std::size_t>(d)]);
          d = parents.empty() ? d - 1 : parents[static_cast<std::size_t>(d)];
        }
        if (!parents.empty()) {
          finished.commit(expected[i], outputs, leaf);
          CHECK(chunkattn_step_commit_branch(c, &rows[i], leaf, outputs.data(), size(outputs)) ==
                0);
        } else {
          finished.commit(expected[i], outputs);
          CHECK(chunkattn_step_commit(c, &rows[i], outputs.data(), size(outputs)) == 0);
        }
      }
    }
    chunkattn_step_destroy(c);
  }

  void compare() {
    chunkattn_tree_stats s{};
    REQUIRE(chunkattn_tree_get_stats(c_, &s) == 0);
    const TreeStats e = cpp_.stats();
    const std::uint64_t counts[] = {s.inserts,
                                    s.leaves,
                                    s.forks,
                                    s.prompt_tokens,
                                    s.cached_tokens,
                                    s.pending_tokens,
                                    s.preempted_inserts,
                                    s.preempted_tokens,
                                    s.preempted_cached_tokens,
                                    s.splits,
                                    s.copied_tokens,
                                    s.merged_tokens,
                                    s.published_tokens,
                                    s.evicted_tokens,
                                    s.evicted_chunks,
                                    s.failed_inserts,
                                    s.failed_adds,
                                    s.clears,
                                    s.steps,
                                    s.cancelled_steps,
                                    s.abandoned_steps};
    const std::uint64_t expected[] = {e.inserts,
                                      e.leaves,
                                      e.forks,
                                      e.prompt_tokens,
                                      e.cached_tokens,
                                      e.pending_tokens,
                                      e.preempted_inserts,
                                      e.preempted_tokens,
                                      e.preempted_cached_tokens,
                                      e.splits,
                                      e.copied_tokens,
                                      e.merged_tokens,
                                      e.published_tokens,
                                      e.evicted_tokens,
                                      e.evicted_chunks,
                                      e.failed_inserts,
                                      e.failed_adds,
                                      e.clears,
                                      e.steps,
                                      e.cancelled_steps,
                                      e.abandoned_steps};
    CHECK(std::ranges::equal(counts, expected));
    CHECK(s.live_sequences == static_cast<std::int64_t>(e.live_sequences));
    CHECK(s.leaving_sequences == static_cast<std::int64_t>(e.leaving_sequences));
    CHECK(s.nodes == static_cast<std::int64_t>(e.nodes));
    CHECK(s.used_chunks == static_cast<std::int64_t>(e.used_chunks));
    CHECK(s.retained_chunks == static_cast<std::int64_t>(e.retained_chunks));
    CHECK(s.stored_tokens == static_cast<std::int64_t>(e.stored_tokens));
    CHECK(chunkattn_tree_chunks_available(c_) ==
          static_cast<std::int64_t>(cpp_.chunks_available()));
    CHECK(chunkattn_tree_num_chunks(c_) == static_cast<std::int64_t>(cpp_.num_chunks()));
    CHECK(chunkattn_mirror_number(mirror_) == num_events_);
    for (const Pins& pin : pins_)
      CHECK(chunkattn_pin_size(pin.c) == static_cast<std::int64_t>(pin.cpp.size()));
    for (const Sequences& twin : live_) compare(twin);
    if (random_.chance(0.05)) compare_snapshot();
  }
  void compare(const Sequences& twin) {
    const auto& s = twin.cpp;
    chunkattn_sequence_info info{};
    REQUIRE(chunkattn_sequence_get_info(twin.c, &info) == 0);
    CHECK(info.id == static_cast<std::uint64_t>(s.id()));
    CHECK(info.waits_for == static_cast<std::uint64_t>(s.waits_for()));
    const std::int64_t counts[] = {info.size,    info.cached,  info.uncomputed, info.scheduled,
                                   info.written, info.pending, info.shared,     info.num_reserved};
    const std::size_t expected[] = {s.size(),          s.num_cached(),  s.num_uncomputed(),
                                    s.num_scheduled(), s.num_written(), s.num_pending(),
                                    s.num_shared(),    s.num_reserved()};
    CHECK(std::ranges::equal(counts, expected, [](std::int64_t a, std::size_t b) {
      return a == static_cast<std::int64_t>(b);
    }));
    if (!random_.chance(0.1)) return;
    const int begin = random_.uniform(0, static_cast<int>(s.size()));
    const int length = random_.uniform(0, static_cast<int>(s.size()) - begin);
    TokenList tokens(static_cast<std::size_t>(length));
    CHECK(chunkattn_sequence_tokens(twin.c, begin, length, tokens.data()) == 0);
    const TokenList all = s.tokens();
    CHECK(std::equal(tokens.begin(), tokens.end(), all.begin() + begin));
    std::vector<Piece> pieces;
    s.for_each_run({begin, length}, [&](const Piece& piece) { pieces.push_back(piece); });
    std::vector<chunkattn_piece> found(pieces.size() / 2 + 1);
    CHECK(chunkattn_sequence_pieces(twin.c, begin, length, found.data(),
                                    static_cast<std::int64_t>(found.size())) ==
          static_cast<std::int64_t>(pieces.size()));
    for (std::size_t i = 0; i < std::min(found.size(), pieces.size()); ++i) {
      CHECK(found[i].chunk == pieces[i].chunk);
      CHECK(found[i].begin == pieces[i].begin);
      CHECK(found[i].length == pieces[i].length);
      CHECK(found[i].position == pieces[i].position);
    }
    std::vector<std::int32_t> blocks(100, -7);
    const std::int64_t num_blocks = chunkattn_sequence_blocks(twin.c, -1, blocks.data(), 100);
    if (!shares_chunks_) return;
    BlockTable table;
    table.add(s);
    REQUIRE(num_blocks == static_cast<std::int64_t>(table.indices().size()));
    CHECK(std::equal(table.indices().begin(), table.indices().end(), blocks.begin()));
  }
  /// A mirror that begins with a snapshot finds what the one that followed the events finds.
  void compare_snapshot() {
    chunkattn_snapshot snapshot{};
    REQUIRE(chunkattn_events_snapshot(events_, &snapshot) == 0);
    CHECK(snapshot.stream == 77);
    chunkattn_mirror* const late =
        chunkattn_mirror_create(ChunkSize, shares_chunks_ ? CHUNKATTN_SHARE_CHUNKS : 0);
    REQUIRE(chunkattn_mirror_load(late, &snapshot) == 0);
    CHECK(chunkattn_mirror_number(late) == num_events_);
    for (int i = 0; i < 5; ++i) {
      const TokenList tokens = random_prompt();
      CHECK(chunkattn_mirror_match(late, tokens.data(), size(tokens), nullptr) ==
            chunkattn_mirror_match(mirror_, tokens.data(), size(tokens), nullptr));
    }
    chunkattn_mirror_destroy(late);
  }

  test::Random& random_;
  Tree cpp_;
  AttentionPlan cpp_plan_;
  chunkattn_tree* c_;
  chunkattn_plan* plan_;
  chunkattn_mirror* mirror_;
  chunkattn_events* events_ = nullptr;
  std::vector<Sequences> live_;
  std::vector<Pins> pins_;
  std::map<SequenceId, std::pair<TokenList, std::vector<std::int32_t>>> drafts_;  // of the step
  std::uint64_t now_ = 0;
  std::int64_t num_events_ = 0;
  bool can_pin_, shares_chunks_;
};

template <int ChunkSize>
void run_twins(std::uint64_t stream) {
  test::Random random(stream);
  for (int i = 0; i < test::scaled(20); ++i) {
    const Setup setup = random_setup(random, ChunkSize);
    CAPTURE(setup.config.no_retention);
    CAPTURE(setup.config.by_priority);
    CAPTURE(setup.config.sharing);
    Twins<ChunkSize>(random, setup).run(150);
  }
}

}  // namespace

TEST_CASE("random calls of the tree in C and of the tree in C++ give the same") {
  run_twins<16>(1);
  run_twins<32>(2);
  run_twins<64>(3);
  run_twins<128>(4);
}

TEST_CASE("a tree in C refuses bad input by names of tree.h, with nothing changed") {
  const chunkattn_tree_config good{.version = CHUNKATTN_C_VERSION,
                                   .chunk_size = 16,
                                   .max_chunks = 4,
                                   .sharing = 0,
                                   .min_run = 0,
                                   .no_retention = 0,
                                   .by_priority = 0,
                                   .learns = 0,
                                   .fair = 0,
                                   .high_watermark = 0,
                                   .low_watermark = 0,
                                   .max_pinned = 0,
                                   .ttl = 0};
  const auto refuses_config = [&](const auto& change, const char* expected) {
    chunkattn_tree_config config = good;
    change(config);
    CHECK(chunkattn_tree_create(&config) == nullptr);
    CHECK(chunkattn_error() == std::string(expected));
  };
  using Config = chunkattn_tree_config;
  refuses_config([](Config& c) { c.version = 2; },
                 "config->version = 2: expected CHUNKATTN_C_VERSION = 3");
  refuses_config([](Config& c) { c.chunk_size = 8; },
                 "config->chunk_size = 8: expected 16, 32, 64 or 128");
  refuses_config([](Config& c) { c.max_chunks = 0; },
                 "config->max_chunks = 0: expected 1 to 2^31 - 1");
  refuses_config([](Config& c) { c.max_chunks = std::int64_t{1} << 31; },
                 "config->max_chunks = 2147483648: expected 1 to 2^31 - 1");
  refuses_config([](Config& c) { c.sharing = 2; },
                 "config->sharing = 2: expected CHUNKATTN_SHARE_TOKENS = 0 or "
                 "CHUNKATTN_SHARE_CHUNKS = 1");
  refuses_config([](Config& c) { c.min_run = 17; },
                 "config->min_run = 17: expected 0 to chunk_size, 16");
  refuses_config([](Config& c) { c.min_run = -1; },
                 "config->min_run = -1: expected 0 to chunk_size, 16");
  refuses_config([](Config& c) { c.high_watermark = -1; },
                 "config->high_watermark = -1: expected a count of chunks");
  refuses_config([](Config& c) { c.low_watermark = -1; },
                 "config->low_watermark = -1: expected a count of chunks");
  refuses_config([](Config& c) { c.low_watermark = 3, c.high_watermark = 2; },
                 "low_watermark = 3: expected at most high_watermark, 2");
  refuses_config([](Config& c) { c.low_watermark = 3; },
                 "low_watermark = 3: expected none without high_watermark");
  refuses_config([](Config& c) { c.max_pinned = -1; },
                 "config->max_pinned = -1: expected a count of chunks");
  refuses_config([](Config& c) { c.ttl = std::int64_t{1} << 32; },
                 "config->ttl = 4294967296: expected 1 to 2^32 - 1, or 0 for none");
  refuses_config([](Config& c) { c.ttl = -1; },
                 "config->ttl = -1: expected 1 to 2^32 - 1, or 0 for none");
  refuses_config([](Config& c) { c.ttl = 5, c.learns = 1; }, "ttl = 5: expected 0 with learns");
  CHECK(chunkattn_tree_create(nullptr) == nullptr);
  CHECK(chunkattn_error() == std::string("config = null: expected not null"));

  chunkattn_tree* const tree = chunkattn_tree_create(&good);
  REQUIRE(tree != nullptr);
  const auto failed = [](auto result, const char* expected) {
    CHECK(result == (sizeof(result) == 8 ? -1 : CHUNKATTN_FAILED));
    CHECK(chunkattn_error() == std::string(expected));
  };
  TokenList tokens(100);
  chunkattn_sequence* s = nullptr;
  failed(chunkattn_tree_insert(nullptr, tokens.data(), 20, nullptr, &s),
         "tree = null: expected not null");
  failed(chunkattn_tree_insert(tree, nullptr, 20, nullptr, &s),
         "tokens = null: expected num_tokens tokens");
  failed(chunkattn_tree_insert(tree, tokens.data(), 0, nullptr, &s),
         "num_tokens = 0: expected 1 to 2^30");
  failed(chunkattn_tree_insert(tree, tokens.data(), (1 << 30) + 1, nullptr, &s),
         "num_tokens = 1073741825: expected 1 to 2^30");
  failed(chunkattn_tree_insert(tree, tokens.data(), 20, nullptr, nullptr),
         "out = null: expected not null");
  chunkattn_insert_options options{};
  options.public_length = -1;
  failed(chunkattn_tree_insert(tree, tokens.data(), 20, &options, &s),
         "options->public_length = -1: expected a count of tokens");
  options.public_length = 0, options.max_reuse = -2;
  failed(chunkattn_tree_chunks_needed(tree, tokens.data(), 20, &options),
         "options->max_reuse = -2: expected a position, -1 or 0");
  failed(chunkattn_tree_set_tenant(tree, 1, 1, -1),
         "config->fair = 0: expected not 0, for a tree whose tenants have shares");
  failed(chunkattn_tree_trim(tree, -1), "chunks = -1: expected a count");
  CHECK(s == nullptr);
  CHECK(chunkattn_tree_num_chunks(tree) == 0);

  CHECK(chunkattn_tree_insert(tree, tokens.data(), 65, nullptr, &s) == CHUNKATTN_OUT_OF_CHUNKS);
  CHECK(chunkattn_error() ==
        std::string("out of chunks: fewer are free or cached than the prompt needs"));
  REQUIRE(chunkattn_tree_insert(tree, tokens.data(), 40, nullptr, &s) == 0);
  failed(chunkattn_sequence_fork(s, 0, &s),
         "length = 0: expected 1 to the sequence's size, or -1 for all");
  failed(chunkattn_sequence_tokens(s, 30, 20, tokens.data()),
         "the end of the range = 50: expected at most the sequence's size, 40");
  failed(chunkattn_sequence_pieces(s, 0, 1000, nullptr, 0),
         "length = 1000: expected an end within the sequence's 40 positions");
  failed(chunkattn_sequence_mark_loaded(s, 1, 1),
         "begin = 1: expected at most 0, the first position without K/V");
  chunkattn_pin* pin = nullptr;
  failed(chunkattn_tree_pin(tree, tokens.data(), 40, nullptr, &pin),
         "max_pinned = 0: expected at least 1 in the tree's retention policy: pins may cover no "
         "chunk");
  failed(chunkattn_sequence_tokens(s, -1, 2, tokens.data()),
         "begin = -1: expected a position of the sequence");
  failed(chunkattn_sequence_pieces(s, 0, -1, nullptr, 0),
         "length = -1: expected positions of the sequence");
  failed(chunkattn_sequence_blocks(s, 0, nullptr, 0),
         "kv_len = 0: expected 1 to the sequence's known and reserved tokens, or -1");
  failed(chunkattn_sequence_truncate(s, 0), "length = 0: expected 1 to the sequence's size");
  failed(chunkattn_sequence_truncate(s, -1), "length = -1: expected 1 to the sequence's size");
  CHECK(chunkattn_sequence_append(s, tokens.data(), 60) == CHUNKATTN_OUT_OF_CHUNKS);
  CHECK(chunkattn_error() ==
        std::string("out of chunks: fewer are free or cached than the tokens need"));
  CHECK(chunkattn_events_create(tree, nullptr, nullptr, 0) == nullptr);
  CHECK(chunkattn_error() == std::string("sink = null: expected what is to get the events"));

  chunkattn_step* const step = chunkattn_step_begin(tree);
  REQUIRE(step != nullptr);
  CHECK(chunkattn_step_begin(tree) == nullptr);
  CHECK(chunkattn_error() == std::string("chunkattn_step_begin() = a second open step: expected "
                                         "that step 1 is submitted, finished or dropped first"));
  chunkattn_added added{};
  failed(chunkattn_step_add(step, s, -1, nullptr, nullptr, 0, &added),
         "max_tokens = -1: expected at least 1, or 0 for all");
  failed(chunkattn_step_add(step, s, 0, nullptr, nullptr, 2, &added),
         "drafts = null: expected num_drafts tokens");
  failed(chunkattn_step_add_all(step, nullptr, 2, 0, &added),
         "sequences = null: expected num_sequences sequences");
  chunkattn_sequence* const two[] = {s, nullptr};
  failed(chunkattn_step_add_all(step, two, 2, 0, &added),
         "sequences[1] = null: expected a sequence");
  failed(chunkattn_step_commit_all(step, tokens.data(), 1),
         "step = open: expected one that has finished: see chunkattn_step_finish()");
  failed(chunkattn_step_rows(step, nullptr, 0),
         "step = open: expected one that has finished: see chunkattn_step_finish()");
  Config other_size = good;
  other_size.fair = 1;
  chunkattn_tree* const fair = chunkattn_tree_create(&other_size);
  for (const int weight : {0, -1, (1 << 20) + 1})
    failed(chunkattn_tree_set_tenant(fair, 1, weight, -1),
           ("weight = " + std::to_string(weight) + ": expected 1 to 2^20").c_str());
  failed(chunkattn_tree_set_tenant(fair, 1, 1, -2),
         "quota = -2: expected a count of chunks, or -1 for no limit");
  CHECK(chunkattn_tree_set_tenant(fair, 1, 1 << 20, 0) == 0);
  chunkattn_tree_destroy(fair);
  other_size.chunk_size = 32;
  chunkattn_tree* const other = chunkattn_tree_create(&other_size);
  chunkattn_sequence* foreign = nullptr;
  REQUIRE(chunkattn_tree_insert(other, tokens.data(), 5, nullptr, &foreign) == 0);
  failed(chunkattn_step_add(step, foreign, 0, nullptr, nullptr, 0, &added),
         "sequence = of another tree: expected one of the step's tree");
  REQUIRE(chunkattn_step_add(step, s, 0, nullptr, nullptr, 0, &added) == 0);
  CHECK(added.reason == CHUNKATTN_ADDED);
  const char* const not_built =
      "step = added to since it was built, or not built: expected one of chunkattn_step_build(), "
      "after the last add()";
  failed(chunkattn_step_tokens(step, 0, tokens.data(), 40), not_built);
  failed(chunkattn_step_positions(step, tokens.data(), 40), not_built);
  chunkattn_plan* const plan = chunkattn_step_plan_create();
  failed(chunkattn_plan_slots(plan, nullptr, 1), "num_rows = 1: expected that of the plan, 0");
  REQUIRE(chunkattn_step_build(step, plan) == 0);
  failed(chunkattn_step_tokens(step, 0, tokens.data(), 39),
         "num_rows = 39: expected that of the step, 40");
  failed(chunkattn_plan_copies(plan, nullptr, -1), "capacity = -1: expected a count");
  chunkattn_sequence* late = nullptr;
  const TokenList own(7, 9);
  REQUIRE(chunkattn_tree_insert(tree, own.data(), 7, nullptr, &late) == 0);
  REQUIRE(chunkattn_step_add(step, late, 0, nullptr, nullptr, 0, &added) == 0);
  failed(chunkattn_step_tokens(step, 0, tokens.data(), 47), not_built);
  failed(chunkattn_step_finish(step),
         "step = 1: expected chunkattn_step_build() after the last add(): the kernels have no plan "
         "of what to compute");
  REQUIRE(chunkattn_step_build(step, plan) == 0);
  CHECK(chunkattn_step_tokens(step, 0, tokens.data(), 47) == 0);
  REQUIRE(chunkattn_step_submit(step) == 0);
  failed(chunkattn_step_submit(step), "step = in flight: expected one that is open");
  failed(chunkattn_step_add(step, s, 0, nullptr, nullptr, 0, &added),
         "step = in flight: expected one that is open");
  REQUIRE(chunkattn_step_finish(step) == 0);
  failed(chunkattn_step_finish(step), "step = finished: expected one that is open or in flight");
  failed(chunkattn_step_commit(step, nullptr, tokens.data(), 1), "row = null: expected not null");
  failed(chunkattn_step_build(step, plan), "step = finished: expected one that is open");
  CHECK(chunkattn_step_num_rows(step) == 47);
  chunkattn_row row{};
  REQUIRE(chunkattn_step_rows(step, &row, 1) == 2);
  failed(chunkattn_step_commit(step, &row, nullptr, 0),
         "num_outputs = 0: expected 1: the row has no drafts");
  failed(chunkattn_step_commit_all(step, tokens.data(), 1),
         "num_outputs = 1: expected one for each of the 2 rows of chunkattn_step_rows()");
  row.index = 2;
  failed(chunkattn_step_commit(step, &row, tokens.data(), 1),
         "row = of another step: expected a row that chunkattn_step_rows() of this one gives");

  // Handles of a tree that is gone: destroyed, and nothing else.
  chunkattn_tree_destroy(tree);
  chunkattn_sequence_info info{};
  failed(chunkattn_sequence_get_info(s, &info),
         "sequence = orphaned: expected a handle whose tree still exists");
  failed(chunkattn_step_commit_all(step, tokens.data(), 1),
         "step = orphaned: expected a step whose tree still exists");
  other_size.chunk_size = 16;
  chunkattn_tree* const next = chunkattn_tree_create(&other_size);
  chunkattn_step* const of_next = chunkattn_step_begin(next);
  failed(chunkattn_step_add_all(of_next, &s, 1, 0, &added),
         "sequences[0] = not live: expected one whose tree still exists");
  chunkattn_step_destroy(of_next), chunkattn_tree_destroy(next);
  chunkattn_sequence_destroy(s), chunkattn_sequence_destroy(late);
  chunkattn_step_destroy(step);
  chunkattn_plan_destroy(plan);
  chunkattn_sequence_destroy(foreign);
  chunkattn_tree_destroy(other);
  chunkattn_tree_destroy(nullptr), chunkattn_sequence_destroy(nullptr);
  chunkattn_step_destroy(nullptr), chunkattn_plan_destroy(nullptr);
  chunkattn_pin_destroy(nullptr), chunkattn_events_destroy(nullptr);
  chunkattn_mirror_destroy(nullptr);
}

TEST_CASE("the least of a count in C is none of its zeros") {
  chunkattn_tree_config config{};
  config.version = CHUNKATTN_C_VERSION, config.chunk_size = 16, config.max_chunks = 8;
  const auto used_after = [&] {  // of chunks, once a text of three has left
    chunkattn_tree* const tree = chunkattn_tree_create(&config);
    REQUIRE(tree != nullptr);
    const TokenList tokens(48);
    chunkattn_sequence* s = nullptr;
    REQUIRE(chunkattn_tree_insert(tree, tokens.data(), 48, nullptr, &s) == 0);
    REQUIRE(chunkattn_sequence_mark_loaded(s, 0, 48) == 0);
    chunkattn_sequence_destroy(s);
    chunkattn_tree_stats stats{};
    REQUIRE(chunkattn_tree_trim(tree, 8) == 0);  // changes the tree, so that the sequence leaves
    REQUIRE(chunkattn_tree_get_stats(tree, &stats) == 0);
    chunkattn_tree_destroy(tree);
    return stats.used_chunks;
  };
  CHECK(used_after() == 3);
  config.high_watermark = 2;
  CHECK(used_after() == 2);
  config.low_watermark = 1;
  CHECK(used_after() == 1);
  config.low_watermark = 0, config.high_watermark = 1;
  CHECK(used_after() == 1);
  config.no_retention = 1;
  CHECK(used_after() == 0);
}

TEST_CASE("copies of a fork are counted in C where there is no room for them") {
  chunkattn_tree_config config{};
  config.version = CHUNKATTN_C_VERSION, config.chunk_size = 16, config.max_chunks = 8;
  chunkattn_tree* const tree = chunkattn_tree_create(&config);
  chunkattn_plan* const plan = chunkattn_step_plan_create();
  const TokenList tokens(20);
  chunkattn_sequence *s = nullptr, *fork = nullptr;
  chunkattn_added added{};
  chunkattn_insert_options options{};
  options.no_output = 1;
  REQUIRE(chunkattn_tree_insert(tree, tokens.data(), 20, &options, &s) == 0);
  REQUIRE(chunkattn_sequence_mark_loaded(s, 0, 20) == 0);
  REQUIRE(chunkattn_sequence_append(s, tokens.data(), 3) == 0);  // a short tail of its own
  REQUIRE(chunkattn_sequence_mark_loaded(s, 20, 2) == 0);
  REQUIRE(chunkattn_sequence_fork(s, -1, &fork) == 0);
  chunkattn_step* const step = chunkattn_step_begin(tree);
  for (chunkattn_sequence* const one : {s, fork})
    CHECK(chunkattn_step_add(step, one, 0, nullptr, nullptr, 0, &added) == 0);
  REQUIRE(chunkattn_step_build(step, plan) == 0);
  chunkattn_copy copies[3] = {};
  const std::int64_t count = chunkattn_plan_copies(plan, copies, 3);
  REQUIRE(count == 1);
  CHECK(copies[0].length == 2);
  CHECK(copies[0].source_begin == 4);
  CHECK(copies[0].source_chunk != copies[0].target_chunk);
  copies[0].length = -1;
  CHECK(chunkattn_plan_copies(plan, copies, 0) == count);
  CHECK(copies[0].length == -1);
  CHECK(chunkattn_plan_copies(plan, nullptr, 0) == count);
  chunkattn_step_destroy(step), chunkattn_plan_destroy(plan);
  chunkattn_sequence_destroy(s), chunkattn_sequence_destroy(fork), chunkattn_tree_destroy(tree);
}

TEST_CASE("a mirror in C refuses events and snapshots that no tree gives") {
  CHECK(chunkattn_mirror_create(17, 0) == nullptr);
  CHECK(chunkattn_error() == std::string("chunk_size = 17: expected 16, 32, 64 or 128"));
  CHECK(chunkattn_mirror_create(16, 2) == nullptr);
  chunkattn_mirror* const mirror = chunkattn_mirror_create(16, 0);
  REQUIRE(mirror != nullptr);
  const TokenList tokens(16);
  const auto refuses = [&](const chunkattn_event& event, const std::int32_t* of, const char* text) {
    std::int32_t result = -1;
    CHECK(chunkattn_mirror_apply(mirror, &event, of, &result) == CHUNKATTN_FAILED);
    CHECK(chunkattn_error() == std::string(text));
    CHECK(result == -1);
    CHECK(chunkattn_mirror_number(mirror) == 0);
  };
  chunkattn_event event{};
  event.stream = 1, event.number = 1, event.span = 1, event.length = 16;
  event.kind = 3;
  refuses(event, tokens.data(),
          "event->kind = 3: expected CHUNKATTN_STORED = 0, CHUNKATTN_EVICTED = 1 or "
          "CHUNKATTN_CLEARED = 2");
  event.kind = CHUNKATTN_STORED;
  refuses(event, nullptr, "tokens = null: expected event->length tokens");
  event.position = -5;
  refuses(event, tokens.data(),
          "event->position = -5: expected 0 to 2^30 - event->length, in units of 1");
  event.position = 0;
  event.length = 17;
  refuses(event, tokens.data(),
          "event->length = 17: expected 1 to the chunk size, 16, of a stored one");
  chunkattn_snapshot snapshot{};
  chunkattn_event span = event;
  span.kind = 256, span.length = 16, span.parent = 1;
  snapshot.spans = &span, snapshot.tokens = tokens.data(), snapshot.num_tokens = 16;
  snapshot.num_spans = 1, snapshot.unit = 1;
  CHECK(chunkattn_mirror_load(mirror, &snapshot) == CHUNKATTN_FAILED);
  CHECK(chunkattn_error() == std::string("snapshot->spans->kind = 256: expected CHUNKATTN_STORED = "
                                         "0, CHUNKATTN_EVICTED = 1 or CHUNKATTN_CLEARED = 2"));
  snapshot = {};
  snapshot.num_spans = 1, snapshot.unit = 1;
  CHECK(chunkattn_mirror_load(mirror, &snapshot) == CHUNKATTN_FAILED);
  CHECK(chunkattn_error() == std::string("snapshot->spans = null: expected num_spans events"));
  event.length = 16;
  snapshot.spans = &event;
  CHECK(chunkattn_mirror_load(mirror, &snapshot) == CHUNKATTN_FAILED);  // its tokens are missing
  snapshot.tokens = tokens.data(), snapshot.num_tokens = 16;
  CHECK(chunkattn_mirror_load(mirror, &snapshot) == 0);
  CHECK(chunkattn_mirror_match(mirror, tokens.data(), 16, nullptr) == 16);
  chunkattn_mirror_destroy(mirror);
}
