// A GGUF file of the smallest sensible Llama: 2 layers, 2 query heads over 1 K/V head of 8.
#pragma once

#include <string>
#include <vector>

#include "files.hpp"

namespace test {

inline constexpr int tiny_dim = 16, tiny_hidden = 24, tiny_kv_dim = 8, tiny_vocabulary = 9;

/// The floats of tensor number `n`: distinct, and exact in bfloat16.
inline std::vector<float> tiny_values(std::size_t count, int n) {
  std::vector<float> values(count);
  for (std::size_t i = 0; i < count; ++i)
    values[i] = static_cast<float>(
        static_cast<int>((i * 7 + static_cast<std::size_t>(n) * 13) % 251) - 125);
  return values;
}

/// \param tied  without a classifier of its own
inline GgufWriter tiny_gguf(bool tied = true) {
  GgufWriter file;
  file.text("general.architecture", "llama");
  file.integer("llama.block_count", 2);
  file.integer("llama.embedding_length", tiny_dim);
  file.integer("llama.feed_forward_length", tiny_hidden);
  file.integer("llama.attention.head_count", 2);
  file.integer("llama.attention.head_count_kv", 1);
  file.integer("llama.context_length", 64);
  file.integer("llama.rope.dimension_count", 8);
  file.real("llama.rope.freq_base", 500.0f);
  file.real("llama.attention.layer_norm_rms_epsilon", 1e-4f);
  file.flag("tokenizer.ggml.add_bos_token", false);
  file.texts("tokenizer.ggml.tokens", {"<s>", "a", "b", "c", "ab", "Ġ", "Ġa", "\xc4\x8a", "<e>"});
  file.numbers<std::int32_t>("tokenizer.ggml.token_type", 5, {3, 1, 1, 1, 1, 1, 1, 1, 3});
  file.texts("tokenizer.ggml.merges", {"a b", "Ġ a"});
  file.text("tokenizer.ggml.model", "gpt2");
  file.text("tokenizer.ggml.pre", "smollm");
  file.integer("tokenizer.ggml.eos_token_id", 8);
  int n = 0;
  const auto matrix = [&](const std::string& name, int outputs, int inputs) {
    file.floats(name + ".weight", static_cast<std::uint64_t>(inputs),
                static_cast<std::uint64_t>(outputs),
                tiny_values(static_cast<std::size_t>(outputs * inputs), n++));
  };
  const auto vector = [&](const std::string& name, int size) {
    file.floats(name + ".weight", static_cast<std::uint64_t>(size), 0,
                tiny_values(static_cast<std::size_t>(size), n++));
  };
  matrix("token_embd", tiny_vocabulary, tiny_dim);
  for (int l = 0; l < 2; ++l) {
    const std::string block = "blk." + std::to_string(l) + ".";
    vector(block + "attn_norm", tiny_dim);
    matrix(block + "attn_q", tiny_dim, tiny_dim);
    matrix(block + "attn_k", tiny_kv_dim, tiny_dim);
    matrix(block + "attn_v", tiny_kv_dim, tiny_dim);
    matrix(block + "attn_output", tiny_dim, tiny_dim);
    vector(block + "ffn_norm", tiny_dim);
    matrix(block + "ffn_gate", tiny_hidden, tiny_dim);
    matrix(block + "ffn_up", tiny_hidden, tiny_dim);
    matrix(block + "ffn_down", tiny_dim, tiny_hidden);
  }
  vector("output_norm", tiny_dim);
  if (!tied) matrix("output", tiny_vocabulary, tiny_dim);
  return file;
}

}  // namespace test
