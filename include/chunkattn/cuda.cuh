// The CUDA backend: KvCache<Cuda, T> and ChunkAttention<Cuda, HeadDim>, with device pointers and a
// stream. For nvcc.
//
//   ChunkAttention<Cuda, 128> attention({.max_rows = 256, .num_qo_heads = 32, .num_kv_heads = 8});
//   StepView view = plan.build(step);
//   attention.prepare(view, stream);              // uploads what changed; often one tiny kernel
//   for (layer ...) {
//     attention.write(kv.layer(l), view, k, v, stream);
//     attention.run(kv.layer(l), view, q, out, lse, stream);
//   }
//   in_flight.push_back(std::move(step).submitted());
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
#include <iterator>
#include <memory>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "attention_options.hpp"
#include "detail/base/check.hpp"
#include "detail/base/chunk_source.hpp"
#include "detail/base/instruction_sets.hpp"
#include "detail/cuda/device_state.cuh"
#include "detail/cuda/kernel_table.cuh"
#include "detail/cuda/merge_states.cuh"
#include "detail/cuda/runtime.cuh"
#include "detail/kv/cache_geometry.hpp"
#include "detail/kv/checks.hpp"
#include "detail/plan/check_current.hpp"
#include "kv_cache.hpp"
#include "merge_state.hpp"
#include "tree_options.hpp"
#include "variants.hpp"

CHUNKATTN_NAMESPACE_BEGIN

/// K/V in device memory: in each layer K [chunk][kv_head][token][head_dim] and V
/// [chunk][kv_head][token][value_dim], so that an engine's own kernels can write it through a
/// KvView.
///
/// Chunks are allocated in slabs of 2^n, each for all layers; growth adds slabs and moves none. The
/// tables of slab addresses are on the device and never move, so views and captured graphs stay
/// valid while the cache grows. Growth allocates, and copies a few bytes synchronously: call grow()
/// when a request is admitted to keep it out of decode steps. It belongs to the device that was
/// current at construction, and grows there whichever is current.
///
/// \tparam T  half or bfloat16 (or CUDA's __half or __nv_bfloat16, which are the same here), or
///             std::int8_t or float8_e4m3, with a float scale for each row, which write() makes
template <class T>
class KvCache<Cuda, T> {
  static_assert(std::is_same_v<T, half> || std::is_same_v<T, bfloat16> || has_row_scales<T>,
                "KvCache<Cuda, T>: T must be chunkattn::half, chunkattn::bfloat16, std::int8_t or "
                "chunkattn::float8_e4m3");

 public:
  /// Chunks that the tables of slab addresses have room for, by default.
  static constexpr std::size_t default_chunk_limit = std::size_t{1} << 22;

  /// Memory for the chunks of `tree`, wherever that is moved: layer() grows it to
  /// tree.num_chunks() chunks. Throws InvalidArgument for options that make no sense.
  template <TokenType Token, int ChunkSize, ChunkAllocator Allocator, RetentionPolicy Retention>
  KvCache(const PrefixTree<Token, ChunkSize, Allocator, Retention>& tree, KvCacheOptions options,
          std::size_t chunk_limit = default_chunk_limit)
      : KvCache(detail::ChunkAccess::source(tree), ChunkSize, options, tree.num_chunks(),
                chunk_limit) {}

  /// Memory for `num_chunks` chunks of `chunk_size` tokens, without a tree; grow() adds to it, up
  /// to `chunk_limit` chunks.
  KvCache(int chunk_size, KvCacheOptions options, std::size_t num_chunks = 0,
          std::size_t chunk_limit = default_chunk_limit)
      : KvCache(detail::ChunkSource{}, chunk_size, options, num_chunks, chunk_limit) {}

