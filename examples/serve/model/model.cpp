#include "model.hpp"

#include <cmath>

namespace serve {

std::size_t Model::weight_bytes() const {
  std::size_t bytes = embedding.bytes() + own_classifier.bytes();
  for (const Layer& layer : layers)
    bytes += layer.qkv.bytes() + layer.out.bytes() + layer.gate_up.bytes() + layer.down.bytes();
  return bytes;
}

Model blank_model(const Config& config, Element element) {
  const auto dim = static_cast<std::size_t>(config.dim);
  const auto kv_dim = static_cast<std::size_t>(config.kv_dim());
  const auto hidden = static_cast<std::size_t>(config.hidden_dim);
  const auto vocabulary = static_cast<std::size_t>(config.vocab_size);
  Model model;
  model.config = config;
  model.embedding = Matrix(vocabulary, dim, element);
  if (!config.tied) model.own_classifier = Matrix(vocabulary, dim, element);
  for (int l = 0; l < config.num_layers; ++l)
    model.layers.push_back({.attention_norm = std::vector<float>(dim, 1.0f),
                            .ffn_norm = std::vector<float>(dim, 1.0f),
                            .qkv = Matrix(dim + 2 * kv_dim, dim, element),
                            .out = Matrix(dim, dim, element),
                            .gate_up = Matrix(2 * hidden, dim, element),
                            .down = Matrix(dim, hidden, element)});
  model.final_norm.assign(dim, 1.0f);
  const auto head_dim = static_cast<float>(config.head_dim());
  for (int i = 0; i < config.head_dim(); i += 2)
    model.rope_frequencies.push_back(1.0f /
                                     std::pow(config.rope_base, static_cast<float>(i) / head_dim));
  return model;
}

}  // namespace serve
