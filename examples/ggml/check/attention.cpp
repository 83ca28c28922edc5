// The plugin beside ggml's own code: the same FLASH_ATTN_EXT nodes on both, in turn, with the masks
// that llama.cpp makes for decoding, prompts and windows.
//
//   check_attention PLUGIN.so [--threads N] [--rounds N] [--quick]
//
// Prints the difference of the results and the median of the times of each case. Exit status 1 if a
// difference is above what 16-bit values explain, or if the plugin does not take a case.
#include <ggml-alloc.h>
#include <ggml-backend.h>
#include <ggml-cpu.h>
#include <ggml.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

namespace {

struct Case {
  const char* name;
  int head_dim, heads, kv_heads, rows, cells;
  ggml_type type;
  std::function<bool(int row, int cell)> shows;
  int streams = 1;
};

/// Decoding: each row sees the shared cells, and of those after them every so-and-so-many-th.
Case decode(const char* name, int rows, int shared, int own, ggml_type type, int head_dim = 128,
            int heads = 32, int kv_heads = 8) {
  const int cells = (shared + rows * own + 255) / 256 * 256;
  return {name, head_dim, heads, kv_heads, rows, cells, type, [=](int row, int cell) {
            return cell < shared || (cell < shared + rows * own && (cell - shared) % rows == row);
          }};
}
/// Decoding without unified K/V: each row has a stream of its own.
Case streams(const char* name, int count, int length, ggml_type type) {
  return {name, 128,
          32,   8,
          1,    (length + 255) / 256 * 256,
          type, [=](int, int cell) { return cell < length; },
          count};
}
Case prompt(const char* name, int rows, int before, ggml_type type, int window = 1 << 30) {
  return {name,
          128,
          32,
          8,
          rows,
          (before + rows + 255) / 256 * 256,
          type,
          [=](int row, int cell) {
            return cell <= before + row && before + row - cell < window; }};
}

std::vector<Case> cases(bool quick) {
  const ggml_type f16 = GGML_TYPE_F16, bf16 = GGML_TYPE_BF16;
  std::vector<Case> list = {
      decode("decode 32, 4096 shared", 32, 4096, 64, f16),
      decode("decode 32, 4096 shared", 32, 4096, 64, bf16),
      decode("decode 8, 4096 shared", 8, 4096, 64, f16),
      decode("decode 1, 4096 tokens", 1, 4096, 64, f16),
      decode("decode 32, 512 of their own", 32, 0, 512, f16),
      streams("32 streams of 512", 32, 512, f16),
      prompt("512 of a prompt", 512, 0, f16),
      prompt("512 of a prompt", 512, 0, GGML_TYPE_F32),
      prompt("512 after 3584", 512, 3584, f16),
      prompt("512 after 1536, window 1024", 512, 1536, f16, 1024),
      decode("decode 32, 1024 shared, heads of 64", 32, 1024, 64, f16, 64, 9, 3),
      decode("decode 32, 1024 shared, heads of 112", 32, 1024, 64, f16, 112),  // copied to 128
      decode("decode 1, 4096 tokens, heads of 112", 1, 4096, 64, f16, 112),
  };
  if (quick)
    for (Case& each : list) each.heads /= each.kv_heads, each.kv_heads = 1;
  return list;
}

/// A graph of one node in memory of its own, for one backend.
class Graph {
 public:
  Graph(ggml_backend_t backend, const Case& of) : backend_(backend) {
    context_.reset(ggml_init({1 << 20, nullptr, true}));
    ggml_context* const c = context_.get();
    q = ggml_new_tensor_4d(c, GGML_TYPE_F32, of.head_dim, of.heads, of.rows, of.streams);
    k = ggml_new_tensor_4d(c, of.type, of.head_dim, of.kv_heads, of.cells, of.streams);
    v = ggml_new_tensor_4d(c, of.type, of.head_dim, of.kv_heads, of.cells, of.streams);
    mask = ggml_new_tensor_4d(c, GGML_TYPE_F16, of.cells, of.rows, 1, of.streams);
    out = ggml_flash_attn_ext(c, ggml_permute(c, q, 0, 2, 1, 3), ggml_permute(c, k, 0, 2, 1, 3),
                              ggml_permute(c, v, 0, 2, 1, 3), mask,
                              1.0f / std::sqrt(static_cast<float>(of.head_dim)), 0, 0);
    taken = ggml_backend_supports_op(backend, out);
    graph_ = ggml_new_graph(c);
    ggml_build_forward_expand(graph_, out);
    buffer_.reset(ggml_backend_alloc_ctx_tensors(c, backend));
  }

  double seconds() {
    const auto start = std::chrono::steady_clock::now();
    if (ggml_backend_graph_compute(backend_, graph_) != GGML_STATUS_SUCCESS) std::abort();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }
  std::vector<float> result() const {
    std::vector<float> values(static_cast<std::size_t>(ggml_nelements(out)));
    ggml_backend_tensor_get(out, values.data(), 0, ggml_nbytes(out));
    return values;
  }

