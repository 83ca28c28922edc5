// SlotValues: a value of so many bytes for each token of a tree that has one. A value lies by its
// token's slot, in an array for each chunk with a bit for each slot that says whether it is there.
//
// So sharing, splits and tenants need nothing: who has a token's slot has its value. A value goes
// when its slot does, and follows where a token gets a second slot (a fork) or the other of two (a
// merge). Memory that is short then loses the value, as if it had never been set.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <utility>

#include "../../detail/support/array.hpp"
#include "../../detail/support/config.hpp"
#include "../../detail/tree/core.hpp"
#include "../../detail/tree/node_observer.hpp"
#include "../../detail/tree/step_table.hpp"
#include "../../plan_view.hpp"

CHUNKATTN_NAMESPACE_BEGIN

namespace detail {

/// Observes the tree from now on, until its owner removes it. Positions are those of slots here.
class SlotValues final : public NodeObserver {
 public:
  SlotValues(TreeCore& tree, std::size_t value_size)
      : core_(tree),
        value_size_(value_size),
        num_words_(to_size((tree.topology.geometry.size + 63) / 64)) {
    tree.topology.observers.add(*this);
  }
  SlotValues(const SlotValues&) = delete;
  SlotValues& operator=(const SlotValues&) = delete;

  /// Chunks in which any token has a value.
  [[nodiscard]] std::size_t num_chunks() const noexcept { return num_pages_; }
  /// Memory for the values of a chunk.
  [[nodiscard]] std::size_t chunk_bytes() const noexcept {
    return sizeof(std::uint64_t) * page_words();
  }

  // ---- paths ---------------------------------------------------------------------------------

  /// The first position from `begin` on that has no value, of those before `end` on the path to
  /// `last`; `end`: all have.
  [[nodiscard]] std::int32_t first_missing(NodeIndex last, std::int32_t begin,
                                           std::int32_t end) const noexcept {
    std::int32_t first = (std::max)(begin, end);
    for_each_run(last, begin, end,
                 [&](ChunkIndex c, std::int32_t offset, std::int32_t count, std::int32_t position) {
                   const std::int32_t missing = num_leading(c, offset, count);
                   if (missing < count) first = (std::min)(first, position + missing);
                 });
    return first;
  }
  /// The values of [begin, end), which are there.
  void read(NodeIndex last, std::int32_t begin, std::int32_t end, std::byte* out) const noexcept {
    for_each_run(last, begin, end,
                 [&](ChunkIndex c, std::int32_t offset, std::int32_t count, std::int32_t position) {
                   std::memcpy(out + to_size(position - begin) * value_size_,
                               value_at(*page(c), offset), to_size(count) * value_size_);
                 });
  }
  /// Those of [begin, end) are these from now on. Throws std::bad_alloc, with nothing changed.
  void set(NodeIndex last, std::int32_t begin, std::int32_t end, const std::byte* values) {
    bool has_pages = true;
    const auto make = [&](ChunkIndex c, std::int32_t, std::int32_t, std::int32_t) {
      has_pages = has_pages && make_page(c);
    };
    for_each_run(last, begin, end, make);
    if (!has_pages) {
      for_each_run(last, begin, end, [&](ChunkIndex c, auto...) { drop_if_empty(c); });
      fail_allocation();
    }
    for_each_run(last, begin, end,
                 [&](ChunkIndex c, std::int32_t offset, std::int32_t count, std::int32_t position) {
                   put(c, offset, count, values + to_size(position - begin) * value_size_);
                 });
  }
  /// The same of those that have none, as far as there is memory.
  void add(NodeIndex last, std::int32_t begin, std::int32_t end, const std::byte* values) noexcept {
    for_each_run(last, begin, end,
                 [&](ChunkIndex c, std::int32_t offset, std::int32_t count, std::int32_t position) {
                   const std::byte* value = values + to_size(position - begin) * value_size_;
                   for (; count > 0; ++offset, --count, value += value_size_)
                     put_missing(c, offset, value);
                 });
  }
  /// Calls f(position, value) for the slots of a part of a path that have one.
  template <class F>
  void for_each(const Piece& piece, const F& f) const {
    for (std::int32_t i = 0; i < piece.length; ++i)
      if (has(piece.chunk, piece.begin + i))
        f(piece.position + i, value_at(*page(piece.chunk), piece.begin + i));
  }
  /// Room for the chunks that there are, so that set_decoded() finds each. Throws as set() does.
  void reserve_chunks() {
    if (const std::size_t count = core_.chunk_table.size(); count > size_ && !grow(2 * count))
      fail_allocation();
  }
  /// The values of the rows of entries that just decode, `lag` slots after their own. Returns the
  /// first one that does not, or whose chunk has no value yet; or `end`.
  template <class T>
  [[nodiscard, gnu::noinline]] const StepEntry* set_decoded(const StepEntry* entry,
                                                            const StepEntry* end, std::int32_t lag,
                                                            const T* values) noexcept {
    const Page* const pages = pages_.get();  // in registers
    const std::size_t num_words = num_words_;
    for (; entry != end && entry->chunk != no_chunk; ++entry) {
      std::uint64_t* const words = pages[entry->chunk].get();
      if (words == nullptr) [[unlikely]]
        break;
      const std::int32_t offset = entry->offset + lag;  // it is not the last slot of the chunk
      words[offset >> 6] |= std::uint64_t{1} << (offset & 63);
      std::memcpy(reinterpret_cast<std::byte*>(words + num_words) + to_size(offset) * sizeof(T),
                  values + entry->first_row, sizeof(T));
    }
    return entry;
  }

