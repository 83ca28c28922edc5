// What requests may ask of sampling beside temperature and top_p: top_k, min_p, penalties, biases,
// log-probabilities, where a text ends; and that each request gets its own, whoever else is in the
// batch. The seeds of the statistics are fixed, so that luck has no part.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "engine/sampling.hpp"
#include "model/load.hpp"
#include "tests/support/random.hpp"

using namespace serve;

namespace {

const std::vector<float> logits{1.0f, -0.5f, 2.0f, 0.25f, 1.5f, -1.0f, 2.0f, 0.0f};

/// What is left of softmax, token by token: those of at least min_p times the greatest probability,
/// of these the top_k most likely, of these the fewest that have top_p of what is left.
std::vector<double> distribution(const Sampling& s) {
  std::vector<double> p;
  for (const float logit : logits) p.push_back(std::exp(logit / s.temperature));
  const double greatest = *std::max_element(p.begin(), p.end());
  std::vector<std::size_t> order;
  for (std::size_t i = 0; i < p.size(); ++i)
    if (p[i] >= s.min_p * greatest) order.push_back(i);
  std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) { return p[a] > p[b]; });
  if (s.top_k > 0) order.resize(std::min(order.size(), static_cast<std::size_t>(s.top_k)));
  double all = 0, kept = 0;
  for (const std::size_t i : order) all += p[i];
  std::vector<double> q(p.size());
  for (const std::size_t i : order) {
    if (kept >= s.top_p * all && kept > 0) break;
    kept += q[i] = p[i];
  }
  for (double& one : q) one /= kept;
  return q;
}

/// Pearson's statistic; infinite where the impossible happened.
double chi_square(const std::vector<int>& counts, const std::vector<double>& p, int draws) {
  double sum = 0;
  for (std::size_t i = 0; i < p.size(); ++i) {
    const double expected = p[i] * draws;
    if (expected == 0 && counts[i] > 0) return std::numeric_limits<double>::infinity();
    if (expected > 0) sum += (counts[i] - expected) * (counts[i] - expected) / expected;
  }
  return sum;
}

std::string refusal(const Sampling& sampling) {
  try {
    check_sampling(sampling);
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "";
}

// --- a batch
// ---------------------------------------------------------------------------------------

/// What became of a choice: its tokens, and every number that was reported of them.
struct Said {
  std::vector<int> tokens;
  Finish finish = Finish::none;
  int stop_token = -1;
  std::vector<std::pair<int, float>> logprobs;
  bool operator==(const Said&) const = default;
};

struct SmallModel {
  chunkattn::ThreadPool pool{2};
  Model model =
      random_model({64, 172, 2, 8, 4, 300, 256, true, 1e-5f, 10000.0f}, Element::fp32, 7, pool);
  std::vector<int> stop;  ///< tokens that end texts, of the engine

  /// By request and choice.
  std::map<std::pair<RequestId, int>, Said> run(const std::vector<Request>& requests,
                                                std::size_t max_chunks,
                                                int* preemptions = nullptr) {
    Products products(pool, ProductKind::own);
    EngineOptions options;
    options.chunk_size = 8;
    options.max_chunks = max_chunks;
    options.stop = stop;
    options.reduce = chunkattn::CpuOptions::Reduce::batch_invariant;
    const auto engine = make_engine(model, products, options);
    for (const Request& request : requests) engine->submit(request);
    std::map<std::pair<RequestId, int>, Said> all;
    while (engine->step(0))
      for (const Event& event : engine->take_events()) {
        Said& said = all[{event.id, event.choice}];
        if (event.token >= 0) said.tokens.push_back(event.token);
        said.finish = event.finish;
        said.stop_token = event.stop_token;
        for (const TokenLogprob& one : event.logprobs)
          said.logprobs.emplace_back(one.token, one.logprob);
      }
    if (preemptions != nullptr) *preemptions = engine->stats().preemptions;
    return all;
  }
};

double uniform(test::Random& random, double low, double high) {
  return low + (high - low) * static_cast<double>(random.bits() >> 11) * 0x1p-53;
}

Request random_request(test::Random& random, RequestId id) {
  Request request;
  request.id = id;
  for (int n = random.uniform(1, 20); n > 0; --n) request.prompt.push_back(random.uniform(3, 9));
  request.max_length = request.prompt.size() + static_cast<std::size_t>(random.uniform(5, 40));
  request.choices = random.uniform(1, 3);
  Sampling& sampling = request.sampling;
  const auto now_and_then = [&] { return random.uniform(0, 2) == 0; };
  sampling.temperature = now_and_then() ? 0 : uniform(random, 0.5, 2.0);
  sampling.seed = random.bits();
  if (now_and_then()) sampling.top_p = uniform(random, 0.1, 1.0);
  if (now_and_then()) sampling.top_k = random.uniform(1, 50);
  if (now_and_then()) sampling.min_p = uniform(random, 0.0, 0.5);
  if (now_and_then()) sampling.frequency_penalty = uniform(random, -2.0, 2.0);
  if (now_and_then()) sampling.presence_penalty = uniform(random, -2.0, 2.0);
  if (now_and_then()) sampling.repetition_penalty = uniform(random, 0.5, 2.0);
  if (now_and_then()) request.min_tokens = static_cast<std::size_t>(random.uniform(1, 5));
  request.ignore_eos = now_and_then();
  if (now_and_then())
    for (int token = 0; token < 300; token += random.uniform(1, 30))
      request.stop_tokens.push_back(token);
  if (now_and_then())
    for (int token = 10; token < 14; ++token)
      request.logit_bias.push_back({token, static_cast<float>(uniform(random, -9.0, 9.0))});
  if (now_and_then()) request.logprobs = random.uniform(0, 5);
  return request;
}

}  // namespace

