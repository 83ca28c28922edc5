// The one file of the engine that compiles kernels: every (head_dim, K/V type) it offers, and no
// more. To compile them in parallel, put each explicit instantiation into a file of its own.
#include "dispatch.hpp"

#include <chunkattn/chunkattn.hpp>
#include <utility>

#include "engine.hpp"

template class chunkattn::ChunkAttention<chunkattn::Cpu, 64, engine::Threads>;
template class chunkattn::ChunkAttention<chunkattn::Cpu, 128, engine::Threads>;

namespace engine {
namespace {

template <int HeadDim, class T>
class Attention final : public AnyAttention {
 public:
  explicit Attention(Threads& threads) : attention_(threads) {}

  void write(const LayerPointers& layer, const chunkattn::LiveView& plan, std::span<const float> k,
             std::span<const float> v) override {
    attention_.write(view(layer), plan, k, v);
  }
  void run(const LayerPointers& layer, const chunkattn::LiveView& plan, std::span<const float> q,
           std::span<float> out) override {
    attention_.run(view(layer), plan, q, out);
  }

 private:
  static chunkattn::KvView<T> view(const LayerPointers& layer) {
    return chunkattn::make_kv_view(static_cast<T*>(layer.k), static_cast<T*>(layer.v),
                                   {.num_slots = layer.num_slots,
                                    .num_kv_heads = layer.num_kv_heads,
                                    .chunk_size = layer.chunk_size,
                                    .head_dim = HeadDim});
  }
  chunkattn::ChunkAttention<chunkattn::Cpu, HeadDim, Threads> attention_;
};

template <int HeadDim>
std::unique_ptr<AnyAttention> make_for(KvType type, Threads& threads) {
  switch (type) {
    case KvType::fp32:
      return std::make_unique<Attention<HeadDim, float>>(threads);
    case KvType::fp16:
      return std::make_unique<Attention<HeadDim, chunkattn::half>>(threads);
    case KvType::bf16:
      return std::make_unique<Attention<HeadDim, chunkattn::bfloat16>>(threads);
  }
  return nullptr;
}

}  // namespace

std::unique_ptr<AnyAttention> make_attention(int head_dim, KvType type, Threads& threads) {
  switch (head_dim) {
    case 64:
      return make_for<64>(type, threads);
    case 128:
      return make_for<128>(type, threads);
    default:
      throw chunkattn::InvalidArgument("head_dim = " + std::to_string(head_dim) +
                                       ": expected 64 or 128, the sizes this engine compiles");
  }
}

}  // namespace engine
