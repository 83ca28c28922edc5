// Executors: the library's own thread pool, and one that uses no threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "detail/support/check.hpp"
#include "detail/support/config.hpp"
#include "detail/support/fork_mark.hpp"
#include "detail/support/in_use.hpp"
#include "detail/support/spin_lock.hpp"
#include "detail/support/thread_count.hpp"
#include "error.hpp"
#if defined(_WIN32)
#include "detail/support/waitable_windows.hpp"
#endif

CHUNKATTN_NAMESPACE_BEGIN

/// Runs independent calls on several threads, or on one.
///
/// - `concurrency()`: how many calls may run at the same time (1 for a serial executor).
/// - `parallel_for(n, f)` calls f(i) once for each i in [0, n), in any order, and returns when all
///   have returned. Calls never wait for each other.
template <class E>
concept Executor = requires(E& e, void (*f)(int)) {
  { e.concurrency() } -> std::convertible_to<int>;
  e.parallel_for(1, f);
};

/// Runs everything on the calling thread.
class SerialExecutor {
 public:
  /// Always 1.
  [[nodiscard]] int concurrency() const noexcept { return 1; }

  /// Calls f(0) to f(n - 1) in order.
  template <class F>
  void parallel_for(int n, F&& f) {
    for (int i = 0; i < n; ++i) f(i);
  }
};
static_assert(Executor<SerialExecutor>);

/// A fixed set of threads; the thread that calls parallel_for works, too. Workers spin for a moment
/// after each call, because a model calls once per layer, and then sleep. Only one thread at a time
/// may call parallel_for: a call while another one runs, or from inside it, throws InvalidArgument.
/// A child of fork(), made while that does not run, has none of the workers: its first parallel_for
/// starts as many again.
class ThreadPool {
 public:
  /// The most threads of a pool: as many CPUs as Linux supports.
  static constexpr int max_threads = 8192;

  /// \param num_threads  the caller's included; 0: as many as there are CPUs that the process may
  ///                      run on (affinity mask) and pay for (CPU quota of its cgroup)
  /// \throws InvalidArgument for less than 0 and more than max_threads
  /// \throws Error where the system does not start so many; none is left behind then
  explicit ThreadPool(int num_threads = 0) {
    detail::check_argument(num_threads >= 0, "num_threads", num_threads,
                           "a count, or 0 for as many as there are CPUs to use");
    detail::check_argument(
        num_threads <= max_threads, "num_threads", num_threads,
        {"at most ", max_threads, ", or 0 for as many as there are CPUs to use"});
    if (num_threads == 0) num_threads = (std::min)(detail::default_threads(), max_threads);
    concurrency_ = num_threads;
    start();
  }

  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  ~ThreadPool() {
    if (mark_.is_in_child()) forget();
    stop();
  }

  /// Threads, the caller's included.
  [[nodiscard]] int concurrency() const noexcept { return concurrency_; }

  /// Calls f(i) for each i in [0, n) and returns when all calls have returned. If f throws, calls
  /// that have not begun are skipped and one of the exceptions is rethrown.
  /// \throws Error in a child of fork() where the system does not start so many threads
  template <class F>
  void parallel_for(int n, F&& f) {
    if (n <= 0) return;
    if (concurrency_ == 1 || n == 1) {
      for (int i = 0; i < n; ++i) f(i);
      return;
    }
    if (mark_.is_in_child()) start_anew();
    const detail::InUse::Call alone(in_use_, "pool");
    using Function = std::remove_reference_t<F>;
    call_ = [](void* function, int i) { (*static_cast<Function*>(function))(i); };
    function_ = const_cast<void*>(static_cast<const void*>(std::addressof(f)));
    count_ = n;
    next_.store(0, std::memory_order_relaxed);
    busy_.store(static_cast<int>(threads_.size()), std::memory_order_relaxed);
    round_.fetch_add(1, std::memory_order_release);
    round_.notify_all();
    take_calls();
    for (int spins = 0; busy_.load(std::memory_order_acquire) != 0; ++spins) {
      if (spins < spin_limit)
        detail::spin_pause();
      else
        std::this_thread::yield();
    }
#if CHUNKATTN_EXCEPTIONS
    if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
#endif
  }

 private:
  static constexpr int spin_limit = 2000;

  void start();
  void start_anew() {
    forget();
    stop_.store(false, std::memory_order_relaxed);
    round_.store(0, std::memory_order_relaxed);  // as workers expect that begin
    in_use_ = {};                                // by threads of the parent
    start();
    mark_ = {};
  }
  // Threads of the parent are not joined: they do not exist here, and a thread that was started
  // here may have got the handle of one of them.
  void forget() noexcept {
    for (std::thread& thread : threads_) ::new (static_cast<void*>(&thread)) std::thread();
    threads_.clear();
  }

  // Waits for all threads to end.
  void stop() noexcept {
    stop_.store(true, std::memory_order_relaxed);
    round_.fetch_add(1, std::memory_order_release);
    round_.notify_all();
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
  }

  void take_calls() {
    for (;;) {
      const int i = next_.fetch_add(1, std::memory_order_relaxed);
      if (i >= count_) return;
#if CHUNKATTN_EXCEPTIONS
      try {
        call_(function_, i);
      } catch (...) {
        const std::lock_guard guard(failure_mutex_);
        if (!failure_) failure_ = std::current_exception();
        next_.store(count_, std::memory_order_relaxed);
      }
#else
      call_(function_, i);
#endif
    }
  }

  void work();

  int concurrency_ = 1;
  detail::ForkMark mark_;
  std::vector<std::thread> threads_;
#if defined(_WIN32)
  alignas(64) detail::WaitableNumber round_{0};
#else
  alignas(64) std::atomic<std::uint32_t> round_{0};  // rises with each parallel_for
#endif
  alignas(64) std::atomic<int> next_{0};  // the next index to call
  alignas(64) std::atomic<int> busy_{0};  // workers still in this round
  std::atomic<bool> stop_{false};
  void (*call_)(void*, int) = nullptr;
  void* function_ = nullptr;
  int count_ = 0;
  detail::InUse in_use_;
  std::mutex failure_mutex_;
  std::exception_ptr failure_;
};
static_assert(Executor<ThreadPool>);

#if CHUNKATTN_BODIES
CHUNKATTN_FUNCTION void ThreadPool::start() {
#if CHUNKATTN_EXCEPTIONS
  try {
#endif
    threads_.reserve(static_cast<std::size_t>(concurrency_ - 1));
    while (threads_.size() + 1 < static_cast<std::size_t>(concurrency_))
      threads_.emplace_back([this] { work(); });
#if CHUNKATTN_EXCEPTIONS
  } catch (const std::exception& error) {
    const std::size_t started = threads_.size();
    stop();
    detail::fail(Error(detail::joined({"num_threads = ", concurrency_,
                                       ": expected no more than the system allows, thread ",
                                       started + 2, " could not be started: ", error.what()})));
  }
#endif
}

CHUNKATTN_FUNCTION void ThreadPool::work() {
  std::uint32_t seen = 0;
  for (;;) {
    for (int spins = 0; round_.load(std::memory_order_acquire) == seen; ++spins) {
      if (spins < spin_limit)
        detail::spin_pause();
      else
        round_.wait(seen, std::memory_order_acquire);
    }
    seen = round_.load(std::memory_order_acquire);
    if (stop_.load(std::memory_order_relaxed)) return;
    take_calls();
    busy_.fetch_sub(1, std::memory_order_release);
  }
}
#endif

CHUNKATTN_NAMESPACE_END
