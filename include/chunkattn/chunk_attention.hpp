// ChunkAttention<Cpu, HeadDim>: writes K/V and computes attention for a plan's rows on the CPU,
// chunk-first and sequence-first (Algorithms 1 and 2) over one list of tasks.
//
// A worker takes some KV heads of one row block and goes through the tree's segments, parents
// first: shared ones with all their query-head rows at once, private ones streamed. The state (O,
// m, d) of its rows stays in the core's cache meanwhile, so nothing is merged and nothing is
// locked. Only if there are too few heads to keep all workers busy is the work cut along the tokens
// of K/V; then partial results are merged (in order, or under a spin lock).
#pragma once

#include <concepts>
#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <type_traits>
#include <utility>
#include <variant>

#include "attention_options.hpp"
#include "detail/attention/row_places.hpp"
#include "detail/attention/sm_scale.hpp"
#include "detail/cpu/call.hpp"
#include "detail/cpu/checks.hpp"
#include "detail/cpu/kernels.hpp"
#include "detail/cpu/schedule.hpp"
#include "detail/kv/checks.hpp"
#include "detail/plan/check_current.hpp"
#include "detail/support/check.hpp"
#include "detail/support/in_use.hpp"
#include "detail/support/instruction_sets.hpp"
#include "executor.hpp"
#include "head_rows.hpp"
#include "variants.hpp"

// Where kernels are compiled elsewhere, one that is missing is an error of the linker.
#if CHUNKATTN_BODIES
#include "detail/cpu/run_kernels.hpp"
#endif

CHUNKATTN_ISA_NAMESPACE_BEGIN

/// Exact attention over shared prefixes on the CPU: the paper's two-phase partition (section 3.2,
/// Algorithms 1 and 2). One object serves every layer, every element type of K/V and every number
/// of heads, and is used by one thread at a time: a call while another one runs throws
/// InvalidArgument. Once it has seen the largest plan, it allocates nothing. Every member of an
/// object that was moved from throws InvalidArgument.
///
/// \tparam HeadDim   elements per head of Q and K: a multiple of 8, at most 576
/// \tparam Exec      runs the tasks (concept Executor)
/// \tparam ValueDim  elements per head of V and of the output: a multiple of 8, at most 576; by
///                   default HeadDim
template <int HeadDim, int ValueDim, class Exec>
class ChunkAttention<Cpu, HeadDim, ValueDim, Exec> {
  static_assert(
      HeadDim > 0 && HeadDim % 8 == 0 && HeadDim <= 576,
      "ChunkAttention<Cpu, HeadDim>: HeadDim must be a multiple of 8 and at most 576; pad "
      "the heads of your model to the next multiple of 8 with zeros");
  static_assert(
      ValueDim > 0 && ValueDim % 8 == 0 && ValueDim <= 576,
      "ChunkAttention<Cpu, HeadDim, ValueDim>: ValueDim must be a multiple of 8 and at most 576");
  static_assert(Executor<Exec>,
                "ChunkAttention<Cpu, HeadDim, ValueDim, Exec>: Exec must offer concurrency() and "
                "parallel_for(n, f), see the concept Executor");

  // A variant, or a mistake for one; else a buffer, or a mistake for that.
  template <class X>
  static constexpr bool meant_as_variant = detail::cpu::MeantAsVariant<X>;

 public:
  /// Computes on `executor`, which must outlive this object.
  /// \throws InvalidArgument for options that make no sense
  explicit ChunkAttention(Exec& executor, CpuOptions options = {})
      : options_(checked(options)),
        executor_(&executor, Release{false}),
        engine_(detail::cpu::make_engine<HeadDim, ValueDim>(options_)) {}

  /// Computes on its own executor of `num_threads` threads; 0: as many as there are CPUs to use.
  /// \throws InvalidArgument for options that make no sense, and what the executor's constructor
  ///         throws
  explicit ChunkAttention(int num_threads = 0, CpuOptions options = {})
    requires std::constructible_from<Exec, int>
      : options_(checked(options)),
        executor_(new Exec(num_threads), Release{true}),
        engine_(detail::cpu::make_engine<HeadDim, ValueDim>(options_)) {}

  /// Makes the plan's row copies in this layer, then stores K and V of the plan's query tokens.
  /// Rows whose K/V is already written are skipped. Calling it twice is harmless.
  ///
  /// \param layer  K and V memory of the layer: KvCache::layer(), or any KvView
  /// \param plan   what AttentionPlan::build() gave for the step
  /// \param k, v   [num_rows][num_kv_heads][HeadDim] (v: ValueDim), in the caller's order; float,
  ///               half or bfloat16, rounded to the layer's type to nearest even. Arrays without
  ///               gaps, or HeadRows
  template <KvElement T, class K, class V>
  void write(const KvView<T>& layer, const LiveView& plan, const K& k, const V& v,
             DeviceStream<Cpu> = {}) {
    if constexpr (detail::cpu::QoRange<K> && detail::cpu::QoRange<V>)
      write_rows(layer, plan, detail::cpu::given_to_read(k), detail::cpu::given_to_read(v), true);
    else
      detail::cpu::explain_buffers<K, V>();
  }

