// The engine on a simulated clock: whatever joins, leaves, is cancelled or is preempted, each
// choice says what it says alone, ends once, and leaves nothing in use.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "engine/engine.hpp"
#include "model/load.hpp"
#include "tests/support/random.hpp"

using namespace serve;

namespace {

const Config tiny{32, 64, 2, 4, 2, 60, 128, true, 1e-5f, 10000.0f};
constexpr double forever = std::numeric_limits<double>::infinity();
const Mode all_modes[] = {Mode::tree, Mode::paged, Mode::paged_prefix};
const Preempt both_preempts[] = {Preempt::recompute, Preempt::swap};

struct Fixture {
  chunkattn::ThreadPool pool{2};
  Model model;
  Products products{pool, ProductKind::own};

  explicit Fixture(const Config& config = tiny)
      : model(random_model(config, Element::fp32, 11, pool)) {}

  [[nodiscard]] EngineOptions options(Mode mode = Mode::tree,
                                      Preempt preempt = Preempt::recompute) const {
    EngineOptions options;
    options.chunk_size = 8;
    options.reduce = chunkattn::CpuOptions::Reduce::batch_invariant;
    options.mode = mode;
    options.preempt = preempt;
    return options;
  }
  std::unique_ptr<Engine> engine(const EngineOptions& options) {
    return make_engine(model, products, options);
  }
};

/// What became of one choice.
struct Result {
  std::vector<int> tokens;
  Finish finish = Finish::none;
  std::size_t cached = 0;
  int events = 0;
};
using Key = std::pair<RequestId, int>;

/// Takes all events; checks what holds of any order of events.
void collect(Engine& engine, std::map<Key, Result>& results) {
  for (const Event& event : engine.take_events()) {
    Result& one = results[{event.id, event.choice}];
    CHECK(one.finish == Finish::none);  // nothing after the last
    CHECK((event.token >= 0 || event.finish != Finish::none));
    CHECK((one.events == 0 || event.cached == 0));
    ++one.events;
    one.cached += event.cached;
    if (event.token >= 0) one.tokens.push_back(event.token);
    one.finish = event.finish;
  }
}

std::map<Key, Result> run_to_end(Engine& engine) {
  std::map<Key, Result> results;
  while (engine.step(0)) collect(engine, results);
  collect(engine, results);
  return results;
}

void check_snapshot(const TreeSnapshot& shot, const EngineOptions& options) {
  CHECK(shot.chunks_used + shot.chunks_cached + shot.chunks_free == options.max_chunks);
  const TreeSnapshot::Windows& windows = shot.windows;
  CHECK(windows.chunks_used + windows.chunks_cached + windows.chunks_free ==
        (windows.keys > 0 ? max_window_chunks(options) : 0));
  std::map<int, std::uint64_t> tenants;
  for (const TreeSnapshot::Node& node : shot.nodes) {
    CHECK(node.tokens > 0);
    CHECK(node.first_tokens.size() == std::min<std::size_t>(node.tokens, 16));
    if (node.parent != 0) CHECK(tenants.at(node.parent) == node.tenant);
    tenants[node.id] = node.tenant;
  }
}

/// Nobody is there any more, and nothing is in use.
void check_empty(Engine& engine, const EngineOptions& options) {
  CHECK_FALSE(engine.step(1e9));
  CHECK(engine.take_events().empty());
  CHECK(engine.waiting() == 0);
  const TreeSnapshot shot = engine.snapshot();
  check_snapshot(shot, options);
  CHECK(shot.chunks_used == 0);
  CHECK(shot.windows.chunks_used == 0);
  if (options.mode == Mode::paged) CHECK(shot.chunks_cached == 0);
  for (const TreeSnapshot::Node& node : shot.nodes) CHECK(node.sequences == 0);
}

/// A request, and what its client does.
struct Client {
  Request request;
  double arrival = 0;
  double cancel = forever;
  std::optional<std::size_t> stop_after;  ///< tokens of each choice
};

std::vector<Client> random_clients(test::Random& random, int count) {
  std::vector<std::vector<int>> beginnings(2, std::vector<int>(24));
  for (auto& beginning : beginnings)
    for (int& token : beginning) token = random.uniform(3, 59);
  std::vector<Client> clients;
  for (int i = 0; i < count; ++i) {
    Client client;
    Request& request = client.request;
    request.id = to_size(i);
    request.tenant = to_size(random.uniform(0, 1));
    const auto& beginning = beginnings[random.index(2)];
    request.prompt.assign(beginning.begin(), beginning.begin() + random.uniform(0, 24));
    for (int n = random.uniform(1, 8); n > 0; --n) request.prompt.push_back(random.uniform(3, 59));
    request.max_length = request.prompt.size() + to_size(random.uniform(0, 24));
    request.choices = random.chance(0.5) ? 1 : random.uniform(2, 4);
    if (random.chance(0.6)) request.sampling = {1.5, random.chance(0.5) ? 1 : 0.9, random.bits()};
    client.arrival = random.uniform(0, 40);
    if (random.chance(0.2)) request.deadline = client.arrival + random.uniform(-1, 40);
    if (random.chance(0.2)) request.start_by = client.arrival + random.uniform(-1, 40);
    if (random.chance(0.2)) client.cancel = client.arrival + random.uniform(0, 30);
    if (random.chance(0.2)) client.stop_after = to_size(random.uniform(0, 10));
    clients.push_back(std::move(client));
  }
  return clients;
}

/// Runs all clients against one engine.
std::map<Key, Result> serve_all(Engine& engine, const EngineOptions& options,
                                const std::vector<Client>& clients) {
  std::map<Key, Result> results;
  double now = 0;
  for (bool worked = true, waits = true; worked || waits; ++now) {
    waits = false;
    for (const Client& client : clients) {
      if (client.arrival == now) engine.submit(client.request);
      if (client.cancel == now) engine.cancel(client.request.id);
      waits = waits || client.arrival > now;
    }
    engine.cancel(clients.size() + 7);  // unknown
    engine.stop(clients.size() + 7, 0);
    engine.stop(0, 99);
    worked = engine.step(now);
    check_snapshot(engine.snapshot(), options);
    collect(engine, results);
    for (const Client& client : clients)
      for (int choice = 0; client.stop_after && choice < client.request.choices; ++choice) {
        const auto found = results.find({client.request.id, choice});
        if (found != results.end() && found->second.tokens.size() >= *client.stop_after)
          engine.stop(client.request.id, choice);
      }
    collect(engine, results);
  }
  return results;
}

}  // namespace