  // ---- changes of the tree -------------------------------------------------------------------

  void on_release(NodeIndex n, std::int32_t keep) noexcept override {
    const TreeNode& node = core_.topology.node(n);
    core_.topology.for_each_run(node, keep, node.length - keep,
                                [&](ChunkIndex c, std::int32_t offset, std::int32_t count,
                                    std::int32_t) { forget(c, offset, count); });
  }
  void on_copy(NodeIndex from, NodeIndex to, std::int32_t count) noexcept override {
    if (core_.topology.node(from).name_space == core_.topology.node(to).name_space)
      copy(from, to, count);  // else what was public is the tenant's own now
  }
  void on_merge(NodeIndex duplicate, NodeIndex target) noexcept override {
    copy(duplicate, target, core_.topology.node(duplicate).length);
  }
  void on_clear() noexcept override {}  // live sequences keep K/V and values alone
  void reserve(std::size_t) override {}
  void on_split(NodeIndex, NodeIndex) noexcept override {}

  /// For tests: values are of known tokens alone, and memory is that of values.
  [[nodiscard]] bool is_consistent() const override {
    std::size_t pages = 0, values = 0, of_tokens = 0;
    for (std::size_t c = 0; c < size_; ++c) {
      if (!pages_[c]) continue;
      const std::size_t before = values;
      for (std::size_t w = 0; w < num_words_; ++w) values += to_size(std::popcount(pages_[c][w]));
      if (values == before) return false;
      ++pages;
    }
    for (std::size_t i = 1; i < core_.topology.num_indices(); ++i) {
      const TreeNode& n = core_.topology.node(static_cast<NodeIndex>(i));
      if (n.state == NodeState::free) continue;
      const std::int32_t known =
          n.tail_of == none ? n.length : core_.sequences[n.tail_of].size - n.position;
      core_.topology.for_each_run(
          n, 0, (std::min)(n.length, known),
          [&](ChunkIndex c, std::int32_t offset, std::int32_t count, std::int32_t) {
            for (; count > 0; ++offset, --count) of_tokens += has(c, offset);
          });
    }
    return pages == num_pages_ && values == of_tokens;
  }

 private:
  /// A chunk's: a bit for each slot, then the values.
  using Page = std::unique_ptr<std::uint64_t[]>;

