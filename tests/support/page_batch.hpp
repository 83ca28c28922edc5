// Random page tables as paged engines have them, and steps that they go through.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "chunkattn/interop/page_tables.hpp"
#include "random.hpp"

namespace test {

/// A batch in both forms. Sequences are what an engine may make of them, and a little more.
struct PageBatch {
  struct Sequence {
    std::vector<std::int32_t> pages;  ///< those of seq_len, and a few after them
    int seq_len = 0;
    int num_queries = 0;
  };

  chunkattn::PageGeometry geometry;
  std::vector<Sequence> sequences;

  // As PageTables, with garbage where no one looks.
  std::vector<std::int32_t> table, seq_lens, query_start_loc;
  std::int64_t stride = 0;
  // As PageIndices, with `query_start_loc`.
  std::vector<std::int32_t> indptr, indices, last_page_len;
  std::vector<std::int64_t> slot_mapping;

  [[nodiscard]] int pages_of(const Sequence& sequence) const {
    return (sequence.seq_len + geometry.page_size - 1) / geometry.page_size;
  }
  [[nodiscard]] int num_rows() const { return query_start_loc.back(); }
  [[nodiscard]] chunkattn::PageTables tables() const {
    return {table, stride, seq_lens, query_start_loc, slot_mapping};
  }
  [[nodiscard]] chunkattn::PageIndices csr() const {
    return {indptr, indices, last_page_len, query_start_loc, slot_mapping};
  }
  /// The slot of a path position: page * page_size + offset.
  [[nodiscard]] std::int64_t slot(const Sequence& sequence, int position) const {
    const std::int64_t page =
        sequence.pages[static_cast<std::size_t>(position / geometry.page_size)];
    return page * geometry.page_size + position % geometry.page_size;
  }
  /// How many leading pages may be read together: a plain loop.
  [[nodiscard]] int common_pages(const Sequence& a, const Sequence& b) const {
    std::size_t p = 0;
    while (static_cast<int>(p + 1) * geometry.page_size <= std::min(a.seq_len, b.seq_len) &&
           a.pages[p] == b.pages[p])
      ++p;
    return static_cast<int>(p);
  }

  /// Fills in the arrays of both forms.
  void write_tables(Random& random) {
    const auto garbage = [&] { return random.uniform(-1000000, 1000000); };
    stride = random.uniform(0, 3);
    std::int64_t most = 0;
    for (const Sequence& s : sequences)
      if (s.num_queries > 0) most = std::max<std::int64_t>(most, pages_of(s));
    stride += most;
    table.assign(sequences.size() * static_cast<std::size_t>(stride), 0);
    for (std::int32_t& entry : table) entry = garbage();
    seq_lens.clear();
    query_start_loc.assign(1, 0);
    indptr.assign(1, 0);
    indices.clear();
    last_page_len.clear();
    for (std::size_t i = 0; i < sequences.size(); ++i) {
      const Sequence& s = sequences[i];
      const bool looked_at = s.num_queries > 0;
      const int num_pages = looked_at ? pages_of(s) : random.uniform(0, 2);
      for (int p = 0; p < num_pages; ++p) {
        const std::int32_t page = looked_at ? s.pages[static_cast<std::size_t>(p)] : garbage();
        indices.push_back(page);
        if (looked_at)
          table[i * static_cast<std::size_t>(stride) + static_cast<std::size_t>(p)] = page;
      }
      seq_lens.push_back(looked_at ? s.seq_len : garbage());
      query_start_loc.push_back(query_start_loc.back() + s.num_queries);
      indptr.push_back(static_cast<std::int32_t>(indices.size()));
      last_page_len.push_back(looked_at && s.seq_len > 0 ? (s.seq_len - 1) % geometry.page_size + 1
                                                         : garbage());
    }
  }
};

struct PageBatchOptions {
  std::vector<int> page_sizes{1, 1, 2, 3, 6, 16, 64, 100, 128, 1024};
  int max_sequences = 12;
  int max_tokens = 200;  ///< of a sequence beyond what it shares; and at least a few pages
  int max_queries = 40;
  int num_pages = 1 << 20;  ///< of memory; 0: few more than are used
};

/// Makes batches, and what becomes of them from step to step.
class PageBatches {
 public:
  PageBatches(Random& random, PageBatchOptions options)
      : random_(random), options_(std::move(options)) {}

