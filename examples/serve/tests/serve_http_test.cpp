// The server over loopback: replies whole and streamed, every field that is refused, every path,
// keys.
#include <doctest/doctest.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "http_setup.hpp"
#include "server/metrics.hpp"
#include "server/tree_json.hpp"
#include "tests/support/nested_json.hpp"
#include "tests/support/random.hpp"

using namespace serve;
using namespace test;

namespace {

Json user_says(const std::string& text) {
  return {{"messages", {{{"role", "user"}, {"content", text}}}}};
}

}  // namespace

TEST_CASE("a completion comes as a whole, as OpenAI's") {
  ScriptedSite s;
  auto client = s.site.client();
  const auto reply = post(client, completions,
                          Json{{"model", "tiny"}, {"prompt", "abé"}, {"max_tokens", 10}, {"n", 2}});
  CHECK(reply.status == 200);
  CAPTURE(reply.body.dump());
  CHECK(reply.body["object"] == "text_completion");
  CHECK(reply.body["id"].get<std::string>().starts_with("cmpl-"));
  CHECK(reply.body["model"] == "tiny");
  CHECK(reply.body["created"].get<long long>() > 1'700'000'000);
  REQUIRE(reply.body["choices"].size() == 2);
  for (int i = 0; i < 2; ++i) {
    CHECK(reply.body["choices"][i]["index"] == i);
    CHECK(reply.body["choices"][i]["text"] == "abéabé");  // each time a token to begin a text
    CHECK(reply.body["choices"][i]["finish_reason"] == "length");
  }
  CHECK(reply.body["usage"] == Json{{"prompt_tokens", 5},
                                    {"completion_tokens", 20},
                                    {"total_tokens", 25},
                                    {"prompt_tokens_details", {{"cached_tokens", 1}}}});
  const auto tokens = post(client, completions,
                           Json{{"prompt", {100, 101, 102}}, {"max_tokens", 4}, {"stop", nullptr}});
  CHECK(tokens.body["usage"]["prompt_tokens"] == 3);
  const auto one = post(client, completions, Json{{"prompt", {"ab"}}});
  CHECK(one.body["usage"]["completion_tokens"] == 16);  // OpenAI's default
}

TEST_CASE("a chat comes as a whole, and its content is text alone") {
  ScriptedSite s;
  auto client = s.site.client();
  Json body = user_says("Hi");
  body["max_completion_tokens"] = 24;
  body["max_tokens"] = 3;  // the older name does not count beside the newer
  const auto reply = post(client, chats, body);
  CHECK(reply.status == 200);
  CHECK(reply.body["object"] == "chat.completion");
  CHECK(reply.body["choices"][0]["message"] ==
        Json{{"role", "assistant"}, {"content", "<|im_start|>user\nHi<|im_"}});
  body["messages"] = {
      {{"role", "developer"}, {"content", "A"}},
      {{"role", "user"},
       {"content", {{{"type", "text"}, {"text", "B"}}, {{"type", "text"}, {"text", "C"}}}}}};
  body["max_completion_tokens"] = 57;
  CHECK(post(client, chats, body).body["choices"][0]["message"]["content"] ==
        "<|im_start|>system\nA<|im_end|>\n<|im_start|>user\nBC<|im_en");
  body = user_says("x");
  const auto full = post(client, chats, body);  // as much as fits
  CHECK(full.body["usage"]["total_tokens"] == 256);
}

TEST_CASE("a history that clients build is taken, with all that replies have") {
  ScriptedSite s;
  auto client = s.site.client();
  const auto messages_of = [&](const std::string& messages) {
    const std::string body = R"({"max_tokens": 1, "messages": )" + messages + "}";
    const auto reply = post(client, chats, body);
    CAPTURE(reply.body.dump());
    CHECK(reply.status == 200);
    std::string text;
    for (const int token : s.levers.last_request().prompt)
      text += byte_tokenizer(300)->decode(5, token);
    return text;
  };
  const std::string end = "<|im_end|>\n", asks = "<|im_start|>assistant\n";
  // What the openai package's model_dump() has of a reply that asks for a tool.
  CHECK(messages_of(R"([{"role": "user", "content": "a"},
      {"content": null, "refusal": null, "role": "assistant", "annotations": [], "audio": null,
       "function_call": null, "tool_calls": [{"id": "call_1", "type": "function", "index": 0,
         "function": {"name": "f", "arguments": "{\"x\": 1}"}}]},
      {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "7"}]}])") ==
        "<|im_start|>user\na" + end + asks +
            "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\": 1}}\n</tool_call>" + end +
            "<|im_start|>tool\n7" + end + asks);
  CHECK(messages_of(R"([{"role": "assistant", "content": "", "function_call": {"name": "g"}},
      {"role": "function", "name": "g", "content": null}])") ==
        asks + "<tool_call>\n{\"name\": \"g\", \"arguments\": {}}\n</tool_call>" + end +
            "<|im_start|>tool\n" + end + asks);
  CHECK(messages_of(R"([{"role": "assistant", "tool_calls": [{"type": "custom",
      "custom": {"name": "h", "input": "a\"b"}}, {"function": {"name": "i", "arguments": {"y": 2}}}]}])") ==
        asks + "<tool_call>\n{\"name\": \"h\", \"arguments\": \"a\\\"b\"}\n</tool_call>\n" +
            "<tool_call>\n{\"name\": \"i\", \"arguments\": {\"y\":2}}\n</tool_call>" + end + asks);
  CHECK(messages_of(R"([{"role": "user", "content": "a"}, {"role": "developer", "content": "b"},
      {"role": "system", "content": "c", "name": "me"}])") ==
        "<|im_start|>user\na" + end + "<|im_start|>system\nb" + end + "<|im_start|>system\nc" +
            end + asks);
  CHECK(messages_of(R"([{"role": "assistant", "content": "a", "reasoning_content": "hm", "id": "x",
      "reasoning": "hm", "annotations": [{"type": "url_citation"}], "parsed": {"x": 1},
      "reasoning_details": [{"type": "x"}], "prefix": false, "unknown": "", "other": {}}])") ==
        asks + "a" + end + asks);
  CHECK(messages_of(R"([{"role": "assistant", "content": null, "refusal": "No."},
      {"role": "assistant", "content": [{"type": "refusal", "refusal": "Never."}]},
      {"role": "assistant", "content": null, "audio": {"id": "a", "transcript": "Hm."}},
      {"role": "assistant", "content": null, "audio": {"id": "a"}}])") ==
        asks + "No." + end + asks + "Never." + end + asks + "Hm." + end + asks + end + asks);
  // And its own replies, as they are.
  Json body = user_says("b");
  body["max_tokens"] = 20;
  const Json mine = post(client, chats, body).body["choices"][0]["message"];
  CHECK(messages_of(Json::array({mine}).dump()) ==
        asks + mine["content"].get<std::string>() + end + asks);
}

