// DeviceState: what the CUDA backend keeps of a device between calls, and its checks of a call.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "../../attention_options.hpp"
#include "../../kv_view.hpp"
#include "../../plan_view.hpp"
#include "../../variants.hpp"
#include "../attention/sm_scale.hpp"
#include "../kv/checks.hpp"
#include "../plan/check_current.hpp"
#include "../support/check.hpp"
#include "../support/config.hpp"
#include "kernel_table.cuh"
#include "plan_upload.cuh"

CHUNKATTN_NAMESPACE_BEGIN
namespace detail::cuda {

/// Checks of one object's calls. Refuses by InvalidArgument.
class CallChecks {
 public:
  /// \param pointers  ask the driver about addresses, once about each
  /// \param streams   watch that two streams are not used at the same time
  CallChecks(int device, bool pointers, bool streams)
      : device_(device), pointers_(pointers), streams_(streams) {
    known_.reserve(most_known);
#if CUDART_VERSION >= 12080  // whose cudaStreamGetDevice may be newer than the driver
    int version = 0;
    check_cuda(cudaDriverGetVersion(&version), "cudaDriverGetVersion");
    knows_devices_ = version >= 12080;
#endif
  }

  [[nodiscard]] int device() const noexcept { return device_; }

  /// `pointer` is memory that the device can read, at a multiple of `alignment`.
  void pointer(const char* name, const void* pointer, std::size_t alignment = 16) {
    detail::check_argument(pointer != nullptr, name, pointer, "device memory");
    detail::check_argument(reinterpret_cast<std::uintptr_t>(pointer) % alignment == 0, name,
                           pointer, {"an address that is a multiple of ", alignment});
    if (!pointers_) return;
    const auto at = std::lower_bound(known_.begin(), known_.end(), pointer, std::less<>());
    if (at != known_.end() && *at == pointer) return;
    cudaPointerAttributes attributes{};
    check_cuda(cudaPointerGetAttributes(&attributes, pointer), "cudaPointerGetAttributes");
    detail::check_argument(
        attributes.type != cudaMemoryTypeUnregistered && attributes.devicePointer != nullptr, name,
        pointer, "device memory, this is host memory");
    detail::check_argument(attributes.type != cudaMemoryTypeDevice || attributes.device == device_,
                           name, attributes.device, {"memory of device ", device_});
    // More than a model of 128 layers with buffers of their own uses: they are not of one.
    if (known_.size() == most_known)
      known_.assign(1, pointer);
    else
      known_.insert(at, pointer);
  }

  /// `stream` is of the device (older drivers cannot tell), and what was enqueued on another has
  /// finished.
  void stream(cudaStream_t stream) {
    if (known_stream_ && stream == stream_) return;
#if CUDART_VERSION >= 12080
    if (knows_devices_) {
      int device = 0;
      check_cuda(cudaStreamGetDevice(stream, &device), "cudaStreamGetDevice");
      detail::check_argument(device == device_, "stream", device, {"a stream of device ", device_});
    }
#endif
    // What is captured runs later, and nothing may be asked meanwhile.
    if (streams_ && known_stream_ && !is_capturing(stream))
      detail::check_argument(last_work_.has_passed(), "stream", static_cast<const void*>(stream),
                             {"the stream of the calls before, ", static_cast<const void*>(stream_),
                              ", until it has finished their work"});
    stream_ = stream;
    known_stream_ = true;
  }

  /// Something was enqueued on `stream`.
  void enqueued(cudaStream_t stream) {
    // An event inside a capture belongs to the graph and does not tell when that runs.
    if (streams_ && !is_capturing(stream)) last_work_.record(stream);
  }

 private:
  static constexpr std::size_t most_known = 1536;

