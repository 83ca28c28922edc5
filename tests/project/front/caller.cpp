// A unit of an engine that schedules: a step of two sequences, whose first tokens are the same.
#include <chunkattn/attention_plan.hpp>
#include <chunkattn/prefix_tree.hpp>
#include <chunkattn/runtime/any_attention.hpp>
#include <cstdio>
#include <string>
#include <vector>

#include "attention.hpp"

using namespace chunkattn;
constexpr int num_qo_heads = 4, num_kv_heads = 2;

namespace {

int failures = 0;
void check(bool ok, const char* what) {
  if (!ok) std::printf("FAILED: %s\n", what);
  failures += !ok;
}

void step_on_the_cpu() {
  const auto attention = cpu_attention(128);
  PrefixTree<int> tree;
  const auto cache = attention->make_cache(tree, ElementType::half, {1, num_kv_heads});
  std::vector<PrefixTree<int>::Sequence> sequences;
  auto step = tree.begin_step();
  for (int i = 0; i < 2; ++i) {
    std::vector<int> prompt(100, 7);
    prompt.back() = i;
    sequences.push_back(tree.insert(prompt));
    (void)step.add(sequences.back());
  }
  AttentionPlan plan;
  const auto view = plan.build(step);
  const auto rows = static_cast<std::size_t>(view.num_rows);
  check(rows == 101, "what is shared is computed once");
  std::vector<float> q(rows * num_qo_heads * 128, 0.25f), out(q.size());
  std::vector<float> k(rows * num_kv_heads * 128, 0.5f), v(k.size());
  for (std::size_t i = 0; i < v.size(); ++i) v[i] = static_cast<float>(i % 128);
  for (const AnyVariant& variant : {AnyVariant(), AnyVariant(SlidingWindow{4})}) {
    out.assign(out.size(), -1.0f);
    attend(*attention, cache->layer(0), view, variant, q, k, v, out);
    bool right = true;  // all rows of V are alike, so any average of them is the same
    for (std::size_t i = 0; i < out.size(); ++i) {
      const float difference = out[i] - static_cast<float>(i % 128);
      right = right && difference < 0.01f && difference > -0.01f;
    }
    check(right, "attention over rows of V that are alike");
  }
  std::printf("%s\n", describe(*attention).c_str());
}

template <class F>
std::string refused(const F& f) {
  try {
    f();
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "no error";
}

}  // namespace

int main() {
  step_on_the_cpu();
  check(refused([] { (void)cpu_attention(80); }) ==
            "head_dim = 80: expected one that this program was built with: 64, 128",
        "a size that was not compiled");
#if defined(WITH_CUDA)
  check(refused([] { (void)cuda_attention(128, 8, num_qo_heads, num_kv_heads); }) ==
            "head_dim = 128: expected one that this program was built with: 64, 192:128",
        "a size that was not compiled for the GPU");
  try {
    const auto attention = cuda_attention(64, 8, num_qo_heads, num_kv_heads);
    std::printf("%s\n", describe(*attention).c_str());
  } catch (const DeviceError& error) {
    const std::string text = error.what();
    check(text.find("cudaGetDeviceCount failed with code") == 0, "what fails without a device");
    std::printf("no GPU: %s\n", text.c_str());
  }
#endif
  return failures;
}
