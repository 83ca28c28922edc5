// Threads for connections.
#pragma once

#include <httplib.h>

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

namespace serve {

/// What httplib hands its connections to. A connection keeps a thread for as long as it lasts, so
/// threads are made when they are needed, up to a bound. Beyond it connections wait for one; beyond
/// as many again they are turned away; and beyond that they wait unaccepted in the kernel's queue.
/// (httplib's own pool keeps all that come.)
class ConnectionPool final : public httplib::TaskQueue {
 public:
  using Task = std::function<void()>;
  // void, or bool where httplib is newer than 0.12
  using Enqueued = decltype(std::declval<httplib::TaskQueue&>().enqueue(std::declval<Task>()));

  /// \pre most >= 1
  explicit ConnectionPool(std::size_t most) : most_(most) {
    turner_away_ = std::thread([this] { turn_away(); });
  }

  Enqueued enqueue(Task task) override {
    std::unique_lock lock(mutex_);
    if (idle_ <= tasks_.size() && threads_.size() < most_)
      threads_.emplace_back([this] { work(); });
    if (tasks_.size() < most_) {
      tasks_.push_back(std::move(task));
    } else {
      room_.wait(lock, [this] { return too_many_.size() < most_; });
      too_many_.push_back(std::move(task));
    }
    changed_.notify_all();
    return static_cast<Enqueued>(true);
  }

  /// Ends when all connections have.
  void shutdown() override {
    {
      const std::lock_guard lock(mutex_);
      ends_ = true;
      changed_.notify_all();
    }
    for (std::thread& thread : threads_) thread.join();
    turner_away_.join();
  }

  /// Whether the connection of this thread is to get a 503 with Retry-After.
  [[nodiscard]] static bool turning_away() { return turning_away_; }

 private:
  void work() {
    std::unique_lock lock(mutex_);
    for (;;) {
      ++idle_;
      changed_.wait(lock, [this] { return !tasks_.empty() || ends_; });
      --idle_;
      if (tasks_.empty()) return;
      take(tasks_, lock);
    }
  }
  void turn_away() {
    turning_away_ = true;
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] { return !too_many_.empty() || ends_; });
      if (too_many_.empty()) return;
      room_.notify_one();
      take(too_many_, lock);
    }
  }
  static void take(std::deque<Task>& from, std::unique_lock<std::mutex>& lock) {
    {
      const Task task = std::move(from.front());
      from.pop_front();
      lock.unlock();
      task();
    }
    lock.lock();
  }

  static inline thread_local bool turning_away_ = false;

  const std::size_t most_;
  std::mutex mutex_;  // of all that follow
  std::condition_variable changed_, room_;
  std::deque<Task> tasks_, too_many_;
  std::size_t idle_ = 0;
  bool ends_ = false;
  std::vector<std::thread> threads_;
  std::thread turner_away_;
};

}  // namespace serve
