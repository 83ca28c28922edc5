#include "sentence_piece.hpp"

#include <optional>
#include <utility>

#include "merge.hpp"
#include "unicode.hpp"

namespace serve {

SentencePiece::SentencePiece(Vocabulary vocabulary, SpecialTokens special)
    : Tokenizer(vocabulary.pieces, std::move(special)),
      scores_(std::move(vocabulary.scores)),
      kinds_(std::move(vocabulary.kinds)),
      space_prefix_(vocabulary.space_prefix) {
  byte_tokens_.fill(-1);
  for (std::size_t i = 0; i < vocabulary.pieces.size(); ++i) {
    const std::string& piece = vocabulary.pieces[i];
    const int token = static_cast<int>(i);
    if (kinds_[i] == Kind::text) text_tokens_.emplace(piece, token);  // the first counts
    if (kinds_[i] == Kind::byte) byte_tokens_[static_cast<unsigned char>(piece[0])] = token;
  }
  // U+2581, of three bytes, is read as a space.
  if (covers_utf8(byte_tokens_)) most_bytes_ = 3 * longest_piece();
}

int SentencePiece::byte_of(std::string_view name) {
  if (name.size() != 6 || !name.starts_with("<0x") || name[5] != '>') return -1;
  int byte = 0;
  for (const char digit : name.substr(3, 2)) {
    const bool decimal = digit >= '0' && digit <= '9';
    if (!decimal && !(digit >= 'A' && digit <= 'F')) return -1;
    byte = byte * 16 + (decimal ? digit - '0' : digit - 'A' + 10);
  }
  return byte;
}

std::string SentencePiece::with_spaces(std::string_view piece) {
  constexpr std::string_view sign = "\xe2\x96\x81";
  std::string text;
  for (std::size_t at = 0; at < piece.size();) {
    const bool is_sign = piece.substr(at).starts_with(sign);
    text += is_sign ? ' ' : piece[at];
    at += is_sign ? sign.size() : 1;
  }
  return text;
}

void SentencePiece::add_text(std::string_view text, bool begins, std::vector<int>& tokens) const {
  std::string prefixed = begins && space_prefix_ ? " " : "";
  const std::string spaced = with_spaces(prefixed.append(text));
  std::vector<int> merged;
  for (std::size_t at = 0; at < spaced.size();) {
    const std::size_t bytes = character_bytes(std::string_view(spaced).substr(at));
    const std::string character = spaced.substr(at, bytes);
    const auto found = text_tokens_.find(character);
    if (found != text_tokens_.end())
      merged.push_back(found->second);
    else
      for (const char byte : character)
        if (byte_tokens_[static_cast<unsigned char>(byte)] >= 0)
          merged.push_back(byte_tokens_[static_cast<unsigned char>(byte)]);
    at += bytes;
  }
  merge_pairs(merged, [this](int left, int right) -> std::optional<Merge> {
    if (!is_text(left) || !is_text(right)) return std::nullopt;  // spelled bytes stay what they are
    const auto found = text_tokens_.find(piece(left) + piece(right));
    if (found == text_tokens_.end()) return std::nullopt;
    return Merge{-double{scores_[static_cast<std::size_t>(found->second)]}, found->second};
  });
  tokens.insert(tokens.end(), merged.begin(), merged.end());
}

std::string SentencePiece::first_piece(const std::string& piece) const {
  return space_prefix_ && piece.starts_with(' ') ? piece.substr(1) : piece;
}

}  // namespace serve
