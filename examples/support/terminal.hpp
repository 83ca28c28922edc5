// Properties of the terminal that stdout is, if it is one.
#pragma once

#include <sys/ioctl.h>
#include <unistd.h>

#include <cstddef>
#include <cstdlib>
#include <string_view>

namespace examples {

/// Whether stdout is a terminal that obeys control sequences, so that a line can rewrite itself.
inline bool on_terminal() {
  static const bool result = [] {
    const char* kind = std::getenv("TERM");
    return ::isatty(STDOUT_FILENO) != 0 && kind != nullptr && *kind != '\0' &&
           std::string_view(kind) != "dumb";
  }();
  return result;
}

/// Whether it may have colours too: the user can refuse those with a NO_COLOR that is not empty.
inline bool use_colours() {
  static const bool result = [] {
    const char* refused = std::getenv("NO_COLOR");
    return on_terminal() && (refused == nullptr || *refused == '\0');
  }();
  return result;
}

/// Columns that a line may have: the terminal's at this moment, or 80.
inline std::size_t terminal_width() {
  winsize size{};
  if (::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) return size.ws_col;
  return 80;
}

}  // namespace examples
