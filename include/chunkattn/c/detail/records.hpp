// The structs of tree.h as those of the C++ library, and back, with checks of what callers fill in.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>

#include "../../detail/support/array.hpp"
#include "../../detail/support/check.hpp"
#include "../../detail/support/config.hpp"
#include "../../events/cache_event.hpp"
#include "../../tree_options.hpp"
#include "../tree.h"
#include "handles.hpp"
#include "pointers.hpp"

CHUNKATTN_NAMESPACE_BEGIN
namespace detail::c {

[[nodiscard]] inline chunkattn_row row_of(const ScheduledSequence& row) noexcept {
  return {static_cast<std::uint64_t>(row.sequence),
          row.index,
          row.position,
          row.first_row,
          row.num_rows,
          row.num_drafts,
          row.has_output ? 1 : 0};
}
[[nodiscard]] inline ScheduledSequence row_of(const chunkattn_row& row) noexcept {
  return {static_cast<SequenceId>(row.sequence),
          row.index,
          row.position,
          row.first_row,
          row.num_rows,
          row.num_drafts,
          row.has_output != 0};
}
[[nodiscard]] inline chunkattn_added added_of(const AddResult& result, bool one) {
  using Reason = AddResult::Reason;
  chunkattn_added added{};
  switch (result.reason()) {
    case Reason::none:
      if (one) added.row = row_of(result.row());
      break;
    case Reason::waits_for_sequence:
      added.reason = CHUNKATTN_WAITS_FOR_SEQUENCE;
      added.waits_for = static_cast<std::uint64_t>(result.waits_for());
      break;
    case Reason::waits_for_step:
      added.reason = CHUNKATTN_WAITS_FOR_STEP;
      added.waits_for = result.step();
      break;
    case Reason::out_of_chunks:
      added.reason = CHUNKATTN_NO_CHUNKS;
      break;
    case Reason::nothing_to_compute:
      added.reason = CHUNKATTN_NOTHING_TO_COMPUTE;
      break;
  }
  added.blocked_index = static_cast<std::int64_t>(result.blocked_index());
  return added;
}
[[nodiscard]] inline chunkattn_event event_of(const CacheEvent& event) noexcept {
  return {event.stream,
          event.number,
          event.span,
          event.parent,
          event.name_space.tenant,
          event.name_space.adapter,
          event.name_space.is_public ? 1 : 0,
          static_cast<std::int32_t>(event.kind),
          event.position,
          event.length,
          event.first_chunk,
          event.first_offset};
}
[[nodiscard]] inline CacheEvent event_of(const chunkattn_event& event) noexcept {
  return {.kind = static_cast<CacheEvent::Kind>(event.kind),
          .stream = event.stream,
          .number = event.number,
          .span = event.span,
          .parent = event.parent,
          .name_space = {event.tenant, event.adapter, event.is_public != 0},
          .position = event.position,
          .length = event.length,
          .first_chunk = event.first_chunk,
          .first_offset = event.first_offset};
}

inline void check_event(const chunkattn_event& event, const char* name) {
  check_argument(event.kind >= CHUNKATTN_STORED && event.kind <= CHUNKATTN_CLEARED,
                 joined({name, "->kind"}), event.kind,
                 "CHUNKATTN_STORED = 0, CHUNKATTN_EVICTED = 1 or CHUNKATTN_CLEARED = 2");
}

/// An array of a caller.
template <class T>
[[nodiscard]] std::span<T> checked_array(T* array, std::int64_t size, const char* name,
                                         const char* size_name, const char* of) {
  check_argument(size >= 0, size_name, size, "a count");
  if (size > 0) check_memory(array, name, alignof(T), of);
  return {array, to_size(size)};
}
/// Tokens of a prompt, or none.
[[nodiscard]] inline Tokens checked_tokens(const std::int32_t* tokens, std::int64_t num_tokens) {
  return checked_array(tokens, num_tokens, "tokens", "num_tokens", "num_tokens tokens");
}
/// At least one token, and as many as a sequence may have.
[[nodiscard]] inline Tokens checked_prompt(const std::int32_t* tokens, std::int64_t num_tokens) {
  check_argument(num_tokens >= 1 && num_tokens <= max_length, "num_tokens", num_tokens,
                 "1 to 2^30");
  return checked_tokens(tokens, num_tokens);
}

[[nodiscard]] inline InsertOptions insert_options(const chunkattn_insert_options* given) {
  if (given == nullptr) return {};
  const chunkattn_insert_options& options = checked_pointer(given, "options");
  check_argument(options.public_length >= 0, "options->public_length", options.public_length,
                 "a count of tokens");
  check_argument(options.max_reuse >= -1, "options->max_reuse", options.max_reuse,
                 "a position, -1 or 0");
  return {.name_space = {.tenant = options.tenant, .adapter = options.adapter},
          .public_length = to_size(options.public_length),
          .max_reuse = options.max_reuse > 0    ? to_size(options.max_reuse)
                       : options.max_reuse == 0 ? (std::numeric_limits<std::size_t>::max)()
                                                : 0,
          .compute_last = options.no_output == 0,
          .priority = options.priority,
          .share_pending = options.compute_pending == 0,
          .preempted = options.preempted != 0};
}

/// Positions of a sequence: begin and length that fit into 32 bits.
[[nodiscard]] inline TokenRange checked_range(std::int64_t begin, std::int64_t length,
                                              const char* length_name) {
  check_argument(begin >= 0 && begin <= max_length, "begin", begin, "a position of the sequence");
  check_argument(length >= 0 && length <= max_length, length_name, length,
                 "positions of the sequence");
  return {static_cast<std::int32_t>(begin), static_cast<std::int32_t>(length)};
}

}  // namespace detail::c
CHUNKATTN_NAMESPACE_END
