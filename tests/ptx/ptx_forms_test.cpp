// Instruction by instruction: does the machine do what PTX says, at the edges too?
#include <doctest/doctest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <sstream>
#include <string>
#include <vector>

#include "ptx/float.hpp"
#include "ptx/kernel_text.hpp"

namespace {

using namespace ptxrun;

constexpr u32 nan_bits = 0x7fc12345u, minus_0 = 0x80000000u, infinity = 0x7f800000u,
              tiny = 0x00000001u;
constexpr u32 minus_1 = 0xffffffffu, least = 0x80000000u, most = 0x7fffffffu;
constexpr u32 yes = 1, no = 0;
constexpr u32 f(float x) {
  return std::bit_cast<u32>(x);
}

struct Case {
  const char* name;
  const char* kinds;  // of the result and the sources: P, H, R, L
  std::vector<u64> sources;
  u64 result;
};

std::string register_of(char kind, int n) {
  return (kind == 'P'   ? "%p"
          : kind == 'H' ? "%rs"
          : kind == 'L' ? "%rd"
                        : "%r") +
         std::to_string(n);
}

// The instruction in lanes whose number `on` has a bit for; the others keep what was there.
std::vector<u64> run_case(const Case& c, u32 on) {
  const std::string kinds = c.kinds;
  std::ostringstream text;
  text << "mul.wide.u32 %rd29, %r31, 64;\nadd.s64 %rd28, %rd30, %rd29;\n";
  const auto load = [&](int n, char kind, std::size_t place) {
    const std::string from = ", [%rd28+" + std::to_string(8 * place) + "];\n";
    if (kind == 'P')
      text << "ld.global.u32 %r29" << from << "setp.ne.s32 " << register_of('P', n)
           << ", %r29, 0;\n";
    else
      text << "ld.global."
           << (kind == 'H'   ? "u16 "
               : kind == 'L' ? "u64 "
                             : "u32 ")
           << register_of(kind, n) << from;
  };
  load(0, kinds[0], 6);
  for (std::size_t k = 1; k < kinds.size(); ++k) load(static_cast<int>(k), kinds[k], k - 1);
  text << "ld.global.u32 %r28, [%rd28+56];\nsetp.ne.s32 %p31, %r28, 0;\n@%p31 " << c.name << " ";
  for (std::size_t k = 0; k < kinds.size(); ++k)
    text << (k > 0 ? ", " : "") << register_of(kinds[k], static_cast<int>(k));
  text << ";\nmul.wide.u32 %rd27, %r31, 8;\nadd.s64 %rd26, %rd31, %rd27;\n";
  if (kinds[0] == 'P') text << "selp.u32 %r0, 1, 0, %p0;\n";
  text << "st.global."
       << (kinds[0] == 'H'   ? "u16"
           : kinds[0] == 'L' ? "u64"
                             : "u32")
       << " [%rd26], " << register_of(kinds[0] == 'P' ? 'R' : kinds[0], 0) << ";";
  std::vector<u64> in(32 * 8), out(32);
  for (std::size_t l = 0; l < 32; ++l) {
    for (std::size_t k = 0; k < c.sources.size(); ++k) in[l * 8 + k] = c.sources[k];
    in[l * 8 + 6] = kinds[0] == 'P' ? 1 - c.result : 0x1234;
    in[l * 8 + 7] = on >> l & 1;
  }
  run_text(text.str(), in.data(), out.data());
  return out;
}

void check(const std::vector<Case>& cases) {
  for (const Case& c : cases) {
    CAPTURE(c.name);
    for (const u64 source : c.sources) CAPTURE(source);
    constexpr u32 some = 0x5a0ff001u;
    const auto everywhere = run_case(c, all_lanes), partly = run_case(c, some);
    for (std::size_t l = 0; l < 32; ++l) {
      CHECK(everywhere[l] == c.result);
      CHECK(partly[l] == ((some >> l & 1) != 0 ? c.result
                          : c.kinds[0] == 'P'  ? 1 - c.result
                                               : 0x1234));
    }
  }
}

}  // namespace

