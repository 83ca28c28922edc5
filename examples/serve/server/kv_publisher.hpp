// KvPublisher: publishes what is cached to other processes, in the messages that vLLM publishes
// (its kv_events.py): batches of BlockStored, BlockRemoved and AllBlocksCleared as MessagePack over
// ZeroMQ, numbered, with a second socket for those who missed some. docs/serve.md has the format.
#pragma once

#include <chunkattn/chunkattn.hpp>
#include <chunkattn/events/cache_event.hpp>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "engine/engine.hpp"

namespace serve {

/// How an event is written.
enum class EventForm {
  arrays,  ///< as vLLM before 0.32 and SGLang do
  maps     ///< as vLLM does from 0.32 on
};

struct PublisherOptions {
  std::string address;  ///< of the PUB socket, as ZeroMQ has it: tcp://127.0.0.1:5557
  std::string replay;   ///< of the ROUTER socket
  std::string topic = "kv-events";
  EventForm form = EventForm::arrays;
  std::size_t tokens_per_block = 64;
  std::int32_t window = 0;    ///< of layers whose K/V goes before that of others; 0: none have one
  bool with_tenants = false;  ///< whether tokens of tenants with a salt are published, too
  std::size_t num_batches = 10000;  ///< that are kept to be sent again
};

/// "5557", "HOST:5557" and "tcp://HOST:5557" as addresses of both sockets, the second one port
/// above the first; others ("ipc://FILE") as they are, with ".replay" appended. Without a host it
/// is 127.0.0.1.
/// \throws std::invalid_argument for what is no such address
[[nodiscard]] PublisherOptions publisher_addresses(const std::string& text);

/// add() and flush() are called by one thread, the engine's; all else is the work of another.
class KvPublisher {
 public:
  /// Binds both sockets, and publishes that nothing is cached.
  /// \throws std::runtime_error that names the address, or says that the program was built without
  ///         ZeroMQ
  explicit KvPublisher(PublisherOptions options);
  /// Publishes that nothing is cached any more.
  ~KvPublisher();
  KvPublisher(const KvPublisher&) = delete;
  KvPublisher& operator=(const KvPublisher&) = delete;

  /// An event of the tree, published by the next flush().
  void add(const chunkattn::CacheEvent& event, std::span<const int> tokens);
  /// The same of its lower tiers.
  void add(const TierEvent& event, std::span<const int> tokens);
  /// Ends a batch, unless nothing has happened.
  void flush();

  /// Processor time that its own thread has taken.
  [[nodiscard]] double thread_seconds() const;

 private:
  class Worker;
  std::unique_ptr<Worker> worker_;
};

}  // namespace serve
