#include "kv_publisher.hpp"

#include <fmt/format.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <deque>
#include <iterator>
#include <mutex>
#include <nlohmann/json.hpp>
#include <span>
#include <stdexcept>
#include <thread>
#include <utility>
#include <variant>
#include <vector>
#include <zmq.hpp>

#include "kv_blocks.hpp"
#include "kv_tier_blocks.hpp"

namespace serve {

namespace {

using Bytes = std::vector<std::uint8_t>;

/// vLLM's words. "GPU" is where attention reads K/V, whatever the device is.
const char* name_of(Medium medium) {
  switch (medium) {
    case Medium::memory:
      return "CPU";
    case Medium::files:
      return "DISK";
    default:
      return "GPU";
  }
}

double unix_time() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

std::array<std::uint8_t, 8> big_endian(std::uint64_t number) {
  std::array<std::uint8_t, 8> bytes;
  for (std::size_t i = 0; i < 8; ++i) bytes[i] = static_cast<std::uint8_t>(number >> (56 - 8 * i));
  return bytes;
}

using OrderedJson = nlohmann::ordered_json;  // readers know what a map is by its first key

OrderedJson as_array(const BlockEvent& event, std::size_t tokens_per_block) {
  switch (event.kind) {
    case BlockEvent::Kind::stored:
      return OrderedJson::array(
          {"BlockStored", event.hashes,
           event.parent == 0 ? OrderedJson(nullptr) : OrderedJson(event.parent), event.tokens,
           tokens_per_block, nullptr, name_of(event.medium)});
    case BlockEvent::Kind::removed:
      return OrderedJson::array({"BlockRemoved", event.hashes, name_of(event.medium)});
    default:
      return OrderedJson::array({"AllBlocksCleared"});
  }
}

/// vLLM leaves out what has its default. Layers with full attention are one group, those with a
/// window another one.
OrderedJson as_map(const BlockEvent& event, const PublisherOptions& options) {
  const int group = event.is_windowed ? 1 : 0;
  switch (event.kind) {
    case BlockEvent::Kind::stored: {
      OrderedJson map{
          {"type", "BlockStored"},
          {"block_hashes", event.hashes},
          {"parent_block_hash",
           event.parent == 0 ? OrderedJson(nullptr) : OrderedJson(event.parent)},
          {"token_ids", event.tokens},
          {"block_size", options.tokens_per_block},
          {"lora_id", nullptr},
          {"medium", name_of(event.medium)},
          {"lora_name", nullptr},
          {"group_idx", group},
          {"kv_cache_spec_kind", event.is_windowed ? "sliding_window" : "full_attention"}};
      if (event.is_windowed) map["kv_cache_spec_sliding_window"] = options.window;
      return map;
    }
    case BlockEvent::Kind::removed:
      return {{"type", "BlockRemoved"},
              {"block_hashes", event.hashes},
              {"medium", name_of(event.medium)},
              {"group_idx", group}};
    default:
      return {{"type", "AllBlocksCleared"}};
  }
}

Bytes encoded(const std::vector<BlockEvent>& events, const PublisherOptions& options) {
  OrderedJson list = OrderedJson::array();
  for (const BlockEvent& event : events)
    list.push_back(options.form == EventForm::maps ? as_map(event, options)
                                                   : as_array(event, options.tokens_per_block));
  return OrderedJson::to_msgpack(OrderedJson::array({unix_time(), std::move(list), 0}));
}

void send(zmq::socket_t& socket, std::span<const std::uint8_t> bytes, bool more) {
  socket.send(zmq::const_buffer(bytes.data(), bytes.size()),
              more ? zmq::send_flags::sndmore : zmq::send_flags::dontwait);
}

zmq::socket_t bound(zmq::context_t& context, zmq::socket_type type, const std::string& address) {
  zmq::socket_t socket(context, type);
  socket.set(zmq::sockopt::linger, 500);
  socket.set(zmq::sockopt::sndhwm, 100000);
  try {
    socket.bind(address);
  } catch (const zmq::error_t& error) {
    throw std::runtime_error(
        fmt::format("--kv-events: {}: cannot be bound: {}", address, error.what()));
  }
  return socket;
}

}  // namespace

class KvPublisher::Worker {
 public:
  explicit Worker(PublisherOptions options)
      : options_(std::move(options)),
        blocks_(options_.tokens_per_block, options_.with_tenants,
                options_.window > 0 && options_.form == EventForm::maps),
        tier_blocks_(options_.with_tenants),
        publish_(bound(context_, zmq::socket_type::pub, options_.address)),
        replay_(bound(context_, zmq::socket_type::router, options_.replay)),
        wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    if (wake_ < 0) throw std::runtime_error("--kv-events: no eventfd");
    thread_ = std::thread([this] { run(); });
  }
  ~Worker() {
    {
      const std::lock_guard lock(mutex_);
      ends_ = true;
    }
    wake();
    thread_.join();
    ::close(wake_);
  }
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  template <class Event>
  void add(const Event& event, std::span<const int> tokens) {
    batch_.events.push_back(event);
    batch_.tokens.insert(batch_.tokens.end(), tokens.begin(), tokens.end());
  }
  void flush() {
    if (batch_.events.empty()) return;
    {
      const std::lock_guard lock(mutex_);
      batches_.push_back(std::exchange(batch_, {}));
    }
    wake();
  }
  [[nodiscard]] double thread_seconds() {
    clockid_t clock;
    timespec time{};
    if (::pthread_getcpuclockid(thread_.native_handle(), &clock) != 0 ||
        ::clock_gettime(clock, &time) != 0)
      return 0;
    return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
  }

