// Types of a prefix tree's interface: tokens, options, retention policies, results and counters.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <optional>
#include <span>
#include <type_traits>

#include "allocator.hpp"
#include "detail/support/check.hpp"
#include "detail/support/config.hpp"

CHUNKATTN_NAMESPACE_BEGIN

namespace detail {

// What a token type must satisfy, named so that compilers' messages explain it.

/// Compared by ==. A floating-point number is not equal to itself if it is NaN, so the tree would
/// never find it: use its bits (std::bit_cast<std::uint32_t>).
template <class T>
concept EqualToItself = std::equality_comparable<T> && !std::floating_point<T>;  // NaN != NaN

/// Copying must not throw: it would leave half of a prompt in the tree. For types that own memory
/// use an index into a table of them.
template <class T>
concept NothrowCopyable = std::copyable<T> && std::is_nothrow_copy_constructible_v<T> &&
                          std::is_nothrow_copy_assignable_v<T>;

}  // namespace detail

/// A token of a prompt: what is compared to find shared prefixes. Usually an integer id; a struct
/// may carry further identity (an image's id beside its placeholder token).
///
/// - It has a default constructor, and copying it never throws.
/// - `a == a` is always true: so no floating-point numbers, and no struct whose == compares any
///   that may be NaN (which the compiler cannot check). Equal tokens have equal std::hash.
/// - Neither == nor std::hash throws, because the tree calls them where it cannot fail.
template <class T>
concept TokenType = std::default_initializable<T> && detail::NothrowCopyable<T> &&
                    detail::EqualToItself<T> && requires(const T& token) {
                      { std::hash<T>{}(token) } -> std::convertible_to<std::size_t>;
                    };

/// Tokens that a call reads: any contiguous range of them, or a list, {1, 2, 3}.
template <class Token>
struct TokenSpan : std::span<const Token> {
  using std::span<const Token>::span;
  /// The same tokens.
  TokenSpan(std::span<const Token> tokens) noexcept : std::span<const Token>(tokens) {}
  /// Those of the list, for as long as the call takes.
  TokenSpan(std::initializer_list<Token> tokens) noexcept
      : std::span<const Token>(tokens.begin(), tokens.size()) {}
};

/// Who may share K/V: sequences share it only if all fields are equal. `tenant` is a trust boundary
/// (a salt, a customer), `adapter` names the weights (a LoRA, a model). Both are compared exactly,
/// not by a hash.
struct Namespace {
  std::uint64_t tenant = 0;   ///< trust boundary
  std::uint64_t adapter = 0;  ///< which weights
  /// In results of the tree: these tokens are shared by all tenants of the adapter, because
  /// InsertOptions::public_length covers them. A flag, so that every tenant number, 0 too, is a
  /// tenant.
  bool is_public = false;
  friend constexpr bool operator==(const Namespace&, const Namespace&) = default;
};

/// How a tree shares and forks.
struct TreeOptions {
  /// What may be shared: any common prefix to the token, or whole chunks only. `chunk` gives
  /// standard block tables for other paged kernels; `token` splits a chunk in place where prompts
  /// part.
  enum class Sharing : std::uint8_t { token, chunk };

  Sharing sharing = Sharing::token;  ///< exact to the token, or whole chunks
  /// Sharing::token: a fork copies a private tail of fewer tokens than this and splits a longer one
  /// in place. Unset: ChunkSize / 2. Larger values copy more; smaller ones leave more chunks partly
  /// used: at most ChunkSize / min_run times the chunks that the tokens need.
  std::optional<std::int32_t> min_run{};
};

/// Positions [begin, begin + length) of a sequence.
struct TokenRange {
  std::int32_t begin = 0;   ///< first position, counted from 0
  std::int32_t length = 0;  ///< positions
  /// One past the last position.
  [[nodiscard]] constexpr std::int32_t end() const noexcept { return begin + length; }
  /// Whether there are no positions.
  [[nodiscard]] constexpr bool empty() const noexcept { return length == 0; }
  friend constexpr bool operator==(const TokenRange&, const TokenRange&) = default;
};

/// The number of a sequence in its tree, never used for another one: a key for an engine's own
/// tables. `none` is no sequence.
enum class SequenceId : std::uint64_t { none = 0 };

/// How a prompt is inserted.
struct InsertOptions {
  Namespace name_space{};  ///< with whom the sequence may share K/V
  /// The first tokens of the prompt that all tenants of the adapter share, where they insert them
  /// with a public_length, too.
  std::size_t public_length = 0;
  /// Tokens from this position on are computed even if their K/V is cached (for prompt
  /// log-probabilities). Their K/V stays shared and is not written again.
  std::size_t max_reuse = (std::numeric_limits<std::size_t>::max)();
  /// Whether the last token of the prompt is computed even if its K/V is cached, because its logits
  /// are needed. False for a sequence that continues with append().
  bool compute_last = true;
  /// With RetentionOptions::by_priority: how long the sequence's chunks stay cached; larger is
  /// longer. Where n different ones were used so far, evicting a chunk is O(log n), O(n) with
  /// RetentionOptions::fair, and the first use of another one O(n).
  int priority = 0;
  /// Whether to share K/V that another sequence has still to compute. If not, it is computed a
  /// second time and the sequence never has to wait.
  bool share_pending = true;
  /// Whether these are the tokens of a sequence that was preempted and comes back, which TreeStats
  /// counts apart. Sequence::options() sets it.
  bool preempted = false;
};

