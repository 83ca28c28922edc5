// Log-probabilities of prompts that the engine keeps beside their K/V: what was said once is said
// again, whatever came between, and no row is computed for it.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "model_says.hpp"
#include "scoring_engine.hpp"
#include "scratch_folder.hpp"

using namespace serve;
using namespace test;

TEST_CASE("what was scored once is said again, and only what is new is computed") {
  Random random(12);
  for (int round = 0; round < 6; ++round) {
    EngineOptions options = ScoringEngine::options();
    options.max_chunks = 4000;  // nothing is evicted
    options.step_tokens = static_cast<std::size_t>(random.uniform(1, 3) * 40);
    const bool is_chunked = round % 3 == 2;  // shares whole chunks
    if (is_chunked) options.mode = Mode::paged_prefix;
    if (round % 2 == 1) options.reduce = chunkattn::CpuOptions::Reduce::deterministic;
    ScoringEngine engine(options);
    std::map<std::vector<int>, std::vector<TokenLogprob>> said;  // behind these tokens of a tenant
    std::set<std::vector<int>> cached;                           // likewise
    std::vector<std::vector<int>> prompts{drawn_tokens(random, 120)};
    for (int i = 0; i < 40; ++i) {
      std::vector<int> prompt = prompts[random.index(prompts.size())];
      prompt.resize(1 + random.index(prompt.size()));
      prompt = joined(prompt, drawn_tokens(random, random.uniform(0, 30)));
      prompts.push_back(prompt);
      Request request;
      request.tenant = random.index(2);
      request.prompt = prompt;
      const bool is_scored = random.chance(0.8), is_more = random.chance(0.1);
      if (is_scored) {
        request.prompt_logprobs = true;
        request.logprobs = is_more ? random.uniform(6, 20) : random.uniform(0, 5);
        if (random.chance(0.3)) request.scored_from = 1 + random.index(prompt.size());
      }
      const auto [scores, rows] = engine.run(request);
      // Row by row, as it should be.
      std::vector<int> path{static_cast<int>(request.tenant)};
      std::size_t first = prompt.size() - 1, needed = 0;  // the last is always computed
      for (std::size_t p = 0; p < prompt.size(); ++p) {
        path.push_back(prompt[p]);
        const bool is_last = p + 1 == prompt.size();
        if (!is_last) path.push_back(prompt[p + 1]);
        const bool is_wanted = is_scored && !is_last && p + 1 >= request.scored_from;
        const bool is_known = !is_wanted || (said.contains(path) && !is_more);
        if (!is_last) path.pop_back();
        if (!cached.contains(path) || !is_known) first = std::min(first, p);
        needed += !cached.contains(path) || !is_known || is_last ? 1 : 0;
      }
      CAPTURE(i);
      // What is known behind what is not is passed over from one step to the next.
      CHECK(rows >= needed);
      if (!is_chunked) CHECK(rows <= prompt.size() - first);
      REQUIRE(scores.size() == (is_scored ? prompt.size() - request.scored_from : 0));
      path.assign(1, static_cast<int>(request.tenant));
      const auto own = own_distributions(engine.model, engine.products, prompt);
      for (std::size_t p = 0; p < prompt.size(); ++p) {
        path.push_back(prompt[p]);
        cached.insert(path);
        if (!is_scored || p + 1 < request.scored_from || p + 1 == prompt.size()) continue;
        const auto& one = scores[p + 1 - request.scored_from];
        path.push_back(prompt[p + 1]);
        REQUIRE(one.size() == 1 + static_cast<std::size_t>(request.logprobs));
        CHECK(one[0].token == prompt[p + 1]);
        for (const TokenLogprob& of : one)
          CHECK(std::abs(of.logprob - own[p][static_cast<std::size_t>(of.token)]) < 1e-5f);
        for (std::size_t k = 2; k < one.size(); ++k) CHECK(one[k - 1].logprob >= one[k].logprob);
        auto& before = said[path];
        for (std::size_t k = 0; k < std::min(before.size(), one.size()) && !is_more; ++k) {
          CHECK(before[k].token == one[k].token);
          // To the bit; of whole chunks, where the last one may be computed for each.
          if (!is_chunked) CHECK(before[k].logprob == one[k].logprob);
        }
        if (before.empty() || (!is_more && before.size() < one.size()))
          before.assign(one.begin(), one.begin() + std::min<std::ptrdiff_t>(6, std::ssize(one)));
        path.pop_back();
      }
    }
    CHECK(engine.engine->stats().recalled_tokens > 0);
    CHECK(engine.engine->stats().recalled_tokens < engine.engine->stats().scored_tokens);
  }
}

