// TierSpans: what a tree has cached, by its events: tokens of each span, where they lie, and what
// the blocks in it are called in tiers.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "../../detail/support/array.hpp"
#include "../../detail/support/config.hpp"
#include "../../events/cache_event.hpp"
#include "../../plan_view.hpp"
#include "../../tree_options.hpp"
#include "hash.hpp"

CHUNKATTN_NAMESPACE_BEGIN
namespace detail {

/// The chunks of a block, for transfer().
template <int ChunkSize>
struct TierPieces {
  static constexpr int chunk_size = ChunkSize;
  std::vector<Piece> pieces;  // in path order
  std::uint64_t tree = 0;

  [[nodiscard]] std::size_t size() const {
    return pieces.empty() ? 0 : to_size(pieces.back().position + pieces.back().length);
  }
  [[nodiscard]] std::size_t num_reserved() const { return 0; }
  [[nodiscard]] std::size_t num_scheduled() const { return size(); }
  [[nodiscard]] std::uint64_t tree_id() const { return tree; }
  template <class F>
  void for_each_run(TokenRange, const F& f) const {
    for (const Piece& piece : pieces) f(piece);
  }
};

/// A block is a whole number of tokens of a path, from a multiple of it on. It belongs to the span
/// that has its last token; the others are in it or in its parents.
template <class Token>
class TierSpans {
 public:
  struct Span {
    std::uint64_t parent = 0;
    Namespace name_space{};
    std::int32_t position = 0;
    std::int32_t public_end = 0;  ///< of the path, where a tenant's part begins
    std::vector<Token> tokens;
    std::vector<Piece> pieces;     ///< where they lie
    std::vector<TierHash> hashes;  ///< of the path up to the end of each block that is its own
    [[nodiscard]] std::int32_t end() const noexcept {
      return position + static_cast<std::int32_t>(tokens.size());
    }
  };

  explicit TierSpans(std::int32_t block) : block_(block) {}

  /// New tokens at the end of a span; calls found(block) for each block that they complete. False
  /// if what came before is not known.
  template <class F>
  bool store(const CacheEvent& event, std::span<const Token> tokens, const F& found) {
    if (event.parent != 0 && !spans_.contains(event.parent)) return false;
    Span& span = spans_[event.span];
    if (event.parent != event.span) {
      span.parent = event.parent;
      span.name_space = event.name_space;
      span.position = event.position;
      span.public_end = event.position;
      if (event.parent != 0 && !event.name_space.is_public)
        if (const Span& last = spans_.at(event.parent); !last.name_space.is_public)
          span.public_end = last.public_end;
    }
    if (span.end() != event.position) return false;
    span.tokens.insert(span.tokens.end(), tokens.begin(), tokens.end());
    Piece* const last = span.pieces.empty() ? nullptr : &span.pieces.back();
    if (last != nullptr && last->chunk == event.first_chunk &&
        last->begin + last->length == event.first_offset)
      last->length += event.length;
    else
      span.pieces.push_back({event.first_chunk, event.first_offset, event.length, event.position});
    while (first_block(span) + span.hashes.size() < to_size(span.end() / block_)) {
      const std::size_t block = first_block(span) + span.hashes.size();
      TierHash hash = block == 0 ? TierHash() : path_hash(span, block - 1);
      bytes_.clear();
      add_tokens(span, block * to_size(block_), bytes_);
      hash.add(bytes_);
      span.hashes.push_back(hash);
      found(block);
    }
    return true;
  }
  /// Calls leaving(span, block) for each block of which tokens go, while they are still known.
  template <class F>
  bool evict(const CacheEvent& event, const F& leaving) {
    const auto found = spans_.find(event.span);
    if (found == spans_.end()) return false;
    Span& span = found->second;
    if (event.position < span.position || event.position + event.length != span.end()) return false;
    const std::size_t kept = to_size(event.position / block_);
    for (std::size_t block = (std::max)(kept, first_block(span)); has_block(span, block); ++block)
      leaving(event.span, block);
    if (event.position == span.position) {
      spans_.erase(found);
      return true;
    }
    span.tokens.resize(to_size(event.position - span.position));
    while (!span.pieces.empty() && span.pieces.back().position >= event.position)
      span.pieces.pop_back();
    if (!span.pieces.empty())
      span.pieces.back().length =
          (std::min)(span.pieces.back().length, event.position - span.pieces.back().position);
    span.hashes.resize(kept > first_block(span) ? kept - first_block(span) : 0);
    return true;
  }
  void clear() noexcept { spans_.clear(); }

