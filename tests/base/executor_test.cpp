// Executors: each index exactly once, from any number of threads, again and again; exceptions.
#include "chunkattn/executor.hpp"

#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "chunkattn/detail/support/thread_count.hpp"

#if defined(__linux__)
#include <sched.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <optional>

#include "tests/support/forked.hpp"
#endif

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

#if CHUNKATTN_EXCEPTIONS
TEST_CASE("ThreadPool: a call while another one runs is refused, from any thread") {
  for (const bool nested : {false, true}) {
    ThreadPool pool(3);
    std::atomic<int> refused{0}, done{0};
    const auto call = [&] {
      try {
        pool.parallel_for(2, [](int) {});
      } catch (const InvalidArgument& error) {
        refused += std::string_view(error.what()).starts_with("pool = in use by another call: ");
      }
    };
    pool.parallel_for(5, [&](int) {
      if (nested)
        call();
      else
        std::thread(call).join();
      ++done;
    });
    CHECK(refused == 5);
    CHECK(done == 5);
    pool.parallel_for(5, [&](int) { ++done; });
    CHECK(done == 10);
    CHECK_THROWS_AS(pool.parallel_for(2, [](int) { throw 1; }), int);
    pool.parallel_for(5, [&](int) { ++done; });
    CHECK(done == 15);
  }
}
#endif

TEST_CASE("SerialExecutor keeps the order") {
  SerialExecutor serial;
  std::vector<int> order;
  serial.parallel_for(4, [&](int i) { order.push_back(i); });
  CHECK(order == std::vector<int>{0, 1, 2, 3});
}

