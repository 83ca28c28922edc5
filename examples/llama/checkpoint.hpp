// Loads a llama2.c checkpoint (the float32 format with a header of seven integers).
#pragma once

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

namespace llama {

/// A file that cannot be read, or that is not what it should be: names the file and what is wrong.
class FileError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct Config {
  std::int32_t dim = 0;
  std::int32_t hidden_dim = 0;
  std::int32_t num_layers = 0;
  std::int32_t num_qo_heads = 0;
  std::int32_t num_kv_heads = 0;
  std::int32_t vocab_size = 0;
  std::int32_t max_positions = 0;
  bool shared_classifier = true;  ///< the classifier is the token embedding

  [[nodiscard]] int head_dim() const { return dim / num_qo_heads; }
  [[nodiscard]] int kv_dim() const { return num_kv_heads * head_dim(); }
};

/// Matrices are row-major [outputs][inputs]; the per-layer ones have the layer outermost.
struct Model {
  Config config;
  std::vector<float> storage;
  std::span<const float> embedding;                 // [vocab_size][dim]
  std::span<const float> attention_norm, ffn_norm;  // [layers][dim]
  std::span<const float> wq, wo;                    // [layers][dim][dim]
  std::span<const float> wk, wv;                    // [layers][kv_dim][dim]
  std::span<const float> w1, w3;                    // [layers][hidden_dim][dim]
  std::span<const float> w2;                        // [layers][dim][hidden_dim]
  std::span<const float> final_norm;                // [dim]
  std::span<const float> classifier;                // [vocab_size][dim]

  [[nodiscard]] std::span<const float> layer(std::span<const float> all, int l) const {
    const std::size_t size = all.size() / static_cast<std::size_t>(config.num_layers);
    return all.subspan(size * static_cast<std::size_t>(l), size);
  }
};

namespace detail {

inline constexpr std::size_t header_bytes = 7 * sizeof(std::int32_t);

inline std::vector<unsigned char> read_file(const std::string& path) {
  std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "rb"),
                                                       [](std::FILE* f) { return std::fclose(f); });
  if (!file) throw FileError(path + ": cannot be opened");
  std::vector<unsigned char> bytes;
  std::vector<unsigned char> block(std::size_t{1} << 20);
  for (;;) {
    const std::size_t got = std::fread(block.data(), 1, block.size(), file.get());
    bytes.insert(bytes.end(), block.begin(), block.begin() + static_cast<std::ptrdiff_t>(got));
    if (got != block.size()) break;
  }
  if (std::ferror(file.get()) != 0) throw FileError(path + ": cannot be read");
  return bytes;
}

/// Points the model's spans into its storage, in the order of the file. Returns the number of
/// floats; with empty storage it only counts.
inline std::size_t lay_out(Model& model) {
  const Config& c = model.config;
  const auto size = [](std::int64_t a, std::int64_t b, std::int64_t d = 1) {
    return static_cast<std::size_t>(a) * static_cast<std::size_t>(b) * static_cast<std::size_t>(d);
  };
  std::size_t at = 0;
  const auto take = [&](std::size_t count) {
    std::span<const float> part;
    if (!model.storage.empty()) part = std::span<const float>(model.storage).subspan(at, count);
    at += count;
    return part;
  };
  model.embedding = take(size(c.vocab_size, c.dim));
  model.attention_norm = take(size(c.num_layers, c.dim));
  model.wq = take(size(c.num_layers, c.dim, c.dim));
  model.wk = take(size(c.num_layers, c.kv_dim(), c.dim));
  model.wv = take(size(c.num_layers, c.kv_dim(), c.dim));
  model.wo = take(size(c.num_layers, c.dim, c.dim));
  model.ffn_norm = take(size(c.num_layers, c.dim));
  model.w1 = take(size(c.num_layers, c.hidden_dim, c.dim));
  model.w2 = take(size(c.num_layers, c.dim, c.hidden_dim));
  model.w3 = take(size(c.num_layers, c.hidden_dim, c.dim));
  model.final_norm = take(size(c.dim, 1));
  take(size(c.max_positions, c.head_dim()));  // tables of cosines and sines: computed here instead
  model.classifier = c.shared_classifier ? model.embedding : take(size(c.vocab_size, c.dim));
  return at;
}

