// The Llama forward pass around attention: embedding, RMS norm, rotary positions, SwiGLU, logits.
// Attention itself is the caller's, so that the same code runs over any K/V cache.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "checkpoint.hpp"

namespace llama {

/// Runs everything on the calling thread.
struct Serial {
  int concurrency() const { return 1; }
  template <class F>
  void parallel_for(int n, F&& f) {
    for (int i = 0; i < n; ++i) f(i);
  }
};

/// out = weight * x / rms(x)
inline void rms_norm(std::span<const float> x, std::span<const float> weight,
                     std::span<float> out) {
  float sum = 0.0f;
  for (const float value : x) sum += value * value;
  const float scale = 1.0f / std::sqrt(sum / static_cast<float>(x.size()) + 1e-5f);
  for (std::size_t i = 0; i < x.size(); ++i) out[i] = weight[i] * (scale * x[i]);
}

/// Rotates neighbouring pairs of each head by the position.
inline void rotate(std::span<float> heads, int head_dim, int position) {
  const auto d = static_cast<std::size_t>(head_dim);
  for (std::size_t i = 0; i < d; i += 2) {
    const float frequency =
        1.0f / std::pow(10000.0f, static_cast<float>(i) / static_cast<float>(head_dim));
    const float angle = static_cast<float>(position) * frequency;
    const float cosine = std::cos(angle), sine = std::sin(angle);
    for (std::size_t h = i; h < heads.size(); h += d) {
      const float x = heads[h], y = heads[h + 1];
      heads[h] = x * cosine - y * sine;
      heads[h + 1] = x * sine + y * cosine;
    }
  }
}

/// x[i] = silu(x[i]) * gate[i]
inline void swiglu(std::span<float> x, std::span<const float> gate) {
  for (std::size_t i = 0; i < x.size(); ++i)
    x[i] = x[i] * (1.0f / (1.0f + std::exp(-x[i]))) * gate[i];
}

/// The index of the largest value, the first of equals: greedy sampling.
inline int argmax(std::span<const float> values) {
  return static_cast<int>(std::max_element(values.begin(), values.end()) - values.begin());
}

/// out[rows][outputs] = x[rows][inputs] * weight[outputs][inputs]^T. Each sum runs over the inputs
/// in order, whatever the batch: a sequence's numbers do not depend on its neighbours.
template <class Exec>
void matmul(Exec& executor, std::span<const float> x, std::span<const float> weight,
            std::span<float> out, std::size_t rows) {
  constexpr std::size_t tile_rows = 16, tile_outputs = 4;
  const std::size_t inputs = x.size() / rows, outputs = out.size() / rows;
  const std::size_t tiles = (rows + tile_rows - 1) / tile_rows;
  std::vector<float> packed(tiles * inputs * tile_rows,
                            0.0f);  // [tile][input][row]: rows are lanes
  for (std::size_t r = 0; r < rows; ++r)
    for (std::size_t j = 0; j < inputs; ++j)
      packed[((r / tile_rows) * inputs + j) * tile_rows + r % tile_rows] = x[r * inputs + j];
  const auto one_tile = [&](std::size_t tile, std::size_t begin, std::size_t count) {
    float sums[tile_outputs][tile_rows] = {};
    const float* lanes = packed.data() + tile * inputs * tile_rows;
    const float* w[tile_outputs];
    for (std::size_t o = 0; o < tile_outputs; ++o)
      w[o] = weight.data() + (begin + std::min(o, count - 1)) * inputs;
    for (std::size_t j = 0; j < inputs; ++j, lanes += tile_rows)
      for (std::size_t o = 0; o < tile_outputs; ++o)
        for (std::size_t r = 0; r < tile_rows; ++r) sums[o][r] += w[o][j] * lanes[r];
    for (std::size_t r = tile * tile_rows; r < std::min(rows, (tile + 1) * tile_rows); ++r)
      for (std::size_t o = 0; o < count; ++o)
        out[r * outputs + begin + o] = sums[o][r - tile * tile_rows];
  };
  const std::size_t work = rows * inputs * outputs;
  const int parts = work < 100'000 ? 1 : std::max(1, executor.concurrency()) * 4;
  const auto part = [&](int p) {
    const std::size_t blocks = (outputs + tile_outputs - 1) / tile_outputs;
    const auto i = static_cast<std::size_t>(p), n = static_cast<std::size_t>(parts);
    for (std::size_t block = blocks * i / n; block < blocks * (i + 1) / n; ++block) {
      const std::size_t begin = block * tile_outputs;
      for (std::size_t tile = 0; tile < tiles; ++tile)
        one_tile(tile, begin, std::min(tile_outputs, outputs - begin));
    }
  };
  if (parts == 1)
    part(0);
  else
    executor.parallel_for(parts, part);
}

/// One forward pass over the rows of a step: tokens[r] stands at positions[r] of its sequence.
/// attend(layer, q, k, v, out) has q, out [rows][num_qo_heads][head_dim] and k, v
/// [rows][num_kv_heads][head_dim]. Returns the logits [logit_rows.size()][vocab_size] of the rows
/// that are asked for.
template <class Exec, class Attend>
std::vector<float> forward(const Model& model, Exec& executor, std::span<const int> tokens,
                           std::span<const int> positions, std::span<const int> logit_rows,
                           Attend&& attend) {
  const Config& c = model.config;
  const std::size_t rows = tokens.size();
  const auto dim = static_cast<std::size_t>(c.dim), kv_dim = static_cast<std::size_t>(c.kv_dim());
  const auto hidden = static_cast<std::size_t>(c.hidden_dim);
  std::vector<float> x(rows * dim), normed(rows * dim), q(rows * dim), out(rows * dim);
  std::vector<float> k(rows * kv_dim), v(rows * kv_dim), h1(rows * hidden), h3(rows * hidden);
  const auto row = [](std::vector<float>& all, std::size_t r, std::size_t width) {
    return std::span<float>(all).subspan(r * width, width);
  };
  const auto norm_rows = [&](std::span<const float> weight) {
    for (std::size_t r = 0; r < rows; ++r) rms_norm(row(x, r, dim), weight, row(normed, r, dim));
  };
  const auto add_to_x = [&](const std::vector<float>& delta) {
    for (std::size_t i = 0; i < x.size(); ++i) x[i] += delta[i];
  };

  for (std::size_t r = 0; r < rows; ++r) {
    const auto source = model.embedding.subspan(static_cast<std::size_t>(tokens[r]) * dim, dim);
    std::copy(source.begin(), source.end(), row(x, r, dim).begin());
  }
  for (int l = 0; l < c.num_layers; ++l) {
    norm_rows(model.layer(model.attention_norm, l));
    matmul(executor, normed, model.layer(model.wq, l), q, rows);
    matmul(executor, normed, model.layer(model.wk, l), k, rows);
    matmul(executor, normed, model.layer(model.wv, l), v, rows);
    for (std::size_t r = 0; r < rows; ++r) {
      rotate(row(q, r, dim), c.head_dim(), positions[r]);
      rotate(row(k, r, kv_dim), c.head_dim(), positions[r]);
    }
    attend(l, std::span<const float>(q), std::span<const float>(k), std::span<const float>(v),
           std::span<float>(out));
    matmul(executor, out, model.layer(model.wo, l), normed, rows);
    add_to_x(normed);
    norm_rows(model.layer(model.ffn_norm, l));
    matmul(executor, normed, model.layer(model.w1, l), h1, rows);
    matmul(executor, normed, model.layer(model.w3, l), h3, rows);
    swiglu(h1, h3);
    matmul(executor, h1, model.layer(model.w2, l), out, rows);
    add_to_x(out);
  }
  if (logit_rows.empty()) return {};
  std::vector<float> last(logit_rows.size() * dim);
  for (std::size_t i = 0; i < logit_rows.size(); ++i)
    rms_norm(row(x, static_cast<std::size_t>(logit_rows[i]), dim), model.final_norm,
             row(last, i, dim));
  std::vector<float> logits(logit_rows.size() * static_cast<std::size_t>(c.vocab_size));
  matmul(executor, last, model.classifier, logits, logit_rows.size());
  return logits;
}

}  // namespace llama
