// All of it together: a small model, its engine, the server. Texts in company are those alone,
// prompts are found in the cache of their own tenant only, and a client that goes away gives back
// its chunks.
#include <doctest/doctest.h>

#include <cmath>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "model_site.hpp"
#include "tests/support/random.hpp"

using namespace serve;
using namespace test;

namespace {

Json request(const std::string& prompt, const std::string& salt = "") {
  Json body{{"prompt", prompt}, {"max_tokens", 24}, {"temperature", 0}};
  if (!salt.empty()) body["cache_salt"] = salt;
  return body;
}

std::size_t cached(const test::HttpReply& reply) {
  return reply.body["usage"]["prompt_tokens_details"]["cached_tokens"].get<std::size_t>();
}

}  // namespace

TEST_CASE("log-probabilities of prompts are those of the model's own logits") {
  ModelSite s;
  test::Random random(5);
  std::vector<std::vector<int>> prompts{{7}, {1}};
  for (int i = 0; i < 14; ++i) {  // with beginnings in common, some longer than a step scores
    std::vector<int> prompt(static_cast<std::size_t>(i % 3 == 0 ? 0 : 20), 40 + i % 2);
    for (int n = random.uniform(1, i % 4 == 0 ? 170 : 40); n > 0; --n)
      prompt.push_back(random.uniform(1, 299));
    prompts.push_back(prompt);
  }
  const auto check = [&](std::size_t prompt, const Json& choice, std::size_t generated) {
    const std::vector<float> own = own_logprobs(s.model, s.products, prompts[prompt]);
    const Json& logprobs = choice["logprobs"]["token_logprobs"];
    CAPTURE(choice.dump());
    REQUIRE(logprobs.size() == prompts[prompt].size() + generated);
    CHECK(logprobs[0].is_null());
    for (std::size_t i = 0; i < own.size(); ++i)
      CHECK(std::abs(logprobs[i + 1].get<float>() - own[i]) < 1e-5f);
    return logprobs;
  };
  Json body{{"prompt", prompts}, {"max_tokens", 0},  {"echo", true},
            {"logprobs", 2},     {"temperature", 0}, {"n", 2}};
  std::vector<Json> first;
  for (int round = 0; round < 2; ++round) {  // then with all of it in the cache; 120 chunks are few
    auto client = s.site.client();
    const auto reply = post(client, completions, body);
    REQUIRE(reply.status == 200);
    for (std::size_t i = 0; i < 2 * prompts.size(); ++i) {
      const Json logprobs = check(i / 2, reply.body["choices"].at(i), 0);
      if (round == 0) first.push_back(logprobs);
      CHECK(logprobs == first[i]);
    }
  }
  CHECK(s.site.service().counters().engine.preemptions >= 0);
  // After what is generated anyhow: as lm-eval asks, one token.
  body["max_tokens"] = 1;
  body.erase("n");
  auto client = s.site.client();
  const auto reply = post(client, completions, body);
  for (std::size_t i = 0; i < prompts.size(); ++i) (void)check(i, reply.body["choices"].at(i), 1);
  // While others run that use the same beginnings, in a stream.
  std::vector<std::thread> others;
  for (int t = 0; t < 3; ++t)
    others.emplace_back([&, t] {
      auto other = s.site.client();
      const Json plain{{"prompt", prompts[static_cast<std::size_t>(3 + t)]}, {"max_tokens", 40}};
      CHECK(post(other, completions, plain).status == 200);
    });
  body["stream"] = true;
  const auto result = client.Post(completions, body.dump(), "application/json");
  REQUIRE(static_cast<bool>(result));
  std::vector<Json> logprobs(prompts.size());
  for (const std::string& event : events_of(result->body)) {
    if (event == "[DONE]") continue;
    const Json choice = Json::parse(event)["choices"][0];
    for (const Json& one : choice["logprobs"].value("token_logprobs", Json::array()))
      logprobs[choice["index"].get<std::size_t>()]["logprobs"]["token_logprobs"].push_back(one);
  }
  for (std::thread& other : others) other.join();
  for (std::size_t i = 0; i < prompts.size(); ++i) (void)check(i, logprobs[i], 1);
}

