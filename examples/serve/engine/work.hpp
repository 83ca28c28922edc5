// Work: the engine's records of requests, beside their sequences.
#pragma once

#include <algorithm>
#include <chunkattn/chunkattn.hpp>
#include <chunkattn/transfer/transfer.hpp>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "engine.hpp"
#include "sampling.hpp"

namespace serve {

/// A request until all of its choices have ended.
struct LiveRequest {
  LiveRequest(Request r, std::size_t prompt_tokens)
      : request(std::move(r)),
        prompt_size(prompt_tokens),
        open(request.choices),
        ended(static_cast<std::size_t>(open)) {}

  [[nodiscard]] bool has_ended(int choice) const {
    return ended[static_cast<std::size_t>(choice)] != 0;
  }

  Request request;  ///< its prompt is where the work is, and here only if it is scored
  std::size_t prompt_size;
  int open;                                                     ///< choices that have not ended
  std::vector<char> ended;                                      ///< by choice
  bool joined = false;                                          ///< some of its work was live
  std::vector<std::vector<TokenLogprob>> prompt_logprobs = {};  ///< as far as they are computed
  bool prompt_reported = false;
  std::shared_ptr<const CacheReport> report;  ///< until an event has it
  std::vector<int> penalised = {};  ///< the prompt's tokens, each once, for repetition_penalty
  std::vector<int> ends = {};       ///< tokens that may not come before min_tokens others

  /// Whether log-probabilities of the prompt are to be computed.
  [[nodiscard]] bool scores_prompt() const { return request.prompt_logprobs && !prompt_reported; }
  /// The position whose logits give the next of them.
  [[nodiscard]] std::size_t next_scored() const {
    return request.scored_from - 1 + prompt_logprobs.size();
  }
};

/// So often a sequence is preempted before its next token; then others are until it has got one.
constexpr int most_preemptions = 2;

/// What one sequence is for: a choice, or a prompt that its choices have in common.
struct Work {
  std::shared_ptr<LiveRequest> job;
  int choice = 0;
  /// It computes the prompt for all choices; they split off when that is done.
  bool splits = false;
  std::vector<int> tokens;     ///< prompt and generated ones, while it waits
  std::uint64_t queue_id = 0;  ///< in the queue of Order::cache; 0: it is not there
  std::optional<chunkattn::SwappedSequence<std::int32_t>> swapped;
  bool decodes = false;      ///< all but its last token is computed
  int preempted = 0;         ///< times since its last token
  std::size_t reached = 0;   ///< positions that were computed before it was preempted
  std::size_t computed = 0;  ///< tokens of the prompt that went through the model
  std::size_t cached = 0;    ///< the others, until an event has reported them
  TokenCounts counts;        ///< of what it has got, where penalties ask for it

  /// False when everything it was for has ended.
  [[nodiscard]] bool is_wanted() const { return splits ? job->open > 0 : !job->has_ended(choice); }
  [[nodiscard]] bool has_precedence() const { return preempted >= most_preemptions; }
  [[nodiscard]] std::size_t swapped_bytes() const {
    if (!swapped) return 0;
    std::size_t bytes = swapped->kv.size();
    for (const chunkattn::CompanionRows& rows : swapped->companions) bytes += rows.bytes.size();
    return bytes;
  }

  /// Rows [position, position + rows) are in a step. Returns how many of them are computed again.
  std::size_t count_rows(std::size_t position, std::size_t rows) {
    const std::size_t end = position + rows;
    const std::size_t again = std::min(end, reached) - std::min(position, reached);
    const std::size_t in_prompt =
        std::min(end, job->prompt_size) - std::min(position, job->prompt_size);
    computed += in_prompt - std::min(again, in_prompt);
    return again;
  }
};

/// Sequences that do the same, side by side as Step::add() takes them, in the order of joining.
template <class Sequence>
struct Group {
  std::vector<Sequence> sequences;
  std::vector<Work> works;

  [[nodiscard]] std::size_t size() const { return works.size(); }
  [[nodiscard]] bool empty() const { return works.empty(); }
  void push(Sequence sequence, Work work) {
    sequences.push_back(std::move(sequence));
    works.push_back(std::move(work));
  }
  std::pair<Sequence, Work> take(std::size_t i) {
    std::pair<Sequence, Work> taken(std::move(sequences[i]), std::move(works[i]));
    const auto at = static_cast<std::ptrdiff_t>(i);
    sequences.erase(sequences.begin() + at);
    works.erase(works.begin() + at);
    return taken;
  }
};

}  // namespace serve
