#include "model.hpp"

#include <cmath>

namespace serve {

std::size_t Model::weight_bytes() const {
  std::size_t bytes = embedding.bytes() + own_classifier.bytes();
  for (const Layer& layer : layers)
    bytes += layer.qkv.bytes() + layer.out.bytes() + layer.gate_up.bytes() + layer.down.bytes();
  return bytes;
}

namespace {

std::vector<float> frequencies(int head_dim, float base) {
  std::vector<float> all;
  for (int i = 0; i < head_dim; i += 2)
    all.push_back(1.0f / std::pow(base, static_cast<float>(i) / static_cast<float>(head_dim)));
  return all;
}

}  // namespace

Model blank_model(const Config& config, Element element) {
  const std::size_t dim = to_size(config.dim), hidden = to_size(config.hidden_dim);
  const std::size_t q_dim = to_size(config.q_dim()), kv_dim = to_size(config.kv_dim());
  const std::size_t vocabulary = to_size(config.vocab_size);
  Model model;
  model.config = config;
  model.embedding = Matrix(vocabulary, dim, element);
  if (!config.tied) model.own_classifier = Matrix(vocabulary, dim, element);
  for (int l = 0; l < config.num_layers; ++l) {
    Layer& layer = model.layers.emplace_back();
    layer.attention_norm.assign(dim, 1.0f);
    layer.ffn_norm.assign(dim, 1.0f);
    layer.qkv = Matrix(q_dim + 2 * kv_dim, dim, element);
    layer.out = Matrix(dim, q_dim, element);
    layer.gate_up = Matrix(2 * hidden, dim, element);
    layer.down = Matrix(dim, hidden, element);
  }
  model.final_norm.assign(dim, 1.0f);
  model.rope_frequencies = frequencies(config.head_dim(), config.rope_base);
  if (config.local_rope_base > 0)
    model.local_rope_frequencies = frequencies(config.head_dim(), config.local_rope_base);
  return model;
}

}  // namespace serve
