// The publisher over its sockets: what a message is, what is sent again, and what stands for
// messages that are kept no longer. check/kv_events.py follows a whole server.
#include <doctest/doctest.h>
#include <unistd.h>

#include <chunkattn/cache/windowed_layers.hpp>
#include <chunkattn/chunkattn.hpp>
#include <chunkattn/events/cache_events.hpp>
#include <chunkattn/tiers/tiers.hpp>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>
#include <zmq.hpp>

#include "engine/tier_log.hpp"
#include "server/kv_publisher.hpp"
#include "tier_mirror.hpp"

using namespace serve;
using Json = nlohmann::json;

namespace {

constexpr std::uint64_t end_mark = ~std::uint64_t{0};
constexpr int limit_ms = 60000;

struct Message {
  std::uint64_t number = 0;
  Json payload;
  std::string bytes;  // of the payload
};

std::uint64_t number_of(const zmq::message_t& frame) {
  REQUIRE(frame.size() == 8);
  std::uint64_t number = 0;
  for (std::size_t i = 0; i < 8; ++i) number = number << 8 | frame.data<std::uint8_t>()[i];
  return number;
}

std::vector<zmq::message_t> receive(zmq::socket_t& socket) {
  std::vector<zmq::message_t> frames;
  do {
    frames.emplace_back();
    REQUIRE(socket.recv(frames.back()));
  } while (frames.back().more());
  return frames;
}

Message message_of(const zmq::message_t& number, const zmq::message_t& payload) {
  Message message{number_of(number), {}, payload.to_string()};
  if (payload.size() > 0)
    message.payload = Json::from_msgpack(payload.data<std::uint8_t>(),
                                         payload.data<std::uint8_t>() + payload.size());
  return message;
}

struct Setup {
  using Tree = chunkattn::PrefixTree<int, 4>;

  explicit Setup(std::size_t num_batches = 100, bool with_tenants = false,
                 EventForm form = EventForm::arrays, std::int32_t window = 0) {
    options = publisher_addresses("ipc:///tmp/serve_publisher_test." + std::to_string(::getpid()));
    options.tokens_per_block = 4;
    options.num_batches = num_batches;
    options.with_tenants = with_tenants;
    options.form = form;
    options.window = window;
    publisher.emplace(options);
    for (zmq::socket_t* socket : {&events, &again}) {
      socket->set(zmq::sockopt::linger, 0);
      socket->set(zmq::sockopt::rcvtimeo, limit_ms);
    }
    again.connect(options.replay);
    follow();
  }
  template <class... Components>
  void follow(const Components&... components) {
    tree_events.emplace(
        tree,
        [this](const chunkattn::CacheEvent& event, std::span<const int> tokens) {
          publisher->add(event, tokens);
        },
        chunkattn::CacheEvents<Tree>::new_stream(), components...);
  }
  ~Setup() {
    for (const std::string& address : {options.address, options.replay})  // ZeroMQ leaves the files
      ::unlink(address.c_str() + std::string_view("ipc://").size());
  }
  /// All from this number on, without the mark after them.
  std::vector<Message> replay(std::uint64_t from) {
    std::uint8_t bytes[8];
    for (int i = 0; i < 8; ++i) bytes[i] = static_cast<std::uint8_t>(from >> (56 - 8 * i));
    again.send(zmq::const_buffer(), zmq::send_flags::sndmore);
    again.send(zmq::const_buffer(bytes, 8), zmq::send_flags::none);
    std::vector<Message> messages;
    for (;;) {
      const auto frames = receive(again);
      REQUIRE(frames.size() == 3);
      CHECK(frames[0].size() == 0);
      messages.push_back(message_of(frames[1], frames[2]));
      if (messages.back().number == end_mark) break;
    }
    CHECK(messages.back().payload.is_null());
    messages.pop_back();
    return messages;
  }
  void pass(std::vector<int> prompt, std::uint64_t tenant = 0) {
    auto sequence = tree.insert(prompt, {.name_space = {.tenant = tenant}});
    sequence.mark_loaded(sequence.loadable());
    sequence.leave();
    publisher->flush();
  }
  /// Waits until the own thread has come to what was flushed.
  std::vector<Message> replay_until(std::size_t count) {
    std::vector<Message> messages;
    for (int tries = 0; tries < 10000 && messages.size() < count; ++tries) messages = replay(0);
    REQUIRE(messages.size() == count);
    return messages;
  }

  PublisherOptions options;
  zmq::context_t context;
  zmq::socket_t events{context, zmq::socket_type::sub}, again{context, zmq::socket_type::dealer};
  std::optional<KvPublisher> publisher;
  Tree tree{chunkattn::PoolAllocator{.max_chunks = 4}};
  std::optional<chunkattn::CacheEvents<Tree>> tree_events;
};

}  // namespace

