// Arithmetic of floats. Without .ftz subnormals are kept; results that are NaN are the canonical
// one.
#include "ptx/float.hpp"

#include <algorithm>

#include "ptx/forms.hpp"

namespace ptxrun {
namespace {

// The other one where one is NaN; +0 is greater than -0.
float maximum(float a, float b) {
  if (a != a) return canonical(b);
  if (b != b) return a;
  return a > b || (a == b && !std::signbit(a)) ? a : b;
}
float minimum(float a, float b) {
  return -maximum(-a, -b);
}

// |b| beyond 2^126: 0, and NaN for infinite a.
float quotient_approx(float a, float b) {
  const float size = std::fabs(b);
  if (size > 0x1p126f && size < INFINITY)
    return std::isfinite(a) ? std::copysign(0.0f, a) * std::copysign(1.0f, b) : canonical(NAN);
  return canonical(a / b);
}

// Within 2^-22: with CHUNKATTN_PTX_WORST as wrong as that, to either side.
float power_of_2(float x) {
  static const double wrong = std::getenv("CHUNKATTN_PTX_WORST") != nullptr ? 0x1p-22 : 0;
  const double exact = std::exp2(static_cast<double>(flushed(x)));
  return canonical(flushed(
      static_cast<float>(exact * (1 + ((std::bit_cast<u32>(x) & 1) != 0 ? wrong : -wrong)))));
}

#define PTX_FLOATS(E) PTX_BINARY(float, float, float, canonical(E))

}  // namespace

void add_float_forms(Forms& f) {
  for (const char* rounding : {"", ".rn"}) {
    f.push_back({std::string("add") + rounding + ".f32", "RRR", PTX_FLOATS(a + b)});
    f.push_back({std::string("sub") + rounding + ".f32", "RRR", PTX_FLOATS(a - b)});
    f.push_back({std::string("mul") + rounding + ".f32", "RRR", PTX_FLOATS(a * b)});
  }
  f.push_back(
      {"fma.rn.f32", "RRRR", PTX_TERNARY(float, float, float, canonical(std::fma(a, b, c)))});
  f.push_back({"max.f32", "RRR", PTX_BINARY(float, float, float, maximum(a, b))});
  f.push_back({"min.f32", "RRR", PTX_BINARY(float, float, float, minimum(a, b))});
  f.push_back({"neg.f32", "RR", PTX_UNARY(u32, u32, a ^ 0x80000000u)});
  f.push_back({"abs.f32", "RR", PTX_UNARY(u32, u32, a & 0x7fffffffu)});
  f.push_back({"rcp.rn.f32", "RR", PTX_UNARY(float, float, canonical(1.0f / a))});
  f.push_back({"div.rn.f32", "RRR", PTX_FLOATS(a / b)});
  f.push_back({"div.approx.f32", "RRR", PTX_BINARY(float, float, float, quotient_approx(a, b))});
  f.push_back({"ex2.approx.ftz.f32", "RR", PTX_UNARY(float, float, power_of_2(a))});
  f.push_back({"setp.eq.f32", "PRR", PTX_COMPARE(float, a == b)});
  f.push_back({"setp.ne.f32", "PRR", PTX_COMPARE(float, a<b || a> b)});
  f.push_back({"setp.lt.f32", "PRR", PTX_COMPARE(float, a < b)});
  f.push_back({"setp.le.f32", "PRR", PTX_COMPARE(float, a <= b)});
  f.push_back({"setp.gt.f32", "PRR", PTX_COMPARE(float, a > b)});
  f.push_back({"setp.ge.f32", "PRR", PTX_COMPARE(float, a >= b)});
  // True also where one is NaN.
  f.push_back({"setp.equ.f32", "PRR", PTX_COMPARE(float, !(a < b || a > b))});
  f.push_back({"setp.neu.f32", "PRR", PTX_COMPARE(float, !(a == b))});
  f.push_back({"setp.ltu.f32", "PRR", PTX_COMPARE(float, !(a >= b))});
  f.push_back({"setp.leu.f32", "PRR", PTX_COMPARE(float, !(a > b))});
  f.push_back({"setp.gtu.f32", "PRR", PTX_COMPARE(float, !(a <= b))});
  f.push_back({"setp.geu.f32", "PRR", PTX_COMPARE(float, !(a < b))});
  f.push_back({"setp.nan.f32", "PRR", PTX_COMPARE(float, a != a || b != b)});
  f.push_back({"setp.num.f32", "PRR", PTX_COMPARE(float, a == a && b == b)});
}

}  // namespace ptxrun
