// The engine over tiers: a chat continues after a restart, also of a server that was killed; what
// was evicted comes back; and every text is the one that is computed without tiers.
#include <doctest/doctest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/engine.hpp"
#include "model/load.hpp"
#include "scratch_folder.hpp"
#include "tests/support/random.hpp"

using namespace serve;

namespace {

const Config tiny{32, 64, 2, 4, 2, 60, 512, true, 1e-5f, 10000.0f};

struct Fixture {
  chunkattn::ThreadPool pool{1};
  Model model = random_model(tiny, Element::fp32, 11, pool);
  Products products{pool, ProductKind::own};

  /// Bits do not depend on what else runs.
  [[nodiscard]] static EngineOptions options(const std::string& directory = "",
                                             std::size_t memory = 0) {
    EngineOptions options;
    options.chunk_size = 8;
    options.reduce = chunkattn::CpuOptions::Reduce::batch_invariant;
    options.tiers.memory_bytes = memory;
    options.tiers.directory = directory;
    options.tiers.directory_bytes = 1 << 24;
    options.tiers.model = "tiny";
    return options;
  }
  std::unique_ptr<Engine> engine(const EngineOptions& options) {
    return make_engine(model, products, options);
  }
};

struct Text {
  std::vector<int> tokens;
  std::size_t cached = 0;
};

Request request_of(RequestId id, std::vector<int> prompt, std::size_t more,
                   const std::string& salt = "", std::uint64_t tenant = 0) {
  Request request;
  request.id = id;
  request.max_length = prompt.size() + more;
  request.prompt = std::move(prompt);
  request.tenant = tenant;
  request.salt = salt;
  return request;
}

std::map<RequestId, Text> run(Engine& engine, const std::vector<Request>& requests) {
  for (const Request& request : requests) engine.submit(request);
  std::map<RequestId, Text> texts;
  while (engine.step(0)) continue;
  for (const Event& event : engine.take_events()) {
    if (event.token >= 0) texts[event.id].tokens.push_back(event.token);
    texts[event.id].cached += event.cached;
  }
  return texts;
}

std::vector<int> tokens_from(int seed, std::size_t n) {
  std::vector<int> tokens;
  for (std::size_t i = 0; i < n; ++i)
    tokens.push_back(static_cast<int>((static_cast<std::size_t>(seed) * 37 + i * i * 13 + i) % 60));
  return tokens;
}

/// The second turn of a chat whose first was answered with this.
std::vector<int> second_turn(std::vector<int> chat, const std::vector<int>& answer) {
  chat.insert(chat.end(), answer.begin(), answer.end());
  const std::vector<int> more = tokens_from(5, 20);
  chat.insert(chat.end(), more.begin(), more.end());
  return chat;
}

}  // namespace

TEST_CASE("after a restart the second turn of a chat hits, and says what it says otherwise") {
  Fixture f;
  const test::ScratchFolder folder;
  const std::vector<int> first = tokens_from(1, 100);
  Text one, two, plain;
  one = run(*f.engine(f.options(folder.path)), {request_of(1, first, 20)})[1];
  CHECK(one.cached == 0);
  const std::vector<int> chat = second_turn(first, one.tokens);
  {
    const auto engine = f.engine(f.options(folder.path));
    two = run(*engine, {request_of(1, chat, 20)})[1];
    CHECK(engine->stats().tiers.loaded_tokens == two.cached);
  }
  plain = run(*f.engine(f.options()), {request_of(1, chat, 20)})[1];
  CHECK(two.tokens == plain.tokens);
  CHECK(plain.cached == 0);
  CHECK(two.cached == (first.size() + one.tokens.size() - 1) / 8 * 8);
}

TEST_CASE("a server that is killed has stored what it computed") {
  const test::ScratchFolder folder;
  const std::vector<int> first = tokens_from(1, 100);
  const pid_t child = ::fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    Fixture f;
    const auto engine = f.engine(f.options(folder.path));
    (void)run(*engine, {request_of(1, first, 20)});
    // What is on its way down is there within a moment.
    for (int i = 0; i < 1000 && std::distance(std::filesystem::directory_iterator(folder.path),
                                              std::filesystem::directory_iterator()) < 15;
         ++i)
      ::usleep(10000);
    ::raise(SIGKILL);
  }
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  CHECK(WIFSIGNALED(status));
  Fixture f;
  const Text plain = run(*f.engine(f.options()), {request_of(1, first, 20)})[1];
  const Text after = run(*f.engine(f.options(folder.path)), {request_of(1, first, 20)})[1];
  CHECK(after.tokens == plain.tokens);
  CHECK(after.cached == 96);
}

