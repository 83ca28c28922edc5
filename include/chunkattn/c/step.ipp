// The functions of tree.h for steps, events and mirrors; tree.ipp includes it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>

#include "../detail/support/array.hpp"
#include "../detail/support/check.hpp"
#include "../interop/block_table.hpp"
#include "../interop/detail/page_rows.hpp"
#include "detail/guarded.hpp"
#include "detail/handles.hpp"
#include "detail/mirror_of.hpp"
#include "detail/pointers.hpp"
#include "detail/records.hpp"
#include "tree.ipp"

CHUNKATTN_NAMESPACE_BEGIN
namespace detail::c {

inline int commit_row(chunkattn_step* step, const chunkattn_row* row, const std::int32_t* outputs,
                      std::int64_t num_outputs, std::optional<std::int32_t> leaf) {
  return guarded<int>(CHUNKATTN_FAILED, [&] {
    chunkattn_step& of = checked_pointer(step, "step");
    of.commit(checked_pointer(row, "row"),
              checked_array(outputs, num_outputs, "outputs", "num_outputs", "num_outputs tokens"),
              leaf);
    return 0;
  });
}
/// Memory of a step's rows.
[[nodiscard]] inline std::span<std::int32_t> checked_rows_of(const chunkattn_step& step,
                                                             std::int32_t* out,
                                                             std::int64_t num_rows) {
  if (num_rows != step.num_rows()) [[unlikely]]
    fail_argument("num_rows", num_rows, {"that of the step, ", step.num_rows()});
  return checked_array(out, num_rows, "out", "num_rows", "memory of num_rows integers");
}

extern "C" {

// ---- steps -----------------------------------------------------------------------------------

CHUNKATTN_C_API chunkattn_step* chunkattn_step_begin(chunkattn_tree* tree) {
  return guarded<chunkattn_step*>(
      nullptr, [&] { return checked_pointer(tree, "tree").begin_step().release(); });
}
CHUNKATTN_C_API int chunkattn_step_add(chunkattn_step* step, chunkattn_sequence* sequence,
                                       int64_t max_tokens, const int32_t* drafts,
                                       const int32_t* parents, int64_t num_drafts,
                                       chunkattn_added* out) {
  return guarded<int>(CHUNKATTN_FAILED, [&] {
    chunkattn_step& to = checked_pointer(step, "step");
    chunkattn_sequence& added = checked_pointer(sequence, "sequence");
    Drafts<std::int32_t> given;
    given.tokens = checked_array(drafts, num_drafts, "drafts", "num_drafts", "num_drafts tokens");
    if (parents != nullptr)
      given.parents =
          checked_array(parents, num_drafts, "parents", "num_drafts", "num_drafts integers");
    chunkattn_added& result = checked_pointer(out, "out");
    to.add(added, token_limit(max_tokens), given, result);
    return 0;
  });
}
CHUNKATTN_C_API int chunkattn_step_add_all(chunkattn_step* step,
                                           chunkattn_sequence* const* sequences,
                                           int64_t num_sequences, int64_t max_tokens,
                                           chunkattn_added* out) {
  return guarded<int>(CHUNKATTN_FAILED, [&] {
    chunkattn_step& to = checked_pointer(step, "step");
    const std::span<chunkattn_sequence* const> all = checked_array(
        sequences, num_sequences, "sequences", "num_sequences", "num_sequences sequences");
    for (std::size_t i = 0; i < all.size(); ++i)
      if (all[i] == nullptr) [[unlikely]]
        fail_argument(indexed_name("sequences", i), "null", "a sequence");
    chunkattn_added& result = checked_pointer(out, "out");
    to.add_all(all, token_limit(max_tokens), result);
    return 0;
  });
}
CHUNKATTN_C_API int64_t chunkattn_step_num_rows(const chunkattn_step* step) {
  return guarded<int64_t>(-1,
                          [&] { return std::int64_t{checked_pointer(step, "step").num_rows()}; });
}

CHUNKATTN_C_API chunkattn_plan* chunkattn_step_plan_create(void) {
  return guarded<chunkattn_plan*>(nullptr, [&] { return new chunkattn_step_plan; });
}
CHUNKATTN_C_API void chunkattn_plan_destroy(chunkattn_plan* plan) {
  delete plan;
}
CHUNKATTN_C_API int chunkattn_step_build(chunkattn_step* step, chunkattn_plan* plan) {
  return guarded<int>(CHUNKATTN_FAILED, [&] {
    chunkattn_step& of = checked_pointer(step, "step");
    auto* const steps = dynamic_cast<chunkattn_step_plan*>(&checked_pointer(plan, "plan"));
    check_argument(steps != nullptr, "plan", "of page tables",
                   "one of chunkattn_step_plan_create()");
    of.build(*steps);
    return 0;
  });
}
CHUNKATTN_C_API int chunkattn_step_tokens(const chunkattn_step* step, int32_t placeholder,
                                          int32_t* out, int64_t num_rows) {
  return guarded<int>(CHUNKATTN_FAILED, [&] {
    const chunkattn_step& of = checked_pointer(step, "step");
    of.copy_tokens(placeholder, checked_rows_of(of, out, num_rows));
    return 0;
  });
}
CHUNKATTN_C_API int chunkattn_step_positions(const chunkattn_step* step, int32_t* out,
                                             int64_t num_rows) {
  return guarded<int>(CHUNKATTN_FAILED, [&] {
    const chunkattn_step& of = checked_pointer(step, "step");
    of.copy_positions(checked_rows_of(of, out, num_rows));
    return 0;
  });
}
CHUNKATTN_C_API int chunkattn_plan_slots(const chunkattn_plan* plan, int64_t* out,
                                         int64_t num_rows) {
  return guarded<int>(CHUNKATTN_FAILED, [&] {
    const LiveView& view = current_view(checked_pointer(plan, "plan"));
    if (num_rows != view.num_rows) [[unlikely]]
      fail_argument("num_rows", num_rows, {"that of the plan, ", view.num_rows});
    const std::span<std::int64_t> slots =
        checked_array(out, num_rows, "out", "num_rows", "memory of num_rows integers");
    copy_first<std::int64_t>(BlockTable::slot_mapping(view), slots);
    return 0;
  });
}
CHUNKATTN_C_API int64_t chunkattn_plan_copies(const chunkattn_plan* plan, chunkattn_copy* out,
                                              int64_t capacity) {
  return guarded<int64_t>(-1, [&] {
    const LiveView& view = current_view(checked_pointer(plan, "plan"));
    const std::span<chunkattn_copy> copies =
        checked_array(out, capacity, "out", "capacity", "memory of capacity copies");
    const std::size_t count = to_size(view.num_copies);
    for (std::size_t i = 0; i < (std::min)(count, copies.size()); ++i) {
      const auto& c = view.copies[i];
      copies[i] = {c.source_chunk, c.source_begin, c.target_chunk, c.target_begin, c.length};
    }
    return count_of(count);
  });
}

CHUNKATTN_C_API int chunkattn_step_submit(chunkattn_step* step) {
  return guarded<int>(CHUNKATTN_FAILED, [&] {
    checked_pointer(step, "step").submit();
    return 0;
  });
}
CHUNKATTN_C_API int chunkattn_step_finish(chunkattn_step* step) {
  return guarded<int>(CHUNKATTN_FAILED, [&] {
    checked_pointer(step, "step").finish();
    return 0;
  });
}
CHUNKATTN_C_API int64_t chunkattn_step_rows(const chunkattn_step* step, chunkattn_row* out,
                                            int64_t capacity) {
  return guarded<int64_t>(-1, [&] {
    const chunkattn_step& of = checked_pointer(step, "step");
    return count_of(
        of.rows(checked_array(out, capacity, "out", "capacity", "memory of capacity rows")));
  });
}
CHUNKATTN_C_API int chunkattn_step_commit(chunkattn_step* step, const chunkattn_row* row,
                                          const int32_t* outputs, int64_t num_outputs) {
  return commit_row(step, row, outputs, num_outputs, std::nullopt);
}
CHUNKATTN_C_API int chunkattn_step_commit_branch(chunkattn_step* step, const chunkattn_row* row,
                                                 int32_t leaf, const int32_t* outputs,
                                                 int64_t num_outputs) {
  return commit_row(step, row, outputs, num_outputs, leaf);
}
CHUNKATTN_C_API int chunkattn_step_commit_all(chunkattn_step* step, const int32_t* outputs,
                                              int64_t num_outputs) {
  return guarded<int>(CHUNKATTN_FAILED, [&] {
    chunkattn_step& of = checked_pointer(step, "step");
    of.commit_all(
        checked_array(outputs, num_outputs, "outputs", "num_outputs", "num_outputs tokens"));
    return 0;
  });
}
CHUNKATTN_C_API void chunkattn_step_destroy(chunkattn_step* step) {
  delete step;
}

// ---- events ----------------------------------------------------------------------------------

CHUNKATTN_C_API chunkattn_events* chunkattn_events_create(chunkattn_tree* tree,
                                                          chunkattn_event_sink sink, void* context,
                                                          uint64_t stream) {
  return guarded<chunkattn_events*>(nullptr, [&] {
    chunkattn_tree& of = checked_pointer(tree, "tree");
    check_argument(sink != nullptr, "sink", "null", "what is to get the events");
    return of.events(sink, context, stream).release();
  });
}
CHUNKATTN_C_API int chunkattn_events_snapshot(chunkattn_events* events, chunkattn_snapshot* out) {
  return guarded<int>(CHUNKATTN_FAILED, [&] {
    chunkattn_events& of = checked_pointer(events, "events");
    of.snapshot(checked_pointer(out, "out"));
    return 0;
  });
}
CHUNKATTN_C_API void chunkattn_events_destroy(chunkattn_events* events) {
  delete events;
}

CHUNKATTN_C_API chunkattn_mirror* chunkattn_mirror_create(int32_t chunk_size, int32_t sharing) {
  return guarded<chunkattn_mirror*>(nullptr, [&] {
    const TreeOptions::Sharing how = sharing_of(sharing, "sharing");
    return with_chunk_size(chunk_size, "chunk_size", [&]<int ChunkSize>() -> chunkattn_mirror* {
      return new MirrorOf<ChunkSize>(how);
    });
  });
}
CHUNKATTN_C_API int chunkattn_mirror_apply(chunkattn_mirror* mirror, const chunkattn_event* event,
                                           const int32_t* tokens, int32_t* out) {
  return guarded<int>(CHUNKATTN_FAILED, [&] {
    chunkattn_mirror& to = checked_pointer(mirror, "mirror");
    const chunkattn_event& given = checked_pointer(event, "event");
    check_event(given, "event");
    std::int32_t& result = checked_pointer(out, "out");
    result = to.apply(given, tokens);
    return 0;
  });
}
CHUNKATTN_C_API int chunkattn_mirror_load(chunkattn_mirror* mirror,
                                          const chunkattn_snapshot* snapshot) {
  return guarded<int>(CHUNKATTN_FAILED, [&] {
    chunkattn_mirror& to = checked_pointer(mirror, "mirror");
    const chunkattn_snapshot& given = checked_pointer(snapshot, "snapshot");
    (void)checked_array(given.spans, given.num_spans, "snapshot->spans", "snapshot->num_spans",
                        "num_spans events");
    (void)checked_array(given.tokens, given.num_tokens, "snapshot->tokens", "snapshot->num_tokens",
                        "num_tokens tokens");
    to.load(given);
    return 0;
  });
}
CHUNKATTN_C_API int64_t chunkattn_mirror_match(const chunkattn_mirror* mirror,
                                               const int32_t* tokens, int64_t num_tokens,
                                               const chunkattn_insert_options* options) {
  return guarded<int64_t>(-1, [&] {
    const chunkattn_mirror& in = checked_pointer(mirror, "mirror");
    return count_of(in.match(checked_tokens(tokens, num_tokens), insert_options(options)));
  });
}
CHUNKATTN_C_API int64_t chunkattn_mirror_number(const chunkattn_mirror* mirror) {
  return guarded<int64_t>(
      -1, [&] { return static_cast<std::int64_t>(checked_pointer(mirror, "mirror").number()); });
}
CHUNKATTN_C_API void chunkattn_mirror_destroy(chunkattn_mirror* mirror) {
  delete mirror;
}

}  // extern "C"

}  // namespace detail::c
CHUNKATTN_NAMESPACE_END
