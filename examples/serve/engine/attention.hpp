// ChunkAttention for a model whose head size and K/V element type are known at run time only.
#pragma once

#include <chunkattn/chunkattn.hpp>
#include <chunkattn/runtime/make_attention.hpp>
#include <cstddef>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <variant>

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

/// The caches that K and V may be kept in.
using AnyCache = std::variant<chunkattn::KvCache<chunkattn::Cpu, float>*,
                              chunkattn::KvCache<chunkattn::Cpu, chunkattn::half>*,
                              chunkattn::KvCache<chunkattn::Cpu, chunkattn::bfloat16>*>;

/// The same with K/V in host memory, for chunkattn::swap_out() and resume().
class HostAttention : public Attention {
 public:
  /// Where K and V are.
  [[nodiscard]] virtual AnyCache cache() = 0;
};

/// \tparam windows  of models of which some layers have a window: others get one that hides nothing
template <int HeadDim, class T, bool windows>
class AttentionOf final : public HostAttention {
 public:
  template <class Tree>
  AttentionOf(const Tree& tree, const Config& config, chunkattn::ThreadPool& executor,
              const chunkattn::CpuOptions& options)
      : config_(config),
        cache_(tree, {.num_layers = config.num_layers,
                      .num_kv_heads = config.num_kv_heads,
                      .head_dim = HeadDim}),
        attention_(executor, scaled(options, config)) {}

  void run(int layer, const chunkattn::LiveView& view, std::span<const float> q,
           std::span<const float> k, std::span<const float> v, std::span<float> out) override {
    attention_.write(cache_.layer(layer), view, k, v);
    if constexpr (windows) {
      const chunkattn::SlidingWindow window{config_.is_local(layer) ? config_.window : all_keys};
      attention_.run(cache_.layer(layer), view, window, q, out);
    } else {
      attention_.run(cache_.layer(layer), view, q, out);
    }
  }
  [[nodiscard]] std::size_t bytes_per_chunk() const override { return cache_.bytes_per_chunk(); }
  [[nodiscard]] AnyCache cache() override { return &cache_; }

 private:
  static constexpr std::int32_t all_keys = 1 << 30;

  static chunkattn::CpuOptions scaled(chunkattn::CpuOptions options, const Config& config) {
    options.sm_scale = config.sm_scale;
    return options;
  }

  const Config config_;
  chunkattn::KvCache<chunkattn::Cpu, T> cache_;
  chunkattn::ChunkAttention<chunkattn::Cpu, HeadDim> attention_;
};

// The kernels are compiled in attention_fp32.cpp and its neighbours, side by side: of llama2.c's
// models, of SmolLM2, of Llama; and of small models, Phi-3, Mistral, Gemma 3.
#define SERVE_FOR_HEAD_DIMS(what, T)    \
  what class AttentionOf<8, T, false>;  \
  what class AttentionOf<48, T, false>; \
  what class AttentionOf<64, T, false>; \
  what class AttentionOf<128, T, false>;
#define SERVE_FOR_HEAD_DIMS_WITH_WINDOWS(what, T) \
  what class AttentionOf<8, T, true>;             \
  what class AttentionOf<96, T, true>;            \
  what class AttentionOf<128, T, true>;           \
  what class AttentionOf<256, T, true>;
SERVE_FOR_HEAD_DIMS(extern template, float)
SERVE_FOR_HEAD_DIMS(extern template, chunkattn::half)
SERVE_FOR_HEAD_DIMS(extern template, chunkattn::bfloat16)
SERVE_FOR_HEAD_DIMS_WITH_WINDOWS(extern template, float)
SERVE_FOR_HEAD_DIMS_WITH_WINDOWS(extern template, chunkattn::half)
SERVE_FOR_HEAD_DIMS_WITH_WINDOWS(extern template, chunkattn::bfloat16)

template <class T, class Tree>
std::unique_ptr<HostAttention> make_attention_of(const Tree& tree, const Config& config,
                                                 chunkattn::ThreadPool& executor,
                                                 const chunkattn::CpuOptions& options) {
  const int head_dim = config.head_dim();
  const auto make = [&]<int HeadDim, bool windows>() {
    return std::make_unique<AttentionOf<HeadDim, T, windows>>(tree, config, executor, options);
  };
  if (head_dim == 96) return make.template operator()<96, true>();
  if (head_dim == 256) return make.template operator()<256, true>();
  if (config.window > 0) {
    if (head_dim == 8) return make.template operator()<8, true>();
    if (head_dim == 128) return make.template operator()<128, true>();
    throw std::invalid_argument("head_dim = " + std::to_string(head_dim) +
                                " with a window: expected 8, 96, 128 or 256, which this program is "
                                "built for");
  }
  if (head_dim == 8) return make.template operator()<8, false>();
  if (head_dim == 48) return make.template operator()<48, false>();
  if (head_dim == 64) return make.template operator()<64, false>();
  if (head_dim == 128) return make.template operator()<128, false>();
  throw std::invalid_argument("head_dim = " + std::to_string(head_dim) +
                              ": expected 8, 48, 64, 96, 128 or 256, which this program is built "
                              "for; the library takes any multiple of 8 up to 256");
}

template <class Tree>
std::unique_ptr<HostAttention> make_attention(KvType kv, const Tree& tree, const Config& config,
                                              chunkattn::ThreadPool& executor,
                                              const chunkattn::CpuOptions& options) {
  switch (kv) {
    case KvType::fp16:
      return make_attention_of<chunkattn::half>(tree, config, executor, options);
    case KvType::bf16:
      return make_attention_of<chunkattn::bfloat16>(tree, config, executor, options);
    default:
      return make_attention_of<float>(tree, config, executor, options);
  }
}

}  // namespace serve