TEST_CASE("streams come in whole characters, with usage if wanted, and end with [DONE]") {
  ScriptedSite s;
  auto client = s.site.client();
  Json body{{"prompt", "é€ "}, {"max_tokens", 13}, {"stream", true}, {"n", 2}};
  for (const bool usage : {false, true}) {
    if (usage) body["stream_options"] = {{"include_usage", true}};
    const auto result = client.Post(completions, body.dump(), "application/json");
    REQUIRE(static_cast<bool>(result));
    CHECK(result->get_header_value("Content-Type") == "text/event-stream");
    auto events = test::events_of(result->body);
    REQUIRE(events.size() > 3);
    CHECK(events.back() == "[DONE]");
    events.pop_back();
    if (usage) {
      const Json last = Json::parse(events.back());
      CHECK(last["choices"].empty());
      CHECK(last["usage"]["completion_tokens"] == 26);
      events.pop_back();
    }
    std::string texts[2];
    Json finish[2];
    for (const std::string& event : events) {
      const Json data = Json::parse(event);    // which refuses half a character
      CHECK(data.contains("usage") == usage);  // null until the last, as OpenAI's
      const Json& choice = data["choices"].at(0);
      texts[choice["index"].get<int>()] += choice["text"].get<std::string>();
      if (!choice["finish_reason"].is_null())
        finish[choice["index"].get<int>()] = choice["finish_reason"];
    }
    for (int i = 0; i < 2; ++i) {
      CHECK(texts[i] == "é€ é€");  // bos, 2, 3, 1; bos, 2, 3: 13 tokens
      CHECK(finish[i] == "length");
    }
  }
  Json chat = user_says("Hello");
  chat["stream"] = true;
  chat["stop"] = "Hello";
  const auto result = client.Post(chats, chat.dump(), "application/json");
  REQUIRE(static_cast<bool>(result));
  const auto events = test::events_of(result->body);
  const Json first = Json::parse(events.front());
  CHECK(first["object"] == "chat.completion.chunk");
  CHECK(first["choices"][0]["delta"] == Json{{"role", "assistant"}, {"content", ""}});
  std::string text;
  for (std::size_t i = 1; i + 2 < events.size(); ++i)
    text += Json::parse(events[i])["choices"][0]["delta"]["content"].get<std::string>();
  CHECK(text == "<|im_start|>user\n");
  CHECK(Json::parse(events[events.size() - 2])["choices"][0]["finish_reason"] == "stop");
}

