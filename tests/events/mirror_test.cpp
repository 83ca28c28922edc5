// A mirror of a tree is fed by whatever a network brings: what cannot follow is refused and changes
// nothing, all else is taken over, as a plain map of tokens does it.
#include "chunkattn/events/mirror.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <limits>
#include <map>
#include <new>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "chunkattn/prefix_tree.hpp"
#include "tests/support/counted_new.hpp"
#include "tests/support/pages.hpp"
#include "tests/support/random.hpp"
#include "tests/support/refused.hpp"
#include "tests/support/retention.hpp"
#include "tests/support/steps.hpp"

using namespace chunkattn;
using test::iota;
using test::refused;

namespace {

using Tree = PrefixTree<int, 4>;
using Kind = CacheEvent::Kind;
using Sharing = TreeOptions::Sharing;

/// Stored tokens by their span and position, each with what it follows.
class PlainMirror {
 public:
  explicit PlainMirror(std::int64_t unit) : unit_(unit) {}

  /// False, with nothing changed, for an event that cannot follow.
  bool apply(const CacheEvent& event, std::span<const int> tokens) {
    const std::int64_t begin = event.position, end = begin + event.length;
    switch (event.kind) {
      case Kind::cleared:
        tokens_.clear();
        return true;
      case Kind::stored: {
        if (event.length < 1 || tokens.size() != static_cast<std::size_t>(event.length) ||
            event.length % unit_ != 0 || begin < 0 || begin % unit_ != 0 || event.span == 0)
          return false;
        const Position before{event.parent, begin - 1};
        if (event.parent == 0 ? begin != 0 : !may_follow(before, event)) return false;
        const auto own = tokens_.lower_bound({event.span, 0});
        const bool is_known = own != tokens_.end() && own->first.first == event.span;
        if (event.parent == event.span ? tokens_.contains({event.span, begin}) : is_known)
          return false;
        if (find(event.parent == 0 ? root : before, event.name_space, tokens)) return false;
        for (std::int64_t p = begin; p < end; ++p)
          tokens_[{event.span, p}] = {event.parent == 0 && p == 0 ? root
                                      : p == begin                ? before
                                                                  : Position{event.span, p - 1},
                                      event.name_space,
                                      tokens[static_cast<std::size_t>(p - begin)],
                                      {}};
        return true;
      }
      case Kind::kept:
      case Kind::lost: {
        if (event.length < 1 || event.group < 0 || event.group >= std::ssize(reach_)) return false;
        if (!tokens_.contains({event.span, begin}) || !tokens_.contains({event.span, end - 1}))
          return false;
        for (std::int64_t p = begin; p < end; ++p) {
          auto& kept = tokens_.at({event.span, p}).kept;
          event.kind == Kind::kept ? (void)kept.insert(event.group) : (void)kept.erase(event.group);
        }
        return true;
      }
      case Kind::evicted: {
        if (event.length < 1 || event.length % unit_ != 0 || tokens_.contains({event.span, end}))
          return false;
        for (std::int64_t p = begin; p < end; ++p)
          if (!tokens_.contains({event.span, p})) return false;
        for (const auto& [at, token] : tokens_)
          if (token.before.first == event.span && token.before.second >= begin &&
              (at.first != event.span))
            return false;
        for (std::int64_t p = begin; p < end; ++p) tokens_.erase({event.span, p});
        return true;
      }
    }
    return false;
  }
  bool load(const CacheSnapshot<Tree::token_type>& snapshot) {
    if (snapshot.unit != 1 && snapshot.unit != 4) return false;
    PlainMirror loaded(snapshot.unit);
    loaded.reach_ = snapshot.reach;
    if (std::ranges::any_of(snapshot.reach, [](int reach) { return reach < 0; })) return false;
    std::span<const int> rest(snapshot.tokens);
    for (const CacheEvent& event : snapshot.spans) {
      const auto length = static_cast<std::size_t>(event.length);
      if (event.kind != Kind::stored || length > rest.size() ||
          !loaded.apply(event, rest.first(length)))
        return false;
      rest = rest.subspan(length);
    }
    for (const CacheEvent& event : snapshot.kept)
      if (event.kind != Kind::kept || !loaded.apply(event, {})) return false;
    if (rest.empty()) *this = loaded;
    return rest.empty();
  }
  [[nodiscard]] std::size_t match(std::span<const int> prompt, const InsertOptions& options) const {
    return path_of(prompt, options).size();
  }
  /// Of the positions of a path the last one before which all groups have what they reach.
  [[nodiscard]] std::size_t resume_point(std::span<const int> prompt,
                                         const InsertOptions& options) const {
    const std::vector<Position> path = path_of(prompt, options);
    const auto is_point = [&](std::int64_t position) {
      for (std::size_t group = 0; group < reach_.size(); ++group)
        for (std::int64_t p = std::max<std::int64_t>(0, position - reach_[group]); p < position;
             ++p)
          if (!tokens_.at(path[static_cast<std::size_t>(p)]).kept.contains(static_cast<int>(group)))
            return false;
      return true;
    };
    auto position = static_cast<std::int64_t>(std::min(path.size(), options.max_reuse));
    while (!is_point(position)) --position;
    return static_cast<std::size_t>(position);
  }
  [[nodiscard]] std::size_t num_tokens() const { return tokens_.size(); }
  /// Where a span ends, 0 if it is not there, and its namespace.
  [[nodiscard]] std::pair<std::int32_t, Namespace> end_of(std::uint64_t span) const {
    const auto next = tokens_.lower_bound({span + 1, 0});
    if (next == tokens_.begin()) return {};
    const auto& [at, stored] = *std::prev(next);
    if (at.first != span) return {};
    return {static_cast<std::int32_t>(at.second) + 1, stored.space};
  }

