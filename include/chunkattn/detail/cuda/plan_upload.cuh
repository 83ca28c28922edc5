// The plan's copy on the device (paper section 3.3, lazy context copy): what changed is uploaded
// from double-buffered pinned memory, an ordinary decode step is one small kernel and no upload.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include "../../attention_options.hpp"
#include "../support/array.hpp"
#include "../support/check.hpp"
#include "device_plan.hpp"
#include "runtime.cuh"
#include "schedule_cache.cuh"

CHUNKATTN_NAMESPACE_BEGIN

namespace detail::cuda {

/// What ChunkAttention<Cuda>::prepare() had to do, counted for tests and for curious users.
struct UploadCounts {
  std::uint64_t schedules = 0;  ///< task lists built
  std::uint64_t uploads = 0;    ///< prepares that copied something
  std::uint64_t bytes = 0;      ///< copied
  std::uint64_t advances = 0;   ///< steps made by the advance kernel alone
};

/// `limits` with every field set; throws InvalidArgument where one makes no sense.
[[nodiscard]] inline CudaOptions::Limits completed(CudaOptions::Limits limits) {
  detail::check_argument(limits.max_rows > 0 && limits.max_rows <= (1 << 20), "limits.max_rows",
                         limits.max_rows, "between 1 and 1048576");
  detail::check_argument(limits.num_kv_heads > 0, "limits.num_kv_heads", limits.num_kv_heads,
                         "at least 1");
  detail::check_argument(limits.num_qo_heads > 0 && limits.num_qo_heads % limits.num_kv_heads == 0,
                         "limits.num_qo_heads", limits.num_qo_heads,
                         "a positive multiple of num_kv_heads");
  detail::check_argument(limits.num_qo_heads / limits.num_kv_heads <= 64, "limits.num_qo_heads",
                         limits.num_qo_heads, "at most 64 query heads per KV head");
  detail::check_argument(limits.num_qo_heads <= 0x7fffffff / limits.max_rows, "limits.num_qo_heads",
                         limits.num_qo_heads, "fewer: max_rows * num_qo_heads is at most 2^31 - 1");
  for (const auto& [name, value] : {std::pair{"limits.max_segments", limits.max_segments},
                                    std::pair{"limits.max_pieces", limits.max_pieces},
                                    std::pair{"limits.max_copies", limits.max_copies},
                                    std::pair{"limits.max_partial_rows", limits.max_partial_rows}})
    detail::check_argument(value.value_or(0) >= 0, name, value.value_or(0), "a count");
  detail::check_argument(limits.max_windows >= 0 && limits.max_windows < ScheduleCache::most,
                         "limits.max_windows", limits.max_windows, "0 to 7");
  const auto complete = [](std::optional<std::int32_t>& limit, std::int32_t usual) {
    limit = limit.value_or(usual);
  };
  complete(limits.max_segments, 4 * limits.max_rows);
  complete(limits.max_pieces, 64 * limits.max_rows + 4096);
  complete(limits.max_copies, limits.max_rows);
  complete(limits.max_partial_rows, 4 * (std::min)(limits.max_rows, 768) + 256);
  return limits;
}

/// Arrays of a plan that the device has a copy of.
struct PlanArray {
  enum Index {
    segments,
    pieces,
    row_token,
    row_segment,
    row_kv_len,
    writes,
    copies,
    lists,  // header, tasks and merges of each schedule
    most = lists + 3 * ScheduleCache::most
  };
  static constexpr int header(int schedule) noexcept { return lists + 3 * schedule; }
  static constexpr int tasks(int schedule) noexcept { return lists + 3 * schedule + 1; }
  static constexpr int merges(int schedule) noexcept { return lists + 3 * schedule + 2; }
};

/// Where each array lies in the workspace; the uploaded part comes first and is mirrored in pinned
/// memory.
struct WorkspaceLayout {
  std::size_t offset[PlanArray::most] = {};
  int num_schedules = 0;
  std::size_t upload_bytes = 0;
  std::size_t counters = 0, flags = 0;  // zero at first
  std::size_t partial_out = 0, partial_lse = 0, totals = 0;
  std::size_t total = 0;
  ScheduleCapacity capacity;