TEST_CASE("texts over tiers are those without, whatever is evicted, rounded or damaged") {
  Fixture f;
  test::Random random;
  const test::ScratchFolder folder;
  std::vector<Request> requests;
  for (RequestId id = 1; id <= 60; ++id) {
    const int group = random.uniform(0, 5);
    std::vector<int> prompt = tokens_from(group, 30 + random.index(40));
    for (std::size_t n = random.index(20); n > 0; --n) prompt.push_back(random.uniform(0, 59));
    const auto tenant = static_cast<std::uint64_t>(random.uniform(0, 2));
    requests.push_back(request_of(id, std::move(prompt), 1 + random.index(20),
                                  tenant == 0 ? "" : "salt" + std::to_string(tenant), tenant));
  }
  const auto plain = run(*f.engine(f.options()), requests);
  for (int round = 0; round < 4; ++round) {
    EngineOptions options = f.options(folder.path, round % 2 == 0 ? 20000 : 0);
    options.max_chunks = 40;
    options.preempt = round == 1 ? Preempt::swap : Preempt::recompute;
    options.order = round == 2 ? Order::cache : Order::fcfs;
    const auto engine = f.engine(options);
    const auto texts = run(*engine, requests);
    for (const auto& [id, text] : plain) CHECK(texts.at(id).tokens == text.tokens);
    if (round == 0) CHECK(engine->stats().tiers.stored_blocks > 0);  // else they are there
    if (round > 0) CHECK(engine->stats().tiers.loaded_tokens > 0);
    if (round != 2) continue;
    for (const auto& entry : std::filesystem::directory_iterator(folder.path))
      if (entry.path().extension() == ".kv" && random.chance(0.3)) {
        std::fstream file(entry.path(), std::ios::in | std::ios::out | std::ios::binary);
        file.seekp(static_cast<std::streamoff>(random.index(entry.file_size())));
        file.put(static_cast<char>(random.uniform(0, 255)));
      }
  }
}

TEST_CASE("while a prompt is loaded others are computed") {
  Fixture f;
  const test::ScratchFolder folder;
  const std::vector<int> prompt = tokens_from(1, 100);
  (void)run(*f.engine(f.options(folder.path)), {request_of(1, prompt, 1)});
  const auto engine = f.engine(f.options(folder.path));
  engine->submit(request_of(1, prompt, 1));
  engine->submit(request_of(2, tokens_from(2, 6), 1));  // no whole block
  CHECK(engine->step(0));
  CHECK(engine->stats().rows > 0);  // not one step is spent on waiting
  while (engine->step(0)) continue;
}

TEST_CASE("a directory knows tenants by their salts, not by their numbers") {
  Fixture f;
  const test::ScratchFolder folder;
  const std::vector<int> prompt = tokens_from(1, 100);
  (void)run(*f.engine(f.options(folder.path)), {request_of(1, prompt, 2, "mine", 1)});
  const auto found = [&](const std::string& salt, std::uint64_t tenant) {
    return run(*f.engine(f.options(folder.path)), {request_of(1, prompt, 2, salt, tenant)})[1]
        .cached;
  };
  CHECK(found("other", 1) == 0);
  CHECK(found("", 0) == 0);
  CHECK(found("mine", 2) == 96);
}

TEST_CASE("K/V that is rounded to 8 bits is read, and by nobody who wants other bits") {
  Fixture f;
  const test::ScratchFolder folder;
  const std::vector<int> prompt = tokens_from(1, 100);
  for (const auto stored :
       {TierOptions::Stored::as_it_is, TierOptions::Stored::int8, TierOptions::Stored::e4m3}) {
    EngineOptions options = f.options(folder.path);
    options.tiers.stored = stored;
    CHECK(run(*f.engine(options), {request_of(1, prompt, 2)})[1].cached == 0);
    CHECK(run(*f.engine(options), {request_of(1, prompt, 2)})[1].cached == 96);
  }
}

