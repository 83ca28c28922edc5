// Scoring: /v1/score and continuations. The values are the model's own, in the caller's order,
// whatever else runs and however few chunks there are; what prompts begin with in common is
// computed once; an item fails alone, a request of SGLang's as a whole.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <thread>
#include <vector>

#include "model_site.hpp"
#include "server/api_reply.hpp"
#include "server/scoring.hpp"

using namespace serve;
using namespace test;

namespace {

const char* const scores_path = "/v1/score";

/// Rows that the engine has computed, which is idle now.
std::size_t settled_rows(ModelSite& s) {
  (void)s.site.service().snapshot();  // between two steps, after which they are counted
  (void)s.site.service().snapshot();
  return s.site.service().counters().engine.rows;
}

/// Asks for the scores of two items.
std::string two_items() {
  const std::string body =
      Json{{"query", {5}}, {"items", {{6}, {7}}}, {"label_token_ids", {9}}}.dump();
  return "POST /v1/score HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
         "Connection: close\r\nContent-Length: " +
         std::to_string(body.size()) + "\r\n\r\n" + body;
}

}  // namespace

TEST_CASE("/v1/score gives the probabilities of labels, and computes the query once") {
  ModelSite s;
  auto client = s.site.client();
  Random random(3);
  const std::vector<int> query = drawn_tokens(random, 90), labels{7, 250, 7, 31};
  std::vector<std::vector<int>> items;
  for (int i = 0; i < 12; ++i) {  // none begins as another does
    items.push_back(drawn_tokens(random, 6));
    items.back()[0] = 10 + i;
  }
  for (const bool softmax : {false, true}) {
    const std::size_t before = settled_rows(s);
    Json body{{"query", query}, {"items", items}, {"label_token_ids", labels}, {"model", "tiny"}};
    if (softmax) body["apply_softmax"] = true;
    const auto reply = post(client, scores_path, body);
    CAPTURE(reply.body.dump());
    REQUIRE(reply.status == 200);
    CHECK(reply.body["object"] == "scoring");
    CHECK(reply.body["model"] == "tiny");
    REQUIRE(reply.body["scores"].size() == items.size());
    for (std::size_t i = 0; i < items.size(); ++i) {
      const auto own = own_distributions(s.model, s.products, joined(query, items[i])).back();
      double sum = 0;
      for (const int label : labels) sum += std::exp(own[static_cast<std::size_t>(label)]);
      REQUIRE(reply.body["scores"][i].size() == labels.size());
      for (std::size_t j = 0; j < labels.size(); ++j) {
        const double p = std::exp(own[static_cast<std::size_t>(labels[j])]);
        CHECK(reply.body["scores"][i][j].get<double>() ==
              doctest::Approx(softmax ? p / sum : p).epsilon(1e-4));
      }
    }
    const std::size_t tokens = items.size() * 96, computed = softmax ? 12 : 90 + 12 * 6;
    CHECK(settled_rows(s) - before == computed);
    const Json& usage = reply.body["usage"];
    CHECK(usage["prompt_tokens"] == tokens);
    CHECK(usage["completion_tokens"] == 0);
    CHECK(usage["prompt_tokens_details"]["cached_tokens"] == tokens - computed);
  }
  // Apart, as with a salt for each item, all of it is computed, and scores are the same to the bit.
  const std::size_t before = settled_rows(s);
  const auto together = post(client, scores_path,
                             Json{{"query", query}, {"items", items}, {"label_token_ids", labels}});
  for (std::size_t i = 0; i < items.size(); ++i) {
    const auto one = post(client, scores_path,
                          Json{{"query", query},
                               {"items", {items[i]}},
                               {"label_token_ids", labels},
                               {"cache_salt", std::to_string(i)}});
    CHECK(one.body["scores"][0] == together.body["scores"][i]);
  }
  CHECK(settled_rows(s) - before == 12 + 12 * 96);
  CHECK(client.Get("/metrics")->body.find("\nchunkattn_scored_items_total 48\n") !=
        std::string::npos);
}

