// Element conversions, all of them: every half and bfloat16 there is, rounding to nearest even, and
// the vector paths against the integer ones.
#include "chunkattn/element.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <span>
#include <string_view>
#include <vector>

#include "chunkattn/attention_options.hpp"
#include "chunkattn/detail/cpu/kernels.hpp"
#include "chunkattn/kv_view.hpp"
#include "support/random.hpp"

using namespace chunkattn;
// The compiler's options promise it.
namespace simd = chunkattn::detail::cpu::CHUNKATTN_LEAST_ISA::simd;

namespace {

bool same_bits(float a, float b) {
  return std::bit_cast<std::uint32_t>(a) == std::bit_cast<std::uint32_t>(b);
}

bool is_nan_bits(float value) {
  return (std::bit_cast<std::uint32_t>(value) & 0x7fffffffu) > 0x7f800000u;
}

// Floats where rounding is decided: all halves, the middles between them, their neighbours.
std::vector<float> interesting_floats(test::Random& random) {
  std::vector<float> values;
  for (std::uint32_t bits = 0; bits < 0x10000u; ++bits) {
    const float value = to_float(half{static_cast<std::uint16_t>(bits)});
    const std::uint32_t exact = std::bit_cast<std::uint32_t>(value);
    for (const std::uint32_t delta : {0u, 1u, ~0u, 0x1000u, 0x0fffu, 0x1001u})
      values.push_back(std::bit_cast<float>(exact + delta));
  }
  for (int i = 0; i < 200000; ++i)
    values.push_back(std::bit_cast<float>(static_cast<std::uint32_t>(random.bits())));
  values.resize(values.size() / 16 * 16);
  return values;
}

// The nearest of T by exhaustive reasoning in double: candidates are the result and its neighbours.
template <class T>
void check_nearest(float value) {
  const T result = from_float<T>(value);
  const double exact = static_cast<double>(value);
  const double error = std::abs(static_cast<double>(to_float(result)) - exact);
  for (const int step : {-1, 1}) {
    const T other{static_cast<std::uint16_t>(result.bits + step)};
    const float neighbour = to_float(other);
    if (is_nan_bits(neighbour) || std::isinf(neighbour)) continue;
    const double distance = std::abs(static_cast<double>(neighbour) - exact);
    if (distance < error || (distance == error && (result.bits & 1u) != 0)) {
      CAPTURE(value);
      FAIL_CHECK("not the nearest, or a tie not to even");
    }
  }
}

// What the bits of a float8_e4m3 stand for, by OCP's definition; magnitudes up to 0x7e.
double e4m3_number(int magnitude) {
  const int exponent = magnitude / 8;
  const double fraction = magnitude % 8 / 8.0;
  return exponent == 0 ? std::ldexp(fraction, -6) : std::ldexp(1 + fraction, exponent - 7);
}

// The nearest magnitude of all: of two the even one, what is beyond the last becomes that.
int nearest_e4m3(double size) {
  int best = 0;
  for (int magnitude = 1; magnitude <= 0x7e; ++magnitude) {
    const double distance = std::abs(e4m3_number(magnitude) - size);
    const double least = std::abs(e4m3_number(best) - size);
    if (distance < least || (distance == least && magnitude % 2 == 0)) best = magnitude;
  }
  return best;
}

// Every float8_e4m3, W at once.
template <int W>
void check_widened_e4m3() {
  for (int first = 0; first < 256; first += W) {
    float8_e4m3 values[W];
    for (int l = 0; l < W; ++l) values[l].bits = static_cast<std::uint8_t>(first + l);
    float widened[W];
    simd::store(widened, simd::load_widened<W>(values));
    for (int l = 0; l < W; ++l) {
      CAPTURE(first + l);
      if ((first + l) % 128 == 0x7f)
        CHECK(is_nan_bits(widened[l]));
      else
        CHECK(same_bits(widened[l], to_float(values[l])));
    }
  }
}

template <int W, class T>
void check_vectors(const std::vector<float>& values) {
  std::size_t different = 0;
  for (std::size_t i = 0; i + W <= values.size(); i += W) {
    T narrow[W];
    simd::store_narrowed<W>(narrow, simd::load<W>(&values[i]));
    float widened[W];
    simd::store(widened, simd::load_widened<W>(narrow));
    for (std::size_t l = 0; l < W; ++l) {
      const float value = values[i + l];
      if (is_nan_bits(value)) {
        different += is_nan_bits(to_float(narrow[l])) && is_nan_bits(widened[l]) ? 0u : 1u;
        continue;
      }
      different += narrow[l] == from_float<T>(value) ? 0u : 1u;
      different += same_bits(widened[l], to_float(narrow[l])) ? 0u : 1u;
    }
  }
  CHECK(different == 0);
}

}  // namespace

