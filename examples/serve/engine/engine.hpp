// Continuous batching: requests join while others decode, all live ones advance together, and each
// leaves when it is done. One step is one forward pass over whatever rows it has: a token of each
// sequence that decodes, and parts of prompts as far as the budget of tokens goes.
#pragma once

#include <chunkattn/chunkattn.hpp>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "../model/model.hpp"
#include "../model/products.hpp"
#include "attention.hpp"

namespace serve {

using RequestId = std::uint64_t;

struct Request {
  RequestId id = 0;
  std::vector<int> prompt;     ///< at least one token
  std::size_t max_length = 0;  ///< tokens at most, the prompt's included
};

/// What became of a request.
struct Completion {
  RequestId id = 0;
  std::vector<int> tokens;   ///< prompt and generated ones, without the one that ended the text
  std::size_t computed = 0;  ///< of the prompt, through the model; the rest was cached
  int joined = 0, left = 0;  ///< steps
};

struct EngineOptions {
  int chunk_size = 64;                                     ///< 8, 16, 32 or 64 tokens
  chunkattn::Sharing sharing = chunkattn::Sharing::token;  ///< exact to the token, or whole chunks
  chunkattn::Reduce reduce = chunkattn::Reduce::deterministic;
  KvType kv = KvType::fp32;
  std::size_t max_chunks = 1024;  ///< of K/V; what has left stays as cache while there is room
  std::size_t step_tokens = 512;  ///< tokens of a step, beside one for each that decodes
  std::vector<int> stop;          ///< tokens that end a text
  /// Attention in fp16 on a GPU, with the CPU's beside it: it gets the same tokens, and its logits
  /// are what the GPU's are held against.
  bool on_gpu = false;
};

struct EngineStats {
  int steps = 0;
  std::size_t rows = 0;            ///< tokens that went through the model
  std::size_t peak_sequences = 0;  ///< live in one step
  int preemptions = 0;
  std::size_t recomputed = 0;  ///< tokens of those that were preempted
  std::uint64_t plan_rebuilds = 0;
  // In the step where requests by themselves would have held most chunks:
  std::size_t unshared_chunks = 0;  ///< these
  std::size_t chunks = 0;           ///< that were in use
  std::size_t unshared_tokens = 0;  ///< of all live sequences, each counted by itself
  // On a GPU:
  std::size_t compared_logits = 0;  ///< with the CPU's
  double largest_difference = 0;    ///< among them
};

class Engine {
 public:
  virtual ~Engine() = default;
  /// Takes a request; it joins in the next step that has room for it.
  /// \throws std::invalid_argument for what can never run: names the field
  virtual void submit(Request request) = 0;
  /// One step. False where nothing was left to do.
  virtual bool step() = 0;
  /// Those that have ended since the last call.
  [[nodiscard]] virtual std::vector<Completion> take_completions() = 0;
  [[nodiscard]] virtual const EngineStats& stats() const = 0;
  [[nodiscard]] virtual std::size_t bytes_per_chunk() const = 0;
};

/// \throws std::invalid_argument for options that no engine is built for
[[nodiscard]] std::unique_ptr<Engine> make_engine(const Model& model, Products& products,
                                                  const EngineOptions& options);

}  // namespace serve
