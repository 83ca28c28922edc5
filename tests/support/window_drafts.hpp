// Chats whose drafts are trees, in a model with a windowed layer: the group's outputs must have the
// bits of the same window over K/V of all tokens. K and V of a row are functions of its token path;
// what a pool has freed is NaN.
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "chunkattn/attention_plan.hpp"
#include "chunkattn/cache/windowed_layers.hpp"
#include "chunkattn/debug/tree.hpp"
#include "chunkattn/kv_cache.hpp"
#include "chunkattn/prefix_tree.hpp"
#include "tests/support/parents.hpp"
#include "tests/support/random.hpp"
#include "tests/support/window_engine.hpp"

namespace test {

/// \tparam Attention  write() and run() of PlainAttention
template <int ChunkSize, class Attention>
class WindowDrafts {
  static constexpr int dim = WindowModel::head_dim, heads = WindowModel::num_qo_heads;
  using Tree = chunkattn::PrefixTree<int, ChunkSize>;
  using Sequence = typename Tree::Sequence;

 public:
  std::uint64_t copied = 0, branches = 0, refused = 0, recomputed = 0;

  WindowDrafts(int window, std::size_t max_chunks, std::uint64_t stream, Attention attention)
      : random_(stream),
        window_(window),
        attention_(std::move(attention)),
        tree_({.max_chunks = 4000}),
        near_(tree_, {.window = window, .max_chunks = max_chunks}),
        full_kv_(tree_, {1, 1, dim}),
        near_kv_(near_, {1, 1, dim}) {
    tree_.set_free_sink([this](chunkattn::ChunkIndex c) { full_kv_.poison(c); });
    near_.set_free_sink([this](chunkattn::ChunkIndex c) { near_kv_.poison(c); });
  }
  ~WindowDrafts() {
    tree_.set_free_sink({});
    near_.set_free_sink({});
  }

  void operate() {
    const int what = random_.uniform(0, 19);
    if (what == 0 || live_.empty()) {
      if (live_.size() < 6) join();
    } else if (what == 1 && live_.size() < 6) {
      Sequence& from = live_[random_.index(live_.size())];
      live_.push_back(
          from.fork(random_.chance(0.5) ? Sequence::whole : 1 + random_.index(from.size())));
    } else if (what == 2) {
      leave();
    } else if (what < 8 && !in_flight_.empty()) {
      finish();
    } else {
      step();
    }
    check_invariants(tree_);
    REQUIRE(chunkattn::detail::WindowAccess::group(near_).is_consistent());
  }
  /// Nothing is held at the end.
  void end() {
    while (!in_flight_.empty()) finish();
    tree_.device_idle();
    live_.clear();
    if (tree_.stats().leaving_sequences == 0)  // else copies that nobody made hold some
      CHECK(near_.stats().used_chunks == near_.stats().cached_chunks);
    recomputed = near_.stats().recomputed_tokens;
  }

 private:
  struct Entry {
    Parents parents;
    Tokens drafts;
  };
  struct Flight {
    typename Tree::InFlight step;
    std::vector<Entry> entries;
  };
  static std::size_t to_size(std::int64_t n) { return static_cast<std::size_t>(n); }

