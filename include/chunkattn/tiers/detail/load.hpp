// TierLoad: what a sequence waits for from tiers.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <vector>

#include "../../detail/support/config.hpp"
#include "../../transfer/companion.hpp"
#include "../tier_store.hpp"
#include "record.hpp"

CHUNKATTN_NAMESPACE_BEGIN
namespace detail {

/// Blocks of a prompt that are being loaded, in order. What is not marked is as it was made, or the
/// tree's thread's.
struct TierLoad {
  std::array<std::vector<std::byte>, 2> heads;  ///< of blocks that are private; of public ones
  std::vector<std::byte> tokens;                ///< of the prompt
  std::size_t block_bytes = 0;                  ///< of a block's tokens
  std::size_t first = 0, public_blocks = 0;
  std::vector<TierStore::Key> keys;               ///< from block `first` on
  std::shared_ptr<void> expected;                 ///< what the observer gave for them
  std::uint64_t sequence = 0, weights = 0;        ///< whose it is
  std::size_t limit = 0;                          ///< positions that are loaded, at most
  std::vector<CompanionRows> rows;                ///< that have come so far, of each companion
  std::chrono::steady_clock::time_point since{};  ///< when something came

  // Under the queue's mutex:
  struct Ready {
    std::size_t block = 0;
    std::vector<std::byte> raw;
  };
  std::deque<Ready> ready;
  std::size_t next = 0;  ///< of keys
  std::size_t tier = 0;  ///< where it is, or waits
  bool is_stalled = false, is_over = false;

  [[nodiscard]] TierContent content(std::size_t block) const {
    return {heads[block < public_blocks ? 1 : 0],
            std::span(tokens).first((block + 1) * block_bytes)};
  }
};

}  // namespace detail
CHUNKATTN_NAMESPACE_END
