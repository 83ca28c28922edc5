// K and V rows that go through write(), and a second way by which the oracle gets the same ones.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <type_traits>
#include <vector>

#include "attention_case.hpp"

namespace test {

/// NaN everywhere: as values, or as the scales of 8-bit rows.
template <class T>
void poison_kv(const chunkattn::KvView<T>& kv) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (int chunk = 0; chunk < kv.num_chunks; ++chunk) {
    for (int head = 0; head < kv.num_kv_heads; ++head) {
      for (int t = 0; t < kv.chunk_size; ++t) {
        if constexpr (chunkattn::has_row_scales<T>)
          *kv.k_row_scale(chunk, head, t) = *kv.v_row_scale(chunk, head, t) = nan;
        if constexpr (!std::is_same_v<T, std::int8_t>) {
          std::fill_n(kv.k_row(chunk, head, t), kv.head_dim, chunkattn::from_float<T>(nan));
          std::fill_n(kv.v_row(chunk, head, t), kv.dim_of_v(), chunkattn::from_float<T>(nan));
        }
      }
    }
  }
}

/// K and V of every token that some row of a plan sees.
class WrittenRows {
 public:
  /// \param largest  0, or values that 8 bits hold exactly: a power of two times integers up to
  ///                 127, or times float8_e4m3 up to 448, the largest of which is in every row
  WrittenRows(Random& random, const RandomPlan& plan, int heads, int head_dim, int largest,
              std::optional<int> value_dim = {})
      : chunk_size_(plan.chunk_size),
        heads_(heads),
        head_dim_(head_dim),
        value_dim_(value_dim.value_or(head_dim)) {
    plan.for_each_visible([&](int chunk, int offset) { targets_.push_back({chunk, offset}); });
    const auto less = [](auto a, auto b) {
      return a.chunk != b.chunk ? a.chunk < b.chunk : a.offset < b.offset;
    };
    const auto same = [](auto a, auto b) { return a.chunk == b.chunk && a.offset == b.offset; };
    std::sort(targets_.begin(), targets_.end(), less);
    targets_.erase(std::unique(targets_.begin(), targets_.end(), same), targets_.end());
    random.shuffle(targets_);
    k_.resize(targets_.size() * row_size(head_dim_));
    v_.resize(targets_.size() * row_size(value_dim_));
    for (auto* values : {&k_, &v_}) {
      random.fill(std::span(*values));
      const auto dim = static_cast<std::size_t>(values == &k_ ? head_dim_ : value_dim_);
      for (std::size_t row = 0; largest > 0 && row < values->size(); row += dim) {
        const float step = random.pick({1.0f, 2.0f, 4.0f}) * (largest == 127 ? 0x1p-7f : 0x1p-9f);
        for (std::size_t i = row; i < row + dim; ++i) {
          auto number = static_cast<float>(random.uniform(-largest, largest));
          if (largest == 448) number = chunkattn::to_float(chunkattn::to_float8_e4m3(number));
          (*values)[i] = step * number;
        }
        (*values)[row + random.index(dim)] =
            step * static_cast<float>(random.pick({largest, -largest}));
      }
    }
  }

  /// By write(), a few rows at a time.
  template <class Attention, class T>
  void write(Random& random, Attention& attention, const chunkattn::KvView<T>& kv) const {
    for (std::size_t begin = 0; begin < targets_.size();) {
      const std::size_t count = std::min(targets_.size() - begin, 1 + random.index(20));
      chunkattn::PlanView plan;
      plan.num_rows = static_cast<std::int32_t>(count);
      plan.chunk_size = chunk_size_;
      plan.writes = &targets_[begin];
      attention.write(
          kv, chunkattn::LiveView::unchecked(plan),
          std::span(k_).subspan(begin * row_size(head_dim_), count * row_size(head_dim_)),
          std::span(v_).subspan(begin * row_size(value_dim_), count * row_size(value_dim_)));
      begin += count;
    }
  }

  /// K alone, where V is in it.
  template <class Attention, class T>
  void write_k(Attention& attention, const chunkattn::KvView<T>& kv) const {
    chunkattn::PlanView plan;
    plan.num_rows = static_cast<std::int32_t>(targets_.size());
    plan.chunk_size = chunk_size_;
    plan.writes = targets_.data();
    attention.write(kv, chunkattn::LiveView::unchecked(plan), k_);
  }

  /// By the test itself, as floats that were rounded to T (8-bit values are exact).
  template <class T>
  void store(const chunkattn::KvView<float>& kv) const {
    const auto rounded = [](float value) {
      if constexpr (chunkattn::has_row_scales<T>)
        return value;
      else
        return chunkattn::to_float(chunkattn::from_float<T>(value));
    };
    std::size_t at_k = 0, at_v = 0;
    for (const chunkattn::PlanView::WriteTarget& target : targets_) {
      for (int head = 0; head < heads_; ++head) {
        for (int i = 0; i < head_dim_; ++i)
          kv.k_row(target.chunk, head, target.offset)[i] = rounded(k_[at_k++]);
        for (int i = 0; i < value_dim_; ++i)
          kv.v_row(target.chunk, head, target.offset)[i] = rounded(v_[at_v++]);
      }
    }
  }

 private:
  [[nodiscard]] std::size_t row_size(int dim) const {
    return static_cast<std::size_t>(heads_) * static_cast<std::size_t>(dim);
  }

  int chunk_size_, heads_, head_dim_, value_dim_;
  std::vector<chunkattn::PlanView::WriteTarget> targets_;
  std::vector<float> k_, v_;  // [target][head][head_dim or value_dim]
};

}  // namespace test
