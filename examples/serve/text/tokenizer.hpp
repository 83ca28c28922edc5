// Text to tokens and back.
#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "../model/gguf.hpp"

namespace serve {

/// A part of a text. Only where it is trusted do the names of special tokens stand for these
/// tokens: in templates and in plain prompts, never in what somebody says in a chat. Those whose
/// names are white space, as Gemma has for indentation and paragraphs, are text as any other.
struct TextPart {
  std::string text;
  bool trusted = false;
};

/// What a model's vocabulary says beside its pieces.
struct SpecialTokens {
  int bos = -1;                  ///< begins a text; -1: none
  bool add_bos = false;          ///< whether plain prompts begin with it
  std::vector<int> stop;         ///< each ends a text that is generated
  std::vector<int> by_name;      ///< what the text of a trusted part may name
  std::vector<int> invisible;    ///< left out of what is decoded
  std::vector<int> strips = {};  ///< of by_name: white space after it is not read
};

class Tokenizer {
 public:
  virtual ~Tokenizer() = default;

  /// The parts as one text: words go on from one part to the next.
  [[nodiscard]] std::vector<int> encode(std::span<const TextPart> parts) const;
  /// A prompt as a user writes it: trusted, and after bos if the model wants one.
  [[nodiscard]] std::vector<int> encode_prompt(std::string_view text) const;

  /// Tokens that a text of so many bytes of UTF-8 has at least, which says without reading it that
  /// it is too long.
  [[nodiscard]] std::size_t least_tokens(std::size_t bytes) const;

  /// The bytes of `token` after `previous` (-1: first of all). One token may be a part of a
  /// character.
  [[nodiscard]] std::string decode(int previous, int token) const;
  [[nodiscard]] std::string decode(std::span<const int> tokens) const;
  /// As decode(), and special tokens by the names that a prompt has for them, except the bos
  /// that prompts are given.
  [[nodiscard]] std::string spell(int previous, int token) const;

  [[nodiscard]] int vocab_size() const { return static_cast<int>(pieces_.size()); }
  [[nodiscard]] int bos() const { return special_.bos; }
  [[nodiscard]] const std::vector<int>& stop_tokens() const { return special_.stop; }

 protected:
  /// \param pieces  what each token stands for
  Tokenizer(std::vector<std::string> pieces, SpecialTokens special);

  /// Adds the tokens of a text without special tokens.
  /// \param begins  whether nothing stands before it, or a special token
  virtual void add_text(std::string_view text, bool begins, std::vector<int>& tokens) const = 0;
  /// Bytes of a text that one token covers at most; 0: any number, as where bytes have no token.
  [[nodiscard]] virtual std::size_t most_bytes() const = 0;
  [[nodiscard]] std::size_t longest_piece() const;
  /// Whether no byte that UTF-8 has is left out. \param tokens  by byte; -1: none
  [[nodiscard]] static bool covers_utf8(std::span<const int, 256> tokens);
  /// What becomes of a piece that begins a text.
  [[nodiscard]] virtual std::string first_piece(const std::string& piece) const { return piece; }

  [[nodiscard]] const std::string& piece(int token) const {
    return pieces_[static_cast<std::size_t>(token)];
  }

 private:
  [[nodiscard]] bool is_invisible(int token) const;
  /// The special token whose name a text begins with, the longest; -1: none.
  [[nodiscard]] int named(std::string_view text, bool is_trusted) const;

  std::vector<std::string> pieces_;
  SpecialTokens special_;
  std::vector<bool> invisible_;
  std::array<std::vector<int>, 256> by_first_byte_;  // special_.by_name, the longer first
};

/// The tokenizer that a GGUF file brings. \throws FileError that names the key
[[nodiscard]] std::unique_ptr<Tokenizer> read_tokenizer(const Gguf& gguf);

/// A llama2.c tokenizer file for a vocabulary of this size. \throws FileError
[[nodiscard]] std::unique_ptr<Tokenizer> read_llama2c_tokenizer(const std::string& path,
                                                                int vocab_size);

/// A token per byte, for models without a tokenizer. \pre vocab_size >= 259
[[nodiscard]] std::unique_ptr<Tokenizer> byte_tokenizer(int vocab_size);

}  // namespace serve
