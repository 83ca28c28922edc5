// Faults, planted one by one: does the machine report what a device would not forgive?
#include <doctest/doctest.h>

#include <memory>
#include <string>
#include <vector>

#include "ptx/allocations.hpp"
#include "ptx/kernel_text.hpp"

namespace {

using namespace ptxrun;

// Runs the kernel on 64 words of global memory, with several orders of turns; the first fault's
// text.
std::string fault_of(const std::string& body, int threads = 64, std::size_t shared_bytes = 256) {
  watch_allocations();
  std::vector<u32> memory(64);
  try {
    for (u64 seed = 1; seed <= 4; ++seed)
      run_text(body, memory.data(), memory.data(), threads, shared_bytes, seed);
  } catch (const Fault& fault) {
    return fault.what();
  }
  return "none";
}

void check_fault(const std::string& body, const std::string& expected, int threads = 64) {
  const std::string fault = fault_of(body, threads);
  INFO(body);
  INFO(fault);
  CHECK(fault.find(expected) != fault.npos);
}

// Each thread's word: of global memory at %rd1, of shared at %r1.
const std::string own_word =
    "mul.wide.u32 %rd2, %r31, 4;\nadd.s64 %rd1, %rd30, %rd2;\nshl.b32 %r2, %r31, 2;\nadd.s32 %r1, "
    "%r30, %r2;\n";
const std::string only_warp_1 = "setp.lt.s32 %p1, %r31, 32;\n@%p1 bra $end;\n";
const std::string members = "mov.u32 %r20, -1;\nmov.u32 %r21, 31;\nmov.u32 %r22, 1;\n";
const std::string shuffle = "shfl.sync.bfly.b32 %r5|%p5, %r31, %r22, %r21, %r20;\n";
const std::string copy =
    "shl.b32 %r3, %r31, 4;\nadd.s32 %r4, %r30, %r3;\nmov.u32 %r5, 16;\nsetp.gt.s32 %p2, %r31, "
    "7;\n@%p2 bra $wait;\n"
    "mul.wide.u32 %rd3, %r31, 16;\nadd.s64 %rd4, %rd30, %rd3;\n"
    "cp.async.cg.shared.global.L2::128B [%r4], [%rd4], 16, %r5;\n$wait:\n";

}  // namespace

TEST_CASE("what is right is not reported") {
  const std::string store = own_word + "st.shared.u32 [%r1], %r31;\n";
  CHECK(fault_of(store + "bar.sync 0;\nxor.b32 %r3, %r2, 252;\nadd.s32 %r4, %r30, "
                         "%r3;\nld.shared.u32 %r5, [%r4];\nst.global.u32 [%rd1], %r5;") == "none");
  CHECK(fault_of(store + "ld.shared.u32 %r5, [%r1];") == "none");
  // Lanes that met between.
  CHECK(fault_of(store + members + shuffle +
                 "xor.b32 %r3, %r2, 4;\nadd.s32 %r4, %r30, %r3;\nld.shared.u32 %r5, [%r4];") ==
        "none");
  CHECK(fault_of("mov.u32 %r1, 7;\nst.shared.u32 [%r30], %r1;") == "none");  // all write the same
  CHECK(
      fault_of(own_word + copy +
               "cp.async.commit_group;\ncp.async.wait_group 0;\nbar.sync 0;\nxor.b32 %r3, %r2, "
               "64;\nand.b32 %r3, %r3, 127;\nadd.s32 %r4, %r30, %r3;\nld.shared.u32 %r6, [%r4];") ==
      "none");
  CHECK(fault_of("setp.ne.s32 %p1, %r31, 0;\n@%p1 ret;\natom.global.add.u32 %r1, [%rd30], "
                 "1;\nmembar.gl;\natom.global.add.u32 %r1, [%rd30+4], 1;") == "none");
}

