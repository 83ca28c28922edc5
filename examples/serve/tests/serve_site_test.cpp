// All of it together: a small model, its engine, the server. Texts in company are those alone,
// prompts are found in the cache of their own tenant only, and a client that goes away gives back
// its chunks.
#include <doctest/doctest.h>

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "engine/engine.hpp"
#include "http_setup.hpp"
#include "model/load.hpp"
#include "tests/support/random.hpp"

using namespace serve;
using namespace test;

namespace {

/// A server over random weights. What the engine refers to stands before it.
struct ModelSite {
  chunkattn::ThreadPool pool{1};
  Model model =
      random_model({64, 172, 2, 8, 4, 300, 256, true, 1e-5f, 10000.0f}, Element::fp32, 7, pool);
  Products products{pool, ProductKind::own};
  test::Site site{make_engine(model, products, options()), {}, {}};

  static EngineOptions options() {
    EngineOptions options;
    options.chunk_size = 8;
    options.max_chunks = 120;
    options.reduce = chunkattn::CpuOptions::Reduce::batch_invariant;
    options.preempt = Preempt::swap;
    return options;
  }
};

Json request(const std::string& prompt, const std::string& salt = "") {
  Json body{{"prompt", prompt}, {"max_tokens", 24}, {"temperature", 0}};
  if (!salt.empty()) body["cache_salt"] = salt;
  return body;
}

std::size_t cached(const test::HttpReply& reply) {
  return reply.body["usage"]["prompt_tokens_details"]["cached_tokens"].get<std::size_t>();
}

}  // namespace

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

TEST_CASE("the tree tells of what was said, parents first") {
  ModelSite s;
  auto client = s.site.client();
  for (const char* end : {"one", "two"})
    CHECK(post(client, completions, request(std::string("it begins ") + end)).status == 200);
  const Json tree = test::reply_of(client.Get("/tree")).body;
  CHECK(tree["chunk_size"] == 8);
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
