// What the CUDA backend keeps of a device between calls, and its checks of a call.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
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
#include "../base/check.hpp"
#include "../base/config.hpp"
#include "../kv/checks.hpp"
#include "../plan/check_current.hpp"
#include "checks.cuh"
#include "kernel_table.cuh"
#include "plan_upload.cuh"

CHUNKATTN_NAMESPACE_BEGIN
namespace detail::cuda {

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
                options.workspace == nullptr ? own_.data()
                                             : static_cast<std::byte*>(options.workspace)) {
    upload_.set_kernels(&begin_step_kernel<false>, &begin_step_kernel<true>);
    load_kernel(&begin_step_kernel<false>);
    load_kernel(&begin_step_kernel<true>);
    upload_.zero_counters();
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
    check_argument(tuning.min_split_tokens > 0, "options.tuning.min_split_tokens",
                   tuning.min_split_tokens, "at least 1");
    return options;
  }

  static int attribute(cudaDeviceAttr which, int device) {
    int value = 0;
    check_cuda(cudaDeviceGetAttribute(&value, which, device), "cudaDeviceGetAttribute");
    return value;
  }

  int find_device() {
    int count = 0;
    check_cuda(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
    const int device = current_device();
    if (is_capture_near(nullptr))
      fail_argument("stream", "capturing",
                    "objects made before the capture: memory cannot be allocated inside it");
    const int major = attribute(cudaDevAttrComputeCapabilityMajor, device);
    check_argument(major >= 8, "compute capability", major, "8.0 or newer");
    num_sms_ = attribute(cudaDevAttrMultiProcessorCount, device);
    occupancy_ = choose_occupancy(dims, attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
                                  attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor, device),
                                  wanted_blocks(dims));
    if constexpr (supported_head_dims(dims_of<std::int8_t>))
      quantized_occupancy_ = choose_occupancy(
          dims_of<std::int8_t>, attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
          attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor, device), wanted_blocks(dims));
    int blocks = std::numeric_limits<int>::max();  // what the driver says of them counts
    for (const UsedKernel* kernel = UsedKernels<HeadDim, ValueDim>::first;
         kernel != nullptr && occupancy_.num_stages > 0; kernel = kernel->next) {
      blocks = std::min(blocks, kernel->load(shared_bytes()));
      loaded_.push_back(kernel->address);
    }
    if (blocks != std::numeric_limits<int>::max()) occupancy_.blocks_per_sm = blocks;
    check_argument(occupancy_.blocks_per_sm > 0, "HeadDim", HeadDim,
                   "less on this device: its shared memory is too small");
    return device;
  }

  [[nodiscard]] CostModel model() const noexcept { return {options_.tuning, num_blocks()}; }

  // Bytes to allocate: none where the caller brought enough.
  [[nodiscard]] std::size_t own_bytes() {
    const std::size_t needed = WorkspaceLayout(limits_, ValueDim).total;
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
    constexpr int unit = 16 / static_cast<int>(sizeof(T));
    check_argument(layer.stride_token % unit == 0 && layer.stride_head % unit == 0 &&
                       layer.stride_chunk % unit == 0,
                   "layer strides", layer.stride_token, {"multiples of ", unit, " elements"});
    check_argument(layer.v_stride_token % unit == 0 && layer.v_stride_head % unit == 0 &&
                       layer.v_stride_chunk % unit == 0,
                   "layer strides of V", layer.v_stride_token,
                   {"multiples of ", unit, " elements"});
    if constexpr (has_row_scales<T>) {
      const auto check = [this](const char* name, const float* dense, float* const* slabs) {
        checks_.pointer(name, slabs != nullptr ? static_cast<const void*>(slabs) : dense,
                        slabs != nullptr ? 8 : 4);
      };
      check("layer.k_scale", layer.k_scale, layer.k_scale_slabs);
      check("layer.v_scale", layer.v_scale, layer.v_scale_slabs);
    }
    const void* k = layer.k_slabs != nullptr ? static_cast<const void*>(layer.k_slabs) : layer.k;
    const void* v = layer.v_slabs != nullptr ? static_cast<const void*>(layer.v_slabs) : layer.v;
    checks_.pointer("layer.k", k, layer.k_slabs != nullptr ? 8 : 16);
    checks_.pointer("layer.v", v, layer.v_slabs != nullptr ? 8 : 16);
  }

  void prepare(const LiveView& plan, cudaStream_t stream) {
    check_current(plan);
    const CurrentDevice device(checks_.device());
    checks_.stream(stream);
    upload_.prepare(plan, stream);
    checks_.enqueued(stream);
  }

  // By K/V's element type: the variant of the kernel, the view of it that all kernels have, and
  // what the kernel is given.
  template <class T, class E, class V>
  using KindOf = std::conditional_t<has_row_scales<E>, Quantized<E, V>, V>;
  template <class T, class E, class V>
  void load(const PlanView& plan, bool capturing, cudaStream_t stream) {
    (void)kernel_for<T, KindOf<T, E, V>>(capturing);
    upload_.use_elements(static_cast<int>(sizeof(E)), plan, capturing, stream);
  }
  template <class T, class E>
  static KvView<T> as_wide(const KvView<E>& layer) {
    if constexpr (has_row_scales<E>)
      return {};
    else
      return layer;
  }
  template <class T, class E, class V>
  auto arguments(const CallArguments<T>& call, const KvView<E>& layer, const V& variant) const {
    auto wide = with_variant(call, variant, options_.sm_scale);
    if constexpr (has_row_scales<E>)
      return AttentionArguments<T, KindOf<T, E, V>>{wide, layer};
    else
      return wide;
  }

  template <class T, class E, class V>
  void run(const KvView<E>& layer, const LiveView& plan, const V& variant, std::span<const T> q,
           std::span<T> out, std::span<float> lse, cudaStream_t stream) {
    using Kind = KindOf<T, E, V>;
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
    check_variant(variant);
    prepare(plan, stream);

    const bool capturing = is_capturing(stream);
    static_assert(
        sizeof(AttentionArguments<T, Kind>) <= 4096,
        "ChunkAttention<Cuda>::run: a variant holds too much for a kernel's arguments: let "
        "it point to device memory");
    const auto kernel = kernel_for<T, Kind>(capturing);
    upload_.use_elements(static_cast<int>(sizeof(E)), view, capturing, stream);
    const int schedule = upload_.schedule_for(HiddenKeys(variant), view, capturing, stream);
    const CallArguments<T> call{upload_.memory(schedule),
                                as_wide<T>(layer),
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
    launch("attention_kernel", kernel, grid, block_threads, shared_bytes<E>(), stream,
           arguments(call, layer, variant));
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
    if constexpr (!std::is_same_v<V, Plain>) {
      const auto check = [this](const char* name, const auto& term) {
        Tables::each(term, [&](const float* data) { checks_.pointer(name, data, alignof(float)); });
      };
      const auto terms = terms_of(variant, options_.sm_scale);
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
    return detail::cuda::shared_bytes(dims_of<E>, occupancy<E>().num_stages);
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
    if constexpr (std::is_same_v<V, Plain>) {
      return kernel<AttentionKernel<T, HeadDim, ValueDim>>(capturing);
    } else {
      const auto pointer = attention_kernel_address<T, HeadDim, ValueDim, V>();
      load_once(reinterpret_cast<const void*>(pointer), capturing, [&] {
        allow_shared(pointer, shared_bytes<stored_element<T, V>>());
        load_kernel(pointer);
      });
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
    return static_cast<int>(std::max(std::int64_t{1}, std::min(blocks, most)));
  }

  CudaOptions::Limits limits_;
  CudaOptions options_;
  int num_sms_ = 0;
  Occupancy occupancy_, quantized_occupancy_;
  std::vector<const void*> loaded_;  // kernels
  CallChecks checks_;
  DeviceMemory own_;
  PlanUpload upload_;
};

}  // namespace detail::cuda
CHUNKATTN_NAMESPACE_END
