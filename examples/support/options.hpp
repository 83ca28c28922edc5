// A command line in thirty lines of help: options with a value, flags, and errors that name the
// option, its value and what was expected.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <functional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
#include <type_traits>
#include <utility>
#include <vector>

#include "table.hpp"

namespace examples {

/// The user's mistake on the command line; programs print it and exit with status 2.
class UsageError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class Options {
 public:
  Options(std::string program, std::string summary)
      : program_(std::move(program)), summary_(std::move(summary)) {}

  /// `--name`: sets `target` to true.
  void flag(std::string name, std::string help, bool& target) {
    entries_.push_back({std::move(name), "", std::move(help), false,
                        [&target](std::string_view) { target = true; }});
  }

  /// `--name PLACEHOLDER`, a number in [least, most]. Its default is the target's present value.
  template <class Number>
  requires std::is_arithmetic_v<Number>
  void number(std::string name, std::string placeholder, std::string help, Number& target,
              Number least, Number most) {
    help += fmt::format(" (default {})", target);
    auto read = [name, least, most, &target](std::string_view text) {
      Number value{};
      const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
      if (error != std::errc{} || end != text.data() + text.size() || value < least || value > most)
        throw UsageError(
            fmt::format("{} = {}: expected a number from {} to {}", name, text, least, most));
      target = value;
    };
    entries_.push_back({std::move(name), std::move(placeholder), std::move(help), true, read});
  }

  /// `--name PLACEHOLDER`, any text.
  void text(std::string name, std::string placeholder, std::string help, std::string& target) {
    entries_.push_back({std::move(name), std::move(placeholder), std::move(help), true,
                        [&target](std::string_view value) { target = value; }});
  }

  /// As text(), and may be given several times.
  void texts(std::string name, std::string placeholder, std::string help,
             std::vector<std::string>& target) {
    entries_.push_back({std::move(name), std::move(placeholder), std::move(help), true,
                        [&target](std::string_view value) { target.emplace_back(value); }});
  }

  /// `--name a|b|c`: one of `allowed`. Its default is the target's present value.
  void choice(std::string name, std::vector<std::string> allowed, std::string help,
              std::string& target) {
    std::string list;
    for (const std::string& candidate : allowed) list += (list.empty() ? "" : "|") + candidate;
    help += fmt::format(" (default {})", target);
    auto read = [name, list, allowed = std::move(allowed), &target](std::string_view value) {
      for (const std::string& candidate : allowed)
        if (candidate == value) {
          target = value;
          return;
        }
      throw UsageError(fmt::format("{} = {}: expected {}", name, value, list));
    };
    entries_.push_back({std::move(name), list, std::move(help), true, read});
  }

  /// Reads the command line. False after --help was printed: the program is done.
  [[nodiscard]] bool parse(int argc, const char* const* argv) const {
    for (int i = 1; i < argc; ++i) {
      std::string_view argument = argv[i];
      if (argument == "--help" || argument == "-h") {
        fmt::print("{}", help());
        return false;
      }
      const std::size_t equals = argument.find('=');
      const std::string_view name = argument.substr(0, equals);
      const Entry* entry = find(name);
      if (entry == nullptr)
        throw UsageError(fmt::format("{}: no such option; {} --help lists them", name, program_));
      if (!entry->takes_value) {
        if (equals != std::string_view::npos)
          throw UsageError(fmt::format("{} takes no value", name));
        entry->read({});
      } else if (equals != std::string_view::npos) {
        entry->read(argument.substr(equals + 1));
      } else if (i + 1 < argc) {
        entry->read(argv[++i]);
      } else {
        throw UsageError(fmt::format("{}: expected a value ({})", name, entry->placeholder));
      }
    }
    return true;
  }

  [[nodiscard]] std::string help() const {
    std::size_t width = 0;
    for (const Entry& entry : entries_)
      width = std::max(width, entry.name.size() + entry.placeholder.size());
    std::string out = wrapped(program_ + ": " + summary_, 0) + "\n\nOptions:\n";
    for (const Entry& entry : entries_)
      out += fmt::format("  {:<{}}  {}\n", entry.name + " " + entry.placeholder, width + 1,
                         wrapped(entry.help, width + 5));
    return out + fmt::format("  {:<{}}  {}\n", "--help", width + 1, "print this");
  }

 private:
  struct Entry {
    std::string name, placeholder, help;
    bool takes_value;
    std::function<void(std::string_view)> read;
  };

  [[nodiscard]] const Entry* find(std::string_view name) const {
    for (const Entry& entry : entries_)
      if (entry.name == name) return &entry;
    return nullptr;
  }

  std::string program_, summary_;
  std::vector<Entry> entries_;
};

/// Runs a program's body; failures become one line on stderr and an exit status (2: usage, 1: the
/// rest, also where its output did not arrive).
template <class Body>
int guarded(const char* program, Body&& body) {
  try {
    const int status = body();
    if (std::fflush(stdout) != 0)
      throw std::runtime_error("stdout: " + std::generic_category().message(errno));
    return status;
  } catch (const UsageError& error) {
    std::fprintf(stderr, "%s: %s\n", program, error.what());  // fmt::print would throw
    return 2;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s: %s\n", program, error.what());
    return 1;
  }
}

}  // namespace examples
