// Requests that are replayed: those of a trace, and generated ones.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "trace_file.hpp"

namespace replay {

using Token = std::uint32_t;

struct Request {
  double arrival = 0;         ///< seconds
  int output = 1;             ///< tokens that it generates
  std::uint64_t tenant = 0;   ///< of the cache
  std::vector<Token> prompt;  ///< [tokens]
};

/// Tokens of the trace that one of ours stands for: a block of 512 becomes 48 on average.
inline constexpr double trace_scale = 512.0 / 48;

/// A trace's. Equal blocks of it stand for equal blocks of 512 tokens. Here a block becomes 40 to
/// 56 tokens, length and content given by its number, so that prompts part inside chunks; outputs
/// are scaled alike.
[[nodiscard]] std::vector<Request> trace_requests(std::span<const TracedRequest> trace);

/// Users of 64 groups, each with a system prompt of 1,000 to 3,000 tokens, who arrive mixed: 6,000
/// requests, 70 a second (Poisson), with 50 to 400 tokens of their own and 50 to 300 of output.
/// Always the same ones: the seed is in the source.
[[nodiscard]] std::vector<Request> groups_of_users();

/// Prompts as ids of blocks of 64 tokens, in the order in which they are used.
using Blocks = std::vector<std::vector<std::uint32_t>>;

/// A trace's, one block of ours for each of 512 tokens: what a cache of chunks keeps or not is
/// whole blocks then, as an offline bound needs it.
[[nodiscard]] Blocks trace_blocks(std::span<const TracedRequest> trace);
/// Agents with long tool loops: 1,200 sessions of 6 kinds, each with a system prompt of 8 to 40
/// blocks; one begins every second (Poisson) and goes through 12 calls on average, each of which
/// appends 1 to 10 blocks. A session has a pace of its own (log-normal, 20 s), a call's time is
/// that (log-normal); one in 20 waits for a person besides (10 minutes).
[[nodiscard]] Blocks agent_blocks();
/// Retrieval: 12,000 prompts of 6 common blocks, 5 of 2,000 documents of 3 to 14 blocks in random
/// order, documents being wanted by Zipf's law (0.9), and 1 to 3 blocks of the user's.
[[nodiscard]] Blocks retrieval_blocks();
/// Code completion, of which no policy's constants were chosen: 150 persons, each with 8 files of
/// its own beside 40 common ones, all of 5 to 80 blocks. A prompt is 3 common blocks, the file up
/// to the cursor, and one block of its own. One asks again after 8 s (log-normal), stays in a file
/// for 15 requests on average and goes back to the last ones most; the cursor wanders, and half of
/// the requests follow an edit of a block of the last 4 before it, so that prompts part there.
[[nodiscard]] Blocks editor_blocks();

}  // namespace replay
