// The matrix unit, as the kernels above it see it: eight tiles of 16 rows of 64 bytes, and C += A·B
// over pairs of bfloat16. One policy, of which a pass has one: the processor's (AMX), a model in
// plain C++ (tests), or none.
#ifndef CHUNKATTN_ISA_TILES
#define CHUNKATTN_ISA_TILES

#include "pass.hpp"

CHUNKATTN_PASS_BEGIN(TILES)

/// Rows of a tile; also the floats, or pairs of bfloat16, in a row.
inline constexpr int tile_size = 16;

#if defined(CHUNKATTN_SOFTWARE_TILES)

using Tiles = SoftwareTiles;
inline constexpr bool has_tiles = true;
inline constexpr int software_tiles = CHUNKATTN_SOFTWARE_TILES;

#elif defined(CHUNKATTN_PASS_AMX)

/// The tiles of this core, in use from construction to destruction. They are configured and
/// released within one worker's call, because the thread is the executor's: whoever had them
/// before has to configure them again anyway, and a thread that leaves them in use costs the
/// operating system 8 KB at every switch.
///
/// All operations are assembler that says it touches memory. The intrinsics of g++ 12 do not: the
/// compiler drops or delays stores that only a tile load or the configuration reads.
class AmxTiles {
 public:
  static constexpr bool runs_on(InstructionSet set) noexcept { return set == InstructionSet::amx; }

  [[gnu::noinline]] explicit AmxTiles(bool wanted) noexcept : in_use_(wanted) {
    if (!wanted) return;
    Config config{};
    config.palette = 1;
    for (int i = 0; i < 8; ++i) {
      config.row_bytes[i] = 64;
      config.rows[i] = tile_size;
    }
    __asm__ volatile("ldtilecfg %0" : : "m"(config));
  }
  AmxTiles(const AmxTiles&) = delete;
  AmxTiles& operator=(const AmxTiles&) = delete;
  [[gnu::noinline]] ~AmxTiles() {
    if (in_use_) __asm__ volatile("tilerelease" : : : "memory");
  }

  /// Tile R = 0.
  template <int R>
  CHUNKATTN_INLINE void zero() noexcept {
    __asm__ volatile("{tilezero %%tmm%c0|tilezero tmm%c0}" : : "i"(R));
  }
  /// Tile R = 16 rows of 64 bytes, `stride` bytes apart.
  template <int R>
  CHUNKATTN_INLINE void load(const void* from, std::ptrdiff_t stride) noexcept {
    __asm__ volatile("{tileloadd (%0,%1,1), %%tmm%c2|tileloadd tmm%c2, [%0+%1*1]}"
                     :
                     : "r"(from), "r"(stride), "i"(R)
                     : "memory");
  }
  /// The same for rows that are not needed again soon.
  template <int R>
  CHUNKATTN_INLINE void load_once(const void* from, std::ptrdiff_t stride) noexcept {
    __asm__ volatile("{tileloaddt1 (%0,%1,1), %%tmm%c2|tileloaddt1 tmm%c2, [%0+%1*1]}"
                     :
                     : "r"(from), "r"(stride), "i"(R)
                     : "memory");
  }
  template <int R>
  CHUNKATTN_INLINE void store(void* to, std::ptrdiff_t stride) noexcept {
    __asm__ volatile("{tilestored %%tmm%c2, (%0,%1,1)|tilestored [%0+%1*1], tmm%c2}"
                     :
                     : "r"(to), "r"(stride), "i"(R)
                     : "memory");
  }
  /// C[m][n] += sum over pairs k of A[m][k] · B[k][n]: 16 rows of 16 pairs times 16 rows of 16.
  template <int C, int A, int B>
  CHUNKATTN_INLINE void dot() noexcept {
    __asm__ volatile("{tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0|tdpbf16ps tmm%c0, tmm%c1, tmm%c2}"
                     :
                     : "i"(C), "i"(A), "i"(B));
  }

 private:
  struct alignas(64) Config {  // as ldtilecfg reads it
    std::uint8_t palette, start_row, reserved[14];
    std::uint16_t row_bytes[16];
    std::uint8_t rows[16];
  };
  static_assert(sizeof(Config) == 64);

  bool in_use_;
};

using Tiles = AmxTiles;
inline constexpr bool has_tiles = true;
inline constexpr int software_tiles = 0;

#else

/// A pass without a matrix unit.
struct Tiles {
  static constexpr bool runs_on(InstructionSet) noexcept { return false; }
  explicit Tiles(bool) noexcept {}
};
inline constexpr bool has_tiles = false;
inline constexpr int software_tiles = 0;

#endif

/// Whether products over K and V of T may go through tiles where there are some. fp32 would need
/// three terms, and head dimensions that leave a tile partly empty are not worth code of their own.
template <int HeadDim, int ValueDim, class T>
inline constexpr bool fits_tiles =
    has_tiles && HeadDim % (2 * tile_size) == 0 && ValueDim % (2 * tile_size) == 0 && sizeof(T) < 4;

/// Lines that are computed at once: two tiles beside each other.
inline constexpr int matrix_lines = 2 * tile_size;

/// A worker's scratch for a block, in floats.
template <int ValueDim>
struct TileScratch {
  static constexpr std::size_t v_size = block_tokens * ValueDim;  // two terms of half a float
  static constexpr std::size_t logits_size = block_tokens * matrix_lines;
  static constexpr std::size_t out_size = tile_size * ValueDim;
  static constexpr std::size_t size = has_tiles ? v_size + 2 * logits_size + out_size : 0;

  float* v;       ///< [ValueDim / 32] of what pack_values() makes
  float* logits;  ///< [block_tokens][matrix_lines], then probabilities
  float* p;       ///< what pack_probabilities() makes
  float* out;     ///< [tile_size][ValueDim], outputs of a tile that has fewer lines

  explicit TileScratch(float* memory) noexcept
      : v(memory), logits(v + v_size), p(logits + logits_size), out(p + logits_size) {}
};

CHUNKATTN_PASS_END

#endif  // CHUNKATTN_ISA_TILES
