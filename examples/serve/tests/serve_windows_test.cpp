// K/V of layers with a window, which the engine gives back: how much it holds, what it computes
// again, and that texts are those of an engine that keeps it.
#include <doctest/doctest.h>

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "engine/engine.hpp"
#include "model/load.hpp"
#include "tests/support/random.hpp"

using namespace serve;

namespace {

constexpr int window_vocabulary = 60;

Config windowed_config(int window, int global_every) {
  Config config{32, 64, 3, 4, 2, window_vocabulary, 512, true, 1e-5f, 10000.0f};
  config.window = window;
  config.global_every = global_every;
  return config;
}

struct WindowedModel {
  chunkattn::ThreadPool pool{1};
  Model model;
  Products products{pool, ProductKind::own};

  explicit WindowedModel(const Config& config)
      : model(random_model(config, Element::fp32, 17, pool)) {}

  [[nodiscard]] EngineOptions options() const {
    EngineOptions options;
    options.chunk_size = 8;
    options.max_chunks = 200;
    options.reduce = chunkattn::CpuOptions::Reduce::batch_invariant;
    return options;
  }
  std::unique_ptr<Engine> engine(const EngineOptions& options) {
    return make_engine(model, products, options);
  }
};

std::vector<int> random_tokens(test::Random& random, std::size_t count) {
  std::vector<int> tokens(count);
  for (int& token : tokens) token = random.uniform(3, window_vocabulary - 1);
  return tokens;
}

/// Runs requests at once; tokens of each, choices one after the other.
std::vector<std::vector<int>> run_requests(Engine& engine, const std::vector<Request>& requests) {
  std::vector<std::vector<int>> texts;
  std::vector<std::size_t> first;
  for (const Request& request : requests) {
    first.push_back(texts.size());
    texts.resize(texts.size() + to_size(request.choices));
    engine.submit(request);
  }
  while (engine.step(0)) continue;
  for (const Event& event : engine.take_events())
    if (event.token >= 0)
      for (std::size_t i = 0; i < requests.size(); ++i)
        if (requests[i].id == event.id)
          texts[first[i] + to_size(event.choice)].push_back(event.token);
  return texts;
}

/// Tokens that requests take through the model, which is checked to say what one says that keeps
/// all K/V.
std::size_t rows_of(WindowedModel& model, Engine& engine, const std::vector<Request>& requests) {
  EngineOptions cold = model.options();
  cold.keeps_windows = true;
  const std::size_t before = engine.stats().rows;
  const auto texts = run_requests(engine, requests);
  CHECK(texts == run_requests(*model.engine(cold), requests));
  return engine.stats().rows - before;
}

}  // namespace

TEST_CASE("what a window has left behind is free again") {
  test::Random random(1);
  for (const int global_every : {3, 0}) {  // one layer sees all, or none does
    WindowedModel model(windowed_config(20, global_every));
    EngineOptions options = model.options();
    options.step_tokens = 16;
    const auto engine = model.engine(options);
    const std::vector<Request> one{{1, random_tokens(random, 200), 400}};
    CHECK(rows_of(model, *engine, one) == 399);
    const EngineStats& stats = engine->stats();
    CHECK(stats.peak_chunks == 50);
    CHECK(stats.peak_window_chunks <= 12);  // 20 tokens and a step of 16, and two windows kept
    CHECK(stats.window_chunks <= 8);
    CHECK(stats.window_chunks >= 6);
    CHECK(stats.peak_window_chunks > stats.window_chunks);
    CHECK(stats.window_tokens == 0);
    const TreeSnapshot shot = engine->snapshot();
    CHECK(shot.windows.keys == 20);
    CHECK(shot.windows.chunks_used == 0);
    CHECK(shot.windows.chunks_cached <= 8);  // before the prompt's last token, and before the last
    CHECK(shot.windows.chunks_cached >= 4);
    CHECK(engine->bytes_per_window_chunk() == (global_every == 0 ? 3u : 2u) * 8 * 2 * 2 * 8 * 4);
    CHECK(engine->bytes_per_chunk() == (global_every == 0 ? 0u : 1u) * 8 * 2 * 2 * 8 * 4);
  }
}

TEST_CASE("K/V of windows is kept where it cannot be given back, or is not to be") {
  WindowedModel model(windowed_config(17, 3));
  EngineOptions options = model.options();
  const auto has_pool = [&] { return model.engine(options)->bytes_per_window_chunk() > 0; };
  CHECK(has_pool());
  options.keeps_windows = true;
  CHECK_FALSE(has_pool());
  options.keeps_windows = false;
  options.mode = Mode::paged;
  CHECK_FALSE(has_pool());
  options.mode = Mode::tree;
  options.tiers.memory_bytes = 1 << 20;
  CHECK(has_pool());
  CHECK(WindowedModel(windowed_config(17, 0)).engine(options)->bytes_per_window_chunk() == 0);
  options.tiers = {};
  CHECK(model.engine(options)->snapshot().windows.chunks_free == options.max_chunks);
  options.max_window_chunks = 2;
  CHECK_THROWS_WITH_AS((void)model.engine(options),
                       "max_window_chunks = 2: expected at least 3, what a window of 17 takes",
                       std::invalid_argument);
  options.max_chunks = 2;  // no text is as long as the window
  CHECK(has_pool());
  options.max_chunks = 200;
  options.max_window_chunks = 3;
  CHECK(has_pool());
  CHECK(rows_of(model, *model.engine(options), {{1, std::vector<int>(60, 5), 90}}) == 89);
}

