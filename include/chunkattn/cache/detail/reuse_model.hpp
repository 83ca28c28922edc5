// ReuseModel: how long cached tokens are worth keeping, learnt from what was used again and when.
// Integers only, so that the same calls give the same decisions on every machine.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>

#include "../../detail/support/array.hpp"
#include "../../detail/support/config.hpp"
#include "../../detail/tree/topology.hpp"

CHUNKATTN_NAMESPACE_BEGIN

namespace detail {

/// Tokens that were evicted.
struct Ghost {
  std::uint32_t key = 0;     ///< 0: none
  std::uint32_t length = 0;  ///< tokens
  ReuseRecord reuse;
};

/// Runs of tokens that were evicted lately, by a hash of their position. A few are forgotten before
/// their time, and a hash may be another's: then something is kept too long, or not long enough.
class Ghosts {
 public:
  /// Makes room for as many as `count`; 16 bytes each.
  void reserve(std::size_t count) {
    std::size_t sets = (std::max<std::size_t>)(sets_.size(), 16);
    while (sets * ways < count) sets *= 2;
    if (sets == sets_.size()) return;
    Array<Set> grown(sets);
    sets_.swap(grown);
    for (const Set& set : grown)
      for (const Ghost& ghost : set.ways)
        if (ghost.key != 0) insert(ghost);
  }
  /// In place of the oldest of its set; with the next call, when the set has come from memory.
  void add(const Ghost& ghost) noexcept {
    if (sets_.empty() || ghost.key == 0) return;
    if (next_.key != 0) insert(next_);
    next_ = ghost;
    CHUNKATTN_PREFETCH_WRITE(&set_of(ghost.key));
  }
  /// Takes one out; its key is 0 where there is none.
  Ghost take(std::uint32_t key) noexcept {
    if (sets_.empty() || key == 0) return {};
    if (next_.key != 0) insert(std::exchange(next_, {}));
    for (Ghost& ghost : set_of(key).ways)
      if (ghost.key == key) return std::exchange(ghost, {});
    return {};
  }
  [[nodiscard]] std::size_t capacity() const noexcept { return sets_.size() * ways; }

 private:
  static constexpr std::size_t ways = 4;
  struct alignas(64) Set {
    Ghost ways[Ghosts::ways];
  };
  static_assert(sizeof(Set) == 64, "one cache line per look-up");

  void insert(const Ghost& ghost) noexcept {
    Ghost* oldest = nullptr;
    for (Ghost& other : set_of(ghost.key).ways) {
      if (other.key == ghost.key || other.key == 0) {
        other = ghost;
        return;
      }
      // Times may wrap around.
      if (oldest == nullptr ||
          static_cast<std::int32_t>(other.reuse.since - oldest->reuse.since) < 0)
        oldest = &other;
    }
    *oldest = ghost;
  }
  Set& set_of(std::uint32_t key) noexcept { return sets_[key & (sets_.size() - 1)]; }

  Array<Set> sets_;  // a power of two of them
  Ghost next_;       // to be added
};

/// What may go next: of each group of one level the oldest node, where that is a leaf, and what it
/// is worth at one time.
class Candidates {
 public:
  static constexpr std::size_t max_groups = 32;

  /// A group is looked at again: its oldest node is another one, or may be a leaf by now.
  void renew(std::size_t group) noexcept { stale_ |= 1u << group; }
  void renew_all(std::size_t num_groups) noexcept { stale_ = (1u << num_groups) - 1; }
  /// One to be looked at again; -1: none.
  [[nodiscard]] int next_stale() noexcept {
    if (stale_ == 0) return -1;
    const int group = std::countr_zero(stale_);
    stale_ &= stale_ - 1;
    return group;
  }
  void drop(std::size_t group) noexcept { has_ &= ~(1u << group); }
  void set(std::size_t group, std::uint64_t value, std::uint32_t age) noexcept {
    has_ |= 1u << group;
    values_[group] = value;
    ages_[group] = age;
  }
  /// The group whose one is worth least, of several the oldest; -1: there is none.
  [[nodiscard]] int least() const noexcept {
    if (has_ == 0) return -1;
    auto best = static_cast<std::size_t>(std::countr_zero(has_));
    for (std::uint32_t rest = has_ & (has_ - 1); rest != 0; rest &= rest - 1) {
      const auto group = static_cast<std::size_t>(std::countr_zero(rest));
      if (values_[group] < values_[best] ||
          (values_[group] == values_[best] && ages_[group] > ages_[best]))
        best = group;
    }
    return static_cast<int>(best);
  }

