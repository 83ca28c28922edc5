// What a prefix tree is made with and what it tells: tokens, options, retention policies, results
// and counters.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>

#include "allocator.hpp"
#include "detail/base/check.hpp"
#include "detail/base/config.hpp"
#include "detail/base/token_concepts.hpp"

CHUNKATTN_NAMESPACE_BEGIN

/// A token of a prompt: what is compared to find shared prefixes. Usually an integer id; a struct
/// may carry further identity (an image's id beside its placeholder token).
///
/// - It can be made without a value, and copying it never throws.
/// - `a == b`, where `a == a` always holds: not floating-point numbers, nor a struct whose == uses
///   them and may meet NaN (the compiler cannot see that). Equal tokens have equal std::hash.
/// - Neither == nor std::hash throws: the tree also calls them where nothing may fail.
template <class T>
concept TokenType = std::default_initializable<T> && detail::NothrowCopyable<T> &&
                    detail::EqualToItself<T> && requires(const T& token) {
                      { std::hash<T>{}(token) } -> std::convertible_to<std::size_t>;
                    };

/// Whose tokens these are. Two sequences share K/V only where both fields agree: `tenant` is a
/// trust boundary (a salt, a customer), `adapter` names the weights (a LoRA, a model). The two are
/// compared field by field and never mixed, so tenant 5 is not adapter 5.
struct Namespace {
  std::uint64_t tenant = 0;   ///< trust boundary
  std::uint64_t adapter = 0;  ///< which weights
  /// Tokens that every tenant of the adapter may share: what InsertOptions::public_length covers.
  /// A tag of its own, so that no tenant number, 0 included, stands for everybody.
  bool is_public = false;
  friend constexpr bool operator==(const Namespace&, const Namespace&) = default;
};

/// How a tree shares, forks and reuses.
struct TreeOptions {
  /// What may be shared: any common prefix to the token, or whole chunks only. `chunk` gives
  /// standard block tables for other paged kernels; `token` splits a chunk in place where prompts
  /// part.
  enum class Sharing : std::uint8_t { token, chunk };

  Sharing sharing = Sharing::token;  ///< exact to the token, or whole chunks
  /// Sharing::token: a fork copies a private tail of fewer tokens than this and splits a longer one
  /// in place. 0 means ChunkSize / 2. Slots stay within ChunkSize / min_run of the need.
  std::int32_t min_run = 0;
};

/// Path positions [begin, begin + length) of a sequence.
struct TokenRange {
  std::int32_t begin = 0;   ///< first path position, counted from 0
  std::int32_t length = 0;  ///< positions
  /// One past the last position.
  [[nodiscard]] constexpr std::int32_t end() const noexcept { return begin + length; }
  /// Whether there are no positions.
  [[nodiscard]] constexpr bool empty() const noexcept { return length == 0; }
  friend constexpr bool operator==(const TokenRange&, const TokenRange&) = default;
};

/// Names a sequence of a tree for as long as the tree lives; never given to another one. A key for
/// an engine's own tables.
enum class SequenceId : std::uint64_t { none = 0 };

/// How a prompt joins.
struct InsertOptions {
  Namespace name_space{};  ///< whose tokens these are
  /// The first tokens of the prompt that every tenant of the same adapter may share.
  std::size_t public_length = 0;
  /// Tokens past this one are computed even where their K/V is cached (prompt log-probabilities).
  /// Their K/V stays shared and is not rewritten.
  std::size_t max_reuse = std::numeric_limits<std::size_t>::max();
  /// The last token of the prompt is computed even where its K/V is cached: without its query there
  /// is nothing to sample from. False for a sequence that goes on with append().
  bool compute_last = true;
  /// Retention priority of what this sequence leaves behind; larger stays longer (`Priority`).
  int priority = 0;
  /// With false, tokens that another sequence is still to write are not shared but computed a
  /// second time, so that this sequence waits for nobody.
  bool share_pending = true;
};

namespace detail {
using Sharing = TreeOptions::Sharing;
}