TEST_CASE("an end token has a log-probability where the prompt has them") {
  ModelSite s;
  EngineOptions options = ModelSite::options();
  for (int token = 0; token < 300; ++token) options.stop.push_back(token);  // whatever is said
  const auto engine = make_engine(s.model, s.products, options);
  for (const std::size_t generated : {0, 1, 5}) {
    Request request;
    request.id = 1;
    request.prompt = {5, 6, 7};
    request.max_length = 3 + generated;
    request.logprobs = 0;
    request.prompt_logprobs = true;
    engine->submit(request);
    while (engine->step(0)) continue;
    const auto events = engine->take_events();
    REQUIRE(events.size() == 1);
    CHECK(events[0].token == -1);
    CHECK(events[0].finish == (generated == 0 ? Finish::length : Finish::stop));
    CHECK(events[0].prompt_logprobs.size() == 2);
    CHECK(events[0].logprobs.size() == (generated == 0 ? 0 : 1));
  }
}

TEST_CASE("a prompt is found in the cache, by those with the same salt only") {
  ModelSite s;
  auto client = s.site.client();
  const std::string prompt = "what all have in common, then ";
  CHECK(cached(post(client, completions, request(prompt + "one"))) == 0);
  CHECK(cached(post(client, completions, request(prompt + "two"))) == prompt.size() + 1);  // bos
  CHECK(cached(post(client, completions, request(prompt + "two", "a"))) == 0);
  CHECK(cached(post(client, completions, request(prompt + "two", "b"))) == 0);
  CHECK(cached(post(client, completions, request(prompt + "two", "a"))) == prompt.size() + 3);
}

TEST_CASE("texts in company, by few chunks, are those alone") {
  ModelSite s;
  test::Random random(1);
  std::vector<std::string> prompts;
  for (int i = 0; i < 16; ++i) {
    std::string prompt = i % 2 == 0 ? "a beginning of many prompts, " : "another one, ";
    for (int n = random.uniform(1, 30); n > 0; --n)
      prompt += static_cast<char>(random.uniform('a', 'z'));
    prompts.push_back(prompt);
  }
  const auto texts_of = [&](httplib::Client& client, std::size_t i) {
    Json body = request(prompts[i]);
    body["n"] = 2;
    const auto reply = post(client, completions, body);
    CHECK(reply.status == 200);
    return reply.body["choices"];
  };
  std::vector<Json> alone(prompts.size()), together(prompts.size());
  auto client = s.site.client();
  for (std::size_t i = 0; i < prompts.size(); ++i) alone[i] = texts_of(client, i);
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < prompts.size(); ++i)
    threads.emplace_back([&, i] {
      auto own = s.site.client();
      together[i] = texts_of(own, i);
    });
  for (std::thread& thread : threads) thread.join();
  for (std::size_t i = 0; i < prompts.size(); ++i) {
    CHECK(together[i] == alone[i]);
    CHECK(alone[i][0]["text"] == alone[i][1]["text"]);
  }
  CHECK(s.site.service().snapshot().chunks_used == 0);
}

TEST_CASE("what a seed says is said again") {
  ModelSite s;
  auto client = s.site.client();
  Json body = request("abc");
  body["temperature"] = 1.5;
  body["seed"] = 5;
  const Json first = post(client, completions, body).body["choices"];
  CHECK(post(client, completions, body).body["choices"] == first);
}

TEST_CASE("a client that goes away gives back its chunks, and the others go on") {
  ModelSite s;
  auto client = s.site.client();
  const Json expected = post(client, completions, request("goes on")).body["choices"];
  for (int i = 0; i < 5; ++i) {
    const std::string body =
        Json{{"prompt", "goes away"}, {"max_tokens", 200}, {"stream", true}}.dump();
    RawConnection connection(s.site.port());
    connection.send(
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        "Content-Length: " +
        std::to_string(body.size()) + "\r\n\r\n" + body);
    CHECK(!connection.read("data: ").empty());
    connection.close();
    CHECK(post(client, completions, request("goes on")).body["choices"] == expected);
  }
  CHECK(eventually([&] { return s.site.service().counters().requests == 0; }));
  CHECK(s.site.service().snapshot().chunks_used == 0);
}