  int device_;
  bool pointers_, streams_;
  bool knows_devices_ = false;      // the driver, of streams
  std::vector<const void*> known_;  // sorted addresses that the driver was asked about
  cudaStream_t stream_ = nullptr;
  bool known_stream_ = false;
  Event last_work_;
};

/// What ChunkAttention<Cuda> keeps: the device, its kernels, the plan's copy there; and its checks.
template <int HeadDim, int ValueDim>
class DeviceState {
  static constexpr HeadDims dims{HeadDim, ValueDim};

 public:
  DeviceState(const CudaOptions::Limits& limits, const CudaOptions& options)
      : limits_(completed(limits)),
        options_(checked(options)),
        checks_(find_device(), options.check_pointers, options.check_streams),
        own_(own_bytes()),
        upload_(limits_, {limits_.num_qo_heads, limits_.num_kv_heads, HeadDim, ValueDim}, model(),
                num_sms_ * most_blocks(dims),
                options.workspace == nullptr ? own_.data()
                                             : static_cast<std::byte*>(options.workspace)) {
    upload_.set_kernels(&begin_step_kernel<false>, &begin_step_kernel<true>);
    load_kernel(&begin_step_kernel<false>);
    load_kernel(&begin_step_kernel<true>);
    upload_.zero_counters();
  }

  /// Bytes that an object on the current device needs.
  [[nodiscard]] static std::size_t workspace_size(const CudaOptions::Limits& limits) {
    const int sms = device_attribute(cudaDevAttrMultiProcessorCount, current_device());
    return WorkspaceLayout(completed(limits), dims, sms * most_blocks(dims)).total;
  }

  /// Blocks of a full launch.
  [[nodiscard]] int num_blocks() const noexcept { return num_sms_ * occupancy_.blocks_per_sm; }
  static CudaOptions checked(CudaOptions options) {
    options.sm_scale = resolved_sm_scale(options.sm_scale, HeadDim);
    const CudaOptions::Tuning& tuning = options.tuning;
    for (const auto& [name, value] :
         {std::pair{"options.tuning.ps_per_kib", tuning.ps_per_kib},
          std::pair{"options.tuning.alone_ps_per_kib", tuning.alone_ps_per_kib},
          std::pair{"options.tuning.ps_per_mflop", tuning.ps_per_mflop},
          std::pair{"options.tuning.task_ps", tuning.task_ps},
          std::pair{"options.tuning.merge_ps", tuning.merge_ps},
          std::pair{"options.tuning.wait_ps", tuning.wait_ps}})
      check_argument(value >= 0, name, value, "a time");
    check_argument(options.reduce == CudaOptions::Reduce::deterministic ||
                       options.reduce == CudaOptions::Reduce::batch_invariant,
                   "options.reduce", static_cast<int>(options.reduce),
                   "Reduce::deterministic or Reduce::batch_invariant");
    check_argument(tuning.min_split_tokens > 0, "options.tuning.min_split_tokens",
                   tuning.min_split_tokens, "at least 1");
    return options;
  }

