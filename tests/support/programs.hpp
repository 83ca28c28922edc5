// Programs as a user runs them.
#pragma once

#include <doctest/doctest.h>
#include <sys/wait.h>

#include <array>
#include <cstdio>
#include <string>

namespace test {

struct Outcome {
  int status = -1;
  std::string output;  // stdout and stderr
  [[nodiscard]] bool says(const std::string& text) const {
    return output.find(text) != std::string::npos;
  }
};

/// Runs a command of the shell.
inline Outcome run(const std::string& command) {
  Outcome outcome;
  std::FILE* pipe = ::popen((command + " 2>&1").c_str(), "r");
  REQUIRE(pipe != nullptr);
  std::array<char, 4096> block{};
  for (std::size_t got; (got = std::fread(block.data(), 1, block.size(), pipe)) != 0;)
    outcome.output.append(block.data(), got);
  const int status = ::pclose(pipe);
  outcome.status = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  return outcome;
}

}  // namespace test
