// Another process that is killed: a child of fork(), or on Windows this program again, of which it
// runs one test case.
#pragma once

#include <doctest/doctest.h>

#include <cstdint>
#include <cstdlib>
#include <string>
#include <utility>

#if defined(_WIN32)
#include <process.h>
#else
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#endif

namespace test {

#if defined(_WIN32)
int terminate_process(void* process, unsigned status) __asm__("TerminateProcess");
#endif

class OtherProcess {
 public:
  using Work = void (*)(const std::string& text, std::uint64_t number);
#if defined(_WIN32)
  OtherProcess(const char* test_case, Work, const std::string& text, std::uint64_t number) {
    ::_putenv_s("CHUNKATTN_TEST_TEXT", text.c_str());
    ::_putenv_s("CHUNKATTN_TEST_NUMBER", std::to_string(number).c_str());
    const std::string which = std::string("--test-case=") + test_case;
    process_ = ::_spawnl(_P_NOWAIT, _pgmptr, "test", "--no-skip", which.c_str(), nullptr);
    ::_putenv_s("CHUNKATTN_TEST_TEXT", "");
    REQUIRE(process_ != -1);
  }
  void kill() {
    REQUIRE(terminate_process(reinterpret_cast<void*>(process_), 9) != 0);
    int status = 0;
    REQUIRE(::_cwait(&status, std::exchange(process_, -1), 0) != -1);
    CHECK(status == 9);  // nothing else has ended it
  }

 private:
  std::intptr_t process_ = -1;
#else
  OtherProcess(const char*, Work work, const std::string& text, std::uint64_t number)
      : process_(::fork()) {
    REQUIRE(process_ >= 0);
    if (process_ > 0) return;
    work(text, number);
    ::_exit(1);
  }
  void kill() {
    REQUIRE(::kill(process_, SIGKILL) == 0);
    int status = 0;
    REQUIRE(::waitpid(process_, &status, 0) == process_);
    CHECK(WIFSIGNALED(status));  // nothing else has ended it
  }

 private:
  pid_t process_ = -1;
#endif
};

/// What that test case does.
inline void in_other_process(OtherProcess::Work work) {
  const char* const text = std::getenv("CHUNKATTN_TEST_TEXT");
  const char* const number = std::getenv("CHUNKATTN_TEST_NUMBER");
  if (text != nullptr && *text != 0 && number != nullptr)
    work(text, std::strtoull(number, nullptr, 10));
}

}  // namespace test
