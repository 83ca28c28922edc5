// Random plans and K/V for kernel tests, without a tree: every shape a kernel must accept.
//
// Rows outside what some query row sees are filled with NaN, so a kernel that lets one of them
// reach its result is caught.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

#include "chunkattn/kv_view.hpp"
#include "chunkattn/plan_view.hpp"
#include "random.hpp"

namespace test {

enum class Share { none, some, all };

struct RandomPlanOptions {
  Share share = Share::some;
  int num_sequences = 8;
  int chunk_size = 64;
  int max_length = 300;         ///< tokens of a segment, at most
  int max_depth = 4;            ///< levels of shared segments
  int max_queries = 1;          ///< query rows per sequence; 1: decode
  double split_chance = 0.3;    ///< a segment continues in the middle of its parent's last chunk
  double middle_chance = 0.3;   ///< a segment's first piece begins in the middle of a chunk
  double reserve_chance = 0.5;  ///< a leaf reaches past what its rows see
  int unused_chunks = 3;        ///< chunks that no piece uses
};

struct RandomPlan : chunkattn::PlanView::Arrays {
  int num_chunks = 0;

  [[nodiscard]] chunkattn::LiveView view() const {
    return chunkattn::LiveView::unchecked(Arrays::view());
  }
  [[nodiscard]] int num_rows() const { return static_cast<int>(row_token.size()); }
  [[nodiscard]] bool any_shared() const {
    return std::any_of(segments.begin(), segments.end(),
                       [](const auto& segment) { return segment.num_sequences > 1; });
  }

  /// Calls f(chunk, offset) for each K/V row that at least one query row sees (some of them twice).
  template <class F>
  void for_each_visible(F&& f) const {
    for (const chunkattn::PlanView::Segment& segment : segments) {
      std::int32_t kv_len = 0;
      for (int row = segment.row_begin; row < segment.row_end; ++row)
        kv_len = std::max(kv_len, row_kv_len[static_cast<std::size_t>(row)]);
      for (int p = 0; p < segment.num_pieces; ++p) {
        const auto& piece = pieces[static_cast<std::size_t>(segment.piece_begin + p)];
        const int seen = chunkattn::visible_length(piece, kv_len);
        for (int t = 0; t < seen; ++t) f(piece.chunk, piece.begin + t);
      }
    }
  }
};

namespace detail {

/// Builds a plan depth first, parents before children, as AttentionPlan does.
class PlanBuilder {
 public:
  PlanBuilder(Random& random, const RandomPlanOptions& options)
      : random_(random), options_(options) {}

  RandomPlan build() {
    plan_.chunk_size = options_.chunk_size;
    const int n = options_.num_sequences;
    if (options_.share == Share::all && n > 1) {
      branch(n, -1, 0, 0);
    } else if (options_.share == Share::none) {
      for (int i = 0; i < n; ++i) leaf(-1, 0);
    } else {
      for (int left = n; left > 0;) {  // a forest
        const int take = random_.uniform(1, left);
        take > 1 ? branch(take, -1, 0, 0) : leaf(-1, 0);
        left -= take;
      }
    }
    finish();
    return std::move(plan_);
  }

 private:
  // A shared segment of `n` sequences: some may end in it, the others continue.
  void branch(int n, int parent, int position, int depth) {
    const int self = segment(parent, position, random_.uniform(1, options_.max_length), n);
    const chunkattn::PlanView::Segment made = plan_.segments[static_cast<std::size_t>(self)];
    const int end = made.position + made.length;
    int left = n;
    while (left > 0 && random_.chance(0.15)) {  // ends here: its queries lie inside the segment
      queries(self, random_.uniform(1, end));
      --left;
    }
    while (left > 0) {
      int take = 1;
      if (depth + 1 < options_.max_depth && left > 1 && random_.chance(0.5))
        take = random_.uniform(1, left);
      take > 1 ? branch(take, self, end, depth + 1) : leaf(self, end);
      left -= take;
    }
    plan_.segments[static_cast<std::size_t>(self)].row_end = plan_.num_rows();
  }

  // A private segment with the queries of its sequence at its end.
  void leaf(int parent, int position) {
    const int length = random_.uniform(1, options_.max_length);
    const int self = segment(parent, position, length, 1);
    const int reserved =
        random_.chance(options_.reserve_chance) ? random_.uniform(0, length - 1) : 0;
    queries(self, position + length - reserved);
    plan_.segments[static_cast<std::size_t>(self)].row_end = plan_.num_rows();
  }

  // Query rows at consecutive positions, the last of which sees `kv_len` positions.
  void queries(int deepest, int kv_len) {
    const int count = std::min(random_.uniform(1, options_.max_queries), kv_len);
    for (int i = 0; i < count; ++i) {
      plan_.row_kv_len.push_back(kv_len - count + 1 + i);
      plan_.row_segment.push_back(deepest);
      plan_.row_token.push_back(plan_.num_rows());
    }
  }

