// Instead of kv_publisher.cpp where the program is built without ZeroMQ.
#include <stdexcept>

#include "kv_publisher.hpp"

namespace serve {

class KvPublisher::Worker {};

KvPublisher::KvPublisher(PublisherOptions) {
  throw std::runtime_error(
      "--kv-events: this program was built without ZeroMQ (Debian: cppzmq-dev); install it and "
      "build again");
}
KvPublisher::~KvPublisher() = default;
void KvPublisher::add(const chunkattn::CacheEvent&, std::span<const int>) {}
void KvPublisher::add(const TierEvent&, std::span<const int>) {}
void KvPublisher::flush() {}
double KvPublisher::thread_seconds() const {
  return 0;
}

}  // namespace serve
