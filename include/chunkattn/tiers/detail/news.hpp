// Events of tiers: which blocks came into which one, and which are no longer there. Stores say so
// on any thread; who asked hears of it on the tree's.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "../../detail/support/config.hpp"
#include "../../tree_options.hpp"
#include "../tier_store.hpp"

CHUNKATTN_NAMESPACE_BEGIN
namespace detail {

struct TierKeyHash {
  std::size_t operator()(const TierStore::Key& key) const noexcept {
    return static_cast<std::size_t>(key.high ^ (key.low >> 7));
  }
};

/// A block of tokens by itself: where it stands, and whose it is.
struct TierBlock {
  Namespace name_space{};
  std::int32_t position = 0;
  std::int32_t public_length = 0;  ///< leading tokens of the prompt that are public, if this is not
  std::vector<std::byte> tokens;
};

/// What happened to a block.
enum class TierChange : std::uint8_t { stored, evicted, cleared, named };

/// Blocks that are in tiers or on their way, with all that they continue, and changes of which
/// nobody has heard yet. Blocks that it was never told of (others' in the same store) are none of
/// its business. The mutex is the innermost of all.
class TierNews {
 public:
  using Key = TierStore::Key;

  /// While it lives, the block is known, so that it can be told what becomes of it.
  class Hold {
   public:
    Hold() = default;
    Hold(Hold&& other) noexcept
        : news_(std::move(other.news_)), key_(other.key_), age_(other.age_) {}
    Hold& operator=(Hold&& other) noexcept {
      std::swap(news_, other.news_);
      std::swap(key_, other.key_);
      std::swap(age_, other.age_);
      return *this;
    }
    ~Hold() {
      if (news_) news_->release(key_, age_);
    }

   private:
    friend class TierNews;
    Hold(std::shared_ptr<TierNews> news, const Key& key, std::uint64_t age) noexcept
        : news_(std::move(news)), key_(key), age_(age) {}
    std::shared_ptr<TierNews> news_;
    Key key_{};
    std::uint64_t age_ = 0;
  };

  /// What one call of a store says of a block by its result. That counts unless the store, or
  /// another call, said something of the block meanwhile: it is not known which came last.
  class Watch {
   public:
    Watch(TierNews* news, std::size_t tier, const Key& key) : news_(news), tier_(tier), key_(key) {
      if (news_ == nullptr) return;
      const std::lock_guard lock(news_->mutex_);
      next_ = std::exchange(news_->watches_, this);
    }
    Watch(const Watch&) = delete;
    Watch& operator=(const Watch&) = delete;
    ~Watch() {
      if (news_ == nullptr) return;
      const std::lock_guard lock(news_->mutex_);
      Watch** at = &news_->watches_;
      while (*at != this) at = &(*at)->next_;
      *at = next_;
    }
    void saw(bool is_there) noexcept {
      if (news_ == nullptr) return;
      const std::lock_guard lock(news_->mutex_);
      if (!changed_) news_->change(tier_, key_, is_there, this);
    }

   private:
    friend class TierNews;
    TierNews* news_;
    std::size_t tier_;
    Key key_;
    bool changed_ = false;
    Watch* next_ = nullptr;
  };

  /// Who hears one store.
  class Listener final : public TierStore::Listener {
   public:
    Listener(std::shared_ptr<TierNews> news, std::size_t tier)
        : news_(std::move(news)), tier_(tier) {}
    void changed(const Key& key, bool is_there) noexcept override {
      const std::lock_guard lock(news_->mutex_);
      news_->change(tier_, key, is_there, nullptr);
    }

   private:
    std::shared_ptr<TierNews> news_;
    std::size_t tier_;
  };