TEST_CASE("texts are joined before they become tokens, the item first where that is asked for") {
  ModelSite s;
  auto client = s.site.client();
  const auto scores = [&](const Json& query, const Json& items, bool item_first) {
    const auto reply = post(client, scores_path,
                            Json{{"query", query},
                                 {"items", items},
                                 {"label_token_ids", {40, 41}},
                                 {"item_first", item_first}});
    CAPTURE(reply.body.dump());
    REQUIRE(reply.status == 200);
    return reply.body["scores"];
  };
  const auto tokens = [&](const std::string& text) {
    return Json(s.site.served().tokenizer->encode_prompt(text));
  };
  for (const bool item_first : {false, true}) {
    const Json whole = tokens(item_first ? "lait"
                                           "au "
                                         : "au "
                                           "lait");
    CHECK(scores("au ", {"lait", "the"}, item_first)[0] ==
          scores(whole, Json::array({Json::array()}), false)[0]);
    CHECK(scores("au ", "lait", item_first) == scores(whole, Json::array({Json::array()}), false));
    CHECK(scores({5, 6}, {{7}, {8, 9}}, item_first) ==
          scores(Json::array(),
                 item_first ? Json{{7, 5, 6}, {8, 9, 5, 6}} : Json{{5, 6, 7}, {5, 6, 8, 9}},
                 false));
  }
  CHECK(scores("abc", Json::array(), false) == Json::array());
}

TEST_CASE("random continuations have the model's own log-probabilities, in the caller's order") {
  Random random(11);
  int greedy = 0, others = 0;
  for (int round = 0; round < 4; ++round) {
    EngineOptions options = ModelSite::options();
    options.max_chunks = round == 0 ? 34 : 120;  // room for few
    options.step_tokens = static_cast<std::size_t>(random.uniform(1, 3) * 40);
    options.preempt = random.uniform(0, 1) == 0 ? Preempt::swap : Preempt::recompute;
    if (round == 3) options.mode = random.uniform(0, 1) == 0 ? Mode::paged : Mode::paged_prefix;
    ModelSite s({}, options);
    std::vector<std::vector<int>> contexts;
    for (int i = 0; i < 3; ++i) contexts.push_back(drawn_tokens(random, random.uniform(1, 150)));
    std::vector<Job> jobs;
    std::vector<std::vector<int>> prompts;
    std::vector<std::size_t> begins;
    for (int i = random.uniform(10, 30); i > 0; --i) {
      const auto& context = contexts[static_cast<std::size_t>(random.uniform(0, 2))];
      auto tokens = drawn_tokens(random, random.uniform(0, i % 7 == 0 ? 100 : 12));
      prompts.push_back(joined(context, tokens));
      if (random.uniform(0, 1) == 0 &&
          context.size() < 200) {  // as likely as can be, or that behind another one
        const std::size_t kept = context.size() + static_cast<std::size_t>(random.chance(0.3));
        prompts.back().resize(std::min(prompts.back().size(), kept));
        const auto likely = own_distributions(s.model, s.products, prompts.back()).back();
        prompts.back().push_back(
            static_cast<int>(std::max_element(likely.begin(), likely.end()) - likely.begin()));
      }
      begins.push_back(context.size());
      jobs.push_back(continuation_job(prompts.back(), begins.back()));
    }
    const std::vector<ItemScore> scores = score(s.site.service(), jobs);
    REQUIRE(scores.size() == jobs.size());
    for (std::size_t i = 0; i < jobs.size(); ++i) {
      CAPTURE(i);
      const auto own = own_distributions(s.model, s.products, prompts[i]);
      REQUIRE(!scores[i].failure);
      REQUIRE(scores[i].logprobs.size() == prompts[i].size() - begins[i]);
      double sum = 0;
      bool is_greedy = true;
      for (std::size_t t = begins[i]; t < prompts[i].size(); ++t) {
        const float logprob = own[t - 1][static_cast<std::size_t>(prompts[i][t])];
        CHECK(std::abs(scores[i].logprobs[t - begins[i]] - logprob) < 1e-5f);
        sum += logprob;
        is_greedy = is_greedy && logprob == *std::max_element(own[t - 1].begin(), own[t - 1].end());
      }
      CHECK(scores[i].sum() == doctest::Approx(sum).epsilon(1e-5));
      CHECK(scores[i].is_greedy == is_greedy);
      (is_greedy ? greedy : others) += 1;
    }
  }
  CHECK(greedy > 0);
  CHECK(others > 0);
}