 private:
  using TreeEvent = chunkattn::CacheEvent;
  /// Events of the tree and the tiers, and the tokens of those that have some.
  struct Batch {
    std::vector<std::variant<TreeEvent, TierEvent>> events;
    std::vector<int> tokens;
  };
  struct Message {
    std::uint64_t number;
    Bytes payload;
  };

  void wake() const {
    const std::uint64_t one = 1;
    while (::write(wake_, &one, sizeof one) < 0 && errno == EINTR) continue;
  }

  void run() {
    publish({{}});
    for (;;) {
      std::array<zmq::pollitem_t, 2> items{
          {{replay_.handle(), 0, ZMQ_POLLIN, 0}, {nullptr, wake_, ZMQ_POLLIN, 0}}};
      try {
        zmq::poll(items.data(), items.size(), std::chrono::milliseconds(-1));
        if ((items[0].revents & ZMQ_POLLIN) != 0) answer();
      } catch (const zmq::error_t& error) {
        if (error.num() != EINTR && error.num() != EHOSTUNREACH && error.num() != EAGAIN) throw;
      }
      std::uint64_t count = 0;
      if (::read(wake_, &count, sizeof count) < 0) continue;  // nothing new
      if (take_batches()) break;
    }
    publish({{}});
  }
  /// True at the end.
  bool take_batches() {
    std::deque<Batch> taken;
    bool ends = false;
    {
      const std::lock_guard lock(mutex_);
      taken.swap(batches_);
      ends = ends_;
    }
    for (const Batch& batch : taken) {
      std::vector<BlockEvent> changes;
      std::span<const int> rest(batch.tokens);
      for (const auto& event : batch.events) {
        const auto* const of_tree = std::get_if<TreeEvent>(&event);
        const std::size_t count =
            of_tree ? num_tokens(*of_tree) : num_tokens(std::get<TierEvent>(event));
        const std::span<const int> tokens = rest.first(count);
        of_tree ? apply(*of_tree, tokens, changes)
                : tier_blocks_.apply(std::get<TierEvent>(event), tokens, changes);
        rest = rest.subspan(count);
      }
      if (!changes.empty()) publish(changes);
    }
    return ends;
  }
  [[nodiscard]] static std::size_t num_tokens(const TreeEvent& event) {
    return event.kind == TreeEvent::Kind::stored ? static_cast<std::size_t>(event.length) : 0;
  }
  [[nodiscard]] std::size_t num_tokens(const TierEvent& event) const {
    return event.kind == TierEvent::Kind::stored || event.kind == TierEvent::Kind::named
               ? options_.tokens_per_block
               : 0;
  }
  void apply(const TreeEvent& event, std::span<const int> tokens,
             std::vector<BlockEvent>& changes) {
    // Subscribers forget blocks in all media, and what is in tiers is no longer found, either.
    if (event.kind == TreeEvent::Kind::cleared) tier_blocks_.forget();
    blocks_.apply(event, tokens, changes);
  }
  void publish(const std::vector<BlockEvent>& changes) {
    kept_.push_back({next_++, encoded(changes, options_)});
    if (kept_.size() > options_.num_batches) kept_.pop_front();
    publish_.send(zmq::buffer(options_.topic), zmq::send_flags::sndmore);
    send(publish_, big_endian(kept_.back().number), true);
    send(publish_, kept_.back().payload, false);
  }

