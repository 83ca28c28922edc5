// TierManager: what Tiers does on the tree's thread. It follows the tree's events, copies blocks
// out of its cache, writes loaded ones to their slots.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "../../detail/support/array.hpp"
#include "../../detail/support/check.hpp"
#include "../../detail/support/chunk_source.hpp"
#include "../../detail/support/config.hpp"
#include "../../detail/support/fork_mark.hpp"
#include "../../element.hpp"
#include "../../events/cache_events.hpp"
#include "../../kv_view.hpp"
#include "../../plan_view.hpp"
#include "../../transfer/detail/slots.hpp"
#include "../../transfer/transfer.hpp"
#include "../../tree_options.hpp"
#include "../tier_store.hpp"
#include "codec.hpp"
#include "companions.hpp"
#include "queue.hpp"
#include "record.hpp"
#include "spans.hpp"

CHUNKATTN_NAMESPACE_BEGIN
namespace detail {

/// \tparam Tiers  of that tree and cache, for its types
template <class Tiers, class Tree, class Cache>
class TierManager {
  using Token = typename Tree::token_type;
  using Sequence = typename Tree::Sequence;
  using Element = cache_element<Cache>;
  using Queue = TierQueue<Token>;
  using Clock = typename Queue::Clock;

 public:
  using Options = typename Tiers::Options;
  using Stats = typename Tiers::Stats;

  TierManager(Tree& tree, Cache& cache, std::vector<std::shared_ptr<TierStore>> stores,
              Options options)
      : tree_(&tree),
        cache_(&cache),
        options_(std::move(options)),
        block_(options_.block_tokens.value_or(Tree::chunk_size)),
        tree_id_(ChunkAccess::source(tree).tree_id),
        spans_(block_) {
    check_argument(block_ > 0, "options.block_tokens", block_,
                   "at least 1, or none for the tree's chunk size");
    check_argument(options_.max_prefetched > 0, "options.max_prefetched", options_.max_prefetched,
                   "at least 1");
    check_argument(options_.max_wait_seconds > 0, "options.max_wait_seconds",
                   options_.max_wait_seconds, "a positive time");
    check_argument(!stores.empty(), "stores.size()", stores.size(), "at least one tier");
    for (const auto& store : stores) check_argument(store != nullptr, "stores", "null", "tiers");
    if constexpr (requires { cache.tree_id(); })
      check_argument(cache.tree_id() == 0 || cache.tree_id() == tree_id_, "cache",
                     "of another tree", "the K/V memory of the tree");
    companions_.emplace(options_.companions, block_);
    codec_ = make_tier_codec<Element>(cache, to_size(block_), options_.stored_as);
    codec_.companions = companions_->shapes();
    queue_ = std::make_unique<Queue>(std::move(stores), codec_, options_.max_prefetched,
                                     options_.max_queued_bytes, 10 * options_.max_wait_seconds,
                                     options_.threads, report());
    follow();
  }
  TierManager(const TierManager&) = delete;
  TierManager& operator=(const TierManager&) = delete;
  void close() {
    events_.reset();
    tree_ = nullptr;
    // In a child nothing of it can be destroyed: who held its locks is not there.
    if (is_in_child()) (void)queue_.release();
    queue_.reset();
  }
  [[nodiscard]] Queue& queue() const {
    check_process();
    return *queue_;
  }

  // ---- offload ------------------------------------------------------------------------------

  std::size_t advance(std::size_t max_blocks) {
    resume_following();
    for (std::size_t n = 0; n < max_blocks && !fresh_.empty() && has_room();) {
      const auto [span, block] = fresh_.front();
      fresh_.pop_front();
      if (store(span, block)) ++n;
    }
    return fresh_.size();
  }
  void store_all() {
    resume_following();
    fresh_.clear();
    spans_.for_each_block([&](std::uint64_t span, std::size_t block) {
      queue_->wait_for_room(block_bytes());
      (void)store(span, block);
    });
  }
  void flush() { queue().flush(); }

  // ---- load ---------------------------------------------------------------------------------

