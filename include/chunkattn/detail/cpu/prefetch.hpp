// Prefetching K and V. While rows are streamed, their cache lines are prefetched
// a few KB ahead, which is what memory needs to stay busy. Products over shared tokens leave memory
// idle: while they compute, not only their next block is prefetched but also the beginning of what
// the task will stream afterwards, as much as fits the L2 cache.
#pragma once

#if defined(__linux__)
#include <unistd.h>
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "../../kv_view.hpp"
#include "../support/config.hpp"
#include "../support/instruction_sets.hpp"
#include "walk.hpp"

CHUNKATTN_ISA_DETAIL_BEGIN
namespace cpu {

/// Prefetches the cache line at `address`, from memory to L2: the kernel's own data is in L1.
CHUNKATTN_INLINE void prefetch(const void* address) {
  __builtin_prefetch(address, 0, 2);
}

/// Prefetches the cache line at `address`, from L2 to L1.
CHUNKATTN_INLINE void prefetch_near(const void* address) {
  __builtin_prefetch(address, 0, 3);
}

/// Contiguous memory.
struct MemoryRun {
  const char* begin;
  const char* end;
};

/// Cache lines that a kernel may prefetch at once. A core tracks few misses at a time, and some
/// cores drop what is requested beyond them: Zen 5 loses half of a burst of 16 lines, and nothing
/// of bursts of 4 that come every 10 ns.
inline constexpr int max_burst = 4;

/// The cache lines that the running kernel may prefetch. Small, so that its loops keep it in
/// registers.
struct PrefetchCursor {
  const char* at = nullptr;
  const char* end = nullptr;
  const MemoryRun* next = nullptr;
  const MemoryRun* last = nullptr;
  int left = 0;  ///< cache lines

  /// Prefetches the next `count` cache lines, at most max_burst or a compile-time constant.
  CHUNKATTN_INLINE void advance(int count) noexcept {
    if (left <= 0) return;
    if (at >= end) {
      if (next == last) {
        left = 0;
        return;
      }
      at = next->begin;
      end = next->end;
      ++next;
    }
    for (int i = 0; i < count; ++i) prefetch(at + i * 64);
    at += count * 64;
    left -= count;
  }
};

/// Of a core's second cache, as far as the system reports it; else 512 KB.
[[nodiscard]] inline std::size_t l2_bytes() noexcept {
#if defined(_SC_LEVEL2_CACHE_SIZE)
  static const long bytes = ::sysconf(_SC_LEVEL2_CACHE_SIZE);
  if (bytes > 0) return static_cast<std::size_t>(bytes);
#endif
  return std::size_t{512} << 10;
}

/// Cache lines of one row of K or V.
template <int Dim, class T>
inline constexpr int cache_lines_per_row = (Dim * static_cast<int>(sizeof(T)) + 63) / 64;

/// Everything that one task reads: the products' blocks of its first KV head, then the streams'
/// blocks, each for all of the task's heads. Streams are prefetched `stream_lead` cache lines
/// ahead.
template <int HeadDim, int ValueDim, class T, int stream_lead>
class Prefetcher {
 public:
  /// For the heads [head_begin, head_end), with copies of walks that the task will take, and their
  /// tokens.
  Prefetcher(const KvView<T>& kv, int head_begin, int head_end, const ItemWalk& products,
             std::int64_t product_tokens, const ItemWalk& streams,
             std::int64_t stream_tokens) noexcept
      : kv_(kv),
        products_{products, head_begin, head_begin + 1},
        streams_{streams, head_begin, head_end},
        product_tokens_(product_tokens - 1),
        early_left_(most_early()) {
    // A token has a line at least.
    const int tokens = static_cast<int>((std::min<std::int64_t>)(stream_tokens, early_left_));
    early_left_ = (std::min)(early_left_, num_cache_lines(tokens) * (head_end - head_begin));
  }

  /// Prefetches the first few KB at once.
  void start() noexcept {
    if (refill(products_, 1) == 0) refill(streams_, stream_lead);
    cursor.left = granted_ = (std::min)(queued_, stream_lead);
    while (cursor.left > 0) cursor.advance(1);
    settle();
  }
  /// Before a product of `lines` query lines with a block of `tokens`: allows it to prefetch the
  /// next block, and as far as it leaves memory idle its share of what is streamed later. Evenly:
  /// in bursts that come too fast, a fifth of the lines was dropped.
  void grant_product(int tokens, int lines, int flops_per_ns) noexcept {
    const int read = num_cache_lines(tokens);
    const std::int64_t blocks = product_tokens_ / block_tokens + 1;  // from this one on
    product_tokens_ -= tokens;
    refill(products_, queued_ + 1);
    // What memory can bring meanwhile: about 6 bytes per ns.
    constexpr int flops = 2 * (HeadDim + ValueDim);
    const int room = static_cast<int>(std::int64_t{tokens} * lines * flops / flops_per_ns * 6 / 64);
    const int spare = room - queued_;
    // Not before the last blocks in which a quarter of the time suffices: what comes earlier is
    // pushed out of L2 by the products' own K and V.
    const bool soon = std::int64_t{spare} * blocks <= std::int64_t{early_left_} * 4;
    const int early = (std::min)(static_cast<int>((early_left_ + blocks - 1) / blocks), spare);
    if (soon && early > 0) early_left_ -= refill(streams_, queued_ + early);
    cursor.left = granted_ = queued_;
    lead_ -= read;
  }
  /// Before a block of `tokens` is streamed: allows to prefetch as much as it reads, and more if
  /// the stream is not as far ahead as it should be.
  void grant_stream(int tokens) noexcept {
    const int read = num_cache_lines(tokens);
    const int lines = read + (std::max)(0, stream_lead - lead_);
    refill(streams_, lines);
    cursor.left = granted_ = (std::min)(lines, queued_);
    lead_ -= read;
  }
  /// After the kernel.
  void settle() noexcept {
    const int fetched = granted_ - cursor.left;
    lead_ += fetched;
    queued_ -= fetched;
    if (cursor.next == cursor.last && cursor.at >= cursor.end) queued_ = 0;
  }