TEST_CASE(
    "texts that part at every position: the first computes it once, the next what is its own") {
  test::Random random(2);
  WindowedModel model(windowed_config(12, 3));
  const auto prompt = random_tokens(random, 48);
  const auto parted = [&](RequestId id, int at) {
    Request request{id, {prompt.begin(), prompt.begin() + at}, 56};
    for (const int token : random_tokens(random, 54 - to_size(at))) request.prompt.push_back(token);
    request.prompt[to_size(at)] = 3 + (prompt[to_size(at)] - 3 + static_cast<int>(id)) % 50;
    return request;
  };
  for (int at = 1 + random.uniform(0, 2); at < 48; at += 3) {
    CAPTURE(at);
    const auto engine = model.engine(model.options());
    CHECK(rows_of(model, *engine, {{1, prompt, 50}}) == 49);
    // Windows end where the first prompt and its text ended, and chunks begin at 32.
    const std::size_t own = 55 - to_size(at);
    CHECK(rows_of(model, *engine, {parted(2, at)}) == (at >= 43 ? own : 55));
    CHECK(rows_of(model, *engine, {parted(3, at)}) == own);
  }
}

TEST_CASE("of those that lack the same window one computes it") {
  test::Random random(3);
  WindowedModel model(windowed_config(12, 3));
  const auto shared = random_tokens(random, 100);
  const auto request = [&](RequestId id, int own) {
    Request one{id, shared, 112};
    for (int i = 0; i < 10; ++i) one.prompt.push_back(own);
    return one;
  };
  EngineOptions options = model.options();
  options.step_tokens = to_size(random.uniform(1, 60));
  const auto engine = model.engine(options);
  CHECK(rows_of(model, *engine, {request(1, 5)}) == 111);
  std::vector<Request> others;
  for (int i = 0; i < 5; ++i) others.push_back(request(to_size(2 + i), 10 + i));
  CHECK(rows_of(model, *engine, others) == 111 + 4 * 11);
  CHECK(engine->stats().window_tokens == 100);
  CHECK(rows_of(model, *engine, {request(9, 30)}) == 11);
}

TEST_CASE("nobody waits for what another one does not compute for it") {
  test::Random random(7);
  WindowedModel model(windowed_config(12, 3));
  EngineOptions options = model.options();
  options.step_tokens = 16;
  auto first = random_tokens(random, 80), second = random_tokens(random, 80);
  first[0] = 3, second[0] = 4;
  const auto engine = model.engine(options);
  (void)rows_of(model, *engine, {{1, first, 82}, {2, second, 82}});
  const auto parted = [](RequestId id, std::vector<int> prompt, int at, int own) {
    prompt.resize(to_size(at));
    prompt.insert(prompt.end(), to_size(own), static_cast<int>(5 + id));
    return Request{id, prompt, prompt.size() + 1};
  };
  const auto steps_of = [](Engine& of, const std::vector<Request>& requests) {
    for (const Request& request : requests) of.submit(request);
    int steps = 0;
    for (; of.step(0); ++steps) continue;
    CHECK(of.take_events().size() == requests.size());
    return steps;
  };
  // The second is in the last step of the first: it has its window, or got it where they part.
  CHECK(steps_of(*engine, {parted(3, first, 40, 30), parted(4, first, 80, 2)}) == 5);
  CHECK(steps_of(*engine, {parted(5, second, 50, 60), parted(6, second, 50, 2)}) == 7);
  // Two that have nothing in common are computed side by side, as far as steps allow.
  options.step_tokens = 512;
  const auto large = model.engine(options);
  (void)rows_of(model, *large, {{1, first, 82}, {2, second, 82}});
  CHECK(steps_of(*large, {parted(7, first, 60, 3), parted(8, second, 60, 3)}) == 1);
}

TEST_CASE("a prompt is computed in steps that its window's chunks have room for") {
  test::Random random(8);
  WindowedModel model(windowed_config(20, 3));
  EngineOptions options = model.options();
  options.max_window_chunks = 7;  // of which it holds 4
  const auto engine = model.engine(options);
  CHECK(rows_of(model, *engine, {{1, random_tokens(random, 160), 161}}) == 160);
  CHECK(engine->stats().preemptions == 0);
  CHECK(engine->stats().steps <= 160 / 8);
  CHECK(engine->stats().peak_window_chunks <= 7);
}