TEST_CASE("a prompt that is repeated with its log-probabilities again computes what is new") {
  ModelSite s;
  auto client = s.site.client();
  Random random(14);
  const std::vector<int> prompt = drawn_tokens(random, 60);
  const auto echoed = [&](const std::vector<int>& tokens, int logprobs, std::size_t computed) {
    const std::size_t before = settled_rows(s);
    const auto reply =
        post(client, completions,
             Json{{"prompt", tokens}, {"echo", true}, {"logprobs", logprobs}, {"max_tokens", 0}});
    CAPTURE(reply.body.dump());
    REQUIRE(reply.status == 200);
    CHECK(settled_rows(s) - before == computed);
    CHECK(reply.body["usage"]["prompt_tokens_details"]["cached_tokens"] ==
          tokens.size() - computed);
    return reply.body["choices"][0]["logprobs"];
  };
  const Json first = echoed(prompt, 5, 60);
  CHECK(echoed(prompt, 5, 1) == first);
  CHECK(echoed(prompt, 1, 1)["token_logprobs"] == first["token_logprobs"]);
  const std::vector<int> longer = joined(prompt, {9, 10, 11});
  const Json second = echoed(longer, 5, 4);  // and what the last token of before says of the next
  for (std::size_t i = 0; i < 60; ++i) CHECK(second["top_logprobs"][i] == first["top_logprobs"][i]);
  CHECK(echoed(longer, 6, 63)["token_logprobs"] == second["token_logprobs"]);
  // Without log-probabilities nothing is scored, and nothing of that is counted below.
  const auto text =
      post(client, completions, Json{{"prompt", longer}, {"echo", true}, {"max_tokens", 0}});
  CHECK(text.status == 200);
  CHECK(text.body["choices"][0]["logprobs"].is_null());
  CHECK(text.body["usage"]["prompt_tokens_details"]["cached_tokens"] == 62);
  const auto metrics = client.Get("/metrics");
  REQUIRE(static_cast<bool>(metrics));
  for (const std::string line :
       {"scored_items_total 0", "scored_tokens_total 301", "recalled_tokens_total 177"}) {
    CAPTURE(metrics->body);
    CHECK(metrics->body.find("\nchunkattn_" + line + "\n") != std::string::npos);
  }
}

TEST_CASE("a prompt whose time is over before it is scored is repeated without log-probabilities") {
  ServiceOptions service;
  service.request_seconds = 0;
  ModelSite s({}, ModelSite::options(), service);
  auto client = s.site.client();
  const auto reply =
      post(client, completions,
           Json{{"prompt", "abc"}, {"echo", true}, {"logprobs", 1}, {"max_tokens", 1}});
  CAPTURE(reply.body.dump());
  REQUIRE(reply.status == 200);
  const Json& choice = reply.body["choices"][0];
  CHECK(choice["cut_off"] == "deadline");
  CHECK(choice["text"] == "abc");
  CHECK(choice["logprobs"].is_null());
}

TEST_CASE("an item of a batch fails alone; one of a request, with all") {
  ModelSite s;
  std::vector<Job> jobs;
  for (int i = 0; i < 5; ++i) jobs.push_back(continuation_job({7, 8, 9, 10 + i}, 2));
  jobs[1].prompt.assign(300, 5);  // more than the model's positions
  jobs[3].scored_from = 5;
  const std::vector<ItemScore> scores = score(s.site.service(), jobs);
  for (std::size_t i = 0; i < 5; ++i) {
    CHECK(scores[i].failure.has_value() == (i == 1 || i == 3));
    CHECK(scores[i].logprobs.size() == (i == 1 || i == 3 ? 0 : 2));
  }
  CHECK(scores[1].failure->reason() == Refused::Reason::invalid);
  CHECK(std::string(scores[1].failure->what()).find("tokens of the prompt = 300") !=
        std::string::npos);
  CHECK(std::string(scores[3].failure->what())
            .find("scored_from = 5: expected 1 to the prompt's tokens, 4") != std::string::npos);
  CHECK(score(s.site.service(), {}).empty());
  CHECK_THROWS_WITH_AS(
      (void)score(s.site.service(), std::vector<Job>(257, continuation_job({7, 8}, 1))),
      "items = 257 items: expected at most 256, the places for requests", Refused);
  s.site.service().close();
  CHECK_THROWS_AS((void)score(s.site.service(), jobs), Refused);

  ScriptedSite scripted;
  scripted.levers.fails = 1;  // of the engine, at the last request of a step
  auto client = scripted.site.client();
  const Json body{{"query", {5}}, {"items", {{6}, {7}, {8}}}, {"label_token_ids", {9}}};
  const auto reply = post(client, scores_path, body);
  CHECK(reply.status == 500);
  CHECK(reply.body["error"]["message"] == "it has failed in the engine: it does not like this one");
  CHECK(post(client, scores_path, body).status == 200);
}

