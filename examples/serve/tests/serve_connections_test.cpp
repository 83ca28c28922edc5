// Connections: too many, clients that go away, an engine that breaks, the end of the server, bytes
// that are no requests.
#include <doctest/doctest.h>

#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "http_setup.hpp"
#include "tests/support/random.hpp"

using namespace serve;
using namespace test;

namespace {

/// The head of a request for text by hand.
std::string head(const std::string& rest) {
  return "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n" +
         rest;
}

std::string raw_request(const std::string& body, const std::string& rest = "") {
  return head("Content-Length: " + std::to_string(body.size()) + "\r\n" + rest + "\r\n" + body);
}

/// Sends each of these, on a connection of its own, and expects the status beside it.
void check_statuses(const ScriptedSite& s,
                    const std::vector<std::pair<std::string, const char*>>& cases) {
  for (const auto& [sent, status] : cases) {
    const auto& bytes = sent;  // clang before 16 captures no structured bindings
    CAPTURE(bytes.substr(0, 300));
    RawConnection connection(s.site.port());
    connection.send(bytes);
    const std::string reply = connection.read();
    CAPTURE(reply);
    CHECK(reply.starts_with(std::string("HTTP/1.1 ") + status));
    if (*status != '2') CHECK(reply.find("\"error\"") != std::string::npos);
  }
}

}  // namespace

TEST_CASE("a request is refused with 503 when the queue is full") {
  ServiceOptions options;
  options.max_requests = 2;
  ScriptedSite s({}, options);
  s.levers.held = true;
  std::vector<std::thread> clients;
  for (int i = 0; i < 2; ++i)
    clients.emplace_back([&] {
      auto client = s.site.client();
      CHECK(post(client, completions, Json{{"prompt", "abc"}}).status == 200);
    });
  CHECK(eventually([&] { return s.levers.submitted == 2; }));
  auto client = s.site.client();
  const auto reply = post(client, completions, Json{{"prompt", "abc"}});
  CHECK(reply.status == 429);
  CHECK(reply.headers.find("Retry-After")->second == "1");
  CHECK(reply.body["error"]["type"] == "rate_limit_error");
  s.levers.held = false;
  for (std::thread& thread : clients) thread.join();
  CHECK(post(client, completions, Json{{"prompt", "abc"}}).status == 200);
}

TEST_CASE("a request is refused with 503 when no memory is free in time") {
  ServiceOptions options;
  options.wait_seconds = 0.1;
  ScriptedSite s({}, options);
  s.levers.full = true;
  for (const bool stream : {false, true}) {
    auto client = s.site.client();
    const auto reply = post(client, completions, Json{{"prompt", "abc"}, {"stream", stream}});
    CHECK(reply.status == 503);
    CHECK(reply.headers.find("Retry-After")->second == "1");
    CHECK(reply.body["error"]["message"] ==
          "there was no room for it within 0.1 s: try again later");
  }
  CHECK(s.site.service().counters().requests == 0);
  s.levers.full = false;
  auto client = s.site.client();
  CHECK(post(client, completions, Json{{"prompt", "abc"}}).status == 200);
}

TEST_CASE("when all connections are taken a connection is turned away") {
  HttpOptions http;
  http.max_connections = 2;
  ScriptedSite s(http);
  s.levers.held = true;
  std::vector<std::thread> clients;
  for (int i = 0; i < 2; ++i)
    clients.emplace_back([&] {
      auto client = s.site.client();
      client.set_keep_alive(false);
      CHECK(post(client, completions, Json{{"prompt", "abc"}}).status == 200);
    });
  CHECK(eventually([&] { return s.levers.submitted == 2; }));
  RawConnection waits(s.site.port()), waits_too(s.site.port());
  const std::string request =
      "GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";
  waits.send(request);
  waits_too.send(request);
  RawConnection turned_away(s.site.port());
  turned_away.send(raw_request(R"({"prompt": "abc"})"));
  const std::string reply = turned_away.read();
  CHECK(reply.starts_with("HTTP/1.1 429"));
  CHECK(reply.find("all 2 connections are taken") != std::string::npos);
  s.levers.held = false;
  for (std::thread& thread : clients) thread.join();
  CHECK(waits.read().starts_with("HTTP/1.1 200"));
  CHECK(waits_too.read().starts_with("HTTP/1.1 200"));
}

