#include "products.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <exception>
#include <utility>

namespace serve {

namespace detail {

namespace {

// Vectors of one register of what the compiler compiles for, and rows whose sums stay in registers.
#if defined(__AVX512F__)
constexpr std::size_t width = 16, tile_rows = 4;
#elif defined(__AVX__)
constexpr std::size_t width = 8, tile_rows = 2;
#elif defined(__aarch64__)
constexpr std::size_t width = 4, tile_rows = 4;
#else
constexpr std::size_t width = 4, tile_rows = 2;
#endif
using Floats [[gnu::vector_size(width * sizeof(float))]] = float;
using Words [[gnu::vector_size(width * sizeof(std::uint32_t))]] = std::uint32_t;
using Halves [[gnu::vector_size(width * sizeof(std::uint16_t))]] = std::uint16_t;

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
  float lane[width];
  std::memcpy(lane, &vector, sizeof lane);
  for (std::size_t half = width / 2; half > 0; half /= 2)
    for (std::size_t i = 0; i < half; ++i) lane[i] += lane[i + half];
  return lane[0];
}

constexpr std::size_t tile_outputs = 4;

/// Rows [row, row + Rows) times up to four outputs. Lane l of a sum has the inputs
/// l, l + width, ... in this order, whatever Rows is.
template <std::size_t Rows, class Weight>
void tile(const ProductCall& call, std::size_t row, std::size_t output, std::size_t count) {
  const std::size_t stride = call.inputs;
  const float* x[Rows];
  const Weight* w[tile_outputs];
  for (std::size_t r = 0; r < Rows; ++r)
    x[r] = static_cast<const float*>(call.x) + (row + r) * stride;
  for (std::size_t o = 0; o < tile_outputs; ++o)
    w[o] = static_cast<const Weight*>(call.weights) + (output + std::min(o, count - 1)) * stride;
  Floats sums[Rows][tile_outputs] = {};
  for (std::size_t i = 0; i < stride; i += width) {
    Floats factors[tile_outputs];
    for (std::size_t o = 0; o < tile_outputs; ++o) factors[o] = load(w[o] + i);
    for (std::size_t r = 0; r < Rows; ++r) {
      const Floats activations = load(x[r] + i);
      for (std::size_t o = 0; o < tile_outputs; ++o) sums[r][o] += activations * factors[o];
    }
  }
  for (std::size_t r = 0; r < Rows; ++r)
    for (std::size_t o = 0; o < count; ++o)
      call.out[(row + r) * call.out_stride + output + o] = sum(sums[r][o]);
}

template <class Weight>
void all_tiles(const ProductCall& call) {
  // Rows whose activations stay in a core's second cache while all outputs of the part pass by.
  constexpr std::size_t block_rows = 64;
  for (std::size_t first = 0; first < call.rows; first += block_rows) {
    const std::size_t last = std::min(call.rows, first + block_rows);
    for (std::size_t output = 0; output < call.outputs; output += tile_outputs) {
      const std::size_t count = std::min(tile_outputs, call.outputs - output);
      std::size_t row = first;
      for (; row + tile_rows <= last; row += tile_rows)
        tile<tile_rows, Weight>(call, row, output, count);
      for (; row < last; ++row) tile<1, Weight>(call, row, output, count);
    }
  }
}

/// The same by floats of the weights, so many at a time as stay in a core's second cache.
void in_fp32(ProductCall call, Multiply multiply) {
  constexpr std::size_t panel_floats = std::size_t{1} << 17;
  thread_local std::vector<float> panel;
  const auto* weights = static_cast<const std::uint16_t*>(call.weights);
  const std::size_t end = call.outputs;
  const std::size_t most = std::max<std::size_t>(panel_floats / call.inputs / lanes, 1) * lanes;
  panel.resize(std::min(most, end) * call.inputs);
  call.element = Element::fp32;
  call.weights = panel.data();
  for (std::size_t begin = 0; begin < end; begin += call.outputs) {
    call.outputs = std::min(most, end - begin);
    const std::uint16_t* from = weights + begin * call.inputs;
    for (std::size_t i = 0; i < call.outputs * call.inputs; i += width) {
      const Floats floats = load(from + i);
      std::memcpy(panel.data() + i, &floats, sizeof floats);
    }
    multiply(call);
    call.out += call.outputs;
  }
}

}  // namespace

void own_product(const ProductCall& call) {
  if (call.element == Element::fp32)
    all_tiles<float>(call);
  else
    all_tiles<std::uint16_t>(call);
}

}  // namespace detail