  /// Provides memory for the chunks [0, num_chunks) in every layer; moves none.
  /// \throws InvalidArgument  beyond chunk_limit
  /// \throws DeviceError      without memory, with nothing changed
  void grow(std::size_t num_chunks) {
    detail::check_argument(num_chunks <= max_slabs_ << slab_shift_, "num_chunks", num_chunks,
                           {"at most chunk_limit = ", max_slabs_ << slab_shift_});
    const std::size_t slabs = (num_chunks + per_slab() - 1) >> slab_shift_;
    std::vector<detail::cuda::DeviceMemory> made(std::max(slabs, slabs_.size()) - slabs_.size());
    if (made.empty()) {
      num_chunks_ = std::max(num_chunks_, num_chunks);
      return;
    }
    check_no_capture(num_chunks);
    const detail::cuda::CurrentDevice current(device_);
    slabs_.reserve(slabs_.size() + made.size());
    for (auto& slab : made) slab = detail::cuda::DeviceMemory(bytes_per_chunk() << slab_shift_);
    std::vector<std::byte*> addresses = enter(made);
    std::move(made.begin(), made.end(), std::back_inserter(slabs_));
    addresses_ = std::move(addresses);
    num_chunks_ = std::max(num_chunks_, num_chunks);
  }

  /// A view of K and V of layer `index`, in device memory, for all chunks that the tree has handed
  /// out so far. Grows the memory if the tree has grown; inside a capture it throws InvalidArgument
  /// instead: call grow() before.
  /// \param stream  the stream that may be capturing. Captures of a non-blocking stream are noticed
  ///                only if it is given here.
  [[nodiscard]] KvView<T> layer(int index, cudaStream_t stream = nullptr) {
    detail::check_argument(index >= 0 && index < options_.num_layers, "layer", index,
                           {"less than num_layers, ", options_.num_layers});
    detail::check_argument(table_.data() != nullptr, "layer", index,
                           "a cache that was not moved from");
    const std::size_t needed = chunks_.num_chunks();
    if (needed > num_chunks_) {
      check_no_capture(needed, stream);
      grow(needed);
    }
    return view(index, reinterpret_cast<std::byte* const*>(table_.data()), max_slabs_);
  }
  /// layer() for the host: k_row() and v_row() say there where rows lie, until the memory grows.
  [[nodiscard]] KvView<T> host_layer(int index) {
    (void)layer(index);  // checks, and grows
    return view(index, addresses_.data(), slabs_.size());
  }
  /// For gather_kv() and scatter_kv(): copies device memory to the host now, and back. What streams
  /// that do not wait for the default one have to do with it must have finished.
  void copy_out(const void* from, std::byte* to, std::size_t bytes) const {
    const detail::cuda::CurrentDevice current(device_);
    detail::cuda::copy_to_host(to, from, bytes);
  }
  /// Copies it back.
  void copy_in(void* to, const std::byte* from, std::size_t bytes) const {
    const detail::cuda::CurrentDevice current(device_);
    detail::cuda::copy_now(static_cast<std::byte*>(to), bytes, from, bytes, 1);
  }

  /// The number of the tree whose chunks these are, 0 for none.
  [[nodiscard]] std::uint64_t tree_id() const noexcept { return chunks_.tree_id; }
  /// The options that it was made with.
  [[nodiscard]] const KvCacheOptions& options() const noexcept { return options_; }
  /// Chunks that have memory in every layer.
  [[nodiscard]] std::size_t num_chunks() const noexcept { return num_chunks_; }
  /// Bytes of K and V of one chunk, all layers together.
  [[nodiscard]] std::size_t bytes_per_chunk() const noexcept {
    return static_cast<std::size_t>(options_.num_layers) * part_offset(num_parts);
  }
  /// Bytes of device memory allocated, all layers together.
  [[nodiscard]] std::size_t bytes() const noexcept {
    return slabs_.size() * (bytes_per_chunk() << slab_shift_);
  }

 private:
  friend struct detail::ChunkAccess;
  KvCache(detail::ChunkSource source, int chunk_size, const KvCacheOptions& options,
          std::size_t num_chunks, std::size_t chunk_limit = default_chunk_limit)
      : options_(options), chunk_size_(chunk_size), chunks_(std::move(source)) {
    detail::check_kv_geometry(options, chunk_size, sizeof(T));
    check_no_capture(num_chunks);
    detail::check_argument(!options.v_in_k, "options.v_in_k", options.v_in_k,
                           "false: on CUDA V has rows of its own");
    while (slab_shift_ < 16 && bytes_per_chunk() << slab_shift_ < slab_target) ++slab_shift_;
    max_slabs_ = std::max<std::size_t>(1, (chunk_limit + per_slab() - 1) >> slab_shift_);
    table_ = detail::cuda::DeviceMemory(max_slabs_ * num_tables() * sizeof(std::byte*));
    grow(num_chunks);
    write_check_ = detail::make_write_check(options, chunks_);
  }