 private:
  using Position = std::pair<std::uint64_t, std::int64_t>;  // span, position
  static constexpr Position root{0, -1};
  struct Stored {
    Position before;
    Namespace space;
    int token = 0;
    std::set<int> kept;  // by groups
  };
  [[nodiscard]] std::vector<Position> path_of(std::span<const int> prompt,
                                              const InsertOptions& options) const {
    Position last = root;
    std::vector<Position> path;
    const auto unit = static_cast<std::size_t>(unit_);
    const std::size_t public_end = std::min(options.public_length, prompt.size()) / unit * unit;
    while (path.size() + unit <= prompt.size()) {
      Namespace space = options.name_space;
      if (path.size() < public_end) space = {.adapter = space.adapter, .is_public = true};
      const auto found = find(last, space, prompt.subspan(path.size()));
      if (!found) break;
      last = *found;
      for (std::int64_t i = 1 - unit_; i <= 0; ++i) path.push_back({last.first, last.second + i});
    }
    return path;
  }
  [[nodiscard]] bool may_follow(const Position& before, const CacheEvent& event) const {
    const auto at = tokens_.find(before);
    if (at == tokens_.end()) return false;
    const Namespace& space = at->second.space;
    return space == event.name_space || (space.is_public && event.span != event.parent &&
                                         space.adapter == event.name_space.adapter);
  }
  /// The last token of the unit that continues with these tokens after a position.
  [[nodiscard]] std::optional<Position> find(const Position& last, const Namespace& space,
                                             std::span<const int> tokens) const {
    for (const auto& [at, stored] : tokens_) {
      if (stored.before != last || !(stored.space == space)) continue;
      std::int64_t i = 0;
      while (i < unit_ &&
             tokens_.at({at.first, at.second + i}).token == tokens[static_cast<std::size_t>(i)])
        ++i;
      if (i == unit_) return Position{at.first, at.second + unit_ - 1};
    }
    return std::nullopt;
  }

