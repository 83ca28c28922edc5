// OpenMpExecutor: on the library's own threads until the process has a runtime of OpenMP, then on
// those of that, but not in a child of fork(). The runtime never starts a thread for which there is
// no room: it would end the process.
#include "chunkattn/runtime/openmp_executor.hpp"

#include <dlfcn.h>
#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <filesystem>
#include <functional>
#include <future>
#include <limits>
#include <memory>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "support/forked.hpp"
#include "support/refused.hpp"

using chunkattn::OpenMpExecutor;
using chunkattn::ThreadPool;

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

/// Whether an exception of a call arrives, calls that have not begun are skipped, and the executor
/// works after it.
bool rethrows(OpenMpExecutor& executor) {
  constexpr int many = 2000;
  std::atomic<int> begun = 0;
  try {
    executor.parallel_for(many, [&](int i) {
      ++begun;
      if (i == 0) throw std::runtime_error("zero");
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    });
  } catch (const std::runtime_error& error) {
    return error.what() == std::string("zero") && begun < many && calls_each_once(executor);
  }
  return false;
}

/// Whether two of its threads work at the same time: each call waits for the other.
bool has_two_threads(OpenMpExecutor& executor) {
  std::atomic<int> begun = 0;
  executor.parallel_for(2, [&](int) {
    ++begun;
    while (begun < 2) std::this_thread::yield();
  });
  return begun == 2;
}

constexpr int skipped = 77;

/// ThreadSanitizer does not know how it synchronises.
bool load_openmp() {
  return test::can_fork && ::dlopen("libgomp.so.1", RTLD_NOW | RTLD_GLOBAL) != nullptr;
}

/// A parallel region of the engine's.
template <class F = void (*)()>
void region_of(unsigned count, F f = [] {}) {
  using Parallel = void (*)(void (*)(void*), void*, unsigned, unsigned);
  reinterpret_cast<Parallel>(::dlsym(RTLD_DEFAULT, "GOMP_parallel"))(
      [](void* function) { (*static_cast<F*>(function))(); }, &f, count, 0);
}

std::ptrdiff_t threads_of_process() {
  const std::filesystem::directory_iterator tasks("/proc/self/task");
  return std::distance(begin(tasks), end(tasks));
}

