// The threads that kernels run on. Where ggml has brought an OpenMP runtime, they are its threads:
// see OpenMpExecutor.
#pragma once

#include <algorithm>
#include <chunkattn/executor.hpp>
#include <chunkattn/runtime/openmp_executor.hpp>
#include <memory>
#include <utility>

namespace plugin {

/// An Executor (chunkattn/executor.hpp) of as many threads as ggml was given.
class Workers {
 public:
  [[nodiscard]] int concurrency() const noexcept { return threads_->concurrency(); }
  /// Before a call, not in it.
  void set_concurrency(int count) {
    count = std::max(count, 1);
    if (count != concurrency()) threads_ = std::make_unique<chunkattn::OpenMpExecutor>(count);
  }

  template <class F>
  void parallel_for(int n, F&& f) {
    threads_->parallel_for(n, std::forward<F>(f));
  }

 private:
  std::unique_ptr<chunkattn::OpenMpExecutor> threads_ =
      std::make_unique<chunkattn::OpenMpExecutor>(1);
};
static_assert(chunkattn::Executor<Workers>);

}  // namespace plugin
