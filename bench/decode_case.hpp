// One decode case: a batch over a prefix tree, K/V for enough layers that each call finds its data
// cold, and the plans of the different ways to compute it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "chunkattn/attention_plan.hpp"
#include "chunkattn/kv_cache.hpp"
#include "chunkattn/prefix_tree.hpp"

namespace bench {

/// A batch of sequences, each a path of (id, tokens): equal ids from the root on are shared. The
/// last query_tokens of each are computed in the step: 1 is decoding, more is prefill.
struct Batch {
  struct Part {
    std::uint32_t id;
    int tokens;
  };
  std::vector<std::vector<Part>> sequences;
  int query_tokens = 1;

  [[nodiscard]] int size() const { return static_cast<int>(sequences.size()); }
};

/// `count` sequences with one common prefix, each with `private_tokens` of its own.
inline Batch one_prefix(int count, int shared_tokens, int private_tokens) {
  Batch batch;
  for (int i = 0; i < count; ++i) {
    batch.sequences.emplace_back();
    if (shared_tokens > 0) batch.sequences.back().push_back({1u, shared_tokens});
    if (private_tokens > 0)
      batch.sequences.back().push_back({static_cast<std::uint32_t>(i) + 2u, private_tokens});
  }
  return batch;
}

/// A plan in which nothing is shared: each row reads its whole path by itself, from the same
/// chunks. What an engine with shared pages and an ordinary paged kernel does.
class UnsharedPlan {
 public:
  explicit UnsharedPlan(const chunkattn::PlanView& plan) : view_(plan) {
    for (int row = 0; row < plan.num_rows; ++row) {
      std::vector<int> path;
      for (int s = plan.row_segment[row]; s >= 0; s = plan.segments[s].parent) path.push_back(s);
      chunkattn::PlanView::Segment segment{};
      segment.row_begin = row;
      segment.row_end = row + 1;
      segment.piece_begin = static_cast<std::int32_t>(pieces_.size());
      segment.parent = -1;
      segment.num_sequences = 1;
      for (auto s = path.rbegin(); s != path.rend(); ++s) {
        const chunkattn::PlanView::Segment& part = plan.segments[*s];
        pieces_.insert(pieces_.end(), plan.pieces + part.piece_begin,
                       plan.pieces + part.piece_begin + part.num_pieces);
        segment.length += part.length;
      }
      segment.num_pieces = static_cast<std::int32_t>(pieces_.size()) - segment.piece_begin;
      segments_.push_back(segment);
      row_segment_.push_back(row);
    }
    view_.num_segments = static_cast<std::int32_t>(segments_.size());
    view_.num_pieces = static_cast<std::int32_t>(pieces_.size());
    view_.segments = segments_.data();
    view_.pieces = pieces_.data();
    view_.row_segment = row_segment_.data();
  }

  [[nodiscard]] chunkattn::LiveView view() const { return chunkattn::LiveView::unchecked(view_); }

 private:
  chunkattn::PlanView view_;
  std::vector<chunkattn::PlanView::Segment> segments_;
  std::vector<chunkattn::Piece> pieces_;
  std::vector<std::int32_t> row_segment_;
};

/// The batch in a tree, with its query tokens in an open step.
/// \tparam share  false: each sequence is a tenant of its own, so nothing is found in common
template <int ChunkSize>
class PlannedBatch {
 public:
  using Tree = chunkattn::PrefixTree<std::uint32_t, ChunkSize>;

