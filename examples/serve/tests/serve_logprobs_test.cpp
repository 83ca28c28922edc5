// Log-probabilities in replies: OpenAI's two forms, whole and streamed; tokens that are no whole
// character, and those of a stop string.
#include <doctest/doctest.h>

#include <string>
#include <vector>

#include "http_setup.hpp"
#include "server/choice_text.hpp"
#include "server/logprobs_json.hpp"
#include "tests/support/random.hpp"

using namespace serve;
using namespace test;

namespace {

/// The logprobs of a stream's choice 0, put together; each list grows as its text does.
Json streamed(httplib::Client& client, const char* path, Json body, std::string& text) {
  body["stream"] = true;
  const auto result = client.Post(path, body.dump(), "application/json");
  REQUIRE(static_cast<bool>(result));
  Json all;
  for (const std::string& event : events_of(result->body)) {
    if (event == "[DONE]") continue;
    const Json choice = Json::parse(event)["choices"].at(0);
    if (path == chats)
      text += choice["delta"].value("content", "");
    else
      text += choice["text"].get<std::string>();
    for (const auto& [name, list] : choice["logprobs"].items())
      if (list.is_array())
        for (const Json& one : list) all[name].push_back(one);
  }
  return all;
}

std::size_t code_points(const std::string& text) {
  std::size_t count = 0;
  for (const char c : text) count += (static_cast<unsigned char>(c) & 0xc0) != 0x80 ? 1 : 0;
  return count;
}

}  // namespace

TEST_CASE("a completion has its tokens, their log-probabilities and offsets") {
  ScriptedSite s;
  auto client = s.site.client();
  const Json body{{"prompt", "bé"}, {"max_tokens", 5}, {"logprobs", 2}};  // says bos, b, é, bos
  const auto reply = post(client, completions, body);
  CAPTURE(reply.body.dump());
  CHECK(reply.body["choices"][0]["text"] == "bé");
  const Json expected{{"tokens", {"", "b", "bytes:\\xc3", "bytes:\\xa9", ""}},
                      {"token_logprobs", {-0.5, -0.5, -0.5, -0.5, -0.5}},
                      {"top_logprobs",
                       {{{"", -0.5}},  // of tokens of one name the most likely
                        {{"b", -0.5}, {"a", -1.5}},
                        {{"bytes:\\xc3", -0.5}, {"bytes:\\xc2", -1.5}},
                        {{"bytes:\\xa9", -0.5}, {"bytes:\\xa8", -1.5}},
                        {{"", -0.5}}}},
                      {"text_offset", {0, 0, 1, 1, 2}}};
  CHECK(reply.body["choices"][0]["logprobs"] == expected);
  std::string text;
  CHECK(streamed(client, completions, body, text) == expected);
  CHECK(text == "bé");
  Json alone = body;
  alone["logprobs"] = 0;
  CHECK(post(client, completions, alone).body["choices"][0]["logprobs"]["top_logprobs"][1] ==
        Json{{"b", -0.5}});
}

TEST_CASE("a chat has the bytes of its tokens, too") {
  ScriptedSite s;
  auto client = s.site.client();
  Json body{{"messages", {{{"role", "user"}, {"content", "é"}}}},
            {"max_tokens", 19},
            {"logprobs", true},
            {"top_logprobs", 1}};
  const auto reply = post(client, chats, body);
  CAPTURE(reply.body.dump());
  const Json logprobs = reply.body["choices"][0]["logprobs"];
  CHECK(logprobs["refusal"].is_null());
  const Json content = logprobs["content"];
  REQUIRE(content.size() == 19);
  std::string bytes;
  for (const Json& token : content) {
    CHECK(token["logprob"] == -0.5);
    REQUIRE(token["top_logprobs"].size() == 1);
    CHECK(token["top_logprobs"][0]["bytes"] == token["bytes"]);
    for (const Json& byte : token["bytes"]) bytes += static_cast<char>(byte.get<int>());
  }
  CHECK(bytes == reply.body["choices"][0]["message"]["content"].get<std::string>());
  CHECK(bytes == "<|im_start|>user\né");
  CHECK(content[17]["token"] == "\xef\xbf\xbd");
  CHECK(content[17]["bytes"] == Json{0xc3});
  std::string text;
  CHECK(streamed(client, chats, body, text)["content"] == content);
  CHECK(text == bytes);
  body.erase("top_logprobs");
  CHECK(post(client, chats, body).body["choices"][0]["logprobs"]["content"][0]["top_logprobs"] ==
        Json::array());
}

TEST_CASE("tokens of a stop string are not returned") {
  ScriptedSite s;
  auto client = s.site.client();
  const Json body{{"prompt", {100, 101, 102, 103}},
                  {"max_tokens", 50},
                  {"logprobs", 0},
                  {"stop", {"cd"}}};  // says abcd
  const auto reply = post(client, completions, body);
  CAPTURE(reply.body.dump());
  const std::string said = reply.body["choices"][0]["text"].get<std::string>();
  CHECK(said.size() == 2);
  CHECK(reply.body["choices"][0]["logprobs"]["tokens"].size() == 2);
  std::string text;
  CHECK(streamed(client, completions, body, text) == reply.body["choices"][0]["logprobs"]);
}

