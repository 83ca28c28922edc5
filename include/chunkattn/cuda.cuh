// ChunkAttention<Cuda, HeadDim>: the CUDA backend's face, the CPU's with device pointers and a
// stream.
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

#include <algorithm>
#include <cstdint>
#include <span>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "attention_options.hpp"
#include "detail/attention/sm_scale.hpp"
#include "detail/base/check.hpp"
#include "detail/cuda/checks.cuh"
#include "detail/cuda/kernel_table.cuh"
#include "detail/cuda/kv_cache.cuh"
#include "detail/cuda/plan_upload.cuh"
#include "detail/kv/checks.hpp"
#include "detail/plan/check_current.hpp"
#include "variants.hpp"

CHUNKATTN_NAMESPACE_BEGIN

/// How attention on a GPU is computed.
struct CudaOptions {
  float sm_scale = 0;  ///< factor of q·k, finite; 0: 1 / sqrt(HeadDim)
  CostModel model;     ///< num_blocks is replaced by what the device holds
  /// Device memory of workspace_size(limits) bytes, 256-byte aligned; null: allocated by the
  /// constructor.
  void* workspace = nullptr;
  std::size_t workspace_bytes = 0;  ///< size of `workspace`
  /// Ask the driver whether q, k, v, out are device memory, once per new address.
  bool check_pointers = true;
  /// Refuse a stream while work that was enqueued on another is under way: an event per call. On in
  /// debug builds.
#if defined(NDEBUG)
  bool check_streams = false;
#else
  bool check_streams = true;
#endif
};

CHUNKATTN_NAMESPACE_END

CHUNKATTN_ISA_NAMESPACE_BEGIN

/// Exact attention over shared prefixes on a GPU of compute capability 8.0 or newer. One object
/// serves every layer of one geometry, K/V in half or bfloat16. It belongs to the device that was
/// current at construction and is used on one stream at a time (another may follow when the first
/// has finished what was enqueued), by one thread at a time; several objects may work on several
/// streams. It is neither copied nor moved. After construction nothing is allocated and no kernel
/// is loaded.
///
/// Rows of V, and of the output, have ValueDim elements.
template <int HeadDim, class Exec, int ValueDim>
class ChunkAttention<Cuda, HeadDim, Exec, ValueDim> {
  static constexpr detail::cuda::HeadDims dims{HeadDim, ValueDim};
  static_assert(detail::cuda::supported_head_dims(dims),
                "ChunkAttention<Cuda, HeadDim, Exec, ValueDim>: HeadDim must be 64, 96, 128 or 256 "
                "(or 16), ValueDim, if it differs, 64, 96 or 128 (or 16); with a HeadDim of 192 or "
                "256 it must be 64 or 128. Pad the heads of your model to the next of these with "
                "zeros");

 public:
  /// Device memory the object needs: plan, tasks and partial results at their declared maxima.
  [[nodiscard]] static std::size_t workspace_size(const CudaLimits& limits) {
    return detail::cuda::WorkspaceLayout(detail::cuda::completed(limits), ValueDim).total;
  }

  /// \throws InvalidArgument for limits or options that make no sense or a workspace that is too
  ///         small
  /// \throws DeviceError without a device of compute capability 8.0, or without memory
  explicit ChunkAttention(CudaLimits limits, CudaOptions options = {})
      : limits_(detail::cuda::completed(limits)),
        options_(checked(options)),
        checks_(find_device(), options.check_pointers, options.check_streams),
        own_(own_bytes()),
        upload_(limits_, {limits_.num_qo_heads, limits_.num_kv_heads, HeadDim, ValueDim}, model(),
                options.workspace == nullptr ? own_.data()
                                             : static_cast<std::byte*>(options.workspace)) {
    upload_.set_advance(&detail::cuda::advance_kernel<>);
    detail::cuda::load_kernel(&detail::cuda::advance_kernel<>);
    // The tickets start at zero; each launch leaves them so, and counts itself: no flag has its
    // number.
    const auto& layout = upload_.layout();
    detail::cuda::check_cuda(
        cudaMemset(upload_.memory().counters, 0, layout.partial_out - layout.counters),
        "cudaMemset");
    // It may still be under way, and the caller's stream need not wait for the default one.
    detail::cuda::check_cuda(cudaStreamSynchronize(nullptr), "cudaStreamSynchronize");
  }