  PrefetchCursor cursor;  ///< for the kernel at work

 private:
  // What L2 holds of later streams, besides queries, outputs and the products' K and V: half of 1
  // MB, which more were not faster than, and less of a smaller one.
  static int most_early() noexcept {
    return static_cast<int>(
        std::clamp(l2_bytes() / 2, std::size_t{256} << 10, std::size_t{512} << 10) / 64);
  }
  static constexpr int capacity = 256;

  // Lines of K and V of so many tokens.
  int num_cache_lines(int tokens) const noexcept {
    const int of_k = num_cache_lines<HeadDim>(tokens, kv_.stride_token);
    if (ValueDim != HeadDim && kv_.has_v_in_k()) return of_k;
    return of_k + num_cache_lines<ValueDim>(tokens, kv_.token_stride_of_v());
  }
  template <int Dim>
  static int num_cache_lines(int tokens, std::int64_t stride) noexcept {
    return stride == Dim ? (tokens * Dim * static_cast<int>(sizeof(T)) + 63) / 64
                         : tokens * cache_lines_per_row<Dim, T>;
  }

  // Blocks still to be queued, each for several heads.
  struct Source {
    ItemWalk walk;
    int head_begin;
    int head_end;
    int head = head_end;  // the next one of `block`
    BlockSpan block{};
  };

  // Queues blocks of a source until `lines` lines are queued; returns how many came.
  int refill(Source& source, int lines) noexcept {
    if (queued_ >= lines) return 0;
    const int before = queued_;
    int count = 0;
    for (const MemoryRun* run = cursor.next; run != cursor.last; ++run) runs_[count++] = *run;
    // A block may consist of as many pieces as it has tokens.
    while (queued_ < lines && count + 2 * block_tokens <= capacity) {
      if (source.head == source.head_end) {
        if (!source.walk.next(source.block)) break;
        source.head = source.head_begin;
      }
      for (int r = 0; r < source.block.num_runs; ++r)
        add_run(source.block.runs[r], source.head, count);
      ++source.head;
    }
    cursor.next = runs_;
    cursor.last = runs_ + count;
    return queued_ - before;
  }

  void add_run(const ChunkRun& run, int head, int& count) noexcept {
    add_rows<HeadDim>(kv_.k_row(run.chunk, head, run.begin), kv_.stride_token, run.count, count);
    if (ValueDim == HeadDim || !kv_.has_v_in_k())
      add_rows<ValueDim>(kv_.v_row(run.chunk, head, run.begin), kv_.token_stride_of_v(), run.count,
                         count);
    if constexpr (has_row_scales<T>) {
      if (kv_.scales != KvScales::per_row) return;
      for (int t = 0; t < run.count; t += 16) {
        prefetch(kv_.k_row_scale(run.chunk, head, run.begin + t));
        prefetch(kv_.v_row_scale(run.chunk, head, run.begin + t));
      }
    }
  }
  template <int Dim>
  void add_rows(const T* row, std::int64_t stride, int tokens, int& count) noexcept {
    if (stride == Dim) {
      add(row, static_cast<std::size_t>(tokens) * Dim * sizeof(T), count);
    } else {
      for (int t = 0; t < tokens; ++t) add(row + t * stride, Dim * sizeof(T), count);
    }
  }
  void add(const void* begin, std::size_t bytes, int& count) noexcept {
    const char* const from = static_cast<const char*>(begin);
    runs_[count++] = {from, from + bytes};
    queued_ += static_cast<int>((bytes + 63) / 64);
  }

  const KvView<T>& kv_;
  Source products_;
  Source streams_;
  std::int64_t product_tokens_;  // that are still to come, less one
  int early_left_;               // lines of streams that may still be queued during products
  int queued_ = 0;               // cache lines of runs that were not prefetched yet
  int granted_ = 0;              // of the kernel at work
  int lead_ = 0;                 // cache lines that were prefetched and not yet read
  MemoryRun runs_[capacity];
};

}  // namespace cpu
CHUNKATTN_ISA_DETAIL_END
