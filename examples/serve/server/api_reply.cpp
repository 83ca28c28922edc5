#include "api_reply.hpp"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <utility>

#include "logprobs_json.hpp"

namespace serve {

namespace {

using Json = nlohmann::json;

/// Why a choice ended, in OpenAI's words: clients know no others. What a text was stopped by,
/// beside the model's end, and why one is cut off, stand beside it.
/// \param end  a Piece or a WholeChoice
template <class End>
void set_finish(Json& choice, const End& end) {
  const Finish finish = end.finish;
  choice["finish_reason"] = finish == Finish::none   ? Json()
                            : finish == Finish::stop ? Json("stop")
                                                     : Json("length");
  if (finish == Finish::cancelled) choice["cut_off"] = "cancelled";
  if (finish == Finish::deadline) choice["cut_off"] = "deadline";
  if (finish == Finish::none) return;
  choice["stop_reason"] = finish != Finish::stop     ? Json()
                          : !end.stop_string.empty() ? Json(end.stop_string)
                          : end.stop_token >= 0      ? Json(end.stop_token)
                                                     : Json();
}

Json head_of(const ReplyHead& head, bool chunk) {
  const char* object = !head.chat ? "text_completion"
                       : chunk    ? "chat.completion.chunk"
                                  : "chat.completion";
  return {{"id", head.id}, {"object", object}, {"created", head.created}, {"model", head.model}};
}

/// Why a prompt was found, or was not.
Json report_of(const ReplyHead& head, const CacheReport& report) {
  Json ranges = Json::array();
  for (const chunkattn::ExplainedRange& range : report.ranges) {
    Json one{{"begin", range.range.begin},
             {"end", range.range.end()},
             {"reason", chunkattn::name_of(range.reason)}};
    if (range.reason == chunkattn::CacheReason::evicted) {
      one["cause"] = chunkattn::name_of(range.cause);
      one["tokens_ago"] = range.tokens_ago;
    }
    if (range.reason == chunkattn::CacheReason::in_tier) one["tier"] = range.tier;
    ranges.push_back(std::move(one));
  }
  Json all{{"ranges", std::move(ranges)}};
  if (report.parting) {
    all["parts_at"] = report.parting->position;
    if (head.tells_texts && report.parting->cached) all["cached_token"] = *report.parting->cached;
  }
  return all;
}

Json usage_of(const ReplyHead& head, const Usage& usage) {
  Json all{{"prompt_tokens", usage.prompt},
           {"completion_tokens", usage.generated},
           {"total_tokens", usage.prompt + usage.generated}};
  if (head.hides_cached) return all;
  all["prompt_tokens_details"] = {{"cached_tokens", usage.cached}};
  for (const auto& report : usage.reports)
    all["cache_reports"].push_back(report ? report_of(head, *report) : Json());
  return all;
}

/// What has none, as of a model whose logits are no numbers, has 0.
std::vector<double> probabilities(const std::vector<float>& logprobs, bool softmax) {
  std::vector<double> p(logprobs.size());
  const double largest =
      softmax && !p.empty() ? *std::max_element(logprobs.begin(), logprobs.end()) : 0;
  double sum = 0;
  for (std::size_t i = 0; i < p.size(); ++i) {
    p[i] = std::exp(logprobs[i] - largest);
    if (std::isnan(p[i])) p[i] = 0;
    sum += p[i];
  }
  for (double& one : p)
    if (softmax && sum > 0) one /= sum;
  return p;
}

std::string chunk(const ReplyHead& head, const Piece& piece, const char* key, Json value,
                  Json logprobs = nullptr) {
  Json data = head_of(head, true);
  Json one{{"index", piece.choice}, {key, std::move(value)}, {"logprobs", std::move(logprobs)}};
  set_finish(one, piece);
  data["choices"] = Json::array({std::move(one)});
  if (head.usage_follows) data["usage"] = nullptr;
  return event(data.dump());
}

}  // namespace

std::string tokens_json(const std::vector<int>& tokens, std::size_t max_length) {
  return Json{{"count", tokens.size()}, {"max_model_len", max_length}, {"tokens", tokens}}.dump();
}

std::string scores_json(const ReplyHead& head, const std::vector<ItemScore>& scores, bool softmax,
                        const Usage& usage) {
  Json lists = Json::array();
  for (const ItemScore& score : scores) lists.push_back(probabilities(score.labels, softmax));
  return Json{{"object", "scoring"},
              {"model", head.model},
              {"scores", std::move(lists)},
              {"usage", usage_of(head, usage)}}
      .dump();
}

std::string whole_reply(const ReplyHead& head, const Tokenizer& tokenizer,
                        const std::vector<WholeChoice>& choices, const Usage& usage) {
  Json reply = head_of(head, false);
  reply["choices"] = Json::array();
  for (const WholeChoice& choice : choices) {
    Json one{{"index", reply["choices"].size()},
             {"logprobs", logprobs_json(head.chat, tokenizer, choice.scored)}};
    set_finish(one, choice);
    if (head.chat)
      one["message"] = {{"role", "assistant"}, {"content", choice.text}};
    else
      one["text"] = choice.text;
    reply["choices"].push_back(std::move(one));
  }
  reply["usage"] = usage_of(head, usage);
  return reply.dump();
}

std::string event(const std::string& data) {
  return "data: " + data + "\n\n";
}

std::string opening_event(const ReplyHead& head, int choice) {
  if (!head.chat) return "";
  return chunk(head, {.choice = choice, .text = {}}, "delta",
               {{"role", "assistant"}, {"content", ""}});
}

std::string piece_event(const ReplyHead& head, const Tokenizer& tokenizer, const Piece& piece) {
  Json logprobs = logprobs_json(head.chat, tokenizer, piece.scored);
  if (!head.chat) return chunk(head, piece, "text", piece.text, std::move(logprobs));
  Json delta = Json::object();
  if (!piece.text.empty()) delta["content"] = piece.text;
  return chunk(head, piece, "delta", std::move(delta), std::move(logprobs));
}

std::string usage_event(const ReplyHead& head, const Usage& usage) {
  Json data = head_of(head, true);
  data["choices"] = Json::array();
  data["usage"] = usage_of(head, usage);
  return event(data.dump());
}

}  // namespace serve
