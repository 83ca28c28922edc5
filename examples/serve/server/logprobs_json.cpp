#include "logprobs_json.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <string>

#include "utf8_stream.hpp"

namespace serve {

namespace {

using Json = nlohmann::json;

/// JSON has no minus infinity; OpenAI's servers end here, too.
double finite(float logprob) {
  return logprob >= -9999.0f ? logprob : -9999.0;
}

/// The bytes as text, with U+FFFD for what is none.
std::string as_text(const std::string& bytes) {
  Utf8Stream stream;
  std::string text = stream.push(bytes);
  return text + stream.finish();
}

std::string name_of(const std::string& bytes) {
  if (as_text(bytes) == bytes) return bytes;
  std::string name = "bytes:";
  for (const char byte : bytes) name += fmt::format("\\x{:02x}", static_cast<unsigned char>(byte));
  return name;
}

Json chat_entry(const Tokenizer& tokenizer, int previous, const TokenLogprob& one) {
  const std::string bytes = tokenizer.decode(previous, one.token);
  Json numbers = Json::array();
  for (const char byte : bytes) numbers.push_back(static_cast<unsigned char>(byte));
  return {{"token", as_text(bytes)}, {"logprob", finite(one.logprob)}, {"bytes", numbers}};
}

Json chat_logprobs(const Tokenizer& tokenizer, std::span<const ScoredToken> scored) {
  Json content = Json::array();
  for (const ScoredToken& token : scored) {
    Json entry = chat_entry(tokenizer, token.previous, token.logprobs.front());
    entry["top_logprobs"] = Json::array();
    for (std::size_t i = 1; i < token.logprobs.size(); ++i)
      entry["top_logprobs"].push_back(chat_entry(tokenizer, token.previous, token.logprobs[i]));
    content.push_back(std::move(entry));
  }
  return {{"content", std::move(content)}, {"refusal", nullptr}};
}

Json text_logprobs(const Tokenizer& tokenizer, std::span<const ScoredToken> scored) {
  Json all{{"tokens", Json::array()},
           {"token_logprobs", Json::array()},
           {"top_logprobs", Json::array()},
           {"text_offset", Json::array()}};
  for (const ScoredToken& token : scored) {
    const auto name = [&](const TokenLogprob& one) {
      return name_of(token.of_prompt ? tokenizer.spell(token.previous, one.token)
                                     : tokenizer.decode(token.previous, one.token));
    };
    all["tokens"].push_back(name(token.logprobs.front()));
    all["text_offset"].push_back(token.offset);
    if (token.of_prompt && token.previous < 0) {  // nothing is before it
      all["token_logprobs"].push_back(nullptr);
      all["top_logprobs"].push_back(nullptr);
      continue;
    }
    Json top = Json::object();  // of tokens of one name, the most likely
    for (std::size_t i = 1; i < token.logprobs.size(); ++i)
      top.emplace(name(token.logprobs[i]), finite(token.logprobs[i].logprob));
    const TokenLogprob& own = token.logprobs.front();
    top.emplace(name(own), finite(own.logprob));
    all["token_logprobs"].push_back(finite(own.logprob));
    all["top_logprobs"].push_back(std::move(top));
  }
  return all;
}

}  // namespace

Json logprobs_json(bool chat, const Tokenizer& tokenizer, std::span<const ScoredToken> scored) {
  if (scored.empty()) return nullptr;
  return chat ? chat_logprobs(tokenizer, scored) : text_logprobs(tokenizer, scored);
}

}  // namespace serve