TEST_CASE("a client that goes away frees what it had") {
  ScriptedSite s;
  s.levers.held = true;
  for (const bool stream : {false, true}) {
    const Json body{{"prompt", "abc"}, {"stream", stream}, {"max_tokens", 200}};
    auto connection = std::make_unique<RawConnection>(s.site.port());
    connection->send(raw_request(body.dump()));
    CHECK(eventually([&] { return s.site.service().snapshot().chunks_used == 1; }));
    connection.reset();
    CHECK(eventually([&] { return s.site.service().snapshot().chunks_used == 0; }));
    CHECK(eventually([&] { return s.site.service().counters().requests == 0; }));
  }
  CHECK(s.site.service().counters().finished[static_cast<int>(Finish::cancelled)] == 2);
  // While it waits for memory.
  s.levers.full = true;
  {
    RawConnection connection(s.site.port());
    connection.send(raw_request(R"({"prompt": "abc"})"));
    CHECK(eventually([&] { return s.site.service().counters().waiting == 1; }));
  }
  CHECK(eventually([&] { return s.site.service().counters().requests == 0; }));
  s.levers.full = false;
  // In the middle of a stream.
  s.levers.held = false;
  RawConnection connection(s.site.port());
  connection.send(raw_request(R"({"prompt": "abc", "stream": true, "max_tokens": 2})"));
  CHECK(connection.read("[DONE]").find("data: ") != std::string::npos);
}

TEST_CASE("when the engine breaks, replies say so") {
  ScriptedSite s;
  s.levers.held = true;
  std::string streamed;
  std::thread client([&] {
    auto c = s.site.client();
    const Json body{{"prompt", "abc"}, {"stream", true}};
    RawConnection connection(s.site.port());
    connection.send(raw_request(body.dump()));
    streamed = connection.read();
  });
  CHECK(eventually([&] { return s.levers.submitted == 1; }));
  s.levers.breaks = true;
  client.join();
  CHECK(streamed.find("\"server_error\"") != std::string::npos);
  auto other = s.site.client();
  CHECK(post(other, completions, Json{{"prompt", "abc"}}).status == 503);
  CHECK(reply_of(other.Get("/health")).status == 503);
  CHECK(reply_of(other.Get("/health")).body["status"] == "failed");
  CHECK(reply_of(other.Get("/health")).body["reason"] == "it was made to break");
  CHECK(reply_of(other.Get("/tree")).body["failure"] == "it was made to break");
}

TEST_CASE("at the end new requests are refused, and those that run are answered") {
  ScriptedSite s;
  s.levers.held = true;
  std::thread running([&] {
    auto client = s.site.client();
    const auto reply = post(client, completions, Json{{"prompt", "abc"}, {"max_tokens", 4}});
    CHECK(reply.status == 200);
    CHECK(reply.body["choices"][0]["text"] == "abc");
  });
  CHECK(eventually([&] { return s.levers.submitted == 1; }));
  s.site.service().close();
  auto client = s.site.client();
  client.set_keep_alive(false);
  CHECK(post(client, completions, Json{{"prompt", "abc"}}).status == 503);
  CHECK(reply_of(client.Get("/health")).body["status"] == "closing");
  s.levers.held = false;
  s.site.service().drain(std::chrono::hours(1));
  s.site.stop();
  running.join();
}

