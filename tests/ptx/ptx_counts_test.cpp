// What the machine counts, against counts that can be done by hand.
#include <doctest/doctest.h>

#include <array>
#include <string>
#include <vector>

#include "ptx/allocations.hpp"
#include "ptx/counts.hpp"
#include "ptx/kernel_text.hpp"

namespace {

using namespace ptxrun;

template <class F>
std::array<u64, 32> addresses(F&& of_lane) {
  std::array<u64, 32> made;
  for (u64 l = 0; l < 32; ++l) made[l] = of_lane(l);
  return made;
}

void check_wavefronts(const std::array<u64, 32>& at, u32 on, u32 bytes, u64 all, u64 least) {
  const Wavefronts found = wavefronts_of(at, on, bytes);
  CHECK(found.all == all);
  CHECK(found.least == least);
}
void check_sectors(const std::array<u64, 32>& at, u32 on, u32 bytes, u64 all, u64 least) {
  const Sectors found = sectors_of(at, on, bytes);
  CHECK(found.all == all);
  CHECK(found.least == least);
}

// What a kernel of one block counts, over zeros, less what it counts with an empty body.
Counts counted(const std::string& body, int threads = 32) {
  watch_allocations();
  struct alignas(256) Block {
    u32 words[64];
  };
  std::vector<Block> memory(64);  // begins with a sector
  Counts empty, counts;
  count_into(&empty);
  run_text("", memory.data(), memory.data(), threads);
  count_into(&counts);
  run_text(body, memory.data(), memory.data(), threads);
  count_into(nullptr);
  counts -= empty;
  return counts;
}

}  // namespace

TEST_CASE("wavefronts of words") {
  const auto strided = [](u64 bytes) { return addresses([=](u64 l) { return 1024 + l * bytes; }); };
  check_wavefronts(strided(4), all_lanes, 4, 1, 1);
  check_wavefronts(strided(8), all_lanes, 4, 2, 1);
  check_wavefronts(strided(12), all_lanes, 4, 1, 1);  // odd: all banks
  check_wavefronts(strided(64), all_lanes, 4, 16, 1);
  check_wavefronts(strided(128), all_lanes, 4, 32, 1);
  check_wavefronts(strided(132), all_lanes, 4, 1, 1);
  check_wavefronts(strided(0), all_lanes, 4, 1, 1);  // the same word
  check_wavefronts(strided(1), all_lanes, 1, 1, 1);
  check_wavefronts(strided(2), all_lanes, 2, 1, 1);
  check_wavefronts(strided(128), 0x00000011u, 4, 2, 1);  // of two lanes
  check_wavefronts(strided(128), 0, 4, 0, 0);
}

TEST_CASE("wavefronts of vectors: halves and quarters of a warp") {
  const auto strided = [](u64 bytes) { return addresses([=](u64 l) { return 1024 + l * bytes; }); };
  check_wavefronts(strided(8), all_lanes, 8, 2, 2);
  check_wavefronts(strided(16), all_lanes, 8, 4, 2);
  check_wavefronts(strided(16), all_lanes, 16, 4, 4);
  check_wavefronts(strided(32), all_lanes, 16, 8, 4);
  check_wavefronts(strided(256), all_lanes, 16, 32, 4);  // eight rows in one group of banks
  check_wavefronts(strided(272), all_lanes, 16, 4, 4);
  check_wavefronts(strided(16), 0x000000ffu, 16, 1, 1);
  check_wavefronts(strided(16), 0x80000001u, 16, 2, 2);  // of two quarters
  // Eight lanes of a row, four rows, of which pieces are exchanged as in stages.
  const auto swizzled = addresses([](u64 l) { return l / 8 * 256 + ((l % 8) ^ (l / 8)) * 16; });
  check_wavefronts(swizzled, all_lanes, 16, 4, 4);
}

