// An observer of tiers that remembers all calls.
#pragma once

#include <algorithm>
#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "chunkattn/tiers/tiers.hpp"

namespace test {

template <class Tiers>
class RecordingObserver final : public Tiers::Observer {
 public:
  using Key = chunkattn::TierStore::Key;
  using Block = typename Tiers::Block;

  std::shared_ptr<void> expect(std::size_t num_blocks,
                               const typename Tiers::Observer::BlockAt& block_at) override {
    const std::lock_guard lock(mutex_);
    path_lengths_.push_back(num_blocks);
    for (std::size_t i = num_blocks; i-- > 0;) {
      Block block = block_at(i);
      if (!blocks_.emplace(block.key.text(), std::move(block)).second) break;
    }
    const auto expected = std::make_shared<int>();
    std::erase_if(expected_, [](const auto& one) { return one.expired(); });
    expected_.push_back(expected);
    return expected;
  }
  void changed(std::size_t tier, const Key& key, bool is_stored) noexcept override {
    const std::lock_guard lock(mutex_);
    const std::pair entry(tier, key.text());
    if (is_stored)
      stored_.insert(entry);
    else
      num_lost_ += stored_.erase(entry);
  }
  void cleared() noexcept override {
    const std::lock_guard lock(mutex_);
    ++num_cleared_;
  }

  /// All that were expected, by their keys.
  [[nodiscard]] std::map<std::string, Block> blocks() const {
    const std::lock_guard lock(mutex_);
    return blocks_;
  }
  /// Whether it was expected.
  [[nodiscard]] bool knows(const Key& key) const {
    const std::lock_guard lock(mutex_);
    return blocks_.contains(key.text());
  }
  [[nodiscard]] bool has(std::size_t tier, const Key& key) const {
    const std::lock_guard lock(mutex_);
    return stored_.contains({tier, key.text()});
  }
  [[nodiscard]] std::size_t num_stored(std::size_t tier) const {
    const std::lock_guard lock(mutex_);
    return static_cast<std::size_t>(std::count_if(
        stored_.begin(), stored_.end(), [&](const auto& one) { return one.first == tier; }));
  }
  /// Paths whose last block is on its way.
  [[nodiscard]] std::size_t num_expected() const {
    const std::lock_guard lock(mutex_);
    return static_cast<std::size_t>(std::count_if(expected_.begin(), expected_.end(),
                                                  [](const auto& one) { return !one.expired(); }));
  }
  [[nodiscard]] std::size_t num_lost() const {
    const std::lock_guard lock(mutex_);
    return num_lost_;
  }
  [[nodiscard]] std::size_t num_cleared() const {
    const std::lock_guard lock(mutex_);
    return num_cleared_;
  }
  [[nodiscard]] std::vector<std::size_t> path_lengths() const {
    const std::lock_guard lock(mutex_);
    return path_lengths_;
  }

 private:
  mutable std::mutex mutex_;
  std::map<std::string, Block> blocks_;
  std::set<std::pair<std::size_t, std::string>> stored_;
  std::vector<std::weak_ptr<int>> expected_;
  std::vector<std::size_t> path_lengths_;
  std::size_t num_lost_ = 0, num_cleared_ = 0;
};

}  // namespace test
