// TokenTree: the tree with its tokens' type. Where tokens are kept, finding prompts, and storing
// what becomes known. All the rest is in TreeCore, which does not know what a token is.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <utility>
#include <vector>

#include "../../allocator.hpp"
#include "../../tree_options.hpp"
#include "../support/array.hpp"
#include "../support/check.hpp"
#include "../support/config.hpp"
#include "chunk_table.hpp"
#include "core.hpp"
#include "prefixes.hpp"
#include "retention.hpp"
#if CHUNKATTN_BODIES
#include "add.hpp"
#include "finish.hpp"
#include "join.hpp"
#include "leave.hpp"
#include "write.hpp"
#endif

CHUNKATTN_NAMESPACE_BEGIN

namespace detail {

/// PrefixTree::Match. (The last token of a prompt is computed anyway: see InsertOptions.)
struct MatchResult {
  std::size_t cached;
  std::size_t pending;
};

/// Throws InvalidArgument for a prompt that cannot be inserted.
template <class Token>
void check_prompt(std::span<const Token> prompt) {
  check_argument(!prompt.empty(), "prompt.size()", 0, "at least one token");
  check_argument(prompt.size() <= to_size(max_length), "prompt.size()", prompt.size(),
                 "at most 2^30 tokens");
}

template <TokenType Token, int ChunkSize>
class TokenStore final : public Tokens {
 public:
  void grow(std::size_t num_chunks) override {
    if (num_chunks * ChunkSize <= tokens_.size()) return;
    tokens_.resize(num_chunks * ChunkSize);
  }
  [[nodiscard]] std::uint64_t hash(std::uint64_t seed, ChunkIndex chunk, std::int32_t offset,
                                   std::int32_t count) const noexcept override {
    return hash(seed, std::span(&token(chunk, offset), to_size(count)));
  }
  /// The same for tokens of a prompt.
  [[nodiscard]] static std::uint64_t hash(std::uint64_t seed,
                                          std::span<const Token> tokens) noexcept {
    for (const Token& token : tokens) seed = mix_hash(seed + 1, std::hash<Token>{}(token));
    return seed;
  }
  [[nodiscard]] std::int32_t common(ChunkIndex a, std::int32_t offset_a, ChunkIndex b,
                                    std::int32_t offset_b,
                                    std::int32_t count) const noexcept override {
    const Token *const in_a = &token(a, offset_a), *const in_b = &token(b, offset_b);
    return static_cast<std::int32_t>(std::mismatch(in_a, in_a + count, in_b).first - in_a);
  }
  /// Whether these tokens stand there.
  [[nodiscard]] bool equal(ChunkIndex chunk, std::int32_t offset,
                           std::span<const Token> tokens) const noexcept {
    return std::equal(tokens.begin(), tokens.end(), &token(chunk, offset));
  }
  void copy(ChunkIndex from, std::int32_t offset, ChunkIndex to, std::int32_t to_offset,
            std::int32_t count) noexcept override {
    store(to, to_offset, std::span(&token(from, offset), to_size(count)));
  }
  void prefetch(ChunkIndex chunk, std::int32_t offset) const noexcept override {
    CHUNKATTN_PREFETCH_WRITE(tokens_.data() + to_size(chunk) * ChunkSize + to_size(offset));
  }

  void store(ChunkIndex chunk, std::int32_t offset, const Token& token) {
    tokens_[to_size(chunk) * ChunkSize + to_size(offset)] = token;
  }
  void store(ChunkIndex chunk, std::int32_t offset, std::span<const Token> tokens) {
    std::copy(tokens.begin(), tokens.end(),
              tokens_.begin() + chunk * std::ptrdiff_t{ChunkSize} + offset);
  }
  [[nodiscard]] const Token& token(ChunkIndex chunk, std::int32_t offset) const noexcept {
    return tokens_[to_size(chunk) * ChunkSize + to_size(offset)];
  }

 private:
  std::vector<Token> tokens_;  // [chunk][offset]
};

template <TokenType Token, int ChunkSize, ChunkAllocator Allocator, RetentionPolicy Policy>
class TokenTree {
 public:
  using token_type = Token;
  static constexpr int chunk_size = ChunkSize;

