// Continuous batching: requests join while others decode, all live ones advance together, and each
// leaves when it is done. One step is one forward pass over whatever rows it has: a token of each
// sequence that decodes, and parts of prompts as far as `step_tokens` allows.
//
// What happens to a request is reported by events. The engine has no clock and no threads of its
// own: whoever calls step() says what time it is.
#pragma once

#include <array>
#include <chunkattn/cache/explain.hpp>
#include <chunkattn/chunkattn.hpp>
#include <chunkattn/events/cache_event.hpp>
#include <chunkattn/tiers/tier_store.hpp>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "../model/model.hpp"
#include "../model/products.hpp"
#include "attention.hpp"

namespace serve {

using RequestId = std::uint64_t;

/// How a token is chosen from logits.
struct Sampling {
  double temperature = 0;  ///< 0: the token of the greatest logit; at most 2
  double top_p = 1;        ///< only the most likely tokens, of this probability together; (0, 1]
  /// Choice i of a request draws from a stream of its own, by position. The same request with the
  /// same seed gets the same text; in batch-invariant mode whatever else runs.
  std::uint64_t seed = 0;
  int top_k = 0;     ///< only so many of the most likely tokens; 0: all
  double min_p = 0;  ///< only tokens of this part of the most likely one's probability; [0, 1]
  double frequency_penalty = 0;  ///< off a token's logit for each time it was generated; [-2, 2]
  double presence_penalty = 0;   ///< off it once if it was generated at all; [-2, 2]
  /// Divides a logit above 0, and multiplies one below, of each token of the prompt and of those
  /// generated; (0, 100]
  double repetition_penalty = 1;

