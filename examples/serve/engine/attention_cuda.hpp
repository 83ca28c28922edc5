// Attention on a GPU, everything else on the host.
#pragma once

#include <chunkattn/chunkattn.hpp>
#include <memory>
#include <span>

#include "../../support/cuda_attention.hpp"
#include "attention.hpp"

namespace serve {

template <class Tree>
class AttentionOnGpu final : public Attention {
 public:
  /// \param max_rows  tokens of one step
  /// \throws chunkattn::DeviceError without a GPU
  AttentionOnGpu(const Tree& tree, const Config& config, std::size_t max_rows)
      : tree_(tree),
        gpu_(examples::make_cuda_attention({.num_layers = config.num_layers,
                                            .num_qo_heads = config.num_qo_heads,
                                            .num_kv_heads = config.num_kv_heads,
                                            .head_dim = config.head_dim(),
                                            .chunk_size = Tree::chunk_size,
                                            .max_rows = static_cast<int>(max_rows)})),
        bytes_per_chunk_(4 * static_cast<std::size_t>(config.num_layers * config.kv_dim()) *
                         Tree::chunk_size) {}

  void run(int layer, const chunkattn::LiveView& view, std::span<const float> q,
           std::span<const float> k, std::span<const float> v, std::span<float> out) override {
    gpu_->write(layer, view, tree_.num_chunks(), k, v);
    gpu_->run(layer, view, q, out);
  }
  [[nodiscard]] std::size_t bytes_per_chunk() const override { return bytes_per_chunk_; }

 private:
  const Tree& tree_;
  std::unique_ptr<examples::CudaAttention> gpu_;
  std::size_t bytes_per_chunk_;  // K and V in fp16
};

}  // namespace serve
