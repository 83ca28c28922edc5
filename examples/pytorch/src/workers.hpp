// The threads that kernels run on. Where torch has brought the OpenMP runtime of GCC, they are its
// threads: those wait for work by spinning, and a second set of threads would have to share the
// processors with them. Else they are the library's own; also in a child of fork(), as Python's
// multiprocessing makes it: the runtime would wait there for threads that did not come along.
#pragma once

#include <dlfcn.h>
#include <unistd.h>

#include <atomic>
#include <chunkattn/executor.hpp>
#include <exception>
#include <memory>
#include <mutex>
#include <type_traits>
#include <utility>

namespace binding {

/// An Executor (chunkattn/executor.hpp). Python's threads take turns by `lock()`.
class Workers {
 public:
  /// \param count  the caller's included; 0: as many as there are CPUs to use
  explicit Workers(int count) {
    // Finds the symbol if the runtime is loaded with global visibility, as torch loads it.
    if (count > 1) parallel_ = reinterpret_cast<Parallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
    if (parallel_ == nullptr) pool_ = std::make_unique<chunkattn::ThreadPool>(count);
    count_ = pool_ ? pool_->concurrency() : count;
  }

  [[nodiscard]] int concurrency() const noexcept { return count_; }
  /// Whether they are threads of OpenMP.
  [[nodiscard]] bool are_openmp() const noexcept { return parallel_ != nullptr; }
  [[nodiscard]] std::unique_lock<std::mutex> lock() { return std::unique_lock(mutex_); }

  template <class F>
  void parallel_for(int n, F&& f) {
    if (n <= 0) return;
    if (parallel_ != nullptr && ::getpid() != process_) {
      pool_ = std::make_unique<chunkattn::ThreadPool>(count_);
      parallel_ = nullptr;
    }
    if (pool_ || n == 1) {
      if (pool_) return pool_->parallel_for(n, std::forward<F>(f));
      return f(0);
    }
    Loop<std::remove_reference_t<F>> loop{f, n};
    parallel_(&Loop<std::remove_reference_t<F>>::run, &loop,
              static_cast<unsigned>(n < count_ ? n : count_), 0);
    if (loop.failure) std::rethrow_exception(loop.failure);
  }

 private:
  using Parallel = void (*)(void (*)(void*), void*, unsigned, unsigned);

  template <class F>
  struct Loop {
    F& f;
    int n;
    std::atomic<int> next{0};
    std::mutex failed{};
    std::exception_ptr failure{};

    static void run(void* self) {
      Loop& loop = *static_cast<Loop*>(self);
      try {
        for (int i = loop.next++; i < loop.n; i = loop.next++) loop.f(i);
      } catch (...) {
        const std::lock_guard guard(loop.failed);
        loop.failure = std::current_exception();
        loop.next = loop.n;
      }
    }
  };

  Parallel parallel_ = nullptr;
  std::unique_ptr<chunkattn::ThreadPool> pool_;
  int count_ = 1;
  pid_t process_ = ::getpid();
  std::mutex mutex_;
};

}  // namespace binding
