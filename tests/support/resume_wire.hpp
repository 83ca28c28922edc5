// Where prompts can be resumed, as a mirror says that hears of it by events alone: it must be what
// the groups of windowed layers and the checkpoints of the tree say. Streams of events end and
// begin anew, groups and checkpoints end while they are followed, events get lost and come again.
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "chunkattn/cache/checkpoints.hpp"
#include "chunkattn/cache/windowed_layers.hpp"
#include "chunkattn/events/mirror.hpp"
#include "chunkattn/tree_options.hpp"
#include "tests/support/random.hpp"

namespace test {

/// What a run has seen.
struct ResumeCounts {
  std::uint64_t found = 0, early = 0, by_state = 0, kept = 0, lost = 0, missed = 0, ended = 0;

  void add(const ResumeCounts& other) {
    found += other.found, early += other.early, by_state += other.by_state;
    kept += other.kept, lost += other.lost, missed += other.missed, ended += other.ended;
  }
};

template <class Tree>
class ResumeWire {
  using Mirror = chunkattn::CacheMirror<Tree>;
  using Applied = typename Mirror::Applied;
  using Kind = chunkattn::CacheEvent::Kind;

 public:
  using Layers = chunkattn::WindowedLayers<Tree>;
  using Groups = std::vector<const Layers*>;  ///< those that there are, three at most
  using Sequence = typename Tree::Sequence;

  ResumeWire(Tree& tree, std::uint64_t stream) : tree_(tree), random_(stream) {}
  ResumeWire(const ResumeWire&) = delete;
  ResumeWire& operator=(const ResumeWire&) = delete;

  /// What happened since the last time comes to the mirror.
  void hear(const Groups& groups) {
    if (!events_ || random_.chance(0.003)) connect(groups);
    if (states_ && random_.chance(0.003)) {
      states_.reset();
      ++counts_.ended;
    }
    for (; !sent_.empty(); sent_.pop_front()) {
      const Message& message = sent_.front();
      counts_.kept += message.event.kind == Kind::kept;
      counts_.lost += message.event.kind == Kind::lost;
      if (random_.chance(0.002)) continue;
      const auto applied = mirror_.apply(message.event, message.tokens);
      if (applied == Applied::changed && random_.chance(0.01))
        REQUIRE(mirror_.apply(message.event, message.tokens) == Applied::repeated);
    }
    if (mirror_.number() == events_->last_event()) return;
    mirror_.load(events_->snapshot());
    ++counts_.missed;
  }
  /// The state at some position of a sequence is kept.
  void save(const Sequence& sequence) {
    const std::size_t written = sequence.num_written();
    if (!states_ || written == 0) return;
    (void)states_->save(sequence, 1 + random_.index(written), std::make_shared<int>());
  }
  /// Both say the same of a prompt.
  void compare(std::span<const int> prompt, const Groups& groups,
               chunkattn::InsertOptions options = {}) {
    const bool by_token = tree_.options().sharing == chunkattn::TreeOptions::Sharing::token;
    const std::size_t cached = tree_.match_prefix(prompt, options).cached;
    const std::size_t match = cached - (by_token ? 0 : cached % Tree::chunk_size);
    REQUIRE(mirror_.match_prefix(prompt, options) == match);
    std::size_t position = match;
    bool by_state = false;
    chunkattn::InsertOptions up_to = options;
    for (std::size_t before = match + 1; before != position;) {
      before = position;
      for (const Followed& followed : followed_) {
        if (followed.reach == 0) continue;
        up_to.max_reuse = position;
        const Layers* const group = find(followed.id, groups);
        position = group != nullptr ? group->find(prompt, up_to) : 0;
      }
      up_to.max_reuse = position;
      if (!with_states_) continue;
      position = states_ ? states_->find(prompt, up_to) : 0;
      by_state = by_state || position < up_to.max_reuse;
    }
    REQUIRE(mirror_.find(prompt, options) == position);
    counts_.found += position > 0;
    counts_.early += position > 0 && position < match;
    counts_.by_state += position > 0 && by_state;
  }
  [[nodiscard]] const ResumeCounts& counts() const { return counts_; }

 private:
  struct Message {
    chunkattn::CacheEvent event;
    std::vector<int> tokens;
  };
  struct Followed {
    std::uint64_t id;
    std::int32_t reach;
  };
  [[nodiscard]] static const Layers* find(std::uint64_t id, const Groups& groups) {
    for (const Layers* group : groups)
      if (chunkattn::detail::WindowAccess::id(*group) == id) return group;
    return nullptr;
  }
  void connect(const Groups& groups) {
    if (random_.chance(0.5)) events_.reset();
    if (random_.chance(0.7)) {
      states_.reset();
      states_.emplace(tree_, typename chunkattn::Checkpoints<Tree>::Options{1 + random_.index(30),
                                                                            random_.uniform(1, 6)});
    }
    with_states_ = states_ && random_.chance(0.5);
    followed_.clear();
    Groups some;
    for (const Layers* group : groups)
      if (random_.chance(0.8)) some.push_back(group);
    for (const Layers* group : some)
      followed_.push_back(
          {chunkattn::detail::WindowAccess::id(*group), group->options().window - 1});
    switch (some.size()) {
      case 0:
        return connect_to();
      case 1:
        return connect_to(*some[0]);
      case 2:
        return connect_to(*some[0], *some[1]);
      default:
        return connect_to(*some[0], *some[1], *some[2]);
    }
  }
  template <class... Components>
  void connect_to(const Components&... components) {
    if (with_states_)
      start(components..., *states_);
    else
      start(components...);
  }
  template <class... Components>
  void start(const Components&... components) {
    using Events = chunkattn::CacheEvents<Tree>;
    Events events(
        tree_,
        [this](const chunkattn::CacheEvent& event, std::span<const int> tokens) {
          sent_.push_back({event, {tokens.begin(), tokens.end()}});
        },
        Events::new_stream(), components...);
    if (events_)
      *events_ = std::move(events);
    else
      events_.emplace(std::move(events));
    sent_.clear();
    mirror_.load(events_->snapshot());
  }

  Tree& tree_;
  Random random_;
  std::deque<Message> sent_;
  std::optional<chunkattn::Checkpoints<Tree>> states_;
  std::optional<chunkattn::CacheEvents<Tree>> events_;
  Mirror mirror_;
  std::vector<Followed> followed_;  ///< groups; the checkpoints come last
  bool with_states_ = false;        ///< even when they have ended
  ResumeCounts counts_;
};

}  // namespace test
