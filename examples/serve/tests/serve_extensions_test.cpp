// What clients of vLLM send beside OpenAI's fields, and the paths that they ask for: where texts
// end, and why; the tokens of prompts and chats.
#include <doctest/doctest.h>

#include <chunkattn/version.hpp>
#include <string>
#include <vector>

#include "http_setup.hpp"

using namespace serve;
using namespace test;

namespace {

/// The byte tokenizer's.
int token_of(char c) {
  return 3 + static_cast<unsigned char>(c);
}

/// What is said after a prompt, which is repeated, and how it ends.
struct Said {
  std::string text;
  Json finish, reason;
};

Said said(httplib::Client& client, Json body) {
  const Json choice = post(client, completions, body).body["choices"][0];
  return {choice["text"], choice["finish_reason"], choice["stop_reason"]};
}

}  // namespace

TEST_CASE("a token of stop_token_ids ends a text, is no part of it, and is the reason") {
  ScriptedSite s;
  auto client = s.site.client();
  const Json body{{"prompt", "abcd"}, {"stop_token_ids", {token_of('x'), token_of('c')}}};
  const Said stopped = said(client, body);
  CHECK(stopped.text == "ab");
  CHECK(stopped.finish == "stop");
  CHECK(stopped.reason == token_of('c'));
  Json all = body;
  all["stop_token_ids"] = {token_of('x')};
  CHECK(said(client, all).finish == "length");
  CHECK(said(client, all).reason.is_null());
  all["stop"] = {"x", "cd"};  // a string is a reason, too
  CHECK(said(client, all).text == "ab");
  CHECK(said(client, all).reason == "cd");

  Json chat{{"messages", {{{"role", "user"}, {"content", "a"}}}},
            {"stop_token_ids", {token_of('u')}}};
  const Json whole = post(client, chats, chat).body["choices"][0];
  CHECK(whole["message"]["content"] == "<|im_start|>");
  CHECK(whole["stop_reason"] == token_of('u'));
  for (const bool is_chat : {false, true}) {  // in a stream, beside the finish
    Json streamed = is_chat ? chat : body;
    streamed["stream"] = true;
    const auto result =
        client.Post(is_chat ? chats : completions, streamed.dump(), "application/json");
    REQUIRE(static_cast<bool>(result));
    int reasons = 0;
    for (const std::string& event : events_of(result->body)) {
      if (event == "[DONE]") continue;
      const Json choice = Json::parse(event)["choices"][0];
      CHECK(choice.contains("stop_reason") == !choice["finish_reason"].is_null());
      if (choice["finish_reason"].is_null()) continue;
      ++reasons;
      CHECK(choice["stop_reason"] == token_of(is_chat ? 'u' : 'c'));
    }
    CHECK(reasons == 1);
  }
}

TEST_CASE("within min_tokens neither tokens nor strings end a text") {
  ScriptedSite s;
  auto client = s.site.client();
  Json body{{"prompt", {token_of('a'), token_of('b'), token_of('c')}}, {"max_tokens", 12}};
  const auto text = [&](int min_tokens, const char* name, const Json& stop) {
    Json one = body;
    one["min_tokens"] = min_tokens;
    one[name] = stop;
    return said(client, one).text;
  };
  for (const auto& [min_tokens, expected] :
       std::vector<std::pair<int, std::string>>{{0, "a"}, {1, "a"}, {2, "abca"}, {5, "abcabca"}}) {
    CAPTURE(min_tokens);
    CHECK(text(min_tokens, "stop_token_ids", {token_of('b')}) == expected);
    CHECK(text(min_tokens, "stop", "b") == expected);
  }
  // One that ends after them counts, though it begins within them, and is no part of the text.
  CHECK(text(2, "stop", "bc") == "a");
  CHECK(text(3, "stop", "bc") == "abca");
  CHECK(text(3, "stop", "bca") == "a");
  CHECK(text(12, "stop", "c") == "abcabcabcabc");
  CHECK(text(12, "stop", "ca") == "abcabcabcabc");  // what is held back at the end is said
}

TEST_CASE("what vLLM's load generator sends is taken") {
  ScriptedSite s;
  auto client = s.site.client();
  Json body = Json::parse(R"({"model": "tiny", "prompt": "abc", "temperature": 0.0,
      "repetition_penalty": 1.0, "max_tokens": 32, "logprobs": null, "stream": true,
      "stream_options": {"include_usage": true}, "ignore_eos": true})");
  auto result = client.Post(completions, body.dump(), "application/json");
  REQUIRE(static_cast<bool>(result));
  CHECK(result->status == 200);
  auto events = events_of(result->body);
  REQUIRE(events.size() > 2);
  CHECK(Json::parse(events[events.size() - 2])["usage"]["completion_tokens"] == 32);
  CHECK(s.levers.last_request().ignore_eos);
  body.erase("prompt");
  body.erase("max_tokens");
  body["messages"] =
      Json::parse(R"([{"role": "user", "content": [{"type": "text", "text": "abc"}]}])");
  body["max_completion_tokens"] = 32;
  result = client.Post(chats, body.dump(), "application/json");
  REQUIRE(static_cast<bool>(result));
  CHECK(result->status == 200);
}

