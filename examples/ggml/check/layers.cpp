// Layers of one graph by ggml's scheduler, some with the plugin and some with ggml's own code: the
// plugin reads a mask once for all layers, and again when it may have changed. Prompts of several
// sequences go through in batches, as llama.cpp cuts them: a graph is computed again with another
// mask, or made anew where the last one was. Results are compared with those of ggml's own code.
//
//     CHUNKATTN_GGML_STATISTICS=1 check_layers PLUGIN.so [--sequences N] [--length N]
//
// prints last what plans took, as the plugin says at its end.
#include <ggml-alloc.h>
#include <ggml-backend.h>
#include <ggml-cpu.h>
#include <ggml.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <utility>
#include <vector>

namespace {

constexpr int head_dim = 64, heads = 9, kv_heads = 3, layers = 3, batch = 512;

struct Token {
  int sequence, position;
};

struct FreeSched {
  void operator()(ggml_backend_sched* sched) const { ggml_backend_sched_free(sched); }
};
struct FreeContext {
  void operator()(ggml_context* context) const { ggml_free(context); }
};

/// A scheduler, and the graph that was made last, always in the same memory.
class Model {
 public:
  explicit Model(std::vector<ggml_backend_t> backends)
      : backends_(std::move(backends)),
        sched_(ggml_backend_sched_new(backends_.data(), nullptr, static_cast<int>(backends_.size()),
                                      1024, false, true)),
        memory_(1 << 20) {}

  /// A graph for so many rows and cells.
  void make(int rows, int cells) {
    ggml_backend_sched_reset(sched_.get());
    context_.reset();
    context_.reset(ggml_init({memory_.size(), memory_.data(), true}));
    ggml_context* const c = context_.get();
    const auto input = [&](ggml_type type, std::int64_t d0, std::int64_t d1, std::int64_t d2) {
      ggml_tensor* const made = ggml_new_tensor_3d(c, type, d0, d1, d2);
      ggml_set_input(made);
      return made;
    };
    q = input(GGML_TYPE_F32, head_dim, heads, rows);
    k = input(GGML_TYPE_F16, head_dim, kv_heads, cells);
    v = input(GGML_TYPE_F16, head_dim, kv_heads, cells);
    mask = input(GGML_TYPE_F16, cells, rows, 1);
    ggml_tensor* x = q;
    for (int layer = 0; layer < layers; ++layer) {
      x = ggml_flash_attn_ext(c, ggml_permute(c, x, 0, 2, 1, 3), ggml_permute(c, k, 0, 2, 1, 3),
                              ggml_permute(c, v, 0, 2, 1, 3), mask, 0.125f, 0, 0);
      x = ggml_add(c, q, ggml_scale(c, x, 2.0f));
    }
    out = x;
    ggml_set_output(out);
    graph_ = ggml_new_graph(c);
    ggml_build_forward_expand(graph_, out);
    if (!ggml_backend_sched_alloc_graph(sched_.get(), graph_)) std::abort();
  }

  /// Computes the last graph.
  std::vector<float> compute(const std::vector<float>& queries,
                             const std::vector<ggml_fp16_t>& keys,
                             const std::vector<ggml_fp16_t>& shown) {
    ggml_backend_tensor_set(q, queries.data(), 0, ggml_nbytes(q));
    ggml_backend_tensor_set(k, keys.data(), 0, ggml_nbytes(k));
    ggml_backend_tensor_set(v, keys.data() + 64, 0, ggml_nbytes(v));
    ggml_backend_tensor_set(mask, shown.data(), 0, ggml_nbytes(mask));
    if (ggml_backend_sched_graph_compute(sched_.get(), graph_) != GGML_STATUS_SUCCESS) std::abort();
    std::vector<float> values(static_cast<std::size_t>(ggml_nelements(out)));
    ggml_backend_tensor_get(out, values.data(), 0, ggml_nbytes(out));
    return values;
  }

