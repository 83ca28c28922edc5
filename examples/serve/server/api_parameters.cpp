#include "api_parameters.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <map>
#include <random>
#include <string>
#include <string_view>
#include <utility>

namespace serve {

namespace {

using Json = nlohmann::json;

/// For each field that is not read the values that are taken, as JSON, and why others are not.
struct Unread {
  const char* values;  ///< a list; empty: any, as they do not change the reply
  const char* expected;
};
using UnreadFields = std::map<std::string_view, Unread>;

constexpr const char* no_tools = "nothing: tools are not supported";

/// OpenAI's.
const UnreadFields openai_fields{
    {"audio", {"[]", "nothing: only text is supported"}},
    {"best_of", {"[1]", "1: others are not supported"}},
    {"echo", {"[false]", "false: a reply does not repeat its messages"}},
    {"function_call", {R"(["none", "auto"])", no_tools}},
    {"functions", {"[[]]", no_tools}},
    {"metadata", {"", ""}},
    {"moderation", {"[]", "nothing: not supported"}},
    {"modalities", {R"([["text"]])", "[\"text\"]: others are not supported"}},
    {"parallel_tool_calls", {"[true, false]", no_tools}},
    {"prediction", {"[]", "nothing: not supported"}},
    {"prompt_cache_key", {"", ""}},
    {"prompt_cache_options", {"", ""}},
    {"prompt_cache_retention", {"", ""}},
    {"reasoning_effort", {R"(["none"])", "none: others are not supported"}},
    {"response_format",
     {R"([{"type": "text"}])", "{\"type\": \"text\"}: others are not supported"}},
    {"safety_identifier", {"", ""}},
    {"service_tier", {R"(["auto", "default"])", "auto or default: there is one"}},
    {"store", {"[false]", "false: nothing is stored"}},
    {"suffix", {R"([""])", "nothing: not supported"}},
    {"tool_choice", {R"(["none", "auto"])", no_tools}},
    {"tools", {"[[]]", no_tools}},
    {"user", {"", ""}},
    {"verbosity", {R"(["medium"])", "medium: others are not supported"}},
    {"web_search_options", {"[]", "nothing: not supported"}}};

/// vLLM's, llama-server's and SGLang's, which routers repeat with the values that they take for
/// granted.
const UnreadFields others_fields{
    {"add_generation_prompt", {"[true]", "true: others are not supported"}},
    {"cache_prompt", {"[true]", "true: prompts are cached; cache_salt says who shares them"}},
    {"include_reasoning", {"[true, false]", "true or false"}},
    {"length_penalty", {"[1]", "1: others are not supported"}},
    {"priority", {"[0]", "0: others are not supported"}},
    {"repeat_penalty", {"[1]", "1: repetition_penalty is supported, for all of prompt and text"}},
    {"request_id", {"", ""}},
    {"rid", {"", ""}},
    {"separate_reasoning", {"[true, false]", "true or false"}},
    {"skip_special_tokens", {"[true]", "true: they are not shown"}},
    {"spaces_between_special_tokens", {"[true]", "true: they are not shown"}},
    {"stream_reasoning", {"[true, false]", "true or false"}},
    {"typical_p", {"[1]", "1: others are not supported"}}};

/// What read_completion() and read_chat() read, and read_sampling().
constexpr const char* read_by_both[] = {"cache_salt",
                                        "explain_cache",
                                        "frequency_penalty",
                                        "ignore_eos",
                                        "logit_bias",
                                        "logprobs",
                                        "max_tokens",
                                        "min_p",
                                        "min_tokens",
                                        "model",
                                        "n",
                                        "presence_penalty",
                                        "repetition_penalty",
                                        "seed",
                                        "stop",
                                        "stop_token_ids",
                                        "stream",
                                        "stream_options",
                                        "temperature",
                                        "top_k",
                                        "top_p"};

constexpr const char* read_for_scores[] = {
    "apply_softmax", "cache_salt", "item_first", "items", "model", "label_token_ids", "query"};

bool is_read(std::string_view name, Asks asks) {
  if (asks == Asks::score)
    return std::find(std::begin(read_for_scores), std::end(read_for_scores), name) !=
           std::end(read_for_scores);
  if (asks == Asks::tokens)
    return name == "model" || name == "prompt" || name == "messages" ||
           name == "add_special_tokens";
  const auto* const end = std::end(read_by_both);
  if (std::find(std::begin(read_by_both), end, name) != end) return true;
  if (asks == Asks::completion) return name == "prompt" || name == "echo";
  return name == "messages" || name == "max_completion_tokens" || name == "top_logprobs";
}

void check_unread(const Fields& fields, const std::string& name, const Json& value) {
  if (value.is_null()) return;
  auto found = openai_fields.find(name);
  if (found == openai_fields.end()) found = others_fields.find(name);
  if (found == others_fields.end()) {
    if (!stands_for_nothing(value))
      fields.fail(name, value, "nothing: no field of this name is known here");
    return;
  }
  const auto& [values, expected] = found->second;
  if (*values == '\0') return;
  for (const Json& taken : Json::parse(values))
    if (value == taken) return;
  fields.fail(name, value, expected);
}

/// {"token": bias, …}
std::vector<LogitBias> read_logit_bias(const Fields& fields, int vocab_size) {
  std::map<int, float> biases;  // by token, each once however it is written
  const Json* value = fields.find("logit_bias");
  if (value == nullptr) return {};
  if (!value->is_object() || value->size() > 1024)
    fields.fail("logit_bias", *value, "an object of at most 1024 tokens with their biases");
  for (const auto& [name, bias] : value->items()) {
    int token = -1;
    const char* const end = name.data() + name.size();
    const auto read = std::from_chars(name.data(), end, token);
    if (read.ec != std::errc() || read.ptr != end || token < 0 || token >= vocab_size)
      fields.fail("logit_bias", Json(name), fmt::format("tokens from 0 to {}", vocab_size - 1));
    if (!bias.is_number() || !(std::abs(bias.get<double>()) <= 100))
      fields.fail(fmt::format("logit_bias.{}", token), bias, "a number from -100 to 100");
    biases[token] = bias.get<float>();
  }
  std::vector<LogitBias> all;
  for (const auto& [token, bias] : biases) all.push_back({token, bias});
  return all;
}

/// A chat says whether and how many, a completion how many.
int read_logprobs(const Fields& fields, bool chat) {
  if (!chat) {
    const Json* value = fields.find("logprobs");
    if (value == nullptr || *value == false) return -1;
    return static_cast<int>(fields.integer("logprobs", 0, most_logprobs, 0));
  }
  const bool wanted = fields.boolean("logprobs", false);
  const auto top = fields.integer("top_logprobs", 0, most_logprobs, 0);
  if (top > 0 && !wanted) fields.fail("top_logprobs", top, "0, or logprobs = true beside it");
  return wanted ? static_cast<int>(top) : -1;
}

}  // namespace

void refuse_what_is_missing(const Fields& fields, Asks asks) {
  for (const auto& [name, value] : fields.all().items())
    if (!is_read(name, asks)) check_unread(fields, name, value);
}

void read_sampling(const Fields& fields, bool chat, int vocab_size, Job& job) {
  constexpr long long far = 1ll << 62;
  Sampling& sampling = job.sampling;
  sampling.temperature = fields.number("temperature", 0, 2, 1);
  sampling.top_p = fields.number("top_p", 0, 1, 1);
  if (sampling.top_p == 0) sampling.top_p = 1e-9;  // the most likely token, as others have it
  // -1 is vLLM's "all", 0 llama-server's.
  sampling.top_k = static_cast<int>(std::max(0ll, fields.integer("top_k", -1, 1 << 30, 0)));
  sampling.min_p = fields.number("min_p", 0, 1, 0);
  sampling.frequency_penalty = fields.number("frequency_penalty", -2, 2, 0);
  sampling.presence_penalty = fields.number("presence_penalty", -2, 2, 0);
  sampling.repetition_penalty = fields.number("repetition_penalty", 0, 100, 1);
  if (sampling.repetition_penalty == 0)
    fields.fail("repetition_penalty", 0, "a number above 0, at most 100");
  if (fields.find("seed") != nullptr)
    sampling.seed = static_cast<std::uint64_t>(fields.integer("seed", -far, far, 0));
  else
    sampling.seed = (std::uint64_t{std::random_device()()} << 32) | std::random_device()();
  job.logit_bias = read_logit_bias(fields, vocab_size);
  job.logprobs = read_logprobs(fields, chat);
}

}  // namespace serve
