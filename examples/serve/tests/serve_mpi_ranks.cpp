// What serve_mpi_test starts under mpirun: serve_mpi_ranks collectives, context,
// fail RANK or stray. And `mpirun -n 3 serve_mpi_ranks measure`: what collectives cost here.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "../../support/options.hpp"
#include "context_check.hpp"
#include "model/load.hpp"
#include "parallel/parallel_engine.hpp"
#include "parallel/split_model.hpp"
#include "ranks/message.hpp"
#include "ranks/run_rank.hpp"
#include "tests/support/random.hpp"

using namespace serve;

namespace {

void expect(bool good, const std::string& what) {
  if (!good) throw std::logic_error("not as expected: " + what);
}

/// Every rank knows what all ranks bring along, and so what must come out: the same bits.
int check_collectives(Communicator& ranks) {
  test::Random random(1);  // of one seed: the same numbers on all ranks
  const auto rank = static_cast<std::size_t>(ranks.rank());
  const auto size = static_cast<std::size_t>(ranks.size());
  for (int round = 0; round < 60; ++round) {
    const auto count = static_cast<std::size_t>(random.uniform(0, round < 50 ? 40 : 20000));
    std::vector<std::vector<float>> values(size, std::vector<float>(count));
    for (auto& of_rank : values)
      for (float& value : of_rank) value = random.normal();
    std::vector<float> sums = values[0];
    for (std::size_t r = 1; r < size; ++r)
      for (std::size_t i = 0; i < count; ++i) sums[i] += values[r][i];

    std::vector<float> sum = values[rank];
    ranks.sum(sum);
    expect(sum == sums, "sum");

    std::vector<float> all(rank == 0 ? size * count : 0), concatenated;
    for (const auto& of_rank : values)
      concatenated.insert(concatenated.end(), of_rank.begin(), of_rank.end());
    ranks.gather(values[rank], all);
    expect(rank != 0 || all == concatenated, "gather");

    RankMessage message;
    if (rank == 0) message.put(values[size - 1]);
    message.broadcast(ranks);
    std::vector<float> received;
    message.take(received);
    expect(received == values[size - 1] && message.empty(), "broadcast");
  }
  if (rank == 0) std::printf("collectives are right\n");
  return 0;
}

/// One rank fails while the others wait for it in the next sum.
int fail(Communicator& ranks, int failing) {
  std::vector<float> values(1000, 1.0f);
  ranks.sum(values);
  if (ranks.rank() == failing) throw std::runtime_error("no more of this");
  ranks.sum(values);
  return 0;
}

/// The last rank has a request that rank 0 does not know of, and with it another step.
int stray(Communicator& ranks) {
  chunkattn::ThreadPool pool(1);
  const Config config{64, 40, 1, 8, 4, 50, 64, true, 1e-5f, 10000.0f};
  const Model part =
      part_of(random_model(config, Element::fp32, 1, pool), ranks.rank(), ranks.size());
  Products products(pool, ProductKind::own, ranks);
  auto engine = make_engine(part, products, {});
  Request request;
  request.prompt = {5, 6, 7};
  request.max_length = 10;
  if (ranks.rank() + 1 == ranks.size()) {
    Request unknown = request;
    unknown.id = 1;
    engine->submit(unknown);
  }
  if (ranks.rank() > 0) return follow(ranks, *engine), 0;
  engine = lead(ranks, std::move(engine));
  engine->submit(request);
  while (engine->step(0)) {
  }
  return 0;
}

int check_context(Communicator& ranks) {
  for (std::uint64_t stream = 0; stream < 5; ++stream) test::ContextRank(ranks, stream).run();
  if (ranks.rank() == 0) std::printf("the context is right\n");
  return 0;
}

/// Microseconds of a sum over the ranks and of a message from rank 0: of 100 runs of 20 the best,
/// which nobody else's work held up, and the median.
int measure(Communicator& ranks) {
  using Clock = std::chrono::steady_clock;
  const auto time = [&](const char* what, std::size_t bytes, const auto& collective) {
    constexpr int times = 20;
    std::vector<double> runs(100);
    for (double& run : runs) {
      const auto start = Clock::now();
      for (int i = 0; i < times; ++i) collective();
      run = std::chrono::duration<double, std::micro>(Clock::now() - start).count() / times;
    }
    std::sort(runs.begin(), runs.end());
    if (ranks.rank() == 0)
      std::printf("%-9s %8zu bytes  best %8.2f us  median %8.2f us\n", what, bytes, runs[0],
                  runs[runs.size() / 2]);
  };
  for (const std::size_t count : {1u, 576u, 4096u, 32768u, 262144u}) {
    std::vector<float> values(count);
    time("sum", count * sizeof(float), [&] { ranks.sum(values); });
  }
  std::uint64_t value = 0;
  time("broadcast", sizeof value,
       [&] { ranks.broadcast(std::as_writable_bytes(std::span(&value, 1))); });
  return 0;
}

int run(Communicator& ranks, const std::string& what, int argument) {
  if (what == "measure") return measure(ranks);
  if (what == "context") return check_context(ranks);
  if (what == "fail") return fail(ranks, argument);
  return what == "stray" ? stray(ranks) : check_collectives(ranks);
}

}  // namespace

int main(int argc, char** argv) {
  return examples::guarded("serve", [&] {
    const std::string what = argc > 1 ? argv[1] : "collectives";
    const int argument = argc > 2 ? std::atoi(argv[2]) : 0;
    return run_rank("tensor", [&](Communicator& ranks) { return run(ranks, what, argument); });
  });
}
