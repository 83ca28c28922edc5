// AnyAttention: ChunkAttention behind virtual functions. A source file that includes this compiles
// no kernel. One source file of the program makes the objects by make_attention(), for the head
// sizes, types and variants that it lists.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <memory>
#include <new>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>

#include "../detail/support/check.hpp"
#include "../detail/support/chunk_source.hpp"
#include "../detail/support/config.hpp"
#include "../element.hpp"
#include "../fwd.hpp"
#include "../head_rows.hpp"
#include "../kv_cache.hpp"
#include "../kv_view.hpp"
#include "../plan_view.hpp"
#include "../tree_options.hpp"
#include "../variants.hpp"
#include "detail/variant_name.hpp"

CHUNKATTN_NAMESPACE_BEGIN

namespace detail {
/// The element type of an array, const where it cannot be written.
template <class R>
using element_of = typename decltype(std::span(std::declval<R&>()))::element_type;
}  // namespace detail

/// An array that is read, of a type known at run time, or rows at distances of their own. It owns
/// nothing; host or device memory.
struct ConstElements {
  const void* data = nullptr;               ///< the first; null only where there are none
  ElementType type = ElementType::float32;  ///< of the elements
  std::size_t size = 0;                     ///< number of elements
  /// Where they lie, if there is a value: then what `data` and `size` say does not count.
  std::optional<HeadRows<const void>> rows{};

  ConstElements() = default;
  /// `count` elements from `first` on.
  ConstElements(const void* first, ElementType element, std::size_t count) noexcept
      : data(first), type(element), size(count) {}
  /// A std::vector, std::span, std::array or the like of float, half or bfloat16 (or CUDA's __half
  /// or __nv_bfloat16).
  template <class R>
    requires QoElement<detail::own_element<detail::element_of<const R>>>
  ConstElements(const R& range) noexcept
      : ConstElements(std::data(range),
                      element_type_of<detail::own_element<detail::element_of<const R>>>,
                      std::size(range)) {}
  /// Rows of elements of this type.
  ConstElements(ElementType element, const HeadRows<const void>& strided) noexcept
      : type(element), rows(strided) {}
  /// Rows of float, half or bfloat16. CPU alone.
  template <class X>
    requires QoElement<std::remove_const_t<X>>
  ConstElements(const HeadRows<X>& strided) noexcept
      : ConstElements(element_type_of<std::remove_const_t<X>>,
                      detail::rows_at<const void>(strided.data, strided)) {}
};

/// An array that is written, of a type known at run time, or rows at distances of their own. It
/// owns nothing; host or device memory.
struct Elements {
  void* data = nullptr;                     ///< the first
  ElementType type = ElementType::float32;  ///< of the elements
  std::size_t size = 0;                     ///< number of elements
  std::optional<HeadRows<void>> rows{};     ///< where they lie, as of ConstElements

  Elements() = default;
  /// `count` elements from `first` on.
  Elements(void* first, ElementType element, std::size_t count) noexcept
      : data(first), type(element), size(count) {}
  /// A std::vector, std::span, std::array or the like of float, half or bfloat16 (or CUDA's __half
  /// or __nv_bfloat16), not const.
  template <class R>
    requires(!std::is_const_v<detail::element_of<R>> &&
             QoElement<detail::own_element<detail::element_of<R>>>)
  Elements(R&& range) noexcept
      : Elements(std::data(range), element_type_of<detail::own_element<detail::element_of<R>>>,
                 std::size(range)) {}

  /// Rows of elements of this type.
  Elements(ElementType element, const HeadRows<void>& strided) noexcept
      : type(element), rows(strided) {}
  /// Rows of float, half or bfloat16. CPU alone.
  template <QoElement X>
  Elements(const HeadRows<X>& strided) noexcept
      : Elements(element_type_of<X>, detail::rows_at<void>(strided.data, strided)) {}

  /// These elements, to be read.
  operator ConstElements() const noexcept {
    if (!rows) return {data, type, size};
    return {type, detail::rows_at<const void>(rows->data, *rows)};
  }
};

