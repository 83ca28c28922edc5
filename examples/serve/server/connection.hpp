// Connections below httplib: it sees a request only when its head is here and is well formed, and
// whoever answers can ask whether the client is still there.
#pragma once

#include <httplib.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <ctime>
#include <string>
#include <string_view>

#include "trailers.hpp"

namespace serve {

/// One connection, as httplib reads and writes it. Which functions override one of httplib's
/// depends on its version, so none says so.
class Connection final : public httplib::Stream {
 public:
  /// \param socket  of a connection; closed by whoever made it
  explicit Connection(socket_t socket);
  ~Connection();

  /// The connection whose request this thread answers.
  [[nodiscard]] static Connection& current() { return *current_; }

  /// Whether the next request's first bytes are here before the client ends, or `ends` is set, or
  /// the connection has been idle for long.
  [[nodiscard]] bool wait_for_request(const std::atomic<bool>& ends);
  /// Reads its head, which stays to be read. False, with the reason sent to the client, if it is
  /// refused.
  [[nodiscard]] bool receive_head();
  /// A chunked body comes next. Trailers after it are dropped.
  void expect_chunks() { trailers_.begin(); }
  /// Whether the client sends no more. It may have closed, or wait for its reply: only what is
  /// written to one that has closed shows it, as it is answered by a reset.
  [[nodiscard]] bool has_ended() const;
  /// Whether the client has closed the connection.
  [[nodiscard]] bool is_gone() const;

  bool is_readable() const { return wait_readable(); }
  bool is_writable() const { return is_peer_alive(); }
  bool wait_readable() const;
  bool wait_writable() const;
  bool is_peer_alive() const { return wait_writable() && !is_gone(); }
  ssize_t read(char* to, std::size_t size);
  ssize_t write(const char* from, std::size_t size);
  void get_remote_ip_and_port(std::string&, int&) const {}  // which is never asked for
  void get_local_ip_and_port(std::string&, int&) const {}
  socket_t socket() const { return socket_; }
  std::time_t duration() const { return 0; }  // of httplib's own limits, which are not set

 private:
  [[nodiscard]] std::string_view unread() const;
  [[nodiscard]] ssize_t receive();
  void refuse(int status, const std::string& body);

  static inline thread_local Connection* current_ = nullptr;

  const socket_t socket_;
  std::string received_;
  std::size_t read_ = 0;  // of these
  TrailerFilter trailers_;
};

/// httplib's server on such connections.
class ConnectionServer : public httplib::Server {
 public:
  /// Idle connections end, others when their request is answered.
  void end_connections() { ends_ = true; }

 private:
  bool process_and_close_socket(socket_t socket) override;

  std::atomic<bool> ends_ = false;
};

}  // namespace serve
