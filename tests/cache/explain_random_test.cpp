// What CacheExplainer says of random prompts, beside a plain model that keeps every path that was
// ever found, and every eviction of each of its tokens.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "chunkattn/attention_plan.hpp"
#include "chunkattn/cache/explain.hpp"
#include "chunkattn/cache/policy.hpp"
#include "chunkattn/cache/scored_policy.hpp"
#include "chunkattn/debug/tree.hpp"
#include "chunkattn/events/cache_events.hpp"
#include "chunkattn/prefix_tree.hpp"
#include "tests/support/random.hpp"
#include "tests/support/retention.hpp"

using namespace chunkattn;

namespace explain_random {

constexpr std::uint64_t no_number = std::numeric_limits<std::uint64_t>::max();

/// Every path that prompts could ever find, by the tree's events.
class Paths {
 public:
  struct Node {
    int is_there = 0;  // under Sharing::chunk texts that begin alike have each their own
    std::uint64_t first = no_number, last = no_number;  // when it was evicted, in units: from, to
    EvictionCause cause{};
    Namespace space{};
  };
  EvictionCause cause = EvictionCause::space;  // of what is evicted now

  explicit Paths(std::int32_t unit) : unit_(unit) {}

  void apply(const CacheEvent& event, std::span<const int> tokens) {
    if (event.kind == CacheEvent::Kind::cleared) return clear();
    if (event.kind == CacheEvent::Kind::stored) {
      if (event.span != event.parent) spans_[event.span] = {event.position, node_before(event), {}};
      Span& span = spans_.at(event.span);
      for (const int token : tokens) {
        const std::size_t before = span.nodes.empty() ? span.before : span.nodes.back();
        span.nodes.push_back(child(before, event.name_space, token));
        ++nodes[span.nodes.back()].is_there;
      }
      return;
    }
    Span& span = spans_.at(event.span);
    for (std::int32_t i = event.length; i > 0; --i) {
      const std::size_t node = span.nodes.back();
      span.nodes.pop_back();
      --nodes[node].is_there;
      if ((event.position + i) % unit_ != 0) continue;
      nodes[node].first = nodes[node].last = log.size();
      nodes[node].cause = cause;
      log.push_back(event.name_space);
    }
    if (span.nodes.empty()) spans_.erase(event.span);
  }
  /// The node of a path with one token more, if it was ever there.
  [[nodiscard]] std::optional<std::size_t> find(std::size_t node, const Namespace& space,
                                                int token) const {
    const auto found = children_.find({node, space.tenant, space.adapter, space.is_public, token});
    if (found == children_.end()) return std::nullopt;
    return found->second;
  }
  /// Units that were evicted after one, of all or a tenant's own.
  [[nodiscard]] std::uint64_t count_after(std::uint64_t number,
                                          std::optional<std::uint64_t> tenant) const {
    if (!tenant) return log.size() - 1 - number;
    return static_cast<std::uint64_t>(std::count_if(
        log.begin() + static_cast<std::ptrdiff_t>(number) + 1, log.end(),
        [&](const Namespace& one) { return !one.is_public && one.tenant == *tenant; }));
  }
  /// Tokens of cached texts that follow a node in this namespace.
  [[nodiscard]] std::vector<int> following(std::size_t node, const Namespace& space) const {
    std::vector<int> tokens;
    const auto key = std::tuple(node, space.tenant, space.adapter, space.is_public,
                                std::numeric_limits<int>::min());
    for (auto i = children_.lower_bound(key);
         i != children_.end() && std::get<0>(i->first) == node &&
         std::get<1>(i->first) == space.tenant && std::get<2>(i->first) == space.adapter &&
         std::get<3>(i->first) == space.is_public;
         ++i)
      if (nodes[i->second].is_there > 0) tokens.push_back(std::get<4>(i->first));
    return tokens;
  }

  std::vector<Node> nodes{Node{.is_there = 1}};
  std::vector<Namespace> log;

