// Integers, bits, comparisons, selection, predicates. All wrap around; shifts by more than the
// width give what is shifted in.
#include <algorithm>
#include <cstdlib>

#include "ptx/forms.hpp"

namespace ptxrun {
namespace {

// What a division by zero gives is not defined; devices give all ones.
template <class V>
V quotient(V a, V b) {
  if (b == 0) return static_cast<V>(~V{0});
  if (std::is_signed_v<V> && b == static_cast<V>(-1))
    return static_cast<V>(u64{0} - static_cast<u64>(a));
  return static_cast<V>(a / b);
}
template <class V>
V remainder_of(V a, V b) {
  if (b == 0) return a;
  if (std::is_signed_v<V> && b == static_cast<V>(-1)) return 0;
  return static_cast<V>(a % b);
}

template <class V>
void select(Warp& w, const Instruction& i) {
  const V* a = w.reg<V>(i.operand[1]);
  const V* b = w.reg<V>(i.operand[2]);
  const u32 p = w.predicates[i.operand[3]];
  write_lanes<V>(w, i.operand[0], [=](int l) { return (p >> l & 1) != 0 ? a[l] : b[l]; });
}

template <class F>
void logic(Warp& w, const Instruction& i, F f) {
  write_predicate(w, i.operand[0], f(w.predicates[i.operand[1]], w.predicates[i.operand[2]]));
}
#define PTX_LOGIC(E)                                              \
  [](Warp& w, const Instruction& i) {                             \
    logic(w, i, [](u32 a, [[maybe_unused]] u32 b) { return E; }); \
  }

template <class V>
void add_comparisons(Forms& f, const std::string& type, const std::string& operands) {
  f.push_back({"setp.eq." + type, operands, PTX_COMPARE(V, a == b)});
  f.push_back({"setp.ne." + type, operands, PTX_COMPARE(V, a != b)});
  if (type[0] == 'b') return;  // bits have no order
  f.push_back({"setp.lt." + type, operands, PTX_COMPARE(V, a < b)});
  f.push_back({"setp.le." + type, operands, PTX_COMPARE(V, a <= b)});
  f.push_back({"setp.gt." + type, operands, PTX_COMPARE(V, a > b)});
  f.push_back({"setp.ge." + type, operands, PTX_COMPARE(V, a >= b)});
}

// Of V, signed or not, in registers of the kind `k`.
template <class V>
void add_arithmetic(Forms& f, const std::string& type, char k) {
  using U = std::make_unsigned_t<V>;
  const std::string two(2, k), three(3, k), four(4, k);
  f.push_back({"add." + type, three, PTX_BINARY(U, U, U, static_cast<U>(a + b))});
  f.push_back({"sub." + type, three, PTX_BINARY(U, U, U, static_cast<U>(a - b))});
  f.push_back({"min." + type, three, PTX_BINARY(V, V, V, std::min(a, b))});
  f.push_back({"max." + type, three, PTX_BINARY(V, V, V, std::max(a, b))});
  f.push_back({"shr." + type, two + "R",
               PTX_BINARY(V, V, u32,
                          static_cast<V>(b < sizeof(V) * 8              ? a >> b
                                         : std::is_signed_v<V> && a < 0 ? -1
                                                                        : 0))});
  if (sizeof(V) < 4) return;
  f.push_back({"mul.lo." + type, three, PTX_BINARY(U, U, U, static_cast<U>(a * b))});
  f.push_back({"mad.lo." + type, four, PTX_TERNARY(U, U, U, static_cast<U>(a * b + c))});
  f.push_back({"div." + type, three, PTX_BINARY(V, V, V, quotient(a, b))});
  f.push_back({"rem." + type, three, PTX_BINARY(V, V, V, remainder_of(a, b))});
}

template <class V>
void add_bits(Forms& f, const std::string& type, char k) {
  const std::string two(2, k), three(3, k);
  f.push_back({"and." + type, three, PTX_BINARY(V, V, V, static_cast<V>(a & b))});
  f.push_back({"or." + type, three, PTX_BINARY(V, V, V, static_cast<V>(a | b))});
  f.push_back({"xor." + type, three, PTX_BINARY(V, V, V, static_cast<V>(a ^ b))});
  f.push_back({"not." + type, two, PTX_UNARY(V, V, static_cast<V>(~a))});
  f.push_back({"shl." + type, two + "R",
               PTX_BINARY(V, V, u32, static_cast<V>(b < sizeof(V) * 8 ? a << b : 0))});
}

template <class V>
void add_moves(Forms& f, const std::string& type, char k) {
  f.push_back({"mov." + type, std::string(2, k), PTX_UNARY(V, V, a)});
  f.push_back({"selp." + type, std::string(3, k) + "P", select<V>});
}

}  // namespace

void add_integer_forms(Forms& f) {
  add_arithmetic<s16>(f, "s16", 'H');
  add_arithmetic<u16>(f, "u16", 'H');
  add_arithmetic<s32>(f, "s32", 'R');
  add_arithmetic<u32>(f, "u32", 'R');
  add_arithmetic<s64>(f, "s64", 'L');
  add_arithmetic<u64>(f, "u64", 'L');
  f.push_back({"mul.hi.s32", "RRR", PTX_BINARY(s32, s32, s32, static_cast<s32>(s64{a} * b >> 32))});
  f.push_back({"mul.hi.u32", "RRR", PTX_BINARY(u32, u32, u32, static_cast<u32>(u64{a} * b >> 32))});
  f.push_back({"mul.wide.s32", "LRR", PTX_BINARY(s64, s32, s32, s64{a} * b)});
  f.push_back({"mul.wide.u32", "LRR", PTX_BINARY(u64, u32, u32, u64{a} * b)});
  f.push_back(
      {"mad.wide.s32", "LRRL", PTX_TERNARY(u64, s32, u64, static_cast<u64>(s64{a} * b) + c)});
  f.push_back({"mad.wide.u32", "LRRL", PTX_TERNARY(u64, u32, u64, u64{a} * b + c)});
  f.push_back({"neg.s32", "RR", PTX_UNARY(u32, u32, 0u - a)});
  f.push_back({"neg.s64", "LL", PTX_UNARY(u64, u64, u64{0} - a)});
  f.push_back({"abs.s32", "RR",
               PTX_UNARY(u32, s32, a < 0 ? 0u - static_cast<u32>(a) : static_cast<u32>(a))});
  add_bits<u16>(f, "b16", 'H');
  add_bits<u32>(f, "b32", 'R');
  add_bits<u64>(f, "b64", 'L');
  add_comparisons<s16>(f, "s16", "PHH");
  add_comparisons<u16>(f, "u16", "PHH");
  add_comparisons<s32>(f, "s32", "PRR");
  add_comparisons<u32>(f, "u32", "PRR");
  add_comparisons<u32>(f, "b32", "PRR");
  add_comparisons<s64>(f, "s64", "PLL");
  add_comparisons<u64>(f, "u64", "PLL");
  for (const char* type : {"b16", "u16", "s16"}) add_moves<u16>(f, type, 'H');
  for (const char* type : {"b32", "u32", "s32", "f32"}) add_moves<u32>(f, type, 'R');
  for (const char* type : {"b64", "u64", "s64"}) add_moves<u64>(f, type, 'L');
  f.push_back({"and.pred", "PPP", PTX_LOGIC(a & b)});
  f.push_back({"or.pred", "PPP", PTX_LOGIC(a | b)});
  f.push_back({"xor.pred", "PPP", PTX_LOGIC(a ^ b)});
  f.push_back({"not.pred", "PP", PTX_LOGIC(~a)});
  f.push_back({"mov.pred", "PP", PTX_LOGIC(a)});
}

}  // namespace ptxrun
