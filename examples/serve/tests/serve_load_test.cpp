// Loads: what arrives when, and what is reported of it, on a clock of the test's own.
#include <doctest/doctest.h>

#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "files.hpp"
#include "load/run_load.hpp"
#include "model/mapped_file.hpp"
#include "tests/support/nested_json.hpp"

using namespace serve;

namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

/// Gives each request a token in each step, all requests at once; a step takes a second.
class FakeEngine final : public Engine {
 public:
  double time = 0;

  void submit(Request request) override { live_.push_back({std::move(request), 0}); }
  void cancel(RequestId id) override {
    std::erase_if(live_, [&](const auto& one) {
      if (one.first.id != id) return false;
      events_.push_back({id, 0, -1, Finish::cancelled, 0});
      return true;
    });
  }
  void stop(RequestId, int) override {}
  bool step(double) override {
    if (live_.empty()) return false;
    time += 1;
    std::erase_if(live_, [&](auto& one) {
      auto& [request, tokens] = one;
      const bool last = request.prompt.size() + ++tokens == request.max_length;
      events_.push_back({request.id, 0, 1, last ? Finish::length : Finish::none, 0});
      return last;
    });
    return true;
  }
  std::vector<Event> take_events() override { return std::exchange(events_, {}); }
  [[nodiscard]] std::size_t waiting() const override { return 0; }
  [[nodiscard]] const EngineStats& stats() const override { return stats_; }
  [[nodiscard]] TreeSnapshot snapshot() const override { return {}; }
  [[nodiscard]] std::size_t bytes_per_chunk() const override { return 1; }

 private:
  std::vector<std::pair<Request, std::size_t>> live_;
  std::vector<Event> events_;
  EngineStats stats_;
};

Arrival arrival(double time, RequestId id, std::size_t tokens) {
  Arrival one{time, {}};
  one.request.id = id;
  one.request.prompt = {1};
  one.request.max_length = 1 + tokens;
  return one;
}

}  // namespace

TEST_CASE("arrivals are random, prompts begin alike, and both repeat") {
  PoissonLoad load{.rate = 4,
                   .requests = 20000,
                   .prompt_tokens = 6,
                   .shared_tokens = 4,
                   .completion_tokens = 5,
                   .vocab_size = 1000,
                   .seed = 3};
  const auto arrivals = poisson_load(load);
  REQUIRE(arrivals.size() == 20000);
  std::size_t shorter = 0;
  for (std::size_t i = 0; i < arrivals.size(); ++i) {
    const Request& request = arrivals[i].request;
    REQUIRE(request.id == i);
    REQUIRE(request.prompt.size() == 6);
    REQUIRE(request.max_length == 11);
    for (std::size_t t = 0; t < 6; ++t) {
      REQUIRE((request.prompt[t] >= 3 && request.prompt[t] < 1000));
      if (t < 4) REQUIRE(request.prompt[t] == arrivals[0].request.prompt[t]);
    }
    if (i == 0) continue;
    REQUIRE(arrivals[i].time >= arrivals[i - 1].time);
    if (arrivals[i].time - arrivals[i - 1].time < std::log(2) / 4) ++shorter;
  }
  // The seed is fixed, so these hold always. The median of the gaps is ln 2 / rate.
  CHECK(arrivals.back().time == doctest::Approx(5000).epsilon(0.03));
  CHECK(shorter == doctest::Approx(10000).epsilon(0.03));
  CHECK(arrivals[1].request.prompt != arrivals[2].request.prompt);
  CHECK(poisson_load(load)[777].time == arrivals[777].time);
  load.rate = infinity;
  CHECK(poisson_load(load).back().time == 0);
}

TEST_CASE("latencies are from arrival, and idle time is skipped") {
  FakeEngine engine;
  std::vector<std::size_t> done;
  const std::vector<Arrival> load{arrival(0, 0, 4), arrival(1.5, 1, 2), arrival(100, 2, 1)};
  const LoadReport report = run_load(
      engine, load,
      {.clock = [&] { return engine.time; },
       .progress = [&](double, std::size_t, std::size_t ended) { done.push_back(ended); }});
  CHECK(report.arrived == 3);
  CHECK(report.completed == 3);
  CHECK_FALSE(report.capped);
  CHECK(report.tokens == 7);
  CHECK(report.busy_seconds == 5);
  CHECK(report.seconds == 101);
  CHECK(done == std::vector<std::size_t>{0, 0, 0, 2, 3});
  // Tokens at 1, 2, 3, 4; at 3, 4; at 101.
  CHECK(report.normalised_latency == doctest::Approx((4.0 / 4 + 2.5 / 2 + 1.0) / 3));
  CHECK(report.ttft.p50 == doctest::Approx(1));
  CHECK(report.ttft.p90 == doctest::Approx(1.5));
  CHECK(report.tpot.p50 == doctest::Approx(1));
  CHECK(report.tokens_per_second() == doctest::Approx(7.0 / 5));
}

