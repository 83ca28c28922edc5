// The reply to one request for text, while it is generated.
#pragma once

#include <httplib.h>

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "api_reply.hpp"
#include "api_request.hpp"
#include "service.hpp"

namespace serve {

/// Writes a reply piece by piece, or at once when all is there. To drop it early is to cancel the
/// request.
class Answer {
 public:
  /// \param at_end  called with one line about what was generated
  Answer(ReplyHead head, const Tokenizer& tokenizer, const ApiRequest& request,
         std::vector<Service::Ticket> tickets, std::function<void(const std::string&)> at_end);

  /// Waits for more and writes it. False where the connection is to be closed: the client has gone,
  /// or the engine has failed. Looks for either at least twenty times a second.
  [[nodiscard]] bool go_on(httplib::DataSink& sink);
  [[nodiscard]] bool ended() const { return running_ == 0; }

 private:
  [[nodiscard]] std::string take(const std::vector<Piece>& pieces);
  [[nodiscard]] std::string ending();

  const ReplyHead head_;
  const Tokenizer& tokenizer_;
  const bool stream_;
  std::vector<WholeChoice> choices_;
  std::size_t running_;  ///< choices
  Usage usage_;
  bool opened_ = false, probed_ = false;
  std::function<void(const std::string&)> at_end_;
  std::vector<Service::Ticket> tickets_;  ///< one of each prompt; they have one channel
};

}  // namespace serve
