// Conversions: cvt and cvta.
#include "ptx/float.hpp"
#include "ptx/forms.hpp"

namespace ptxrun {
namespace {

// Saturates; NaN is 0.
s32 integer_of(float x) {
  if (x != x) return 0;
  if (x >= 0x1p31f) return 0x7fffffff;
  return x <= -0x1p31f ? static_cast<s32>(0x80000000u) : static_cast<s32>(x);
}

}  // namespace

void add_conversions(Forms& f) {
  f.push_back({"cvta.to.global.u64", "LL", PTX_UNARY(u64, u64, a)});
  f.push_back({"cvt.s64.s32", "LR", PTX_UNARY(s64, s32, s64{a})});
  f.push_back({"cvt.u64.u32", "LR", PTX_UNARY(u64, u32, u64{a})});
  f.push_back({"cvt.u32.u64", "RL", PTX_UNARY(u32, u64, static_cast<u32>(a))});
  f.push_back({"cvt.u32.u16", "RH", PTX_UNARY(u32, u16, u32{a})});
  f.push_back({"cvt.s32.s16", "RH", PTX_UNARY(s32, s16, s32{a})});
  f.push_back({"cvt.u16.u32", "HR", PTX_UNARY(u16, u32, static_cast<u16>(a))});
  f.push_back({"cvt.s16.s8", "HH", PTX_UNARY(s16, u16, static_cast<s16>(static_cast<s8>(a)))});
  f.push_back({"cvt.rn.f32.s16", "RH", PTX_UNARY(float, s16, static_cast<float>(a))});
  f.push_back({"cvt.rn.f32.u16", "RH", PTX_UNARY(float, u16, static_cast<float>(a))});
  f.push_back({"cvt.rn.f32.s32", "RR", PTX_UNARY(float, s32, static_cast<float>(a))});
  f.push_back({"cvt.rn.f32.u32", "RR", PTX_UNARY(float, u32, static_cast<float>(a))});
  f.push_back({"cvt.rzi.s32.f32", "RR", PTX_UNARY(s32, float, integer_of(std::trunc(a)))});
  f.push_back({"cvt.rni.s32.f32", "RR", PTX_UNARY(s32, float, integer_of(std::nearbyint(a)))});
  f.push_back({"cvt.rni.f32.f32", "RR", PTX_UNARY(float, float, canonical(std::nearbyint(a)))});
  f.push_back({"cvt.rzi.f32.f32", "RR", PTX_UNARY(float, float, canonical(std::trunc(a)))});
  f.push_back({"cvt.rmi.f32.f32", "RR", PTX_UNARY(float, float, canonical(std::floor(a)))});
  // The first source becomes the upper half.
  f.push_back(
      {"cvt.rn.f16x2.f32", "RRR", PTX_BINARY(u32, float, float, half_of(a) << 16 | half_of(b))});
  f.push_back({"cvt.rn.bf16x2.f32", "RRR",
               PTX_BINARY(u32, float, float, bfloat16_of(a) << 16 | bfloat16_of(b))});
}

}  // namespace ptxrun
