#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "load.hpp"

namespace serve {

namespace {

constexpr std::string_view llama2c_format = "a llama2.c checkpoint";
constexpr ShapeNames names{"dim",        "hidden_dim", "n_layers", "n_heads",
                           "n_kv_heads", "vocab_size", "seq_len"};

Config read_header(FieldReader& reader, const std::string& path) {
  std::int32_t header[7];
  const char* const fields[] = {names.dim,          names.hidden_dim,   names.num_layers,
                                names.num_qo_heads, names.num_kv_heads, names.vocab_size,
                                names.max_positions};
  for (int i = 0; i < 7; ++i) header[i] = reader.number<std::int32_t>(fields[i]);
  Config c;
  c.dim = header[0];
  c.hidden_dim = header[1];
  c.num_layers = header[2];
  c.num_qo_heads = header[3];
  c.num_kv_heads = header[4];
  c.tied = header[5] > 0;  // a negative vocabulary size: a classifier of its own
  c.vocab_size = header[5] > 0 ? header[5] : header[5] > -(1 << 30) ? -header[5] : 0;
  c.max_positions = header[6];
  check_shape(c, path + ": not " + std::string(llama2c_format), names);
  return c;
}

std::size_t count_floats(const Config& c) {
  const auto size = [](int n) { return static_cast<std::size_t>(n); };
  const std::size_t dim = size(c.dim), kv_dim = size(c.kv_dim()), hidden = size(c.hidden_dim);
  const std::size_t layer = 2 * dim + 2 * dim * dim + 2 * kv_dim * dim + 3 * hidden * dim;
  const std::size_t tables = size(c.max_positions) * size(c.head_dim());
  return size(c.num_layers) * layer + (c.tied ? 1 : 2) * size(c.vocab_size) * dim + dim + tables;
}

/// The weights one after the other; \pre the file has as many as it should.
class Weights {
 public:
  explicit Weights(std::span<const std::byte> bytes) : next_(bytes.data()) {}
  void skip(std::size_t count) { next_ += count * sizeof(float); }
  void vector(std::vector<float>& to) {
    std::memcpy(to.data(), next_, to.size() * sizeof(float));
    skip(to.size());
  }
  void matrix(Matrix& to, std::size_t outputs, std::size_t first = 0) {
    std::vector<float> row(to.inputs());
    for (std::size_t o = 0; o < outputs; ++o) {
      vector(row);
      to.set(first + o, row);
    }
  }

 private:
  const std::byte* next_;  // not aligned for floats, perhaps
};

}  // namespace

Model load_llama2c(const std::string& path, Element element) {
  const MappedFile file(path);
  FieldReader reader(file, llama2c_format);
  const Config c = read_header(reader, path);
  const std::size_t expected = count_floats(c) * sizeof(float);
  if (reader.left() != expected)
    reader.fail("file size", std::to_string(file.bytes().size()),
                std::to_string(reader.position() + expected) + ": it is " +
                    (reader.left() < expected ? "truncated" : "oversized") + " for its header");
  Model model = blank_model(c, element);
  const auto dim = static_cast<std::size_t>(c.dim), kv_dim = static_cast<std::size_t>(c.kv_dim());
  const auto hidden = static_cast<std::size_t>(c.hidden_dim);
  Weights weights(reader.take(expected, "weights"));
  weights.matrix(model.embedding, model.embedding.outputs());
  for (Layer& layer : model.layers) weights.vector(layer.attention_norm);
  for (Layer& layer : model.layers) weights.matrix(layer.qkv, dim);
  for (Layer& layer : model.layers) weights.matrix(layer.qkv, kv_dim, dim);
  for (Layer& layer : model.layers) weights.matrix(layer.qkv, kv_dim, dim + kv_dim);
  for (Layer& layer : model.layers) weights.matrix(layer.out, dim);
  for (Layer& layer : model.layers) weights.vector(layer.ffn_norm);
  for (Layer& layer : model.layers) weights.matrix(layer.gate_up, hidden);
  for (Layer& layer : model.layers) weights.matrix(layer.down, dim);
  for (Layer& layer : model.layers) weights.matrix(layer.gate_up, hidden, hidden);
  weights.vector(model.final_norm);
  // Tables of cosines and sines: computed from the frequencies instead.
  weights.skip(static_cast<std::size_t>(c.max_positions) * static_cast<std::size_t>(c.head_dim()));
  if (!c.tied) weights.matrix(model.own_classifier, model.own_classifier.outputs());
  return model;
}

}  // namespace serve