TEST_CASE("in any company, each choice says what it says alone") {
  test::Random random(21);
  for (int round = 0; round < test::scaled(3); ++round) {
    Config config = tiny;
    if (round % 3 > 0) config.num_layers = 3, config.window = random.uniform(1, 40);
    if (round % 3 == 1) config.global_every = 2;
    CAPTURE(config.window);
    Fixture fixture(config);
    const auto clients = random_clients(random, 24);
    const std::vector<int> ends{random.uniform(3, 59)};
    std::map<Key, Result> alone;
    EngineOptions plenty = fixture.options();
    plenty.stop = ends;
    plenty.keeps_windows = true;
    for (const Client& client : clients) {
      const auto engine = fixture.engine(plenty);
      Request request = client.request;
      request.deadline = request.start_by = forever;
      engine->submit(request);
      for (auto& [key, results] : run_to_end(*engine)) alone[key] = std::move(results);
    }
    for (const Mode mode : all_modes)
      for (const Preempt preempt : both_preempts) {
        EngineOptions options = fixture.options(mode, preempt);
        options.stop = ends;
        options.max_chunks = to_size(random.uniform(9, 24));  // the longest alone needs 8
        options.step_tokens = to_size(random.uniform(1, 60));
        if (random.chance(0.3)) options.max_sequences = to_size(random.uniform(1, 8));
        if (random.chance(0.5)) options.swap_bytes = to_size(random.uniform(0, 20000));
        if (random.chance(0.3)) options.sharing = chunkattn::TreeOptions::Sharing::chunk;
        if (random.chance(0.5)) options.order = Order::cache;
        options.max_window_chunks = to_size(random.uniform(
            static_cast<int>(std::min(least_window_chunks(config, options), options.max_chunks)),
            static_cast<int>(options.max_chunks)));
        CAPTURE(options.max_chunks);
        CAPTURE(options.max_window_chunks);
        CAPTURE(static_cast<int>(mode));
        CAPTURE(static_cast<int>(preempt));
        const auto engine = fixture.engine(options);
        const auto results = serve_all(*engine, options, clients);
        check_empty(*engine, options);
        for (const Client& client : clients)
          for (int choice = 0; choice < client.request.choices; ++choice) {
            CAPTURE(client.request.id);
            CAPTURE(choice);
            REQUIRE(results.contains({client.request.id, choice}));
            const Result& one = results.at({client.request.id, choice});
            const Result& expected = alone.at({client.request.id, choice});
            CHECK(one.finish != Finish::none);
            REQUIRE(one.tokens.size() <= expected.tokens.size());
            CHECK(std::equal(one.tokens.begin(), one.tokens.end(), expected.tokens.begin()));
            CHECK((one.finish != Finish::deadline || client.request.deadline < forever));
            CHECK((one.finish != Finish::late || client.request.start_by < forever));
            CHECK((one.finish != Finish::late || one.tokens.empty()));
            CHECK((one.finish != Finish::cancelled || client.cancel < forever));
            const bool was_stopped = client.stop_after && one.finish == Finish::stop;
            if (one.finish == Finish::length || (one.finish == Finish::stop && !was_stopped)) {
              CHECK(one.finish == expected.finish);
              CHECK(one.tokens == expected.tokens);
            }
            if (mode == Mode::paged) CHECK(one.cached == 0);
            CHECK(one.cached < client.request.prompt.size());
          }
      }
  }
}

