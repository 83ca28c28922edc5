// The CUDA backend: KvCache<Cuda, T> and ChunkAttention<Cuda, HeadDim>, with device pointers and a
// stream. For nvcc.
//
//   ChunkAttention<Cuda, 128> attention({.max_rows = 256, .num_qo_heads = 32, .num_kv_heads = 8});
//   StepView view = plan.build(step);
//   attention.prepare(view, stream);              // uploads what changed; often one tiny kernel
//   for (layer ...) {
//     attention.write(kv.layer(l), view, k, v, stream);
//     attention.run(kv.layer(l), view, q, out, {.lse = lse, .stream = stream});
//   }
//   in_flight.push_back(std::move(step).submit());
//
// To capture a graph, call prepare() before the capture and write()/run() inside it; from then on
// prepare() and a graph launch are a step, with any plan inside the limits.
#pragma once

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#error \
    "chunkattn needs compute capability 8.0: compile with -arch=sm_80, or a newer one (nvcc's default is older)"
#include <chunkattn/see_the_error_above>
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

#include "attention_options.hpp"
#include "detail/cuda/device_cache.cuh"
#include "detail/cuda/device_state.cuh"
#include "detail/cuda/kernel_table.cuh"
#include "detail/cuda/merge_states.cuh"
#include "detail/cuda/runtime.cuh"
#include "detail/kv/checks.hpp"
#include "detail/plan/check_current.hpp"
#include "detail/support/check.hpp"
#include "detail/support/in_use.hpp"
#include "detail/support/instruction_sets.hpp"
#include "kv_cache.hpp"
#include "merge_state.hpp"
#include "variants.hpp"

CHUNKATTN_NAMESPACE_BEGIN

/// merge_states() of results in device memory, in the order of `stream` (the paper's attn_reduce,
/// Eqn 2). Call it once before a stream is captured: its first call loads a kernel.
///
/// \tparam Base  LseBase::e or two: of all lse
/// \param outs  [num_states][num_rows][num_qo_heads][head_dim], half or bfloat16
/// \param lses  [num_states][num_rows][num_qo_heads]
/// \param out   [num_rows][num_qo_heads][head_dim]; may be one of the states
/// \param lse   [num_rows][num_qo_heads]; may be that state's
/// \throws InvalidArgument where the sizes do not fit each other
template <LseBase Base = LseBase::e, class T>
  requires(std::is_same_v<T, half> || std::is_same_v<T, bfloat16>)
void merge_states(std::span<const T> outs, std::span<const float> lses, int num_states,
                  std::type_identity_t<std::span<T>> out, std::span<float> lse,
                  cudaStream_t stream) {
  detail::check_states(outs, lses, num_states, out, lse);
  detail::cuda::merge_on_device<Base == LseBase::e>(
      detail::cuda::MergeStatesArguments<T>{outs.data(), lses.data(), out.data(), lse.data(),
                                            std::ssize(lse), num_states,
                                            static_cast<int>(out.size() / lse.size())},
      stream);
}

CHUNKATTN_NAMESPACE_END

CHUNKATTN_ISA_NAMESPACE_BEGIN

/// Exact attention over shared prefixes on a GPU of compute capability 8.0 or newer: the paper's
/// two-phase partition (section 3.2). One object serves all layers of one geometry, with K/V in
/// half or bfloat16. It belongs to the device that was current at construction, and its calls run
/// there whichever is current; the default stream is that device's. One thread at a time uses it (a
/// call while another one runs throws InvalidArgument), on one stream at a time (another one when
/// the first has finished what was enqueued); several objects may work on several streams. It can
/// be neither copied nor moved. After construction it allocates nothing and loads no kernel, except
/// those of variants.
///
/// \tparam HeadDim   elements per head of Q and K
/// \tparam ValueDim  elements per head of V and of the output
template <int HeadDim, int ValueDim, class Exec>
class ChunkAttention<Cuda, HeadDim, ValueDim, Exec> {
  static constexpr detail::cuda::HeadDims dims{HeadDim, ValueDim};
  static_assert(
      detail::cuda::supported_head_dims(dims),
      "ChunkAttention<Cuda, HeadDim, ValueDim>: HeadDim must be 64, 80, 96, 112, 128 or "
      "256 (or 16), ValueDim, if it differs, 64, 96 or 128 (or 16); with a HeadDim of 192 or "
      "256 it must be 64 or 128. Pad the heads of your model to the next of these with "
      "zeros");

