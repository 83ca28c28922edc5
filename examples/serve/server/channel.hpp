// Channel: what the engine's thread sends a request.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "../engine/engine.hpp"

namespace serve {

/// Why a request is not served.
class Refused : public std::runtime_error {
 public:
  enum class Reason {
    full,     ///< the queue is full; try again later
    late,     ///< it has waited for memory as long as it may; try again later
    closing,  ///< the server ends
    invalid,  ///< it can never run
    failed,   ///< the engine is broken
    error     ///< the engine cannot do this one, and continues
  };
  Refused(Reason reason, const std::string& message)
      : std::runtime_error(message), reason_(reason) {}
  [[nodiscard]] Reason reason() const { return reason_; }

 private:
  Reason reason_;
};

/// A generated token with the log-probabilities that were asked for.
struct ScoredToken {
  int previous = -1;                   ///< the token before it
  std::size_t offset = 0;              ///< characters of the text before it
  std::vector<TokenLogprob> logprobs;  ///< its own, then those of the most likely ones
  bool of_prompt = false;              ///< of a prompt that is repeated
};

/// More of the text of one choice.
struct Piece {
  int choice = 0;
  std::string text;                      ///< whole characters
  std::size_t tokens = 0;                ///< that were generated for it, held back text included
  Finish finish = Finish::none;          ///< not none: the last piece of this choice
  std::string stop_string = {};          ///< that the text ended before; empty: it did not
  int stop_token = -1;                   ///< of the request, that ended it; -1: none did
  std::vector<ScoredToken> scored = {};  ///< whose text it begins, if log-probabilities are wanted
  std::vector<std::vector<TokenLogprob>> prompt_logprobs = {};  ///< as Event's
  std::vector<float> labels = {};                               ///< as Event's
  std::shared_ptr<const CacheReport> report = {};               ///< as Event's
};

/// From the engine's thread to that of a request. Holds no more than the request may generate.
class Channel {
 public:
  /// The engine has taken a prompt of the request.
  void accept() {
    const std::lock_guard lock(mutex_);
    ++accepted_;
    changed_.notify_one();
  }
  /// The request is over, for this reason.
  void refuse(Refused::Reason reason, const std::string& message) {
    const std::lock_guard lock(mutex_);
    refused_ = Refusal{reason, message};
    changed_.notify_one();
  }
  /// \param cached  tokens of a prompt, with its first piece
  void push(Piece piece, std::size_t cached) {
    const std::lock_guard lock(mutex_);
    pieces_.push_back(std::move(piece));
    cached_ += cached;
    changed_.notify_one();
  }

  /// Waits until the engine has taken so many prompts. \throws Refused
  void wait_until_accepted(std::size_t prompts) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return accepted_ == prompts || refused_; });
    if (refused_) throw Refused(refused_->reason, refused_->message);
  }
  /// Waits until there is something to take; false where that takes longer. \throws Refused
  [[nodiscard]] bool wait_until_said(std::chrono::milliseconds limit) {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, limit, [this] { return !pieces_.empty() || refused_; });
    if (pieces_.empty() && refused_) throw Refused(refused_->reason, refused_->message);
    return !pieces_.empty();
  }
  /// All pieces since the last call; waits for the first for a time. \throws Refused
  [[nodiscard]] std::vector<Piece> take(std::chrono::milliseconds limit) {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, limit, [this] { return !pieces_.empty() || refused_; });
    if (pieces_.empty() && refused_) throw Refused(refused_->reason, refused_->message);
    return std::exchange(pieces_, {});
  }
  /// Tokens of the prompts that were found in the cache, as far as it is known.
  [[nodiscard]] std::size_t cached() const {
    const std::lock_guard lock(mutex_);
    return cached_;
  }

 private:
  struct Refusal {  // no exception: threads would share its text
    Refused::Reason reason;
    std::string message;
  };

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Piece> pieces_;
  std::size_t cached_ = 0;
  std::size_t accepted_ = 0;
  std::optional<Refusal> refused_;
};

}  // namespace serve
