// PinTable: pinned paths by the handles that hold them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>

#include "../support/array.hpp"
#include "../support/config.hpp"

CHUNKATTN_NAMESPACE_BEGIN

namespace detail {

/// A pinned path, from the root to the node `last`; -1: the record is free.
struct PinRecord {
  std::int32_t last = -1;
  std::uint32_t generation = 0;  ///< tells the pins apart that have had the record
  std::int32_t next_free = -1;   ///< of a free record: the next one; -1: it is the last
};

/// Records of pins.
class PinTable {
 public:
  /// Records whose generations are used up stay free for good: no later pin is taken for an earlier
  /// one.
  static constexpr std::uint32_t last_generation = std::numeric_limits<std::uint32_t>::max();

  /// Makes sure that add() does not fail.
  void reserve() {
    if (free_ == none && pins_.size() == pins_.capacity()) pins_.reserve(2 * pins_.size() + 8);
  }
  /// The record of a new pin.
  std::int32_t add(std::int32_t last) noexcept {
    std::int32_t pin = free_;
    if (pin == none) {
      pin = static_cast<std::int32_t>(pins_.size());
      pins_.push_back({});
    } else {
      free_ = pins_[to_size(pin)].next_free;
    }
    pins_[to_size(pin)].last = last;
    return pin;
  }
  /// The end of a pin that there is.
  void remove(std::int32_t pin) noexcept {
    PinRecord& record = pins_[to_size(pin)];
    record.last = none;
    if (++record.generation != last_generation) record.next_free = std::exchange(free_, pin);
  }
  /// The record, if it is still that of the generation; else null.
  [[nodiscard]] const PinRecord* find(std::int32_t pin, std::uint32_t generation) const noexcept {
    const PinRecord& record = pins_[to_size(pin)];
    return record.generation == generation && record.last != none ? &record : nullptr;
  }
  /// The node `from` is gone: pins that ended there end in `to`.
  void move(std::int32_t from, std::int32_t to) noexcept {
    for (PinRecord& pin : pins_)
      if (pin.last == from) pin.last = to;
  }
  [[nodiscard]] const PinRecord& operator[](std::int32_t pin) const noexcept {
    return pins_[to_size(pin)];
  }
  [[nodiscard]] const PinRecord* begin() const noexcept { return pins_.begin(); }
  [[nodiscard]] const PinRecord* end() const noexcept { return pins_.end(); }

 private:
  static constexpr std::int32_t none = -1;

  Array<PinRecord> pins_;
  std::int32_t free_ = none;  // a free record
};

}  // namespace detail

CHUNKATTN_NAMESPACE_END
