// Hostile events for mirrors of the engine simulation's tree: damaged, repeated, or of another
// tree. A mirror refuses such an event and is as before, or applies it as a plain list of spans
// does; one that refuses all of them continues with the tree's own.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <limits>
#include <map>
#include <new>
#include <span>
#include <stdexcept>
#include <utility>
#include <vector>

#include "chunkattn/events/mirror.hpp"
#include "chunkattn/prefix_tree.hpp"
#include "tests/support/counted_new.hpp"
#include "tests/support/engine_sim.hpp"

namespace test {

/// Spans as published, looked through one by one.
template <class Token>
class PlainSpans {
 public:
  struct Span {
    std::uint64_t parent = 0;
    Namespace space{};
    std::size_t position = 0;
    std::vector<Token> tokens;
    [[nodiscard]] std::size_t end() const { return position + tokens.size(); }
  };
  std::map<std::uint64_t, Span> all;
  std::size_t unit = 1;

  void apply(const CacheEvent& event, std::span<const Token> tokens) {
    const auto position = static_cast<std::size_t>(event.position);
    if (event.kind == CacheEvent::Kind::cleared) return all.clear();
    Span& span = all[event.span];
    if (event.kind == CacheEvent::Kind::evicted) {
      span.tokens.resize(position - span.position);
      if (span.tokens.empty()) all.erase(event.span);
      return;
    }
    if (span.tokens.empty()) span = {event.parent, event.name_space, position, {}};
    span.tokens.insert(span.tokens.end(), tokens.begin(), tokens.end());
  }
  template <class Snapshot>
  void load(const Snapshot& snapshot) {
    all.clear();
    unit = static_cast<std::size_t>(snapshot.unit);
    std::span<const Token> rest(snapshot.tokens);
    for (const CacheEvent& event : snapshot.spans) {
      const auto length = static_cast<std::size_t>(event.length);
      apply(event, rest.first(length));
      rest = rest.subspan(length);
    }
    if (!rest.empty()) throw std::logic_error("a snapshot that was loaded has no surplus tokens");
  }
  [[nodiscard]] std::size_t num_tokens() const {
    std::size_t sum = 0;
    for (const auto& [number, span] : all) sum += span.tokens.size();
    return sum;
  }
  /// Every span is of whole units and hangs on one that is there, as its namespace may.
  [[nodiscard]] bool is_consistent() const {
    return std::ranges::all_of(all, [&](const auto& entry) {
      const Span& span = entry.second;
      if (span.tokens.empty() || span.tokens.size() % unit != 0 || span.position % unit != 0)
        return false;
      if (span.parent == 0) return span.position == 0;
      const auto parent = all.find(span.parent);
      if (parent == all.end() || parent == all.find(entry.first)) return false;
      const Span& before = parent->second;
      return span.position > before.position && span.position <= before.end() &&
             (span.space == before.space ||
              (before.space.is_public && before.space.adapter == span.space.adapter));
    });
  }
  /// Leading tokens of a prompt; at no place may two spans go on with the same.
  [[nodiscard]] std::size_t match(std::span<const Token> prompt, const Namespace& own,
                                  std::size_t public_length) const {
    const std::size_t public_end = std::min(public_length, prompt.size()) / unit * unit;
    std::pair<std::uint64_t, std::size_t> last{0, 0};  // a span, and where in it
    for (; last.second + unit <= prompt.size(); last.second += unit) {
      const auto at = last.second;
      const Namespace space =
          at < public_end ? Namespace{.adapter = own.adapter, .is_public = true} : own;
      std::size_t found = 0;
      std::uint64_t next = 0;
      for (const auto& [number, span] : all) {
        const bool goes_on = number == last.first && at > 0;
        if (!(span.space == space) || at + unit > span.end() ||
            !(goes_on || (span.parent == last.first && span.position == at)))
          continue;
        if (!std::equal(prompt.begin() + static_cast<std::ptrdiff_t>(at),
                        prompt.begin() + static_cast<std::ptrdiff_t>(at + unit),
                        span.tokens.begin() + static_cast<std::ptrdiff_t>(at - span.position)))
          continue;
        next = number;
        ++found;
      }
      if (found > 1) throw std::logic_error("no two spans of a mirror go on alike");
      if (found == 0) break;
      last.first = next;
    }
    return last.second;
  }
};

template <class Tree>
class HostileWire {
  using Token = typename Tree::token_type;
  using Mirror = CacheMirror<Tree>;
  using Applied = typename Mirror::Applied;
  using Snapshot = CacheSnapshot<Token>;
  using Kind = CacheEvent::Kind;