  ggml_tensor *q, *k, *v, *mask, *out;
  bool taken = false;

 private:
  struct Free {
    void operator()(ggml_context* context) const { ggml_free(context); }
    void operator()(ggml_backend_buffer* buffer) const { ggml_backend_buffer_free(buffer); }
  };
  ggml_backend_t backend_;
  std::unique_ptr<ggml_context, Free> context_;
  std::unique_ptr<ggml_backend_buffer, Free> buffer_;
  ggml_cgraph* graph_;
};

void fill(Graph& one, Graph& other, const Case& of, std::mt19937_64& random) {
  std::normal_distribution<float> normal;
  for (ggml_tensor* Graph::* const which : {&Graph::q, &Graph::k, &Graph::v}) {
    std::vector<float> values(static_cast<std::size_t>(ggml_nelements(one.*which)));
    for (float& value : values) value = normal(random);
    std::vector<char> bytes(ggml_nbytes(one.*which));
    const auto count = static_cast<std::int64_t>(values.size());
    switch ((one.*which)->type) {
      case GGML_TYPE_F16:
        ggml_fp32_to_fp16_row(values.data(), reinterpret_cast<ggml_fp16_t*>(bytes.data()), count);
        break;
      case GGML_TYPE_BF16:
        ggml_fp32_to_bf16_row(values.data(), reinterpret_cast<ggml_bf16_t*>(bytes.data()), count);
        break;
      default:
        std::memcpy(bytes.data(), values.data(), bytes.size());
    }
    for (Graph* graph : {&one, &other})
      ggml_backend_tensor_set(graph->*which, bytes.data(), 0, bytes.size());
  }
  std::vector<ggml_fp16_t> mask;
  for (int s = 0; s < of.streams; ++s)
    for (int r = 0; r < of.rows; ++r)
      for (int c = 0; c < of.cells; ++c)
        mask.push_back(
            ggml_fp32_to_fp16(of.shows(r, c) ? 0.0f : -std::numeric_limits<float>::infinity()));
  for (Graph* graph : {&one, &other})
    ggml_backend_tensor_set(graph->mask, mask.data(), 0, mask.size() * sizeof mask[0]);
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

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
  int threads = 2, rounds = 7;
  bool quick = false;
  for (int i = 2; i < argc; ++i) {
    if (std::strcmp(argv[i], "--threads") == 0 && i + 1 < argc) threads = std::atoi(argv[++i]);
    if (std::strcmp(argv[i], "--rounds") == 0 && i + 1 < argc) rounds = std::atoi(argv[++i]);
    if (std::strcmp(argv[i], "--quick") == 0) quick = true;
  }
  ggml_backend_load_all_from_path(LLAMA_CPP_PROGRAMS);  // ggml's own
  ggml_backend_reg_t plugin = argc < 2 ? nullptr : ggml_backend_load(argv[1]);
  if (plugin == nullptr) {
    std::fprintf(stderr, "usage: check_attention PLUGIN.so [--threads N] [--rounds N] [--quick]\n");
    return 2;
  }
  const std::uint64_t seed = std::random_device{}();
  std::printf("seed %llu, %d threads\n", static_cast<unsigned long long>(seed), threads);
  std::mt19937_64 random(seed);
  ggml_backend_t ours = ggml_backend_dev_init(ggml_backend_reg_dev_get(plugin, 0), nullptr);
  ggml_backend_t cpu = ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr);
  if (ours == nullptr || cpu == nullptr) {
    std::fprintf(stderr,
                 "no backend for the CPU in " LLAMA_CPP_PROGRAMS ", or none of the plugin\n");
    return 2;
  }
  for (ggml_backend_t backend : {ours, cpu}) {
    ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(ggml_backend_get_device(backend));
    reinterpret_cast<ggml_backend_set_n_threads_t>(
        ggml_backend_reg_get_proc_address(reg, "ggml_backend_set_n_threads"))(backend, threads);
  }
  std::printf("%-38s %-5s %10s %10s %8s %9s\n", "", "K/V", "ggml ms", "plugin ms", "faster",
              "NMSE");
  bool good = true;
  for (const Case& each : cases(quick)) {
    Graph stock(cpu, each), with(ours, each);
    fill(stock, with, each, random);
    std::vector<double> of_stock, of_ours;
    stock.seconds();
    with.seconds();
    for (int round = 0; round < rounds; ++round) {
      of_stock.push_back(stock.seconds());
      of_ours.push_back(with.seconds());
    }
    const double wrong = difference(with.result(), stock.result());
    good = good && with.taken && wrong < 5e-4;  // as test-backend-ops allows
    std::printf("%-38s %-5s %10.3f %10.3f %7.2fx %9.1e%s\n", each.name, ggml_type_name(each.type),
                1e3 * median(of_stock), 1e3 * median(of_ours), median(of_stock) / median(of_ours),
                wrong, with.taken ? "" : " NOT TAKEN");
    std::fflush(stdout);
  }
  ggml_backend_free(ours);
  ggml_backend_free(cpu);
  return good ? 0 : 1;
}