/// A KvView of any element type. It owns nothing.
class AnyKvView {
 public:
  /// No memory: refused by every call.
  AnyKvView() = default;
  /// A view of the K and V of `view`.
  template <KvElement T>
  AnyKvView(const KvView<T>& view) noexcept : view_(view) {
    using Numbered =
        std::variant_alternative_t<static_cast<std::size_t>(element_type_of<T>), Views>;
    static_assert(std::is_same_v<Numbered, KvView<T>>, "type() is the index");
  }

  /// The element type of K and V.
  [[nodiscard]] ElementType type() const noexcept {
    return static_cast<ElementType>(view_.index());
  }
  /// The view, whose type must be that of T.
  /// \throws InvalidArgument if it is not
  template <KvElement T>
  [[nodiscard]] const KvView<T>& as() const {
    const KvView<T>* const view = std::get_if<KvView<T>>(&view_);
    if (view == nullptr) [[unlikely]]
      detail::fail_argument("layer.type()", name_of(type()), {element_name<T>()});
    return *view;
  }
  /// Calls f(const KvView<T>&) with T of its type, and returns what f returns.
  template <class F>
  decltype(auto) visit(F&& f) const {
    return std::visit(f, view_);
  }
  /// A view of the KV heads [first, first + count): the share of a tensor-parallel rank.
  /// \throws InvalidArgument for heads that this view does not have
  [[nodiscard]] AnyKvView heads(int first, int count) const {
    return visit([&](const auto& view) -> AnyKvView { return view.heads(first, count); });
  }

 private:
  using Views = std::variant<KvView<float>, KvView<half>, KvView<bfloat16>, KvView<std::int8_t>,
                             KvView<float8_e4m3>>;
  Views view_;
};

/// A view of an engine's own memory.
/// \param k, v  [num_chunks][num_kv_heads][chunk_size][head_dim] (v: value_dim) elements of `type`,
///              as for make_kv_view()
/// \param k_scale, v_scale  scales of 8-bit rows, [num_chunks][num_kv_heads][chunk_size], or fewer
///                          as `scales` says; null for other types
/// \throws InvalidArgument where memory is missing or sizes make no sense
[[nodiscard]] inline AnyKvView make_any_kv_view(ElementType type, void* k, void* v,
                                                const KvGeometry& geometry,
                                                float* k_scale = nullptr, float* v_scale = nullptr,
                                                KvScales scales = KvScales::per_row) {
  const auto view = [&]<class T>(T*) -> AnyKvView {
    if constexpr (has_row_scales<T>) {
      return make_kv_view(static_cast<T*>(k), static_cast<T*>(v), k_scale, v_scale, geometry,
                          scales);
    } else {
      detail::check_argument(k_scale == nullptr && v_scale == nullptr, "k_scale", "given",
                             {"null: rows of ", element_name<T>(), " have no scales"});
      return make_kv_view(static_cast<T*>(k), static_cast<T*>(v), geometry);
    }
  };
  switch (type) {
    case ElementType::float32:
      return view(static_cast<float*>(nullptr));
    case ElementType::half:
      return view(static_cast<half*>(nullptr));
    case ElementType::bfloat16:
      return view(static_cast<bfloat16*>(nullptr));
    case ElementType::int8:
      return view(static_cast<std::int8_t*>(nullptr));
    case ElementType::float8_e4m3:
      return view(static_cast<float8_e4m3*>(nullptr));
  }
  detail::fail_argument("type", static_cast<int>(type), "an ElementType");
}

/// A KvCache of some device and element type: AnyAttention::make_cache() makes it.
class AnyKvCache {
 public:
  AnyKvCache() = default;
  AnyKvCache(const AnyKvCache&) = delete;
  AnyKvCache& operator=(const AnyKvCache&) = delete;
  virtual ~AnyKvCache() = default;

