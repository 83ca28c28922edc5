// The forward pass and the engine: recorded texts with plain attention and with ours, the same text
// in any company, logits with the same bits for 1 to 64 rows, and an engine short of chunks.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "engine/engine.hpp"
#include "engine/step_budget.hpp"
#include "files.hpp"
#include "model/forward.hpp"
#include "model/load.hpp"
#include "tests/support/random.hpp"
#include "text/tokenizer.hpp"

using namespace serve;

namespace {

const Config small{64, 172, 3, 8, 4, 300, 256, true, 1e-5f, 10000.0f};

/// Attention over a cache of one sequence, as it is written down: what ChunkAttention stands for.
class PlainAttention {
 public:
  explicit PlainAttention(const Config& config)
      : config_(config), k_(to_size(config.num_layers)), v_(k_) {}

  void operator()(int layer, std::span<const float> q, std::span<const float> k,
                  std::span<const float> v, std::span<float> out) {
    auto& keys = k_[to_size(layer)];
    auto& values = v_[to_size(layer)];
    const std::size_t kv_dim = to_size(config_.kv_dim()), dim = to_size(config_.dim);
    for (std::size_t row = 0; row < q.size() / dim; ++row) {
      keys.insert(keys.end(), k.data() + row * kv_dim, k.data() + (row + 1) * kv_dim);
      values.insert(values.end(), v.data() + row * kv_dim, v.data() + (row + 1) * kv_dim);
      const std::size_t head_dim = to_size(config_.head_dim()), group = dim / kv_dim;
      for (std::size_t h = 0; h < dim / head_dim; ++h)
        attend(q.data() + row * dim + h * head_dim, keys.data() + h / group * head_dim,
               values.data() + h / group * head_dim, keys.size() / kv_dim,
               out.data() + row * dim + h * head_dim);
    }
  }

 private:
  void attend(const float* q, const float* k, const float* v, std::size_t tokens, float* out) {
    const std::size_t d = to_size(config_.head_dim()), stride = to_size(config_.kv_dim());
    std::vector<double> p(tokens), o(d);
    double largest = -1e300, sum = 0;
    for (std::size_t t = 0; t < tokens; ++t) {
      for (std::size_t i = 0; i < d; ++i) p[t] += double(q[i]) * double(k[t * stride + i]);
      p[t] /= std::sqrt(double(d));
      largest = std::max(largest, p[t]);
    }
    for (std::size_t t = 0; t < tokens; ++t) {
      p[t] = std::exp(p[t] - largest);
      sum += p[t];
      for (std::size_t i = 0; i < d; ++i) o[i] += p[t] * double(v[t * stride + i]);
    }
    for (std::size_t i = 0; i < d; ++i) out[i] = static_cast<float>(o[i] / sum);
  }

  Config config_;
  std::vector<std::vector<float>> k_, v_;
};

/// Greedy tokens of one sequence, its prompt in one pass or in passes of one row.
std::vector<int> generate_plainly(const Model& model, chunkattn::ThreadPool& pool,
                                  std::vector<int> tokens, std::size_t max_length, int stop,
                                  bool prompt_at_once) {
  Products products(pool, ProductKind::own);
  Forward forward(model, products);
  PlainAttention attention(model.config);
  std::size_t done = 0;
  while (tokens.size() < max_length) {
    const std::size_t rows = prompt_at_once ? tokens.size() - done : 1;
    std::vector<int> positions;
    for (std::size_t r = 0; r < rows; ++r) positions.push_back(static_cast<int>(done + r));
    const std::vector<int> last{static_cast<int>(rows) - 1};
    const auto logits =
        forward.run(std::span(tokens).subspan(done, rows), positions, last, attention);
    done += rows;
    if (done < tokens.size()) continue;
    const int next = argmax(logits);
    if (next == stop) break;
    tokens.push_back(next);
  }
  return tokens;
}

/// What became of a request of one choice.
struct Text {
  std::vector<int> tokens;  ///< prompt and generated ones
  std::size_t cached = 0;
};

/// Runs all requests, `together` of them joining in each step; texts by id.
std::map<RequestId, Text> run_engine(const Model& model, chunkattn::ThreadPool& pool,
                                     const EngineOptions& options,
                                     const std::vector<Request>& requests, std::size_t together,
                                     EngineStats* stats = nullptr) {
  Products products(pool, ProductKind::own);
  const auto engine = make_engine(model, products, options);
  std::map<RequestId, Text> texts;
  for (const Request& request : requests) texts[request.id].tokens = request.prompt;
  std::size_t next = 0, ended = 0;
  for (;;) {
    for (std::size_t i = 0; i < together && next < requests.size(); ++i)
      engine->submit(requests[next++]);
    const bool worked = engine->step(0);
    for (const Event& event : engine->take_events()) {
      Text& text = texts.at(event.id);
      text.cached += event.cached;
      if (event.token >= 0) text.tokens.push_back(event.token);
      if (event.finish != Finish::none) ++ended;
    }
    if (!worked && next == requests.size()) break;
  }
  CHECK(ended == requests.size());
  if (stats != nullptr) *stats = engine->stats();
  return texts;
}

/// Prompts of which many begin alike.
std::vector<Request> random_requests(test::Random& random, int count) {
  std::vector<int> shared(40);
  for (int& token : shared) token = random.uniform(3, 299);
  std::vector<Request> requests;
  for (int i = 0; i < count; ++i) {
    Request request;
    request.id = to_size(i);
    const auto common = shared.begin() + random.uniform(0, 40);
    request.prompt.assign(shared.begin(), common);
    for (int n = random.uniform(1, 20); n > 0; --n)
      request.prompt.push_back(random.uniform(3, 299));
    request.max_length = request.prompt.size() + to_size(random.uniform(0, 30));
    requests.push_back(std::move(request));
  }
  return requests;
}

}  // namespace