TEST_CASE("top_k, min_p and top_p leave what they should, with its probabilities") {
  constexpr int draws = 50000;
  constexpr double bound = 45;  // 7 degrees of freedom: passed once in 7 million seeds
  Sampler sampler;
  for (const double temperature : {0.5, 1.0, 2.0})
    for (const int top_k : {0, 1, 2, 5, 8, 1000})
      for (const double min_p : {0.0, 0.1, 0.6, 1.0})
        for (const double top_p : {1.0, 0.7}) {
          const Sampling sampling{temperature, top_p, 5, top_k, min_p, 0, 0};
          const auto p = distribution(sampling);
          std::vector<int> counts(logits.size());
          for (int i = 0; i < draws; ++i)
            ++counts[static_cast<std::size_t>(
                sampler.sample(logits, sampling, 0, static_cast<std::size_t>(i)))];
          CAPTURE(temperature);
          CAPTURE(top_k);
          CAPTURE(min_p);
          CAPTURE(top_p);
          CHECK(chi_square(counts, p, draws) < bound);
        }
  // Of equal ones the first is kept.
  for (std::size_t at = 0; at < 100; ++at)
    CHECK(sampler.sample(logits, {1, 1, 3, 1, 0, 0, 0}, 0, at) == 2);
}

TEST_CASE("the same seed draws the same tokens, another one others") {
  Sampler sampler;
  int differ = 0;
  for (std::size_t at = 0; at < 1000; ++at) {
    const Sampling sampling{1.5, 0.9, 11, 6, 0.05, 0, 0};
    Sampling other = sampling;
    other.seed = 12;
    const int token = sampler.sample(logits, sampling, 0, at);
    CHECK(Sampler().sample(logits, sampling, 0, at) == token);
    differ += sampler.sample(logits, other, 0, at) != token ? 1 : 0;
  }
  CHECK(differ > 500);  // of six tokens, of which none has more than 0.3
}

