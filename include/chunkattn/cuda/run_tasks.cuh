// Which block does what, and who waits for whom.
//
// Blocks take (task, KV head) pairs by tickets, in the order of the task list: first the
// chunk-first ones, which wait for nobody, then the sequence-first ones, which wait for the partial
// results that they merge. A block draws its next ticket while it works on the last one, and works
// on them in the order it drew them. So whoever holds a chunk-first ticket has only such ahead of
// it and comes to an end, however few blocks are resident; and whoever waits, waits for such a
// ticket, drawn by a block that runs. Which block runs which task does not change the result.
#pragma once

#include "tile_attention.cuh"

CHUNKATTN_NAMESPACE_BEGIN
namespace cuda_detail {

/// The tasks of a block, each fetched while the one before it runs. Its last thread does the
/// fetching: it has nothing to do while the tables of a task are made.
template <class T, HeadDims Dims>
class TaskQueue {
  using Layout = SharedLayout<Dims>;

 public:
  CHUNKATTN_DEVICE TaskQueue(const CallArguments<T>& args, unsigned char* shared)
      : args_(args),
        tasks_(reinterpret_cast<Task*>(shared + Layout::tasks)),
        tickets_(reinterpret_cast<int*>(shared + Layout::tickets)),
        num_chunk_first_(args.plan.header->num_chunk_first),
        items_((num_chunk_first_ + args.plan.header->num_sequence_first) * args.num_kv_heads) {
    draw();
    fetch();
  }

  /// Goes to the task that was fetched. False: there is none.
  CHUNKATTN_DEVICE bool next() {
    slot_ ^= 1;
    ptx::cp_async_wait(0);
    ptx::barrier();  // ticket and task; the last task's tables and accumulators are read
    return tickets_[slot_] < items_;
  }
  CHUNKATTN_DEVICE const Task& task() const { return tasks_[slot_]; }
  CHUNKATTN_DEVICE int kv_head() const { return tickets_[slot_] % args_.num_kv_heads; }
  CHUNKATTN_DEVICE bool is_chunk_first() const {
    return tickets_[slot_] < num_chunk_first_ * args_.num_kv_heads;
  }

  /// Draws the ticket after this one.
  CHUNKATTN_DEVICE void draw() {
    if (is_last_thread()) tickets_[slot_ ^ 1] = ptx::atomic_add(&args_.plan.counters->next, 1);
  }
  /// Begins to copy its task.
  CHUNKATTN_DEVICE void fetch() {
    if (!is_last_thread()) return;
    const int ticket = tickets_[slot_ ^ 1];
    if (ticket < items_) {
      const ptx::SharedAddress to = ptx::shared_address(&tasks_[slot_ ^ 1]);
      const auto* from =
          reinterpret_cast<const unsigned char*>(args_.plan.tasks + ticket / args_.num_kv_heads);
      CHUNKATTN_UNROLL
      for (int i = 0; i < static_cast<int>(sizeof(Task)); i += 16)
        ptx::cp_async_16(to + i, from + i, true);
    }
    ptx::cp_async_commit();
  }

 private:
  CHUNKATTN_DEVICE static bool is_last_thread() { return ptx::thread_index() == block_threads - 1; }

  const CallArguments<T>& args_;
  Task* tasks_;   // [2]
  int* tickets_;  // [2]
  int num_chunk_first_, items_;
  int slot_ = 1;
};

/// The partial results that a sequence-first task merges: are they there?
template <class T, HeadDims Dims>
class PartialsWait {
  // Threads that do nothing else while the tables of a task are made.
  static constexpr int first_thread = block_threads / 2;

 public:
  CHUNKATTN_DEVICE PartialsWait(const CallArguments<T>& args, const Task& task, int kv_head,
                                std::uint32_t launch, unsigned char* shared)
      : args_(args),
        task_(task),
        kv_head_(kv_head),
        launch_(launch),
        missing_(reinterpret_cast<int*>(shared + SharedLayout<Dims>::missing)) {}

