#include "answer.hpp"

#include <fmt/format.h>

#include <chrono>
#include <utility>

#include "api_error.hpp"
#include "connection.hpp"

namespace serve {

Answer::Answer(ReplyHead head, const Tokenizer& tokenizer, const ApiRequest& request,
               std::vector<Service::Ticket> tickets, std::function<void(const std::string&)> at_end)
    : head_(std::move(head)),
      tokenizer_(tokenizer),
      stream_(request.stream),
      choices_(request.jobs.size() * static_cast<std::size_t>(request.jobs.front().choices)),
      running_(choices_.size()),
      at_end_(std::move(at_end)),
      tickets_(std::move(tickets)) {
  for (const Job& job : request.jobs) usage_.prompt += job.prompt.size();
  if (request.jobs.front().explains) usage_.reports.resize(request.jobs.size());
}

bool Answer::go_on(httplib::DataSink& sink) {
  if (!sink.is_writable()) return false;
  // A client that sends no more may have closed. Something that says nothing finds out.
  if (Connection::current().has_ended() && !std::exchange(probed_, true))
    if (const std::string probe = stream_ ? ":\n\n" : " "; !sink.write(probe.data(), probe.size()))
      return false;
  std::string out;
  bool good = true;
  try {
    out = take(tickets_.front().channel().take(std::chrono::milliseconds(50)));
    if (ended()) out += ending();
  } catch (const Refused& refused) {  // too late for another status
    const std::string body = ApiError(500, refused.what()).body();
    out = stream_ ? event(body) : body;
    good = false;
  }
  if (!out.empty() && !sink.write(out.data(), out.size())) return false;
  if (good && ended()) sink.done();
  return good;
}

/// What is to be written of these pieces now.
std::string Answer::take(const std::vector<Piece>& pieces) {
  std::string out;
  if (stream_ && !std::exchange(opened_, true))
    for (std::size_t i = 0; i < choices_.size(); ++i)
      out += opening_event(head_, static_cast<int>(i));
  for (const Piece& piece : pieces) {
    WholeChoice& choice = choices_[static_cast<std::size_t>(piece.choice)];
    usage_.generated += piece.tokens;
    choice.finish = piece.finish;
    choice.stop_string = piece.stop_string;
    choice.stop_token = piece.stop_token;
    if (piece.finish != Finish::none) --running_;
    if (piece.report && !usage_.reports.empty())
      usage_.reports[static_cast<std::size_t>(piece.choice) * usage_.reports.size() /
                     choices_.size()] = piece.report;
    if (stream_) {
      if (!piece.text.empty() || piece.finish != Finish::none)
        out += piece_event(head_, tokenizer_, piece);
      continue;
    }
    choice.text += piece.text;
    choice.scored.insert(choice.scored.end(), piece.scored.begin(), piece.scored.end());
  }
  return out;
}

/// What follows all pieces.
std::string Answer::ending() {
  usage_.cached = tickets_.front().channel().cached();
  at_end_(fmt::format("prompt {} ({} cached), {} generated", usage_.prompt, usage_.cached,
                      usage_.generated));
  if (!stream_) return whole_reply(head_, tokenizer_, choices_, usage_);
  return (head_.usage_follows ? usage_event(head_, usage_) : "") + done_event;
}

}  // namespace serve
