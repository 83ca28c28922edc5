// A GGUF file of the smallest sensible Llama: 2 layers, 2 query heads over 1 K/V head of 8.
#pragma once

#include <cmath>
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

/// The same heads several times over.
struct TinyHeads {
  int times = 1;
  /// Weights of a size that leaves activations at about 1, as in real models: what rounding does
  /// to them stays small.
  bool gentle = false;
};

/// \param tied  without a classifier of its own
inline GgufWriter tiny_gguf(bool tied = true, TinyHeads heads = {},
                            const std::string& architecture = "llama") {
  const int dim = tiny_dim * heads.times, kv_dim = tiny_kv_dim * heads.times;
  GgufWriter file;
  file.text("general.architecture", architecture);
  file.integer(architecture + ".block_count", 2);
  file.integer(architecture + ".embedding_length", static_cast<std::uint32_t>(dim));
  file.integer(architecture + ".feed_forward_length", tiny_hidden);
  file.integer(architecture + ".attention.head_count", static_cast<std::uint32_t>(2 * heads.times));
  file.integer(architecture + ".attention.head_count_kv", static_cast<std::uint32_t>(heads.times));
  file.integer(architecture + ".context_length", 64);
  file.integer(architecture + ".rope.dimension_count", 8);
  file.real(architecture + ".rope.freq_base", 500.0f);
  file.real(architecture + ".attention.layer_norm_rms_epsilon", 1e-4f);
  file.flag("tokenizer.ggml.add_bos_token", false);
  file.texts("tokenizer.ggml.tokens", {"<s>", "a", "b", "c", "ab", "Ġ", "Ġa", "\xc4\x8a", "<e>"});
  file.numbers<std::int32_t>("tokenizer.ggml.token_type", 5, {3, 1, 1, 1, 1, 1, 1, 1, 3});
  file.texts("tokenizer.ggml.merges", {"a b", "Ġ a"});
  file.text("tokenizer.ggml.model", "gpt2");
  file.text("tokenizer.ggml.pre", "smollm");
  file.integer("tokenizer.ggml.eos_token_id", 8);
  int n = 0;
  const auto matrix = [&](const std::string& name, int outputs, int inputs) {
    auto values = tiny_values(static_cast<std::size_t>(outputs * inputs), n++);
    // Uniform in [-125, 125] to a variance of 1 / inputs.
    if (heads.gentle)
      for (float& value : values) value *= std::sqrt(3.0f / static_cast<float>(inputs)) / 125;
    file.floats(name + ".weight", static_cast<std::uint64_t>(inputs),
                static_cast<std::uint64_t>(outputs), values);
  };
  const auto vector = [&](const std::string& name, int size) {
    auto values = tiny_values(static_cast<std::size_t>(size), n++);
    if (heads.gentle) values.assign(values.size(), 1.0f);
    file.floats(name + ".weight", static_cast<std::uint64_t>(size), 0, values);
  };
  matrix("token_embd", tiny_vocabulary, dim);
  for (int l = 0; l < 2; ++l) {
    const std::string block = "blk." + std::to_string(l) + ".";
    vector(block + "attn_norm", dim);
    matrix(block + "attn_q", dim, dim);
    matrix(block + "attn_k", kv_dim, dim);
    matrix(block + "attn_v", kv_dim, dim);
    matrix(block + "attn_output", dim, dim);
    vector(block + "ffn_norm", dim);
    matrix(block + "ffn_gate", tiny_hidden, dim);
    matrix(block + "ffn_up", tiny_hidden, dim);
    matrix(block + "ffn_down", dim, tiny_hidden);
  }
  vector("output_norm", dim);
  if (!tied) matrix("output", tiny_vocabulary, dim);
  return file;
}

}  // namespace test
