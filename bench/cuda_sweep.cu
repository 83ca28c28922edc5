// Decode attention on a GPU against its floor, max(bytes / bandwidth, flops / rate), one JSON line
// per case. Both ceilings are measured first on the same device: a copy, and a loop of the mma.sync
// that the kernels use (wgmma would be faster; they do not use it). K/V is cold: layers rotate
// through more memory than the L2 holds. Times are medians of graph replays.
//
// Usage: cuda_sweep [seconds per case, default 0.3] [what the names of the cases to run end with]
// Where the folder CHUNKATTN_DATA holds workloads/kernel_trees.json, its trees are cases too.
#include <thrust/device_vector.h>
#include <thrust/fill.h>
#include <thrust/random.h>
#include <thrust/transform.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

#include "chunkattn/cuda.cuh"
#include "chunkattn/debug/attention.hpp"
#include "chunkattn/plan_view.hpp"
#include "tests/support/schedule_summary.hpp"

namespace {

using chunkattn::ChunkAttention;
using chunkattn::Cuda;
using chunkattn::half;

void check(cudaError_t result, const char* what) {
  if (result == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(result));
  std::exit(1);
}

struct RandomHalf {
  std::uint32_t seed;
  __device__ half operator()(std::size_t i) const {
    thrust::default_random_engine engine(seed + static_cast<std::uint32_t>(i * 2654435761u));
    thrust::normal_distribution<float> normal(0.0f, 1.0f);
    return chunkattn::to_half(normal(engine));
  }
};
thrust::device_vector<half> random_halves(std::size_t n, std::uint32_t seed) {
  thrust::device_vector<half> values(n);
  thrust::transform(thrust::counting_iterator<std::size_t>(0),
                    thrust::counting_iterator<std::size_t>(n), values.begin(), RandomHalf{seed});
  return values;
}

struct Timer {
  cudaEvent_t begin, end;
  Timer() {
    check(cudaEventCreate(&begin), "event");
    check(cudaEventCreate(&end), "event");
  }
};

// Median microseconds of one call of `enqueue`, which is captured `rounds` times into one graph.
template <class F>
double measure(cudaStream_t stream, int rounds, double seconds, F&& enqueue) {
  static Timer timer;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
  for (int r = 0; r < rounds; ++r) enqueue(r);
  check(cudaStreamEndCapture(stream, &graph), "capture");
  check(cudaGraphInstantiate(&exec, graph, 0), "instantiate");
  std::vector<float> times;
  double total = 0;
  for (int i = 0; i < 3 || (total < seconds * 1e3 && i < 2000); ++i) {
    check(cudaEventRecord(timer.begin, stream), "record");
    check(cudaGraphLaunch(exec, stream), "graph");
    check(cudaEventRecord(timer.end, stream), "record");
    check(cudaEventSynchronize(timer.end), "run");
    float ms = 0;
    check(cudaEventElapsedTime(&ms, timer.begin, timer.end), "elapsed");
    if (i > 0) times.push_back(ms);
    total += ms;
  }
  cudaGraphExecDestroy(exec);
  cudaGraphDestroy(graph);
  std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
  return times[times.size() / 2] * 1e3 / rounds;
}

double copy_bandwidth(cudaStream_t stream) {  // bytes per microsecond, read and written
  const std::size_t bytes = std::size_t{2} << 30;
  thrust::device_vector<char> a(bytes, 1), b(bytes);
  const double us = measure(stream, 1, 0.3, [&](int) {
    check(cudaMemcpyAsync(thrust::raw_pointer_cast(b.data()), thrust::raw_pointer_cast(a.data()),
                          bytes, cudaMemcpyDeviceToDevice, stream),
          "copy");
  });
  return 2.0 * static_cast<double>(bytes) / us;
}

__global__ void empty_kernel() {}

// What a matrix product of a library reaches on an H200: floors are given for it, too.
constexpr double dense_flop_per_us = 790e6;

constexpr int mma_rounds = 4096, mma_chains = 8;

// Eight independent chains in each warp; what is stored in the end only keeps the loop alive.
__global__ void mma_kernel(float* sink) {
  float sums[mma_chains][4] = {};
  const std::uint32_t one = 0x3c003c00u + threadIdx.x;  // fp16 pairs near 1
  const std::uint32_t a[4] = {one, one, one, one};
  for (int r = 0; r < mma_rounds; ++r)
#pragma unroll
    for (auto& sum : sums) chunkattn::detail::ptx::mma<half>(sum, a, one, one);
  float total = 0;
  for (const auto& sum : sums) total += sum[0] + sum[1] + sum[2] + sum[3];
  if (total < 0) *sink = total;
}

double matrix_rate(int sms, cudaStream_t stream) {  // dense fp16 flop per microsecond
  thrust::device_vector<float> sink(1);
  const int blocks = sms * 4, warps = 8;
  const double us = measure(stream, 4, 0.2, [&](int) {
    mma_kernel<<<blocks, warps * 32, 0, stream>>>(thrust::raw_pointer_cast(sink.data()));
  });
  check(cudaGetLastError(), "mma_kernel");
  return 2.0 * 16 * 8 * 16 * mma_rounds * mma_chains * warps * blocks / us;
}

// A prefix tree by its levels: nodes[l] nodes of tokens[l] tokens, children divided as evenly as
// possible among the parents; every node of the last level is a sequence with one query token.
struct Case {
  std::string name;
  int qo_heads, kv_heads;
  std::vector<int> nodes, tokens;

