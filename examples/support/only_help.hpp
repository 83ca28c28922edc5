// The command line of a program without options: --help and nothing else.
#pragma once

#include <cstdio>
#include <optional>
#include <string_view>

namespace examples {

/// The status to leave with when the command line says anything: 0 after help, 2 after a mistake.
inline std::optional<int> only_help(int argc, const char* const* argv, const char* program,
                                    const char* summary) {
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument = argv[i];
    if (argument == "--help" || argument == "-h") {
      const bool told =
          std::printf("%s: %s\n\nOptions:\n  --help  print this\n", program, summary) > 0 &&
          std::fflush(stdout) == 0;
      return told ? 0 : 1;
    }
    std::fprintf(stderr, "%s: %s: no such option; %s --help lists them\n", program, argv[i],
                 program);
    return 2;
  }
  return {};
}

}  // namespace examples
