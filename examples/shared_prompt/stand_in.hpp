// Stands in for a model's projections: q, k and v of unit variance, drawn by a hash from the token
// and its position. Equal prefixes therefore have equal K and V, as they have in a real model.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace shared_prompt {

class StandIn {
 public:
  StandIn(int num_qo_heads, int num_kv_heads, int head_dim)
      : q_size_(static_cast<std::size_t>(num_qo_heads * head_dim)),
        kv_size_(static_cast<std::size_t>(num_kv_heads * head_dim)) {}

  [[nodiscard]] std::size_t q_size() const { return q_size_; }    ///< num_qo_heads * head_dim
  [[nodiscard]] std::size_t kv_size() const { return kv_size_; }  ///< num_kv_heads * head_dim

  /// q [q_size()], k and v [kv_size()] of one token at one position.
  static void project(std::int32_t token, std::int32_t position, std::span<float> q,
                      std::span<float> k, std::span<float> v) {
    const std::uint64_t row =
        (static_cast<std::uint64_t>(static_cast<std::uint32_t>(token)) << 32) |
        static_cast<std::uint32_t>(position);
    fill(q, mix(row * 3 + 0));
    fill(k, mix(row * 3 + 1));
    fill(v, mix(row * 3 + 2));
  }

 private:
  static std::uint64_t mix(std::uint64_t x) {
    x = (x ^ (x >> 31)) * 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 29)) * 0xbf58476d1ce4e5b9u;
    return x ^ (x >> 32);
  }

  // The sum of four uniform 16-bit numbers: mean 2 * 65535, variance 4 * (2^32 - 1) / 12.
  static void fill(std::span<float> out, std::uint64_t seed) {
    for (std::size_t i = 0; i < out.size(); ++i) {
      const std::uint64_t bits = mix(seed + i * 0x632be59bd9b4e019u);
      const std::uint64_t sum =
          (bits & 0xffff) + ((bits >> 16) & 0xffff) + ((bits >> 32) & 0xffff) + (bits >> 48);
      out[i] = (static_cast<float>(sum) - 131070.0f) * (1.0f / 37837.0f);
    }
  }

  std::size_t q_size_, kv_size_;
};

}  // namespace shared_prompt
