// The number that the threads of a pool sleep for: no change of it is slept through.
#include <doctest/doctest.h>

#include <atomic>
#include <cstdint>
#include <thread>

#include "chunkattn/executor.hpp"

namespace {

#if defined(_WIN32)
using Number = chunkattn::detail::WaitableNumber;
#else
using Number = std::atomic<std::uint32_t>;
#endif

void change(Number& number, std::uint32_t to) {
  number.store(to, std::memory_order_release);
  number.notify_all();
}
void wait_for(Number& number, std::uint32_t value) {
  while (number.load(std::memory_order_acquire) != value)
    number.wait(value - 1, std::memory_order_acquire);
}

}  // namespace

TEST_CASE("two threads that wait for each other never wait for long") {
  constexpr std::uint32_t rounds = 20000;
  Number there{0}, back{0};
  std::thread other([&] {
    for (std::uint32_t n = 1; n <= rounds; ++n) {
      wait_for(there, n);
      change(back, n);
    }
  });
  for (std::uint32_t n = 1; n <= rounds; ++n) {
    change(there, n);
    wait_for(back, n);
  }
  other.join();
  CHECK(back.load() == rounds);
}

TEST_CASE("a change wakes all who wait for it, and waiting for another value returns at once") {
  Number number{7};
  number.wait(6, std::memory_order_acquire);
  std::atomic<int> awake = 0;
  std::thread threads[3];
  for (std::thread& thread : threads)
    thread = std::thread([&] {
      wait_for(number, 8);
      ++awake;
    });
  change(number, 8);
  for (std::thread& thread : threads) thread.join();
  CHECK(awake == 3);
}
