// Decode attention on a GPU against its floor, max(bytes / bandwidth, flops / rate), one JSON line
// per case. Ceilings are measured first on the same device. K/V is cold: layers rotate through more
// memory than the L2 holds. Times are medians of graph replays.
//
// Usage: cuda_sweep [seconds per case, default 0.3] [substring of the cases to run]
#include <thrust/device_vector.h>
#include <thrust/fill.h>
#include <thrust/random.h>
#include <thrust/transform.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "chunkattn/cuda/chunk_attention.cuh"

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

struct Case {
  const char* name;
  int batch, qo_heads, kv_heads, shared, own;
};

// A shared run of `shared` tokens, then `own` tokens of each sequence.
struct Plan {
  std::vector<chunkattn::Segment> segments;
  std::vector<chunkattn::Piece> pieces;
  std::vector<std::int32_t> row_token, row_kv_len, row_segment;
  std::vector<chunkattn::WriteTarget> writes;
  int num_slots = 0;

  explicit Plan(const Case& c) {
    const int root = c.shared > 0 ? add(0, c.batch, 0, c.shared, -1, c.batch) : -1;
    for (int i = 0; i < c.batch; ++i) {
      row_segment.push_back(c.own > 0 ? add(i, i + 1, c.shared, c.own, root, 1) : root);
      row_token.push_back(i);
      row_kv_len.push_back(c.shared + c.own);
      writes.push_back({chunkattn::no_slot, 0});
    }
  }
  int add(int begin, int end, int position, int length, int parent, int sequences) {
    chunkattn::Segment s{begin,  end,      static_cast<int>(pieces.size()), 0, position, length,
                         parent, sequences};
    for (int done = 0; done < length; done += 64, ++s.piece_count)
      pieces.push_back({num_slots++, 0, std::min(64, length - done), position + done});
    segments.push_back(s);
    return static_cast<int>(segments.size()) - 1;
  }
  chunkattn::PlanView view() const {
    chunkattn::PlanView view;
    view.num_rows = static_cast<int>(row_token.size());
    view.num_segments = static_cast<int>(segments.size());
    view.num_pieces = static_cast<int>(pieces.size());
    view.chunk_size = 64;
    view.segments = segments.data();
    view.pieces = pieces.data();
    view.row_token = row_token.data();
    view.row_kv_len = row_kv_len.data();
    view.row_segment = row_segment.data();
    view.writes = writes.data();
    view.topology = view.pieces_version = 1;
    return view;
  }
};

void run_case(const Case& c, double bandwidth, double rate, double seconds, cudaStream_t stream) {
  constexpr int d = 128;
  const Plan plan(c);
  const std::size_t slot = static_cast<std::size_t>(c.kv_heads) * 64 * d;
  const std::size_t layer_bytes =
      2 * slot * sizeof(half) * static_cast<std::size_t>(plan.num_slots);
  // Rotate through at least 512 MB, several times the largest L2.
  const int layers =
      static_cast<int>(std::clamp<std::size_t>((512u << 20) / layer_bytes + 1, 2, 64));
  const std::size_t elements = slot * static_cast<std::size_t>(plan.num_slots);
  auto memory = random_halves(2 * elements * static_cast<std::size_t>(layers), 1);
  const std::size_t lines = static_cast<std::size_t>(c.batch) * c.qo_heads;
  auto q = random_halves(lines * d, 2);
  thrust::device_vector<half> out(lines * d);
  chunkattn::CudaLimits limits;
  limits.max_rows = c.batch;
  limits.num_qo_heads = c.qo_heads;
  limits.num_kv_heads = c.kv_heads;
  limits.max_pieces = static_cast<int>(plan.pieces.size());
  ChunkAttention<Cuda, d> attention(limits);
  attention.prepare(plan.view(), stream);
  const auto run = [&](int r) {
    half* base = thrust::raw_pointer_cast(memory.data()) +
                 2 * elements * static_cast<std::size_t>(r % layers);
    const auto layer =
        chunkattn::make_kv_view(base, base + elements, plan.num_slots, c.kv_heads, 64, d);
    attention.run(layer, plan.view(),
                  std::span<const half>(thrust::raw_pointer_cast(q.data()), q.size()),
                  std::span<half>(thrust::raw_pointer_cast(out.data()), out.size()), {}, stream);
  };
  run(0);
  check(cudaStreamSynchronize(stream), "run");
  const double us = measure(stream, layers, seconds, run);
  const auto& summary = attention.summary();
  const double tokens = c.shared + static_cast<double>(c.batch) * c.own;
  const double bytes = tokens * c.kv_heads * d * 4 + 2.0 * lines * d * 2;
  const double flops = 4.0 * c.qo_heads * d * c.batch * (c.shared + c.own);
  const double floor = std::max(bytes / bandwidth, flops / rate);
  std::printf(
      "{\"case\": \"%s\", \"batch\": %d, \"qo_heads\": %d, \"kv_heads\": %d, \"shared\": %d, "
      "\"private\": %d, \"us\": %.2f, \"floor_us\": %.2f, \"of_floor\": %.3f, \"bytes\": %.0f, "
      "\"scheduled_kv_bytes\": %lld, \"partial_bytes\": %lld, \"shared_runs\": %d, \"splits\": "
      "%d}\n",
      c.name, c.batch, c.qo_heads, c.kv_heads, c.shared, c.own, us, floor, floor / us, bytes,
      static_cast<long long>(summary.kv_bytes), static_cast<long long>(summary.partial_bytes),
      summary.num_shared, summary.num_split);
  std::fflush(stdout);
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
  const double rate = 790e6;  // flop per us; replaced by --rate once the matrix rate is measured
  const double launch =
      measure(stream, 100, 0.1, [&](int) { empty_kernel<<<1, 32, 0, stream>>>(); });
  std::printf(
      "{\"device\": \"%s\", \"sms\": %d, \"copy_bytes_per_us\": %.0f, \"graph_kernel_us\": %.2f}\n",
      device.name, device.multiProcessorCount, bandwidth, launch);
  std::vector<std::pair<std::string, Case>> cases;
  const auto add = [&](std::string name, Case c) { cases.emplace_back(std::move(name), c); };
  for (const int shared : {1024, 2048, 4096})
    for (const int own : {0, 64, 512, -1})  // -1: the same context, nothing shared
      add("paper table 3",
          own < 0 ? Case{"", 32, 32, 32, 0, shared} : Case{"", 32, 32, 32, shared, own});
  for (const int batch : {1, 4, 16, 64, 96}) add("paper figure 4", {"", batch, 32, 32, 2048, 256});
  for (const int batch : {64, 256})
    for (const int shared : {4096, 32768})
      for (const int own : {64, 512}) add("gqa", {"", batch, 32, 8, shared, own});
  for (const int batch : {1, 8, 64, 256}) add("nothing shared", {"", batch, 32, 8, 0, 4096});
  for (auto& [name, c] : cases) {
    if (std::strstr(name.c_str(), filter) == nullptr) continue;
    c.name = name.c_str();
    run_case(c, bandwidth, rate, seconds, stream);
  }
  return 0;
}