TEST_CASE("every half survives the way through float") {
  for (std::uint32_t bits = 0; bits < 0x10000u; ++bits) {
    const half value{static_cast<std::uint16_t>(bits)};
    const float wide = to_float(value);
    if ((bits & 0x7fffu) > 0x7c00u)
      REQUIRE(is_nan_bits(wide));
    else
      REQUIRE(to_half(wide) == value);
  }
  CHECK(to_float(half{0x0001}) == 0x1p-24f);
  CHECK(to_float(half{0x3c00}) == 1.0f);
  CHECK(to_float(half{0x7bff}) == 65504.0f);
}

TEST_CASE("rounding to nearest even, checked against the neighbours") {
  test::Random random;
  for (int i = 0; i < 200000; ++i) {
    const float value = std::ldexp(random.normal(), random.uniform(-26, 15));
    if (std::abs(value) < 65504.0f) check_nearest<half>(value);
    check_nearest<bfloat16>(value);
  }
  CHECK(to_half(65519.0f).bits == 0x7bff);
  CHECK(to_half(65520.0f).bits == 0x7c00);
  CHECK(to_half(0x1p-25f).bits == 0);
  CHECK(to_half(0x1.000002p-25f).bits == 1);
  CHECK(to_bfloat16(std::numeric_limits<float>::max()).bits == 0x7f80);
}

TEST_CASE("float8_e4m3: all 256 are what their definition says, and survive") {
  for (int bits = 0; bits < 256; ++bits) {
    CAPTURE(bits);
    const float8_e4m3 value{static_cast<std::uint8_t>(bits)};
    const float wide = to_float(value);
    CHECK((std::bit_cast<std::uint32_t>(wide) >> 31 != 0) == (bits >= 128));
    if (bits % 128 == 0x7f)
      CHECK(is_nan_bits(wide));
    else
      CHECK(std::abs(static_cast<double>(wide)) == e4m3_number(bits % 128));
    CHECK(to_float8_e4m3(wide) == value);
  }
  CHECK(to_float(float8_e4m3{0x7e}) == 448.0f);
  CHECK(to_float(float8_e4m3{0x81}) == -0x1p-9f);
  check_widened_e4m3<4>();
  check_widened_e4m3<simd::native_width>();
#if defined(__AVX512F__) && !defined(CHUNKATTN_ISA)
  check_widened_e4m3<8>();
#endif
}

TEST_CASE("float8_e4m3: rounding as its definition in double, too large becomes 448") {
  std::vector<float> values{448, 449, 463, 464, 465, 480, 1e6f, std::numeric_limits<float>::max()};
  for (int i = 0; i < 0x7e; ++i) {  // numbers, the middles between them, and both sides of each
    const double low = e4m3_number(i), middle = (low + e4m3_number(i + 1)) / 2;
    for (const auto x : {static_cast<float>(low), static_cast<float>(middle)})
      for (const float to : {0.0f, x, 1e3f}) values.push_back(std::nextafter(x, to));
  }
  test::Random random;
  for (int i = 0; i < 20000; ++i)
    values.push_back(std::ldexp(std::abs(random.normal()), random.uniform(-14, 10)));
  for (int i = 0; i < 2000; ++i) {  // any float at all
    const auto bits = static_cast<std::uint32_t>(random.bits()) & 0x7fffffffu;
    values.push_back(std::bit_cast<float>(bits < 0x7f800000u ? bits : bits - 0x00800000u));
  }
  for (const float value : values) {
    CAPTURE(value);
    const int expected = nearest_e4m3(static_cast<double>(value));
    CHECK(to_float8_e4m3(value).bits == expected);
    CHECK(to_float8_e4m3(-value).bits == expected + 128);
  }
  CHECK(to_float8_e4m3(std::bit_cast<float>(0x7f800000u)).bits == 0x7e);
  CHECK(to_float8_e4m3(std::bit_cast<float>(0xff800000u)).bits == 0xfe);
  for (const std::uint32_t nan : {0x7fc00000u, 0x7f800001u, 0x7fffffffu}) {
    CHECK(to_float8_e4m3(std::bit_cast<float>(nan)).bits == 0x7f);
    CHECK(to_float8_e4m3(std::bit_cast<float>(nan | 0x80000000u)).bits == 0xff);
  }
}

