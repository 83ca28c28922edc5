// Executors: each index exactly once, from any number of threads, again and again; exceptions.
#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <stdexcept>
#include <thread>
#include <vector>

#include "chunkattn/cpu/thread_pool.hpp"

using namespace chunkattn;

TEST_CASE("ThreadPool calls each index exactly once") {
  for (const int threads : {1, 2, 3, 8}) {
    ThreadPool pool(threads);
    CHECK(pool.concurrency() == threads);
    for (int n : {0, 1, 2, 7, 1000}) {
      std::vector<std::atomic<int>> calls(static_cast<std::size_t>(n));
      pool.parallel_for(n, [&](int i) { calls[static_cast<std::size_t>(i)].fetch_add(1); });
      for (const auto& count : calls) CHECK(count.load() == 1);
    }
  }
}

TEST_CASE("ThreadPool: 0 threads are as many as the machine has, a negative number is refused") {
  const int machine = static_cast<int>(std::thread::hardware_concurrency());
  CHECK(ThreadPool(0).concurrency() == (machine > 1 ? machine : 1));
#if CHUNKATTN_EXCEPTIONS
  CHECK_THROWS_AS(ThreadPool(-1), InvalidArgument);
#endif
}

TEST_CASE("ThreadPool: many short rounds, with pauses in which workers fall asleep") {
  ThreadPool pool(4);
  long total = 0;
  for (int round = 0; round < 3000; ++round) {
    std::atomic<long> sum{0};
    pool.parallel_for(5, [&](int i) { sum.fetch_add(i + 1, std::memory_order_relaxed); });
    total += sum.load();
    if (round % 500 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  CHECK(total == 3000 * 15);
}

TEST_CASE("ThreadPool: the other thread takes part") {
  ThreadPool pool(2);
  std::atomic<int> arrived{0};
  // Each of two calls waits until the other has begun: one thread alone would never end.
  pool.parallel_for(2, [&](int) {
    arrived.fetch_add(1);
    while (arrived.load() < 2) std::this_thread::yield();
  });
  CHECK(arrived.load() == 2);
}

TEST_CASE("SerialExecutor keeps the order") {
  SerialExecutor serial;
  std::vector<int> order;
  serial.parallel_for(4, [&](int i) { order.push_back(i); });
  CHECK(order == std::vector<int>{0, 1, 2, 3});
}

#if CHUNKATTN_EXCEPTIONS
TEST_CASE("ThreadPool passes one exception on, after every call has ended, and goes on") {
  ThreadPool pool(3);
  for (int round = 0; round < 50; ++round) {
    std::atomic<int> running{0};
    CHECK_THROWS_AS(pool.parallel_for(100,
                                      [&](int i) {
                                        running.fetch_add(1);
                                        const bool fail = i % 7 == 3;
                                        running.fetch_sub(1);
                                        if (fail) throw std::runtime_error("no");
                                      }),
                    std::runtime_error);
    CHECK(running.load() == 0);
    std::atomic<int> calls{0};
    pool.parallel_for(10, [&](int) { calls.fetch_add(1); });
    CHECK(calls.load() == 10);
  }
}
#endif