Products::Products(chunkattn::ThreadPool& executor, ProductKind kind, Communicator& ranks)
    : executor_(executor), ranks_(ranks) {
#if defined(SERVE_HAVE_ONEDNN)
  if (kind == ProductKind::onednn) onednn_ = detail::onednn_product;
#else
  (void)kind;
#endif
}

namespace {

/// Rows for which weights in bf16 are not worth widening: memory is what such a product waits for.
constexpr std::size_t few_rows = 1;

}  // namespace

/// Why there is no product with these weights; empty where there is.
std::string Products::refusal(const Matrix& weights) {
  for (const std::size_t rows : {std::size_t{1}, few_rows + 1}) {
    const std::vector<float> x(row_room(rows) * weights.stride());
    std::vector<float> out(row_room(rows) * weights.outputs());
    try {
      run(x, rows, weights, out);
    } catch (const std::exception& error) {
      return error.what();
    }
  }
  return "";
}

std::string Products::try_out(const Model& model) {
  std::vector<const Matrix*> all{&model.classifier()};
  if (!model.layers.empty()) {
    const Layer& layer = model.layers.front();
    all.insert(all.end(), {&layer.qkv, &layer.out, &layer.gate_up, &layer.down});
  }
  std::string said;
  for (const Matrix* weights : all)
    while (onednn_ != nullptr) {
      const std::string why = refusal(*weights);
      if (why.empty()) break;
      const bool bf16 = weights->element() == Element::bf16;
      if (bf16 && !std::exchange(widens_, true)) {
        said = "by oneDNN in fp32, for in bf16 it refuses on this processor: " + why;
      } else {
        onednn_ = nullptr;
        said = "by serve itself and slowly, for oneDNN refuses on this processor: " + why;
      }
    }
  return said;
}

void Products::run(std::span<const float> x, std::size_t rows, const Matrix& weights,
                   std::span<float> out) {
  if (rows == 0) return;
  const std::size_t stride = weights.stride(), outputs = weights.outputs();
  const bool bf16 = weights.element() == Element::bf16, widens = bf16 && widens_;
  const bool onednn = onednn_ != nullptr && !(widens && rows <= few_rows);
  detail::ProductCall whole{onednn ? row_room(rows) : rows,
                            stride,
                            outputs,
                            outputs,
                            weights.element(),
                            x.data(),
                            nullptr,
                            out.data()};
  if (onednn && bf16 && !widens) {
    rounded_.resize(whole.rows * stride);
    executor_.parallel_for(static_cast<int>(whole.rows), [&](int row) {
      const std::size_t begin = static_cast<std::size_t>(row) * stride;
      for (std::size_t i = begin; i < begin + stride; ++i)
        rounded_[i] = chunkattn::to_bfloat16(x[i]).bits;
    });
    whole.x = rounded_.data();
  }
  // oneDNN gets as few and large parts as there are threads. Ours may be smaller: whoever is late
  // then delays no other. All begin at a multiple of a vector.
  const auto threads = static_cast<std::size_t>(executor_.concurrency());
  const std::size_t least = rows * stride * outputs < 100'000 ? outputs : 16;
  const std::size_t wanted = onednn ? threads : threads * 4;
  const std::size_t size =
      std::max(least, (outputs + wanted * lanes - 1) / (wanted * lanes) * lanes);
  executor_.parallel_for(static_cast<int>((outputs + size - 1) / size), [&](int part) {
    const std::size_t begin = static_cast<std::size_t>(part) * size;
    detail::ProductCall call = whole;
    call.outputs = std::min(size, outputs - begin);
    call.weights = bf16 ? static_cast<const void*>(weights.bf16() + begin * stride)
                        : weights.fp32() + begin * stride;
    call.out += begin;
    if (!onednn) return detail::own_product(call);
    if (widens) return detail::in_fp32(call, onednn_);
    onednn_(call);
  });
}

}  // namespace serve