TEST_CASE("penalties and biases, computed by hand") {
  Sampler sampler;
  const std::vector<float> four{1, 2, 3, 4};
  Request request;
  const auto adjusted = [&](const TokenCounts& counts) {
    const auto values = sampler.adjusted(four, request, {counts});
    return std::vector<float>(values.begin(), values.end());
  };
  CHECK(adjusted({}) == four);
  request.sampling.frequency_penalty = 0.5;
  request.sampling.presence_penalty = 0.25;
  CHECK(adjusted({{0, 1}, {3, 2}}) == std::vector<float>{0.25f, 2, 3, 2.75f});
  request.sampling.frequency_penalty = -1;  // what was said is more likely
  CHECK(adjusted({{1, 3}}) == std::vector<float>{1, 4.75f, 3, 4});
  request.sampling.frequency_penalty = 0;
  CHECK(adjusted({{1, 3}}) == std::vector<float>{1, 1.75f, 3, 4});
  request.logit_bias = {{1, 5}, {3, -100}};
  CHECK(adjusted({}) == std::vector<float>{1, 7, 3, -96});
  CHECK(adjusted({{1, 1}}) == std::vector<float>{1, 6.75f, 3, -96});

  // Greedily with the same logits again and again: 3.0 falls to 2.3, 1.9, 1.5; 2.5 to 1.8; 2
  // to 1.3.
  request.logit_bias.clear();
  request.sampling = {};
  request.sampling.frequency_penalty = 0.4;
  request.sampling.presence_penalty = 0.3;
  const std::vector<float> three{3, 2.5f, 2};
  TokenCounts counts;
  std::vector<int> said;
  for (std::size_t at = 0; at < 6; ++at) {
    said.push_back(
        sampler.sample(sampler.adjusted(three, request, {counts}), request.sampling, 0, at));
    ++counts[said.back()];
  }
  CHECK(said == std::vector<int>{0, 1, 0, 2, 0, 1});
}

TEST_CASE(
    "the repetition penalty is of prompt and text, each token once, before the other penalties") {
  Sampler sampler;
  const std::vector<float> six{4, -4, 2, -2, 1, 0};
  Request request;
  const auto adjusted = [&](const SoFar& so_far) {
    const auto values = sampler.adjusted(six, request, so_far);
    return std::vector<float>(values.begin(), values.end());
  };
  CHECK(each_once(std::vector<int>{3, 0, 3, 1, 0}) == std::vector<int>{0, 1, 3});
  const std::vector<int> prompt{0, 1};
  const TokenCounts counts{{1, 5}, {2, 1}, {3, 2}};
  CHECK(adjusted({counts, prompt}) == six);
  request.sampling.repetition_penalty = 2;
  CHECK(request.sampling.has_penalties());
  CHECK(adjusted({{}, prompt}) == std::vector<float>{2, -8, 2, -2, 1, 0});
  CHECK(adjusted({counts, prompt}) == std::vector<float>{2, -8, 1, -4, 1, 0});
  request.sampling.repetition_penalty = 0.5;  // what was said is more likely
  CHECK(adjusted({counts, prompt}) == std::vector<float>{8, -2, 4, -1, 1, 0});
  request.sampling.repetition_penalty = 2;
  request.sampling.frequency_penalty = 0.25;
  request.sampling.presence_penalty = 1;
  request.logit_bias = {{0, -6}, {2, 4}};  // these come first
  CHECK(adjusted({counts, prompt}) == std::vector<float>{-4, -10.25f, 1.75f, -5.5f, 1, 0});
  // Tokens that may not come yet do not, whatever speaks for them.
  request.logit_bias = {{4, 100}};
  constexpr float never = -std::numeric_limits<float>::infinity();
  const std::vector<int> ends{0, 4};
  CHECK(adjusted({{}, {}, ends}) == std::vector<float>{never, -4, 2, -2, never, 0});
}

TEST_CASE("log-probabilities are those of softmax, the greatest first") {
  double sum = 0;
  for (const float logit : logits) sum += std::exp(static_cast<double>(logit));
  const auto all = logprobs_of(logits, 5, 20);  // there are eight
  REQUIRE(all.size() == 9);
  CHECK(all[0].token == 5);
  const int order[] = {2, 6, 4, 0, 3, 7, 1, 5};  // of equal ones the first
  double together = 0;
  for (std::size_t i = 1; i < all.size(); ++i) {
    const auto token = static_cast<std::size_t>(order[i - 1]);
    CHECK(all[i].token == order[i - 1]);
    CHECK(all[i].logprob == doctest::Approx(logits[token] - std::log(sum)));
    together += std::exp(static_cast<double>(all[i].logprob));
  }
  CHECK(together == doctest::Approx(1));
  CHECK(all[0].logprob == all[8].logprob);
  CHECK(logprobs_of(logits, 3, 0).size() == 1);
  const float nan = std::numeric_limits<float>::quiet_NaN();
  CHECK(logprobs_of(std::vector<float>{1, nan, 2}, 0, 2)[1].token == 2);
  const float infinity = std::numeric_limits<float>::infinity();
  const auto none = logprobs_of(std::vector<float>{1, -infinity}, 1, 2);
  CHECK(none[0].logprob == -infinity);
  CHECK(none[1].logprob == 0);
}