TEST_CASE("a field that is wrong is named, with its value and what was expected") {
  ScriptedSite s;
  auto client = s.site.client();
  struct Wrong {
    const char* path;
    std::string body;
    const char* param;
    const char* says;
  };
  const std::string deep = std::string(40, '[') + std::string(40, ']');
  const Wrong wrong[] = {
      {completions, "", "", "the body is not JSON"},
      {completions, "{", "", "the body is not JSON"},
      {completions, "[]", "", "the body is array: expected an object"},
      {completions, "null", "", "the body is null"},
      {completions, R"({"prompt": "a", "user": tru})", "user", "(in user or behind it)"},
      {completions, "{\"prompt\": \"\xff\xfe\"}", "prompt", "UTF-8"},
      {completions, R"({"prompt": "\ud800"})", "prompt", "surrogate"},
      {completions, R"({"prompt": "a", "top_p": 1e999})", "top_p", "overflow"},
      {completions, R"({"prompt": "a", "metadata": )" + deep + "}", "metadata",
       "more than 32 levels"},
      {completions, std::string(100'000, '['), "", "more than 32 levels"},
      {completions, R"({"prompt": )" + test::nested_json()[0] + "}", "prompt",
       "more than 32 levels"},
      {completions, test::nested_json()[1], "a", "more than 32 levels"},
      {completions, R"({"prompt": "a")" + std::string(100'000, ' '), "prompt", "not JSON"},
      {completions, "{}", "prompt", "prompt = null: expected a string, or a list of tokens, or a"},
      {completions, R"({"prompt": 7})", "prompt", "prompt = 7"},
      {completions, R"({"prompt": []})", "prompt", "0 tokens: expected at least one"},
      {completions, R"({"prompt": ["a", []]})", "prompt[1]", "prompt[1] = 0 tokens"},
      {completions, R"({"prompt": ["a", 5]})", "prompt[1]", "prompt[1] = 5: expected a string"},
      {completions, R"({"prompt": [5, "a"]})", "prompt[1]", "expected a token"},
      {completions, R"({"prompt": [[5], [[5]]]})", "prompt[1][0]", "expected a token"},
      {completions, R"({"prompt": [{}]})", "prompt[0]", "expected a string"},
      {completions, R"({"prompt": ["a","b","c","d","e","f","g","h","i"], "n": 16})", "prompt",
       "at most 8 prompts, as n = 16"},
      {completions, R"({"prompt": [5, -1]})", "prompt[1]", "prompt[1] = -1: expected a token"},
      {completions, R"({"prompt": [5, 300]})", "prompt[1]", "from 0 to 299"},
      {completions, R"({"prompt": [5, 1e3]})", "prompt[1]", "prompt[1] = 1000.0"},
      {completions, R"({"prompt": "a", "max_tokens": 0})", "max_tokens", "max_tokens = 0"},
      {completions, R"({"prompt": "a", "max_tokens": 1.5})", "max_tokens", "max_tokens = 1.5"},
      {completions, R"({"prompt": "a", "max_tokens": "5"})", "max_tokens", "max_tokens = \"5\""},
      {completions, R"({"prompt": "a", "max_tokens": 18446744073709551615})", "max_tokens",
       "1844674"},
      {completions, R"({"prompt": "a", "max_tokens": 99999999999999999999999})", "max_tokens",
       "e+22"},
      {completions, R"({"prompt": "a", "max_tokens": 255})", "max_tokens", "at most 254 behind 2"},
      {completions, R"({"prompt": "a", "n": 0})", "n", "n = 0: expected an integer from 1 to 16"},
      {completions, R"({"prompt": "a", "n": 17})", "n", "n = 17"},
      {completions, R"({"prompt": "a", "temperature": -0.1})", "temperature", "from 0 to 2"},
      {completions, R"({"prompt": "a", "temperature": "hot"})", "temperature", "\"hot\""},
      {completions, R"({"prompt": "a", "top_p": 1.01})", "top_p", "top_p = 1.01"},
      {completions, R"({"prompt": "a", "seed": 1e30})", "seed", "seed = 1e+30"},
      {completions, R"({"prompt": "a", "stop": ""})", "stop", "stop = \"\""},
      {completions, R"({"prompt": "a", "stop": ["a", 5]})", "stop[1]", "stop[1] = 5"},
      {completions, R"({"prompt": "a", "stop": ["a", "b", "c", "d", "e"]})", "stop", "up to 4"},
      {completions, R"({"prompt": "a", "stream": 1})", "stream",
       "stream = 1: expected true or false"},
      {completions, R"({"prompt": "a", "stream_options": {}})", "stream_options", "stream = true"},
      {completions, R"({"prompt": "a", "cache_salt": 5})", "cache_salt", "a string of at most 256"},
      {completions, R"({"prompt": "a", "logprobs": 21})", "logprobs", "from 0 to 20"},
      {completions, R"({"prompt": "a", "logprobs": true})", "logprobs", "from 0 to 20"},
      {completions, R"({"prompt": "a", "echo": 1})", "echo", "expected true or false"},
      {completions, R"({"prompt": "a", "echo": true, "max_tokens": -1})", "max_tokens",
       "from 0 to"},
      {chats, R"({"messages": [{"role": "user", "content": "a"}], "echo": true})", "echo",
       "expected false"},
      {completions, R"({"prompt": "a", "suffix": "b"})", "suffix", "not supported"},
      {completions, R"({"prompt": "a", "presence_penalty": 2.5})", "presence_penalty",
       "from -2 to 2"},
      {completions, R"({"prompt": "a", "frequency_penalty": "1"})", "frequency_penalty",
       "from -2 to 2"},
      {completions, R"({"prompt": "a", "repetition_penalty": 0})", "repetition_penalty",
       "repetition_penalty = 0: expected a number above 0, at most 100"},
      {completions, R"({"prompt": "a", "repetition_penalty": -1.5})", "repetition_penalty",
       "from 0 to 100"},
      {completions, R"({"prompt": "a", "repeat_penalty": 1.1})", "repeat_penalty",
       "repetition_penalty is supported"},
      {completions, R"({"prompt": "a", "min_tokens": -1})", "min_tokens", "min_tokens = -1"},
      {completions, R"({"prompt": "a", "min_tokens": 6, "max_tokens": 5})", "min_tokens",
       "min_tokens = 6: expected at most max_tokens, 5"},
      {chats, R"({"messages": [{"role": "user", "content": "a"}], "min_tokens": 250})",
       "min_tokens", "min_tokens = 250: expected at most max_tokens, "},
      {completions, R"({"prompt": "a", "stop_token_ids": 5})", "stop_token_ids",
       "a list of at most 1024 tokens"},
      {completions, R"({"prompt": "a", "stop_token_ids": [5, 300]})", "stop_token_ids[1]",
       "stop_token_ids[1] = 300: expected a token from 0 to 299"},
      {completions, R"({"prompt": "a", "stop_token_ids": ["</s>"]})", "stop_token_ids[0]",
       "expected a token"},
      {completions, R"({"prompt": "a", "top_k": -2})", "top_k", "top_k = -2"},
      {completions, R"({"prompt": "a", "top_k": 1.5})", "top_k", "an integer"},
      {completions, R"({"prompt": "a", "min_p": 1.5})", "min_p", "from 0 to 1"},
      {completions, R"({"prompt": "a", "logit_bias": [[5, 1]]})", "logit_bias", "an object"},
      {completions, R"({"prompt": "a", "logit_bias": {"300": 1}})", "logit_bias",
       "tokens from 0 to 299"},
      {completions, R"({"prompt": "a", "logit_bias": {"5 ": 1}})", "logit_bias", "\"5 \""},
      {completions, R"({"prompt": "a", "logit_bias": {"5": 101}})", "logit_bias.5", "-100 to 100"},
      {completions, R"({"prompt": "a", "logit_bias": {"5": false}})", "logit_bias.5", "= false"},
      {completions, R"({"prompt": "a", "ignore_eos": 1})", "ignore_eos",
       "ignore_eos = 1: expected true or false"},
      {completions, R"({"prompt": "a", "temprature": 0.5})", "temprature",
       "temprature = 0.5: expected nothing: no field of this name is known here"},
      {completions, R"({"prompt": "a", "max_completion_tokens": 5})", "max_completion_tokens",
       "no field"},
      {completions, R"({"prompt": "a", "stream": true, "stream_options": {"x": true}})",
       "stream_options.x", "only include_usage"},
      {completions, R"({"prompt": "a", "best_of": 3})", "best_of", "not supported"},
      {chats, "{}", "messages", "messages = null"},
      {chats, R"({"messages": []})", "messages", "at least one message"},
      {chats, R"({"messages": ["a"]})", "messages[0]", "messages[0] = \"a\""},
      {chats, R"({"messages": [{"role": "user"}]})", "messages[0].content",
       "messages[0].content = null"},
      {chats, R"({"messages": [{"role": "critic", "content": "a"}]})", "messages[0].role",
       "\"critic\": expected system, developer, user, assistant, tool or function"},
      {chats, R"({"messages": [{"content": "a"}]})", "messages[0].role", "= null"},
      {chats, R"({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]})",
       "messages[0].content[0]", "expected {\"type\": \"text\""},
      {chats, R"({"messages": [{"role": "user", "content": null}]})", "messages[0].content",
       "= null"},
      {chats,
       R"({"messages": [{"role": "user", "content": [{"type": "refusal", "refusal": "a"}]}]})",
       "messages[0].content[0]", "expected {\"type\": \"text\""},
      {chats, R"({"messages": [{"role": "user", "content": "a", "contend": "b"}]})",
       "messages[0].contend", "no field of this name"},
      {chats, R"({"messages": [{"role": "assistant", "tool_calls": {}}]})",
       "messages[0].tool_calls", "expected a list"},
      {chats, R"({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": 5}}]}]})",
       "messages[0].tool_calls[0].function", "the name of a tool"},
      {chats, R"({"messages": [{"role": "assistant", "function_call": "f"}]})",
       "messages[0].function_call", "the name of a tool"},
      {chats, R"({"messages": [{"role": "user", "content": "a"}], "tools": [1]})", "tools",
       "not supported"},
      {chats, R"({"messages": [{"role": "user", "content": "a"}], "web_search_options": {}})",
       "web_search_options", "not supported"},
      {chats, R"({"messages": [{"role": "user", "content": "a"}], "top_logprobs": 2})",
       "top_logprobs", "logprobs = true beside it"},
      {chats, R"({"messages": [{"role": "user", "content": "a"}], "logprobs": 2})", "logprobs",
       "true or false"},
      {chats,
       R"({"messages": [{"role": "assistant", "content": "a", "tool_calls": [{"id": "1"}]}]})",
       "messages[0].tool_calls[0]", "\"function\": …"},
      {chats,
       R"({"messages": [{"role": "user", "content": "a"}], "response_format": {"type": "json_object"}})",
       "response_format", "not supported"},
  };
  for (const Wrong& one : wrong) {
    CAPTURE(one.body.substr(0, 100));
    const auto reply = post(client, one.path, one.body);
    CAPTURE(reply.body.dump());
    CHECK(reply.status == 400);
    CHECK(reply.body["error"]["type"] == "invalid_request_error");
    CHECK(reply.body["error"]["message"].get<std::string>().find(one.says) != std::string::npos);
    CHECK(reply.body["error"]["param"] == (*one.param == '\0' ? Json() : Json(one.param)));
  }
  const std::string long_prompt(300, 'x');
  for (const char* path : {completions, chats}) {
    const Json body = path == chats ? user_says(long_prompt) : Json{{"prompt", long_prompt}};
    const auto reply = post(client, path, body);
    CHECK(reply.status == 400);
    CHECK(reply.body["error"]["code"] == "context_length_exceeded");
  }
  // Of one that cannot fit whatever its tokens are, the bytes are counted and nothing else is done.
  for (const char* path : {completions, chats}) {
    const std::string longer(2000, 'x');
    const Json body = path == chats ? user_says(longer) : Json{{"prompt", longer}};
    const auto reply = post(client, path, body);
    CHECK(reply.status == 400);
    CHECK(reply.body["error"]["code"] == "context_length_exceeded");
    CHECK(reply.body["error"]["param"] == (path == chats ? "messages" : "prompt"));
    CHECK(reply.body["error"]["message"].get<std::string>().find(" bytes, which are at least ") !=
          std::string::npos);
  }
  // What the engine itself refuses.
  CHECK(post(client, completions, Json{{"prompt", std::string(210, 'x')}}).status == 400);
  CHECK(post(client, completions, Json{{"prompt", "a"}, {"model", "gpt-4"}}).status == 404);
  CHECK(post(client, completions, Json{{"prompt", {"a", std::string(210, 'x'), "b"}}}).status ==
        400);
  CHECK(post(client, completions, Json{{"prompt", "a"}, {"user", "me"}, {"seed", -5}}).status ==
        200);
  s.site.served().chat = nullptr;
  s.site.served().no_chat = "it has no template";
  CHECK(post(client, chats, user_says("a"))
            .body["error"]["message"]
            .get<std::string>()
            .ends_with("it has no template"));
  CHECK(s.site.service().counters().requests == 0);
}