template <class F>
bool refused_for_threads(const F& f) {
  try {
    f();
  } catch (const chunkattn::Error& error) {
    return std::string_view(error.what())
        .starts_with("num_threads = 4: expected no more than the system allows, thread 2 could");
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

// GCC's runtime has no threads yet in these children: their parent has not called it.
TEST_CASE("OpenMpExecutor where the system starts no more threads") {
  const auto in_child = [](auto test) {
    const int result = test::in_child([&] { return load_openmp() ? test() : skipped; });
    if (result == skipped) MESSAGE("SKIPPED: no libgomp.so.1, no user whom limits bind, or TSan");
    return result == skipped ? 0 : result;
  };
  CHECK(in_child([] {
          if (!test::allow_no_more_threads()) return skipped;
          return refused_for_threads([] { OpenMpExecutor(4); }) ? 0 : 1;
        }) == 0);
  CHECK(in_child([] {  // those that it has are enough
          OpenMpExecutor executor(4);
          if (!test::allow_no_more_threads()) return skipped;
          for (int i = 0; i < 3; ++i)
            if (!calls_each_once(executor) || !executor.are_openmp()) return 1;
          OpenMpExecutor other(4);
          return calls_each_once(other) && other.are_openmp() ? 0 : 2;
        }) == 0);
  CHECK(in_child([] {  // a region of the engine's ends some
          OpenMpExecutor executor(4);
          if (!test::allow_no_more_threads()) return skipped;
          region_of(2);
          while (threads_of_process() > 2) std::this_thread::yield();
          if (!refused_for_threads([&] { executor.parallel_for(5, [](int) { ::_exit(1); }); }))
            return 2;
          OpenMpExecutor two(2);
          return calls_each_once(two) && two.are_openmp() ? 0 : 3;
        }) == 0);
  CHECK(in_child([] {  // so does one of another executor's
          OpenMpExecutor executor(4), two(2);
          while (threads_of_process() > 2) std::this_thread::yield();
          if (!test::allow_no_more_threads()) return skipped;
          return calls_each_once(two) && refused_for_threads([&] {
                   executor.parallel_for(5, [](int) { ::_exit(1); });
                 })
                     ? 0
                     : 2;
        }) == 0);
  CHECK(in_child([] {  // threads that were callers themselves meanwhile
          OpenMpExecutor executor(4);
          region_of(4, [] { OpenMpExecutor(2).parallel_for(2, [](int) {}); });
          if (!calls_each_once(executor)) return 1;
          region_of(2);
          while (threads_of_process() > 2) std::this_thread::yield();
          if (!test::allow_no_more_threads()) return skipped;
          return refused_for_threads([&] { executor.parallel_for(5, [](int) { ::_exit(1); }); })
                     ? 0
                     : 2;
        }) == 0);
  CHECK(in_child([] {  // the runtime has none yet for another thread
          OpenMpExecutor executor(4);
          std::atomic<bool> is_limited = false;
          std::atomic<int> result = 0;
          std::thread other([&] {
            while (!is_limited) std::this_thread::yield();
            if (!refused_for_threads([&] { executor.parallel_for(5, [](int) { ::_exit(1); }); }))
              result = 2;
          });
          if (!test::allow_no_more_threads()) ::_exit(skipped);
          is_limited = true;
          other.join();
          return result != 0 ? result.load() : calls_each_once(executor) ? 0 : 3;
        }) == 0);
}

TEST_CASE("OpenMpExecutor beside regions of the engine's, and inside of them") {
  const auto test = [] {
    if (!load_openmp()) return skipped;
    for (const int many : {ThreadPool::max_threads + 1, std::numeric_limits<int>::max()}) {
      if (!test::refused([=] { OpenMpExecutor{many}; }).starts_with("num_threads = ")) return 1;
    }
    if (threads_of_process() != 1) return 2;
    OpenMpExecutor executor(4), two(2);
    for (int round = 0; round < 20; ++round) {
      if (round % 2 == 0) region_of(2);
      if (round % 3 == 0 && !calls_each_once(two)) return 3;
      if (round % 5 == 0 &&
          !std::async(std::launch::async, calls_each_once, std::ref(executor)).get())
        return 4;
      if (!calls_each_once(executor) || !executor.are_openmp()) return 5;
    }
    // All of them stay, however few calls there are.
    while (threads_of_process() > 4) std::this_thread::yield();
    for (int round = 0; round < 20; ++round) executor.parallel_for(2, [](int) {});
    if (threads_of_process() != 4) return 6;
    std::atomic<int> wrong = 0;
    region_of(3, [&] { wrong += !calls_each_once(*std::make_unique<OpenMpExecutor>(4)); });
    if (wrong != 0 || !calls_each_once(executor)) return 7;
    return test::in_child(
        [] {  // where the runtime would wait for what did not come along
          OpenMpExecutor here(3);
          return calls_each_once(here) && rethrows(here) && !here.are_openmp() ? 0 : 1;
        },
        10);
  };
  const int result = test::in_child(test);
  if (result == skipped) MESSAGE("SKIPPED: no libgomp.so.1, or ThreadSanitizer");
  CHECK((result == 0 || result == skipped));
}

TEST_CASE("OpenMpExecutor on the threads of OpenMP") {
  if (!load_openmp()) {
    MESSAGE("SKIPPED: no libgomp.so.1, or ThreadSanitizer");
    return;
  }
  CHECK_FALSE(OpenMpExecutor(1).are_openmp());  // needs none
  OpenMpExecutor executor(3);
  CHECK(executor.are_openmp());
  CHECK(executor.concurrency() == 3);
  CHECK(calls_each_once(executor));
  CHECK(has_two_threads(executor));
  CHECK(rethrows(executor));
  CHECK(test::in_child([&] {
          if (!calls_each_once(executor) || executor.are_openmp()) return 1;
          if (!has_two_threads(executor)) return 3;
          return executor.concurrency() == 3 && rethrows(executor) ? 0 : 2;
        }) == 0);
  CHECK(executor.are_openmp());
}
