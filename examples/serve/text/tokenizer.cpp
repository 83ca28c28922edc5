#include "tokenizer.hpp"

#include <algorithm>
#include <utility>

#include "unicode.hpp"

namespace serve {

Tokenizer::Tokenizer(std::vector<std::string> pieces, SpecialTokens special)
    : pieces_(std::move(pieces)), special_(std::move(special)), invisible_(pieces_.size()) {
  for (const int token : special_.invisible) invisible_[static_cast<std::size_t>(token)] = true;
  std::erase_if(special_.by_name, [this](int token) { return piece(token).empty(); });
  // Where one name begins another, the longer is meant.
  std::sort(special_.by_name.begin(), special_.by_name.end(),
            [this](int a, int b) { return piece(a).size() > piece(b).size(); });
  for (const int token : special_.by_name)
    by_first_byte_[static_cast<unsigned char>(piece(token)[0])].push_back(token);
}

int Tokenizer::named(std::string_view text, bool is_trusted) const {
  for (const int token : by_first_byte_[static_cast<unsigned char>(text[0])])
    if (text.starts_with(piece(token)) &&
        (is_trusted || piece(token).find_first_not_of(" \t\r\n") == std::string::npos))
      return token;
  return -1;
}

bool Tokenizer::is_invisible(int token) const {
  return token < 0 || invisible_[static_cast<std::size_t>(token)];
}

std::vector<int> Tokenizer::encode(std::span<const TextPart> parts) const {
  std::vector<int> tokens;
  std::string text;  // since the last special token
  bool begins = true, strips = false;
  const auto close_text = [&] {
    if (!text.empty()) add_text(text, begins, tokens);
    text.clear();
  };
  for (const TextPart& part : parts) {
    for (std::size_t at = 0; at < part.text.size();) {
      const std::string_view rest = std::string_view(part.text).substr(at);
      const int token = named(rest, part.trusted);
      if (token < 0) {
        const std::size_t space = strips ? leading_space(rest) : 0;
        at += space;
        if (space > 0) continue;
        strips = false;
        text += part.text[at++];
        continue;
      }
      close_text();
      tokens.push_back(token);
      begins = true;
      strips =
          std::find(special_.strips.begin(), special_.strips.end(), token) != special_.strips.end();
      at += piece(token).size();
    }
  }
  close_text();
  return tokens;
}

std::vector<int> Tokenizer::encode_prompt(std::string_view text) const {
  const TextPart part{std::string(text), true};
  std::vector<int> tokens = encode({&part, 1});
  if (special_.add_bos) tokens.insert(tokens.begin(), special_.bos);
  return tokens;
}

std::size_t Tokenizer::least_tokens(std::size_t bytes) const {
  const std::size_t most = most_bytes();
  return most == 0 ? 0 : (bytes + most - 1) / most;
}

std::size_t Tokenizer::longest_piece() const {
  std::size_t longest = 0;
  for (const std::string& piece : pieces_) longest = std::max(longest, piece.size());
  return longest;
}

bool Tokenizer::covers_utf8(std::span<const int, 256> tokens) {
  for (std::size_t byte = 0; byte < 0xf5; ++byte)
    if (byte != 0xc0 && byte != 0xc1 && tokens[byte] < 0) return false;
  return true;
}

std::string Tokenizer::decode(int previous, int token) const {
  if (is_invisible(token)) return "";
  return is_invisible(previous) ? first_piece(piece(token)) : piece(token);
}

std::string Tokenizer::spell(int previous, int token) const {
  const bool is_named =
      std::find(special_.by_name.begin(), special_.by_name.end(), token) != special_.by_name.end();
  const bool is_given = previous < 0 && special_.add_bos && token == special_.bos;
  if (is_named && !is_given) return piece(token);
  return decode(previous, token);
}

std::string Tokenizer::decode(std::span<const int> tokens) const {
  std::string text;
  int previous = -1;
  for (const int token : tokens) {
    text += decode(previous, token);
    previous = token;
  }
  return text;
}

}  // namespace serve
