// CacheEvent: one change of what prompts can find in a tree.
#pragma once

#include <cstdint>

#include "../detail/support/config.hpp"
#include "../plan_view.hpp"
#include "../tree_options.hpp"

CHUNKATTN_NAMESPACE_BEGIN

/// A change of what prompts can find, for routers and for whoever else keeps a picture of it: see
/// CacheEvents.
///
/// Stored tokens form *spans*: runs of consecutive tokens of one path and namespace that grow, and
/// shrink, at their ends only. A path goes from the root over spans, and may leave one in its
/// middle. A span's parent is stored before it and evicted after it.
struct CacheEvent {
  /// The K/V of tokens became usable, was evicted (or freed: it can be found no more), or clear()
  /// was called. Of a component that is followed: what it has of tokens that are stored, K/V of
  /// windows or the state after the token, is `kept` from now on, or `lost` before these tokens
  /// are. Without these kinds a reader knows what is stored, not where a prompt is resumed.
  enum class Kind : std::uint8_t { stored, evicted, cleared, kept, lost };
  Kind kind = Kind::cleared;  ///< what happened
  /// Tells the events of one CacheEvents from those of others, as of a process before it was
  /// started again: numbers and spans are of the stream.
  std::uint64_t stream = 0;
  /// One more than that of the event before. In a snapshot: that of the last event before it.
  std::uint64_t number = 0;
  std::uint64_t span = 0;  ///< the span of these tokens, never used for another one
  /// The span of the token before the first of these: 0 at the start of a prompt, `span` itself
  /// where these extend it.
  std::uint64_t parent = 0;
  Namespace name_space{};             ///< of the tokens
  std::int32_t position = 0;          ///< position in the prompt of the first of them
  std::int32_t length = 0;            ///< how many; but for `evicted` they all lie in one chunk
  ChunkIndex first_chunk = no_chunk;  ///< the chunk of the first of them
  std::int32_t first_offset = 0;      ///< its offset in this chunk
  std::int32_t group = 0;  ///< kept, lost: in which place of CacheSnapshot::reach the component is
};

CHUNKATTN_NAMESPACE_END
