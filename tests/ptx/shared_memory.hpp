// Shared memory of a block, which watches who uses it: addresses, words that nobody wrote,
// destinations of copies under way, and threads that meet in a word without a barrier between them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "ptx/fault.hpp"

namespace ptxrun {

/// Where the window of shared memory begins: not at 0, so that an address is not an offset.
inline constexpr std::uint32_t shared_base = 1024;

class SharedMemory {
 public:
  /// Who uses a word: a thread, after so many times that its warp has met in an instruction of all
  /// lanes; or all lanes of a warp in such an instruction.
  struct User {
    std::uint16_t number;
    std::uint32_t meetings;
    static User thread(int index, std::uint32_t meetings) {
      return {static_cast<std::uint16_t>(index), meetings};
    }
    static User lanes(int warp, std::uint32_t meetings) {
      return {static_cast<std::uint16_t>(of_warp | warp), meetings};
    }
    [[nodiscard]] int warp() const {
      return (number & of_warp) != 0 ? number & 0x7fff : number / 32;
    }
  };

  explicit SharedMemory(std::size_t bytes);

  /// The bytes of one element or vector, which lies at a multiple of its size.
  const unsigned char* read(std::uint32_t address, std::uint32_t bytes, User user);
  void write(std::uint32_t address, const void* from, std::uint32_t bytes, User user);

  /// From begin to land, the 16 bytes at `address` belong to an asynchronous copy of `user`.
  void begin_copy(std::uint32_t address, User user);
  void land_copy(std::uint32_t address, const void* from, std::uint32_t bytes, User user);

  /// All threads have passed a barrier.
  void passed_barrier() { ++epoch_; }

 private:
  static constexpr std::uint16_t of_warp = 0x8000, several = 0xffff;

  /// The last use of a kind, and when: in an epoch, which begins with a barrier.
  struct Use {
    User user{0, 0};
    std::uint32_t epoch = 0;
  };
  struct Word {
    Use write, read;
    std::uint8_t written = 0;  // by byte
    bool under_way = false;    // a copy's destination
  };

  std::size_t place(std::uint32_t address, std::uint32_t bytes) const;
  bool races(const Use& use, User user) const;
  void check_write(const Word& word, User user, bool same_value) const;

  std::vector<unsigned char> bytes_;
  std::vector<Word> words_;
  std::uint32_t epoch_ = 1;
};

}  // namespace ptxrun
