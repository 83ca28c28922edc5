// Byte-level BPE, as GPT-2, SmolLM2 and Llama 3 have it: a pre-tokenizer, then merges of bytes.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "pre_tokenizer.hpp"
#include "tokenizer.hpp"

namespace serve {

class ByteLevelBpe final : public Tokenizer {
 public:
  struct Vocabulary {
    PreTokenizer pre_tokenizer = PreTokenizer::gpt2;
    std::vector<std::string> pieces;  ///< bytes, not the letters that stand for them in files
    std::vector<bool> is_text;        ///< false: stands for itself only by name
    std::vector<std::array<int, 3>> merges;  ///< left, right, what they become; best first
  };

  ByteLevelBpe(Vocabulary vocabulary, SpecialTokens special);

  /// The bytes of a piece as files write it: each byte is a letter there. Characters that stand for
  /// no byte are kept.
  static std::string bytes_of(std::string_view piece);

 private:
  void add_text(std::string_view text, bool begins, std::vector<int>& tokens) const override;
  [[nodiscard]] std::size_t most_bytes() const override { return most_bytes_; }
  void add_piece(std::string_view piece, std::vector<int>& tokens) const;

  PreTokenizer pre_tokenizer_;
  std::array<int, 256> byte_tokens_;
  std::size_t most_bytes_ = 0;
  std::unordered_map<std::uint64_t, std::pair<std::uint32_t, int>> merges_;
  std::unordered_map<std::string, int> whole_pieces_;  // Llama 3: these need no merges
};

}  // namespace serve