  int find_device() {
    int count = 0;
    check_cuda(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
    const int device = current_device();
    if (is_capture_near(nullptr))
      fail_argument("stream", "capturing",
                    "objects made before the capture: memory cannot be allocated inside it");
    const int major = device_attribute(cudaDevAttrComputeCapabilityMajor, device);
    if (major < 8)
      detail::fail(
          DeviceError(detail::joined({"ChunkAttention<Cuda> on device ", device}),
                      static_cast<int>(cudaErrorNoKernelImageForDevice),
                      detail::joined({"compute capability ", major, ": expected 8.0 or newer"})));
    num_sms_ = device_attribute(cudaDevAttrMultiProcessorCount, device);
    const int per_block = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    const int per_sm = device_attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
    int rows = limits_.max_rows * (limits_.num_qo_heads / limits_.num_kv_heads);
    if (is_invariant()) rows = (std::max)(rows, invariant_tile_rows);
    occupancy_ = choose_occupancy(dims, rows, per_block, per_sm, wanted_blocks(dims));
    if constexpr (supported_head_dims(dims_of<std::int8_t>))
      quantized_occupancy_ =
          choose_occupancy(dims_of<std::int8_t>, rows, per_block, per_sm, wanted_blocks(dims));
    int blocks = (std::numeric_limits<int>::max)();  // what the driver says of them counts
    for (const UsedKernel* kernel = UsedKernels<HeadDim, ValueDim>::first;
         kernel != nullptr && occupancy_.num_stages > 0; kernel = kernel->next) {
      blocks = (std::min)(blocks, kernel->load(shared_bytes()));
      loaded_.push_back(kernel->address);
    }
    if (blocks != (std::numeric_limits<int>::max)())
      occupancy_.blocks_per_sm = (std::min)(blocks, most_blocks(dims));
    check_argument(occupancy_.blocks_per_sm > 0, "HeadDim", HeadDim,
                   "less on this device: its shared memory is too small");
    return device;
  }

  [[nodiscard]] bool is_invariant() const noexcept {
    return options_.reduce == CudaOptions::Reduce::batch_invariant;
  }
  [[nodiscard]] CostModel model() const noexcept {
    return {options_.tuning, num_blocks(), (std::max)(occupancy_.tile_rows, usual_tile_rows),
            is_invariant()};
  }

  // Bytes to allocate: none where the caller brought enough.
  [[nodiscard]] std::size_t own_bytes() {
    const std::size_t needed = workspace_size(limits_);
    if (options_.workspace == nullptr) return needed;
    check_argument(options_.workspace_bytes >= needed, "options.workspace_bytes",
                   options_.workspace_bytes, {"at least workspace_size(limits) = ", needed});
    check_argument(reinterpret_cast<std::uintptr_t>(options_.workspace) % 256 == 0,
                   "options.workspace", options_.workspace, "256-byte alignment");
    checks_.pointer("options.workspace", options_.workspace);
    return 0;
  }

  template <class T>
  void check_layer(const KvView<T>& layer, const PlanView& plan) {
    static_assert(
        supported_head_dims(dims_of<T>),
        "ChunkAttention<Cuda>: K/V of 8 bits have heads of up to 128 elements, those of V "
        "no longer than those of K");
    check_layer_of_plan(layer, plan);
    check_argument(layer.head_dim == HeadDim, "layer.head_dim", layer.head_dim,
                   {"HeadDim = ", HeadDim});
    check_argument(
        layer.value_dim == (ValueDim == HeadDim ? 0 : ValueDim), "layer.value_dim", layer.value_dim,
        {"0 where V's rows are as K's, else the ValueDim of ChunkAttention, ", ValueDim});
    check_argument(!layer.has_v_in_k(), "layer.v", static_cast<const void*>(layer.v),
                   "memory of V: on CUDA it is not in K's rows");
    check_argument(layer.num_kv_heads == limits_.num_kv_heads, "layer.num_kv_heads",
                   layer.num_kv_heads, {"limits.num_kv_heads = ", limits_.num_kv_heads});
    check_chunks(layer, plan);
    check_row_scales(layer, "kernels of this device read a scale for each row");
    constexpr int unit = 16 / static_cast<int>(sizeof(T));
    check_argument(layer.stride_token % unit == 0 && layer.stride_head % unit == 0 &&
                       layer.stride_chunk % unit == 0,
                   "layer strides", layer.stride_token, {"multiples of ", unit, " elements"});
    check_argument(layer.v_stride_token % unit == 0 && layer.v_stride_head % unit == 0 &&
                       layer.v_stride_chunk % unit == 0,
                   "layer strides of V", layer.v_stride_token,
                   {"multiples of ", unit, " elements"});
    const auto check = [this](const char* name, const auto* dense, const auto* slabs) {
      checks_.pointer(name, slabs != nullptr ? static_cast<const void*>(slabs) : dense,
                      slabs != nullptr      ? 8
                      : sizeof(*dense) == 4 ? 4
                                            : 16);
    };
    check("layer.k", layer.k, layer.k_slabs);
    check("layer.v", layer.v, layer.v_slabs);
    if constexpr (has_row_scales<T>) {
      check("layer.k_scale", layer.k_scale, layer.k_scale_slabs);
      check("layer.v_scale", layer.v_scale, layer.v_scale_slabs);
    }
  }

  // That memory of one's own has the plan's chunks (slabs grow behind a view): when these have
  // changed, since decode steps have many pieces.
  template <class T>
  void check_chunks(const KvView<T>& layer, const PlanView& plan) {
    if (layer.k_slabs != nullptr) return;
    check_argument(layer.chunk_size == plan.chunk_size, "layer.chunk_size", layer.chunk_size,
                   {"the plan's chunk size, ", plan.chunk_size});
    const std::array now{std::uint64_t{reinterpret_cast<std::uintptr_t>(plan.pieces)},
                         plan.segments_version, plan.pieces_version,
                         static_cast<std::uint64_t>(layer.num_chunks)};
    if (now == checked_pieces_) return;
    check_pieces(layer, plan);
    checked_pieces_ = now;
  }

  void prepare(const LiveView& plan, cudaStream_t stream) {
    check_current(plan);
    const CurrentDevice device(checks_.device());
    checks_.stream(stream);
    upload_.prepare(plan, stream);
    checks_.enqueued(stream);
  }

  /// Loads the kernel for K/V of type E and queries of type T; which schedule it takes.
  template <class T, class E, class V>
  int schedule_for(const V& variant, const PlanView& plan, bool capturing, cudaStream_t stream) {
    using Kind = KernelVariant<E, V>;
    (void)kernel_for<T, Kind>(capturing);
    upload_.use_elements(static_cast<int>(sizeof(E)));
    return upload_.schedule_for(HiddenKeys(variant), large_tiles<Kind, dims>, plan, capturing,
                                stream);
  }

  template <class T, class E, class V>
  void run(const KvView<E>& layer, const LiveView& plan, const V& variant, std::span<const T> q,
           std::span<T> out, const RunOptions<Cuda>& options) {
    const std::span<float> lse = options.lse;
    const cudaStream_t stream = options.stream;
    using Kind = KernelVariant<E, V>;
    check_current(plan);
    const CurrentDevice device(checks_.device());
    const PlanView& view = plan;
    check_layer(layer, plan);
    check_written(layer, view);
    const std::size_t lines = line_count(view, limits_.num_qo_heads);
    check_size("q.size()", q.size(), lines * HeadDim);
    check_size("out.size()", out.size(), lines * ValueDim);
    if (!lse.empty()) check_size("lse.size()", lse.size(), lines);
    checks_.pointer("q", q.data());
    checks_.pointer("out", out.data());
    if (!lse.empty()) checks_.pointer("lse", lse.data());
    check_out_beside_q(q, out);
    if (!lse.empty()) check_lse_beside(lse, q, out);
    check_variant(variant);
    check_window(variant, view);
    prepare(plan, stream);

    const bool capturing = is_capturing(stream);
    static_assert(
        sizeof(AttentionArguments<T, Kind>) <= 4096,
        "ChunkAttention<Cuda>::run: a variant holds too much for a kernel's arguments: let "
        "it point to device memory");
    const int schedule = schedule_for<T, E>(variant, view, capturing, stream);
    const CallArguments<T> call{upload_.memory(schedule),
                                {},
                                q.data(),
                                out.data(),
                                lse.data(),
                                limits_.num_kv_heads,
                                limits_.num_qo_heads / limits_.num_kv_heads,
                                occupancy<E>().num_stages,
                                0};
    const std::int64_t items =
        static_cast<std::int64_t>(upload_.scheduler(schedule).tasks().size()) *
        limits_.num_kv_heads;
    const int most = num_blocks<E>();
    // A graph is replayed with other plans: as many as any may need.
    const int grid = capturing || items > most ? most : static_cast<int>(items);
    launch("attention_kernel", kernel_for<T, Kind>(capturing), grid, block_threads,
           shared_bytes<E>(), stream,
           attention_arguments(call, layer, variant, *options_.sm_scale));
    checks_.enqueued(stream);
  }

  static std::size_t line_count(const PlanView& view, int heads) {
    return static_cast<std::size_t>(view.num_rows) * static_cast<std::size_t>(heads);
  }
  static void check_size(const char* name, std::size_t size, std::size_t expected) {
    check_argument(size == expected, name, size, {"num_rows * heads * elements = ", expected});
  }

  template <class V>
  void check_variant(const V& variant) {
    if constexpr (ChecksItself<V>) variant.check(limits_.num_qo_heads);
    if constexpr (!std::is_same_v<V, NoVariant>) {
      const auto check = [this](const char* name, const auto& term) {
        for_each_table(term,
                       [&](const float* data) { checks_.pointer(name, data, alignof(float)); });
      };
      const auto terms = terms_of(variant, *options_.sm_scale);
      check("a table of variant.logit", terms.logit);
      check("a table of variant.visible", terms.visible);
      check("a table of variant.sink", terms.sink);
    }
  }

  // By the element type of K/V.
  template <class E>
  static constexpr HeadDims dims_of{HeadDim, ValueDim, static_cast<int>(sizeof(E))};
  template <class E>
  [[nodiscard]] const Occupancy& occupancy() const noexcept {
    return has_row_scales<E> ? quantized_occupancy_ : occupancy_;
  }
  template <class E = half>
  [[nodiscard]] int shared_bytes() const noexcept {
    return detail::cuda::shared_bytes(dims_of<E>, occupancy<E>().num_stages,
                                      occupancy<E>().tile_rows);
  }
  template <class E>
  [[nodiscard]] int num_blocks() const noexcept {
    return num_sms_ * occupancy<E>().blocks_per_sm;
  }

  // A kernel that is loaded on this device: by the constructor, or, where that ran before main(),
  // by the first call.
  template <class Kernel>
  [[nodiscard]] auto kernel(bool capturing) {
    const auto& used = Used<HeadDim, ValueDim, Kernel>::one;
    load_once(used.address, capturing, [&] { (void)used.load(shared_bytes()); });
    return used.pointer;
  }
  // The attention kernel; that of a variant is loaded by the first call that needs it.
  template <class T, class V>
  [[nodiscard]] auto kernel_for(bool capturing) {
    using Attention = AttentionKernel<T, HeadDim, ValueDim, V>;
    if constexpr (std::is_same_v<V, NoVariant>) {
      return kernel<Attention>(capturing);
    } else {
      const auto pointer = Attention::pointer();
      load_once(reinterpret_cast<const void*>(pointer), capturing,
                [&] { (void)Attention::load(pointer, shared_bytes<stored_element<T, V>>()); });
      return pointer;
    }
  }
  template <class Load>
  void load_once(const void* address, bool capturing, const Load& load) {
    if (std::find(loaded_.begin(), loaded_.end(), address) != loaded_.end()) return;
    if (capturing)
      fail_argument("stream", "capturing",
                    "prepare(layer, plan, variant, stream) before the capture: the variant's "
                    "kernel is not loaded yet");
    loaded_.reserve(loaded_.size() + 1);
    load();
    loaded_.push_back(address);
  }

  [[nodiscard]] int small_grid(std::int64_t blocks) const noexcept {
    const std::int64_t most = std::int64_t{num_sms_} * 8;
    return static_cast<int>((std::max)(std::int64_t{1}, (std::min)(blocks, most)));
  }

  CudaOptions::Limits limits_;
  CudaOptions options_;
  int num_sms_ = 0;
  Occupancy occupancy_, quantized_occupancy_;
  std::vector<const void*> loaded_;                // kernels
  std::array<std::uint64_t, 4> checked_pieces_{};  // of a plan, and for how many chunks
  CallChecks checks_;
  DeviceMemory own_;
  PlanUpload upload_;
};

}  // namespace detail::cuda
CHUNKATTN_NAMESPACE_END