  /// A batch of sequences that share pages in all ways.
  PageBatch make() {
    batch_ = {};
    next_page_ = 0;
    batch_.geometry.page_size = options_.page_sizes[random_.index(options_.page_sizes.size())];
    batch_.geometry.joined = random_.chance(0.5);
    if (random_.chance(0.3)) batch_.geometry.null_page = next_page_++;
    scattered_ = random_.chance(0.5);
    const int count = random_.uniform(random_.chance(0.05) ? 0 : 1, options_.max_sequences);
    for (int i = 0; i < count; ++i) join();
    batch_.geometry.num_pages =
        options_.num_pages > 0 ? options_.num_pages : next_page_ + random_.uniform(1, 3);
    finish();
    return batch_;
  }

  /// The next step of the batch made last: as when all decode, or with other sequences.
  /// \returns whether nothing but lengths changed
  bool step(bool others) {
    for (PageBatch::Sequence& s : batch_.sequences) {
      if (s.num_queries == 0 || s.seq_len == 0) continue;
      s.seq_len += random_.uniform(1, s.num_queries);
      extend(s);
    }
    if (others) change();
    finish();
    return !others;
  }
  [[nodiscard]] const PageBatch& batch() const { return batch_; }

 private:
  int new_page() {
    if (scattered_ && random_.chance(0.7)) next_page_ += random_.uniform(1, 3);
    return next_page_++;
  }
  void extend(PageBatch::Sequence& s) {
    while (static_cast<int>(s.pages.size()) < batch_.pages_of(s)) s.pages.push_back(new_page());
  }

  void join() {
    PageBatch::Sequence s;
    const int page = batch_.geometry.page_size;
    if (!batch_.sequences.empty() && random_.chance(0.75)) {
      const PageBatch::Sequence& other = batch_.sequences[random_.index(batch_.sequences.size())];
      s.pages = other.pages;
      s.pages.resize(random_.index(other.pages.size() + 1));
      if (random_.chance(0.1) && s.pages.size() > 1) {  // parts from it, and is equal again
        s.pages[random_.index(s.pages.size())] = new_page();
      }
    }
    s.seq_len = static_cast<int>(s.pages.size()) * page;
    if (!s.pages.empty() && random_.chance(0.2))
      s.seq_len -= random_.uniform(0, page - 1);  // ends in a page of the other's
    else if (s.pages.empty() || random_.chance(0.8))
      s.seq_len += random_.uniform(1, std::max(options_.max_tokens, 3 * page));
    extend(s);
    if (random_.chance(0.05)) s.pages.back() = s.pages.front();  // one page twice
    free_pages(s);
    s.num_queries = random_.chance(0.6) ? 1 : random_.uniform(0, options_.max_queries);
    s.num_queries = std::min(s.num_queries, s.seq_len);
    if (random_.chance(0.05)) s.seq_len = 0;  // padding
    batch_.sequences.push_back(s);
  }
  // As of a sliding window; seldom in the middle.
  void free_pages(PageBatch::Sequence& s) {
    if (batch_.geometry.null_page < 0 || random_.chance(0.6)) return;
    const auto end = random_.index(s.pages.size() + 1);
    const auto begin = random_.chance(0.3) ? random_.index(end + 1) : 0;
    for (std::size_t p = begin; p < end; ++p) s.pages[p] = batch_.geometry.null_page;
  }

  void change() {
    std::vector<PageBatch::Sequence>& all = batch_.sequences;
    const int what = random_.uniform(0, 6);
    if (what == 0 || all.empty()) {
      join();
      return;
    }
    PageBatch::Sequence& one = all[random_.index(all.size())];
    if (what == 1) all.erase(all.begin() + static_cast<std::ptrdiff_t>(random_.index(all.size())));
    if (what == 2) random_.shuffle(all);
    if (what == 3) free_pages(one);
    if (what == 4)
      one.num_queries = random_.uniform(0, std::min(options_.max_queries, one.seq_len));
    if (what == 5) one.pages[random_.index(one.pages.size())] = new_page();
    if (what == 6)
      one.seq_len = random_.uniform(std::min(one.num_queries, one.seq_len), one.seq_len);
  }

  void finish() {
    batch_.write_tables(random_);
    batch_.slot_mapping.clear();
    if (random_.chance(0.5)) return;
    // Slots of its own choice, some none, and a few for padding.
    const int count = batch_.num_rows() + random_.uniform(0, 3);
    const std::int64_t slots = std::int64_t{batch_.geometry.num_pages} * batch_.geometry.page_size;
    for (int i = 0; i < count; ++i)
      batch_.slot_mapping.push_back(i >= batch_.num_rows() || random_.chance(0.2)
                                        ? -random_.uniform(1, 5)
                                        : static_cast<std::int64_t>(random_.bits() >> 1) % slots);
  }

  Random& random_;
  PageBatchOptions options_;
  PageBatch batch_;
  int next_page_ = 0;
  bool scattered_ = false;
};

}  // namespace test