 public:
  HostileWire(Choices& choices, Counters& counters) : choices_(choices), counters_(counters) {}

  /// Takes the tree's events from now on.
  void connect(Tree& tree) {
    heard_.clear();
    events_.emplace(tree, [this](const CacheEvent& event, std::span<const Token> tokens) {
      hear(event, tokens);
    });
    begin();
    faithful_ = victim_;
    other_ = Other(PoolAllocator{.max_chunks = 12}, {.sharing = tree.options().sharing});
    others_events_.emplace(
        other_,
        [this](const CacheEvent& event, std::span<const Token> tokens) {
          keep({event, {tokens.begin(), tokens.end()}});
        },
        events_->stream());  // as if it were this tree's
  }
  /// What was published since the last time arrives, and with it what else comes.
  void deliver() {
    if (one_in(40)) begin();
    for (std::size_t n = below(3); n > 0; --n) one_in(24) ? attack(damaged_snapshot()) : attack();
    for (Message& message : heard_) {
      expect(faithful_.apply(message.event, message.tokens) == Applied::changed,
             "who refused what was damaged goes on with what is true");
      keep(std::move(message));
    }
    if (!heard_.empty()) is_like_faithful_ = false;
    heard_.clear();
    if (one_in(64)) compare(events_->snapshot(), faithful_);
  }

 private:
  struct Message {
    CacheEvent event;
    std::vector<Token> tokens;
  };
  using Other = PrefixTree<Token, Tree::chunk_size>;

  static void expect(bool ok, const char* what) {
    if (!ok) throw std::logic_error(what);
  }
  [[nodiscard]] std::size_t below(std::size_t n) { return choices_.below(n); }
  [[nodiscard]] bool one_in(std::size_t n) { return below(n) == 0; }
  void count(const char* what) { ++counters_[what]; }
  void hear(const CacheEvent& event, std::span<const Token> tokens) {
    const HeapCounters before = heap;  // what the test allocates is none of the tree's
    heap.fail_in = -1;
    heard_.push_back({event, {tokens.begin(), tokens.end()}});
    heap.allocations = before.allocations;
    heap.fail_in = before.fail_in;
  }
  void keep(Message message) {
    recent_.push_back(std::move(message));
    if (recent_.size() > 48) recent_.pop_front();
  }

  /// The victim starts again, as what the tree is.
  void begin() {
    const Snapshot now = events_->snapshot();
    victim_.load(now);
    plain_.load(now);
    is_like_faithful_ = heard_.empty();
  }
  /// The other tree goes on: somebody comes and leaves.
  void use_other() {
    const std::vector<Token> prompt = random_tokens(1 + below(3 * Tree::chunk_size));
    auto s = other_.insert(prompt, {.name_space = {.tenant = below(3)}, .public_length = below(8)});
    for (auto range = s.loadable(); !range.empty(); range = s.loadable()) s.mark_loaded(range);
  }
  [[nodiscard]] std::vector<Token> random_tokens(std::size_t count) {
    std::vector<Token> tokens(count);
    for (Token& token : tokens) token = static_cast<Token>(below(3));
    return tokens;
  }

  // ---- damage --------------------------------------------------------------------------------