TEST_CASE("who shares with those that run joins before others that came earlier") {
  Fixture fixture;
  // Two groups, whose requests arrive in turn: a prompt of 40 tokens in common, 3 of their own.
  std::vector<Request> requests(16);
  for (int i = 0; i < 16; ++i) {
    Request& request = requests[to_size(i)];
    request.id = to_size(i);
    request.prompt.assign(40, 10 + i % 2);
    for (const int own : {20 + i, 1, 2}) request.prompt.push_back(own);
    request.max_length = 50;
  }
  std::map<Key, Result> results[2];
  std::size_t distinct[2];
  for (const Order order : {Order::fcfs, Order::cache}) {
    EngineOptions options = fixture.options();
    options.max_sequences = 4;
    options.order = order;
    const auto engine = fixture.engine(options);
    for (const Request& request : requests) engine->submit(request);
    const auto which = static_cast<std::size_t>(order);
    results[which] = run_to_end(*engine);
    distinct[which] = engine->stats().distinct_tokens;
    CHECK(engine->stats().peak_sequences == 4);
    CHECK(engine->stats().unshared_tokens >= 4 * 43);
  }
  CHECK(results[0].size() == 16);
  for (const auto& [key, one] : results[0]) CHECK(one.tokens == results[1].at(key).tokens);
  CHECK(distinct[0] >= 2 * 40 + 4 * 3);
  CHECK(distinct[1] < 40 + 4 * 10);
}

