// A random engine whose model has layers with and without windows: prompts join, fork, grow, are
// truncated and leave, steps are planned twice, dropped, lost in flight and overlap, drafts are
// accepted and rejected, sequences are swapped out and in, tiers hold what is evicted, groups come
// and go, either pool runs short, everything cached is forgotten.
//
// K, V and queries of a row are functions of its token path. So each output of each layer is held
// against a softmax in double over what the path says, and every row that a group says it has must
// hold what its path says. All other rows of a group are NaN. What a group holds, and where
// sequences are resumed, must be what plain_window_pool.hpp says; so must what a mirror knows of it
// by events (resume_wire.hpp).
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "chunkattn/attention_plan.hpp"
#include "chunkattn/cache/windowed_kv.hpp"
#include "chunkattn/cache/windowed_layers.hpp"
#include "chunkattn/debug/tree.hpp"
#include "chunkattn/kv_cache.hpp"
#include "chunkattn/prefix_tree.hpp"
#include "chunkattn/tiers/tiers.hpp"
#include "chunkattn/transfer/transfer.hpp"
#include "tests/support/plain_window_pool.hpp"
#include "tests/support/random.hpp"
#include "tests/support/resume_wire.hpp"

namespace test {

/// What a row's K, V and q are made of: a hash of all tokens of its path.
using PathHash = std::uint64_t;

inline PathHash mixed(PathHash x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}
inline PathHash extended(PathHash path, int token) {
  return mixed(path * 31 + static_cast<PathHash>(token) + 0x9e3779b97f4a7c15u);
}
/// Element `i` of a row: which = 0 for K, 1 for V, 2 and up for the query heads.
inline float element(PathHash path, int layer, int which, int i) {
  const auto bits = mixed(path + static_cast<PathHash>(1000 * layer + 100 * which + i + 1));
  return static_cast<float>(static_cast<std::int64_t>(bits)) * 0x1p-62f;
}

/// The shape of the model and of the pools.
struct WindowModel {
  static constexpr int head_dim = 8, num_qo_heads = 2;

  std::vector<int> windows;           ///< of each group, a layer each; layer 0 has none
  std::size_t max_chunks = 0;         ///< of the tree
  std::size_t max_window_chunks = 0;  ///< of each group
  std::optional<std::size_t> max_cached{};
  chunkattn::TreeOptions tree{};
  int max_text = 200;      ///< tokens
  bool same_bits = false;  ///< as over the whole plan, with K/V of all tokens
  bool has_tiers = false;  ///< below the tree
};

/// Stands in for the kernels: reads plans as PlanView says, in double.
struct PlainAttention {
  using View = chunkattn::KvView<float>;
  static constexpr int dim = WindowModel::head_dim, heads = WindowModel::num_qo_heads;

  void write(const View& kv, const chunkattn::LiveView& plan, std::span<const float> k,
             std::span<const float> v) {
    for (int i = 0; i < plan.num_copies; ++i)
      for (int t = 0; t < plan.copies[i].length; ++t) {
        const auto& copy = plan.copies[i];
        const int from = copy.source_begin + t, to = copy.target_begin + t;
        std::copy_n(kv.k_row(copy.source_chunk, 0, from), dim, kv.k_row(copy.target_chunk, 0, to));
        std::copy_n(kv.v_row(copy.source_chunk, 0, from), dim, kv.v_row(copy.target_chunk, 0, to));
      }
    std::set<std::pair<int, int>> targets;
    for (int row = 0; row < plan.num_rows; ++row) {
      const auto [chunk, offset] = plan.writes[row];
      if (chunk == chunkattn::no_chunk) continue;
      REQUIRE(targets.insert({chunk, offset}).second);  // by one row each
      std::copy_n(k.data() + row * dim, dim, kv.k_row(chunk, 0, offset));
      std::copy_n(v.data() + row * dim, dim, kv.v_row(chunk, 0, offset));
    }
  }
  void run(const View& kv, const chunkattn::LiveView& plan, int window, std::span<const float> q,
           std::span<float> out) {
    for (int row = 0; row < plan.num_rows; ++row)
      for (int h = 0; h < heads; ++h) run_head(kv, plan, window, row, h, q, out);
  }