 private:
  std::array<std::uint64_t, max_groups> values_{};
  std::array<std::uint32_t, max_groups> ages_{};
  std::uint32_t has_ = 0, stale_ = 0;  // bits by group
};

/// The value of cached chunks by group and age: their Gittins index, the most hits per time in a
/// slot that keeping one for some time still promises, as those of its group have been used again.
class ReuseModel {
 public:
  static constexpr int num_groups = 20;
  static_assert(num_groups < static_cast<int>(Candidates::max_groups));  // as renew_all() shifts

  ReuseModel() { values_.fill((std::numeric_limits<std::uint64_t>::max)()); }

  /// \param used  chunks in use
  static std::uint8_t gap_of(std::uint32_t age, std::size_t used) noexcept {
    const std::uint64_t tenths = std::uint64_t{age} * 10;
    return tenths < used ? 1 : tenths < 3 * used ? 2 : tenths < 10 * used ? 3 : 4;
  }
  /// \param gap  0: not known
  static std::uint8_t group_of(std::uint8_t uses, std::uint8_t gap) noexcept {
    const int often = uses <= 1 ? uses : uses <= 3 ? 2 : 3;
    return static_cast<std::uint8_t>(5 * often + gap);
  }
  static std::uint8_t gap_of(std::uint8_t group) noexcept { return group % 5; }

  /// `chunks` of the group fell out of use.
  void fell_out_of_use(std::uint8_t group, std::uint32_t chunks, std::size_t used) noexcept {
    unused_[group] += chunks * one;
    since_update_ += chunks;
    if (since_update_ < (std::max<std::size_t>)(4096, used / 2)) return;
    since_update_ = 0;
    update();
  }
  /// `chunks` of the group are used again.
  void was_used(std::uint8_t group, std::uint32_t age, std::uint32_t chunks) noexcept {
    hits_[index_of(group, age)] += chunks * one;
  }
  /// The same, of chunks with this record. Returns their record from then on.
  /// \param used  chunks in use
  ReuseRecord used_again(const ReuseRecord& before, std::uint32_t age, std::uint32_t chunks,
                         std::size_t used) noexcept {
    was_used(before.group, age, chunks);
    const auto uses = static_cast<std::uint8_t>((std::min)(before.uses + 1, 255));
    return {.uses = uses, .group = group_of(uses, gap_of(age, used))};
  }
  [[nodiscard]] std::uint64_t value(std::uint8_t group, std::uint32_t age) const noexcept {
    return values_[index_of(group, age)];
  }

  Ghosts ghosts;
  Candidates candidates;

 private:
  static constexpr std::size_t num_ages = 48;  // each half an octave
  static constexpr std::uint64_t one = 256;    // a chunk, in the units that are counted

  static std::size_t index_of(std::uint8_t group, std::uint32_t age) noexcept {
    std::size_t bucket = 0;
    if (age >= 2) {
      const auto octave = static_cast<std::size_t>(std::bit_width(age)) - 1;
      bucket = 2 * octave + (age >> (octave - 1) & 1);
    }
    return group * num_ages + (std::min)(bucket, num_ages - 1);
  }
  /// The first age of a bucket.
  static std::uint64_t begin(std::size_t bucket) noexcept {
    return bucket == 0 ? 0 : std::uint64_t{2 + bucket % 2} << bucket / 2 >> 1;
  }

  void update() noexcept {
    for (std::size_t group = 0; group < num_groups; ++group) {
      const auto hits = hits_.begin() + group * num_ages;
      // How many are there still at the beginning of each age, each as 2 to have halves.
      std::array<std::uint64_t, num_ages + 1> left;
      left[0] = 2 * unused_[group] + 4 * one;
      for (std::size_t b = 0; b < num_ages; ++b)
        left[b + 1] = left[b] > 2 * hits[b] + one ? left[b] - 2 * hits[b] : one;
      for (std::size_t a = 0; a < num_ages; ++a) {
        std::uint64_t used = 0, time = 0, best = 0;
        for (std::size_t b = a; b < num_ages; ++b) {
          used += hits[b];
          time += (begin(b + 1) - begin(b)) * (left[b] + left[b + 1]) / 4 + 1;
          best = (std::max)(best, (used << 28) / time);
        }
        values_[group * num_ages + a] = best;
      }
      // What is long ago counts less.
      unused_[group] -= unused_[group] / 32;
      for (std::size_t b = 0; b < num_ages; ++b) hits[b] -= hits[b] / 32;
    }
  }

  std::array<std::uint64_t, num_groups * num_ages> hits_{}, values_;
  std::array<std::uint64_t, num_groups> unused_{};
  std::size_t since_update_ = 0;
};

}  // namespace detail

CHUNKATTN_NAMESPACE_END
