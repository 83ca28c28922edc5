// What a profiler would count of the attention kernel on the cases of schedule_cases.hpp, by the
// kernel's PTX (CHUNKATTN_PTX, see run.sh): one task of each kind that a schedule has, for one KV
// head, times how many of them there are; beside what bench/cuda_model.hpp assumes of the same.
// fp16, head dimension 128, an H200. Not counted: waits for other blocks' results.
//
// Usage: gpu_counts [--check | what the names of the cases to count contain]
// --check: whether the sum over kinds is what a whole step counts, matrices and copies have no bank
// conflicts, and the model's instructions are those that are counted.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>
#include <span>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bench/cuda_model.hpp"
#include "ptx/counts.hpp"
#include "simt/attention.hpp"
#include "support/random.hpp"
#include "support/schedule_cases.hpp"

namespace {

namespace cuda = chunkattn::detail::cuda;
using chunkattn::half;
using cuda::Task;
using ptxrun::Count;
using ptxrun::Counts;
using ptxrun::Kind;
using ptxrun::u64;

constexpr int dim = 128, pool = 512;  // chunks that stand for those of a case
constexpr cuda::HeadDims dims{dim};

/// Normal values that begin where device memory does: at a multiple of 256 bytes.
template <class T>
class DeviceArray {
 public:
  explicit DeviceArray(std::size_t size) : blocks_(size * sizeof(T) / sizeof(Block) + 1) {
    test::Random random(7);
    random.fill(std::span<T>(data(), size));
  }
  T* data() { return reinterpret_cast<T*>(blocks_.data()); }

 private:
  struct alignas(256) Block {
    unsigned char bytes[256];
  };
  std::vector<Block> blocks_;
};

/// A plan, its schedule, and memory for one KV head of it, which stands for all.
class Step {
 public:
  Step(test::RandomPlan plan, const cuda::Geometry& geometry, const cuda::CostModel& costs)
      : plan_(std::move(plan)),
        geometry_(geometry),
        scheduler_(schedule_of(plan_, geometry, costs)),
        lines_(to_size(plan_.num_rows() * geometry.num_qo_heads)),
        q_(lines_ * dim),
        out_(lines_ * dim),
        lse_(lines_),
        partial_out_(to_size(scheduler_.num_partials()) * dim),
        partial_lse_(to_size(scheduler_.num_partials())),
        totals_(cuda::total_bytes(dims) / sizeof(float)),
        kv_len_(plan_.row_kv_len.begin(), plan_.row_kv_len.end()) {
    const int most =
        std::min(costs.most_tile_rows, cuda::tile_rows_for(plan_.num_rows() * geometry.group()));
    num_stages_ = cuda::choose_stages(dims, most, 227 * 1024, 228 * 1024, 2).num_stages;
    shared_bytes_ = to_size(cuda::shared_bytes(dims, num_stages_, most));
  }

  const cuda::Scheduler& scheduler() const { return scheduler_; }
  const test::RandomPlan& plan() const { return plan_; }
  const cuda::Geometry& geometry() const { return geometry_; }

  /// What one block counts that works on the last `pairs` of (task, KV head) of `tasks`.
  Counts launch(std::span<const Task> tasks, int pairs) {
    const int num_pairs = static_cast<int>(tasks.size()) * geometry_.num_kv_heads;
    const cuda::PlanHeader header{plan_.num_rows(), 0, static_cast<int>(tasks.size())};
    cuda::Counters counters{num_pairs - pairs, 0, 6};
    std::vector<std::uint32_t> flags(to_size(scheduler_.num_chunk_first() * geometry_.num_kv_heads),
                                     7);  // all results are there
    std::uint32_t overlapped = 0;
    const auto view = plan_.view();
    cuda::CallArguments<half> call{};
    call.plan = {&header,
                 tasks.data(),
                 scheduler_.merges().data(),
                 view.segments,
                 view.pieces,
                 view.row_token,
                 kv_len_.data(),
                 view.row_segment,
                 nullptr,
                 view.copies,
                 &counters,
                 flags.data(),
                 partial_out_.data(),
                 partial_lse_.data(),
                 totals_.data(),
                 &overlapped};
    call.kv = kv(geometry_.num_kv_heads);
    call.q = q_.data();
    call.out = out_.data();
    call.lse = lse_.data();
    call.num_kv_heads = geometry_.num_kv_heads;
    call.group = geometry_.group();
    call.num_stages = num_stages_;
    const auto arguments =
        cuda::with_variant(call, chunkattn::NoVariant{}, 1.0f / std::sqrt(float{dim}));
    Counts counts;
    ptxrun::count_into(&counts);
    const bool known = simt::executed_elsewhere(&cuda::attention_kernel<half, dim, dim>, 1,
                                                cuda::block_threads, shared_bytes_, arguments);
    ptxrun::count_into(nullptr);
    if (!known) throw std::runtime_error("no PTX of the attention kernel");
    return counts;
  }