  TokenTree(Allocator allocator, const TreeOptions& options, Policy policy)
      : allocator_(std::move(allocator)),
        policy_(std::move(policy)),
        core(allocator_, tokens_, ChunkSize, resolved(options), policy_) {
    if constexpr (has_hooks)
      core.retention.set_order(Policy::Hooks::make_order(policy_, core));
    else
      check_plain(policy_);
  }

 private:
  /// Whether the policy has a component do more (cache/policy.hpp).
  static constexpr bool has_hooks = requires { typename Policy::Hooks; };

  TokenStore<Token, ChunkSize> tokens_;
  AnyAllocatorOf<Allocator> allocator_;
  Policy policy_;

 public:  // after what it refers to
  TreeCore core;

  [[nodiscard]] const Allocator& allocator() const noexcept { return allocator_.get(); }

  // ---- finding -------------------------------------------------------------------------------

  /// Leading tokens of a prompt that are public, in units of sharing.
  [[nodiscard]] std::int32_t public_length(std::span<const Token> prompt,
                                           const InsertOptions& options) const noexcept {
    const auto length = static_cast<std::int32_t>((std::min)(options.public_length, prompt.size()));
    return length - length % core.prefixes.unit();
  }
  /// The longest match of a prompt.
  /// \param match  that to continue from; one that ended inside a node is not continued
  [[nodiscard]] PathMatch find(std::span<const Token> prompt, const InsertOptions& options,
                               PathMatch match = {}) const {
    const std::int32_t unit = core.prefixes.unit();
    prompt = prompt.first((std::min)(prompt.size(), to_size(max_length)));  // the tree has no more
    const std::int32_t public_end = public_length(prompt, options);
    const auto size = static_cast<std::int32_t>(prompt.size());
    while (match.used == core.topology.node(match.last).length && size - match.length >= unit) {
      const Namespace space = TreeCore::space_at(options, match.length, public_end);
      const auto key = prompt.subspan(to_size(match.length), to_size(unit));
      const NodeIndex child = core.prefixes.find_child(
          match.last, space,
          Prefixes::finish_hash(tokens_.hash(Prefixes::hash_seed(match.last, space), key)),
          [&](const TreeNode& c) {  // a key lies in one chunk
            return c.length >= unit && tokens_.equal(c.first_chunk, c.begin, key);
          });
      if (child == none) break;
      const std::int32_t end = match.length < public_end ? public_end : size;
      const TreeNode& c = core.topology.node(child);
      std::int32_t common =
          common_length(c, 0, prompt.subspan(to_size(match.length), to_size(end - match.length)));
      common -= common % unit;
      match.last = child;
      match.used = common;
      match.length += common;
    }
    return match;
  }
  /// Shortens a match to what is written, in units of sharing.
  void trim_to_written(PathMatch& match) const noexcept {
    const std::int32_t end = (std::min)(match.length, core.topology.written_end(match.last));
    match.length = end - end % core.prefixes.unit();
    while (match.last != root_node && core.topology.node(match.last).position >= match.length) {
      match.last = core.topology.node(match.last).parent;
      match.used = core.topology.node(match.last).length;
    }
    match.used = (std::min)(match.used, match.length - core.topology.node(match.last).position);
  }
  /// What PrefixTree::match_prefix() says of a match.
  [[nodiscard]] MatchResult result_of(const PathMatch& match, const InsertOptions& options) const {
    std::int32_t own_begin = match.length;
    for (NodeIndex i = match.last; i != root_node; i = core.topology.node(i).parent) {
      const TreeNode& n = core.topology.node(i);
      const std::int32_t written_end = n.position + n.written;
      if (n.written < n.length && n.writer == none) own_begin = (std::min)(own_begin, written_end);
    }
    const std::int32_t written_end =
        (std::min)(match.length, core.topology.written_end(match.last));
    const std::size_t cached = (std::min)(to_size(written_end), options.max_reuse);
    return {cached, (std::min)(to_size(own_begin), options.max_reuse) - cached};
  }
  /// Chunks that insert() of a prompt of `size` tokens would at most take from the available ones:
  /// new ones, and cached ones that it brings back into use.
  [[nodiscard]] std::size_t chunks_needed(PathMatch match, std::size_t size,
                                          const InsertOptions& options) const {
    if (!options.share_pending) trim_to_written(match);
    const std::size_t placed = to_size(match.length + core.room_at(match));
    return core.prefixes.count_unused_chunks(match) +
           (size > placed ? (size - placed - 1) / ChunkSize + 1 : 0);
  }

