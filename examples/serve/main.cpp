// A small inference engine over chunkattn: see docs/serve.md.
#include <fmt/format.h>

#include <chunkattn/version.hpp>
#include <string_view>

#include "../support/options.hpp"
#include "commands.hpp"

namespace {

struct Command {
  std::string_view name, help;
  int (*run)(int argc, char** argv);
};

constexpr Command commands[] = {
    {"bench", "runs a load of requests, and says how they fared", serve::bench},
    {"generate", "continues a list of prompts, all in one batch", serve::generate},
#ifdef SERVE_HAVE_SERVER
    {"run", "serves a model over HTTP, as OpenAI's API has it", serve::run},
#endif
    {"score", "prints what a model says of given tokens", serve::score},
    {"tokenize", "prints the tokens of texts", serve::tokenize}};

int run_command(int argc, char** argv) {
  const std::string_view name = argc > 1 ? argv[1] : "--help";
  for (const Command& command : commands)
    if (name == command.name) return command.run(argc - 1, argv + 1);
  if (name == "--version") {
    fmt::print("serve {}.{}.{}\n", CHUNKATTN_VERSION_MAJOR, CHUNKATTN_VERSION_MINOR,
               CHUNKATTN_VERSION_PATCH);
    return 0;
  }
  if (name != "--help" && name != "-h")
    throw examples::UsageError(fmt::format("{}: no such command; serve --help lists them", name));
  fmt::print("serve: a small inference engine over one prefix tree\n\n");
  for (const Command& command : commands)
    fmt::print("  serve {:<8}  {}\n", command.name, command.help);
  fmt::print("\nserve COMMAND --help lists the options of a command.\n");
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return examples::guarded("serve", [&] { return run_command(argc, argv); });
}
