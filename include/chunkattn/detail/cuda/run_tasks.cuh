// The loop of a thread block over its tasks: which it runs, what it prepares ahead, and which tasks
// wait for which.
//
// Blocks take (task, KV head) pairs by tickets, in the order of tasks: first the chunk-first ones,
// which wait for nobody, then the sequence-first ones, which wait for the partial results that they
// merge. A block draws tickets ahead of its work, two at most, and works in the order it drew them.
// Why that comes to an end, and what a block does ahead for its next task: README.md here.
#pragma once

#include "tile_attention.cuh"

CHUNKATTN_NAMESPACE_BEGIN
namespace detail::cuda {

/// What a block knows of its launch, in shared memory: registers are for products.
struct LaunchState {
  std::uint32_t number;  ///< counts launches; flags are compared with it
  int missing;           ///< of the task at work: not 0 where partial results were not there yet
  int num_pairs;         ///< task * num_kv_heads + KV head
};
static_assert(sizeof(LaunchState) == launch_bytes);

/// The tasks of a block: the one it works on, the next one, and the one after it, which is fetched
/// meanwhile. Its last thread does the fetching: it has nothing to do while token tables are made.
template <class T, HeadDims Dims>
class TaskQueue {
  using Layout = SharedLayout<Dims>;
  using Tables = TileTables<most_tile_rows(Dims)>;

 public:
  CHUNKATTN_DEVICE TaskQueue(const CallArguments<T>& args, unsigned char* shared)
      : args_(args),
        tasks_(reinterpret_cast<Task*>(shared + Layout::tasks)),
        pairs_(reinterpret_cast<int*>(shared + Layout::pairs)),
        tables_(reinterpret_cast<Tables*>(shared + Layout::tables)),
        launch_(*reinterpret_cast<LaunchState*>(shared + Layout::launch)) {}

  /// The task that the block works on, if there is one.
  CHUNKATTN_DEVICE bool has_task() const { return pairs_[ring_index(0)] < launch_.num_pairs; }
  CHUNKATTN_DEVICE const Task& task() const { return tasks_[ring_index(0)]; }
  CHUNKATTN_DEVICE Tables& tables() const { return tables_[count_ % 2]; }
  /// The next one.
  CHUNKATTN_DEVICE bool has_next() const { return pairs_[ring_index(1)] < launch_.num_pairs; }
  CHUNKATTN_DEVICE const Task& next_task() const { return tasks_[ring_index(1)]; }
  CHUNKATTN_DEVICE Tables& next_tables() const { return tables_[(count_ + 1) % 2]; }
  CHUNKATTN_DEVICE int next_kv_head() const { return pairs_[ring_index(1)] % args_.num_kv_heads; }

  /// Which thread it is that fetches.
  CHUNKATTN_DEVICE static bool is_last_thread() { return ptx::thread_index() == block_threads - 1; }
  /// Draws the ticket after that.
  CHUNKATTN_DEVICE int draw() const {
    return is_last_thread() ? ptx::atomic_add(&args_.plan.counters->next, 1) : 0;
  }
  /// Notes it and begins to copy its task.
  CHUNKATTN_DEVICE void fetch(int drawn) const {
    if (!is_last_thread()) return;
    pairs_[ring_index(2)] = drawn;
    if (drawn >= launch_.num_pairs) return;
    const ptx::SharedAddress to = ptx::shared_address(&tasks_[ring_index(2)]);
    const auto* from =
        reinterpret_cast<const unsigned char*>(args_.plan.tasks + drawn / args_.num_kv_heads);
    CHUNKATTN_UNROLL
    for (int i = 0; i < static_cast<int>(sizeof(Task)); i += 16)
      ptx::cp_async_16(to + i, from + i, true);
  }
  /// Goes to the next task, when all but the last `pending` groups of copies have landed; the task
  /// after it is among those that have.
  CHUNKATTN_DEVICE void advance(int pending) {
    ++count_;
    ptx::cp_async_wait(pending);
    ptx::barrier();  // pairs and tasks; the last task's accumulators are read
  }

 private:
  CHUNKATTN_DEVICE unsigned ring_index(unsigned ahead) const { return (count_ + ahead) % 3; }

  const CallArguments<T>& args_;
  Task* tasks_;     // [3]
  int* pairs_;      // [3]: tickets
  Tables* tables_;  // [2]
  const LaunchState& launch_;
  unsigned count_ = 0;  // of advances: two lead to the first task
};

/// Whether the partial results that a sequence-first task merges are there.
template <class T, HeadDims Dims>
class PartialsWait {
  // Threads that do nothing else while token tables are made.
  static constexpr int first_thread = block_threads / 2;

