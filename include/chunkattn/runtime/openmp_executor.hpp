// OpenMpExecutor: the threads of OpenMP for programs that have some already, as PyTorch has.
#pragma once

#if !defined(_WIN32)
#include <dlfcn.h>
#endif

#include <atomic>
#include <exception>
#include <memory>
#include <mutex>
#include <type_traits>
#include <utility>

#include "../detail/support/config.hpp"
#include "../detail/support/fork_mark.hpp"
#include "../executor.hpp"
#include "detail/openmp_team.hpp"

CHUNKATTN_NAMESPACE_BEGIN

/// An Executor on the threads of OpenMP, if the process has a runtime of it that takes the calls of
/// GCC's (GCC's, LLVM's and Intel's do): those wait for work by spinning, and a second set of
/// threads would have to share the processors with them. Else on a ThreadPool, also in a child of
/// fork(), where the runtime would wait for threads that did not come along. Only one thread at a
/// time may call parallel_for. It calls for no option of the compiler. On Windows always a
/// ThreadPool.
///
/// A runtime ends the process if the system refuses it a thread. So the constructor has it start
/// its threads, after as many others have shown that there is room; parallel_for does so where the
/// runtime has none yet for the thread that calls, or has fewer again.
class OpenMpExecutor {
 public:
  /// \param num_threads  the caller's included; 0: as many as there are CPUs to use, on a
  /// ThreadPool
  /// \throws InvalidArgument, Error  as ThreadPool
  explicit OpenMpExecutor(int num_threads = 0) {
    // Finds the symbol if the runtime is loaded with global visibility, as torch loads it.
#if !defined(_WIN32)
    if (num_threads > 1 && !detail::OpenMpTeam::of_caller()->was_left_behind())
      parallel_ = reinterpret_cast<Parallel>(::dlsym(RTLD_DEFAULT, "GOMP_parallel"));
#endif
    if (parallel_ == nullptr) pool_ = std::make_unique<ThreadPool>(num_threads);
    count_ = pool_ ? pool_->concurrency() : num_threads;
    if (parallel_ != nullptr) run_region([](int) {}, 0);
  }

  /// Threads, the caller's included.
  [[nodiscard]] int concurrency() const noexcept { return count_; }
  /// Whether they are threads of OpenMP.
  [[nodiscard]] bool are_openmp() const noexcept { return parallel_ != nullptr; }

  /// Calls f(i) for each i in [0, n) and returns when all calls have returned. If f throws, calls
  /// that have not begun are skipped and one of the exceptions is rethrown.
  /// \throws Error where the system does not start so many threads
  template <class F>
  void parallel_for(int n, F&& f) {
    if (n <= 0) return;
    if (parallel_ != nullptr && mark_.is_in_child()) {
      pool_ = std::make_unique<ThreadPool>(count_);
      parallel_ = nullptr;
    }
    if (pool_) return pool_->parallel_for(n, std::forward<F>(f));
    if (n == 1) return f(0);
    run_region(f, n);
  }

 private:
  using Parallel = void (*)(void (*)(void*), void*, unsigned, unsigned);

  template <class F>
  struct Loop {
    F& f;
    int n;
    const std::shared_ptr<detail::OpenMpTeam>& team;
    std::atomic<int> next{0};
    std::mutex failed{};
    std::exception_ptr failure{};

    static void run(void* self) {
      Loop& loop = *static_cast<Loop*>(self);
      detail::OpenMpTeam::enter(loop.team);
#if CHUNKATTN_EXCEPTIONS
      try {
        for (int i = loop.next++; i < loop.n; i = loop.next++) loop.f(i);
      } catch (...) {
        const std::lock_guard guard(loop.failed);
        loop.failure = std::current_exception();
        loop.next = loop.n;
      }
#else
      for (int i = loop.next++; i < loop.n; i = loop.next++) loop.f(i);
#endif
    }
  };

  // All threads take part, however few calls there are: GCC's runtime ends the others.
  template <class F>
  void run_region(F&& f, int n) {
    using Region = Loop<std::remove_reference_t<F>>;
    const auto& team = detail::OpenMpTeam::of_caller();
    if (!team->has(count_)) const ThreadPool as_many(count_);
    Region loop{f, n, team};
    parallel_(&Region::run, &loop, static_cast<unsigned>(count_), 0);
    team->had_region(count_);
#if CHUNKATTN_EXCEPTIONS
    if (loop.failure) std::rethrow_exception(loop.failure);
#endif
  }

  Parallel parallel_ = nullptr;
  std::unique_ptr<ThreadPool> pool_;
  int count_ = 1;
  detail::ForkMark mark_;
};
static_assert(Executor<OpenMpExecutor>);

CHUNKATTN_NAMESPACE_END