 private:
  struct Span {
    std::int32_t position = 0;
    std::size_t before = 0;  // the node of the path before it
    std::vector<std::size_t> nodes{};
  };
  [[nodiscard]] std::size_t node_before(const CacheEvent& event) const {
    if (event.parent == 0) return 0;
    const Span& parent = spans_.at(event.parent);
    return parent.nodes.at(static_cast<std::size_t>(event.position - parent.position - 1));
  }
  std::size_t child(std::size_t node, const Namespace& space, int token) {
    const auto [at, is_new] = children_.try_emplace(
        {node, space.tenant, space.adapter, space.is_public, token}, nodes.size());
    if (is_new) nodes.push_back({.space = space});
    return at->second;
  }
  // In which order is the tree's business.
  void clear() {
    const std::uint64_t first = log.size();
    std::vector<std::size_t> gone;
    for (const auto& [number, span] : spans_)
      for (std::size_t i = 0; i < span.nodes.size(); ++i) {
        nodes[span.nodes[i]].is_there = 0;
        if ((span.position + static_cast<std::int32_t>(i) + 1) % unit_ == 0)
          gone.push_back(span.nodes[i]);
      }
    for (const std::size_t node : gone) {
      nodes[node].first = first;
      nodes[node].last = first + gone.size() - 1;
      nodes[node].cause = EvictionCause::clear;
      log.push_back(nodes[node].space);
    }
    spans_.clear();
  }

  std::int32_t unit_;
  std::map<std::tuple<std::size_t, std::uint64_t, std::uint64_t, bool, int>, std::size_t> children_;
  std::map<std::uint64_t, Span> spans_;
};

/// An engine that does anything, with an explainer and the model beside it.
template <class Policy, int ChunkSize>
class Engine {
 public:
  using Tree = PrefixTree<int, ChunkSize, PoolAllocator, Policy>;

  Engine(Policy policy, TreeOptions::Sharing sharing, std::size_t max_chunks,
         std::size_t max_tokens, EvictionCause leaving, std::uint64_t stream)
      : random_(stream),
        unit_(sharing == TreeOptions::Sharing::token ? 1 : ChunkSize),
        max_units_(max_tokens / static_cast<std::size_t>(unit_)),
        leaving_(leaving),
        tree_(PoolAllocator{.max_chunks = max_chunks}, {.sharing = sharing}, std::move(policy)),
        explainer_(tree_, {.max_tokens = max_tokens}),
        paths_(unit_),
        events_(tree_, [this](const CacheEvent& event, std::span<const int> tokens) {
          paths_.apply(event, tokens);
        }) {}

  void run(int operations) {
    for (int i = 0; i < operations; ++i) {
      operate();
      REQUIRE(explainer_.stats().evicted_tokens ==
              paths_.log.size() * static_cast<std::size_t>(unit_));
      if (i % 64 == 0) check_invariants(tree_);
      if (random_.chance(0.5)) compare();
    }
    CHECK(num_wrong_ <= 2 + num_positions_ / 1000);
  }
  [[nodiscard]] std::size_t num_partings() const { return num_partings_; }
  [[nodiscard]] std::size_t count(CacheReason reason) const {
    return counts_[static_cast<std::size_t>(reason)];
  }

 private:
  using Sequence = typename Tree::Sequence;

  [[nodiscard]] std::pair<std::vector<int>, InsertOptions> random_prompt() {
    std::vector<int> prompt(random_.index(5 * ChunkSize) + 1);
    for (int& token : prompt) token = random_.chance(0.85) ? 1 : random_.uniform(2, 3);
    InsertOptions options;
    options.name_space = {.tenant = random_.index(3), .adapter = random_.chance(0.8) ? 0u : 1u};
    if (random_.chance(0.3)) options.public_length = random_.index(2 * ChunkSize);
    if (random_.chance(0.2)) options.max_reuse = random_.index(prompt.size() + 1);
    options.compute_last = random_.chance(0.8);
    options.share_pending = random_.chance(0.9);
    options.priority = random_.uniform(0, 2);
    return {std::move(prompt), options};
  }

