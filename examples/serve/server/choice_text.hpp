// From the tokens of one choice to the text that its client sees.
#pragma once

#include <string>
#include <vector>

#include "../text/tokenizer.hpp"
#include "stop_strings.hpp"
#include "utf8_stream.hpp"

namespace serve {

/// Decodes token by token; emits whole characters only, and nothing of a stop string.
class ChoiceText {
 public:
  /// \param previous  the prompt's last token
  ChoiceText(const Tokenizer& tokenizer, int previous, std::vector<std::string> stop)
      : tokenizer_(&tokenizer), previous_(previous), stop_(std::move(stop)) {}

  /// What can be said after this token. \pre not stopped()
  [[nodiscard]] std::string push(int token) {
    const std::string characters = characters_.push(tokenizer_->decode(previous_, token));
    previous_ = token;
    return stop_.push(characters);
  }
  /// Whether a stop string was found.
  [[nodiscard]] bool stopped() const { return stop_.found(); }
  /// What is left to say of a text that ended otherwise: a stop string may be found in it yet.
  [[nodiscard]] std::string finish() {
    std::string text = stop_.push(characters_.finish());
    return stopped() ? text : text + stop_.finish();
  }

 private:
  const Tokenizer* tokenizer_;
  int previous_;
  Utf8Stream characters_;
  StopStrings stop_;
};

}  // namespace serve