 public:
  CHUNKATTN_DEVICE PartialsWait(const CallArguments<T>& args, const TaskQueue<T, Dims>& queue,
                                LaunchState& launch)
      : args_(args), queue_(queue), launch_(launch) {}

  /// Looks once, a barrier before wait(). `missing` is 0.
  CHUNKATTN_DEVICE void look() {
    if (ptx::thread_index() < first_thread) return;
    const int merge_count = queue_.task().merge_count;
    for (int m = ptx::thread_index() - first_thread; m < merge_count; m += first_thread)
      if (!each_tile(m, [&](const std::uint32_t* flag) {
            return ptx::load_acquire(flag) == launch_.number;
          }))
        launch_.missing = 1;
  }

  /// Waits for what was missing then.
  CHUNKATTN_DEVICE void wait() {
    if (launch_.missing == 0) return;
    const int merge_count = queue_.task().merge_count;
    for (int m = ptx::thread_index(); m < merge_count; m += block_threads)
      each_tile(m, [&](const std::uint32_t* flag) {
        while (ptx::load_acquire(flag) != launch_.number) ptx::pause();
        return true;
      });
    ptx::barrier();  // each thread has acquired its part
    if (ptx::thread_index() == 0) launch_.missing = 0;
  }

 private:
  // f(flag) of merge `m` for each tile that the task's rows are in, until one is false.
  template <class F>
  CHUNKATTN_DEVICE bool each_tile(int m, F&& f) const {
    const Task& task = queue_.task();
    const Merge merge = args_.plan.merges[task.merge_begin + m];
    const int first_row = task.row_begin - merge.row_begin;
    const int last_row = first_row + task.row_count - 1;
    const int bits = merge.tile_bits;
    for (int tile = first_row >> bits; tile <= last_row >> bits; ++tile)
      if (!f(&args_.plan.flags[(merge.flag + tile) * args_.num_kv_heads + queue_.tables().kv_head]))
        return false;
    return true;
  }