TEST_CASE("values that stand for nothing are taken, and what says nothing about the reply") {
  ScriptedSite s;
  auto client = s.site.client();
  const Json neutral = Json::parse(R"({
    "tools": [], "functions": null, "tool_choice": "none", "parallel_tool_calls": true,
    "response_format": {"type": "text"}, "modalities": ["text"], "store": false, "audio": null,
    "service_tier": "auto", "user": "me", "metadata": {"a": "b"}, "prompt_cache_key": "k",
    "safety_identifier": "x", "skip_special_tokens": true, "ignore_eos": false,
    "no_stop_trim": false, "stop_token_ids": [], "repetition_penalty": 1.0, "min_tokens": 0,
    "separate_reasoning": true, "logit_bias": {}, "top_k": -1, "min_p": 0, "logprobs": false,
    "frequency_penalty": 0, "presence_penalty": 0.0, "best_of": 1, "nothing_known": null})");
  for (const char* path : {completions, chats}) {
    Json body = path == chats ? user_says("a") : Json{{"prompt", "a"}};
    body.update(neutral);
    const auto reply = post(client, path, body);
    CAPTURE(reply.body.dump());
    CHECK(reply.status == 200);
    CHECK(reply.body["choices"][0]["logprobs"].is_null());
  }
}

TEST_CASE("what is asked of sampling reaches the engine") {
  ScriptedSite s;
  auto client = s.site.client();
  CHECK(post(client, completions,
             Json{{"prompt", "a"},
                  {"temperature", 0.5},
                  {"top_p", 0.25},
                  {"top_k", 7},
                  {"min_p", 0.125},
                  {"seed", 9},
                  {"frequency_penalty", 1.5},
                  {"presence_penalty", -0.5},
                  {"repetition_penalty", 1.25},
                  {"ignore_eos", true},
                  {"min_tokens", 3},
                  {"stop_token_ids", {40, 41}},
                  {"logit_bias", {{"7", -100}, {"12", 2.5}, {"007", 3}}}})
            .status == 200);
  const Request last = s.levers.last_request();
  CHECK(last.sampling.temperature == 0.5);
  CHECK(last.sampling.top_p == 0.25);
  CHECK(last.sampling.top_k == 7);
  CHECK(last.sampling.min_p == 0.125);
  CHECK(last.sampling.seed == 9);
  CHECK(last.sampling.frequency_penalty == 1.5);
  CHECK(last.sampling.presence_penalty == -0.5);
  CHECK(last.sampling.repetition_penalty == 1.25);
  CHECK(last.ignore_eos);
  CHECK(last.min_tokens == 3);
  CHECK(last.stop_tokens == std::vector<int>{40, 41});
  REQUIRE(last.logit_bias.size() == 2);  // a token is one, however it is written
  CHECK(last.logit_bias[0].token == 7);
  CHECK(last.logit_bias[1].token == 12);
  CHECK(last.logit_bias[1].bias == 2.5f);
  CHECK(last.logprobs == -1);
}