namespace detail {
using Sharing = TreeOptions::Sharing;
/// Tokens of a sequence, at most.
inline constexpr std::int32_t max_length = 1 << 30;
}  // namespace detail

/// Counts since the tree's construction, and its present state. Chunks are counted once, not by
/// layer.
struct TreeStats {
  std::uint64_t inserts = 0;                  ///< sequences that joined by insert()
  std::uint64_t leaves = 0;                   ///< sequences that left
  std::uint64_t forks = 0;                    ///< sequences that joined by fork()
  std::uint64_t prompt_tokens = 0;            ///< tokens of all inserted prompts but preempted ones
  std::uint64_t cached_tokens = 0;            ///< of these, found with their K/V written
  std::uint64_t pending_tokens = 0;           ///< of these, found while another had to compute them
  std::uint64_t preempted_inserts = 0;        ///< of inserts, with InsertOptions::preempted
  std::uint64_t preempted_tokens = 0;         ///< tokens of these
  std::uint64_t preempted_cached_tokens = 0;  ///< of these, found, written or not
  std::uint64_t splits = 0;                   ///< nodes cut in two
  std::uint64_t splits_inside_chunk = 0;      ///< of these, inside a chunk
  std::uint64_t forks_copied = 0;             ///< forks that copied a whole tail, being short
  std::uint64_t forks_shared = 0;             ///< all others
  std::uint64_t copied_tokens = 0;            ///< K/V rows copied for forks
  std::uint64_t reassigned_nodes = 0;         ///< times that K/V to be computed got another writer
  std::uint64_t merged_tokens = 0;     ///< generated tokens dropped, being in the tree already
  std::uint64_t published_tokens = 0;  ///< generated tokens that prompts can match now
  std::uint64_t evicted_tokens = 0;    ///< cached tokens that were evicted
  std::uint64_t evicted_chunks = 0;    ///< chunks freed by that
  std::uint64_t failed_inserts = 0;    ///< insert(), for lack of chunks
  std::uint64_t failed_adds = 0;       ///< Step::add() and append(), for lack of chunks
  std::uint64_t clears = 0;            ///< calls of clear()
  std::uint64_t steps = 0;             ///< steps that finished
  std::uint64_t cancelled_steps = 0;   ///< steps that were dropped before they were submitted
  std::uint64_t abandoned_steps = 0;   ///< steps that were dropped in flight
  std::size_t live_sequences = 0;      ///< sequences that have not left
  /// Sequences that have left and are still used by a step or a copy; a step with a tree of drafts
  /// counts as one more.
  std::size_t leaving_sequences = 0;
  std::size_t nodes = 0;            ///< runs of tokens, live and cached
  std::size_t used_chunks = 0;      ///< chunks that are not free
  std::size_t retained_chunks = 0;  ///< of these, evictable: they hold only cached tokens
  std::size_t stored_tokens = 0;    ///< tokens in used chunks; the rest of these is fragmentation
};

/// Why cached tokens went.
enum class EvictionCause : std::uint8_t {
  space,        ///< others needed their chunks, and they were first in the policy's order
  watermark,    ///< more chunks than high_watermark were in use
  quota,        ///< their tenant had more than its quota
  ttl,          ///< expire(): they were unused for too long
  trim,         ///< trim()
  clear,        ///< clear()
  not_retained  ///< the policy keeps nothing: the last sequence that had them left
};

/// The rows of one sequence in a step. Rows are counted over the whole step, in the order of add().
struct ScheduledSequence {
  SequenceId sequence = SequenceId::none;  ///< the sequence
  std::int32_t index = 0;                  ///< sequences that were added before it
  std::int32_t position = 0;               ///< position of the first row in its sequence
  std::int32_t first_row = 0;              ///< its index in q, k, v and out
  std::int32_t num_rows = 0;               ///< drafts included
  std::int32_t num_drafts = 0;             ///< drafts: the last of these rows
  /// Whether the rows reach the end of the sequence, so that there is something to sample. (A part
  /// of a longer prompt has no output.)
  bool has_output = false;

  /// The row whose logits give the first output; those of the drafts follow.
  [[nodiscard]] std::int32_t output_row() const noexcept {
    return first_row + num_rows - 1 - num_drafts;
  }
};

/// The result of Step::add(): whether the sequence, or all of the sequences, were added, or why
/// none was.
class AddResult {
 public:
  /// Why a sequence was not added.
  enum class Reason : std::uint8_t {
    none,                ///< it was added
    waits_for_sequence,  ///< another sequence has to compute K/V that this one reads
    waits_for_step,      ///< a step in flight still uses memory that this sequence needs
    out_of_chunks,       ///< no chunk is free or evictable: wait for a sequence to leave
    nothing_to_compute   ///< all known tokens are computed: commit an output, or append()
  };

