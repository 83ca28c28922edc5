// KvCache<Cuda, T>: K/V in device memory, in slabs.
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
#include "../../tree_options.hpp"
#include "../kv/cache_geometry.hpp"
#include "../support/check.hpp"
#include "../support/chunk_source.hpp"
#include "runtime.cuh"

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
    std::vector<detail::cuda::DeviceMemory> made((std::max)(slabs, slabs_.size()) - slabs_.size());
    if (made.empty()) {
      num_chunks_ = (std::max)(num_chunks_, num_chunks);
      return;
    }
    check_no_capture(num_chunks);
    const detail::cuda::CurrentDevice current(device_);
    slabs_.reserve(slabs_.size() + made.size());
    for (auto& slab : made) slab = detail::cuda::DeviceMemory(bytes_per_chunk() << slab_shift_);
    std::vector<std::byte*> addresses = enter(made);
    std::move(made.begin(), made.end(), std::back_inserter(slabs_));
    addresses_ = std::move(addresses);
    num_chunks_ = (std::max)(num_chunks_, num_chunks);
  }

  /// A view of K and V of layer `index`, in device memory, for all chunks that the tree has handed
  /// out so far. Grows the memory if the tree has grown; inside a capture it throws InvalidArgument
  /// instead: call grow() before.
  /// \param stream  the stream that may be capturing. Captures of a non-blocking stream are noticed
  ///                only if it is given here.
  [[nodiscard]] KvView<T> layer(int index, cudaStream_t stream = nullptr) {
    detail::check_argument(index >= 0 && index < options_.num_layers, "layer", index,
                           {"0 to num_layers - 1, ", options_.num_layers - 1});
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
    max_slabs_ = (std::max<std::size_t>)(1, (chunk_limit + per_slab() - 1) >> slab_shift_);
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
      view.value_dim = options_.dim_of_v();
      view.v_stride_token = options_.dim_of_v();
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

CHUNKATTN_NAMESPACE_END
