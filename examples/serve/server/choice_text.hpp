// From the tokens of one choice to the text that its client sees.
#pragma once

#include <algorithm>
#include <cstddef>
#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "../text/tokenizer.hpp"
#include "channel.hpp"
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
  /// \param logprobs  of the token; empty: not wanted
  [[nodiscard]] std::string push(int token, std::vector<TokenLogprob> logprobs = {}) {
    const std::string bytes = tokenizer_->decode(previous_, token);
    const bool after_half = whole_.holds();
    const std::string text = whole_.push(bytes);
    if (!logprobs.empty()) {
      // What was held back and is no character after all stands before this token's own text.
      const bool apart = after_half && text.starts_with(replacement_character) &&
                         (static_cast<unsigned char>(bytes[0]) & 0xc0) != 0x80;
      const std::size_t begin = bytes_ + (apart ? replacement_character.size() : 0);
      const std::size_t offset = characters_before_ + (apart ? 1 : 0);
      scored_.push_back({begin, {previous_, offset, std::move(logprobs)}});
    }
    previous_ = token;
    return say(text);
  }
  /// Whether a stop string was found.
  [[nodiscard]] bool stopped() const { return stop_.found(); }
  /// What is left to say of a text that ended otherwise: a stop string may be found in it yet.
  [[nodiscard]] std::string finish() {
    std::string text = say(whole_.finish());
    if (stopped()) return text;
    said_ = std::string::npos;
    return text + stop_.finish();
  }
  /// The tokens whose text has begun in what was said since the last call. Those of a stop string
  /// are never told.
  [[nodiscard]] std::vector<ScoredToken> take_scored() {
    std::vector<ScoredToken> scored;
    for (; !scored_.empty() && scored_.front().begin < said_; scored_.pop_front())
      scored.push_back(std::move(scored_.front().token));
    return scored;
  }

 private:
  struct Scored {
    std::size_t begin;  ///< bytes of the text before it
    ScoredToken token;
  };

  std::string say(const std::string& text) {
    bytes_ += text.size();
    characters_before_ +=
        static_cast<std::size_t>(std::count_if(text.begin(), text.end(), [](char c) {
          return (static_cast<unsigned char>(c) & 0xc0) != 0x80;
        }));
    std::string said = stop_.push(text);
    said_ += said.size();
    return said;
  }

  const Tokenizer* tokenizer_;
  int previous_;
  Utf8Stream whole_;
  StopStrings stop_;
  std::size_t bytes_ = 0, characters_before_ = 0;  // in whole characters, held back or not
  std::size_t said_ = 0;                           // bytes
  std::deque<Scored> scored_;                      // not told of
};

}  // namespace serve
