// The state of the query lines of one task, in one worker's memory.
#ifndef CHUNKATTN_ISA_LINE_STATE
#define CHUNKATTN_ISA_LINE_STATE

#include "dots.hpp"
#include "elements.hpp"
#include "line_total.hpp"
#include "pass.hpp"
#include "simd.hpp"
#include "tiles.hpp"

CHUNKATTN_PASS_BEGIN(VECTORS)

/// Lines of a tile of the chunk-first kernel.
inline constexpr int tile_lines = 2 * simd::native_width;

/// The memory of one worker, for the lines of one task: queries, running softmax, outputs, and the
/// kernels' scratch. Everything is 64-byte aligned.
template <int HeadDim, int ValueDim>
class LineState {
 public:
  static constexpr int value_dim = ValueDim;
  /// 16 bits for each element, in whole vectors, and a scale.
  static constexpr int query_words = has_int16 ? (HeadDim + 31) / 32 * 16 + 8 : 0;
  using Total = LineTotal<ValueDim>;

  float* q = nullptr;              ///< [lines][HeadDim], scaled by sm_scale
  float* q_transposed = nullptr;   ///< [HeadDim][transposed_stride], the same, or words of them
  float* q_words = nullptr;        ///< [lines][query_words], for streams of dot products
  float* out = nullptr;            ///< [lines][ValueDim], unnormalised
  float* merged = nullptr;         ///< [lines] Total, of splits: see PartialResults
  float* totals = nullptr;         ///< [lines] Total, of windows
  float* max = nullptr;            ///< [lines]
  float* sum = nullptr;            ///< [lines]
  std::int32_t* kv_len = nullptr;  ///< [lines] positions seen
  float* p = nullptr;              ///< [tiles][block_tokens][tile_lines], probabilities
  float* rescale = nullptr;        ///< [lines] factors of the current block
  float* scratch = nullptr;        ///< [block_tokens][HeadDim or ValueDim], widened K or V
  float* spare = nullptr;          ///< [ValueDim] outputs of padding lines
  float* tile_scratch = nullptr;   ///< see TileScratch
  std::ptrdiff_t transposed_stride = 0;
  bool has_tiles = false;          ///< q_transposed is what tiles need
  bool has_pairs = false;          ///< … or what dot products of pairs need
  std::int32_t* row = nullptr;     ///< [lines] query token, in the caller's order: for variants
  std::int32_t* head = nullptr;    ///< [lines] query head: for variants
  std::int32_t* window = nullptr;  ///< [lines] of the last block; from 1 on, the line has a total

  /// Makes room for `lines` lines; keeps memory that is large enough.
  void reserve(int lines) {
    if (lines <= capacity_) return;
    constexpr std::size_t k_dim = HeadDim, v_dim = ValueDim;
    // Tiles may begin at any line.
    const auto n = to_size((lines + tile_lines - 1) / tile_lines * tile_lines + tile_lines);
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
                                 block_tokens * (std::max)(k_dim, v_dim),
                                 v_dim,
                                 n * Total::stride,
                                 n * Total::stride,
                                 TileScratch<ValueDim>::size,
                                 n,
                                 n,
                                 n,
                                 n * to_size(query_words)};
    size_ = 0;
    for (std::size_t size : sizes) size_ += rounded(size);
    memory_.reset(static_cast<float*>(::operator new(size_ * sizeof(float), std::align_val_t{64})));
    std::fill_n(memory_.get(), size_, 0.0f);
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
    totals = take(sizes[11]);
    tile_scratch = take(sizes[12]);
    row = reinterpret_cast<std::int32_t*>(take(sizes[13]));
    head = reinterpret_cast<std::int32_t*>(take(sizes[14]));
    window = reinterpret_cast<std::int32_t*>(take(sizes[15]));
    q_words = take(sizes[16]);
    transposed_stride = static_cast<std::ptrdiff_t>(stride);
    capacity_ = lines;
  }

  /// Fills all of it, so that a test notices what is read before it is written.
  void poison(float value) noexcept { std::fill_n(memory_.get(), size_, value); }

  [[nodiscard]] Total merged_line(int line) const noexcept {
    return {merged + static_cast<std::ptrdiff_t>(line) * Total::stride};
  }
  [[nodiscard]] SoftmaxState softmax(int line) const noexcept { return {max[line], sum[line]}; }

  /// Empty states for lines [begin, end).
  void clear(int begin, int end) noexcept {
    clear_running(begin, end);
    std::fill(window + begin, window + end, 0);
  }

  /// Lines [begin, begin + count) are to see a block at this path position: where a window ended,
  /// their running state goes to their totals.
  void enter(int position, int begin, int count) noexcept {
    if (position < window_tokens) return;  // most contexts know one window
    const std::int32_t now = position / window_tokens;
    for (int line = begin; line < begin + count; ++line) {
      if (window[line] == now) continue;
      fold(line);
      clear_running(line, line + 1);
      window[line] = now;
    }
  }

  /// The end of the walk of lines [0, count): their running state becomes that of all windows.
  void close(int count) noexcept {
    for (int line = 0; line < count; ++line) {
      if (window[line] == 0) continue;
      fold(line);
      const SoftmaxState all = total_line(line).close(out + line * ValueDim);
      max[line] = all.max;
      sum[line] = all.sum;
      window[line] = 0;
    }
  }

 private:
  [[nodiscard]] Total total_line(int line) const noexcept {
    return {totals + static_cast<std::ptrdiff_t>(line) * Total::stride};
  }
  // What has no weight counts, too: its output may be NaN.
  void fold(int line) noexcept {
    const float* const from = out + line * ValueDim;
    if (window[line] == 0)
      total_line(line).start(softmax(line), from);
    else
      total_line(line).add(softmax(line), from, total_line(line));
  }
  void clear_running(int begin, int end) noexcept {
    std::fill(max + begin, max + end, empty_max);
    std::fill(sum + begin, sum + end, 0.0f);
    std::fill(out + begin * ValueDim, out + end * ValueDim, 0.0f);
  }

  static constexpr std::size_t rounded(std::size_t size) { return (size + 15) / 16 * 16; }
  struct Release {
    void operator()(float* memory) const noexcept {
      ::operator delete(memory, std::align_val_t{64});
    }
  };
  std::unique_ptr<float, Release> memory_;
  std::size_t size_ = 0;  // of it, in floats
  int capacity_ = 0;      // in lines
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
    CHUNKATTN_UNROLLED
    for (int l = 0; l < width; ++l)
      __builtin_memcpy(&rows[l], bytes + l * from_stride + i * word, sizeof rows[l]);
    simd::transpose<width>(rows);
    CHUNKATTN_UNROLLED
    for (int j = 0; j < width; ++j) simd::store(to + (i + j) * to_stride, rows[j]);
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

/// out = out * factor + sum. The values of a block are added up apart from the running output,
/// which may have become so large that each of them would lose digits.
template <int W>
CHUNKATTN_INLINE void add_block_sum(simd::Float<W> sum, simd::Float<W> factor,
                                    float* out) noexcept {
  simd::store(out, simd::fma(simd::load<W>(out), factor, sum));
}
/// The same for `Columns` elements of one line.
template <int Columns>
CHUNKATTN_INLINE void add_block_sums(const float* sums, float factor, float* out) noexcept {
  constexpr int width = simd::width_for<Columns>;
  for (int i = 0; i < Columns; i += width)
    add_block_sum<width>(simd::load<width>(sums + i), simd::broadcast<width>(factor), out + i);
}

CHUNKATTN_PASS_END

#endif  // CHUNKATTN_ISA_LINE_STATE