TEST_CASE("a sequence that is preempted is computed again, or copied out and back") {
  Fixture fixture;
  // Two of 16 and 32 more tokens: 6 chunks each, where there are 8. Both join; the second leaves
  // when both have 4, with 31 tokens computed, and the first takes 2 of its chunks: 16 are left.
  std::vector<Request> requests(2);
  for (int i = 0; i < 2; ++i) {
    requests[to_size(i)].id = to_size(i);
    requests[to_size(i)].prompt.assign(16, 10 + i);
    requests[to_size(i)].max_length = 48;
  }
  EngineOptions options = fixture.options();
  const auto expected = [&] {
    const auto engine = fixture.engine(options);
    for (const Request& request : requests) engine->submit(request);
    const auto results = run_to_end(*engine);
    CHECK(engine->stats().preemptions == 0);
    return results;
  }();
  options.max_chunks = 8;
  const auto run = [&](EngineStats& stats) {
    const auto engine = fixture.engine(options);
    for (const Request& request : requests) engine->submit(request);
    const auto results = run_to_end(*engine);
    check_empty(*engine, options);
    for (const auto& [key, one] : results) CHECK(one.tokens == expected.at(key).tokens);
    stats = engine->stats();
    CHECK(stats.preemptions == 1);
  };
  EngineStats recompute, swap, refused;
  run(recompute);
  CHECK(recompute.recomputed == 15);
  CHECK(recompute.swaps + recompute.swaps_refused == 0);
  options.preempt = Preempt::swap;
  run(swap);
  CHECK(swap.swaps == 1);
  CHECK(swap.swapped_tokens == 31);
  CHECK(swap.restored_tokens == 15);  // the rest was still cached
  CHECK(swap.recomputed == 0);
  CHECK(swap.rows + 15 == recompute.rows);
  options.swap_bytes = 1000;
  run(refused);
  CHECK(refused.swaps == 0);
  CHECK(refused.swaps_refused == 1);
  CHECK(refused.recomputed == 15);
}

TEST_CASE("swapping copies what is private, not what others have") {
  Fixture fixture;
  EngineOptions options = fixture.options(Mode::tree, Preempt::swap);
  options.max_chunks = 8;
  const auto engine = fixture.engine(options);
  for (int i = 0; i < 2; ++i) {
    Request request;
    request.id = to_size(i);
    request.prompt.assign(32, 9);
    request.prompt.push_back(20 + i);
    request.max_length = 56;
    engine->submit(request);
  }
  const auto results = run_to_end(*engine);  // 4 chunks in common, and 3 each
  CHECK(engine->stats().preemptions == 1);
  CHECK(engine->stats().swaps == 1);
  CHECK(engine->stats().swapped_tokens > 0);
  CHECK(engine->stats().swapped_tokens <= 24);
  CHECK(engine->stats().recomputed == 0);
  check_empty(*engine, options);
}

TEST_CASE("one whose path others have cut into too many chunks goes a way of its own") {
  Fixture fixture;
  const auto prompt_of = [](int tokens, int last) {
    std::vector<int> prompt;
    for (int i = 0; i < tokens; ++i) prompt.push_back(10 + i);
    prompt.push_back(last);
    return prompt;
  };
  Request request;
  request.prompt = prompt_of(23, 33);
  request.max_length = 48;  // 6 chunks
  const auto alone = fixture.engine(fixture.options());
  alone->submit(request);
  const auto expected = run_to_end(*alone).at({0, 0}).tokens;
  for (const Preempt preempt : both_preempts) {
    EngineOptions options = fixture.options(Mode::tree, preempt);
    options.max_chunks = 8;
    const auto engine = fixture.engine(options);
    for (int tokens = 3; tokens <= 23; tokens += 4) {  // each parts in the chunk of the one before
      Request cuts;
      cuts.prompt = prompt_of(tokens, 9);
      cuts.max_length = cuts.prompt.size();
      engine->submit(cuts);
      (void)run_to_end(*engine);
    }
    // It takes the 6 chunks of the others and 2 of its own, where 39 tokens end: no ninth is there.
    const std::size_t before = engine->stats().rows;
    engine->submit(request);
    const auto results = run_to_end(*engine);
    CHECK(results.at({0, 0}).cached == 23);
    CHECK(results.at({0, 0}).tokens == expected);
    const bool is_swapped = preempt == Preempt::swap;
    const EngineStats& stats = engine->stats();
    CHECK(stats.swaps == (is_swapped ? 1 : 0));
    CHECK(stats.restored_tokens == (is_swapped ? 38 : 0));
    CHECK(stats.recomputed == (is_swapped ? 0 : 38));
    CHECK(stats.rows - before == 24 + stats.recomputed);
    check_empty(*engine, options);
  }
}