TEST_CASE("several prompts are answered in their order, each with its choices") {
  ServiceOptions options;
  options.max_requests = 4;
  ScriptedSite s({}, options);
  auto client = s.site.client();
  Json body{{"prompt", {"abc", "de", {103, 104}}}, {"max_tokens", 8}, {"n", 2}};
  const auto reply = post(client, completions, body);
  CAPTURE(reply.body.dump());
  CHECK(reply.status == 200);
  REQUIRE(reply.body["choices"].size() == 6);
  std::vector<std::string> said;
  for (int i = 0; i < 6; ++i) {
    CHECK(reply.body["choices"][i]["index"] == i);
    said.push_back(reply.body["choices"][i]["text"].get<std::string>());
  }
  CHECK(said ==
        std::vector<std::string>{"abcabc", "abcabc", "deded", "deded", "dededede", "dededede"});
  CHECK(reply.body["usage"] == Json{{"prompt_tokens", 9},
                                    {"completion_tokens", 48},
                                    {"total_tokens", 57},
                                    {"prompt_tokens_details", {{"cached_tokens", 3}}}});
  body["stream"] = true;
  const auto result = client.Post(completions, body.dump(), "application/json");
  REQUIRE(static_cast<bool>(result));
  std::vector<std::string> streamed(6);
  int ended = 0;
  for (const std::string& event : test::events_of(result->body)) {
    if (event == "[DONE]") continue;
    const Json choice = Json::parse(event)["choices"][0];
    streamed.at(choice["index"].get<std::size_t>()) += choice["text"].get<std::string>();
    ended += choice["finish_reason"] == "length" ? 1 : 0;
  }
  CHECK(streamed == said);
  CHECK(ended == 6);
  // All of them fit in the queue, or none.
  CHECK(post(client, completions, Json{{"prompt", {"a", "b", "c", "d", "e"}}}).status == 400);
  s.levers.held = true;
  std::thread runs([&] {
    auto other = s.site.client();
    CHECK(post(other, completions, Json{{"prompt", "abc"}, {"max_tokens", 5}}).status == 200);
  });
  CHECK(eventually([&] { return s.site.service().counters().requests == 1; }));
  CHECK(post(client, completions, Json{{"prompt", {"a", "b", "c", "d"}}}).status == 429);
  CHECK(s.site.service().counters().requests == 1);
  s.levers.held = false;
  runs.join();
  CHECK(post(client, completions, Json{{"prompt", {"a", "b", "c", "d"}}}).status == 200);
  // A client that goes away takes all of its prompts along.
  s.levers.held = true;
  {
    RawConnection connection(s.site.port());
    const std::string all = R"({"prompt": ["a", "b", "c"]})";
    connection.send(
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: "
        "application/json\r\nContent-Length: " +
        std::to_string(all.size()) + "\r\n\r\n" + all);
    CHECK(eventually([&] { return s.site.service().counters().requests == 3; }));
  }
  CHECK(eventually([&] { return s.site.service().counters().requests == 0; }));
}