  void operate() {
    paths_.cause = EvictionCause::space;
    const int what = random_.uniform(0, 99);
    if (what < 35) {
      const auto [prompt, options] = random_prompt();
      const auto told = explainer_.explain(prompt, options);
      if (auto sequence = tree_.try_insert(prompt, options)) {
        if (options.share_pending)
          REQUIRE(told.count(CacheReason::found) == sequence->num_cached());
        sequences_.push_back(std::move(*sequence));
      }
    } else if (what < 70) {
      step();
    } else if (what < 88) {
      if (sequences_.empty()) return;
      paths_.cause = leaving_;
      sequences_.erase(sequences_.begin() +
                       static_cast<std::ptrdiff_t>(random_.index(sequences_.size())));
    } else if (what < 92) {
      if (sequences_.empty() || sequences_.size() > 12) return;
      auto& source = sequences_[random_.index(sequences_.size())];
      if (auto fork = source.try_fork()) sequences_.push_back(std::move(*fork));
    } else if (what < 95) {
      paths_.cause = EvictionCause::ttl;
      tree_.expire(++now_);
    } else if (what < 97) {
      paths_.cause = EvictionCause::trim;
      tree_.trim(random_.index(30));
    } else if (what < 99) {
      paths_.cause = leaving_;
      if (sequences_.size() > 6) sequences_.pop_back();
    } else if (random_.chance(0.2)) {
      tree_.clear();
    }
  }
  void step() {
    auto step = tree_.begin_step();
    for (auto& sequence : sequences_)
      if (random_.chance(0.6)) (void)step.add(sequence, random_.index(2 * ChunkSize) + 1);
    (void)plan_.build(step);
    paths_.cause = leaving_;
    if (random_.chance(0.1)) return;  // dropped
    auto finished = std::move(step).finish();
    for (const auto row : finished.rows())
      if (random_.chance(0.8)) finished.commit(row, random_.chance(0.7) ? 1 : 2);
  }

  // ---- the model's answer --------------------------------------------------------------------