  /// \param blocks  of a launch, at most
  WorkspaceLayout(const CudaOptions::Limits& limits, HeadDims dims, int blocks) {
    const std::int64_t group = limits.num_qo_heads / limits.num_kv_heads;
    const std::int64_t tiles = limits.max_rows + limits.max_rows * group / usual_tile_rows + 1;
    const std::int64_t merge_tasks = limits.max_rows * (group / merge_rows(dims.v) + 1);
    // With Reduce::batch_invariant at most a task and a merge for each row's each partial result.
    const std::int64_t partial_rows = *limits.max_partial_rows;
    capacity.tasks =
        to_size((std::max)(3 * tiles + merge_tasks + 1024, partial_rows + limits.max_rows));
    capacity.merges = to_size((std::max)(std::int64_t{16} * limits.max_rows + 1024, partial_rows));
    capacity.partials = to_size(partial_rows * limits.num_qo_heads);
    num_schedules = 1 + limits.max_windows;
    offset[PlanArray::segments] = take<Segment>(to_size(*limits.max_segments));
    offset[PlanArray::pieces] = take<Piece>(to_size(*limits.max_pieces));
    for (const int array : {PlanArray::row_token, PlanArray::row_segment, PlanArray::row_kv_len})
      offset[array] = take<std::int32_t>(to_size(limits.max_rows));
    offset[PlanArray::writes] = take<WriteTarget>(to_size(limits.max_rows));
    offset[PlanArray::copies] = take<RowCopy>(to_size(*limits.max_copies));
    for (int i = 0; i < num_schedules; ++i) {
      offset[PlanArray::header(i)] = take<PlanHeader>(1);
      offset[PlanArray::tasks(i)] = take<Task>(capacity.tasks);
      offset[PlanArray::merges(i)] = take<Merge>(capacity.merges);
    }
    upload_bytes = total;
    counters = take<Counters>(1);
    flags = take<std::uint32_t>(capacity.tasks * to_size(limits.num_kv_heads));
    partial_out = take<float>(capacity.partials * to_size(dims.v));
    partial_lse = take<float>(capacity.partials);
    totals = take<std::byte>(to_size(blocks) * total_bytes(dims));
  }

 private:
  template <class E>
  std::size_t take(std::size_t count) {
    const std::size_t at = total;
    total += (count * sizeof(E) + 255) / 256 * 256;
    return at;
  }
};

/// Keeps the device's copy of a plan up to date, in the order of one stream.
class PlanUpload {
 public:
  /// \param most_blocks  of a launch
  PlanUpload(const CudaOptions::Limits& limits, const Geometry& geometry, const CostModel& model,
             int most_blocks, std::byte* workspace)
      : limits_(limits),
        layout_(limits, geometry.dims(), most_blocks),
        geometry_(geometry),
        model_(model),
        workspace_(workspace),
        staging_{PinnedMemory(layout_.upload_bytes), PinnedMemory(layout_.upload_bytes)},
        schedules_(layout_.num_schedules),
        made_(to_size(layout_.num_schedules)) {
    const auto rows = to_size(limits.max_rows);
    kv_len_.reserve(rows);
    writes_.reserve(rows);
    tokens_.reserve(rows);
    deepest_.reserve(rows);
    copies_.reserve(to_size(*limits.max_copies));
    *overlapped_word() = 0;
  }

  /// The device may still be copying from pinned memory.
  ~PlanUpload() {
    for (Event& event : events_) forget_error(event.try_wait());
  }
  PlanUpload(const PlanUpload&) = delete;
  PlanUpload& operator=(const PlanUpload&) = delete;

