// What the demo and the benchmarks compute by vectors of their own, compiled for lesser processors.
#include <cstddef>
#include <cstdint>

#include "bench/machine.hpp"
#include "examples/shared_prompt/baselines.hpp"

template void shared_prompt::detail::naive_head<128>(const float*, const float*, const float*,
                                                     std::size_t, float, float*, float*);
template void shared_prompt::detail::naive_head<128>(const float*, const chunkattn::half*,
                                                     const chunkattn::half*, std::size_t, float,
                                                     float*, float*);
template void shared_prompt::detail::naive_head<128>(const float*, const chunkattn::bfloat16*,
                                                     const chunkattn::bfloat16*, std::size_t, float,
                                                     float*, float*);

double rates_of_units(chunkattn::ThreadPool& pool) {
  return bench::matrix_rate(pool, 1) + bench::byte_rate(pool, 1) + bench::pair_rate(pool, 1);
}

struct Serial {
  int concurrency() const { return 1; }
  template <class Task>
  void parallel_for(int count, const Task& task) {
    for (int i = 0; i < count; ++i) task(i);
  }
};

// Of which run.sh reads the assembler: the loops must not touch memory.
double peak_of_fma(int iterations, std::uint64_t& sink) {
  Serial serial;
  return examples::fma_rate(serial, iterations, sink);
}
