// ChunkAttention<Cuda, …> as an AnyAttention.
#pragma once

#include <memory>
#include <span>
#include <string_view>
#include <utility>

#include "../../cuda.cuh"
#include "../../detail/support/config.hpp"
#include "../../detail/support/instruction_sets.hpp"
#include "../../element.hpp"
#include "../../executor.hpp"
#include "../../fwd.hpp"
#include "../../plan_view.hpp"
#include "../any_attention.hpp"
#include "built_with.hpp"
#include "variant_name.hpp"

CHUNKATTN_ISA_DETAIL_BEGIN
namespace front {

/// ChunkAttention<Cuda, …> as an AnyAttention.
template <HeadSize Size, class Types, class Variants>
class CudaAttention final : public AnyAttention {
 public:
  CudaAttention(const CudaOptions::Limits& limits, const CudaOptions& options)
      : attention_(limits, options) {}

  [[nodiscard]] const char* device() const noexcept override { return "cuda"; }
  [[nodiscard]] const char* instruction_set() const noexcept override { return "cuda"; }
  [[nodiscard]] int head_dim() const noexcept override { return Size.head_dim; }
  [[nodiscard]] int value_dim() const noexcept override { return Size.value_dim; }
  [[nodiscard]] std::span<const ElementType> kv_types() const noexcept override {
    return Types::types;
  }
  [[nodiscard]] std::span<const ElementType> qo_types() const noexcept override {
    return Types::types;
  }
  [[nodiscard]] std::span<const std::string_view> variants() const noexcept override {
    return Variants::names;
  }

  void prepare(const LiveView& plan, void* stream) override {
    attention_.prepare(plan, static_cast<cudaStream_t>(stream));
  }
  void prepare(const AnyKvView& layer, const LiveView& plan, const AnyVariant& variant,
               void* stream) override {
    detail::with_layer(Types{}, layer, [&](const auto& view) {
      detail::with_variant(Variants{}, variant, [&](const auto& typed) {
        attention_.prepare(view, plan, typed, static_cast<cudaStream_t>(stream));
      });
    });
  }

  void write(const AnyKvView& layer, const LiveView& plan, const ConstElements& k,
             const ConstElements& v, void* stream) override {
    detail::check_same_type("v.type", v.type, "k", k.type);
    detail::with_layer(Types{}, layer, [&]<class T>(const KvView<T>& view) {
      detail::check_same_type("k.type", k.type, "the layer", layer.type());
      attention_.write(view, plan, detail::typed_array<T>("k", k), detail::typed_array<T>("v", v),
                       static_cast<cudaStream_t>(stream));
    });
  }

  void run(const AnyKvView& layer, const LiveView& plan, const ConstElements& q,
           const Elements& out, const RunOptions& options) override {
    detail::with_layer(Types{}, layer, [&]<class T>(const KvView<T>& view) {
      detail::check_same_type("q.type", q.type, "the layer", layer.type());
      detail::check_same_type("out.type", out.type, "q", q.type);
      detail::with_variant(Variants{}, options.variant, [&](const auto& variant) {
        attention_.run(view, plan, variant, detail::typed_array<T>("q", q),
                       detail::typed_array<T>("out", out),
                       {.lse = options.lse, .stream = static_cast<cudaStream_t>(options.stream)});
      });
    });
  }

 private:
  struct LayerOf {
    template <class Cache>
    AnyKvView operator()(Cache& cache, int index, void* stream) const {
      return cache.layer(index, static_cast<cudaStream_t>(stream));
    }
  };

  [[nodiscard]] std::unique_ptr<AnyKvCache> cache_for(
      detail::ChunkSource source, int chunk_size, ElementType type,
      const KvCacheOptions& options) const override {
    std::unique_ptr<AnyKvCache> made;
    detail::with_type(Types{}, type, "type", [&]<class T>(T*) {
      made = std::make_unique<detail::AnyKvCacheOf<KvCache<Cuda, T>, T, LayerOf>>(
          std::move(source), chunk_size, options);
    });
    return made;
  }

  ChunkAttention<Cuda, Size.head_dim, Size.value_dim> attention_;
};

}  // namespace front
CHUNKATTN_ISA_DETAIL_END