TEST_CASE("the tree shows what was said, parents first") {
  HttpOptions http;
  http.tree_texts = true;
  ModelSite s(http);
  auto client = s.site.client();
  for (const char* end : {"one", "two"})
    CHECK(post(client, completions, request(std::string("it begins ") + end)).status == 200);
  const Json tree = test::reply_of(client.Get("/tree")).body;
  CHECK(tree["chunk_size"] == 8);
  // K and V in fp32: 2 layers of 4 heads of 8 numbers for each of 8 tokens.
  CHECK(tree["chunk_bytes"] == 2 * 4 * 2 * 4 * 8 * 8);
  CHECK(tree["chunks"]["used"] == 0);
  CHECK(tree["chunks"]["cached"].get<int>() > 0);
  CHECK(tree["chunks"]["cached"].get<int>() + tree["chunks"]["free"].get<int>() == 120);
  std::vector<int> seen{0};
  bool begins = false;
  for (const Json& node : tree["nodes"]) {
    CHECK(std::find(seen.begin(), seen.end(), node["parent"].get<int>()) != seen.end());
    seen.push_back(node["id"].get<int>());
    begins = begins || node["text"].get<std::string>().starts_with("it begins ");
  }
  CHECK(begins);
}

TEST_CASE("texts of the tree are for those who name their salt") {
  HttpOptions http;
  http.api_key = "key";
  ModelSite s(http);
  auto client = s.site.client("key");
  for (const char* salt : {"", "mine", "theirs"})
    CHECK(post(client, completions, request(std::string("words ") + salt, salt)).status == 200);
  const auto texts = [&](const std::string& key, const httplib::Headers& headers) {
    std::vector<std::string> all;
    std::size_t nodes = 0;
    auto as_key = s.site.client(key);
    const Json tree = reply_of(as_key.Get("/tree", headers)).body;
    for (const Json& node : tree["nodes"]) {
      CHECK(node.contains("tokens"));
      ++nodes;
      if (node.contains("text")) all.push_back(node["text"].get<std::string>().substr(0, 10));
    }
    CHECK(nodes >= 3);
    return all;
  };
  CHECK(texts("key", {}).empty());
  CHECK(texts("key", {{"X-Cache-Salt", ""}}).empty());
  CHECK(texts("key", {{"X-Cache-Salt", "nobody's"}}).empty());
  const auto mine = texts("key", {{"X-Cache-Salt", "mine"}});
  REQUIRE(!mine.empty());
  CHECK(mine.front() == "words mine");
  for (const std::string& text : mine) CHECK(!text.starts_with("words thei"));
  CHECK(texts("other", {{"X-Cache-Salt", "mine"}}).empty());
  CHECK(reply_of(client.Get("/tree")).body.contains("cached_tokens"));
  CHECK(s.site.service().counters().salts == 2);  // to ask is not to be remembered
}

TEST_CASE("what was cached is left out where it is hidden") {
  HttpOptions http;
  http.hides_cached = true;
  ModelSite s(http);
  auto client = s.site.client();
  for (int i = 0; i < 2; ++i) {
    const Json usage = post(client, completions, request("guess this")).body["usage"];
    CHECK(usage["prompt_tokens"] == 11);
    CHECK(!usage.contains("prompt_tokens_details"));
  }
  Json body = request("guess this");
  body["stream"] = true;
  body["stream_options"] = {{"include_usage", true}};
  const auto streamed = client.Post(completions, body.dump(), "application/json");
  CHECK(streamed->body.find("\"completion_tokens\"") != std::string::npos);
  CHECK(streamed->body.find("cached") == std::string::npos);
  const Json tree = reply_of(client.Get("/tree")).body;
  CHECK(tree["nodes"].empty());
  CHECK(!tree.contains("cached_tokens"));
  CHECK(tree["prompt_tokens"] == 33);
  CHECK(tree["nodes_left_out"] == 0);
  // Nor by what operators and routers read: tokens that were computed reveal the rest.
  CHECK(!reply_of(client.Get("/v1/loads")).body["loads"][0].contains("cache_hit_rate"));
  const std::string metrics = client.Get("/metrics")->body;
  CHECK(metrics.find("prompt_tokens_total 33") != std::string::npos);
  for (const char* name : {"cached_prompt", "rows_total", "loaded_tokens", "recalled"})
    CHECK(metrics.find(name) == std::string::npos);
}