  /// Pins what is written of these tokens; the pin's index, or none.
  std::int32_t pin(std::span<const Token> tokens, const InsertOptions& options) {
    check_argument(core.retention.options().max_pinned > 0, "max_pinned", 0,
                   "at least 1 in the tree's retention policy: pins may cover no chunk");
    PathMatch match = find(tokens, options);
    trim_to_written(match);
    return match.length == 0 ? none : core.retention.pin(match);
  }

  // ---- storing -------------------------------------------------------------------------------

  SequenceIndex insert(std::span<const Token> prompt, const InsertOptions& options) {
    check_prompt(prompt);
    const int level = checked_answer<int>("level(priority)", policy_.level(options.priority),
                                          (std::numeric_limits<int>::min)(),
                                          (std::numeric_limits<int>::max)(), "a number of 32 bits");
    if constexpr (has_hooks) Policy::Hooks::inserting(policy_, core, options, level);
    PathMatch match = find(prompt, options);
    const std::int32_t found = match.length;
    if (!options.share_pending) trim_to_written(match);
    const auto size = static_cast<std::int32_t>(prompt.size());
    // What repeats another's pending tokens cannot be found; it stays private until it leaves.
    const std::int32_t published_end =
        match.length < found ? match.length : size - size % core.prefixes.unit();
    const SequenceIndex joined =
        core.join(match, {size, public_length(prompt, options), published_end, level}, options);
    if (joined == none) return none;
    const auto store_node = [&](NodeIndex i, std::int32_t, std::int32_t length) {
      const TreeNode& n = core.topology.node(i);
      store(n, 0, prompt.subspan(to_size(n.position), to_size(length)));
      if (n.state == NodeState::published) core.prefixes.publish(i);
    };
    core.sequences.for_each_node(joined, {match.length, size - match.length}, store_node);
    if constexpr (has_hooks) Policy::Hooks::inserted(*this, prompt, options, match.length, joined);
    return joined;
  }

  bool append(SequenceIndex s, std::span<const Token> tokens) {
    if (!core.append(s, tokens.size())) return false;
    const TreeNode& tail = core.sequences.tail(s);
    store(tail, tail.length - static_cast<std::int32_t>(tokens.size()), tokens);
    return true;
  }

  /// \param tokens  of the drafts, or empty where these are not known
  CHUNKATTN_INLINE AddOutcome add(StepRecord& step, SequenceIndex s, std::int32_t max_tokens,
                                  const NewDrafts& drafts, std::span<const Token> tokens) {
    const AddOutcome outcome = core.add(step, s, max_tokens, drafts);
    if (!tokens.empty() && outcome.reason == AddResult::Reason::none) store_drafts(step, tokens);
    return outcome;
  }