  /// write() for a layer whose V is in K (KvCacheOptions::v_in_k).
  ///
  /// \param layer  memory of the layer
  /// \param plan   what AttentionPlan::build() gave for the step
  /// \param k      [num_rows][num_kv_heads][HeadDim], in the caller's order; its first ValueDim
  ///               elements are V
  /// \throws InvalidArgument as the other overload, and for a layer with V of its own
  template <KvElement T, class K>
  void write(const KvView<T>& layer, const LiveView& plan, const K& k) {
    if constexpr (detail::cpu::QoRange<K>)
      write_rows(layer, plan, detail::cpu::given_to_read(k),
                 decltype(detail::cpu::given_to_read(k)){}, false);
    else
      detail::cpu::explain_buffers<K>();
  }

  /// Causal attention of the plan's rows over their whole contexts. num_qo_heads is
  /// q.size() / (num_rows * HeadDim), or HeadRows::num_heads, at most max_qo_heads, and must be a
  /// multiple of the layer's num_kv_heads; query head h reads KV head h / (num_qo_heads /
  /// num_kv_heads). NaN in, NaN out: docs/cpu.md says what becomes of NaN and infinities.
  ///
  /// \param layer  K and V of the layer, written before by write() or kernels of your own
  /// \param plan   what AttentionPlan::build() gave for the step
  /// \param q      [num_rows][num_qo_heads][HeadDim], in the caller's order; float, half or
  ///               bfloat16, without gaps or as HeadRows
  /// \param out    [num_rows][num_qo_heads][ValueDim], likewise; every element is written. It may
  ///               be q itself, if that has as many bytes, and overlaps it no other way
  /// \param options  where the softmax denominators go
  /// \throws InvalidArgument, with nothing changed, for sizes that do not fit each other, a plan
  ///         that is out of date, and a layer of another tree. If the executor throws, `out` and
  ///         `lse` are unspecified and everything else is as before
  template <KvElement T, class Q, class Out>
    requires(!meant_as_variant<Q>)
  void run(const KvView<T>& layer, const LiveView& plan, const Q& q, Out&& out,
           const RunOptions<Cpu>& options = {}) {
    run(layer, plan, NoVariant{}, q, std::forward<Out>(out), options);
  }

  /// run() with a variant (variants.hpp): a window, a soft cap, sinks, biases, masks, or one of
  /// your own. Its type chooses the kernels; it and its members may differ from call to call.
  ///
  /// \param layer, plan, q, out, options  as of run() without a variant; lse counts sinks
  /// \param variant                       read until run() returns
  /// \throws InvalidArgument as run() without a variant, and if the variant's members make no sense
  template <KvElement T, class V, class Q, class Out>
    requires meant_as_variant<V>
  void run(const KvView<T>& layer, const LiveView& plan, const V& variant, const Q& q, Out&& out,
           const RunOptions<Cpu>& options = {}) {
    constexpr bool is_variant =
        AttentionVariant<V>;  // compilers would explain the concept at length
    if constexpr (is_variant && detail::cpu::QoRange<Q> && detail::cpu::WritableRange<Out>) {
      run_rows(layer, plan, variant, detail::cpu::given_to_read(q), detail::cpu::given_rows(out),
               options.lse);
    } else {
      static_assert(
          is_variant,
          "ChunkAttention::run: this variant has none of the members logit(s, at), "
          "visible(at) and sink(at), or not as variants.hpp says: const, and "
          "returning expressions of chunkattn::lanes; or it has masked() without visible()");
      detail::cpu::explain_run<Q, Out>();
    }
  }

  /// Not of a whole cache: says, at compile time, what to write.
  template <KvProvider Cache, class... Rest>
  void write(const Cache&, const Rest&...) {
    detail::explain_layer<Cache>();
  }
  /// Not of a whole cache: says, at compile time, what to write.
  template <KvProvider Cache, class... Rest>
  void run(const Cache&, const Rest&...) {
    detail::explain_layer<Cache>();
  }

  /// The options, with values in place of the defaults of sm_scale and instruction_set.
  [[nodiscard]] const CpuOptions& options() const noexcept { return options_; }

 private:
  friend struct detail::AttentionAccess;

  void check_not_moved_from() const {
    detail::check_argument(executor_ != nullptr, "attention", "moved-from",
                           "one that was not moved from");
  }

