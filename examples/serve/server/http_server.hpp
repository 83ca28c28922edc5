// The service by HTTP, as OpenAI's API has it.
#pragma once

#include <httplib.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "api_reply.hpp"
#include "api_request.hpp"
#include "connection.hpp"
#include "service.hpp"

namespace serve {

struct HttpOptions {
  std::string host = "127.0.0.1";
  int port = 8000;                              ///< 0: any that is free
  std::string api_key;                          ///< empty: everybody may
  std::size_t max_connections = 256;            ///< at once
  std::size_t max_body = std::size_t{4} << 20;  ///< bytes
  std::size_t max_requests = 256;               ///< that the service takes, for /v1/loads
  std::vector<std::string> origins;             ///< whose pages may ask: "https://chat.example"
  bool shows_chunks = false;                    ///< whether /kv_chunks is there,
  bool shows_salted = false;                    ///< with tokens of tenants with a salt
  bool tree_texts = false;    ///< whether /tree shows texts of all to who has the key
  bool hides_cached = false;  ///< whether replies leave out what was cached
  /// Called with a line for each text that was asked for, from any thread.
  std::function<void(const std::string&)> log = [](const std::string&) {};
};

class HttpServer {
 public:
  /// Both outlive the server.
  HttpServer(Service& service, const Served& served, HttpOptions options);
  HttpServer(const HttpServer&) = delete;
  HttpServer& operator=(const HttpServer&) = delete;

  /// Takes the port, from when on connections are queued. Returns its number.
  /// \throws std::runtime_error that names host and port
  int bind();
  /// Serves until stop(). \pre bind()
  void run();
  /// Waits until replies are written that are being written now, for a time, then ends run().
  /// From any thread. \pre run() was called or will be
  void stop(std::chrono::duration<double> limit);

 private:
  struct Reply;
  [[nodiscard]] bool handle_before_body(const httplib::Request& request,
                                        httplib::Response& response);
  void handle(const httplib::Request& request, httplib::Response& response,
              const std::string& body);
  [[nodiscard]] Reply reply_to(const httplib::Request& request) const;
  [[nodiscard]] std::string chunks(bool has_key) const;
  [[nodiscard]] std::string tree(const httplib::Request& request) const;
  [[nodiscard]] Reply health() const;
  void generate(const httplib::Request& request, httplib::Response& response,
                const std::string& body);
  void score(const httplib::Request& request, httplib::Response& response, const std::string& body);
  [[nodiscard]] ReplyHead head_of_reply(const char* kind);
  [[nodiscard]] std::shared_ptr<void> writing();
  [[nodiscard]] std::function<void(const std::string&)> logged(const std::string& path) const;
  [[nodiscard]] bool has_key(const httplib::Request& request) const;
  [[nodiscard]] bool may_be_named(const std::string& host) const;
  void allow_origin(const httplib::Request& request, httplib::Response& response) const;

  Service& service_;
  const Served& served_;
  const HttpOptions options_;
  const std::string id_prefix_;  // of replies: no other server's
  std::atomic<std::uint64_t> replies_ = 0;
  std::atomic<int> generating_ = 0;  // replies that are not written to their end
  int listening_ = -1;
  ConnectionServer server_;
};

}  // namespace serve
