// OpenMpExecutor: on the library's own threads until the process has a runtime of OpenMP, then on
// those of that, but not in a child of fork().
#include "chunkattn/runtime/openmp_executor.hpp"

#include <dlfcn.h>
#include <doctest/doctest.h>

#include <atomic>
#include <cstddef>
#include <mutex>
#include <set>
#include <stdexcept>
#include <thread>
#include <vector>

#include "support/forked.hpp"

using chunkattn::OpenMpExecutor;

namespace {

/// Whether each call is made once, by at most as many threads as it has.
bool calls_each_once(OpenMpExecutor& executor) {
  for (const int n : {0, 1, 2, 7, 500}) {
    std::vector<std::atomic<int>> calls(static_cast<std::size_t>(n));
    std::set<std::thread::id> threads;
    std::mutex mutex;
    executor.parallel_for(n, [&](int i) {
      ++calls[static_cast<std::size_t>(i)];
      const std::lock_guard guard(mutex);
      threads.insert(std::this_thread::get_id());
    });
    for (const auto& count : calls)
      if (count != 1) return false;
    if (threads.size() > static_cast<std::size_t>(executor.concurrency())) return false;
  }
  return true;
}

/// Whether an exception of a call arrives, and the executor works after it.
bool rethrows(OpenMpExecutor& executor) {
  try {
    executor.parallel_for(100, [](int i) {
      if (i == 13) throw std::runtime_error("thirteen");
    });
  } catch (const std::runtime_error& error) {
    return error.what() == std::string("thirteen") && calls_each_once(executor);
  }
  return false;
}

}  // namespace

TEST_CASE("OpenMpExecutor without OpenMP is a ThreadPool") {
  for (const int threads : {1, 3}) {
    OpenMpExecutor executor(threads);
    CHECK_FALSE(executor.are_openmp());
    CHECK(executor.concurrency() == threads);
    CHECK(calls_each_once(executor));
    CHECK(rethrows(executor));
  }
  CHECK(OpenMpExecutor(0).concurrency() == chunkattn::ThreadPool(0).concurrency());
  CHECK_THROWS_AS(OpenMpExecutor(-1), chunkattn::InvalidArgument);
}

TEST_CASE("OpenMpExecutor on the threads of OpenMP") {
  void* const runtime = test::can_fork ? ::dlopen("libgomp.so.1", RTLD_NOW | RTLD_GLOBAL) : nullptr;
  if (runtime == nullptr) {  // ThreadSanitizer does not know how it synchronises
    MESSAGE("SKIPPED: no libgomp.so.1, or ThreadSanitizer");
    return;
  }
  CHECK_FALSE(OpenMpExecutor(1).are_openmp());  // needs none
  OpenMpExecutor executor(3);
  CHECK(executor.are_openmp());
  CHECK(executor.concurrency() == 3);
  CHECK(calls_each_once(executor));
  CHECK(rethrows(executor));
  CHECK(test::in_child([&] {
          if (!calls_each_once(executor) || executor.are_openmp()) return 1;
          return executor.concurrency() == 3 && rethrows(executor) ? 0 : 2;
        }) == 0);
  CHECK(executor.are_openmp());
}