TEST_CASE("prompts that are scored at once share what they begin with") {
  Random random(13);
  for (const Mode mode : {Mode::tree, Mode::paged}) {
    EngineOptions options = ScoringEngine::options();
    options.mode = mode;
    options.max_chunks = 500;
    options.step_tokens = 30;
    ScoringEngine engine(options);
    const std::vector<int> common = drawn_tokens(random, 100);
    std::vector<Request> requests;
    for (int i = 0; i < 4; ++i) {
      Request request;
      request.prompt = joined(common, {50 + i / 2, 5, 6, 7});
      request.prompt_logprobs = true;
      request.logprobs = 2;
      if (i == 3) request.scored_from = 103;
      requests.push_back(request);
    }
    const auto [scores, rows] = engine.run_all(requests);
    // The first, the last row of its equal, from where the third parts, the last of its equal.
    if (mode == Mode::tree) CHECK(rows == 104 + 1 + 5 + 1);
    for (std::size_t i = 0; i < 4; ++i) {
      const auto own = own_logprobs(engine.model, engine.products, requests[i].prompt);
      const std::size_t from = requests[i].scored_from;
      REQUIRE(scores[i].size() == 104 - from);
      for (std::size_t t = from; t < 104; ++t)
        CHECK(std::abs(scores[i][t - from][0].logprob - own[t - 1]) < 1e-5f);
    }
  }
}

TEST_CASE("steps hold as much of contexts as fits, and continuations side by side") {
  EngineOptions options = ScoringEngine::options();
  options.step_tokens = 400;
  options.max_chunks = 500;
  ScoringEngine engine(options);
  Random random(15);
  const std::vector<int> context = drawn_tokens(random, 220);
  std::vector<Request> requests(2);
  for (int i = 0; i < 2; ++i) {
    requests[static_cast<std::size_t>(i)].prompt = joined(context, {10 + i, 20, 30});
    requests[static_cast<std::size_t>(i)].prompt_logprobs = true;
    requests[static_cast<std::size_t>(i)].scored_from = 220;
    requests[static_cast<std::size_t>(i)].logprobs = 0;
  }
  CHECK(engine.run_all(requests).second == 223 + 4);  // the context's last row once for each
  CHECK(engine.engine->stats().steps == 1);
}

TEST_CASE("a vocabulary of fewer tokens than are kept") {
  ScoringEngine engine(ScoringEngine::options(), ScoringEngine::shape(4));
  Request request;
  request.prompt = {1, 2, 3};
  request.prompt_logprobs = true;
  request.logprobs = 5;
  const auto first = engine.run(request), second = engine.run(request);
  CHECK(first.second == 3);
  CHECK(second.second == 1);
  for (const auto& scores : {first.first, second.first}) {
    REQUIRE(scores.size() == 2);
    CHECK(scores[0].size() == 5);
    CHECK(scores[1][0].token == 3);
  }
}

TEST_CASE("what cannot be scored is refused by name") {
  ScoringEngine engine(ScoringEngine::options());
  const auto refusal = [&](Request request) {
    request.id = 5;
    request.max_length = 4;
    try {
      engine.engine->submit(std::move(request));
    } catch (const std::invalid_argument& error) {
      return std::string(error.what());
    }
    return std::string("none");
  };
  CHECK(refusal(scored({1, 2, 3}, -1)) ==
        "request 5: logprobs = -1: expected 0 to 20 beside prompt_logprobs");
  CHECK(refusal(scored({1, 2, 3}, 21)) ==
        "request 5: logprobs = 21: expected -1, which is none, to 20");
  for (const std::size_t from : {0, 4})
    CHECK(refusal(scored({1, 2, 3}, 1, from)) ==
          "request 5: scored_from = " + std::to_string(from) +
              ": expected 1 to the prompt's tokens, 3");
  for (const int label : {-1, 300}) {
    Request request = scored({1, 2, 3});
    request.labels = {0, 299, label};
    CHECK(refusal(request) == "request 5: a token of labels = " + std::to_string(label) +
                                  ": expected a token of the model");
  }
  CHECK(engine.run(scored({1, 2, 3}, 20, 3)).second == 3);
}

