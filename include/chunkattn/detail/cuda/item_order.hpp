// In which order a launch's (task, KV head) pairs are taken.
//
// Sequence-first pairs wait for partial results of chunk-first pairs of their own KV head only. So
// they need not stand behind those of other heads, and where the one kind computes while the other
// streams, they had better not: then the order goes through the heads, the chunk-first pairs some
// heads ahead of the sequence-first ones, and both kinds alternate evenly. One head ahead:
//
//     chunk-first      0 0 0 | 1   1   1   | 2   2   2   |           KV head; three tasks of
//     sequence-first         |   0   0   0 |   1   1   1 | 2 2 2     each kind
//
// All heads ahead: the order of the task list, first the one kind, then the other.
#pragma once

#include <cstdint>

#include "../base/config.hpp"

CHUNKATTN_NAMESPACE_BEGIN
namespace detail::cuda {

/// From tickets to pairs; a pair has the number task * num_kv_heads + head. Each has one ticket.
/// Before the sequence-first pairs of a head stand all chunk-first ones of that head: the rounds
/// before theirs have them, or what comes before all rounds.
struct ItemOrder {
  std::int32_t num_chunk_first = 0;     ///< tasks
  std::int32_t num_sequence_first = 0;  ///< tasks, behind them
  std::int32_t num_kv_heads = 1;
  std::int32_t ahead = 1;  ///< heads, 1 to num_kv_heads

  /// Products of two numbers of tasks fit 32 bits, as pair() needs them where not all are ahead.
  static constexpr std::int32_t most_mixed_tasks = 46340;

  [[nodiscard]] CHUNKATTN_HD constexpr std::int32_t num_pairs() const noexcept {
    return (num_chunk_first + num_sequence_first) * num_kv_heads;
  }
  [[nodiscard]] CHUNKATTN_HD constexpr bool is_chunk_first(std::int32_t pair) const noexcept {
    return pair < num_chunk_first * num_kv_heads;
  }

  /// The pair of a ticket below num_pairs().
  [[nodiscard]] CHUNKATTN_HD constexpr std::int32_t pair(std::int32_t ticket) const noexcept {
    if (ahead >= num_kv_heads) return ticket;
    if (ticket < num_chunk_first * ahead)
      return number(ticket % num_chunk_first, ticket / num_chunk_first);
    ticket -= num_chunk_first * ahead;
    const std::int32_t tasks = num_chunk_first + num_sequence_first;
    const std::int32_t rounds = num_kv_heads - ahead;
    if (ticket >= tasks * rounds) {
      ticket -= tasks * rounds;
      return number(num_chunk_first + ticket % num_sequence_first,
                    rounds + ticket / num_sequence_first);
    }
    const std::int32_t head = ticket / tasks;
    const std::int32_t i = ticket % tasks;
    // Of a round's first i pairs so many are chunk-first.
    const std::int32_t first = (i * num_chunk_first + tasks - 1) / tasks;
    const bool chunk_first = first * tasks < (i + 1) * num_chunk_first;
    return chunk_first ? number(first, head + ahead) : number(num_chunk_first + i - first, head);
  }

 private:
  [[nodiscard]] CHUNKATTN_HD constexpr std::int32_t number(std::int32_t task,
                                                           std::int32_t head) const noexcept {
    return task * num_kv_heads + head;
  }
};

}  // namespace detail::cuda
CHUNKATTN_NAMESPACE_END