TEST_CASE("of random texts and stop strings, the tokens returned are those whose text is") {
  Random random(31);
  const auto tokenizer = byte_tokenizer(300);
  for (int round = 0; round < scaled(300); ++round) {
    std::vector<std::string> stop;
    if (round % 3 != 0) stop = {"aba", "é€"};
    ChoiceText choice(*tokenizer, -1, stop);
    const char* const letters[] = {"a", "b", "é", "€", "\xff", "\xc3"};
    std::vector<int> tokens, returned;
    std::string said;
    for (int i = 0; i < 20 && !choice.stopped(); ++i)
      for (const char c : std::string(letters[random.index(6)])) {
        if (choice.stopped()) break;
        const int token = 3 + static_cast<unsigned char>(c);
        tokens.push_back(token);
        said += choice.push(token, {{token, -1.0f}});
        for (const ScoredToken& one : choice.take_scored()) {
          CHECK(one.offset < code_points(said));
          returned.push_back(one.logprobs.front().token);
        }
      }
    if (!choice.stopped()) said += choice.finish();
    for (const ScoredToken& one : choice.take_scored())
      returned.push_back(one.logprobs.front().token);
    REQUIRE(returned.size() <= tokens.size());
    CHECK(std::equal(returned.begin(), returned.end(), tokens.begin()));
    if (!choice.stopped()) {
      CHECK(returned == tokens);
      continue;
    }
    Utf8Stream stream;  // of the tokens returned, which is all that was said
    std::string text;
    for (const int token : returned) text += stream.push(tokenizer->decode(-1, token));
    CHECK(text + stream.finish() == said);
  }
}

TEST_CASE("a prompt that is repeated stands before the text, with its own log-probabilities") {
  ScriptedSite s;
  auto client = s.site.client();
  Json body{{"prompt", "bé"}, {"max_tokens", 2}, {"logprobs", 1}, {"echo", true}};  // says bos, b
  const auto reply = post(client, completions, body);
  CAPTURE(reply.body.dump());
  CHECK(reply.body["choices"][0]["text"] == "béb");
  const Json expected{{"tokens", {"", "b", "bytes:\\xc3", "bytes:\\xa9", "", "b"}},
                      {"token_logprobs", {nullptr, -1.0, -2.0, -3.0, -0.5, -0.5}},
                      {"top_logprobs",
                       {nullptr,
                        {{"", -0.125}, {"b", -1.0}},
                        {{"", -0.125}, {"bytes:\\xc3", -2.0}},
                        {{"", -0.125}, {"bytes:\\xa9", -3.0}},
                        {{"", -0.5}},
                        {{"b", -0.5}}}},
                      {"text_offset", {0, 0, 1, 1, 2, 2}}};
  CHECK(reply.body["choices"][0]["logprobs"] == expected);
  CHECK(reply.body["usage"]["completion_tokens"] == 2);
  std::string text;
  CHECK(streamed(client, completions, body, text) == expected);
  CHECK(text == "béb");
  // Of every choice, and nothing else where nothing is to be generated.
  body["max_tokens"] = 0;
  body["n"] = 3;
  const auto alone = post(client, completions, body);
  CAPTURE(alone.body.dump());
  REQUIRE(alone.body["choices"].size() == 3);
  for (const Json& choice : alone.body["choices"]) {
    CHECK(choice["text"] == "bé");
    CHECK(choice["finish_reason"] == "length");
    CHECK(choice["logprobs"]["token_logprobs"] == Json{nullptr, -1.0, -2.0, -3.0});
  }
  CHECK(alone.body["usage"]["completion_tokens"] == 0);
  // Without log-probabilities; stop strings are not looked for in it; one token.
  const auto plain =
      post(client, completions,
           Json{{"prompt", {"abab", {100}}}, {"echo", true}, {"max_tokens", 3}, {"stop", "ab"}});
  CHECK(plain.body["choices"][0]["text"] == "abab");
  CHECK(plain.body["choices"][0]["finish_reason"] == "stop");
  CHECK(plain.body["choices"][0]["logprobs"].is_null());
  CHECK(plain.body["choices"][1]["text"] == "aaaa");
  const auto one =
      post(client, completions,
           Json{{"prompt", {100}}, {"echo", true}, {"max_tokens", 0}, {"logprobs", 0}});
  CHECK(one.body["choices"][0]["text"] == "a");
  CHECK(one.body["choices"][0]["logprobs"]["token_logprobs"] == Json::array({nullptr}));
}

TEST_CASE("what has no probability has one that JSON can say") {
  const auto tokenizer = byte_tokenizer(300);
  const float infinity = std::numeric_limits<float>::infinity();
  const std::vector<ScoredToken> scored{{-1, 0, {{100, -infinity}, {101, std::nanf("")}}}};
  const Json text = logprobs_json(false, *tokenizer, scored);
  CHECK(text["token_logprobs"][0] == -9999.0);
  CHECK(logprobs_json(true, *tokenizer, scored)["content"][0]["top_logprobs"][0]["logprob"] ==
        -9999.0);
  CHECK(logprobs_json(true, *tokenizer, {}).is_null());
}
