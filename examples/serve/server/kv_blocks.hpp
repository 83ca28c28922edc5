// BlockTable: blocks, as other servers have them: full chunks from the start of a prompt, named by
// a hash of all tokens up to their end. Made from the tree's events, which are of spans of any
// length.
#pragma once

#include <chunkattn/chunkattn.hpp>
#include <chunkattn/events/cache_event.hpp>
#include <chunkattn/interop/block_table.hpp>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <unordered_map>
#include <vector>

namespace serve {

/// Where a block is.
enum class Medium : std::uint8_t {
  tree,    ///< where attention reads K/V
  memory,  ///< in host memory, a lower tier
  files    ///< in files
};

/// A change of the set of blocks.
struct BlockEvent {
  enum class Kind : std::uint8_t { stored, removed, cleared };
  Kind kind = Kind::cleared;
  Medium medium = Medium::tree;
  /// Of layers with a window, whose K/V goes before that of others: a prompt goes on where both
  /// have what they read. The hash of a block is the same.
  bool is_windowed = false;
  std::vector<std::uint64_t> hashes;  ///< one after the other in a prompt; removed: the last first
  std::uint64_t parent = 0;           ///< stored: the block before the first; 0: none
  std::vector<int> tokens;            ///< stored: of all blocks
};

/// Of a block after another (0: none): 63 bits, since some readers take signed numbers, and never
/// 0.
[[nodiscard]] std::uint64_t hash_of_block(std::uint64_t parent, std::uint64_t tenant,
                                          std::span<const int> tokens);
/// Whether blocks of a name space are published.
[[nodiscard]] inline bool is_published(const chunkattn::Namespace& space, bool with_tenants) {
  // Sequences that share nothing join as adapters of their own: no prompt finds what they have.
  return space.adapter == 0 && (with_tenants || space.tenant == 0);
}

class BlockTable {
 public:
  /// \param tokens_per_block  at least 1
  /// \param with_tenants      whether blocks of tenants with a salt count, too
  /// \param with_windows      whether events say which blocks layers with a window have
  BlockTable(std::size_t tokens_per_block, bool with_tenants, bool with_windows = false)
      : size_(tokens_per_block), with_tenants_(with_tenants), with_windows_(with_windows) {}

  /// Appends what the event changes to `changes`, or to the last of them, where it extends that.
  /// \pre the events are those of one tree, in order and without gaps
  void apply(const chunkattn::CacheEvent& event, std::span<const int> tokens,
             std::vector<BlockEvent>& changes);
  /// All blocks, as if they were stored now: each after its parent.
  [[nodiscard]] std::vector<BlockEvent> all() const;
  [[nodiscard]] std::size_t num_blocks() const { return num_blocks_; }
  [[nodiscard]] std::size_t tokens_per_block() const { return size_; }

 private:
  /// Tokens of a path from `position` on, after those of the parent.
  struct Span {
    std::uint64_t parent = 0;
    std::size_t position = 0;
    std::uint64_t tenant = 0;
    std::vector<int> tokens;
    std::vector<std::uint64_t> hashes;  ///< of the blocks that end in it
    std::vector<bool> kept;             ///< by token: layers with a window have it
    std::vector<bool> windowed;         ///< by block: they have all of it
    std::vector<std::uint64_t> next;    ///< spans that go on in this one or at its end
    [[nodiscard]] std::size_t end() const { return position + tokens.size(); }
  };

  void store(const chunkattn::CacheEvent& event, std::span<const int> tokens,
             std::vector<BlockEvent>& changes);
  void evict(const chunkattn::CacheEvent& event, std::vector<BlockEvent>& changes);
  void complete_block(Span& span, std::size_t end, std::vector<BlockEvent>& changes);
  void keep(const chunkattn::CacheEvent& event, std::vector<BlockEvent>& changes);
  void update_windowed(Span& span, std::size_t begin, std::size_t end,
                       std::vector<BlockEvent>& changes);
  void set_windowed(Span& span, std::size_t block, bool is_windowed,
                    std::vector<BlockEvent>& changes);
  void add_windowed(const Span& span, std::size_t block, std::vector<BlockEvent>& changes) const;
  [[nodiscard]] bool is_kept(const Span& span, std::size_t end) const;
  [[nodiscard]] std::uint64_t hash_of_block_at(const Span& span, std::size_t end) const;
  void read_block(const Span& span, std::size_t end, std::span<int> block) const;

  const std::size_t size_;
  const bool with_tenants_, with_windows_;
  std::unordered_map<std::uint64_t, Span> spans_;
  std::size_t num_blocks_ = 0;
};

}  // namespace serve
