#include "kv_blocks.hpp"

#include <algorithm>
#include <utility>

namespace serve {

namespace {

/// Both halves of a product of 64 bits: every bit of it depends on all of them.
std::uint64_t fold(std::uint64_t a, std::uint64_t b) {
  __extension__ using Wide = unsigned __int128;
  const Wide product = static_cast<Wide>(a) * b;
  return static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64);
}

/// The last change, if what comes now can be added to it, or a new one.
BlockEvent& removal(bool is_windowed, std::vector<BlockEvent>& changes) {
  if (changes.empty() || changes.back().kind != BlockEvent::Kind::removed ||
      changes.back().medium != Medium::tree || changes.back().is_windowed != is_windowed)
    changes.push_back({.kind = BlockEvent::Kind::removed,
                       .is_windowed = is_windowed,
                       .hashes = {},
                       .tokens = {}});
  return changes.back();
}
/// The same of a block that is stored after another one.
BlockEvent& storing(std::uint64_t parent, bool is_windowed, std::vector<BlockEvent>& changes) {
  const bool goes_on = !changes.empty() && changes.back().kind == BlockEvent::Kind::stored &&
                       changes.back().medium == Medium::tree &&
                       changes.back().is_windowed == is_windowed && parent != 0 &&
                       changes.back().hashes.back() == parent;
  if (!goes_on)
    changes.push_back({.kind = BlockEvent::Kind::stored,
                       .is_windowed = is_windowed,
                       .hashes = {},
                       .parent = parent,
                       .tokens = {}});
  return changes.back();
}

}  // namespace

std::uint64_t hash_of_block(std::uint64_t parent, std::uint64_t tenant,
                            std::span<const int> tokens) {
  std::uint64_t value = fold(parent ^ 0xa0761d6478bd642fu, tenant ^ 0xe7037ed1a0b428dbu);
  for (const int token : tokens)
    value = fold(value ^ static_cast<std::uint32_t>(token) ^ 0x8ebc6af09c88c6e3u,
                 0x589965cc75374cc3u ^ (value << 1));
  return std::max<std::uint64_t>(value >> 1, 1);
}

void BlockTable::apply(const chunkattn::CacheEvent& event, std::span<const int> tokens,
                       std::vector<BlockEvent>& changes) {
  using Kind = chunkattn::CacheEvent::Kind;
  if (event.kind == Kind::cleared) {
    spans_.clear();
    num_blocks_ = 0;
    changes.push_back({});
  } else if (is_published(event.name_space, with_tenants_)) {
    if (event.kind == Kind::stored) store(event, tokens, changes);
    if (event.kind == Kind::evicted) evict(event, changes);
    if (with_windows_ && (event.kind == Kind::kept || event.kind == Kind::lost))
      keep(event, changes);
  }
}

void BlockTable::store(const chunkattn::CacheEvent& event, std::span<const int> tokens,
                       std::vector<BlockEvent>& changes) {
  Span& span = spans_[event.span];
  if (event.parent != event.span) {
    span.parent = event.parent;
    span.position = static_cast<std::size_t>(event.position);
    span.tenant = event.name_space.tenant;
    if (with_windows_ && event.parent != 0) spans_.at(event.parent).next.push_back(event.span);
  }
  const std::size_t before = span.end();
  span.tokens.insert(span.tokens.end(), tokens.begin(), tokens.end());
  span.kept.resize(span.tokens.size());
  for (std::size_t end = (before / size_ + 1) * size_; end <= span.end(); end += size_)
    complete_block(span, end, changes);
}

void BlockTable::evict(const chunkattn::CacheEvent& event, std::vector<BlockEvent>& changes) {
  const auto found = spans_.find(event.span);
  if (found == spans_.end()) return;
  Span& span = found->second;
  const auto end = static_cast<std::size_t>(event.position);
  const std::size_t kept = end / size_ - span.position / size_;
  if (span.hashes.size() > kept) {
    for (std::size_t block = span.hashes.size(); block-- > kept;)
      set_windowed(span, block, false, changes);
    std::vector<std::uint64_t>& gone = removal(false, changes).hashes;
    num_blocks_ -= span.hashes.size() - kept;
    gone.insert(gone.end(), span.hashes.rbegin(),
                span.hashes.rend() - static_cast<std::ptrdiff_t>(kept));
    span.hashes.resize(kept);
    span.windowed.resize(kept);
  }
  span.tokens.resize(end - span.position);
  span.kept.resize(span.tokens.size());
  if (!span.tokens.empty()) return;
  if (const auto parent = spans_.find(span.parent); parent != spans_.end())
    std::erase(parent->second.next, event.span);
  spans_.erase(found);
}

void BlockTable::keep(const chunkattn::CacheEvent& event, std::vector<BlockEvent>& changes) {
  Span& span = spans_.at(event.span);
  const auto begin = static_cast<std::size_t>(event.position);
  const std::size_t end = begin + static_cast<std::size_t>(event.length);
  std::fill_n(span.kept.begin() + static_cast<std::ptrdiff_t>(begin - span.position), event.length,
              event.kind == chunkattn::CacheEvent::Kind::kept);
  update_windowed(span, begin, end, changes);
}