 private:
  static void run_head(const View& kv, const chunkattn::LiveView& plan, int window, int row, int h,
                       std::span<const float> q, std::span<float> out) {
    const int at = (plan.row_token[row] * heads + h) * dim;
    double sums[dim] = {}, total = 0;
    for (int s = plan.row_segment[row]; s >= 0; s = plan.segments[s].parent) {
      const auto& segment = plan.segments[s];
      if (row < segment.row_begin || row >= segment.row_end) FAIL("a row beside its segment");
      for (int i = 0; i < segment.num_pieces; ++i) {
        const chunkattn::Piece& piece = plan.pieces[segment.piece_begin + i];
        for (int t = 0; t < visible_length(piece, plan.row_kv_len[row]); ++t) {
          if (plan.row_kv_len[row] - 1 - piece.position - t >= window) continue;
          const float* const k = kv.k_row(piece.chunk, 0, piece.begin + t);
          const float* const v = kv.v_row(piece.chunk, 0, piece.begin + t);
          double dot = 0;
          for (int d = 0; d < dim; ++d) dot += double{q[to_size(at + d)]} * k[d];
          const double p = std::exp(dot / std::sqrt(double{dim}));
          total += p;
          for (int d = 0; d < dim; ++d) sums[d] += p * v[d];
        }
      }
    }
    for (int d = 0; d < dim; ++d) out[to_size(at + d)] = static_cast<float>(sums[d] / total);
  }
  static std::size_t to_size(int n) { return static_cast<std::size_t>(n); }
};

/// What a run has seen, for tests that ask whether it saw what it should.
struct WindowCounts {
  std::uint64_t rows = 0, steps = 0, dropped = 0, lost = 0, refused = 0, resumed_early = 0;
  std::uint64_t accepted = 0, rejected = 0, copies = 0;
  std::uint64_t swapped = 0, swapped_with_windows = 0, loaded = 0, groups = 0, not_viewed = 0,
                evicted = 0;
  ResumeCounts resume;

  void add(const WindowCounts& other) {
    rows += other.rows, steps += other.steps, dropped += other.dropped, lost += other.lost;
    refused += other.refused, resumed_early += other.resumed_early;
    accepted += other.accepted, rejected += other.rejected, copies += other.copies;
    swapped_with_windows += other.swapped_with_windows;
    swapped += other.swapped, loaded += other.loaded, groups += other.groups;
    not_viewed += other.not_viewed, evicted += other.evicted;
    resume.add(other.resume);
  }
};

/// \tparam Attention  write() and run() of PlainAttention
template <int ChunkSize, class Attention>
class WindowEngine {
  static constexpr std::size_t no_group = ~std::size_t{0};
  static constexpr int no_window = std::numeric_limits<int>::max();
  static constexpr int dim = WindowModel::head_dim, heads = WindowModel::num_qo_heads;

 public:
  using Tree = chunkattn::PrefixTree<int, ChunkSize>;
  using Sequence = typename Tree::Sequence;
  using Layers = chunkattn::WindowedLayers<Tree>;
  using Tiers = chunkattn::Tiers<Tree, chunkattn::KvCache<chunkattn::Cpu, float>>;
  using LiveView = chunkattn::LiveView;
  using Views = std::vector<std::optional<LiveView>>;  ///< of each group

  WindowEngine(const WindowModel& model, std::uint64_t stream, Attention attention = {})
      : model_(model),
        random_(stream),
        attention_(std::move(attention)),
        tree_({.max_chunks = model.max_chunks}, model.tree, policy()),
        full_(tree_, {1 + static_cast<int>(model.windows.size()), 1, dim}),
        wire_(tree_, stream + 1'000'000) {
    for (const int window : model.windows)
      groups_.push_back(std::make_unique<Group>(tree_, model, window));
    if (model.has_tiers) open_tiers();
    for (int i = 0; i < 6; ++i) {
      std::vector<int> text(to_size(random_.uniform(model.max_text / 2, model.max_text)));
      for (int& token : text) token = random_.uniform(0, 2);
      if (i > 0) {  // which begins as an earlier one does
        const std::vector<int>& earlier = texts_[random_.index(texts_.size())];
        const std::size_t shared = random_.index(std::min(earlier.size(), text.size()));
        std::copy_n(earlier.begin(), shared, text.begin());
      }
      texts_.push_back(std::move(text));
    }
  }