TEST_CASE("integers wrap around, shifts run out") {
  check({{"add.s32", "RRR", {most, 1}, least},
         {"sub.s32", "RRR", {least, 1}, most},
         {"add.s16", "HHH", {0x7fff, 1}, 0x8000},
         {"add.s64", "LLL", {~u64{0}, 2}, 1},
         {"mul.lo.s32", "RRR", {0x10001, 0x10001}, 0x20001},
         {"mul.lo.s64", "LLL", {u64{1} << 63, 3}, u64{1} << 63},
         {"mul.hi.s32", "RRR", {minus_1, 1}, minus_1},
         {"mul.hi.u32", "RRR", {minus_1, minus_1}, 0xfffffffe},
         {"mul.wide.s32", "LRR", {minus_1, 2}, ~u64{1}},
         {"mul.wide.u32", "LRR", {minus_1, 2}, 0x1fffffffe},
         {"mad.lo.s32", "RRRR", {minus_1, 3, 5}, 2},
         {"mad.wide.s32", "LRRL", {minus_1, 3, 5}, 2},
         {"div.s32", "RRR", {static_cast<u32>(-7), 2}, static_cast<u32>(-3)},
         {"div.s32", "RRR", {least, minus_1}, least},
         {"rem.s32", "RRR", {static_cast<u32>(-7), 2}, minus_1},
         {"rem.s32", "RRR", {least, minus_1}, 0},
         {"div.u32", "RRR", {minus_1, 2}, most},
         {"rem.u32", "RRR", {minus_1, 10}, 5},
         {"neg.s32", "RR", {least}, least},
         {"abs.s32", "RR", {static_cast<u32>(-5)}, 5},
         {"min.s32", "RRR", {minus_1, 1}, minus_1},
         {"max.s32", "RRR", {minus_1, 1}, 1},
         {"max.u32", "RRR", {minus_1, 1}, minus_1},
         {"shl.b32", "RRR", {1, 31}, least},
         {"shl.b32", "RRR", {1, 32}, 0},
         {"shr.u32", "RRR", {least, 31}, 1},
         {"shr.u32", "RRR", {least, 40}, 0},
         {"shr.s32", "RRR", {least, 31}, minus_1},
         {"shr.s32", "RRR", {least, 99}, minus_1},
         {"shr.s16", "HHR", {0x8000, 8}, 0xff80},
         {"shr.u16", "HHR", {0x8000, 8}, 0x80},
         {"shl.b64", "LLR", {1, 63}, u64{1} << 63},
         {"shl.b64", "LLR", {1, 64}, 0},
         {"shr.u64", "LLR", {u64{1} << 63, 63}, 1},
         {"and.b16", "HHH", {0xf0f0, 0xff00}, 0xf000},
         {"or.b16", "HHH", {0xf0f0, 0xff00}, 0xfff0},
         {"and.b32", "RRR", {12, 10}, 8},
         {"or.b32", "RRR", {12, 10}, 14},
         {"xor.b32", "RRR", {12, 10}, 6},
         {"not.b32", "RR", {12}, ~u32{12}}});
}

TEST_CASE("comparisons and selection") {
  check({{"setp.lt.s32", "PRR", {minus_1, 0}, yes},
         {"setp.lt.u32", "PRR", {minus_1, 0}, no},
         {"setp.ge.s32", "PRR", {0, 0}, yes},
         {"setp.ge.u32", "PRR", {0, 1}, no},
         {"setp.gt.s32", "PRR", {1, minus_1}, yes},
         {"setp.gt.u32", "PRR", {1, minus_1}, no},
         {"setp.le.s32", "PRR", {minus_1, minus_1}, yes},
         {"setp.eq.b32", "PRR", {minus_0, 0}, no},
         {"setp.eq.s32", "PRR", {3, 3}, yes},
         {"setp.ne.s32", "PRR", {3, 3}, no},
         {"setp.eq.s16", "PHH", {0xffff, 0xffff}, yes},
         {"setp.ne.s16", "PHH", {1, 2}, yes},
         {"setp.gt.u16", "PHH", {0xffff, 1}, yes},
         {"setp.eq.s64", "PLL", {u64{1} << 32, 0}, no},
         {"setp.ne.s64", "PLL", {u64{1} << 32, 0}, yes},
         {"setp.lt.s64", "PLL", {~u64{0}, 0}, yes},
         {"setp.ge.s64", "PLL", {~u64{0}, 0}, no},
         {"selp.b32", "RRRP", {7, 8, yes}, 7},
         {"selp.f32", "RRRP", {7, 8, no}, 8},
         {"selp.u16", "HHHP", {7, 8, no}, 8},
         {"selp.b64", "LLLP", {~u64{0}, 8, yes}, ~u64{0}},
         {"and.pred", "PPP", {yes, no}, no},
         {"or.pred", "PPP", {yes, no}, yes},
         {"xor.pred", "PPP", {yes, yes}, no},
         {"not.pred", "PP", {yes}, no},
         {"mov.pred", "PP", {yes}, yes},
         {"mov.u16", "HH", {0xffff}, 0xffff},
         {"mov.b32", "RR", {minus_1}, minus_1},
         {"mov.u64", "LL", {~u64{0}}, ~u64{0}}});
}

