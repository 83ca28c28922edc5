// KvCache: the library's own memory for K and V. The CPU's is here; the CUDA backend specialises
// the same template.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "allocator.hpp"
#include "detail/kv/cache_geometry.hpp"
#include "detail/kv/write_check.hpp"
#include "detail/support/array.hpp"
#include "detail/support/check.hpp"
#include "detail/support/chunk_source.hpp"
#include "detail/support/config.hpp"
#include "fwd.hpp"
#include "kv_view.hpp"
#include "tree_options.hpp"

CHUNKATTN_NAMESPACE_BEGIN

/// The shape of a model's K/V.
struct KvCacheOptions {
  int num_layers = 1;              ///< layers of the model, each with memory of its own
  int num_kv_heads = 1;            ///< heads of K and of V
  int head_dim = 0;                ///< elements per head of K, a multiple of 8
  std::optional<int> value_dim{};  ///< elements per head of V, a multiple of 8; unset: head_dim
  /// CPU: V is the first value_dim elements of each row of K and is not stored again: the latent
  /// vectors of multi-head latent attention (MLA).
  bool v_in_k = false;
  /// For debugging an engine: checks that each step that has K/V to write writes every layer, and
  /// each layer before run() reads it. If not, run(), or finish() with nothing changed, throws
  /// InvalidArgument that names the layer. Call mark_written() for kernels of your own and for
  /// captured graphs. Do not count layers in num_layers that use the K/V of another layer.
  bool check_writes = false;

  /// Elements per head of V.
  [[nodiscard]] int dim_of_v() const noexcept { return value_dim.value_or(head_dim); }
};

/// A group of layers with chunks of its own in place of the tree's: a WindowedLayers.
template <class G>
concept ChunkGroup = requires(const G& group) {
  detail::ChunkAccess::source_of_group(group);
  G::chunk_size;
};

/// K and V memory of every layer of a model, for the chunks of a tree (the paper's section 3.1).
template <class Device, class T>
class KvCache {
  static_assert(!std::is_same_v<Device, Cuda>,
                "KvCache<Cuda, T> needs nvcc: compile the file that uses it as CUDA (.cu), where "
                "chunkattn/chunkattn.hpp brings the CUDA backend");
  static_assert(std::is_same_v<Device, Cuda>,
                "KvCache<Device, T>: Device must be chunkattn::Cpu or chunkattn::Cuda");
};

/// K/V in host memory.
///
/// Layout of a chunk in one layer: for each KV head K [chunk_size][head_dim], then V
/// [chunk_size][value_dim], so that a task reads contiguous memory; 8-bit elements are followed by
/// float scales of that head, K's [chunk_size] and V's [chunk_size]. With v_in_k there are only K
/// and its scales. Chunks are allocated in slabs, which are never moved, and freed by the
/// destructor; each begins at a 64-byte boundary, on huge pages where the system has them. New
/// memory is not initialised.
///
/// \tparam T  float, half, bfloat16, std::int8_t or float8_e4m3
template <class T>
class KvCache<Cpu, T> {
  static_assert(KvElement<T>,
                "KvCache<Cpu, T>: T must be float, chunkattn::half, chunkattn::bfloat16, "
                "std::int8_t or chunkattn::float8_e4m3");

 public:
  /// Memory for the chunks of `tree`, wherever that is moved: layer() grows it to
  /// tree.num_chunks() chunks. Throws InvalidArgument for options that make no sense.
  template <TokenType Token, int ChunkSize, ChunkAllocator Allocator, RetentionPolicy Retention>
  KvCache(const PrefixTree<Token, ChunkSize, Allocator, Retention>& tree, KvCacheOptions options)
      : KvCache(detail::ChunkAccess::source(tree), ChunkSize, options, tree.num_chunks()) {}

  /// The same for the chunks of a group of layers, a WindowedLayers.
  template <ChunkGroup Group>
  KvCache(const Group& group, KvCacheOptions options)
      : KvCache(detail::ChunkAccess::source_of_group(group), Group::chunk_size, options, 0) {}

  /// Memory for `num_chunks` chunks of `chunk_size` tokens, without a tree; grow() adds to it.
  KvCache(int chunk_size, KvCacheOptions options, std::size_t num_chunks = 0)
      : KvCache(detail::ChunkSource{}, chunk_size, options, num_chunks) {}

