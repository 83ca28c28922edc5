// PromptScores: what rows of prompts said of their next tokens, kept with the tree's K/V.
#pragma once

#include <algorithm>
#include <array>
#include <chunkattn/cache/annotations.hpp>
#include <cstddef>
#include <span>
#include <vector>

#include "engine.hpp"
#include "work.hpp"

namespace serve {

/// Log-probabilities of prompts, by token: the token's own and those of the most likely ones in its
/// place. They are written where a prompt is scored, and what was written once is what later
/// requests are told: with most products another batch would round otherwise.
template <class Tree>
class PromptScores {
 public:
  using Sequence = typename Tree::Sequence;
  static constexpr int most = 5;  ///< of the most likely ones

  explicit PromptScores(Tree& tree)
      : column_(tree, {.lag = 1, .name = "log-probabilities: own, 5 most likely"}) {}

  /// Whether a request's scores may be read here: it wants no more than there is.
  [[nodiscard]] static bool has_all_of(const Request& request) { return request.logprobs <= most; }

  /// Tells a request what is known of its prompt, which is what the sequence has, from its next
  /// score on. Returns of how many tokens.
  std::size_t recall(LiveRequest& job, const Sequence& sequence) const {
    if (!has_all_of(job.request)) return 0;
    const std::size_t begin = job.next_scored();
    std::vector<Row> rows(column_.first_missing(sequence, begin) - begin);
    column_.read(sequence, begin, std::span<Row>(rows));
    for (const Row& row : rows) job.prompt_logprobs.push_back(row.said(job.request.logprobs));
    return rows.size();
  }
  /// Keeps what a finished step computed of a position of a prompt, if nothing is known of it.
  /// Returns what its request is told.
  /// \param computed  logprobs_of() with wanted()
  [[nodiscard]] std::vector<TokenLogprob> keep(const Sequence& sequence, std::size_t position,
                                               const Request& request,
                                               std::vector<TokenLogprob> computed) {
    Row row(computed);
    if (column_.first_missing(sequence, position) == position)
      column_.set(sequence, position, row);
    else
      column_.read(sequence, position, std::span<Row>(&row, 1));
    return has_all_of(request) ? row.said(request.logprobs) : computed;
  }
  /// So many of the most likely ones are to be computed.
  [[nodiscard]] static int wanted(const Request& request) {
    return std::max(request.logprobs, most);
  }

  [[nodiscard]] chunkattn::KvCompanion<Sequence>* companion() { return &column_; }

 private:
  struct Row {
    Row() = default;
    explicit Row(const std::vector<TokenLogprob>& computed) {
      std::copy_n(computed.begin(), std::min(computed.size(), all.size()), all.begin());
    }
    /// The token's own, and so many of the most likely ones.
    [[nodiscard]] std::vector<TokenLogprob> said(int count) const {
      const auto end = std::find_if(all.begin() + 1, all.begin() + 1 + count,
                                    [](const TokenLogprob& one) { return one.token < 0; });
      return {all.begin(), end};
    }
    std::array<TokenLogprob, 1 + most> all{none, none, none, none, none, none};
  };
  static constexpr TokenLogprob none{-1, 0};  ///< of a vocabulary that has fewer

  chunkattn::Annotations<Tree, Row> column_;
};

}  // namespace serve
