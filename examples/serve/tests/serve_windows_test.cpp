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
  WindowedModel model(windowed_config(20, 3));
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
  CHECK_FALSE(has_pool());
  options.tiers = {};
  options.max_window_chunks = 3;
  CHECK_THROWS_WITH_AS((void)model.engine(options),
                       "max_window_chunks = 3: expected at least 4, what a window of 20 takes",
                       std::invalid_argument);
  options.max_window_chunks = 4;
  CHECK(has_pool());
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

TEST_CASE("memory is divided between all tokens and windows") {
  test::Random random(5);
  for (int round = 0; round < 300; ++round) {
    Config config = windowed_config(random.uniform(1, 300), random.uniform(0, 7));
    config.num_layers = random.uniform(1, 40);
    EngineOptions options;
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
    const std::size_t least = 2 * least_window_chunks(config, options);
    CHECK(room.chunks * others <= 4 * (room.window_chunks + 1) * others + windowed);
    CHECK((room.window_chunks >= least || room.window_chunks == all / to_size(config.num_layers)));
    options.max_chunks = 1000;
    const WindowRoom given = window_room(config, options, all);
    CHECK(given.chunks == 1000);
    CHECK(given.window_chunks >= 250);
    options.max_window_chunks = 77;
    CHECK(window_room(config, options, all).window_chunks == 77);
    CHECK(window_room(config, options, all).chunks == 1000);
  }
}
