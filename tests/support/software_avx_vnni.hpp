// AVX-VNNI on processors that lack it: VPDPWSSD of 256 bits, as the compiler wrote it into the
// kernels, is computed where the processor refuses it. To be included once, in a test's one source.
#pragma once

#include <immintrin.h>
#include <signal.h>
#include <ucontext.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "support/software_dots.hpp"

namespace test {

/// Reads one instruction and computes it on the registers of a thread that a signal stopped.
class AvxVnni {
 public:
  explicit AvxVnni(mcontext_t& thread)
      : registers_(thread.gregs), at_(reinterpret_cast<const std::uint8_t*>(registers_[REG_RIP])) {
    auto* const saved = reinterpret_cast<std::uint8_t*>(thread.fpregs);
    low_ = saved + 160;   // XMM of the FXSAVE area
    high_ = saved + 576;  // the other halves of YMM
    std::uint64_t parts;  // those that are not all zeros, and so saved
    std::memcpy(&parts, saved + 512, sizeof parts);
    if ((parts & 4) == 0) std::memset(high_, 0, 256);
    parts |= 4;
    std::memcpy(saved + 512, &parts, sizeof parts);
  }

  void run() {
    if (next() != 0xc4) refuse("no VEX prefix of three bytes");
    const std::uint8_t first = next(), second = next();
    if ((first & 0x1f) != 2 || (second & 0x87) != 5 || next() != 0x52) refuse("not VPDPWSSD");
    const auto extended = [&](int bit, int field) { return field | (first & bit ? 0 : 8); };
    const std::uint8_t fields = next();
    const int to = extended(0x80, fields >> 3 & 7), a = ~second >> 3 & 15;
    std::uint32_t sums[8], left[8], right[8];
    load(to, sums);
    load(a, left);
    if (fields >> 6 == 3)
      load(extended(0x20, fields & 7), right);
    else
      std::memcpy(right, address(fields, first), sizeof right);
    for (int lane = 0; lane < 8; ++lane)
      sums[lane] = chunkattn::detail::cpu::software_dot_int16(sums[lane], left[lane], right[lane]);
    std::memcpy(low_ + 16 * to, sums, 16);
    std::memcpy(high_ + 16 * to, sums + 4, 16);
    registers_[REG_RIP] = reinterpret_cast<greg_t>(at_);
  }

 private:
  [[noreturn]] static void refuse(const char* what) {
    std::fprintf(stderr, "software_avx_vnni.hpp: %s\n", what);
    std::abort();
  }
  std::uint8_t next() { return *at_++; }
  void load(int number, std::uint32_t* lanes) const {
    std::memcpy(lanes, low_ + 16 * number, 16);
    std::memcpy(lanes + 4, high_ + 16 * number, 16);
  }
  std::int64_t general(int number) const {
    constexpr int order[] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP,
                             REG_RSI, REG_RDI, REG_R8,  REG_R9,  REG_R10, REG_R11,
                             REG_R12, REG_R13, REG_R14, REG_R15};
    return registers_[order[number]];
  }
  // Of an operand in memory: base, index and distance.
  const void* address(std::uint8_t fields, std::uint8_t prefix) {
    const int mode = fields >> 6;
    int base = fields & 7;
    std::int64_t sum = 0;
    if (base == 4) {
      const std::uint8_t scaled = next();
      const int index = (scaled >> 3 & 7) | (prefix & 0x40 ? 0 : 8);
      if (index != 4) sum += general(index) << (scaled >> 6);
      base = scaled & 7;
    }
    const bool absolute = mode == 0 && base == 5;  // after the instruction, or where the index says
    if (absolute && (fields & 7) == 4) refuse("an address without a base");
    if (!absolute) sum += general(base | (prefix & 0x20 ? 0 : 8));
    if (mode == 1) sum += static_cast<std::int8_t>(next());
    if (mode == 2 || absolute) {
      std::int32_t distance;
      std::memcpy(&distance, at_, sizeof distance);
      at_ += sizeof distance;
      sum += distance;
    }
    if (absolute) sum += reinterpret_cast<std::int64_t>(at_);
    return reinterpret_cast<const void*>(sum);
  }

  greg_t* registers_;
  const std::uint8_t* at_;
  std::uint8_t* low_;
  std::uint8_t* high_;
};

/// From the start of the program on, where the processor lacks the instructions.
inline const bool avx_vnni_is_modelled = [] {
  unsigned a = 7, b, c = 1, d;  // CPUID: AVX-VNNI is bit 4 of leaf 7, part 1
  __asm__ volatile("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
  if ((a & 1u << 4) != 0) return false;
  struct sigaction action{};
  action.sa_flags = SA_SIGINFO | SA_NODEFER;
  action.sa_sigaction = [](int, siginfo_t*, void* context) {
    AvxVnni(static_cast<ucontext_t*>(context)->uc_mcontext).run();
  };
  ::sigaction(SIGILL, &action, nullptr);
  return true;
}();

}  // namespace test
