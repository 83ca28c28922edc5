#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "dequantise.hpp"
#include "load.hpp"

namespace serve {

namespace {

/// How the models of one architecture differ from Llama's.
struct Architecture {
  std::string_view name;
  bool halves = false;      ///< a rotary pair is half a head apart; else side by side
  bool biases = false;      ///< of q, k and v
  bool head_norms = false;  ///< of each head of q and of k
  bool post_norms = false;  ///< of what attention and feed-forward add to the stream
  bool fused = false;       ///< q, k, v are one tensor, and so are gates and values
  bool gemma = false;       ///< GELU, scaled embeddings, windows in five of six layers
};

constexpr Architecture architectures[] = {
    {.name = "llama"},  // Mistral's, too
    {.name = "qwen2", .halves = true, .biases = true},
    {.name = "qwen3", .halves = true, .head_norms = true},
    {.name = "phi3", .halves = true, .fused = true},
    {.name = "gemma3", .halves = true, .head_norms = true, .post_norms = true, .gemma = true}};

const Architecture& read_architecture(const Gguf& gguf) {
  constexpr const char* key = "general.architecture";
  const std::string_view name = gguf.text(key);
  for (const Architecture& one : architectures)
    if (one.name == name) return one;
  gguf.fail(key, std::string(name), "llama, qwen2, qwen3, phi3 or gemma3");
}

/// Keys of a file that begin with the name of its architecture.
class Keys {
 public:
  Keys(const Gguf& gguf, std::string_view architecture)
      : gguf_(gguf), prefix_(std::string(architecture) + ".") {}

  [[nodiscard]] std::string operator()(const char* name) const { return prefix_ + name; }
  [[nodiscard]] bool has(const char* name) const { return gguf_.has((*this)(name)); }
  [[nodiscard]] int integer(const char* name) const {
    return static_cast<int>(gguf_.integer((*this)(name), 0, std::numeric_limits<int>::max()));
  }
  [[nodiscard]] int integer(const char* name, int otherwise) const {
    return has(name) ? integer(name) : otherwise;
  }
  [[nodiscard]] float real(const char* name, double otherwise) const {
    return static_cast<float>(gguf_.real((*this)(name), otherwise));
  }
  /// Refuses every value but this one.
  void only(const char* name, int value) const {
    (void)gguf_.integer((*this)(name), value, value, value);
  }
  void fail(const char* name, const std::string& value, const std::string& expected) const {
    gguf_.fail((*this)(name), value, expected);
  }

 private:
  const Gguf& gguf_;
  std::string prefix_;
};

constexpr const char* vocabulary_key = "tokenizer.ggml.tokens";

void read_windows(const Keys& keys, const Architecture& architecture, Config& c) {
  const char* const key = "attention.sliding_window";
  if (!architecture.gemma) {
    c.window = keys.integer(key, 0);
    if (c.window >= c.max_positions) c.window = 0;  // as it never applies
    return;
  }
  c.window = keys.integer(key);
  if (c.window == 0) keys.fail(key, "0", "1 or more");
  c.global_every = 6;
  keys.only("attention.sliding_window_pattern", c.global_every);
  c.local_rope_base = keys.real("rope.freq_base_swa", 10000);
  if (!(c.local_rope_base >= 1 && c.local_rope_base <= 1e12f))
    keys.fail("rope.freq_base_swa", std::to_string(c.local_rope_base), "1 to 1e12");
}

Config read_config(const Gguf& gguf, const Architecture& architecture) {
  const Keys keys(gguf, architecture.name);
  Config c;
  c.dim = keys.integer("embedding_length");
  c.hidden_dim = keys.integer("feed_forward_length");
  c.num_layers = keys.integer("block_count");
  c.num_qo_heads = keys.integer("attention.head_count");
  c.num_kv_heads = keys.integer("attention.head_count_kv", c.num_qo_heads);
  c.vocab_size = static_cast<int>(gguf.texts(vocabulary_key).size());
  c.max_positions = keys.integer("context_length");
  c.tied = !gguf.has_tensor("output.weight");
  c.norm_eps = keys.real("attention.layer_norm_rms_epsilon", 1e-5);
  c.rope_base = keys.real("rope.freq_base", 10000);
  if (const char* key = "attention.key_length"; keys.has(key))
    c.head_size = static_cast<int>(gguf.integer(keys(key), 2, 1024));
  const std::string names[] = {
      keys("embedding_length"),     keys("feed_forward_length"),     keys("block_count"),
      keys("attention.head_count"), keys("attention.head_count_kv"), keys("context_length")};
  check_shape(c, gguf.path(),
              {names[0].c_str(), names[1].c_str(), names[2].c_str(), names[3].c_str(),
               names[4].c_str(), vocabulary_key, names[5].c_str()});
  keys.only("rope.dimension_count", c.head_dim());
  keys.only("attention.value_length", c.head_dim());
  keys.only("vocab_size", c.vocab_size);
  keys.only("expert_count", 0);
  for (const char* cap : {"attn_logit_softcapping", "final_logit_softcapping"})
    if (const float value = keys.real(cap, 0); value != 0)
      keys.fail(cap, std::to_string(value), "none");
  read_windows(keys, architecture, c);
  c.gelu = architecture.gemma;
  if (architecture.gemma) c.embedding_scale = std::sqrt(static_cast<float>(c.dim));
  if (architecture.gemma && c.num_layers == 62)  // 27B: not said in files
    c.sm_scale = 1 / std::sqrt(static_cast<float>(c.dim) / static_cast<float>(c.num_qo_heads));
  return c;
}

/// Reads a model; every tensor of the file has to be used.
class Loader {
 public:
  Loader(const Gguf& gguf, Element element)
      : gguf_(gguf),
        architecture_(read_architecture(gguf)),
        config_(read_config(gguf, architecture_)),
        head_dim_(to_size(config_.head_dim())) {
    check_tensors();
    model_ = blank_model(config_, element);
  }