TEST_CASE("what was said once stays, whatever another batch makes of it") {
  Random random(16);
  EngineOptions options = ScoringEngine::options();
  options.max_chunks = 500;
  options.reduce = chunkattn::CpuOptions::Reduce::deterministic;  // bits depend on the batch
  ScoringEngine engine(options);
  const std::vector<int> prompt = drawn_tokens(random, 100);
  const Scores first = engine.run(scored(prompt, 5)).first;
  std::vector<Request> more(3, scored(prompt, 6));  // than is kept
  more[0].prompt.resize(60);
  const auto [others, rows] = engine.run_all(more);
  CHECK(rows > 100);
  Scores five = others[2];
  for (auto& token : five) token.pop_back();
  CHECK_FALSE(is_same(five, first));
  CHECK(is_same(engine.run(scored(prompt, 5)).first, first));
}

TEST_CASE("scores of a sequence that is swapped are known when it has come back") {
  Random random(18);
  for (const int global_every : {0, 3}) {  // without windows, and with some
    EngineOptions options = ScoringEngine::options();
    options.max_chunks = 20;
    Config config = ScoringEngine::shape(300);
    if (global_every > 0) config = ScoringEngine::windowed(12, global_every);
    ScoringEngine engine(options, config);
    std::vector<Request> requests{scored(drawn_tokens(random, 72)),
                                  scored(drawn_tokens(random, 72))};
    requests[0].max_length = 140;  // takes 9 of the 10 chunks of the other
    requests[1].max_length = 100;
    const auto [scores, rows] = engine.run_all(requests);
    CHECK(rows == 139 + 99);
    CHECK(engine.engine->stats().swaps == 1);
    CHECK(engine.engine->stats().restored_tokens >= 40);
    CHECK(engine.engine->stats().recalled_tokens == 0);
    const auto again = engine.run(scored(requests[1].prompt));
    CHECK(engine.engine->stats().recalled_tokens == 71);
    if (global_every == 0) CHECK(again.second == 1);  // else its window is gone
    CHECK(is_same(again.first, scores[1]));
  }
}

TEST_CASE("what comes from a tier without scores is not passed over for want of a chunk") {
  Random random(19);
  const std::vector<int> prompt = drawn_tokens(random, 100);
  EngineOptions options = ScoringEngine::options();
  const Scores plain = ScoringEngine(options).run(scored(prompt)).first;
  options.tiers.memory_bytes = std::size_t{1} << 24;
  options.sharing = chunkattn::TreeOptions::Sharing::chunk;  // who joins again has a last chunk
  options.step_tokens = 8;
  options.max_chunks = 40;
  ScoringEngine engine(options);
  std::size_t loaded = 0;
  for (std::size_t steps = 1; steps < 7; ++steps) {
    CAPTURE(steps);
    engine.restart(options);
    Request cached;
    cached.prompt = prompt;
    (void)engine.run(cached);
    for (int i = 0; i < 4; ++i) (void)engine.run(scored(drawn_tokens(random, 90)));
    // Its choices take what is free when the loaded blocks have come, or before, or after.
    Request takes;
    takes.prompt = drawn_tokens(random, static_cast<int>(8 * steps));
    takes.choices = 40;  // more than there are chunks for
    takes.max_length = takes.prompt.size() + 8;
    const auto scores = engine.run_all({takes, scored(prompt)}).first;
    CHECK(is_same(scores[1], plain));
    loaded += engine.engine->stats().tiers.loaded_tokens;
  }
  CHECK(loaded > 0);
}

TEST_CASE("of equal prompts one is scored, and another one goes on where that is cancelled") {
  Random random(20);
  const std::vector<int> prompt = drawn_tokens(random, 100);
  EngineOptions options = ScoringEngine::options();
  options.step_tokens = 30;
  const Scores plain = ScoringEngine(options).run(scored(prompt)).first;
  for (const bool is_late : {false, true}) {
    ScoringEngine engine(options);
    for (RequestId id : {1, 2}) {
      Request request = scored(prompt);
      request.id = id;
      request.max_length = 100;
      if (id == 1 && is_late) request.deadline = 1;
      engine.engine->submit(request);
    }
    for (int i = 0; i < 2; ++i) CHECK(engine.engine->step(0));
    if (!is_late) engine.engine->cancel(1);
    while (engine.engine->step(2)) continue;
    const std::vector<Event> events = engine.engine->take_events();
    REQUIRE(events.size() == 2);
    CHECK(events[0].finish == (is_late ? Finish::deadline : Finish::cancelled));
    CHECK(events[0].prompt_logprobs.empty());
    CHECK(is_same(events[1].prompt_logprobs, plain));
    CHECK(engine.engine->stats().rows == 100);
    CHECK(engine.engine->stats().scored_tokens == 60 + 99);
    CHECK(engine.engine->stats().recalled_tokens == 60);
  }
}

