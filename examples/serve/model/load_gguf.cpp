#include <algorithm>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "dequantise.hpp"
#include "load.hpp"

namespace serve {

namespace {

constexpr const char* dim_key = "llama.embedding_length";
constexpr const char* hidden_key = "llama.feed_forward_length";
constexpr const char* layers_key = "llama.block_count";
constexpr const char* qo_heads_key = "llama.attention.head_count";
constexpr const char* kv_heads_key = "llama.attention.head_count_kv";
constexpr const char* positions_key = "llama.context_length";
constexpr const char* vocabulary_key = "tokenizer.ggml.tokens";

Config read_config(const Gguf& gguf) {
  const std::string_view architecture = gguf.text("general.architecture");
  if (architecture != "llama")
    gguf.fail("general.architecture", std::string(architecture), "llama");
  const auto integer = [&gguf](const char* key) {
    return static_cast<int>(gguf.integer(key, 0, std::numeric_limits<int>::max()));
  };
  Config c;
  c.dim = integer(dim_key);
  c.hidden_dim = integer(hidden_key);
  c.num_layers = integer(layers_key);
  c.num_qo_heads = integer(qo_heads_key);
  c.num_kv_heads = gguf.has(kv_heads_key) ? integer(kv_heads_key) : c.num_qo_heads;
  c.vocab_size = static_cast<int>(gguf.texts(vocabulary_key).size());
  c.max_positions = integer(positions_key);
  c.tied = !gguf.has_tensor("output.weight");
  c.norm_eps = static_cast<float>(gguf.real("llama.attention.layer_norm_rms_epsilon", 1e-5));
  c.rope_base = static_cast<float>(gguf.real("llama.rope.freq_base", 10000));
  check_shape(
      c, gguf.path(),
      {dim_key, hidden_key, layers_key, qo_heads_key, kv_heads_key, vocabulary_key, positions_key});
  for (const char* key :
       {"llama.rope.dimension_count", "llama.attention.key_length", "llama.attention.value_length"})
    (void)gguf.integer(key, c.head_dim(), c.head_dim(), c.head_dim());
  (void)gguf.integer("llama.vocab_size", c.vocab_size, c.vocab_size, c.vocab_size);
  (void)gguf.integer("llama.expert_count", 0, 0, 0);
  return c;
}

/// Frequencies as the file scales them: all by one factor, or each by its own (Llama 3.1 and
/// later).
void scale_frequencies(const Gguf& gguf, std::vector<float>& frequencies) {
  const std::string_view kind = gguf.text("llama.rope.scaling.type", "none");
  if (kind == "linear") {
    const double factor = gguf.real("llama.rope.scaling.factor", 1);
    if (!(factor >= 1 && factor <= 1e6))
      gguf.fail("llama.rope.scaling.factor", std::to_string(factor), "1 to 1e6");
    for (float& frequency : frequencies) frequency /= static_cast<float>(factor);
  } else if (kind != "none") {
    gguf.fail("llama.rope.scaling.type", std::string(kind), "none or linear");
  }
  if (!gguf.has_tensor("rope_freqs.weight")) return;
  std::vector<float> factors(frequencies.size());
  dequantise(gguf.tensor("rope_freqs.weight", 1, factors.size()), 0, factors);
  for (std::size_t i = 0; i < factors.size(); ++i) {
    if (!(factors[i] > 0))
      gguf.fail("rope_freqs.weight[" + std::to_string(i) + "]", std::to_string(factors[i]),
                "more than 0");
    frequencies[i] /= factors[i];
  }
}

/// A tensor that becomes the outputs of a matrix from `first` on.
struct Part {
  const Tensor* tensor;
  Matrix* matrix;
  std::size_t first;
};

std::vector<Part> matrix_parts(const Gguf& gguf, Model& model) {
  const auto dim = static_cast<std::size_t>(model.config.dim);
  const auto kv_dim = static_cast<std::size_t>(model.config.kv_dim());
  const auto hidden = static_cast<std::size_t>(model.config.hidden_dim);
  const auto vocabulary = static_cast<std::size_t>(model.config.vocab_size);
  std::vector<Part> parts;
  const auto part = [&](const std::string& name, Matrix& matrix, std::size_t outputs,
                        std::size_t first = 0) {
    parts.push_back({&gguf.tensor(name + ".weight", outputs, matrix.inputs()), &matrix, first});
  };
  part("token_embd", model.embedding, vocabulary);
  if (!model.config.tied) part("output", model.own_classifier, vocabulary);
  for (std::size_t l = 0; l < model.layers.size(); ++l) {
    Layer& layer = model.layers[l];
    const std::string block = "blk." + std::to_string(l) + ".";
    part(block + "attn_q", layer.qkv, dim);
    part(block + "attn_k", layer.qkv, kv_dim, dim);
    part(block + "attn_v", layer.qkv, kv_dim, dim + kv_dim);
    part(block + "attn_output", layer.out, dim);
    part(block + "ffn_gate", layer.gate_up, hidden);
    part(block + "ffn_up", layer.gate_up, hidden, hidden);
    part(block + "ffn_down", layer.down, dim);
  }
  return parts;
}

/// Matrices are made after their tensors were found to have these shapes, so that no number in a
/// damaged file alone decides how much memory is taken.
void check_tensors(const Gguf& gguf, const Config& c) {
  const auto dim = static_cast<std::size_t>(c.dim), hidden = static_cast<std::size_t>(c.hidden_dim);
  (void)gguf.tensor("token_embd.weight", static_cast<std::size_t>(c.vocab_size), dim);
  for (int l = 0; l < c.num_layers; ++l) {
    const std::string block = "blk." + std::to_string(l) + ".";
    (void)gguf.tensor(block + "ffn_gate.weight", hidden, dim);
    (void)gguf.tensor(block + "attn_q.weight", dim, dim);
    for (const char* bias : {"attn_q.bias", "attn_k.bias", "attn_v.bias"})
      if (gguf.has_tensor(block + bias)) gguf.fail("tensor " + block + bias, "there", "no biases");
  }
}

}  // namespace

bool is_gguf(const std::string& path) {
  const MappedFile file(path);
  const auto bytes = file.bytes();
  return bytes.size() >= 4 && std::memcmp(bytes.data(), "GGUF", 4) == 0;
}

Model load_gguf(const Gguf& gguf, Element element, chunkattn::ThreadPool& executor) {
  const Config config = read_config(gguf);
  check_tensors(gguf, config);
  Model model = blank_model(config, element);
  scale_frequencies(gguf, model.rope_frequencies);
  const auto read_norm = [&gguf](const std::string& name, std::vector<float>& norm) {
    dequantise(gguf.tensor(name + ".weight", 1, norm.size()), 0, norm);
  };
  read_norm("output_norm", model.final_norm);
  for (std::size_t l = 0; l < model.layers.size(); ++l) {
    const std::string block = "blk." + std::to_string(l) + ".";
    read_norm(block + "attn_norm", model.layers[l].attention_norm);
    read_norm(block + "ffn_norm", model.layers[l].ffn_norm);
  }
  const std::vector<Part> parts = matrix_parts(gguf, model);
  executor.parallel_for(static_cast<int>(parts.size()), [&parts](int i) {
    const Part& part = parts[static_cast<std::size_t>(i)];
    std::vector<float> weights(part.tensor->inputs);
    for (std::size_t o = 0; o < part.tensor->outputs; ++o) {
      dequantise(*part.tensor, o, weights);
      part.matrix->set(part.first + o, weights);
    }
  });
  return model;
}

}  // namespace serve
