// ChunkAttention for a model whose head size and K/V element type are known at run time only.
#pragma once

#include <chunkattn/chunkattn.hpp>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>

#include "../model/model.hpp"

namespace serve {

/// What K and V are kept as.
enum class KvType { fp32, fp16, bf16 };

/// The attention of all layers over one K/V cache.
class Attention {
 public:
  virtual ~Attention() = default;
  /// One layer of one step: stores k and v [rows][num_kv_heads][head_dim], k rotated, and attends.
  /// q, out: [rows][num_qo_heads][head_dim]
  virtual void run(int layer, const chunkattn::LiveView& view, std::span<const float> q,
                   std::span<const float> k, std::span<const float> v, std::span<float> out) = 0;
  /// Bytes of K and V that a chunk takes, all layers together.
  [[nodiscard]] virtual std::size_t bytes_per_chunk() const = 0;
};

template <int HeadDim, class T>
class AttentionOf final : public Attention {
 public:
  template <class Tree>
  AttentionOf(const Tree& tree, const Config& config, chunkattn::ThreadPool& executor,
              chunkattn::Reduce reduce)
      : cache_(tree, {.num_layers = config.num_layers,
                      .num_kv_heads = config.num_kv_heads,
                      .head_dim = HeadDim}),
        attention_(executor, {.reduce = reduce}) {}

  void run(int layer, const chunkattn::LiveView& view, std::span<const float> q,
           std::span<const float> k, std::span<const float> v, std::span<float> out) override {
    attention_.write(cache_.layer(layer), view, k, v);
    attention_.run(cache_.layer(layer), view, q, out);
  }
  [[nodiscard]] std::size_t bytes_per_chunk() const override { return cache_.bytes_per_slot(); }

 private:
  chunkattn::KvCache<chunkattn::Cpu, T> cache_;
  chunkattn::ChunkAttention<chunkattn::Cpu, HeadDim> attention_;
};

// The kernels are compiled in attention_fp32.cpp and its neighbours, side by side.
#define SERVE_FOR_HEAD_DIMS(what, T) \
  what class AttentionOf<8, T>;      \
  what class AttentionOf<48, T>;     \
  what class AttentionOf<64, T>;     \
  what class AttentionOf<128, T>;
SERVE_FOR_HEAD_DIMS(extern template, float)
SERVE_FOR_HEAD_DIMS(extern template, chunkattn::half)
SERVE_FOR_HEAD_DIMS(extern template, chunkattn::bfloat16)

template <class T, class Tree>
std::unique_ptr<Attention> make_attention_of(const Tree& tree, const Config& config,
                                             chunkattn::ThreadPool& executor,
                                             chunkattn::Reduce reduce) {
  switch (config.head_dim()) {  // of llama2.c's models, of SmolLM2 and of Llama
    case 8:
      return std::make_unique<AttentionOf<8, T>>(tree, config, executor, reduce);
    case 48:
      return std::make_unique<AttentionOf<48, T>>(tree, config, executor, reduce);
    case 64:
      return std::make_unique<AttentionOf<64, T>>(tree, config, executor, reduce);
    case 128:
      return std::make_unique<AttentionOf<128, T>>(tree, config, executor, reduce);
    default:
      throw std::invalid_argument("head_dim = " + std::to_string(config.head_dim()) +
                                  ": expected 8, 48, 64 or 128, which this program is built for; "
                                  "the library takes any multiple of 8 up to 256");
  }
}

template <class Tree>
std::unique_ptr<Attention> make_attention(KvType kv, const Tree& tree, const Config& config,
                                          chunkattn::ThreadPool& executor,
                                          chunkattn::Reduce reduce) {
  switch (kv) {
    case KvType::fp16:
      return make_attention_of<chunkattn::half>(tree, config, executor, reduce);
    case KvType::bf16:
      return make_attention_of<chunkattn::bfloat16>(tree, config, executor, reduce);
    default:
      return make_attention_of<float>(tree, config, executor, reduce);
  }
}

}  // namespace serve