  /// Makes the device's plan equal to `plan`, by operations on `stream`. No memory is allocated
  /// and the host waits only when two earlier uploads are still under way.
  void prepare(const PlanView& plan, cudaStream_t stream) {
    check(plan);
    check_launches();
    const Changes changes = difference(plan);
    if (!changes.any() && !reset_tickets_) return;
    if (is_capturing(stream))
      detail::fail_argument("stream", "capturing",
                            "prepare(plan, stream) before the capture: an upload inside it would "
                            "be replayed with stale contents");
    replace(plan, changes, stream);
    begin_step(changes.advance, stream);
    if (changes.advance) ++counts_.advances;
    remember(plan);
  }

  /// Which schedule is for a variant that hides these keys, of the plan that was prepared last;
  /// made and copied where there is none yet. For a kernel with or without `large_tiles`: where one
  /// without them uses the list that hides nothing, that has none from then on.
  int schedule_for(const HiddenKeys& hidden, bool large_tiles, const PlanView& plan, bool capturing,
                   cudaStream_t stream) {
    if (hidden.none() && !large_tiles) leave_large_tiles(plan, stream);
    int i = schedules_.find(hidden);
    if (i < 0) {
      if (capturing)
        detail::fail_argument("stream", "capturing",
                              "prepare(layer, plan, variant, stream) before the capture: no other "
                              "call has used this window yet");
      i = schedules_.replaceable();
      if (i < 0)
        detail::fail_argument("limits.max_windows", limits_.max_windows,
                              "more: captured graphs use a window each");
      build(i, plan, hidden);
      std::swap(schedules_[i], made_[to_size(i)]);
      schedules_[i].last_use = 0;
      Changes changes;
      changes.list(i);
      upload(plan, changes, stream);
    }
    schedules_.use(i, capturing);
    return i;
  }

  /// What an element of K and V takes in memory: what lists are cut for from the next one on. All
  /// are right for any.
  void use_elements(int bytes) noexcept { geometry_.stored_bytes = bytes; }
  [[nodiscard]] const Geometry& geometry() const noexcept { return geometry_; }

  // Sets the tickets; with `advance` each row sees one position more, too.
  void begin_step(bool advance, cudaStream_t stream) {
    const int grid = advance ? (limits_.max_rows + 255) / 256 : 1;
    launch("begin_step_kernel", begin_step_[advance ? 1 : 0], grid, 256, 0, stream, memory());
    reset_tickets_ = false;
  }

  [[nodiscard]] PlanMemory memory(int schedule = 0) const noexcept {
    PlanMemory memory{};
    memory.header = at<PlanHeader>(PlanArray::header(schedule));
    memory.tasks = at<Task>(PlanArray::tasks(schedule));
    memory.merges = at<Merge>(PlanArray::merges(schedule));
    memory.segments = at<Segment>(PlanArray::segments);
    memory.pieces = at<Piece>(PlanArray::pieces);
    memory.row_token = at<std::int32_t>(PlanArray::row_token);
    memory.row_kv_len = at<std::int32_t>(PlanArray::row_kv_len);
    memory.row_segment = at<std::int32_t>(PlanArray::row_segment);
    memory.writes = at<WriteTarget>(PlanArray::writes);
    memory.copies = at<RowCopy>(PlanArray::copies);
    memory.counters = reinterpret_cast<Counters*>(workspace_ + layout_.counters);
    memory.flags = reinterpret_cast<std::uint32_t*>(workspace_ + layout_.flags);
    memory.partial_out = reinterpret_cast<float*>(workspace_ + layout_.partial_out);
    memory.partial_lse = reinterpret_cast<float*>(workspace_ + layout_.partial_lse);
    memory.totals = reinterpret_cast<float*>(workspace_ + layout_.totals);
    memory.overlapped = overlapped_word();
    return memory;
  }
  /// Before the first launch: no flag has its number.
  void zero_counters() {
    zero_now(workspace_ + layout_.counters, layout_.partial_out - layout_.counters);
  }
  [[nodiscard]] const Scheduler& scheduler(int schedule = 0) const noexcept {
    return schedules_[schedule].list;
  }
  [[nodiscard]] const UploadCounts& counts() const noexcept { return counts_; }
  /// begin_step_kernel, without and with `advance`.
  void set_kernels(void (*plain)(PlanMemory), void (*advance)(PlanMemory)) noexcept {
    begin_step_[0] = plain;
    begin_step_[1] = advance;
  }