  /// Provides memory for the chunks [0, num_chunks) in every layer; moves none. Views that were
  /// taken before stay valid for the chunks they had.
  /// \throws InvalidArgument  beyond 2^31 - 1 chunks or 2^62 bytes
  /// \throws std::bad_alloc   with no layer changed
  void grow(std::size_t num_chunks) {
    detail::check_argument(
        num_chunks <= (std::min)(max_pool_chunks, (std::size_t{1} << 62) / bytes_per_chunk()),
        "num_chunks", num_chunks, "at most 2^31 - 1 chunks, and 2^62 bytes of K and V");
    const std::size_t per_slab = std::size_t{1} << slab_shift_;
    const std::size_t slabs = (num_chunks + per_slab - 1) / per_slab;
    if (slabs > num_slabs_) add_slabs(slabs);
    num_chunks_ = (std::max)(num_chunks_, num_chunks);
  }

  /// A view of K and V of layer `index`, for all chunks that the tree has handed out so far. Call
  /// it again in each step, on the thread that calls the tree: it grows the memory if the tree has
  /// grown (and throws what grow() throws). Throws InvalidArgument for a layer that there is not,
  /// and once the tree has ended.
  [[nodiscard]] KvView<T> layer(int index, DeviceStream<Cpu> = {}) {
    if (tables_.empty()) [[unlikely]]
      detail::fail_argument("layer", index, "a cache that was not moved from");
    if (index < 0 || static_cast<std::size_t>(index) >= tables_.size()) [[unlikely]]
      detail::fail_argument("layer", index, {"0 to num_layers - 1, ", options_.num_layers - 1});
    const std::size_t needed = chunks_.num_chunks();
    if (needed > num_chunks_) grow(needed);
    const Tables& table = tables_[static_cast<std::size_t>(index)];
    KvView<T> view;
    view.tree_id = chunks_.tree_id;
    view.layer = index;
    view.write_check = write_check_.get();
    view.k_slabs = table.k.data();
    view.v_slabs = table.v.data();
    view.slab_shift = slab_shift_;
    view.num_chunks = static_cast<std::int32_t>(num_chunks_);
    view.num_kv_heads = options_.num_kv_heads;
    view.head_dim = options_.head_dim;
    view.chunk_size = chunk_size_;
    view.stride_token = options_.head_dim;
    view.stride_head = static_cast<std::int64_t>(head_bytes() / sizeof(T));
    view.stride_chunk = static_cast<std::int64_t>(chunk_bytes() / sizeof(T));
    if (options_.dim_of_v() != options_.head_dim) {
      view.value_dim = options_.dim_of_v();
      view.v_stride_token = options_.dim_of_v();
      view.v_stride_head = view.stride_head;
      view.v_stride_chunk = view.stride_chunk;
    }
    if (options_.v_in_k) {
      view.v_slabs = view.k_slabs;
      view.v_stride_token = view.stride_token;
    }
    if constexpr (has_row_scales<T>) {
      view.k_scale_slabs = table.k_scale.data();
      view.v_scale_slabs = options_.v_in_k ? view.k_scale_slabs : table.v_scale.data();
      view.scale_stride_head = static_cast<std::int64_t>(head_bytes() / sizeof(float));
      view.scale_stride_chunk = static_cast<std::int64_t>(chunk_bytes() / sizeof(float));
    }
    return view;
  }

  /// For debugging: fills K and V of a chunk with NaN in every layer (8-bit: scales of NaN), so
  /// that a kernel that reads freed K/V gives NaN. See set_free_sink() of the tree, or of the
  /// WindowedLayers, whose chunks these are.
  void poison(ChunkIndex chunk) noexcept {
    const auto at = static_cast<std::size_t>(chunk);
    if (at >> slab_shift_ >= num_slabs_) return;
    const std::size_t within = at & ((std::size_t{1} << slab_shift_) - 1);
    for (const Tables& table : tables_)
      std::memset(reinterpret_cast<char*>(table.k[at >> slab_shift_]) + within * chunk_bytes(),
                  0xff, chunk_bytes());
  }

  /// The number of the tree whose chunks these are, 0 for none.
  [[nodiscard]] std::uint64_t tree_id() const noexcept { return chunks_.tree_id; }
  /// The options that it was made with.
  [[nodiscard]] const KvCacheOptions& options() const noexcept { return options_; }
  /// Chunks that have memory in every layer.
  [[nodiscard]] std::size_t num_chunks() const noexcept { return num_chunks_; }
  /// Bytes of K and V (and scales) of one chunk, all layers together.
  [[nodiscard]] std::size_t bytes_per_chunk() const noexcept {
    return chunk_bytes() * static_cast<std::size_t>(options_.num_layers);
  }
  /// Bytes allocated, all layers together.
  [[nodiscard]] std::size_t bytes() const noexcept {
    return (num_slabs_ << slab_shift_) * bytes_per_chunk();
  }