TEST_CASE("what is wrong with a request for scores is said by name") {
  HttpOptions options;
  options.max_requests = 3;
  ScriptedSite s(options);
  auto client = s.site.client();
  const Json good{{"query", "ab"}, {"items", {"c", "d"}}, {"label_token_ids", {5}}};
  CHECK(post(client, scores_path, good).status == 200);
  const auto error = [&](const Json& changes) {
    Json body = good;
    body.update(changes);
    const auto reply = post(client, scores_path, body);
    CHECK(reply.status == 400);
    return reply.body["error"]["message"].get<std::string>();
  };
  const auto names = [](const std::string& message, const std::string& part) {
    CAPTURE(message);
    CHECK(message.find(part) == 0);
  };
  names(error({{"label_token_ids", nullptr}}),
        "label_token_ids = null: expected a list of 1 to 1024 tokens");
  names(error({{"label_token_ids", Json::array()}}), "label_token_ids = []: expected a list of 1");
  names(error({{"label_token_ids", std::vector<int>(1025, 5)}}),
        "label_token_ids = […]: expected a list of 1");
  names(error({{"label_token_ids", {5, 300}}}),
        "label_token_ids[1] = 300: expected a token from 0 to 299");
  names(error({{"label_token_ids", {-1}}}), "label_token_ids[0] = -1: expected a token");
  names(error({{"query", nullptr}}), "query = null: expected a string, or a list of tokens");
  names(error({{"query", 5}}), "query = 5: expected a string");
  names(error({{"items", nullptr}}),
        "items = null: expected a string or a list of them, as query is one");
  names(error({{"items", {{5}}}}), "items[0] = […]: expected a string or a list of them");
  names(error({{"query", {5}}}),
        "items[0] = \"c\": expected a list of lists of tokens, as query is one");
  names(error({{"query", {5}}, {"items", "c"}}), "items = \"c\": expected a list of lists");
  names(error({{"query", {5}}, {"items", {5, 6}}}), "items[0] = 5: expected a list of lists");
  names(error({{"query", {300}}, {"items", {{5}}}}), "query[0] = 300: expected a token");
  names(error({{"query", {5}}, {"items", {{5}, {5, -2}}}}), "items[1][1] = -2: expected a token");
  names(error({{"query", {5}}, {"items", {{5}, {5, -2}}}, {"item_first", true}}),
        "items[1][1] = -2");
  names(error({{"items", {"a", "b", "c", "d"}}}), "items = […]: expected at most 3 items");
  names(error({{"items", {"a", std::string(255, 'x')}}}),
        "items[1] = 258 tokens: expected less than 256");
  names(error({{"items", {"a", std::string(4000, 'x')}}}), "items[1] = 4002 bytes");
  names(error({{"query", Json::array()}, {"items", {{5}, Json::array()}}}), "items[1] = 0 tokens");
  names(error({{"apply_softmax", 1}}), "apply_softmax = 1: expected true or false");
  names(error({{"item_first", "yes"}}), "item_first = \"yes\": expected true or false");
  names(error({{"cache_salt", 5}}), "cache_salt = 5");
  names(error({{"max_tokens", 5}}), "max_tokens = 5: expected nothing");
  names(error({{"stream", true}}), "stream = true: expected nothing");
  Json other = good;
  other["model"] = "another";
  const auto reply = post(client, scores_path, other);
  CHECK(reply.status == 404);
  CHECK(reply.body["error"]["code"] == "model_not_found");
  CHECK(client.Get(scores_path)->status == 405);
  // What others send beside them.
  other["model"] = "tiny";
  other.update({{"rid", "5"}, {"user", "me"}, {"return_pooled_hidden_states", false}});
  CHECK(post(client, scores_path, other).status == 200);
  // Salts are tenants here, too.
  other["cache_salt"] = "mine";
  CHECK(post(client, scores_path, other).status == 200);
  CHECK(s.levers.tenant > 0);
  CHECK(s.levers.last_request().labels == std::vector<int>{5});
}

