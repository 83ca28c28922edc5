// The plan's copy on the device (paper section 3.3, lazy context copy): what changed is uploaded
// from double-buffered pinned memory, an ordinary decode step is one small kernel and no upload.
#pragma once

#include <algorithm>
#include <cstring>
#include <span>
#include <type_traits>
#include <vector>

#include "device_plan.hpp"
#include "launch.cuh"
#include "locate.hpp"
#include "runtime.cuh"
#include "schedule.hpp"

CHUNKATTN_NAMESPACE_BEGIN

/// The most a plan may hold. Workspace, addresses and grids follow from it and never change, so a
/// captured graph stays valid while plans come and go. 0 chooses the value given.
struct CudaLimits {
  std::int32_t max_rows = 0;          ///< query tokens of a step; required
  std::int32_t num_qo_heads = 0;      ///< required
  std::int32_t num_kv_heads = 0;      ///< required
  std::int32_t max_segments = 0;      ///< 4 * max_rows
  std::int32_t max_pieces = 0;        ///< extent of the piece array; 64 * max_rows + 4096
  std::int32_t max_copies = 0;        ///< max_rows
  std::int32_t max_partial_rows = 0;  ///< rows with partial results; 4 * max_rows + 256
};

namespace cuda_detail {

/// `limits` with every 0 replaced; throws InvalidArgument where one makes no sense.
[[nodiscard]] inline CudaLimits completed(CudaLimits limits) {
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
  detail::check_argument(limits.max_segments >= 0, "limits.max_segments", limits.max_segments,
                         "a count");
  detail::check_argument(limits.max_pieces >= 0, "limits.max_pieces", limits.max_pieces, "a count");
  detail::check_argument(limits.max_copies >= 0, "limits.max_copies", limits.max_copies, "a count");
  detail::check_argument(limits.max_partial_rows >= 0, "limits.max_partial_rows",
                         limits.max_partial_rows, "a count");
  if (limits.max_segments == 0) limits.max_segments = 4 * limits.max_rows;
  if (limits.max_pieces == 0) limits.max_pieces = 64 * limits.max_rows + 4096;
  if (limits.max_copies == 0) limits.max_copies = limits.max_rows;
  if (limits.max_partial_rows == 0) limits.max_partial_rows = 4 * limits.max_rows + 256;
  return limits;
}

/// Where each array lies in the workspace; the uploaded part comes first and is mirrored in pinned
/// memory.
struct WorkspaceLayout {
  enum Array {
    header,
    segments,
    pieces,
    row_token,
    row_segment,
    row_kv_len,
    writes,
    copies,
    tasks,
    merges,
    num_arrays
  };
  std::size_t offset[num_arrays] = {};
  std::size_t upload_bytes = 0;
  std::size_t counters = 0, partial_out = 0, partial_lse = 0;
  std::size_t total = 0;
  ScheduleCapacity capacity;

  WorkspaceLayout(const CudaLimits& limits, int head_dim) {
    const auto size = [](std::int64_t n) { return static_cast<std::size_t>(n); };
    const std::int64_t group = limits.num_qo_heads / limits.num_kv_heads;
    const std::int64_t tiles = limits.max_rows + limits.max_rows * group / max_tile_rows + 1;
    capacity.tasks = size(3 * tiles + 1024);
    capacity.merges = size(std::int64_t{16} * limits.max_rows + 1024);
    capacity.partials = size(std::int64_t{limits.max_partial_rows} * limits.num_qo_heads);
    const std::size_t bytes[num_arrays] = {sizeof(PlanHeader),
                                           size(limits.max_segments) * sizeof(Segment),
                                           size(limits.max_pieces) * sizeof(Piece),
                                           size(limits.max_rows) * sizeof(std::int32_t),
                                           size(limits.max_rows) * sizeof(std::int32_t),
                                           size(limits.max_rows) * sizeof(std::int32_t),
                                           size(limits.max_rows) * sizeof(WriteTarget),
                                           size(limits.max_copies) * sizeof(RowCopy),
                                           capacity.tasks * sizeof(Task),
                                           capacity.merges * sizeof(std::int32_t)};
    for (int a = 0; a < num_arrays; ++a) offset[a] = take(bytes[a]);
    upload_bytes = total;
    counters = take(sizeof(Counters));
    partial_out = take(capacity.partials * size(head_dim) * sizeof(float));
    partial_lse = take(capacity.partials * sizeof(float));
  }

