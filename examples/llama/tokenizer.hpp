// The byte-pair tokenizer of llama2.c: pieces with scores; text becomes characters, then the pair
// with the best score is merged until none is left.
#pragma once

#include <cctype>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "checkpoint.hpp"

namespace llama {

class Tokenizer {
 public:
  static constexpr int bos = 1;         ///< begins every sequence; generated, it ends one
  static constexpr int first_byte = 3;  ///< piece first_byte + b stands for the byte b

  Tokenizer(std::vector<std::string> pieces, std::vector<float> scores)
      : pieces_(std::move(pieces)), scores_(std::move(scores)) {
    for (std::size_t i = 0; i < pieces_.size(); ++i)
      ids_.emplace(pieces_[i], static_cast<int>(i));  // of equal pieces the first is found
  }

  /// Reads a llama2.c tokenizer file for a vocabulary of `vocab_size`. Throws FileError if it is
  /// truncated, oversized, or no tokenizer.
  static Tokenizer load(const std::string& path, int vocab_size) {
    const std::vector<unsigned char> bytes = detail::read_file(path);
    std::size_t at = 0;
    const auto take = [&](void* target, std::size_t count) {
      if (bytes.size() - at < count)
        throw FileError(path + ": truncated: " + std::to_string(bytes.size()) +
                        " bytes end before a vocabulary of " + std::to_string(vocab_size) +
                        " pieces");
      std::memcpy(target, bytes.data() + at, count);
      at += count;
    };
    std::int32_t longest = 0;
    take(&longest, sizeof longest);
    const auto foreign = [&path](const std::string& what) {
      throw FileError(path + ": not a llama2.c tokenizer: " + what);
    };
    if (longest <= 0 || longest > 4096)
      foreign("longest piece = " + std::to_string(longest) + ", expected 1 to 4096");
    std::vector<std::string> pieces(static_cast<std::size_t>(vocab_size));
    std::vector<float> scores(pieces.size());
    for (std::size_t i = 0; i < pieces.size(); ++i) {
      std::int32_t length = 0;
      take(&scores[i], sizeof scores[i]);
      take(&length, sizeof length);
      if (length < 0 || length > 4096)
        foreign("length of piece " + std::to_string(i) + " = " + std::to_string(length) +
                ", expected 0 to 4096");
      pieces[i].resize(static_cast<std::size_t>(length));
      take(pieces[i].data(), pieces[i].size());
    }
    if (at != bytes.size())
      throw FileError(path + ": oversized: " + std::to_string(bytes.size() - at) +
                      " bytes after a vocabulary of " + std::to_string(vocab_size) + " pieces");
    return {std::move(pieces), std::move(scores)};
  }

  /// One piece per byte: for a model without a tokenizer of its own. vocab_size >= 259.
  static Tokenizer bytes_only(int vocab_size) {
    std::vector<std::string> pieces(static_cast<std::size_t>(vocab_size));
    for (std::size_t i = 0; i < pieces.size(); ++i) {
      pieces[i] = "<" + std::to_string(i) + ">";
      if (i >= first_byte && i < first_byte + 256)
        pieces[i] = std::string(1, static_cast<char>(static_cast<unsigned char>(i - first_byte)));
    }
    return {std::move(pieces), std::vector<float>(static_cast<std::size_t>(vocab_size), 0.0f)};
  }

  [[nodiscard]] int vocab_size() const { return static_cast<int>(pieces_.size()); }

  /// bos, then the text; a text that is not empty is encoded as if a space stood before it.
  [[nodiscard]] std::vector<int> encode(std::string_view text) const {
    std::vector<int> tokens{bos};
    if (text.empty()) return tokens;
    if (const auto space = ids_.find(" "); space != ids_.end()) tokens.push_back(space->second);
    for (std::size_t i = 0; i < text.size();) {
      std::size_t length = 1;  // a character: a byte and the continuation bytes behind it
      while (i + length < text.size() && length < 4 &&
             (static_cast<unsigned char>(text[i + length]) & 0xc0u) == 0x80u)
        ++length;
      const auto found = ids_.find(std::string(text.substr(i, length)));
      if (found != ids_.end())
        tokens.push_back(found->second);
      else
        for (std::size_t b = i; b < i + length; ++b)
          tokens.push_back(first_byte + static_cast<unsigned char>(text[b]));
      i += length;
    }
    while (merge_best_pair(tokens)) {
    }
    return tokens;
  }

  /// The text of `token` after `previous`: the space that a piece begins with is dropped after bos;
  /// pieces such as <0x0A> are the byte they name; single unprintable bytes are left out.
  [[nodiscard]] std::string decode(int previous, int token) const {
    std::string piece = pieces_.at(static_cast<std::size_t>(token));
    if (previous == bos && piece.starts_with(' ')) piece.erase(0, 1);
    if (piece.size() == 6 && piece.starts_with("<0x") && piece[5] == '>') {
      const int high = hex_digit(piece[3]), low = hex_digit(piece[4]);
      if (high >= 0 && low >= 0) piece.assign(1, static_cast<char>(high * 16 + low));
    }
    if (piece.size() == 1) {
      const int byte = static_cast<unsigned char>(piece[0]);
      if (std::isprint(byte) == 0 && std::isspace(byte) == 0) piece.clear();
    }
    return piece;
  }

  /// The text of a whole sequence that begins with bos.
  [[nodiscard]] std::string decode(const std::vector<int>& tokens) const {
    std::string text;
    for (std::size_t i = 1; i < tokens.size(); ++i) text += decode(tokens[i - 1], tokens[i]);
    return text;
  }

 private:
  [[nodiscard]] bool merge_best_pair(std::vector<int>& tokens) const {
    float best_score = -1e10f;
    std::size_t best = 0;
    int merged = -1;
    for (std::size_t i = 0; i + 1 < tokens.size(); ++i) {
      const auto found = ids_.find(pieces_[static_cast<std::size_t>(tokens[i])] +
                                   pieces_[static_cast<std::size_t>(tokens[i + 1])]);
      if (found == ids_.end()) continue;
      const float score = scores_[static_cast<std::size_t>(found->second)];
      if (score > best_score) {
        best_score = score;
        best = i;
        merged = found->second;
      }
    }
    if (merged < 0) return false;
    tokens[best] = merged;
    tokens.erase(tokens.begin() + static_cast<std::ptrdiff_t>(best) + 1);
    return true;
  }

  static int hex_digit(char c) {
    if (c >= '0' && c <= '9') return c - '0';
    if (c >= 'a' && c <= 'f') return c - 'a' + 10;
    if (c >= 'A' && c <= 'F') return c - 'A' + 10;
    return -1;
  }

  std::vector<std::string> pieces_;
  std::vector<float> scores_;
  std::unordered_map<std::string, int> ids_;
};

}  // namespace llama