 private:
  ggml_tensor *q, *k, *v, *mask, *out;
  std::vector<ggml_backend_t> backends_;
  std::unique_ptr<ggml_backend_sched, FreeSched> sched_;
  std::vector<char> memory_;
  std::unique_ptr<ggml_context, FreeContext> context_;
  ggml_cgraph* graph_ = nullptr;
};

/// The difference as a part of the result, in squares, as test-backend-ops takes it.
double difference(const std::vector<float>& a, const std::vector<float>& b) {
  double wrong = 0, all = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    wrong += (a[i] - b[i]) * static_cast<double>(a[i] - b[i]);
    all += b[i] * static_cast<double>(b[i]);
  }
  return wrong / all;
}

}  // namespace

int main(int argc, char** argv) {
  int sequences = 8, length = 900;
  for (int i = 2; i + 1 < argc; ++i) {
    if (std::strcmp(argv[i], "--sequences") == 0) sequences = std::atoi(argv[i + 1]);
    if (std::strcmp(argv[i], "--length") == 0) length = std::atoi(argv[i + 1]);
  }
  ggml_backend_load_all_from_path(LLAMA_CPP_PROGRAMS);  // ggml's own
  ggml_backend_reg_t plugin = argc < 2 ? nullptr : ggml_backend_load(argv[1]);
  if (plugin == nullptr) {
    std::fprintf(stderr, "usage: check_layers PLUGIN.so [--sequences N] [--length N]\n");
    return 2;
  }
  ggml_backend_t ours = ggml_backend_dev_init(ggml_backend_reg_dev_get(plugin, 0), nullptr);
  ggml_backend_t cpu = ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr);
  if (ours == nullptr || cpu == nullptr) {
    std::fprintf(stderr,
                 "no backend for the CPU in " LLAMA_CPP_PROGRAMS ", or none of the plugin\n");
    return 2;
  }
  const std::uint64_t seed = std::random_device{}();
  std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;

  // Cells of sequences one after another, as they come; the mask is made as llama.cpp makes it.
  std::vector<Token> tokens;
  for (int s = 0; s < sequences; ++s)
    for (int p = 0; p < length; ++p) tokens.push_back({s, p});
  std::vector<ggml_fp16_t> keys((tokens.size() + 2048) * kv_heads * head_dim + 64);
  for (ggml_fp16_t& each : keys) each = ggml_fp32_to_fp16(normal(random));
  std::vector<float> queries(static_cast<std::size_t>(batch * heads * head_dim));
  bool good = true;
  double worst = 0;
  {
    Model with({ours, cpu}), stock({cpu});
    for (std::size_t begin = 0; begin < tokens.size(); begin += batch) {
      const int rows = static_cast<int>(std::min<std::size_t>(batch, tokens.size() - begin));
      const int cells = (static_cast<int>(begin) + rows + 2047) / 2048 * 2048;
      // Each graph twice, and then one that is like it, in the same memory.
      if (rows != batch || begin / batch % 2 == 0) {
        with.make(rows, cells);
        stock.make(rows, cells);
      }
      for (float& each : queries) each = normal(random);
      std::vector<ggml_fp16_t> mask(
          static_cast<std::size_t>(rows) * static_cast<std::size_t>(cells),
          ggml_fp32_to_fp16(-std::numeric_limits<float>::infinity()));
      for (int r = 0; r < rows; ++r) {
        const Token& token = tokens[begin + static_cast<std::size_t>(r)];
        const int first = token.sequence * length;
        for (int p = 0; p <= token.position; ++p)
          mask[static_cast<std::size_t>(r) * static_cast<std::size_t>(cells) +
               static_cast<std::size_t>(first + p)] = 0;
      }
      const double wrong =
          difference(with.compute(queries, keys, mask), stock.compute(queries, keys, mask));
      worst = std::max(worst, wrong);
      good = good && wrong < 5e-4;  // as test-backend-ops allows
    }
  }
  std::printf("%d layers, %d sequences of %d tokens: NMSE at most %.1e%s\n", layers, sequences,
              length, worst, good ? "" : " WRONG");
  ggml_backend_free(ours);  // which says what plans took
  ggml_backend_free(cpu);
  return good ? 0 : 1;
}