  std::string label() const {
    return name + " b " + std::to_string(batch()) + " " + std::to_string(qo_heads) + "/" +
           std::to_string(kv_heads) + " " + std::to_string(shared()) + "+" + std::to_string(own());
  }
  int batch() const { return nodes.back(); }
  int own() const { return tokens.back(); }
  int shared() const {
    int sum = 0;
    for (std::size_t l = 0; l + 1 < tokens.size(); ++l) sum += tokens[l];
    return sum;
  }
};
Case make_case(std::string name, int batch, int qo_heads, int kv_heads, int shared, int own) {
  Case c{std::move(name), qo_heads, kv_heads, {}, {}};
  if (shared > 0) c.nodes.push_back(1), c.tokens.push_back(shared);
  c.nodes.push_back(batch), c.tokens.push_back(own);
  return c;
}

struct Plan : chunkattn::PlanView::Arrays {
  int num_chunks = 0;
  double stored_tokens = 0;

  explicit Plan(const Case& c) {
    chunk_size = 64;
    segments_version = pieces_version = 1;
    const std::size_t levels = c.nodes.size();
    // The first row below each node: leaves are rows, a parent begins where its first child does.
    std::vector<std::vector<int>> begin(levels), above(levels);
    for (std::size_t l = levels; l-- > 0;) {
      begin[l].assign(static_cast<std::size_t>(c.nodes[l]) + 1, c.batch());
      for (int n = c.nodes[l]; n-- > 0;) {
        if (l + 1 == levels) {
          begin[l][n] = n;
          continue;
        }
        const std::int64_t children = c.nodes[l + 1];  // child k belongs to k * nodes / children
        begin[l][n] = begin[l + 1][(n * children + c.nodes[l] - 1) / c.nodes[l]];
      }
    }
    int position = 0;
    for (std::size_t l = 0; l < levels; position += c.tokens[l++]) {
      for (int n = 0; n < c.nodes[l]; ++n) {
        const int parent =
            l == 0 ? -1 : above[l - 1][static_cast<std::int64_t>(n) * c.nodes[l - 1] / c.nodes[l]];
        const int rows = begin[l][n + 1] - begin[l][n];
        above[l].push_back(c.tokens[l] == 0 ? parent
                                            : add(begin[l][n], begin[l][n + 1], position,
                                                  c.tokens[l], parent, rows));
        stored_tokens += c.tokens[l];
      }
    }
    for (int i = 0; i < c.batch(); ++i) {
      row_segment.push_back(above.back()[i]);
      row_token.push_back(i);
      row_kv_len.push_back(position);
      writes.push_back({chunkattn::no_chunk, 0});
    }
  }
  int add(int begin, int end, int position, int length, int parent, int sequences) {
    chunkattn::PlanView::Segment s{
        begin, end, static_cast<int>(pieces.size()), 0, position, length, parent, sequences};
    for (int done = 0; done < length; done += 64, ++s.num_pieces)
      pieces.push_back({num_chunks++, 0, std::min(64, length - done), position + done});
    segments.push_back(s);
    return static_cast<int>(segments.size()) - 1;
  }
  chunkattn::LiveView view() const {  // it is of no step of a tree
    return chunkattn::LiveView::unchecked(Arrays::view());
  }
};

void run_case(const Case& c, double bandwidth, double rate, double seconds, cudaStream_t stream) {
  constexpr int d = 128;
  const Plan plan(c);
  const std::size_t chunk = static_cast<std::size_t>(c.kv_heads) * 64 * d;
  const std::size_t layer_bytes =
      2 * chunk * sizeof(half) * static_cast<std::size_t>(plan.num_chunks);
  // Rotate through at least 512 MB, several times the largest L2.
  const int layers =
      static_cast<int>(std::clamp<std::size_t>((512u << 20) / layer_bytes + 1, 2, 64));
  const std::size_t elements = chunk * static_cast<std::size_t>(plan.num_chunks);
  auto memory = random_halves(2 * elements * static_cast<std::size_t>(layers), 1);
  const std::size_t lines = static_cast<std::size_t>(c.batch()) * c.qo_heads;
  auto q = random_halves(lines * d, 2);
  thrust::device_vector<half> out(lines * d);
  chunkattn::CudaOptions::Limits limits;
  limits.max_rows = c.batch();
  limits.max_segments = static_cast<int>(plan.segments.size());
  limits.max_partial_rows = static_cast<int>(plan.segments.size()) * 4 + 16 * c.batch() + 256;
  limits.num_qo_heads = c.qo_heads;
  limits.num_kv_heads = c.kv_heads;
  limits.max_pieces = static_cast<int>(plan.pieces.size());
  ChunkAttention<Cuda, d> attention(limits);
  attention.prepare(plan.view(), stream);
  const auto run = [&](int r) {
    half* base = thrust::raw_pointer_cast(memory.data()) +
                 2 * elements * static_cast<std::size_t>(r % layers);
    const auto layer =
        chunkattn::make_kv_view(base, base + elements, {plan.num_chunks, c.kv_heads, 64, d});
    attention.run(
        layer, plan.view(), std::span<const half>(thrust::raw_pointer_cast(q.data()), q.size()),
        std::span<half>(thrust::raw_pointer_cast(out.data()), out.size()), {.stream = stream});
  };
  run(0);
  check(cudaStreamSynchronize(stream), "run");
  const double us = measure(stream, layers, seconds, run);
  const test::ScheduleSummary summary =
      test::summarize(chunkattn::plan_upload_of(attention).scheduler(),
                      chunkattn::plan_upload_of(attention).geometry());
  const double bytes = plan.stored_tokens * c.kv_heads * d * 4 + 2.0 * lines * d * 2;
  const double flops = 4.0 * c.qo_heads * d * c.batch() * (c.shared() + c.own());
  const double floor = std::max(bytes / bandwidth, flops / rate);
  const double dense_floor = std::max(bytes / bandwidth, flops / dense_flop_per_us);
  std::printf(
      "{\"case\": \"%s\", \"batch\": %d, \"qo_heads\": %d, \"kv_heads\": %d, \"shared\": %d, "
      "\"private\": %d, \"us\": %.2f, \"floor_us\": %.2f, \"dense_floor_us\": %.2f, "
      "\"bytes\": %.0f, \"flops\": %.0f, "
      "\"scheduled_kv_bytes\": %lld, \"partial_bytes\": %lld, \"shared_runs\": %d, \"splits\": "
      "%d}\n",
      c.label().c_str(), c.batch(), c.qo_heads, c.kv_heads, c.shared(), c.own(), us, floor,
      dense_floor, bytes, flops, static_cast<long long>(summary.kv_bytes),
      static_cast<long long>(summary.partial_bytes), summary.num_shared, summary.num_split);
  std::fflush(stdout);
}

std::vector<Case> tree_cases() {
  const char* folder = std::getenv("CHUNKATTN_DATA");
  const std::string path =
      std::string(folder != nullptr ? folder : "../shared") + "/workloads/kernel_trees.json";
  std::ifstream file(path, std::ios::binary);
  std::vector<Case> cases;
  if (!file) {
    std::fprintf(stderr, "%s is not there, set CHUNKATTN_DATA: its trees are left out\n",
                 path.c_str());
    return cases;
  }
  const auto document = nlohmann::json::parse(file);
  int index = 0;
  for (const auto& tree : document.at("trees")) {
    ++index;
    for (const auto& heads : document.at("heads")) {
      cases.push_back({"tree " + std::to_string(index), heads.at(0).get<int>(),
                       heads.at(1).get<int>(), tree.at("nodes_per_level").get<std::vector<int>>(),
                       tree.at("tokens_per_node").get<std::vector<int>>()});
    }
  }
  return cases;
}

}  // namespace

