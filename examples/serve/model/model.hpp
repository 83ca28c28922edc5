// A model of the Llama family in memory: its shape and its weights.
#pragma once

#include <chunkattn/chunkattn.hpp>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "../../support/huge_buffer.hpp"

namespace serve {

/// Dimensions and numbers of tokens, which are ints, as sizes and indices.
[[nodiscard]] constexpr std::size_t to_size(int n) {
  return static_cast<std::size_t>(n);
}

struct Config {
  int dim = 0;  ///< of the residual stream
  int hidden_dim = 0;
  int num_layers = 0;
  int num_qo_heads = 0;
  int num_kv_heads = 0;
  int vocab_size = 0;
  int max_positions = 0;
  bool tied = true;  ///< the classifier is the token embedding
  float norm_eps = 1e-5f;
  float rope_base = 10000.0f;
  int head_size = 0;     ///< 0: dim / num_qo_heads
  int window = 0;        ///< the last keys that a local layer sees, the row's own included; 0: all
  int global_every = 0;  ///< of layers each n-th has no window; 0: all have it
  float local_rope_base = 0;        ///< of layers with a window; 0: rope_base
  std::optional<float> sm_scale{};  ///< of q·k; unset: 1 / sqrt(head_dim)
  float embedding_scale = 1;        ///< of embeddings as the first layer reads them
  bool gelu = false;                ///< gates by GELU (its tanh form) instead of SiLU

  [[nodiscard]] int head_dim() const { return head_size > 0 ? head_size : dim / num_qo_heads; }
  [[nodiscard]] int q_dim() const { return num_qo_heads * head_dim(); }
  [[nodiscard]] bool is_local(int layer) const {
    return window > 0 && (global_every == 0 || (layer + 1) % global_every != 0);
  }
  [[nodiscard]] int num_local() const {
    int count = 0;
    for (int layer = 0; layer < num_layers; ++layer) count += is_local(layer) ? 1 : 0;
    return count;
  }
  [[nodiscard]] int kv_dim() const { return num_kv_heads * head_dim(); }
};

/// What weights are kept as.
enum class Element { fp32, bf16 };

/// Products read vectors of this many elements; rows of weights and of activations end with zeros
/// up to a multiple of it, so that no product has a remainder to treat in another order.
inline constexpr std::size_t lanes = 16;
[[nodiscard]] constexpr std::size_t padded(std::size_t size) {
  return (size + lanes - 1) / lanes * lanes;
}

/// Weights [outputs][padded(inputs)].
class Matrix {
 public:
  Matrix() = default;
  Matrix(std::size_t outputs, std::size_t inputs, Element element)
      : outputs_(outputs),
        inputs_(inputs),
        element_(element),
        memory_(outputs * padded(inputs) * bytes_of(element)) {}

  [[nodiscard]] std::size_t outputs() const { return outputs_; }
  [[nodiscard]] std::size_t inputs() const { return inputs_; }
  [[nodiscard]] std::size_t stride() const { return padded(inputs_); }
  [[nodiscard]] Element element() const { return element_; }
  [[nodiscard]] std::size_t bytes() const { return memory_.bytes(); }
  [[nodiscard]] const float* fp32() const { return memory_.as<float>(); }
  [[nodiscard]] const std::uint16_t* bf16() const { return memory_.as<std::uint16_t>(); }

  /// The weights of one output, rounded to what the matrix keeps.
  void set(std::size_t output, std::span<const float> weights) {
    const std::size_t first = output * stride();
    for (std::size_t i = 0; i < inputs_; ++i) {
      if (element_ == Element::fp32)
        memory_.as<float>()[first + i] = weights[i];
      else
        memory_.as<std::uint16_t>()[first + i] = chunkattn::to_bfloat16(weights[i]).bits;
    }
  }
  void get(std::size_t output, std::span<float> weights) const {
    const std::size_t first = output * stride();
    for (std::size_t i = 0; i < inputs_; ++i)
      weights[i] = element_ == Element::fp32
                       ? fp32()[first + i]
                       : chunkattn::to_float(chunkattn::bfloat16{bf16()[first + i]});
  }

 private:
  static std::size_t bytes_of(Element element) { return element == Element::fp32 ? 4 : 2; }

  std::size_t outputs_ = 0, inputs_ = 0;
  Element element_ = Element::fp32;
  examples::HugeBuffer memory_;
};

/// What reads the same input is one matrix: fewer, larger products.
struct Layer {
  std::vector<float> attention_norm, ffn_norm;
  // Each empty where the model has none:
  std::vector<float> attention_post_norm, ffn_post_norm;  ///< of what is added to the stream
  std::vector<float> q_norm, k_norm;                      ///< [head_dim], of each head
  std::vector<float> qkv_bias;
  Matrix qkv;      ///< all heads of q, of k, of v
  Matrix out;      ///< of attention
  Matrix gate_up;  ///< hidden_dim gates, then as many values
  Matrix down;
};

struct Model {
  Config config;
  Matrix embedding;  ///< [vocab_size][dim], or a rank's part of it
  std::vector<Layer> layers;
  std::vector<float> final_norm;
  Matrix own_classifier;                      ///< empty where config.tied
  std::vector<float> rope_frequencies;        ///< radians per position, for each pair of a head
  std::vector<float> local_rope_frequencies;  ///< of layers with a window; empty: the same

  [[nodiscard]] const Matrix& classifier() const {
    return config.tied ? embedding : own_classifier;
  }
  [[nodiscard]] std::size_t weight_bytes() const;
};

/// A model of this shape with matrices of zeros, norms of ones, and frequencies
/// rope_base^(-2i / head_dim).
[[nodiscard]] Model blank_model(const Config& config, Element element);

}  // namespace serve
