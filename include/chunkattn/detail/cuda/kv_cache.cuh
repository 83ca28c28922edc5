// KvCache<Cuda, T>: the library's own K/V memory on a GPU.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include "../../kv_cache.hpp"
#include "../base/check.hpp"
#include "../kv/cache_geometry.hpp"
#include "runtime.cuh"

CHUNKATTN_NAMESPACE_BEGIN

/// K/V in device memory, [slot][kv_head][token][head_dim] for K and, with value_dim, for V in each
/// layer, so that an engine's own kernels can write it through a KvView.
///
/// Slots come in slabs of 2^n slots, one allocation for all layers; growth adds slabs and never
/// moves one. The tables of slab addresses lie on the device at fixed places, so views and captured
/// graphs stay valid while the cache grows. Growth allocates and copies a few bytes synchronously:
/// call grow() ahead (admission time) to keep it out of decode steps.
template <class T>
class KvCache<Cuda, T> {
  static_assert(std::is_same_v<T, half> || std::is_same_v<T, bfloat16>,
                "KvCache<Cuda, T>: T must be chunkattn::half or chunkattn::bfloat16");

 public:
  /// Slots that the tables of slab addresses have room for, unless told otherwise.
  static constexpr std::size_t default_slot_limit = std::size_t{1} << 22;

  /// Memory that follows `tree`, wherever it is moved: layer() grows to tree.num_slots().
  template <SlotOwner Tree>
  KvCache(const Tree& tree, KvCacheOptions options, std::size_t slot_limit = default_slot_limit)
      : KvCache(tree.slot_source(), Tree::chunk_size, options, slot_limit) {}

  /// The same for a tree of which no more is known than its slot_source() and its chunk size.
  KvCache(const SlotSource& source, int chunk_size, const KvCacheOptions& options,
          std::size_t slot_limit = default_slot_limit)
      : KvCache(source, chunk_size, options, source.num_slots(), slot_limit) {}

  /// Memory for `num_slots` slots of `chunk_size` tokens on the current device; `slot_limit` bounds
  /// what it may grow to (8 bytes of tables per slab).
  KvCache(int chunk_size, KvCacheOptions options, std::size_t num_slots = 0,
          std::size_t slot_limit = default_slot_limit)
      : KvCache(SlotSource{}, chunk_size, options, num_slots, slot_limit) {}

  /// Makes room for slots [0, num_slots) in every layer; never moves one. A failure (DeviceError:
  /// out of memory) leaves the cache as it was.
  void grow(std::size_t num_slots) {
    detail::check_argument(num_slots <= max_slabs_ << slab_shift_, "num_slots", num_slots,
                           {"at most slot_limit = ", max_slabs_ << slab_shift_});
    const std::size_t slabs = (num_slots + per_slab() - 1) >> slab_shift_;
    std::vector<detail::cuda::DeviceMemory> made(std::max(slabs, slabs_.size()) - slabs_.size());
    slabs_.reserve(slabs_.size() + made.size());
    for (auto& slab : made) slab = detail::cuda::DeviceMemory(bytes_per_slot() << slab_shift_);
    for (std::size_t i = 0; i < made.size(); ++i) enter(made[i], slabs_.size() + i);
    std::move(made.begin(), made.end(), std::back_inserter(slabs_));
    num_slots_ = std::max(num_slots_, num_slots);
  }

  /// K and V of layer `index` as device pointers, for all slots the tree has handed out so far.
  /// Grows where it must, which is refused inside a capture: call grow() before.
  /// \param stream  the stream that may be capturing. The default one knows of the captures of
  ///                blocking streams only; name yours if it is a non-blocking one.
  [[nodiscard]] KvView<T> layer(int index, cudaStream_t stream = nullptr) {
    detail::check_argument(index >= 0 && index < options_.num_layers, "layer", index,
                           {"less than num_layers, ", options_.num_layers});
    detail::check_argument(table_.data() != nullptr, "layer", index,
                           "a cache that was not moved from");
    const std::size_t needed = slots_.num_slots();
    if (needed > num_slots_) {
      detail::check_argument(!detail::cuda::is_capture_near(stream), "num_slots", num_slots_,
                             {"grow(", needed,
                              ") before the capture: memory cannot be allocated "
                              "inside it"});
      grow(needed);
    }
    return view(index);
  }

  /// Views of all layers in device memory, for ChunkAttention<Cuda>::copy_rows. Their num_slots is
  /// that of the construction; addresses are right for every slot.
  [[nodiscard]] const KvView<T>* device_layers() const noexcept {
    return reinterpret_cast<const KvView<T>*>(views_.data());
  }
  /// Number of the tree that it follows, 0 for none.
  [[nodiscard]] std::uint64_t tree_id() const noexcept { return slots_.tree_id; }
  /// The geometry it was made for.
  [[nodiscard]] const KvCacheOptions& options() const noexcept { return options_; }
  /// Slots that have memory in every layer.
  [[nodiscard]] std::size_t num_slots() const noexcept { return num_slots_; }
  /// Bytes of K and V of one slot, all layers together.
  [[nodiscard]] std::size_t bytes_per_slot() const noexcept {
    return static_cast<std::size_t>(options_.num_layers) * layer_elements() * sizeof(T);
  }
  /// Bytes of device memory held, all layers together.
  [[nodiscard]] std::size_t bytes() const noexcept {
    return slabs_.size() * (bytes_per_slot() << slab_shift_);
  }

