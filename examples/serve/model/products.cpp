#include "products.hpp"

#include <algorithm>
#include <bit>
#include <cstring>

namespace serve {

namespace detail {

namespace {

// Vectors as the compiler has them for whatever processor it compiles for.
using Floats [[gnu::vector_size(lanes * sizeof(float))]] = float;
using Words [[gnu::vector_size(lanes * sizeof(std::uint32_t))]] = std::uint32_t;
using Halves [[gnu::vector_size(lanes * sizeof(std::uint16_t))]] = std::uint16_t;

inline Floats load(const float* from) {
  Floats vector;
  std::memcpy(&vector, from, sizeof vector);
  return vector;
}
inline Floats load(const std::uint16_t* from) {  // bfloat16: the upper half of a float
  Halves halves;
  std::memcpy(&halves, from, sizeof halves);
  return std::bit_cast<Floats>(__builtin_convertvector(halves, Words) << 16);
}

/// Adds the lanes in one order.
inline float sum(Floats vector) {
  float lane[lanes];
  std::memcpy(lane, &vector, sizeof lane);
  for (std::size_t half = lanes / 2; half > 0; half /= 2)
    for (std::size_t i = 0; i < half; ++i) lane[i] += lane[i + half];
  return lane[0];
}

constexpr std::size_t tile_outputs = 4;

/// Rows [row, row + Rows) times up to four outputs. Lane l of a sum has the inputs l, l + 16, ...
/// in this order, whatever Rows is.
template <int Rows, class Weight>
void tile(const ProductCall& call, const Weight* weights, std::size_t row, std::size_t output,
          std::size_t count) {
  const std::size_t stride = call.weights->stride();
  const float* x[Rows];
  const Weight* w[tile_outputs];
  for (std::size_t r = 0; r < Rows; ++r) x[r] = call.x + (row + r) * stride;
  for (std::size_t o = 0; o < tile_outputs; ++o)
    w[o] = weights + (output + std::min(o, count - 1)) * stride;
  Floats sums[Rows][tile_outputs] = {};
  for (std::size_t i = 0; i < stride; i += lanes) {
    Floats factors[tile_outputs];
    for (std::size_t o = 0; o < tile_outputs; ++o) factors[o] = load(w[o] + i);
    for (std::size_t r = 0; r < Rows; ++r) {
      const Floats activations = load(x[r] + i);
      for (std::size_t o = 0; o < tile_outputs; ++o) sums[r][o] += activations * factors[o];
    }
  }
  for (std::size_t r = 0; r < Rows; ++r)
    for (std::size_t o = 0; o < count; ++o)
      call.out[(row + r) * call.weights->outputs() + output + o] = sum(sums[r][o]);
}

template <class Weight>
void all_tiles(const ProductCall& call, const Weight* weights, std::size_t begin, std::size_t end) {
  // Rows whose activations stay in a core's second cache while all outputs of the part pass by.
  constexpr std::size_t block_rows = 64;
  for (std::size_t first = 0; first < call.rows; first += block_rows) {
    const std::size_t last = std::min(call.rows, first + block_rows);
    for (std::size_t output = begin; output < end; output += tile_outputs) {
      const std::size_t count = std::min(tile_outputs, end - output);
      std::size_t row = first;
      for (; row + 4 <= last; row += 4) tile<4>(call, weights, row, output, count);
      for (; row < last; ++row) tile<1>(call, weights, row, output, count);
    }
  }
}

}  // namespace

void own_product(const ProductCall& call, std::size_t begin, std::size_t end) {
  if (call.weights->element() == Element::fp32)
    all_tiles(call, call.weights->fp32(), begin, end);
  else
    all_tiles(call, call.weights->bf16(), begin, end);
}

}  // namespace detail

void Products::run(std::span<const float> x, std::size_t rows, const Matrix& weights,
                   std::span<float> out) {
  if (rows == 0) return;
  const detail::ProductCall call{x.data(), rows, &weights, out.data()};
  const bool onednn = kind_ == ProductKind::onednn;
  if (onednn && weights.element() == Element::bf16) {
    const std::size_t stride = weights.stride(), room = row_room(rows);
    rounded_.resize(room * stride);
    executor_.parallel_for(static_cast<int>(room), [&](int row) {
      const std::size_t begin = static_cast<std::size_t>(row) * stride;
      for (std::size_t i = begin; i < begin + stride; ++i)
        rounded_[i] = chunkattn::to_bfloat16(x[i]).bits;
    });
  }
  // oneDNN gets as few and large parts as there are threads. Ours may be smaller: whoever is late
  // then holds nobody up. All begin at a multiple of a vector.
  const std::size_t outputs = weights.outputs();
  const auto threads = static_cast<std::size_t>(executor_.concurrency());
  const std::size_t least = rows * weights.stride() * outputs < 100'000 ? outputs : 16;
  const std::size_t wanted = onednn ? threads : threads * 4;
  const std::size_t size =
      std::max(least, (outputs + wanted * lanes - 1) / (wanted * lanes) * lanes);
  executor_.parallel_for(static_cast<int>((outputs + size - 1) / size), [&](int part) {
    const std::size_t begin = static_cast<std::size_t>(part) * size;
    const std::size_t end = std::min(outputs, begin + size);
#if defined(SERVE_HAVE_ONEDNN)
    if (onednn) return detail::onednn_product(call, rounded_.data(), begin, end);
#endif
    detail::own_product(call, begin, end);
  });
}

}  // namespace serve