  /// Does something at random, mostly a step.
  void operate() {
    choose();
    check_pools();
    if (random_.chance(0.3)) check_wire();
  }
  /// Computes a prompt alone, so many rows at a time, and lets it go.
  void answer(const std::vector<int>& prompt, int rows) {
    live_.clear();
    live_.push_back(tree_.insert(prompt));
    rows_ = rows;
    while (live_[0].num_written() < prompt.size()) {
      burst_ = 2;
      step();
      while (!in_flight_.empty()) end_step();
      tree_.device_idle();
    }
    burst_ = 0;
    live_.clear();
  }
  /// All that a run is to end with: nothing held, and the pools' counts are right.
  void finish() {
    while (!in_flight_.empty()) end_step();
    tree_.device_idle();  // steps that were lost are over
    live_.clear();
    check();
    for (const auto& group : groups_) {
      if (!group) continue;
      const auto stats = group->layers.stats();
      if (tree_.stats().leaving_sequences == 0)  // else copies that nobody made hold some
        CHECK(stats.used_chunks == stats.cached_chunks);
      counts_.evicted += stats.evicted_chunks;
    }
    clear();
    check_pools();
    check_wire();
    for (const auto& group : groups_)
      if (group) CHECK(group->layers.stats().used_chunks == 0);
    counts_.resume = wire_.counts();
  }
  [[nodiscard]] const WindowCounts& counts() const { return counts_; }
  [[nodiscard]] typename Layers::Stats stats(std::size_t group) const {
    return groups_[group]->layers.stats();
  }

 private:
  using Cache = chunkattn::KvCache<chunkattn::Cpu, float>;
  using Pool = PlainWindowPool<Layers>;
  /// K/V of windows that travels, of which the plain model is told.
  class Companion final : public chunkattn::KvCompanion<Sequence> {
   public:
    Companion(Layers& layers, Cache& cache, Pool& pool) : kv_(layers, cache), pool_(pool) {}
    [[nodiscard]] std::string format() const override { return kv_.format(); }
    [[nodiscard]] std::size_t bytes_per_token() const override { return kv_.bytes_per_token(); }
    void gather(std::span<const chunkattn::Piece> places, chunkattn::CompanionRows& rows) override {
      kv_.gather(places, rows);
    }
    void scatter(Sequence& sequence, const chunkattn::CompanionRows& rows) override {
      kv_.scatter(sequence, rows);
      pool_.loaded(chunkattn::detail::TreeAccess::index(sequence), rows.ranges);
    }
    [[nodiscard]] bool reserve(Sequence& sequence, const chunkattn::CompanionRows& rows) override {
      const bool has_room = kv_.reserve(sequence, rows);
      pool_.reserved(chunkattn::detail::TreeAccess::index(sequence), rows.ranges, has_room);
      return has_room;
    }
    [[nodiscard]] std::size_t end(const Sequence& sequence, std::size_t limit) const override {
      return kv_.end(sequence, limit);
    }
    [[nodiscard]] chunkattn::TokenRange needed(std::size_t position,
                                               chunkattn::TokenRange own) const override {
      return kv_.needed(position, own);
    }
    void resume(Sequence& sequence, std::size_t position) override {
      const int before = static_cast<int>(sequence.num_scheduled());
      kv_.resume(sequence, position);
      pool_.resumed(chunkattn::detail::TreeAccess::index(sequence), static_cast<int>(position),
                    before);
    }

   private:
    chunkattn::WindowedKv<Tree, Cache> kv_;
    Pool& pool_;
  };
  struct Group {
    Layers layers;
    Cache cache;
    Pool pool;
    Companion companion;
    /// Arrays of plans by their versions.
    std::map<std::pair<std::uint64_t, std::uint64_t>, std::vector<int>> seen;
    Group(Tree& tree, const WindowModel& model, int window)
        : layers(tree, {.window = window,
                        .max_chunks = model.max_window_chunks,
                        .max_cached_chunks = model.max_cached}),
          cache(layers, {1, 1, dim}),
          pool(chunkattn::detail::TreeAccess::shared(tree)->tree->core, layers),
          companion(layers, cache, pool) {}
  };
  /// A row of a step, in the caller's order.
  struct Row {
    std::shared_ptr<const std::vector<PathHash>> path;  ///< of the entry's last row
    int end = 0;                                        ///< tokens of it that are the row's path
    int token = 0;

    [[nodiscard]] PathHash hash() const { return (*path)[static_cast<std::size_t>(end - 1)]; }
  };
  struct Flight {
    typename Tree::InFlight step;
    std::vector<Row> rows;
  };

  void choose() {
    const int what = burst_ > 0 && random_.chance(0.9) ? 99 : random_.uniform(0, 99);
    if (what < 12) return join();
    if (what < 15) return fork();
    if (what < 21) return leave();
    if (what < 24) return edit();
    if (what == 24 && random_.chance(0.1)) return clear();
    if (what == 25 && !live_.empty()) return (void)any().take_over();
    if (what == 26 || what == 30) return random_.chance(0.5) ? swap_out() : swap_in();
    if (what == 27 && random_.chance(0.5)) return come_or_go();
    if (what == 28 && (tiers_ || random_.chance(0.1))) return evict_all();
    if (what == 29) return pin();
    if (tiers_ && random_.chance(0.1)) return use_tiers();
    if (what >= 30) step();
  }