  /// Block number `last` of a path and all before it are known from now on.
  /// \param key_at, block_at  of each of them
  template <class KeyAt, class BlockAt>
  static Hold announce(const std::shared_ptr<TierNews>& news, std::size_t last, const KeyAt& key_at,
                       const BlockAt& block_at) {
    const std::lock_guard lock(news->mutex_);
    std::size_t first = last + 1;
    while (first > 0 && !news->nodes_.contains(key_at(first - 1))) --first;
    struct Guard {
      TierNews& news;
      Key key{};
      bool done = true;
      ~Guard() {
        if (!done) news.prune(key);
      }
    } guard{*news};
    Key parent = first > 0 ? key_at(first - 1) : Key{};
    for (std::size_t i = first; i <= last; ++i) {
      const Key key = key_at(i);
      news->nodes_.emplace(key, Node{block_at(i), parent});
      if (i > 0) ++news->nodes_.at(parent).children;
      guard.key = parent = key;
      guard.done = false;
    }
    guard.done = true;
    ++news->nodes_.at(parent).holds;
    return Hold(news, parent, news->age_);
  }
  /// One more of a block that is known.
  static Hold hold(const std::shared_ptr<TierNews>& news, const Key& key) {
    if (!news) return {};
    const std::lock_guard lock(news->mutex_);
    const auto found = news->nodes_.find(key);
    if (found == news->nodes_.end()) return {};
    ++found->second.holds;
    return Hold(news, key, news->age_);
  }
  /// Nothing that was there can be found any more.
  void reset() noexcept {
    const std::lock_guard lock(mutex_);
    ++age_;
    nodes_.clear();
    pending_.clear();
    begins_anew_ = has_news_ = true;
  }

  /// Calls f(change, tier, key, parent, block) for each change since the last call, in order; a
  /// block has its tokens unless it was evicted. Blocks that others continue are named before these
  /// if they are in no tier.
  template <class F>
  void deliver(const F& f) {
    if (!has_news_) return;
    for (std::vector<Told> told;;) {
      {
        const std::lock_guard lock(mutex_);
        if (begins_anew_) {
          begin_anew();
          told = {{}};
        } else if (pending_.empty()) {
          has_news_ = false;
          return;
        } else {
          told = take();
        }
      }
      for (const Told& one : told) f(one.change, one.tier, one.key, one.parent, one.block);
    }
  }
  /// The same for all that was told and still holds, as if it happened now.
  template <class F>
  void list(const F& f) const {
    std::vector<Told> told;
    {
      const std::lock_guard lock(mutex_);
      for (const auto& [key, node] : nodes_) {
        if (!node.is_told()) continue;
        if (node.told == 0) told.push_back(told_of(TierChange::named, 0, key, node));
        for (std::size_t tier = 0; tier < most_tiers; ++tier)
          if ((node.told >> tier & 1) != 0)
            told.push_back(told_of(TierChange::stored, tier, key, node));
      }
    }
    std::stable_sort(told.begin(), told.end(), [](const Told& a, const Told& b) {
      return a.block.position < b.block.position;
    });
    for (const Told& one : told) f(one.change, one.tier, one.key, one.parent, one.block);
  }

  static constexpr std::size_t most_tiers = 64;

 private:
  struct Node {
    TierBlock block;
    Key parent{};
    std::uint32_t holds = 0, children = 0;
    std::uint64_t tiers = 0;          // where it is
    std::uint64_t told = 0;           // where it is said to be
    std::uint32_t told_children = 0;  // that those who hear know of
    [[nodiscard]] bool is_told() const noexcept { return told != 0 || told_children > 0; }
  };
  struct Pending {
    Key key{};
    std::size_t tier = 0;
    bool is_there = false;
  };
  struct Told {
    TierChange change = TierChange::cleared;
    std::size_t tier = 0;
    Key key{}, parent{};
    TierBlock block{};
  };

  // All of these: \pre mutex_ is held