TEST_CASE("a message is what vLLM publishes") {
  Setup s(/*num_batches=*/10000);
  s.events.connect(s.options.address);
  s.events.set(zmq::sockopt::subscribe, "kv-events");
  // Who subscribes late misses what came before: only what is sent again is sure to come.
  auto messages = s.replay_until(1);
  const std::uint64_t first = messages[0].number;
  CHECK(first > 1'600'000'000'000'000);  // microseconds since 1970
  CHECK(messages[0].payload[1] == Json::array({Json::array({"AllBlocksCleared"})}));
  s.pass({1, 2, 3, 4, 5, 6, 7, 8, 9});
  messages = s.replay_until(2);
  CHECK(messages[1].number == first + 1);
  const Json& batch = messages[1].payload;
  CHECK(batch.size() == 3);
  CHECK(batch[0].is_number_float());
  REQUIRE(batch[1].size() == 1);
  const Json stored = batch[1][0];
  REQUIRE(stored.size() == 7);
  CHECK(stored[0] == "BlockStored");
  CHECK(stored[1].size() == 2);
  CHECK(stored[2].is_null());
  CHECK(stored[3] == Json::array({1, 2, 3, 4, 5, 6, 7, 8}));
  CHECK(stored[4] == 4);
  CHECK(stored[5].is_null());
  CHECK(stored[6] == "GPU");
  s.pass({1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12});
  messages = s.replay_until(3);
  CHECK(messages[2].payload[1][0][2] == stored[1][1]);  // it continues from there
  s.pass({20, 21, 22, 23, 24, 25, 26, 27});             // one chunk is free, one is evicted
  messages = s.replay_until(4);
  const Json removed = messages[3].payload[1][0];
  CHECK(removed == Json::array({"BlockRemoved", messages[2].payload[1][0][1], "GPU"}));
  // The same over the first socket, once the publisher has got the subscription.
  s.events.set(zmq::sockopt::rcvtimeo, 10);
  zmq::message_t topic;
  bool is_subscribed = false;
  for (int i = 0; i < limit_ms / 10 && !is_subscribed; ++i) {
    s.pass({100 + i, 2, 3, 4});
    is_subscribed = s.events.recv(topic).has_value();
  }
  REQUIRE(is_subscribed);
  CHECK(topic.to_string() == "kv-events");
  const auto frames = receive(s.events);
  REQUIRE(frames.size() == 2);
  const Message message = message_of(frames[0], frames[1]);
  const auto sent_again = s.replay(message.number);
  REQUIRE(!sent_again.empty());
  CHECK(sent_again[0].number == message.number);
  CHECK(sent_again[0].payload == message.payload);
}

TEST_CASE("as maps, an event has the fields that vLLM 0.32 writes, and its type first") {
  Setup s(100, false, EventForm::maps);
  s.pass({1, 2, 3, 4, 5, 6, 7, 8, 9});
  s.pass({1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12});
  s.pass({20, 21, 22, 23, 24, 25, 26, 27});  // one chunk is free, one is evicted
  const auto messages = s.replay_until(4);
  CHECK(messages[0].payload[1] == Json::array({{{"type", "AllBlocksCleared"}}}));
  const Json &batch = messages[1].payload, &stored = batch[1][0];
  CHECK(batch.size() == 3);
  CHECK(batch[0].is_number_float());
  CHECK(batch[2] == 0);
  REQUIRE(stored["block_hashes"].size() == 2);
  CHECK(stored == Json{{"type", "BlockStored"},
                       {"block_hashes", stored["block_hashes"]},
                       {"parent_block_hash", nullptr},
                       {"token_ids", {1, 2, 3, 4, 5, 6, 7, 8}},
                       {"block_size", 4},
                       {"lora_id", nullptr},
                       {"medium", "GPU"},
                       {"lora_name", nullptr},
                       {"group_idx", 0},
                       {"kv_cache_spec_kind", "full_attention"}});
  const Json& next = messages[2].payload[1][0];
  CHECK(next["parent_block_hash"] == stored["block_hashes"][1]);
  CHECK(messages[3].payload[1][0] == Json{{"type", "BlockRemoved"},
                                          {"block_hashes", next["block_hashes"]},
                                          {"medium", "GPU"},
                                          {"group_idx", 0}});
  // Readers choose by the first key what the others are.
  const std::string& bytes = messages[1].bytes;
  CHECK(bytes.find("type") < bytes.find("block_hashes"));
}

TEST_CASE("blocks that layers with a window have are a group of their own, in maps") {
  for (const EventForm form : {EventForm::maps, EventForm::arrays}) {
    Setup s(100, false, form, /*window=*/3);
    chunkattn::WindowedLayers<Setup::Tree> near(s.tree, {.window = 3, .max_chunks = 4});
    s.follow(near);
    chunkattn::AttentionPlan plan;
    auto sequence = s.tree.insert({1, 2, 3, 4, 5, 6, 7, 8});
    near.resume(sequence);
    auto step = s.tree.begin_step();
    REQUIRE(step.add(sequence));
    (void)near.view(plan.build(step));
    (void)std::move(step).finish();
    s.publisher->flush();
    const auto messages = s.replay_until(2);
    const Json& batch = messages[1].payload[1];
    if (form == EventForm::arrays) {
      CHECK(batch.size() == 1);
      continue;
    }
    REQUIRE(batch.size() == 2);
    CHECK(batch[0]["group_idx"] == 0);
    REQUIRE(batch[0]["block_hashes"].size() == 2);
    CHECK(batch[1] == Json{{"type", "BlockStored"},
                           {"block_hashes", {batch[0]["block_hashes"][1]}},
                           {"parent_block_hash", batch[0]["block_hashes"][0]},
                           {"token_ids", {5, 6, 7, 8}},
                           {"block_size", 4},
                           {"lora_id", nullptr},
                           {"medium", "GPU"},
                           {"lora_name", nullptr},
                           {"group_idx", 1},
                           {"kv_cache_spec_kind", "sliding_window"},
                           {"kv_cache_spec_sliding_window", 3}});
  }
}

TEST_CASE("one message stands for those that are kept no longer") {
  Setup s(/*num_batches=*/2);
  for (int i = 0; i < 5; ++i) s.pass({10 * i, 1, 2, 3});
  std::vector<Message> messages;
  for (int tries = 0; tries < 10000; ++tries) {
    messages = s.replay(0);
    if (messages.size() == 1 && messages[0].payload[1].size() == 5) break;
  }
  REQUIRE(messages.size() == 1);
  const Json state = messages[0].payload[1];
  CHECK(state[0] == Json::array({"AllBlocksCleared"}));
  CHECK(state.size() == 5);  // four chunks
  const auto kept = s.replay(messages[0].number);
  REQUIRE(kept.size() == 1);  // the last is still there itself
  CHECK(kept[0].number == messages[0].number);
  CHECK(kept[0].payload[1].size() < 5);
}

TEST_CASE("blocks in lower tiers have media of their own") {
  using Tree = chunkattn::PrefixTree<int, 4>;
  using TreeTiers = chunkattn::Tiers<Tree, chunkattn::KvCache<chunkattn::Cpu, float>>;
  for (const bool with_tenants : {false, true}) {
    CAPTURE(with_tenants);
    Setup s(/*num_batches=*/1, with_tenants);
    KvPublisher& publisher = *s.publisher;
    Tree tree(chunkattn::PoolAllocator{.max_chunks = 8});
    chunkattn::KvCache<chunkattn::Cpu, float> cache(
        tree, {.num_layers = 1, .num_kv_heads = 1, .head_dim = 8});
    const auto memory = std::make_shared<chunkattn::MemoryTier>(2000);
    const auto slow = std::make_shared<chunkattn::MemoryTier>(8000);  // stands for files
    TierMirror mirror(4);
    const auto tier_log =
        std::make_shared<TierLog>(std::vector{TierEvent::Medium::memory, TierEvent::Medium::files});
    TreeTiers::Options options;
    options.model = "m";
    options.threads = false;
    std::map<std::string, chunkattn::TierStore::Key> names;
    options.observer = std::make_shared<TierLogObserver<TreeTiers>>(tier_log);
    const TierSink sink = [&](const TierEvent& event, std::span<const int> tokens) {
      mirror.apply(event, tokens);
      if (event.name_space.tenant == 0) names[event.block.text()] = event.block;
      publisher.add(event, tokens);
    };
    TreeTiers tiers(tree, cache, {memory, slow}, std::move(options));
    const chunkattn::CacheEvents tree_events(
        tree, [&](const chunkattn::CacheEvent& event, std::span<const int> tokens) {
          publisher.add(event, tokens);
        });

    // What somebody knows who gets all messages; the replay stands for those of them.
    std::map<std::string, std::map<std::uint64_t, Json>> media;  // by medium: hash -> its tokens
    std::size_t removed = 0;
    std::uint64_t last_number = 0;
    const auto apply = [&](const Message& message) {
      for (const Json& event : message.payload[1]) {
        if (event[0] == "AllBlocksCleared") {
          media.clear();
          continue;
        }
        auto& blocks = media[event[event[0] == "BlockStored" ? 6 : 2]];
        for (std::size_t i = 0; i < event[1].size(); ++i) {
          const std::uint64_t hash = event[1][i];
          if (event[0] == "BlockRemoved") {
            REQUIRE(blocks.erase(hash) == 1);
            ++removed;
          } else {
            Json tokens(event[3].begin() + static_cast<std::ptrdiff_t>(4 * i),
                        event[3].begin() + static_cast<std::ptrdiff_t>(4 * i + 4));
            // A name is the same in all media.
            for (const auto& [medium, others] : media)
              if (const auto other = others.find(hash); other != others.end())
                CHECK(other->second == tokens);
            REQUIRE(blocks.emplace(hash, std::move(tokens)).second);
          }
        }
      }
      last_number = message.number;
    };
    last_number = s.replay_until(1)[0].number;
    for (int round = 0; round < 40; ++round) {
      const std::uint64_t tenant = round % 4 == 3 ? 1 : 0;
      std::vector<int> prompt(static_cast<std::size_t>(9 + round % 8), round % 5);
      auto sequence = tree.insert(prompt, {.name_space = {.tenant = tenant}});
      auto load = tiers.load(sequence);
      load.wait(sequence);
      for (auto range = sequence.loadable(); !range.empty(); range = sequence.loadable())
        sequence.mark_loaded(range);
      sequence.leave();
      auto other = tree.insert({1000 + round, 1, 2, 3});  // so that something happens in any case
      other.mark_loaded(other.loadable());
      other.leave();
      if (round == 25) {
        tree.clear();
        tiers.reopen("other");
      }
      tiers.flush();
      tier_log->deliver(sink);
      publisher.flush();
      std::vector<Message> kept;
      for (int tries = 0; tries < 10000 && kept.empty(); ++tries) kept = s.replay(last_number + 1);
      REQUIRE(kept.size() == 1);
      REQUIRE(kept[0].number == last_number + 1);
      apply(kept[0]);
    }
    CHECK(removed > 20);
    if (!with_tenants) {
      for (const auto& [name, medium] : {std::pair("CPU", TierEvent::Medium::memory),
                                         std::pair("DISK", TierEvent::Medium::files)}) {
        std::size_t held = 0;
        for (const auto& [text, key] : names) held += mirror.has(medium, key) ? 1 : 0;
        CHECK(held > 0);
        CHECK(media[name].size() == held);
      }
    } else {
      CHECK(media["CPU"].size() == mirror.num_blocks(TierEvent::Medium::memory));
      CHECK(media["DISK"].size() == mirror.num_blocks(TierEvent::Medium::files));
    }
    const auto expected = media;
    apply(s.replay(0).at(0));  // all that is kept no longer
    CHECK(media == expected);
  }
}

TEST_CASE("tenants with a salt are published where that is asked for") {
  Setup silent;
  silent.pass({1, 2, 3, 4}, 5);
  silent.pass({5, 6, 7, 8});
  CHECK(silent.replay_until(2)[1].payload[1][0][3] == Json::array({5, 6, 7, 8}));
  silent.publisher.reset();
  Setup loud(100, /*with_tenants=*/true);
  loud.pass({1, 2, 3, 4}, 5);
  CHECK(loud.replay_until(2)[1].payload[1][0][3] == Json::array({1, 2, 3, 4}));
}

TEST_CASE("requests that are none get no answer, and do no harm") {
  Setup s;
  for (const std::string_view text : {"", "short", "much too long for a number"}) {
    s.again.send(zmq::const_buffer(), zmq::send_flags::sndmore);
    s.again.send(zmq::buffer(text), zmq::send_flags::none);
  }
  s.again.send(zmq::str_buffer("x"), zmq::send_flags::sndmore);
  s.again.send(zmq::str_buffer("12345678"), zmq::send_flags::none);
  s.again.send(zmq::str_buffer("alone"), zmq::send_flags::none);
  for (int i = 0; i < 6; ++i)
    s.again.send(zmq::const_buffer(), i < 5 ? zmq::send_flags::sndmore : zmq::send_flags::none);
  CHECK(s.replay(0).size() == 1);
}

TEST_CASE("an address that is taken is named") {
  Setup s;
  PublisherOptions other = publisher_addresses("127.0.0.1:1");
  std::string said;
  try {
    const KvPublisher refused(other);
  } catch (const std::runtime_error& error) {
    said = error.what();
  }
  if (::geteuid() != 0)
    CHECK(said.starts_with("--kv-events: tcp://127.0.0.1:1: cannot be bound: "));
  other = publisher_addresses("no such host:5557");
  CHECK_THROWS_AS(KvPublisher{other}, std::runtime_error);
}