  std::int64_t unit_;
  std::vector<std::int32_t> reach_;
  std::map<Position, Stored> tokens_;
};

/// Makes events, of few spans and tokens so that many fit.
struct Anything {
  explicit Anything(std::uint64_t seed) : random(seed) {}
  Namespace space() {
    const int which = random.uniform(0, 9);
    if (which < 5) return {.is_public = true};
    if (which < 8) return {.tenant = 1};
    return {.tenant = which == 8 ? 1u : 2u, .adapter = which == 8 ? 1u : 0u};
  }
  /// From `from` to `to`, times the unit or not, or some number at the end of its type.
  std::int32_t number(int from, int to, int unit) {
    if (random.chance(0.02)) {
      constexpr std::array ends{std::numeric_limits<std::int32_t>::min(),
                                std::numeric_limits<std::int32_t>::max(), 1 << 30, -4};
      return ends[random.index(ends.size())];
    }
    return random.uniform(from, to) * (random.chance(0.9) ? unit : 1);
  }
  /// One of which most fit what is there.
  CacheEvent event(int unit, const PlainMirror& there) {
    CacheEvent e;
    const auto span = [&] { return static_cast<std::uint64_t>(random.uniform(0, 12)); };
    e.kind = random.chance(0.01)  ? static_cast<Kind>(7)
             : random.chance(0.6) ? Kind::stored
                                  : Kind::evicted;
    if (random.chance(0.005)) e.kind = Kind::cleared;
    if (random.chance(0.25)) e.kind = random.chance(0.7) ? Kind::kept : Kind::lost;
    e.group = random.uniform(random.chance(0.1) ? -1 : 0, random.chance(0.9) ? 1 : 2);
    e.span = span();
    e.parent = random.chance(0.2) ? e.span : span();
    const bool is_range = e.kind == Kind::kept || e.kind == Kind::lost;
    e.length = is_range ? number(0, 8, 1) : number(e.kind == Kind::stored ? -1 : 1, 4, unit);
    const auto [end, its] = there.end_of(e.kind == Kind::stored ? e.parent : e.span);
    e.name_space = random.chance(0.6) ? its : space();
    e.position = is_range && e.length > 0         ? end - random.uniform(0, 12)
                 : random.chance(0.2)             ? number(-1, 6, unit)
                 : e.kind == Kind::stored         ? end - (random.chance(0.3) ? unit : 0)
                 : e.length > 0 && e.length < end ? end - e.length
                                                  : 0;
    return e;
  }
  /// Of components that are followed.
  std::vector<std::int32_t> reach() {
    std::vector<std::int32_t> all(random.index(4));
    for (std::int32_t& one : all) one = random.uniform(0, random.chance(0.5) ? 2 : 9);
    return all;
  }
  std::vector<int> tokens(std::int64_t count) {
    std::vector<int> all(static_cast<std::size_t>(std::clamp<std::int64_t>(count, 0, 100)));
    for (int& token : all) token = random.chance(0.6) ? 1 : random.uniform(2, 3);
    return all;
  }
  test::Random random;
};

void check_same(Anything& any, const CacheMirror<Tree>& mirror, const PlainMirror& plain) {
  REQUIRE(mirror.num_tokens() == plain.num_tokens());
  for (int i = 0; i < 4; ++i) {
    const std::vector<int> prompt = any.tokens(any.random.uniform(0, 40));
    InsertOptions options{.name_space = any.space(),
                          .public_length = static_cast<std::size_t>(any.random.uniform(0, 40))};
    options.name_space.is_public = false;
    REQUIRE(mirror.match_prefix(prompt, options) == plain.match(prompt, options));
    if (any.random.chance(0.5)) options.max_reuse = any.random.index(40);
    REQUIRE(mirror.find(prompt, options) == plain.resume_point(prompt, options));
  }
}

CacheSnapshot<Tree::token_type> snapshot_of(std::uint64_t seed, Sharing sharing) {
  Tree tree({}, {.sharing = sharing});
  const CacheEvents events(tree, [](const CacheEvent&, std::span<const int>) {});
  Anything any(seed);
  for (int i = 0; i < 6; ++i) {
    const auto prompt = any.tokens(any.random.uniform(1, 20));
    auto s = tree.insert(prompt, {.name_space = {.tenant = 1}, .public_length = 8});
    test::load(s);
  }
  return events.snapshot();
}

}  // namespace

