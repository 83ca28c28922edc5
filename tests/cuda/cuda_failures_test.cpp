// The CUDA backend between a driver of which any call may fail and an engine that goes on: the next
// step is right, or is refused. On the fake device.
#include <doctest/doctest.h>

#include <algorithm>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "simt/walk.hpp"

namespace {

using namespace simt;

struct Outcome {
  bool met = false;      ///< there were so many calls that one of them has failed,
  bool refused = false;  ///< and an error has told
};

/// Makes calls of which the driver's n-th fails.
Outcome failing(int n, const std::function<void()>& calls) {
  Device& driver = device();
  driver.last_error = cudaSuccess;
  driver.fail_any(cudaErrorLaunchFailure, n);
  Outcome outcome;
  try {
    calls();
  } catch (const chunkattn::DeviceError& error) {
    outcome.refused = true;
    CHECK(error.code() == cudaErrorLaunchFailure);
  }
  outcome.met = driver.any_before_failure < 0;
  driver.any_before_failure = -1;
  CHECK((outcome.met || !outcome.refused));
  CHECK(cudaPeekAtLastError() == cudaSuccess);
  CHECK(driver.capture_mode == cudaStreamCaptureModeGlobal);
  CHECK(driver.capturing == nullptr);
  return outcome;
}

/// Everybody's next tokens.
void plan_all(Walk& walk) {
  REQUIRE(walk.plan_step(std::vector<bool>(walk.sequences.size(), true), false));
}
void decode(Walk& walk) {
  plan_all(walk);
  walk.call({});
  walk.submit();
  walk.settle();
}

}  // namespace

TEST_CASE("whichever call of the driver fails, the step is right when it is made again") {
  current_schedule() = {};
  const int sms = std::exchange(device().sms, 1);  // prompts are in large tiles
  {
    Walk walk(81);
    walk.join(130, 9);
    walk.join(130, 25);
    while (walk.sequences[1].num_uncomputed() > 1) decode(walk);
    struct Kind {
      const char* name;
      std::function<void()> before;  // the step
      Walk::Calls calls;
    };
    int size = 5;  // of windows
    const Kind kinds[] = {
        {"the same rows", [] {}, {}},
        {"other rows",
         [&] {
           if (walk.sequences.size() > 2) walk.leave(2);
           decode(walk);
           walk.fork(0);
         },
         {}},
        {"a window in place of another",
         [&] { size = size < 20 ? walk.random.uniform(90, 110) : walk.random.uniform(1, 10); },
         {}},
        {"a prompt",
         [&] {
           while (walk.sequences.size() > 2) walk.leave(2);
           walk.renew();
           walk.join(0, 50);
         },
         {{{}, {Shown::sinks}}}},
        {"a list that is made anew for the same rows",
         [&] {  // which are short: two tokens more are an eighth
           while (!walk.sequences.empty()) walk.leave(0);
           walk.join(0, 3);
           walk.join(0, 4);
           for (int i = 0; i < 2; ++i) decode(walk);
         },
         {}},
        {"a capture", [] {}, {{}, true, false}},
        {"a graph's next step",
         [&] {
           if (walk.has_graph()) return;
           plan_all(walk);
           walk.call({{}, true, false});
           walk.submit();
           walk.settle();
         },
         {{}, false, true}},
    };
    for (const Kind& kind : kinds) {
      CAPTURE(kind.name);
      for (int n = 0;; ++n) {
        CAPTURE(n);
        kind.before();
        Walk::Calls calls = kind.calls;
        if (std::string(kind.name).starts_with("a window"))
          calls.runs = {{Shown::window, {size}}, {Shown::window, {25}}};
        plan_all(walk);
        walk.choose(calls);
        const Outcome outcome = failing(n, [&] { walk.call(); });
        if (outcome.refused) {
          if (n % 2 == 1) {  // another step comes between
            walk.cancel();
            decode(walk);
            plan_all(walk);
          }
          walk.call(calls);
        }
        walk.submit();
        walk.settle();
        if (!outcome.met) break;
      }
    }
  }
  device().sms = sms;
}