TEST_CASE("sixty requests at once get all their tokens from ten chunks") {
  test::Random random(5);
  Fixture fixture({32, 64, 1, 4, 2, 60, 1024, true, 1e-5f, 10000.0f});
  std::vector<Request> requests(60);
  std::size_t tokens = 0;
  for (std::size_t i = 0; i < requests.size(); ++i) {
    Request& request = requests[i];
    request.id = i;
    for (int n = random.uniform(1, 500); n > 0; --n)
      request.prompt.push_back(random.uniform(3, 59));
    request.max_length = to_size(random.uniform(static_cast<int>(request.prompt.size()) + 1, 576));
    tokens += request.max_length - request.prompt.size();
  }
  for (const Preempt preempt : both_preempts) {
    EngineOptions options = fixture.options(Mode::tree, preempt);
    options.chunk_size = 64;
    options.max_chunks = 10;
    const auto engine = fixture.engine(options);
    for (const Request& request : requests) engine->submit(request);
    for (const auto& [key, one] : run_to_end(*engine)) CHECK(one.finish == Finish::length);
    const EngineStats& stats = engine->stats();
    CHECK(stats.generated_tokens == tokens);
    CHECK(stats.preemptions > 0);
    CHECK(stats.fruitless_preemptions <= 2);
    CHECK(stats.recomputed * 4 <= (preempt == Preempt::swap ? 0 : stats.rows));
    check_empty(*engine, options);
  }
}

TEST_CASE("one that was preempted twice is preempted again only when it has got a token") {
  test::Random random(3);
  Fixture fixture;
  for (int round = 0; round < test::scaled(1); ++round) {
    std::vector<Request> requests(60);
    std::size_t tokens = 0;
    for (std::size_t i = 0; i < requests.size(); ++i) {
      Request& request = requests[i];
      request.id = i;
      for (int n = random.chance(0.3) ? random.uniform(20, 100) : random.uniform(1, 8); n > 0; --n)
        request.prompt.push_back(random.uniform(3, 59));
      request.max_length = std::min<std::size_t>(
          request.prompt.size() + to_size(random.uniform(1, 100)), tiny.max_positions);
      request.choices = random.uniform(1, 4);
      request.sampling = {1, 1, i};
      tokens += to_size(request.choices) * (request.max_length - request.prompt.size());
    }
    for (const Mode mode : all_modes)
      for (const Preempt preempt : both_preempts) {
        EngineOptions options = fixture.options(mode, preempt);
        options.max_chunks = 20;
        options.step_tokens = 1;  // a prompt takes as many steps as it has tokens
        const auto engine = fixture.engine(options);
        for (const Request& request : requests) engine->submit(request);
        (void)run_to_end(*engine);
        CHECK(engine->stats().generated_tokens == tokens);
        CHECK(engine->stats().preemptions > 20);
        CHECK(engine->stats().fruitless_preemptions <= 2);
        check_empty(*engine, options);
      }
  }
}