TEST_CASE("vector conversions agree with the integer ones, bit for bit") {
  test::Random random;
  const std::vector<float> values = interesting_floats(random);
  check_vectors<simd::native_width, half>(values);
  check_vectors<simd::native_width, bfloat16>(values);
  check_vectors<4, half>(values);
  check_vectors<4, bfloat16>(values);
#if defined(__AVX512F__) && !defined(CHUNKATTN_ISA)
  check_vectors<8, half>(values);
  check_vectors<8, bfloat16>(values);
#endif
}

TEST_CASE("vector exp: within 2 units in the last place, 0 below the smallest normal") {
  constexpr int width = simd::native_width;
  double worst = 0;
  for (float x = 0.0f; x > -87.3f; x -= 0.00037f) {
    float result[width];
    simd::store(result, simd::exp_nonpositive<width>(simd::broadcast<width>(x)));
    const double exact = std::exp(static_cast<double>(x));
    const double error = std::abs(static_cast<double>(result[0]) - exact) / exact;
    worst = error > worst ? error : worst;
  }
  MESSAGE("largest relative error of exp: ", worst);
  CHECK(worst < 2 * 0x1p-23);
  for (const float x : {-87.5f, -104.0f, -160.0f, -1e30f, -2e38f}) {
    float result[width];
    simd::store(result, simd::exp_nonpositive<width>(simd::broadcast<width>(x)));
    CHECK(result[width - 1] == 0.0f);
  }
  float one[width];
  simd::store(one, simd::exp_nonpositive<width>(simd::zero<width>()));
  CHECK(one[0] == 1.0f);
}

#if !defined(__FINITE_MATH_ONLY__) || !__FINITE_MATH_ONLY__
TEST_CASE("vector exp: NaN of any sign and payload stays NaN, minus infinity gives 0") {
  constexpr int width = simd::native_width;
  test::Random random;
  for (int i = 0; i < 2000; ++i) {
    float values[width];
    for (float& value : values)
      value = std::bit_cast<float>(static_cast<std::uint32_t>(random.bits()) | 0x7f800000u);
    values[0] = std::bit_cast<float>(i % 2 == 0 ? 0x7fc00000u : 0xffffffffu);
    values[width - 1] = -std::numeric_limits<float>::infinity();
    float result[width];
    simd::store(result, simd::exp_nonpositive<width>(simd::load<width>(values)));
    for (std::size_t l = 0; l + 1 < width; ++l)
      if (is_nan_bits(values[l])) CHECK(is_nan_bits(result[l]));
    CHECK(result[width - 1] == 0.0f);
  }
}
#endif

TEST_CASE("lane sums come out in order") {
  constexpr int width = simd::native_width;
  simd::Float<width> rows[width];
  for (int i = 0; i < width; ++i) {
    float lanes[width];
    for (int l = 0; l < width; ++l) lanes[l] = static_cast<float>(100 * i + l);
    rows[i] = simd::load<width>(lanes);
  }
  float sums[width];
  simd::store(sums, simd::sum_lanes<width>(rows));
  for (int i = 0; i < width; ++i)
    CHECK(sums[i] == static_cast<float>(100 * i * width + width * (width - 1) / 2));
}

TEST_CASE("quantize_row: at most half a step off, extremes reach 127, zeros stay zero") {
  test::Random random;
  for (int i = 0; i < 500; ++i) {
    std::vector<float> row(64);
    random.fill(std::span(row), std::ldexp(1.0f, random.uniform(-20, 20)));
    std::int8_t stored[64];
    const float scale = quantize_row(row.data(), 64, stored);
    int largest = 0;
    for (std::size_t j = 0; j < 64; ++j) {
      CHECK(std::abs(scale * stored[j] - row[j]) <= 0.5001f * scale);
      largest = std::max(largest, std::abs(static_cast<int>(stored[j])));
    }
    CHECK(largest == 127);
  }
  const std::vector<float> zeros(16, 0.0f);
  std::int8_t stored[16];
  CHECK(quantize_row(zeros.data(), 16, stored) == 0.0f);
  CHECK(stored[3] == 0);
}