TEST_CASE("sectors") {
  const auto strided = [](u64 bytes) { return addresses([=](u64 l) { return 4096 + l * bytes; }); };
  check_sectors(strided(4), all_lanes, 4, 4, 4);
  check_sectors(strided(8), all_lanes, 4, 8, 4);
  check_sectors(strided(32), all_lanes, 4, 32, 4);
  check_sectors(strided(0), all_lanes, 4, 1, 1);
  check_sectors(strided(16), all_lanes, 16, 16, 16);
  check_sectors(strided(16), 0x0000ffffu, 16, 8, 8);
  check_sectors(strided(256), 0x00000007u, 16, 3, 2);
  check_sectors(strided(4), 0, 4, 0, 0);
  // 128 bytes that begin in the middle of a sector.
  check_sectors(addresses([](u64 l) { return 4112 + l * 4; }), all_lanes, 4, 5, 4);
}

TEST_CASE("instructions by kind, of each warp, those of lanes that are off too") {
  const Counts two = counted("add.s32 %r1, %r2, %r3;\nadd.rn.f32 %r4, %r5, %r6;\n", 64);
  CHECK(two[Kind::integer].instructions == 2);
  CHECK(two[Kind::arithmetic].instructions == 2);
  CHECK(two.total().instructions == 4);
  const Counts off = counted("setp.lt.s32 %p1, %r31, 0;\n@%p1 ld.global.u32 %r1, [%rd30];\n");
  CHECK(off[Kind::load_global].instructions == 1);
  CHECK(off[Kind::load_global].sectors == 0);
  const Counts one = counted("setp.eq.s32 %p1, %r31, 0;\n@%p1 st.shared.u32 [%r30], %r31;\n");
  CHECK(one[Kind::store_shared].wavefronts == 1);
  // Both sides of a branch, each for its lanes, then what waits for all of them: once.
  const Counts sides = counted(
      "setp.lt.s32 %p1, %r31, 16;\n@%p1 bra $less;\nadd.s32 %r1, %r2, %r3;\nbra.uni $end;\n$less:\n"
      "add.s32 %r1, %r2, %r2;\nadd.s32 %r1, %r1, %r2;\n$end:\nvote.sync.any.pred %p2, %p1, -1;\n");
  CHECK(sides[Kind::integer].instructions == 3);
  CHECK(sides[Kind::control].instructions == 2);
  CHECK(sides[Kind::shuffle].instructions == 1);
}

TEST_CASE("kinds of forms") {
  CHECK(kind_of("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32") == Kind::mma);
  CHECK(kind_of("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16") == Kind::ldmatrix);
  CHECK(kind_of("cp.async.wait_group") == Kind::copy);
  CHECK(kind_of("ld.f32/R") == Kind::load_global);
  CHECK(kind_of("ld.acquire.gpu.global.u32/R") == Kind::load_global);
  CHECK(kind_of("ld.param.u64/L") == Kind::move);
  CHECK(kind_of("ex2.approx.ftz.f32") == Kind::exp2);
  CHECK(kind_of("cvt.rn.f16x2.f32") == Kind::convert);
  CHECK(kind_of("setp.gt.f32") == Kind::choose);
  CHECK(kind_of("mad.lo.s32") == Kind::integer);
  CHECK(kind_of("fma.rn.f32") == Kind::arithmetic);
  CHECK(kind_of("bar.sync") == Kind::control);
}