TEST_CASE("the forward pass reproduces the recorded texts with plain attention") {
  const std::string folder = test::stories_folder();
  if (folder.empty()) return;
  chunkattn::ThreadPool pool(2);
  const Model model = load_llama2c(folder + "/stories260K.bin", Element::fp32);
  const auto tokenizer = read_llama2c_tokenizer(folder + "/tok512.bin", model.config.vocab_size);
  std::string greedy = test::read_text(folder + "/stories260K.greedy.txt");
  if (greedy.ends_with('\n')) greedy.pop_back();
  const auto text = [&](const std::string& prompt, int steps, bool at_once) {
    return tokenizer->decode(generate_plainly(model, pool, tokenizer->encode_prompt(prompt),
                                              to_size(steps) + 1, tokenizer->bos(), at_once));
  };
  CHECK(text("", 256, false) == greedy);
  const auto recorded =
      nlohmann::json::parse(test::read_text(folder + "/stories260K.prompts.json"));
  REQUIRE(recorded.size() == 6);
  for (const auto& entry : recorded)
    for (const bool at_once : {true, false})
      CHECK(text(entry.at("prompt").get<std::string>(), entry.at("steps").get<int>(), at_once) ==
            entry.at("text").get<std::string>());
}

TEST_CASE("batch-invariant: the logits of a row have the same bits among 1 to 64 rows") {
  chunkattn::ThreadPool pool(2);
  const Model model = random_model(small, Element::bf16, 5, pool);
  Products products(pool, ProductKind::own);
  using Tree = chunkattn::PrefixTree<int, 16>;
  test::Random random(3);
  std::vector<std::vector<int>> prompts(64, std::vector<int>(20, 7));
  for (auto& prompt : prompts)
    for (int i = 0; i < 10; ++i) prompt.push_back(random.uniform(3, 299));
  std::vector<float> first_alone;
  for (int rows = 1; rows <= 64; ++rows) {
    Forward forward(model, products);
    Tree tree({}, {}, {.retains = false});
    chunkattn::AttentionPlan plan;
    const auto attention =
        make_attention(KvType::bf16, tree, model.config, pool,
                       {.reduce = chunkattn::CpuOptions::Reduce::batch_invariant});
    std::vector<Tree::Sequence> sequences;
    std::vector<float> logits;
    // All decode at once in the second step; the one that is looked at stands last.
    for (int i = rows - 1; i >= 0; --i) sequences.push_back(tree.insert(prompts[to_size(i)]));
    for (int s = 0; s < 2; ++s) {
      Tree::Step step = tree.begin_step();
      std::vector<int> logit_rows;
      for (auto& sequence : sequences) {
        const auto added = step.add(sequence);
        REQUIRE(added);
        logit_rows.push_back(added.row().output_row());
      }
      const auto view = plan.build(step);
      const auto tokens = view.tokens();
      const auto positions = view.positions();
      const auto got =
          forward.run(tokens, positions, logit_rows,
                      [&](int layer, std::span<const float> q, std::span<const float> k,
                          std::span<const float> v,
                          std::span<float> out) { attention->run(layer, view, q, k, v, out); });
      logits.assign(got.end() - small.vocab_size, got.end());
      Tree::Finished finished = std::move(step).finish();
      finished.commit(std::vector<int>(to_size(rows), 11));
    }
    if (rows == 1) first_alone = logits;
    CAPTURE(rows);
    CHECK(std::memcmp(logits.data(), first_alone.data(), logits.size() * sizeof(float)) == 0);
  }
}