  std::shared_ptr<TierLoad> start(const Sequence& sequence, bool compute_last) {
    resume_following();
    const std::size_t size = sequence.size();
    const TokenRange range = sequence.loadable();
    const std::size_t first = to_size(range.begin / block_), blocks = size / to_size(block_);
    const std::size_t limit = size - (compute_last ? 1 : 0);
    if (!is_open_ || sequence.weights_epoch() == 0 || range.empty() || first >= blocks ||
        to_size(range.begin) >= limit)
      return nullptr;
    auto load = std::make_shared<TierLoad>();
    load->rows = companions_->no_rows();
    const InsertOptions how = sequence.options();
    const std::size_t public_end = (std::min)(how.public_length, size);
    load->heads[0] = head_of(how.name_space, public_end);
    load->heads[1] = head_of({.adapter = how.name_space.adapter, .is_public = true}, 0);
    load->public_blocks = load->heads[1].empty() ? 0 : public_end / to_size(block_);
    if (load->heads[0].empty()) return nullptr;
    load->block_bytes = to_size(block_) * sizeof(Token);
    load->first = first;
    const std::vector<Token> tokens = sequence.tokens();
    const auto bytes = std::as_bytes(std::span(tokens)).first(blocks * load->block_bytes);
    load->tokens.assign(bytes.begin(), bytes.end());
    TierHash hash;
    std::vector<TierStore::Key> keys;
    for (std::size_t block = 0; block < blocks && block * to_size(block_) < limit; ++block) {
      hash.add(bytes.subspan(block * load->block_bytes, load->block_bytes));
      if (block >= first || options_.observer)
        keys.push_back(key_of(hash, load->content(block).head));
    }
    if (options_.observer) {
      load->expected = expect(
          keys.size(), [&](std::size_t block) { return keys[block]; }, load->tokens, how.name_space,
          load->public_blocks);
      keys.erase(keys.begin(), keys.begin() + static_cast<std::ptrdiff_t>(first));
    }
    load->keys = std::move(keys);
    load->sequence = static_cast<std::uint64_t>(sequence.id());
    load->weights = sequence.weights_epoch();
    load->limit = limit;
    load->since = Clock::now();
    ++stats_.loads;
    queue_->start(load);
    return load;
  }
  /// As Tiers::find().
  [[nodiscard]] std::vector<std::size_t> find(std::span<const Token> prompt,
                                              const InsertOptions& how, std::size_t begin) const {
    std::vector<std::size_t> tiers;
    const std::size_t public_end = (std::min)(how.public_length, prompt.size());
    const auto own = head_of(how.name_space, public_end);
    if (!is_open_ || own.empty()) return tiers;
    const auto shared = head_of({.adapter = how.name_space.adapter, .is_public = true}, 0);
    const std::size_t block = to_size(block_), first = begin / block;
    const std::size_t public_blocks = shared.empty() ? 0 : public_end / block;
    TierHash hash;
    for (std::size_t i = 0; i < prompt.size() / block; ++i) {
      hash.add(std::as_bytes(prompt.subspan(i * block, block)));
      if (i < first) continue;
      const std::size_t tier = queue().tier_of(key_of(hash, i < public_blocks ? shared : own));
      if (tier == queue().num_tiers()) return tiers;
      tiers.push_back(tier);
    }
    return tiers;
  }
  /// False when it is over.
  bool poll(Sequence& sequence, const std::shared_ptr<TierLoad>& load) {
    if (tree_ == nullptr || !is_open_ || is_in_child() ||
        static_cast<std::uint64_t>(sequence.id()) != load->sequence ||
        sequence.weights_epoch() != load->weights)
      return cancel(load);
    if (take(sequence, load)) return true;
    companions_->put_back(sequence, load->rows);
    return false;
  }
  void wait(const TierLoad& load) {
    if (queue_) queue_->wait(load, std::chrono::milliseconds(50));
  }
  bool cancel(const std::shared_ptr<TierLoad>& load) {
    if (is_in_child())
      static_cast<void>(new auto(load));  // nor this
    else if (queue_)
      queue_->cancel(load, /*too_late=*/false);
    return false;
  }

