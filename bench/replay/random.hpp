// Random numbers that are the same everywhere: the standard's distributions are not.
#pragma once

#include <cstddef>
#include <cstdint>

namespace replay {

/// splitmix64
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  std::uint64_t next() {
    std::uint64_t z = state_ += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  /// [0, 1)
  double uniform() { return double(next() >> 11) * 0x1p-53; }
  /// first to last, both included
  std::size_t between(std::size_t first, std::size_t last) {
    return first + static_cast<std::size_t>(next() % (last - first + 1));
  }

 private:
  std::uint64_t state_;
};

}  // namespace replay