  int segment(int parent, int position, int length, int num_sequences) {
    while (random_.chance(0.2)) plan_.pieces.push_back({chunkattn::no_chunk, -1, -1, -1});  // a gap
    chunkattn::PlanView::Segment made{};
    made.row_begin = plan_.num_rows();
    made.position = position;
    made.length = length;
    made.parent = parent;
    made.num_sequences = num_sequences;
    made.piece_begin = static_cast<std::int32_t>(plan_.pieces.size());
    const int chunk_size = options_.chunk_size;
    int chunk = -1;
    int begin = 0;
    if (parent >= 0 && !continued_[static_cast<std::size_t>(parent)] &&
        random_.chance(options_.split_chance)) {
      continued_[static_cast<std::size_t>(parent)] =
          true;  // one child only has the rest of the chunk
      const auto& above = plan_.segments[static_cast<std::size_t>(parent)];
      const auto& last =
          plan_.pieces[static_cast<std::size_t>(above.piece_begin + above.num_pieces - 1)];
      begin = last.begin + last.length;
      chunk = last.chunk;
    }
    if (chunk < 0 || begin >= chunk_size) {
      chunk = plan_.num_chunks++;
      begin = random_.chance(options_.middle_chance) ? random_.uniform(0, chunk_size - 1) : 0;
    }
    for (int done = 0; done < length;) {
      const int take = std::min(length - done, chunk_size - begin);
      // A run may leave the rest of a chunk unused: what follows stands in another one.
      const int used = random_.chance(0.1) ? random_.uniform(1, take) : take;
      plan_.pieces.push_back({chunk, begin, used, position + done});
      ++made.num_pieces;
      done += used;
      chunk = plan_.num_chunks++;
      begin = random_.chance(0.1) ? random_.uniform(0, chunk_size - 1) : 0;
    }
    --plan_.num_chunks;  // the last one taken ahead is not used
    plan_.segments.push_back(made);
    continued_.push_back(false);
    return static_cast<int>(plan_.segments.size()) - 1;
  }

  // Chunks in random order, callers' tokens in random order, a write target for each row.
  void finish() {
    plan_.num_chunks += options_.unused_chunks;
    std::vector<std::int32_t> order(static_cast<std::size_t>(plan_.num_chunks));
    for (std::size_t i = 0; i < order.size(); ++i) order[i] = static_cast<std::int32_t>(i);
    random_.shuffle(order);
    for (auto& piece : plan_.pieces)
      if (piece.chunk >= 0) piece.chunk = order[static_cast<std::size_t>(piece.chunk)];
    random_.shuffle(plan_.row_token);
    plan_.writes.assign(plan_.row_token.size(), {chunkattn::no_chunk, 0});
    for (std::size_t row = 0; row < plan_.row_token.size(); ++row) {
      const int position = plan_.row_kv_len[row] - 1;
      auto& target = plan_.writes[static_cast<std::size_t>(plan_.row_token[row])];
      for (int s = plan_.row_segment[row]; s >= 0;
           s = plan_.segments[static_cast<std::size_t>(s)].parent) {
        const auto& segment = plan_.segments[static_cast<std::size_t>(s)];
        if (segment.num_sequences > 1) continue;  // shared slots are written already
        for (int p = 0; p < segment.num_pieces; ++p) {
          const auto& piece = plan_.pieces[static_cast<std::size_t>(segment.piece_begin + p)];
          if (position >= piece.position && position < piece.position + piece.length)
            target = {piece.chunk, piece.begin + position - piece.position};
        }
      }
    }
    plan_.segments_version = random_.bits();
    plan_.pieces_version = random_.bits();
  }

  Random& random_;
  RandomPlanOptions options_;
  RandomPlan plan_;
  std::vector<bool> continued_;  // by segment: a child continues in its last chunk
};

}  // namespace detail

inline RandomPlan make_random_plan(Random& random, const RandomPlanOptions& options) {
  return detail::PlanBuilder(random, options).build();
}

/// Fills K and V: normal numbers where some query row looks, NaN everywhere else. The view must be
/// of host memory; its strides are up to the caller.
template <class T>
void fill_kv(Random& random, const RandomPlan& plan, const chunkattn::KvView<T>& kv,
             float k_deviation = 1.0f, float v_deviation = 1.0f) {
  const T poison = chunkattn::from_float<T>(std::numeric_limits<float>::quiet_NaN());
  const auto for_row = [&](int chunk, int offset, auto&& value_k, auto&& value_v) {
    for (int head = 0; head < kv.num_kv_heads; ++head) {
      T* k = kv.k_row(chunk, head, offset);
      T* v = kv.v_row(chunk, head, offset);
      for (int i = 0; i < kv.head_dim; ++i) k[i] = value_k();
      for (int i = 0; i < kv.dim_of_v(); ++i) v[i] = value_v();
    }
  };
  for (int chunk = 0; chunk < kv.num_chunks; ++chunk)
    for (int offset = 0; offset < kv.chunk_size; ++offset)
      for_row(chunk, offset, [&] { return poison; }, [&] { return poison; });
  plan.for_each_visible([&](int chunk, int offset) {
    for_row(
        chunk, offset, [&] { return chunkattn::from_float<T>(k_deviation * random.normal()); },
        [&] { return chunkattn::from_float<T>(v_deviation * random.normal()); });
  });
}

/// K and V memory of one layer in the layout [chunk][kv_head][token][head_dim], K and V apart (V
/// with value_dim, if that is set).
template <class T>
struct KvStorage {
  std::vector<T> k, v;
  chunkattn::KvView<T> view;

  KvStorage(int num_chunks, int num_kv_heads, int chunk_size, int head_dim,
            std::optional<int> value_dim = {}) {
    const auto rows = static_cast<std::size_t>(num_chunks) *
                      static_cast<std::size_t>(num_kv_heads) * static_cast<std::size_t>(chunk_size);
    k.resize(rows * static_cast<std::size_t>(head_dim));
    v.resize(rows * static_cast<std::size_t>(value_dim.value_or(head_dim)));
    view = chunkattn::make_kv_view(k.data(), v.data(),
                                   {num_chunks, num_kv_heads, chunk_size, head_dim, value_dim});
  }
};

}  // namespace test
