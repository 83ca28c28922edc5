// The matrix unit: the model in plain C++ against the definition of TDPBF16PS, element by element,
// and where the processor has one, its bits against the model's.
#include <doctest/doctest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>

#include "chunkattn/chunk_attention.hpp"
#include "support/random.hpp"
#include "support/software_tiles.hpp"

using namespace chunkattn;
using test::Random;

namespace {

struct Matrix {
  std::uint32_t row[16][16];
};

// C += A·B as Intel's manual defines it, with the processor's own fused multiply-add. Where fmaf
// rounds to a denormal, or from one to the smallest normal number, the definition says too little
// to be this short; the case is drawn again.
bool multiply(Matrix& c, const Matrix& a, const Matrix& b) {
  bool clear = true;
  const auto input = [](std::uint32_t bits) {
    return std::bit_cast<float>((bits & 0x7f800000u) == 0 ? bits & 0x80000000u : bits);
  };
  const auto output = [&](float x) {
    if (std::abs(x) == 0x1p-126f) clear = false;
    return std::abs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x;
  };
  for (int m = 0; m < 16; ++m) {
    for (int n = 0; n < 16; ++n) {
      float even = 0, odd = 0;
      for (int k = 0; k < 16; ++k) {
        const std::uint32_t x = a.row[m][k], y = b.row[k][n];
        even = output(std::fmaf(input(x << 16), input(y << 16), even));
        odd = output(std::fmaf(input(x & 0xffff0000u), input(y & 0xffff0000u), odd));
      }
      const float sum = output(even + odd);
      c.row[m][n] = std::bit_cast<std::uint32_t>(output(input(c.row[m][n]) + sum));
    }
  }
  return clear;
}

enum class Numbers { normal, wide, tiny, any_bits };

// Random pairs of bfloat16: about 1; of any exponent; products about the smallest numbers; any
// bits.
std::uint32_t random_pair(Random& random, Numbers numbers) {
  const auto one = [&]() -> std::uint32_t {
    if (numbers == Numbers::any_bits) return static_cast<std::uint32_t>(random.bits() >> 48);
    const int exponent = numbers == Numbers::normal ? 0
                         : numbers == Numbers::wide ? random.uniform(-70, 60)
                                                    : random.uniform(-75, -55);
    return to_bfloat16(std::ldexp(random.normal(), exponent)).bits;
  };
  return one() | one() << 16;
}

void fill(Random& random, Numbers numbers, Matrix& a, Matrix& b, Matrix& c) {
  for (int i = 0; i < 16; ++i) {
    for (int j = 0; j < 16; ++j) {
      a.row[i][j] = random_pair(random, numbers);
      b.row[i][j] = random_pair(random, numbers);
      c.row[i][j] = numbers == Numbers::any_bits
                        ? static_cast<std::uint32_t>(random.bits() >> 32)
                        : std::bit_cast<std::uint32_t>(random.normal() *
                                                       (numbers == Numbers::tiny ? 1e-37f : 1.0f));
    }
  }
}

// Equal bits; any NaN is as good as another.
int differences(const Matrix& x, const Matrix& y) {
  int count = 0;
  for (int i = 0; i < 16; ++i) {
    for (int j = 0; j < 16; ++j) {
      const float a = std::bit_cast<float>(x.row[i][j]), b = std::bit_cast<float>(y.row[i][j]);
      count += x.row[i][j] != y.row[i][j] && !(std::isnan(a) && std::isnan(b)) ? 1 : 0;
    }
  }
  return count;
}

Matrix model(const Matrix& a, const Matrix& b, const Matrix& c) {
  detail::cpu::SoftwareTiles tiles(true);
  Matrix result;
  tiles.load<0>(&c, 64);
  tiles.load<4>(&a, 64);
  tiles.load_once<7>(&b, 64);
  tiles.dot<0, 4, 7>();
  tiles.store<0>(&result, 64);
  return result;
}

constexpr Numbers kinds[] = {Numbers::normal, Numbers::wide, Numbers::tiny, Numbers::any_bits};

}  // namespace

TEST_CASE("the model multiplies as TDPBF16PS is defined, bit by bit") {
  Random random(1);
  for (const Numbers numbers : kinds) {
    CAPTURE(static_cast<int>(numbers));
    int compared = 0, flushed = 0;
    const auto seen = [&] { return compared > 0 && (flushed > 0 || numbers != Numbers::tiny); };
    for (int i = 0; i < test::scaled(40) || (!seen() && i < 4000); ++i) {
      Matrix a, b, c;
      fill(random, numbers, a, b, c);
      Matrix expected = c;
      if (!multiply(expected, a, b)) continue;
      ++compared;
      const Matrix got = model(a, b, c);
      CHECK(differences(got, expected) == 0);
      for (const auto& row : got.row)
        for (const std::uint32_t bits : row) {
          CHECK(((bits & 0x7f800000u) != 0 || (bits & 0x7fffffffu) == 0));
          flushed += (bits & 0x7fffffffu) == 0 ? 1 : 0;
        }
    }
    CHECK(seen());
  }
}

