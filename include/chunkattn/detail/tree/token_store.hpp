// The tokens of the tree, by slot and offset. The rest of the tree knows them only through Tokens,
// which does not say what a token is.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "../../tree_options.hpp"
#include "../base/config.hpp"
#include "child_index.hpp"
#include "records.hpp"

CHUNKATTN_NAMESPACE_BEGIN

namespace detail {

/// What the tree does with tokens without knowing them. Runs lie within a slot.
class Tokens {
 public:
  virtual ~Tokens() = default;
  /// Makes room for slots [0, num_slots).
  virtual void grow(std::size_t num_slots) = 0;
  /// Adds tokens to the hash of a key.
  [[nodiscard]] virtual std::uint64_t hash(std::uint64_t seed, SlotIndex slot, std::int32_t offset,
                                           std::int32_t count) const noexcept = 0;
  /// Leading tokens that two runs of `count` have in common.
  [[nodiscard]] virtual std::int32_t common(SlotIndex a, std::int32_t offset_a, SlotIndex b,
                                            std::int32_t offset_b,
                                            std::int32_t count) const noexcept = 0;
  virtual void copy(SlotIndex from, std::int32_t offset, SlotIndex to, std::int32_t to_offset,
                    std::int32_t count) noexcept = 0;
  /// Asks early for a place that will be written.
  virtual void prefetch(SlotIndex slot, std::int32_t offset) const noexcept = 0;
};

template <TokenType Token, int ChunkSize>
class TokenStore final : public Tokens {
 public:
  void grow(std::size_t num_slots) override {
    if (num_slots * ChunkSize <= tokens_.size()) return;
    if (num_slots * ChunkSize > tokens_.capacity())
      tokens_.reserve(std::max(num_slots * ChunkSize, 2 * tokens_.size()));
    tokens_.resize(num_slots * ChunkSize);
  }
  [[nodiscard]] std::uint64_t hash(std::uint64_t seed, SlotIndex slot, std::int32_t offset,
                                   std::int32_t count) const noexcept override {
    return hash(seed, std::span(&token(slot, offset), at(count)));
  }
  /// The same for tokens of a prompt.
  [[nodiscard]] static std::uint64_t hash(std::uint64_t seed,
                                          std::span<const Token> tokens) noexcept {
    for (const Token& token : tokens) seed = mix_hash(seed + 1, std::hash<Token>{}(token));
    return seed;
  }
  [[nodiscard]] std::int32_t common(SlotIndex a, std::int32_t offset_a, SlotIndex b,
                                    std::int32_t offset_b,
                                    std::int32_t count) const noexcept override {
    const Token *const in_a = &token(a, offset_a), *const in_b = &token(b, offset_b);
    return static_cast<std::int32_t>(std::mismatch(in_a, in_a + count, in_b).first - in_a);
  }
  /// Whether these tokens stand there.
  [[nodiscard]] bool equal(SlotIndex slot, std::int32_t offset,
                           std::span<const Token> tokens) const noexcept {
    return std::equal(tokens.begin(), tokens.end(), &token(slot, offset));
  }
  void copy(SlotIndex from, std::int32_t offset, SlotIndex to, std::int32_t to_offset,
            std::int32_t count) noexcept override {
    store(to, to_offset, std::span(&token(from, offset), at(count)));
  }
  void prefetch(SlotIndex slot, std::int32_t offset) const noexcept override {
    CHUNKATTN_PREFETCH_WRITE(tokens_.data() + at(slot) * ChunkSize + at(offset));
  }

  void store(SlotIndex slot, std::int32_t offset, const Token& token) {
    tokens_[at(slot) * ChunkSize + at(offset)] = token;
  }
  void store(SlotIndex slot, std::int32_t offset, std::span<const Token> tokens) {
    std::copy(tokens.begin(), tokens.end(),
              tokens_.begin() + slot * std::ptrdiff_t{ChunkSize} + offset);
  }
  [[nodiscard]] const Token& token(SlotIndex slot, std::int32_t offset) const noexcept {
    return tokens_[at(slot) * ChunkSize + at(offset)];
  }

 private:
  std::vector<Token> tokens_;  // [slot][offset]
};

}  // namespace detail

CHUNKATTN_NAMESPACE_END
