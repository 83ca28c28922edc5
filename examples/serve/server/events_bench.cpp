// What publishing costs: 256 sequences decode, and whenever one ends another joins. Steps that only
// decode are timed, and everything that publishing does beside them.
#include <fmt/format.h>
#include <time.h>

#include <algorithm>
#include <chunkattn/chunkattn.hpp>
#include <cstdio>
#include <exception>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "../../support/options.hpp"
#include "engine/engine.hpp"
#include "model/load.hpp"
#include "server/kv_publisher.hpp"

namespace {

using namespace serve;

struct Arguments {
  std::string random, address = "15557";
  int sequences = 256, prompt = 256, shared = 128, generated = 128, steps = 200, seed = 1;
};

double seconds_of(clockid_t clock) {
  timespec time{};
  ::clock_gettime(clock, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2),
                   values.end());
  return values[values.size() / 2];
}

/// A 15th of the smallest model that people run: decode steps are short.
Config small_shape() {
  Config config;
  config.dim = 288;
  config.hidden_dim = 768;
  config.num_layers = 6;
  config.num_qo_heads = 6;
  config.num_kv_heads = 6;
  config.vocab_size = 4096;
  config.max_positions = 1024;
  return config;
}

/// Requests of groups that share the first part of their prompts.
class Load {
 public:
  Load(const Arguments& arguments, int vocabulary)
      : arguments_(arguments),
        vocabulary_(vocabulary),
        random_(static_cast<std::uint64_t>(arguments.seed)) {}

  void submit(Engine& engine, int tokens) {
    Request request;
    request.id = ++last_id_;
    const int group = draw(16);
    for (int i = 0; i < arguments_.prompt; ++i)
      request.prompt.push_back(i < arguments_.shared ? (group * 131 + i * 7) % vocabulary_
                                                     : draw(vocabulary_));
    request.max_length = request.prompt.size() + static_cast<std::size_t>(tokens);
    engine.submit(std::move(request));
  }
  int draw(int below) { return std::uniform_int_distribution<int>(0, below - 1)(random_); }

 private:
  const Arguments& arguments_;
  int vocabulary_;
  std::mt19937_64 random_;
  RequestId last_id_ = 0;
};

struct Cost {
  std::vector<double> decode;  ///< processor seconds of steps that only decode
  double engine_thread = 0;    ///< processor seconds of add() and flush(), of all steps
  double own_thread = 0;       ///< of the publisher's
  int steps = 0;
  std::uint64_t events = 0;
};

Cost measure(const Arguments& arguments, const Model& model, Products& products,
             KvPublisher* publisher) {
  EngineOptions options;
  options.step_tokens = 2048;
  // What lives, and a little cache that is evicted all the time.
  const int tokens = arguments.prompt + arguments.generated;
  options.max_chunks = static_cast<std::size_t>(arguments.sequences * (tokens / 64 + 2) + 64);
  const auto engine = make_engine(model, products, options);
  Cost cost;
  if (publisher != nullptr)
    engine->set_cache_sink([&](const chunkattn::CacheEvent& event, std::span<const int> stored) {
      const double start = seconds_of(CLOCK_THREAD_CPUTIME_ID);
      publisher->add(event, stored);
      cost.engine_thread += seconds_of(CLOCK_THREAD_CPUTIME_ID) - start;
      ++cost.events;
    });
  Load load(arguments, model.config.vocab_size);
  for (int i = 0; i < arguments.sequences; ++i)
    load.submit(*engine, 1 + load.draw(arguments.generated));
  const auto whole = static_cast<std::size_t>(arguments.sequences);
  bool warm = false;
  double own_before = 0;
  for (int now = 0; cost.steps < arguments.steps; ++now) {
    const std::size_t rows = engine->stats().rows;
    const double start = seconds_of(CLOCK_PROCESS_CPUTIME_ID);
    engine->step(now);
    const double decoded = seconds_of(CLOCK_PROCESS_CPUTIME_ID) - start;
    if (!warm && engine->stats().rows - rows == whole) {
      warm = true;
      cost.events = 0;
      cost.engine_thread = 0;
      own_before = publisher != nullptr ? publisher->thread_seconds() : 0;
    }
    if (warm) {
      ++cost.steps;
      if (engine->stats().rows - rows == whole) cost.decode.push_back(decoded);
    }
    if (publisher != nullptr) {
      const double before = seconds_of(CLOCK_THREAD_CPUTIME_ID);
      publisher->flush();
      if (warm) cost.engine_thread += seconds_of(CLOCK_THREAD_CPUTIME_ID) - before;
    }
    for (const Event& event : engine->take_events())
      if (event.finish != Finish::none) load.submit(*engine, arguments.generated);
  }
  if (publisher != nullptr) cost.own_thread = publisher->thread_seconds() - own_before;
  return cost;
}

void report(const Arguments& arguments) {
  chunkattn::ThreadPool executor(0);
  Products products(executor, built_with_onednn ? ProductKind::onednn : ProductKind::own);
  const Config shape = arguments.random.empty() ? small_shape() : read_shape(arguments.random);
  const Model model = random_model(shape, Element::fp32, 1, executor);
  const Cost without = measure(arguments, model, products, nullptr);
  KvPublisher publisher(publisher_addresses(arguments.address));
  const Cost with = measure(arguments, model, products, &publisher);
  const double step = median(without.decode), beside = median(with.decode);
  const double beside = (with.engine_thread + with.own_thread) / with.steps;
  fmt::print("{} sequences, {} steps, {:.1f} events each; processor time\n", arguments.sequences,
             with.steps, static_cast<double>(with.events) / with.steps);
  fmt::print("a step that decodes             {:9.1f} us\n", 1e6 * step);
  fmt::print("the same beside publishing      {:9.1f} us, {:+.2f} %\n", 1e6 * beside,
             100 * (beside / step - 1));
  fmt::print("publishing, on engine's thread  {:9.1f} us a step\n",
             1e6 * with.engine_thread / with.steps);
  fmt::print("publishing, on its own thread   {:9.1f} us a step\n",
             1e6 * with.own_thread / with.steps);
  fmt::print("publishing in all               {:9.1f} us a step, {:.2f} % of one that decodes\n",
             1e6 * beside, 100 * beside / step);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    Arguments a;
    examples::Options options("serve_events_bench", "what it costs to publish what is cached");
    options.text("--random", "SHAPE", "of the model, as in serve; else one of 7 million weights",
                 a.random);
    options.text("--kv-events", "ADDRESS", "to publish at", a.address);
    options.number("--sequences", "N", "at once", a.sequences, 1, 1 << 12);
    options.number("--prompt", "N", "tokens of a prompt", a.prompt, 1, 1 << 16);
    options.number("--shared", "N", "of these, shared by a sixteenth", a.shared, 0, 1 << 16);
    options.number("--generated", "N", "tokens of a text", a.generated, 1, 1 << 16);
    options.number("--steps", "N", "to measure", a.steps, 1, 1 << 20);
    options.number("--seed", "N", "of lengths and tokens", a.seed, 0, 1 << 30);
    if (!options.parse(argc, argv)) return 0;
    report(a);
    return 0;
  } catch (const std::exception& error) {
    fmt::print(stderr, "{}\n", error.what());
    return 1;
  }
}