  [[nodiscard]] std::uint64_t some_span() {
    if (plain_.all.empty() || one_in(8)) return one_in(2) ? below(40) : ~std::uint64_t{0};
    return std::next(plain_.all.begin(), static_cast<std::ptrdiff_t>(below(plain_.all.size())))
        ->first;
  }
  [[nodiscard]] std::int32_t some_number(std::int32_t near) {
    constexpr std::array ends{std::numeric_limits<std::int32_t>::min(), -1, 0, 1 << 30,
                              std::numeric_limits<std::int32_t>::max()};
    if (one_in(6)) return ends[below(ends.size())];
    const auto step = static_cast<std::int64_t>(one_in(3) ? 1 : plain_.unit);
    const std::int64_t number =
        near + step * static_cast<std::int64_t>(1 + below(3)) * (one_in(2) ? 1 : -1);
    return static_cast<std::int32_t>(std::clamp<std::int64_t>(number, ends.front(), ends.back()));
  }
  void damage(CacheEvent& event, std::vector<Token>& tokens) {
    switch (below(9)) {
      case 0:
        event.kind = static_cast<Kind>(below(one_in(4) ? 256 : 2));
        break;
      case 1:
        event.span = some_span();
        break;
      case 2:
        event.parent = one_in(3) ? event.span : one_in(4) ? 0 : some_span();
        break;
      case 3:
        event.position = some_number(event.position);
        break;
      case 4:
        event.length = some_number(event.length);
        if (one_in(2)) tokens.resize(static_cast<std::size_t>(std::clamp(event.length, 0, 300)));
        break;
      case 5:
        event.name_space = {below(3), below(2), one_in(2)};
        break;
      case 6:
        if (!tokens.empty()) tokens[below(tokens.size())] = static_cast<Token>(below(3));
        break;
      case 7:
        tokens.resize(below(tokens.size() + 3));
        break;
      default:  // goes on from a span that is there
        if (const auto at = plain_.all.find(some_span()); at != plain_.all.end()) {
          event.name_space = at->second.space;
          event.parent = at->first;
          event.position = static_cast<std::int32_t>(at->second.end());
          if (one_in(3)) event.span = event.parent;
        }
    }
  }
  [[nodiscard]] Snapshot damaged_snapshot() {
    Snapshot s;
    if (one_in(4)) {
      auto foreign = others_events_->snapshot();
      s = {foreign.stream, foreign.number, foreign.unit, std::move(foreign.spans),
           std::move(foreign.tokens)};
    } else {
      s = events_->snapshot();
    }
    for (std::size_t faults = below(3); faults > 0; --faults) {
      const std::size_t at = below(s.spans.size() + 1);
      const auto place = s.spans.begin() + static_cast<std::ptrdiff_t>(at);
      std::vector<Token> none;
      if (one_in(5)) {
        s.tokens.resize(below(s.tokens.size() + 3));
      } else if (one_in(8)) {
        s.unit = one_in(2) ? 1 : some_number(1);
      } else if (at == s.spans.size()) {
        if (!s.tokens.empty()) s.tokens[below(s.tokens.size())] = static_cast<Token>(below(3));
      } else if (one_in(3)) {
        s.spans.insert(place, CacheEvent(*place));
      } else if (one_in(3)) {
        s.spans.erase(place);
      } else {
        damage(*place, none);
      }
    }
    return s;
  }

  // ---- what arrives --------------------------------------------------------------------------

  enum class Outcome : std::uint8_t { taken, refused, out_of_memory };
  /// Calls f, with memory that may run out. Where nothing is taken, the victim is as before.
  template <class F>
  Outcome outcome_of(const F& f) {
    const auto number = victim_.number();
    const auto tokens = victim_.num_tokens();
    Outcome outcome = Outcome::taken;
    const HeapCounters before = heap;
    heap.fail_in = one_in(8) ? static_cast<std::int64_t>(below(6)) : -1;
    try {
      f();
    } catch (const InvalidArgument&) {
      outcome = Outcome::refused;
    } catch (const std::bad_alloc&) {
      outcome = Outcome::out_of_memory;
    }
    heap.allocations = before.allocations;
    heap.fail_in = before.fail_in;
    if (outcome == Outcome::taken) return outcome;
    expect(victim_.number() == number && victim_.num_tokens() == tokens,
           "what a mirror refuses changes nothing");
    count(outcome == Outcome::refused ? "hostile event refused" : "memory ran out: mirror");
    return outcome;
  }