  ChunkAttention(const ChunkAttention&) = delete;
  ChunkAttention& operator=(const ChunkAttention&) = delete;

  /// Brings the device's copy of `plan` up to date: uploads what changed since the last call, and
  /// nothing at all for a further decode step. write() and run() call it themselves; call it once
  /// per step before launching a captured graph.
  /// \param plan  what AttentionPlan::build() gave for the step
  void prepare(const LiveView& plan, cudaStream_t stream) {
    detail::check_current(plan);
    checks_.stream(stream);
    upload_.prepare(plan, stream);
    checks_.enqueued(stream);
  }

  /// The same for calls of run() with `variant`: loads its kernel for K/V of T, and makes tasks for
  /// its window. Call it before run() is captured. Afterwards prepare(plan, stream) keeps these
  /// tasks up to date, too.
  /// \throws InvalidArgument where the variant's members make no sense, or its tables are host
  /// memory
  template <class T, AttentionVariant V>
  void prepare(const KvView<T>& layer, const LiveView& plan, const V& variant,
               cudaStream_t stream) {
    detail::check_current(plan);
    check_layer(layer, plan);
    check_variant(variant);
    prepare(plan, stream);
    const bool capturing = detail::cuda::is_capturing(stream);
    (void)kernel_for<T, V>(capturing);
    (void)upload_.schedule_for(detail::cuda::HiddenKeys(variant), plan, capturing, stream);
    checks_.enqueued(stream);
  }

  /// Performs the plan's row copies in this layer, then stores K and V of the plan's query tokens.
  /// Tokens whose target slot is no_slot are skipped. Doing it twice is harmless.
  ///
  /// \param layer  K and V of the layer, device pointers
  /// \param k, v   device memory [num_rows][num_kv_heads][HeadDim] (v: ValueDim), the caller's row
  ///               order, of T or float (rounded to nearest even)
  template <class T, class X>
  void write(const KvView<T>& layer, const LiveView& plan, std::span<X> k, std::span<X> v,
             cudaStream_t stream) {
    using Source = std::remove_const_t<X>;
    static_assert(std::is_same_v<Source, T> || std::is_same_v<Source, float>,
                  "write: K and V must be of the layer's element type or float");
    detail::check_current(plan);
    const PlanView& view = plan;
    check_layer(layer, plan);
    detail::check_own_v(layer);
    const std::size_t kv_lines = line_count(view, limits_.num_kv_heads);
    check_size("k.size()", k.size(), kv_lines * HeadDim);
    check_size("v.size()", v.size(), kv_lines * ValueDim);
    checks_.pointer("k", k.data());
    checks_.pointer("v", v.data());
    prepare(plan, stream);
    const bool capturing = detail::cuda::is_capturing(stream);
    // A graph is replayed with other plans: as large as any may need.
    const std::int64_t heads = limits_.num_kv_heads;
    const std::int64_t lines = (capturing ? limits_.max_rows : view.num_rows) * heads;
    const std::int64_t copies = (capturing ? limits_.max_copies : view.num_copies) * heads;
    constexpr int at_once = detail::cuda::written_lines(std::max(HeadDim, ValueDim));
    const int grid = small_grid(std::max((lines + at_once - 1) / at_once, copies));
    const auto kernel = [&] {
      if constexpr (std::is_same_v<Source, T>)
        return kernels<T>().write;
      else
        return kernels<T>().write_floats;
    }();
    detail::cuda::launch("write_kernel", kernel, grid, detail::cuda::small_threads, 0, stream,
                         {upload_.memory(), layer, k.data(), v.data()});
    checks_.enqueued(stream);
    detail::note_written(layer, view);
  }

