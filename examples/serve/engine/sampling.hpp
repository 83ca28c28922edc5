// Choosing a token from logits. Random numbers are a function of (seed, choice, position), with no
// state: a sequence that was preempted, or that runs in other company, draws the same ones.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "engine.hpp"

namespace serve {

/// Uniform in [0, 1), a multiple of 2^-53.
[[nodiscard]] double uniform_number(std::uint64_t seed, int choice, std::size_t position);

/// How often a choice has got each token, not counting its prompt.
using TokenCounts = std::map<int, int>;

/// What the logits of a choice's next token depend on beside its request.
struct SoFar {
  const TokenCounts& counts;            ///< where penalties ask for them
  std::span<const int> prompt = {};     ///< its tokens, each once; where repetition_penalty asks
  std::span<const int> too_early = {};  ///< tokens that may not come yet
};

/// Samples; keeps its memory from one call to the next.
class Sampler {
 public:
  /// A token of `logits` [vocab_size].
  /// \param choice    of the request
  /// \param position  that the token will have in its sequence
  [[nodiscard]] int sample(std::span<const float> logits, const Sampling& sampling, int choice,
                           std::size_t position);
  /// The logits with the biases and penalties of a request: what sample() is to be given. Valid
  /// until the next call.
  [[nodiscard]] std::span<const float> adjusted(std::span<const float> logits,
                                                const Request& request, const SoFar& so_far);

 private:
  /// How many of the candidates are left, and the sum of their weights.
  struct Kept {
    std::size_t count;
    double sum;
  };
  Kept keep_least(double weight);
  /// Orders the most likely of them first, as far as their weights sum up to `wanted`, and no more
  /// than `most` of them.
  Kept keep_most_likely(double wanted, std::size_t most);
  Kept narrowed(const Sampling& sampling, double sum);

  struct Candidate {
    double weight;
    int token;
  };
  std::vector<Candidate> candidates_;
  std::vector<float> adjusted_;
};

/// Log-probabilities of a token and of the `most` most likely ones, in this order; equal ones: the
/// first token first. \param logits  [vocab_size], before biases and penalties
[[nodiscard]] std::vector<TokenLogprob> logprobs_of(std::span<const float> logits, int token,
                                                    int most);

/// The log-probabilities of some tokens, likewise.
[[nodiscard]] std::vector<float> logprobs_of(std::span<const float> logits,
                                             std::span<const int> tokens);

/// Sorted, each once: as SoFar has the tokens of a prompt.
[[nodiscard]] std::vector<int> each_once(std::span<const int> tokens);

/// \throws std::invalid_argument that names the field
void check_sampling(const Sampling& sampling);

}  // namespace serve