  static constexpr std::size_t slab_target = std::size_t{64} << 20;

  [[nodiscard]] std::size_t per_slab() const noexcept { return std::size_t{1} << slab_shift_; }
  [[nodiscard]] std::size_t num_tables() const noexcept {
    return num_parts * static_cast<std::size_t>(options_.num_layers);
  }
  // K, V, and of 8-bit elements their scales.
  static constexpr std::size_t num_parts = has_row_scales<T> ? 4 : 2;
  // Where a part of one layer begins, in bytes of one chunk; after the last one: of all.
  [[nodiscard]] std::size_t part_offset(std::size_t part) const noexcept {
    const std::size_t rows =
        static_cast<std::size_t>(options_.num_kv_heads) * static_cast<std::size_t>(chunk_size_);
    const std::size_t of_row[] = {static_cast<std::size_t>(options_.head_dim) * sizeof(T),
                                  static_cast<std::size_t>(options_.dim_of_v()) * sizeof(T),
                                  sizeof(float), sizeof(float)};
    std::size_t bytes = 0;
    for (std::size_t p = 0; p < part; ++p) bytes += (rows * of_row[p] + 15) / 16 * 16;
    return bytes;
  }

  // With tables [layer][part][table_size] of slab addresses.
  [[nodiscard]] KvView<T> view(int index, std::byte* const* tables, std::size_t table_size) const {
    tables += static_cast<std::size_t>(index) * num_parts * table_size;
    KvView<T> view;
    view.tree_id = chunks_.tree_id;
    view.layer = index;
    view.write_check = write_check_.get();
    view.k_slabs = reinterpret_cast<T* const*>(tables);
    view.v_slabs = reinterpret_cast<T* const*>(tables + table_size);
    if constexpr (has_row_scales<T>) {
      view.k_scale_slabs = reinterpret_cast<float* const*>(tables + 2 * table_size);
      view.v_scale_slabs = reinterpret_cast<float* const*>(tables + 3 * table_size);
      view.scale_stride_head = chunk_size_;
      view.scale_stride_chunk = view.scale_stride_head * options_.num_kv_heads;
    }
    view.slab_shift = slab_shift_;
    view.num_chunks = static_cast<std::int32_t>(num_chunks_);
    view.num_kv_heads = options_.num_kv_heads;
    view.head_dim = options_.head_dim;
    view.chunk_size = chunk_size_;
    view.stride_token = options_.head_dim;
    view.stride_head = view.stride_token * chunk_size_;
    view.stride_chunk = view.stride_head * options_.num_kv_heads;
    if (options_.dim_of_v() != options_.head_dim) {
      view.value_dim = options_.value_dim;
      view.v_stride_token = options_.value_dim;
      view.v_stride_head = view.v_stride_token * chunk_size_;
      view.v_stride_chunk = view.v_stride_head * options_.num_kv_heads;
    }
    return view;
  }

  // Memory is allocated, and its addresses are copied by the default stream.
  void check_no_capture(std::size_t needed, cudaStream_t stream = nullptr) const {
    const detail::cuda::CurrentDevice current(device_);
    detail::check_argument(
        !detail::cuda::is_capture_near(stream), "num_chunks", num_chunks_,
        {"grow(", needed, ") before the capture: memory cannot be allocated inside it"});
  }

  // Puts addresses of further slabs into the tables, where nobody reads them yet. Returns all.
  [[nodiscard]] std::vector<std::byte*> enter(const std::vector<detail::cuda::DeviceMemory>& made) {
    std::vector<std::byte*> all, places;  // [table][slab]
    for (std::size_t t = 0; t < num_tables();
         ++t) {  // K of layer 0, V of layer 0, ..., K of 1, ...
      const std::size_t begin = t / num_parts * part_offset(num_parts) + part_offset(t % num_parts);
      for (std::size_t s = 0; s < slabs_.size(); ++s)
        all.push_back(slabs_[s].data() + (begin << slab_shift_));
      for (const auto& slab : made) {
        places.push_back(slab.data() + (begin << slab_shift_));
        all.push_back(places.back());
      }
    }
    detail::cuda::copy_now(table_.data() + slabs_.size() * sizeof(std::byte*),
                           max_slabs_ * sizeof(std::byte*), places.data(),
                           made.size() * sizeof(std::byte*), num_tables());
    return all;
  }