TEST_CASE("parameters out of range are refused by name") {
  const double nan = std::nan("");
  CHECK(refusal({1, 1, 0, 5, 1, 2, -2}).empty());
  CHECK(refusal({1, 1, 0, -1, 0, 0, 0}).starts_with("top_k = -1"));
  CHECK(refusal({1, 1, 0, 0, 1.5, 0, 0}) == "min_p = 1.500000: expected 0 to 1");
  CHECK(refusal({1, 1, 0, 0, nan, 0, 0}).starts_with("min_p = nan"));
  CHECK(refusal({1, 1, 0, 0, 0, 2.5, 0}).starts_with("frequency_penalty = 2.5"));
  CHECK(refusal({1, 1, 0, 0, 0, 0, nan}).starts_with("presence_penalty = nan"));
  CHECK(refusal({1, 1, 0, 0, 0, 0, 0, 0}) ==
        "repetition_penalty = 0.000000: expected more than 0, at most 100");
  CHECK(refusal({1, 1, 0, 0, 0, 0, 0, 101}).starts_with("repetition_penalty = 101"));
  CHECK(refusal({1, 1, 0, 0, 0, 0, 0, nan}).starts_with("repetition_penalty = nan"));

  SmallModel s;
  const auto engine_refusal = [&](LogitBias bias, int logprobs) -> std::string {
    Request request;
    request.prompt = {5};
    request.max_length = 2;
    request.logit_bias = {bias};
    request.logprobs = logprobs;
    try {
      (void)s.run({request}, 50);
    } catch (const std::invalid_argument& error) {
      return error.what();
    }
    return "";
  };
  Request stopped{.prompt = {5}, .max_length = 2, .stop_tokens = {299, 300}};
  CHECK_THROWS_WITH_AS((void)s.run({stopped}, 50),
                       "request 0: a token of stop_tokens = 300: expected a token of the model",
                       std::invalid_argument);
  CHECK(engine_refusal({299, -100}, 20).empty());
  CHECK(engine_refusal({300, 0}, 0).find("logit_bias = 300: expected a token") !=
        std::string::npos);
  CHECK(engine_refusal({-1, 0}, 0).find("logit_bias = -1") != std::string::npos);
  CHECK(engine_refusal({5, 101}, 0).find("logit_bias = 101") != std::string::npos);
  CHECK(engine_refusal({5, 1}, 21).find("logprobs = 21") != std::string::npos);
}

TEST_CASE("each request of a batch is sampled by its own parameters, as if it were alone") {
  test::Random random(20);
  SmallModel s;
  for (int token = 7; token < 300; token += 25) s.stop.push_back(token);
  std::vector<Request> requests;
  for (RequestId id = 1; id <= 24; ++id) requests.push_back(random_request(random, id));
  std::map<std::pair<RequestId, int>, Said> alone;
  for (const Request& request : requests) alone.merge(s.run({request}, 400));
  CHECK(s.run(requests, 400) == alone);
  int preemptions = 0;  // which lose neither counts nor seeds
  CHECK(s.run(requests, 40, &preemptions) == alone);
  CHECK(preemptions > 0);
  std::reverse(requests.begin(), requests.end());
  CHECK(s.run(requests, 400) == alone);
}

TEST_CASE("an engine adds biases, counts what it generates for each choice, and reports neither") {
  SmallModel s;
  Request request;
  request.prompt = {5, 100, 6};
  request.max_length = 43;
  request.logprobs = 3;
  const Said plain = s.run({request}, 50)[{0, 0}];
  REQUIRE(plain.tokens.size() == 40);
  for (std::size_t i = 0; i < plain.tokens.size(); ++i) {
    CHECK(plain.logprobs[4 * i] == plain.logprobs[4 * i + 1]);  // greedy: the most likely one
    CHECK(plain.logprobs[4 * i].first == plain.tokens[i]);
  }
  request.logit_bias = {{100, 100}, {200, 100}};
  request.sampling.frequency_penalty = 2;
  request.choices = 2;
  auto biased = s.run({request}, 50);
  CHECK(biased[{0, 0}] == biased[{0, 1}]);  // greedy, so they count alike
  const Said& said = biased[{0, 0}];
  const auto hundreds = std::count(said.tokens.begin(), said.tokens.end(), 100);
  const auto both = hundreds + std::count(said.tokens.begin(), said.tokens.end(), 200);
  CHECK(both == 40);
  CHECK(std::abs(2 * hundreds - both) <= 10);  // logits of this model are less than 10 apart
  // At the first token the model is asked the same, and answers the same.
  for (std::size_t i = 1; i < 4; ++i) CHECK(said.logprobs[i] == plain.logprobs[i]);
}

