// Whether ranks that should do the same do the same.
#pragma once

#include <chunkattn/chunkattn.hpp>
#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "communicator.hpp"

namespace serve {

/// A number that stands for values in their order (FNV-1a over their bytes).
class Digest {
 public:
  template <class T>
    requires std::is_arithmetic_v<T>
  Digest& add(T value) {
    for (const std::byte byte : std::as_bytes(std::span(&value, 1)))
      value_ = (value_ ^ static_cast<std::uint64_t>(byte)) * 0x100000001b3u;
    return *this;
  }
  template <class T>
  Digest& add(const std::vector<T>& values) {
    for (const T value : values) add(value);
    return add(values.size());
  }
  [[nodiscard]] std::uint64_t value() const { return value_; }

 private:
  std::uint64_t value_ = 0xcbf29ce484222325u;
};

/// Called by all ranks with what they are about to do.
/// \param what  for the message: "the step"
/// \throws std::logic_error on a rank whose digest is not rank 0's
inline void check_agreement(Communicator& ranks, const char* what, const Digest& digest) {
  std::uint64_t expected = digest.value();
  ranks.broadcast(std::as_writable_bytes(std::span(&expected, 1)));
  if (digest.value() != expected)
    throw std::logic_error(std::string(what) + ": digest = " + std::to_string(digest.value()) +
                           ": expected rank 0's, " + std::to_string(expected));
}

/// All ranks build the same step over the same tree, or none continues.
inline void check_step(Communicator& ranks, const std::vector<int>& tokens,
                       const std::vector<int>& positions, const std::vector<int>& logit_rows,
                       const chunkattn::TreeStats& tree) {
  if (ranks.size() == 1) return;
  check_agreement(ranks, "step and tree",
                  Digest()
                      .add(tokens)
                      .add(positions)
                      .add(logit_rows)
                      .add(tree.used_chunks)
                      .add(tree.retained_chunks));
}

}  // namespace serve
