// ExecutorRef: an executor without its type, so that kernels are compiled once for all of them.
#pragma once

#include <memory>
#include <type_traits>

#include "../../executor.hpp"
#include "../support/config.hpp"

CHUNKATTN_NAMESPACE_BEGIN

namespace detail::cpu {

/// Refers to an executor, which outlives it.
class ExecutorRef {
 public:
  template <Executor Exec>
  explicit ExecutorRef(Exec& executor) noexcept
      : executor_(std::addressof(executor)),
        concurrency_(
            [](void* e) { return static_cast<int>(static_cast<Exec*>(e)->concurrency()); }),
        parallel_for_([](void* e, int n, const void* context, Invoke call) {
          static_cast<Exec*>(e)->parallel_for(n, [=](int i) { call(context, i); });
        }) {}

  [[nodiscard]] int concurrency() const { return concurrency_(executor_); }
  template <class F>
  void parallel_for(int n, const F& f) const {
    parallel_for_(executor_, n, std::addressof(f),
                  [](const void* context, int i) { (*static_cast<const F*>(context))(i); });
  }

 private:
  using Invoke = void (*)(const void* context, int i);

  void* executor_;
  int (*concurrency_)(void* executor);
  void (*parallel_for_)(void* executor, int n, const void* context, Invoke call);
};

}  // namespace detail::cpu

CHUNKATTN_NAMESPACE_END
