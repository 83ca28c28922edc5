// The state of a PTX machine: instructions, registers of a warp, blocks under way. A register is 32
// lanes side by side; predicates are masks of lanes.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "ptx/shared_memory.hpp"

namespace ptxrun {

using u8 = std::uint8_t;
using u16 = std::uint16_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;
using s8 = std::int8_t;
using s16 = std::int16_t;
using s32 = std::int32_t;
using s64 = std::int64_t;

inline constexpr u32 all_lanes = 0xffffffffu;

struct Warp;
struct Instruction;
using Handler = void (*)(Warp&, const Instruction&);

/// What the machine has to know of an instruction before it runs it.
enum class Flow : u8 {
  plain,      ///< of each lane for itself
  branch,     ///< goes to `target`
  leave,      ///< ends threads
  together,   ///< of all 32 lanes at once
  barrier,    ///< of all threads of the block
  give_turn,  ///< other warps go first
};

/// An opcode with all of its modifiers, and the kinds of its operands in the order of the text:
/// H, R, L a register or literal of 16, 32, 64 bits, P a predicate, A an address in 64 bits, S one
/// in 32 bits, I a number, T a label. `number` counts the forms.
struct Form {
  std::string name, operands;
  Handler run = nullptr;
  Flow flow = Flow::plain;
  int number = 0;
};

struct Instruction {
  const Form* form = nullptr;
  Handler run = nullptr;
  Flow flow = Flow::plain;
  bool negated = false;           // the guard
  u8 vector = 1;                  // elements of a load or store
  int guard = -1;                 // predicate
  int target = 0;                 // of a branch
  s64 offset = 0;                 // of the address
  std::array<u32, 14> operand{};  // first slots of registers, numbers of predicates, numbers
  int line = 0;                   // in the module's text
};

/// Literals and special registers have slots of their own.
struct Literal {
  u32 slot;
  u64 value;
  bool wide;
};
enum Special { tid_x, ctaid_x, ntid_x, nctaid_x, num_specials };

struct Entry {
  std::string name;
  std::size_t param_bytes = 0;
  std::vector<Instruction> code;
  std::vector<Literal> literals;
  u32 num_slots = 0, num_predicates = 0;
  std::vector<u32> false_predicates, true_predicates;  // literals
  std::array<int, num_specials> special_slot{-1, -1, -1, -1};
};

/// An asynchronous copy of 16 bytes to shared memory, of which `bytes` are read and the rest is
/// zero.
struct Copy {
  u32 target, bytes;
  const unsigned char* source;
};

struct Block {
  Block(const Entry& entry, int index, int grid, int threads, std::size_t shared_bytes);
  ~Block();
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  const Entry& entry;
  int index, grid, threads;
  SharedMemory shared;
  const unsigned char* params = nullptr;
  const void* last_atomic = nullptr;  // since the last fence
  std::vector<Warp> warps;
};

struct Warp {
  Block* block = nullptr;
  int index = 0;
  std::vector<u32> registers;
  std::vector<u32> predicates;
  u32 mask = 0;                // lanes that the instruction at hand is of
  u32 exited = 0, parked = 0;  // parked: at an instruction of all lanes, where others are missing
  std::array<int, 32> pc{};
  bool at_barrier = false;
  int barrier_line = 0;
  u32 meetings = 0;                                      // instructions of all lanes so far
  std::array<std::vector<Copy>, 32> open;                // issued
  std::array<std::deque<std::vector<Copy>>, 32> groups;  // committed, oldest first

  template <class V>
  V* reg(u32 slot) {
    return reinterpret_cast<V*>(registers.data() + std::size_t{slot} * 32);
  }
  SharedMemory::User thread(int lane) const {
    return SharedMemory::User::thread(index * 32 + lane, meetings);
  }
};

// --- instructions of each lane for itself
// --------------------------------------------------------------

template <class F>
void for_lanes(u32 mask, F&& f) {
  for (; mask != 0; mask &= mask - 1) f(std::countr_zero(mask));
}

/// All lanes are computed, and those that are on get the result.
template <class D, class F>
void write_lanes(Warp& w, u32 slot, F&& f) {
  D* d = w.reg<D>(slot);
  if (w.mask == all_lanes) {
    for (int l = 0; l < 32; ++l) d[l] = f(l);
    return;
  }
  D results[32];
  for (int l = 0; l < 32; ++l) results[l] = f(l);
  for (int l = 0; l < 32; ++l) d[l] = (w.mask >> l & 1) != 0 ? results[l] : d[l];
}
inline void write_predicate(Warp& w, u32 number, u32 bits) {
  u32& p = w.predicates[number];
  p = (p & ~w.mask) | (bits & w.mask);
}

template <class D, class A, class F>
void unary(Warp& w, const Instruction& i, F f) {
  const A* a = w.reg<A>(i.operand[1]);
  write_lanes<D>(w, i.operand[0], [=](int l) { return f(a[l]); });
}
template <class D, class A, class B, class F>
void binary(Warp& w, const Instruction& i, F f) {
  const A* a = w.reg<A>(i.operand[1]);
  const B* b = w.reg<B>(i.operand[2]);
  write_lanes<D>(w, i.operand[0], [=](int l) { return f(a[l], b[l]); });
}
template <class D, class A, class C, class F>
void ternary(Warp& w, const Instruction& i, F f) {
  const A* a = w.reg<A>(i.operand[1]);
  const A* b = w.reg<A>(i.operand[2]);
  const C* c = w.reg<C>(i.operand[3]);
  write_lanes<D>(w, i.operand[0], [=](int l) { return f(a[l], b[l], c[l]); });
}

}  // namespace ptxrun
