// The functions of tree.h, for one C++ source file of a program or shared library. chunkattn.ipp
// includes it. It compiles a tree for each chunk size, unless it defines CHUNKATTN_C_EXTERN_TREES;
// then others do, each of which says, for some of 16, 32, 64 and 128:
//
//     #include <chunkattn/c/tree_of_size.ipp>
//     CHUNKATTN_C_TREE(16)
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <utility>

#include "../allocator.hpp"
#include "../detail/plan/check_current.hpp"
#include "../detail/support/array.hpp"
#include "../detail/support/check.hpp"
#include "../error.hpp"
#include "../interop/block_table.hpp"
#include "../tree_options.hpp"
#include "detail/guarded.hpp"
#include "detail/handles.hpp"
#include "detail/mirror_of.hpp"
#include "detail/pointers.hpp"
#include "detail/records.hpp"
#include "tree.h"
#include "tree_of_size.ipp"

#if defined(CHUNKATTN_C_EXTERN_TREES)
CHUNKATTN_C_DECLARE_TREE(16)
CHUNKATTN_C_DECLARE_TREE(32)
CHUNKATTN_C_DECLARE_TREE(64)
CHUNKATTN_C_DECLARE_TREE(128)
#else
CHUNKATTN_C_TREE(16)
CHUNKATTN_C_TREE(32)
CHUNKATTN_C_TREE(64)
CHUNKATTN_C_TREE(128)
#endif