  /// What a block counts for one more task like this, while it works on others.
  Counts of_task(const Task& task) {
    const std::vector<Task> twice{task, task};
    Counts counts = launch(twice, 2);
    counts -= launch(twice, 1);
    return counts;
  }
  /// What it counts without any.
  Counts of_block() { return launch(scheduler_.tasks(), 0); }

  /// Positions that a task streams.
  int tokens_of(const Task& task) const {
    if (task.segment < 0) return 0;
    const auto& segment = plan_.segments[to_size(task.segment)];
    const int seen = plan_.row_kv_len[to_size(task.row_begin / geometry_.group())];
    return std::min({task.position_end, segment.position + segment.length, seen}) -
           task.position_begin;
  }

 private:
  static std::size_t to_size(std::int64_t n) { return static_cast<std::size_t>(n); }

  static cuda::Scheduler schedule_of(test::RandomPlan& plan, const cuda::Geometry& geometry,
                                     const cuda::CostModel& costs) {
    for (chunkattn::Piece& piece : plan.pieces) piece.chunk %= pool;
    cuda::Scheduler scheduler;
    scheduler.build(plan.view(), geometry, costs, {1u << 20, 1u << 20, 1u << 30});
    return scheduler;
  }

  // The same for all heads, which lie one behind the other as a cache has them.
  static chunkattn::KvView<half> kv(int num_kv_heads) {
    constexpr std::size_t elements = std::size_t{pool} * 64 * dim;
    static DeviceArray<half> values(2 * elements);
    auto view =
        chunkattn::make_kv_view(values.data(), values.data() + elements, {pool, 1, 64, dim});
    view.num_kv_heads = num_kv_heads;
    view.stride_head = 0;
    return view;
  }