TEST_CASE("routers get what they ask workers for") {
  HttpOptions options;
  options.max_requests = 7;
  ScriptedSite s(options);
  auto client = s.site.client();
  const Json info = reply_of(client.Get("/model_info")).body;
  CHECK(info["served_model_name"] == "tiny");
  CHECK(info["is_generation"] == true);
  CHECK(reply_of(client.Get("/get_model_info")).body == info);
  const auto load = [&] {
    const Json loads = reply_of(client.Get("/v1/loads?include=core,queues")).body["loads"];
    REQUIRE(loads.size() == 1);
    return loads[0];
  };
  CHECK(load()["num_running_reqs"] == 0);
  CHECK(load()["max_running_requests"] == 7);
  s.levers.held = true;
  std::thread runs([&] {
    auto other = s.site.client();
    (void)post(other, "/v1/completions", Json{{"prompt", "abc"}, {"max_tokens", 5}});
  });
  CHECK(eventually([&] { return load()["num_running_reqs"] == 1; }));
  CHECK(load()["num_waiting_reqs"] == 0);
  s.levers.held = false;
  runs.join();
  CHECK(eventually([&] { return load()["num_running_reqs"] == 0; }));
  CHECK(reply_of(client.Get("/kv_chunks")).status == 404);  // without --kv-events
}

TEST_CASE("nothing of a reply is sent before its first token") {
  ScriptedSite s;
  s.levers.held = true;
  RawConnection waits(s.site.port());
  const std::string body = R"({"prompt": "abc", "max_tokens": 5, "stream": true})";
  waits.send(
      "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
      "Connection: close\r\nContent-Length: " +
      std::to_string(body.size()) + "\r\n\r\n" + body);
  auto client = s.site.client();
  CHECK(eventually([&] { return s.levers.submitted == 1; }));
  CHECK_FALSE(waits.can_read(std::chrono::milliseconds(200)));
  s.levers.held = false;
  CHECK(waits.read().starts_with("HTTP/1.1 200"));
}

TEST_CASE("counts of both pools of K/V are in what is read of them") {
  ServiceCounters counters;
  TreeSnapshot tree;
  tree.chunks_used = 30, tree.chunks_cached = 50, tree.chunks_free = 20, tree.chunk_bytes = 7;
  tree.evicted_tokens = 9;
  const auto tokenizer = byte_tokenizer(300);
  const auto read = [&](bool matches) {
    return Json::parse(tree_json(counters, tree, *tokenizer, {.matches = matches}))["windows"];
  };
  const auto usage = [&] {
    return Json::parse(loads_json(counters, tree, 1, true))["loads"][0]["token_usage"];
  };
  CHECK(read(true).is_null());
  CHECK(usage() == 0.3);
  tree.windows = {.keys = 16,
                  .chunk_bytes = 5,
                  .chunks_used = 4,
                  .chunks_cached = 3,
                  .chunks_free = 1,
                  .evicted_chunks = 2};
  counters.engine.window_tokens = 11;
  const Json open{{"keys", 16}, {"chunk_bytes", 5}, {"used", 4},   {"cached", 3},
                  {"free", 1},  {"evicted", 2},     {"tokens", 11}};
  CHECK(read(true) == open);
  Json hidden = open;
  hidden.erase("tokens");  // which reveals what was cached
  CHECK(read(false) == hidden);
  CHECK(usage() == 0.5);
  const std::string metrics = metrics_text(counters, tree, true);
  for (const char* line : {"window_chunks{state=\"used\"} 4", "window_chunks{state=\"cached\"} 3",
                           "window_chunks{state=\"free\"} 1", "chunk_bytes{pool=\"chunks\"} 7",
                           "chunk_bytes{pool=\"window_chunks\"} 5", "evicted_tokens_total 9",
                           "evicted_window_chunks_total 2", "window_tokens_total 11"}) {
    CAPTURE(line);
    CHECK(metrics.find("\nchunkattn_" + std::string(line) + "\n") != std::string::npos);
  }
  CHECK(metrics_text(counters, tree, false).find("window_tokens") == std::string::npos);
}

