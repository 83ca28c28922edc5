// Scoring: log-probabilities of tokens behind prompts, of many prompts at once. They are computed
// side by side, so that what they begin with in common is computed and read once.
#pragma once

#include <chrono>
#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "service.hpp"

namespace serve {

/// What became of one item, which fails alone.
struct ItemScore {
  std::vector<float> logprobs;     ///< of each token of a continuation
  bool is_greedy = false;          ///< whether each of these is the most likely one in its place
  std::vector<float> labels;       ///< log-probabilities of the labels
  std::optional<Refused> failure;  ///< why there is none of this

  /// Of the continuation as a whole.
  [[nodiscard]] double sum() const;
};

/// Scores the tokens of a prompt from `begin` on, each behind all before it.
/// \pre 1 <= begin <= prompt.size()
[[nodiscard]] Job continuation_job(std::vector<int> prompt, std::size_t begin,
                                   std::string cache_salt = {});
/// Scores each label as the token behind the prompt.
[[nodiscard]] Job label_job(std::vector<int> prompt, std::vector<int> labels,
                            std::string cache_salt = {});

/// Items that are scored. To drop it is to cancel them.
class Scoring {
 public:
  /// \param items  of continuation_job() and label_job()
  /// \throws Refused where there are not places for all of them
  Scoring(Service& service, std::vector<Job> items)
      : tickets_(service.submit_apart(std::move(items))) {}

  /// Waits for more, for a time. True when all items have ended.
  [[nodiscard]] bool wait(std::chrono::milliseconds limit);
  /// In the order of the items.
  [[nodiscard]] const std::vector<ItemScore>& scores() const { return scores_; }
  /// Tokens of all prompts that were found in the cache.
  [[nodiscard]] std::size_t cached() const;

 private:
  std::vector<Service::Ticket> tickets_;
  std::vector<ItemScore> scores_;  // of those that have ended: the first
};

/// The same for whoever has nothing else to do.
[[nodiscard]] std::vector<ItemScore> score(Service& service, std::vector<Job> items);

}  // namespace serve
