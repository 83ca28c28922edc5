// The command lines of the programs: CLI11, with our words for help and for errors, which name the
// option, its value and what was expected.
#pragma once

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <exception>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <system_error>
#include <type_traits>
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
  Options(const std::string& program, const std::string& summary) : app_(summary, program) {
    app_.formatter(std::make_shared<Help>());
    app_.set_help_flag("-h,--help", "print this");
    app_.allow_extras();  // parse() refuses them
    app_.option_defaults()->take_last();
  }

  /// `--name`: sets `target` to true.
  void flag(const std::string& name, const std::string& help, bool& target) {
    app_.add_flag(name, target, help)->check([name](const std::string& value) -> std::string {
      if (value != "true") throw UsageError(name + " takes no value");
      return {};
    });
  }

  /// `--name PLACEHOLDER`, a number in [least, most]. Its default is the target's present value.
  template <class Number>
    requires std::is_arithmetic_v<Number>
  void number(const std::string& name, const std::string& placeholder, const std::string& help,
              Number& target, Number least, Number most) {
    app_.add_option(name, target, with_default(help, target))
        ->type_name(placeholder)
        ->check(expect(name, CLI::Range(least, most),
                       fmt::format("a number from {} to {}", least, most)));
  }

  /// `--name PLACEHOLDER`, any text.
  void text(const std::string& name, const std::string& placeholder, const std::string& help,
            std::string& target) {
    app_.add_option(name, target, help)->type_name(placeholder);
  }

  /// As text(), and may be given several times.
  void texts(const std::string& name, const std::string& placeholder, const std::string& help,
             std::vector<std::string>& target) {
    app_.add_option(name, target, help)
        ->type_name(placeholder)
        ->expected(1)  // each time
        ->allow_extra_args(false)
        ->take_all();
  }

  /// `--name a|b|c`: one of `allowed`. Its default is the target's present value.
  void choice(const std::string& name, const std::vector<std::string>& allowed,
              const std::string& help, std::string& target) {
    const std::string list = fmt::format("{}", fmt::join(allowed, "|"));
    app_.add_option(name, target, with_default(help, target))
        ->type_name(list)
        ->check(expect(name, CLI::IsMember(allowed), list));
  }

  /// Reads the command line. False after --help was printed: the program is done.
  [[nodiscard]] bool parse(int argc, const char* const* argv) {
    try {
      app_.parse(argc, argv);
    } catch (const CLI::CallForHelp&) {
      fmt::print("{}", app_.help());
      return false;
    } catch (const CLI::ArgumentMismatch&) {  // the last option has no value after it
      throw UsageError(fmt::format("{}: expected a value", argv[argc - 1]));
    } catch (const CLI::ParseError& error) {
      throw UsageError(error.what());
    }
    for (const std::string& argument : app_.remaining())
      throw UsageError(fmt::format("{}: no such option; {} --help lists them",
                                   argument.substr(0, argument.find('=')), app_.get_name()));
    return true;
  }

 private:
  class Help : public CLI::Formatter {
   public:
    std::string make_help(const CLI::App* app, std::string, CLI::AppFormatMode) const override {
      const CLI::Option* help = app->get_help_ptr();
      std::size_t width = left(*help).size();
      for (const CLI::Option* option : app->get_options())
        width = std::max(width, left(*option).size());
      const auto line = [&](const CLI::Option& option) {
        return fmt::format("  {:<{}}  {}\n", left(option), width,
                           wrapped(option.get_description(), width + 4));
      };
      std::string out = wrapped(app->get_name() + ": " + app->get_description(), 0);
      out += "\n\nOptions:\n";
      for (const CLI::Option* option : app->get_options())
        if (option != help) out += line(*option);
      return out + line(*help);
    }

   private:
    static std::string left(const CLI::Option& option) {
      const std::string name = "--" + option.get_lnames().front();
      const std::string placeholder = option.get_type_name();  // flags have none
      return placeholder.empty() ? name : name + " " + placeholder;
    }
  };

  template <class T>
  static std::string with_default(const std::string& help, const T& value) {
    return fmt::format("{} (default {})", help, value);
  }

  static std::function<std::string(const std::string&)> expect(std::string name,
                                                               CLI::Validator valid,
                                                               std::string expected) {
    return [=](const std::string& value) -> std::string {
      if (!valid(value).empty())
        throw UsageError(fmt::format("{} = {}: expected {}", name, value, expected));
      return {};
    };
  }

  CLI::App app_;
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