CHUNKATTN_NAMESPACE_BEGIN
namespace detail::c {

/// Calls f<ChunkSize>() for the chunk size that was asked for.
template <class F>
auto with_chunk_size(std::int32_t size, const char* name, const F& f) {
  switch (size) {
    case 16:
      return f.template operator()<16>();
    case 32:
      return f.template operator()<32>();
    case 64:
      return f.template operator()<64>();
    case 128:
      return f.template operator()<128>();
    default:
      fail_argument(name, size, "16, 32, 64 or 128");
  }
}

[[nodiscard]] inline TreeOptions::Sharing sharing_of(std::int32_t sharing, const char* name) {
  check_argument(sharing == CHUNKATTN_SHARE_TOKENS || sharing == CHUNKATTN_SHARE_CHUNKS, name,
                 sharing, "CHUNKATTN_SHARE_TOKENS = 0 or CHUNKATTN_SHARE_CHUNKS = 1");
  return sharing == CHUNKATTN_SHARE_TOKENS ? TreeOptions::Sharing::token
                                           : TreeOptions::Sharing::chunk;
}

[[nodiscard]] inline std::size_t checked_chunks(std::int64_t chunks, const char* name) {
  check_argument(chunks >= 0, name, chunks, "a count of chunks");
  return to_size(chunks);
}

[[nodiscard]] inline RunTimePolicy policy_of(const chunkattn_tree_config& config) {
  constexpr std::int64_t longest = (std::numeric_limits<std::uint32_t>::max)();
  check_argument(config.ttl >= 0 && config.ttl <= longest, "config->ttl", config.ttl,
                 "1 to 2^32 - 1, or 0 for none");
  RunTimePolicy policy;
  policy.retains = config.no_retention == 0;
  policy.by_priority = config.by_priority != 0;
  policy.learns = config.learns != 0;
  policy.fair = config.fair != 0;
  if (const auto most = checked_chunks(config.high_watermark, "config->high_watermark"); most > 0)
    policy.high_watermark = most;
  if (const auto least = checked_chunks(config.low_watermark, "config->low_watermark"); least > 0)
    policy.low_watermark = least;
  policy.max_pinned = checked_chunks(config.max_pinned, "config->max_pinned");
  policy.ttl = static_cast<std::uint32_t>(config.ttl);
  return policy;
}

[[nodiscard]] inline std::unique_ptr<chunkattn_tree> tree_of(const chunkattn_tree_config& config) {
  if (config.version != CHUNKATTN_C_VERSION) [[unlikely]]
    fail_argument("config->version", config.version,
                  {"CHUNKATTN_C_VERSION = ", CHUNKATTN_C_VERSION});
  check_argument(config.max_chunks >= 1 && to_size(config.max_chunks) <= max_pool_chunks,
                 "config->max_chunks", config.max_chunks, "1 to 2^31 - 1");
  TreeOptions options{.sharing = sharing_of(config.sharing, "config->sharing")};
  if (config.min_run < 0 || config.min_run > config.chunk_size) [[unlikely]]
    fail_argument("config->min_run", config.min_run, {"0 to chunk_size, ", config.chunk_size});
  if (config.min_run > 0) options.min_run = config.min_run;
  RunTimePolicy policy = policy_of(config);
  return with_chunk_size(config.chunk_size, "config->chunk_size", [&]<int ChunkSize>() {
    return make_tree<ChunkSize>(PoolAllocator{.max_chunks = to_size(config.max_chunks)}, options,
                                std::move(policy));
  });
}

/// As a result: 0, or that chunks are missing.
template <class T>
[[nodiscard]] int put(std::unique_ptr<T> made, T*& out, const char* needs) {
  if (made == nullptr) {
    set_error(needs);
    return CHUNKATTN_OUT_OF_CHUNKS;
  }
  out = made.release();
  return 0;
}
[[nodiscard]] inline std::int64_t count_of(std::size_t count) noexcept {
  return static_cast<std::int64_t>(count);
}
/// Tokens at most: all for 0.
[[nodiscard]] inline std::size_t token_limit(std::int64_t max_tokens) {
  check_argument(max_tokens >= 0, "max_tokens", max_tokens, "at least 1, or 0 for all");
  return max_tokens > 0 ? to_size(max_tokens) : (std::numeric_limits<std::size_t>::max)();
}
[[nodiscard]] inline const LiveView& current_view(const chunkattn_plan& plan) {
  check_current(plan.view);
  return plan.view;
}

extern "C" {

CHUNKATTN_C_API int chunkattn_c_version(void) {
  return CHUNKATTN_C_VERSION;
}
CHUNKATTN_C_API const char* chunkattn_error(void) {
  return error_text();
}

// ---- the tree --------------------------------------------------------------------------------

CHUNKATTN_C_API chunkattn_tree* chunkattn_tree_create(const chunkattn_tree_config* config) {
  return guarded<chunkattn_tree*>(
      nullptr, [&] { return tree_of(checked_pointer(config, "config")).release(); });
}
CHUNKATTN_C_API void chunkattn_tree_destroy(chunkattn_tree* tree) {
  delete tree;
}
CHUNKATTN_C_API int chunkattn_tree_insert(chunkattn_tree* tree, const int32_t* tokens,
                                          int64_t num_tokens,
                                          const chunkattn_insert_options* options,
                                          chunkattn_sequence** out) {
  return guarded<int>(CHUNKATTN_FAILED, [&] {
    chunkattn_tree& to = checked_pointer(tree, "tree");
    const Tokens prompt = checked_prompt(tokens, num_tokens);
    chunkattn_sequence*& result = checked_pointer(out, "out");
    return put(to.insert(prompt, insert_options(options)), result,
               "out of chunks: fewer are free or cached than the prompt needs");
  });
}
CHUNKATTN_C_API int chunkattn_tree_match(const chunkattn_tree* tree, const int32_t* tokens,
                                         int64_t num_tokens,
                                         const chunkattn_insert_options* options,
                                         chunkattn_match* out) {
  return guarded<int>(CHUNKATTN_FAILED, [&] {
    const chunkattn_tree& in = checked_pointer(tree, "tree");
    chunkattn_match& result = checked_pointer(out, "out");
    result = in.match(checked_tokens(tokens, num_tokens), insert_options(options));
    return 0;
  });
}
CHUNKATTN_C_API int64_t chunkattn_tree_chunks_needed(const chunkattn_tree* tree,
                                                     const int32_t* tokens, int64_t num_tokens,
                                                     const chunkattn_insert_options* options) {
  return guarded<int64_t>(-1, [&] {
    const chunkattn_tree& in = checked_pointer(tree, "tree");
    return count_of(in.chunks_needed(checked_prompt(tokens, num_tokens), insert_options(options)));
  });
}
CHUNKATTN_C_API int64_t chunkattn_tree_chunks_available(const chunkattn_tree* tree) {
  return guarded<int64_t>(
      -1, [&] { return count_of(checked_pointer(tree, "tree").chunks_available()); });
}
CHUNKATTN_C_API int64_t chunkattn_tree_num_chunks(const chunkattn_tree* tree) {
  return guarded<int64_t>(-1, [&] { return count_of(checked_pointer(tree, "tree").num_chunks()); });
}
CHUNKATTN_C_API int chunkattn_tree_get_stats(const chunkattn_tree* tree,
                                             chunkattn_tree_stats* out) {
  return guarded<int>(CHUNKATTN_FAILED, [&] {
    const TreeStats s = checked_pointer(tree, "tree").stats();
    checked_pointer(out, "out") = {.inserts = s.inserts,
                                   .leaves = s.leaves,
                                   .forks = s.forks,
                                   .prompt_tokens = s.prompt_tokens,
                                   .cached_tokens = s.cached_tokens,
                                   .pending_tokens = s.pending_tokens,
                                   .preempted_inserts = s.preempted_inserts,
                                   .preempted_tokens = s.preempted_tokens,
                                   .preempted_cached_tokens = s.preempted_cached_tokens,
                                   .splits = s.splits,
                                   .copied_tokens = s.copied_tokens,
                                   .merged_tokens = s.merged_tokens,
                                   .published_tokens = s.published_tokens,
                                   .evicted_tokens = s.evicted_tokens,
                                   .evicted_chunks = s.evicted_chunks,
                                   .failed_inserts = s.failed_inserts,
                                   .failed_adds = s.failed_adds,
                                   .clears = s.clears,
                                   .steps = s.steps,
                                   .cancelled_steps = s.cancelled_steps,
                                   .abandoned_steps = s.abandoned_steps,
                                   .live_sequences = count_of(s.live_sequences),
                                   .leaving_sequences = count_of(s.leaving_sequences),
                                   .nodes = count_of(s.nodes),
                                   .used_chunks = count_of(s.used_chunks),
                                   .retained_chunks = count_of(s.retained_chunks),
                                   .stored_tokens = count_of(s.stored_tokens)};
    return 0;
  });
}
CHUNKATTN_C_API int chunkattn_tree_set_tenant(chunkattn_tree* tree, uint64_t tenant, int32_t weight,
                                              int64_t quota) {
  return guarded<int>(CHUNKATTN_FAILED, [&] {
    chunkattn_tree& of = checked_pointer(tree, "tree");
    check_argument(of.is_fair, "config->fair", 0, "not 0, for a tree whose tenants have shares");
    check_argument(weight >= 1 && weight <= 1 << 20, "weight", weight, "1 to 2^20");
    check_argument(quota >= -1, "quota", quota, "a count of chunks, or -1 for no limit");
    of.tenants->terms[tenant] = {weight, quota < 0 ? (std::numeric_limits<std::uint64_t>::max)()
                                                   : static_cast<std::uint64_t>(quota)};
    return 0;
  });
}
CHUNKATTN_C_API int chunkattn_tree_clear(chunkattn_tree* tree) {
  return guarded<int>(CHUNKATTN_FAILED, [&] {
    checked_pointer(tree, "tree").clear();
    return 0;
  });
}
CHUNKATTN_C_API int64_t chunkattn_tree_trim(chunkattn_tree* tree, int64_t chunks) {
  return guarded<int64_t>(-1, [&] {
    chunkattn_tree& of = checked_pointer(tree, "tree");
    check_argument(chunks >= 0, "chunks", chunks, "a count");
    return count_of(of.trim(to_size(chunks)));
  });
}
CHUNKATTN_C_API int64_t chunkattn_tree_expire(chunkattn_tree* tree, uint64_t now) {
  return guarded<int64_t>(-1, [&] { return count_of(checked_pointer(tree, "tree").expire(now)); });
}
CHUNKATTN_C_API int chunkattn_tree_device_idle(chunkattn_tree* tree) {
  return guarded<int>(CHUNKATTN_FAILED, [&] {
    checked_pointer(tree, "tree").device_idle();
    return 0;
  });
}
CHUNKATTN_C_API int chunkattn_tree_pin(chunkattn_tree* tree, const int32_t* tokens,
                                       int64_t num_tokens, const chunkattn_insert_options* options,
                                       chunkattn_pin** out) {
  return guarded<int>(CHUNKATTN_FAILED, [&] {
    chunkattn_tree& of = checked_pointer(tree, "tree");
    const Tokens prompt = checked_tokens(tokens, num_tokens);
    chunkattn_pin*& result = checked_pointer(out, "out");
    result = of.pin(prompt, insert_options(options)).release();
    return 0;
  });
}
CHUNKATTN_C_API int64_t chunkattn_pin_size(const chunkattn_pin* pin) {
  return guarded<int64_t>(-1, [&] { return count_of(checked_pointer(pin, "pin").size()); });
}
CHUNKATTN_C_API void chunkattn_pin_destroy(chunkattn_pin* pin) {
  delete pin;
}

// ---- sequences -------------------------------------------------------------------------------

CHUNKATTN_C_API int chunkattn_sequence_get_info(const chunkattn_sequence* sequence,
                                                chunkattn_sequence_info* out) {
  return guarded<int>(CHUNKATTN_FAILED, [&] {
    const chunkattn_sequence_info info = checked_pointer(sequence, "sequence").info();
    checked_pointer(out, "out") = info;
    return 0;
  });
}
CHUNKATTN_C_API int chunkattn_sequence_append(chunkattn_sequence* sequence, const int32_t* tokens,
                                              int64_t num_tokens) {
  return guarded<int>(CHUNKATTN_FAILED, [&] {
    chunkattn_sequence& to = checked_pointer(sequence, "sequence");
    if (to.append(checked_prompt(tokens, num_tokens))) return 0;
    set_error("out of chunks: fewer are free or cached than the tokens need");
    return static_cast<int>(CHUNKATTN_OUT_OF_CHUNKS);
  });
}
CHUNKATTN_C_API int chunkattn_sequence_fork(chunkattn_sequence* sequence, int64_t length,
                                            chunkattn_sequence** out) {
  return guarded<int>(CHUNKATTN_FAILED, [&] {
    chunkattn_sequence& of = checked_pointer(sequence, "sequence");
    chunkattn_sequence*& result = checked_pointer(out, "out");
    check_argument(length >= 1 || length == -1, "length", length,
                   "1 to the sequence's size, or -1 for all");
    return put(of.fork(length < 0 ? (std::numeric_limits<std::size_t>::max)() : to_size(length)),
               result, "out of chunks: a fork takes one");
  });
}
CHUNKATTN_C_API int chunkattn_sequence_truncate(chunkattn_sequence* sequence, int64_t length) {
  return guarded<int>(CHUNKATTN_FAILED, [&] {
    chunkattn_sequence& of = checked_pointer(sequence, "sequence");
    check_argument(length >= 1, "length", length, "1 to the sequence's size");
    try {
      of.truncate(to_size(length));
    } catch (const OutOfChunks& error) {
      set_error(error.what());
      return static_cast<int>(CHUNKATTN_OUT_OF_CHUNKS);
    }
    return 0;
  });
}
CHUNKATTN_C_API int64_t chunkattn_sequence_take_over(chunkattn_sequence* sequence) {
  return guarded<int64_t>(
      -1, [&] { return count_of(checked_pointer(sequence, "sequence").take_over()); });
}
CHUNKATTN_C_API int chunkattn_sequence_tokens(const chunkattn_sequence* sequence, int64_t begin,
                                              int64_t num_tokens, int32_t* out) {
  return guarded<int>(CHUNKATTN_FAILED, [&] {
    const chunkattn_sequence& of = checked_pointer(sequence, "sequence");
    const TokenRange range = checked_range(begin, num_tokens, "num_tokens");
    of.copy_tokens(
        range,
        checked_array(out, num_tokens, "out", "num_tokens", "memory of num_tokens tokens").data());
    return 0;
  });
}
CHUNKATTN_C_API int64_t chunkattn_sequence_pieces(const chunkattn_sequence* sequence, int64_t begin,
                                                  int64_t length, chunkattn_piece* out,
                                                  int64_t capacity) {
  return guarded<int64_t>(-1, [&] {
    const chunkattn_sequence& of = checked_pointer(sequence, "sequence");
    const TokenRange range = checked_range(begin, length, "length");
    return count_of(of.pieces(
        range, checked_array(out, capacity, "out", "capacity", "memory of capacity pieces")));
  });
}
CHUNKATTN_C_API int64_t chunkattn_sequence_blocks(const chunkattn_sequence* sequence,
                                                  int64_t kv_len, int32_t* out, int64_t capacity) {
  return guarded<int64_t>(-1, [&] {
    const chunkattn_sequence& of = checked_pointer(sequence, "sequence");
    check_argument(kv_len >= 1 || kv_len == -1, "kv_len", kv_len,
                   "1 to the sequence's known and reserved tokens, or -1");
    return count_of(
        of.blocks(kv_len < 0 ? (std::numeric_limits<std::size_t>::max)() : to_size(kv_len),
                  checked_array(out, capacity, "out", "capacity", "memory of capacity chunks")));
  });
}
CHUNKATTN_C_API int chunkattn_sequence_loadable(const chunkattn_sequence* sequence, int64_t* begin,
                                                int64_t* length) {
  return guarded<int>(CHUNKATTN_FAILED, [&] {
    const TokenRange range = checked_pointer(sequence, "sequence").loadable();
    int64_t &first = checked_pointer(begin, "begin"), &count = checked_pointer(length, "length");
    first = range.begin;
    count = range.length;
    return 0;
  });
}
CHUNKATTN_C_API int chunkattn_sequence_mark_loaded(chunkattn_sequence* sequence, int64_t begin,
                                                   int64_t length) {
  return guarded<int>(CHUNKATTN_FAILED, [&] {
    checked_pointer(sequence, "sequence").mark_loaded(checked_range(begin, length, "length"));
    return 0;
  });
}
CHUNKATTN_C_API void chunkattn_sequence_destroy(chunkattn_sequence* sequence) {
  delete sequence;
}
}  // extern "C"

}  // namespace detail::c
CHUNKATTN_NAMESPACE_END

#include "step.ipp"