TEST_CASE("addresses beyond their memory, or misaligned") {
  check_fault(own_word + "ld.global.u32 %r5, [%rd1+4];", "load: 4 bytes");
  check_fault(own_word + "st.global.u32 [%rd1+4], %r5;", "store: 4 bytes");
  check_fault("ld.global.u32 %r5, [%rd30+-4];", "no memory");
  check_fault("ld.global.v2.u32 {%r5, %r6}, [%rd30+252];", "misaligned: 8 bytes");
  check_fault("ld.global.v4.u32 {%r5, %r6, %r7, %r8}, [%rd30+8];", "misaligned: 16 bytes");
  check_fault("atom.global.add.u32 %r5, [%rd30+256], 1;", "atom: 4 bytes");
  check_fault(own_word + "st.shared.u32 [%r1+4], %r31;", "offset 256 of 256 bytes");
  check_fault("ld.shared.u32 %r5, [%r30+-4];", "offset -4 of 256 bytes");
  check_fault("mov.u32 %r5, 0;\nst.shared.u32 [%r5], %r5;", "shared memory: offset");
  check_fault("st.shared.v2.u32 [%r30+4], {%r5, %r6};",
              "shared memory: misaligned: 8 bytes at offset 4");
  check_fault("ld.shared.v4.u32 {%r5, %r6, %r7, %r8}, [%r30+8];", "shared memory: misaligned");
  check_fault("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r5, %r6, %r7, %r8}, [%r30+8];",
              "shared memory: misaligned");
  check_fault(
      "mov.u32 %r5, 16;\nadd.s64 %rd1, %rd30, 248;\ncp.async.cg.shared.global.L2::128B [%r30], "
      "[%rd1], 16, %r5;",
      "cp.async: misaligned");
  check_fault(
      "mov.u32 %r5, 16;\nadd.s64 %rd1, %rd30, 256;\ncp.async.cg.shared.global.L2::128B [%r30], "
      "[%rd1], 16, %r5;",
      "cp.async: 16 bytes");
  check_fault("mov.u32 %r5, 17;\ncp.async.cg.shared.global.L2::128B [%r30], [%rd30], 16, %r5;",
              "cp.async: not of 16 bytes");
  check_fault("ld.param.u32 %r5, [in+16];", "beyond the arguments");
}

TEST_CASE("memory that has been freed") {
  watch_allocations();
  auto gone = std::make_unique<std::vector<u32>>(64);
  const u32* const address = gone->data();
  gone.reset();
  CHECK_THROWS_AS(run_text("ld.global.u32 %r5, [%rd30];", address, nullptr), Fault);
}

TEST_CASE("shared memory that nobody wrote") {
  check_fault("ld.shared.u32 %r5, [%r30];", "read of what nobody wrote");
  check_fault(
      "mov.u32 %r5, 1;\nst.shared.u16 [%r30], %r5;\nbar.sync 0;\nld.shared.u32 %r5, [%r30];",
      "read of what nobody wrote");
  check_fault("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r5, %r6, %r7, %r8}, [%r30];",
              "read of what nobody wrote");
}

TEST_CASE("copies that have not been waited for") {
  const std::string before = "read before the copy to it has been waited for";
  check_fault(own_word + copy +
                  "cp.async.commit_group;\nld.shared.u32 %r6, [%r30];\ncp.async.wait_group 0;",
              before, 32);
  check_fault(own_word + copy +
                  "cp.async.commit_group;\ncp.async.wait_group 1;\nld.shared.u32 %r6, "
                  "[%r30];\ncp.async.wait_group 0;",
              before, 32);
  check_fault(own_word + copy + "cp.async.wait_group 0;\nld.shared.u32 %r6, [%r30];", before,
              32);  // no group
  check_fault(own_word + copy +
                  "cp.async.commit_group;\nst.shared.u32 [%r30], %r31;\ncp.async.wait_group 0;",
              "written before the copy", 32);
  check_fault(own_word + copy +
                  "cp.async.commit_group;\ncp.async.wait_group 0;\nld.shared.u32 %r6, [%r30];",
              "race", 32);  // of others
  check_fault(own_word + copy + "cp.async.commit_group;", "leaves with copies under way", 32);
  check_fault(own_word + copy, "leaves with copies under way", 32);
  check_fault(own_word + "st.shared.u32 [%r1], %r31;\nbar.sync 0;\nld.shared.u32 %r9, [%r30];\n" +
                  copy + "cp.async.commit_group;\ncp.async.wait_group 0;",
              "race", 32);
}

TEST_CASE("races") {
  const std::string store = own_word + "st.shared.u32 [%r1], %r31;\n";
  const std::string others =
      "xor.b32 %r3, %r2, 128;\nadd.s32 %r4, %r30, %r3;\n";  // a word of the other warp
  const std::string neighbours =
      "xor.b32 %r3, %r2, 4;\nadd.s32 %r4, %r30, %r3;\n";  // of the same warp
  for (const std::string& word : {others, neighbours}) {
    check_fault(store + word + "ld.shared.u32 %r5, [%r4];",
                word == others ? "shared memory: r" : "race: read");
    check_fault(
        store + "bar.sync 0;\nld.shared.u32 %r5, [%r1];\n" + word + "st.shared.u32 [%r4], %r31;",
        "race");
    check_fault(store + word + "st.shared.u32 [%r4], %r31;", "race: threads");
  }
  check_fault("st.shared.u32 [%r30], %r31;", "race: threads");
  // Meeting the own warp orders nothing between warps.
  check_fault(store + members + shuffle + others + "ld.shared.u32 %r5, [%r4];", "shared memory: r");
  check_fault(
      "setp.ne.s32 %p1, %r31, 0;\n@%p1 ret;\natom.global.add.u32 %r1, [%rd30], "
      "1;\natom.global.add.u32 %r1, [%rd30+4], 1;",
      "without a fence");
}

