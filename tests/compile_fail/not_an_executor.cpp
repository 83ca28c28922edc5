// expect: Exec must offer concurrency() and parallel_for(n, f), see the concept Executor
#include <chunkattn/chunk_attention.hpp>

struct Queue {
  int concurrency() const { return 1; }
#ifdef CHUNKATTN_CONTROL
  template <class F>
  void parallel_for(int n, F&& f) {
    for (int i = 0; i < n; ++i) f(i);
  }
#endif
};

Queue queue;
chunkattn::ChunkAttention<chunkattn::Cpu, 64, 64, Queue> attention(queue);
