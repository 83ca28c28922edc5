// What stands behind the handles of tree.h: interfaces that know no chunk size. tree_of.hpp has
// their implementations, one for each size.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <unordered_map>

#include "../../attention_plan.hpp"
#include "../../cache/policy.hpp"
#include "../../detail/support/config.hpp"
#include "../../interop/page_tables.hpp"
#include "../../plan_view.hpp"
#include "../../step.hpp"
#include "../../tree_options.hpp"
#include "../tree.h"

CHUNKATTN_NAMESPACE_BEGIN
namespace detail::c {

using Tokens = std::span<const std::int32_t>;

/// What tenants are granted, of those that chunkattn_tree_set_tenant() named.
struct Tenants {
  struct Terms {
    std::int32_t weight;
    std::uint64_t quota;
  };
  std::unordered_map<std::uint64_t, Terms> terms;
};

/// A policy chosen at run time.
struct RunTimePolicy : CachePolicy {
  std::shared_ptr<Tenants> tenants = std::make_shared<Tenants>();

  [[nodiscard]] std::int32_t weight(std::uint64_t tenant) const noexcept {
    const auto known = tenants->terms.find(tenant);
    return known != tenants->terms.end() ? known->second.weight : 1;
  }
  [[nodiscard]] std::uint64_t quota(std::uint64_t tenant) const noexcept {
    const auto known = tenants->terms.find(tenant);
    return known != tenants->terms.end() ? known->second.quota
                                         : (std::numeric_limits<std::uint64_t>::max)();
  }
};

}  // namespace detail::c
CHUNKATTN_NAMESPACE_END

struct chunkattn_pin {
  virtual ~chunkattn_pin() = default;
  [[nodiscard]] virtual std::size_t size() const = 0;
};

struct chunkattn_events {
  virtual ~chunkattn_events() = default;
  virtual void snapshot(chunkattn_snapshot& out) = 0;
};

struct chunkattn_mirror {
  virtual ~chunkattn_mirror() = default;
  virtual std::int32_t apply(const chunkattn_event& event, const std::int32_t* tokens) = 0;
  virtual void load(const chunkattn_snapshot& snapshot) = 0;
  [[nodiscard]] virtual std::size_t match(chunkattn::detail::c::Tokens prompt,
                                          const chunkattn::InsertOptions& options) const = 0;
  [[nodiscard]] virtual std::uint64_t number() const = 0;
};

struct chunkattn_sequence {
  explicit chunkattn_sequence(int size) : chunk_size(size) {}
  virtual ~chunkattn_sequence() = default;
  [[nodiscard]] virtual chunkattn_sequence_info info() const = 0;
  /// False, as below, where chunks are missing.
  virtual bool append(chunkattn::detail::c::Tokens tokens) = 0;
  virtual std::unique_ptr<chunkattn_sequence> fork(std::size_t length) = 0;
  virtual void truncate(std::size_t length) = 0;
  virtual std::size_t take_over() = 0;
  virtual void copy_tokens(chunkattn::TokenRange range, std::int32_t* out) const = 0;
  virtual std::size_t pieces(chunkattn::TokenRange range, std::span<chunkattn_piece> out) const = 0;
  virtual std::size_t blocks(std::size_t kv_len, std::span<std::int32_t> out) const = 0;
  [[nodiscard]] virtual chunkattn::TokenRange loadable() const = 0;
  virtual void mark_loaded(chunkattn::TokenRange range) = 0;

  const int chunk_size;  ///< of its tree
};

/// A plan of either kind: of steps of a tree, or of page tables.
struct chunkattn_plan {
  virtual ~chunkattn_plan() = default;
  chunkattn::LiveView view{};          ///< of the last batch
  chunkattn::PageGeometry geometry{};  ///< of the K/V memory that it is for
};

struct chunkattn_step_plan final : chunkattn_plan {
  chunkattn::AttentionPlan plan;
};

struct chunkattn_step {
  virtual ~chunkattn_step() = default;
  virtual void add(chunkattn_sequence& sequence, std::size_t max_tokens,
                   const chunkattn::Drafts<std::int32_t>& drafts, chunkattn_added& out) = 0;
  virtual void add_all(std::span<chunkattn_sequence* const> sequences, std::size_t max_tokens,
                       chunkattn_added& out) = 0;
  [[nodiscard]] virtual int num_rows() const = 0;
  virtual void build(chunkattn_step_plan& plan) = 0;
  virtual void copy_tokens(std::int32_t placeholder, std::span<std::int32_t> out) const = 0;
  virtual void copy_positions(std::span<std::int32_t> out) const = 0;
  virtual void submit() = 0;
  virtual void finish() = 0;
  virtual std::size_t rows(std::span<chunkattn_row> out) const = 0;
  virtual void commit(const chunkattn_row& row, chunkattn::detail::c::Tokens outputs,
                      std::optional<std::int32_t> leaf) = 0;
  virtual void commit_all(chunkattn::detail::c::Tokens outputs) = 0;
};

struct chunkattn_tree {
  explicit chunkattn_tree(const chunkattn::detail::c::RunTimePolicy& policy)
      : tenants(policy.tenants), is_fair(policy.fair) {}
  virtual ~chunkattn_tree() = default;
  virtual std::unique_ptr<chunkattn_sequence> insert(chunkattn::detail::c::Tokens prompt,
                                                     const chunkattn::InsertOptions& options) = 0;
  [[nodiscard]] virtual chunkattn_match match(chunkattn::detail::c::Tokens prompt,
                                              const chunkattn::InsertOptions& options) const = 0;
  [[nodiscard]] virtual std::size_t chunks_needed(
      chunkattn::detail::c::Tokens prompt, const chunkattn::InsertOptions& options) const = 0;
  [[nodiscard]] virtual std::size_t chunks_available() const = 0;
  [[nodiscard]] virtual std::size_t num_chunks() const = 0;
  [[nodiscard]] virtual chunkattn::TreeStats stats() const = 0;
  virtual void clear() = 0;
  virtual std::size_t trim(std::size_t chunks) = 0;
  virtual std::size_t expire(std::uint64_t now) = 0;
  virtual std::unique_ptr<chunkattn_pin> pin(chunkattn::detail::c::Tokens prompt,
                                             const chunkattn::InsertOptions& options) = 0;
  virtual std::unique_ptr<chunkattn_step> begin_step() = 0;
  virtual void device_idle() = 0;
  virtual std::unique_ptr<chunkattn_events> events(chunkattn_event_sink sink, void* context,
                                                   std::uint64_t stream) = 0;

  const std::shared_ptr<chunkattn::detail::c::Tenants> tenants;
  const bool is_fair;
};