  PlannedBatch(const Batch& batch, bool share) {
    std::uint64_t tenant = 0;
    for (const auto& parts : batch.sequences) {
      std::vector<std::uint32_t> prompt;
      for (const auto& part : parts)
        for (int i = 0; i < part.tokens; ++i)
          prompt.push_back(part.id * 65536u + static_cast<std::uint32_t>(i));
      chunkattn::InsertOptions options;
      if (!share) options.name_space.tenant = ++tenant;
      sequences_.push_back(tree_.insert(std::span<const std::uint32_t>(prompt), options));
      // K/V is filled in later; the last tokens are the query.
      chunkattn::TokenRange range = sequences_.back().loadable();
      range.length =
          std::min(range.end(), static_cast<std::int32_t>(prompt.size()) - batch.query_tokens) -
          range.begin;
      if (range.length > 0) sequences_.back().mark_loaded(range);
    }
    step_.emplace(tree_.begin_step());
    for (auto& sequence : sequences_)
      if (!step_->add(sequence, batch.query_tokens)) std::abort();
    view_ = plan_.build(*step_);
  }

  [[nodiscard]] const Tree& tree() const { return tree_; }
  [[nodiscard]] const chunkattn::LiveView& view() const { return view_; }

  /// K/V tokens that are read once each, and (query row, token) pairs.
  struct Work {
    double tokens = 0;
    double pairs = 0;
  };
  /// \param window  keys that a row sees, the last ones; 0: all
  [[nodiscard]] Work work(int window = 0) const {
    Work work;
    const chunkattn::PlanView& view = view_;
    for (int s = 0; s < view.num_segments; ++s) {
      const chunkattn::PlanView::Segment& segment = view.segments[s];
      std::int32_t begin = segment.length, end = 0;
      for (int row = segment.row_begin; row < segment.row_end; ++row) {
        const std::int32_t kv_len = view.row_kv_len[row];
        const std::int32_t first =
            std::max(0, (window > 0 ? kv_len - window : 0) - segment.position);
        const std::int32_t last = std::min(kv_len - segment.position, segment.length);
        work.pairs += std::max(0, last - first);
        begin = std::min(begin, first);
        end = std::max(end, last);
      }
      work.tokens += std::max(0, end - begin);
    }
    return work;
  }

 private:
  Tree tree_{{}, {}, {.retains = false}};
  std::vector<typename Tree::Sequence> sequences_;
  std::optional<typename Tree::Step> step_;
  chunkattn::AttentionPlan plan_;
  chunkattn::LiveView view_;
};

/// Fills `count` elements with cheap random numbers of about unit variance.
template <class T>
void fill_random(T* to, std::size_t count, std::uint64_t seed) {
  std::uint64_t state = seed * 0x9e3779b97f4a7c15ull + 1;
  const auto next = [&] {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state;
  };
  if constexpr (std::is_same_v<T, std::int8_t>) {
    for (std::size_t i = 0; i < count; ++i) to[i] = static_cast<std::int8_t>(next() >> 56);
  } else {
    // A table of rounded numbers: quick for every element type.
    static const std::vector<T> table = [] {
      std::mt19937 engine(1);
      std::normal_distribution<float> normal;
      std::vector<T> values(4096);
      for (T& value : values) value = chunkattn::from_float<T>(normal(engine));
      return values;
    }();
    for (std::size_t i = 0; i < count; ++i) to[i] = table[next() >> 52];
  }
}

/// Fills all of a layer's chunks.
template <class T>
void fill_layer(const chunkattn::KvView<T>& view, std::uint64_t seed) {
  const auto row =
      static_cast<std::size_t>(view.chunk_size) * static_cast<std::size_t>(view.head_dim);
  for (int chunk = 0; chunk < view.num_chunks; ++chunk) {
    for (int head = 0; head < view.num_kv_heads; ++head) {
      fill_random(view.k_row(chunk, head, 0), row, ++seed);
      fill_random(view.v_row(chunk, head, 0), row, ++seed);
      if constexpr (chunkattn::has_row_scales<T>) {
        std::fill_n(view.k_row_scale(chunk, head, 0), view.chunk_size, 1.0f / 64);
        std::fill_n(view.v_row_scale(chunk, head, 0), view.chunk_size, 1.0f / 64);
      }
    }
  }
}

}  // namespace bench