TEST_CASE("events that no tree publishes are refused, and change nothing") {
  CacheMirror<Tree> mirror(Sharing::token);
  const auto text = [&](CacheEvent event, const std::vector<int>& tokens) {
    event.number = mirror.number() + 1;
    const auto before = mirror.num_tokens();
    const std::string message = refused([&] { (void)mirror.apply(event, tokens); });
    if (message != "no error") {
      CHECK(mirror.number() == event.number - 1);
      CHECK(mirror.num_tokens() == before);
    }
    return message;
  };
  const auto stored = [&](std::uint64_t span, std::uint64_t parent, int position,
                          const std::vector<int>& tokens, Namespace space = {}) {
    return text({.kind = Kind::stored,
                 .span = span,
                 .parent = parent,
                 .name_space = space,
                 .position = position,
                 .length = static_cast<std::int32_t>(tokens.size())},
                tokens);
  };
  const auto evicted = [&](std::uint64_t span, int position, int length) {
    return text({.kind = Kind::evicted, .span = span, .position = position, .length = length}, {});
  };
  CHECK(stored(0, 0, 0, {1}).find("event.span = 0") == 0);
  CHECK(stored(1, 0, 0, {1, 2, 3}) == "no error");
  CHECK(stored(2, 0, 0, {1, 7}).find("tokens = as of another span") == 0);
  CHECK(stored(2, 1, 2, {3, 7}).find("tokens = as of another span") == 0);
  CHECK(stored(2, 1, 2, {4}, {.tenant = 1}).find("event.parent = 1") == 0);
  CHECK(stored(2, 1, 2, {4}) == "no error");
  CHECK(stored(3, 1, 2, {4}).find("tokens = as of another span") == 0);
  CHECK(evicted(1, 1, 2).find("event.position = 1: expected tokens that no other") == 0);
  CHECK(evicted(1, 2, 1) == "no error");
  CHECK(evicted(2, 2, 1) == "no error");
  CHECK(evicted(1, 0, 2) == "no error");
  CHECK(mirror.num_tokens() == 0);
}

TEST_CASE("a mirror follows one stream, whatever its number is") {
  using Applied = CacheMirror<Tree>::Applied;
  const auto tokens = iota(0, 8);
  CacheMirror<Tree> mirror(Sharing::token);
  CHECK_FALSE(mirror.stream());
  CacheEvent event{.kind = Kind::stored, .stream = 0, .number = 1, .span = 1, .length = 8};
  CHECK(mirror.apply(event, tokens) == Applied::changed);
  CHECK(mirror.stream() == 0);
  event = {.kind = Kind::evicted, .stream = 5, .number = 2, .span = 1, .length = 8};
  CHECK(mirror.apply(event, {}) == Applied::missed);
  CHECK(mirror.num_tokens() == 8);
  mirror.load({.stream = 5, .spans = {}, .tokens = {}});
  CHECK(mirror.num_tokens() == 0);
  event = {.kind = Kind::stored, .stream = 0, .number = 1, .span = 1, .length = 8};
  CHECK(mirror.apply(event, tokens) == Applied::missed);
}