TEST_CASE("each request says what it says alone, whatever joins it and however chunks are cut") {
  test::Random random(4);
  chunkattn::ThreadPool pool(2);
  const Model model = random_model(small, Element::fp32, 6, pool);
  const auto requests = random_requests(random, 24);
  std::map<RequestId, std::vector<int>> alone;
  for (const Request& request : requests)
    alone[request.id] = generate_plainly(model, pool, request.prompt, request.max_length, -1, true);
  for (const int chunk_size : {8, 16, 32, 64})
    for (const auto sharing :
         {chunkattn::TreeOptions::Sharing::token, chunkattn::TreeOptions::Sharing::chunk}) {
      EngineOptions options;
      options.chunk_size = chunk_size;
      options.sharing = sharing;
      options.step_tokens = to_size(random.uniform(1, 100));
      options.reduce = chunkattn::CpuOptions::Reduce::batch_invariant;
      EngineStats stats;
      const auto texts =
          run_engine(model, pool, options, requests, to_size(random.uniform(1, 24)), &stats);
      std::size_t cached = 0, prompts = 0;
      for (const Request& request : requests) {
        CHECK(texts.at(request.id).tokens == alone.at(request.id));
        cached += texts.at(request.id).cached;
        prompts += request.prompt.size();
      }
      if (sharing == chunkattn::TreeOptions::Sharing::token) CHECK(cached > 0);
      CHECK(stats.cached_tokens == cached);
      CHECK(stats.prompt_tokens == prompts);
      CHECK(stats.chunks <= stats.unshared_chunks + 24);
      CHECK(stats.preemptions == 0);
    }
}

TEST_CASE("an engine short of chunks preempts, computes again, and says the same") {
  test::Random random(5);
  chunkattn::ThreadPool pool(1);
  const Model model = random_model(small, Element::fp32, 8, pool);
  auto requests = random_requests(random, 20);
  for (Request& request : requests) request.max_length = request.prompt.size() + 40;
  EngineOptions options;
  options.chunk_size = 8;
  options.reduce = chunkattn::CpuOptions::Reduce::batch_invariant;
  const auto plenty = run_engine(model, pool, options, requests, 20);
  options.max_chunks = 20;  // the longest alone takes 13
  EngineStats stats;
  const auto few = run_engine(model, pool, options, requests, 20, &stats);
  CHECK(stats.preemptions > 0);
  for (const auto& [id, text] : plenty) CHECK(few.at(id).tokens == text.tokens);
}

TEST_CASE("texts end at stop tokens, at their length, and where the model's positions end") {
  chunkattn::ThreadPool pool(1);
  const Model model = random_model(small, Element::fp32, 9, pool);
  Request request{1, {5, 6, 7}, 50};
  EngineOptions options;
  const auto tokens = run_engine(model, pool, options, {request}, 1).at(1).tokens;
  CHECK(tokens.size() == 50);
  options.stop = {tokens[20]};
  std::size_t expected = 3;
  while (tokens[expected] != tokens[20]) ++expected;
  CHECK(run_engine(model, pool, options, {request}, 1).at(1).tokens.size() == expected);
  options.stop = {};
  request.max_length = 3;
  CHECK(run_engine(model, pool, options, {request}, 1).at(1).tokens == request.prompt);
  request.max_length = 100000;
  CHECK(run_engine(model, pool, options, {request}, 1).at(1).tokens.size() == 257);
}