  [[nodiscard]] const Span* find(std::uint64_t number, std::size_t block) const {
    const auto found = spans_.find(number);
    return found == spans_.end() || !has_block(found->second, block) ? nullptr : &found->second;
  }
  [[nodiscard]] const TierHash& hash(const Span& span, std::size_t block) const {
    return span.hashes[block - first_block(span)];
  }
  /// Of a block of the path, its own or one before that.
  [[nodiscard]] const TierHash& path_hash(const Span& span, std::size_t block) const {
    const Span* s = &span;
    while (!has_block(*s, block)) s = before(*s);
    return hash(*s, block);
  }
  /// The tokens of the path up to the end of a block.
  void path_tokens(const Span& span, std::size_t block, std::vector<std::byte>& to) const {
    add_tokens(span, 0, (block + 1) * to_size(block_), to);
  }
  /// Where the tokens of a block lie, in path order.
  void pieces_of(const Span& span, std::size_t block, std::vector<Piece>& to) const {
    const auto begin = static_cast<std::int32_t>(block) * block_;
    std::int32_t end = begin + block_;
    for (const Span* s = &span; end > begin; s = before(*s)) {
      for (std::size_t i = s->pieces.size(); i-- > 0 && end > begin;) {
        Piece piece = s->pieces[i];
        if (piece.position >= end) continue;
        piece.length = (std::min)(piece.length, end - piece.position);
        if (const std::int32_t before = begin - piece.position; before > 0) {
          piece.begin += before;
          piece.position += before;
          piece.length -= before;
        }
        to.push_back(piece);
        end = piece.position;
      }
    }
    std::reverse(to.begin(), to.end());
  }
  /// Calls f(span, block) for all blocks.
  template <class F>
  void for_each_block(const F& f) const {
    for (const auto& [number, span] : spans_)
      for (std::size_t block = first_block(span); has_block(span, block); ++block) f(number, block);
  }
  [[nodiscard]] std::size_t num_spans() const noexcept { return spans_.size(); }

 private:
  [[nodiscard]] std::size_t first_block(const Span& span) const noexcept {
    return to_size(span.position / block_);
  }
  [[nodiscard]] bool has_block(const Span& span, std::size_t block) const noexcept {
    return block >= first_block(span) && block - first_block(span) < span.hashes.size();
  }
  /// Its parent; null: it starts the path.
  [[nodiscard]] const Span* before(const Span& span) const {
    return span.parent == 0 ? nullptr : &spans_.at(span.parent);
  }
  void add_tokens(const Span& span, std::size_t begin, std::vector<std::byte>& to) const {
    add_tokens(span, begin, begin + to_size(block_), to);
  }
  /// Positions [begin, end) of the path, as bytes. The span begins before `end`.
  void add_tokens(const Span& span, std::size_t begin, std::size_t end,
                  std::vector<std::byte>& to) const {
    const std::size_t offset = to.size();
    to.resize(offset + (end - begin) * sizeof(Token));
    std::byte* const bytes = to.data() + offset;
    for (const Span* s = &span; end > begin; s = before(*s)) {
      const std::size_t position = to_size(s->position);
      const std::size_t first = (std::max)(begin, position);
      const std::span<const std::byte> part =
          std::as_bytes(std::span(s->tokens).subspan(first - position, end - first));
      std::copy(part.begin(), part.end(), bytes + (first - begin) * sizeof(Token));
      end = first;
    }
  }

  std::int32_t block_;
  std::unordered_map<std::uint64_t, Span> spans_;
  std::vector<std::byte> bytes_;
};

}  // namespace detail
CHUNKATTN_NAMESPACE_END