TEST_CASE("lanes that are off where all are needed") {
  const std::string odd = "and.b32 %r3, %r31, 1;\nsetp.eq.s32 %p1, %r3, 1;\n";
  const std::string mma =
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%r0, %r1, %r2, %r3}, {%r4, %r5, %r6, "
      "%r7}, {%r8, %r9}, {%r0, %r1, %r2, %r3};\n";
  const std::string matrix =
      "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r5, %r6, %r7, %r8}, [%r30];\n";
  const std::string vote = "vote.sync.any.pred %p3, %p2, %r20;\n";
  for (const std::string& all :
       {mma, matrix, members + shuffle, members + vote, std::string("bar.warp.sync -1;\n"),
        std::string("bar.sync 0;\n")}) {
    check_fault(odd + "@%p1 bra $end;\n" + all + "$end:", "lanes are off, which have left");
    check_fault(odd + "@%p1 bra $other;\n" + all + "bra.uni $end;\n$other:\n" + all + "$end:",
                "lanes are off, which wait at line");
  }
  check_fault(odd + "@%p1 " + mma, "lanes are off by a predicate");
  check_fault(odd + "@%p1 bar.sync 0;", "lanes are off by a predicate");
  check_fault("mov.u32 %r20, 255;\nmov.u32 %r21, 31;\nmov.u32 %r22, 1;\n" + shuffle,
              "shfl.sync: of some lanes");
  check_fault("mov.u32 %r20, 255;\n" + vote, "vote.sync: of some lanes");
  check_fault("bar.warp.sync 255;", "bar.warp.sync: of some lanes");
}

TEST_CASE("barriers that not all warps reach, and blocks that wait for ever") {
  check_fault(only_warp_1 + "bar.sync 0;\n$end:", "others have left");
  check_fault(
      "setp.lt.s32 %p1, %r31, 32;\n@%p1 bra $other;\nbar.sync 0;\nbra.uni $end;\n$other:\nbar.sync "
      "0;\n$end:",
      "different barriers");
  check_fault(
      "mov.u32 %r1, 32;\n$wait:\nld.acquire.gpu.global.u32 %r2, [%rd30];\nnanosleep.u32 "
      "%r1;\nsetp.eq.s32 %p1, %r2, 0;\n@%p1 bra $wait;",
      "wait for one another");
}

TEST_CASE("what the machine does not know is refused by name") {
  const auto refused = [](const std::string& body, const std::string& expected) {
    INFO(body);
    CHECK_THROWS_WITH_AS(read_module(kernel_text(body)), doctest::Contains(expected.c_str()),
                         Fault);
  };
  refused("add.sat.s32 %r1, %r2, %r3;", "line 18: unknown instruction: add.sat.s32");
  refused("add.s32 %r1, %r2;", "not the operands of add.s32");
  refused("add.s32 %r1, %r2, %rd3;", "another width than the instruction: %rd3");
  refused("add.s32 %r1, %r2, %q3;", "no register %q3");
  refused("add.s32 %r1, %r2, %r32;", "no register %r32");
  refused("mov.u32 %r1, %laneid;", "no register %laneid");
  refused("mov.u32 %r1, elsewhere;", "unknown operand: elsewhere");
  refused("bra $nowhere;", "no label $nowhere");
  refused("bar.sync 1;", "barriers other than 0");
  refused(".local .b8 stack[16];", "unknown directive: .local");
  refused(".reg .f64 %fd<3>;", "registers of type .f64");
  refused("ld.local.u32 %r1, [%r2];", "unknown instruction: ld.local.u32");
  refused("cp.async.cg.shared.global.L2::128B [%r1+16], [%rd1], 16, %r2;", "offsets of a copy");
  refused("cp.async.cg.shared.global.L2::128B [%r1], [%rd1+16], 16, %r2;", "offsets of a copy");
  refused("ret;\nmov.u32 %r1, %r2;\n}\n//", "does not end with ret");
}

TEST_CASE("launches that no device takes") {
  const auto entries = read_module(kernel_text(""));
  const void* arguments[2] = {};
  const auto refused = [&](const Launch& launch, const std::string& expected) {
    CHECK_THROWS_WITH_AS(run(entries.at("kernel"), launch), doctest::Contains(expected.c_str()),
                         Fault);
  };
  refused({1, 32, 64, arguments, 8, 1}, "arguments of 8 bytes, not 16");
  for (const int grid : {0, -1})
    refused({grid, 32, 64, arguments, 16, 1}, "a launch that no device takes");
  for (const int threads : {0, 31, 48, 1056})
    refused({1, threads, 64, arguments, 16, 1}, "a launch that no device takes");
}