  const CallArguments<T>& args_;
  const TaskQueue<T, Dims>& queue_;
  LaunchState& launch_;
};

/// The partial results of a chunk-first task are there, for whoever acquires it.
template <class T>
CHUNKATTN_DEVICE void publish_partials(const CallArguments<T>& args, const Task& task, int kv_head,
                                       std::uint32_t launch) {
  ptx::barrier();  // all threads' rows are stored
  if (ptx::thread_index() == 0)
    ptx::store_release(&args.plan.flags[task.flag * args.num_kv_heads + kv_head], launch);
}

/// What comes before a task's first copies, while all K/V of the task before is on its way: the
/// tables of the next task, and the fetching of the one after it.
template <class T, HeadDims Dims, class V>
CHUNKATTN_DEVICE void look_ahead(TaskQueue<T, Dims>& queue, TileFeed<T, Dims, V>& feed) {
  const bool more = queue.has_next();
  const int drawn = queue.draw();
  const int end =
      more ? feed.make_row_table(queue.next_tables(), queue.next_task(), queue.next_kv_head()) : 0;
  ptx::barrier();  // row table; the token tables of the task before are used up
  queue.fetch(drawn);
  if (more)
    feed.make_token_tables(queue.next_tables(), queue.next_task(), end);
  else
    feed.end();
}

/// The copies of the next task that must wait for the last products of the one before.
template <class T, HeadDims Dims, class V>
CHUNKATTN_DEVICE void load_ahead(const TaskQueue<T, Dims>& queue, TileFeed<T, Dims, V>& feed) {
  ptx::barrier();  // stages and queries are used up; the next task's tables are made
  feed.load_queries(queue.next_tables(), queue.next_task());
  ptx::cp_async_commit();  // and the task after that, unless it went with a tile
  feed.load_tiles(0, feed.tiles_beside());
}

/// Whether the kernel of variant V has tiles of 128 rows.
template <class V, HeadDims Dims>
inline constexpr bool large_tiles = std::is_same_v<V, NoVariant> && has_large_tiles(Dims);

template <class T, HeadDims Dims, int TileRows, class V>
CHUNKATTN_DEVICE void run_task(const AttentionArguments<T, V>& args, TaskQueue<T, Dims>& queue,
                               TileFeed<T, Dims, V>& feed, LaunchState& launch,
                               unsigned char* shared) {
  const Task& task = queue.task();
  const auto& tables = queue.tables();
  PartialsWait<T, Dims> partials(args, queue, launch);
  TileAttention<T, Dims, TileRows, V> tile(args, feed, tables, shared);
  tile.run([&] {
    look_ahead(queue, feed);
    partials.look();
  });
  load_ahead(queue, feed);
  if constexpr (TileRows == max_tile_rows) {
    if (task.chunk_first != 0) {
      tile.template write_results<false>(task);
      publish_partials(args, task, tables.kv_head, launch.number);
    } else {
      tile.template write_results<true>(task);  // there is nothing that it merges
    }
  } else {
    float* accumulators = feed.accumulators();
    const bool streamed = tile.streamed();
    if (streamed) tile.store_accumulators(task.row_count, accumulators);
    ptx::barrier();  // accumulators and stats
    if (task.chunk_first != 0) {
      write_rows<T, Dims, TileRows, false>(args, task, tables.kv_head, tables.rows, shared,
                                           accumulators, streamed);
      publish_partials(args, task, tables.kv_head, launch.number);
    } else {
      partials.wait();
      write_rows<T, Dims, TileRows, true>(args, task, tables.kv_head, tables.rows, shared,
                                          accumulators, streamed);
    }
  }
}

/// The last block to leave sets the tickets: all have drawn their last one, and nobody waits any
/// more. Each has drawn two, and one for each of its tasks. Another number, or a block too many: a
/// launch that ran beside this one has drawn of the same tickets. Then they stay as they are, so
/// that no block begins anew, until prepare() sets them.
CHUNKATTN_DEVICE void leave_launch(const PlanMemory& plan, const LaunchState& launch) {
  Counters& counters = *plan.counters;
  ptx::fence();  // the block's draws, before it is counted
  const int others = ptx::atomic_add(&counters.left, 1);
  if (others < ptx::grid_size() - 1) return;
  ptx::fence();  // it has seen all leave: then it sees all draws
  const int drawn = ptx::atomic_add(&counters.next, 0);
  if (others == ptx::grid_size() - 1 && drawn == launch.num_pairs + 2 * ptx::grid_size())
    counters = {0, 0, launch.number};
  else
    *plan.overlapped = 1;
}

template <class T, HeadDims Dims, class V>
CHUNKATTN_DEVICE void run_tasks(const AttentionArguments<T, V>& args) {
  unsigned char* shared = ptx::dynamic_shared();
  LaunchState& launch = *reinterpret_cast<LaunchState*>(shared + SharedLayout<Dims>::launch);
  TaskQueue<T, Dims> queue(args, shared);
  TileFeed<T, Dims, V> feed(args, shared);
  if (queue.is_last_thread())
    launch = {args.plan.counters->launches + 1, 0, args.plan.header->num_tasks * args.num_kv_heads};
  queue.fetch(queue.draw());
  ptx::cp_async_commit();
  queue.advance(0);  // to before the first task
  look_ahead(queue, feed);
  load_ahead(queue, feed);
  if (feed.goes_on) feed.load_tiles(0, args.num_stages - 1);
  for (queue.advance(feed.tiles_beside()); queue.has_task(); queue.advance(feed.tiles_beside())) {
    const int rows = queue.task().tile_rows;
    if (rows == 16)
      run_task<T, Dims, 16>(args, queue, feed, launch, shared);
    else if (rows == 32)
      run_task<T, Dims, 32>(args, queue, feed, launch, shared);
    else if (!large_tiles<V, Dims> || rows == 64)
      run_task<T, Dims, 64>(args, queue, feed, launch, shared);
    else if constexpr (large_tiles<V, Dims>)
      run_task<T, Dims, 128>(args, queue, feed, launch, shared);
  }
  ptx::cp_async_wait(0);  // groups without copies
  if (ptx::thread_index() == 0) leave_launch(args.plan, launch);
}

/// Chunk-first tasks (paper section 3.2, Algorithm 1): what several sequences share, read once for
/// all their rows; each row's partial result goes to the workspace. Then sequence-first ones
/// (Algorithm 2): what a sequence has for itself, streamed once, merged with the partials of what
/// it shares, normalised and written in the caller's order. With nothing shared this is a plain
/// paged kernel.
///
/// V: the variant (variants.hpp). Compiled only for those that run() is called with. (Two numbers,
/// not HeadDims: nvcc 13.0 cannot write the host side of a kernel with an argument of a class.)
template <class T, int HeadDim, int ValueDim, class V = NoVariant>
CHUNKATTN_KERNEL CHUNKATTN_LAUNCH_BOUNDS(block_threads, wanted_blocks(HeadDims{HeadDim, ValueDim}))
    attention_kernel(const AttentionArguments<T, V> args) {
  run_tasks<T, HeadDims{HeadDim, ValueDim, static_cast<int>(sizeof(stored_element<T, V>))}>(args);
}

}  // namespace detail::cuda
CHUNKATTN_NAMESPACE_END