TEST_CASE("what tells TDPBF16PS from other orders of the same sum") {
  Matrix a{}, b{}, c{};
  const auto set = [&](int k, float even, float odd) {  // products of row 0 and column 0
    a.row[0][k] = std::uint32_t{to_bfloat16(even).bits} |
                  static_cast<std::uint32_t>(to_bfloat16(odd).bits) << 16;
    b.row[k][0] = 0x3f803f80u;  // 1 and 1
  };
  const auto result = [&] { return std::bit_cast<float>(model(a, b, c).row[0][0]); };

  // Chains of their own: 2^24 + 1 - 2^24 is 0 in one chain and 1 in two.
  set(0, 0x1p24f, 1.0f);
  set(1, -0x1p24f, 0.0f);
  CHECK(result() == 1.0f);
  // From zero: the element is added last, so small products are not lost one by one.
  set(0, 0.5f, 0.5f);
  set(1, 0.5f, 0.5f);
  c.row[0][0] = std::bit_cast<std::uint32_t>(0x1p24f);
  CHECK(result() == 0x1p24f + 2.0f);
  // Ties to even.
  c.row[0][0] = std::bit_cast<std::uint32_t>(0x1p24f);
  set(0, 1.0f, 0.0f);
  set(1, 0.0f, 0.0f);
  CHECK(result() == 0x1p24f);
  c.row[0][0] = std::bit_cast<std::uint32_t>(0x1p24f + 2.0f);
  CHECK(result() == 0x1p24f + 4.0f);
  // Fused: 2^127 * 2 alone would be infinity.
  a.row[0][0] = std::uint32_t{to_bfloat16(-0x1p127f).bits};
  b.row[0][0] = std::uint32_t{to_bfloat16(1.0f).bits};
  a.row[0][1] = std::uint32_t{to_bfloat16(0x1p127f).bits};
  b.row[1][0] = std::uint32_t{to_bfloat16(2.0f).bits};
  c.row[0][0] = 0;
  CHECK(result() == 0x1p127f);
}

TEST_CASE("denormals count as zero and become zero") {
  Matrix a{}, b{}, c{};
  b.row[0][0] = 0x3f803f80u;
  a.row[0][0] = 0x007f007fu;  // two denormal bfloat16
  c.row[0][0] = 0x007fffffu;  // and a denormal float
  CHECK(model(a, b, c).row[0][0] == 0);
  c.row[0][0] = 0x80000001u;
  CHECK(model(a, b, c).row[0][0] == 0);  // -0 + 0
  a.row[0][0] = std::uint32_t{to_bfloat16(0x1p-126f).bits};
  b.row[0][0] = std::uint32_t{to_bfloat16(0.5f).bits};
  c.row[0][0] = 0;
  CHECK(model(a, b, c).row[0][0] == 0);  // 2^-127
  b.row[0][0] = std::uint32_t{to_bfloat16(1.0f).bits};
  CHECK(model(a, b, c).row[0][0] == std::bit_cast<std::uint32_t>(0x1p-126f));
}

TEST_CASE("rows lie where their stride says") {
  std::uint32_t memory[16 * 24], copy[16 * 24] = {};
  for (int i = 0; i < 16 * 24; ++i) memory[i] = static_cast<std::uint32_t>(i);
  detail::cpu::SoftwareTiles tiles(true);
  tiles.load<3>(memory + 1, 24 * 4);
  tiles.store<3>(copy + 2, 24 * 4);
  for (int row = 0; row < 16; ++row)
    for (int i = 0; i < 24; ++i)
      CHECK(copy[row * 24 + i] ==
            (i >= 2 && i < 18 ? static_cast<std::uint32_t>(row * 24 + i - 1) : 0u));
  tiles.zero<3>();
  tiles.store<3>(copy, 64);
  for (int i = 0; i < 256; ++i) CHECK(copy[i] == 0);
}

#if defined(CHUNKATTN_WITH_AMX)

namespace {

// The tiles' own instructions are assembler, for which clang alone wants the permission.
#if defined(__clang__)
CHUNKATTN_ALLOW_AVX512_AMX
#else
CHUNKATTN_ALLOW_AVX512
#endif
Matrix processor(const Matrix& a, const Matrix& b, const Matrix& c) {
  detail::cpu::avx512::AmxTiles tiles(true);
  Matrix result;
  tiles.load<0>(&c, 64);
  tiles.load<4>(&a, 64);
  tiles.load_once<7>(&b, 64);
  tiles.dot<0, 4, 7>();
  tiles.store<0>(&result, 64);
  return result;
}
CHUNKATTN_FORBID

}  // namespace

#endif

TEST_CASE("the processor's tiles give the model's bits") {
#if defined(CHUNKATTN_WITH_AMX)
  if (detail::cpu::is_supported(InstructionSet::amx)) {
    Random random(2);
    for (const Numbers numbers : kinds) {
      CAPTURE(static_cast<int>(numbers));
      for (int i = 0; i < test::scaled(200); ++i) {
        Matrix a, b, c;
        fill(random, numbers, a, b, c);
        CHECK(differences(processor(a, b, c), model(a, b, c)) == 0);
      }
    }
    return;
  }
  std::printf("skipped: tiles of the processor: %s amx\n",
              std::string(detail::cpu::why_not(InstructionSet::amx)).c_str());
#else
  std::printf("skipped: tiles of the processor: this build has none\n");
#endif
}