TEST_CASE("/tokenize gives the tokens of a prompt or a chat, as they are computed") {
  HttpOptions options;
  options.api_key = "secret";
  ScriptedSite s(options);
  auto client = s.site.client("secret");
  const auto tokens = [&](const Json& body) {
    const auto reply = post(client, "/tokenize", body);
    CAPTURE(reply.body.dump());
    REQUIRE(reply.status == 200);
    CHECK(reply.body.size() == 3);
    CHECK(reply.body["count"] == reply.body["tokens"].size());
    CHECK(reply.body["max_model_len"] == 256);
    return reply.body["tokens"].get<std::vector<int>>();
  };
  const std::vector<int> ab{1, token_of('a'), token_of('b')};
  CHECK(tokens({{"prompt", "ab"}, {"model", "tiny"}, {"add_special_tokens", true}}) == ab);
  CHECK(tokens({{"prompt", "ab"}}) == ab);
  CHECK(tokens({{"prompt", "ab"}, {"add_special_tokens", false}, {"return_token_strs", false}}) ==
        std::vector<int>{token_of('a'), token_of('b')});
  CHECK(tokens({{"prompt", ""}, {"add_special_tokens", false}}).empty());
  Json chat{{"messages", {{{"role", "user"}, {"content", "ab"}}}}, {"add_generation_prompt", true}};
  const std::vector<int> of_chat = tokens(chat);
  CHECK(post(client, chats, {{"messages", chat["messages"]}, {"max_tokens", 1}}).status == 200);
  CHECK(s.levers.last_request().prompt == of_chat);
  CHECK(tokens({{"prompt", std::string(700, 'x')}}).size() == 701);  // more than a text may have
  CHECK(post(client, "/tokenize", Json{{"prompt", std::string(2000, 'x')}}).body["error"]["code"] ==
        "context_length_exceeded");  // far more

  struct Wrong {
    Json body;
    const char* says;
  };
  Json special = chat;
  special["add_special_tokens"] = true;
  Json unclosed = chat;
  unclosed["add_generation_prompt"] = false;
  for (const Wrong& wrong : std::vector<Wrong>{
           {Json::object(), "prompt = null: expected a string, or messages in place of it"},
           {{{"prompt", "a"}, {"messages", Json::array()}}, "messages in place of it"},
           {{{"prompt", {"a"}}}, "prompt = […]: expected a string"},
           {{{"messages", Json::array()}}, "messages = []: expected a list"},
           {{{"prompt", "a"}, {"max_tokens", 5}}, "max_tokens = 5: expected nothing"},
           {{{"prompt", "a"}, {"return_token_strs", true}}, "return_token_strs = true"},
           {special, "add_special_tokens = true: expected false beside messages"},
           {unclosed, "add_generation_prompt = false: expected true"}}) {
    const auto reply = post(client, "/tokenize", wrong.body);
    CAPTURE(reply.body.dump());
    CHECK(reply.status == 400);
    CHECK(reply.body["error"]["message"].get<std::string>().find(wrong.says) != std::string::npos);
  }
  CHECK(post(client, "/tokenize", Json{{"prompt", "a"}, {"model", "gpt-4"}}).status == 404);
  CHECK(post(client, "/tokenize", std::string("{")).body["error"]["type"] ==
        "invalid_request_error");
  CHECK(reply_of(client.Post("/tokenize", R"({"prompt": "a"})", "text/plain")).status == 415);
  CHECK(reply_of(client.Get("/tokenize")).status == 405);
  auto stranger = s.site.client();
  CHECK(post(stranger, "/tokenize", Json{{"prompt", "a"}}).status == 401);
}

TEST_CASE("/version and /ping are for everybody") {
  HttpOptions options;
  options.api_key = "secret";
  ScriptedSite s(options);
  auto client = s.site.client();
  CHECK(reply_of(client.Get("/version")).body ==
        Json{{"version", std::to_string(CHUNKATTN_VERSION_MAJOR) + "." +
                             std::to_string(CHUNKATTN_VERSION_MINOR) + "." +
                             std::to_string(CHUNKATTN_VERSION_PATCH)}});
  CHECK(reply_of(client.Get("/ping")).body == reply_of(client.Get("/health")).body);
  s.site.service().close();
  CHECK(reply_of(client.Get("/ping")).status == 503);
}
