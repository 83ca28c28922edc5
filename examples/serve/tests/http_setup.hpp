// A server in this process on a port of its own, and ways to talk to it.
#pragma once

#include <arpa/inet.h>
#include <doctest/doctest.h>
#include <httplib.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <utility>

#include "scripted_engine.hpp"
#include "server/http_server.hpp"

namespace test {

using Json = nlohmann::json;

inline const char* const completions = "/v1/completions";
inline const char* const chats = "/v1/chat/completions";

/// A service with HTTP in front of it, on the byte tokenizer and a ChatML template.
class Site {
 public:
  Site(std::unique_ptr<serve::Engine> engine, serve::HttpOptions http,
       serve::ServiceOptions options, int vocabulary = 300)
      : tokenizer_(serve::byte_tokenizer(vocabulary)),
        chat_(serve::ChatTemplate::Family::chatml),
        served_{"tiny", tokenizer_.get(), &chat_, "", 256, 16},
        service_(std::move(engine), *tokenizer_, options),
        server_(service_, served_, on_free_port(std::move(http))),
        port_(server_.bind()),
        thread_([this] { server_.run(); }) {}
  ~Site() {
    service_.close();
    service_.drain(std::chrono::seconds(0));
    stop();
  }
  Site(const Site&) = delete;
  Site& operator=(const Site&) = delete;

  [[nodiscard]] int port() const { return port_; }
  [[nodiscard]] serve::Service& service() { return service_; }
  [[nodiscard]] serve::Served& served() { return served_; }
  /// As a program does at its end, the service being closed and drained.
  void stop() {
    if (!thread_.joinable()) return;
    server_.stop(std::chrono::minutes(1));
    thread_.join();
  }

  [[nodiscard]] httplib::Client client(const std::string& key = "") const {
    httplib::Client client("127.0.0.1", port_);
    client.set_read_timeout(120);
    client.set_keep_alive(true);
    client.set_tcp_nodelay(true);
    if (!key.empty()) client.set_bearer_token_auth(key.c_str());
    return client;
  }

 private:
  static serve::HttpOptions on_free_port(serve::HttpOptions http) {
    http.port = 0;
    return http;
  }

  std::unique_ptr<serve::Tokenizer> tokenizer_;
  serve::ChatTemplate chat_;
  serve::Served served_;
  serve::Service service_;
  serve::HttpServer server_;
  int port_;
  std::thread thread_;
};

/// One whose engine repeats its prompt.
struct ScriptedSite {
  ScriptedEngine::Levers levers;
  Site site;
  explicit ScriptedSite(serve::HttpOptions http = {}, serve::ServiceOptions options = {})
      : site(std::make_unique<ScriptedEngine>(levers), std::move(http), options) {}
};

struct HttpReply {
  int status = 0;
  Json body;
  httplib::Headers headers;
};

inline HttpReply reply_of(const httplib::Result& result) {
  REQUIRE_MESSAGE(static_cast<bool>(result), httplib::to_string(result.error()));
  return {result->status, Json::parse(result->body, nullptr, false), result->headers};
}

inline HttpReply post(httplib::Client& client, const std::string& path, const std::string& body) {
  return reply_of(client.Post(path, body, "application/json"));
}
inline HttpReply post(httplib::Client& client, const std::string& path, const Json& body) {
  return post(client, path, body.dump());
}

/// The events of a stream, without what SSE puts around them.
inline std::vector<std::string> events_of(const std::string& body) {
  std::vector<std::string> events;
  for (std::size_t at = 0; at < body.size();) {
    const std::size_t end = body.find("\n\n", at);
    REQUIRE(end != std::string::npos);
    REQUIRE(body.compare(at, 6, "data: ") == 0);
    events.push_back(body.substr(at + 6, end - at - 6));
    at = end + 2;
  }
  return events;
}

/// A connection for bytes that are no good requests.
class RawConnection {
 public:
  explicit RawConnection(int port) : socket_(::socket(AF_INET, SOCK_STREAM, 0)) {
    REQUIRE(socket_ >= 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<std::uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    REQUIRE(::connect(socket_, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0);
  }
  ~RawConnection() { close(); }
  RawConnection(const RawConnection&) = delete;
  RawConnection& operator=(const RawConnection&) = delete;

  /// False if the other side has closed.
  bool send(std::string_view bytes) {
    while (!bytes.empty()) {
      const ssize_t sent = ::send(socket_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (sent <= 0) return false;
      bytes.remove_prefix(static_cast<std::size_t>(sent));
    }
    return true;
  }
  /// Ends what this side sends; it still reads.
  void end_sending() { ::shutdown(socket_, SHUT_WR); }
  /// Whether anything comes within this time.
  bool can_read(std::chrono::milliseconds limit) {
    pollfd one{socket_, POLLIN, 0};
    return ::poll(&one, 1, static_cast<int>(limit.count())) > 0;
  }
  /// All until the other side closes, or until `last` was read.
  std::string read(std::string_view last = "") {
    std::string all;
    char buffer[4096];
    while (last.empty() || all.find(last) == std::string::npos) {
      const ssize_t got = ::recv(socket_, buffer, sizeof buffer, 0);
      if (got <= 0) break;
      all.append(buffer, static_cast<std::size_t>(got));
    }
    return all;
  }
  void close() {
    if (socket_ >= 0) ::close(socket_);
    socket_ = -1;
  }
  /// Closes by a reset.
  void reset() {
    const linger at_once{1, 0};
    CHECK(::setsockopt(socket_, SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once) == 0);
    close();
  }

 private:
  int socket_;
};

}  // namespace test