 public:
  /// Bytes of device memory that an object on the current device needs for its plan, tasks, partial
  /// results and running totals.
  [[nodiscard]] static std::size_t workspace_size(const CudaOptions::Limits& limits) {
    return detail::cuda::DeviceState<HeadDim, ValueDim>::workspace_size(limits);
  }

  /// \throws InvalidArgument for limits or options that make no sense or a workspace that is too
  ///         small
  /// \throws DeviceError without a device of compute capability 8.0, or without memory
  explicit ChunkAttention(const CudaOptions::Limits& limits, const CudaOptions& options = {})
      : state_(limits, options) {}

  ChunkAttention(const ChunkAttention&) = delete;
  ChunkAttention& operator=(const ChunkAttention&) = delete;

  /// Brings the device's copy of `plan` up to date: uploads what has changed since the last call;
  /// for a further decode step nothing. write() and run() call it themselves; call it once per step
  /// before launching a captured graph.
  /// \param plan  what AttentionPlan::build() gave for the step
  /// \throws InvalidArgument for a plan that is out of date or larger than the limits
  void prepare(const LiveView& plan, cudaStream_t stream) {
    const detail::InUse::Call alone(in_use_, "attention");
    state_.prepare(plan, stream);
  }

  /// Prepares calls of run() with `variant`: what prepare(plan, stream) does, and it loads the
  /// variant's kernel for K/V of T and makes the tasks for its window. Call it before run() is
  /// captured; from then on prepare(plan, stream) keeps these tasks up to date, too.
  /// \tparam Q  of q and out, where K/V has 8 bits
  /// \throws InvalidArgument where the variant's members make no sense
  template <class T, AttentionVariant V, class Q = std::conditional_t<has_row_scales<T>, half, T>>
  void prepare(const KvView<T>& layer, const LiveView& plan, const V& variant,
               cudaStream_t stream) {
    const detail::InUse::Call alone(in_use_, "attention");
    detail::check_current(plan);
    const detail::cuda::CurrentDevice device(state_.checks_.device());
    state_.check_layer(layer, plan);
    state_.check_variant(variant);
    state_.prepare(plan, stream);
    (void)state_.template schedule_for<Q, T>(variant, plan, detail::cuda::is_capturing(stream),
                                             stream);
    state_.checks_.enqueued(stream);
  }