/// Counts since construction, and the present state.
struct TreeStats {
  std::uint64_t inserts = 0;         ///< sequences that joined by insert()
  std::uint64_t leaves = 0;          ///< sequences that left
  std::uint64_t forks = 0;           ///< sequences that joined by fork()
  std::uint64_t prompt_tokens = 0;   ///< tokens of all inserted prompts
  std::uint64_t cached_tokens = 0;   ///< of these, found with their K/V written
  std::uint64_t pending_tokens = 0;  ///< of these, found while another sequence was to write them
  std::uint64_t splits = 0;          ///< nodes cut in two
  std::uint64_t splits_inside_slot = 0;  ///< of these, inside a slot
  std::uint64_t forks_copied = 0;        ///< forks that copied a short tail
  std::uint64_t forks_shared = 0;        ///< forks that copied nothing
  std::uint64_t copied_tokens = 0;       ///< K/V rows copied for forks
  std::uint64_t hand_overs = 0;          ///< pending nodes that got a new writer
  std::uint64_t merged_tokens = 0;       ///< generated tokens dropped for an equal published path
  std::uint64_t published_tokens = 0;    ///< generated tokens that became matchable
  std::uint64_t evicted_tokens = 0;      ///< cached tokens given up
  std::uint64_t evicted_slots = 0;       ///< slots freed by that
  std::uint64_t failed_inserts = 0;      ///< for want of slots
  std::uint64_t failed_adds = 0;         ///< Step::add() and append(), for want of slots
  std::uint64_t clears = 0;              ///< calls of clear()
  std::uint64_t steps = 0;               ///< steps that finished
  std::uint64_t cancelled_steps = 0;     ///< steps that were dropped before they were submitted
  std::uint64_t abandoned_steps = 0;     ///< steps that were dropped in flight
  std::size_t live_sequences = 0;        ///< joined and not left
  /// Left, and still used by a step or a copy; a step with a tree of drafts counts as one more.
  std::size_t leaving_sequences = 0;
  std::size_t nodes = 0;           ///< runs of tokens, live and cached
  std::size_t used_slots = 0;      ///< live + retained + retiring
  std::size_t retained_slots = 0;  ///< held by nothing but cached, evictable nodes
  std::size_t stored_tokens = 0;   ///< places taken in used slots; the rest is fragmentation
};

/// Something entered the cache's reach or left it; for routers that mirror what is cached where.
struct CacheEvent {
  /// Became cache, stopped being it, or all of the cache did.
  enum class Kind : std::uint8_t { stored, evicted, cleared };
  Kind kind;                       ///< what happened
  Namespace name_space{};          ///< whose tokens
  std::int32_t position = 0;       ///< path position of the first token concerned
  std::int32_t length = 0;         ///< tokens concerned
  SlotIndex first_slot = no_slot;  ///< where the first of them lies
};

/// The rows of one sequence in a step. Rows are counted over the whole step, in the order of add().
struct StepRow {
  SequenceId sequence = SequenceId::none;  ///< whose
  std::int32_t index = 0;                  ///< how many sequences were added before it
  std::int32_t position = 0;               ///< path position of the first row
  std::int32_t first_row = 0;              ///< of q, k, v and out
  std::int32_t num_rows = 0;               ///< drafts included
  std::int32_t num_drafts = 0;             ///< the last rows are these
  /// Whether the rows reach the end of the sequence, so that there is something to sample. (A part
  /// of a longer prompt has no output.)
  bool has_output = false;

  /// The row whose logits give the first output; those of the drafts follow.
  [[nodiscard]] std::int32_t output_row() const noexcept {
    return first_row + num_rows - 1 - num_drafts;
  }
};

/// What Step::add() says: that it added what it was given, or why it added nothing.
class AddResult {
 public:
  /// Why a sequence was not added.
  enum class Reason : std::uint8_t {
    none,                ///< it was added
    waits_for_sequence,  ///< another sequence is to write K/V that this one reads: add that first
    waits_for_step,      ///< a step in flight still uses places that this sequence needs
    out_of_chunks,       ///< the budget is spent: wait for a sequence to leave, or make one
    nothing_to_compute   ///< all known tokens are computed: commit an output, or append()
  };