TEST_CASE("quantize_row: float8_e4m3 is within its roundings, extremes reach 448") {
  test::Random random;
  for (int i = 0; i < 2000; ++i) {
    std::vector<float> row(24);
    random.fill(std::span(row), std::ldexp(1.0f, random.uniform(-149, 120)));
    float8_e4m3 stored[24];
    const float scale = quantize_row(row.data(), 24, stored);
    const auto reach = std::abs(*std::max_element(
        row.begin(), row.end(), [](float a, float b) { return std::abs(a) < std::abs(b); }));
    if (reach == 0) {
      CHECK(scale == 0.0f);
      continue;
    }
    CAPTURE(reach);
    CHECK(scale == std::max(reach / 448, 0x1p-126f));
    int largest = 0;
    for (std::size_t j = 0; j < row.size(); ++j) {
      const double exact = static_cast<double>(row[j]), unit = static_cast<double>(scale);
      const double got = unit * static_cast<double>(to_float(stored[j]));
      CHECK(std::abs(got - exact) <= 1.0001 * std::max(0x1p-4 * std::abs(exact), 0x1p-10 * unit));
      largest = std::max(largest, stored[j].bits % 128);
    }
    if (scale > 0x1p-126f) CHECK(largest == 0x7e);
  }
}

TEST_CASE("quantize_row: from the smallest subnormal to the largest float") {
  test::Random random;
  for (int i = 0; i < 2000; ++i) {
    std::vector<float> row(24);
    const float size = std::ldexp(1.0f, i < 277 ? i - 149 : random.uniform(-149, 127));
    for (float& value : row) value = size * (static_cast<float>(random.uniform(-8, 8)) / 8);
    row[random.index(row.size())] = random.chance(0.5) ? size : -size;
    std::int8_t stored[24];
    const float scale = quantize_row(row.data(), 24, stored);
    CAPTURE(size);
    CHECK(scale > 0);
    CHECK(std::isfinite(1 / scale));
    for (std::size_t j = 0; j < row.size(); ++j) {
      const double error = std::abs(static_cast<double>(scale) * stored[j] - row[j]);
      CHECK(error <= 0.5001 * static_cast<double>(scale));
      CHECK(stored[j] >= -127);
    }
  }
  const std::vector<float> negative_zeros(8, -0.0f);
  std::int8_t stored[8] = {1, 1, 1, 1, 1, 1, 1, 1};
  CHECK(quantize_row(negative_zeros.data(), 8, stored) == 0.0f);
  for (const std::int8_t value : stored) CHECK(value == 0);
}

TEST_CASE("quantize_row: a row that is not finite gets a NaN scale, whatever else it holds") {
  test::Random random;
  for (const std::uint32_t bits :
       {0x7fc00000u, 0xffc00000u, 0x7f800001u, 0xffffffffu, 0x7f800000u, 0xff800000u}) {
    std::vector<float> row(40);
    random.fill(std::span(row), random.pick({0.0f, 1e-40f, 1.0f, 1e38f}));
    row[random.index(row.size())] = std::bit_cast<float>(bits);
    std::int8_t stored[40];
    std::fill_n(stored, 40, std::int8_t{99});
    CHECK(is_nan_bits(quantize_row(row.data(), 40, stored)));
    for (const std::int8_t value : stored) CHECK(value == 0);
  }
}

TEST_CASE("the instruction set in use: the best of the compiled ones, and what there was") {
  const std::string_view name = instruction_set();
  for (const InstructionSet set : detail::cpu::compiled_sets)
    if (detail::cpu::is_supported(set)) CHECK(detail::cpu::resolved(set) == set);
  CHECK(describe_instruction_set().rfind(std::string(name) + " of ", 0) == 0);
#if defined(CHUNKATTN_ISA) && CHUNKATTN_ISA_CHOICE != CHUNKATTN_ISA_CHOICE_native
  CHECK(name == name_of(InstructionSet::CHUNKATTN_ISA));
#elif defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
  CHECK(name ==
        (detail::cpu::is_supported(
             detail::cpu::compiled_sets[std::size(detail::cpu::compiled_sets) - 1])
             ? name_of(detail::cpu::compiled_sets[std::size(detail::cpu::compiled_sets) - 1])
             : "avx512"));
#endif
}