  /// Performs the plan's row copies in every layer by one launch; write() then finds them done
  /// (and repeats them harmlessly where it runs).
  /// \param layers  device array of num_layers views of the same geometry
  template <class T>
  void copy_rows(const KvView<T>& first, const KvView<T>* layers, int num_layers,
                 const LiveView& plan, cudaStream_t stream) {
    detail::check_current(plan);
    const PlanView& view = plan;
    check_layer(first, plan);
    detail::check_argument(num_layers > 0, "num_layers", num_layers, "at least 1");
    checks_.pointer("layers", layers, alignof(KvView<T>));
    prepare(plan, stream);
    const bool capturing = detail::cuda::is_capturing(stream);
    if (!capturing && view.num_copies == 0) return;
    const std::int64_t copies = capturing ? limits_.max_copies : view.num_copies;
    detail::cuda::launch("copy_rows_kernel", kernels<T>().copy_rows,
                         small_grid(copies * num_layers * limits_.num_kv_heads),
                         detail::cuda::small_threads, 0, stream,
                         {upload_.memory(), layers, num_layers, limits_.num_kv_heads});
    checks_.enqueued(stream);
  }

  /// Attention of the plan's rows over their whole paths, causal. NaN in, NaN out, as on the CPU
  /// (docs/cpu.md).
  ///
  /// \param layer   K and V of the layer, device pointers
  /// \param q, out  device memory [num_rows][num_qo_heads][HeadDim] (out: ValueDim), the caller's
  ///                row order
  /// \param lse     device memory [num_rows][num_qo_heads], natural log of the sum of exp; or empty
  template <class T>
  void run(const KvView<T>& layer, const LiveView& plan, std::span<const std::type_identity_t<T>> q,
           std::span<std::type_identity_t<T>> out, std::span<float> lse, cudaStream_t stream) {
    run(layer, plan, Plain{}, q, out, lse, stream);
  }

  /// The same with a variant (variants.hpp): a window, a soft cap, sinks, biases, masks,
  /// or what the caller has written. Its type chooses a kernel, which is loaded by the first call
  /// or by prepare(); its members may differ from call to call.
  ///
  /// \param variant  copied; what its tables (Sinks::logits, Alibi::slopes) point to is device
  ///                 memory, and what per_lane() calls can be called there
  /// \throws InvalidArgument where the variant's members make no sense
  template <class T, AttentionVariant V>
  void run(const KvView<T>& layer, const LiveView& plan, const V& variant,
           std::span<const std::type_identity_t<T>> q, std::span<std::type_identity_t<T>> out,
           std::span<float> lse, cudaStream_t stream) {
    static_assert(std::is_same_v<T, half> || std::is_same_v<T, bfloat16>,
                  "ChunkAttention<Cuda>::run: T must be chunkattn::half or chunkattn::bfloat16");
    detail::check_current(plan);
    const PlanView& view = plan;
    check_layer(layer, plan);
    detail::check_written(layer, view);
    const std::size_t lines = line_count(view, limits_.num_qo_heads);
    check_size("q.size()", q.size(), lines * HeadDim);
    check_size("out.size()", out.size(), lines * ValueDim);
    if (!lse.empty()) check_size("lse.size()", lse.size(), lines);
    checks_.pointer("q", q.data());
    checks_.pointer("out", out.data());
    if (!lse.empty()) checks_.pointer("lse", lse.data());
    check_variant(variant);
    prepare(plan, stream);

    const bool capturing = detail::cuda::is_capturing(stream);
    static_assert(
        sizeof(detail::cuda::AttentionArguments<T, V>) <= 4096,
        "ChunkAttention<Cuda>::run: a variant holds too much for a kernel's arguments: let "
        "it point to device memory");
    const auto kernel = kernel_for<T, V>(capturing);
    const int schedule =
        upload_.schedule_for(detail::cuda::HiddenKeys(variant), view, capturing, stream);
    const detail::cuda::CallArguments<T> call{upload_.memory(schedule),
                                              layer,
                                              q.data(),
                                              out.data(),
                                              lse.data(),
                                              limits_.num_kv_heads,
                                              limits_.num_qo_heads / limits_.num_kv_heads,
                                              occupancy_.num_stages,
                                              0};
    const std::int64_t items =
        static_cast<std::int64_t>(upload_.scheduler(schedule).tasks().size()) *
        limits_.num_kv_heads;
    const int most = num_blocks();
    // A graph is replayed with other plans: as many as any may need.
    const int grid = capturing || items > most ? most : static_cast<int>(items);
    detail::cuda::launch("attention_kernel", kernel, grid, detail::cuda::block_threads,
                         shared_bytes(), stream,
                         detail::cuda::with_variant(call, variant, options_.sm_scale));
    checks_.enqueued(stream);
  }