 private:
  friend struct detail::ChunkAccess;
  KvCache(detail::ChunkSource source, int chunk_size, const KvCacheOptions& options,
          std::size_t num_chunks)
      : options_(options), chunk_size_(chunk_size), chunks_(std::move(source)) {
    detail::check_kv_geometry(options, chunk_size, sizeof(T));
    while (slab_shift_ < 16 && chunk_bytes() << slab_shift_ < slab_target) ++slab_shift_;
    tables_.resize(static_cast<std::size_t>(options.num_layers));
    grow(num_chunks);
    write_check_ = detail::make_write_check(options, chunks_);
  }

  static constexpr std::size_t slab_target = std::size_t{4} << 20;
  static constexpr std::size_t huge_page = std::size_t{2} << 20;

  struct Release {
    std::size_t alignment = 64;
    void operator()(char* memory) const noexcept {
      ::operator delete(memory, std::align_val_t{alignment});
    }
  };
  using Memory = std::unique_ptr<char, Release>;
  struct Tables {
    Array<T*> k, v;
    Array<float*> k_scale, v_scale;
  };

  static Memory allocate(std::size_t bytes) {
    const std::size_t alignment = bytes >= huge_page ? huge_page : 64;
    Memory memory(static_cast<char*>(::operator new(bytes, std::align_val_t{alignment})),
                  Release{alignment});
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    if (alignment == huge_page) madvise(memory.get(), bytes / huge_page * huge_page, MADV_HUGEPAGE);
#endif
    return memory;
  }

  // Memory for slabs [num_slabs_, slabs) of every layer, or an exception and of none.
  CHUNKATTN_COLD void add_slabs(std::size_t slabs) {
    if (slabs > table_capacity_) new_tables((std::max)(slabs, 2 * table_capacity_ + 8));
    std::vector<Memory> made((slabs - num_slabs_) * tables_.size());
    for (Memory& slab : made) slab = allocate(chunk_bytes() << slab_shift_);
    memory_.push_back(std::move(made));
    // From here on nothing fails.
    const Memory* next = memory_.back().data();
    for (Tables& table : tables_) {
      for (std::size_t at = num_slabs_; at < slabs; ++at) {
        char* const slab = (next++)->get();
        table.k.push_back(reinterpret_cast<T*>(slab));
        table.v.push_back(reinterpret_cast<T*>(slab + rows_bytes(options_.head_dim)));
        if constexpr (has_row_scales<T>) {
          table.k_scale.push_back(reinterpret_cast<float*>(slab + kv_bytes()));
          table.v_scale.push_back(table.k_scale.back() + chunk_size_);
        }
      }
    }
    num_slabs_ = slabs;
  }
  // Larger tables of slab addresses. Old ones are kept: views may still point at them.
  CHUNKATTN_COLD void new_tables(std::size_t capacity) {
    std::vector<Tables> made = tables_;
    for (Tables& table : made) {
      table.k.reserve(capacity);
      table.v.reserve(capacity);
      if constexpr (has_row_scales<T>) {
        table.k_scale.reserve(capacity);
        table.v_scale.reserve(capacity);
      }
    }
    old_tables_.push_back(std::move(tables_));
    tables_ = std::move(made);
    table_capacity_ = capacity;
  }

  /// Bytes of the rows of one (chunk, head), `dim` elements each.
  [[nodiscard]] std::size_t rows_bytes(int dim) const noexcept {
    return static_cast<std::size_t>(chunk_size_) * static_cast<std::size_t>(dim) * sizeof(T);
  }
  [[nodiscard]] std::size_t kv_bytes() const noexcept {
    return rows_bytes(options_.head_dim) + (options_.v_in_k ? 0 : rows_bytes(options_.dim_of_v()));
  }
  [[nodiscard]] std::size_t head_bytes() const noexcept {
    const std::size_t scales = !has_row_scales<T> ? 0 : options_.v_in_k ? 1 : 2;
    return kv_bytes() + scales * static_cast<std::size_t>(chunk_size_) * sizeof(float);
  }
  [[nodiscard]] std::size_t chunk_bytes() const noexcept {
    return static_cast<std::size_t>(options_.num_kv_heads) * head_bytes();
  }

  KvCacheOptions options_;
  int chunk_size_;
  int slab_shift_ = 0;
  std::size_t num_chunks_ = 0;
  std::size_t num_slabs_ = 0;  // with memory in every layer
  std::size_t table_capacity_ = 0;
  std::vector<Tables> tables_;  // by layer
  std::vector<std::vector<Tables>> old_tables_;
  std::vector<std::vector<Memory>> memory_;  // of each growth
  detail::ChunkSource chunks_;
  std::shared_ptr<detail::WriteCheck> write_check_;
};

CHUNKATTN_NAMESPACE_END
