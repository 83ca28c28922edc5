// ChunkAttention for a model whose head size and K/V element type are known at run time only.
#pragma once

#include <chunkattn/chunkattn.hpp>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>

#include "../support/cuda_attention.hpp"
#include "checkpoint.hpp"

namespace llama {

/// The attention of all layers over one K/V cache.
class Attention {
 public:
  virtual ~Attention() = default;
  /// One layer of one step: stores k and v [rows][num_kv_heads][head_dim], k rotated, and attends.
  /// q, out: [rows][num_qo_heads][head_dim]
  virtual void run(int layer, const chunkattn::LiveView& plan, std::span<const float> q,
                   std::span<const float> k, std::span<const float> v, std::span<float> out) = 0;
};

template <int HeadDim, class T>
class AttentionOf final : public Attention {
 public:
  template <class Tree>
  AttentionOf(const Tree& tree, const Config& config, chunkattn::ThreadPool& executor,
              chunkattn::AttentionOptions options)
      : cache_(tree, {.num_layers = config.num_layers,
                      .num_kv_heads = config.num_kv_heads,
                      .head_dim = HeadDim}),
        attention_(executor, options) {}

  void run(int layer, const chunkattn::LiveView& plan, std::span<const float> q,
           std::span<const float> k, std::span<const float> v, std::span<float> out) override {
    attention_.write(cache_.layer(layer), plan, k, v);
    attention_.run(cache_.layer(layer), plan, q, out);
  }

 private:
  chunkattn::KvCache<chunkattn::Cpu, T> cache_;
  chunkattn::ChunkAttention<chunkattn::Cpu, HeadDim> attention_;
};

/// The same on a GPU; the tree says how much memory it takes.
template <class Tree>
class AttentionOnGpu final : public Attention {
 public:
  /// \param max_rows  query tokens of one step
  AttentionOnGpu(const Tree& tree, const Config& config, int max_rows)
      : tree_(tree),
        gpu_(examples::make_cuda_attention({.num_layers = config.num_layers,
                                            .num_qo_heads = config.num_qo_heads,
                                            .num_kv_heads = config.num_kv_heads,
                                            .head_dim = config.head_dim(),
                                            .chunk_size = Tree::chunk_size,
                                            .max_rows = max_rows})) {}

  void run(int layer, const chunkattn::LiveView& plan, std::span<const float> q,
           std::span<const float> k, std::span<const float> v, std::span<float> out) override {
    gpu_->write(layer, plan, static_cast<std::size_t>(tree_.num_slots()), k, v);
    gpu_->run(layer, plan, q, out);
  }

 private:
  const Tree& tree_;
  std::unique_ptr<examples::CudaAttention> gpu_;
};

// The kernels are compiled in attention_fp32.cpp and its neighbours, side by side.
#define LLAMA_FOR_HEAD_DIMS(what, T) \
  what class AttentionOf<8, T>;      \
  what class AttentionOf<48, T>;     \
  what class AttentionOf<64, T>;     \
  what class AttentionOf<128, T>;
LLAMA_FOR_HEAD_DIMS(extern template, float)
LLAMA_FOR_HEAD_DIMS(extern template, chunkattn::half)
LLAMA_FOR_HEAD_DIMS(extern template, chunkattn::bfloat16)

template <class T, class Tree>
std::unique_ptr<Attention> make_attention_of(const Tree& tree, const Config& config,
                                             chunkattn::ThreadPool& executor,
                                             chunkattn::AttentionOptions options) {
  switch (config.head_dim()) {  // the sizes of the published tinyllamas, and of Llama 2
    case 8:
      return std::make_unique<AttentionOf<8, T>>(tree, config, executor, options);
    case 48:
      return std::make_unique<AttentionOf<48, T>>(tree, config, executor, options);
    case 64:
      return std::make_unique<AttentionOf<64, T>>(tree, config, executor, options);
    case 128:
      return std::make_unique<AttentionOf<128, T>>(tree, config, executor, options);
    default:
      throw std::invalid_argument("head_dim = " + std::to_string(config.head_dim()) +
                                  ": this example is built for 8, 48, 64 and 128; the library "
                                  "takes any multiple of 8 up to 256, add a line here");
  }
}

/// \param kv  "fp32", "fp16" or "bf16"
template <class Tree>
std::unique_ptr<Attention> make_attention(const std::string& kv, const Tree& tree,
                                          const Config& config, chunkattn::ThreadPool& executor,
                                          chunkattn::AttentionOptions options) {
  if (kv == "fp16") return make_attention_of<chunkattn::half>(tree, config, executor, options);
  if (kv == "bf16") return make_attention_of<chunkattn::bfloat16>(tree, config, executor, options);
  return make_attention_of<float>(tree, config, executor, options);
}

}  // namespace llama