  // ---- both ----------------------------------------------------------------------------------

  void computed(std::size_t tokens, double seconds) {
    if (tokens == 0 || !(seconds > 0)) return;
    const double one = seconds / static_cast<double>(tokens);
    token_seconds_ += (one - token_seconds_) * (token_seconds_ == 0 ? 1.0 : 0.1);
    queue_->set_compute_seconds(token_seconds_ * block_);
  }
  void reopen(std::string model) {
    check_process();
    options_.model = std::move(model);
    queue_->forget();
    is_open_ = true;
  }
  [[nodiscard]] Stats stats() const {
    Stats all = stats_;
    for (const typename Queue::Counts& c : queue().counts())
      all.tiers.push_back(
          {c.stored, c.stored_bytes, c.put_failed, c.loaded, c.missed, c.refused, c.not_worth});
    return all;
  }

 private:
  // ---- the tree's events ----

  void follow() {
    events_.emplace(*tree_, [this](const CacheEvent& event, std::span<const Token> tokens) {
      on_event(event, tokens);
    });
    is_lost_ = true;
    resume_following();
  }
  /// Whether the threads are those of the parent, from which this process was forked.
  [[nodiscard]] bool is_in_child() const noexcept {
    return options_.threads && mark_.is_in_child();
  }
  void check_process() const {
    check_argument(!is_in_child(), "tiers", "made before fork()",
                   "some that this process made: the threads of these are its parent's");
  }
  /// From a snapshot, if anything got lost for want of memory, or was there before.
  void resume_following() {
    check_process();
    if (!is_lost_) return;
    spans_.clear();
    fresh_.clear();
    const auto snapshot = events_->snapshot();
    is_lost_ = false;
    std::span<const Token> rest(snapshot.tokens);
    for (const CacheEvent& event : snapshot.spans) {
      on_event(event, rest.first(to_size(event.length)));
      rest = rest.subspan(to_size(event.length));
    }
  }
  void on_event(const CacheEvent& event, std::span<const Token> tokens) noexcept {
    if (is_in_child()) return;
    // What K/V is computed with from now on, reopen() says: even where events before it got lost.
    if (event.kind == CacheEvent::Kind::cleared) {
      is_open_ = false;
      if (options_.observer) options_.observer->cleared();
    }
    if (is_lost_) return;
    is_lost_ = true;
#if CHUNKATTN_EXCEPTIONS
    try {
      is_lost_ = !apply(event, tokens);
    } catch (...) {  // out of memory: what is evicted until then is not stored
    }
#else
    is_lost_ = !apply(event, tokens);
#endif
  }
  bool apply(const CacheEvent& event, std::span<const Token> tokens) {
    switch (event.kind) {
      case CacheEvent::Kind::stored:
        return spans_.store(event, tokens, [&](std::size_t block) {
          if (!options_.write_through || !is_open_) return;
          fresh_.emplace_back(event.span, block);
          if (fresh_.size() > most_fresh) fresh_.pop_front();  // advance() is not called
        });
      case CacheEvent::Kind::evicted:
        return spans_.evict(
            event, [&](std::uint64_t span, std::size_t block) { (void)store(span, block); });
      case CacheEvent::Kind::cleared:
        spans_.clear();
        fresh_.clear();
        return true;
      case CacheEvent::Kind::kept:
      case CacheEvent::Kind::lost:
        break;  // it follows no component
    }
    return false;
  }

  // ---- offload ------------------------------------------------------------------------------

