#include "score_answer.hpp"

#include <fmt/format.h>

#include <utility>

#include "api_error.hpp"

namespace serve {

namespace {

Usage usage_of_items(const ScoreRequest& request) {
  Usage usage;
  for (const Job& item : request.items) usage.prompt += item.prompt.size();
  return usage;
}

}  // namespace

ScoreAnswer::ScoreAnswer(ReplyHead head, ScoreRequest request, Service& service,
                         std::function<void(const std::string&)> at_end)
    : head_(std::move(head)),
      softmax_(request.apply_softmax),
      usage_(usage_of_items(request)),
      at_end_(std::move(at_end)),
      scoring_(service, std::move(request.items)) {}

std::string ScoreAnswer::body() {
  for (const ItemScore& score : scoring_.scores())
    if (score.failure) throw *score.failure;
  usage_.cached = scoring_.cached();
  at_end_(fmt::format("{} items, prompts {} ({} cached)", scoring_.scores().size(), usage_.prompt,
                      usage_.cached));
  return scores_json(head_, scoring_.scores(), softmax_, usage_);
}

bool ScoreAnswer::go_on(httplib::DataSink& sink) {
  if (!sink.is_writable()) return false;
  if (!wait(std::chrono::milliseconds(50))) return true;
  ended_ = true;
  std::string out;
  bool good = true;
  try {
    out = body();
  } catch (const Refused& refused) {
    out = ApiError(500, refused.what()).body();
    good = false;
  }
  if (!sink.write(out.data(), out.size())) return false;
  if (good) sink.done();
  return good;
}

}  // namespace serve
