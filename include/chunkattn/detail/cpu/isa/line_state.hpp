// The state of the query lines of one task, in one worker's memory.
#ifndef CHUNKATTN_ISA_LINE_STATE
#define CHUNKATTN_ISA_LINE_STATE

#include "elements.hpp"
#include "pass.hpp"
#include "simd.hpp"
#include "tiles.hpp"

CHUNKATTN_PASS_BEGIN

/// Lines of a tile of the chunk-first kernel.
inline constexpr int tile_lines = 2 * simd::native_width;

/// The memory of one worker, for the lines of one task: queries, running softmax, outputs, and the
/// kernels' scratch. Everything is 64-byte aligned.
template <int HeadDim, int ValueDim>
class LineState {
 public:
  static constexpr int value_dim = ValueDim;
  static constexpr int partial_stride = ValueDim + 16;

  float* q = nullptr;              ///< [lines][HeadDim], scaled by sm_scale
  float* q_transposed = nullptr;   ///< [HeadDim][transposed_stride], the same, or words of them
  float* out = nullptr;            ///< [lines][ValueDim], unnormalised
  float* merged = nullptr;         ///< [lines][partial_stride], see PartialResults
  float* max = nullptr;            ///< [lines]
  float* sum = nullptr;            ///< [lines]
  std::int32_t* kv_len = nullptr;  ///< [lines] positions seen
  float* p = nullptr;              ///< [tiles][block_tokens][tile_lines], probabilities
  float* rescale = nullptr;        ///< [lines] factors of the current block
  float* scratch = nullptr;        ///< [block_tokens][HeadDim or ValueDim], widened K or V
  float* spare = nullptr;          ///< [ValueDim] a line that nobody reads
  float* tile_scratch = nullptr;   ///< see TileScratch
  std::ptrdiff_t transposed_stride = 0;
  bool has_tiles = false;        ///< q_transposed is what tiles need
  bool has_pairs = false;        ///< … or what dot products of pairs need
  std::int32_t* row = nullptr;   ///< [lines] query token, in the caller's order: for variants
  std::int32_t* head = nullptr;  ///< [lines] query head: for variants

  /// Makes room for `lines` lines; keeps memory that is large enough.
  void reserve(int lines) {
    if (lines <= capacity_) return;
    constexpr std::size_t k_dim = HeadDim, v_dim = ValueDim;
    const auto n = static_cast<std::size_t>((lines + tile_lines - 1) / tile_lines * tile_lines +
                                            tile_lines);  // tiles may begin at any line
    // An odd number of cache lines, so that a column does not fall into few cache sets.
    const std::size_t stride = (n / 16 | 1) * 16 + 16 * (n % 16 != 0 ? 2 : 0);
    const std::size_t sizes[] = {n * k_dim,
                                 k_dim * stride + n + tile_size,
                                 n * v_dim,
                                 n,
                                 n,
                                 n,
                                 n * block_tokens,
                                 n,
                                 block_tokens * std::max(k_dim, v_dim),
                                 v_dim,
                                 n * partial_stride,
                                 TileScratch<ValueDim>::size,
                                 n,
                                 n};
    std::size_t total = 0;
    for (std::size_t size : sizes) total += rounded(size);
    memory_.reset(static_cast<float*>(::operator new(total * sizeof(float), std::align_val_t{64})));
    std::fill_n(memory_.get(), total, 0.0f);
    float* at = memory_.get();
    const auto take = [&](std::size_t size) {
      float* const result = at;
      at += rounded(size);
      return result;
    };
    q = take(sizes[0]);
    q_transposed = take(sizes[1]);
    out = take(sizes[2]);
    max = take(sizes[3]);
    sum = take(sizes[4]);
    kv_len = reinterpret_cast<std::int32_t*>(take(sizes[5]));
    p = take(sizes[6]);
    rescale = take(sizes[7]);
    scratch = take(sizes[8]);
    spare = take(sizes[9]);
    merged = take(sizes[10]);
    tile_scratch = take(sizes[11]);
    row = reinterpret_cast<std::int32_t*>(take(sizes[12]));
    head = reinterpret_cast<std::int32_t*>(take(sizes[13]));
    transposed_stride = static_cast<std::ptrdiff_t>(stride);
    capacity_ = lines;
  }

  [[nodiscard]] float* merged_line(int line) noexcept {
    return merged + static_cast<std::ptrdiff_t>(line) * partial_stride;
  }

  /// Empty states for lines [begin, end).
  void clear(int begin, int end) noexcept {
    std::fill(max + begin, max + end, empty_max);
    std::fill(sum + begin, sum + end, 0.0f);
    std::fill(out + begin * ValueDim, out + end * ValueDim, 0.0f);
  }

 private:
  static constexpr std::size_t rounded(std::size_t size) { return (size + 15) / 16 * 16; }
  struct Release {
    void operator()(float* memory) const noexcept {
      ::operator delete(memory, std::align_val_t{64});
    }
  };
  std::unique_ptr<float, Release> memory_;
  int capacity_ = 0;
};

/// A vector of rows of `Words` 32-bit words, `from_stride` bytes apart, as columns: word i of row l
/// goes to to[i * to_stride + l].
template <int Words>
CHUNKATTN_INLINE void transpose_words(const void* from, std::ptrdiff_t from_stride, float* to,
                                      std::ptrdiff_t to_stride) noexcept {
  constexpr int width = simd::native_width;
  constexpr std::ptrdiff_t word = sizeof(float);
  constexpr int whole = Words / width * width;
  const auto* const bytes = static_cast<const char*>(from);
  for (int i = 0; i < whole; i += width) {
    simd::Float<width> rows[width];
    simd::repeat<width>([&](auto l) CHUNKATTN_LAMBDA {
      __builtin_memcpy(&rows[l], bytes + l * from_stride + i * word, sizeof rows[l]);
    });
    simd::transpose<width>(rows);
    simd::repeat<width>([&](auto j)
                            CHUNKATTN_LAMBDA { simd::store(to + (i + j) * to_stride, rows[j]); });
  }
  for (int i = whole; i < Words; ++i)
    for (int l = 0; l < width; ++l)
      __builtin_memcpy(to + i * to_stride + l, bytes + l * from_stride + i * word, sizeof(float));
}

/// Number of the block's tokens that `line` sees.
template <class T, class State>
CHUNKATTN_INLINE int visible_tokens(const Block<T>& block, const State& state, int line) noexcept {
  return std::clamp(state.kv_len[line] - block.position, 0, block.count);
}

/// out += p * value, `Columns` elements of one line and token. Tokens that only some lines of a
/// group see are added line by line: a probability of 0 would not do, because 0 x NaN is NaN.
template <int Columns, class T>
CHUNKATTN_INLINE void add_value(float p, const T* value, float* out) noexcept {
  constexpr int width = simd::width_for<Columns>;
  for (int i = 0; i < Columns; i += width)
    simd::store(out + i, simd::fma(simd::broadcast<width>(p), simd::load_widened<width>(value + i),
                                   simd::load<width>(out + i)));
}

CHUNKATTN_PASS_END

#endif  // CHUNKATTN_ISA_LINE_STATE
