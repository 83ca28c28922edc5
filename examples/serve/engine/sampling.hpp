// Choosing a token from logits. Random numbers are a function of (seed, choice, position), with no
// state: a sequence that was preempted, or that runs in other company, draws the same ones.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "engine.hpp"

namespace serve {

/// Uniform in [0, 1), a multiple of 2^-53.
[[nodiscard]] double uniform_number(std::uint64_t seed, int choice, std::size_t position);

/// Samples; keeps its memory from one call to the next.
class Sampler {
 public:
  /// A token of `logits` [vocab_size].
  /// \param choice    of the request
  /// \param position  that the token will have in its sequence
  [[nodiscard]] int sample(std::span<const float> logits, const Sampling& sampling, int choice,
                           std::size_t position);

 private:
  /// Orders the most likely tokens first, as far as their weights sum up to `wanted`. Returns how
  /// many these are, and their sum.
  struct Kept {
    std::size_t count;
    double sum;
  };
  Kept keep_most_likely(double wanted);

  struct Candidate {
    double weight;
    int token;
  };
  std::vector<Candidate> candidates_;
};

/// \throws std::invalid_argument that names the field
void check_sampling(const Sampling& sampling);

}  // namespace serve