 private:
  void check(const PlanView& plan) const {
    detail::check_argument(plan.num_rows > 0 && plan.num_rows <= limits_.max_rows, "plan.num_rows",
                           plan.num_rows, {"1 to limits.max_rows = ", limits_.max_rows});
    const auto at_most = [](const char* name, std::int32_t value, const char* limit,
                            std::int32_t most) {
      detail::check_argument(value <= most, name, value, {"at most ", limit, " = ", most});
    };
    at_most("plan.num_segments", plan.num_segments, "limits.max_segments", *limits_.max_segments);
    at_most("plan.num_pieces", plan.num_pieces, "limits.max_pieces", *limits_.max_pieces);
    at_most("plan.num_copies", plan.num_copies, "limits.max_copies", *limits_.max_copies);
  }

  // What launches have found out about themselves by now.
  void check_launches() {
    volatile std::uint32_t* const overlapped = overlapped_word();
    if (*overlapped == 0) return;
    *overlapped = 0;
    reset_tickets_ = true;
    detail::fail_argument("stream", "shared by launches",
                          "one launch of an object at a time: launches overlapped, on two streams "
                          "or in branches of a graph, and what they wrote is not valid");
  }
  [[nodiscard]] std::uint32_t* overlapped_word() const noexcept {
    return reinterpret_cast<std::uint32_t*>(overlapped_.data());
  }

  template <class E>
  static bool equal(const std::vector<E>& known, const E* now, std::int32_t count) {
    const auto n = to_size(count);
    return known.size() == n && std::memcmp(known.data(), now, n * sizeof(E)) == 0;
  }

  // How a plan differs from what the device has.
  struct Changes {
    bool array[PlanArray::most] = {};  // to be copied
    bool advance = false;              // the advance kernel makes the rest

    void list(int i) noexcept {
      array[PlanArray::header(i)] = array[PlanArray::tasks(i)] = array[PlanArray::merges(i)] = true;
    }
    [[nodiscard]] bool has_list(int i) const noexcept { return array[PlanArray::tasks(i)]; }
    [[nodiscard]] bool any_array() const noexcept {
      return std::any_of(std::begin(array), std::end(array), [](bool changed) { return changed; });
    }
    [[nodiscard]] bool any() const noexcept { return any_array() || advance; }
  };

  [[nodiscard]] Changes difference(const PlanView& plan) {
    Changes changes;
    const bool same_rows = plan.segments == segments_ &&
                           plan.segments_version == segments_version_ &&
                           equal(tokens_, plan.row_token, plan.num_rows) &&
                           equal(deepest_, plan.row_segment, plan.num_rows);
    if (!same_rows) {
      std::fill_n(changes.array, static_cast<int>(PlanArray::lists), true);
      schedules_.drop_unused();
      for (int i = 0; i < schedules_.count(); ++i)
        if (schedules_.in_use(i)) changes.list(i);
      return changes;
    }
    const bool grown = plan.pieces_version != pieces_version_;
    const bool same_lengths = equal(kv_len_, plan.row_kv_len, plan.num_rows);
    for (int i = 0; i < schedules_.count() && (grown || !same_lengths); ++i)
      if (schedules_.in_use(i) && !schedules_[i].serves(plan)) changes.list(i);
    if (grown) changes.array[PlanArray::segments] = changes.array[PlanArray::pieces] = true;
    // Copies that every layer is to make stand there once; an older list does no harm.
    if (plan.num_copies > 0 && !equal(copies_, plan.copies, plan.num_copies))
      changes.array[PlanArray::copies] = true;
    if (to_size(plan.num_copies) != copies_.size()) changes.array[PlanArray::header(0)] = true;
    if (!same_lengths || !equal(writes_, plan.writes, plan.num_rows)) {
      changes.advance = is_next_step(plan);
      changes.array[PlanArray::row_kv_len] = changes.array[PlanArray::writes] = !changes.advance;
    }
    return changes;
  }

