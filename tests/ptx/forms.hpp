// The forms of instructions that the machine knows, by family. A form is an opcode with all of its
// modifiers; what is not here is refused by name. Meanings: PTX ISA 9.0.
#pragma once

#include <string>
#include <vector>

#include "ptx/machine.hpp"

namespace ptxrun {

using Forms = std::vector<Form>;

void add_integer_forms(Forms& forms);
void add_float_forms(Forms& forms);
void add_conversions(Forms& forms);
void add_memory_forms(Forms& forms);
void add_warp_forms(Forms& forms);

/// The form of this name, of which loads and stores have one for each width of the register: H, R,
/// L. Null: none.
const Form* find_form(const std::string& name, char width);

/// How many there are.
int num_forms();

#define PTX_UNARY(D, A, E) \
  [](Warp& w, const Instruction& i) { unary<D, A>(w, i, [](A a) -> D { return E; }); }
#define PTX_BINARY(D, A, B, E) \
  [](Warp& w, const Instruction& i) { binary<D, A, B>(w, i, [](A a, B b) -> D { return E; }); }
#define PTX_TERNARY(D, A, C, E)                                   \
  [](Warp& w, const Instruction& i) {                             \
    ternary<D, A, C>(w, i, [](A a, A b, C c) -> D { return E; }); \
  }

template <class A, class F>
void compare(Warp& w, const Instruction& i, F f) {
  const A* a = w.reg<A>(i.operand[1]);
  const A* b = w.reg<A>(i.operand[2]);
  u32 bits = 0;
  for (int l = 0; l < 32; ++l) bits |= u32{f(a[l], b[l])} << l;
  write_predicate(w, i.operand[0], bits);
}
#define PTX_COMPARE(A, E) \
  [](Warp& w, const Instruction& i) { compare<A>(w, i, [](A a, A b) -> bool { return E; }); }

}  // namespace ptxrun
