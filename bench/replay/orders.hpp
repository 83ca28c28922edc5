// Orders in which waiting requests are admitted.
#pragma once

#include <chunkattn/cache/admission.hpp>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <limits>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "trace.hpp"

namespace replay {

/// Requests that wait, by their indices in the workload, and those that run.
class Order {
 public:
  Order() = default;
  Order(const Order&) = delete;
  Order& operator=(const Order&) = delete;
  virtual ~Order() = default;
  virtual void arrives(std::size_t request) = 0;
  /// The one to be tried next; there is one.
  virtual std::size_t next() = 0;
  /// The last answer of next() is admitted.
  virtual void admitted(std::size_t request) = 0;
  virtual void ended(std::size_t) {}
  [[nodiscard]] virtual std::size_t size() const = 0;
};

/// First come, first served.
class Fcfs final : public Order {
 public:
  void arrives(std::size_t request) override { waiting_.push_back(request); }
  std::size_t next() override { return waiting_.front(); }
  void admitted(std::size_t) override { waiting_.pop_front(); }
  [[nodiscard]] std::size_t size() const override { return waiting_.size(); }

 private:
  std::deque<std::size_t> waiting_;
};

/// The longest prefix in common with any that runs, whatever others wait for it; of equal ones the
/// oldest. Knows nothing of the tree: prefixes are found by hashes of every 8 tokens. What an order
/// with nothing else in mind reaches.
class Greedy final : public Order {
 public:
  explicit Greedy(std::span<const Request> requests) : prefixes_(requests.size()) {
    for (std::size_t r = 0; r < requests.size(); ++r) {
      std::uint64_t hash = 0;
      const auto& prompt = requests[r].prompt;
      for (std::size_t i = 0; i < prompt.size(); ++i) {
        hash = (hash ^ prompt[i]) * 0x9e3779b97f4a7c15u;
        hash ^= hash >> 29;
        if ((i + 1) % unit == 0) prefixes_[r].push_back(hash);
      }
    }
  }
  void arrives(std::size_t request) override { waiting_.push_back(request); }
  std::size_t next() override {
    std::size_t best = 0, longest = 0;
    for (std::size_t i = 0; i < waiting_.size(); ++i) {
      const std::size_t shared = shared_with_running(prefixes_[waiting_[i]]);
      if (i > 0 && shared <= longest) continue;
      best = i;
      longest = shared;
    }
    at_ = best;
    return waiting_[best];
  }
  void admitted(std::size_t request) override {
    waiting_.erase(waiting_.begin() + static_cast<std::ptrdiff_t>(at_));
    for (const std::uint64_t prefix : prefixes_[request]) ++running_[prefix];
  }
  void ended(std::size_t request) override {
    for (const std::uint64_t prefix : prefixes_[request]) {
      const auto at = running_.find(prefix);
      if (--at->second == 0) running_.erase(at);
    }
  }
  [[nodiscard]] std::size_t size() const override { return waiting_.size(); }

 private:
  static constexpr std::size_t unit = 8;

  [[nodiscard]] std::size_t shared_with_running(const std::vector<std::uint64_t>& prefixes) const {
    std::size_t low = 0, high = prefixes.size();
    while (low < high) {  // a prefix is there if a longer one is
      const std::size_t middle = (low + high + 1) / 2;
      if (running_.contains(prefixes[middle - 1]))
        low = middle;
      else
        high = middle - 1;
    }
    return low;
  }

  std::vector<std::vector<std::uint64_t>> prefixes_;
  std::unordered_map<std::uint64_t, int> running_;
  std::vector<std::size_t> waiting_;
  std::size_t at_ = 0;
};

/// What the library has for engines without a policy: AdmissionQueue::rank() and next().
template <class Tree>
class Cache final : public Order {
 public:
  Cache(const Tree& tree, std::span<const Request> requests) : tree_(tree), requests_(requests) {}
  void arrives(std::size_t request) override {
    (void)waiting_.push({requests_[request].prompt});
    order_.push_back(request);
  }
  std::size_t next() override {
    waiting_.rank(tree_);
    id_ = waiting_.next()->id;
    return order_[id_ - 1];
  }
  void admitted(std::size_t) override { waiting_.admitted(id_); }
  [[nodiscard]] std::size_t size() const override { return waiting_.size(); }

 private:
  const Tree& tree_;
  std::span<const Request> requests_;
  chunkattn::AdmissionQueue<Tree> waiting_;
  std::vector<std::size_t> order_;  // requests by id
  std::uint64_t id_ = 0;
};

}  // namespace replay
