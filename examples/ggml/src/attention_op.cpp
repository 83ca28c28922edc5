#include "attention_op.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels.hpp"
#include "mask_table.hpp"

namespace plugin {
namespace {

using namespace chunkattn;

struct Parameters {
  float scale, max_bias, soft_cap;
};
Parameters parameters_of(const ggml_tensor& node) noexcept {
  Parameters parameters;
  std::memcpy(&parameters, node.op_params, sizeof parameters);
  return parameters;
}

bool has_type_of_kernels(const ggml_tensor& tensor) noexcept {
  return tensor.type == GGML_TYPE_F32 || tensor.type == GGML_TYPE_F16 ||
         tensor.type == GGML_TYPE_BF16;
}

// Whether its rows are dense, and lie whole elements apart.
bool has_dense_rows(const ggml_tensor& tensor) noexcept {
  const std::size_t size = ggml_type_size(tensor.type);
  return tensor.nb[0] == size && tensor.nb[1] % size == 0 && tensor.nb[2] % size == 0 &&
         tensor.nb[3] % size == 0;
}

std::int64_t stride(const ggml_tensor& tensor, int dimension) noexcept {
  return static_cast<std::int64_t>(tensor.nb[dimension] / ggml_type_size(tensor.type));
}

// K [head_dim, cells, heads, streams] and V likewise.
template <class T>
AnyKvView kv_view(const ggml_tensor& k, const ggml_tensor& v) {
  KvView<T> view;
  view.k = static_cast<T*>(k.data);
  view.v = static_cast<T*>(v.data);
  view.num_chunks = static_cast<std::int32_t>(k.ne[3]);
  view.num_kv_heads = static_cast<std::int32_t>(k.ne[2]);
  view.head_dim = static_cast<std::int32_t>(k.ne[0]);
  view.chunk_size = static_cast<std::int32_t>(k.ne[1]);
  view.stride_token = stride(k, 1);
  view.stride_head = stride(k, 2);
  view.stride_chunk = stride(k, 3);
  view.value_dim = static_cast<std::int32_t>(v.ne[0]);
  view.v_stride_token = stride(v, 1);
  view.v_stride_head = stride(v, 2);
  view.v_stride_chunk = stride(v, 3);
  return view;
}
AnyKvView kv_view(const ggml_tensor& k, const ggml_tensor& v) {
  if (k.type == GGML_TYPE_F32) return kv_view<float>(k, v);
  return k.type == GGML_TYPE_F16 ? kv_view<half>(k, v) : kv_view<bfloat16>(k, v);
}

double seconds() noexcept {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

const char* reason_to_decline(const ggml_tensor& node) noexcept {
  const ggml_tensor &q = *node.src[0], &k = *node.src[1], &v = *node.src[2];
  const ggml_tensor *mask = node.src[3], *sinks = node.src[4];
  const Parameters parameters = parameters_of(node);
  const HeadSize size(static_cast<int>(k.ne[0]), static_cast<int>(v.ne[0]));
  if (!size_with_kernels(size)) return "no kernels were compiled for heads of its size";
  if (k.type != v.type || !has_type_of_kernels(k))
    return "K and V are not of one type of F32, F16 and BF16";
  if (q.type != GGML_TYPE_F32 || node.type != GGML_TYPE_F32) return "queries or result are not F32";
  if (!has_dense_rows(q) || !has_dense_rows(k) || !has_dense_rows(v) || !ggml_is_contiguous(&node))
    return "its rows are not dense";
  if (k.ne[1] != v.ne[1] || k.ne[2] != v.ne[2] || k.ne[3] != v.ne[3] || q.ne[3] != k.ne[3] ||
      q.ne[2] % k.ne[2] != 0)
    return "K, V and queries differ in heads or streams";
  if (!std::isfinite(parameters.scale) || parameters.scale == 0) return "its scale is 0";
  constexpr std::int64_t most = std::numeric_limits<std::int32_t>::max();
  if (q.ne[1] < 1 || k.ne[1] < 1 || q.ne[1] * q.ne[3] > most / k.ne[1])
    return "it has no rows, or too many";
  if (mask != nullptr && (mask->type != GGML_TYPE_F16 || !has_dense_rows(*mask) ||
                          mask->ne[2] != 1 || (mask->ne[3] != 1 && mask->ne[3] != q.ne[3]) ||
                          mask->ne[0] < k.ne[1] || mask->ne[1] < q.ne[1]))
    return "its mask is not F16 for all heads";
  if (mask == nullptr && parameters.max_bias > 0) return "it has a bias without a mask";
  if (sinks != nullptr && (sinks->type != GGML_TYPE_F32 || !ggml_is_contiguous(sinks)))
    return "its sinks are not F32";
  return nullptr;
}

void AttentionOp::run(const ggml_tensor& node) {
  const double start = seconds();
  const MaskForest& forest = forest_of(node);
  const double planned = seconds();

  const ggml_tensor& q = *node.src[0];
  const HeadSize own(static_cast<int>(q.ne[0]), static_cast<int>(node.ne[0]));
  const HeadSize size = *size_with_kernels(own);
  const ggml_tensor& k = padded_k_(*node.src[1], size.head_dim, workers_);
  const ggml_tensor& v = padded_v_(*node.src[2], size.value_dim, workers_);
  const auto lines = static_cast<std::size_t>(q.ne[1] * q.ne[2] * q.ne[3]);
  const auto elements = lines * static_cast<std::size_t>(size.value_dim);
  auto* out = static_cast<float*>(node.data);
  if (size.value_dim != own.value_dim) {
    padded_out_.resize(elements);
    out = padded_out_.data();
  }
  AnyAttention::RunOptions options;
  options.variant = variant_of(node, forest);
  attention_for(size, parameters_of(node).scale)
      .run(kv_view(k, v), LiveView::unchecked(forest.plan()),
           ConstElements(queries_of(q, size.head_dim), ElementType::float32,
                         lines * static_cast<std::size_t>(size.head_dim)),
           Elements(out, ElementType::float32, elements), options);
  if (size.value_dim != own.value_dim)
    for (std::size_t line = 0; line < lines; ++line)
      std::copy_n(out + line * static_cast<std::size_t>(size.value_dim), own.value_dim,
                  static_cast<float*>(node.data) + line * static_cast<std::size_t>(own.value_dim));

  ++totals_.calls;
  totals_.plan_s += planned - start;
  totals_.attention_s += seconds() - planned;
}

// The plan of the node's mask: the same as in another layer, or a new one.
const MaskForest& AttentionOp::forest_of(const ggml_tensor& node) {
  const ggml_tensor &q = *node.src[0], &k = *node.src[1];
  const ggml_tensor* const mask = node.src[3];
  MaskView view;
  view.streams = static_cast<int>(q.ne[3]);
  view.rows = static_cast<int>(q.ne[1]);
  view.cells = static_cast<int>(k.ne[1]);
  if (mask != nullptr) {
    view.bits = static_cast<const std::uint16_t*>(mask->data);
    view.row_stride = stride(*mask, 1);
    view.stream_stride = mask->ne[3] == 1 ? 0 : stride(*mask, 3);
  }
  const auto end = known_.begin() + static_cast<std::ptrdiff_t>(num_known_);
  auto known = std::find_if(known_.begin(), end, [&](const Known& each) {
    return each.mask == mask && each.view == view;
  });
  if (known != end) return known->forest;
  constexpr std::size_t most = 4;
  if (num_known_ == most) num_known_ = 0;
  if (num_known_ == known_.size()) known_.emplace_back();
  known = known_.begin() + static_cast<std::ptrdiff_t>(num_known_);
  known->mask = mask;
  known->view = view;
  known->forest.build(view);
  ++num_known_;  // not before, in case memory is short
  ++totals_.plans;
  if (known->forest.has_table()) ++totals_.tables;
  return known->forest;
}

// Queries as [streams][rows][heads][head_dim]: where they are, if they lie so, else copies, with
// zeros after those of shorter heads.
const float* AttentionOp::queries_of(const ggml_tensor& q, int head_dim) {
  const std::int64_t dim = q.ne[0], rows = q.ne[1], heads = q.ne[2], streams = q.ne[3];
  const auto* const data = static_cast<const float*>(q.data);
  const bool fits = dim == head_dim && (heads == 1 || stride(q, 2) == dim) &&
                    (rows == 1 || stride(q, 1) == heads * dim) &&
                    (streams == 1 || stride(q, 3) == rows * heads * dim);
  if (fits) return data;
  queries_.resize(static_cast<std::size_t>(head_dim * rows * heads * streams));
  float* to = queries_.data();
  for (std::int64_t s = 0; s < streams; ++s)
    for (std::int64_t r = 0; r < rows; ++r)
      for (std::int64_t h = 0; h < heads; ++h, to += head_dim) {
        std::copy_n(data + s * stride(q, 3) + r * stride(q, 1) + h * stride(q, 2), dim, to);
        std::fill(to + dim, to + head_dim, 0.0f);
      }
  return queries_.data();
}

AnyVariant AttentionOp::variant_of(const ggml_tensor& node, const MaskForest& forest) {
  const Parameters parameters = parameters_of(node);
  const auto heads = static_cast<std::size_t>(node.src[0]->ne[2]);
  const auto* const given =
      node.src[4] == nullptr ? nullptr : static_cast<const float*>(node.src[4]->data);
  const bool caps = parameters.soft_cap != 0;
  sinks_.assign(heads, -std::numeric_limits<float>::infinity());
  if (given != nullptr) sinks_.assign(given, given + heads);
  if (!forest.has_table()) {
    if (caps) return combine(SoftCap{parameters.soft_cap}, Sinks{sinks_});
    return given == nullptr ? AnyVariant(NoVariant{}) : AnyVariant(Sinks{sinks_});
  }

  slopes_.assign(heads, 1.0f);
  if (parameters.max_bias > 0) {
    // ALiBi: powers of one number for the first heads, of its square root for the others.
    const std::size_t whole = std::size_t{1}
                              << static_cast<int>(std::log2(static_cast<double>(heads)));
    const float first = std::pow(2.0f, -parameters.max_bias / static_cast<float>(whole));
    const float others = std::pow(2.0f, -parameters.max_bias / 2 / static_cast<float>(whole));
    for (std::size_t h = 0; h < heads; ++h)
      slopes_[h] = h < whole ? std::pow(first, static_cast<float>(h + 1))
                             : std::pow(others, static_cast<float>(2 * (h - whole) + 1));
  }
  const MaskTable table{forest.table().data(), forest.plan().chunk_size, slopes_.data(),
                        sinks_.data()};
  if (caps) return combine(SoftCap{parameters.soft_cap}, table);
  return table;
}

AnyAttention& AttentionOp::attention_for(HeadSize size, float scale) {
  auto& attention = attentions_[{size.head_dim, size.value_dim, scale}];
  if (!attention) {
    CpuOptions options;
    options.sm_scale = scale;
    attention = make_attention(size, workers_, options);
  }
  return *attention;
}

}  // namespace plugin