  /// [who, "", number]: all from this number on, then -1 with nothing. Where some of these are kept
  /// no longer, a batch under the last number says instead what is cached: everything is cleared,
  /// then stored.
  void answer() {
    std::vector<zmq::message_t> request;
    for (bool more = true; more;) {
      zmq::message_t frame;
      if (!replay_.recv(frame, zmq::recv_flags::dontwait)) break;
      more = frame.more();
      if (request.size() < 4) request.push_back(std::move(frame));
    }
    if (request.size() != 3 || request[1].size() != 0 || request[2].size() != 8) return;
    std::uint64_t from = 0;
    for (std::size_t i = 0; i < 8; ++i) from = from << 8 | request[2].data<std::uint8_t>()[i];
    const std::span client(request[0].data<std::uint8_t>(), request[0].size());
    if (from < kept_.front().number && kept_.front().number != first_) {
      std::vector<BlockEvent> state = blocks_.all();
      state.insert(state.begin(), BlockEvent{});
      std::ranges::move(tier_blocks_.all(), std::back_inserter(state));
      reply(client, next_ - 1, encoded(state, options_));
    } else {
      for (const Message& message : kept_)
        if (message.number >= from) reply(client, message.number, message.payload);
    }
    reply(client, ~std::uint64_t{0}, {});
  }
  void reply(std::span<const std::uint8_t> client, std::uint64_t number,
             std::span<const std::uint8_t> payload) {
    send(replay_, client, true);
    send(replay_, {}, true);
    send(replay_, big_endian(number), true);
    send(replay_, payload, false);
  }

  /// Microseconds since 1970. So the numbers of a server that starts again are a gap to those who
  /// received the one before, who ask for a replay, and get that everything was cleared.
  const std::uint64_t first_ = static_cast<std::uint64_t>(1e6 * unix_time());

  const PublisherOptions options_;
  Batch batch_;  // of the thread that calls add()
  // Of the own thread:
  BlockTable blocks_;
  TierBlockTable tier_blocks_;
  std::deque<Message> kept_;
  std::uint64_t next_ = first_;
  zmq::context_t context_;
  zmq::socket_t publish_, replay_;

  int wake_ = -1;
  std::mutex mutex_;  // of the next two
  std::deque<Batch> batches_;
  bool ends_ = false;
  std::thread thread_;  // the last: it sees all others made
};

KvPublisher::KvPublisher(PublisherOptions options)
    : worker_(std::make_unique<Worker>(std::move(options))) {}
KvPublisher::~KvPublisher() = default;
void KvPublisher::add(const chunkattn::CacheEvent& event, std::span<const int> tokens) {
  worker_->add(event, tokens);
}
void KvPublisher::add(const TierEvent& event, std::span<const int> tokens) {
  worker_->add(event, tokens);
}
void KvPublisher::flush() {
  worker_->flush();
}
double KvPublisher::thread_seconds() const {
  return worker_->thread_seconds();
}

}  // namespace serve