TEST_CASE("floats keep subnormals, make one NaN, and know -0") {
  const u32 nan = canonical_nan;
  check({{"add.f32", "RRR", {tiny, tiny}, 2},
         {"add.f32", "RRR", {nan_bits, f(1)}, nan},
         {"add.f32", "RRR", {infinity, infinity | minus_0}, nan},
         {"add.f32", "RRR", {minus_0, minus_0}, minus_0},
         {"add.f32", "RRR", {minus_0, 0}, 0},
         {"add.f32", "RRR", {f(0x1p24f), f(1)}, f(0x1p24f)},
         {"sub.f32", "RRR", {f(0x1p24f), f(1)}, f(0x1p24f - 1)},
         {"mul.f32", "RRR", {f(0x1p-100f), f(0x1p-49f)}, tiny},
         {"mul.rn.f32", "RRR", {f(3e38f), f(10)}, infinity},
         {"fma.rn.f32", "RRRR", {f(1 + 0x1p-12f), f(1 - 0x1p-12f), f(-1)}, f(-0x1p-24f)},
         {"fma.rn.f32", "RRRR", {0, infinity, f(1)}, nan},
         {"max.f32", "RRR", {nan_bits, f(-3)}, f(-3)},
         {"max.f32", "RRR", {f(-3), nan_bits}, f(-3)},
         {"max.f32", "RRR", {nan_bits, nan_bits}, nan},
         {"max.f32", "RRR", {minus_0, 0}, 0},
         {"max.f32", "RRR", {0, minus_0}, 0},
         {"min.f32", "RRR", {minus_0, 0}, minus_0},
         {"min.f32", "RRR", {0, minus_0}, minus_0},
         {"min.f32", "RRR", {f(2), nan_bits}, f(2)},
         {"neg.f32", "RR", {0}, minus_0},
         {"abs.f32", "RR", {minus_0 | tiny}, tiny},
         {"rcp.rn.f32", "RR", {minus_0}, infinity | minus_0},
         {"rcp.rn.f32", "RR", {f(3)}, f(1.0f / 3)},
         {"div.rn.f32", "RRR", {f(1), f(127)}, f(1.0f / 127)},
         {"div.approx.f32", "RRR", {f(6), f(3)}, f(2)},
         {"div.approx.f32", "RRR", {f(0x1p127f), f(0x1p127f)}, 0},  // beyond 2^126
         {"div.approx.f32", "RRR", {infinity, f(0x1p127f)}, nan},
         {"div.approx.f32", "RRR", {0, 0}, nan},
         {"ex2.approx.ftz.f32", "RR", {f(-3)}, f(0.125f)},
         {"ex2.approx.ftz.f32", "RR", {infinity | minus_0}, 0},
         {"ex2.approx.ftz.f32", "RR", {infinity}, infinity},
         {"ex2.approx.ftz.f32", "RR", {f(-127)}, 0},  // would be subnormal
         {"ex2.approx.ftz.f32", "RR", {tiny}, f(1)},
         {"ex2.approx.ftz.f32", "RR", {nan_bits}, nan}});
  check({{"setp.eq.f32", "PRR", {minus_0, 0}, yes},
         {"setp.eq.f32", "PRR", {nan_bits, nan_bits}, no},
         {"setp.ne.f32", "PRR", {nan_bits, 0}, no},
         {"setp.neu.f32", "PRR", {nan_bits, nan_bits}, yes},
         {"setp.neu.f32", "PRR", {minus_0, 0}, no},
         {"setp.lt.f32", "PRR", {nan_bits, infinity}, no},
         {"setp.lt.f32", "PRR", {infinity | minus_0, 0}, yes},
         {"setp.ltu.f32", "PRR", {nan_bits, 0}, yes},
         {"setp.le.f32", "PRR", {minus_0, 0}, yes},
         {"setp.gt.f32", "PRR", {tiny, 0}, yes},
         {"setp.ge.f32", "PRR", {f(1), nan_bits}, no},
         {"setp.nan.f32", "PRR", {f(1), nan_bits}, yes},
         {"setp.num.f32", "PRR", {f(1), nan_bits}, no}});
}