inline void check_config(const Config& c, const std::string& path) {
  const auto need = [&path](bool ok, const char* field, std::int32_t value, const char* expected) {
    if (!ok)
      throw FileError(path + ": not a llama2.c checkpoint: " + field + " = " +
                      std::to_string(value) + " in the header, expected " + expected);
  };
  constexpr std::int32_t limit = 1 << 20;
  need(c.dim > 0 && c.dim <= limit, "dim", c.dim, "1 to 2^20");
  need(c.hidden_dim > 0 && c.hidden_dim <= limit, "hidden_dim", c.hidden_dim, "1 to 2^20");
  need(c.num_layers > 0 && c.num_layers <= 1024, "n_layers", c.num_layers, "1 to 1024");
  need(c.num_qo_heads > 0 && c.dim % c.num_qo_heads == 0, "n_heads", c.num_qo_heads,
       "a divisor of dim");
  need(c.head_dim() % 2 == 0, "dim / n_heads", c.head_dim(), "an even number");
  need(c.num_kv_heads > 0 && c.num_qo_heads % c.num_kv_heads == 0, "n_kv_heads", c.num_kv_heads,
       "a divisor of n_heads");
  need(c.vocab_size > 0 && c.vocab_size <= limit, "vocab_size", c.vocab_size, "1 to 2^20");
  need(c.max_positions > 0 && c.max_positions <= limit, "seq_len", c.max_positions, "1 to 2^20");
}

}  // namespace detail

/// Throws FileError if the file cannot be read, is truncated or oversized for its header, or its
/// header is not that of a llama2.c checkpoint.
inline Model load_checkpoint(const std::string& path) {
  static_assert(std::endian::native == std::endian::little, "checkpoints are little-endian");
  const std::vector<unsigned char> bytes = detail::read_file(path);
  if (bytes.size() < detail::header_bytes)
    throw FileError(path + ": " + std::to_string(bytes.size()) +
                    " bytes, too short for the header of a llama2.c checkpoint (" +
                    std::to_string(detail::header_bytes) + ")");
  std::int32_t header[7];
  std::memcpy(header, bytes.data(), sizeof header);
  Model model;
  Config& c = model.config;
  c.dim = header[0];
  c.hidden_dim = header[1];
  c.num_layers = header[2];
  c.num_qo_heads = header[3];
  c.num_kv_heads = header[4];
  c.shared_classifier = header[5] > 0;  // a negative vocabulary size: a classifier of its own
  c.vocab_size = header[5] > 0 ? header[5] : (header[5] > -(1 << 30) ? -header[5] : 0);
  c.max_positions = header[6];
  detail::check_config(c, path);

  const std::size_t floats = detail::lay_out(model);
  const std::size_t expected = detail::header_bytes + floats * sizeof(float);
  if (bytes.size() != expected)
    throw FileError(path + ": " + (bytes.size() < expected ? "truncated" : "oversized") + ": " +
                    std::to_string(bytes.size()) + " bytes, its header asks for " +
                    std::to_string(expected));
  model.storage.resize(floats);
  std::memcpy(model.storage.data(), bytes.data() + detail::header_bytes, floats * sizeof(float));
  detail::lay_out(model);
  return model;
}

/// A model with random weights, scaled so that activations neither vanish nor blow up.
inline Model random_model(Config config, std::uint32_t seed) {
  Model model;
  model.config = config;
  model.storage.resize(detail::lay_out(model));
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal(0.0f, 1.0f / std::sqrt(static_cast<float>(config.dim)));
  for (float& weight : model.storage) weight = normal(generator);
  detail::lay_out(model);
  for (const auto norm : {model.attention_norm, model.ffn_norm, model.final_norm}) {
    float* first = model.storage.data() + (norm.data() - model.storage.data());
    for (std::size_t i = 0; i < norm.size(); ++i) first[i] = 1.0f;
  }
  return model;
}

}  // namespace llama