  [[nodiscard]] std::size_t block_bytes() const {
    return codec_.raw_bytes + codec_.companions.most_bytes();
  }
  [[nodiscard]] bool has_room() const { return queue_->has_room(block_bytes()); }
  /// Copies a block out of the cache. False if there is nothing to copy.
  bool store(std::uint64_t number, std::size_t block) {
    const auto* const span = spans_.find(number, block);
    if (span == nullptr || !is_open_) return false;
    const std::vector<std::byte> head =
        head_of(span->name_space, span->name_space.is_public ? 0 : to_size(span->public_end));
    if (head.empty()) return false;
    const TierStore::Key key = key_of(spans_.hash(*span, block), head);
    const bool is_known = queue_->knows(key), is_bare = companions_->is_bare(key);
    if (is_known && !is_bare) return false;
    if (!has_room()) {
      ++stats_.dropped;
      return false;
    }
    typename Queue::Put put;
    pieces_.pieces.clear();
    spans_.pieces_of(*span, block, pieces_.pieces);
    pieces_.tree = tree_id_;
    const TokenRange range{static_cast<std::int32_t>(block) * block_, block_};
    put.raw.resize(codec_.raw_bytes);
    const bool has_rows = companions_->add_rows(pieces_.pieces, range.begin, put.raw);
    if (is_known && !has_rows) return false;
    put.replaces = is_bare && has_rows;
    companions_->note(key, has_rows);
    put.key = key;
    put.head = head;
    spans_.path_tokens(*span, block, put.tokens);
    if (options_.observer) put.expected = expect(*span, block + 1, put.tokens);
    transfer(
        pieces_, range, *cache_, std::span<std::byte>(put.raw).first(codec_.raw_bytes), range,
        [](const void* row, std::byte* to, std::size_t bytes) { std::memcpy(to, row, bytes); });
    queue_->put(std::move(put));
    ++stats_.gathered;
    return true;
  }

  // ---- load ---------------------------------------------------------------------------------

  /// What has come. False: nothing more will, or is wanted.
  bool take(Sequence& sequence, const std::shared_ptr<TierLoad>& load) {
    bool is_over = false;
    const auto taken = queue_->take(load, is_over);
    for (const TierLoad::Ready& ready : taken)
      if (!fill(sequence, *load, ready)) return cancel(load);
    if (is_over) return false;
    const auto now = Clock::now();
    if (!taken.empty()) load->since = now;
    const double part =
        std::chrono::duration<double>(now - load->since).count() / patience(sequence, *load);
    if (part <= 1) {
      queue_->pass_over(load, part);
      return true;
    }
    ++stats_.loads_late;
    queue_->cancel(load, /*too_late=*/true);
    return false;
  }
  /// False if the rest is not wanted any longer.
  bool fill(Sequence& sequence, TierLoad& load, const TierLoad::Ready& ready) {
    const auto begin = static_cast<std::int32_t>(ready.block) * block_;
    const bool has_rows = companions_->take(std::span(ready.raw).subspan(codec_.raw_bytes), begin,
                                            load.limit, load.rows);
    companions_->note(load.keys[ready.block - load.first], has_rows);
    const TokenRange loadable = sequence.loadable();
    if (loadable.empty() || loadable.begin < begin) return false;
    const std::int32_t end =
        (std::min)({begin + block_, static_cast<std::int32_t>(load.limit), loadable.end()});
    if (loadable.begin >= end) return true;  // somebody else was faster
    const TokenRange range{loadable.begin, end - loadable.begin};
    scatter_kv(sequence, range, *cache_,
               std::span<const std::byte>(ready.raw).first(codec_.raw_bytes), {begin, block_});
    sequence.mark_loaded(range);
    stats_.loaded_tokens += to_size(range.length);
    return true;
  }
  [[nodiscard]] double patience(const Sequence& sequence, const TierLoad& load) const {
    if (token_seconds_ == 0) return options_.max_wait_seconds;
    const std::size_t there = (std::min)(sequence.num_written(), load.limit);
    return (std::max)(token_seconds_ * static_cast<double>(load.limit - there), least_patience);
  }

  // ---- who follows tiers ----

