// Annotations: a value for each token of a path, which lives as long as the token's K/V and is
// shared as it is (docs/annotations.md).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <type_traits>
#include <utility>

#include "../detail/support/array.hpp"
#include "../detail/support/check.hpp"
#include "../detail/support/config.hpp"
#include "../detail/tree/core.hpp"
#include "../detail/tree/step_table.hpp"
#include "../detail/tree/token_tree.hpp"
#include "../plan_view.hpp"
#include "../transfer/companion.hpp"
#include "../tree_options.hpp"
#include "detail/slot_values.hpp"

CHUNKATTN_NAMESPACE_BEGIN

/// A column beside a tree: a T for each token that has one, such as the log-probability of the next
/// token, the experts of its row, a hidden state. Prompts that share tokens share the values; they
/// follow forks, splits and merges, and go when the K/V of their tokens goes.
///
/// A value at `position` may depend on the tokens up to position + lag. It belongs to the path up
/// to there: a fork or a prompt that parts before has none.
///
/// Its calls, its end too, are calls of the tree: the caller locks. The tree may move, and may end
/// before it; then all calls but stats() throw InvalidArgument. A tree may have several. As a
/// companion of K/V it takes part in swap_out(), resume() and Tiers.
///
/// \tparam Tree  a PrefixTree
/// \tparam T     what a value is: trivially copyable
template <class Tree, class T>
class Annotations final : public KvCompanion<typename Tree::Sequence> {
  static_assert(std::is_trivially_copyable_v<T>, "Annotations: T must be trivially copyable");

 public:
  using token_type = typename Tree::token_type;  ///< what prompts are made of
  using Sequence = typename Tree::Sequence;      ///< a sequence of the tree
  using Finished = typename Tree::Finished;      ///< a step of it that has run
  using value_type = T;                          ///< what a token has

  /// What values are of.
  struct Options {
    /// Tokens after its own that a value depends on. 1: what a row says of the next token, as its
    /// log-probability.
    std::size_t lag = 0;
    /// Of what is swapped or stored with K/V, values of another name, lag or size are never read.
    std::string name{};
  };
  /// What there is.
  struct Stats {
    std::size_t chunks = 0;  ///< of the tree, in which any token has a value
    std::size_t bytes = 0;   ///< of memory for their values
  };

  /// Without values yet.
  /// \throws InvalidArgument for a lag of more than 2^30
  explicit Annotations(Tree& tree, Options options = {})
      : shared_(detail::TreeAccess::shared(tree)),
        lag_(checked(options)),
        name_(std::move(options.name)),
        values_(shared_->tree->core, sizeof(T)) {}
  Annotations(const Annotations&) = delete;
  Annotations& operator=(const Annotations&) = delete;
  ~Annotations() override {
    if (shared_->tree) shared_->tree->core.topology.observers.remove(values_);
  }

  /// The values of a step, one for each of its rows, in the order of the plan's rows: after what it
  /// outputs was committed. A row gets none whose token, or one of the `lag` next, is not known;
  /// that is of a draft (for accepted ones call the other set()); or whose sequence has left, or
  /// went back, since then.
  /// \returns how many values were set
  /// \throws InvalidArgument for a step of another tree, and another number of values
  std::size_t set(const Finished& finished, std::span<const T> values) {
    check_tree();
    if (!detail::TreeAccess::is_of(finished, shared_)) [[unlikely]]
      detail::fail_argument("finished", "of another tree", "a step of this tree");
    const detail::StepRecord& step = detail::TreeAccess::record(finished);
    if (values.size() != detail::to_size(step.num_rows)) [[unlikely]]
      detail::fail_argument("values.size()", values.size(),
                            {"one for each of the step's ", step.num_rows, " rows"});
    return step.is_void ? 0 : set_rows(step, values.data());
  }
  /// The values of positions from `position` on, whose rows finished steps have computed.
  /// \throws InvalidArgument for a sequence of another tree (here and below), and for positions
  ///         from num_written() or size() - lag on (K/V that a step is still to copy is written)
  void set(const Sequence& sequence, std::size_t position, std::span<const T> values) {
    const detail::SequenceIndex s = index_of(sequence);
    const detail::SequenceRecord& record = core().sequences[s];
    const std::size_t written = detail::to_size(core().topology.written_end(record.tail));
    const std::size_t end = (std::min)({written, sequence.size(), end_of(sequence.size())});
    if (position > end || values.size() > end - position) [[unlikely]]
      detail::fail_argument("position + values.size()", position + values.size(),
                            {"at most ", end, ", so far rows are computed and their tokens known"});
    const std::int32_t begin = slot_of(position);
    values_.set(record.tail, begin, begin + static_cast<std::int32_t>(values.size()),
                bytes(values.data()));
  }
  /// The value of one position.
  void set(const Sequence& sequence, std::size_t position, const T& value) {
    set(sequence, position, std::span<const T>(&value, 1));
  }

  /// The first position from `begin` on without a value: where values of a sequence end.
  [[nodiscard]] std::size_t first_missing(const Sequence& sequence, std::size_t begin = 0) const {
    return first_missing(path_of(sequence), begin);
  }
  /// The same of what the tree has of a prompt: values of a request that begins so.
  [[nodiscard]] std::size_t first_missing(TokenSpan<token_type> prompt, std::size_t begin = 0,
                                          const InsertOptions& options = {}) const {
    return first_missing(path_of(prompt, options), begin);
  }
  /// The values of positions from `position` on.
  /// \throws InvalidArgument where one has none; the message says how far they go
  void read(const Sequence& sequence, std::size_t position, std::span<T> out) const {
    read(path_of(sequence), position, out);
  }
  /// The same of a prompt, which need not be inserted for it.
  void read(TokenSpan<token_type> prompt, std::size_t position, std::span<T> out,
            const InsertOptions& options = {}) const {
    read(path_of(prompt, options), position, out);
  }

