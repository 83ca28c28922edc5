// ggml's operation FLASH_ATTN_EXT by our kernels: reads a node, finds the plan of its mask, and
// runs attention over K and V where they lie.
#pragma once

#include <ggml.h>

#include <chunkattn/runtime/any_attention.hpp>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <tuple>
#include <vector>

#include "mask_forest.hpp"
#include "padded_heads.hpp"
#include "workers.hpp"

namespace plugin {

/// Why a FLASH_ATTN_EXT is left to ggml's own code, in some words; null if it is taken.
[[nodiscard]] const char* reason_to_decline(const ggml_tensor& node) noexcept;

/// What a backend computes with. Used by one thread at a time.
class AttentionOp {
 public:
  /// Threads, the caller's included.
  void set_threads(int count) { workers_.set_concurrency(count); }

  /// Before nodes of another evaluation of a graph, whose masks may have other values where those
  /// of the last one were.
  void forget_masks() noexcept { num_known_ = 0; }

  /// Computes a node that is taken, whose tensors are in host memory.
  /// \throws std::bad_alloc without memory
  void run(const ggml_tensor& node);

  /// What it has done so far.
  struct Totals {
    std::int64_t calls = 0;   ///< nodes computed
    std::int64_t plans = 0;   ///< masks that became plans
    std::int64_t tables = 0;  ///< of them, those that are no forest
    double plan_s = 0;        ///< for plans
    double attention_s = 0;   ///< for everything else
  };
  [[nodiscard]] const Totals& totals() const noexcept { return totals_; }

 private:
  struct Known {  // a model may have several masks, for layers of several kinds
    const ggml_tensor* mask = nullptr;
    MaskView view;
    MaskForest forest;
  };

  const MaskForest& forest_of(const ggml_tensor& node);
  const float* queries_of(const ggml_tensor& q, int head_dim);
  chunkattn::AnyVariant variant_of(const ggml_tensor& node, const MaskForest& forest);
  chunkattn::AnyAttention& attention_for(chunkattn::HeadSize size, float scale);

  Workers workers_;
  std::map<std::tuple<int, int, float>, std::unique_ptr<chunkattn::AnyAttention>> attentions_;
  std::vector<Known> known_;  // the first num_known_ are of this evaluation
  std::size_t num_known_ = 0;
  std::vector<float> queries_;  // where they do not lie as kernels want them
  PaddedHeads padded_k_, padded_v_;
  std::vector<float> padded_out_;
  std::vector<float> slopes_, sinks_;
  Totals totals_;
};

}  // namespace plugin
