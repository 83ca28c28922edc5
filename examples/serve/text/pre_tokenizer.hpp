// Pre-tokenizers cut a text into the pieces that byte-pair merges never cross. Each stands for the
// regular expression that a model was trained with, written out as what it does.
#pragma once

#include <optional>
#include <string_view>
#include <vector>

namespace serve {

enum class PreTokenizer {
  gpt2,    ///< 's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
  smollm,  ///< each \p{N} by itself, what is between them as gpt2
  qwen2,   ///< as llama3, but each \p{N} by itself
  llama3,  ///< (?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|
           ///<  ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+
};

/// By the names that GGUF files use.
[[nodiscard]] std::optional<PreTokenizer> pre_tokenizer_of(std::string_view name);

/// The pieces; put together they are the text.
[[nodiscard]] std::vector<std::string_view> pre_tokenize(PreTokenizer kind, std::string_view text);

}  // namespace serve
