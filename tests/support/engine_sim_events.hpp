// Events of the engine simulation's tree on their way to a mirror: some get lost, some come again.
// The mirror asks for those that it missed, or for a snapshot where they are kept no longer, and
// is then held against the tree.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "chunkattn/debug/tree.hpp"
#include "chunkattn/events/mirror.hpp"
#include "chunkattn/prefix_tree.hpp"
#include "tests/support/counted_new.hpp"
#include "tests/support/engine_sim.hpp"

namespace test {

template <class Tree>
class EventWire {
  using Token = typename Tree::token_type;
  using Mirror = CacheMirror<Tree>;
  using Applied = typename Mirror::Applied;

 public:
  EventWire(Choices& choices, Counters& counters) : choices_(choices), counters_(counters) {}
  EventWire(const EventWire&) = delete;
  EventWire& operator=(const EventWire&) = delete;

  /// Takes the tree's events from now on; what was published before is lost.
  void connect(Tree& tree) {
    const bool first = !connected_;
    const bool late = tree.stats().nodes > 1 || !first;
    connected_ = true;
    if (first) mirror_ = Mirror(tree.options().sharing);
    events_.emplace(tree, [this](const CacheEvent& event, std::span<const Token> tokens) {
      // What the test itself allocates is no allocation of the tree's, and does not fail.
      const HeapCounters before = heap;
      heap.fail_in = -1;
      sent_.push_back({event, {tokens.begin(), tokens.end()}});
      if (sent_.size() > kept) sent_.pop_front();
      heap.allocations = before.allocations;
      heap.fail_in = before.fail_in;
      ++told_;
    });
    if (late) {
      sent_.clear();
      mirror_.load(events_->snapshot());
      count(first ? "events asked for late" : "events asked for again");
    }
    told_ = seen_ = events_->last_event();
  }
  [[nodiscard]] bool connected() const { return connected_; }

  /// What was told since the last time arrives, more or less.
  void deliver() {
    expect(sent_.empty() || sent_.back().event.number == told_, "events are numbered one by one");
    expect(events_->last_event() == told_, "the last event is the last that was published");
    while (seen_ < told_) {
      const std::uint64_t next = std::max(seen_ + 1, told_ + 1 - sent_.size());
      seen_ = next;
      if (choices_.below(40) == 0) {
        count("event lost");
        continue;
      }
      receive(message(next));
      if (choices_.below(40) == 0) {
        const std::uint64_t oldest = told_ + 1 - sent_.size();
        receive(message(oldest + choices_.below(told_ + 1 - oldest)));
        count("event repeated");
      }
    }
  }
  /// The mirror is what the tree is; what got lost last is asked for.
  void compare(const Tree& tree) {
    if (mirror_.number() < told_) recover();
    expect(mirror_.number() == told_, "the mirror is up to date");
    std::size_t findable = 0;
    paths_.clear();
    chunkattn::for_each_node(tree, 1 << 20, [&](const NodeInfo<typename Tree::token_type>& node) {
      Path& path = paths_.emplace_back();
      path.id = node.id;
      for (const Path& before : paths_)
        if (before.id == node.parent) {
          path.tokens = before.tokens;
          path.public_length = before.public_length;
        }
      path.tokens.insert(path.tokens.end(), node.first_tokens.begin(), node.first_tokens.end());
      InsertOptions options{.name_space = node.name_space, .public_length = path.public_length};
      if (node.name_space.is_public) {
        options.name_space.is_public = false;
        options.public_length = path.public_length = path.tokens.size();
      }
      const std::size_t found = check_match(tree, path.tokens, options);
      const auto position = static_cast<std::size_t>(node.position);
      if (found > position && is_published(tree, node)) findable += found - position;
    });
    expect(mirror_.num_tokens() == findable, "the mirror holds what can be found, and no more");
    count("mirror compared");
  }
  /// The mirror finds of a prompt what the tree finds. Returns how much.
  std::size_t check_match(const Tree& tree, std::span<const Token> prompt,
                          const InsertOptions& options) const {
    const std::size_t unit =
        tree.options().sharing == TreeOptions::Sharing::token ? 1 : std::size_t{Tree::chunk_size};
    const std::size_t cached = tree.match_prefix(prompt, options).cached;
    const std::size_t found = mirror_.match_prefix(prompt, options);
    expect(found == cached - cached % unit, "the mirror finds what the tree finds");
    return found;
  }
  [[nodiscard]] bool is_current() const { return connected_ && mirror_.number() == told_; }

 private:
  static constexpr std::size_t kept = 64;  // events for replay
  struct Message {
    CacheEvent event;
    std::vector<Token> tokens;
  };
  struct Path {
    std::int32_t id = 0;
    std::size_t public_length = 0;
    std::vector<Token> tokens;
  };

  static void expect(bool ok, const char* what) {
    if (!ok) throw std::logic_error(what);
  }
  void count(const char* what) { ++counters_[what]; }
  [[nodiscard]] const Message& message(std::uint64_t number) const {
    return sent_[static_cast<std::size_t>(number + sent_.size() - told_ - 1)];
  }
  void receive(const Message& message) {
    if (mirror_.apply(message.event, message.tokens) == Applied::missed) recover();
  }
  /// By replay, where all that is missing is still kept, or by a snapshot.
  void recover() {
    const std::uint64_t oldest = told_ + 1 - sent_.size();
    if (mirror_.number() + 1 < oldest || choices_.below(3) == 0) {
      mirror_.load(events_->snapshot());
      seen_ = told_;
      return count("mirror recovered by a snapshot");
    }
    for (std::uint64_t next = mirror_.number() + 1; next <= seen_; ++next)
      expect(mirror_.apply(message(next).event, message(next).tokens) == Applied::changed,
             "a replayed event is the next one");
    count("mirror recovered by replay");
  }
  /// Whether prompts come to this node: not to what only its own sequences have.
  static bool is_published(const Tree& tree, const NodeInfo<typename Tree::token_type>& node) {
    return chunkattn::detail::TreeAccess::core(tree).topology.node(node.id).state ==
           chunkattn::detail::NodeState::published;
  }

  Choices& choices_;
  Counters& counters_;
  Mirror mirror_;
  std::optional<CacheEvents<Tree>> events_;
  std::deque<Message> sent_;
  std::vector<Path> paths_;
  std::uint64_t told_ = 0;  // number of the last event
  std::uint64_t seen_ = 0;  // of the last that arrived or got lost
  bool connected_ = false;
};

}  // namespace test