  // The device has `plan` now.
  void remember(const PlanView& plan) {
    segments_ = plan.segments;
    segments_version_ = plan.segments_version;
    pieces_version_ = plan.pieces_version;
    copies_.assign(plan.copies, plan.copies + plan.num_copies);
    const auto rows = to_size(plan.num_rows);
    tokens_.assign(plan.row_token, plan.row_token + rows);
    deepest_.assign(plan.row_segment, plan.row_segment + rows);
    kv_len_.assign(plan.row_kv_len, plan.row_kv_len + rows);
    writes_.assign(plan.writes, plan.writes + rows);
  }

  // Makes the lists that have changed and copies all that has. What stands on the device is known
  // again when its plan is remembered.
  void replace(const PlanView& plan, const Changes& changes, cudaStream_t stream) {
    for (int i = 0; i < schedules_.count(); ++i)  // throws before any change
      if (changes.has_list(i)) build(i, plan, schedules_[i].hidden);
    for (int i = 0; i < schedules_.count(); ++i)
      if (changes.has_list(i)) std::swap(schedules_[i], made_[to_size(i)]);
    segments_ = nullptr;  // a call that fails from here on leaves nothing to build upon
    upload(plan, changes, stream);
  }

  // Makes what takes the place of list i.
  void build(int i, const PlanView& plan, const HiddenKeys& hidden) {
    CostModel model = model_;
    if (!hidden.none())
      model.most_tile_rows = usual_tile_rows;  // kernels of variants have no others
    KeptSchedule& next = made_[to_size(i)];
    next.last_use = schedules_[i].last_use;
    next.hidden = hidden;
    next.build(plan, geometry_, model, layout_.capacity);
    ++counts_.schedules;
  }

  // Not inside a capture: the kernel of such a call was loaded by one before, which came here, too.
  void leave_large_tiles(const PlanView& plan, cudaStream_t stream) {
    model_.most_tile_rows = usual_tile_rows;
    const auto is_large = [](const Task& task) { return task.tile_rows > usual_tile_rows; };
    if (std::none_of(scheduler().tasks().begin(), scheduler().tasks().end(), is_large)) return;
    segments_ = nullptr;  // whatever fails here: the next prepare() makes all lists anew
    Changes changes;
    changes.list(0);
    replace(plan, changes, stream);
    remember(plan);
  }

  // Does the advancing kernel lead from what the device has to `plan`?
  [[nodiscard]] bool is_next_step(const PlanView& plan) const {
    for (std::size_t row = 0; row < kv_len_.size(); ++row) {
      if (plan.row_kv_len[row] != kv_len_[row] + 1) return false;
      const auto token = to_size(tokens_[row]);
      const WriteTarget& now = plan.writes[token];
      WriteTarget expected = writes_[token];
      if (expected.chunk != no_chunk)
        expected = locate(plan.segments, plan.pieces, deepest_[row], kv_len_[row]);
      if (now.chunk != expected.chunk || now.offset != expected.offset) return false;
    }
    return true;
  }