  /// Looks once, before the barriers of the task. *missing is 0.
  CHUNKATTN_DEVICE void look() {
    if (ptx::thread_index() < first_thread) return;
    for (int m = ptx::thread_index() - first_thread; m < task_.merge_count; m += first_thread)
      if (!each_tile(m,
                     [&](const std::uint32_t* flag) { return ptx::load_acquire(flag) == launch_; }))
        *missing_ = 1;
  }

  /// Waits for what was missing then.
  CHUNKATTN_DEVICE void wait() {
    if (*missing_ == 0) return;
    for (int m = ptx::thread_index(); m < task_.merge_count; m += block_threads)
      each_tile(m, [&](const std::uint32_t* flag) {
        while (ptx::load_acquire(flag) != launch_) ptx::pause();
        return true;
      });
    ptx::barrier();  // each thread has acquired its part
    if (ptx::thread_index() == 0) *missing_ = 0;
  }

 private:
  // f(flag) of merge `m` for each tile that the task's rows are in, until one is false.
  template <class F>
  CHUNKATTN_DEVICE bool each_tile(int m, F&& f) const {
    const Merge merge = args_.plan.merges[task_.merge_begin + m];
    const int first_row = task_.row_begin - merge.row_begin;
    const int last_row = first_row + task_.row_count - 1;
    for (int tile = first_row / max_tile_rows; tile <= last_row / max_tile_rows; ++tile)
      if (!f(&args_.plan.flags[(merge.flag + tile) * args_.num_kv_heads + kv_head_])) return false;
    return true;
  }

  const CallArguments<T>& args_;
  const Task& task_;
  int kv_head_;
  std::uint32_t launch_;
  int* missing_;
};

/// The partial results of a chunk-first task are there, for whoever acquires it.
template <class T>
CHUNKATTN_DEVICE void publish_partials(const CallArguments<T>& args, const Task& task, int kv_head,
                                       std::uint32_t launch) {
  ptx::barrier();  // all threads' rows are stored
  if (ptx::thread_index() == 0)
    ptx::store_release(&args.plan.flags[task.flag * args.num_kv_heads + kv_head], launch);
}

template <class T, HeadDims Dims, int TileRows, class V>
CHUNKATTN_DEVICE void run_task(const AttentionArguments<T, V>& args, TaskQueue<T, Dims>& queue,
                               std::uint32_t launch, unsigned char* shared) {
  const Task& task = queue.task();
  const int kv_head = queue.kv_head();
  PartialsWait<T, Dims> partials(args, task, kv_head, launch, shared);
  queue.draw();
  partials.look();
  TileAttention<T, Dims, TileRows, V> tile(args, task, kv_head, shared);
  const bool streamed = tile.run();
  queue.fetch();
  if (queue.is_chunk_first()) {
    write_rows<T, Dims, TileRows, false>(args, task, shared, streamed);
    publish_partials(args, task, kv_head, launch);
  } else {
    partials.wait();
    write_rows<T, Dims, TileRows, true>(args, task, shared, streamed);
  }
}

template <class T, HeadDims Dims, class V>
CHUNKATTN_DEVICE void run_tasks(const AttentionArguments<T, V>& args) {
  unsigned char* shared = ptx::dynamic_shared();
  Counters& counters = *args.plan.counters;
  const std::uint32_t launch = counters.launches + 1;
  if (ptx::thread_index() == 0) *reinterpret_cast<int*>(shared + SharedLayout<Dims>::missing) = 0;
  TaskQueue<T, Dims> queue(args, shared);
  while (queue.next()) {
    if (queue.task().tile_rows == 16)
      run_task<T, Dims, 16>(args, queue, launch, shared);
    else if (queue.task().tile_rows == 32)
      run_task<T, Dims, 32>(args, queue, launch, shared);
    else
      run_task<T, Dims, 64>(args, queue, launch, shared);
  }
  // The last block to leave: all have drawn their last ticket, and nobody waits any more.
  if (ptx::thread_index() == 0 && ptx::atomic_add(&counters.left, 1) == ptx::grid_size() - 1)
    counters = {0, 0, launch};
}

}  // namespace cuda_detail
CHUNKATTN_NAMESPACE_END
