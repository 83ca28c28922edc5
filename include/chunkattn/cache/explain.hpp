// CacheExplainer: why tokens of a prompt are found in a tree, or are not (docs/cache.md, "Why was
// it not found").
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <random>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "../detail/support/array.hpp"
#include "../detail/support/check.hpp"
#include "../detail/support/config.hpp"
#include "../detail/tree/core.hpp"
#include "../detail/tree/token_tree.hpp"
#include "../tree_options.hpp"
#include "detail/evicted_paths.hpp"

CHUNKATTN_NAMESPACE_BEGIN

/// What became of tokens of a prompt. The first that holds is told.
enum class CacheReason : std::uint8_t {
  found,            ///< their K/V is used: as many as Sequence::num_cached() would say
  not_resumable,    ///< their K/V is there, but no window or state from which to go on after them
  above_max_reuse,  ///< it is there, but is computed again: InsertOptions::max_reuse, compute_last
  pending,          ///< another sequence is computing it
  in_tier,          ///< it was evicted, and is in a lower tier
  evicted,          ///< it was evicted
  forgotten,        ///< it was evicted so long ago that nothing else is known
  other_adapter,    ///< the tenant has it under another adapter
  other_tenant,     ///< another tenant has it: only explain_across_tenants() says so
  never_seen        ///< none of it, or it was forgotten entirely, or no prompt could find it yet
};

/// In lower case, with underscores: as it is spelt here.
[[nodiscard]] constexpr const char* name_of(CacheReason reason) noexcept {
  constexpr const char* names[] = {
      "found",   "not_resumable", "above_max_reuse", "pending",      "in_tier",
      "evicted", "forgotten",     "other_adapter",   "other_tenant", "never_seen"};
  return names[static_cast<std::size_t>(reason)];
}
/// The same.
[[nodiscard]] constexpr const char* name_of(EvictionCause cause) noexcept {
  constexpr const char* names[] = {"space", "watermark", "quota",       "ttl",
                                   "trim",  "clear",     "not_retained"};
  return names[static_cast<std::size_t>(cause)];
}

/// Consecutive tokens of a prompt of which the same is to be said.
struct ExplainedRange {
  TokenRange range{};                            ///< their positions
  CacheReason reason = CacheReason::never_seen;  ///< what became of them
  EvictionCause cause = EvictionCause::space;    ///< of `evicted`
  /// Of `evicted`: tokens that were evicted after the first of these. Those of the caller's tenant
  /// alone, so that they say nothing of others; explain_across_tenants() counts all. So much more
  /// room, and they would be there.
  std::uint64_t tokens_ago = 0;
  std::size_t tier = 0;  ///< of `in_tier`: 0 is the fastest
};

/// What CacheExplainer says of a prompt.
template <class Token>
struct CacheExplanation {
  /// Where a text that is cached goes on otherwise than the prompt.
  struct Parting {
    std::size_t position = 0;  ///< the first token that differs
    /// The text's token there. Nothing unless the text is of the caller's own tenant, and private.
    std::optional<Token> cached{};
  };

  std::vector<ExplainedRange> ranges{};  ///< all of the prompt, in its order
  /// Where the prompt parts from the text that has most of it, if one has any: with several, from
  /// one of them.
  std::optional<Parting> parting{};

  /// Tokens of the prompt with this reason.
  [[nodiscard]] std::size_t count(CacheReason reason) const noexcept {
    std::size_t tokens = 0;
    for (const ExplainedRange& one : ranges)
      if (one.reason == reason) tokens += detail::to_size(one.range.length);
    return tokens;
  }
};

/// Follows what a tree evicts, and says why a prompt is not found. The tree does nothing for it
/// while there is none; with one, what it costs is in proportion to what is evicted.
///
/// Its calls, its end too, are calls of the tree: the caller locks; explain() is a const query. The
/// tree may move, and may end before it; then only stats() may be called.
///
/// \tparam Tree  a PrefixTree
template <class Tree>
class CacheExplainer {
 public:
  using token_type = typename Tree::token_type;      ///< what prompts are made of
  using Explanation = CacheExplanation<token_type>;  ///< what explain() gives
  using Prompt = std::span<const token_type>;        ///< what the functions below are told

