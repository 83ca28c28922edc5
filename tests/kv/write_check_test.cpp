// KvCacheOptions::check_writes: a step that forgets to write a layer gets an error that says which
// one.
#include <doctest/doctest.h>

#include <cstddef>
#include <deque>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "chunkattn/attention_plan.hpp"
#include "chunkattn/chunk_attention.hpp"
#include "chunkattn/kv_cache.hpp"
#include "chunkattn/prefix_tree.hpp"
#include "chunkattn/transfer/transfer.hpp"
#include "support/steps.hpp"

using namespace chunkattn;
using test::iota;
using test::refused;

namespace {

using Tree = PrefixTree<int, 4>;
constexpr int num_layers = 3, heads = 4, dim = 8;

KvCacheOptions checked() {
  return {.num_layers = num_layers, .num_kv_heads = heads, .head_dim = dim, .check_writes = true};
}

struct Engine {
  Tree tree;
  KvCache<Cpu, float> cache{tree, checked()};
  ChunkAttention<Cpu, dim> attention{1};
  AttentionPlan plan;

  static std::vector<float> rows(const PlanView& view, int num_heads) {
    return std::vector<float>(static_cast<std::size_t>(view.num_rows * num_heads * dim), 0.5f);
  }
  void write(const KvView<float>& layer, const LiveView& view) {
    const std::vector<float> k = rows(view, layer.num_kv_heads);
    attention.write(layer, view, k, k);
  }
  void run(const KvView<float>& layer, const LiveView& view) {
    const std::vector<float> q = rows(view, layer.num_kv_heads);
    std::vector<float> out(q.size(), 7.0f);
    try {
      attention.run(layer, view, q, out);
    } catch (const InvalidArgument&) {
      for (const float x : out) REQUIRE(x == 7.0f);  // nothing has been touched
      throw;
    }
  }
  void forward(const LiveView& view) {
    for (int l = 0; l < num_layers; ++l) {
      write(cache.layer(l), view);
      run(cache.layer(l), view);
    }
  }
  // A step of these sequences as it should be.
  template <class... Sequence>
  Tree::Finished step(Sequence&... sequences) {
    auto open = tree.begin_step();
    for (const bool added : {static_cast<bool>(open.add(sequences))...}) CHECK(added);
    forward(plan.build(open));
    return std::move(open).finish();
  }
};

}  // namespace

TEST_CASE_FIXTURE(Engine, "an engine that writes every layer gets no error") {
  auto chat = tree.insert(iota(1, 10));
  for (int n = 0; n < 8; ++n) {
    auto done = step(chat);
    for (const auto row : done.rows()) done.commit(row, n);
  }
  auto fork = chat.fork();  // whose copies write() makes
  chat.append(1);
  fork.append(2);
  (void)step(chat, fork);
  chat.append(3);
  AttentionPlan plans[2];  // two in flight
  std::deque<Tree::InFlight> in_flight;
  for (int n = 0; n < 6; ++n) {
    if (in_flight.size() == 2) {
      auto done = std::move(in_flight.front()).finish();
      in_flight.pop_front();
      for (const auto row : done.rows()) done.commit(row, n);
    }
    auto open = tree.begin_step();
    CHECK(open.add(chat));
    forward(plans[n % 2].build(open));
    in_flight.push_back(std::move(open).submit());
  }
}

TEST_CASE_FIXTURE(Engine, "run() of a layer that the step has not written") {
  auto chat = tree.insert(iota(1, 10));
  for (const std::size_t number : {1, 2}) {  // what an earlier step has written says nothing
    auto open = tree.begin_step();
    CHECK(open.add(chat, 5));
    const auto view = plan.build(open);
    write(cache.layer(0), view);
    run(cache.layer(0), view);
    CHECK(refused([&] { run(cache.layer(1), view); }) ==
          "layer = 1: expected step " + std::to_string(number) +
              " to write it before run(), by write() or by kernels reported by mark_written()");
    write(cache.layer(1), view);
    run(cache.layer(1), view);
    write(cache.layer(2), view);
    (void)std::move(open).finish();
  }
}

TEST_CASE_FIXTURE(Engine, "finish() without a layer's write changes nothing, and can be repeated") {
  auto chat = tree.insert(iota(1, 10));
  const auto expected = [](int layer) {
    return "layer = " + std::to_string(layer) +
           ": expected step 1 to write it before finish(), "
           "by write() or by kernels reported by mark_written()";
  };
  SUBCASE("open") {
    auto open = tree.begin_step();
    CHECK(open.add(chat));
    const auto view = plan.build(open);
    CHECK(refused([&] { (void)std::move(open).finish(); }) == expected(0));
    CHECK(chat.num_written() == 0);
    write(cache.layer(0), view);
    write(cache.layer(2), view);
    CHECK(refused([&] { (void)std::move(open).finish(); }) == expected(1));
    write(cache.layer(1), view);
    (void)std::move(open).finish();
    CHECK(chat.num_written() == 10);
  }
  SUBCASE("in flight") {
    auto open = tree.begin_step();
    CHECK(open.add(chat));
    const auto view = plan.build(open);
    auto in_flight = std::move(open).submit();  // kernels may still be queued by another thread
    CHECK(refused([&] { (void)std::move(in_flight).finish(); }) == expected(0));
    forward(view);
    (void)std::move(in_flight).finish();
  }
}

