// Policies of caches for objects, made for trees of blocks: only leaves go. Of blocks alone, not in
// the library's tree; to see what they would find.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <list>
#include <set>
#include <utility>
#include <vector>

namespace replay {

/// What all have in common: how many children of a block are cached, and who is in use.
class BlockCache {
 public:
  explicit BlockCache(const std::vector<int>& parents)
      : parents_(parents),
        cached_(parents.size()),
        children_(parents.size()),
        busy_(parents.size()) {}
  [[nodiscard]] bool has(int b) const { return cached_[std::size_t(b)] != 0; }
  [[nodiscard]] std::size_t size() const { return size_; }
  void set_busy(const std::vector<int>& path, bool busy) {
    for (const int b : path) busy_[std::size_t(b)] = busy ? 1 : 0;
  }

 protected:
  [[nodiscard]] bool may_go(int b) const {
    return children_[std::size_t(b)] == 0 && busy_[std::size_t(b)] == 0;
  }
  void enter(int b) { count(b, 1); }
  void leave(int b) { count(b, -1); }

 private:
  void count(int b, int by) {
    cached_[std::size_t(b)] = by > 0 ? 1 : 0;
    size_ += static_cast<std::size_t>(by);
    if (const int p = parents_[std::size_t(b)]; p >= 0) children_[std::size_t(p)] += by;
  }
  const std::vector<int>& parents_;
  std::vector<char> cached_;
  std::vector<int> children_;
  std::vector<char> busy_;
  std::size_t size_ = 0;
};

/// SIEVE: a queue by arrival and a hand that goes from its old end to its young one, evicts what
/// was not used since it was there last, and passes over what is no leaf.
class Sieve : public BlockCache {
 public:
  Sieve(const std::vector<int>& parents, std::size_t)
      : BlockCache(parents), used_(parents.size()), hand_(queue_.end()) {}
  void use(int b, std::size_t) { used_[std::size_t(b)] = 1; }
  void add(int b, std::size_t) {
    enter(b);
    queue_.push_back(b);
    used_[std::size_t(b)] = 0;
  }
  void evict() {
    for (;; ++hand_) {
      if (hand_ == queue_.end()) hand_ = queue_.begin();
      if (!may_go(*hand_)) continue;
      if (std::exchange(used_[std::size_t(*hand_)], 0) != 0) continue;
      leave(*hand_);
      hand_ = queue_.erase(hand_);
      return;
    }
  }

 private:
  std::list<int> queue_;  // oldest first
  std::vector<char> used_;
  std::list<int>::iterator hand_;
};

/// S3-FIFO: what is new passes through a tenth of the slots; what was used there, or was evicted
/// from there lately, gets into the main queue, where each use gives it another round.
class S3Fifo : public BlockCache {
 public:
  S3Fifo(const std::vector<int>& parents, std::size_t capacity)
      : BlockCache(parents),
        uses_(parents.size()),
        is_ghost_(parents.size()),
        capacity_(capacity) {}
  void use(int b, std::size_t) {
    uses_[std::size_t(b)] = static_cast<char>(std::min(3, uses_[std::size_t(b)] + 1));
  }
  void add(int b, std::size_t) {
    enter(b);
    uses_[std::size_t(b)] = 0;
    (is_ghost_[std::size_t(b)] != 0 ? main_ : small_).push_back(b);
  }
  void evict() {
    for (;;) {
      const bool from_small = small_.size() * 10 >= capacity_ || main_.empty();
      std::deque<int>& queue = from_small ? small_ : main_;
      const int b = queue.front();
      queue.pop_front();
      char& uses = uses_[std::size_t(b)];
      if (!may_go(b) || uses > 0) {
        if (!from_small && uses > 0) --uses;
        main_.push_back(b);
        continue;
      }
      leave(b);
      if (from_small) remember(b);
      return;
    }
  }

 private:
  void remember(int b) {
    is_ghost_[std::size_t(b)] = 1;
    ghosts_.push_back(b);
    if (ghosts_.size() <= capacity_) return;
    is_ghost_[std::size_t(ghosts_.front())] = 0;
    ghosts_.pop_front();
  }
  std::deque<int> small_, main_, ghosts_;
  std::vector<char> uses_, is_ghost_;
  std::size_t capacity_;
};

/// GDSF: least uses times cost goes first, above a floor that rises to what was evicted last. The
/// cost of a block grows with its position, as recomputing it does: one more for every 64 blocks.
class Gdsf : public BlockCache {
 public:
  Gdsf(const std::vector<int>& parents, std::size_t)
      : BlockCache(parents), uses_(parents.size()), value_(parents.size()) {}
  void use(int b, std::size_t depth) {
    order_.erase({value_[std::size_t(b)], b});
    ++uses_[std::size_t(b)];
    put(b, depth);
  }
  void add(int b, std::size_t depth) {
    enter(b);
    uses_[std::size_t(b)] = 1;
    put(b, depth);
  }
  void evict() {
    auto at = order_.begin();
    while (!may_go(at->second)) ++at;
    floor_ = std::max(floor_, at->first);
    leave(at->second);
    order_.erase(at);
  }

 private:
  void put(int b, std::size_t depth) {
    value_[std::size_t(b)] = floor_ + uses_[std::size_t(b)] * (1 + double(depth) / 64);
    order_.emplace(value_[std::size_t(b)], b);
  }
  std::vector<int> uses_;
  std::vector<double> value_;
  std::set<std::pair<double, int>> order_;
  double floor_ = 0;
};

/// Blocks that a cache of so many finds.
template <class Cache>
std::size_t block_hits(const std::vector<std::vector<int>>& paths, const std::vector<int>& parents,
                       std::size_t capacity) {
  Cache cache(parents, capacity);
  std::size_t hits = 0;
  for (const auto& path : paths) {
    cache.set_busy(path, true);
    for (std::size_t depth = 0; depth < path.size(); ++depth) {
      if (cache.has(path[depth])) {
        ++hits;
        cache.use(path[depth], depth);
        continue;
      }
      if (cache.size() == capacity) cache.evict();
      cache.add(path[depth], depth);
    }
    cache.set_busy(path, false);
  }
  return hits;
}

}  // namespace replay