/// Of blocks with tokens [begin, end) of a span's path, its own and those of spans that go on
/// within a block.
void BlockTable::update_windowed(Span& span, std::size_t begin, std::size_t end,
                                 std::vector<BlockEvent>& changes) {
  const std::size_t first = span.position / size_;
  for (std::size_t block = std::max(begin / size_, first);
       block * size_ < end && block - first < span.hashes.size(); ++block)
    set_windowed(span, block - first, is_kept(span, (block + 1) * size_), changes);
  for (const std::uint64_t number : span.next) {
    Span& next = spans_.at(number);
    const std::size_t block = next.position / size_ * size_;
    if (next.position > begin && next.position > block && block < end)
      update_windowed(next, block, std::min(end, block + size_), changes);
  }
}

void BlockTable::set_windowed(Span& span, std::size_t block, bool is_windowed,
                              std::vector<BlockEvent>& changes) {
  if (span.windowed[block] == is_windowed) return;
  span.windowed[block] = is_windowed;
  if (is_windowed)
    add_windowed(span, block, changes);
  else
    removal(true, changes).hashes.push_back(span.hashes[block]);
}

void BlockTable::add_windowed(const Span& span, std::size_t block,
                              std::vector<BlockEvent>& changes) const {
  const std::size_t end = (span.position / size_ + block + 1) * size_;
  BlockEvent& change = storing(hash_of_block_at(span, end - size_), true, changes);
  change.tokens.resize(change.tokens.size() + size_);
  read_block(span, end, std::span(change.tokens).last(size_));
  change.hashes.push_back(span.hashes[block]);
}

/// Whether layers with a window have all of the block that ends there.
bool BlockTable::is_kept(const Span& span, std::size_t end) const {
  const Span* at = &span;
  for (std::size_t position = end; position-- > end - size_;) {
    while (position < at->position) at = &spans_.at(at->parent);
    if (!at->kept[position - at->position]) return false;
  }
  return true;
}

void BlockTable::complete_block(Span& span, std::size_t end, std::vector<BlockEvent>& changes) {
  const std::uint64_t parent = hash_of_block_at(span, end - size_);
  BlockEvent& change = storing(parent, false, changes);
  change.tokens.resize(change.tokens.size() + size_);
  const std::span<int> block = std::span(change.tokens).last(size_);
  read_block(span, end, block);
  change.hashes.push_back(hash_of_block(parent, span.tenant, block));
  span.hashes.push_back(change.hashes.back());
  span.windowed.push_back(false);
  ++num_blocks_;
}

/// Of the block that ends at this position of the span's path; 0 at its start.
std::uint64_t BlockTable::hash_of_block_at(const Span& span, std::size_t end) const {
  if (end == 0) return 0;
  const Span* at = &span;
  while (end <= at->position) at = &spans_.at(at->parent);
  return at->hashes[end / size_ - at->position / size_ - 1];
}

void BlockTable::read_block(const Span& span, std::size_t end, std::span<int> block) const {
  const Span* at = &span;
  for (std::size_t left = size_; left > 0;) {
    const std::size_t last = end - size_ + left;  // one past what is still wanted
    const std::size_t first = std::max(at->position, end - size_);
    if (first < last) {
      std::copy_n(at->tokens.begin() + static_cast<std::ptrdiff_t>(first - at->position),
                  last - first, block.begin() + static_cast<std::ptrdiff_t>(first - (end - size_)));
      left -= last - first;
    }
    if (left > 0) at = &spans_.at(at->parent);
  }
}

std::vector<BlockEvent> BlockTable::all() const {
  std::vector<std::pair<std::size_t, std::uint64_t>> order;  // a parent begins before its children
  for (const auto& [number, span] : spans_) order.emplace_back(span.position, number);
  std::sort(order.begin(), order.end());
  std::vector<BlockEvent> stored;
  for (const auto& [position, number] : order) {
    const Span& span = spans_.at(number);
    if (span.hashes.empty()) continue;
    std::size_t end = (span.position / size_ + 1) * size_;
    BlockEvent event{.kind = BlockEvent::Kind::stored, .hashes = span.hashes, .tokens = {}};
    event.parent = hash_of_block_at(span, end - size_);
    event.tokens.resize(span.hashes.size() * size_);
    for (std::size_t i = 0; i < span.hashes.size(); ++i, end += size_)
      read_block(span, end, std::span(event.tokens).subspan(i * size_, size_));
    stored.push_back(std::move(event));
  }
  for (const auto& [position, number] : order) {
    const Span& span = spans_.at(number);
    for (std::size_t block = 0; block < span.windowed.size(); ++block)
      if (span.windowed[block]) add_windowed(span, block, stored);
  }
  return stored;
}

}  // namespace serve