  /// The element type of K and V.
  [[nodiscard]] virtual ElementType type() const noexcept = 0;
  /// A view of K and V of layer `index`, for all chunks that the tree has handed out so far. Call
  /// it again in each step, on the thread that calls the tree: it grows the memory if the tree has
  /// grown.
  /// \param stream  CUDA: the cudaStream_t that may be capturing; else null
  /// \throws InvalidArgument for a layer that the cache does not have; std::bad_alloc or
  ///         DeviceError without memory
  [[nodiscard]] virtual AnyKvView layer(int index, void* stream = nullptr) = 0;
  /// Provides memory for the chunks [0, num_chunks) in every layer; moves none.
  /// \throws InvalidArgument for too many; std::bad_alloc or DeviceError without memory
  virtual void grow(std::size_t num_chunks) = 0;

  /// The options that it was made with.
  [[nodiscard]] virtual const KvCacheOptions& options() const noexcept = 0;
  /// Chunks that have memory in every layer.
  [[nodiscard]] virtual std::size_t num_chunks() const noexcept = 0;
  /// Bytes of K and V of one chunk, all layers together.
  [[nodiscard]] virtual std::size_t bytes_per_chunk() const noexcept = 0;
  /// Bytes allocated, all layers together.
  [[nodiscard]] virtual std::size_t bytes() const noexcept = 0;
  /// The number of the tree whose chunks these are.
  [[nodiscard]] virtual std::uint64_t tree_id() const noexcept = 0;

  /// The cache as a KvProvider of a known element type, for for_each_kv_span(), gather_kv() and
  /// what else moves K/V. The cache must outlive it.
  template <KvElement T>
  class As {
   public:
    /// A view of K and V of layer `index`, see AnyKvCache::layer().
    [[nodiscard]] KvView<T> layer(int index) { return cache_->layer(index).template as<T>(); }
    /// The cache's options.
    [[nodiscard]] const KvCacheOptions& options() const noexcept { return cache_->options(); }
    /// The number of the tree whose chunks these are.
    [[nodiscard]] std::uint64_t tree_id() const noexcept { return cache_->tree_id(); }

   private:
    friend class AnyKvCache;
    explicit As(AnyKvCache& cache) noexcept : cache_(&cache) {}
    AnyKvCache* cache_;
  };
  /// \throws InvalidArgument if T is not type()
  template <KvElement T>
  [[nodiscard]] As<T> as() {
    if (type() != element_type_of<T>) [[unlikely]]
      detail::fail_argument("cache.type()", name_of(type()), {element_name<T>()});
    return As<T>(*this);
  }
};

/// A copy of a variant, of any type that has a name: of the library's, and of those with a member
/// `static constexpr std::string_view name` (for Bias<F> and Mask<F>: of F), which no other type in
/// the program may have. What the variant points to (Sinks::logits,
/// say) is read until the call that it is given to returns.
class AnyVariant {
 public:
  /// The most bytes that a variant may have here.
  static constexpr std::size_t max_bytes = 128;

  /// Attention without a variant.
  AnyVariant() noexcept : AnyVariant(NoVariant{}) {}
  /// A copy of `variant`.
  template <class V>
    requires(!std::same_as<V, AnyVariant>) && AttentionVariant<V>
  AnyVariant(const V& variant) noexcept {
    static_assert(detail::NamedVariant<V>,
                  "AnyVariant: a variant is found by its name at run time; give the type a member "
                  "`static constexpr std::string_view name = \"...\"`");
    static_assert(
        std::is_trivially_copyable_v<V> && sizeof(V) <= max_bytes &&
            alignof(V) <= alignof(std::max_align_t),
        "AnyVariant: a variant must be trivially copyable and have at most 128 bytes; let "
        "it point to what is larger");
    if constexpr (detail::NamedVariant<V>) name_ = detail::VariantName<V>::value;
    bytes_ = sizeof(V);
    ::new (static_cast<void*>(members_)) V(variant);
  }

  /// The name of its type.
  [[nodiscard]] std::string_view name() const noexcept { return name_; }
  /// The variant, if it is a V; else null.
  template <AttentionVariant V>
  [[nodiscard]] const V* get_if() const noexcept {
    if (name_ != detail::VariantName<V>::value || bytes_ != sizeof(V)) return nullptr;
    return std::launder(reinterpret_cast<const V*>(members_));
  }

 private:
  std::string_view name_;
  std::size_t bytes_ = 0;
  alignas(std::max_align_t) unsigned char members_[max_bytes] = {};
};