  static std::size_t to_size(std::int64_t n) { return static_cast<std::size_t>(n); }
  [[nodiscard]] static chunkattn::RetentionOptions policy() {
    chunkattn::RetentionOptions policy;
    policy.max_pinned = 8;
    return policy;
  }
  [[nodiscard]] static int sampled(PathHash path) { return static_cast<int>(mixed(path) % 3); }
  Sequence& any() { return live_[random_.index(live_.size())]; }

  // ---- what is not a step --------------------------------------------------------------------

  void join() {
    if (live_.size() >= 8) return;
    std::vector<int> prompt = texts_[random_.index(texts_.size())];
    prompt.resize(1 + random_.index(prompt.size()));
    for (int n = random_.uniform(0, 20); n > 0; --n) prompt.push_back(random_.uniform(0, 2));
    std::vector<std::size_t> found;
    for (const auto& group : groups_) found.push_back(group ? group->layers.find(prompt) : 0);
    auto sequence = tree_.try_insert(prompt);
    if (!sequence) return;
    if (sequence->num_pending() == 0)
      for (std::size_t i = 0; i < groups_.size(); ++i) {
        if (!groups_[i]) continue;
        const std::size_t end = groups_[i]->layers.window_end(*sequence, Sequence::whole);
        if (found[i] <= sequence->num_scheduled())
          CHECK(end == found[i]);
        else  // the last token is computed in any case
          CHECK(end < found[i]);
      }
    if (tiers_ && random_.chance(0.6)) load(*sequence);
    live_.push_back(std::move(*sequence));
  }
  void fork() {
    if (live_.empty() || live_.size() >= 8) return;
    Sequence& from = any();
    const std::size_t length =
        random_.chance(0.5) ? Sequence::whole : 1 + random_.index(from.size());
    if (auto twin = from.try_fork(length)) live_.push_back(std::move(*twin));
  }
  void leave() {
    if (live_.empty()) return;
    Sequence& one = any();
    if (random_.chance(0.5)) texts_[random_.index(texts_.size())] = one.tokens();  // the next turn
    std::swap(one, live_.back());
    live_.pop_back();
  }
  void edit() {
    if (live_.empty()) return;
    Sequence& one = any();
    if (random_.chance(0.5)) {
      if (one.num_reserved() == 0)
        (void)one.try_append({random_.uniform(0, 2), random_.uniform(0, 2)});
    } else {
      try {
        one.truncate(1 + random_.index(one.size()));
      } catch (const chunkattn::OutOfChunks&) {  // of the tree
        ++counts_.refused;
      }
    }
  }

  void clear() {
    tree_.clear();
    if (tiers_) tiers_->reopen("model");
  }
  /// A preempted sequence, with its windows in the groups that there were.
  struct Swapped {
    chunkattn::SwappedSequence<int> sequence;
    std::vector<std::uint64_t> groups;  ///< ids, in the order of its companions
  };
  void swap_out() {
    if (live_.empty() || swapped_.size() >= 3) return;
    Sequence& one = any();
    Swapped swapped;
    const auto companions = find_companions(swapped.groups);
    swapped.sequence = chunkattn::swap_out(one, full_, companions);
    swapped_.push_back(std::move(swapped));
    std::swap(one, live_.back());
    live_.pop_back();
    ++counts_.swapped;
  }
  void swap_in() {
    if (swapped_.empty() || live_.size() >= 8) return;
    std::swap(swapped_[random_.index(swapped_.size())], swapped_.back());
    Swapped& swapped = swapped_.back();
    std::vector<std::uint64_t> groups;
    auto companions = find_companions(groups);
    if (groups != swapped.groups || random_.chance(0.1)) {  // computed again
      companions.clear();
      swapped.sequence.companions.clear();
      swapped.groups.clear();
    }
    auto one = chunkattn::resume(tree_, full_, swapped.sequence, companions);
    if (!one) return;
    bool is_ready = !companions.empty();
    for (const auto& group : groups_)
      is_ready = is_ready && (!group || group->layers.is_ready(*one));
    counts_.swapped_with_windows += is_ready && one->num_scheduled() > 0;
    live_.push_back(std::move(*one));
    swapped_.pop_back();
  }
  chunkattn::KvCompanions<Sequence> find_companions(std::vector<std::uint64_t>& ids) {
    chunkattn::KvCompanions<Sequence> companions;
    for (const auto& group : groups_) {
      if (!group) continue;
      companions.push_back(&group->companion);
      ids.push_back(group->cache.tree_id());
    }
    return companions;
  }
  /// The group of some layers goes, or one comes that knows nothing of what is there.
  void come_or_go() {
    const std::size_t g = random_.index(groups_.size());
    if (groups_[g]) {
      counts_.evicted += groups_[g]->layers.stats().evicted_chunks;
      return groups_[g].reset();
    }
    groups_[g] = std::make_unique<Group>(tree_, model_, model_.windows[g]);
    ++counts_.groups;
    for (const Sequence& one : live_) CHECK_FALSE(groups_[g]->layers.is_ready(one));
  }
  /// Somebody takes all chunks, and goes.
  void evict_all() {
    const std::size_t size = ChunkSize * tree_.chunks_available();
    if (size > 0) (void)tree_.try_insert(std::vector<int>(size, 9));
    if (!tiers_) return;
    while (tiers_->work()) {
    }
    join();
    join();
  }
  void pin() {
    if (pins_.size() >= 2) return (void)pins_.erase(pins_.begin());
    const std::vector<int>& text = texts_[random_.index(texts_.size())];
    pins_.push_back(tree_.pin(std::span(text).first(random_.index(text.size()))));
  }