TEST_CASE("what can never run is refused when it is submitted") {
  chunkattn::ThreadPool pool(1);
  const Model model = random_model(small, Element::fp32, 9, pool);
  Products products(pool, ProductKind::own);
  EngineOptions options;
  options.chunk_size = 8;
  options.max_chunks = 4;
  const auto engine = make_engine(model, products, options);
  const auto refusal = [&](Request request) -> std::string {
    try {
      engine->submit(std::move(request));
    } catch (const std::invalid_argument& error) {
      return error.what();
    }
    return "";
  };
  CHECK(refusal({1, {}, 5}).find("tokens of the prompt = 0: expected 1 to") != std::string::npos);
  CHECK(refusal({1, std::vector<int>(300, 4), 300}).find("= 300") != std::string::npos);
  CHECK(refusal({1, {3, 4}, 1}).find("max_length = 1: expected at least") != std::string::npos);
  CHECK(refusal({1, {3, 4}, 25}).find("no more than 24") != std::string::npos);
  CHECK(refusal({1, {3, 300}, 5}).find("a token of the prompt = 300") != std::string::npos);
  CHECK(refusal({1, {3, 4}, 24}).empty());
  options.chunk_size = 24;
  CHECK_THROWS_AS((void)make_engine(model, products, options), std::invalid_argument);
  Config odd = small;
  odd.num_qo_heads = odd.num_kv_heads = 2;  // heads of 32
  const Model other = random_model(odd, Element::fp32, 1, pool);
  options.chunk_size = 8;
  CHECK_THROWS_AS((void)make_engine(other, products, options), std::invalid_argument);
}

TEST_CASE("argmax is the first of the largest") {
  CHECK(argmax(std::vector<float>{-2, -1, -3}) == 1);
  CHECK(argmax(std::vector<float>{0, 5, 5, 5}) == 1);
  CHECK(argmax(std::vector<float>{7}) == 0);
}

namespace {

// Instead of oneDNN: fails where a step has this many rows or more.
std::size_t failing_rows = 0;
void fails_for_many_rows(const detail::ProductCall& call) {
  if (failing_rows > 0 && call.rows >= failing_rows) throw std::runtime_error("too many rows");
  detail::own_product(call);
}

}  // namespace

TEST_CASE("a step that throws has not happened, and says whom it was about") {
  chunkattn::ThreadPool pool(1);
  const Model model =
      random_model({64, 172, 2, 8, 4, 300, 256, true, 1e-5f, 10000.0f}, Element::fp32, 7, pool);
  Products products(pool, fails_for_many_rows);
  EngineOptions options;
  options.max_chunks = 100;
  options.chunk_size = 8;
  options.reduce = chunkattn::CpuOptions::Reduce::batch_invariant;
  const auto engine = make_engine(model, products, options);
  const auto prompt_of = [](std::size_t size, int token) { return std::vector<int>(size, token); };
  const Request first{.id = 1, .prompt = prompt_of(6, 5), .max_length = 40};
  const Request second{.id = 2, .prompt = prompt_of(100, 7), .max_length = 110};
  std::map<RequestId, std::vector<int>> texts;
  std::map<RequestId, std::size_t> cached;
  const auto take = [&] {
    for (const Event& event : engine->take_events()) {
      if (event.token >= 0) texts[event.id].push_back(event.token);
      cached[event.id] += event.cached;
    }
  };
  engine->submit(first);
  for (int i = 0; i < 5; ++i) engine->step(0);
  CHECK(engine->failed().empty());
  // It is cancelled, and comes again when it can be computed.
  engine->submit(second);
  failing_rows = 50;
  CHECK_THROWS_WITH_AS(engine->step(0), "too many rows", std::runtime_error);
  CHECK(engine->failed() == std::vector<RequestId>{2});
  engine->cancel(2);
  take();
  texts.erase(2), cached.erase(2);
  CHECK(engine->step(0));
  failing_rows = 1;  // those that decode are tried again, if nobody cancels them
  CHECK_THROWS(engine->step(0));
  CHECK(engine->failed() == std::vector<RequestId>{1});
  CHECK_THROWS(engine->step(0));
  failing_rows = 0;
  engine->submit(second);
  while (engine->step(0)) continue;
  CHECK(engine->failed().empty());
  take();
  CHECK(engine->snapshot().chunks_used == 0);
  CHECK(cached[2] == 0);
  // No text has changed by that.
  const auto expected = run_engine(model, pool, options, {first, second}, 1);
  for (const Request& request : {first, second}) {
    std::vector<int> whole = request.prompt;
    whole.insert(whole.end(), texts[request.id].begin(), texts[request.id].end());
    CHECK(whole == expected.at(request.id).tokens);
  }
}