  test::RandomPlan plan_;
  cuda::Geometry geometry_;
  cuda::Scheduler scheduler_;
  std::size_t lines_;
  DeviceArray<half> q_, out_;
  DeviceArray<float> lse_, partial_out_, partial_lse_, totals_;
  std::vector<std::int32_t> kv_len_;
  int num_stages_ = 0;
  std::size_t shared_bytes_ = 0;
};

/// Executed instructions, but moves: ptxas leaves few of them.
u64 instructions_of(const Counts& counts) {
  return counts.total().instructions - counts[Kind::move].instructions;
}

/// All blocks of a launch, by one task of each kind.
Counts counts_of(Step& step, int num_blocks) {
  // Tile, rows, tokens, partial results, phase: what else tasks differ in changes few instructions.
  std::map<std::tuple<int, int, int, int, bool>, std::pair<const Task*, u64>> kinds;
  const auto& tasks = step.scheduler().tasks();
  for (const Task& task : tasks) {
    auto& [first, times] = kinds[{task.tile_rows, task.row_count, step.tokens_of(task),
                                  task.merge_count, task.chunk_first != 0}];
    if (first == nullptr) first = &task;
    ++times;
  }
  Counts sum = step.of_block() * static_cast<u64>(num_blocks);
  for (const auto& [kind, found] : kinds)
    sum += step.of_task(*found.first) *
           (found.second * static_cast<u64>(step.geometry().num_kv_heads));
  return sum;
}

double million(u64 n) {
  return static_cast<double>(n) / 1e6;
}

// One KV tile of each height, of 16 that a long task has more than another.
Counts of_16_tiles(int tile_rows) {
  cuda::CostModel costs = model::costs_of_today();
  costs.num_blocks = 1;  // nothing is split
  const auto count = [&](int tokens) {
    Step step(test::make_level_plan({1, tile_rows}, {tokens, 64}), test::mha, costs);
    return step.of_task(step.scheduler().tasks().front());
  };
  Counts counts = count(40 * 64);
  counts -= count(24 * 64);
  return counts;
}

void print_tiles() {
  std::map<int, Counts> tiles;
  for (const int rows : {16, 32, 64, 128}) tiles[rows] = of_16_tiles(rows);
  std::printf("%-36s", "a KV tile of 64 tokens, by a block");
  for (const auto& [rows, counts] : tiles) std::printf(" %6d rows", rows);
  std::printf("\n");
  const auto line = [&](const std::string& name, auto&& of) {
    std::printf("%-36s", name.c_str());
    for (const auto& [rows, counts] : tiles) std::printf(" %11.1f", of(counts, rows));
    std::printf("\n");
  };
  const auto per_tile = [](u64 n) { return static_cast<double>(n) / 16; };
  const auto assumed = [](int rows) { return model::make_item({}, 64, rows, rows, 1, true, 0); };
  for (int k = 0; k < ptxrun::num_kinds; ++k)
    line(ptxrun::name_of(Kind(k)),
         [&](const Counts& c, int) { return per_tile(c[Kind(k)].instructions); });
  line("instructions but mma and mov, a warp", [&](const Counts& c, int) {
    return per_tile(instructions_of(c) - c[Kind::mma].instructions) / cuda::block_warps;
  });
  line("  assumed by the model",
       [&](const Counts&, int rows) { return assumed(rows).instructions; });
  for (const Kind kind : {Kind::ldmatrix, Kind::copy, Kind::load_shared, Kind::store_shared})
    line(std::string("wavefronts of ") + ptxrun::name_of(kind),
         [&](const Counts& c, int) { return per_tile(c[kind].wavefronts); });
  line("wavefronts", [&](const Counts& c, int) { return per_tile(c.total().wavefronts); });
  line("  without conflicts",
       [&](const Counts& c, int) { return per_tile(c.total().least_wavefronts); });
  line("  assumed by the model",
       [&](const Counts&, int rows) { return assumed(rows).shared_bytes / 128; });
  line("sectors", [&](const Counts& c, int) { return per_tile(c.total().sectors); });
  line("  the least", [&](const Counts& c, int) { return per_tile(c.total().least_sectors); });
}

// Counts, then how long each unit of an H200 is busy with them, beside the modelled time.
void print_case(const test::ScheduleCase& c) {
  constexpr double clocks_per_us = 1755, multiprocessors = 132, issued_per_clock = 4;
  const model::Machine machine;
  Step step(c.plan(), c.geometry, model::costs_of_today());
  const Counts counts = counts_of(step, machine.num_blocks);
  const Count all = counts.total();
  const auto clocks = [&](u64 n, double per_clock) {
    return static_cast<double>(n) / (clocks_per_us * multiprocessors * per_clock);
  };
  const double mma_us = static_cast<double>(counts[Kind::mma].instructions) * 4096 /
                        (machine.block_flops_per_us * machine.num_blocks);
  std::printf("%-24s %8.2f %7.2f %8.2f %6.3f %8.2f %6.3f %7.1f %7.1f %7.1f %8.1f\n", c.name.c_str(),
              million(instructions_of(counts)), million(counts[Kind::mma].instructions),
              million(all.wavefronts),
              static_cast<double>(all.wavefronts) / static_cast<double>(all.least_wavefronts),
              million(all.sectors),
              static_cast<double>(all.sectors) / static_cast<double>(all.least_sectors),
              clocks(instructions_of(counts), issued_per_clock), clocks(all.wavefronts, 1), mma_us,
              model::play(machine, step.plan().view(), c.geometry, step.scheduler()));
  std::fflush(stdout);
}

void print_occupancy() {
  std::printf("shared memory of a block:");
  for (const auto& [name, block, all] : {std::tuple{"sm_80", 163, 164}, {"sm_90a", 227, 228}}) {
    const cuda::Occupancy of = cuda::choose_occupancy(dims, 256, block * 1024, all * 1024);
    std::printf(" %s %d stages, %.0f KB, %d blocks;", name, of.num_stages,
                cuda::shared_bytes(dims, of.num_stages, of.tile_rows) / 1024.0, of.blocks_per_sm);
  }
  std::printf("\n\n");
}

void print_cases(const std::string& filter) {
  std::printf(
      "\n%-24s %8s %7s %8s %6s %8s %6s %7s %7s %7s %8s\n%-24s %8s %7s %8s %6s %8s %6s %7s "
      "%7s %7s %8s\n",
      "millions, by warps", "instr.", "mma", "wave-", "of", "sectors", "of", "us of", "us of",
      "us of", "modelled", "", "", "", "fronts", "least", "", "least", "issue", "shared", "mma",
      "us");
  for (const test::ScheduleCase& c : test::two_level_cases())
    if (c.name.find(filter) != std::string::npos) print_case(c);
}

// Whether the sum over kinds of tasks is what a whole step counts, which one block runs.
int check() {
  cuda::CostModel costs = model::costs_of_today();
  costs.num_blocks = 8;
  int wrong = 0;
  const auto expect = [&](bool right, const char* what, u64 found, u64 expected) {
    std::printf("%s: %s: %llu, of a whole step %llu\n", right ? "passed" : "FAILED", what,
                static_cast<unsigned long long>(found), static_cast<unsigned long long>(expected));
    wrong += right ? 0 : 1;
  };
  const auto near = [](u64 a, u64 b) {
    return std::abs(static_cast<double>(a) / static_cast<double>(b) - 1) < 0.02;
  };
  for (const auto& geometry : {cuda::Geometry{2, 2, dim}, cuda::Geometry{32, 2, dim}}) {
    Step step(test::make_level_plan({1, 9}, {700, 130}), geometry, costs);
    const auto& tasks = step.scheduler().tasks();
    Counts whole = step.launch(tasks, static_cast<int>(tasks.size()) * geometry.num_kv_heads);
    const Counts sum = counts_of(step, 1);
    const auto compare = [&](const char* what, u64 a, u64 b, bool exactly) {
      expect(exactly ? a == b : near(a, b), what, a, b);
    };
    compare("mma", sum[Kind::mma].instructions, whole[Kind::mma].instructions, true);
    compare("wavefronts of ldmatrix", sum[Kind::ldmatrix].wavefronts,
            whole[Kind::ldmatrix].wavefronts, true);
    compare("wavefronts", sum.total().wavefronts, whole.total().wavefronts, false);
    compare("sectors", sum.total().sectors, whole.total().sectors, false);
    compare("instructions", sum.total().instructions, whole.total().instructions, false);
    for (const Kind kind : {Kind::ldmatrix, Kind::copy})
      expect(whole[kind].wavefronts == whole[kind].least_wavefronts,
             (std::string("conflicts of ") + ptxrun::name_of(kind)).c_str(),
             whole[kind].least_wavefronts, whole[kind].wavefronts);
  }
  for (const int rows : {16, 32, 64, 128}) {
    const Counts counts = of_16_tiles(rows);
    const double warp =
        static_cast<double>(instructions_of(counts) - counts[Kind::mma].instructions) /
        (16 * cuda::block_warps);
    const double assumed = model::make_item({}, 64, rows, rows, 1, true, 0).instructions;
    const bool right = std::abs(assumed / warp - 1) < 0.05;
    std::printf("%s: instructions of a warp for a tile of %d rows: %.0f, by the model %.0f\n",
                right ? "passed" : "FAILED", rows, warp, assumed);
    wrong += right ? 0 : 1;
  }
  return wrong == 0 ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  if (simt::is_emulated()) {
    std::printf("nothing is counted: CHUNKATTN_PTX names no PTX of the kernels\n");
    return 77;
  }
  const std::string option = argc > 1 ? argv[1] : "";
  if (option == "--check") return check();
  print_occupancy();
  print_tiles();
  print_cases(option);
  return 0;
}
