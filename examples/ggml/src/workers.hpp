// The threads that kernels run on: those of ggml. Its threads are OpenMP's where both were built
// with it, and wait for work by spinning, so a second set of threads would have to share the
// processors with them.
#pragma once

#include <atomic>
#include <chunkattn/executor.hpp>
#include <exception>
#include <memory>
#include <mutex>
#include <utility>

namespace plugin {

/// An Executor (chunkattn/executor.hpp) of as many threads as ggml was given.
class Workers {
 public:
  [[nodiscard]] int concurrency() const noexcept { return count_; }
  /// Before a call, not in it.
  void set_concurrency(int count) { count_ = count < 1 ? 1 : count; }

  template <class F>
  void parallel_for(int n, F&& f) {
    if (n == 1 || count_ == 1) {
      for (int i = 0; i < n; ++i) f(i);
      return;
    }
#ifdef _OPENMP
    std::atomic<int> next{0};
    std::mutex failed;
    std::exception_ptr failure;
#pragma omp parallel num_threads(n < count_ ? n : count_)
    try {
      for (int i = next++; i < n; i = next++) f(i);
    } catch (...) {
      const std::lock_guard guard(failed);
      failure = std::current_exception();
      next = n;
    }
    if (failure) std::rethrow_exception(failure);
#else
    if (!pool_ || pool_->concurrency() != count_)
      pool_ = std::make_unique<chunkattn::ThreadPool>(count_);
    pool_->parallel_for(n, std::forward<F>(f));
#endif
  }

 private:
  int count_ = 1;
#ifndef _OPENMP
  std::unique_ptr<chunkattn::ThreadPool> pool_;
#endif
};
static_assert(chunkattn::Executor<Workers>);

}  // namespace plugin