/// The size of heads.
struct HeadSize {
  int head_dim;   ///< elements per head of Q and K
  int value_dim;  ///< elements per head of V and of the output

  /// V heads of the size of K heads.
  constexpr HeadSize(int dim) noexcept : HeadSize(dim, dim) {}
  /// V heads of another size.
  constexpr HeadSize(int dim, int dim_of_v) noexcept : head_dim(dim), value_dim(dim_of_v) {}
  friend constexpr bool operator==(HeadSize, HeadSize) = default;
};

/// A list of head sizes that kernels are compiled for: HeadDims<64, 128, HeadSize(192, 128)>.
template <HeadSize... Sizes>
struct HeadDims {
  static_assert(sizeof...(Sizes) > 0, "HeadDims: name at least one size");
};

/// A list of element types that K and V may be stored as: KvTypes<half, std::int8_t>.
template <KvElement... T>
struct ElementTypes {
  static_assert(sizeof...(T) > 0, "ElementTypes: name at least one type");
  /// The types as numbers.
  static constexpr ElementType types[sizeof...(T)] = {element_type_of<T>...};
};

/// A list of variants that kernels are compiled for; NoVariant is attention without one:
/// Variants<NoVariant, SlidingWindow>.
template <AttentionVariant... V>
struct Variants {
  static_assert(sizeof...(V) > 0, "Variants: name at least one, perhaps NoVariant");
  static_assert((detail::NamedVariant<V> && ...),
                "Variants: a variant is found by its name at run time; give the type a member "
                "`static constexpr std::string_view name = \"...\"`");
  /// The names of the variants.
  static constexpr std::string_view names[sizeof...(V)] = {detail::VariantName<V>::value...};
  static_assert(detail::all_differ(names), "Variants: two of them have the same name");
};

/// Attention over the plan of a prefix tree, for one size of heads, on some device. One object
/// serves every layer and is used by one thread at a time, as ChunkAttention, whose bits it
/// computes. Calls throw InvalidArgument before anything changes; if a type or a variant was not
/// compiled, the message lists those that were.
class AnyAttention {
 public:
  /// Options of one call of run().
  struct RunOptions {
    /// [num_rows][num_qo_heads], gets the natural logarithm of the softmax denominators; or empty.
    std::span<float> lse = {};
    AnyVariant variant = {};  ///< one of variants()
    void* stream = nullptr;   ///< CUDA: the cudaStream_t; on the CPU null
  };

  AnyAttention() = default;
  AnyAttention(const AnyAttention&) = delete;
  AnyAttention& operator=(const AnyAttention&) = delete;
  virtual ~AnyAttention() = default;

  /// "cpu" or "cuda": the device that computes, and whose memory arrays are in.
  [[nodiscard]] virtual const char* device() const noexcept = 0;
  /// The name of the instruction set that runs (see instruction_set()); "cuda" on a GPU.
  [[nodiscard]] virtual const char* instruction_set() const noexcept = 0;
  /// Elements per head of Q and K.
  [[nodiscard]] virtual int head_dim() const noexcept = 0;
  /// Elements per head of V and of the output.
  [[nodiscard]] virtual int value_dim() const noexcept = 0;
  /// The element types that K and V may be stored as.
  [[nodiscard]] virtual std::span<const ElementType> kv_types() const noexcept = 0;
  /// The element types that q and out may have; on CUDA it is that of K/V in each call.
  [[nodiscard]] virtual std::span<const ElementType> qo_types() const noexcept = 0;
  /// The names of the variants that run() takes.
  [[nodiscard]] virtual std::span<const std::string_view> variants() const noexcept = 0;