  [[nodiscard]] std::size_t page_words() const noexcept {
    return num_words_ + (to_size(core_.topology.geometry.size) * value_size_ + 7) / 8;
  }
  [[nodiscard]] const Page* page(ChunkIndex c) const noexcept {
    return to_size(c) < size_ && pages_[to_size(c)] ? &pages_[to_size(c)] : nullptr;
  }
  [[nodiscard]] std::byte* value_at(const Page& page, std::int32_t offset) const noexcept {
    return reinterpret_cast<std::byte*>(page.get() + num_words_) + to_size(offset) * value_size_;
  }
  // Calls f(chunk, offset, count, position) for the slots [begin, end) of the path to `last`, those
  // of the last node first.
  template <class F>
  void for_each_run(NodeIndex last, std::int32_t begin, std::int32_t end, const F& f) const {
    for (NodeIndex i = last; i != root_node; i = core_.topology.node(i).parent) {
      const TreeNode& n = core_.topology.node(i);
      const std::int32_t first = (std::max)(begin, n.position);
      core_.topology.for_each_run(n, first - n.position, (std::min)(end, n.end()) - first,
                                  [&](ChunkIndex c, std::int32_t offset, std::int32_t count,
                                      std::int32_t done) { f(c, offset, count, first + done); });
      if (n.position <= begin) return;
    }
  }
  // Calls f(word, mask) for the bits of `count` slots.
  template <class F>
  static void for_each_word(std::int32_t offset, std::int32_t count, const F& f) {
    for (const std::int32_t end = offset + count; offset < end;) {
      const std::int32_t bit = offset & 63, run = (std::min)(64 - bit, end - offset);
      f(to_size(offset >> 6), ~std::uint64_t{0} >> (64 - run) << bit);
      offset += run;
    }
  }
  [[nodiscard]] bool has(ChunkIndex c, std::int32_t offset) const noexcept {
    return num_leading(c, offset, 1) == 1;
  }
  // Of `count` slots, how many before the first one without a value.
  [[nodiscard]] std::int32_t num_leading(ChunkIndex c, std::int32_t offset,
                                         std::int32_t count) const noexcept {
    const Page* const p = page(c);
    if (p == nullptr) return 0;
    std::int32_t leading = count;
    for_each_word(offset, count, [&](std::size_t word, std::uint64_t mask) {
      const std::uint64_t missing = mask & ~(*p)[word];
      if (missing == 0) return;
      const auto at = static_cast<std::int32_t>(64 * word) + std::countr_zero(missing);
      leading = (std::min)(leading, at - offset);
    });
    return leading;
  }

  // ---- slots ---------------------------------------------------------------------------------

  // False where memory is short.
  [[nodiscard]] bool make_page(ChunkIndex c) noexcept {
    if (to_size(c) >= size_ && !grow(2 * to_size(c) + 16)) return false;
    Page& page = pages_[to_size(c)];
    if (page) return true;
    page.reset(new (std::nothrow) std::uint64_t[page_words()]);
    if (!page) return false;
    std::fill_n(page.get(), num_words_, 0);
    ++num_pages_;
    return true;
  }
  [[nodiscard]] bool grow(std::size_t size) noexcept {
    std::unique_ptr<Page[]> pages(new (std::nothrow) Page[size]);
    if (!pages) return false;
    std::move(pages_.get(), pages_.get() + size_, pages.get());
    pages_ = std::move(pages);
    size_ = size;
    return true;
  }
  // Into a chunk that has a page.
  void put(ChunkIndex c, std::int32_t offset, std::int32_t count,
           const std::byte* values) noexcept {
    const Page& page = pages_[to_size(c)];
    for_each_word(offset, count, [&](std::size_t word, std::uint64_t mask) { page[word] |= mask; });
    std::memcpy(value_at(page, offset), values, to_size(count) * value_size_);
  }
  // Where the slot has none, and there is memory.
  void put_missing(ChunkIndex c, std::int32_t offset, const std::byte* value) noexcept {
    if (!has(c, offset) && make_page(c)) put(c, offset, 1, value);
  }
  void forget(ChunkIndex c, std::int32_t offset, std::int32_t count) noexcept {
    if (page(c) == nullptr) return;
    for_each_word(offset, count,
                  [&](std::size_t word, std::uint64_t mask) { pages_[to_size(c)][word] &= ~mask; });
    drop_if_empty(c);
  }
  void drop_if_empty(ChunkIndex c) noexcept {
    const Page* const p = page(c);
    const auto has_any = [](std::uint64_t word) { return word != 0; };
    if (p == nullptr || std::any_of(p->get(), p->get() + num_words_, has_any)) return;
    pages_[to_size(c)].reset();
    --num_pages_;
  }
  // The first `count` tokens of two nodes are equal: what is missing in `to` is that of `from`.
  void copy(NodeIndex from, NodeIndex to, std::int32_t count) noexcept {
    core_.topology.for_each_common_run(core_.topology.node(from), core_.topology.node(to), count,
                                       [&](ChunkIndex a, std::int32_t at_a, ChunkIndex b,
                                           std::int32_t at_b, std::int32_t run, std::int32_t) {
                                         for (; run > 0; ++at_a, ++at_b, --run)
                                           if (has(a, at_a))
                                             put_missing(b, at_b, value_at(*page(a), at_a));
                                       });
  }

  const TreeCore& core_;
  const std::size_t value_size_, num_words_;
  std::unique_ptr<Page[]> pages_;  ///< by chunk
  std::size_t size_ = 0;           ///< of pages_
  std::size_t num_pages_ = 0;      ///< of these, those that there are
};

}  // namespace detail

CHUNKATTN_NAMESPACE_END
