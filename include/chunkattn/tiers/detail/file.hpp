// TierFile: an open file, by the number that POSIX and the C library of Windows give it.
#pragma once

#if defined(_WIN32)
#include <io.h>
#else
#include <unistd.h>
#endif

#include <array>
#include <cstdint>
#include <utility>

#include "../../detail/support/config.hpp"

CHUNKATTN_NAMESPACE_BEGIN
namespace detail {

class TierFile {
 public:
  explicit TierFile(int number = -1) : number_(number) {}
  TierFile(TierFile&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  TierFile& operator=(TierFile&& other) noexcept {
    std::swap(number_, other.number_);
    return *this;
  }
  ~TierFile() { (void)close(); }
  [[nodiscard]] bool is_open() const noexcept { return number_ >= 0; }
  [[nodiscard]] int number() const noexcept { return number_; }
  /// False if what was written could not be kept.
  bool close() noexcept {
    const int old = std::exchange(number_, -1);
#if defined(_WIN32)
    return old < 0 || ::_close(old) == 0;
#else
    return old < 0 || ::close(old) == 0;
#endif
  }

 private:
  int number_;
};

struct TierFileStatus {
  std::uint64_t size = 0;
  std::array<std::int64_t, 2> used{};  ///< seconds and nanoseconds, or as the system counts
};

}  // namespace detail
CHUNKATTN_NAMESPACE_END
