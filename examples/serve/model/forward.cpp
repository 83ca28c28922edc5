#include "forward.hpp"

#include <algorithm>
#include <cmath>

namespace serve {

namespace {

/// out = weight * x / rms(x)
void rms_norm(std::span<const float> x, std::span<const float> weight, float eps, float* out) {
  float sums[lanes] =
      {};  // in lanes, so that compilers can use vectors without a licence to reorder
  std::size_t i = 0;
  for (; i + lanes <= x.size(); i += lanes)
    for (std::size_t l = 0; l < lanes; ++l) sums[l] += x[i + l] * x[i + l];
  for (std::size_t l = 0; i + l < x.size(); ++l) sums[l] += x[i + l] * x[i + l];
  float sum = 0;
  for (const float one : sums) sum += one;
  const float scale = 1.0f / std::sqrt(sum / static_cast<float>(x.size()) + eps);
  for (std::size_t j = 0; j < x.size(); ++j) out[j] = weight[j] * (scale * x[j]);
}

/// Each head by itself.
void norm_heads(std::span<float> heads, std::span<const float> weight, float eps) {
  if (weight.empty()) return;
  for (std::size_t head = 0; head < heads.size(); head += weight.size()) {
    const std::span<float> one = heads.subspan(head, weight.size());
    rms_norm(one, weight, eps, one.data());
  }
}

float silu(float x) {
  return x / (1.0f + std::exp(-x));
}

/// The form with tanh.
float gelu(float x) {
  constexpr float root = 0.7978845608f;  // sqrt(2 / pi)
  return 0.5f * x * (1.0f + std::tanh(root * (x + 0.044715f * x * x * x)));
}

/// Rotates neighbouring pairs of each head.
void rotate(std::span<const float> heads, std::span<const float> cosines,
            std::span<const float> sines, float* out) {
  const std::size_t pairs = cosines.size();
  for (std::size_t head = 0; head < heads.size(); head += 2 * pairs)
    for (std::size_t i = 0; i < pairs; ++i) {
      const float a = heads[head + 2 * i], b = heads[head + 2 * i + 1];
      out[head + 2 * i] = a * cosines[i] - b * sines[i];
      out[head + 2 * i + 1] = a * sines[i] + b * cosines[i];
    }
}

}  // namespace

int argmax(std::span<const float> values) {
  return static_cast<int>(std::max_element(values.begin(), values.end()) - values.begin());
}

template <class F>
void Forward::for_rows(std::size_t rows, const F& f) {
  constexpr std::size_t block = 8;  // enough work for a thread to be woken
  const std::size_t blocks = (rows + block - 1) / block;
  products_.executor().parallel_for(static_cast<int>(blocks), [&](int b) {
    const std::size_t first = to_size(b) * block;
    for (std::size_t r = first; r < std::min(rows, first + block); ++r) f(r);
  });
}

void Forward::begin(std::span<const int> tokens, std::span<const int> positions) {
  const Config& c = model_.config;
  rows_ = tokens.size();
  const std::size_t room = row_room(rows_), dim = to_size(c.dim);
  const std::size_t q_dim = to_size(c.q_dim()), kv_dim = to_size(c.kv_dim());
  x_.resize(rows_ * dim);
  input_.assign(room * padded(dim), 0.0f);
  qkv_.resize(room * (q_dim + 2 * kv_dim));
  q_.resize(rows_ * q_dim);
  k_.resize(rows_ * kv_dim);
  v_.resize(rows_ * kv_dim);
  attended_.resize(rows_ * q_dim);
  heads_.assign(room * padded(q_dim), 0.0f);
  delta_.resize(room * dim);
  gate_up_.resize(room * 2 * to_size(c.hidden_dim));
  hidden_.assign(room * padded(to_size(c.hidden_dim)), 0.0f);
  angles_.resize(rows_, model_.rope_frequencies.size());
  local_angles_.resize(rows_, model_.local_rope_frequencies.size());
  for_rows(rows_, [&](std::size_t r) {
    const std::span<float> x = std::span(x_).subspan(r * dim, dim);
    embed(to_size(tokens[r]), x);
    for (float& value : x) value *= c.embedding_scale;
    angles_.set(r, positions[r], model_.rope_frequencies);
    local_angles_.set(r, positions[r], model_.local_rope_frequencies);
  });
  products_.ranks().sum(x_);
}

/// The embedding of a token, or zeros where another rank has it.
void Forward::embed(std::size_t token, std::span<float> x) const {
  const std::size_t first = to_size(products_.ranks().rank()) * model_.embedding.outputs();
  if (token >= first && token < first + model_.embedding.outputs())
    model_.embedding.get(token - first, x);
  else
    std::fill(x.begin(), x.end(), 0.0f);
}

void Forward::Angles::resize(std::size_t rows, std::size_t pairs) {
  cosines.resize(rows * pairs);
  sines.resize(rows * pairs);
}

void Forward::Angles::set(std::size_t row, int position, std::span<const float> frequencies) {
  for (std::size_t i = 0; i < frequencies.size(); ++i) {
    const float angle = static_cast<float>(position) * frequencies[i];
    cosines[row * frequencies.size() + i] = std::cos(angle);
    sines[row * frequencies.size() + i] = std::sin(angle);
  }
}

void Forward::make_qkv(const Layer& layer, bool is_local) {
  const Config& c = model_.config;
  const std::size_t dim = to_size(c.dim), q_dim = to_size(c.q_dim()), kv_dim = to_size(c.kv_dim());
  const std::size_t pairs = model_.rope_frequencies.size();
  const Angles& angles =
      is_local && !model_.local_rope_frequencies.empty() ? local_angles_ : angles_;
  for_rows(rows_, [&](std::size_t r) {
    rms_norm(std::span(x_).subspan(r * dim, dim), layer.attention_norm, c.norm_eps,
             input_.data() + r * padded(dim));
  });
  products_.run(input_, rows_, layer.qkv, qkv_);
  for_rows(rows_, [&](std::size_t r) {
    const auto row = std::span(qkv_).subspan(r * layer.qkv.outputs(), layer.qkv.outputs());
    for (std::size_t i = 0; i < layer.qkv_bias.size(); ++i) row[i] += layer.qkv_bias[i];
    const std::span<float> q = row.first(q_dim), k = row.subspan(q_dim, kv_dim);
    norm_heads(q, layer.q_norm, c.norm_eps);
    norm_heads(k, layer.k_norm, c.norm_eps);
    const auto cosines = std::span(angles.cosines).subspan(r * pairs, pairs);
    const auto sines = std::span(angles.sines).subspan(r * pairs, pairs);
    rotate(q, cosines, sines, q_.data() + r * q_dim);
    rotate(k, cosines, sines, k_.data() + r * kv_dim);
    std::copy_n(row.data() + q_dim + kv_dim, kv_dim, v_.data() + r * kv_dim);
  });
}

/// Adds delta_ to a row of the stream, after a norm of its own where the model has one.
void Forward::add_delta(std::size_t row, std::span<const float> post_norm) {
  const std::size_t dim = to_size(model_.config.dim);
  const std::span<float> delta = std::span(delta_).subspan(row * dim, dim);
  if (!post_norm.empty()) rms_norm(delta, post_norm, model_.config.norm_eps, delta.data());
  for (std::size_t i = 0; i < dim; ++i) x_[row * dim + i] += delta[i];
}

void Forward::add_attention(const Layer& layer) {
  const std::size_t dim = to_size(model_.config.dim), q_dim = to_size(model_.config.q_dim());
  for_rows(rows_, [&](std::size_t r) {
    std::copy_n(attended_.data() + r * q_dim, q_dim, heads_.data() + r * padded(q_dim));
  });
  products_.run(heads_, rows_, layer.out, delta_);
  products_.ranks().sum(std::span(delta_).first(rows_ * dim));
  for_rows(rows_, [&](std::size_t r) {
    add_delta(r, layer.attention_post_norm);
    rms_norm(std::span(x_).subspan(r * dim, dim), layer.ffn_norm, model_.config.norm_eps,
             input_.data() + r * padded(dim));
  });
}

void Forward::add_ffn(const Layer& layer) {
  const std::size_t dim = to_size(model_.config.dim), width = to_size(model_.config.hidden_dim);
  products_.run(input_, rows_, layer.gate_up, gate_up_);
  for_rows(rows_, [&](std::size_t r) {
    const float* gate = gate_up_.data() + r * 2 * width;
    float* out = hidden_.data() + r * padded(width);
    if (model_.config.gelu)
      for (std::size_t i = 0; i < width; ++i) out[i] = gelu(gate[i]) * gate[width + i];
    else
      for (std::size_t i = 0; i < width; ++i) out[i] = silu(gate[i]) * gate[width + i];
  });
  products_.run(hidden_, rows_, layer.down, delta_);
  products_.ranks().sum(std::span(delta_).first(rows_ * dim));
  for_rows(rows_, [&](std::size_t r) { add_delta(r, layer.ffn_post_norm); });
}

std::span<const float> Forward::logits_of(std::span<const int> logit_rows) {
  const std::size_t dim = to_size(model_.config.dim), rows = logit_rows.size();
  const std::size_t room = row_room(rows);
  input_.assign(room * padded(dim), 0.0f);
  for_rows(rows, [&](std::size_t i) {
    rms_norm(std::span(x_).subspan(to_size(logit_rows[i]) * dim, dim), model_.final_norm,
             model_.config.norm_eps, input_.data() + i * padded(dim));
  });
  const std::size_t part = model_.classifier().outputs();
  logits_.resize(room * part);
  products_.run(input_, rows, model_.classifier(), logits_);
  return gathered_logits(rows, part);
}

/// The logits of all ranks side by side. Only rank 0 gets them: on others they are zero.
std::span<const float> Forward::gathered_logits(std::size_t rows, std::size_t part) {
  Communicator& ranks = products_.ranks();
  const std::size_t vocabulary = to_size(model_.config.vocab_size);
  const std::span<const float> own = std::span(logits_).first(rows * part);
  if (ranks.size() == 1) return own;
  whole_logits_.assign(rows * vocabulary, 0.0f);
  if (ranks.rank() == 0) gathered_.resize(to_size(ranks.size()) * own.size());
  ranks.gather(own, gathered_);
  if (ranks.rank() == 0)
    for_rows(rows, [&](std::size_t r) {
      for (std::size_t first = 0; first < vocabulary; first += part)
        std::copy_n(gathered_.data() + first / part * own.size() + r * part,
                    std::min(part, vocabulary - first),
                    whole_logits_.data() + r * vocabulary + first);
    });
  return whole_logits_;
}

}  // namespace serve
