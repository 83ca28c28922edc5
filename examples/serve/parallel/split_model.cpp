#include "split_model.hpp"

#include <initializer_list>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "../ranks/communicator.hpp"

namespace serve {

namespace {

/// These runs of outputs one after the other, each output with these inputs.
Matrix cut(const Matrix& whole, std::initializer_list<Share> runs, Share inputs) {
  std::size_t outputs = 0;
  for (const Share& run : runs) outputs += run.size();
  Matrix part(outputs, inputs.size(), whole.element());
  std::vector<float> weights(whole.inputs());
  std::size_t output = 0;
  for (const Share& run : runs)
    for (std::size_t o = run.begin; o < run.end; ++o) {
      whole.get(o, weights);
      part.set(output++, std::span(weights).subspan(inputs.begin, inputs.size()));
    }
  return part;
}

/// The same of numbers that belong to outputs.
std::vector<float> cut(const std::vector<float>& whole, std::initializer_list<Share> runs) {
  std::vector<float> part;
  for (const Share& run : whole.empty() ? std::initializer_list<Share>() : runs)
    part.insert(part.end(), whole.begin() + static_cast<std::ptrdiff_t>(run.begin),
                whole.begin() + static_cast<std::ptrdiff_t>(run.end));
  return part;
}

/// The rows of a part of the vocabulary. All parts have the same size: zeros follow the last.
Matrix cut_vocabulary(const Matrix& whole, int rank, int size) {
  const auto n = static_cast<std::size_t>(size), r = static_cast<std::size_t>(rank);
  Matrix part((whole.outputs() + n - 1) / n, whole.inputs(), whole.element());
  std::vector<float> weights(whole.inputs());
  for (std::size_t o = 0; o < part.outputs(); ++o) {
    if (r * part.outputs() + o >= whole.outputs()) break;
    whole.get(r * part.outputs() + o, weights);
    part.set(o, weights);
  }
  return part;
}

}  // namespace

Model part_of(Model whole, int rank, int size) {
  const Config config = whole.config;
  if (config.num_kv_heads % size != 0)
    throw std::invalid_argument("num_kv_heads = " + std::to_string(config.num_kv_heads) + " on " +
                                std::to_string(size) +
                                " ranks: expected a number of ranks that divides it");
  if (config.hidden_dim < size)
    throw std::invalid_argument("hidden_dim = " + std::to_string(config.hidden_dim) + " on " +
                                std::to_string(size) + " ranks: expected at least one for each");
  const auto head_dim = static_cast<std::size_t>(config.head_dim());
  const auto q_dim = static_cast<std::size_t>(config.q_dim());
  const auto kv_dim = static_cast<std::size_t>(config.kv_dim());
  const auto hidden = static_cast<std::size_t>(config.hidden_dim);
  const Share q = share_of(q_dim, rank, size), kv = share_of(kv_dim, rank, size);
  const Share ffn = share_of(hidden, rank, size), all{0, static_cast<std::size_t>(config.dim)};

  Model part = std::move(whole);
  part.config.head_size = static_cast<int>(head_dim);
  part.config.num_qo_heads = config.num_qo_heads / size;
  part.config.num_kv_heads = config.num_kv_heads / size;
  part.config.hidden_dim = static_cast<int>(ffn.size());
  part.embedding = cut_vocabulary(part.embedding, rank, size);
  if (!config.tied) part.own_classifier = cut_vocabulary(part.own_classifier, rank, size);
  for (Layer& layer : part.layers) {
    const std::size_t k = q_dim, v = q_dim + kv_dim;  // where their outputs begin
    const auto heads = {q, Share{k + kv.begin, k + kv.end}, Share{v + kv.begin, v + kv.end}};
    layer.qkv = cut(layer.qkv, heads, all);
    layer.qkv_bias = cut(layer.qkv_bias, heads);
    layer.out = cut(layer.out, {{0, all.end}}, q);
    layer.gate_up =
        cut(layer.gate_up, {{ffn.begin, ffn.end}, {hidden + ffn.begin, hidden + ffn.end}}, all);
    layer.down = cut(layer.down, {{0, all.end}}, ffn);
  }
  return part;
}

}  // namespace serve
