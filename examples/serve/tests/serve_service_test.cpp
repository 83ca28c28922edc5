// The service without HTTP: what requests get, refusals, cancellation, deadlines, the end of it
// all.
#include <doctest/doctest.h>

#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "scripted_engine.hpp"
#include "server/service.hpp"
#include "tests/support/random.hpp"

using namespace serve;
using test::eventually;

namespace {

struct Setup {
  std::unique_ptr<Tokenizer> tokenizer = byte_tokenizer(300);
  test::ScriptedEngine::Levers levers;
  Service service;

  explicit Setup(ServiceOptions options = {})
      : service(std::make_unique<test::ScriptedEngine>(levers), *tokenizer, options) {}

  [[nodiscard]] Job job(const std::string& text, std::size_t max_tokens) const {
    Job job;
    const TextPart part{text, false};
    job.prompt = tokenizer->encode({&part, 1});
    job.max_tokens = max_tokens;
    return job;
  }
};

struct Received {
  std::string text;
  std::size_t tokens = 0;
  Finish finish = Finish::none;
};

/// All that a request says.
std::vector<Received> receive(Service::Ticket& ticket, int choices) {
  std::vector<Received> received(static_cast<std::size_t>(choices));
  for (int running = choices; running > 0;)
    for (const Piece& piece : ticket.channel().take(std::chrono::seconds(1))) {
      Received& one = received[static_cast<std::size_t>(piece.choice)];
      CHECK(one.finish == Finish::none);
      one.text += piece.text;
      one.tokens += piece.tokens;
      one.finish = piece.finish;
      if (piece.finish != Finish::none) --running;
    }
  return received;
}

std::optional<Refused::Reason> refusal(Service& service, Job job) {
  try {
    (void)service.submit(std::move(job));
  } catch (const Refused& refused) {
    return refused.reason();
  }
  return std::nullopt;
}

}  // namespace

TEST_CASE("a request gets its text to the end, in characters") {
  Setup s;
  auto ticket = s.service.submit(s.job("é€", 7));
  const auto received = receive(ticket, 1);
  CHECK(received[0].text == "é€é");
  CHECK(received[0].tokens == 7);
  CHECK(received[0].finish == Finish::length);
  CHECK(ticket.channel().cached() == 1);
  const ServiceCounters counters = s.service.counters();
  CHECK(counters.requests == 0);
  CHECK(counters.accepted == 1);
  CHECK(counters.generated_tokens == 7);
  CHECK(counters.prompt_tokens == 5);
  CHECK(counters.cached_tokens == 1);
  CHECK(counters.finished[static_cast<int>(Finish::length)] == 1);
  CHECK(counters.first_token.count == 1);
  CHECK(counters.whole.count == 1);
}

TEST_CASE("a stop string ends the choice that says it") {
  Setup s;
  Job job = s.job("one two END more ", 100);
  job.choices = 3;
  job.stop = {"never", "END"};
  auto ticket = s.service.submit(job);
  for (const Received& one : receive(ticket, 3)) {
    CHECK(one.text == "one two ");
    CHECK(one.finish == Finish::stop);
    CHECK(one.tokens == 11);
  }
  job.max_tokens = 11;  // its last letter is the last token
  auto at_the_end = s.service.submit(job);
  CHECK(receive(at_the_end, 3)[2].finish == Finish::stop);
  job.max_tokens = 10;
  auto too_short = s.service.submit(job);
  const auto received = receive(too_short, 3);
  CHECK(received[1].text == "one two EN");
  CHECK(received[1].finish == Finish::length);
}

TEST_CASE("many threads are served at once, each its own text") {
  Setup s;
  test::Random random(1);
  std::vector<std::string> prompts;
  for (int i = 0; i < 24; ++i)
    prompts.push_back("thread " + std::to_string(i) + std::string(random.index(9), 'x') + ". ");
  std::vector<std::string> texts(prompts.size());
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < prompts.size(); ++i)
    threads.emplace_back([&, i] {
      for (int round = 0; round < 5; ++round) {
        auto ticket = s.service.submit(s.job(prompts[i], 2 * prompts[i].size()));
        for (bool ended = false; !ended;)
          for (const Piece& piece : ticket.channel().take(std::chrono::seconds(1))) {
            texts[i] += piece.text;
            ended = piece.finish != Finish::none;
          }
      }
    });
  for (std::thread& thread : threads) thread.join();
  for (std::size_t i = 0; i < prompts.size(); ++i) {
    std::string expected;
    for (int k = 0; k < 10; ++k) expected += prompts[i];
    CHECK(texts[i] == expected);
  }
  CHECK(s.service.counters().requests == 0);
}