TEST_CASE("scores are refused as texts are: no places, a deadline, the end of the server") {
  ServiceOptions service;
  service.max_requests = 3;
  service.request_seconds = 0.2;
  ScriptedSite s({}, service);
  auto client = s.site.client();
  Json body{{"query", {5}}, {"items", {{6}, {7}}}, {"label_token_ids", {9}}};
  s.levers.held = true;
  std::thread first([&] {
    auto other = s.site.client();
    CHECK(post(other, scores_path, body).status == 503);  // it ends when the lever is free
  });
  CHECK(eventually([&] { return s.site.service().counters().requests == 2; }));
  CHECK(post(client, scores_path, body).status == 429);
  body["items"] = {{6}, {7}, {8}, {9}};
  const auto many = post(client, scores_path, body);
  CHECK(many.status == 400);
  CHECK(many.body["error"]["message"] ==
        "items = 4 items: expected at most 3, the places for requests");
  std::this_thread::sleep_for(std::chrono::milliseconds(250));
  s.levers.held = false;
  first.join();
  s.levers.held = true;
  std::thread cancelled([&] {
    auto other = s.site.client();
    const auto reply =
        post(other, scores_path, Json{{"query", {5}}, {"items", {{6}}}, {"label_token_ids", {9}}});
    CHECK(reply.status == 503);
    CHECK(reply.body["error"]["message"] == "the server is shutting down");
  });
  CHECK(eventually([&] { return s.site.service().counters().requests == 1; }));
  s.site.service().close();
  s.site.service().drain(std::chrono::seconds(0));
  cancelled.join();
  CHECK(post(client, scores_path, body).status == 503);
}

TEST_CASE(
    "a client that goes away takes its items with it; one that only listens gets its scores") {
  ScriptedSite s;
  s.levers.held = true;
  const auto requests = [&] { return s.site.service().counters().requests; };
  for (const bool resets : {false, true}) {
    RawConnection gone(s.site.port());
    REQUIRE(gone.send(two_items()));
    CHECK(eventually([&] { return requests() == 2; }));
    if (resets) {
      CHECK(gone.send("GET "));  // the end comes behind what nobody reads
      gone.reset();
    }
    gone.close();
    REQUIRE(eventually([&] { return requests() == 0; }));
  }
  RawConnection listens(s.site.port());
  REQUIRE(listens.send(two_items()));
  listens.end_sending();
  CHECK(eventually([&] { return requests() == 2; }));
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  CHECK(requests() == 2);
  s.levers.held = false;
  const std::string reply = listens.read();
  CAPTURE(reply);
  CHECK(reply.starts_with("HTTP/1.1 200"));
  CHECK(reply.find("\"scoring\"") != std::string::npos);
}

TEST_CASE("behind the head of a reply comes what became of the items, also when the server ends") {
  const std::string last_chunk = "\r\n0\r\n\r\n";
  for (const bool fails : {false, true}) {
    ScriptedSite s;
    s.levers.held = true;
    RawConnection listens(s.site.port());
    REQUIRE(listens.send(two_items()));
    listens.end_sending();
    CHECK(listens.read("\r\n\r\n").starts_with("HTTP/1.1 200"));
    std::thread stopping([&] {
      if (!fails) s.site.stop();  // waits for it
    });
    s.levers.fails = fails ? 1 : 0;
    if (fails)
      CHECK(eventually([&] { return s.site.service().counters().requests == 1; }));
    else
      std::this_thread::sleep_for(std::chrono::milliseconds(200));
    s.levers.held = false;
    const std::string reply = listens.read();
    stopping.join();
    CAPTURE(reply);
    const char* const said =
        fails ? "it has failed in the engine: it does not like this one" : "\"object\":\"scoring\"";
    CHECK(reply.find(said) != std::string::npos);
    CHECK(reply.ends_with(last_chunk) == !fails);  // what fails is no whole reply
  }
}

TEST_CASE("probabilities that a model does not have are 0") {
  const float infinity = std::numeric_limits<float>::infinity();
  const auto scores = [&](std::vector<float> labels, bool softmax) {
    ItemScore one;
    one.labels = std::move(labels);
    return Json::parse(scores_json({}, {one}, softmax, {}))["scores"][0];
  };
  CHECK(scores({0, -infinity}, false) == Json{1.0, 0.0});
  CHECK(scores({-infinity, -infinity}, true) == Json{0.0, 0.0});
  CHECK(scores({std::nanf(""), -1}, false)[0] == 0.0);
  CHECK(scores({-1000, -1000}, true) == Json{0.5, 0.5});
}
