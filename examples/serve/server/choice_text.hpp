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
  /// \param previous    the prompt's last token; -1 where echo() comes first
  /// \param min_tokens  so many tokens are said whatever stop strings are in their text
  ChoiceText(const Tokenizer& tokenizer, int previous, std::vector<std::string> stop,
             std::size_t min_tokens = 0)
      : tokenizer_(&tokenizer),
        previous_(previous),
        min_tokens_(min_tokens),
        stop_(std::move(stop)) {}

  /// What can be said after this token. \pre not stopped()
  /// \param logprobs  of the token; empty: not wanted
  [[nodiscard]] std::string push(int token, std::vector<TokenLogprob> logprobs = {}) {
    ++tokens_;
    return say(add(token, tokenizer_->decode(previous_, token), std::move(logprobs), false));
  }
  /// What a token of the prompt adds to a text that repeats it. Stop strings are not looked for.
  [[nodiscard]] std::string echo(int token, std::vector<TokenLogprob> logprobs = {}) {
    std::string text = add(token, tokenizer_->spell(previous_, token), std::move(logprobs), true);
    count(text);
    said_ += text.size();
    return text;
  }
  /// The token that ends a text has a log-probability, and no text.
  void end_with(std::vector<TokenLogprob> logprobs) {
    scored_.push_back({bytes_, {previous_, characters_before_, std::move(logprobs)}});
  }
  /// Whether a stop string was found.
  [[nodiscard]] bool stopped() const { return !stop_.found().empty(); }
  /// The one that was; empty: none.
  [[nodiscard]] const std::string& stop_string() const { return stop_.found(); }
  /// What is left to say of a text that ended otherwise: a stop string may be found in it yet.
  [[nodiscard]] std::string finish() {
    std::string text = say(whole_.finish());
    if (stopped()) return text;
    said_ = std::string::npos;
    return text + stop_.finish();
  }
  /// The tokens whose text has begun in what was said since the last call. Those of a stop string
  /// are never returned.
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

  /// The characters that a token completes.
  std::string add(int token, const std::string& bytes, std::vector<TokenLogprob> logprobs,
                  bool of_prompt) {
    const bool after_half = whole_.holds();
    const std::string text = whole_.push(bytes);
    if (!logprobs.empty()) {
      // What was held back and is no character after all stands before this token's own text.
      const bool apart = after_half && text.starts_with(replacement_character) &&
                         (static_cast<unsigned char>(bytes[0]) & 0xc0) != 0x80;
      const std::size_t begin = bytes_ + (apart ? replacement_character.size() : 0);
      const std::size_t offset = characters_before_ + (apart ? 1 : 0);
      scored_.push_back({begin, {previous_, offset, std::move(logprobs), of_prompt}});
    }
    previous_ = token;
    return text;
  }
  void count(const std::string& text) {
    bytes_ += text.size();
    characters_before_ +=
        static_cast<std::size_t>(std::count_if(text.begin(), text.end(), [](char c) {
          return (static_cast<unsigned char>(c) & 0xc0) != 0x80;
        }));
  }
  std::string say(const std::string& text) {
    count(text);
    std::string said = stop_.push(text, tokens_ > min_tokens_);
    said_ += said.size();
    return said;
  }

  const Tokenizer* tokenizer_;
  int previous_;
  std::size_t min_tokens_, tokens_ = 0;  // that were pushed
  Utf8Stream whole_;
  StopStrings stop_;
  std::size_t bytes_ = 0, characters_before_ = 0;  // in whole characters, held back or not
  std::size_t said_ = 0;                           // bytes
  std::deque<Scored> scored_;                      // not returned yet
};

}  // namespace serve