TEST_CASE("an engine goes on at random while calls of the driver fail") {
  struct Rates {
    double failures, drafts, other_rows, graphs;
  };
  std::size_t walks = 0;
  for (const Rates rates : {Rates{0.0, 0.5, 0.5, 0.2}, Rates{0.3, 0.3, 0.3, 0.3},
                            Rates{0.5, 0.0, 0.1, 0.1}, Rates{0.3, 0.0, 0.02, 0.4}}) {
    CAPTURE(rates.failures);
    CAPTURE(rates.other_rows);
    const int sms = std::exchange(device().sms, static_cast<int>(walks % 2) + 1);
    {
      Walk walk(82 + walks++);
      test::Random& random = walk.random;
      std::vector<bool> wanted;
      for (int step = 0; step < test::scaled(60); ++step) {
        CAPTURE(step);
        shuffled(random.bits());
        if (random.chance(0.03)) walk.renew();
        if (random.chance(0.1)) walk.change_stream();
        if (walk.sequences.empty() || random.chance(rates.other_rows)) {
          const std::size_t count = walk.sequences.size();
          if (count < 2 || (count < 7 && random.chance(0.4)))
            walk.join(random.pick({0, random.uniform(0, 60), 140}), random.uniform(1, 40));
          else if (random.chance(0.6))
            walk.fork(random.index(count));
          else
            walk.leave(random.index(count));
          wanted.clear();
        }
        if (wanted.size() != walk.sequences.size() || random.chance(rates.other_rows)) {
          wanted.clear();  // some wait, for whom copies of their forks may be made meanwhile
          for (std::size_t i = 0; i < walk.sequences.size(); ++i)
            wanted.push_back(random.chance(0.7));
        }
        if (!walk.plan_step(wanted, random.chance(rates.drafts))) {
          walk.settle();
          continue;
        }
        Walk::Calls calls;
        calls.runs.clear();
        for (int i = random.uniform(1, 3); i > 0; --i)
          calls.runs.push_back({random.pick({Shown::plain, Shown::window, Shown::window,
                                             random.chance(0.2) ? Shown::sinks : Shown::plain}),
                                {random.pick({3, 20, 30, 110}), random.pick({0, 0, 2})}});
        if (random.chance(rates.graphs)) {
          calls.replayed = walk.has_graph() && random.chance(0.8);
          calls.captured = !calls.replayed;
        }
        walk.choose(calls);
        bool made = false;
        while (!made) {
          const int n = random.chance(rates.failures) ? random.uniform(0, 40) : -1;
          const OnDevice current(random.uniform(0, 1));
          made = !failing(n, [&] { walk.call(); }).refused;
          if (!made && random.chance(0.4)) break;
        }
        if (made)
          walk.submit();
        else
          walk.cancel();
        if (calls.replayed || calls.captured || random.chance(0.7)) walk.settle();
      }
      walk.settle();
    }
    device().sms = sms;
  }
  CHECK(device().capture_violations == 0);
}

TEST_CASE("rows that a caller places anywhere are written there") {
  current_schedule() = {};
  test::Random random(86);
  for (int i = 0; i < test::scaled(100); ++i) {
    test::RandomPlanOptions options;
    options.share = random.pick({test::Share::none, test::Share::some});
    options.reserve_chance = 1;
    test::RandomPlan plan = test::make_random_plan(random, options);
    ChunkAttention<Cuda, head_dim> attention(Engine::limits());
    Stream stream;
    for (int step = 0; step < 8; ++step) {
      const chunkattn::PlanView view = plan.view();
      for (std::size_t row = 0; row < plan.row_kv_len.size(); ++row) {
        auto& write = plan.writes[static_cast<std::size_t>(plan.row_token[row])];
        write = chunkattn::detail::cuda::locate(view.segments, view.pieces, plan.row_segment[row],
                                                plan.row_kv_len[row]++);
        if (write.chunk == chunkattn::no_chunk) write = {0, 0};
      }
      auto& moved = plan.writes[random.index(plan.writes.size())];
      const int what = random.uniform(0, 4);
      if (what == 1) moved.offset = (moved.offset + 1) % options.chunk_size;
      if (what == 2) moved.chunk = (moved.chunk + 1) % plan.num_chunks;
      if (what == 3) moved = {chunkattn::no_chunk, 0};
      if (what == 4) ++plan.row_kv_len[random.index(plan.row_kv_len.size())];  // two more
      attention.prepare(plan.view(), &stream);
      stream.drain();
      const auto* const on_device = chunkattn::plan_upload_of(attention).memory().writes;
      const auto* const lengths = chunkattn::plan_upload_of(attention).memory().row_kv_len;
      CHECK(std::equal(plan.row_kv_len.begin(), plan.row_kv_len.end(), lengths));
      for (std::size_t token = 0; token < plan.writes.size(); ++token) {
        CHECK(on_device[token].chunk == plan.writes[token].chunk);
        CHECK(on_device[token].offset == plan.writes[token].offset);
      }
    }
  }
}
