// The tokens that rank 0 chose in a step, on all ranks.
#pragma once

#include <cstddef>
#include <vector>

#include "communicator.hpp"
#include "message.hpp"

namespace serve {

/// Between begin() and end() all ranks ask for the same tokens in the same order. Rank 0 chooses as
/// it goes and sends them to the others at its end; they wait for that at their beginning.
class AgreedTokens {
 public:
  explicit AgreedTokens(Communicator& ranks) : ranks_(ranks) {}
  [[nodiscard]] Communicator& ranks() const { return ranks_; }

  void begin() {
    tokens_ = {};
    if (ranks_.rank() != 0) tokens_.broadcast(ranks_);
  }
  /// \param choose  gives the token; called on rank 0 only
  template <class F>
  [[nodiscard]] int next(const F& choose) {
    int token = 0;
    if (ranks_.rank() == 0) {
      token = choose();
      if (ranks_.size() > 1) tokens_.put(token);
    } else {
      tokens_.take(token);
    }
    return token;
  }
  void end() {
    if (ranks_.rank() == 0 && ranks_.size() > 1) tokens_.broadcast(ranks_);
  }

 private:
  Communicator& ranks_;
  RankMessage tokens_;
};

}  // namespace serve