  /// The maxima it was made for.
  [[nodiscard]] const CudaLimits& limits() const noexcept { return limits_; }
  /// Uploads and what they carried, since construction.
  [[nodiscard]] const UploadCounts& counts() const noexcept { return upload_.counts(); }
  /// What the last prepared plan streams: for floors and reports.
  [[nodiscard]] const ScheduleSummary& summary() const noexcept {
    return upload_.scheduler().summary();
  }
  /// Buffers of the K/V pipeline in shared memory.
  [[nodiscard]] int num_stages() const noexcept { return occupancy_.num_stages; }
  /// Blocks of a full launch.
  [[nodiscard]] int num_blocks() const noexcept { return num_sms_ * occupancy_.blocks_per_sm; }

 private:
  template <class T>
  using Kernels = detail::cuda::KernelTable<T, HeadDim, ValueDim>;

  static CudaOptions checked(CudaOptions options) {
    options.sm_scale = detail::resolved_sm_scale(options.sm_scale, HeadDim);
    const CostModel& model = options.model;
    for (const auto& [name, value] :
         {std::pair{"options.model.ps_per_kib", model.ps_per_kib},
          std::pair{"options.model.alone_ps_per_kib", model.alone_ps_per_kib},
          std::pair{"options.model.ps_per_mflop", model.ps_per_mflop},
          std::pair{"options.model.task_ps", model.task_ps},
          std::pair{"options.model.merge_ps", model.merge_ps},
          std::pair{"options.model.wait_ps", model.wait_ps}})
      detail::check_argument(value >= 0, name, value, "a time");
    detail::check_argument(model.min_split_tokens > 0, "options.model.min_split_tokens",
                           model.min_split_tokens, "at least 1");
    return options;
  }

  static int attribute(cudaDeviceAttr which, int device) {
    int value = 0;
    detail::cuda::check_cuda(cudaDeviceGetAttribute(&value, which, device),
                             "cudaDeviceGetAttribute");
    return value;
  }

  int find_device() {
    int count = 0;
    detail::cuda::check_cuda(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
    int device = 0;
    detail::cuda::check_cuda(cudaGetDevice(&device), "cudaGetDevice");
    const int major = attribute(cudaDevAttrComputeCapabilityMajor, device);
    detail::check_argument(major >= 8, "compute capability", major, "8.0 or newer");
    num_sms_ = attribute(cudaDevAttrMultiProcessorCount, device);
    occupancy_ = detail::cuda::choose_occupancy(
        dims, attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
        attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor, device),
        detail::cuda::wanted_blocks(dims));
    const int shared = shared_bytes();
    if (occupancy_.num_stages > 0)  // what the driver says of it counts
      occupancy_.blocks_per_sm =
          std::min(kernels<half>().load(shared), kernels<bfloat16>().load(shared));
    detail::check_argument(occupancy_.blocks_per_sm > 0, "HeadDim", HeadDim,
                           "less on this device: its shared memory is too small");
    return device;
  }

  [[nodiscard]] CostModel model() const noexcept {
    CostModel model = options_.model;
    model.num_blocks = num_blocks();
    return model;
  }

  // Bytes to allocate: none where the caller brought enough.
  [[nodiscard]] std::size_t own_bytes() const {
    const std::size_t needed = workspace_size(limits_);
    if (options_.workspace == nullptr) return needed;
    detail::check_argument(options_.workspace_bytes >= needed, "options.workspace_bytes",
                           options_.workspace_bytes,
                           {"at least workspace_size(limits) = ", needed});
    detail::check_argument(reinterpret_cast<std::uintptr_t>(options_.workspace) % 256 == 0,
                           "options.workspace", options_.workspace, "256-byte alignment");
    return 0;
  }

