// What a profiler would count of the instructions that the machine runs: executed instructions,
// wavefronts of shared memory, sectors of global memory. All of them follow from the addresses of a
// warp's lanes; time, stalls and hits of caches do not, and are not here.
#pragma once

#include <array>
#include <span>
#include <string_view>

#include "ptx/machine.hpp"

namespace ptxrun {

enum class Kind : u8 {
  mma,
  ldmatrix,
  copy,  ///< cp.async, its commits and waits
  load_shared,
  store_shared,
  load_global,
  store_global,
  atomic,   ///< and fences
  shuffle,  ///< and votes
  arithmetic,
  exp2,  ///< and other approximations
  convert,
  integer,
  choose,   ///< comparisons, selections
  move,     ///< registers, and arguments: ptxas leaves few of them
  control,  ///< branches, barriers
};
inline constexpr int num_kinds = 16;
[[nodiscard]] const char* name_of(Kind kind);

/// Of the instructions of a kind, by warps. "Least": what the same lanes would take where no two
/// banks conflict, and where all that is read of a sector is wanted.
struct Count {
  u64 instructions = 0;  ///< those of which all lanes are off too
  u64 wavefronts = 0, least_wavefronts = 0;
  u64 sectors = 0, least_sectors = 0;

  Count& operator+=(const Count& other);
  Count& operator-=(const Count& other);
  friend Count operator*(Count count, u64 times);
};

struct Counts {
  std::array<Count, num_kinds> kinds{};

  Count& operator[](Kind kind) { return kinds[static_cast<std::size_t>(kind)]; }
  const Count& operator[](Kind kind) const { return kinds[static_cast<std::size_t>(kind)]; }
  [[nodiscard]] Count total() const;
  Counts& operator+=(const Counts& other);
  Counts& operator-=(const Counts& other);
  friend Counts operator*(Counts counts, u64 times);
};

/// Where the machine counts from here on; null: nowhere.
void count_into(Counts* counts);

/// Counts an instruction of a warp before it runs, of lanes `on`.
void count(Warp& warp, const Instruction& instruction, u32 on);

/// The kind of a form, by its name.
[[nodiscard]] Kind kind_of(std::string_view form);

/// Wavefronts of a request to shared memory, of lanes that have `bytes` each at these addresses:
/// 128 bytes' worth of lanes go together (all, halves, quarters), as often as one bank, of 32 with
/// a word of 4 bytes each, is asked for different words.
struct Wavefronts {
  u64 all, least;
};
[[nodiscard]] Wavefronts wavefronts_of(std::span<const u64, 32> addresses, u32 on, u32 bytes);

/// Sectors of 32 bytes that a request to global memory touches; the least for as many bytes.
struct Sectors {
  u64 all, least;
};
[[nodiscard]] Sectors sectors_of(std::span<const u64, 32> addresses, u32 on, u32 bytes);

}  // namespace ptxrun