TEST_CASE("loads, stores, copies and matrices are counted by their lanes' addresses") {
  const std::string word = "shl.b32 %r2, %r31, 2;\nadd.s32 %r1, %r30, %r2;\n";
  const std::string row = "shl.b32 %r4, %r31, 5;\nadd.s32 %r3, %r30, %r4;\n";  // 32 bytes apart
  const Counts plain = counted(word + "st.shared.u32 [%r1], %r31;\nld.shared.u32 %r5, [%r1];\n");
  CHECK(plain[Kind::store_shared].wavefronts == 1);
  CHECK(plain[Kind::load_shared].wavefronts == 1);
  const Counts apart = counted(row + "st.shared.u32 [%r3], %r31;\nld.shared.u32 %r5, [%r3];\n");
  CHECK(apart[Kind::store_shared].wavefronts == 8);
  CHECK(apart[Kind::store_shared].least_wavefronts == 1);
  CHECK(apart[Kind::load_shared].wavefronts == 8);
  const Counts pairs = counted(row + "st.shared.v2.u32 [%r3+8], {%r31, %r31};\n");
  CHECK(pairs[Kind::store_shared].wavefronts == 8);  // 16 lanes, four to a row of banks, twice
  CHECK(pairs[Kind::store_shared].least_wavefronts == 2);

  // 16 bytes for each lane from memory that they have twice as far apart: zeros for all but eight.
  const std::string copy =
      "shl.b32 %r4, %r31, 4;\nand.b32 %r4, %r4, 511;\nadd.s32 %r3, %r30, %r4;\n"
      "mul.wide.u32 %rd3, %r31, 32;\nadd.s64 %rd4, %rd30, %rd3;\n"
      "setp.lt.s32 %p1, %r31, 8;\nselp.b32 %r5, 16, 0, %p1;\n"
      "cp.async.cg.shared.global.L2::128B [%r3], [%rd4], 16, %r5;\n"
      "cp.async.commit_group;\ncp.async.wait_group 0;\n";
  const Counts copied = counted(copy);
  CHECK(copied[Kind::copy].instructions == 3);
  CHECK(copied[Kind::copy].wavefronts == 4);
  CHECK(copied[Kind::copy].sectors == 8);
  CHECK(copied[Kind::copy].least_sectors == 4);

  const std::string matrices = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r5, %r6, %r7, %r8}, ";
  CHECK(counted(copy + "bar.sync 0;\n" + matrices + "[%r3];\n")[Kind::ldmatrix].wavefronts == 4);
  // All rows of a matrix in the same four banks.
  const Counts same = counted(copy +
                              "bar.sync 0;\nand.b32 %r9, %r31, 3;\nshl.b32 %r9, %r9, 7;\n"
                              "add.s32 %r9, %r30, %r9;\n" +
                              matrices + "[%r9];\n");
  CHECK(same[Kind::ldmatrix].wavefronts == 16);
  CHECK(same[Kind::ldmatrix].least_wavefronts == 4);

  const Counts global = counted(
      "mul.wide.u32 %rd3, %r31, 64;\nadd.s64 %rd4, %rd30, %rd3;\nld.global.v2.u32 {%r1, %r2}, "
      "[%rd4];\nst.global.u32 [%rd4+32], %r31;\n");
  CHECK(global[Kind::load_global].sectors == 32);
  CHECK(global[Kind::load_global].least_sectors == 8);
  CHECK(global[Kind::store_global].sectors == 32);
  CHECK(global[Kind::store_global].least_sectors == 4);
  const Counts offset = counted(
      "mul.wide.u32 %rd3, %r31, 4;\nadd.s64 %rd4, %rd30, %rd3;\n"
      "ld.global.u32 %r1, [%rd4];\nst.global.u32 [%rd4+16], %r31;\n");
  CHECK(offset[Kind::load_global].sectors == 4);
  CHECK(offset[Kind::store_global].sectors == 5);
}

TEST_CASE("counts are added, taken away and multiplied by kinds") {
  Counts a, b;
  a[Kind::copy] = {5, 4, 3, 2, 1};
  b[Kind::copy] = {1, 1, 1, 1, 1};
  b[Kind::mma].instructions = 7;
  a -= b;
  a += b * 3;
  CHECK(a[Kind::copy].instructions == 7);
  CHECK(a[Kind::copy].wavefronts == 6);
  CHECK(a[Kind::copy].least_wavefronts == 5);
  CHECK(a[Kind::copy].sectors == 4);
  CHECK(a[Kind::copy].least_sectors == 3);
  CHECK(a[Kind::mma].instructions == 14);
  CHECK(a.total().instructions == 21);
}