  /// Makes the plan's row copies in this layer, then stores K and V of the plan's query tokens.
  /// Rows whose K/V is already written are skipped. Calling it twice is harmless. An engine whose
  /// own kernels store K and V passes neither: then it makes the copies.
  ///
  /// \param layer  K and V memory of the layer, on the device
  /// \param plan   what AttentionPlan::build() gave for the step
  /// \param k, v   device memory [num_rows][num_kv_heads][HeadDim] (v: ValueDim), in the caller's
  ///               order, of T (as CUDA's headers name it, too), of half or bfloat16 where T has
  ///               8 bits (quantize_row() says how these are stored); or both empty
  /// \throws InvalidArgument, with nothing changed, for sizes that do not fit each other, a plan
  ///         that is out of date, and a layer of another tree
  template <class T, class X>
  void write(const KvView<T>& layer, const LiveView& plan, std::span<X> k, std::span<X> v,
             cudaStream_t stream) {
    using Source = detail::own_element<std::remove_const_t<X>>;
    static_assert(has_row_scales<T> ? sizeof(Source) == 2 : std::is_same_v<Source, T>,
                  "write: K and V must be of the layer's element type, of half or bfloat16 where "
                  "that has 8 bits");
    const detail::InUse::Call alone(in_use_, "attention");
    detail::check_current(plan);
    const detail::cuda::CurrentDevice device(state_.checks_.device());
    const PlanView& view = plan;
    state_.check_layer(layer, plan);
    detail::check_own_v(layer);
    if (layer.k_slabs == nullptr) detail::check_writes(layer, view);
    const bool copies_only = k.empty() && v.empty();
    if (!copies_only) {
      const std::size_t kv_lines = state_.line_count(view, state_.limits_.num_kv_heads);
      state_.check_size("k.size()", k.size(), kv_lines * HeadDim);
      state_.check_size("v.size()", v.size(), kv_lines * ValueDim);
      state_.checks_.pointer("k", k.data());
      state_.checks_.pointer("v", v.data());
    }
    state_.prepare(plan, stream);
    const bool capturing = detail::cuda::is_capturing(stream);
    // A graph is replayed with other plans: as large as any may need.
    const std::int64_t heads = state_.limits_.num_kv_heads;
    const std::int64_t lines = (capturing ? state_.limits_.max_rows : view.num_rows) * heads;
    const std::int64_t copies = (capturing ? *state_.limits_.max_copies : view.num_copies) * heads;
    constexpr int at_once = has_row_scales<T>
                                ? detail::cuda::small_threads / 64  // two warps each
                                : detail::cuda::written_lines((std::max)(HeadDim, ValueDim));
    const int grid = state_.small_grid((std::max)((lines + at_once - 1) / at_once, copies));
    detail::cuda::launch("write_kernel",
                         state_.template kernel<detail::cuda::WriteKernel<T, Source>>(capturing),
                         grid, detail::cuda::small_threads, 0, stream,
                         {state_.upload_.memory(), layer, reinterpret_cast<const Source*>(k.data()),
                          reinterpret_cast<const Source*>(v.data())});
    state_.checks_.enqueued(stream);
    if (!copies_only) detail::note_written(layer, view);
  }

  /// Causal attention of the plan's rows over their whole contexts. NaN in, NaN out, as on the CPU
  /// (docs/cpu.md).
  ///
  /// \param layer   K and V of the layer, on the device
  /// \param plan    what AttentionPlan::build() gave for the step
  /// \param q, out  device memory [num_rows][num_qo_heads][HeadDim] (out: ValueDim), in the
  ///                caller's order; out may be q of as many bytes, and overlaps no other part
  /// \param options  where the softmax denominators go, and the stream
  /// \throws InvalidArgument, with nothing changed, for sizes that do not fit each other, a plan
  ///         that is out of date, and a layer of another tree
  template <class T>
  void run(const KvView<T>& layer, const LiveView& plan, std::span<const std::type_identity_t<T>> q,
           std::span<std::type_identity_t<T>> out, const RunOptions<Cuda>& options) {
    run(layer, plan, NoVariant{}, q, out, options);
  }

  /// run() with a variant (variants.hpp): a window, a soft cap, sinks, biases, masks, or one of
  /// your own. Its type chooses a kernel, which the first call or prepare() loads; its members may
  /// differ from call to call.
  ///
  /// \param layer, plan, q, out, options  as of run() without a variant; lse counts sinks
  /// \param variant                       copied. Its tables (Sinks::logits, Alibi::slopes) are in
  ///                                  device memory; functions of per_lane() are device functions
  /// \throws InvalidArgument as run() without a variant, and if the variant's members make no sense
  template <class T, AttentionVariant V>
  void run(const KvView<T>& layer, const LiveView& plan, const V& variant,
           std::span<const std::type_identity_t<T>> q, std::span<std::type_identity_t<T>> out,
           const RunOptions<Cuda>& options) {
    static_assert(std::is_same_v<T, half> || std::is_same_v<T, bfloat16>,
                  "ChunkAttention<Cuda>::run: T must be chunkattn::half or chunkattn::bfloat16");
    const detail::InUse::Call alone(in_use_, "attention");
    state_.template run<T>(layer, plan, variant, q, out, options);
  }