TEST_CASE("choices of a prompt that is scored: it is said once, by the first event") {
  Random random(21);
  for (const Mode mode : {Mode::tree, Mode::paged}) {
    EngineOptions options = ScoringEngine::options();
    options.mode = mode;
    ScoringEngine engine(options);
    Request request = scored(drawn_tokens(random, 50), 2);
    request.id = 1;
    request.choices = 3;
    request.max_length = 54;
    request.labels = {7, 8};
    request.logit_bias = {{7, 5}};  // of what is sampled alone
    const auto own = own_distributions(engine.model, engine.products, request.prompt).back();
    for (const bool is_again : {false, true}) {
      const std::size_t before = engine.engine->stats().rows;
      engine.engine->submit(request);
      while (engine.engine->step(0)) continue;
      const std::vector<Event> events = engine.engine->take_events();
      CHECK(events.size() == 3 * 4);
      CHECK(events[0].prompt_logprobs.size() == 49);
      REQUIRE(events[0].labels.size() == 2);
      for (std::size_t i = 0; i < 2; ++i)
        CHECK(std::abs(events[0].labels[i] - own[to_size(request.labels[i])]) < 1e-5f);
      for (std::size_t i = 1; i < events.size(); ++i) {
        CHECK(events[i].prompt_logprobs.empty());
        CHECK(events[i].labels.empty());
      }
      if (mode == Mode::tree)
        CHECK(engine.engine->stats().rows - before == (is_again ? 1 : 50) + 3 * 3);
    }
  }
}

TEST_CASE("beside windows rows are computed as their rules have it, and scores are the same") {
  Random random(17);
  const Config config = ScoringEngine::windowed(12, 3);
  EngineOptions options = ScoringEngine::options();
  EngineOptions keeping = options;
  keeping.keeps_windows = true;
  const std::vector<int> prompt = drawn_tokens(random, 48);
  const auto parted = [&](int at, int own) {
    std::vector<int> tokens(prompt.begin(), prompt.begin() + at);
    tokens.push_back(3 + (prompt[to_size(at)] + own) % 290);
    return joined(tokens, drawn_tokens(random, 53 - at));
  };
  ScoringEngine engine(options, config), keeps(keeping, config);
  for (int at = random.uniform(1, 3); at < 48; at += 3) {  // also where a chunk begins, and ends
    CAPTURE(at);
    engine.restart(options);
    keeps.restart(keeping);
    const auto rows_of = [&](const std::vector<int>& tokens) {
      const auto [scores, rows] = engine.run(scored(tokens));
      CHECK(is_same(scores, keeps.run(scored(tokens)).first));
      return rows;
    };
    CHECK(rows_of(prompt) == 48);
    CHECK(rows_of(prompt) == 1);
    // What the last shared row says is of another token. Windows are kept before the prompt's last
    // token, by whole chunks: from 32 on; and where prompts parted, from the second one on.
    const std::size_t own = 55 - to_size(at);
    CHECK(rows_of(parted(at, 1)) == (at >= 44 ? own : 54));
    const std::vector<int> third = parted(at, 2);
    CHECK(rows_of(third) == own);
    CHECK(rows_of(third) == 1);
  }
}

TEST_CASE("of continuations whose context has no window any more one computes it") {
  Random random(22);
  const Config config = ScoringEngine::windowed(12, 3);
  EngineOptions options = ScoringEngine::options();
  ScoringEngine engine(options, config);
  for (int at = 96; at < 104; ++at) {
    CAPTURE(at);
    options.step_tokens = to_size(random.uniform(1, 200));
    engine.restart(options);
    const std::vector<int> first = drawn_tokens(random, 140);
    CHECK(engine.run(scored(first)).second == 140);
    std::vector<Request> requests;
    for (int i = 0; i < 5; ++i) {
      std::vector<int> tokens(first.begin(), first.begin() + at);
      tokens.push_back(3 + (first[to_size(at)] + 1 + i) % 290);
      requests.push_back(scored(joined(tokens, drawn_tokens(random, 4)), 1, to_size(at)));
    }
    const auto [scores, rows] = engine.run_all(requests);
    CHECK(rows == to_size(at) + 5 + 4 * 6);  // the last shared row for each
    for (std::size_t i = 0; i < 5; ++i) {
      CHECK(engine.run(requests[i]).second == 1);
      const auto own = own_logprobs(engine.model, engine.products, requests[i].prompt);
      REQUIRE(scores[i].size() == 5);
      for (std::size_t t = 0; t < 5; ++t)
        CHECK(std::abs(scores[i][t][0].logprob - own[to_size(at) + t - 1]) < 1e-5f);
    }
  }
}