TEST_CASE("the choices of a request compute its prompt once, except where nothing is shared") {
  Fixture fixture;
  for (const Mode mode : all_modes) {
    EngineOptions options = fixture.options(mode);
    const auto engine = fixture.engine(options);
    Request request{5, std::vector<int>(21, 7), 31, 4, {1.0, 1.0, 99}};
    engine->submit(request);
    const auto results = run_to_end(*engine);
    REQUIRE(results.size() == 4);
    std::set<std::vector<int>> texts;
    for (const auto& [key, one] : results) {
      CHECK(one.tokens.size() == 10);
      CHECK(one.finish == Finish::length);
      texts.insert(one.tokens);
    }
    CHECK(texts.size() > 1);  // of one seed
    const std::size_t prompts = mode == Mode::paged ? 4 : 1;
    CHECK(engine->stats().prompt_tokens == prompts * 21);
    CHECK(engine->stats().cached_tokens == 0);
    CHECK(engine->stats().rows == prompts * 21 + 4 * 9);
    CHECK(engine->stats().generated_tokens == 40);
    CHECK(engine->stats().peak_sequences == 4);
    check_empty(*engine, options);
  }
}

TEST_CASE("tenants share with themselves alone, and events say how much was cached") {
  Fixture fixture;
  for (const Mode mode : all_modes) {
    const EngineOptions options = fixture.options(mode);
    const auto engine = fixture.engine(options);
    const auto cached = [&](RequestId id, std::uint64_t tenant) {
      Request request{.id = id, .max_length = 30, .tenant = tenant};
      for (int token = 3; token < 28; ++token) request.prompt.push_back(token);
      engine->submit(request);
      return run_to_end(*engine).at({id, 0}).cached;
    };
    CHECK(cached(1, 4) == 0);
    CHECK(cached(2, 5) == 0);
    const std::size_t again = mode == Mode::tree ? 24 : mode == Mode::paged ? 0 : 24;
    CHECK(cached(3, 4) == again);
    CHECK(cached(4, 5) == again);
    std::set<std::uint64_t> tenants;
    for (const auto& node : engine->snapshot().nodes) tenants.insert(node.tenant);
    CHECK(tenants.size() == (mode == Mode::paged ? 0 : 2));
    check_empty(*engine, options);
  }
}

TEST_CASE("a request ends when its time has passed, also where it never ran") {
  Fixture fixture;
  EngineOptions options = fixture.options();
  options.max_sequences = 1;
  const auto engine = fixture.engine(options);
  engine->submit({.id = 1, .prompt = {3, 4, 5}, .max_length = 100, .deadline = 4.0});
  engine->submit({.id = 2, .prompt = {6, 7}, .max_length = 20, .choices = 3, .deadline = 1.5});
  engine->submit({3, {8}, 3});
  CHECK(engine->waiting() == 3);
  std::map<Key, Result> results;
  for (int now = 0; now < 2; ++now) CHECK(engine->step(now));
  CHECK(engine->waiting() == 2);
  CHECK(engine->step(2));
  CHECK(engine->waiting() == 1);
  collect(*engine, results);
  for (int choice = 0; choice < 3; ++choice) {
    CHECK(results.at({2, choice}).finish == Finish::deadline);
    CHECK(results.at({2, choice}).tokens.empty());
  }
  for (double now = 3; engine->step(now); ++now) collect(*engine, results);
  collect(*engine, results);
  CHECK(results.at({1, 0}).finish == Finish::deadline);
  CHECK(results.at({1, 0}).tokens.size() == 5);  // steps at 0, 1, 2, 3 and 4: not yet past it
  CHECK(results.at({3, 0}).finish == Finish::length);
  check_empty(*engine, options);
}

TEST_CASE("a request for which there was no memory until its time has passed ends") {
  Fixture fixture;
  EngineOptions options = fixture.options();
  options.max_sequences = 1;
  const auto engine = fixture.engine(options);
  const auto submit = [&](RequestId id, std::size_t length, double start_by) {
    Request request{id, {3, 4}, length, 2};
    request.start_by = start_by;
    engine->submit(std::move(request));
  };
  submit(1, 12, 0);  // it joins at 0, and continues
  submit(2, 5, 3);
  submit(3, 5, forever);
  std::map<Key, Result> results;
  for (int now = 0; now < 4; ++now) CHECK(engine->step(now));
  collect(*engine, results);
  CHECK(engine->waiting() == 2);
  CHECK(engine->step(4));
  CHECK(engine->waiting() == 1);
  for (double now = 5; engine->step(now); ++now) collect(*engine, results);
  collect(*engine, results);
  for (int choice = 0; choice < 2; ++choice) {
    CHECK(results.at({1, choice}).finish == Finish::length);
    CHECK(results.at({2, choice}).finish == Finish::late);
    CHECK(results.at({2, choice}).tokens.empty());
    CHECK(results.at({3, choice}).finish == Finish::length);
  }
  check_empty(*engine, options);
}

