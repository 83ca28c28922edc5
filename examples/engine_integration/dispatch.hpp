// Attention whose head_dim and K/V type are known only when the model has been loaded.
#pragma once

#include <chunkattn/plan/view.hpp>
#include <memory>
#include <span>

namespace engine {

class Threads;

enum class KvType { fp32, fp16, bf16 };

/// K and V of one layer without their type: [slot][kv_head][token][head_dim], densely packed.
struct LayerPointers {
  void* k = nullptr;
  void* v = nullptr;
  int num_slots = 0, num_kv_heads = 0, chunk_size = 0;
};

/// One attention object for all layers. The engine's other files see this class only, and compile
/// none of the kernels. Every StepView is a LiveView, whatever the tree.
class AnyAttention {
 public:
  virtual ~AnyAttention() = default;
  /// k, v: [num_rows][num_kv_heads][head_dim].
  virtual void write(const LayerPointers& layer, const chunkattn::LiveView& plan,
                     std::span<const float> k, std::span<const float> v) = 0;
  /// q, out: [num_rows][num_qo_heads][head_dim].
  virtual void run(const LayerPointers& layer, const chunkattn::LiveView& plan,
                   std::span<const float> q, std::span<float> out) = 0;
};

/// Throws chunkattn::InvalidArgument for a head_dim that was not compiled in.
std::unique_ptr<AnyAttention> make_attention(int head_dim, KvType type, Threads& threads);

}  // namespace engine
