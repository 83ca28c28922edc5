// The reply to one request for scores.
#pragma once

#include <httplib.h>

#include <chrono>
#include <functional>
#include <string>

#include "api_reply.hpp"
#include "api_request.hpp"
#include "scoring.hpp"
#include "service.hpp"

namespace serve {

/// Comes as a whole, when all items are scored. To drop it early is to cancel them.
class ScoreAnswer {
 public:
  /// \param at_end  called with one line about what was scored
  /// \throws Refused where there are not places for all items
  ScoreAnswer(ReplyHead head, ScoreRequest request, Service& service,
              std::function<void(const std::string&)> at_end);

  /// Waits for the scores, for a time. False where that takes longer.
  [[nodiscard]] bool wait(std::chrono::milliseconds limit) { return scoring_.wait(limit); }
  /// \pre wait() was true; \throws Refused for the first item that failed: all fail with one
  [[nodiscard]] std::string body();

  /// As Answer has it, for a client that may have closed: the status is sent before the scores are
  /// known, and what one answers that has closed is a reset.
  [[nodiscard]] bool go_on(httplib::DataSink& sink);
  [[nodiscard]] bool ended() const { return ended_; }

 private:
  const ReplyHead head_;
  const bool softmax_;
  Usage usage_;
  bool ended_ = false;
  std::function<void(const std::string&)> at_end_;
  Scoring scoring_;
};

}  // namespace serve
