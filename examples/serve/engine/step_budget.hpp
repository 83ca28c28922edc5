// StepBudget: the most tokens of prompts in a step.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>

namespace serve {

/// From what tokens have cost so far, as many as take about a given time. Doubled and halved only:
/// oneDNN makes code for each number of rows.
class StepBudget {
 public:
  static constexpr std::size_t least = 64;  ///< below, products wait for memory

  StepBudget(std::size_t most, double seconds)
      : most_(most), seconds_(seconds), tokens_(std::isinf(seconds) ? most : bounded(least)) {}

  [[nodiscard]] std::size_t tokens() const { return tokens_; }

  /// A step that was mostly prompts.
  void computed(std::size_t rows, double seconds) {
    if (std::isinf(seconds_) || rows < std::min(tokens_, least)) return;  // a rest says little
    const double fit = seconds_ / seconds * static_cast<double>(rows);
    if (fit < static_cast<double>(tokens_))
      tokens_ = bounded(tokens_ / 2);
    else if (fit >= 2.5 * static_cast<double>(tokens_))  // more than it takes, or it would waver
      tokens_ = bounded(tokens_ * 2);
  }

 private:
  [[nodiscard]] std::size_t bounded(std::size_t tokens) const {
    return std::min(std::max(tokens, least), most_);
  }

  std::size_t most_;
  double seconds_;
  std::size_t tokens_;
};

}  // namespace serve