TEST_CASE("conversions round, saturate and extend") {
  check({{"cvt.rzi.s32.f32", "RR", {f(-1.9f)}, minus_1},
         {"cvt.rzi.s32.f32", "RR", {f(1e10f)}, most},
         {"cvt.rzi.s32.f32", "RR", {infinity | minus_0}, least},
         {"cvt.rzi.s32.f32", "RR", {nan_bits}, 0},
         {"cvt.rni.f32.f32", "RR", {f(2.5f)}, f(2)},
         {"cvt.rni.f32.f32", "RR", {f(-0.5f)}, minus_0},
         {"cvt.rmi.f32.f32", "RR", {f(-0.5f)}, f(-1)},
         {"cvt.rn.f32.s32", "RR", {0x01000001}, f(0x1p24f)},
         {"cvt.rn.f32.u32", "RR", {minus_1}, f(0x1p32f)},
         {"cvt.rn.f32.s16", "RH", {0xff80}, f(-128)},
         {"cvt.rn.f32.u16", "RH", {0xff80}, f(65408)},
         {"cvt.s16.s8", "HH", {0x1280}, 0xff80},
         {"cvt.u16.u32", "HR", {0x12345}, 0x2345},
         {"cvt.u32.u16", "RH", {0xffff}, 0xffff},
         {"cvt.s64.s32", "LR", {minus_1}, ~u64{0}},
         {"cvt.u64.u32", "LR", {minus_1}, minus_1},
         {"cvt.u32.u64", "RL", {0x1234567890}, 0x34567890},
         {"cvta.to.global.u64", "LL", {0x1234567890}, 0x1234567890},
         {"cvt.rn.f16x2.f32", "RRR", {f(1), f(-2)}, 0x3c00c000},  // the first is the upper half
         {"cvt.rn.f16x2.f32", "RRR", {f(65520), nan_bits}, 0x7c007fff},
         {"cvt.rn.f16x2.f32", "RRR", {f(65519), f(0x1p-25f)}, 0x7bff0000},
         {"cvt.rn.f16x2.f32", "RRR", {f(-0x1.8p-24f), minus_0}, 0x80028000},
         {"cvt.rn.f16x2.f32", "RRR", {f(1 + 0x1p-11f), f(1 + 0x3p-11f)}, 0x3c003c02},
         {"cvt.rn.bf16x2.f32", "RRR", {f(1), f(-2)}, 0x3f80c000},
         {"cvt.rn.bf16x2.f32", "RRR", {0x7f7fffff, nan_bits}, 0x7f807fff},
         {"cvt.rn.bf16x2.f32", "RRR", {f(1 + 0x1p-8f), f(1 + 0x3p-8f)}, 0x3f803f82}});
  for (u32 bits = 0; bits < 0x10000; ++bits) {  // of 16 bits there and back
    if ((bits & 0x7c00) != 0x7c00 || (bits & 0x3ff) == 0) CHECK(half_of(from_half(bits)) == bits);
    if ((bits & 0x7f80) != 0x7f80 || (bits & 0x7f) == 0)
      CHECK(bfloat16_of(from_bfloat16(bits)) == bits);
  }
}