  /// What is remembered, and whom it asks of what the tree does not know.
  struct Options {
    /// Evicted tokens of which all is known, from 1 to 2^30; under Sharing::chunk in whole chunks.
    /// At least twice as many before them are known as forgotten. 48 bytes each at most, and 20 for
    /// each node of the tree.
    std::size_t max_tokens = std::size_t{1} << 18;
    /// Where a model with windows or states would resume a prompt: WindowedGroups::find() or
    /// Checkpoints::find(). Nothing: wherever its K/V ends.
    std::function<std::size_t(Prompt, const InsertOptions&)> resume{};
    /// The tiers that have the blocks of a prompt from that of a position on: Tiers::find().
    std::function<std::vector<std::size_t>(Prompt, const InsertOptions&, std::size_t)> tiers{};
    /// Tokens of such a block; 0: ChunkSize.
    std::int32_t tier_block = 0;
  };
  /// What there is.
  struct Stats {
    std::uint64_t evicted_tokens = 0;  ///< since construction
    std::size_t known_tokens = 0;      ///< of these, those of which all is known, or was
    std::size_t bytes = 0;             ///< of memory, but for nodes
  };

  /// What is evicted from now on is known.
  /// \throws InvalidArgument for options out of range
  explicit CacheExplainer(Tree& tree, Options options = {})
      : shared_(detail::TreeAccess::shared(tree)),
        options_(checked(std::move(options))),
        unit_(core().prefixes.unit()),
        paths_(shared_->tree->core,
               (std::max)(std::size_t{1}, options_.max_tokens / detail::to_size(unit_)), secret()) {
  }
  CacheExplainer(const CacheExplainer&) = delete;
  CacheExplainer& operator=(const CacheExplainer&) = delete;
  ~CacheExplainer() {
    if (shared_->tree) shared_->tree->core.topology.observers.remove(paths_);
  }

  /// What insert() would find of a prompt, and why it would not find the rest. It says what the
  /// caller's tenant has done, and what the tree has done to its tokens; of other tenants nothing
  /// but that, at last, what they did has pushed its own out of the record.
  /// O(prompt, and children of the root).
  /// \throws InvalidArgument for a prompt that insert() refuses
  [[nodiscard]] Explanation explain(TokenSpan<token_type> prompt,
                                    const InsertOptions& options = {}) const {
    return explained(prompt, options, /*across=*/false);
  }
  /// The same, for who may know of all tenants: whether another one has the tokens, and with counts
  /// of all that was evicted. Tokens of others are not told.
  [[nodiscard]] Explanation explain_across_tenants(TokenSpan<token_type> prompt,
                                                   const InsertOptions& options = {}) const {
    return explained(prompt, options, /*across=*/true);
  }
  /// What there is. O(1).
  [[nodiscard]] Stats stats() const noexcept {
    const detail::EvictionRecord& record = paths_.record();
    return {record.total() * static_cast<std::uint64_t>(unit_),
            record.size() * detail::to_size(unit_), record.bytes()};
  }

 private:
  using Entry = detail::EvictionRecord::Entry;

  /// The ranges of a prompt, which follow each other.
  struct Ranges {
    std::vector<ExplainedRange> all{};
    [[nodiscard]] std::int32_t end() const noexcept {
      return all.empty() ? 0 : all.back().range.end();
    }
    void extend(CacheReason reason, std::int32_t to) {
      if (to <= end()) return;
      if (all.empty() || all.back().reason != reason) {
        all.push_back({{end(), to - end()}, reason});
      } else {
        all.back().range.length = to - all.back().range.begin;
      }
    }
  };
  struct Asked {
    Prompt prompt;
    const InsertOptions& options;
    std::int32_t public_end;
    bool across;
    [[nodiscard]] std::int32_t size() const noexcept {
      return static_cast<std::int32_t>(prompt.size());
    }
    [[nodiscard]] Namespace space_at(std::int32_t position) const noexcept {
      return detail::TreeCore::space_at(options, position, public_end);
    }
  };

  static Options checked(Options options) {
    detail::check_argument(
        options.max_tokens >= 1 && options.max_tokens <= detail::to_size(detail::max_length),
        "max_tokens", options.max_tokens, "1 to 2^30");
    detail::check_argument(options.tier_block >= 0, "tier_block", options.tier_block,
                           "at least 1, or 0 for the chunk size");
    if (options.tier_block == 0) options.tier_block = Tree::chunk_size;
    return options;
  }
  static std::uint64_t secret() {
    std::random_device device;
    return std::uint64_t{device()} << 32 | device();
  }
  [[nodiscard]] const detail::TreeCore& core() const { return shared_->tree->core; }
  [[nodiscard]] const detail::TreeNode& node(detail::NodeIndex n) const {
    return core().topology.node(n);
  }