TEST_CASE("scores come back with K/V from tiers and after a restart, and are not computed again") {
  Fixture f;
  using Scores = std::vector<std::vector<TokenLogprob>>;
  const auto score = [](Engine& engine, const std::vector<int>& prompt, std::size_t& rows) {
    Request request = request_of(1, prompt, 0);
    request.prompt_logprobs = true;
    request.logprobs = 3;
    const std::size_t before = engine.stats().rows;
    engine.submit(request);
    while (engine.step(0)) continue;
    rows = engine.stats().rows - before;
    const std::vector<Event> events = engine.take_events();
    REQUIRE(events.size() == 1);
    REQUIRE(events[0].prompt_logprobs.size() == prompt.size() - 1);
    return events[0].prompt_logprobs;
  };
  const auto is_same = [](const Scores& a, const Scores& b) {
    return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const auto& x, const auto& y) {
      return std::equal(x.begin(), x.end(), y.begin(), y.end(), [](auto one, auto other) {
        return one.token == other.token && one.logprob == other.logprob;
      });
    });
  };
  const std::vector<int> prompt = tokens_from(1, 100);
  std::size_t rows = 0;
  const Scores plain = score(*f.engine(f.options()), prompt, rows);
  const test::ScratchFolder folder, other;
  const Scores first = score(*f.engine(f.options(folder.path)), prompt, rows);
  CHECK(rows == 100);
  CHECK(is_same(first, plain));
  {  // 96 tokens are whole blocks; what the last of them says of the next one is in none
    const auto engine = f.engine(f.options(folder.path));
    CHECK(is_same(score(*engine, prompt, rows), first));
    CHECK(rows == 5);
    CHECK(engine->stats().tiers.loaded_tokens == 96);
    CHECK(engine->stats().recalled_tokens == 95);
    CHECK(is_same(score(*engine, prompt, rows), first));
    CHECK(rows == 1);
  }
  {  // K/V that was stored without scores is loaded, its rows are computed again; then it has some
    (void)run(*f.engine(f.options(other.path)), {request_of(1, prompt, 2)});
    CHECK(is_same(score(*f.engine(f.options(other.path)), prompt, rows), first));
    CHECK(rows == 100);
    CHECK(is_same(score(*f.engine(f.options(other.path)), prompt, rows), first));
    CHECK(rows == 5);
  }
  {  // A continuation wants no scores of its context.
    const auto engine = f.engine(f.options(other.path));
    Request request = request_of(1, prompt, 0);
    request.prompt_logprobs = true;
    request.scored_from = 98;
    request.logprobs = 9;  // more than is kept
    engine->submit(request);
    while (engine->step(0)) continue;
    const std::vector<Event> events = engine->take_events();
    CHECK(engine->stats().rows == 4);
    REQUIRE(events.at(0).prompt_logprobs.size() == 2);
    for (std::size_t i = 0; i < 2; ++i)
      CHECK(events[0].prompt_logprobs[i][0].logprob == plain[97 + i][0].logprob);
  }
  for (const auto preempt : {Preempt::recompute, Preempt::swap}) {  // evicted, to host memory
    EngineOptions options = f.options("", 1 << 20);
    options.max_chunks = 20;
    options.preempt = preempt;
    const auto engine = f.engine(options);
    CHECK(is_same(score(*engine, prompt, rows), first));
    for (int seed = 2; seed < 5; ++seed) (void)score(*engine, tokens_from(seed, 90), rows);
    CHECK(is_same(score(*engine, prompt, rows), first));
    if (engine->stats().tiers.loads_late == 0) CHECK(rows == 5);  // else not worth waiting for
  }
}

TEST_CASE("random prompts are scored as without tiers, whatever is evicted") {
  Fixture f;
  test::Random random(4);
  const test::ScratchFolder folder;
  std::vector<Request> requests;
  for (RequestId id = 1; id <= 60; ++id) {
    std::vector<int> prompt = tokens_from(random.uniform(0, 3), 30 + random.index(40));
    for (std::size_t n = random.index(20); n > 0; --n) prompt.push_back(random.uniform(0, 59));
    requests.push_back(request_of(id, std::move(prompt), random.index(30)));
    requests.back().prompt_logprobs = random.chance(0.7);
    requests.back().logprobs = random.uniform(0, 6);
    if (random.chance(0.3)) requests.back().scored_from = 1 + random.index(30);
  }
  const auto scores_of = [&](const EngineOptions& options) {
    const auto engine = f.engine(options);
    for (const Request& request : requests) engine->submit(request);
    while (engine->step(0)) continue;
    std::map<RequestId, std::vector<std::vector<TokenLogprob>>> scores;
    for (const Event& event : engine->take_events())
      if (!event.prompt_logprobs.empty()) scores[event.id] = event.prompt_logprobs;
    return std::pair(scores, engine->stats());
  };
  EngineOptions alone = f.options();
  alone.mode = Mode::paged;  // nothing is shared
  const auto plain = scores_of(alone).first;
  int preemptions = 0;
  for (int round = 0; round < 5; ++round) {
    EngineOptions options = f.options(round < 4 ? folder.path : "", round % 2 == 0 ? 20000 : 0);
    options.max_chunks = 24;
    options.step_tokens = static_cast<std::size_t>(random.uniform(1, 3)) * 30;
    options.preempt = round % 2 == 1 ? Preempt::swap : Preempt::recompute;
    options.order = round == 2 ? Order::cache : Order::fcfs;
    if (round == 3) options.sharing = chunkattn::TreeOptions::Sharing::chunk;
    const auto [scores, stats] = scores_of(options);
    CHECK(stats.recalled_tokens > 0);
    preemptions += stats.preemptions;
    REQUIRE(scores.size() == plain.size());
    for (const auto& [id, expected] : plain) {
      CAPTURE(id);
      const auto& found = scores.at(id);
      REQUIRE(found.size() == expected.size());
      for (std::size_t i = 0; i < found.size(); ++i) {
        REQUIRE(found[i].size() == expected[i].size());
        for (std::size_t k = 0; k < found[i].size(); ++k) {
          CHECK(found[i][k].token == expected[i][k].token);
          CHECK(found[i][k].logprob == expected[i][k].logprob);
        }
      }
    }
  }
  CHECK(preemptions > 0);
}

TEST_CASE("options") {
  Fixture f;
  EngineOptions options = f.options("", 1000);
  options.mode = Mode::paged;
  CHECK_THROWS_WITH(f.engine(options),
                    "tiers: expected none beside on_gpu, mode paged, or several ranks");
  CHECK_THROWS(f.engine(f.options("/dev/null/no")));
}