TEST_CASE_FIXTURE(Engine, "one layer twice and another never") {
  auto chat = tree.insert(iota(1, 10));
  auto open = tree.begin_step();
  CHECK(open.add(chat));
  const auto view = plan.build(open);
  for (const int layer : {0, 1, 1}) {  // the last should have been 2
    write(cache.layer(layer), view);
    run(cache.layer(layer), view);
  }
  CHECK(refused([&] { (void)std::move(open).finish(); }) ==
        "layer = 2: expected step 1 to write it before finish(), by write() or by kernels "
        "reported by mark_written(); layer 1 was written 2 times");
}

TEST_CASE_FIXTURE(Engine, "writing twice is harmless") {
  auto chat = tree.insert(iota(1, 10));
  auto open = tree.begin_step();
  CHECK(open.add(chat));
  const auto view = plan.build(open);
  forward(view);
  forward(view);
  (void)std::move(open).finish();
}

TEST_CASE_FIXTURE(Engine, "another plan for the step has to be written again") {
  auto a = tree.insert(iota(1, 10)), b = tree.insert(iota(100, 10));
  auto open = tree.begin_step();
  CHECK(open.add(a));
  forward(plan.build(open));
  CHECK(open.add(b));
  const auto view = plan.build(open);
  CHECK(refused([&] { run(cache.layer(0), view); }).find("layer = 0: expected step 1") == 0);
  forward(view);
  (void)std::move(open).finish();
}

TEST_CASE_FIXTURE(Engine, "kernels of the engine's own say what they have written") {
  auto chat = tree.insert(iota(1, 10));
  auto open = tree.begin_step();
  CHECK(open.add(chat));
  const auto view = plan.build(open);
  for (int l = 0; l < num_layers; ++l) {
    mark_written(cache.layer(l), view);
    run(cache.layer(l), view);
  }
  Tree other;
  KvCache<Cpu, float> wrong(other, checked());
  auto reader = other.insert(iota(1, 10));
  CHECK(refused([&] { mark_written(wrong.layer(0), view); }).find("layer = of another tree") == 0);
  (void)std::move(open).finish();
  CHECK(refused([&] { mark_written(cache.layer(0), view); }).find("plan = out of date") == 0);
  // Without the check there is no error.
  KvCacheOptions off = checked();
  off.check_writes = false;
  KvCache<Cpu, float> unchecked(tree, off);
  chat.append(1);
  auto next = tree.begin_step();
  CHECK(next.add(chat));
  const auto later = plan.build(next);
  CHECK(refused([&] { mark_written(unchecked.layer(0), later); }) == "no error");
  CHECK(refused([&] { run(unchecked.layer(0), later); }) == "no error");
}

TEST_CASE_FIXTURE(
    Engine, "K/V that came from elsewhere is in no step, and K/V that is there is not written") {
  auto chat = tree.insert(iota(1, 10));
  std::vector<std::byte> kv(kv_bytes(cache, 9));
  scatter_kv(chat, {0, 9}, cache, kv);
  chat.mark_loaded({0, 9});
  {
    auto open = tree.begin_step();
    CHECK(open.add(chat));
    const auto view = plan.build(open);
    CHECK(view.num_rows == 1);
    CHECK(refused([&] { run(cache.layer(0), view); }).find("layer = 0") == 0);  // its last token
    forward(view);
    (void)std::move(open).finish();
  }
  auto again = tree.insert(iota(1, 10), {.max_reuse = 0});  // computed again, stored already
  auto open = tree.begin_step();
  CHECK(open.add(again, 8));
  const auto view = plan.build(open);
  CHECK(!view.writes_anything());
  run(cache.layer(0), view);
  (void)std::move(open).finish();
}

TEST_CASE_FIXTURE(Engine, "layers of the model that share K/V: written once, read by each") {
  auto chat = tree.insert(iota(1, 10));
  auto open = tree.begin_step();
  CHECK(open.add(chat));
  const auto view = plan.build(open);
  constexpr int of_model_layer[] = {0, 1, 2, 1, 2, 2};
  for (int l = 0; l < 6; ++l) {
    if (l < num_layers) write(cache.layer(l), view);
    run(cache.layer(of_model_layer[l]), view);
  }
  (void)std::move(open).finish();
}

