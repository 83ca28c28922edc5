#include "connection.hpp"

#include <fmt/format.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "request_head.hpp"

namespace serve {

namespace {

using Clock = std::chrono::steady_clock;
constexpr auto read_limit = std::chrono::seconds(10), write_limit = std::chrono::seconds(10);
constexpr auto idle_limit = std::chrono::seconds(6);

/// Whether that can be done before the time is over.
bool poll_for(socket_t socket, short events, std::chrono::milliseconds limit) {
  pollfd one{socket, events, 0};
  const auto end = Clock::now() + limit;
  for (;;) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end - Clock::now());
    const int ready = ::poll(&one, 1, static_cast<int>(std::max<long long>(left.count(), 0)));
    if (ready >= 0 || errno != EINTR) return ready > 0;
  }
}

}  // namespace

Connection::Connection(socket_t socket) : socket_(socket) {
  current_ = this;
}
Connection::~Connection() {
  current_ = nullptr;
}

bool Connection::wait_for_request(const std::atomic<bool>& ends) {
  if (!unread().empty()) return true;
  const auto start = Clock::now();
  while (!ends && Clock::now() - start < idle_limit)
    if (poll_for(socket_, POLLIN, std::chrono::milliseconds(20))) return receive() > 0;
  return false;
}

bool Connection::receive_head() {
  const auto start = Clock::now();
  std::size_t end = std::string_view::npos;
  while ((end = unread().find("\r\n\r\n")) == std::string_view::npos &&
         unread().size() <= max_head_bytes)
    if (Clock::now() - start > read_limit || !wait_readable() || receive() <= 0) return false;
  const auto error = head_error(unread().substr(0, end == std::string_view::npos ? end : end + 4));
  if (error) refuse(error->status(), error->body());
  return !error;
}

bool Connection::has_ended() const {
  char byte = 0;
  return ::recv(socket_, &byte, 1, MSG_PEEK | MSG_DONTWAIT) == 0;
}
bool Connection::is_gone() const {
  pollfd one{socket_, 0, 0};
  return ::poll(&one, 1, 0) > 0;  // an error, or both sides have ended
}

bool Connection::wait_readable() const {
  return !unread().empty() || poll_for(socket_, POLLIN, read_limit);
}
bool Connection::wait_writable() const {
  return poll_for(socket_, POLLOUT, write_limit);
}

ssize_t Connection::read(char* to, std::size_t size) {
  std::size_t passed = 0;
  while (passed == 0 && size > 0) {
    if (unread().empty()) {
      if (!wait_readable()) return -1;
      if (const ssize_t got = receive(); got <= 0) return got;
    }
    for (; passed < size && !unread().empty(); ++read_) {
      const auto verdict = trailers_.next(received_[read_]);
      if (verdict == TrailerFilter::Verdict::wrong) return -1;
      if (verdict == TrailerFilter::Verdict::pass) to[passed++] = received_[read_];
    }
  }
  return static_cast<ssize_t>(passed);
}

/// All of it, or -1.
ssize_t Connection::write(const char* from, std::size_t size) {
  for (std::size_t done = 0; done < size;) {
    if (!wait_writable()) return -1;
    const ssize_t sent = ::send(socket_, from + done, size - done, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR) return -1;
    done += static_cast<std::size_t>(std::max<ssize_t>(sent, 0));
  }
  return static_cast<ssize_t>(size);
}

std::string_view Connection::unread() const {
  return std::string_view(received_).substr(read_);
}

/// Appends what has come to what is unread. 0 where the client has closed, -1 for errors.
ssize_t Connection::receive() {
  char bytes[8192];
  ssize_t got = -1;
  do got = ::recv(socket_, bytes, sizeof bytes, 0);
  while (got < 0 && errno == EINTR);
  received_.erase(0, std::exchange(read_, 0));
  if (got > 0) received_.append(bytes, static_cast<std::size_t>(got));
  return got;
}

/// Answers without httplib. What follows is dropped for a while: were it closed at once, the client
/// might not receive it.
void Connection::refuse(int status, const std::string& body) {
  const std::string reply = fmt::format(
      "HTTP/1.1 {} {}\r\nContent-Type: application/json\r\nContent-Length: {}\r\n"
      "Connection: close\r\n\r\n{}",
      status, status == 431 ? "Request Header Fields Too Large" : "Bad Request", body.size(), body);
  (void)write(reply.data(), reply.size());
  ::shutdown(socket_, SHUT_WR);
  const auto start = Clock::now();
  while (Clock::now() - start < std::chrono::seconds(1) &&
         poll_for(socket_, POLLIN, std::chrono::milliseconds(200)) && receive() > 0)
    read_ = received_.size();
}

bool ConnectionServer::process_and_close_socket(socket_t socket) {
  {
    Connection connection(socket);
    bool closes = false;
    // httplib's own function for a request has more parameters since 0.16: addresses.
    const auto answer = [&](auto& server) {
      if constexpr (requires { server.process_request(connection, false, closes, nullptr); })
        return server.process_request(connection, ends_, closes, nullptr);
      else
        return server.process_request(connection, "", 0, "", 0, ends_, closes, nullptr);
    };
    while (connection.wait_for_request(ends_) && connection.receive_head())
      if (!answer(*this) || closes) break;
  }
  ::shutdown(socket, SHUT_RDWR);
  ::close(socket);
  return true;
}

}  // namespace serve