  void commit(StepRecord& step, StepEntry& entry, std::span<const Token> outputs) {
    core.check_outputs(entry, outputs.size());
    if (outputs.size() == 1)
      store_output(entry, outputs[0]);
    else
      store_chain(step, entry, outputs);
    core.commit(step, entry, static_cast<std::int32_t>(outputs.size()));
  }
  /// The same with the drafts up to `leaf`, none where it is -1.
  void commit(StepRecord& step, StepEntry& entry, std::span<const Token> outputs,
              std::int32_t leaf) {
    core.check_output(entry);
    const std::span<const Draft> tree = step.tree_of(entry);
    const std::int32_t depth = TreeCore::depth_of(entry, tree, leaf);
    if (depth == 0 && outputs.size() != 1) [[unlikely]]
      fail_argument("outputs.size()", outputs.size(), "1, as leaf = -1 says: no draft was right");
    if (outputs.size() != to_size(depth) + 1) [[unlikely]]
      fail_argument("outputs.size()", outputs.size(),
                    {depth + 1, ", the drafts up to leaf = ", leaf, " and one more"});
    if (depth == 0 || tree.empty()) return commit(step, entry, outputs);
    core.check_outputs(entry, outputs.size());
    for (std::int32_t i = leaf; entry.drafts_known && i != none; i = tree[to_size(i)].parent) {
      const Draft& draft = tree[to_size(i)];
      const bool same =
          tokens_.equal(draft.chunk, draft.offset, outputs.subspan(to_size(draft.depth) - 1, 1));
      if (!same) [[unlikely]]
        fail_other_draft(draft.depth - 1);
    }
    core.pending_copies.reserve_more(to_size(depth));
    const TreeNode& tail = core.sequences.tail(entry.sequence);
    const bool moves = core.move_branch(step, entry, tree, leaf);
    store(tail, entry.output_position() - tail.position, outputs);
    core.commit(step, entry, depth + 1, /*on_main_branch=*/!moves);
  }
  /// One output for each entry that has one to come, in their order.
  void commit(StepRecord& step, std::span<const Token> outputs) {
    const std::size_t expected = core.count_outputs(step);
    check_argument(outputs.size() == expected, "outputs.size()", outputs.size(),
                   {"one for each of the ", expected, " rows of Finished::rows()"});
    struct Store {
      TokenTree* tree;
      const Token* next;
      CHUNKATTN_INLINE void operator()(const StepEntry& entry) {
        tree->store_output(entry, *next++);
      }
      CHUNKATTN_INLINE void prefetch(const StepEntry& entry) const noexcept {
        if (entry.chunk != no_chunk) tree->tokens_.prefetch(entry.chunk, entry.offset + 1);
      }
    };
    core.commit_all(step, Store{this, outputs.data()});
  }

  // ---- reading -------------------------------------------------------------------------------

  [[nodiscard]] const Token& token_at(ChunkIndex chunk, std::int32_t offset) const noexcept {
    return tokens_.token(chunk, offset);
  }
  [[nodiscard]] const Token& token(SequenceIndex s, std::int32_t position) const noexcept {
    const TreeNode& n = core.topology.node(core.sequences.node_of(s, position));
    const std::int32_t slot = n.begin + position - n.position;
    return token_at(core.topology.chunk_of(n, slot), core.topology.geometry.offset(slot));
  }
  /// Calls f(entry, path position, token) for the step's first `num_rows` rows, in the order of
  /// add(), rows of drafts that are a tree in that of the drafts. The token is null where it is not
  /// known.
  template <class F>
  void for_each_row(const StepRecord& step, std::int32_t num_rows, const F& f) const {
    for (const StepEntry& entry : step.entries) {
      if (entry.first_row >= num_rows) return;
      const std::span<const Draft> drafts = step.tree_of(entry);
      const std::int32_t end = drafts.empty() ? entry.end() : entry.output_position();
      for (std::int32_t p = entry.begin; p < end; ++p) f(entry, p, known_token(entry, p));
      for (const Draft& draft : drafts) {
        const std::int32_t p = entry.output_position() + draft.depth - 1;
        f(entry, p,
          knows_drafts(entry) ? &token_at(draft.chunk, draft.offset) : known_token(entry, p));
      }
    }
  }

 private:
  /// Whether the tokens of the entry's drafts stand at their slots: they were given to add(), and
  /// nothing that the entry rests on was discarded since then.
  [[nodiscard]] bool knows_drafts(const StepEntry& entry) const noexcept {
    return entry.drafts_known && entry.epoch == core.sequences[entry.sequence].epoch;
  }
  /// The token at a path position of an entry, or null where it is not known.
  [[nodiscard]] const Token* known_token(const StepEntry& entry, std::int32_t position) const {
    const bool known = position < core.sequences[entry.sequence].size ||
                       (position >= entry.output_position() && knows_drafts(entry));
    return known ? &token(entry.sequence, position) : nullptr;
  }
  [[noreturn]] CHUNKATTN_COLD static void fail_other_draft(std::int32_t output) {
    fail_argument(joined({"outputs[", output, "]"}), "another token than the draft in its place",
                  "accepted drafts as they were added, then one token more");
  }
  static TreeOptions resolved(TreeOptions options) {
    options.min_run = options.min_run.value_or((std::max)(1, ChunkSize / 2));
    check_argument(*options.min_run > 0 && *options.min_run <= ChunkSize, "min_run",
                   *options.min_run, {"between 1 and ChunkSize, ", ChunkSize});
    check_argument(options.sharing == Sharing::token || options.sharing == Sharing::chunk,
                   "sharing", static_cast<int>(options.sharing),
                   "TreeOptions::Sharing::token or TreeOptions::Sharing::chunk");
    return options;
  }