TEST_CASE("loads extend, stores cut, vectors are in order") {
  const std::vector<u32> in{0x80818283u, 0x84858687u, 0x88898a8bu, 0x8c8d8e8fu};
  const auto loaded = [&](const std::string& load, const std::string& result) {
    alignas(16) u64 out = 0;
    run_text("setp.ne.s32 %p1, %r31, 0;\n@%p1 ret;\n" + load + "\nst.global.u64 [%rd31], " +
                 result + ";",
             in.data(), &out);
    return out;
  };
  CHECK(loaded("ld.global.u8 %r1, [%rd30+1];\ncvt.u64.u32 %rd1, %r1;", "%rd1") == 0x82);
  CHECK(loaded("ld.global.s8 %r1, [%rd30];\ncvt.u64.u32 %rd1, %r1;", "%rd1") == 0xffffff83);
  CHECK(loaded("ld.global.u16 %rs1, [%rd30+2];\ncvt.u32.u16 %r1, %rs1;\ncvt.u64.u32 %rd1, %r1;",
               "%rd1") == 0x8081);
  CHECK(loaded("ld.global.s32 %rd1, [%rd30];", "%rd1") == 0xffffffff80818283u);
  CHECK(loaded("ld.global.u32 %rd1, [%rd30];", "%rd1") == 0x80818283u);
  CHECK(loaded("ld.f32 %r1, [%rd30+12];\ncvt.u64.u32 %rd1, %r1;", "%rd1") == 0x8c8d8e8fu);
  CHECK(loaded("ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [%rd30];\ncvt.u64.u32 %rd1, %r3;", "%rd1") ==
        0x88898a8bu);
  CHECK(loaded("ld.acquire.gpu.global.u32 %r1, [%rd30];\ncvt.u64.u32 %rd1, %r1;", "%rd1") ==
        0x80818283u);
  CHECK(
      loaded("mov.u32 %r1, 0x12345678;\nst.shared.u32 [%r30], %r1;\nld.shared.u16 %rs1, [%r30+2];\n"
             "cvt.u32.u16 %r2, %rs1;\ncvt.u64.u32 %rd1, %r2;",
             "%rd1") == 0x1234);
  CHECK(loaded("mov.u64 %rd2, 5;\nmov.u64 %rd3, 6;\nst.shared.v2.u64 [%r30+16], {%rd2, %rd3};\n"
               "ld.shared.u64 %rd1, [%r30+24];",
               "%rd1") == 6);
  u32 out[4] = {};
  run_text(
      "setp.ne.s32 %p1, %r31, 0;\n@%p1 ret;\nmov.u32 %r1, 0x1234;\nst.global.u8 [%rd31], "
      "%r1;\ncvt.u16.u32 %rs1, %r1;\n"
      "st.global.u16 [%rd31+6], %rs1;\nst.release.gpu.global.u32 [%rd31+8], %r1;\n"
      "atom.global.add.u32 %r2, [%rd31+8], 6;\nst.global.u32 [%rd31+12], %r2;",
      in.data(), out);
  CHECK((out[0] == 0x34 && out[1] == 0x12340000 && out[2] == 0x123a && out[3] == 0x1234));
}

TEST_CASE("literals have the width of their instruction, in all lanes") {
  std::vector<u32> out(32);
  run_text(
      "mul.wide.u32 %rd1, %r31, 4;\nadd.s64 %rd2, %rd31, %rd1;\ncvt.u16.u32 %rs1, %r31;\n"
      "add.s16 %rs2, %rs1, -2;\nsetp.gt.u16 %p1, %rs2, 7;\nselp.u16 %rs3, 1, 500, %p1;\n"
      "cvt.u32.u16 %r1, %rs3;\nmov.pred %p2, 0;\nmov.pred %p3, -1;\nxor.pred %p4, %p2, %p3;\n"
      "selp.b32 %r2, -1, 0, %p4;\nadd.s64 %rd3, %rd1, -4;\ncvt.u32.u64 %r3, %rd3;\n"
      "add.f32 %r4, 0f3F800000, 0f40000000;\nxor.b32 %r1, %r1, %r2;\nxor.b32 %r3, %r3, %r4;\n"
      "xor.b32 %r1, %r1, %r3;\nst.global.u32 [%rd2], %r1;",
      nullptr, out.data());
  for (u32 l = 0; l < 32; ++l) {
    const u32 chosen = l < 2 || l > 9 ? 1 : 500;
    CHECK(out[l] == (chosen ^ minus_1 ^ (4 * l - 4) ^ f(3)));
  }
}

