// A tokenizer for programs without a model: a word with the space before it is one token (long ones
// are cut), so are up to three digits, a sign, a line feed, a mark such as <|user|>. About as many
// tokens as the byte-pair tokenizers of large models give.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace examples {

class WordTokenizer {
 public:
  /// Token ids are given out in the order of first appearance.
  std::vector<std::int32_t> encode(std::string_view text) {
    std::vector<std::int32_t> tokens;
    for (std::size_t begin = 0; begin < text.size();) {
      const std::size_t length = piece_length(text.substr(begin));
      const auto [entry, is_new] = ids_.try_emplace(std::string(text.substr(begin, length)),
                                                    static_cast<std::int32_t>(pieces_.size()));
      if (is_new) pieces_.push_back(entry->first);
      tokens.push_back(entry->second);
      begin += length;
    }
    return tokens;
  }

  /// The piece of text that a token stands for.
  [[nodiscard]] const std::string& decode(std::int32_t token) const {
    return pieces_.at(static_cast<std::size_t>(token));
  }

  [[nodiscard]] std::size_t vocab_size() const { return pieces_.size(); }

 private:
  static constexpr std::size_t longest_word = 9, longest_number = 3, longest_mark = 48;

  static bool is_letter(char c) {
    const auto byte = static_cast<unsigned char>(c);
    return (byte >= 'a' && byte <= 'z') || (byte >= 'A' && byte <= 'Z') || byte >= 0x80;
  }
  static bool is_digit(char c) { return c >= '0' && c <= '9'; }

  static std::size_t piece_length(std::string_view text) {
    if (text.starts_with("<|"))  // a mark of the chat template
      if (const std::size_t end = text.substr(0, longest_mark).find("|>");
          end != std::string_view::npos)
        return end + 2;
    const std::size_t space = text[0] == ' ' && text.size() > 1 && text[1] != ' ' ? 1 : 0;
    const auto run = [&](bool (*kind)(char), std::size_t longest) {
      std::size_t end = space;
      while (end < text.size() && end - space < longest && kind(text[end])) ++end;
      return end;
    };
    if (is_letter(text[space])) return run(is_letter, longest_word);
    if (is_digit(text[space])) return run(is_digit, longest_number);
    return space + 1;
  }

  std::unordered_map<std::string, std::int32_t> ids_;
  std::vector<std::string> pieces_;
};

}  // namespace examples