  struct Expected {
    CacheReason reason;
    EvictionCause cause{};
    std::uint64_t least = 0, most = 0;  // of tokens_ago at this position
    bool may_be_forgotten = false, may_be_evicted = false;
  };
  [[nodiscard]] static Namespace space_at(const InsertOptions& how, std::size_t position,
                                          std::size_t public_end) {
    return position < public_end ? Namespace{.adapter = how.name_space.adapter, .is_public = true}
                                 : how.name_space;
  }
  /// How much of a prompt is cached in a namespace.
  [[nodiscard]] std::size_t cached(const std::vector<int>& prompt, const InsertOptions& how,
                                   std::size_t public_end) const {
    std::size_t node = 0, end = 0;
    for (; end < prompt.size(); ++end) {
      const auto next = paths_.find(node, space_at(how, end, public_end), prompt[end]);
      if (!next || paths_.nodes[*next].is_there == 0) break;
      node = *next;
    }
    return end - end % static_cast<std::size_t>(unit_);
  }
  void compare() {
    const auto asked = random_prompt();
    const auto& prompt = asked.first;
    const InsertOptions& how = asked.second;
    const bool across = random_.chance(0.5);
    const auto told =
        across ? explainer_.explain_across_tenants(prompt, how) : explainer_.explain(prompt, how);
    const auto tenant = how.name_space.tenant;
    const std::size_t unit = static_cast<std::size_t>(unit_);
    std::size_t public_end = std::min(how.public_length, prompt.size());
    public_end -= public_end % unit;

    InsertOptions limited = how, unlimited = how;
    limited.max_reuse = std::min(how.max_reuse, prompt.size() - (how.compute_last ? 1 : 0));
    unlimited.max_reuse = std::numeric_limits<std::size_t>::max();
    const std::size_t found = tree_.match_prefix(prompt, limited).cached;
    const auto match = tree_.match_prefix(prompt, unlimited);

    std::vector<Expected> expected;
    const auto fill = [&](CacheReason reason, std::size_t end) {
      while (expected.size() < end) expected.push_back({reason});
    };
    fill(CacheReason::found, found);
    fill(CacheReason::above_max_reuse, match.cached);
    fill(CacheReason::pending, match.cached + match.pending);
    // What is on record, unit by unit.
    std::size_t node = 0;
    for (std::size_t i = 0; i < prompt.size(); ++i) {
      const auto next = paths_.find(node, space_at(how, i, public_end), prompt[i]);
      if (!next) break;
      node = *next;
      if (i < expected.size() || (i + 1) % unit != 0) continue;
      const auto& evicted = paths_.nodes[node];
      if (evicted.first == no_number) break;
      Expected one{CacheReason::evicted, evicted.cause};
      const std::uint64_t now = paths_.log.size();
      const auto own = across ? std::nullopt : std::optional(tenant);
      const bool surely = now - evicted.first <= max_units_;
      const bool perhaps = now - evicted.last <= max_units_;
      if (perhaps) {
        one.least = paths_.count_after(evicted.last, own) * unit;
        one.most =
            (paths_.count_after(evicted.first, own) + (evicted.first != evicted.last)) * unit;
      }
      if (!surely) {
        one.may_be_forgotten = true;
        one.may_be_evicted = perhaps;
        if (!perhaps) one.reason = CacheReason::forgotten;
        if (now - evicted.first > 3 * max_units_)
          ancient_from_ = std::min(ancient_from_, i + 1 - unit);
      }
      while (expected.size() <= i) expected.push_back(one);
    }
    std::size_t adapter_end = 0, tenant_end = 0;
    for (std::uint64_t t = 0; t < 3; ++t)
      for (std::uint64_t a = 0; a < 2; ++a) {
        if (t == tenant && a == how.name_space.adapter) continue;
        if (t != tenant && !across) continue;
        InsertOptions theirs = how;
        theirs.name_space = {t, a};
        std::size_t end = cached(prompt, theirs, 0);
        // Behind what is public: other tenants' of this adapter; the tenant's own of another one.
        if (across && (t == tenant || a == how.name_space.adapter))
          end = std::max(end, cached(prompt, theirs, public_end));
        (t == tenant ? adapter_end : tenant_end) =
            std::max(t == tenant ? adapter_end : tenant_end, end);
      }
    const std::size_t known = expected.size();
    fill(CacheReason::other_adapter, adapter_end);
    fill(CacheReason::other_tenant, tenant_end);
    fill(CacheReason::never_seen, prompt.size());

    // Each position, once.
    std::size_t position = 0;
    bool was_wrong = false;
    const ExplainedRange* before = nullptr;
    for (const ExplainedRange& range : told.ranges) {
      REQUIRE(static_cast<std::size_t>(range.range.begin) == position);
      REQUIRE(range.range.length > 0);
      std::uint64_t ago = range.tokens_ago;
      for (; position < static_cast<std::size_t>(range.range.end()); ++position, ++num_positions_) {
        const Expected& want = expected[position];
        ++counts_[static_cast<std::size_t>(range.reason)];
        if (range.reason == CacheReason::forgotten && position >= known) {
          ++num_wrong_;  // a filter's error
          was_wrong = true;
          continue;
        }
        const bool is_right = range.reason == want.reason ||
                              (want.may_be_forgotten && range.reason == CacheReason::forgotten) ||
                              (want.may_be_evicted && range.reason == CacheReason::evicted) ||
                              (position >= ancient_from_ && range.reason >= CacheReason::forgotten);
        INFO(std::string(name_of(range.reason)), " for ", std::string(name_of(want.reason)), " at ",
             position, " of ", prompt.size(), ", across ", across);
        REQUIRE(is_right);
        if (range.reason != CacheReason::evicted) continue;
        REQUIRE(name_of(range.cause) == std::string(name_of(want.cause)));
        INFO(ago, " tokens ago, not ", want.least, " to ", want.most, ", cause ",
             std::string(name_of(range.cause)), " at ", position, " of ", prompt.size(), " across ",
             across);
        REQUIRE((ago >= want.least && ago <= want.most));
        const bool counts = across || position >= public_end;
        if ((position + 1) % unit == 0 && counts) ago += unit;
      }
      if (before != nullptr && before->reason == range.reason && !was_wrong) {
        REQUIRE(range.reason == CacheReason::evicted);
        REQUIRE((before->cause != range.cause || range.tokens_ago != last_ago_));
      }
      before = &range;
      last_ago_ = ago;
    }
    REQUIRE(position == prompt.size());
    ancient_from_ = std::numeric_limits<std::size_t>::max();
    compare_parting(told, prompt, how, public_end, across, match);
  }
  void compare_parting(const CacheExplanation<int>& told, const std::vector<int>& prompt,
                       const InsertOptions& how, std::size_t public_end, bool across,
                       const typename Tree::Match& match) {
    std::size_t node = 0, end = 0;
    std::optional<std::size_t> position;
    std::vector<int> tokens;
    // Where a cached text parts last, if nothing of the prompt is pending.
    const std::size_t least = match.cached - match.cached % static_cast<std::size_t>(unit_);
    for (; end < prompt.size(); ++end) {
      const Namespace space = space_at(how, end, public_end);
      auto others = paths_.following(node, space);
      std::erase(others, prompt[end]);
      if (end >= std::max<std::size_t>(least, 1) && !others.empty() && match.pending == 0) {
        position = end;
        tokens = others;
        if (space.is_public) tokens.clear();
        if (space.is_public && !across) position.reset();
      }
      const auto next = paths_.find(node, space, prompt[end]);
      if (!next || paths_.nodes[*next].is_there == 0) break;
      node = *next;
    }
    if (match.pending > 0) return;
    if (position.has_value() != told.parting.has_value()) {
      INFO("parting at ", position.value_or(0), " not ", told.parting ? told.parting->position : 0,
           ", cached ", match.cached);
      // K/V that nobody computes any more is in the tree without being cached.
      REQUIRE(told.parting.has_value() == position.has_value());
    }
    if (!position) return;
    ++num_partings_;
    REQUIRE(told.parting->position == *position);
    REQUIRE(told.parting->cached.has_value() == !tokens.empty());
    if (!tokens.empty())
      REQUIRE(std::count(tokens.begin(), tokens.end(), *told.parting->cached) == 1);
  }