TEST_CASE("more requests than the queue holds are refused, and served when it has space") {
  ServiceOptions options;
  options.max_requests = 3;
  Setup s(options);
  s.levers.held = true;
  std::vector<Service::Ticket> tickets;
  for (int i = 0; i < 3; ++i) tickets.push_back(s.service.submit(s.job("abc", 5)));
  CHECK(refusal(s.service, s.job("abc", 5)) == Refused::Reason::full);
  CHECK(s.service.counters().requests == 3);
  CHECK(s.service.counters().refused[0] == 1);
  tickets.pop_back();  // a client goes away
  CHECK(eventually([&] { return s.service.counters().requests == 2; }));
  CHECK(s.service.snapshot().chunks_used == 2);
  CHECK(s.service.counters().finished[static_cast<int>(Finish::cancelled)] == 1);
  auto next = s.service.submit(s.job("xy", 4));
  s.levers.held = false;
  CHECK(receive(next, 1)[0].text == "xyxy");
}

TEST_CASE("what the engine refuses is refused with its words") {
  Setup s;
  std::string said;
  try {
    (void)s.service.submit(s.job(std::string(201, 'x'), 5));
  } catch (const Refused& refused) {
    CHECK(refused.reason() == Refused::Reason::invalid);
    said = refused.what();
  }
  CHECK(said == "prompt = 201 tokens: expected at most 200");
  CHECK(s.service.counters().requests == 0);
}

TEST_CASE("a request ends at its deadline") {
  ServiceOptions options;
  options.request_seconds = 0;
  Setup s(options);
  auto ticket = s.service.submit(s.job("abc", 5));
  CHECK(receive(ticket, 1)[0].finish == Finish::deadline);
}

TEST_CASE("a request that waits too long for memory is refused, and leaves the queue") {
  ServiceOptions options;
  options.wait_seconds = 0.2;
  Setup s(options);
  s.levers.held = true;
  auto runs = s.service.submit(s.job("abc", 200));
  CHECK(eventually([&] {
    const ServiceCounters counters = s.service.counters();
    return counters.engine.steps > 0 && counters.waiting == 0;
  }));
  s.levers.full = true;
  Job job = s.job("abc", 5);
  job.choices = 3;
  auto waits = s.service.submit(job);
  CHECK_FALSE(waits.channel().wait_until_said(std::chrono::milliseconds(0)));
  CHECK(eventually([&] { return s.service.counters().waiting == 1; }));
  std::string said;
  try {
    (void)waits.channel().wait_until_said(std::chrono::hours(1));
  } catch (const Refused& refused) {
    CHECK(refused.reason() == Refused::Reason::late);
    said = refused.what();
  }
  CHECK(said == "there was no room for it within 0.2 s: try again later");
  CHECK(s.service.counters().requests == 1);  // the one that runs
  CHECK(s.service.counters().refused[static_cast<int>(Refused::Reason::late)] == 1);
  s.levers.full = false;
  s.levers.held = false;
  CHECK(receive(runs, 1)[0].finish == Finish::length);
  auto next = s.service.submit(s.job("xy", 4));
  CHECK(receive(next, 1)[0].text == "xyxy");
}

TEST_CASE("salts make tenants") {
  Setup s;
  Job job = s.job("a", 1);
  const auto tenant_of = [&](const std::string& salt) {
    job.cache_salt = salt;
    auto ticket = s.service.submit(job);
    (void)receive(ticket, 1);
    return s.levers.tenant.load();
  };
  CHECK(tenant_of("") == 0);
  const auto one = tenant_of("one");
  CHECK(one != 0);
  CHECK(tenant_of("two") != one);
  CHECK(tenant_of("one") == one);
}