TEST_CASE("choices of a request go on from the window of its prompt") {
  test::Random random(4);
  for (const int global_every : {3, 0}) {
    WindowedModel model(windowed_config(12, global_every));
    const auto engine = model.engine(model.options());
    Request request{1, random_tokens(random, 30), 60, 4};
    request.sampling = {1.0, 1.0, 99};
    CHECK(rows_of(model, *engine, {request}) == 30 + 4 * 29);
    CHECK(engine->snapshot().windows.chunks_used == 0);
  }
}

TEST_CASE("prompts join as far as their windows have room, and none is preempted for another") {
  test::Random random(6);
  WindowedModel model(windowed_config(20, 3));
  EngineOptions options = model.options();
  options.max_window_chunks = 16;  // a window takes 4
  const auto engine = model.engine(options);
  std::vector<Request> requests;
  for (RequestId id = 1; id <= 6; ++id) {
    requests.push_back({id, random_tokens(random, 40), 60});
    requests.back().prompt[0] = 3 + static_cast<int>(id);  // they share nothing
  }
  CHECK(rows_of(model, *engine, requests) == 6 * 59);
  CHECK(engine->stats().preemptions == 0);
  CHECK(engine->stats().peak_sequences == 3);
  CHECK(engine->stats().peak_window_chunks == 16);
  CHECK(engine->snapshot().windows.evicted_chunks > 0);
}

TEST_CASE("the window of a sequence that is swapped comes back with it") {
  for (const int global_every : {3, 0}) {  // without a layer that sees all, nothing is swapped
    WindowedModel model(windowed_config(12, global_every));
    EngineOptions options = model.options();
    options.preempt = Preempt::swap;
    options.max_chunks = 14;  // two of 80 tokens take 20
    std::vector<Request> requests;
    for (int i = 0; i < 2; ++i) requests.push_back({to_size(i), std::vector<int>(32, 10 + i), 80});
    const auto swaps = model.engine(options);
    const std::size_t rows = rows_of(model, *swaps, requests);
    const EngineStats& stats = swaps->stats();
    CHECK(stats.preemptions == 1);
    CHECK(stats.swaps == (global_every == 0 ? 0 : 1));
    CHECK(stats.swaps_refused == 0);
    if (global_every == 0) continue;
    CHECK(rows == 2 * 79);
    CHECK(stats.recomputed == 0);
    CHECK(stats.window_tokens == 0);
    // K/V of all tokens in one layer, and of 11 in two.
    options.swap_bytes = (stats.swapped_tokens + 2 * 11) * 2 * 2 * 8 * 4;
    const auto fits = model.engine(options);
    CHECK(rows_of(model, *fits, requests) == rows);
    CHECK(fits->stats().swaps == 1);
    --options.swap_bytes;
    const auto refuses = model.engine(options);
    CHECK(rows_of(model, *refuses, requests) > rows);
    CHECK(refuses->stats().swaps_refused == 1);
  }
}

TEST_CASE("memory is divided between all tokens and windows") {
  test::Random random(5);
  for (int round = 0; round < 300; ++round) {
    Config config = windowed_config(random.uniform(1, 300), random.uniform(0, 7));
    config.num_layers = random.uniform(1, 40);
    EngineOptions options;
    options.chunk_size = 8;
    options.step_tokens = to_size(random.uniform(1, 512));
    options.max_chunks = 0;
    if (config.num_local() == 0) continue;
    const std::size_t windowed = to_size(config.num_local());
    const std::size_t others = to_size(config.num_layers) - windowed;
    const std::size_t all = to_size(random.uniform(3 * config.num_layers, 40000));
    const WindowRoom room = window_room(config, options, all);
    CAPTURE(config.window);
    CAPTURE(config.num_layers);
    CAPTURE(all);
    CHECK(room.chunks * others + room.window_chunks * windowed <= all);
    // Little is left, and no more tokens have windows than the tree has.
    CHECK((room.chunks + 1) * others + (room.window_chunks + 1) * windowed > all);
    CHECK(room.window_chunks <= room.chunks);
    const std::size_t least =
        2 * least_window_chunks(config, options) + options.step_tokens / 8 + 1;
    const std::size_t of_all = all / to_size(config.num_layers);
    CHECK(room.chunks * others <= 4 * (room.window_chunks + 1) * others + windowed);
    CHECK(room.window_chunks == std::max(all / (4 * others + windowed), std::min(least, of_all)));
    options.max_chunks = to_size(random.uniform(4, 1000));
    const WindowRoom given = window_room(config, options, all);
    CHECK(given.chunks == options.max_chunks);
    CHECK(given.window_chunks == std::max(given.chunks / 4, std::min(least, given.chunks)));
    options.max_window_chunks = 77;
    CHECK(window_room(config, options, all).window_chunks == 77);
    CHECK(window_room(config, options, all).chunks == given.chunks);
  }
}