 private:
  std::size_t take(std::size_t bytes) {
    const std::size_t at = total;
    total += (bytes + 255) / 256 * 256;
    return at;
  }
};

/// What prepare() had to do, counted for tests and for curious users.
struct UploadCounts {
  std::uint64_t schedules = 0;  ///< task lists built
  std::uint64_t uploads = 0;    ///< prepares that copied something
  std::uint64_t bytes = 0;      ///< copied
  std::uint64_t advances = 0;   ///< steps made by the advance kernel alone
};

/// Keeps the device's copy of a plan up to date, in the order of one stream.
class PlanUpload {
 public:
  PlanUpload(const CudaLimits& limits, const Geometry& geometry, const CostModel& model,
             std::byte* workspace)
      : limits_(limits),
        layout_(limits, geometry.head_dim),
        geometry_(geometry),
        model_(model),
        workspace_(workspace),
        staging_{PinnedMemory(layout_.upload_bytes), PinnedMemory(layout_.upload_bytes)} {
    const auto rows = static_cast<std::size_t>(limits.max_rows);
    kv_len_.reserve(rows);
    writes_.reserve(rows);
    tokens_.reserve(rows);
    deepest_.reserve(rows);
  }

  /// Makes the device's plan equal to `plan`, by operations on `stream`. No memory is allocated
  /// and the host waits only when two earlier uploads are still under way.
  void prepare(const PlanView& plan, cudaStream_t stream) {
    check(plan);
    const bool same_rows = plan.segments == segments_ && plan.topology == topology_ &&
                           equal(tokens_, plan.row_token, plan.num_rows) &&
                           equal(deepest_, plan.row_segment, plan.num_rows);
    const bool same_pieces = same_rows && plan.pieces_version == pieces_version_;
    const bool same_lengths = same_rows && equal(kv_len_, plan.row_kv_len, plan.num_rows) &&
                              equal(writes_, plan.writes, plan.num_rows);
    const bool same_copies = plan.num_copies == 0 && num_copies_ == 0;
    if (same_pieces && same_lengths && same_copies) return;
    if (is_capturing(stream))
      detail::fail_argument("stream", "capturing",
                            "prepare(plan, stream) before the capture: an upload inside it would "
                            "be replayed with stale contents");

    bool dirty[WorkspaceLayout::num_arrays] = {};
    if (!same_rows) {
      std::fill(std::begin(dirty), std::end(dirty), true);
    } else if (!same_pieces) {
      dirty[WorkspaceLayout::segments] = dirty[WorkspaceLayout::pieces] = true;
    }
    if (!same_rows || (!same_pieces && has_aged(plan))) {
      fresh_.build(plan, geometry_, model_, layout_.capacity);  // throws before any change
      std::swap(scheduler_, fresh_);
      ++counts_.schedules;
      dirty[WorkspaceLayout::header] = dirty[WorkspaceLayout::tasks] =
          dirty[WorkspaceLayout::merges] = true;
    }
    if (!same_copies) {
      dirty[WorkspaceLayout::copies] = plan.num_copies > 0;
      dirty[WorkspaceLayout::header] =
          dirty[WorkspaceLayout::header] || plan.num_copies != num_copies_;
    }
    const bool by_kernel = same_rows && !same_lengths && is_next_step(plan);
    if (same_rows && !same_lengths && !by_kernel)
      dirty[WorkspaceLayout::row_kv_len] = dirty[WorkspaceLayout::writes] = true;

    segments_ = nullptr;  // a call that fails from here on leaves nothing to build upon
    upload(plan, dirty, stream);
    if (by_kernel) {
      launch_advance(stream);
      ++counts_.advances;
    }
    segments_ = plan.segments;
    topology_ = plan.topology;
    pieces_version_ = plan.pieces_version;
    num_copies_ = plan.num_copies;
    const auto rows = static_cast<std::size_t>(plan.num_rows);
    tokens_.assign(plan.row_token, plan.row_token + rows);
    deepest_.assign(plan.row_segment, plan.row_segment + rows);
    kv_len_.assign(plan.row_kv_len, plan.row_kv_len + rows);
    writes_.assign(plan.writes, plan.writes + rows);
  }