TEST_CASE("there is a page, models, health, metrics, a tree; and nothing else") {
  ScriptedSite s;
  auto client = s.site.client();
  const auto page = client.Get("/");
  REQUIRE(static_cast<bool>(page));
  CHECK(page->status == 200);
  CHECK(page->get_header_value("Content-Type") == "text/html; charset=utf-8");
  CHECK(page->body.find("chunkattn") != std::string::npos);
  const Json model = reply_of(client.Get("/v1/models")).body["data"][0];
  CHECK(model["id"] == "tiny");
  CHECK(model["chats"] == true);
  CHECK(model["processor"] == "");
  CHECK(reply_of(client.Get("/v1/models/tiny")).body["id"] == "tiny");
  CHECK(reply_of(client.Get("/v1/models/other")).status == 404);
  CHECK(reply_of(client.Get("/health")).body["status"] == "ok");
  CHECK(post(client, completions, Json{{"prompt", "abc"}}).status == 200);
  const auto metrics = client.Get("/metrics");
  REQUIRE(static_cast<bool>(metrics));
  for (const char* line : {"\nchunkattn_generated_tokens_total 16\n", "\nchunkattn_requests 0\n",
                           "\nchunkattn_choices_finished_total{reason=\"length\"} 1\n",
                           "\nchunkattn_first_token_seconds_bucket{le=\"+Inf\"} 1\n",
                           "\nchunkattn_chunks{state=\"used\"} 0\n"})
    CHECK(metrics->body.find(line) != std::string::npos);
  CHECK(reply_of(client.Get("/tree")).body["generated_tokens"] == 16);
  CHECK(reply_of(client.Get("/nonsense")).status == 404);
  CHECK(reply_of(client.Get("/" + std::string(7000, 'x'))).status == 404);
  CHECK(reply_of(client.Get("/a%0Ab")).status == 404);
  CHECK(post(client, "/nonsense", Json{}).status == 404);
  for (const char* missing : {"/v1/embeddings", "/v1/responses"}) {
    const auto reply = post(client, missing, Json{{"input", "a"}});
    CHECK(reply.status == 404);
    CHECK(reply.body["error"]["message"].get<std::string>().starts_with(std::string(missing) +
                                                                        ": not supported"));
  }
  CHECK(post(client, "/health", Json{}).status == 405);
  const auto wrong = reply_of(client.Get(completions));
  CHECK(wrong.status == 405);
  CHECK(wrong.headers.find("Allow")->second == "POST");
  CHECK(wrong.body["error"]["code"].is_null());
  CHECK(reply_of(client.Delete(chats)).status == 405);
  CHECK(reply_of(client.Put("/v1/models", "{}", "application/json")).status == 405);
  CHECK(reply_of(client.Options(chats)).status == 405);
  for (const char* path : {"/health/", "/v1/models/", "/v1/models/tiny/"})
    CHECK(reply_of(client.Get(path)).status == 200);
  CHECK(post(client, "/v1/completions/", Json{{"prompt", "abc"}}).status == 200);
  CHECK(post(client, "/v1/chat/completions/", user_says("abc")).body["object"] ==
        "chat.completion");
  CHECK(reply_of(client.Get("/health//")).status == 404);
}

TEST_CASE("a body is JSON by its media type, however that is written") {
  ScriptedSite s;
  auto client = s.site.client();
  const std::string body = R"({"prompt": "abc"})";
  for (const char* type :
       {"application/json", "APPLICATION/JSON", "Application/Json; charset=utf-8",
        "application/json;charset=UTF-8", "application/json ;x=y"})
    CHECK(reply_of(client.Post(completions, body, type)).status == 200);
  for (const char* type : {"application/jsonp", "application/json-patch+json", "text/json",
                           "application/x-www-form-urlencoded", "text/plain; application/json",
                           "application/", ";application/json"})
    CHECK(reply_of(client.Post(completions, body, type)).status == 415);
  RawConnection without(s.site.port());
  without.send(
      "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
      "Content-Length: 17\r\n\r\n" +
      body);
  CHECK(without.read().starts_with("HTTP/1.1 415"));
}

TEST_CASE("pages of the origins that were named may ask, and no others") {
  HttpOptions http;
  http.api_key = "secret";
  http.origins = {"https://chat.example", "http://localhost:3000"};
  ScriptedSite s(http);
  auto client = s.site.client();
  const std::string allowed = "Access-Control-Allow-Origin";
  const auto ask = [&](const std::string& origin, const char* path) {
    const httplib::Headers headers{
        {"Origin", origin},
        {"Access-Control-Request-Method", "POST"},
        {"Access-Control-Request-Headers", "authorization,content-type,x-stainless-os"}};
    const auto result = client.Options(path, headers);
    REQUIRE(static_cast<bool>(result));
    return *result;
  };
  for (const std::string& origin : http.origins) {
    const auto reply = ask(origin, chats);  // without the key, which browsers do not send here
    CHECK(reply.status == 204);
    CHECK(reply.get_header_value(allowed.c_str()) == origin);
    CHECK(reply.get_header_value("Vary") == "Origin");
    CHECK(reply.get_header_value("Access-Control-Allow-Methods") == "GET, POST");
    CHECK(reply.get_header_value("Access-Control-Allow-Headers") ==
          "authorization,content-type,x-stainless-os");
    CHECK(ask(origin, "/nonsense").status == 404);
    // What it then asks is answered, errors included.
    for (const char* key : {"secret", "wrong"}) {
      const httplib::Headers headers{{"Origin", origin},
                                     {"Authorization", std::string("Bearer ") + key}};
      const auto said =
          client.Post(completions, headers, R"({"prompt": "abc"})", "application/json");
      REQUIRE(static_cast<bool>(said));
      CHECK(said->status == (key == std::string("secret") ? 200 : 401));
      CHECK(said->get_header_value(allowed.c_str()) == origin);
    }
  }
  for (const char* origin : {"https://chat.example.evil", "http://chat.example", "null", "",
                             "https://chat.example:444", "HTTPS://CHAT.EXAMPLE/"}) {
    const auto reply = ask(origin, chats);
    CHECK(reply.status == 405);
    CHECK_FALSE(reply.has_header(allowed.c_str()));
    const auto said = client.Get("/health", httplib::Headers{{"Origin", origin}});
    REQUIRE(static_cast<bool>(said));
    CHECK_FALSE(said->has_header(allowed.c_str()));
  }
}

