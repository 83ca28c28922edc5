// The forward pass of the Llama family and its relatives around attention: embedding, RMS norms,
// rotary positions, gated feed-forward, logits. Attention itself is the caller's, so that the same
// code runs over any K/V cache.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "model.hpp"
#include "products.hpp"

namespace serve {

/// The index of the largest value, the first of equals: greedy sampling.
[[nodiscard]] int argmax(std::span<const float> values);

/// Holds what a pass works in, from step to step. Everything is done row by row or by a product, so
/// with ProductKind::own a row's numbers do not depend on its neighbours.
class Forward {
 public:
  Forward(const Model& model, Products& products) : model_(model), products_(products) {}

  /// One pass over the rows of a step: tokens[r] stands at positions[r] of its sequence.
  /// attend(layer, q, k, v, out) has q, out [rows][num_qo_heads][head_dim] and k, v
  /// [rows][num_kv_heads][head_dim], q and k rotated; of a rank's part of a model its own heads.
  /// Returns the logits [logit_rows.size()][vocab_size] of the rows that are asked for, on ranks
  /// other than 0 zeros; good until the next call.
  template <class Attend>
  std::span<const float> run(std::span<const int> tokens, std::span<const int> positions,
                             std::span<const int> logit_rows, Attend&& attend) {
    begin(tokens, positions);
    for (std::size_t l = 0; l < model_.layers.size(); ++l) {
      const Layer& layer = model_.layers[l];
      make_qkv(layer, model_.config.is_local(static_cast<int>(l)));
      attend(static_cast<int>(l), std::span<const float>(q_), std::span<const float>(k_),
             std::span<const float>(v_), std::span<float>(attended_));
      add_attention(layer);
      add_ffn(layer);
    }
    return logits_of(logit_rows);
  }

 private:
  void begin(std::span<const int> tokens, std::span<const int> positions);
  void embed(std::size_t token, std::span<float> x) const;
  void make_qkv(const Layer& layer, bool is_local);
  void add_delta(std::size_t row, std::span<const float> post_norm);
  void add_attention(const Layer& layer);
  void add_ffn(const Layer& layer);
  std::span<const float> logits_of(std::span<const int> logit_rows);
  std::span<const float> gathered_logits(std::size_t rows, std::size_t part);
  /// Calls f(row) for each row, many rows on all threads.
  template <class F>
  void for_rows(std::size_t rows, const F& f);

  const Model& model_;
  Products& products_;
  std::size_t rows_ = 0;
  std::vector<float> x_;      // [rows][dim]: the residual stream
  std::vector<float> input_;  // [row_room][padded(dim)]: of a product
  struct Angles {             // [rows][head_dim / 2]
    std::vector<float> cosines, sines;
    void resize(std::size_t rows, std::size_t pairs);
    void set(std::size_t row, int position, std::span<const float> frequencies);
  };
  Angles angles_, local_angles_;
  std::vector<float> qkv_, q_, k_, v_, attended_;
  std::vector<float> heads_;    // [row_room][padded(num_qo_heads * head_dim)]: attended_
  std::vector<float> delta_;    // [row_room][dim]: what is added to x
  std::vector<float> gate_up_;  // [row_room][2 * hidden_dim]
  std::vector<float> hidden_;   // [row_room][padded(hidden_dim)]
  std::vector<float> logits_;   // [row_room][outputs of the classifier]
  std::vector<float> gathered_, whole_logits_;  // of all ranks
};

}  // namespace serve