  [[nodiscard]] bool has_penalties() const {
    return frequency_penalty != 0 || presence_penalty != 0 || repetition_penalty != 1;
  }
};

/// Added to the logit of a token.
struct LogitBias {
  int token = 0;
  float bias = 0;  ///< [-100, 100]
};

/// The logarithm of a token's probability, as the model has it: whatever Sampling says.
struct TokenLogprob {
  int token = 0;
  float logprob = 0;
};

inline constexpr int most_logprobs = 20;

struct Request {
  RequestId id = 0;              ///< of no other request that has not ended
  std::vector<int> prompt = {};  ///< at least one token
  std::size_t max_length = 0;    ///< tokens at most, the prompt's included
  int choices = 1;               ///< texts wanted, 1 to 128; they share the prompt
  Sampling sampling = {};
  std::vector<LogitBias> logit_bias = {};  ///< each token once
  std::vector<int> stop_tokens = {};       ///< that end a text, beside the model's
  bool ignore_eos = false;                 ///< the model's, EngineOptions::stop, end none
  std::size_t min_tokens = 0;  ///< generated of each choice before a token that ends one may come
  int logprobs = -1;           ///< of so many of the most likely tokens, 0 to 20; -1: of none
  /// Whether to report those of the prompt's tokens, too, which are computed for that; and that of
  /// the model's end token.
  bool prompt_logprobs = false;
  /// With prompt_logprobs: the first token whose are wanted, 1 to the prompt's size. The tokens
  /// before that one are found in the cache as those of other requests are.
  std::size_t scored_from = 1;
  std::vector<int> labels = {};  ///< tokens whose log-probabilities behind the prompt are wanted
  bool explains = false;         ///< whether Event::report is wanted
  std::uint64_t tenant = 0;      ///< shares K/V only with its own
  std::string salt = {};  ///< what the tenant is called by all servers that share a directory
  /// On the clock of step(); past it the request ends.
  double deadline = std::numeric_limits<double>::infinity();
  /// On the same clock; past it the request ends if nothing of it has run.
  double start_by = std::numeric_limits<double>::infinity();
};

enum class Finish {
  none,       ///< it continues
  stop,       ///< the model's end token, one of Request::stop_tokens, or Engine::stop()
  length,     ///< max_length, or where the model's positions end
  cancelled,  ///< Engine::cancel()
  deadline,   ///< Request::deadline has passed
  late        ///< Request::start_by has passed, and nothing of it has run
};

/// Why the tokens of a prompt were found in the cache, or were not, when it joined.
using CacheReport = chunkattn::CacheExplanation<std::int32_t>;
inline constexpr std::size_t num_cache_reasons = 10;

/// What happened to one choice of a request. Events stand in the order in which they happened; each
/// generated token has one, and each choice has exactly one with a finish, its last.
struct Event {
  RequestId id = 0;
  int choice = 0;
  int token = -1;                ///< a new token; -1: the choice ended without one
  Finish finish = Finish::none;  ///< not none: the last event of this choice
  std::size_t cached = 0;        ///< prompt tokens that were found in the cache, in first events
  /// Where Request::logprobs asks for it: the new token's, then those of the most likely ones, the
  /// greatest first.
  std::vector<TokenLogprob> logprobs = {};
  /// The same of the prompt's tokens from Request::scored_from on, in the first event of a request
  /// that asks for them.
  std::vector<std::vector<TokenLogprob>> prompt_logprobs = {};
  std::vector<float> labels = {};  ///< log-probabilities of Request::labels, in the first event
  /// In the first event of a request that wants it, if EngineOptions::explained_tokens is not 0.
  std::shared_ptr<const CacheReport> report = {};
  int stop_token = -1;  ///< of Request::stop_tokens, the one that ended the choice
};

/// How K/V is shared. The other two are what the tree is to be compared with.
enum class Mode {
  tree,         ///< prompts share K/V and its reading: one prefix tree, chunk-first attention
  paged,        ///< nothing is shared; attention reads the pages of each sequence by itself
  paged_prefix  ///< full pages are shared and not computed again, and read by each sequence itself
};

/// What happens to the K/V of a sequence that is preempted.
enum class Preempt {
  recompute,  ///< it is computed again where the cache has lost it
  swap        ///< what no other sequence has is copied to host memory and back, if it fits there
};

/// Which of the requests that wait joins next. Those that were preempted go before.
enum class Order {
  fcfs,  ///< the one that came first
  cache  ///< the one that shares most with those that run; none is overtaken too often
};

/// Where K/V goes that is evicted, and comes back from.
struct TierOptions {
  enum class Stored { as_it_is, int8, e4m3 };
  std::size_t memory_bytes = 0;       ///< of host memory; 0: none
  std::string directory;              ///< of files, which servers may share; empty: none
  std::uint64_t directory_bytes = 0;  ///< of all files
  std::string model;                  ///< what K/V is computed with
  Stored stored = Stored::as_it_is;
  bool published = false;  ///< whether Engine::set_tier_sink() gets events
};

/// A change of what a tier holds. A tier may lose a block and keep one that extends it: so that
/// each has its parent known, one that is in no tier is named first.
struct TierEvent {
  enum class Medium : std::uint8_t { memory, files };
  enum class Kind : std::uint8_t {
    stored,   ///< the block came into the tier
    evicted,  ///< it left the tier
    cleared,  ///< nothing of before holds any more; what does follows
    named     ///< it is in no tier; forgotten when nothing that extends it is in any
  };
  Medium medium = Medium::memory;
  Kind kind = Kind::cleared;
  chunkattn::TierStore::Key block{}, parent{};
  chunkattn::Namespace name_space{};
  std::int32_t position = 0;
};

struct EngineOptions {
  int chunk_size = 64;  ///< 8, 16, 32 or 64 tokens
  chunkattn::TreeOptions::Sharing sharing =
      chunkattn::TreeOptions::Sharing::token;  ///< exact to the token, or whole chunks
  chunkattn::CpuOptions::Reduce reduce = chunkattn::CpuOptions::Reduce::deterministic;
  KvType kv = KvType::fp32;
  std::size_t max_chunks = 1024;  ///< of K/V; what has left stays as cache while there is memory
  /// Layers with a window have K/V in chunks of their own, which are free again when the window has
  /// moved on; with Mode::tree, on the CPU, and beside tiers if other layers have none. Else in
  /// those of all other layers.
  bool keeps_windows = false;
  std::size_t max_window_chunks = 0;  ///< of these; 0: as many as max_chunks
  std::size_t step_tokens = 512;      ///< tokens of a step, beside one for each that decodes
  /// Fewer of them where a step would take longer than about this, but as many as a product is
  /// worth: how long one stalls the others. Infinite: by step_tokens alone, whatever the clock
  /// says.
  double step_seconds = std::numeric_limits<double>::infinity();
  std::vector<int> stop;  ///< tokens that end a text
  /// Attention in fp16 on a GPU, with the CPU's beside it: it gets the same tokens, and its logits
  /// are what the GPU's are held against.
  bool on_gpu = false;
  Mode mode = Mode::tree;
  Preempt preempt = Preempt::recompute;
  Order order = Order::fcfs;
  std::size_t swap_bytes = std::size_t{1} << 30;                        ///< of host memory, at most
  std::size_t max_sequences = std::numeric_limits<std::size_t>::max();  ///< that are live at once
  /// Evicted tokens that are remembered, to say why prompts were not found; 0: nothing is said.
  std::size_t explained_tokens = 0;
  TierOptions tiers;
};

/// What went to tiers and came from there.
struct TierCounts {
  std::uint64_t loads = 0;           ///< sequences that something was looked for
  std::uint64_t loads_late = 0;      ///< of these, cancelled to compute instead
  std::uint64_t loaded_tokens = 0;   ///< that came back
  std::uint64_t loaded_blocks = 0;   ///< that tiers gave
  std::uint64_t refused_blocks = 0;  ///< that were damaged, or others
  std::uint64_t stored_blocks = 0;   ///< that the last tier took
  std::uint64_t stored_bytes = 0;
};

/// Counts since the engine was made.
struct EngineStats {
  int steps = 0;
  std::size_t rows = 0;              ///< tokens that went through the model
  std::size_t prompt_tokens = 0;     ///< of requests whose prompts are computed
  std::size_t cached_tokens = 0;     ///< of these, found in the cache
  std::size_t generated_tokens = 0;  ///< reported by events
  std::size_t scored_tokens = 0;     ///< of prompts, whose log-probabilities were wanted
  std::size_t recalled_tokens = 0;   ///< of these, known from earlier prompts
  /// Tokens of prompts that joined, by CacheReason, if EngineOptions::explained_tokens is not 0.
  std::array<std::uint64_t, num_cache_reasons> reasons{};
  std::size_t peak_sequences = 0;      ///< live in one step
  std::size_t peak_chunks = 0;         ///< in use in one step, cache not counted
  std::size_t peak_window_chunks = 0;  ///< of layers with a window, cached windows too
  std::uint64_t window_tokens = 0;     ///< found in the cache, and computed again for windows
  int preemptions = 0;
  int fruitless_preemptions = 0;    ///< the most of one sequence between two of its tokens
  int swaps = 0;                    ///< of these, with K/V copied to host memory
  int swaps_refused = 0;            ///< for want of host memory; computed again
  std::size_t swapped_tokens = 0;   ///< copied to host memory
  std::size_t restored_tokens = 0;  ///< copied back; the others were still cached, or discarded
  std::size_t recomputed = 0;  ///< tokens that were computed before their sequence was preempted
  std::uint64_t plan_rebuilds = 0;
  // In the step where live sequences had most tokens:
  std::size_t unshared_chunks = 0;  ///< that they would have held by themselves
  std::size_t chunks = 0;           ///< that were in use
  std::size_t window_chunks = 0;    ///< of layers with a window, cached windows too
  std::size_t unshared_tokens = 0;  ///< of all live sequences, each counted by itself
  std::size_t distinct_tokens = 0;  ///< of these, what is shared counted once
  TierCounts tiers;
  // On a GPU:
  std::size_t compared_logits = 0;  ///< with the CPU's
  double largest_difference = 0;    ///< among them
};

/// The tree at one moment, for a page that draws it.
struct TreeSnapshot {
  struct Node {
    int id = 0;
    int parent = 0;  ///< 0: a root
    std::size_t tokens = 0;
    std::size_t sequences = 0;  ///< that have it; 0: cached
    std::uint64_t tenant = 0;
    std::vector<int> first_tokens;  ///< 16 at most
  };
  /// Chunks of layers with a window.
  struct Windows {
    int keys = 0;                 ///< that a row sees; 0: there are no such chunks
    std::size_t chunk_bytes = 0;  ///< of K/V of these layers
    std::size_t chunks_used = 0, chunks_cached = 0, chunks_free = 0;
    std::uint64_t evicted_chunks = 0;  ///< so far
  };
  std::vector<Node> nodes;  ///< parents first
  std::size_t chunk_size = 0;
  std::size_t chunk_bytes = 0;    ///< of K/V of all layers, or of those without a window
  std::size_t chunks_used = 0;    ///< by live sequences
  std::size_t chunks_cached = 0;  ///< by nothing but cache
  std::size_t chunks_free = 0;
  std::uint64_t evicted_tokens = 0;  ///< so far
  bool has_tiers = false;            ///< see EngineStats::tiers
  Windows windows;
};

/// Chunks' worth of tokens at the start of prompts whose K/V is there, asked of the tree by
/// matching: what subscribers to its events must hold.
struct CachedChunk {
  int parent = -1;  ///< its index; -1: it stands first
  std::uint64_t tenant = 0;
  std::vector<int> tokens;
};

/// Gets the tree's events and the tokens of stored ones.
using CacheSink = std::function<void(const chunkattn::CacheEvent&, std::span<const int>)>;
/// Gets what is known of the tiers, and the tokens of a block that is stored or named.
using TierSink = std::function<void(const TierEvent&, std::span<const int>)>;

class Engine {
 public:
  virtual ~Engine() = default;
  /// Takes a request; it joins in the next step that has memory for it.
  /// \throws std::invalid_argument for what can never run: names the field, its value and what was
  ///         expected
  virtual void submit(Request request) = 0;
  /// Ends all choices of a request that have not ended. Unknown ids are ignored: it has ended.
  virtual void cancel(RequestId id) = 0;
  /// Ends one choice as if the model had: a stop string was found in its text.
  virtual void stop(RequestId id, int choice) = 0;
  /// One step. False where nothing was left to do.
  /// \param now  seconds on any clock that does not go back
  virtual bool step(double now) = 0;
  /// After step() has thrown: the requests that failed. With these cancelled, the engine continues;
  /// empty: it cannot.
  [[nodiscard]] virtual std::vector<RequestId> failed() const { return {}; }
  /// What has happened since the last call.
  [[nodiscard]] virtual std::vector<Event> take_events() = 0;
  /// Requests of which nothing has run so far.
  [[nodiscard]] virtual std::size_t waiting() const = 0;
  [[nodiscard]] virtual const EngineStats& stats() const = 0;
  [[nodiscard]] virtual TreeSnapshot snapshot() const = 0;
  [[nodiscard]] virtual std::size_t bytes_per_chunk() const = 0;
  [[nodiscard]] virtual std::size_t bytes_per_window_chunk() const { return 0; }
  /// The subscriber to what becomes cached and is evicted, called within calls of step(), cancel()
  /// and stop(). By default nothing is published.
  virtual void set_cache_sink(CacheSink) {}
  /// The subscriber to changes of tiers, called within step() if TierOptions::published.
  virtual void set_tier_sink(TierSink) {}
  /// Asked within step(), of requests: whether it is about to be cancelled. A step of no others is
  /// dropped.
  virtual void set_gone(std::function<bool(RequestId)>) {}
  /// All of them, parents first. Takes long: for tests.
  [[nodiscard]] virtual std::vector<CachedChunk> cached_chunks() const { return {}; }
};

/// Bytes of K and V that chunks of the tree take, and those of layers with a window.
[[nodiscard]] inline std::size_t kv_bytes_of(const Engine& engine, std::size_t chunks,
                                             std::size_t window_chunks) {
  return chunks * engine.bytes_per_chunk() + window_chunks * engine.bytes_per_window_chunk();
}

/// Whether K/V of a model's layers with a window has chunks of its own.
[[nodiscard]] bool has_window_chunks(const Config& config, const EngineOptions& options);
[[nodiscard]] std::size_t max_window_chunks(const EngineOptions& options);
/// Chunks that such layers need at least.
[[nodiscard]] std::size_t least_window_chunks(const Config& config, const EngineOptions& options);
/// Options::max_chunks and max_window_chunks.
struct WindowRoom {
  std::size_t chunks = 0, window_chunks = 0;
};
/// Both for memory of so many chunks of a layer, together: those of the options as they are, others
/// so that windows have a quarter of the tokens that the tree has, but two windows and a step.
[[nodiscard]] WindowRoom window_room(const Config& config, const EngineOptions& options,
                                     std::size_t layer_chunks);

/// \throws std::invalid_argument for options that no engine is built for
[[nodiscard]] std::unique_ptr<Engine> make_engine(const Model& model, Products& products,
                                                  const EngineOptions& options);

}  // namespace serve
