// A matrix unit in plain C++, with the shapes, the order of arithmetic, the rounding and the
// flushing of Intel's: tests run the kernels that use tiles on machines without them
// (CHUNKATTN_SOFTWARE_TILES; this is included before the library), and compare bits where there are
// some.
//
// TDPBF16PS is what volume 2 of Intel's Software Developer's Manual has in pseudocode: for each
// element of the result two chains of fused multiply-adds from zero, one over the even and one over
// the odd elements of the pairs, then their sum, then that is added to the element. Everything is
// rounded to nearest even, denormals count as zero on the way in and become zero on the way out,
// and MXCSR is neither read nor written. Bochs (cpu/avx/amx.cc) computes the same. Intel's
// Intrinsics Guide differs: there both products of a pair are added to the element itself, pair
// after pair. Neither says whether a result is tiny before or after rounding; here after, as with
// all other vector instructions of the processor.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "chunkattn/attention_options.hpp"
#include "chunkattn/detail/support/bit_cast.hpp"
#include "chunkattn/detail/support/config.hpp"
#include "chunkattn/detail/support/instruction_sets.hpp"
#include "software_dots.hpp"

CHUNKATTN_ISA_DETAIL_BEGIN
namespace cpu {

/// The model. The operations are those of AmxTiles (detail/cpu/isa/tiles.hpp).
class SoftwareTiles {
 public:
  static constexpr bool runs_on(InstructionSet) noexcept { return true; }

  explicit SoftwareTiles(bool /*wanted*/) noexcept {}

  template <int R>
  void zero() noexcept {
    tiles_[R] = Tile{};
  }
  template <int R>
  void load(const void* from, std::ptrdiff_t stride) noexcept {
    for (int row = 0; row < 16; ++row)
      std::memcpy(tiles_[R].row[row], static_cast<const char*>(from) + row * stride, 64);
  }
  template <int R>
  void load_once(const void* from, std::ptrdiff_t stride) noexcept {
    load<R>(from, stride);
  }
  template <int R>
  void store(void* to, std::ptrdiff_t stride) const noexcept {
    for (int row = 0; row < 16; ++row)
      std::memcpy(static_cast<char*>(to) + row * stride, tiles_[R].row[row], 64);
  }
  /// C[m][n] += sum over pairs k of A[m][k] · B[k][n].
  template <int C, int A, int B>
  void dot() noexcept {
    float b[2][16][16];
    for (int k = 0; k < 16; ++k)
      for (int n = 0; n < 16; ++n) {
        b[0][k][n] = even(tiles_[B].row[k][n]);
        b[1][k][n] = odd(tiles_[B].row[k][n]);
      }
    for (int m = 0; m < 16; ++m) {
      float sums[2][16] = {};
      for (int k = 0; k < 16; ++k) {
        const std::uint32_t pair = tiles_[A].row[m][k];
        for (int n = 0; n < 16; ++n) {
          sums[0][n] = fused(even(pair), b[0][k][n], sums[0][n]);
          sums[1][n] = fused(odd(pair), b[1][k][n], sums[1][n]);
        }
      }
      for (int n = 0; n < 16; ++n) {
        const float sum = fused(sums[0][n], 1.0f, sums[1][n]);
        const float old = without_denormals(tiles_[C].row[m][n]);
        tiles_[C].row[m][n] = detail::bit_cast<std::uint32_t>(fused(old, 1.0f, sum));
      }
    }
  }

 private:
  struct Tile {
    std::uint32_t row[16][16];
  };

  // The two bfloat16 of a pair.
  static float even(std::uint32_t pair) noexcept { return without_denormals(pair << 16); }
  static float odd(std::uint32_t pair) noexcept { return without_denormals(pair & 0xffff0000u); }

  Tile tiles_[8] = {};
};

}  // namespace cpu
CHUNKATTN_ISA_DETAIL_END