  // ---- tiers ---------------------------------------------------------------------------------

  void open_tiers() {
    typename Tiers::Options options;
    options.model = "model";
    options.threads = false;
    options.max_wait_seconds = 1e9;
    options.write_through = random_.chance(0.5);
    std::vector<std::shared_ptr<chunkattn::TierStore>> stores{
        std::make_shared<chunkattn::MemoryTier>(std::size_t{1} << random_.uniform(15, 20))};
    tiers_.emplace(tree_, full_, std::move(stores), std::move(options));
  }
  void use_tiers() {
    (void)tiers_->advance(to_size(random_.uniform(0, 8)));
    for (int n = random_.uniform(0, 20); n > 0 && tiers_->work();) --n;
  }
  void load(Sequence& sequence) {
    auto load = tiers_->load(sequence);
    const std::uint64_t before = tiers_->stats().loaded_tokens;
    for (int n = random_.uniform(0, 30); n > 0 && load && load.poll(sequence); --n)
      (void)tiers_->work();
    counts_.loaded += tiers_->stats().loaded_tokens - before;
  }

  // ---- a step --------------------------------------------------------------------------------

  void step() {
    check_pools();
    if (!in_flight_.empty() && (num_outstanding() >= 4 || random_.chance(0.6))) return end_step();
    if (num_outstanding() >= 4) {
      tree_.device_idle();
      check_pools();
    }
    auto step = tree_.begin_step();
    if (burst_ > 0) {  // the batch before: its plan is kept
      --burst_;
    } else if (random_.chance(0.2)) {
      burst_ = random_.uniform(1, 30);
      rows_ = random_.uniform(1, 12);
    }
    for (Sequence& one : live_) {
      if (burst_ == 0 && random_.chance(0.2)) continue;
      if (one.num_reserved() > 1 || !resume(one)) continue;
      std::vector<int> drafts;
      if (burst_ == 0 && random_.chance(0.3) && one.num_reserved() == 0)
        drafts.resize(random_.index(4));
      for (int& draft : drafts) draft = random_.uniform(0, 2);
      const int rows = burst_ > 0 ? rows_ : random_.uniform(1, 40);
      (void)step.add(one, to_size(rows), {.tokens = drafts});
    }
    if (step.num_rows() == 0) return;
    chunkattn::AttentionPlan& plan = plans_[burst_ > 0 ? 0 : random_.index(2)];
    auto view = plan.build(step);
    Views views;
    if (!view_groups(view, step, views)) return;
    if (random_.chance(0.05)) {
      view = plan.build(step);
      if (!view_groups(view, step, views)) return;
    }
    ++counts_.steps;
    if (random_.chance(0.04)) return (void)++counts_.dropped;
    if (random_.chance(0.02) && num_outstanding() == 1) {  // one group's view is not taken
      const std::size_t g = random_.index(groups_.size());
      view = plan.build(step);
      if (!view_groups(view, step, views, g)) return;
      ++counts_.not_viewed;
    }
    const std::vector<Row> rows = rows_of(step, view);
    bool all_viewed = true;
    for (std::size_t layer = 0; layer <= groups_.size(); ++layer) {
      compute(rows, layer, view, layer == 0 ? std::optional(LiveView(view)) : views[layer - 1]);
      all_viewed = all_viewed && (layer == 0 || views[layer - 1] || !groups_[layer - 1]);
    }
    counts_.rows += rows.size();
    for (const auto& one : views) counts_.copies += one ? to_size(one->num_copies) : 0;
    in_flight_.push_back({std::move(step).submit(), rows});
    if (!all_viewed || random_.chance(0.5)) end_step();
  }
  // Steps in flight, those that were lost included.
  [[nodiscard]] int num_outstanding() const {
    int outstanding = 0;
    for (const auto& step : chunkattn::detail::TreeAccess::core(tree_).steps.all())
      outstanding += chunkattn::detail::StepTable::is_outstanding(*step);
    return outstanding;
  }
  // Whether the sequence can be added now.
  bool resume(Sequence& one) {
    bool ready = true;
    for (const auto& group : groups_) ready = ready && (!group || group->layers.is_ready(one));
    if (ready) return true;
    const bool busy = one.num_reserved() > 0 || one.num_pending() > 0 || is_in_flight(one);
    if (busy) {
      if (groups_[0] && (one.num_reserved() > 0 || is_in_flight(one)))
        CHECK_THROWS_AS((void)groups_[0]->layers.resume(one), const chunkattn::InvalidArgument&);
      return false;
    }
    const std::size_t before = one.num_scheduled();
    std::size_t position = Sequence::whole;
    for (std::size_t last = 0; position != last;) {  // the last one that all groups have
      last = position;
      for (const auto& group : groups_)
        if (group) position = group->layers.window_end(one, position);
    }
    const auto index = chunkattn::detail::TreeAccess::index(one);
    const int end = static_cast<int>(position);
    for (const auto& group : groups_) {
      if (!group) continue;
      const auto stats = group->layers.stats();
      const int cursor = static_cast<int>(one.num_scheduled());
      try {
        const std::size_t resumed = group->layers.resume(one, position);
        CHECK(resumed == position);
        group->pool.resumed(index, end, cursor);
      } catch (const chunkattn::OutOfChunks&) {
        ++counts_.refused;
        group->pool.refused(index, group->pool.begin_of(end), end);
        group->pool.check();
        CHECK(group->layers.stats().used_chunks == stats.used_chunks);
        return false;
      }
      CHECK(group->layers.is_ready(one));
    }
    CHECK(one.num_scheduled() == position);
    if (position < before) ++counts_.resumed_early;
    return true;
  }
  [[nodiscard]] bool is_in_flight(const Sequence& one) const {
    const auto& core = chunkattn::detail::TreeAccess::core(tree_);
    return core.sequences[chunkattn::detail::TreeAccess::index(one)].steps > 0;
  }
  [[nodiscard]] const chunkattn::detail::StepRecord& record_of(const typename Tree::Step& step) {
    for (const auto& record : chunkattn::detail::TreeAccess::core(tree_).steps.all())
      if (record->number == step.number()) return *record;
    FAIL("no such step");
    std::abort();
  }
  bool view_groups(const typename Tree::StepView& view, const typename Tree::Step& step,
                   Views& views, std::size_t without = no_group) {
    views.clear();
    for (const auto& group : groups_) {
      if (group && views.size() == without) group->pool.not_viewed(record_of(step));
      if (!group || views.size() == without) {
        views.push_back({});
        continue;
      }
      const std::size_t needed = group->layers.chunks_needed(step);
      const bool fits = needed <= group->layers.chunks_available();
      const std::size_t used = group->layers.stats().used_chunks;
      const std::size_t available = group->layers.chunks_available();
      try {
        views.push_back(group->layers.view(view));
        group->pool.viewed(record_of(step), *views.back());
        check_versions(*group, *views.back());
        CHECK(group->layers.stats().used_chunks <= used + needed);
        CHECK(available <= group->layers.chunks_available() + needed);
      } catch (const chunkattn::OutOfChunks&) {
        ++counts_.refused;
        group->pool.refused(record_of(step));
        CHECK(!fits);
        check();
        if (!live_.empty()) leave();  // so that others can go on
        return false;
      }
    }
    return true;
  }
  // Of equal versions are equal arrays, which kernels rely on.
  static void check_versions(Group& group, const chunkattn::PlanView& plan) {
    std::vector<int> arrays;
    for (int s = 0; s < plan.num_segments; ++s) {
      const auto& segment = plan.segments[s];
      arrays.insert(arrays.end(), {segment.position, segment.length, segment.piece_begin});
      for (int i = 0; i < segment.num_pieces; ++i) {
        const auto& piece = plan.pieces[segment.piece_begin + i];
        arrays.insert(arrays.end(), {piece.chunk, piece.position, piece.length});
      }
    }
    const auto [known, is_new] =
        group.seen.insert({{plan.segments_version, plan.pieces_version}, arrays});
    if (!is_new) CHECK(known->second == arrays);
    if (group.seen.size() > 100) group.seen.erase(group.seen.begin());
  }
  [[nodiscard]] std::vector<Row> rows_of(const typename Tree::Step& step,
                                         const typename Tree::StepView& view) {
    std::vector<Row> rows(to_size(view.num_rows));
    const std::vector<int> tokens = view.tokens(-1);
    for (const auto& entry : record_of(step).entries)
      for (const Sequence& one : live_) {
        if (one.id() != entry.id()) continue;
        const std::vector<int> known = one.tokens();
        auto path = std::make_shared<std::vector<PathHash>>();
        for (int i = 0; i < entry.end(); ++i) {
          const PathHash before = path->empty() ? 1 : path->back();
          const int row = entry.first_row + i - entry.begin;
          int token = i >= entry.begin ? tokens[to_size(row)] : -1;
          if (token < 0) token = to_size(i) < known.size() ? known[to_size(i)] : sampled(before);
          path->push_back(extended(before, token));
          if (i >= entry.begin) rows[to_size(row)] = {path, i + 1, token};
        }
      }
    return rows;
  }
  void compute(const std::vector<Row>& rows, std::size_t layer, const LiveView& whole,
               const std::optional<LiveView>& of_layer) {
    std::vector<float> k(rows.size() * dim), v(rows.size() * dim), q(rows.size() * dim * heads);
    std::vector<float> out(q.size(), std::numeric_limits<float>::quiet_NaN());
    const int l = static_cast<int>(layer);
    for (std::size_t r = 0; r < rows.size(); ++r)
      for (int i = 0; i < dim; ++i) {
        const std::size_t at = r * dim + to_size(i);
        k[at] = element(rows[r].hash(), l, 0, i);
        v[at] = element(rows[r].hash(), l, 1, i);
        for (int h = 0; h < heads; ++h)
          q[(r * heads + to_size(h)) * dim + to_size(i)] = 2 * element(rows[r].hash(), l, 2 + h, i);
      }
    const int window = layer == 0 ? no_window : model_.windows[layer - 1];
    if (layer > 0 && model_.same_bits) attention_.write(full_.layer(l), whole, k, v);
    if (!of_layer) return;
    const LiveView& plan = *of_layer;
    const auto kv = layer == 0 ? full_.layer(0) : groups_[layer - 1]->cache.layer(0);
    attention_.write(kv, plan, k, v);
    attention_.run(kv, plan, window, q, out);
    if (layer > 0 && model_.same_bits) {  // as with K/V of all tokens
      std::vector<float> expected(out.size());
      attention_.run(full_.layer(l), whole, window, q, expected);
      CHECK(out == expected);
    }
    for (int row = 0; row < plan.num_rows; ++row) check_row(plan, row, rows, l, window, q, out);
  }
  void check_row(const LiveView& plan, int row, const std::vector<Row>& rows, int layer, int window,
                 std::span<const float> q, std::span<const float> out) {
    const int token = plan.row_token[row];
    const std::vector<PathHash>& path = *rows[to_size(token)].path;
    const int end = plan.row_kv_len[row];
    REQUIRE(rows[to_size(token)].end == end);
    for (int h = 0; h < heads; ++h) {
      const std::size_t at = to_size(token * heads + h) * dim;
      double sums[dim] = {}, total = 0;
      for (int t = window < end ? end - window : 0; t < end; ++t) {
        double dot = 0;
        for (int i = 0; i < dim; ++i)
          dot += double{q[at + to_size(i)]} * element(path[to_size(t)], layer, 0, i);
        const double p = std::exp(dot / std::sqrt(double{dim}));
        total += p;
        for (int i = 0; i < dim; ++i) sums[i] += p * element(path[to_size(t)], layer, 1, i);
      }
      for (int i = 0; i < dim; ++i) {
        const double error = std::abs(sums[i] / total - double{out[at + to_size(i)]});
        if (error < 1e-5) continue;
        FAIL("layer ", layer, ", position ", end - 1, ", error ", error);
      }
    }
  }
  void end_step() {
    Flight flight = std::move(in_flight_.front());
    in_flight_.pop_front();
    if (random_.chance(0.05)) {
      ++counts_.lost;
      {
        auto lost = std::move(flight.step);
      }
      if (random_.chance(0.5)) tree_.device_idle();
    } else {
      auto finished = std::move(flight.step).finish();
      for (const auto& row : finished.rows()) {
        const int first = row.output_row();
        std::vector<int> outputs;
        for (int d = 0;; ++d) {
          outputs.push_back(sampled(flight.rows[to_size(first + d)].hash()));
          if (d == row.num_drafts) break;
          if (outputs.back() != flight.rows[to_size(first + d + 1)].token) break;
          ++counts_.accepted;
        }
        counts_.rejected += to_size(row.num_drafts) + 1 - outputs.size();
        finished.commit(row, outputs);
      }
    }
    check();
  }