TEST_CASE("an asynchronous copy lands at its wait, with zeros for what is not read") {
  std::vector<u32> in{1, 2, 3, 4, 5, 6, 7, 8}, out(8);
  run_text(
      "setp.ne.s32 %p1, %r31, 0;\n@%p1 ret;\nadd.s32 %r1, %r30, 16;\nadd.s64 %rd1, %rd30, 16;\n"
      "mov.u32 %r2, 16;\nmov.u32 %r3, 8;\n"
      "cp.async.cg.shared.global.L2::128B [%r30], [%rd30], 16, %r2;\ncp.async.commit_group;\n"
      "cp.async.cg.shared.global.L2::128B [%r1], [%rd1], 16, %r3;\ncp.async.commit_group;\n"
      "cp.async.wait_group 1;\nld.shared.v4.u32 {%r4, %r5, %r6, %r7}, [%r30];\nst.global.v4.u32 "
      "[%rd31], {%r4, %r5, %r6, %r7};\n"
      "cp.async.wait_group 0;\nld.shared.v4.u32 {%r4, %r5, %r6, %r7}, [%r30+16];\nst.global.v4.u32 "
      "[%rd31+16], {%r4, %r5, %r6, %r7};",
      in.data(), out.data());
  CHECK(out == std::vector<u32>{1, 2, 3, 4, 5, 6, 0, 0});
}

TEST_CASE("shuffles and votes") {
  std::vector<u32> out(64);
  run_text(
      "mul.wide.u32 %rd1, %r31, 8;\nadd.s64 %rd2, %rd31, %rd1;\nmov.u32 %r1, 5;\nmov.u32 %r2, "
      "31;\nmov.u32 %r3, -1;\n"
      "shfl.sync.bfly.b32 %r4|%p1, %r31, %r1, %r2, %r3;\nst.global.u32 [%rd2], %r4;\n"
      "setp.eq.s32 %p2, %r31, 9;\nvote.sync.any.pred %p3, %p2, %r3;\nselp.u32 %r5, 1, 0, "
      "%p3;\nst.global.u32 [%rd2+4], %r5;",
      nullptr, out.data());
  for (u32 l = 0; l < 32; ++l) CHECK((out[2 * l] == (l ^ 5) && out[2 * l + 1] == 1));
  run_text(
      "mul.wide.u32 %rd1, %r31, 4;\nadd.s64 %rd2, %rd31, %rd1;\nmov.u32 %r1, 16;\nmov.u32 %r2, "
      "15;\nmov.u32 %r3, -1;\n"
      "shfl.sync.bfly.b32 %r4|%p1, %r31, %r1, %r2, %r3;\nselp.u32 %r4, %r4, 99, "
      "%p1;\nst.global.u32 [%rd2], %r4;",
      nullptr, out.data());
  for (u32 l = 0; l < 32; ++l)
    CHECK(out[l] == (l < 16 ? 99 : l - 16));  // no lane beyond 15 is read
}

TEST_CASE("ldmatrix hands out rows, or columns where transposed") {
  std::vector<u32> out(128);
  for (const bool transposed : {false, true}) {
    // Word w of row r of matrix m holds elements 256 m + 16 r + 2 w and the next one.
    run_text(
        "mul.wide.u32 %rd1, %r31, 16;\nadd.s64 %rd2, %rd31, %rd1;\nshl.b32 %r1, %r31, 4;\nadd.s32 "
        "%r2, %r30, %r1;\n"
        "shr.u32 %r3, %r31, 3;\nshl.b32 %r3, %r3, 8;\nand.b32 %r4, %r31, 7;\nshl.b32 %r4, %r4, "
        "4;\nadd.s32 %r3, %r3, %r4;\n"
        "mul.lo.s32 %r3, %r3, 65537;\nadd.s32 %r4, %r3, 0x10000;\nadd.s32 %r5, %r3, "
        "0x30002;\nadd.s32 %r6, %r3, 0x50004;\nadd.s32 %r7, %r3, 0x70006;\n"
        "st.shared.v4.u32 [%r2], {%r4, %r5, %r6, %r7};\nbar.sync "
        "0;\nldmatrix.sync.aligned.m8n8.x4." +
            std::string(transposed ? "trans." : "") +
            "shared.b16 {%r8, %r9, %r10, %r11}, [%r2];\nst.global.v4.u32 [%rd2], {%r8, %r9, %r10, "
            "%r11};",
        nullptr, out.data());
    for (u32 l = 0; l < 32; ++l)
      for (u32 m = 0; m < 4; ++m) {
        const u32 r = l / 4, c = l % 4 * 2;
        const u32 first = 256 * m + (transposed ? 16 * c + r : 16 * r + c),
                  second = first + (transposed ? 16 : 1);
        CHECK(out[4 * l + m] == (first | second << 16));
      }
  }
}

