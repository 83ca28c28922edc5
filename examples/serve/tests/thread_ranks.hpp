// Ranks that are threads of one process, for tests.
#pragma once

#include <algorithm>
#include <barrier>
#include <cstddef>
#include <cstring>
#include <span>
#include <thread>
#include <vector>

#include "ranks/communicator.hpp"

namespace test {

class ThreadRank final : public serve::Communicator {
 public:
  /// What the ranks show each other.
  struct Shared {
    explicit Shared(int size)
        : barrier(size), values(static_cast<std::size_t>(size)), count(size) {}
    std::barrier<> barrier;
    std::vector<std::span<const float>> values;
    std::span<const std::byte> bytes;
    int count;
  };
  ThreadRank(Shared& shared, int rank) : shared_(shared), rank_(rank) {}

  [[nodiscard]] int rank() const override { return rank_; }
  [[nodiscard]] int size() const override { return shared_.count; }

  void broadcast(std::span<std::byte> bytes) override {
    if (rank_ == 0) shared_.bytes = bytes;
    shared_.barrier.arrive_and_wait();
    if (rank_ != 0 && !bytes.empty()) std::memcpy(bytes.data(), shared_.bytes.data(), bytes.size());
    shared_.barrier.arrive_and_wait();
  }
  void sum(std::span<float> values) override {
    show(values);
    std::vector<float> sums(values.size());
    for (std::size_t i = 0; i < sums.size(); ++i) {
      sums[i] = shared_.values[0][i];
      for (std::size_t r = 1; r < shared_.values.size(); ++r) sums[i] += shared_.values[r][i];
    }
    shared_.barrier.arrive_and_wait();  // all have read
    std::copy(sums.begin(), sums.end(), values.begin());
  }
  void gather(std::span<const float> values, std::span<float> all) override {
    show(values);
    if (rank_ == 0)
      for (std::size_t r = 0; r < shared_.values.size(); ++r)
        std::copy(shared_.values[r].begin(), shared_.values[r].end(),
                  all.subspan(r * values.size()).begin());
    shared_.barrier.arrive_and_wait();
  }

 private:
  void show(std::span<const float> values) {
    shared_.values[static_cast<std::size_t>(rank_)] = values;
    shared_.barrier.arrive_and_wait();
  }

  Shared& shared_;
  int rank_;
};

/// Calls body(ranks) on `size` threads. An exception ends the program: the others would wait.
template <class Body>
void run_ranks(int size, const Body& body) {
  ThreadRank::Shared shared(size);
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < size; ++rank)
    threads.emplace_back([&shared, &body, rank] {
      ThreadRank ranks(shared, rank);
      body(ranks);
    });
}

}  // namespace test
