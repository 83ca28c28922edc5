// A tier in memory whose calls hang when they are set to, until they are let go.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "chunkattn/tiers/tiers.hpp"

namespace test {

class HangingTier final : public chunkattn::TierStore {
 public:
  enum Call : std::uint32_t { puts = 1, gets = 2, questions = 4, erasures = 8, all = 15 };

  /// Which calls hang.
  std::atomic<std::uint32_t> hangs = 0;
  /// Whether they end when no load waits for them any longer; else only when they are let go.
  std::atomic<bool> listens = false;
  /// Whether it gives damaged records, which it then has to erase.
  std::atomic<bool> damages = false;
  std::atomic<int> num_gets = 0, num_hanging = 0;
  chunkattn::MemoryTier memory{std::size_t{1} << 30};

  ~HangingTier() override { hangs = 0; }

  bool put(const Key& key, const Record& record, const std::atomic<bool>& cancelled) override {
    return hang(puts, &cancelled) && memory.put(key, record, cancelled);
  }
  Record get(const Key& key, const std::atomic<bool>& cancelled) override {
    ++num_gets;
    if (!hang(gets, &cancelled)) return nullptr;
    if (damages) return std::make_shared<const std::vector<std::byte>>(5);
    return memory.get(key, cancelled);
  }
  bool contains(const Key& key) override { return hang(questions) && memory.contains(key); }
  void erase(const Key& key) override {
    if (hang(erasures)) memory.erase(key);
  }
  /// Until a call hangs.
  void wait_until_it_hangs() const {
    while (num_hanging == 0) std::this_thread::yield();
  }

 private:
  /// False if it was cancelled.
  bool hang(Call call, const std::atomic<bool>* cancelled = nullptr) {
    ++num_hanging;
    while ((hangs & call) != 0 && !(listens && cancelled != nullptr && *cancelled))
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    --num_hanging;
    return (hangs & call) == 0;
  }
};

}  // namespace test
