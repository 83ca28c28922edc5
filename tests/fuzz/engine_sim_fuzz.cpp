// libFuzzer target: the bytes choose the operations of the engine simulation
// (tests/support/engine_sim.hpp).
//
//   clang++ -std=c++20 -O1 -g -fsanitize=fuzzer,address,undefined -I. -Iinclude
//       tests/fuzz/engine_sim_fuzz.cpp -o engine_sim_fuzz && ./engine_sim_fuzz tests/fuzz/corpus
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>

#include "tests/support/engine_sim_run.hpp"
#include "tests/support/retention.hpp"

namespace {

/// Choices from the fuzzer's bytes; zeros once they are used up.
class ByteChoices : public test::Choices {
 public:
  ByteChoices(const std::uint8_t* data, std::size_t size) : data_(data), size_(size) {}
  std::size_t below(std::size_t n) override {
    std::size_t value = next();
    if (n > 256) value = value << 8 | next();
    return value % n;
  }
  [[nodiscard]] bool empty() const { return used_ >= size_; }

 private:
  std::size_t next() { return used_ < size_ ? data_[used_++] : 0; }

  const std::uint8_t* data_;
  std::size_t size_;
  std::size_t used_ = 0;
};

template <class Retention>
void run(ByteChoices& choices, const test::SimOptions& options) {
  test::Counters counters;
  test::EngineSim<Retention, 4> sim(choices, options, counters);
  try {
    for (int i = 0; i < 600 && !choices.empty(); ++i) {
      sim.operate();
      sim.check_all();
    }
    sim.end();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n%s\n", error.what(), sim.history().c_str());
    std::abort();
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size < 4) return 0;
  ByteChoices choices(data, size);
  test::SimOptions o;
  const std::size_t flags = choices.below(256);
  o.tree.sharing =
      flags & 1 ? chunkattn::TreeOptions::Sharing::chunk : chunkattn::TreeOptions::Sharing::token;
  if (const auto run = static_cast<std::int32_t>(choices.below(5)); run > 0) o.tree.min_run = run;
  o.many_namespaces = (flags & 4) != 0;
  o.max_live = 10;
  o.max_prompt = 14;
  o.max_length = 40;
  o.letters = flags & 2 ? 2 : 3;
  o.retention.max_pinned = 1 + choices.below(19);
  if (flags & 8) o.budget = 8 + choices.below(40);
  if (flags & 16) {
    o.retention.high_watermark = 6 + choices.below(30);
    o.retention.low_watermark = choices.below(o.retention.high_watermark);
  }
  switch (flags >> 5 & 3) {
    case 0:
      run<test::NoRetention>(choices, o);
      break;
    case 1:
      run<test::ByPriority>(choices, o);
      break;
    default:
      run<chunkattn::CachePolicy>(choices, o);
  }
  return 0;
}