  Tokens random_tokens(int count) {
    Tokens tokens(to_size(count));
    for (int& token : tokens) token = random_.uniform(0, 2);
    return tokens;
  }
  void join() {
    Tokens prompt = random_tokens(random_.uniform(1, 150));
    if (!live_.empty() && random_.chance(0.7)) {
      const Tokens other = live_[random_.index(live_.size())].tokens();
      std::copy_n(other.begin(), random_.index(std::min(other.size(), prompt.size()) + 1),
                  prompt.begin());
    }
    live_.push_back(tree_.insert(prompt));
  }
  void leave() {
    if (live_.empty()) return;
    std::swap(live_[random_.index(live_.size())], live_.back());
    live_.pop_back();
  }
  bool resume(Sequence& one) {
    if (near_.is_ready(one)) return true;
    if (one.num_pending() > 0) return false;
    try {
      near_.resume(one);
    } catch (const chunkattn::OutOfChunks&) {
      return ++refused, false;
    } catch (const chunkattn::InvalidArgument&) {  // it is in a step
      return false;
    }
    return true;
  }
  void step() {
    if (in_flight_.size() >= 2) return finish();
    auto step = tree_.begin_step();
    std::vector<PathHash> rows;
    std::vector<Entry> entries;
    for (Sequence& one : live_) {
      if (one.num_reserved() > 0 || one.num_uncomputed() == 0 || random_.chance(0.2) ||
          !resume(one))
        continue;
      Entry entry;
      const std::size_t begin = one.num_scheduled(), before = rows.size();
      std::size_t known = one.num_uncomputed();
      if (random_.chance(0.7)) {
        const int count = random_.uniform(0, 7);
        entry = {random_parents(random_, count), random_tokens(count)};
      } else {
        known = std::min(known, to_size(random_.uniform(1, 40)));
      }
      const std::size_t all = step.num_rows() + known + entry.drafts.size();
      if (!step.add(one, known + entry.drafts.size(),
                    {.tokens = entry.drafts, .parents = entry.parents}))
        continue;
      REQUIRE(step.num_rows() == all);
      const Tokens tokens = one.tokens();
      PathHash path = 1;
      for (std::size_t i = 0; i < begin + known; ++i) {
        path = extended(path, tokens[i]);
        if (i >= begin) rows.push_back(path);
      }
      for (std::size_t d = 0; d < entry.drafts.size(); ++d) {
        const int parent = entry.parents[d];
        rows.push_back(
            extended(parent < 0 ? path : rows[before + known + to_size(parent)], entry.drafts[d]));
      }
      entries.push_back(std::move(entry));
    }
    if (rows.empty()) return;
    chunkattn::AttentionPlan& plan = plans_[random_.index(2)];
    auto view = plan.build(step);
    std::optional<chunkattn::LiveView> near;
    for (int n = random_.chance(0.1) ? 2 : 1; n > 0; --n) {
      view = plan.build(step);
      const std::size_t needed = near_.chunks_needed(step), available = near_.chunks_available();
      try {
        near = near_.view(view);
        CHECK(available <= near_.chunks_available() + needed);
      } catch (const chunkattn::OutOfChunks&) {
        CHECK(needed > available);
        ++refused;
        return leave();
      }
    }
    if (random_.chance(0.05)) return;
    compute(rows, view, *near);
    copied += to_size(near->num_copies);
    in_flight_.push_back({std::move(step).submit(), std::move(entries)});
    if (random_.chance(0.7)) finish();
  }
  void compute(const std::vector<PathHash>& rows, const chunkattn::LiveView& whole,
               const chunkattn::LiveView& near) {
    std::vector<float> k(rows.size() * dim), v(k), q(k.size() * heads), expected(q), out(q);
    for (std::size_t r = 0; r < rows.size(); ++r)
      for (int i = 0; i < dim; ++i) {
        k[r * dim + to_size(i)] = element(rows[r], 0, 0, i);
        v[r * dim + to_size(i)] = element(rows[r], 0, 1, i);
        for (int h = 0; h < heads; ++h)
          q[(r * heads + to_size(h)) * dim + to_size(i)] = 2 * element(rows[r], 0, 2 + h, i);
      }
    attention_.write(full_kv_.layer(0), whole, k, v);
    attention_.run(full_kv_.layer(0), whole, window_, q, expected);
    attention_.write(near_kv_.layer(0), near, k, v);
    attention_.run(near_kv_.layer(0), near, window_, q, out);
    CHECK(out == expected);
  }
  void finish() {
    Flight flight = std::move(in_flight_.front());
    in_flight_.pop_front();
    if (random_.chance(0.04)) {
      {
        auto lost = std::move(flight.step);
      }
      if (random_.chance(0.5) || num_lost_++ % 2 == 1) tree_.device_idle();
      return;
    }
    auto finished = std::move(flight.step).finish();
    for (const auto& row : finished.rows()) {
      const Entry& entry = flight.entries[to_size(row.index)];
      const int leaf = random_.uniform(-1, static_cast<int>(entry.drafts.size()) - 1);
      Tokens outputs = branch_tokens(entry.parents, entry.drafts, leaf);
      branches += outputs.size() > 1;
      outputs.push_back(random_.uniform(0, 2));
      finished.commit(row, outputs, leaf);
    }
  }

  Random random_;
  int window_;
  Attention attention_;
  Tree tree_;
  chunkattn::WindowedLayers<Tree> near_;
  chunkattn::KvCache<chunkattn::Cpu, float> full_kv_, near_kv_;
  chunkattn::AttentionPlan plans_[2];
  std::vector<Sequence> live_;
  std::deque<Flight> in_flight_;
  int num_lost_ = 0;
};

}  // namespace test
