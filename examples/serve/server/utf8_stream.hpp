// Utf8Stream: valid UTF-8 for clients, whatever bytes tokens have.
#pragma once

#include <string>
#include <string_view>

namespace serve {

inline constexpr std::string_view replacement_character = "\xef\xbf\xbd";

/// Bytes in pieces, characters out. A character that is not whole yet is held back; bytes that can
/// be no part of one become U+FFFD, as browsers have it: one for each longest beginning of a
/// character.
class Utf8Stream {
 public:
  /// The characters that these bytes complete.
  [[nodiscard]] std::string push(std::string_view bytes);
  /// Whether half a character is held back.
  [[nodiscard]] bool holds() const { return !held_.empty(); }
  /// At the end of the text: U+FFFD if half a character was held back.
  [[nodiscard]] std::string finish();

 private:
  std::string held_;
};

}  // namespace serve
