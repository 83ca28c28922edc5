// AnyAttention: ChunkAttention behind virtual functions. Whoever includes this compiles no kernel
// and sees no backend; one unit of the program makes the objects (make_attention()), for the head
// sizes, types and variants that it lists.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "detail/base/check.hpp"
#include "detail/base/config.hpp"
#include "detail/base/element_type.hpp"
#include "detail/front/any_kv.hpp"
#include "detail/front/any_variant.hpp"
#include "detail/front/elements.hpp"
#include "error.hpp"
#include "kv_cache.hpp"
#include "plan_view.hpp"

CHUNKATTN_NAMESPACE_BEGIN

/// What one call of AnyAttention::run() may be told besides its data.
struct RunOptions {
  /// [num_rows][num_qo_heads], gets the natural logarithm of the softmax denominators; or empty.
  std::span<float> lse = {};
  AnyVariant variant = {};  ///< one of AnyAttention::variants()
  void* stream = nullptr;   ///< CUDA: the cudaStream_t; on the CPU null
};

/// Attention over a prefix tree's plan, for one size of heads, on some device. One object serves
/// every layer and is used by one thread at a time. Calls do what those of the ChunkAttention
/// behind them do, to the bit. All throw InvalidArgument before anything is touched; where a type
/// or a variant was not compiled in, the message lists those that were.
class AnyAttention {
 public:
  AnyAttention() = default;
  AnyAttention(const AnyAttention&) = delete;
  AnyAttention& operator=(const AnyAttention&) = delete;
  virtual ~AnyAttention() = default;

  /// "cpu" or "cuda": where pointers point.
  [[nodiscard]] virtual const char* device() const noexcept = 0;
  /// Whose vectors compute, as instruction_set() names them; "cuda" on a GPU.
  [[nodiscard]] virtual const char* instruction_set() const noexcept = 0;
  /// Elements per head of Q and K.
  [[nodiscard]] virtual int head_dim() const noexcept = 0;
  /// Elements per head of V and of the output.
  [[nodiscard]] virtual int value_dim() const noexcept = 0;
  /// What K and V may be stored as.
  [[nodiscard]] virtual std::span<const ElementType> kv_types() const noexcept = 0;
  /// What q and out may be; on CUDA also: those of kv_types(), each with K/V of the same type.
  [[nodiscard]] virtual std::span<const ElementType> qo_types() const noexcept = 0;
  /// The names of the variants that run() knows.
  [[nodiscard]] virtual std::span<const std::string_view> variants() const noexcept = 0;

  /// K/V memory on the device that follows `tree`, wherever it is moved.
  /// \param type     one of kv_types()
  /// \param options  head_dim and value_dim may be left 0 for those of this object
  template <SlotOwner Tree>
  [[nodiscard]] std::unique_ptr<AnyKvCache> make_cache(const Tree& tree, ElementType type,
                                                       KvCacheOptions options) const {
    return make_cache(tree.slot_source(), Tree::chunk_size, type, options);
  }
  /// K/V memory that follows a tree of which no more is known here than PrefixTree::slot_source()
  /// and its chunk size.
  [[nodiscard]] std::unique_ptr<AnyKvCache> make_cache(SlotSource source, int chunk_size,
                                                       ElementType type,
                                                       KvCacheOptions options) const {
    if (options.head_dim == 0) {
      options.head_dim = head_dim();
      if (options.value_dim == 0 && value_dim() != head_dim()) options.value_dim = value_dim();
    }
    if (options.head_dim != head_dim()) [[unlikely]]
      detail::fail_argument("options.head_dim", options.head_dim,
                            {"that of the attention, ", head_dim(), ", or 0 for it"});
    if (options.dim_of_v() != value_dim()) [[unlikely]]
      detail::fail_argument("options.value_dim", options.dim_of_v(),
                            {"that of the attention, ", value_dim(), ", or 0 for it"});
    return cache_for(std::move(source), chunk_size, type, options);
  }

  /// CUDA: brings the device's copy of `plan` up to date. write() and run() do so themselves; call
  /// it once per step before a captured graph is launched. On the CPU there is nothing to do.
  virtual void prepare(const LiveView& plan, void* stream = nullptr) = 0;
  /// CUDA: the same ahead of the capture of run() with `variant` over such a layer.
  virtual void prepare(const AnyKvView& layer, const LiveView& plan, const AnyVariant& variant,
                       void* stream = nullptr) = 0;

  /// Performs the plan's row copies in this layer, then stores K and V of the plan's query tokens;
  /// doing it twice is harmless.
  ///
  /// \param k, v    [num_rows][num_kv_heads][head_dim] (v: value_dim), the caller's row order, both
  ///                of one type of qo_types(); v = {} for layers whose V is in K
  /// \param stream  CUDA: the cudaStream_t; on the CPU null
  virtual void write(const AnyKvView& layer, const LiveView& plan, const ConstElements& k,
                     const ConstElements& v, void* stream = nullptr) = 0;

  /// Attention of the plan's rows over their whole paths, causal. The number of query heads is
  /// q.size / (num_rows * head_dim), a multiple of the layer's num_kv_heads.
  ///
  /// \param q    [num_rows][num_qo_heads][head_dim], the caller's row order, of a type of
  /// qo_types()
  /// \param out  [num_rows][num_qo_heads][value_dim], of the type of q; every element is written
  virtual void run(const AnyKvView& layer, const LiveView& plan, const ConstElements& q,
                   const Elements& out, const RunOptions& options = {}) = 0;

 private:
  [[nodiscard]] virtual std::unique_ptr<AnyKvCache> cache_for(
      SlotSource source, int chunk_size, ElementType type, const KvCacheOptions& options) const = 0;
};

namespace detail {

/// "a, b, c".
CHUNKATTN_COLD inline std::string listed(std::span<const std::string_view> names) {
  std::string text;
  for (const std::string_view name : names) text += joined({text.empty() ? "" : ", ", name});
  return text;
}
CHUNKATTN_COLD inline std::string listed(std::span<const ElementType> types) {
  std::string text;
  for (const ElementType type : types) text += joined({text.empty() ? "" : ", ", name_of(type)});
  return text;
}

}  // namespace detail

/// What an attention object is and was built with, in one line: for logs.
[[nodiscard]] inline std::string describe(const AnyAttention& attention) {
  return detail::joined({attention.device(), " (", attention.instruction_set(), "), head_dim ",
                         attention.head_dim(), ", value_dim ", attention.value_dim(), ", K/V ",
                         detail::listed(attention.kv_types()), ", q and out ",
                         detail::listed(attention.qo_types()), ", variants ",
                         detail::listed(attention.variants())});
}

CHUNKATTN_NAMESPACE_END