  template <class T, class K, class V>
  void write_rows(const KvView<T>& layer, const LiveView& plan, const detail::GivenRows<const K>& k,
                  const detail::GivenRows<const V>& v, bool has_v) {
    const detail::InUse::Call call(in_use_, "attention");
    check_not_moved_from();
    detail::check_current(plan);
    const PlanView& view = plan;
    detail::cpu::check_view(layer, view, HeadDim, ValueDim);
    const auto rows = [&](const char* name, const auto& given, int elements) {
      return detail::checked_rows(name, given, view.num_rows, layer.num_kv_heads,
                                  "layer.num_kv_heads", elements,
                                  elements == HeadDim ? "num_rows * num_kv_heads * head_dim"
                                                      : "num_rows * num_kv_heads * value_dim");
    };
    detail::check_row_scales(layer, "write() gives each row a scale of its own");
    const auto keys = rows("k", k, HeadDim);
    detail::check_writes(layer, view);
    detail::check_own_v(layer);
    const auto values = has_v ? rows("v", v, ValueDim) : HeadRows<const V>{};
    detail::check_argument(
        layer.has_v_in_k() != has_v, "v", has_v ? "given" : "not given",
        has_v ? "nothing: this layer's V is in K, which is written alone"
              : "[num_rows][num_kv_heads][ValueDim], but for layers whose V is in K");
    detail::cpu::write_kernels<HeadDim, ValueDim>(engine_, detail::cpu::ExecutorRef(*executor_),
                                                  layer, view, keys, values);
    detail::note_written(layer, view);
  }

  template <class T, class V, class X, class Y>
  void run_rows(const KvView<T>& layer, const LiveView& plan, const V& variant,
                const detail::GivenRows<const X>& query, const detail::GivenRows<Y>& result,
                std::span<float> lse) {
    const detail::InUse::Call alone(in_use_, "attention");
    check_not_moved_from();
    detail::check_current(plan);
    const PlanView& view = plan;
    detail::cpu::check_view(layer, view, HeadDim, ValueDim);
    const HeadRows<const X> q = detail::checked_queries(query, view.num_rows, HeadDim);
    const int num_qo_heads = q.num_heads;
    if (num_qo_heads % layer.num_kv_heads != 0) [[unlikely]]
      detail::fail_argument("num_qo_heads", num_qo_heads,
                            {"a multiple of layer.num_kv_heads, ", layer.num_kv_heads});
    const HeadRows<Y> out = detail::checked_rows(
        "out", result, view.num_rows, num_qo_heads, "those of q", ValueDim,
        ValueDim == HeadDim ? "q.size()" : "num_rows * num_qo_heads * value_dim");
    if (!lse.empty())
      detail::check_size(
          "lse", lse,
          static_cast<std::size_t>(view.num_rows) * static_cast<std::size_t>(num_qo_heads),
          "0 or num_rows * num_qo_heads");
    detail::check_outputs(q, out, lse);
    if constexpr (detail::ChecksItself<V>) variant.check(num_qo_heads);
    detail::check_host_memory(variant);
    detail::check_window(variant, view);
    detail::check_pieces(layer, view);
    detail::check_written(layer, view);

    const int group = num_qo_heads / layer.num_kv_heads;
    const detail::cpu::Call<T, X, Y, V> call{
        layer, view, q, out, lse.empty() ? nullptr : lse.data(), num_qo_heads, group, variant};
    const detail::cpu::ExecutorRef executor(*executor_);
    if constexpr (std::is_same_v<V, NoVariant>)
      detail::cpu::run_kernels<HeadDim, ValueDim>(engine_, executor, call);
    else
      std::visit([&](auto& engine) { engine.run(executor, call); }, engine_);
  }

  static CpuOptions checked(CpuOptions options) {
    using Reduce = CpuOptions::Reduce;
    using Accuracy = CpuOptions::Accuracy;
    for (const auto& [name, count] :
         {std::pair{"options.tuning.min_tasks", options.tuning.min_tasks},
          std::pair{"options.tuning.max_task_heads", options.tuning.max_task_heads},
          std::pair{"options.tuning.min_product_lines", options.tuning.min_product_lines}})
      detail::check_argument(count.value_or(1) > 0, name, count.value_or(1), "at least 1");
    detail::check_argument(options.reduce == Reduce::deterministic ||
                               options.reduce == Reduce::spin_lock ||
                               options.reduce == Reduce::batch_invariant,
                           "options.reduce", static_cast<int>(options.reduce),
                           "Reduce::deterministic, Reduce::spin_lock or Reduce::batch_invariant");
    detail::check_argument(options.accuracy == Accuracy::fp32 ||
                               options.accuracy == Accuracy::two_terms ||
                               options.accuracy == Accuracy::one_term,
                           "options.accuracy", static_cast<int>(options.accuracy),
                           "Accuracy::fp32, Accuracy::two_terms or Accuracy::one_term");
    options.sm_scale = detail::resolved_sm_scale(options.sm_scale, HeadDim);
    options.instruction_set = detail::cpu::resolved(options.instruction_set);
    return options;
  }

  // Deletes the executor if it is the object's own.
  struct Release {
    bool owned;
    void operator()(Exec* executor) const noexcept {
      if (owned) delete executor;
    }
  };

  CpuOptions options_;
  std::unique_ptr<Exec, Release> executor_;  // null in an object that was moved from
  detail::cpu::AnyEngine<HeadDim, ValueDim> engine_;
  detail::InUse in_use_;
};

CHUNKATTN_ISA_NAMESPACE_END