  /// Whether all were added.
  [[nodiscard]] explicit operator bool() const noexcept { return reason_ == Reason::none; }
  /// Why none was added.
  [[nodiscard]] Reason reason() const noexcept { return reason_; }
  /// With Reason::waits_for_sequence: which one. Add it first, try again in the next step, or let
  /// this sequence compute the K/V (Sequence::take_over()).
  [[nodiscard]] SequenceId waits_for() const noexcept { return waits_for_; }
  /// With Reason::waits_for_step: the number of the step that has to finish first.
  [[nodiscard]] std::uint64_t step() const noexcept { return step_; }
  /// If many sequences were given and none was added: the index of the first that could not be.
  [[nodiscard]] std::size_t blocked_index() const noexcept { return blocked_index_; }

  /// The rows of the sequence that was added.
  /// \throws InvalidArgument if none or many were added
  [[nodiscard]] ScheduledSequence row() const {
    detail::check_argument(reason_ == Reason::none, "row()", "of a sequence that was not added",
                           "a result that is true; reason() says why this one is not");
    detail::check_argument(row_.num_rows > 0, "row()", "of many sequences",
                           "the result of adding one");
    return row_;
  }

 private:
  template <class>
  friend class Step;
  Reason reason_ = Reason::none;
  SequenceId waits_for_ = SequenceId::none;
  std::uint64_t step_ = 0;
  std::size_t blocked_index_ = 0;
  ScheduledSequence row_;
};

/// What becomes of chunks that no sequence uses. By default they stay as cache, and the least
/// recently used go first, leaves of the tree before their parents.
struct RetentionOptions {
  static constexpr std::size_t no_watermark = (std::numeric_limits<std::size_t>::max)();

  /// Whether unused chunks stay until others are needed. Not so is the paper's rule (section 3.1):
  /// only live sequences have K/V.
  bool retains = true;
  /// Chunks in use above which a leaving sequence starts eviction. Unless set, only a need does: in
  /// a pool with a limit, what fits stays; in one without, no more than live sequences have needed
  /// at once. `max_pool_chunks` keeps everything.
  std::size_t high_watermark = no_watermark;
  /// Chunks in use at which that eviction stops; unless set, high_watermark.
  std::size_t low_watermark = no_watermark;
  /// The most chunks that all pins together may cover (PrefixTree::pin()).
  std::size_t max_pinned = 0;
  /// Of a tree with CachePolicy: whether to evict within a level what is worth least by what was
  /// used again before (docs/retention.md), rather than what was not used for longest.
  bool learns = false;
  /// Of a tree with CachePolicy: whether each tenant has a share of what is cached. The lowest,
  /// oldest of the tenant goes that has most tokens cached by its weight; of one above its quota,
  /// whenever a sequence leaves. What is public counts as a tenant's of weight 1. A tree keeps some
  /// hundred bytes of each tenant with K/V in it, or at most a few times as many.
  bool fair = false;
  /// PrefixTree::expire() evicts what was not used for so long; 0: nothing. Not with `learns`.
  std::uint32_t ttl = 0;
  /// Whether lower InsertOptions::priority goes first, within one the least recently used.
  bool by_priority = false;

  /// Of what is cached, lower levels are evicted first.
  [[nodiscard]] constexpr int level(int priority) const noexcept {
    return by_priority ? priority : 0;
  }
};

namespace detail {

/// A field of the same name would hide what the tree reads.
template <class R>
concept HidesNoOption = requires {
  { &R::retains } -> std::same_as<bool RetentionOptions::*>;
  { &R::high_watermark } -> std::same_as<std::size_t RetentionOptions::*>;
  { &R::low_watermark } -> std::same_as<std::size_t RetentionOptions::*>;
  { &R::max_pinned } -> std::same_as<std::size_t RetentionOptions::*>;
  { &R::learns } -> std::same_as<bool RetentionOptions::*>;
  { &R::fair } -> std::same_as<bool RetentionOptions::*>;
  { &R::ttl } -> std::same_as<std::uint32_t RetentionOptions::*>;
  { &R::by_priority } -> std::same_as<bool RetentionOptions::*>;
};

}  // namespace detail

/// A retention policy: RetentionOptions, or what derives from them and has a `level(priority)` of
/// its own, noexcept, a whole number of 32 bits.
///
/// `level()` is asked once with each insert(), before that changes anything, and may answer
/// otherwise than before (by a clock, a table): what is cached keeps the highest level of those
/// that used it. Out of range, insert() throws InvalidArgument. It must not call the tree. The
/// options are read once, when the tree is made.
///
/// cache/policy.hpp has the policy that learns from reuse, or gives tenants shares;
/// cache/scored_policy.hpp one whose victims a function chooses.
template <class R>
concept RetentionPolicy = std::derived_from<R, RetentionOptions> && detail::HidesNoOption<R> &&
                          requires(const R& policy, int priority) {
                            { +policy.level(priority) } noexcept -> std::integral;
                          };

CHUNKATTN_NAMESPACE_END