  test::Random random_;
  std::int32_t unit_;
  std::size_t max_units_;
  EvictionCause leaving_;
  Tree tree_;
  CacheExplainer<Tree> explainer_;
  Paths paths_;
  CacheEvents<Tree> events_;
  AttentionPlan plan_;
  std::vector<Sequence> sequences_;
  std::uint64_t now_ = 0, last_ago_ = 0;
  std::size_t ancient_from_ = std::numeric_limits<std::size_t>::max();
  std::size_t counts_[10] = {};
  std::size_t num_positions_ = 0, num_partings_ = 0, num_wrong_ = 0;
};

}  // namespace explain_random

using explain_random::Engine;
using Sharing = TreeOptions::Sharing;

// What the tree does differs, and so do the reasons of eviction; what is said is the same.

TEST_CASE("an explainer says what a model says of texts that are least recently used") {
  Engine<RetentionOptions, 4> engine({.ttl = 5}, Sharing::token, 40, 120, EvictionCause::watermark,
                                     1);
  engine.run(test::scaled(5000));
  for (int reason = 0; reason < 10; ++reason)  // all but what needs windows or tiers
    if (reason != 1 && reason != 4)
      CHECK_MESSAGE(engine.count(static_cast<CacheReason>(reason)) > 0, reason);
  CHECK(engine.num_partings() > 0);
}
TEST_CASE("an explainer of whole chunks, above a watermark") {
  Engine<test::ByPriority, 4> engine(RetentionOptions{.high_watermark = 30, .low_watermark = 25},
                                     Sharing::chunk, 60, 130, EvictionCause::watermark, 2);
  engine.run(test::scaled(3000));
}
TEST_CASE("an explainer of tenants with quotas, under a policy that learns") {
  struct Quotas : CachePolicy {
    [[nodiscard]] std::uint64_t quota(std::uint64_t tenant) const noexcept { return 4 + tenant; }
  };
  Quotas policy;
  policy.learns = policy.fair = true;
  Engine<Quotas, 8> engine(policy, Sharing::token, 50, 200, EvictionCause::quota, 3);
  engine.run(test::scaled(3000));
}
TEST_CASE("an explainer where victims are chosen by a score") {
  struct Shortest : ScoredPolicy {
    [[nodiscard]] std::int32_t score(const CachedLeaf& leaf) const noexcept { return leaf.length; }
  };
  Engine<Shortest, 2> engine({}, Sharing::token, 60, 64, EvictionCause::watermark, 4);
  engine.run(test::scaled(3000));
}
TEST_CASE("an explainer of a tree that retains nothing") {
  Engine<test::NoRetention, 4> engine({}, Sharing::token, 60, 100, EvictionCause::not_retained, 5);
  engine.run(test::scaled(3000));
}
TEST_CASE("an explainer that remembers one token") {
  Engine<RetentionOptions, 4> engine({}, Sharing::token, 30, 1, EvictionCause::watermark, 6);
  engine.run(test::scaled(1000));
}