  void upload(const PlanView& plan, const Changes& changes, cudaStream_t stream) {
    if (!changes.any_array()) return;
    PlanHeader headers[ScheduleCache::most];
    struct Source {
      const void* data;
      std::size_t bytes;
    };
    const auto of = [](const auto* data, auto count) {
      return Source{data, static_cast<std::size_t>(count) * sizeof(*data)};
    };
    Source source[PlanArray::most] = {
        of(plan.segments, plan.num_segments), of(plan.pieces, plan.num_pieces),
        of(plan.row_token, plan.num_rows),    of(plan.row_segment, plan.num_rows),
        of(plan.row_kv_len, plan.num_rows),   of(plan.writes, plan.num_rows),
        of(plan.copies, plan.num_copies)};
    for (int i = 0; i < schedules_.count(); ++i) {
      const Scheduler& list = scheduler(i);
      headers[i] = {plan.num_rows, plan.num_copies, static_cast<int>(list.tasks().size())};
      source[PlanArray::header(i)] = of(&headers[i], 1);
      source[PlanArray::tasks(i)] = of(list.tasks().data(), list.tasks().size());
      source[PlanArray::merges(i)] = of(list.merges().data(), list.merges().size());
    }
    std::byte* const staging = free_staging();
    CopiesUnderWay copies{stream};
    // Neighbours travel together where what lies between them is little.
    std::size_t begin = 0, end = 0;
    const auto copy = [&] {
      if (begin < end)
        check_cuda(cudaMemcpyAsync(workspace_ + begin, staging + begin, end - begin,
                                   cudaMemcpyHostToDevice, stream),
                   "cudaMemcpyAsync(plan)");
      counts_.bytes += end - begin;
      begin = end;
    };
    for (int a = 0; a < PlanArray::header(schedules_.count()); ++a) {
      if (!changes.array[a] || layout_.offset[a] - end > merge_gap) copy();
      if (!changes.array[a] || source[a].bytes == 0) continue;
      if (begin == end) begin = layout_.offset[a];
      end = layout_.offset[a] + source[a].bytes;
      std::memcpy(staging + layout_.offset[a], source[a].data, source[a].bytes);
    }
    copy();
    events_[next_].record(stream);
    copies.noted = true;
    ++counts_.uploads;
  }

  // Copies behind which no event stands yet: if it comes to nothing, this waits for them.
  struct CopiesUnderWay {
    cudaStream_t stream;
    bool noted = false;
    ~CopiesUnderWay() {
      if (noted) return;
      const OutsideCaptures outside;
      forget_error(cudaStreamSynchronize(stream));
    }
  };

  // The other pinned buffer, once the copies that last read it have landed.
  std::byte* free_staging() {
    next_ ^= 1;
    events_[next_].wait();
    return staging_[next_].data();
  }

  template <class E>
  [[nodiscard]] E* at(int array) const noexcept {
    return reinterpret_cast<E*>(workspace_ + layout_.offset[array]);
  }

  static constexpr std::size_t merge_gap = 4096;

  CudaOptions::Limits limits_;
  WorkspaceLayout layout_;
  Geometry geometry_;
  CostModel model_;
  std::byte* workspace_;
  PinnedMemory staging_[2];
  PinnedMemory overlapped_{sizeof(std::uint32_t)};  // not 0: launches have disturbed one another
  bool reset_tickets_ = false;                      // by the next prepare()
  Event events_[2];
  int next_ = 0;
  void (*begin_step_[2])(PlanMemory) = {};  // without and with `advance`
  ScheduleCache schedules_;
  std::vector<KeptSchedule> made_;  // what is made before it takes the place of a list
  UploadCounts counts_;
  // What the device has.
  const Segment* segments_ = nullptr;
  std::uint64_t segments_version_ = 0, pieces_version_ = 0;
  std::vector<RowCopy> copies_;
  std::vector<std::int32_t> tokens_, deepest_, kv_len_;
  std::vector<WriteTarget> writes_;
};

}  // namespace detail::cuda
CHUNKATTN_NAMESPACE_END
