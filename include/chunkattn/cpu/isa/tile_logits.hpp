// Logits of a tile of the chunk-first kernel: Sᵀ = K·Qᵀ of some tokens with some vectors of lines.
//
// There are two orders of summation. The first takes dim after dim. The second gives bit for bit
// what the streaming kernel computes: for Reduce::batch_invariant, where nobody may see whether a
// block was read for one line or for many.

CHUNKATTN_PASS_BEGIN

/// Tokens whose logits are computed at once: their K, as floats, and Q of a tile fit the L1 cache.
inline constexpr int logit_tokens = 32;
/// Tokens and dims of the innermost loops over Q.
inline constexpr int logit_group = simd::num_accumulators / 2;
inline constexpr int logit_step = 8;
/// fp32 rows of K or V: read where they lie.
struct ScatteredRows {
  static constexpr bool packed = false;
  const float* const* rows;
  CHUNKATTN_INLINE const float* operator[](int t) const noexcept { return rows[t]; }
};

/// Rows that were widened into scratch, one after another: in L1 already.
template <int Columns>
struct PackedRows {
  static constexpr bool packed = true;
  const float* scratch;
  CHUNKATTN_INLINE const float* operator[](int t) const noexcept { return scratch + t * Columns; }
};

/// Columns [begin, begin + Columns) of `count` rows as floats.
template <int HeadDim, int Columns, class T>
CHUNKATTN_INLINE auto widened(const T* const* rows, int count, int begin, float* scratch) noexcept {
  constexpr int width = simd::width_for<HeadDim>;
  for (int t = 0; t < count; ++t)
    simd::repeat<Columns / width>([&](auto i) CHUNKATTN_LAMBDA {
      simd::store(scratch + t * Columns + i * width,
                  simd::load_widened<width>(rows[t] + begin + i * width));
    });
  return PackedRows<Columns>{scratch};
}

/// logits[token][lane] of one tile: Vectors * native_width lines from q_transposed on, tokens
/// [0, count) rounded up to whole groups. `near`: the rows of K are not in L1 yet. Prefetches some
/// lines of `ahead` at each step.
template <int HeadDim, int Vectors, class Rows>
[[gnu::noinline]] void tile_logits(Rows k, int count, const float* q_transposed,
                                   std::ptrdiff_t stride, bool near, LineCursor& ahead, int burst,
                                   float* logits) noexcept {
  constexpr int width = simd::native_width;
  constexpr int group = logit_group;
  constexpr int parities = Vectors == 1 ? 2 : 1;  // enough chains of additions in flight
  constexpr int step = logit_step;
  LineCursor lines = ahead;
  for (int t = 0; t < count; t += group) {
    simd::Float<width> sums[group][2];
    simd::repeat<group>([&](auto j) CHUNKATTN_LAMBDA {
      sums[j][0] = simd::zero<width>();
      sums[j][1] = simd::zero<width>();
    });
    const float* rows[group];
    simd::repeat<group>([&](auto j) CHUNKATTN_LAMBDA { rows[j] = k[t + j]; });
    const float* column = q_transposed;
    for (int outer = 0; outer < HeadDim; outer += step) {
      lines.advance(burst);
      if (!Rows::packed && near && outer % 16 == 0) {
        simd::repeat<group>([&](auto j)
                                CHUNKATTN_LAMBDA { prefetch_near(k[t + group + j] + outer); });
      }
      for (int i = outer; i < outer + step; i += parities) {
        simd::repeat<parities>([&](auto parity) CHUNKATTN_LAMBDA {
          simd::Float<width> query[Vectors];
          simd::repeat<Vectors>(
              [&](auto v) CHUNKATTN_LAMBDA { query[v] = simd::load<width>(column + v * width); });
          column += stride;
          simd::repeat<group>([&](auto j) CHUNKATTN_LAMBDA {
            const simd::Float<width> key = simd::broadcast<width>(rows[j][i + parity]);
            simd::repeat<Vectors>([&](auto v) CHUNKATTN_LAMBDA {
              sums[j][v + parity] = simd::fma(key, query[v], sums[j][v + parity]);
            });
          });
        });
      }
    }
    simd::repeat<group>([&](auto j) CHUNKATTN_LAMBDA {
      float* const to = logits + (t + j) * tile_lines;
      if constexpr (Vectors == 1) {
        simd::store(to, sums[j][0] + sums[j][1]);
      } else {
        simd::repeat<Vectors>([&](auto v)
                                  CHUNKATTN_LAMBDA { simd::store(to + v * width, sums[j][v]); });
      }
    });
  }
  ahead = lines;
}

