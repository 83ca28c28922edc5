// ChunkAttention for a model whose head size and K/V element type are known at run time only.
#pragma once

#include <chunkattn/chunkattn.hpp>
#include <cstddef>
#include <cstring>
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

/// The same with K/V in host memory, of which parts can be copied out and back.
class HostAttention : public Attention {
 public:
  /// Bytes of K and V of a token, all layers together.
  [[nodiscard]] virtual std::size_t bytes_per_token() const = 0;
  /// Copies the K/V of pieces of a path to memory that holds the path positions `held`.
  /// \param to  [num_layers][K, V][num_kv_heads][held.length][head_dim]
  /// \pre `held` has all positions of the pieces
  virtual void copy_out(std::span<const chunkattn::Piece> pieces, chunkattn::TokenRange held,
                        std::span<std::byte> to) = 0;
  /// The other way; \pre no step reads the places meanwhile.
  virtual void copy_in(std::span<const chunkattn::Piece> pieces, chunkattn::TokenRange held,
                       std::span<const std::byte> from) = 0;
};

template <int HeadDim, class T>
class AttentionOf final : public HostAttention {
 public:
  template <class Tree>
  AttentionOf(const Tree& tree, const Config& config, chunkattn::ThreadPool& executor,
              const chunkattn::CpuOptions& options)
      : cache_(tree, {.num_layers = config.num_layers,
                      .num_kv_heads = config.num_kv_heads,
                      .head_dim = HeadDim}),
        attention_(executor, options) {}

  void run(int layer, const chunkattn::LiveView& view, std::span<const float> q,
           std::span<const float> k, std::span<const float> v, std::span<float> out) override {
    attention_.write(cache_.layer(layer), view, k, v);
    attention_.run(cache_.layer(layer), view, q, out);
  }
  [[nodiscard]] std::size_t bytes_per_chunk() const override { return cache_.bytes_per_slot(); }
  [[nodiscard]] std::size_t bytes_per_token() const override {
    return chunkattn::kv_bytes(cache_, 1);
  }
  void copy_out(std::span<const chunkattn::Piece> pieces, chunkattn::TokenRange held,
                std::span<std::byte> to) override {
    for_each_run(pieces, held, [&](const T* rows, std::size_t at, std::size_t bytes) {
      std::memcpy(to.data() + at, rows, bytes);
    });
  }
  void copy_in(std::span<const chunkattn::Piece> pieces, chunkattn::TokenRange held,
               std::span<const std::byte> from) override {
    for_each_run(pieces, held, [&](T* rows, std::size_t at, std::size_t bytes) {
      std::memcpy(rows, from.data() + at, bytes);
    });
  }

 private:
  /// Calls f(rows, at, bytes) for each run of K or V rows that lie side by side; `at`: their place
  /// among those of the positions `held`.
  template <class F>
  void for_each_run(std::span<const chunkattn::Piece> pieces, chunkattn::TokenRange held,
                    const F& f) {
    constexpr std::size_t row_bytes = HeadDim * sizeof(T);
    const auto length = static_cast<std::size_t>(held.length);
    std::size_t run = 0;  // [num_layers][K, V][num_kv_heads]
    for (int l = 0; l < cache_.options().num_layers; ++l) {
      const chunkattn::KvView<T> view = cache_.layer(l);
      for (const bool is_v : {false, true})
        for (int head = 0; head < view.num_kv_heads; ++head, ++run)
          for (const chunkattn::Piece& piece : pieces)
            f(is_v ? view.v_row(piece.slot, head, piece.begin)
                   : view.k_row(piece.slot, head, piece.begin),
              (run * length + static_cast<std::size_t>(piece.position - held.begin)) * row_bytes,
              static_cast<std::size_t>(piece.length) * row_bytes);
    }
  }

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
std::unique_ptr<HostAttention> make_attention_of(const Tree& tree, const Config& config,
                                                 chunkattn::ThreadPool& executor,
                                                 const chunkattn::CpuOptions& options) {
  switch (config.head_dim()) {  // of llama2.c's models, of SmolLM2 and of Llama
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
                                  ": expected 8, 48, 64 or 128, which this program is built for; "
                                  "the library takes any multiple of 8 up to 256");
  }
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