TEST_CASE("a part of a chunk is never evicted where whole chunks are shared") {
  CacheMirror<Tree> mirror(Sharing::chunk);
  const auto tokens = iota(0, 8);
  CacheEvent event{.kind = Kind::stored, .number = 1, .span = 1, .length = 8};
  CHECK(mirror.apply(event, tokens) == CacheMirror<Tree>::Applied::changed);
  event = {.kind = Kind::evicted, .number = 2, .span = 1, .position = 3, .length = 5};
  CHECK(refused([&] { (void)mirror.apply(event, {}); }).find("event.position = 3") == 0);
  event = {.kind = Kind::evicted, .number = 2, .span = 1, .position = 4, .length = 4};
  CHECK(mirror.apply(event, {}) == CacheMirror<Tree>::Applied::changed);
  CHECK(mirror.match_prefix(tokens) == 4);
}

TEST_CASE("a chunk that is public in part is its tenant's where whole chunks are shared") {
  Tree tree({}, {.sharing = Sharing::chunk});
  CacheMirror<Tree> mirror(Sharing::chunk);
  const CacheEvents events(tree, [&](const CacheEvent& event, std::span<const int> tokens) {
    CHECK(mirror.apply(event, tokens) == CacheMirror<Tree>::Applied::changed);
  });
  const InsertOptions options{
      .name_space = {.tenant = 1}, .public_length = 6, .compute_last = false};
  {
    auto s = tree.insert(iota(0, 12), options);
    test::load(s);
  }
  CHECK(tree.match_prefix(iota(0, 12), options).cached == 12);
  CHECK(mirror.match_prefix(iota(0, 12), options) == 12);
}

TEST_CASE("an event that there is no memory for changes nothing") {
  auto prompt = iota(0, 4);
  const auto tokens = iota(500, 8);
  prompt.insert(prompt.end(), tokens.begin(), tokens.end());
  const CacheEvent first{.kind = Kind::stored, .number = 1, .span = 1, .length = 8};
  const CacheEvent second{
      .kind = Kind::stored, .number = 2, .span = 2, .parent = 1, .position = 4, .length = 8};
  int failures = 0;
  for (bool failed = true; failed; ++failures) {
    CacheMirror<Tree> mirror;
    REQUIRE(mirror.apply(first, iota(0, 8)) == CacheMirror<Tree>::Applied::changed);
    failed = false;
    test::heap.fail_in = failures;
    try {
      (void)mirror.apply(second, tokens);
    } catch (const std::bad_alloc&) {
      failed = true;
    }
    test::heap.fail_in = -1;
    if (!failed) break;
    CHECK(mirror.number() == 1);
    CHECK(mirror.num_tokens() == 8);
    CHECK(mirror.match_prefix(prompt) == 4);
    CHECK(mirror.apply(second, tokens) == CacheMirror<Tree>::Applied::changed);
    CHECK(mirror.match_prefix(prompt) == 12);
  }
  CHECK(failures >= 4);  // tokens, where it is found, the span, where it leaves
}

TEST_CASE("spans end before positions do") {
  constexpr std::size_t size = (std::size_t{1} << 30) + 1;
  const test::Pages zeros(size, /*writable=*/false);
  CacheMirror<PrefixTree<std::uint8_t, 4, PoolAllocator, test::NoRetention>> mirror;
  const CacheEvent event{
      .kind = Kind::stored, .number = 1, .span = 1, .length = static_cast<std::int32_t>(size)};
  CHECK(refused([&] {
          (void)mirror.apply(event, {static_cast<const std::uint8_t*>(zeros.data()), size});
        }).find("event.position = 0: expected 0 to 2^30") == 0);
}

