// TierLog: which blocks came into which tier, and which are no longer there, as events in an order
// that subscribers can apply. Tiers report changes on any thread; they are delivered on the
// engine's.
#pragma once

#include <algorithm>
#include <atomic>
#include <chunkattn/tiers/tiers.hpp>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "engine.hpp"

namespace serve {

/// Keeps blocks that are in tiers or on their way, with all that come before them on their paths,
/// and changes that were not delivered yet. Blocks that were never expected (others' in the same
/// store) are none of its business.
class TierLog final : public std::enable_shared_from_this<TierLog> {
 public:
  using Key = chunkattn::TierStore::Key;

  /// \param media  what each tier is, fastest first
  explicit TierLog(std::vector<TierEvent::Medium> media) : media_(std::move(media)) {}

  // As those of chunkattn::Tiers::Observer.

  template <class BlockAt>
  [[nodiscard]] std::shared_ptr<void> expect(std::size_t num_blocks, const BlockAt& block_at) {
    auto hold = std::make_shared<Hold>();  // before anything has changed
    const std::lock_guard lock(mutex_);
    std::vector<std::pair<Key, Node>> added;  // the last one first
    Key parent{};
    for (std::size_t i = num_blocks; i-- > 0;) {
      auto block = block_at(i);
      if (nodes_.contains(block.key)) {
        parent = block.key;
        break;
      }
      added.push_back({block.key, {block.name_space, block.position, std::move(block.tokens)}});
    }
    try {
      for (; !added.empty(); added.pop_back()) {
        auto& [key, node] = added.back();
        node.parent = parent;
        const bool is_first = node.position == 0;
        nodes_.emplace(key, std::move(node));
        if (!is_first) ++nodes_.at(parent).children;
        parent = key;
      }
    } catch (...) {
      prune(parent);
      throw;
    }
    ++nodes_.at(parent).holds;
    hold->key = parent;
    hold->generation = generation_;
    hold->log = shared_from_this();
    return hold;
  }
  void changed(std::size_t tier, const Key& key, bool is_stored) noexcept {
    const std::lock_guard lock(mutex_);
    const auto found = nodes_.find(key);
    if (found == nodes_.end()) return;
    Node& node = found->second;
    const unsigned bit = 1u << tier;
    if (((node.tiers & bit) != 0) == is_stored) return;
    node.tiers ^= bit;
    has_changes_ = true;
    if (!is_rebuilt_ && (pending_.size() == most_pending || !push({key, tier, is_stored})))
      is_rebuilt_ = true;
    else if (!is_rebuilt_)
      ++node.holds;
    prune(key);
  }
  void cleared() noexcept {
    const std::lock_guard lock(mutex_);
    ++generation_;
    nodes_.clear();
    pending_.clear();
    is_rebuilt_ = has_changes_ = true;
  }

  /// Publishes each change since the last call, in order. A block's parent is published before it:
  /// as named, if it is in no tier.
  void deliver(const TierSink& sink) {
    if (!has_changes_) return;
    for (std::vector<Published> events;;) {
      {
        const std::lock_guard lock(mutex_);
        if (is_rebuilt_) {
          rebuild();
          events.assign(1, {});
        } else if (pending_.empty()) {
          has_changes_ = false;
          return;
        } else {
          events = take();
        }
      }
      if (sink)
        for (const Published& one : events) sink(one.event, one.tokens);
    }
  }

 private:
  struct Node {
    chunkattn::Namespace name_space{};
    std::int32_t position = 0;
    std::vector<int> tokens;
    Key parent{};
    std::uint32_t holds = 0, children = 0;
    unsigned tiers = 0;                    // where it is: a bit for each
    unsigned published = 0;                // where it is said to be
    std::uint32_t published_children = 0;  // that subscribers know of
    [[nodiscard]] bool is_published() const noexcept {
      return published != 0 || published_children > 0;
    }
  };
  /// While it lives, a block is known, so that what becomes of it can be published.
  struct Hold {
    Hold() = default;
    Hold(const Hold&) = delete;
    Hold& operator=(const Hold&) = delete;
    ~Hold() {
      if (log) log->release(*this);
    }
    std::shared_ptr<TierLog> log;
    Key key{};
    std::uint64_t generation = 0;
  };
  struct Pending {
    Key key{};
    std::size_t tier = 0;
    bool is_stored = false;
  };
  struct Published {
    TierEvent event{};
    std::vector<int> tokens{};
  };
  struct KeyHash {
    std::size_t operator()(const Key& key) const noexcept {
      return static_cast<std::size_t>(key.high ^ (key.low >> 7));
    }
  };

  // All of these but release(): \pre mutex_ is held