TEST_CASE("a service that ends lets requests end, refuses others, and cancels after a time") {
  Setup s;
  auto first = s.service.submit(s.job("abc", 6));
  s.service.close();
  CHECK(s.service.closing());
  s.service.drain(std::chrono::hours(1));
  CHECK(receive(first, 1)[0].text == "abcabc");
  CHECK(refusal(s.service, s.job("abc", 6)) == Refused::Reason::closing);

  Setup held;
  held.levers.held = true;
  auto cut_off = held.service.submit(held.job("abc", 6));
  held.service.close();
  held.service.drain(std::chrono::seconds(0));
  CHECK(receive(cut_off, 1)[0].finish == Finish::cancelled);
  CHECK(held.service.counters().requests == 0);
}

TEST_CASE(
    "a request that fails in the engine fails alone, and three in a row are the engine's end") {
  Setup s;
  s.levers.held = true;
  auto first = s.service.submit(s.job("abc", 6));
  const auto error = static_cast<int>(Refused::Reason::error);
  for (int i = 1; i <= 4; ++i) {
    auto next = s.service.submit(s.job("xyz", 6));
    const int steps = s.service.counters().engine.steps;
    s.levers.fails = 1;
    std::string said;
    try {
      (void)next.channel().wait_until_said(std::chrono::hours(1));
    } catch (const Refused& refused) {
      CHECK(refused.reason() == Refused::Reason::error);
      said = refused.what();
    }
    CHECK(said == "it has failed in the engine: it does not like this one");
    CHECK(s.service.failure().empty());
    CHECK(s.service.counters().refused[error] == static_cast<std::uint64_t>(i));
    CHECK(s.service.counters().requests == 1);
    CHECK(eventually([&] { return s.service.counters().engine.steps > steps; }));
  }
  // What cannot even be taken.
  CHECK(refusal(s.service, s.job(std::string(199, 'x'), 5)) == Refused::Reason::error);
  CHECK(s.service.counters().requests == 1);
  CHECK(s.service.snapshot().nodes.size() == 1);
  s.levers.held = false;
  CHECK(receive(first, 1)[0].text == "abcabc");

  s.levers.held = true;
  auto a = s.service.submit(s.job("a", 6)), b = s.service.submit(s.job("b", 6));
  auto c = s.service.submit(s.job("c", 6)), d = s.service.submit(s.job("d", 6));
  s.levers.fails = 3;
  CHECK_THROWS_AS(receive(a, 1), Refused);
  CHECK_THROWS_AS(receive(d, 1), Refused);
  CHECK(s.service.failure() == "it does not like this one");
  CHECK(refusal(s.service, s.job("abc", 6)) == Refused::Reason::failed);
}

TEST_CASE("when the engine breaks, all that wait get an error") {
  Setup s;
  s.levers.held = true;
  auto ticket = s.service.submit(s.job("abc", 6));
  s.levers.breaks = true;
  CHECK_THROWS_AS(receive(ticket, 1), Refused);
  CHECK(s.service.failure() == "it was made to break");
  CHECK(refusal(s.service, s.job("abc", 6)) == Refused::Reason::failed);
  CHECK(s.service.snapshot().nodes.empty());
  s.service.close();
  s.service.drain(std::chrono::hours(1));  // nobody is left
}

TEST_CASE("requests that come while the engine breaks are all answered") {
  for (int round = 0; round < test::scaled(20); ++round) {
    Setup s;
    std::atomic<int> answered = 0;
    std::vector<std::thread> threads;
    for (int i = 0; i < 6; ++i)
      threads.emplace_back([&, i] {
        for (int k = 0; k < 5; ++k) {
          try {
            auto ticket = s.service.submit(s.job("abc", 6));
            for (bool ended = false; !ended;)
              for (const Piece& piece : ticket.channel().take(std::chrono::seconds(1)))
                ended = piece.finish != Finish::none;
          } catch (const Refused&) {
          }
          ++answered;
          if (i == 0 && k == 2) s.levers.breaks = true;
        }
      });
    for (std::thread& thread : threads) thread.join();
    CHECK(answered == 30);
  }
}