int main(int argc, char** argv) {
  const double seconds = argc > 1 ? std::atof(argv[1]) : 0.3;
  const char* filter = argc > 2 ? argv[2] : "";
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) {
    std::printf("no CUDA device: nothing was measured\n");
    return 77;
  }
  cudaDeviceProp device{};
  check(cudaGetDeviceProperties(&device, 0), "device");
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  const double bandwidth = copy_bandwidth(stream);
  const double rate = matrix_rate(device.multiProcessorCount, stream);
  const double launch =
      measure(stream, 100, 0.1, [&](int) { empty_kernel<<<1, 32, 0, stream>>>(); });
  std::printf(
      "{\"device\": \"%s\", \"sms\": %d, \"copy_bytes_per_us\": %.0f, \"mma_flop_per_us\": "
      "%.0f, \"graph_kernel_us\": %.2f}\n",
      device.name, device.multiProcessorCount, bandwidth, rate, launch);
  std::vector<Case> cases;
  const auto add = [&](const char* name, int batch, int kv_heads, int shared, int own) {
    cases.push_back(make_case(name, batch, 32, kv_heads, shared, own));
  };
  for (const int shared : {1024, 2048, 4096}) {
    for (const int own : {0, 64, 512}) add("paper table 3", 32, 32, shared, own);
    add("paper table 3", 32, 32, 0, shared);  // the same context, nothing shared
  }
  for (const int batch : {1, 4, 16, 64, 96}) add("paper figure 4", batch, 32, 2048, 256);
  for (const int batch : {64, 256})
    for (const int shared : {4096, 32768})
      for (const int own : {64, 512}) add("gqa", batch, 8, shared, own);
  for (const int batch : {1, 8, 64, 256}) add("nothing shared", batch, 8, 0, 4096);
  for (Case& c : tree_cases()) cases.push_back(std::move(c));
  for (const Case& c : cases)
    if (c.label().ends_with(filter)) run_case(c, bandwidth, rate, seconds, stream);
  return 0;
}