TEST_CASE("what is cancelled or stopped leaves at once") {
  Fixture fixture;
  const EngineOptions options = fixture.options();
  const auto engine = fixture.engine(options);
  engine->submit({1, std::vector<int>(20, 5), 60, 2});
  std::map<Key, Result> results;
  for (int i = 0; i < 3; ++i) CHECK(engine->step(0));
  engine->stop(1, 0);
  engine->stop(1, 0);
  engine->stop(1, -1);
  collect(*engine, results);
  CHECK(results.at({1, 0}).finish == Finish::stop);
  CHECK(results.at({1, 0}).tokens.size() == 3);
  CHECK(results.at({1, 1}).finish == Finish::none);
  CHECK(engine->step(0));
  engine->cancel(1);
  engine->cancel(1);
  CHECK(engine->snapshot().chunks_used == 0);
  collect(*engine, results);
  CHECK(results.at({1, 1}).finish == Finish::cancelled);
  CHECK(results.at({1, 1}).tokens.size() == 4);
  check_empty(*engine, options);
  engine->submit({1, {3}, 5});  // the id is free again
  CHECK(run_to_end(*engine).at({1, 0}).tokens.size() == 4);
}

TEST_CASE("what cannot be is refused, with the field's name") {
  Fixture fixture;
  const auto engine = fixture.engine(fixture.options());
  const auto refusal = [&](const Request& request) -> std::string {
    try {
      engine->submit(request);
    } catch (const std::invalid_argument& error) {
      return error.what();
    }
    return "";
  };
  Request good{1, {3, 4}, 5};
  CHECK(refusal(good).empty());
  CHECK(refusal(good) == "request 1: id = 1: expected one that no other request has");
  good.id = 2;
  const auto with = [&](auto change) {
    Request request = good;
    change(request);
    return refusal(request);
  };
  CHECK(with([](Request& r) { r.choices = 0; }) == "request 2: choices = 0: expected 1 to 128");
  CHECK(with([](Request& r) { r.choices = 129; }).find("choices = 129") != std::string::npos);
  CHECK(with([](Request& r) { r.prompt[1] = -4; }).find("= -4: expected a token") !=
        std::string::npos);
  CHECK(with([](Request& r) { r.sampling.temperature = 3; }).find("temperature = 3") !=
        std::string::npos);
  CHECK(with([](Request& r) { r.sampling.top_p = 0; }).find("top_p = 0") != std::string::npos);
  CHECK(with([](Request& r) {
          r.deadline = std::numeric_limits<double>::quiet_NaN();
        }).find("deadline = nan") != std::string::npos);
  CHECK(with([](Request& r) {
          r.start_by = std::numeric_limits<double>::quiet_NaN();
        }).find("start_by = nan") != std::string::npos);
  CHECK(engine->waiting() == 1);
  const auto refused = [&](auto change) {
    EngineOptions options = fixture.options();
    change(options);
    CHECK_THROWS_AS((void)fixture.engine(options), std::invalid_argument);
  };
  refused([](EngineOptions& o) { o.step_tokens = 0; });
  refused([](EngineOptions& o) { o.max_sequences = 0; });
  refused([](EngineOptions& o) { o.on_gpu = true, o.mode = Mode::paged; });
  refused([](EngineOptions& o) { o.on_gpu = true, o.preempt = Preempt::swap; });
}