/// The same in the order of a streamed dot product: one sum for each lane of its vectors, and these
/// are added by halves. Here a vector holds as many lines, so the sums come one after the other.
template <int HeadDim, int Vectors, class Rows>
[[gnu::noinline]] void tile_logits_as_streamed(Rows k, int count, const float* q_transposed,
                                               std::ptrdiff_t stride, bool near, LineCursor& ahead,
                                               int burst, float* logits) noexcept {
  constexpr int width = simd::native_width;
  constexpr int group = logit_group;
  constexpr int lanes = simd::width_for<HeadDim>;  // of a streamed vector
  constexpr int together = 2 / Vectors;            // enough chains of additions in flight
  constexpr int columns = HeadDim / lanes * together;
  using Sums = simd::Float<width>[group][Vectors];
  const auto for_each = [](const auto& f) CHUNKATTN_LAMBDA {
    simd::repeat<group>([&](auto j) CHUNKATTN_LAMBDA {
      simd::repeat<Vectors>([&](auto v) CHUNKATTN_LAMBDA { f(j, v); });
    });
  };
  LineCursor lines = ahead;
  for (int t = 0; t < count; t += group) {
    const float* rows[group];
    simd::repeat<group>([&](auto j) CHUNKATTN_LAMBDA { rows[j] = k[t + j]; });
    Sums waiting[std::bit_width(unsigned{lanes})];  // [level] of every (lanes >> level)-th lane
    int level = 0;
    int lane = 0;  // counts in bit-reversed order, so that a carry is a sum of two halves
    for (int near_column = 0; near_column < HeadDim; near_column += columns) {
      if (!Rows::packed && near) {
        for (int column = (near_column + 15) / 16 * 16; column < near_column + columns;
             column += 16)
          simd::repeat<group>([&](auto j)
                                  CHUNKATTN_LAMBDA { prefetch_near(k[t + group + j] + column); });
      }
      Sums sums[together];
      simd::repeat<together>([&](auto c) CHUNKATTN_LAMBDA {
        for_each([&](auto j, auto v) CHUNKATTN_LAMBDA { sums[c][j][v] = simd::zero<width>(); });
      });
      for (int i = 0; i < HeadDim; i += lanes) {
        if (i * together % (logit_step * lanes) == 0) lines.advance(burst);
        simd::repeat<together>([&](auto c) CHUNKATTN_LAMBDA {
          const int dim = i + lane + c * (lanes / 2);
          simd::Float<width> query[Vectors];
          simd::repeat<Vectors>([&](auto v) CHUNKATTN_LAMBDA {
            query[v] = simd::load<width>(q_transposed + dim * stride + v * width);
          });
          simd::repeat<group>([&](auto j) CHUNKATTN_LAMBDA {
            const simd::Float<width> key = simd::broadcast<width>(rows[j][dim]);
            simd::repeat<Vectors>([&](auto v) CHUNKATTN_LAMBDA {
              sums[c][j][v] = simd::fma(key, query[v], sums[c][j][v]);
            });
          });
        });
      }
      if constexpr (together == 2)
        for_each([&](auto j, auto v)
                     CHUNKATTN_LAMBDA { sums[0][j][v] = sums[0][j][v] + sums[1][j][v]; });
      int half = lanes / 2 / together;
      for (level = 0; (lane & half) != 0; ++level, half /= 2) {
        for_each([&](auto j, auto v)
                     CHUNKATTN_LAMBDA { sums[0][j][v] = waiting[level][j][v] + sums[0][j][v]; });
        lane -= half;
      }
      lane += half;
      for_each([&](auto j, auto v) CHUNKATTN_LAMBDA { waiting[level][j][v] = sums[0][j][v]; });
    }
    for_each([&](auto j, auto v) CHUNKATTN_LAMBDA {
      simd::store(logits + (t + j) * tile_lines + v * width, waiting[level][j][v]);
    });
  }
  ahead = lines;
}

CHUNKATTN_PASS_END