  template <class T>
  void check_layer(const KvView<T>& layer, const PlanView& plan) {
    detail::check_layer_of_plan(layer, plan);
    detail::check_argument(layer.head_dim == HeadDim, "layer.head_dim", layer.head_dim,
                           {"HeadDim = ", HeadDim});
    detail::check_argument(
        layer.value_dim == (ValueDim == HeadDim ? 0 : ValueDim), "layer.value_dim", layer.value_dim,
        {"0 where V's rows are as K's, else the ValueDim of ChunkAttention, ", ValueDim});
    detail::check_argument(!layer.has_v_in_k(), "layer.v", static_cast<const void*>(layer.v),
                           "memory of V: on CUDA it is not in K's rows");
    detail::check_argument(layer.num_kv_heads == limits_.num_kv_heads, "layer.num_kv_heads",
                           layer.num_kv_heads, {"limits.num_kv_heads = ", limits_.num_kv_heads});
    detail::check_argument(
        layer.stride_token % 8 == 0 && layer.stride_head % 8 == 0 && layer.stride_slot % 8 == 0,
        "layer strides", layer.stride_token, "multiples of 8 elements");
    detail::check_argument(layer.v_stride_token % 8 == 0 && layer.v_stride_head % 8 == 0 &&
                               layer.v_stride_slot % 8 == 0,
                           "layer strides of V", layer.v_stride_token, "multiples of 8 elements");
    const void* k = layer.k_slabs != nullptr ? static_cast<const void*>(layer.k_slabs) : layer.k;
    const void* v = layer.v_slabs != nullptr ? static_cast<const void*>(layer.v_slabs) : layer.v;
    checks_.pointer("layer.k", k, layer.k_slabs != nullptr ? 8 : 16);
    checks_.pointer("layer.v", v, layer.v_slabs != nullptr ? 8 : 16);
  }

  static std::size_t line_count(const PlanView& view, int heads) {
    return static_cast<std::size_t>(view.num_rows) * static_cast<std::size_t>(heads);
  }
  static void check_size(const char* name, std::size_t size, std::size_t expected) {
    detail::check_argument(size == expected, name, size,
                           {"num_rows * heads * elements = ", expected});
  }

  template <class V>
  void check_variant(const V& variant) {
    if constexpr (detail::ChecksItself<V>) variant.check(limits_.num_qo_heads);
    if constexpr (!std::is_same_v<V, Plain>) {
      const auto check = [this](const char* name, const auto& term) {
        detail::cuda::Tables::each(
            term, [&](const float* data) { checks_.pointer(name, data, alignof(float)); });
      };
      const auto terms = detail::cuda::terms_of(variant, options_.sm_scale);
      check("a table of variant.logit", terms.logit);
      check("a table of variant.visible", terms.visible);
      check("a table of variant.sink", terms.sink);
    }
  }

  [[nodiscard]] int shared_bytes() const noexcept {
    return detail::cuda::shared_bytes(dims, occupancy_.num_stages);
  }

  // The kernel of a variant, loaded on this device by the first call that needs it.
  template <class T, class V>
  [[nodiscard]] auto kernel_for(bool capturing) {
    if constexpr (std::is_same_v<V, Plain>) {
      return kernels<T>().attention;
    } else {
      const auto kernel = detail::cuda::attention_kernel_address<T, HeadDim, ValueDim, V>();
      const auto* const address = reinterpret_cast<const void*>(kernel);
      if (std::find(loaded_.begin(), loaded_.end(), address) == loaded_.end()) {
        if (capturing)
          detail::fail_argument("stream", "capturing",
                                "prepare(layer, plan, variant, stream) before the capture: the "
                                "variant's kernel is not loaded yet");
        loaded_.reserve(loaded_.size() + 1);
        detail::cuda::allow_shared(kernel, shared_bytes());
        detail::cuda::load_kernel(kernel);
        loaded_.push_back(address);
      }
      return kernel;
    }
  }

  template <class T>
  [[nodiscard]] auto& kernels() const noexcept {
    return std::get<Kernels<T>>(kernels_);
  }

  [[nodiscard]] int small_grid(std::int64_t blocks) const noexcept {
    const std::int64_t most = std::int64_t{num_sms_} * 8;
    return static_cast<int>(std::max(std::int64_t{1}, std::min(blocks, most)));
  }

  CudaLimits limits_;
  CudaOptions options_;
  int num_sms_ = 0;
  detail::cuda::Occupancy occupancy_;
  std::tuple<Kernels<half>, Kernels<bfloat16>> kernels_;
  std::vector<const void*> loaded_;  // kernels of variants
  detail::cuda::CallChecks checks_;
  detail::cuda::DeviceMemory own_;
  detail::cuda::PlanUpload upload_;
};

CHUNKATTN_ISA_NAMESPACE_END
