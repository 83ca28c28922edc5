// See pair_step.hpp. CHUNKATTN_BENCH_PLAIN: the build without -march, of the usual head_dim alone,
// because it contains every instruction set's kernels.
#include "bench/pair_step.hpp"

#include <algorithm>
#include <vector>

#include "chunkattn/chunk_attention.hpp"

namespace bench {
namespace {

int num_rows(const chunkattn::PlanView& plan) {
  return plan.num_rows;
}

template <class T, int HeadDim, class Variant>
class AttentionStep : public Step {
 public:
  AttentionStep(const StepCase& which, const Variant& variant, chunkattn::ThreadPool& pool,
                std::size_t cold_bytes)
      : planned_(which.batch, which.share), attention_(pool, which.options), variant_(variant) {
    const auto work = planned_.work(which.window);
    const double token_bytes =
        2.0 * HeadDim * sizeof(T) + (std::is_same_v<T, std::int8_t> ? 2.0 * sizeof(float) : 0.0);
    const double kv_bytes = work.tokens * which.num_kv_heads * token_bytes;
    q_.resize(static_cast<std::size_t>(num_rows(planned_.view())) *
              static_cast<std::size_t>(which.num_qo_heads) * HeadDim);
    out_.resize(q_.size());
    fill_random(q_.data(), q_.size(), 1);
    if (which.bf16_queries)
      for (const float x : q_) q_bf16_.push_back(chunkattn::from_float<chunkattn::bfloat16>(x));
    flops = work.pairs * which.num_qo_heads * 4.0 * HeadDim;
    bytes = kv_bytes + 2.0 * static_cast<double>(q_.size() * sizeof(float));
    const double wanted = which.cold ? static_cast<double>(cold_bytes) / kv_bytes : 0.0;
    const int layers = std::clamp(static_cast<int>(wanted) + 1, 1, 512);
    cache_.emplace(planned_.tree(), chunkattn::KvCacheOptions{layers, which.num_kv_heads, HeadDim});
    for (int l = 0; l < layers; ++l) layers_.push_back(cache_->layer(l));
    pool.parallel_for(layers, [&](int l) {
      fill_layer(layers_[static_cast<std::size_t>(l)], static_cast<std::uint64_t>(l));
    });
    // Where memory is virtual, the first pass over fresh pages is slow.
    for (int l = 0; l < layers; ++l) AttentionStep::run();
  }

  void run() override {
    const auto& layer = layers_[next_++ % layers_.size()];
    if constexpr (std::is_same_v<T, chunkattn::bfloat16> &&
                  std::is_same_v<Variant, chunkattn::NoVariant>)
      if (!q_bf16_.empty()) return attention_.run(layer, planned_.view(), variant_, q_bf16_, out_);
    attention_.run(layer, planned_.view(), variant_, q_, out_);
  }

 private:
  PlannedBatch<64> planned_;
  chunkattn::ChunkAttention<chunkattn::Cpu, HeadDim> attention_;
  Variant variant_;
  std::optional<chunkattn::KvCache<chunkattn::Cpu, T>> cache_;
  std::vector<chunkattn::KvView<T>> layers_;
  std::vector<float> q_, out_;
  std::vector<chunkattn::bfloat16> q_bf16_;
  std::size_t next_ = 0;
};

#if defined(CHUNKATTN_BENCH_PLAIN)
constexpr bool has_windows = false;
#else
constexpr bool has_windows = true;
#endif

template <class T, int HeadDim>
std::unique_ptr<Step> make_of(const StepCase& which, chunkattn::ThreadPool& pool,
                              std::size_t cold_bytes) {
  using namespace chunkattn;
  if (which.window == 0)
    return std::make_unique<AttentionStep<T, HeadDim, NoVariant>>(which, NoVariant{}, pool,
                                                                  cold_bytes);
  if constexpr (has_windows && HeadDim == 128 && sizeof(T) > 1 && !std::is_same_v<T, half>)
    return std::make_unique<AttentionStep<T, HeadDim, SlidingWindow>>(
        which, SlidingWindow{which.window}, pool, cold_bytes);
  return nullptr;
}

template <int HeadDim>
std::unique_ptr<Step> make(const StepCase& which, chunkattn::ThreadPool& pool,
                           std::size_t cold_bytes) {
  switch (which.element) {
    case Element::fp32:
      return make_of<float, HeadDim>(which, pool, cold_bytes);
    case Element::bf16:
      return make_of<chunkattn::bfloat16, HeadDim>(which, pool, cold_bytes);
    case Element::fp16:
      if constexpr (HeadDim == 128)
        return make_of<chunkattn::half, HeadDim>(which, pool, cold_bytes);
      return nullptr;
    case Element::int8:
      return make_of<std::int8_t, HeadDim>(which, pool, cold_bytes);
  }
  return nullptr;
}

}  // namespace

#if defined(CHUNKATTN_BENCH_PLAIN)
std::unique_ptr<Step> make_plain_step(const StepCase& which, chunkattn::ThreadPool& pool,
                                      std::size_t cold_bytes) {
  return which.head_dim == 128 ? make<128>(which, pool, cold_bytes) : nullptr;
}
#else
std::unique_ptr<Step> make_native_step(const StepCase& which, chunkattn::ThreadPool& pool,
                                       std::size_t cold_bytes) {
  switch (which.head_dim) {
    case 64:
      return make<64>(which, pool, cold_bytes);
    case 80:
      return make<80>(which, pool, cold_bytes);
    case 96:
      return make<96>(which, pool, cold_bytes);
    case 128:
      return make<128>(which, pool, cold_bytes);
    case 256:
      return make<256>(which, pool, cold_bytes);
    default:
      return nullptr;
  }
}
#endif

}  // namespace bench