  void launch_advance(cudaStream_t stream) {
    const int grid = (limits_.max_rows + 255) / 256;
    launch("advance_kernel", advance_, grid, 256, 0, stream, memory());
  }

  [[nodiscard]] PlanMemory memory() const noexcept {
    PlanMemory memory{};
    memory.header = at<PlanHeader>(WorkspaceLayout::header);
    memory.tasks = at<Task>(WorkspaceLayout::tasks);
    memory.merges = at<std::int32_t>(WorkspaceLayout::merges);
    memory.segments = at<Segment>(WorkspaceLayout::segments);
    memory.pieces = at<Piece>(WorkspaceLayout::pieces);
    memory.row_token = at<std::int32_t>(WorkspaceLayout::row_token);
    memory.row_kv_len = at<std::int32_t>(WorkspaceLayout::row_kv_len);
    memory.row_segment = at<std::int32_t>(WorkspaceLayout::row_segment);
    memory.writes = at<WriteTarget>(WorkspaceLayout::writes);
    memory.copies = at<RowCopy>(WorkspaceLayout::copies);
    memory.counters = reinterpret_cast<Counters*>(workspace_ + layout_.counters);
    memory.partial_out = reinterpret_cast<float*>(workspace_ + layout_.partial_out);
    memory.partial_lse = reinterpret_cast<float*>(workspace_ + layout_.partial_lse);
    return memory;
  }
  [[nodiscard]] const WorkspaceLayout& layout() const noexcept { return layout_; }
  [[nodiscard]] const Scheduler& scheduler() const noexcept { return scheduler_; }
  [[nodiscard]] const UploadCounts& counts() const noexcept { return counts_; }
  void set_advance(void (*kernel)(PlanMemory)) noexcept { advance_ = kernel; }

 private:
  void check(const PlanView& plan) const {
    detail::check_argument(plan.num_rows > 0 && plan.num_rows <= limits_.max_rows, "plan.num_rows",
                           plan.num_rows,
                           "1 to limits.max_rows = " + std::to_string(limits_.max_rows));
    detail::check_argument(plan.num_segments <= limits_.max_segments, "plan.num_segments",
                           plan.num_segments,
                           "at most limits.max_segments = " + std::to_string(limits_.max_segments));
    detail::check_argument(plan.num_pieces <= limits_.max_pieces, "plan.num_pieces",
                           plan.num_pieces,
                           "at most limits.max_pieces = " + std::to_string(limits_.max_pieces));
    detail::check_argument(plan.num_copies <= limits_.max_copies, "plan.num_copies",
                           plan.num_copies,
                           "at most limits.max_copies = " + std::to_string(limits_.max_copies));
  }

  template <class E>
  static bool equal(const std::vector<E>& known, const E* now, std::int32_t count) {
    const auto n = static_cast<std::size_t>(count);
    return known.size() == n && std::memcmp(known.data(), now, n * sizeof(E)) == 0;
  }

  // Splits were chosen for the lengths of then: an eighth more or less, and they are chosen anew.
  bool has_aged(const PlanView& plan) {
    const std::int64_t then = scheduler_.visible_tokens();
    const std::int64_t now = fresh_.count_visible(plan);
    return now > then + then / 8 || now < then - then / 8;
  }