 private:
  KvCache(SlotSource slots, int chunk_size, const KvCacheOptions& options, std::size_t num_slots,
          std::size_t slot_limit)
      : options_(options), chunk_size_(chunk_size), slots_(std::move(slots)) {
    detail::check_kv_geometry(options, chunk_size, sizeof(T));
    detail::check_argument(!options.v_in_k, "options.v_in_k", options.v_in_k,
                           "false: on CUDA V has rows of its own");
    while (slab_shift_ < 16 && bytes_per_slot() << slab_shift_ < slab_target) ++slab_shift_;
    max_slabs_ = std::max<std::size_t>(1, (slot_limit + per_slab() - 1) >> slab_shift_);
    table_ = detail::cuda::DeviceMemory(max_slabs_ * num_tables() * sizeof(T*));
    views_ = detail::cuda::DeviceMemory(static_cast<std::size_t>(options.num_layers) *
                                        sizeof(KvView<T>));
    grow(num_slots);
    write_check_ = detail::make_write_check(options, slots_);
    std::vector<KvView<T>> views;
    for (int l = 0; l < options.num_layers; ++l) views.push_back(view(l));
    copy_now(views_.data(), views.data(), views.size() * sizeof(KvView<T>));
  }

  static constexpr std::size_t slab_target = std::size_t{64} << 20;

  [[nodiscard]] std::size_t per_slab() const noexcept { return std::size_t{1} << slab_shift_; }
  [[nodiscard]] std::size_t num_tables() const noexcept {
    return 2 * static_cast<std::size_t>(options_.num_layers);
  }
  // Elements of one slot in one layer: of rows of `dim`, of K and V.
  [[nodiscard]] std::size_t rows_elements(int dim) const noexcept {
    return static_cast<std::size_t>(options_.num_kv_heads) * static_cast<std::size_t>(chunk_size_) *
           static_cast<std::size_t>(dim);
  }
  [[nodiscard]] std::size_t layer_elements() const noexcept {
    return rows_elements(options_.head_dim) + rows_elements(options_.dim_of_v());
  }

  [[nodiscard]] KvView<T> view(int index) const {
    T* const* tables = reinterpret_cast<T* const*>(table_.data());
    KvView<T> view;
    view.tree_id = slots_.tree_id;
    view.layer = index;
    view.write_check = write_check_.get();
    view.k_slabs = tables + 2 * static_cast<std::size_t>(index) * max_slabs_;
    view.v_slabs = view.k_slabs + max_slabs_;
    view.slab_shift = slab_shift_;
    view.num_slots = static_cast<std::int32_t>(num_slots_);
    view.num_kv_heads = options_.num_kv_heads;
    view.head_dim = options_.head_dim;
    view.chunk_size = chunk_size_;
    view.stride_token = options_.head_dim;
    view.stride_head = view.stride_token * chunk_size_;
    view.stride_slot = view.stride_head * options_.num_kv_heads;
    if (options_.dim_of_v() != options_.head_dim) {
      view.value_dim = options_.value_dim;
      view.v_stride_token = options_.value_dim;
      view.v_stride_head = view.v_stride_token * chunk_size_;
      view.v_stride_slot = view.v_stride_head * options_.num_kv_heads;
    }
    return view;
  }

  // Puts the addresses of slab number `at` into the tables. Nobody reads them until it is counted.
  void enter(const detail::cuda::DeviceMemory& slab, std::size_t at) {
    T* const first = reinterpret_cast<T*>(slab.data());
    for (std::size_t t = 0; t < num_tables(); ++t) {  // K of layer 0, V of layer 0, K of 1, ...
      T* const place =
          first +
          ((t / 2 * layer_elements() + t % 2 * rows_elements(options_.head_dim)) << slab_shift_);
      copy_now(table_.data() + (t * max_slabs_ + at) * sizeof(T*), &place, sizeof place);
    }
  }

  // New entries of a table: no kernel under way looks at them yet. A copy from pageable memory may
  // return before it has landed, and the caller's streams need not wait for the default one.
  static void copy_now(void* target, const void* source, std::size_t bytes) {
    detail::cuda::check_cuda(cudaMemcpy(target, source, bytes, cudaMemcpyHostToDevice),
                             "cudaMemcpy(slab table)");
    detail::cuda::check_cuda(cudaStreamSynchronize(nullptr), "cudaStreamSynchronize");
  }

  KvCacheOptions options_;
  int chunk_size_;
  int slab_shift_ = 0;
  std::size_t max_slabs_ = 0;
  std::size_t num_slots_ = 0;
  detail::cuda::DeviceMemory table_, views_;
  std::vector<detail::cuda::DeviceMemory> slabs_;
  SlotSource slots_;
  std::shared_ptr<detail::WriteCheck> write_check_;
};

static_assert(KvProvider<KvCache<Cuda, half>>);

CHUNKATTN_NAMESPACE_END