  void change(std::size_t tier, const Key& key, bool is_there, const Watch* by) noexcept {
    for (Watch* watch = watches_; watch != nullptr; watch = watch->next_)
      if (watch != by && watch->tier_ == tier && watch->key_ == key) watch->changed_ = true;
    const auto found = nodes_.find(key);
    if (found == nodes_.end()) return;
    Node& node = found->second;
    const std::uint64_t bit = std::uint64_t{1} << tier;
    if (((node.tiers & bit) != 0) == is_there) return;
    node.tiers ^= bit;
    has_news_ = true;
    if (!begins_anew_ && (pending_.size() == most_pending || !push({key, tier, is_there})))
      begins_anew_ = true;
    else if (!begins_anew_)
      ++node.holds;
    prune(key);
  }
  bool push(const Pending& pending) noexcept {
#if CHUNKATTN_EXCEPTIONS
    try {
      pending_.push_back(pending);
    } catch (...) {
      return false;
    }
#else
    pending_.push_back(pending);
#endif
    return true;
  }
  /// Too much has happened to be told one by one: what holds now is told instead.
  void begin_anew() {
    std::vector<Pending> all;
    std::vector<Key> idle;
    for (const auto& [key, node] : nodes_) {
      if (node.tiers == 0 && node.holds == 0 && node.children == 0) idle.push_back(key);
      for (std::size_t tier = 0; tier < most_tiers; ++tier)
        if ((node.tiers >> tier & 1) != 0) all.push_back({key, tier, true});
    }
    std::stable_sort(all.begin(), all.end(), [this](const Pending& a, const Pending& b) {
      return nodes_.at(a.key).block.position < nodes_.at(b.key).block.position;
    });
    std::deque<Pending> old(all.begin(), all.end());
    old.swap(pending_);
    for (auto& [key, node] : nodes_) node.told = node.told_children = 0;
    for (const Pending& pending : pending_) ++nodes_.at(pending.key).holds;
    for (const Pending& pending : old) release_one(pending.key);
    for (const Key& key : idle) prune(key);
    begins_anew_ = false;
  }
  std::vector<Told> take() {
    const Pending pending = pending_.front();
    Node& node = nodes_.at(pending.key);
    std::vector<Told> told;
    std::vector<std::pair<const Key, Node>*> named;
    if (pending.is_there) {
      for (const Node* at = &node; !at->is_told() && at->block.position > 0;) {
        auto& parent = *nodes_.find(at->parent);
        if (!parent.second.is_told()) named.push_back(&parent);
        at = &parent.second;
      }
      for (auto one = named.rbegin(); one != named.rend(); ++one)
        told.push_back(told_of(TierChange::named, 0, (*one)->first, (*one)->second));
      told.push_back(told_of(TierChange::stored, pending.tier, pending.key, node));
    } else {
      told.push_back({TierChange::evicted,
                      pending.tier,
                      pending.key,
                      node.parent,
                      {node.block.name_space, node.block.position, node.block.public_length, {}}});
    }
    // From here on nothing fails.
    const bool was_told = node.is_told();
    node.told ^= std::uint64_t{1} << pending.tier;
    if (was_told != node.is_told()) count_told(node, !was_told);
    pending_.pop_front();
    release_one(pending.key);
    return told;
  }
  /// Those who hear begin, or cease, to know a node: so they do what it continues, unless that is
  /// known by itself.
  void count_told(const Node& node, bool begins) noexcept {
    for (const Node* at = &node; at->block.position > 0;) {
      Node& parent = nodes_.find(at->parent)->second;
      const bool was_told = parent.is_told();
      begins ? ++parent.told_children : --parent.told_children;
      if (was_told == parent.is_told()) return;
      at = &parent;
    }
  }
  [[nodiscard]] static Told told_of(TierChange change, std::size_t tier, const Key& key,
                                    const Node& node) {
    return {change, tier, key, node.parent, node.block};
  }
  void release(const Key& key, std::uint64_t age) noexcept {
    const std::lock_guard lock(mutex_);
    if (age == age_) release_one(key);
  }
  void release_one(const Key& key) noexcept {
    --nodes_.find(key)->second.holds;
    prune(key);
  }
  /// Forgets what is nowhere and on no way, and what was known for its sake only.
  void prune(Key key) noexcept {
    for (auto at = nodes_.find(key); at != nodes_.end();) {
      const Node& node = at->second;
      if (node.holds > 0 || node.children > 0 || node.tiers != 0 || node.told != 0) return;
      const bool is_first = node.block.position == 0;
      key = node.parent;
      nodes_.erase(at);
      if (is_first) return;
      at = nodes_.find(key);
      --at->second.children;
    }
  }

  static constexpr std::size_t most_pending = std::size_t{1} << 18;

  mutable std::mutex mutex_;
  std::unordered_map<Key, Node, TierKeyHash> nodes_;
  std::deque<Pending> pending_;
  Watch* watches_ = nullptr;  // calls of stores that are going on
  std::uint64_t age_ = 0;
  bool begins_anew_ = false;
  std::atomic<bool> has_news_ = false;
};

}  // namespace detail
CHUNKATTN_NAMESPACE_END