TEST_CASE("who asks is told why a prompt was found in the cache, or was not") {
  EngineOptions options = ModelSite::options();
  options.explained_tokens = 2000;
  ModelSite s({}, options);
  s.site.served().explains = true;
  auto client = s.site.client();
  const auto told = [&](Json body) {
    body["explain_cache"] = true;
    body["max_tokens"] = 2;
    const auto reply = post(client, completions, body);
    REQUIRE(reply.status == 200);
    return reply.body["usage"]["cache_reports"];
  };
  const auto tokens = [](int first, int count) {
    Json list = Json::array();
    for (int i = 0; i < count; ++i) list.push_back(3 + (first + i) % 290);
    return list;
  };
  const auto text = [](const Json& report) {
    std::string said;
    for (const Json& range : report["ranges"])
      said += range["reason"].get<std::string>() + " " + range["begin"].dump() + "-" +
              range["end"].dump() + " ";
    return said;
  };
  CHECK(text(told({{"prompt", tokens(0, 50)}})[0]) == "never_seen 0-50 ");
  CHECK(text(told({{"prompt", tokens(0, 50)}})[0]) == "found 0-49 above_max_reuse 49-50 ");
  Json parting = tokens(0, 50);
  parting[20] = 299;
  const Json parted = told({{"prompt", parting}})[0];
  CHECK(text(parted) == "found 0-20 never_seen 20-50 ");
  CHECK(parted["parts_at"] == 20);
  CHECK(!parted.contains("cached_token"));  // others without a salt sent it, perhaps

  // One of a tenant's own names the token, and knows nothing of others.
  const Json mine{{"prompt", tokens(0, 50)}, {"cache_salt", "mine"}};
  CHECK(text(told(mine)[0]) == "never_seen 0-50 ");
  const Json again = told({{"prompt", parting}, {"cache_salt", "mine"}})[0];
  CHECK(again["parts_at"] == 20);
  CHECK(again["cached_token"] == 23);

  // Each prompt has one, whatever the number of choices.
  const Json many = told({{"prompt", {tokens(0, 50), tokens(100, 30)}}, {"n", 2}});
  REQUIRE(many.size() == 2);
  CHECK(text(many[0]) == "found 0-49 above_max_reuse 49-50 ");
  CHECK(text(many[1]) == "never_seen 0-30 ");

  // In a stream they come with the usage.
  Json body{{"prompt", tokens(0, 50)},
            {"explain_cache", true},
            {"stream", true},
            {"stream_options", {{"include_usage", true}}}};
  const auto streamed = events_of(client.Post(completions, body.dump(), "application/json")->body);
  CHECK(text(Json::parse(streamed[streamed.size() - 2])["usage"]["cache_reports"][0]) ==
        "found 0-49 above_max_reuse 49-50 ");

  for (int i = 0; i < 7; ++i) (void)told({{"prompt", tokens(150 + i, 200)}, {"cache_salt", "big"}});
  const Json evicted = told({{"prompt", tokens(0, 50)}})[0]["ranges"][0];
  CHECK(evicted["reason"] == "evicted");
  CHECK(evicted["cause"] == "space");
  CHECK(evicted["tokens_ago"].get<int>() < 150);  // of the tenant's own

  const std::string metrics = client.Get("/metrics")->body;
  const auto counted = [&](const std::string& reason) {
    const std::string name = "explained_prompt_tokens_total{reason=\"" + reason + "\"} ";
    const std::size_t at = metrics.find(name);
    REQUIRE(at != std::string::npos);
    return std::stoul(metrics.substr(at + name.size()));
  };
  CHECK(counted("evicted") >= 50);
  CHECK(counted("found") >= 49 + 20 + 20 + 49 + 49);
  CHECK(counted("other_tenant") == 0);
  CHECK(counted("never_seen") >= 50 + 30 + 30 + 30);

  CHECK(reply_of(client.Get("/tree")).body["explains"] == true);  // the page asks

  // Nothing is added for who does not ask.
  CHECK(!post(client, completions, request("words")).body["usage"].contains("cache_reports"));
  body["explain_cache"] = 1;
  CHECK(post(client, completions, body).status == 400);
}

TEST_CASE("why a prompt was found is refused where it is hidden, and where nobody keeps it") {
  for (const bool hides : {true, false}) {
    HttpOptions http;
    http.hides_cached = hides;
    ModelSite s(http);
    auto client = s.site.client();
    Json body = request("guess this");
    body["explain_cache"] = true;
    const auto reply = post(client, completions, body);
    CHECK(reply.status == 400);
    CHECK(reply.body["error"]["param"] == "explain_cache");
    body["explain_cache"] = false;
    CHECK(post(client, completions, body).status == 200);
    CHECK((client.Get("/metrics")->body.find("explained") == std::string::npos) == hides);
    CHECK(!reply_of(client.Get("/tree")).body.contains("explains"));
  }
}