  Model load(chunkattn::ThreadPool& executor) {
    scale_frequencies();
    read_vector("output_norm.weight", config_.dim, model_.final_norm);
    part("token_embd", model_.embedding, vocabulary());
    if (!config_.tied) part("output", model_.own_classifier, vocabulary());
    for (std::size_t l = 0; l < model_.layers.size(); ++l)
      read_layer("blk." + std::to_string(l) + ".", model_.layers[l]);
    for (const std::string_view name : gguf_.tensor_names())
      if (!used_.contains(name))
        gguf_.fail(
            "tensor " + std::string(name), "there",
            "none of this name in a model of architecture " + std::string(architecture_.name));
    fill_matrices(executor);
    return std::move(model_);
  }

 private:
  /// A tensor that becomes the outputs of a matrix from `first` on; the first `rotary` of them
  /// belong to heads whose pairs are rotated.
  struct Part {
    const Tensor* tensor;
    Matrix* matrix;
    std::size_t first, rotary;
  };

  [[nodiscard]] std::size_t vocabulary() const { return to_size(config_.vocab_size); }

  /// Matrices are made after their tensors were found to have these shapes, so that no number in a
  /// damaged file alone decides how much memory is taken.
  void check_tensors() const {
    const std::size_t dim = to_size(config_.dim), hidden = to_size(config_.hidden_dim);
    const std::size_t q_dim = to_size(config_.q_dim()), kv_dim = to_size(config_.kv_dim());
    const bool fused = architecture_.fused;
    (void)gguf_.tensor("token_embd.weight", vocabulary(), dim);
    for (int l = 0; l < config_.num_layers; ++l) {
      const std::string block = "blk." + std::to_string(l) + ".";
      (void)gguf_.tensor(block + "ffn_up.weight", fused ? 2 * hidden : hidden, dim);
      (void)gguf_.tensor(block + (fused ? "attn_qkv.weight" : "attn_q.weight"),
                         fused ? q_dim + 2 * kv_dim : q_dim, dim);
    }
  }

  const Tensor& take(const std::string& name, std::size_t outputs, std::size_t inputs) {
    const Tensor& tensor = gguf_.tensor(name, outputs, inputs);
    used_.insert(name);
    return tensor;
  }
  void read_vector(const std::string& name, int size, std::vector<float>& values) {
    values.resize(to_size(size));
    dequantise(take(name, 1, values.size()), 0, values);
  }
  void part(const std::string& name, Matrix& matrix, std::size_t outputs, std::size_t first = 0,
            std::size_t rotary = 0) {
    parts_.push_back({&take(name + ".weight", outputs, matrix.inputs()), &matrix, first,
                      architecture_.halves ? rotary : 0});
  }

