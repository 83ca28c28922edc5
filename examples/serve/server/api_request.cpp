#include "api_request.hpp"

#include <fmt/format.h>

#include <utility>
#include <vector>

#include "api_error.hpp"
#include "api_messages.hpp"
#include "api_parameters.hpp"
#include "json_fields.hpp"
#include "scoring.hpp"

namespace serve {

namespace {

using Json = nlohmann::json;
constexpr long long far = 1ll << 62;

std::vector<int> read_token_list(const Fields& fields, const Json& value, const std::string& field,
                                 const Served& served) {
  std::vector<int> tokens;
  tokens.reserve(value.size());
  for (std::size_t i = 0; i < value.size(); ++i) {
    const Json& token = value[i];
    if (!token.is_number_unsigned() ||
        token.get<std::uint64_t>() >= static_cast<std::uint64_t>(served.tokenizer->vocab_size()))
      fields.fail(fmt::format("{}[{}]", field, i), token,
                  fmt::format("a token from 0 to {}", served.tokenizer->vocab_size() - 1));
    tokens.push_back(token.get<int>());
  }
  return tokens;
}

std::vector<std::string> read_stop(const Fields& fields) {
  const Json* value = fields.find("stop");
  if (value == nullptr) return {};
  const char* expected = "a string of 1 to 256 bytes, or up to 4 of them";
  const auto is_stop = [](const Json& one) {
    return one.is_string() && !one.get_ref<const std::string&>().empty() &&
           one.get_ref<const std::string&>().size() <= 256;
  };
  if (is_stop(*value)) return {value->get<std::string>()};
  if (!value->is_array() || value->size() > 4) fields.fail("stop", *value, expected);
  for (std::size_t i = 0; i < value->size(); ++i)
    if (!is_stop((*value)[i])) fields.fail(fmt::format("stop[{}]", i), (*value)[i], expected);
  return value->get<std::vector<std::string>>();
}

std::vector<int> read_stop_tokens(const Fields& fields, const Served& served) {
  const char* name = "stop_token_ids";
  const Json* value = fields.find(name);
  if (value == nullptr) return {};
  if (!value->is_array() || value->size() > 1024)
    fields.fail(name, *value, "a list of at most 1024 tokens");
  return read_token_list(fields, *value, name, served);
}

std::vector<int> read_labels(const Fields& fields, const Served& served) {
  const char* name = "label_token_ids";
  const Json* value = fields.find(name);
  if (value == nullptr || !value->is_array() || value->empty() || value->size() > 1024)
    fields.fail(name, value != nullptr ? *value : Json(), "a list of 1 to 1024 tokens");
  return read_token_list(fields, *value, name, served);
}

void check_model(const Fields& fields, const Served& served) {
  const std::string model = fields.text("model", 256);
  if (!model.empty() && model != served.name)
    throw ApiError(404, fmt::format("model = {}: expected {}", model, served.name), "model",
                   "model_not_found");
}

/// What both endpoints have in common: all but the prompt and its length.
ApiRequest read_common(const Fields& fields, bool chat, const Served& served) {
  check_model(fields, served);
  refuse_what_is_missing(fields, chat ? Asks::chat : Asks::completion);
  ApiRequest request;
  Job& job = request.jobs.emplace_back();
  job.choices = static_cast<int>(fields.integer("n", 1, served.max_choices, 1));
  job.stop = read_stop(fields);
  job.stop_tokens = read_stop_tokens(fields, served);
  job.ignore_eos = fields.boolean("ignore_eos", false);
  job.min_tokens = static_cast<std::size_t>(fields.integer("min_tokens", 0, far, 0));
  job.cache_salt = fields.text("cache_salt", 256);
  job.explains = fields.boolean("explain_cache", false);
  if (job.explains && !served.explains)
    throw ApiError(400, "explain_cache = true: expected false: this server does not say",
                   "explain_cache");
  read_sampling(fields, chat, served.tokenizer->vocab_size(), job);
  request.stream = fields.boolean("stream", false);
  if (const Json* options = fields.find("stream_options"); options != nullptr) {
    if (!options->is_object() || !request.stream)
      fields.fail("stream_options", *options, "an object, and stream = true beside it");
    const Fields in_options(*options);
    request.include_usage = in_options.boolean("include_usage", false);
    for (const auto& [name, value] : options->items())
      if (name != "include_usage" && !value.is_null() && value != false)
        fields.fail("stream_options." + name, value, "nothing: only include_usage is supported");
  }
  return request;
}

/// Takes a prompt and as many tokens as were asked for, or as many as fit.
/// \param field  where the prompt stood
void set_prompt(Job& job, std::vector<int> prompt, const std::string& field,
                std::optional<long long> max_tokens, const char* max_tokens_field,
                const Served& served) {
  const std::size_t size = prompt.size();
  if (size == 0)
    throw ApiError(400, fmt::format("{} = 0 tokens: expected at least one", field), field);
  if (size >= served.max_length)
    throw ApiError(400,
                   fmt::format("{} = {} tokens: expected less than {}, what a text may have", field,
                               size, served.max_length),
                   field, "context_length_exceeded");
  const std::size_t room = served.max_length - size;
  if (max_tokens && static_cast<std::size_t>(*max_tokens) > room)
    throw ApiError(400,
                   fmt::format("{} = {}: expected at most {} behind {} tokens of the prompt",
                               max_tokens_field, *max_tokens, room, size),
                   max_tokens_field, "context_length_exceeded");
  job.max_tokens = max_tokens ? static_cast<std::size_t>(*max_tokens) : room;
  if (job.min_tokens > job.max_tokens)
    throw ApiError(400,
                   fmt::format("min_tokens = {}: expected at most {}, {}", job.min_tokens,
                               max_tokens_field, job.max_tokens),
                   "min_tokens");
  job.prompt = std::move(prompt);
}

/// To tokenise a text that is far too long would take seconds.
void check_bytes(std::size_t bytes, const std::string& field, const Served& served) {
  const std::size_t least = served.tokenizer->least_tokens(bytes);
  if (least >= served.max_length)
    throw ApiError(
        400,
        fmt::format("{} = {} bytes, which are at least {} tokens: expected less than {}, "
                    "what a text may have",
                    field, bytes, least, served.max_length),
        field, "context_length_exceeded");
}

std::optional<long long> read_count(const Fields& fields, const char* name, long long least = 1) {
  if (fields.find(name) == nullptr) return std::nullopt;
  return fields.integer(name, least, far, least);
}

constexpr const char* expected_prompt =
    "a string, or a list of tokens, or a list of strings or of lists of tokens";

std::vector<int> read_prompt(const Fields& fields, const Json& value, const std::string& field,
                             const Served& served) {
  if (value.is_string()) {
    const auto& text = value.get_ref<const std::string&>();
    check_bytes(text.size(), field, served);
    return served.tokenizer->encode_prompt(text);
  }
  if (!value.is_array()) fields.fail(field, value, expected_prompt);
  return read_token_list(fields, value, field, served);
}

/// One prompt, or several, of which each becomes a job as the first one is.
void read_prompts(const Fields& fields, ApiRequest& request, long long max_tokens,
                  const Served& served) {
  const Json* value = fields.find("prompt");
  if (value == nullptr) fields.fail("prompt", Json(), expected_prompt);
  const auto read = [&](const Json& prompt, const std::string& field, Job& job) {
    set_prompt(job, read_prompt(fields, prompt, field, served), field, max_tokens, "max_tokens",
               served);
  };
  const Job first = request.jobs.front();
  if (!value->is_array() || value->empty() || value->front().is_number())
    return read(*value, "prompt", request.jobs.front());
  const std::size_t most = most_texts / static_cast<std::size_t>(first.choices);
  if (value->size() > most)
    fields.fail("prompt", *value,
                fmt::format("at most {} prompts, as n = {}", most, first.choices));
  request.jobs.assign(value->size(), first);
  for (std::size_t i = 0; i < value->size(); ++i)
    read((*value)[i], fmt::format("prompt[{}]", i), request.jobs[i]);
}

/// The query and an item, one behind the other: texts become tokens together.
std::vector<int> read_scored(const Fields& fields, const Json& query, const Json& item,
                             const std::string& field, bool item_first, const Served& served) {
  const Json &first = item_first ? item : query, &second = item_first ? query : item;
  if (query.is_string()) {
    const std::string text =
        first.get_ref<const std::string&>() + second.get_ref<const std::string&>();
    check_bytes(text.size(), field, served);
    return served.tokenizer->encode_prompt(text);
  }
  std::vector<int> tokens = read_token_list(fields, first, item_first ? field : "query", served);
  const std::vector<int> others =
      read_token_list(fields, second, item_first ? "query" : field, served);
  tokens.insert(tokens.end(), others.begin(), others.end());
  return tokens;
}

std::vector<int> read_chat_prompt(const Fields& fields, const Served& served) {
  const std::vector<Message> messages = read_messages(fields);
  if (served.chat == nullptr)
    throw ApiError(400, "messages: this model takes no chats, only prompts: " + served.no_chat,
                   "messages");
  std::vector<TextPart> parts;
  try {
    parts = served.chat->prompt(messages);
  } catch (const std::invalid_argument& error) {  // names the message
    throw ApiError(400, error.what(), "messages");
  }
  std::size_t bytes = 0;
  for (const TextPart& part : parts) bytes += part.text.size();
  check_bytes(bytes, "messages", served);
  return served.tokenizer->encode(parts);
}

}  // namespace

ApiRequest read_completion(std::string_view body, const Served& served) {
  const Json object = parse_object(body);
  const Fields fields(object);
  ApiRequest request = read_common(fields, false, served);
  const bool echo = request.jobs.front().echo = fields.boolean("echo", false);
  const auto max_tokens = read_count(fields, "max_tokens", echo ? 0 : 1).value_or(16);  // OpenAI's
  read_prompts(fields, request, max_tokens, served);
  return request;
}

ApiRequest read_chat(std::string_view body, const Served& served) {
  const Json object = parse_object(body);
  const Fields fields(object);
  ApiRequest request = read_common(fields, true, served);
  const char* newer = "max_completion_tokens";
  const char* name = fields.find(newer) != nullptr ? newer : "max_tokens";
  set_prompt(request.jobs.front(), read_chat_prompt(fields, served), "messages",
             read_count(fields, name), name, served);
  return request;
}

ScoreRequest read_score(std::string_view body, const Served& served, std::size_t most_items) {
  const Json object = parse_object(body);
  const Fields fields(object);
  check_model(fields, served);
  refuse_what_is_missing(fields, Asks::score);
  ScoreRequest request;
  request.apply_softmax = fields.boolean("apply_softmax", false);
  const bool item_first = fields.boolean("item_first", false);
  const std::string salt = fields.text("cache_salt", 256);
  const std::vector<int> labels = read_labels(fields, served);
  const Json* const query = fields.find("query");
  if (query == nullptr || !(query->is_string() || query->is_array()))
    fields.fail("query", query != nullptr ? *query : Json(), "a string, or a list of tokens");
  const bool is_text = query->is_string();
  const char* expected = is_text ? "a string or a list of them, as query is one"
                                 : "a list of lists of tokens, as query is one";
  const Json* value = fields.find("items");
  if (value == nullptr) fields.fail("items", Json(), expected);
  const bool is_one = is_text && value->is_string();
  if (!is_one && !value->is_array()) fields.fail("items", *value, expected);
  if (!is_one && value->size() > most_items)
    fields.fail("items", *value, fmt::format("at most {} items", most_items));
  const std::size_t count = is_one ? 1 : value->size();
  for (std::size_t i = 0; i < count; ++i) {
    const Json& item = is_one ? *value : (*value)[i];
    const std::string field = is_one ? "items" : fmt::format("items[{}]", i);
    if (!(is_text ? item.is_string() : item.is_array())) fields.fail(field, item, expected);
    Job& job = request.items.emplace_back(label_job({}, labels, salt));
    set_prompt(job, read_scored(fields, *query, item, field, item_first, served), field, 0, "",
               served);
  }
  return request;
}

std::vector<int> read_tokens(std::string_view body, const Served& served) {
  const Json object = parse_object(body);
  const Fields fields(object);
  check_model(fields, served);
  refuse_what_is_missing(fields, Asks::tokens);
  const bool is_chat = fields.find("messages") != nullptr;
  const Json* const prompt = fields.find("prompt");
  if (is_chat == (prompt != nullptr))
    fields.fail("prompt", prompt != nullptr ? *prompt : Json(),
                "a string, or messages in place of it");
  // A chat's template has the special tokens already.
  const bool add_special = fields.boolean("add_special_tokens", !is_chat);
  if (is_chat && add_special)
    fields.fail("add_special_tokens", true, "false beside messages: their template adds them");
  if (is_chat) return read_chat_prompt(fields, served);
  if (!prompt->is_string()) fields.fail("prompt", *prompt, "a string");
  const auto& text = prompt->get_ref<const std::string&>();
  check_bytes(text.size(), "prompt", served);
  if (add_special) return served.tokenizer->encode_prompt(text);
  const TextPart part{text, true};
  return served.tokenizer->encode({&part, 1});
}

}  // namespace serve
