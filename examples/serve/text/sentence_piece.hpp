// The byte-pair kind of SentencePiece, as Llama 2 and llama2.c have it: characters are merged to
// the pieces of the highest score; what is no piece is spelled in bytes.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "tokenizer.hpp"

namespace serve {

class SentencePiece final : public Tokenizer {
 public:
  enum class Kind : std::uint8_t { text, byte, special };
  struct Vocabulary {
    std::vector<std::string> pieces;  ///< with plain spaces; of a byte, that byte
    std::vector<float> scores;
    std::vector<Kind> kinds;
    bool space_prefix = true;  ///< a text is read as if a space stood before it
  };

  SentencePiece(Vocabulary vocabulary, SpecialTokens special);

  /// The byte that a piece named <0x0A> stands for; -1 for other names.
  static int byte_of(std::string_view name);
  /// Spaces in place of U+2581, which stands for them in files.
  static std::string with_spaces(std::string_view piece);

 private:
  void add_text(std::string_view text, bool begins, std::vector<int>& tokens) const override;
  [[nodiscard]] std::size_t most_bytes() const override { return most_bytes_; }
  std::string first_piece(const std::string& piece) const override;

  [[nodiscard]] bool is_text(int token) const {
    return kinds_[static_cast<std::size_t>(token)] == Kind::text;
  }

  std::vector<float> scores_;
  std::vector<Kind> kinds_;
  std::array<int, 256> byte_tokens_;
  std::size_t most_bytes_ = 0;
  std::unordered_map<std::string, int> text_tokens_;
  bool space_prefix_;
};

}  // namespace serve