  /// run() over K/V of 8 bits. Q and outputs are half or bfloat16; K's scales are applied to the
  /// logits, V's rows are rounded to the outputs' type.
  template <class E, AttentionVariant V, class Q, class Out>
    requires has_row_scales<E>
  void run(const KvView<E>& layer, const LiveView& plan, const V& variant, std::span<Q> q,
           std::span<Out> out, const RunOptions<Cuda>& options) {
    using T = detail::own_element<Out>;
    static_assert(sizeof(T) == 2 && std::is_same_v<detail::own_element<std::remove_const_t<Q>>, T>,
                  "ChunkAttention<Cuda>::run: q and out must be of one type, half or bfloat16");
    const detail::InUse::Call alone(in_use_, "attention");
    state_.template run<T>(layer, plan, variant,
                           std::span<const T>(reinterpret_cast<const T*>(q.data()), q.size()),
                           std::span<T>(reinterpret_cast<T*>(out.data()), out.size()), options);
  }
  /// The same without a variant.
  template <class E, class Q, class Out>
    requires has_row_scales<E>
  void run(const KvView<E>& layer, const LiveView& plan, std::span<Q> q, std::span<Out> out,
           const RunOptions<Cuda>& options) {
    run(layer, plan, NoVariant{}, q, out, options);
  }

  /// run() of arrays whose elements CUDA's headers name.
  template <class T, class Q, class Out>
    requires is_cuda_element<Out>
  void run(const KvView<T>& layer, const LiveView& plan, std::span<Q> q, std::span<Out> out,
           const RunOptions<Cuda>& options) {
    run(layer, plan, NoVariant{}, q, out, options);
  }
  /// The same with a variant.
  template <class T, AttentionVariant V, class Q, class Out>
    requires is_cuda_element<Out>
  void run(const KvView<T>& layer, const LiveView& plan, const V& variant, std::span<Q> q,
           std::span<Out> out, const RunOptions<Cuda>& options) {
    static_assert(std::is_same_v<detail::own_element<std::remove_const_t<Q>>, T> &&
                      std::is_same_v<detail::own_element<Out>, T>,
                  "ChunkAttention<Cuda>::run: q and out must be of the layer's element type");
    run(layer, plan, variant, std::span<const T>(reinterpret_cast<const T*>(q.data()), q.size()),
        std::span<T>(reinterpret_cast<T*>(out.data()), out.size()), options);
  }

  /// Not of a whole cache: says, at compile time, what to write.
  template <KvProvider Cache, class... Rest>
  void write(const Cache&, const Rest&...) {
    detail::explain_layer<Cache>();
  }
  /// Not of a whole cache: says, at compile time, what to write.
  template <KvProvider Cache, class Q, class Out>
  void run(const Cache&, const LiveView&, const Q&, const Out&, const RunOptions<Cuda>&) {
    detail::explain_layer<Cache>();
  }
  /// The same with a variant.
  template <KvProvider Cache, class V, class Q, class Out>
  void run(const Cache&, const LiveView&, const V&, const Q&, const Out&, const RunOptions<Cuda>&) {
    detail::explain_layer<Cache>();
  }

  /// The limits that it was made with, with values in place of zeros.
  [[nodiscard]] const CudaOptions::Limits& limits() const noexcept { return state_.limits_; }
  /// Stages of the K/V pipeline in shared memory.
  [[nodiscard]] int num_stages() const noexcept { return state_.occupancy_.num_stages; }
  /// Thread blocks of a full launch.
  [[nodiscard]] int num_blocks() const noexcept { return state_.num_blocks(); }

 private:
  friend struct detail::AttentionAccess;

  detail::cuda::DeviceState<HeadDim, ValueDim> state_;
  detail::InUse in_use_;
};

CHUNKATTN_ISA_NAMESPACE_END
