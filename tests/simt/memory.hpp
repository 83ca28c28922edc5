// LaunchMemory: what the blocks of a launch write for one another, and whether a reader may rely on
// it: a word that another block wrote is there for sure only where that block released something
// after it, and the reader's acquired that before.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <unordered_map>
#include <vector>

namespace simt {

/// A point in a thread's course: barriers that its block has passed, and its own operations.
struct Moment {
  int block = 0, thread = 0;
  std::uint64_t barriers = 0, operations = 0;

  /// Everything that stands at `this` is known at `later`, of the same block.
  [[nodiscard]] bool is_before(const Moment& later) const {
    return thread == later.thread ? operations <= later.operations : barriers < later.barriers;
  }
};

class LaunchMemory {
 public:
  /// \param followed  false: everything is right
  explicit LaunchMemory(bool followed = true) : followed_(followed) {}

  /// A write, and what is wrong with it: another block has read the word already. Empty: nothing.
  [[nodiscard]] std::string wrote(const void* address, std::size_t bytes, const Moment& now) {
    std::string wrong;
    if (!followed_) return wrong;
    for_words(address, bytes, [&](std::uintptr_t word) {
      const auto reader = readers_.find(word);
      if (reader != readers_.end() && reader->second != now.block)
        wrong = text(now.block, "writes", reader->second, "has read before");
      writes_[word] = now;
    });
    return wrong;
  }
  /// A read, likewise: it may give something old.
  [[nodiscard]] std::string read(const void* address, std::size_t bytes, const Moment& now) {
    std::string wrong;
    if (!followed_) return wrong;
    for_words(address, bytes, [&](std::uintptr_t word) {
      const auto write = writes_.find(word);
      if (write != writes_.end() && !knows(now, write->second))
        wrong = text(now.block, "reads", write->second.block, "wrote without having acquired it");
      readers_[word] = now.block;
    });
    return wrong;
  }

  void released(const void* flag, const Moment& now) { releases_[flag] = now; }
  void acquired(const void* flag, const Moment& now) {
    const auto found = releases_.find(flag);
    if (found != releases_.end()) acquisitions_[now.block].push_back({found->second, now});
  }

 private:
  struct Acquisition {
    Moment of, at;
  };

  [[nodiscard]] bool knows(const Moment& now, const Moment& write) const {
    if (write.block == now.block) return write.is_before(now);
    const auto found = acquisitions_.find(now.block);
    if (found == acquisitions_.end()) return false;
    for (const Acquisition& acquisition : found->second)
      if (acquisition.of.block == write.block && write.is_before(acquisition.of) &&
          acquisition.at.is_before(now))
        return true;
    return false;
  }

  static std::string text(int block, const char* does, int other, const char* did) {
    return "simt: block " + std::to_string(block) + " " + does + " what block " +
           std::to_string(other) + " " + did;
  }

  template <class F>
  static void for_words(const void* address, std::size_t bytes, F&& f) {
    const auto first = reinterpret_cast<std::uintptr_t>(address) / 4;
    for (std::size_t i = 0; i < (bytes + 3) / 4; ++i) f(first + i);
  }

  bool followed_;
  std::unordered_map<std::uintptr_t, Moment> writes_;
  std::unordered_map<std::uintptr_t, int> readers_;  // the last block
  std::unordered_map<const void*, Moment> releases_;
  std::map<int, std::vector<Acquisition>> acquisitions_;  // by the block that acquired
};

}  // namespace simt
