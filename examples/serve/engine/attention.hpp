// ChunkAttention for a model whose head size and K/V element type are known at run time only.
#pragma once

#include <chunkattn/cache/windowed_layers.hpp>
#include <chunkattn/chunkattn.hpp>
#include <chunkattn/runtime/make_attention.hpp>
#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <variant>
#include <vector>

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
  /// \param view  the tree's; of a layer whose K/V a group has, the group's
  virtual void run(int layer, const chunkattn::LiveView& view, std::span<const float> q,
                   std::span<const float> k, std::span<const float> v, std::span<float> out) = 0;
  /// Bytes of K and V that a chunk of the tree takes, all of its layers together.
  [[nodiscard]] virtual std::size_t bytes_per_chunk() const = 0;
};

/// The caches that K and V may be kept in.
using AnyCache = std::variant<chunkattn::KvCache<chunkattn::Cpu, float>*,
                              chunkattn::KvCache<chunkattn::Cpu, chunkattn::half>*,
                              chunkattn::KvCache<chunkattn::Cpu, chunkattn::bfloat16>*>;

/// The same with K/V in host memory, for chunkattn::swap_out() and resume().
class HostAttention : public Attention {
 public:
  /// Where K and V of the tree's chunks are; null pointers if a group has all layers.
  [[nodiscard]] virtual AnyCache cache() = 0;
  /// Where those of the group's are; null pointers if there is none.
  [[nodiscard]] virtual AnyCache window_cache() = 0;
  /// Bytes of K and V that a chunk of the group takes; 0: there is none.
  [[nodiscard]] virtual std::size_t bytes_per_window_chunk() const = 0;
};

/// \tparam windows  of models of which some layers have a window: others get one that hides nothing
template <int HeadDim, class T, bool windows>
class AttentionOf final : public HostAttention {
  using Cache = chunkattn::KvCache<chunkattn::Cpu, T>;

 public:
  /// \param group  has K/V of the layers with a window; null: the tree has that of all
  template <class Tree>
  AttentionOf(const Tree& tree, const chunkattn::WindowedLayers<Tree>* group, const Config& config,
              chunkattn::ThreadPool& executor, const chunkattn::CpuOptions& options)
      : config_(config), attention_(executor, scaled(options, config)) {
    const int num_grouped = group != nullptr ? config.num_local() : 0;
    if (num_grouped < config.num_layers)
      cache_.emplace(tree, cache_options(config.num_layers - num_grouped));
    if (num_grouped > 0) window_cache_.emplace(*group, cache_options(num_grouped));
    int grouped = 0, others = 0;
    for (int layer = 0; layer < config.num_layers; ++layer)
      index_.push_back(num_grouped > 0 && config.is_local(layer) ? grouped++ : others++);
  }

  void run(int layer, const chunkattn::LiveView& view, std::span<const float> q,
           std::span<const float> k, std::span<const float> v, std::span<float> out) override {
    const bool is_local = config_.is_local(layer);
    Cache& cache = is_local && window_cache_ ? *window_cache_ : *cache_;
    const auto kv = cache.layer(index_[to_size(layer)]);
    attention_.write(kv, view, k, v);
    if constexpr (windows) {
      const chunkattn::SlidingWindow window{is_local ? config_.window : all_keys};
      attention_.run(kv, view, window, q, out);
    } else {
      attention_.run(kv, view, q, out);
    }
  }
  [[nodiscard]] std::size_t bytes_per_chunk() const override {
    return cache_ ? cache_->bytes_per_chunk() : 0;
  }
  [[nodiscard]] std::size_t bytes_per_window_chunk() const override {
    return window_cache_ ? window_cache_->bytes_per_chunk() : 0;
  }
  [[nodiscard]] AnyCache cache() override { return cache_ ? &*cache_ : nullptr; }
  [[nodiscard]] AnyCache window_cache() override {
    return window_cache_ ? &*window_cache_ : nullptr;
  }

 private:
  static constexpr std::int32_t all_keys = 1 << 30;

  static chunkattn::CpuOptions scaled(chunkattn::CpuOptions options, const Config& config) {
    options.sm_scale = config.sm_scale;
    return options;
  }
  [[nodiscard]] chunkattn::KvCacheOptions cache_options(int num_layers) const {
    return {.num_layers = num_layers, .num_kv_heads = config_.num_kv_heads, .head_dim = HeadDim};
  }

  const Config config_;
  std::optional<Cache> cache_, window_cache_;  // of the tree's chunks, and of the group's
  std::vector<int> index_;                     // of each layer, in its cache
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
std::unique_ptr<HostAttention> make_attention_of(const Tree& tree,
                                                 const chunkattn::WindowedLayers<Tree>* group,
                                                 const Config& config,
                                                 chunkattn::ThreadPool& executor,
                                                 const chunkattn::CpuOptions& options) {
  const int head_dim = config.head_dim();
  const auto make = [&]<int HeadDim, bool windows>() {
    return std::make_unique<AttentionOf<HeadDim, T, windows>>(tree, group, config, executor,
                                                              options);
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
std::unique_ptr<HostAttention> make_attention(
    KvType kv, const Tree& tree, const Config& config, chunkattn::ThreadPool& executor,
    const chunkattn::CpuOptions& options, const chunkattn::WindowedLayers<Tree>* group = nullptr) {
  switch (kv) {
    case KvType::fp16:
      return make_attention_of<chunkattn::half>(tree, group, config, executor, options);
    case KvType::bf16:
      return make_attention_of<chunkattn::bfloat16>(tree, group, config, executor, options);
    default:
      return make_attention_of<float>(tree, group, config, executor, options);
  }
}

}  // namespace serve