#if CHUNKATTN_EXCEPTIONS
TEST_CASE("ThreadPool passes one exception on, after every call has ended, and continues") {
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

TEST_CASE("ThreadPool: after an exception, calls that have not begun are skipped") {
  ThreadPool pool(2);
  constexpr int n = 10'000'000;
  std::atomic<int> calls{0};
  CHECK_THROWS_AS(pool.parallel_for(n,
                                    [&](int) {
                                      if (calls++ == 100) throw std::runtime_error("no");
                                    }),
                  std::runtime_error);
  CHECK(calls < n);
}
#endif

TEST_CASE("CPU quotas: what the files of cgroups say") {
  using chunkattn::detail::quota_of_v1;
  using chunkattn::detail::quota_of_v2;
  constexpr int none = chunkattn::detail::no_quota;
  CHECK(quota_of_v2("max 100000\n") == none);
  CHECK(quota_of_v2("200000 100000\n") == 2);
  CHECK(quota_of_v2("250000 100000") == 2);  // half a CPU more would only be waited for
  CHECK(quota_of_v2("50000 100000\n") == 1);
  CHECK(quota_of_v2("1 1000000\n") == 1);
  CHECK(quota_of_v2("6400000 50000\n") == 128);
  CHECK(quota_of_v1("-1\n", "100000\n") == none);
  CHECK(quota_of_v1("300000\n", "100000\n") == 3);
  CHECK(quota_of_v1("10000\n", "100000\n") == 1);
  // What is missing or broken sets no limit.
  for (const std::string_view text : {"", "\n", "max", "100000", "100000 0", "100000 -5",
                                      "0 100000", "-1 100000", "x y", "99999999999999999999 1"})
    CHECK(quota_of_v2(text) == none);
  CHECK(quota_of_v1("", "") == none);
  CHECK(quota_of_v1("100000", "") == none);
  CHECK(quota_of_v1("100000", "0") == none);
}

TEST_CASE("CPU quotas: the tightest of a cgroup and those above it") {
  using chunkattn::detail::cgroup_quota;
  constexpr int none = chunkattn::detail::no_quota;
  std::map<std::string, std::string, std::less<>> files;
  const auto read = [&](const std::string& path) {
    const auto found = files.find(path);
    return found == files.end() ? std::string() : found->second;
  };
  CHECK(cgroup_quota(read) == none);
  files["/proc/self/cgroup"] = "0::/\n";
  CHECK(cgroup_quota(read) == none);
  files["/sys/fs/cgroup/cpu.max"] = "400000 100000\n";  // a container sees itself as the root
  CHECK(cgroup_quota(read) == 4);
  files["/proc/self/cgroup"] = "0::/user.slice/job-7\n";
  CHECK(cgroup_quota(read) == 4);
  files["/sys/fs/cgroup/user.slice/job-7/cpu.max"] = "max 100000\n";
  files["/sys/fs/cgroup/user.slice/cpu.max"] = "300000 100000\n";
  CHECK(cgroup_quota(read) == 3);
  files["/sys/fs/cgroup/user.slice/job-7/cpu.max"] = "200000 100000\n";
  CHECK(cgroup_quota(read) == 2);

  files.clear();
  files["/proc/self/cgroup"] =
      "12:memory:/docker/ab\n11:cpu,cpuacct:/docker/ab\n10:cpuset:/docker/ab\n1:name=systemd:/"
      "\n0::/\n";
  files["/sys/fs/cgroup/cpu,cpuacct/docker/ab/cpu.cfs_quota_us"] = "600000\n";
  files["/sys/fs/cgroup/cpu,cpuacct/docker/ab/cpu.cfs_period_us"] = "100000\n";
  CHECK(cgroup_quota(read) == 6);
  files["/sys/fs/cgroup/cpu/cpu.cfs_quota_us"] = "150000\n";  // inside: mounted as the root
  files["/sys/fs/cgroup/cpu/cpu.cfs_period_us"] = "50000\n";
  CHECK(cgroup_quota(read) == 3);
  files["/proc/self/cgroup"] = "12:cpuset:/docker/ab\n1:cpuacct:/docker/ab\n";  // no cpu controller
  CHECK(cgroup_quota(read) == none);
}

#if defined(__linux__)
namespace {

/// Whether all calls are made, by as many threads as there are to be.
bool works(ThreadPool& pool) {
  for (int round = 0; round < 200; ++round) {
    std::atomic<int> calls{0};
    pool.parallel_for(17, [&](int) { calls.fetch_add(1); });
    if (calls != 17) return false;
  }
  // Each call waits for all others to begin.
  std::atomic<int> arrived{0};
  pool.parallel_for(pool.concurrency(), [&](int) {
    arrived.fetch_add(1);
    while (arrived.load() < pool.concurrency()) std::this_thread::yield();
  });
  return arrived == pool.concurrency();
}

}  // namespace

TEST_CASE("ThreadPool: a child of fork() starts its threads again") {
  if (!test::can_fork) {
    std::printf("skipped: a child of fork(): ThreadSanitizer lets it start no threads\n");
    return;
  }
  for (const int threads : {1, 2, 4}) {
    CAPTURE(threads);
    std::optional<ThreadPool> pool(threads);
    const auto all = [&] { return works(*pool) && pool->concurrency() == threads ? 0 : 1; };
    CHECK(test::in_child(all) == 0);  // before it was used
    CHECK(works(*pool));
    CHECK(test::in_child(all) == 0);
    CHECK(works(*pool));  // the parent's are as they were
    CHECK(test::in_child([&] { return all() + test::in_child(all, 20); }) == 0);
    CHECK(test::in_child([&] { return test::in_child(all, 20); }) == 0);
    CHECK(test::in_child([&] {  // another pool's threads may get the handles of the parent's
            ThreadPool other(threads);
            if (!works(other)) return 1;
            pool.reset();
            return works(other) ? 0 : 2;
          }) == 0);
    CHECK(test::in_child([&] {
            if (!works(*pool)) return 1;
            pool.reset();
            return 0;
          }) == 0);
    CHECK(works(*pool));
  }
}

TEST_CASE("ThreadPool: a child of fork() calls nothing of what its parent was at") {
  if (!test::can_fork) {
    std::printf("skipped: a child of fork(): ThreadSanitizer lets it start no threads\n");
    return;
  }
  ThreadPool pool(8);
  const pid_t parent = getpid();
  std::atomic<bool> has_begun = false, may_end = false, was_called_in_child = false;
  const auto call = [&](int) {
    if (getpid() != parent) was_called_in_child = true;
    has_begun = true;
    while (getpid() == parent && !may_end) std::this_thread::yield();
  };
  std::thread user([&] { pool.parallel_for(1000, call); });
  while (!has_begun) std::this_thread::yield();
  int result = 0;
  for (int i = 0; i < 10 && result == 0; ++i)  // each time some begin before they have what to do
    result =
        test::in_child([&] { return works(pool) && !was_called_in_child ? 0 : 1; }, /*seconds=*/10);
  CHECK(result == 0);
  may_end = true;
  user.join();
}

TEST_CASE("the default number of threads respects the affinity mask") {
  const int before = chunkattn::detail::default_threads();
  CHECK(before >= 1);
  CHECK(ThreadPool().concurrency() == before);
  cpu_set_t saved, one;
  REQUIRE(sched_getaffinity(0, sizeof saved, &saved) == 0);
  CHECK(before <= CPU_COUNT(&saved));
  CPU_ZERO(&one);
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu)
    if (CPU_ISSET(cpu, &saved)) {
      CPU_SET(cpu, &one);
      break;
    }
  REQUIRE(sched_setaffinity(0, sizeof one, &one) == 0);
  CHECK(chunkattn::detail::default_threads() == 1);
  CHECK(ThreadPool().concurrency() == 1);
  CHECK(ThreadPool(3).concurrency() == 3);  // who asks for a number gets it
  REQUIRE(sched_setaffinity(0, sizeof saved, &saved) == 0);
  CHECK(chunkattn::detail::default_threads() == before);
}