  // Does advance_kernel lead from what the device has to `plan`?
  [[nodiscard]] bool is_next_step(const PlanView& plan) const {
    for (std::size_t row = 0; row < kv_len_.size(); ++row) {
      if (plan.row_kv_len[row] != kv_len_[row] + 1) return false;
      const auto token = static_cast<std::size_t>(tokens_[row]);
      const WriteTarget& now = plan.writes[token];
      WriteTarget expected = writes_[token];
      if (expected.slot != no_slot)
        expected = locate(plan.segments, plan.pieces, deepest_[row], kv_len_[row]);
      if (now.slot != expected.slot || now.offset != expected.offset) return false;
    }
    return true;
  }

  void upload(const PlanView& plan, const bool (&dirty)[WorkspaceLayout::num_arrays],
              cudaStream_t stream) {
    if (std::none_of(std::begin(dirty), std::end(dirty), [](bool d) { return d; })) return;
    const PlanHeader header{plan.num_rows,
                            plan.num_copies,
                            scheduler_.num_chunk_first(),
                            scheduler_.num_sequence_first(),
                            {}};
    const auto bytes_of = [](std::int64_t n, std::size_t size) {
      return static_cast<std::size_t>(n) * size;
    };
    const struct {
      const void* data;
      std::size_t bytes;
    } source[WorkspaceLayout::num_arrays] = {
        {&header, sizeof header},
        {plan.segments, bytes_of(plan.num_segments, sizeof(Segment))},
        {plan.pieces, bytes_of(plan.num_pieces, sizeof(Piece))},
        {plan.row_token, bytes_of(plan.num_rows, 4)},
        {plan.row_segment, bytes_of(plan.num_rows, 4)},
        {plan.row_kv_len, bytes_of(plan.num_rows, 4)},
        {plan.writes, bytes_of(plan.num_rows, sizeof(WriteTarget))},
        {plan.copies, bytes_of(plan.num_copies, sizeof(RowCopy))},
        {scheduler_.tasks().data(), scheduler_.tasks().size() * sizeof(Task)},
        {scheduler_.merges().data(), scheduler_.merges().size() * 4}};
    next_ ^= 1;
    events_[next_].wait();  // the copies that last read this buffer
    std::byte* const staging = staging_[next_].data();
    // Neighbours travel together where what lies between them is little.
    for (int a = 0; a < WorkspaceLayout::num_arrays;) {
      if (!dirty[a] || source[a].bytes == 0) {
        ++a;
        continue;
      }
      const std::size_t begin = layout_.offset[a];
      std::size_t end = begin;
      for (; a < WorkspaceLayout::num_arrays && dirty[a] &&
             (end == begin || layout_.offset[a] - end <= merge_gap);
           ++a) {
        if (source[a].bytes > 0)
          std::memcpy(staging + layout_.offset[a], source[a].data, source[a].bytes);
        end = layout_.offset[a] + source[a].bytes;
      }
      check_cuda(cudaMemcpyAsync(workspace_ + begin, staging + begin, end - begin,
                                 cudaMemcpyHostToDevice, stream),
                 "cudaMemcpyAsync(plan)");
      counts_.bytes += end - begin;
    }
    events_[next_].record(stream);
    ++counts_.uploads;
  }

  template <class E>
  [[nodiscard]] E* at(WorkspaceLayout::Array array) const noexcept {
    return reinterpret_cast<E*>(workspace_ + layout_.offset[array]);
  }

  static constexpr std::size_t merge_gap = 4096;

  CudaLimits limits_;
  WorkspaceLayout layout_;
  Geometry geometry_;
  CostModel model_;
  std::byte* workspace_;
  PinnedMemory staging_[2];
  Event events_[2];
  int next_ = 0;
  void (*advance_)(PlanMemory) = nullptr;
  Scheduler scheduler_, fresh_;
  UploadCounts counts_;
  // What the device has.
  const Segment* segments_ = nullptr;
  std::uint64_t topology_ = 0, pieces_version_ = 0;
  std::int32_t num_copies_ = 0;
  std::vector<std::int32_t> tokens_, deepest_, kv_len_;
  std::vector<WriteTarget> writes_;
};

}  // namespace cuda_detail
CHUNKATTN_NAMESPACE_END