  /// What there is. O(1).
  [[nodiscard]] Stats stats() const noexcept {
    return {values_.num_chunks(), values_.num_chunks() * values_.chunk_bytes()};
  }
  /// The options that it was made with.
  [[nodiscard]] Options options() const { return {detail::to_size(lag_), name_}; }

  /// As KvCompanion says.
  [[nodiscard]] std::string format() const override {
    return detail::joined({"annotations 1, ", sizeof(T), " bytes, lag ", lag_, ", "}) + name_;
  }
  /// The size of a value.
  [[nodiscard]] std::size_t bytes_per_token() const override { return sizeof(T); }
  /// As KvCompanion says: of each slot that has a value.
  void gather(std::span<const Piece> places, CompanionRows& rows) override {
    check_tree();
    for (const Piece& piece : places)
      values_.for_each(piece, [&](std::int32_t position, const std::byte* value) {
        std::memcpy(rows.add(position), value, sizeof(T));
      });
  }
  /// As KvCompanion says.
  void scatter(Sequence& sequence, const CompanionRows& rows) override {
    const detail::NodeIndex last = path_of(sequence).last;
    const std::byte* values = rows.bytes.data();
    for (const TokenRange& range : rows.ranges) {
      values_.add(last, range.begin, range.end(), values);
      values += detail::to_size(range.length) * sizeof(T);
    }
  }

 private:
  /// The first `length` tokens of the path to a node.
  struct Path {
    detail::NodeIndex last;
    std::size_t length;
  };

  static std::int32_t checked(const Options& options) {
    detail::check_argument(options.lag <= detail::to_size(detail::max_length), "lag", options.lag,
                           "at most 2^30 tokens");
    return static_cast<std::int32_t>(options.lag);
  }
  void check_tree() const {
    detail::check_argument(shared_->tree.has_value(), "annotations", "orphaned",
                           "those of a tree that still exists");
  }
  [[nodiscard]] const detail::TreeCore& core() const { return shared_->tree->core; }
  [[nodiscard]] detail::SequenceIndex index_of(const Sequence& sequence) const {
    check_tree();
    if (sequence.tree_id() != core().id) [[unlikely]]
      detail::fail_argument("sequence", "of another tree", "one of this tree");
    return detail::TreeAccess::index(sequence);
  }
  [[nodiscard]] Path path_of(const Sequence& sequence) const {
    return {core().sequences[index_of(sequence)].tail, sequence.size()};
  }
  [[nodiscard]] Path path_of(TokenSpan<token_type> prompt, const InsertOptions& options) const {
    check_tree();
    const detail::PathMatch match = shared_->tree->find(prompt, options);
    return {match.last, detail::to_size(match.length)};
  }

  // A value lies at the slot of the last token that it depends on, so that who shares that slot,
  // and nobody else, has the value.
  [[nodiscard]] std::int32_t slot_of(std::size_t position) const noexcept {
    return static_cast<std::int32_t>(position) + lag_;
  }
  // One past the last position that can have a value, of a path of so many tokens.
  [[nodiscard]] std::size_t end_of(std::size_t length) const noexcept {
    return length - (std::min)(length, detail::to_size(lag_));
  }
  [[nodiscard]] std::size_t first_missing(const Path& path, std::size_t begin) const noexcept {
    const std::size_t end = end_of(path.length);
    if (begin >= end) return begin;
    return detail::to_size(values_.first_missing(path.last, slot_of(begin), slot_of(end)) - lag_);
  }
  void read(const Path& path, std::size_t position, std::span<T> out) const {
    if (out.empty()) return;
    const std::size_t end = first_missing(path, position);
    if (out.size() > end - position) [[unlikely]]
      detail::fail_argument("position + out.size()", position + out.size(),
                            {"at most ", end, ", the first position without a value"});
    const std::int32_t begin = slot_of(position);
    values_.read(path.last, begin, begin + static_cast<std::int32_t>(out.size()),
                 reinterpret_cast<std::byte*>(out.data()));
  }
  static const std::byte* bytes(const T* values) noexcept {
    return reinterpret_cast<const std::byte*>(values);
  }

  [[nodiscard]] std::size_t set_rows(const detail::StepRecord& step, const T* values) {
    const detail::SequenceTable& sequences = core().sequences;
    // Whether each row has its value: all decode, and their outputs are known.
    const bool all = lag_ <= 1 && (lag_ == 0 || step.num_outputs == 0) && step.all_outputs &&
                     step.discarded_outputs == sequences.discarded_outputs();
    if (all) values_.reserve_chunks();
    std::size_t count = 0;
    const detail::StepEntry* const end = step.entries.end();
    for (const detail::StepEntry* entry = step.entries.begin();; ++entry) {
      if (all) {
        const detail::StepEntry* const first = entry;
        entry = values_.set_decoded(entry, end, lag_, values);
        count += detail::to_size(entry - first);
      }
      if (entry == end) return count;
      const detail::SequenceRecord& record = sequences[entry->sequence];
      // Another epoch: what the rows rest on may have been discarded.
      if (record.generation != entry->generation || record.epoch != entry->epoch) continue;
      const std::int32_t last = (std::min)(entry->output_position(), record.size - lag_);
      if (entry->begin >= last) continue;
      values_.set(record.tail, entry->begin + lag_, last + lag_, bytes(values + entry->first_row));
      count += detail::to_size(last - entry->begin);
    }
  }

  std::remove_cvref_t<decltype(detail::TreeAccess::shared(std::declval<const Tree&>()))> shared_;
  const std::int32_t lag_;
  const std::string name_;
  detail::SlotValues values_;
};

CHUNKATTN_NAMESPACE_END