  [[nodiscard]] Explanation explained(Prompt prompt, const InsertOptions& options,
                                      bool across) const {
    detail::check_argument(shared_->tree.has_value(), "explainer", "orphaned",
                           "that of a tree that still exists");
    detail::check_prompt(prompt);
    const auto& tree = *shared_->tree;
    const Asked asked{prompt, options, tree.public_length(prompt, options), across};
    const detail::PathMatch match = tree.find(prompt, options);
    Ranges ranges;
    add_matched(asked, match, ranges);
    if (options_.tiers && ranges.end() < asked.size()) add_tiers(asked, ranges);
    add_history(asked, ranges);
    if (ranges.end() < asked.size()) add_others(asked, match, ranges);
    ranges.extend(CacheReason::never_seen, asked.size());
    return {std::move(ranges.all), parting_at(asked, match)};
  }

  // What the tree has.
  void add_matched(const Asked& asked, const detail::PathMatch& match, Ranges& ranges) const {
    InsertOptions limited = asked.options;
    limited.max_reuse =
        (std::min)(limited.max_reuse, asked.prompt.size() - (limited.compute_last ? 1 : 0));
    InsertOptions unlimited = asked.options;
    unlimited.max_reuse = asked.prompt.size();
    const detail::MatchResult there = shared_->tree->result_of(match, unlimited);
    const std::size_t reused = (std::min)(there.cached, limited.max_reuse);
    const std::size_t resumed =
        options_.resume ? (std::min)(options_.resume(asked.prompt, limited), reused) : reused;
    ranges.extend(CacheReason::found, static_cast<std::int32_t>(resumed));
    ranges.extend(CacheReason::not_resumable, static_cast<std::int32_t>(reused));
    ranges.extend(CacheReason::above_max_reuse, static_cast<std::int32_t>(there.cached));
    ranges.extend(CacheReason::pending, static_cast<std::int32_t>(there.cached + there.pending));
  }

  void add_tiers(const Asked& asked, Ranges& ranges) const {
    std::int64_t end = ranges.end() - ranges.end() % options_.tier_block;
    for (const std::size_t tier :
         options_.tiers(asked.prompt, asked.options, detail::to_size(ranges.end()))) {
      end = (std::min)(end + options_.tier_block, std::int64_t{asked.size()});
      if (!ranges.all.empty() && ranges.all.back().reason == CacheReason::in_tier &&
          ranges.all.back().tier != tier)
        ranges.all.push_back({{ranges.end(), 0}, CacheReason::in_tier});
      ranges.extend(CacheReason::in_tier, static_cast<std::int32_t>(end));
      ranges.all.back().tier = tier;
    }
  }

  // What is on record, unit by unit: what comes after tokens that were never there was not either.
  void add_history(const Asked& asked, Ranges& ranges) const {
    using Store = detail::TokenStore<token_type, Tree::chunk_size>;
    const std::int32_t begin = ranges.end();
    std::uint64_t path = 0;
    Entry last{};
    for (std::int32_t i = 0; i < asked.size(); ++i) {
      if (i == 0 || i == asked.public_end) path = paths_.hash.enter(path, asked.space_at(i));
      path = detail::PathHash::add(path, Store::hash(detail::PathHash::token_seed,
                                                     asked.prompt.subspan(detail::to_size(i), 1)));
      if (i < begin || (i + 1) % unit_ != 0) continue;
      Entry entry{};
      if (paths_.record().find(path, entry)) {
        if (!continues(ranges, last, entry, asked)) {
          ranges.all.push_back({{ranges.end(), 0}, CacheReason::evicted, entry.cause});
          ranges.all.back().tokens_ago = ago(entry, asked);
        }
        last = entry;
        ranges.extend(CacheReason::evicted, i + 1);
      } else if (paths_.record().may_have_had(path)) {
        ranges.extend(CacheReason::forgotten, i + 1);
      } else {
        return;
      }
    }
  }
  /// Whether nothing that counts was evicted between two units.
  [[nodiscard]] bool continues(const Ranges& ranges, const Entry& last, const Entry& next,
                               const Asked& asked) const noexcept {
    if (ranges.all.empty() || ranges.all.back().reason != CacheReason::evicted ||
        last.cause != next.cause || next.number >= last.number)
      return false;
    return asked.across ? next.number + 1 == last.number
                        : paths_.record().count_own(asked.options.name_space.tenant, next.number,
                                                    last.number - 1) == 0;
  }
  [[nodiscard]] std::uint64_t ago(const Entry& entry, const Asked& asked) const noexcept {
    const std::uint64_t last = paths_.record().total() - 1;
    const std::uint64_t units =
        asked.across
            ? last - entry.number
            : paths_.record().count_own(asked.options.name_space.tenant, entry.number, last);
    return units * static_cast<std::uint64_t>(unit_);
  }