  // ---- what holds between operations -----------------------------------------------------------

  void check() {
    check_invariants(tree_);
    check_pools();
    for (std::size_t g = 0; g < groups_.size(); ++g) {
      if (!groups_[g]) continue;
      const auto& group = chunkattn::detail::WindowAccess::group(groups_[g]->layers);
      REQUIRE(group.is_consistent());
      poison(group.chunks(), groups_[g]->cache);
      for (const Sequence& one : live_) check_rows(one, group.chunks(), g);
    }
  }
  // Each group is what the plain model says.
  void check_pools() {
    for (const auto& group : groups_) {
      if (!group) continue;
      group->pool.check();
      if (live_.empty()) continue;
      const Sequence& one = any();
      const auto index = chunkattn::detail::TreeAccess::index(one);
      REQUIRE(group->layers.is_ready(one) == group->pool.is_ready(index));
      const int limit = random_.uniform(0, static_cast<int>(one.size()));
      REQUIRE(group->layers.window_end(one, to_size(limit)) ==
              to_size(group->pool.window_end(index, limit)));
    }
  }
  // A mirror knows where prompts can be resumed.
  void check_wire() {
    typename ResumeWire<Tree>::Groups groups;
    for (const auto& group : groups_)
      if (group) groups.push_back(&group->layers);
    if (!live_.empty()) wire_.save(any());
    wire_.hear(groups);
    std::vector<int> prompt = texts_[random_.index(texts_.size())];
    if (!live_.empty() && random_.chance(0.5)) prompt = any().tokens();
    if (random_.chance(0.5)) prompt.resize(1 + random_.index(prompt.size()));
    wire_.compare(prompt, groups);
  }
  // Rows that nobody may read are NaN.
  void poison(const chunkattn::detail::WindowChunks& chunks,
              chunkattn::KvCache<chunkattn::Cpu, float>& cache) {
    const auto kv = cache.layer(0);
    for (int c = 0; c < static_cast<int>(chunks.high_water()); ++c)
      for (int slot = 0; slot < ChunkSize; ++slot) {
        if (chunks.known({c, slot >> 6, std::uint64_t{1} << (slot & 63)}) != 0) continue;
        std::fill_n(kv.k_row(c, 0, slot), dim, std::numeric_limits<float>::quiet_NaN());
        std::fill_n(kv.v_row(c, 0, slot), dim, std::numeric_limits<float>::quiet_NaN());
      }
  }
  // Rows that a group says it has are those of the sequence's path.
  void check_rows(const Sequence& one, const chunkattn::detail::WindowChunks& chunks,
                  std::size_t g) {
    const auto kv = groups_[g]->cache.layer(0);
    const std::vector<int> tokens = one.tokens();
    PathHash path = 1;
    one.for_each_run(
        {0, static_cast<std::int32_t>(one.num_written())}, [&](const chunkattn::Piece& piece) {
          const int c = chunks.find(piece.chunk);
          for (int t = 0; t < piece.length; ++t) {
            path = extended(path, tokens[to_size(piece.position + t)]);
            const int slot = piece.begin + t;
            if (c < 0 || chunks.written({c, slot >> 6, std::uint64_t{1} << (slot & 63)}) == 0)
              continue;
            const float expected = element(path, static_cast<int>(g) + 1, 0, 0);
            if (*kv.k_row(c, 0, slot) != expected)
              FAIL("group ", g, ", position ", piece.position + t, ": another token's K/V");
          }
        });
  }

  WindowModel model_;
  Random random_;
  Attention attention_;
  Tree tree_;
  chunkattn::KvCache<chunkattn::Cpu, float> full_;
  std::vector<std::unique_ptr<Group>> groups_;  ///< null: not there now
  ResumeWire<Tree> wire_;
  std::optional<Tiers> tiers_;
  std::vector<Swapped> swapped_;
  std::vector<typename Tree::Pin> pins_;
  chunkattn::AttentionPlan plans_[2];
  std::vector<std::vector<int>> texts_;
  std::vector<Sequence> live_;
  std::deque<Flight> in_flight_;
  WindowCounts counts_;
  int burst_ = 0,
      rows_ = 0;  ///< steps of the same batch that are to come, and rows of each sequence
};

}  // namespace test