  /// Whether all was added.
  [[nodiscard]] explicit operator bool() const noexcept { return reason_ == Reason::none; }
  /// Why nothing was.
  [[nodiscard]] Reason reason() const noexcept { return reason_; }
  /// With Reason::waits_for_sequence: which one. Add it first, wait until it has written, or
  /// Sequence::take_over() its job.
  [[nodiscard]] SequenceId waits_for() const noexcept { return waits_for_; }
  /// With Reason::waits_for_step: the number of the step that has to finish first.
  [[nodiscard]] std::uint64_t step() const noexcept { return step_; }
  /// Of many sequences of which none was added: the first that could not be, counted from 0.
  [[nodiscard]] std::size_t held_index() const noexcept { return held_index_; }

  /// The rows of a sequence that was added by itself.
  /// \throws InvalidArgument if it was not
  [[nodiscard]] const StepRow& row() const& {
    check_row();
    return row_;
  }
  /// As above, of a temporary.
  [[nodiscard]] StepRow row() const&& {
    check_row();
    return row_;
  }

 private:
  void check_row() const {
    detail::check_argument(reason_ == Reason::none, "row()", "of a sequence that was not added",
                           "a result that is true; reason() says why this one is not");
    detail::check_argument(row_.num_rows > 0, "row()", "of many sequences",
                           "the result of adding one");
  }

  template <class>
  friend class Step;
  Reason reason_ = Reason::none;
  SequenceId waits_for_ = SequenceId::none;
  std::uint64_t step_ = 0;
  std::size_t held_index_ = 0;
  StepRow row_;
};

/// A retention policy. `retains` is a constant; `level(priority)` orders what is evicted: lower
/// levels first, within a level the least recently used first, always leaves before their parents.
/// When more than `high_watermark` slots are in use after a sequence has left, cached ones are
/// evicted down to `low_watermark`; pins hold at most `max_pinned`.
template <class R>
concept RetentionPolicy = requires(const R& policy, int priority) {
  { R::retains } -> std::convertible_to<bool>;
  { policy.level(priority) } noexcept -> std::convertible_to<int>;
  { policy.high_watermark } -> std::convertible_to<std::size_t>;
  { policy.low_watermark } -> std::convertible_to<std::size_t>;
  { policy.max_pinned } -> std::convertible_to<std::size_t>;
};

/// The paper's rule: the cache holds only sequences in decoding.
struct NoRetention {
  static constexpr bool retains = false;  ///< what nobody uses is freed at once
  /// Slots in use above which a leaving sequence starts eviction; unless set, only a need does.
  std::size_t high_watermark = std::numeric_limits<std::size_t>::max();
  /// Slots in use at which that eviction stops; unless set, the high one.
  std::size_t low_watermark = std::numeric_limits<std::size_t>::max();
  /// At most this many slots are pinned by PrefixTree::pin().
  std::size_t max_pinned = 0;
  /// One level.
  [[nodiscard]] constexpr int level(int) const noexcept { return 0; }
};

/// Least recently used goes first.
struct Lru {
  static constexpr bool retains = true;  ///< what nobody uses stays until its slot is needed
  /// Slots in use above which a leaving sequence starts eviction; unless set, only a need does.
  std::size_t high_watermark = std::numeric_limits<std::size_t>::max();
  /// Slots in use at which that eviction stops; unless set, the high one.
  std::size_t low_watermark = std::numeric_limits<std::size_t>::max();
  /// At most this many slots are pinned by PrefixTree::pin().
  std::size_t max_pinned = 0;
  /// One level.
  [[nodiscard]] constexpr int level(int) const noexcept { return 0; }
};

/// Lowest InsertOptions::priority goes first, then the least recently used.
struct Priority {
  static constexpr bool retains = true;  ///< what nobody uses stays until its slot is needed
  /// Slots in use above which a leaving sequence starts eviction; unless set, only a need does.
  std::size_t high_watermark = std::numeric_limits<std::size_t>::max();
  /// Slots in use at which that eviction stops; unless set, the high one.
  std::size_t low_watermark = std::numeric_limits<std::size_t>::max();
  /// At most this many slots are pinned by PrefixTree::pin().
  std::size_t max_pinned = 0;
  /// A level for each priority.
  [[nodiscard]] constexpr int level(int priority) const noexcept { return priority; }
};

static_assert(RetentionPolicy<NoRetention> && RetentionPolicy<Lru> && RetentionPolicy<Priority>);

CHUNKATTN_NAMESPACE_END