#if CHUNKATTN_EXCEPTIONS
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
TEST_CASE("a thread that cannot be started") {
  std::printf("skipped: a thread that cannot be started: a sanitizer needs the address space\n");
}
#else
namespace {

std::size_t running_threads() {
  const std::filesystem::directory_iterator tasks("/proc/self/task");
  return static_cast<std::size_t>(std::distance(begin(tasks), end(tasks)));
}

// In a child with room for a few stacks only: 0 if all is as it should be.
int try_too_many_threads() {
  rlimit limit{};
  if (getrlimit(RLIMIT_STACK, &limit) != 0) return 1;
  const rlim_t stack = limit.rlim_cur == RLIM_INFINITY ? rlim_t{8} << 20 : limit.rlim_cur;
  std::FILE* const file = std::fopen("/proc/self/statm", "r");
  unsigned long pages = 0;
  if (file == nullptr || std::fscanf(file, "%lu", &pages) != 1) return 2;
  std::fclose(file);
  const rlim_t used = pages * static_cast<rlim_t>(sysconf(_SC_PAGESIZE));
  limit.rlim_cur = limit.rlim_max = used + 6 * stack + (rlim_t{32} << 20);
  if (setrlimit(RLIMIT_AS, &limit) != 0) return 3;
  try {
    ThreadPool pool(4000);
    return 4;
  } catch (const Error& error) {
    const std::string message = error.what();
    if (message.find("num_threads = 4000") != 0) return 5;
    if (message.find("could not be started") == std::string::npos) return 6;
  } catch (...) {
    return 7;
  }
  if (running_threads() != 1) return 8;
  ThreadPool pool(2);  // what was taken has been given back
  std::atomic<int> calls{0};
  pool.parallel_for(100, [&](int) { calls.fetch_add(1); });
  return calls.load() == 100 ? 0 : 9;
}

// In a child: it has no room for a stack until the limit is raised again. 0: as it should be.
int try_too_few_again(ThreadPool& pool) {
  const ThreadPool other(9);  // takes the stacks that the parent's threads left
  std::FILE* const file = std::fopen("/proc/self/statm", "r");
  unsigned long pages = 0;
  if (file == nullptr || std::fscanf(file, "%lu", &pages) != 1) return 2;
  std::fclose(file);
  rlimit limit{}, none{};
  if (getrlimit(RLIMIT_AS, &none) != 0) return 3;
  limit = none;
  limit.rlim_cur = pages * static_cast<rlim_t>(sysconf(_SC_PAGESIZE)) + (rlim_t{4} << 20);
  if (setrlimit(RLIMIT_AS, &limit) != 0) return 4;
  for (int i = 0; i < 2; ++i) {
    try {
      pool.parallel_for(9, [](int) {});
      return 5;
    } catch (const Error& error) {
      if (std::string(error.what()).find("num_threads = 9: ") != 0) return 6;
    }
  }
  if (pool.concurrency() != 9 || running_threads() != 9) return 7;
  if (setrlimit(RLIMIT_AS, &none) != 0) return 8;
  return works(pool) ? 0 : 9;
}

}  // namespace

TEST_CASE("a thread that cannot be started: an Error, and those started before have ended") {
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) _exit(try_too_many_threads());
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  REQUIRE(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
}

TEST_CASE("ThreadPool: a child of fork() that may start no threads says so") {
  ThreadPool pool(9);
  CHECK(works(pool));
  CHECK(test::in_child([&] { return try_too_few_again(pool); }) == 0);
  CHECK(works(pool));
}
#endif
#endif
#endif
