// The threads that kernels run on. Where torch has brought an OpenMP runtime, they are its threads:
// see OpenMpExecutor.
#pragma once

#include <chunkattn/runtime/openmp_executor.hpp>
#include <mutex>

namespace binding {

/// An Executor (chunkattn/executor.hpp). Python's threads take turns by `lock()`.
class Workers : public chunkattn::OpenMpExecutor {
 public:
  using OpenMpExecutor::OpenMpExecutor;

  [[nodiscard]] std::unique_lock<std::mutex> lock() { return std::unique_lock(mutex_); }

 private:
  std::mutex mutex_;
};

}  // namespace binding
