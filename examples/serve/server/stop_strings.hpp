// Texts that end a text.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace serve {

/// Finds the first of some strings in a text that comes in pieces, wherever these are cut. The text
/// ends before it. What may be its beginning is held back until more is known.
class StopStrings {
 public:
  /// \pre none is empty
  explicit StopStrings(std::vector<std::string> strings) : strings_(std::move(strings)) {}

  /// Continues the text. Returns what can be said of it. \pre none was found
  /// \param may_end  whether a string that ends in this piece ends the text
  [[nodiscard]] std::string push(std::string_view text, bool may_end = true);
  /// The one that was found; empty: none.
  [[nodiscard]] const std::string& found() const { return found_; }
  /// What was held back, of a text that ended otherwise.
  [[nodiscard]] std::string finish() { return std::exchange(held_, {}); }

 private:
  /// Bytes at the end of the text that may be the beginning of a stop string.
  [[nodiscard]] std::size_t doubtful() const;

  std::vector<std::string> strings_;
  std::string held_;
  std::string found_;
};

}  // namespace serve
