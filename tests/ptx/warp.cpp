// What all lanes of a warp do at once, what threads wait in, and where they go.
#include "ptx/float.hpp"
#include "ptx/forms.hpp"
#include "ptx/run.hpp"

namespace ptxrun {
namespace {

// Places of fragments: PTX ISA, "Matrix fragments for mma.m16n8k16 with floating point type". Lane
// l has of d and c rows l / 4 and l / 4 + 8, of b column l / 4.
template <float (*to_float)(u32)>
void multiply(Warp& w, const Instruction& i) {  // d[4], a[4], b[2], c[4]
  ++statistics().mma;
  double a[16][16], b[16][8];
  float c[16][8];
  for (int l = 0; l < 32; ++l) {
    const int row = l / 4, column = l % 4 * 2;
    for (int r = 0; r < 4; ++r) {
      const u32 pair = w.reg<u32>(i.operand[static_cast<std::size_t>(4 + r)])[l];
      double* const at = &a[row + r % 2 * 8][column + r / 2 * 8];
      at[0] = to_float(pair & 0xffff);
      at[1] = to_float(pair >> 16);
      c[row + r / 2 * 8][column + r % 2] =
          w.reg<float>(i.operand[static_cast<std::size_t>(10 + r)])[l];
    }
    for (int r = 0; r < 2; ++r) {
      const u32 pair = w.reg<u32>(i.operand[static_cast<std::size_t>(8 + r)])[l];
      b[column + r * 8][row] = to_float(pair & 0xffff);
      b[column + r * 8 + 1][row] = to_float(pair >> 16);
    }
  }
  for (int m = 0; m < 16; ++m)
    for (int half = 0; half < 16; half += 8) {  // eight products at a time
      double sum[8];
      for (int n = 0; n < 8; ++n) sum[n] = c[m][n];
      for (int k = half; k < half + 8; ++k)
        for (int n = 0; n < 8; ++n) sum[n] += a[m][k] * b[k][n];
      for (int n = 0; n < 8; ++n) c[m][n] = canonical(towards_zero(sum[n]));
    }
  for (int l = 0; l < 32; ++l)
    for (int r = 0; r < 4; ++r)
      w.reg<float>(i.operand[static_cast<std::size_t>(r)])[l] =
          c[l / 4 + r / 2 * 8][l % 4 * 2 + r % 2];
}

// Lane l has the address of row l % 8 of matrix l / 8, and gets two elements of row l / 4 of each,
// or of column l / 4.
template <bool Transposed>
void load_matrices(Warp& w, const Instruction& i) {
  const u32* rows = w.reg<u32>(i.operand[4]);
  u16 x[4][8][8];
  for (int l = 0; l < 32; ++l)
    std::memcpy(x[l / 8][l % 8],
                w.block->shared.read(rows[l] + static_cast<u32>(i.offset), 16,
                                     SharedMemory::User::lanes(w.index, w.meetings)),
                16);
  for (int m = 0; m < 4; ++m)
    for (int l = 0; l < 32; ++l) {
      const int r = l / 4, c = l % 4 * 2;
      w.reg<u32>(i.operand[static_cast<std::size_t>(m)])[l] =
          Transposed ? x[m][c][r] | u32{x[m][c + 1][r]} << 16
                     : x[m][r][c] | u32{x[m][r][c + 1]} << 16;
    }
}

void exchange(Warp& w, const Instruction& i) {  // d|p, a, lane mask, clamp and segment, members
  const u32* a = w.reg<u32>(i.operand[2]);
  u32 result[32], valid = 0;
  for (int l = 0; l < 32; ++l) {
    const u32 lane = static_cast<u32>(l), distance = w.reg<u32>(i.operand[3])[l] & 31,
              limits = w.reg<u32>(i.operand[4])[l];
    if (w.reg<u32>(i.operand[5])[l] != all_lanes) throw Fault("shfl.sync: of some lanes");
    const u32 segment = limits >> 8 & 31, last = (lane & segment) | (limits & 31 & ~segment);
    const u32 from = lane ^ distance;
    valid |= u32{from <= last} << l;
    result[l] = a[from <= last ? from : lane];
  }
  std::memcpy(w.reg<u32>(i.operand[0]), result, sizeof result);
  w.predicates[i.operand[1]] = valid;
}

void vote_any(Warp& w, const Instruction& i) {  // p, q, members
  for (int l = 0; l < 32; ++l)
    if (w.reg<u32>(i.operand[2])[l] != all_lanes) throw Fault("vote.sync: of some lanes");
  w.predicates[i.operand[0]] = w.predicates[i.operand[1]] != 0 ? all_lanes : 0;
}

void join(Warp& w, const Instruction& i) {  // members
  for (int l = 0; l < 32; ++l)
    if (w.reg<u32>(i.operand[0])[l] != all_lanes) throw Fault("bar.warp.sync: of some lanes");
}

}  // namespace

void add_warp_forms(Forms& f) {
  const std::string fragments(14, 'R');
  f.push_back({"mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", fragments, multiply<from_half>,
               Flow::together});
  f.push_back({"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", fragments,
               multiply<from_bfloat16>, Flow::together});
  f.push_back(
      {"ldmatrix.sync.aligned.m8n8.x4.shared.b16", "RRRRS", load_matrices<false>, Flow::together});
  f.push_back({"ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16", "RRRRS", load_matrices<true>,
               Flow::together});
  f.push_back({"shfl.sync.bfly.b32", "RPRRRR", exchange, Flow::together});
  f.push_back({"vote.sync.any.pred", "PPR", vote_any, Flow::together});
  f.push_back({"bar.warp.sync", "R", join, Flow::together});
  f.push_back({"bar.sync", "I", nullptr, Flow::barrier});
  f.push_back({"nanosleep.u32", "R", nullptr, Flow::give_turn});
  f.push_back({"bra", "T", nullptr, Flow::branch});
  f.push_back({"bra.uni", "T", nullptr, Flow::branch});
  f.push_back({"ret", "", nullptr, Flow::leave});
}

}  // namespace ptxrun
