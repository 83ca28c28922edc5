// The default number of threads of a pool: as many as the CPUs that the process may run on and its
// cgroup's CPU quota allow. More threads would only make others wait.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <string>
#include <string_view>
#include <thread>

#include "config.hpp"

#if defined(__linux__)
#include <sched.h>
#endif

CHUNKATTN_NAMESPACE_BEGIN
namespace detail {

/// No limit to the number of threads.
inline constexpr int no_quota = (std::numeric_limits<int>::max)();

/// Takes the number that `text` begins with, after blanks, out of it; 0 if there is none or it is
/// negative or beyond any quota.
CHUNKATTN_COLD inline std::int64_t take_number(std::string_view& text) {
  text.remove_prefix((std::min)(text.find_first_not_of(' '), text.size()));
  std::int64_t number = 0;
  for (; !text.empty() && text[0] >= '0' && text[0] <= '9'; text.remove_prefix(1)) {
    if (number > (std::int64_t{1} << 52)) return 0;
    number = 10 * number + (text[0] - '0');
  }
  return number;
}

/// Whole CPUs that `quota` microseconds of CPU time in each `period` keep busy, at least 1;
/// no_quota if either is missing.
inline int quota_threads(std::int64_t quota, std::int64_t period) {
  if (quota <= 0 || period <= 0) return no_quota;
  return static_cast<int>(std::clamp<std::int64_t>(quota / period, 1, no_quota));
}

/// \param cpu_max  what the file cpu.max of a cgroup (version 2) holds: "max 100000",
///                 "150000 100000", or nothing
CHUNKATTN_COLD inline int quota_of_v2(std::string_view cpu_max) {
  const std::int64_t quota = take_number(cpu_max);
  return quota_threads(quota, take_number(cpu_max));
}

/// \param cfs_quota_us, cfs_period_us  what the files cpu.cfs_* of a cgroup (version 1) hold
CHUNKATTN_COLD inline int quota_of_v1(std::string_view cfs_quota_us,
                                      std::string_view cfs_period_us) {
  return quota_threads(take_number(cfs_quota_us), take_number(cfs_period_us));
}

/// The tightest quota of this process' cgroup and those above it.
/// \param read  read(path) gives what a file holds, "" if there is none
template <class Read>
CHUNKATTN_COLD int cgroup_quota(const Read& read) {
  int least = no_quota;
  // Quotas of the group at `path` below `mount` and of its ancestors. A container may see its own
  // group as the root.
  const auto walk = [&](const std::string& mount, std::string_view path, bool is_v2) {
    for (;; path = path.substr(0, path.rfind('/'))) {
      if (path == "/") path = "";
      const std::string group = mount + std::string(path) + '/';
      least = (std::min)(least, is_v2 ? quota_of_v2(read(group + "cpu.max"))
                                      : quota_of_v1(read(group + "cpu.cfs_quota_us"),
                                                    read(group + "cpu.cfs_period_us")));
      if (path.empty()) return;
    }
  };
  const std::string groups = read("/proc/self/cgroup");
  for (std::string_view rest = groups; !rest.empty();) {  // lines "id:controllers:/path"
    const std::string_view line = rest.substr(0, rest.find('\n'));
    rest.remove_prefix((std::min)(line.size() + 1, rest.size()));
    const std::size_t first = line.find(':');
    const std::size_t second = line.find(':', first + 1);
    if (second == std::string_view::npos || line.substr(second + 1).substr(0, 1) != "/") continue;
    const std::string controllers(line.substr(first + 1, second - first - 1));
    const std::string_view path = line.substr(second + 1);
    if (controllers.empty()) {
      walk("/sys/fs/cgroup", path, true);
    } else if ((',' + controllers + ',').find(",cpu,") != std::string::npos) {
      walk("/sys/fs/cgroup/" + controllers, path, false);
      if (controllers != "cpu") walk("/sys/fs/cgroup/cpu", path, false);
    }
  }
  return least;
}

/// What a file holds; "" where it cannot be read.
CHUNKATTN_COLD inline std::string read_file(const std::string& path) {
  std::string text;
  if (std::FILE* const file = std::fopen(path.c_str(), "r")) {
    char buffer[1024];
    for (std::size_t n; (n = std::fread(buffer, 1, sizeof buffer, file)) > 0;)
      text.append(buffer, n);
    std::fclose(file);
  }
  return text;
}

/// CPUs that the calling thread may run on, at least 1.
CHUNKATTN_COLD inline int usable_cpus() {
#if defined(__linux__) && defined(CPU_ALLOC)
  for (std::size_t cpus = 1024; cpus <= 1 << 20; cpus *= 2) {  // too small a set is refused
    cpu_set_t* const set = CPU_ALLOC(cpus);
    if (set == nullptr) break;
    const std::size_t size = CPU_ALLOC_SIZE(cpus);
    const int count = sched_getaffinity(0, size, set) == 0 ? CPU_COUNT_S(size, set) : 0;
    CPU_FREE(set);
    if (count > 0) return count;
  }
#endif
  return (std::max)(1, static_cast<int>(std::thread::hardware_concurrency()));
}

/// Threads of a pool by default.
#if CHUNKATTN_BODIES
CHUNKATTN_COLD CHUNKATTN_FUNCTION int default_threads() {
#if defined(__linux__)
  return (std::min)(usable_cpus(), cgroup_quota(&read_file));
#else
  return usable_cpus();
#endif
}
#else
int default_threads();
#endif

}  // namespace detail
CHUNKATTN_NAMESPACE_END