  bool push(const Pending& pending) noexcept {
    try {
      pending_.push_back(pending);
      return true;
    } catch (...) {
      return false;
    }
  }
  /// Too much has happened to be published one by one: what holds now is published instead.
  void rebuild() {
    std::vector<Pending> all;
    std::vector<Key> idle;
    for (const auto& [key, node] : nodes_) {
      if (node.tiers == 0 && node.holds == 0 && node.children == 0) idle.push_back(key);
      for (std::size_t tier = 0; tier < media_.size(); ++tier)
        if ((node.tiers >> tier & 1) != 0) all.push_back({key, tier, true});
    }
    std::stable_sort(all.begin(), all.end(), [this](const Pending& a, const Pending& b) {
      return nodes_.at(a.key).position < nodes_.at(b.key).position;
    });
    std::deque<Pending> old(all.begin(), all.end());
    old.swap(pending_);
    for (auto& [key, node] : nodes_) node.published = node.published_children = 0;
    for (const Pending& pending : pending_) ++nodes_.at(pending.key).holds;
    for (const Pending& pending : old) release_one(pending.key);
    for (const Key& key : idle) prune(key);
    is_rebuilt_ = false;
  }
  std::vector<Published> take() {
    const Pending pending = pending_.front();
    Node& node = nodes_.at(pending.key);
    std::vector<Published> events;
    if (pending.is_stored) {
      std::vector<Key> named;
      for (const Node* at = &node; !at->is_published() && at->position > 0;) {
        const Key key = at->parent;
        at = &nodes_.at(key);
        if (!at->is_published()) named.push_back(key);
      }
      for (; !named.empty(); named.pop_back())
        events.push_back(published(TierEvent::Kind::named, 0, named.back()));
      events.push_back(published(TierEvent::Kind::stored, pending.tier, pending.key));
    } else {
      events.push_back(published(TierEvent::Kind::evicted, pending.tier, pending.key));
    }
    // From here on nothing fails.
    const bool was_published = node.is_published();
    node.published ^= 1u << pending.tier;
    if (was_published != node.is_published()) count_published(node, !was_published);
    pending_.pop_front();
    release_one(pending.key);
    return events;
  }
  [[nodiscard]] Published published(TierEvent::Kind kind, std::size_t tier, const Key& key) const {
    const Node& node = nodes_.at(key);
    return {{media_[tier], kind, key, node.parent, node.name_space, node.position},
            kind == TierEvent::Kind::evicted ? std::vector<int>() : node.tokens};
  }
  /// Subscribers begin, or cease, to know a node, and with it its parent, unless they know that by
  /// itself.
  void count_published(const Node& node, bool begins) noexcept {
    for (const Node* at = &node; at->position > 0;) {
      Node& parent = nodes_.find(at->parent)->second;
      const bool was_published = parent.is_published();
      begins ? ++parent.published_children : --parent.published_children;
      if (was_published == parent.is_published()) return;
      at = &parent;
    }
  }
  void release(const Hold& hold) noexcept {
    const std::lock_guard lock(mutex_);
    if (hold.generation == generation_) release_one(hold.key);
  }
  void release_one(const Key& key) noexcept {
    --nodes_.find(key)->second.holds;
    prune(key);
  }
  /// Forgets what is in no tier and on no way, and what was known for its sake only.
  void prune(Key key) noexcept {
    for (auto at = nodes_.find(key); at != nodes_.end();) {
      const Node& node = at->second;
      if (node.holds > 0 || node.children > 0 || node.tiers != 0 || node.published != 0) return;
      const bool is_first = node.position == 0;
      key = node.parent;
      nodes_.erase(at);
      if (is_first) return;
      at = nodes_.find(key);
      --at->second.children;
    }
  }

  static constexpr std::size_t most_pending = std::size_t{1} << 18;

  const std::vector<TierEvent::Medium> media_;
  std::mutex mutex_;
  std::unordered_map<Key, Node, KeyHash> nodes_;
  std::deque<Pending> pending_;
  std::uint64_t generation_ = 0;  // of nodes
  bool is_rebuilt_ = false;       // by the next deliver()
  std::atomic<bool> has_changes_ = false;
};

/// Passes the log the changes of tiers of some type.
template <class Tiers>
class TierLogObserver final : public Tiers::Observer {
 public:
  explicit TierLogObserver(std::shared_ptr<TierLog> log) : log_(std::move(log)) {}
  std::shared_ptr<void> expect(std::size_t num_blocks,
                               const typename Tiers::Observer::BlockAt& block_at) override {
    return log_->expect(num_blocks, block_at);
  }
  void changed(std::size_t tier, const chunkattn::TierStore::Key& key,
               bool is_stored) noexcept override {
    log_->changed(tier, key, is_stored);
  }
  void cleared() noexcept override { log_->cleared(); }

 private:
  std::shared_ptr<TierLog> log_;
};

}  // namespace serve
