// Baselines of decode attention. The paged baselines are our own sequence-first kernel on
// plans without sharing, so a ratio to them is the algorithm's alone; the naive one stands for code
// that knows nothing of pages: contiguous K/V per sequence and head, three plain loops.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

#include "chunkattn/executor.hpp"

namespace bench {

/// K, V: [batch][num_kv_heads][tokens][head_dim]; q, out: [batch][num_qo_heads][head_dim]. Written
/// so that a compiler vectorises every loop: head_dim runs innermost.
inline void naive_attention(chunkattn::ThreadPool& pool, const float* k, const float* v,
                            const float* q, float* out, int batch, int num_qo_heads,
                            int num_kv_heads, int tokens, int head_dim) {
  const float scale = 1.0f / std::sqrt(static_cast<float>(head_dim));
  const int group = num_qo_heads / num_kv_heads;
  pool.parallel_for(batch * num_qo_heads, [&](int task) {
    thread_local std::vector<float> p;
    p.resize(static_cast<std::size_t>(tokens));
    const int kv = task / num_qo_heads * num_kv_heads + task % num_qo_heads / group;
    const std::ptrdiff_t at = static_cast<std::ptrdiff_t>(kv) * tokens * head_dim;
    const float* const query = q + static_cast<std::ptrdiff_t>(task) * head_dim;
    float* const result = out + static_cast<std::ptrdiff_t>(task) * head_dim;
    float largest = -1e30f;
    for (int t = 0; t < tokens; ++t) {
      const float* const row = k + at + static_cast<std::ptrdiff_t>(t) * head_dim;
      float lanes[16] = {};  // a plain sum would be one chain of additions
      for (int i = 0; i < head_dim; i += 16)
        for (int l = 0; l < 16; ++l) lanes[l] += query[i + l] * row[i + l];
      float dot = 0;
      for (float lane : lanes) dot += lane;
      p[static_cast<std::size_t>(t)] = dot * scale;
      largest = std::max(largest, dot * scale);
    }
    float sum = 0;
    for (float& value : p) {
      value = std::exp(value - largest);
      sum += value;
    }
    std::fill_n(result, head_dim, 0.0f);
    for (int t = 0; t < tokens; ++t) {
      const float* const row = v + at + static_cast<std::ptrdiff_t>(t) * head_dim;
      const float weight = p[static_cast<std::size_t>(t)] / sum;
      for (int i = 0; i < head_dim; ++i) result[i] += weight * row[i];
    }
  });
}

}  // namespace bench
