// The time of a step on the processor that `replay_bench schedule` simulates. docs/scheduling.md
// derives the numbers; they are frozen, so that orders stay comparable over commits.
#pragma once

#include <cstddef>

namespace replay {

/// A model of 8 billion parameters (32 layers, 8 KV heads of 128, bf16) on one accelerator that
/// reaches 1 PFLOP/s and 6.4 TB/s.
struct CostModel {
  double step = 2.5e-3;           ///< seconds: 16 GB of weights are read
  double row = 16e-6;             ///< per token that goes through the model: 16 GFLOP
  double kv_token = 2e-8;         ///< per distinct K/V token that decoding rows read: 131,072 bytes
  std::size_t step_tokens = 512;  ///< of prompts, per step
  std::size_t max_sequences = 64;   ///< that are live at once
  std::size_t kv_tokens = 1200000;  ///< that the K/V memory has room for

  /// Where one token stands for `scale` of them, and one step for as many steps.
  [[nodiscard]] CostModel scaled(double scale) const {
    CostModel model = *this;
    model.step *= scale;
    model.row *= scale;
    model.kv_token *= scale * scale;
    model.kv_tokens = static_cast<std::size_t>(double(kv_tokens) / scale);
    return model;
  }
  /// \param rows      tokens of prompts and of decoding sequences in the step
  /// \param distinct  K/V tokens that its decoding rows read, shared ones counted once
  [[nodiscard]] double seconds(std::size_t rows, std::size_t distinct) const {
    return step + row * double(rows) + kv_token * double(distinct);
  }
};

}  // namespace replay