TEST_CASE("a load that takes too long is ended, and the rest is cancelled") {
  FakeEngine engine;
  const std::vector<Arrival> load{arrival(0, 0, 2), arrival(0, 1, 50), arrival(30, 2, 1)};
  const LoadReport report =
      run_load(engine, load, {.max_seconds = 9, .clock = [&] { return engine.time; }});
  CHECK(report.capped);
  CHECK(report.arrived == 2);
  CHECK(report.completed == 1);
  CHECK(report.tokens == 12);
  CHECK_FALSE(engine.step(0));
}

TEST_CASE("percentiles are values that occurred") {
  CHECK(percentiles({}).p99 == 0);
  CHECK(percentiles({7}).p50 == 7);
  std::vector<double> values;
  for (int i = 100; i > 0; --i) values.push_back(i);
  CHECK(percentiles(values).p50 == 50);
  CHECK(percentiles(values).p90 == 90);
  CHECK(percentiles(values).p99 == 99);
}

TEST_CASE("a trace's blocks become tokens, equal ones equal") {
  const test::TemporaryFile file("trace.jsonl");
  file.write(R"({"timestamp": 0, "input_length": 1030, "output_length": 64, "hash_ids": [4, 9, 1]}
{"timestamp": 500, "input_length": 700, "output_length": 1, "hash_ids": [4, 2]}
{"timestamp": 900, "input_length": 9, "output_length": 3, "hash_ids": [7]}
)");
  TraceLoad load{.path = file.path(),
                 .requests = 2,
                 .shrink = 32,
                 .speed = 2,
                 .max_length = 40,
                 .vocab_size = 99};
  auto arrivals = trace_load(load);
  REQUIRE(arrivals.size() == 2);
  CHECK(arrivals[1].time == 0.25);
  const auto& a = arrivals[0].request;
  const auto& b = arrivals[1].request;
  CHECK(a.prompt.size() == 32);
  CHECK(a.max_length == 34);
  CHECK(b.prompt.size() == 21);
  CHECK(b.max_length == 22);
  CHECK(std::equal(a.prompt.begin(), a.prompt.begin() + 16, b.prompt.begin()));
  CHECK_FALSE(std::equal(a.prompt.begin(), a.prompt.begin() + 21, b.prompt.begin()));
  load.requests = 10;
  load.max_length = 20;
  arrivals = trace_load(load);
  REQUIRE(arrivals.size() == 3);
  CHECK(arrivals[0].request.prompt.size() == 20);
  CHECK(arrivals[0].request.max_length == 20);
  CHECK(arrivals[2].request.prompt.size() == 1);
}

TEST_CASE("a trace that is not one is refused by line and field") {
  const test::TemporaryFile file("trace.jsonl");
  const auto refusal = [&](const std::string& text) -> std::string {
    file.write(text);
    try {
      (void)trace_load({.path = file.path(), .requests = 9, .max_length = 40, .vocab_size = 99});
    } catch (const FileError& error) {
      return error.what();
    }
    return "";
  };
  const std::string good =
      R"({"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [4]})"
      "\n";
  CHECK(refusal(good).empty());
  CHECK(refusal(good + "nonsense").find("line 2: JSON: parse error") != std::string::npos);
  for (const std::string& nested : test::nested_json())
    CHECK(refusal(good + R"({"timestamp": )" + nested + "}")
              .ends_with("line 2: JSON: nested more than 32 levels deep"));
  CHECK(refusal(R"({"timestamp": 0})").find("key 'hash_ids' not found") != std::string::npos);
  CHECK(
      refusal(R"({"timestamp": -1, "hash_ids": []})").find("timestamp = -1: expected 0 to 2^30") !=
      std::string::npos);
  CHECK(refusal(R"({"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [4]})")
            .find("hash_ids has 1 blocks: expected one for each 512 of 600") != std::string::npos);
}