TEST_CASE("any events: refused or taken over as by a plain map") {
  for (const Sharing sharing : {Sharing::token, Sharing::chunk})
    for (std::uint64_t seed = 1; seed <= 10; ++seed) {
      CAPTURE(seed);
      const int unit = sharing == Sharing::token ? 1 : 4;
      Anything any(seed);
      CacheMirror<Tree> mirror(sharing);
      PlainMirror plain(unit);
      const CacheSnapshot<int> empty{
          .unit = unit, .spans = {}, .tokens = {}, .kept = {}, .reach = any.reach()};
      mirror.load(empty);
      REQUIRE(plain.load(empty));
      int taken = 0;
      for (int i = 0; i < test::scaled(9000); ++i) {
        CacheEvent event = any.event(unit, plain);
        event.number = mirror.number() + 1;
        const auto tokens = any.tokens(any.random.chance(0.98) ? event.length : 3);
        const bool accepted =
            refused([&] { (void)mirror.apply(event, tokens); }) == std::string("no error");
        CAPTURE(i);
        REQUIRE(accepted == plain.apply(event, tokens));
        REQUIRE(mirror.number() == event.number - (accepted ? 0 : 1));
        taken += accepted ? 1 : 0;
        check_same(any, mirror, plain);
      }
      CHECK(taken > test::scaled(60));
    }
}

TEST_CASE("any snapshot: refused or loaded as by a plain map") {
  int refusals = 0, loads = 0;
  for (const Sharing sharing : {Sharing::token, Sharing::chunk})
    for (std::uint64_t seed = 1; seed <= 20; ++seed) {
      CAPTURE(seed);
      CacheSnapshot<Tree::token_type> good = snapshot_of(seed, sharing);
      const CacheSnapshot<Tree::token_type> other = snapshot_of(99, sharing);
      Anything any(seed);
      good.reach = any.reach();
      for (std::size_t i = 0; i < good.spans.size() && !good.reach.empty(); ++i) {
        good.kept.push_back(good.spans[i]);
        good.kept.back().kind = Kind::kept;
        good.kept.back().length = any.random.uniform(1, good.spans[i].length);
        good.kept.back().group = static_cast<std::int32_t>(any.random.index(good.reach.size()));
      }
      CacheMirror<Tree> mirror(sharing);
      PlainMirror plain(good.unit);
      mirror.load(other);
      REQUIRE(plain.load(other));
      for (int i = 0; i < test::scaled(200); ++i) {
        CacheSnapshot<Tree::token_type> damaged = good;
        damaged.number = static_cast<std::uint64_t>(i);
        for (int faults = any.random.uniform(0, 2); faults > 0; --faults) {
          if (damaged.spans.empty()) break;
          const auto at = static_cast<std::ptrdiff_t>(any.random.index(damaged.spans.size()));
          CacheEvent& event = damaged.spans[static_cast<std::size_t>(at)];
          const CacheEvent random = any.event(good.unit, plain);
          if (any.random.chance(0.3)) {
            if (damaged.kept.empty() || any.random.chance(0.05)) damaged.reach = {3, -1};
            CacheEvent kept = random;
            if (any.random.chance(0.8)) kept.kind = Kind::kept;
            damaged.kept.push_back(kept);
            continue;
          }
          switch (any.random.uniform(0, 9)) {
            case 0:
              damaged.tokens.push_back(1);
              break;
            case 1:
              damaged.tokens.resize(any.random.index(damaged.tokens.size() + 1));
              break;
            case 2:
              damaged.spans.erase(damaged.spans.begin() + at);
              break;
            case 3:
              damaged.spans.insert(damaged.spans.begin() + at, random);
              break;
            case 4:
              event.span = random.span;
              break;
            case 5:
              event.parent = random.parent;
              break;
            case 6:
              event.position = random.position;
              break;
            case 7:
              event.length = random.length;
              break;
            case 8:
              event.kind = random.kind;
              break;
            default:
              damaged.unit = any.number(-1, 9, 1);
          }
        }
        const std::uint64_t before = mirror.number();
        const bool loaded = refused([&] { mirror.load(damaged); }) == std::string("no error");
        REQUIRE(loaded == plain.load(damaged));
        REQUIRE(mirror.number() == (loaded ? damaged.number : before));
        ++(loaded ? loads : refusals);
        check_same(any, mirror, plain);
      }
    }
  CHECK(refusals > test::scaled(300));
  CHECK(loads > test::scaled(300));
}