  void read_layer(const std::string& block, Layer& layer) {
    const std::size_t q_dim = to_size(config_.q_dim()), kv_dim = to_size(config_.kv_dim());
    const std::size_t dim = to_size(config_.dim), hidden = to_size(config_.hidden_dim);
    read_vector(block + "attn_norm.weight", config_.dim, layer.attention_norm);
    read_vector(block + "ffn_norm.weight", config_.dim, layer.ffn_norm);
    if (architecture_.post_norms) {
      read_vector(block + "post_attention_norm.weight", config_.dim, layer.attention_post_norm);
      read_vector(block + "post_ffw_norm.weight", config_.dim, layer.ffn_post_norm);
    }
    if (architecture_.fused) {
      part(block + "attn_qkv", layer.qkv, q_dim + 2 * kv_dim, 0, q_dim + kv_dim);
      part(block + "ffn_up", layer.gate_up, 2 * hidden);
    } else {
      part(block + "attn_q", layer.qkv, q_dim, 0, q_dim);
      part(block + "attn_k", layer.qkv, kv_dim, q_dim, kv_dim);
      part(block + "attn_v", layer.qkv, kv_dim, q_dim + kv_dim);
      part(block + "ffn_gate", layer.gate_up, hidden);
      part(block + "ffn_up", layer.gate_up, hidden, hidden);
    }
    part(block + "attn_output", layer.out, dim);
    part(block + "ffn_down", layer.down, dim);
    if (architecture_.biases) read_biases(block, layer);
    if (architecture_.head_norms) {
      read_vector(block + "attn_q_norm.weight", config_.head_dim(), layer.q_norm);
      read_vector(block + "attn_k_norm.weight", config_.head_dim(), layer.k_norm);
      pair_up(layer.q_norm, layer.q_norm.size());
      pair_up(layer.k_norm, layer.k_norm.size());
    }
  }

  void read_biases(const std::string& block, Layer& layer) {
    std::vector<float> one;
    for (const auto& [name, size] :
         {std::pair{"attn_q.bias", config_.q_dim()}, std::pair{"attn_k.bias", config_.kv_dim()},
          std::pair{"attn_v.bias", config_.kv_dim()}}) {
      read_vector(block + name, size, one);
      layer.qkv_bias.insert(layer.qkv_bias.end(), one.begin(), one.end());
    }
    pair_up(layer.qkv_bias, to_size(config_.q_dim() + config_.kv_dim()));
  }

  /// Where an output of rotated heads goes: the elements of a pair side by side.
  [[nodiscard]] std::size_t beside_its_pair(std::size_t output) const {
    const std::size_t in_head = output % head_dim_, half = head_dim_ / 2;
    return output - in_head + (in_head < half ? 2 * in_head : 2 * (in_head - half) + 1);
  }
  void pair_up(std::vector<float>& values, std::size_t rotary) const {
    if (!architecture_.halves) return;
    const std::vector<float> before = values;
    for (std::size_t i = 0; i < rotary; ++i) values[beside_its_pair(i)] = before[i];
  }

  /// Frequencies as the file scales them: all by one factor, or each by its own (Llama 3.1 and
  /// later). Those of layers with a window stay.
  void scale_frequencies() {
    const Keys keys(gguf_, architecture_.name);
    std::vector<float>& frequencies = model_.rope_frequencies;
    const std::string_view kind = gguf_.text(keys("rope.scaling.type"), "none");
    if (kind == "linear") {
      const float factor = keys.real("rope.scaling.factor", 1);
      if (!(factor >= 1 && factor <= 1e6f))
        keys.fail("rope.scaling.factor", std::to_string(factor), "1 to 1e6");
      for (float& frequency : frequencies) frequency /= factor;
    } else if (kind != "none") {
      keys.fail("rope.scaling.type", std::string(kind), "none or linear");
    }
    if (!gguf_.has_tensor("rope_freqs.weight")) return;
    std::vector<float> factors;
    read_vector("rope_freqs.weight", static_cast<int>(frequencies.size()), factors);
    for (std::size_t i = 0; i < factors.size(); ++i) {
      if (!(factors[i] > 0))
        gguf_.fail("rope_freqs.weight[" + std::to_string(i) + "]", std::to_string(factors[i]),
                   "more than 0");
      frequencies[i] /= factors[i];
    }
  }

  void fill_matrices(chunkattn::ThreadPool& executor) const {
    executor.parallel_for(static_cast<int>(parts_.size()), [this](int i) {
      const Part& part = parts_[to_size(i)];
      std::vector<float> weights(part.tensor->inputs);
      for (std::size_t o = 0; o < part.tensor->outputs; ++o) {
        dequantise(*part.tensor, o, weights);
        part.matrix->set(part.first + (o < part.rotary ? beside_its_pair(o) : o), weights);
      }
    });
  }

  const Gguf& gguf_;
  const Architecture& architecture_;
  const Config config_;
  const std::size_t head_dim_;
  Model model_;
  std::vector<Part> parts_;
  std::set<std::string, std::less<>> used_;
};

}  // namespace

bool is_gguf(const std::string& path) {
  const MappedFile file(path);
  const auto bytes = file.bytes();
  return bytes.size() >= 4 && std::memcmp(bytes.data(), "GGUF", 4) == 0;
}

Model load_gguf(const Gguf& gguf, Element element, chunkattn::ThreadPool& executor) {
  return Loader(gguf, element).load(executor);
}

}  // namespace serve
