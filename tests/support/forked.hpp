// A function in a child of fork(), which ends whatever it does.
#pragma once

#if !defined(_WIN32)
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <exception>
#include <system_error>
#include <thread>

namespace test {

// A child of a process with threads may start threads under no ThreadSanitizer of these years.
#if defined(__SANITIZE_THREAD__)
inline constexpr bool can_fork = false;
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
inline constexpr bool can_fork = false;
#else
inline constexpr bool can_fork = true;
#endif
#else
inline constexpr bool can_fork = true;
#endif

/// What f() returns there (below 100), 100 if it threw, or 1000 and the number of the signal that
/// ended it: SIGALRM if it took longer than the limit.
template <class F>
int in_child(const F& f, unsigned seconds = 30) {
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(seconds);
    try {
      ::_exit(f());
    } catch (const std::exception&) {
      ::_exit(100);
    }
  }
  int status = 0;
  if (child < 0 || ::waitpid(child, &status, 0) != child) return -1;
  return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
}

/// In a child: from now on the system starts no thread. Whether it is so: not everybody may become
/// a user whom limits bind.
inline bool allow_no_more_threads() {
  constexpr unsigned nobody = 65534;
  const rlimit none{0, 0};
  if (::geteuid() == 0 && (::setgid(nobody) != 0 || ::setuid(nobody) != 0)) return false;
  if (::setrlimit(RLIMIT_NPROC, &none) != 0) return false;
  try {
    std::thread([] {}).join();
    return false;
  } catch (const std::system_error&) {
    return true;
  }
}

}  // namespace test
#endif