TEST_CASE("a step that nobody waits for is dropped between layers") {
  chunkattn::ThreadPool pool(1);
  const Model model =
      random_model({64, 172, 2, 8, 4, 300, 256, true, 1e-5f, 10000.0f}, Element::fp32, 7, pool);
  Products products(pool, ProductKind::own);
  EngineOptions options;
  options.max_chunks = 100;
  options.chunk_size = 8;
  options.reduce = chunkattn::CpuOptions::Reduce::batch_invariant;
  const auto engine = make_engine(model, products, options);
  const Request first{.id = 1, .prompt = std::vector<int>(50, 5), .max_length = 60};
  const Request second{.id = 2, .prompt = std::vector<int>(60, 7), .max_length = 70};
  std::vector<RequestId> gone{1};
  int asked = 0;
  engine->set_gone([&](RequestId id) {
    ++asked;
    return std::find(gone.begin(), gone.end(), id) != gone.end();
  });
  engine->submit(first);
  CHECK(engine->step(0));
  CHECK(asked == 1);  // not of the second layer
  CHECK(engine->take_events().empty());
  engine->cancel(1);
  CHECK(engine->snapshot().chunks_used == 0);
  CHECK(engine->take_events().size() == 1);
  // Somebody else waits for it.
  engine->submit(first);
  engine->submit(second);
  CHECK(engine->step(0));
  CHECK(engine->take_events().size() == 2);
  gone = {};
  while (engine->step(0)) continue;
  std::vector<int> text = first.prompt;
  for (const Event& event : engine->take_events())
    if (event.id == 1 && event.token >= 0) text.push_back(event.token);
  CHECK(text.size() == 59);  // its first token was taken above
  CHECK(engine->snapshot().chunks_used == 0);
}

TEST_CASE("a step's budget keeps to a time, within its bounds") {
  StepBudget free(512, std::numeric_limits<double>::infinity());
  CHECK(free.tokens() == 512);
  free.computed(512, 100);
  CHECK(free.tokens() == 512);
  for (const double per_token : {1e-5, 1e-4, 4e-4, 1e-3, 1e-2}) {
    StepBudget budget(512, 0.1);
    std::size_t changes = 0, before = budget.tokens();
    for (int step = 0; step < 50; ++step) {
      const double noise = step % 2 == 0 ? 1.1 : 1 / 1.1;
      budget.computed(budget.tokens(), per_token * noise * static_cast<double>(budget.tokens()));
      changes += budget.tokens() != std::exchange(before, budget.tokens());
    }
    const double seconds = per_token * static_cast<double>(budget.tokens());
    CAPTURE(per_token);
    CHECK((seconds <= 0.11 || budget.tokens() == StepBudget::least));
    CHECK((seconds >= 0.03 || budget.tokens() == 512));
    CHECK(changes <= 4);  // it converges and stays there
    // One that slows down, as attention to a long prompt does, and rests that say little.
    for (int step = 0; step < 10; ++step) budget.computed(512, 10);
    CHECK(budget.tokens() == StepBudget::least);
    budget.computed(3, 1e-9);
    CHECK(budget.tokens() == StepBudget::least);
  }
  CHECK(StepBudget(20, 0.1).tokens() == 20);
}

TEST_CASE("a long prompt stalls others no longer than a step may take") {
  chunkattn::ThreadPool pool(1);
  const Model model =
      random_model({64, 172, 2, 8, 4, 300, 2048, true, 1e-5f, 10000.0f}, Element::fp32, 7, pool);
  Products products(pool, ProductKind::own);
  EngineOptions options;
  options.max_chunks = 300;
  options.step_seconds = 1e-6;  // of which each step has more: the least there is
  const auto engine = make_engine(model, products, options);
  engine->submit({.id = 1, .prompt = {5, 6}, .max_length = 200});
  engine->step(0);
  engine->submit({.id = 2, .prompt = std::vector<int>(1280, 7), .max_length = 1300});
  std::size_t meanwhile = 0;
  for (bool begun = false; !begun;) {
    CHECK(engine->step(0));
    for (const Event& event : engine->take_events()) {
      meanwhile += event.id == 1;
      begun |= event.id == 2;
    }
  }
  CHECK(meanwhile >= 1280 / StepBudget::least);
  CHECK_THROWS_AS((options.step_seconds = 0, (void)make_engine(model, products, options)),
                  std::invalid_argument);
}