TEST_CASE("mma multiplies matrices whose fragments lie as PTX says") {
  // Small integers: every product and sum is exact.
  const auto a = [](u32 row, u32 k) {
    return static_cast<float>(static_cast<int>(row * 5 + k * 3) % 11 - 5);
  };
  const auto b = [](u32 k, u32 column) {
    return static_cast<float>(static_cast<int>(k * 7 + column * 2) % 13 - 6);
  };
  const auto c = [](u32 row, u32 column) { return static_cast<float>(row * 8 + column); };
  for (const bool bf16 : {false, true}) {
    const auto pair = [&](float low, float high) {
      return bf16 ? bfloat16_of(low) | bfloat16_of(high) << 16 : half_of(low) | half_of(high) << 16;
    };
    std::vector<u32> in, out(128);
    for (u32 l = 0; l < 32; ++l) {  // a[4], b[2], none[2], c[4], none[4]
      const u32 g = l / 4, t = l % 4 * 2;
      for (u32 i = 0; i < 4; ++i) {
        const u32 row = g + (i % 2) * 8, k = t + (i / 2) * 8;
        in.push_back(pair(a(row, k), a(row, k + 1)));
      }
      for (u32 i = 0; i < 2; ++i) in.push_back(pair(b(t + 8 * i, g), b(t + 8 * i + 1, g)));
      in.insert(in.end(), 2, 0);
      for (u32 i = 0; i < 4; ++i) in.push_back(f(c(g + i / 2 * 8, t + i % 2)));
      in.insert(in.end(), 4, 0);
    }
    run_text(
        "mul.wide.u32 %rd1, %r31, 64;\nadd.s64 %rd2, %rd30, %rd1;\nmul.wide.u32 %rd3, %r31, "
        "16;\nadd.s64 %rd4, %rd31, %rd3;\n"
        "ld.global.v4.u32 {%r4, %r5, %r6, %r7}, [%rd2];\nld.global.v2.u32 {%r8, %r9}, "
        "[%rd2+16];\nld.global.v4.u32 {%r0, %r1, %r2, %r3}, [%rd2+32];\n"
        "mma.sync.aligned.m16n8k16.row.col.f32." +
            std::string(bf16 ? "bf16.bf16" : "f16.f16") +
            ".f32 {%r0, %r1, %r2, %r3}, {%r4, %r5, %r6, %r7}, {%r8, %r9}, {%r0, %r1, %r2, %r3};\n"
            "st.global.v4.u32 [%rd4], {%r0, %r1, %r2, %r3};",
        in.data(), out.data());
    for (u32 l = 0; l < 32; ++l)
      for (u32 i = 0; i < 4; ++i) {
        const u32 row = l / 4 + i / 2 * 8, column = l % 4 * 2 + i % 2;
        float sum = c(row, column);
        for (u32 k = 0; k < 16; ++k) sum += a(row, k) * b(k, column);
        CHECK(std::bit_cast<float>(out[4 * l + i]) == sum);
      }
  }
  CHECK(towards_zero(1 + 0x1.8p-24) == 1.0f);
  CHECK(towards_zero(-1 - 0x1.8p-24) == -1.0f);
}

TEST_CASE("lanes that have parted meet again") {
  std::vector<u32> out(32);
  run_text(
      "mul.wide.u32 %rd1, %r31, 4;\nadd.s64 %rd2, %rd31, %rd1;\nmov.u32 %r1, 0;\nmov.u32 %r5, "
      "-1;\nmov.u32 %r6, 31;\nmov.u32 %r7, 1;\n"
      "$loop:\nsetp.ge.s32 %p1, %r1, %r31;\n@%p1 bra $out;\nadd.s32 %r1, %r1, 1;\nbra.uni $loop;\n"
      "$out:\nshfl.sync.bfly.b32 %r2|%p2, %r1, %r7, %r6, %r5;\nst.global.u32 [%rd2], %r2;",
      nullptr, out.data());
  for (u32 l = 0; l < 32; ++l) CHECK(out[l] == (l ^ 1));
}