  int device_ = detail::cuda::current_device();
  KvCacheOptions options_;
  int chunk_size_;
  int slab_shift_ = 0;
  std::size_t max_slabs_ = 0;
  std::size_t num_chunks_ = 0;
  detail::cuda::DeviceMemory table_;
  std::vector<detail::cuda::DeviceMemory> slabs_;
  std::vector<std::byte*> addresses_;  // [layer][part][slab]
  detail::ChunkSource chunks_;
  std::shared_ptr<detail::WriteCheck> write_check_;
};

static_assert(KvProvider<KvCache<Cuda, half>>);

template <class T>
  requires is_cuda_element<T>
class KvCache<Cuda, T>
    : public KvCache<Cuda, std::conditional_t<std::is_same_v<T, __half>, half, bfloat16>> {
 public:
  using KvCache<Cuda, std::conditional_t<std::is_same_v<T, __half>, half, bfloat16>>::KvCache;
};

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
/// there whichever is current; the default stream is that device's. One thread at a time uses it,
/// on one stream at a time (another one when the first has finished what was enqueued); several
/// objects may work on several streams. It can be neither copied nor moved. After construction it
/// allocates nothing and loads no kernel, except those of variants.
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
  /// Bytes of device memory that an object needs for its plan, tasks and partial results.
  [[nodiscard]] static std::size_t workspace_size(const CudaOptions::Limits& limits) {
    return detail::cuda::WorkspaceLayout(detail::cuda::completed(limits), ValueDim).total;
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
  void prepare(const LiveView& plan, cudaStream_t stream) { state_.prepare(plan, stream); }

  /// Prepares calls of run() with `variant`: what prepare(plan, stream) does, and it loads the
  /// variant's kernel for K/V of T and makes the tasks for its window. Call it before run() is
  /// captured; from then on prepare(plan, stream) keeps these tasks up to date, too.
  /// \tparam Q  of q and out, where K/V has 8 bits
  /// \throws InvalidArgument where the variant's members make no sense
  template <class T, AttentionVariant V, class Q = std::conditional_t<has_row_scales<T>, half, T>>
  void prepare(const KvView<T>& layer, const LiveView& plan, const V& variant,
               cudaStream_t stream) {
    detail::check_current(plan);
    const detail::cuda::CurrentDevice device(state_.checks_.device());
    state_.check_layer(layer, plan);
    state_.check_variant(variant);
    prepare(plan, stream);
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
    detail::check_current(plan);
    const detail::cuda::CurrentDevice device(state_.checks_.device());
    const PlanView& view = plan;
    state_.check_layer(layer, plan);
    detail::check_own_v(layer);
    const bool copies_only = k.empty() && v.empty();
    if (!copies_only) {
      const std::size_t kv_lines = state_.line_count(view, state_.limits_.num_kv_heads);
      state_.check_size("k.size()", k.size(), kv_lines * HeadDim);
      state_.check_size("v.size()", v.size(), kv_lines * ValueDim);
      state_.checks_.pointer("k", k.data());
      state_.checks_.pointer("v", v.data());
    }
    prepare(plan, stream);
    const bool capturing = detail::cuda::is_capturing(stream);
    // A graph is replayed with other plans: as large as any may need.
    const std::int64_t heads = state_.limits_.num_kv_heads;
    const std::int64_t lines = (capturing ? state_.limits_.max_rows : view.num_rows) * heads;
    const std::int64_t copies = (capturing ? state_.limits_.max_copies : view.num_copies) * heads;
    constexpr int at_once = has_row_scales<T>
                                ? detail::cuda::small_threads / 64  // two warps each
                                : detail::cuda::written_lines(std::max(HeadDim, ValueDim));
    const int grid = state_.small_grid(std::max((lines + at_once - 1) / at_once, copies));
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
  /// \param lse     device memory [num_rows][num_qo_heads], gets the natural logarithm of the
  ///                softmax denominators; or empty
  /// \throws InvalidArgument, with nothing changed, for sizes that do not fit each other, a plan
  ///         that is out of date, and a layer of another tree
  template <class T>
  void run(const KvView<T>& layer, const LiveView& plan, std::span<const std::type_identity_t<T>> q,
           std::span<std::type_identity_t<T>> out, std::span<float> lse, cudaStream_t stream) {
    run(layer, plan, Plain{}, q, out, lse, stream);
  }

  /// run() with a variant (variants.hpp): a window, a soft cap, sinks, biases, masks, or one of
  /// your own. Its type chooses a kernel, which the first call or prepare() loads; its members may
  /// differ from call to call.
  ///
  /// \param layer, plan, q, out, lse  as of run() without a variant; lse counts sinks
  /// \param variant                   copied. Its tables (Sinks::logits, Alibi::slopes) are in
  ///                                  device memory; functions of per_lane() are device functions
  /// \throws InvalidArgument as run() without a variant, and if the variant's members make no sense
  template <class T, AttentionVariant V>
  void run(const KvView<T>& layer, const LiveView& plan, const V& variant,
           std::span<const std::type_identity_t<T>> q, std::span<std::type_identity_t<T>> out,
           std::span<float> lse, cudaStream_t stream) {
    static_assert(std::is_same_v<T, half> || std::is_same_v<T, bfloat16>,
                  "ChunkAttention<Cuda>::run: T must be chunkattn::half or chunkattn::bfloat16");
    state_.template run<T>(layer, plan, variant, q, out, lse, stream);
  }

  /// run() over K/V of 8 bits. Q and outputs are half or bfloat16; K's scales are applied to the
  /// logits, V's rows are rounded to the outputs' type.
  template <class E, AttentionVariant V, class Q, class Out>
    requires has_row_scales<E>
  void run(const KvView<E>& layer, const LiveView& plan, const V& variant, std::span<Q> q,
           std::span<Out> out, std::span<float> lse, cudaStream_t stream) {
    using T = detail::own_element<Out>;
    static_assert(sizeof(T) == 2 && std::is_same_v<detail::own_element<std::remove_const_t<Q>>, T>,
                  "ChunkAttention<Cuda>::run: q and out must be of one type, half or bfloat16");
    state_.template run<T>(layer, plan, variant,
                           std::span<const T>(reinterpret_cast<const T*>(q.data()), q.size()),
                           std::span<T>(reinterpret_cast<T*>(out.data()), out.size()), lse, stream);
  }
  /// The same without a variant.
  template <class E, class Q, class Out>
    requires has_row_scales<E>
  void run(const KvView<E>& layer, const LiveView& plan, std::span<Q> q, std::span<Out> out,
           std::span<float> lse, cudaStream_t stream) {
    run(layer, plan, Plain{}, q, out, lse, stream);
  }

  /// run() of arrays whose elements CUDA's headers name.
  template <class T, class Q, class Out>
    requires is_cuda_element<Out>
  void run(const KvView<T>& layer, const LiveView& plan, std::span<Q> q, std::span<Out> out,
           std::span<float> lse, cudaStream_t stream) {
    run(layer, plan, Plain{}, q, out, lse, stream);
  }
  /// The same with a variant.
  template <class T, AttentionVariant V, class Q, class Out>
    requires is_cuda_element<Out>
  void run(const KvView<T>& layer, const LiveView& plan, const V& variant, std::span<Q> q,
           std::span<Out> out, std::span<float> lse, cudaStream_t stream) {
    static_assert(std::is_same_v<detail::own_element<std::remove_const_t<Q>>, T> &&
                      std::is_same_v<detail::own_element<Out>, T>,
                  "ChunkAttention<Cuda>::run: q and out must be of the layer's element type");
    run(layer, plan, variant, std::span<const T>(reinterpret_cast<const T*>(q.data()), q.size()),
        std::span<T>(reinterpret_cast<T*>(out.data()), out.size()), lse, stream);
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
};

CHUNKATTN_ISA_NAMESPACE_END
