// What docs/variants.md takes for granted: a layer, a plan's view, and an object that computes.
#include <chunkattn/chunkattn.hpp>
#include <chunkattn/debug/reference.hpp>
#include <cstdio>
#include <vector>

using namespace chunkattn;

inline std::vector<float> k(64, 0.5f), v(k), q(16, 0.5f), out(16), lse(1), sinks(1);
inline ChunkAttention<Cpu, 16> attention(1);
inline const KvView<float> layer = make_kv_view(k.data(), v.data(), {1, 1, 4, 16});
inline const PlanView::Segment segment{0, 1, 0, 1, 0, 4, -1, 1};
inline const Piece piece{0, 0, 4, 0};
inline const std::int32_t token = 0, kv_len = 4, deepest = 0;
inline const LiveView view = [] {
  PlanView plan;
  plan.num_rows = plan.num_segments = plan.num_pieces = 1;
  plan.chunk_size = 4;
  plan.segments = &segment;
  plan.pieces = &piece;
  plan.row_token = &token;
  plan.row_kv_len = &kv_len;
  plan.row_segment = &deepest;
  return LiveView::unchecked(plan);
}();
