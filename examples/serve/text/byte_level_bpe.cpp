#include "byte_level_bpe.hpp"

#include <optional>
#include <utility>

#include "merge.hpp"
#include "unicode.hpp"

namespace serve {

namespace {

/// The letter that stands for a byte in files: printable bytes of Latin-1 for themselves, the
/// others for what follows U+0100 in their order.
std::array<std::int32_t, 256> letters_of_bytes() {
  std::array<std::int32_t, 256> letters{};
  std::int32_t next = 256;
  for (std::int32_t byte = 0; byte < 256; ++byte) {
    const bool printable = (byte >= '!' && byte <= '~') || (byte >= 0xa1 && byte != 0xad);
    letters[static_cast<std::size_t>(byte)] = printable ? byte : next++;
  }
  return letters;
}

std::uint64_t pair_key(int left, int right) {
  return static_cast<std::uint64_t>(left) << 32 | static_cast<std::uint32_t>(right);
}

}  // namespace

std::string ByteLevelBpe::bytes_of(std::string_view piece) {
  static const auto bytes = [] {
    std::unordered_map<std::int32_t, char> map;
    const auto letters = letters_of_bytes();
    for (std::size_t byte = 0; byte < 256; ++byte)
      map[letters[byte]] = static_cast<char>(static_cast<unsigned char>(byte));
    return map;
  }();
  const std::vector<Character> letters = characters(piece);
  std::string text;
  for (std::size_t i = 0; i + 1 < letters.size(); ++i) {
    const auto found = bytes.find(letters[i].code_point);
    if (found != bytes.end())
      text += found->second;
    else
      text += piece.substr(letters[i].begin, letters[i + 1].begin - letters[i].begin);
  }
  return text;
}

ByteLevelBpe::ByteLevelBpe(Vocabulary vocabulary, SpecialTokens special)
    : Tokenizer(vocabulary.pieces, std::move(special)), pre_tokenizer_(vocabulary.pre_tokenizer) {
  byte_tokens_.fill(-1);
  for (std::size_t i = 0; i < vocabulary.pieces.size(); ++i) {
    const std::string& piece = vocabulary.pieces[i];
    if (!vocabulary.is_text[i]) continue;
    if (piece.size() == 1) byte_tokens_[static_cast<unsigned char>(piece[0])] = static_cast<int>(i);
    if (pre_tokenizer_ == PreTokenizer::llama3) whole_pieces_.emplace(piece, static_cast<int>(i));
  }
  if (covers_utf8(byte_tokens_)) most_bytes_ = longest_piece();
  merges_.reserve(vocabulary.merges.size());
  for (std::size_t rank = 0; rank < vocabulary.merges.size(); ++rank) {
    const auto [left, right, merged] = vocabulary.merges[rank];
    merges_.emplace(pair_key(left, right), std::pair{static_cast<std::uint32_t>(rank), merged});
  }
}

void ByteLevelBpe::add_text(std::string_view text, bool, std::vector<int>& tokens) const {
  for (const std::string_view piece : pre_tokenize(pre_tokenizer_, text)) add_piece(piece, tokens);
}

void ByteLevelBpe::add_piece(std::string_view piece, std::vector<int>& tokens) const {
  if (const auto whole = whole_pieces_.find(std::string(piece)); whole != whole_pieces_.end()) {
    tokens.push_back(whole->second);
    return;
  }
  std::vector<int> merged;
  for (const char byte : piece) {
    // A byte that the vocabulary lacks (none that UTF-8 uses, as a rule) says nothing to the model.
    const int token = byte_tokens_[static_cast<unsigned char>(byte)];
    if (token >= 0) merged.push_back(token);
  }
  merge_pairs(merged, [this](int left, int right) -> std::optional<Merge> {
    const auto found = merges_.find(pair_key(left, right));
    if (found == merges_.end()) return std::nullopt;
    return Merge{static_cast<double>(found->second.first), found->second.second};
  });
  tokens.insert(tokens.end(), merged.begin(), merged.end());
}

}  // namespace serve