  /// K/V memory on the device for the chunks of `tree`, wherever that is moved.
  /// \param type     one of kv_types()
  /// \param options  head_dim and value_dim may be left out for those of this object
  template <TokenType Token, int ChunkSize, ChunkAllocator Allocator, RetentionPolicy Retention>
  [[nodiscard]] std::unique_ptr<AnyKvCache> make_cache(
      const PrefixTree<Token, ChunkSize, Allocator, Retention>& tree, ElementType type,
      KvCacheOptions options) const {
    return cache_for(detail::ChunkAccess::source(tree), ChunkSize, type, completed(options));
  }
  /// The same for the chunks of a group of layers, a WindowedLayers.
  template <ChunkGroup Group>
  [[nodiscard]] std::unique_ptr<AnyKvCache> make_cache(const Group& group, ElementType type,
                                                       KvCacheOptions options) const {
    return cache_for(detail::ChunkAccess::source_of_group(group), Group::chunk_size, type,
                     completed(options));
  }

  /// CUDA: brings the device's copy of `plan` up to date. write() and run() do so themselves; call
  /// it once per step before a captured graph is launched. On the CPU there is nothing to do.
  virtual void prepare(const LiveView& plan, void* stream = nullptr) = 0;
  /// CUDA: prepare(plan, stream) for calls of run() with `variant` over such a layer. Call it
  /// before run() is captured. On the CPU there is nothing to do.
  virtual void prepare(const AnyKvView& layer, const LiveView& plan, const AnyVariant& variant,
                       void* stream = nullptr) = 0;

  /// Makes the plan's row copies in this layer, then stores K and V of the plan's query tokens.
  /// Calling it twice is harmless.
  ///
  /// \param layer   K and V memory of the layer
  /// \param plan    what AttentionPlan::build() gave for the step
  /// \param k, v    [num_rows][num_kv_heads][head_dim] (v: value_dim), in the caller's order, both
  ///                of one type of qo_types(); v = {} for layers whose V is in K
  /// \param stream  CUDA: the cudaStream_t; on the CPU null
  virtual void write(const AnyKvView& layer, const LiveView& plan, const ConstElements& k,
                     const ConstElements& v, void* stream = nullptr) = 0;

  /// Causal attention of the plan's rows over their whole contexts. The number of query heads is
  /// q.size / (num_rows * head_dim), a multiple of the layer's num_kv_heads.
  ///
  /// \param layer    K and V of the layer, written before
  /// \param plan     what AttentionPlan::build() gave for the step
  /// \param q        [num_rows][num_qo_heads][head_dim], in the caller's order, of a type of
  ///                 qo_types()
  /// \param out      [num_rows][num_qo_heads][value_dim], of the type of q; every element is
  ///                 written
  /// \param options  where lse goes, the variant, the stream
  virtual void run(const AnyKvView& layer, const LiveView& plan, const ConstElements& q,
                   const Elements& out, const RunOptions& options) = 0;
  /// As above, without a variant and without lse.
  void run(const AnyKvView& layer, const LiveView& plan, const ConstElements& q,
           const Elements& out) {
    run(layer, plan, q, out, RunOptions{});
  }

 private:
  [[nodiscard]] KvCacheOptions completed(KvCacheOptions options) const {
    if (options.head_dim == 0) {
      options.head_dim = head_dim();
      if (!options.value_dim && value_dim() != head_dim()) options.value_dim = value_dim();
    }
    if (options.head_dim != head_dim()) [[unlikely]]
      detail::fail_argument("options.head_dim", options.head_dim,
                            {"that of the attention, ", head_dim(), ", or none for it"});
    if (options.dim_of_v() != value_dim()) [[unlikely]]
      detail::fail_argument("options.value_dim", options.dim_of_v(),
                            {"that of the attention, ", value_dim(), ", or none for it"});
    return options;
  }
  [[nodiscard]] virtual std::unique_ptr<AnyKvCache> cache_for(
      detail::ChunkSource source, int chunk_size, ElementType type,
      const KvCacheOptions& options) const = 0;
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

/// An attention object's device, sizes, types and variants in one line, for logs.
[[nodiscard]] inline std::string describe(const AnyAttention& attention) {
  return detail::joined({attention.device(), " (", attention.instruction_set(), "), head_dim ",
                         attention.head_dim(), ", value_dim ", attention.value_dim(), ", K/V ",
                         detail::listed(attention.kv_types()), ", q and out ",
                         detail::listed(attention.qo_types()), ", variants ",
                         detail::listed(attention.variants())});
}

CHUNKATTN_NAMESPACE_END