  [[nodiscard]] typename Queue::Report report() const {
    if (!options_.observer) return {};
    return [observer = options_.observer](std::size_t tier, const TierStore::Key& key,
                                          bool is_stored) noexcept {
      observer->changed(tier, key, is_stored);
    };
  }
  /// Names blocks [0, num_blocks) of a path to the observer.
  /// \param key_at  of each of them
  /// \param tokens  of all
  template <class KeyAt>
  [[nodiscard]] std::shared_ptr<void> expect(std::size_t num_blocks, const KeyAt& key_at,
                                             std::span<const std::byte> tokens,
                                             const Namespace& space,
                                             std::size_t public_blocks) const {
    const std::size_t bytes = to_size(block_) * sizeof(Token);
    return options_.observer->expect(num_blocks, [&](std::size_t block) {
      typename Tiers::Block named;
      named.key = key_at(block);
      named.name_space =
          block < public_blocks ? Namespace{.adapter = space.adapter, .is_public = true} : space;
      named.position = static_cast<std::int32_t>(block) * block_;
      named.tokens.resize(to_size(block_));
      std::memcpy(named.tokens.data(), tokens.data() + block * bytes, bytes);
      return named;
    });
  }
  [[nodiscard]] std::shared_ptr<void> expect(const typename TierSpans<Token>::Span& span,
                                             std::size_t num_blocks,
                                             std::span<const std::byte> tokens) const {
    const bool is_public = span.name_space.is_public;
    const std::size_t public_end = is_public ? 0 : to_size(span.public_end);
    const std::size_t public_blocks = is_public ? num_blocks : public_end / to_size(block_);
    const auto own = head_of(span.name_space, public_end);
    const auto shared = is_public || public_blocks == 0
                            ? own
                            : head_of({.adapter = span.name_space.adapter, .is_public = true}, 0);
    const auto key_at = [&](std::size_t block) {
      return key_of(spans_.path_hash(span, block), block < public_blocks ? shared : own);
    };
    return expect(num_blocks, key_at, tokens, span.name_space, public_blocks);
  }

  // ---- names ----

  /// What a record of this namespace says of itself; empty: it is not to be stored.
  [[nodiscard]] std::vector<std::byte> head_of(const Namespace& space,
                                               std::size_t public_end) const {
    std::string identity;
    if (options_.identity) {
      const auto named = options_.identity(space);
      if (!named) return {};
      identity = *named;
    } else {
      identity = std::to_string(space.tenant) + ":" + std::to_string(space.adapter);
    }
    const auto& shape = cache_->options();
    const auto [k, v] = row_bytes(*cache_);
    TierBytes head;
    for (const std::uint64_t number :
         {std::uint64_t{0x01020304}, std::uint64_t{kv_layout_version}, to_size(shape.num_layers),
          to_size(shape.num_kv_heads), k, v, sizeof(Element), sizeof(Token), to_size(block_),
          std::size_t{space.is_public}, public_end})
      head.put(std::uint64_t{number});
    head.put(std::string_view(element_text<Element>()));
    head.put(std::string_view(stored_text()));
    head.put(std::string_view(options_.model));
    head.put(std::string_view(identity));
    for (const std::string& format : companions_->formats()) head.put(std::string_view(format));
    return head.bytes;
  }
  [[nodiscard]] static TierStore::Key key_of(TierHash path, std::span<const std::byte> head) {
    path.add(head);
    return path.key();
  }
  [[nodiscard]] const char* stored_text() const {
    if (!options_.stored_as) return "as it is";
    return *options_.stored_as == element_type_of<std::int8_t> ? "int8" : "e4m3";
  }

  static constexpr std::size_t most_fresh = std::size_t{1} << 20;
  /// A load is given a moment, whatever computing would take.
  static constexpr double least_patience = 0.002;

  Tree* tree_;
  Cache* cache_;
  Options options_;
  const std::int32_t block_;
  const std::uint64_t tree_id_;
  TierCodec codec_;
  std::optional<TierCompanions<Sequence>> companions_;
  std::unique_ptr<Queue> queue_;
  TierSpans<Token> spans_;
  TierPieces<Tree::chunk_size> pieces_;
  std::deque<std::pair<std::uint64_t, std::size_t>> fresh_;  // blocks that were not stored yet
  Stats stats_;
  double token_seconds_ = 0;  // that computing takes, lately; 0: unknown
  bool is_open_ = true;
  bool is_lost_ = false;  // events were missed
  const ForkMark mark_;
  std::optional<CacheEvents<Tree>> events_;
};

}  // namespace detail
CHUNKATTN_NAMESPACE_END