  /// Leading tokens of `tokens` that the node holds from `first` on.
  [[nodiscard]] std::int32_t common_length(const TreeNode& n, std::int32_t first,
                                           std::span<const Token> tokens) const noexcept {
    const auto limit = static_cast<std::int32_t>(
        (std::min<std::size_t>)(to_size(n.length - first), tokens.size()));
    if (limit == 0) return 0;
    const Token* asked = tokens.data();
    ChunkIndex chunk = core.topology.chunk_of(n, n.begin + first);
    std::int32_t offset = (n.begin + first) % ChunkSize;
    for (std::int32_t done = 0;; offset = 0, chunk = core.chunk_table.next(chunk)) {
      const std::int32_t run = (std::min)(limit - done, ChunkSize - offset);
      const Token* const held = &tokens_.token(chunk, offset);
      // Whole runs usually match; find the exact place only where they do not.
      if (!std::equal(held, held + run, asked))
        return done +
               static_cast<std::int32_t>(std::mismatch(held, held + run, asked).first - held);
      done += run;
      if (done == limit) return limit;
      asked += run;
    }
  }

  /// The first output of an entry, at its slot.
  CHUNKATTN_INLINE void store_output(const StepEntry& entry, const Token& output) {
    if (entry.chunk != no_chunk) [[likely]]
      return tokens_.store(entry.chunk, entry.offset + 1, output);
    const TreeNode& tail = core.topology.node(core.sequences[entry.sequence].tail);
    const std::int32_t slot = tail.begin + entry.output_position() - tail.position;
    tokens_.store(core.topology.chunk_of(tail, slot), slot % ChunkSize, output);
  }
  /// Drafts that are a chain, and one token more. Throws InvalidArgument where they are others.
  [[gnu::noinline]] void store_chain(const StepRecord& step, const StepEntry& entry,
                                     std::span<const Token> outputs) {
    check_argument(step.tree_of(entry).empty(), "outputs.size()", outputs.size(),
                   "1, or commit(row, outputs, leaf): the row's drafts are a tree");
    const TreeNode& tail = core.sequences.tail(entry.sequence);
    const std::int32_t first = entry.output_position() - tail.position;
    if (entry.drafts_known) {
      const auto accepted = outputs.first(outputs.size() - 1);
      const std::int32_t same = common_length(tail, first, accepted);
      if (same != static_cast<std::int32_t>(accepted.size())) [[unlikely]]
        fail_other_draft(same);
    }
    store(tail, first, outputs);
  }
  /// The drafts of the step's last entry.
  [[gnu::noinline]] void store_drafts(const StepRecord& step, std::span<const Token> tokens) {
    const StepEntry& entry = step.entries.back();
    const TreeNode& tail = core.sequences.tail(entry.sequence);
    const std::span<const Draft> tree = step.tree_of(entry);
    if (tree.empty())
      store(tail, entry.output_position() - tail.position, tokens.first(to_size(entry.drafts)));
    for (std::size_t i = 0; i < tree.size(); ++i)
      tokens_.store(tree[i].chunk, tree[i].offset, tokens[i]);
  }
  void store(const TreeNode& n, std::int32_t first, std::span<const Token> tokens) {
    if (tokens.size() == 1) {  // also because g++ 14 warns of a copy of one token below
      const std::int32_t slot = n.begin + first;
      return tokens_.store(core.topology.chunk_of(n, slot), core.topology.geometry.offset(slot),
                           tokens[0]);
    }
    core.topology.for_each_run(
        n, first, static_cast<std::int32_t>(tokens.size()),
        [&](ChunkIndex s, std::int32_t offset, std::int32_t run, std::int32_t done) {
          tokens_.store(s, offset, tokens.subspan(to_size(done), to_size(run)));
        });
  }
};

}  // namespace detail

CHUNKATTN_NAMESPACE_END