TEST_CASE_FIXTURE(Engine, "each rank writes its heads") {
  auto chat = tree.insert(iota(1, 10));
  auto open = tree.begin_step();
  CHECK(open.add(chat));
  const auto view = plan.build(open);
  for (int l = 0; l < num_layers; ++l) {
    write(cache.layer(l).heads(0, 2), view);
    run(cache.layer(l).heads(0, 2), view);
    if (l != 1) write(cache.layer(l).heads(2, 2), view);
  }
  const std::string expected = "layer = 1: expected step 1 to write its KV head 2 before ";
  CHECK(refused([&] { run(cache.layer(1).heads(2, 2), view); }).find(expected + "run()") == 0);
  CHECK(refused([&] { run(cache.layer(1), view); }).find(expected + "run()") == 0);
  CHECK(refused([&] { (void)std::move(open).finish(); }).find(expected + "finish()") == 0);
  write(cache.layer(1).heads(2, 2), view);
  (void)std::move(open).finish();
}

TEST_CASE_FIXTURE(Engine,
                  "steps that are dropped, and those that rest on them, need not be written") {
  auto chat = tree.insert(iota(1, 10));
  {
    auto cancelled = tree.begin_step();
    CHECK(cancelled.add(chat));
    (void)plan.build(cancelled);
  }
  AttentionPlan second;
  std::optional<Tree::InFlight> lost;
  auto open = tree.begin_step();
  CHECK(open.add(chat, 5));
  (void)plan.build(open);
  lost = std::move(open).submit();
  open = tree.begin_step();
  CHECK(open.add(chat));
  (void)second.build(open);
  lost.reset();  // nothing of the open one counts
  (void)std::move(open).finish();
  CHECK(chat.num_written() == 0);
  tree.device_idle();
  (void)step(chat);
  CHECK(chat.num_written() == 10);
}

TEST_CASE_FIXTURE(Engine,
                  "each cache of a tree is checked as long as it lives, wherever it is moved") {
  auto chat = tree.insert(iota(1, 10));
  KvCacheOptions small = checked();
  small.num_layers = 1;
  std::optional<KvCache<Cpu, float>> draft(std::in_place, tree, small);
  auto open = tree.begin_step();
  CHECK(open.add(chat));
  const auto view = plan.build(open);
  forward(view);
  KvCache<Cpu, float> moved = std::move(*draft);
  CHECK(refused([&] { run(moved.layer(0), view); }).find("layer = 0") == 0);
  CHECK(refused([&] { (void)std::move(open).finish(); }).find("layer = 0") == 0);
  draft.emplace(tree, small);  // it has missed the plan
  CHECK(refused([&] { run(draft->layer(0), view); }) == "no error");
  write(moved.layer(0), view);
  (void)std::move(open).finish();
  draft.reset();
  {
    const KvCache<Cpu, float> gone = std::move(moved);
  }
  chat.append(3);
  (void)step(chat);
}

TEST_CASE("the check is off unless asked for, and needs a tree") {
  Engine engine;
  KvCacheOptions options = checked();
  CHECK(!KvCacheOptions{}.check_writes);
  CHECK(refused([&] { (void)KvCache<Cpu, float>(4, options, 3); })
            .find("options.check_writes = true: expected false for memory that follows no "
                  "PrefixTree") == 0);
  options.check_writes = false;
  Tree tree;
  KvCache<Cpu, float> cache(tree, options);
  const auto layer = cache.layer(0);
  CHECK(layer.write_check == nullptr);
  auto chat = tree.insert(iota(1, 10));
  auto open = tree.begin_step();
  CHECK(open.add(chat));
  const auto view = engine.plan.build(open);
  engine.run(cache.layer(2), view);
  (void)std::move(open).finish();
}

TEST_CASE_FIXTURE(Engine, "kernels run on a thread of their own") {
  auto chat = tree.insert(iota(1, 10)), other = tree.insert(iota(100, 10));
  AttentionPlan plans[2];
  for (int n = 0; n < 20; ++n) {
    auto open = tree.begin_step();
    CHECK(open.add(chat));
    const auto view = plans[0].build(open);
    std::vector<KvView<float>> layers;
    for (int l = 0; l < num_layers; ++l) layers.push_back(cache.layer(l));
    auto in_flight = std::move(open).submit();
    std::thread device([&] {
      for (const auto& layer : layers) {
        write(layer, view);
        run(layer, view);
      }
    });
    {
      auto next = tree.begin_step();  // meanwhile the next one is planned, and cancelled
      other.append(n);
      CHECK(next.add(other));
      (void)plans[1].build(next);
    }
    device.join();
    (void)std::move(in_flight).finish();
    chat.append(n);
  }
}