TEST_CASE("scores and windows come back from tiers and after a restart: rows are not computed") {
  Random random(23);
  const ScratchFolder folder;
  const std::vector<int> prompt = drawn_tokens(random, 100);
  const Config config = ScoringEngine::windowed(16, 3);  // whole chunks
  EngineOptions options = ScoringEngine::options();
  const Scores plain = ScoringEngine(options, config).run(scored(prompt)).first;
  options.tiers.directory = folder.path;
  options.tiers.directory_bytes = std::size_t{1} << 24;
  const auto check = [&](ScoringEngine& engine, std::size_t computed, std::size_t loaded) {
    const std::size_t before = engine.engine->stats().tiers.loaded_tokens;
    const auto [scores, rows] = engine.run(scored(prompt));
    CHECK(is_same(scores, plain));
    const TierCounts& tiers = engine.engine->stats().tiers;
    if (tiers.loads_late > 0) return;  // the machine is slow: it was not worth waiting for
    CHECK(rows == computed);
    CHECK(tiers.loaded_tokens - before == loaded);
  };
  for (const bool is_restarted : {false, true}) {
    ScoringEngine engine(options, config);
    CHECK(engine.engine->bytes_per_window_chunk() > 0);
    if (is_restarted)
      check(engine, 5, 96);  // what the last whole block says of the next token is in none
    else
      check(engine, 100, 0);
    check(engine, 1, 0);
  }
  options.max_chunks = 20;  // evicts it
  options.max_window_chunks = 12;
  options.tiers.directory.clear();
  options.tiers.memory_bytes = std::size_t{1} << 24;
  ScoringEngine small(options, config);
  check(small, 100, 0);
  for (int i = 0; i < 4; ++i) (void)small.run(scored(drawn_tokens(random, 90)));
  check(small, 5, 96);
  // Where all layers have a window, K/V of all is in the tree's chunks, and in tiers.
  ScoringEngine all(options, ScoringEngine::windowed(16, 0));
  CHECK(all.engine->bytes_per_window_chunk() == 0);
}

namespace {

/// What the choices of a request said, and what was said of its prompt.
struct Said {
  Scores prompt;
  std::vector<float> labels;
  std::vector<std::vector<int>> tokens;
  std::vector<Scores> logprobs;
  std::vector<Finish> finishes;

  explicit Said(int choices)
      : tokens(to_size(choices)), logprobs(tokens.size()), finishes(tokens.size()) {}
  void add(const Event& event) {
    const std::size_t choice = to_size(event.choice);
    if (!event.prompt_logprobs.empty()) {
      CHECK(prompt.empty());
      prompt = event.prompt_logprobs;
    }
    if (!event.labels.empty()) labels = event.labels;
    if (event.token >= 0) tokens[choice].push_back(event.token);
    if (!event.logprobs.empty()) logprobs[choice].push_back(event.logprobs);
    finishes[choice] = event.finish;
  }
};

template <class T>
bool begins(const std::vector<T>& whole, const std::vector<T>& part) {
  return part.size() <= whole.size() && std::equal(part.begin(), part.end(), whole.begin());
}

Request drawn_request(Random& random, const std::vector<std::vector<int>>& begins_with) {
  std::vector<int> prompt = begins_with[random.index(begins_with.size())];
  prompt.resize(1 + random.index(prompt.size()));
  Request request = scored(joined(prompt, drawn_tokens(random, random.uniform(0, 20))));
  request.prompt_logprobs = random.chance(0.7);
  request.logprobs = random.uniform(0, 7);
  if (random.chance(0.4)) request.scored_from = 1 + random.index(request.prompt.size());
  if (random.chance(0.3)) request.labels = drawn_tokens(random, random.uniform(1, 3));
  if (random.chance(0.5)) request.choices = random.uniform(1, 4);
  if (random.chance(0.6)) request.max_length = request.prompt.size() + random.index(40);
  request.max_length = std::max(request.max_length, request.prompt.size());
  request.sampling = {1.0, 1.0, random.index(100)};
  request.tenant = random.index(3);
  if (request.tenant > 0) request.salt = "salt " + std::to_string(request.tenant);
  return request;
}

}  // namespace