TEST_CASE("a text that is cut off ends in a word that clients know, with the reason beside it") {
  ServiceOptions options;
  options.request_seconds = 0;
  ScriptedSite late({}, options), cut;
  cut.levers.slow = true;
  const auto ends = [](ScriptedSite& s, bool stream) {
    auto client = s.site.client();
    const Json body{{"prompt", "abc"}, {"max_tokens", 200}, {"stream", stream}};
    const auto result = client.Post(completions, body.dump(), "application/json");
    REQUIRE(static_cast<bool>(result));
    Json choice;
    if (stream) {
      auto events = events_of(result->body);
      choice = Json::parse(events.at(events.size() - 2))["choices"][0];
    } else {
      choice = Json::parse(result->body)["choices"][0];
    }
    CHECK(choice["finish_reason"] == "length");
    return choice.at("cut_off");
  };
  for (const bool stream : {false, true}) CHECK(ends(late, stream) == "deadline");
  std::thread ender([&] {
    CHECK(eventually([&] { return cut.levers.submitted == 1; }));
    cut.site.service().close();
    cut.site.service().drain(std::chrono::seconds(0));
  });
  CHECK(ends(cut, true) == "cancelled");
  ender.join();
  ScriptedSite whole;
  auto client = whole.site.client();
  CHECK_FALSE(
      post(client, completions, Json{{"prompt", "a"}}).body["choices"][0].contains("cut_off"));
}

TEST_CASE("the work of a body grows with its length alone, and what it is made of is limited") {
  const auto tokenizer = byte_tokenizer(300);
  const ChatTemplate chat(ChatTemplate::Family::chatml);
  const Served served{"tiny", tokenizer.get(), &chat, "", 256, 16};
  const auto repeated = [](const std::string& before, const std::string& one, int count,
                           const std::string& end) {
    std::string body = before;
    for (int i = 0; i < count; ++i) body += one + (i + 1 < count ? "," : "");
    return body + end;
  };
  struct Kind {
    const char *before, *one, *end;
  };
  const Kind kinds[] = {
      {R"({"messages": [)", R"({"role":"user","content":""})", "]}"},
      {R"({"messages": [)", "{}", "]}"},
      {R"({"messages": [{"role": "user", "content": [)", R"({"type":"text","text":""})", "]}]}"},
      {R"({"messages": [{"role": "user", "content": "a"}], "metadata": [)", "[]", "]}"},
      {R"({"prompt": [)", "[]", "]}"},
      {R"({"prompt": [)", "[5]", "]}"}};
  for (const Kind& kind : kinds) {
    CAPTURE(kind.one);
    const bool is_chat = std::string(kind.before).find("messages") != std::string::npos;
    std::string said;
    const auto seconds = [&](int count, int rounds) {  // of this thread's processor time
      const std::string body = repeated(kind.before, kind.one, count, kind.end);
      double least = 1e9;
      for (int round = 0; round < rounds; ++round) {
        timespec start{}, end{};
        clock_gettime(CLOCK_THREAD_CPUTIME_ID, &start);
        try {
          (void)(is_chat ? read_chat(body, served) : read_completion(body, served));
        } catch (const ApiError& error) {
          said = error.what();
        }
        clock_gettime(CLOCK_THREAD_CPUTIME_ID, &end);
        least = std::min(least, static_cast<double>(end.tv_sec - start.tv_sec) +
                                    1e-9 * static_cast<double>(end.tv_nsec - start.tv_nsec));
      }
      return least;
    };
    const double few = seconds(4'000, 3), many = seconds(64'000, 3);
    CAPTURE(few);
    CAPTURE(many);
    CHECK(many < 64 * few);  // 16 where it is linear, 256 where it is quadratic
    (void)seconds(70'000, 1);
    CHECK(said.find("at most 65536 lists and objects") != std::string::npos);
  }
}

TEST_CASE("with --tree-texts, texts are for those who have the key; counts are for all") {
  HttpOptions http;
  http.api_key = "secret";
  http.tree_texts = true;
  ScriptedSite s(http);
  auto good = s.site.client("secret"), bad = s.site.client("Secret"), none = s.site.client();
  const Json body{{"prompt", "abc"}};
  for (auto* client : {&bad, &none}) {
    const auto reply = post(*client, completions, body);
    CHECK(reply.status == 401);
    CHECK(reply.body["error"]["code"] == "invalid_api_key");
    CHECK(reply_of(client->Get("/v1/models")).status == 401);
    CHECK(reply_of(client->Get("/health")).status == 200);
  }
  CHECK(post(good, completions, body).status == 200);
  s.levers.held = true;
  std::thread held([&] { CHECK(post(good, completions, body).status == 200); });
  CHECK(eventually([&] { return s.levers.submitted == 2; }));
  auto other = s.site.client("secret");
  CHECK(reply_of(other.Get("/tree")).body["nodes"].at(0).contains("text"));
  for (auto* client : {&bad, &none}) {
    const Json node = reply_of(client->Get("/tree")).body["nodes"].at(0);
    CHECK(!node.contains("text"));
    CHECK(node["tokens"].get<int>() >= 4);
  }
  s.levers.held = false;
  held.join();
}

TEST_CASE("a page of another site is not answered where no key is asked for") {
  ScriptedSite s;
  RawConnection rebound(s.site.port());
  rebound.send("GET /v1/models HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n");
  CHECK(rebound.read().starts_with("HTTP/1.1 403"));
  for (const char* host : {"localhost", "localhost:8000", "127.0.0.1:9", "[::1]:7", "[::1]"}) {
    RawConnection local(s.site.port());
    local.send(std::string("GET /v1/models HTTP/1.1\r\nHost: ") + host +
               "\r\nConnection: close\r\n\r\n");
    CHECK(local.read().starts_with("HTTP/1.1 200"));
  }
}