  void attack() {
    if (recent_.empty() || one_in(16)) use_other();
    if (recent_.empty()) return;
    Message message = recent_[below(recent_.size())];
    CacheEvent& event = message.event;
    std::vector<Token>& tokens = message.tokens;
    for (std::size_t faults = below(3); faults > 0; --faults) damage(event, tokens);
    const std::uint64_t next = victim_.number() + 1;
    event.number = one_in(12) ? below(next + 3) : next;
    const bool is_strange = one_in(24);  // of a stream that it does not follow
    event.stream = *victim_.stream() + (is_strange ? 1 : 0);
    Applied applied{};
    const Outcome outcome = outcome_of([&] { applied = victim_.apply(event, tokens); });
    if (outcome != Outcome::taken) {
      if (outcome == Outcome::refused && is_like_faithful_) {
        event.number = faithful_.number() + 1;
        event.stream = *faithful_.stream();
        try {
          (void)faithful_.apply(event, tokens);
          throw std::logic_error("equal mirrors refuse the same");
        } catch (const InvalidArgument&) {
          count("hostile event refused beside true ones");
        }
      }
    } else if (is_strange || event.number != next) {
      expect(applied == (is_strange || event.number > next ? Applied::missed : Applied::repeated) &&
                 victim_.number() + 1 == next,
             "what is not the next event is not taken");
    } else {
      expect(applied == Applied::changed && victim_.number() == next, "an event was taken");
      plain_.apply(event, tokens);
      is_like_faithful_ = false;
      count("hostile event taken");
    }
    check_victim();
  }
  void attack(const Snapshot& snapshot) {
    if (outcome_of([&] { victim_.load(snapshot); }) == Outcome::taken) {
      plain_.load(snapshot);
      is_like_faithful_ = false;
      count("hostile snapshot loaded");
    }
    check_victim();
  }

  // ---- what must hold ------------------------------------------------------------------------

  void check_victim() {
    expect(victim_.num_tokens() == plain_.num_tokens(), "a mirror holds what it was told");
    if (!one_in(8)) return;
    expect(plain_.is_consistent(), "what a mirror takes is a tree");
    expect_equal(victim_, plain_);
  }
  /// A mirror that was told the truth alone is what the snapshot says.
  void compare(const Snapshot& snapshot, const Mirror& mirror) {
    PlainSpans<Token> truth;
    truth.load(snapshot);
    expect(mirror.number() == snapshot.number && mirror.num_tokens() == truth.num_tokens(),
           "a mirror that is told the truth beside is the tree");
    expect_equal(mirror, truth);
    count("mirror compared beside hostile events");
  }
  /// Along the path of some span, and of something else.
  void expect_equal(const Mirror& mirror, const PlainSpans<Token>& spans) {
    InsertOptions options{.name_space = {below(3), 0}, .public_length = below(12)};
    std::vector<Token> prompt;
    if (!spans.all.empty() && !one_in(4)) {
      auto at = std::next(spans.all.begin(), static_cast<std::ptrdiff_t>(below(spans.all.size())));
      options = {.name_space = at->second.space};
      std::size_t end = at->second.end();
      prompt.resize(end);
      while (true) {
        const auto& span = at->second;
        if (span.space.is_public) options.public_length = std::max(options.public_length, end);
        std::copy_n(span.tokens.begin(), end - span.position,
                    prompt.begin() + static_cast<std::ptrdiff_t>(span.position));
        if (span.parent == 0) break;
        end = span.position;
        at = spans.all.find(span.parent);
      }
      options.name_space.is_public = false;
    }
    for (const Token token : random_tokens(below(6))) prompt.push_back(token);
    expect(mirror.match_prefix(prompt, options) ==
               spans.match(prompt, options.name_space, options.public_length),
           "a mirror finds what it was told");
  }

  Choices& choices_;
  Counters& counters_;
  Mirror faithful_, victim_;
  PlainSpans<Token> plain_;  // what the victim is
  Other other_;
  std::optional<CacheEvents<Tree>> events_;
  std::optional<CacheEvents<Other>> others_events_;
  std::vector<Message> heard_;
  std::deque<Message> recent_;
  bool is_like_faithful_ = false;  // the victim has had nothing else yet
};

}  // namespace test
