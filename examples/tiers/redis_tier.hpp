// A tier in Redis: what a store on other machines takes. Records are values under the text of their
// keys; Redis bounds them and forgets (maxmemory, maxmemory-policy allkeys-lru).
#pragma once

#include <hiredis/hiredis.h>
#include <sys/time.h>

#include <atomic>
#include <chrono>
#include <chunkattn/tiers/tier_store.hpp>
#include <cstddef>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace examples {

/// One connection, made when it is needed and again after a failure, but not more often than each
/// second: while Redis is gone, no call waits for it. Every call ends within the timeout.
class RedisTier final : public chunkattn::TierStore {
 public:
  /// \param socket  the path of a Unix socket
  /// \param prefix  of all keys, for who shares the server with others
  explicit RedisTier(std::string socket, std::string prefix = "chunkattn:",
                     std::chrono::milliseconds timeout = std::chrono::milliseconds(500))
      : socket_(std::move(socket)), prefix_(std::move(prefix)), timeout_(timeout) {}

  bool put(const Key& key, const Record& record, const std::atomic<bool>&) override {
    const std::string name = prefix_ + key.text();
    const Reply reply = ask("SET %b %b", name.data(), name.size(), record->data(), record->size());
    return reply && reply->type == REDIS_REPLY_STATUS;
  }
  [[nodiscard]] Record get(const Key& key, const std::atomic<bool>&) override {
    const std::string name = prefix_ + key.text();
    const Reply reply = ask("GET %b", name.data(), name.size());
    if (!reply || reply->type != REDIS_REPLY_STRING) return nullptr;
    const auto* const bytes = reinterpret_cast<const std::byte*>(reply->str);
    return std::make_shared<const std::vector<std::byte>>(bytes, bytes + reply->len);
  }
  [[nodiscard]] bool contains(const Key& key) override {
    const std::string name = prefix_ + key.text();
    const Reply reply = ask("EXISTS %b", name.data(), name.size());
    return reply && reply->type == REDIS_REPLY_INTEGER && reply->integer == 1;
  }
  void erase(const Key& key) override {
    const std::string name = prefix_ + key.text();
    (void)ask("DEL %b", name.data(), name.size());
  }

 private:
  using Clock = std::chrono::steady_clock;
  struct Free {
    void operator()(redisReply* reply) const { freeReplyObject(reply); }
    void operator()(redisContext* context) const { redisFree(context); }
  };
  using Reply = std::unique_ptr<redisReply, Free>;

  template <class... Args>
  Reply ask(const char* format, const Args&... args) {
    const std::lock_guard lock(mutex_);
    if (!connection_ && !connect()) return nullptr;
    Reply reply(static_cast<redisReply*>(redisCommand(connection_.get(), format, args...)));
    if (!reply) connection_ = nullptr;  // too slow, or gone: the next call connects again
    return reply;
  }
  bool connect() {
    if (Clock::now() < next_try_) return false;
    next_try_ = Clock::now() + std::chrono::seconds(1);
    const timeval limit{static_cast<time_t>(timeout_.count() / 1000),
                        static_cast<suseconds_t>(timeout_.count() % 1000 * 1000)};
    connection_.reset(redisConnectUnixWithTimeout(socket_.c_str(), limit));
    if (!connection_ || connection_->err != 0 ||
        redisSetTimeout(connection_.get(), limit) != REDIS_OK) {
      connection_ = nullptr;
      return false;
    }
    return true;
  }

  const std::string socket_, prefix_;
  const std::chrono::milliseconds timeout_;
  std::mutex mutex_;
  std::unique_ptr<redisContext, Free> connection_;
  Clock::time_point next_try_{};
};

}  // namespace examples
