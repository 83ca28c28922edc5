#include "padded_heads.hpp"

#include <cstring>

#include "kernels.hpp"

namespace plugin {

using chunkattn::HeadSize;

std::optional<HeadSize> size_with_kernels(HeadSize size) noexcept {
  const auto length = [](HeadSize each) { return each.head_dim + each.value_dim; };
  std::optional<HeadSize> best;
  for (const HeadSize& each : head_sizes()) {
    const bool fits = each.head_dim >= size.head_dim && each.value_dim >= size.value_dim &&
                      length(each) <= 2 * length(size);
    if (fits && (!best || length(each) < length(*best))) best = each;
  }
  return best;
}

const ggml_tensor& PaddedHeads::operator()(const ggml_tensor& tensor, int dim, Workers& workers) {
  if (tensor.ne[0] == dim) return tensor;
  copy_ = tensor;
  copy_.ne[0] = dim;
  for (int i = 1; i < 4; ++i)
    copy_.nb[i] = copy_.nb[i - 1] * static_cast<std::size_t>(copy_.ne[i - 1]);
  const std::size_t bytes = copy_.nb[3] * static_cast<std::size_t>(copy_.ne[3]);
  if (memory_.size() < bytes) memory_.resize(bytes);
  copy_.data = memory_.data();

  const std::size_t known = tensor.nb[0] * static_cast<std::size_t>(tensor.ne[0]);
  const auto heads = static_cast<int>(tensor.ne[2] * tensor.ne[3]);
  workers.parallel_for(heads, [&](int at) {
    const auto head = static_cast<std::size_t>(at % tensor.ne[2]);
    const auto stream = static_cast<std::size_t>(at / tensor.ne[2]);
    const char* from =
        static_cast<const char*>(tensor.data) + stream * tensor.nb[3] + head * tensor.nb[2];
    char* to = memory_.data() + stream * copy_.nb[3] + head * copy_.nb[2];
    for (std::int64_t token = 0; token < tensor.ne[1]; ++token) {
      std::memcpy(to, from, known);
      std::memset(to + known, 0, copy_.nb[1] - known);
      from += tensor.nb[1];
      to += copy_.nb[1];
    }
  });
  return copy_;
}

}  // namespace plugin
