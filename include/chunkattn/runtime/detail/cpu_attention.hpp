// ChunkAttention<Cpu, …> as an AnyAttention.
#pragma once

#include <memory>
#include <span>
#include <string_view>
#include <utility>

#include "../../attention_options.hpp"
#include "../../chunk_attention.hpp"
#include "../../detail/plan/check_current.hpp"
#include "../../detail/support/check.hpp"
#include "../../detail/support/config.hpp"
#include "../../detail/support/instruction_sets.hpp"
#include "../../element.hpp"
#include "../../executor.hpp"
#include "../../fwd.hpp"
#include "../../kv_cache.hpp"
#include "../../plan_view.hpp"
#include "../any_attention.hpp"
#include "built_with.hpp"
#include "variant_name.hpp"

CHUNKATTN_ISA_DETAIL_BEGIN
namespace front {

/// ChunkAttention<Cpu, …> as an AnyAttention.
template <HeadSize Size, class Exec, class Types, class Variants, class Qo>
class CpuAttention final : public AnyAttention {
 public:
  template <class Threads>
  CpuAttention(Threads&& threads, const CpuOptions& options)
      : attention_(std::forward<Threads>(threads), options) {}

  [[nodiscard]] const char* device() const noexcept override { return "cpu"; }
  [[nodiscard]] const char* instruction_set() const noexcept override {
    return name_of(attention_.options().instruction_set);
  }
  [[nodiscard]] int head_dim() const noexcept override { return Size.head_dim; }
  [[nodiscard]] int value_dim() const noexcept override { return Size.value_dim; }
  [[nodiscard]] std::span<const ElementType> kv_types() const noexcept override {
    return Types::types;
  }
  [[nodiscard]] std::span<const ElementType> qo_types() const noexcept override {
    return Qo::types;
  }
  [[nodiscard]] std::span<const std::string_view> variants() const noexcept override {
    return Variants::names;
  }

  void prepare(const LiveView& plan, void* stream) override {
    check_no_stream(stream);
    detail::check_current(plan);
  }
  void prepare(const AnyKvView& layer, const LiveView& plan, const AnyVariant& variant,
               void* stream) override {
    prepare(plan, stream);
    detail::with_layer(Types{}, layer, [](const auto&) {});
    detail::with_variant(Variants{}, variant, [](const auto&) {});
  }

  void write(const AnyKvView& layer, const LiveView& plan, const ConstElements& k,
             const ConstElements& v, void* stream) override {
    check_no_stream(stream);
    const bool has_v = v.data != nullptr || v.size != 0 || v.rows;
    if (has_v) detail::check_same_type("v.type", v.type, "k", k.type);
    detail::with_layer(Types{}, layer, [&](const auto& view) {
      detail::with_type(Qo{}, k.type, "k.type", [&]<class X>(X*) {
        if (has_v)
          attention_.write(view, plan, detail::typed<X>(k), detail::typed<X>(v));
        else
          attention_.write(view, plan, detail::typed<X>(k));
      });
    });
  }

  void run(const AnyKvView& layer, const LiveView& plan, const ConstElements& q,
           const Elements& out, const RunOptions& options) override {
    check_no_stream(options.stream);
    detail::check_same_type("out.type", out.type, "q", q.type);
    detail::with_layer(Types{}, layer, [&](const auto& view) {
      detail::with_type(Qo{}, q.type, "q.type", [&]<class X>(X*) {
        detail::with_variant(Variants{}, options.variant, [&](const auto& variant) {
          attention_.run(view, plan, variant, detail::typed<X>(q), detail::typed<X>(out),
                         {.lse = options.lse});
        });
      });
    });
  }

 private:
  struct LayerOf {
    template <class Cache>
    AnyKvView operator()(Cache& cache, int index, void* stream) const {
      check_no_stream(stream);
      return cache.layer(index);
    }
  };

  static void check_no_stream(const void* stream) {
    detail::check_argument(stream == nullptr, "stream", stream, "null: the CPU has no streams");
  }

  [[nodiscard]] std::unique_ptr<AnyKvCache> cache_for(
      detail::ChunkSource source, int chunk_size, ElementType type,
      const KvCacheOptions& options) const override {
    std::unique_ptr<AnyKvCache> made;
    detail::with_type(Types{}, type, "type", [&]<class T>(T*) {
      made = std::make_unique<detail::AnyKvCacheOf<KvCache<Cpu, T>, T, LayerOf>>(
          std::move(source), chunk_size, options);
    });
    return made;
  }

  ChunkAttention<Cpu, Size.head_dim, Size.value_dim, Exec> attention_;
};

}  // namespace front
CHUNKATTN_ISA_DETAIL_END
