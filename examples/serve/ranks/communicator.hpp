// Communicator: collectives of the processes that run one model together. They are numbered: ranks.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>

namespace serve {

/// Each member is called by all ranks in the same order, with sizes that agree; whoever is early
/// waits. One thread of a rank calls at a time.
class Communicator {
 public:
  virtual ~Communicator() = default;
  [[nodiscard]] virtual int rank() const = 0;  ///< 0 decides, the others follow
  [[nodiscard]] virtual int size() const = 0;

  /// The bytes of all become those of rank 0.
  virtual void broadcast(std::span<std::byte> bytes) = 0;

  /// The values of all become their sums over the ranks, each added in the order of the ranks by
  /// one of them: all get the same bits, always.
  virtual void sum(std::span<float> values) = 0;

  /// Rank 0's `all` becomes the values of rank 0, of rank 1 and so on.
  /// \param all  [size()][values.size()]; not touched on other ranks
  virtual void gather(std::span<const float> values, std::span<float> all) = 0;
};

/// A process by itself.
class Alone final : public Communicator {
 public:
  [[nodiscard]] int rank() const override { return 0; }
  [[nodiscard]] int size() const override { return 1; }
  void broadcast(std::span<std::byte>) override {}
  void sum(std::span<float>) override {}
  void gather(std::span<const float> values, std::span<float> all) override {
    std::copy(values.begin(), values.end(), all.begin());
  }
};

[[nodiscard]] inline Communicator& alone() {
  static Alone one;  // it has no state
  return one;
}

/// What `rank` has of `count` things in a row that are dealt out as evenly as they can be.
struct Share {
  std::size_t begin, end;
  [[nodiscard]] std::size_t size() const { return end - begin; }
};
[[nodiscard]] constexpr Share share_of(std::size_t count, int rank, int size) {
  const auto r = static_cast<std::size_t>(rank), n = static_cast<std::size_t>(size);
  return {count * r / n, count * (r + 1) / n};
}

}  // namespace serve