TEST_CASE("random requests are answered as alone, whatever is shared, evicted, cancelled, stored") {
  Random random(24);
  int preemptions = 0;
  std::size_t recalled = 0, window_tokens = 0, loads = 0;
  for (int round = 0; round < scaled(4); ++round) {
    CAPTURE(round);
    const int kind = round % 4;
    Config config = ScoringEngine::shape(300);
    if (kind > 0) config = ScoringEngine::windowed(random.uniform(2, 24), kind == 3 ? 0 : 3);
    const ScratchFolder folder;
    EngineOptions options = ScoringEngine::options();
    options.step_tokens = to_size(random.uniform(1, 3) * 25);
    options.max_chunks = to_size(random.uniform(20, 28));
    options.max_window_chunks = to_size(random.uniform(12, 30));
    options.preempt = kind == 1 || kind == 2 ? Preempt::swap : Preempt::recompute;
    options.order = random.chance(0.3) ? Order::cache : Order::fcfs;
    if (random.chance(0.3)) options.sharing = chunkattn::TreeOptions::Sharing::chunk;
    if (round % 2 == 0) options.tiers.directory = folder.path;
    if (round % 4 == 0) options.tiers.memory_bytes = 100'000;
    options.tiers.directory_bytes = std::size_t{1} << 24;
    EngineOptions alone = ScoringEngine::options();
    alone.mode = Mode::paged;  // nothing is shared, and all K/V is kept
    alone.max_chunks = 3000;   // all of them side by side: bits do not depend on that
    const ScoringEngine expects(alone, config);
    const std::vector<std::vector<int>> prompts{drawn_tokens(random, 90), drawn_tokens(random, 90)};
    RequestId id = 0;
    for (int restarts = 0; restarts < 2; ++restarts) {
      const ScoringEngine tested(options, config);
      Engine& engine = *tested.engine;
      std::map<RequestId, Request> requests;
      std::map<RequestId, Said> said;
      std::set<RequestId> cancelled;
      const auto take = [&] {
        for (const Event& event : engine.take_events()) said.at(event.id).add(event);
      };
      const RequestId last = id + 16;
      for (bool is_busy = true; is_busy || id < last;) {
        const RequestId more = random.chance(0.5) ? 1 + random.index(5) : 0;
        for (const RequestId until = std::min(id + more, last); id < until;) {
          Request request = drawn_request(random, prompts);
          request.id = ++id;
          requests.emplace(id, request);
          said.emplace(id, Said(request.choices));
          engine.submit(request);
        }
        is_busy = engine.step(0);
        take();
        if (!requests.empty() && random.chance(0.05)) {
          const RequestId one = id - random.index(std::min<std::size_t>(requests.size(), 6));
          if (random.chance(0.7))
            engine.cancel(one);
          else
            engine.stop(one, random.uniform(0, requests.at(one).choices - 1));
          cancelled.insert(one);
          take();
        }
      }
      std::map<RequestId, Said> expected;
      for (const auto& [one, request] : requests) {
        expected.emplace(one, Said(request.choices));
        expects.engine->submit(request);
      }
      while (expects.engine->step(0)) continue;
      for (const Event& event : expects.engine->take_events()) expected.at(event.id).add(event);
      for (const auto& [one, own] : expected) {
        CAPTURE(one);
        const Said& found = said.at(one);
        const bool is_whole = !cancelled.contains(one);
        if (is_whole || !found.prompt.empty()) CHECK(is_same(found.prompt, own.prompt));
        if (is_whole || !found.labels.empty()) CHECK(found.labels == own.labels);
        for (std::size_t i = 0; i < own.tokens.size(); ++i) {
          CHECK(begins(own.tokens[i], found.tokens[i]));
          CHECK(found.finishes[i] != Finish::none);
          if (!is_whole) continue;
          CHECK(found.finishes[i] == own.finishes[i]);
          CHECK(found.tokens[i].size() == own.tokens[i].size());
          CHECK(is_same(found.logprobs[i], own.logprobs[i]));
        }
      }
      const EngineStats& stats = engine.stats();
      preemptions += stats.preemptions;
      if (options.preempt == Preempt::swap)
        CHECK(stats.swaps + stats.swaps_refused >= stats.preemptions);
      recalled += stats.recalled_tokens;
      window_tokens += stats.window_tokens;
      loads += stats.tiers.loaded_tokens + stats.tiers.loads_late;
    }
  }
  CHECK(preemptions > 0);
  CHECK(recalled > 0);
  CHECK(window_tokens > 0);
  CHECK(loads > 0);
}