TEST_CASE(
    "a text ends at its own stop tokens and at the model's, after min_tokens and unless ignored") {
  SmallModel s;
  Request request;
  request.prompt = {5, 100, 6};
  request.max_length = 43;
  const std::vector<int> plain = s.run({request}, 50)[{0, 0}].tokens;
  REQUIRE(plain.size() == 40);
  const auto first = [&](int token) {
    return static_cast<std::size_t>(std::find(plain.begin(), plain.end(), token) - plain.begin());
  };
  std::vector<int> distinct = each_once(plain);
  std::sort(distinct.begin(), distinct.end(), [&](int a, int b) { return first(a) < first(b); });
  REQUIRE(distinct.size() >= 4);
  const int end = distinct[2], own = distinct.back();
  const auto begins = [&](const std::vector<int>& tokens) {
    return std::equal(tokens.begin(), tokens.end(), plain.begin());
  };
  const auto run = [&] { return s.run({request}, 50)[{0, 0}]; };

  s.stop = {end};
  request.stop_tokens = {own, end};
  Said said = run();
  CHECK(begins(said.tokens));
  CHECK(said.tokens.size() == first(end));
  CHECK(said.finish == Finish::stop);
  CHECK(said.stop_token == -1);  // the model's own end needs no reason
  request.ignore_eos = true;     // not those of the request
  said = run();
  CHECK(said.tokens.size() == first(end));
  CHECK(said.stop_token == end);
  request.stop_tokens = {own};
  said = run();
  CHECK(begins(said.tokens));
  CHECK(said.tokens.size() == first(own));
  CHECK(said.stop_token == own);
  request.stop_tokens = {};
  said = run();
  CHECK(said.tokens == plain);
  CHECK(said.finish == Finish::length);
  CHECK(said.stop_token == -1);

  // Until min_tokens are there, others come in place of those that would end the text; then they
  // may.
  for (const std::size_t min_tokens : {first(end), first(end) + 1, std::size_t{40}}) {
    CAPTURE(min_tokens);
    request.min_tokens = min_tokens;
    request.ignore_eos = false;
    said = run();
    CHECK(said.tokens.size() >= min_tokens);
    for (std::size_t i = 0; i < min_tokens; ++i) CHECK(said.tokens[i] != end);
    CHECK(begins({said.tokens.begin(), said.tokens.begin() + static_cast<long>(first(end))}));
    if (min_tokens != first(end) + 1) CHECK(said.tokens.size() == min_tokens);
    request.ignore_eos = true;  // nor do they come where they would not end it, as vLLM has it
    request.stop_tokens = {};
    CHECK(run().tokens[first(end)] == (min_tokens == first(end) ? end : said.tokens[first(end)]));
  }
  request.min_tokens = 10;
  request.ignore_eos = false;
  request.logit_bias = {{200, 100}};
  request.stop_tokens = {200};
  said = run();
  CHECK(said.tokens.size() == 10);
  CHECK(std::count(said.tokens.begin(), said.tokens.end(), 200) == 0);
  CHECK(said.stop_token == 200);
}

TEST_CASE(
    "an engine's repetition penalty knows the prompt of each choice, and what the choice has "
    "said") {
  SmallModel s;
  Request request;
  for (int token = 0; token < 200; ++token) request.prompt.push_back(token);
  request.max_length = 240;
  request.choices = 2;
  request.sampling.repetition_penalty = 100;
  const auto all = s.run({request}, 100);
  for (const int choice : {0, 1}) {
    const std::vector<int>& tokens = all.at({0, choice}).tokens;
    REQUIRE(tokens.size() == 40);
    CHECK(each_once(tokens).size() == 40);  // nothing comes twice, nor what the prompt has
    CHECK(*std::min_element(tokens.begin(), tokens.end()) >= 200);
  }
}