TEST_CASE("bytes that are no requests are refused, and the server continues") {
  HttpOptions http;
  http.max_body = 1000;
  ScriptedSite s(http);
  const std::string body = R"({"prompt": "abc"})";
  const std::string long_body = R"({"prompt": ")" + std::string(1500, 'x') + "\"}";
  const auto chunked = [](const std::string& text, const std::string& end = "0\r\n\r\n") {
    char size[20];
    std::snprintf(size, sizeof size, "%zx\r\n", text.size());
    return head("Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n") + size + text + "\r\n" +
           end;
  };
  check_statuses(
      s, {{"nonsense\r\n\r\n", "400"},
          {"GET / HTTP/9.9\r\n\r\n", "400"},
          {std::string("GET /\0 HTTP/1.1\r\n\r\n", 20), "400"},
          {"GET / HTTP/1.1\r\nRange: bytes=0-5\r\n\r\n", "400"},
          {"GET / HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello", "400"},
          {"OPTIONS * HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", "404"},
          {"TRACE / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", "405"},
          {head("Content-Length: abc\r\n\r\n"), "400"},
          {head("Content-Length: -5\r\n\r\n"), "400"},
          {head("Content-Length: 99999999999999999999\r\n\r\n"), "400"},
          {head("Content-Length: 17\r\nContent-Length: 18\r\n\r\n") + body, "400"},
          {head("Content-Length: 17\r\nTransfer-Encoding: chunked\r\n\r\n") + body, "400"},
          {head("Transfer-Encoding: gzip\r\n\r\n"), "400"},
          {head("\r\n") + body, "400"},
          {chunked(body, "xyz\r\n"), "400"},
          {chunked(body), "200"},
          {chunked(body, "0\r\nX-Sum: 5\r\nX-Other: \r\n\r\n"), "200"},
          {chunked(body, "000;a=b\r\nX-Sum: 5\r\n\r\n"), "200"},
          {chunked(body, "0\r\nX-Sum: " + std::string(20'000, 'x') + "\r\n\r\n"), "400"},
          {chunked(body, "0\r\n\rX"), "400"},
          {chunked(body, "0x0\r\n\r\n"), "400"},
          {chunked(body, "-0\r\n\r\n"), "400"},
          {chunked(body, "\r\n\r\n"), "400"},
          {chunked(body, "fffffffffffffffff\r\n"), "400"},
          {chunked(long_body), "413"},
          {raw_request(long_body), "413"},
          {raw_request(std::string(100'000, 'x')), "413"},
          {"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 19\r\n"
           "Content-Type: multipart/form-data; boundary=x\r\n\r\n--x\r\nhello\r\n--x--\r\n",
           "415"},
          {raw_request(body, "Connection: close\r\n"), "200"},
          {"POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: "
           "17\r\n\r\n" +
               body,
           "200"}});
  {  // A promise that is not kept: the client ends in the middle.
    RawConnection connection(s.site.port());
    connection.send(head("Content-Length: 100\r\n\r\n{"));
  }
  test::Random random(1);
  for (int i = 0; i < test::scaled(30); ++i) {
    // Any bytes, cut anywhere, with others in their middle.
    std::string bytes = raw_request(body, "Connection: close\r\n");
    for (int k = random.uniform(0, 4); k > 0; --k)
      bytes[random.index(bytes.size())] = static_cast<char>(random.uniform(0, 255));
    bytes.resize(static_cast<std::size_t>(random.uniform(0, static_cast<int>(bytes.size()))));
    RawConnection connection(s.site.port());
    connection.send(bytes);
  }
  auto client = s.site.client();
  CHECK(post(client, completions, Json{{"prompt", "abc"}}).status == 200);
  CHECK(eventually([&] { return s.site.service().counters().requests == 0; }));
}

TEST_CASE("a head that is too large, or can be read in two ways, is refused") {
  ScriptedSite s;
  const std::string body = R"({"prompt": "abc"})";
  const auto headers = [](int count, const std::string& value) {
    std::string all;
    for (int i = 0; i < count; ++i) all += "X-" + std::to_string(i) + ": " + value + "\r\n";
    return all;
  };
  check_statuses(
      s, {{raw_request(body, headers(96, "b") + "Connection: close\r\n"), "200"},  // 100
          {raw_request(body, headers(97, "b") + "Connection: close\r\n"), "431"},
          {raw_request(body, headers(5000, "b")), "431"},
          {raw_request(body, headers(1, std::string(17'000, 'b'))), "431"},
          {head(headers(1, std::string(1 << 20, 'b'))), "431"},  // without an end
          {raw_request(body, "X-A: b\r\n c\r\n"), "400"},
          {raw_request(body, "X-A: b\r\n\tc: d\r\n"), "400"},
          {raw_request(body, "Transfer-Encoding:\r\n chunked\r\n"), "400"},
          {raw_request(body, "Transfer-Encoding : chunked\r\n"), "400"},
          {raw_request(body, "X-A\r\n"), "400"},
          {raw_request(body, ": b\r\n"), "400"},
          {raw_request(body, "X-A: b\nTransfer-Encoding: chunked\r\n"), "400"},
          {raw_request(body, "X-A: b\rc\r\n"), "400"},
          {"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: WebSocket\r\n\r\n",
           "400"},
          {raw_request(body, "Upgrade: h2c\r\nConnection: close\r\n"), "200"}});
  RawConnection websocket(s.site.port());
  websocket.send("GET / HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\n\r\n");
  CHECK(websocket.read().find("Upgrade: websocket: not supported") != std::string::npos);
}

TEST_CASE("requests that come before the last is answered are answered in their order") {
  ScriptedSite s;
  RawConnection connection(s.site.port());
  connection.send(raw_request(R"({"prompt": "abc", "max_tokens": 4})") +
                  "GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" +
                  raw_request(R"({"prompt": "xyz", "max_tokens": 4})", "Connection: close\r\n"));
  const std::string replies = connection.read();
  CAPTURE(replies);
  const std::size_t first = replies.find("\"abc\""), second = replies.find("\"ok\""),
                    third = replies.find("\"xyz\"");
  CHECK(first < second);
  CHECK(second < third);
  CHECK(third != std::string::npos);
}

TEST_CASE("after the trailers of a chunked body the next request begins") {
  ScriptedSite s;
  RawConnection connection(s.site.port());
  const std::string chunked =
      head("Transfer-Encoding: chunked\r\n\r\n") +
      "3;x=y\r\n{\"p\r\n1\r\nr\r\nF\r\nompt\": \"abc\\n\"}\r\n0\r\nX-Sum: 1\r\nX-Sum: 2\r\n\r\n";
  connection.send(chunked + chunked +
                  raw_request(R"({"prompt": "xyz", "max_tokens": 4})", "Connection: close\r\n"));
  const std::string replies = connection.read();
  CAPTURE(replies);
  const std::size_t first = replies.find("HTTP/1.1 200"), second = replies.find("HTTP/1.1 200", 9),
                    third = replies.find("HTTP/1.1 200", second + 9);
  CHECK(first == 0);
  CHECK(third != std::string::npos);
  CHECK(replies.find("\"xyz\"", third) != std::string::npos);
}

TEST_CASE("lengths of chunks that can be read in two ways are refused") {
  ScriptedSite s;
  const std::string body = R"({"prompt": "abc", "max_tokens": 1})";  // 34 bytes, 22 in hexadecimal
  const auto reply = [&](const std::string& length) {
    RawConnection connection(s.site.port());
    connection.send(head("Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n") + length +
                    "\r\n" + body + "\r\n0\r\n\r\n");
    return connection.read();
  };
  CHECK(reply("22").starts_with("HTTP/1.1 200"));
  CHECK(reply(std::string(13, '0') + "22").starts_with("HTTP/1.1 200"));  // 15 digits
  // One more, and a counter of 64 bits may lose the first: 1, fifteen zeros and 22.
  for (const std::string& wrong :
       {std::string(14, '0') + "22", "1" + std::string(14, '0') + "22",
        "1" + std::string(15, '0') + "22", std::string("0x22"), std::string("+22"),
        std::string("-22"), std::string(" 22"), std::string("22 "), std::string()}) {
    CAPTURE(wrong);
    CHECK(reply(wrong).starts_with("HTTP/1.1 400"));
  }
}

TEST_CASE("a client that has closed its own side only gets its answer") {
  ScriptedSite s;
  for (const char* version : {"HTTP/1.1", "HTTP/1.0"})
    for (const bool stream : {false, true}) {
      s.levers.held = true;
      RawConnection connection(s.site.port());
      std::string request =
          raw_request(Json{{"prompt", "abc"}, {"stream", stream}, {"max_tokens", 8}}.dump());
      request.replace(request.find("HTTP/1.1"), 8, version);
      connection.send(request);
      connection.end_sending();
      // The first token comes only when the server has seen both the request and its end.
      CHECK(connection.can_read(std::chrono::minutes(1)));
      s.levers.held = false;
      const std::string reply = connection.read();
      CAPTURE(reply);
      CHECK(reply.starts_with("HTTP/1.1 200"));
      CHECK(reply.find(stream ? "\"text\":\"c\"" : "\"abcabc\"") != std::string::npos);
      CHECK(reply.find("\"length\"") != std::string::npos);
      CHECK((reply.find("[DONE]") != std::string::npos) == stream);
    }
  CHECK(s.site.service().counters().finished[static_cast<int>(Finish::cancelled)] == 0);
  // One that closes both sides while its reply is on its way is not waited for.
  s.levers.slow = true;
  for (const bool stream : {false, true}) {
    RawConnection connection(s.site.port());
    connection.send(
        raw_request(Json{{"prompt", "abc"}, {"stream", stream}, {"max_tokens", 190}}.dump()));
    CHECK(connection.read("\r\n\r\n").starts_with("HTTP/1.1 200"));
    connection.close();
    CHECK(eventually([&] { return s.site.service().counters().requests == 0; }));
  }
  CHECK(s.site.service().counters().finished[static_cast<int>(Finish::cancelled)] == 2);
}

TEST_CASE("one connection serves many requests, good and bad ones") {
  ScriptedSite s;
  auto client = s.site.client();
  for (int i = 0; i < 20; ++i) {
    CHECK(post(client, completions, Json{{"prompt", "abc"}, {"max_tokens", 4}}).status == 200);
    CHECK(post(client, completions, Json{{"prompt", 5}}).status == 400);
    CHECK(post(client, "/nonsense", Json{{"prompt", 5}}).status == 404);
  }
}