  // What others have cached: other namespaces that begin at the root, or where the public part
  // ends.
  void add_others(const Asked& asked, const detail::PathMatch& match, Ranges& ranges) const {
    const std::int32_t begin = ranges.end();
    std::int32_t own_end = begin, all_end = begin;
    const auto look = [&](detail::NodeIndex top, std::int32_t position) {
      for (detail::NodeIndex i = node(top).first_child; i != detail::none;
           i = node(i).next_sibling) {
        const detail::TreeNode& n = node(i);
        const Namespace space = n.name_space;
        const Namespace& own = asked.options.name_space;
        const bool is_others =
            space.adapter != own.adapter || (space.tenant != own.tenant && !space.is_public);
        const bool is_tenants = space.tenant == own.tenant && !space.is_public;
        if (n.state != detail::NodeState::published || !is_others || !(is_tenants || asked.across))
          continue;
        const std::int32_t common =
            common_length(n, asked.prompt.subspan(detail::to_size(position)));
        if (position + common <= begin && common < n.length) continue;
        InsertOptions theirs = asked.options;
        theirs.name_space = space;
        if (space.is_public)
          theirs.name_space = {asked.options.name_space.tenant, space.adapter};
        else if (position == 0)
          theirs.public_length = 0;
        theirs.max_reuse = asked.prompt.size();
        const auto found = shared_->tree->find(asked.prompt, theirs);
        const auto end = static_cast<std::int32_t>(shared_->tree->result_of(found, theirs).cached) /
                         unit_ * unit_;
        std::int32_t& longest = theirs.name_space.tenant == own.tenant ? own_end : all_end;
        longest = (std::max)(longest, end);
      }
    };
    look(detail::root_node, 0);
    if (asked.public_end > 0 && match.length >= asked.public_end)
      look(ending_at(match.last, asked.public_end), asked.public_end);
    ranges.extend(CacheReason::other_adapter, own_end);
    ranges.extend(CacheReason::other_tenant, all_end);
  }
  /// The node of a path that ends at a position, or none.
  [[nodiscard]] detail::NodeIndex ending_at(detail::NodeIndex n, std::int32_t position) const {
    while (node(n).position >= position) n = node(n).parent;
    return n;
  }

  // Where the best match of the prompt's own namespace goes on otherwise.
  [[nodiscard]] std::optional<typename Explanation::Parting> parting_at(
      const Asked& asked, const detail::PathMatch& match) const {
    if (match.length == asked.size()) return std::nullopt;
    const Prompt rest = asked.prompt.subspan(detail::to_size(match.length));
    const Namespace space = asked.space_at(match.length);
    if (space.is_public && !asked.across) return std::nullopt;
    std::int32_t most = -1;
    std::optional<typename Explanation::Parting> parting;
    const auto look = [&](detail::NodeIndex index, std::int32_t first) {
      const detail::TreeNode& n = node(index);
      if (n.state != detail::NodeState::published || n.name_space != space) return;
      const std::int32_t common = common_length(n, rest, first);
      const std::int32_t position = match.length + common;
      const std::int32_t cached_end = core().topology.written_end(index) / unit_ * unit_;
      if (common <= most || position == 0 || position == asked.size() || position >= cached_end)
        return;
      most = common;
      parting = {detail::to_size(position), std::nullopt};
      if (!space.is_public) parting->cached = token_of(n, first + common);
    };
    if (match.used < node(match.last).length) {
      look(match.last, match.used);
    } else {
      for (detail::NodeIndex i = node(match.last).first_child; i != detail::none;
           i = node(i).next_sibling)
        look(i, 0);
    }
    return parting;
  }
  [[nodiscard]] const token_type& token_of(const detail::TreeNode& n, std::int32_t i) const {
    const std::int32_t slot = n.begin + i;
    return shared_->tree->token_at(core().topology.chunk_of(n, slot),
                                   core().topology.geometry.offset(slot));
  }
  /// Leading tokens of a prompt's rest that a node has from `first` on.
  [[nodiscard]] std::int32_t common_length(const detail::TreeNode& n, Prompt rest,
                                           std::int32_t first = 0) const {
    const auto count =
        static_cast<std::int32_t>((std::min)(rest.size(), detail::to_size(n.length - first)));
    std::int32_t common = 0;
    core().topology.for_each_run(
        n, first, count, [&](ChunkIndex chunk, auto offset, std::int32_t run, std::int32_t done) {
          if (common < done) return;
          const token_type* const held = &shared_->tree->token_at(chunk, offset);
          const auto part = rest.subspan(detail::to_size(done), detail::to_size(run));
          common += static_cast<std::int32_t>(std::mismatch(part.begin(), part.end(), held).first -
                                              part.begin());
        });
    return common;
  }

  std::remove_cvref_t<decltype(detail::TreeAccess::shared(std::declval<const Tree&>()))> shared_;
  const Options options_;
  const std::int32_t unit_;
  detail::EvictedPaths paths_;
};

CHUNKATTN_NAMESPACE_END
