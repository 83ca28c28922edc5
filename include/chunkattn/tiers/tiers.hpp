// Tiers below a prefix tree: K/V that it evicts goes to host memory, to files, to a remote store,
// and comes back where that is faster than computing it again.
//
// Experimental: names and options may change in any version, and chunkattn.hpp does not include it.
// It needs files of POSIX or Windows.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include "../detail/support/config.hpp"
#include "../element.hpp"
#include "../kv_view.hpp"
#include "../transfer/companion.hpp"
#include "../tree_options.hpp"
#include "detail/directory.hpp"
#include "detail/hash.hpp"
#include "detail/manager.hpp"
#include "tier_store.hpp"

CHUNKATTN_NAMESPACE_BEGIN

/// Records in host memory, the least recently used of which make room for others.
class MemoryTier final : public TierStore {
 public:
  /// \param max_bytes  of all records
  explicit MemoryTier(std::size_t max_bytes) : max_bytes_(max_bytes) {}

  bool put(const Key& key, const Record& record, const std::atomic<bool>&) override {
    if (record->size() > max_bytes_) return false;
    const std::lock_guard lock(mutex_);
    decltype(order_) made{{key, record}};
    decltype(entries_) entry{{key, made.begin()}};
    entries_.reserve(entries_.size() + 1);  // nothing below needs memory
    forget(key);
    while (bytes_ > max_bytes_ - record->size()) {
      const Key oldest = order_.back().first;
      forget(oldest);
      notify(oldest, false);
    }
    order_.splice(order_.begin(), made);
    entries_.merge(entry);
    bytes_ += record->size();
    notify(key, true);
    return true;
  }
  [[nodiscard]] Record get(const Key& key, const std::atomic<bool>&) override {
    const std::lock_guard lock(mutex_);
    const auto found = entries_.find(key);
    if (found == entries_.end()) return nullptr;
    order_.splice(order_.begin(), order_, found->second);
    return found->second->second;
  }
  [[nodiscard]] bool contains(const Key& key) override {
    const std::lock_guard lock(mutex_);
    return entries_.contains(key);
  }
  void erase(const Key& key) override {
    const std::lock_guard lock(mutex_);
    forget(key);
    notify(key, false);
  }
  /// Bytes of all records now.
  [[nodiscard]] std::size_t num_bytes() const {
    const std::lock_guard lock(mutex_);
    return bytes_;
  }

 private:
  void forget(const Key& key) {
    const auto found = entries_.find(key);
    if (found == entries_.end()) return;
    bytes_ -= found->second->second->size();
    order_.erase(found->second);
    entries_.erase(found);
  }

  const std::size_t max_bytes_;
  mutable std::mutex mutex_;
  std::list<std::pair<Key, Record>> order_;  // the most recently used first
  std::unordered_map<Key, std::list<std::pair<Key, Record>>::iterator, detail::TierKeyHash>
      entries_;
  std::size_t bytes_ = 0;
};

/// Records as files of one directory, which processes may share. Each appears whole or not at all
/// and outlives its process, however that ends; those that were not read for longest make room for
/// others, also where the disk is full before that. The files hold K/V and tokens as they are: the
/// directory is as secret as the prompts.
class FileTier final : public TierStore {
 public:
  /// \param path       a directory, made with the rights 0700 if it is not there; on Windows
  ///                   in UTF-8
  /// \param max_bytes  of all records, those of other processes, too
  /// \throws InvalidArgument for a path that cannot be written, or that another process, which was
  ///         stopped perhaps, keeps locked for 5 s
  FileTier(const std::string& path, std::uint64_t max_bytes)
      : files_(path, max_bytes, [this](const Key& key, bool is_there) { notify(key, is_there); }) {}

  bool put(const Key& key, const Record& record, const std::atomic<bool>& cancelled) override {
    return files_.put(key, *record, cancelled);
  }
  [[nodiscard]] Record get(const Key& key, const std::atomic<bool>& cancelled) override {
    return get_at_most(key, (std::numeric_limits<std::size_t>::max)(), cancelled);
  }
  [[nodiscard]] Record get_at_most(const Key& key, std::size_t bytes,
                                   const std::atomic<bool>& cancelled) override {
    return files_.get(key, bytes, cancelled);
  }
  [[nodiscard]] bool contains(const Key& key) override { return files_.contains(key); }
  void erase(const Key& key) override { files_.erase(key); }
  /// Bytes of all records now.
  [[nodiscard]] std::uint64_t num_bytes() { return files_.num_bytes(); }

 private:
  detail::TierDirectory files_;
};

/// The lower tiers of one tree, fastest first. Blocks of tokens are offloaded when they are
/// evicted, or as soon as they are cached; a sequence whose prompt has more of them there loads
/// their K/V while others run.
///
/// It follows the tree by its events (CacheEvents). All calls are the tree's thread's. The
/// tree and the cache stay where they are and outlive it, and K/V is host memory. In a child of
/// fork() its threads are missing: there it stores nothing, loads bring nothing more, other calls
/// throw InvalidArgument, and its memory stays when it is destroyed. Make another one there, of
/// stores that the child made.
///
/// \tparam Tree   a PrefixTree that retains (else nothing is evicted), of tokens of unique object
///                representations
/// \tparam Cache  the K/V of its chunks
template <class Tree, KvProvider Cache>
class Tiers {
 public:
  using token_type = typename Tree::token_type;  ///< what prompts are made of
  using Sequence = typename Tree::Sequence;      ///< a sequence of the tree

  static_assert(std::has_unique_object_representations_v<token_type>,
                "Tiers: tokens are stored and compared byte for byte");

  /// A block of a path.
  struct Block {
    TierStore::Key key{};            ///< these tokens, all before them, whose they are, the model
    Namespace name_space{};          ///< of its last token
    std::int32_t position = 0;       ///< path position of its first token
    std::vector<token_type> tokens;  ///< its own
  };
  /// Follows which blocks are in which tier: to publish it, say. It calls neither the tiers nor
  /// their stores.
  class Observer {
   public:
    /// Gives block number 0 to `num_blocks` - 1 of a path.
    using BlockAt = std::function<Block(std::size_t)>;

    virtual ~Observer() = default;
    /// On the tree's thread: the last of these blocks is about to be stored, or those of them that
    /// are missing to be loaded. What it returns is destroyed, on any thread, when that is over:
    /// blocks that are in no tier then may be forgotten.
    /// \param num_blocks  of a path, from its start
    /// \param block_at    during this call
    [[nodiscard]] virtual std::shared_ptr<void> expect(std::size_t num_blocks,
                                                       const BlockAt& block_at) = 0;
    /// On any thread, within calls of stores: a tier got or lost a record, or was seen to have it
    /// or not; perhaps again. One tier's calls come one by one, in the order of its changes; some
    /// are of blocks that were not expected, such as others that share the store have. What other
    /// processes do to a store is seen when it is asked for that record.
    /// \param tier  0: the fastest
    virtual void changed(std::size_t tier, const TierStore::Key& key, bool is_stored) noexcept = 0;
    /// On the tree's thread: by PrefixTree::clear() no block of before is found any more, unless
    /// reopen() names the model of now again.
    virtual void cleared() noexcept = 0;
  };

  /// How tiers are used.
  struct Options {
    /// What K/V is computed with: weights, adapters, how positions are encoded. Records of any
    /// other text are never read.
    std::string model{};
    /// Tokens that are stored and found as one; unset: the tree's ChunkSize.
    std::optional<std::int32_t> block_tokens{};
    /// What K/V of float, half or bfloat16 is stored as: int8 or float8_e4m3, with a scale for each
    /// row; or as it is. Rounded K/V makes other logits.
    std::optional<ElementType> stored_as{};
    /// Whether advance() offloads what is cached, before it is evicted: then it also outlives a
    /// process that is killed.
    bool write_through = false;
    /// Bytes that are being offloaded beyond which further blocks are not stored: an equal share
    /// for each tier.
    std::size_t max_queued_bytes = std::size_t{256} << 20;
    /// Blocks that are loaded before Load::poll() asks for them; and that one call of it takes.
    std::size_t max_prefetched = 8;
    /// The longest that a load may go without a block, while computed() has not been called. After
    /// ten times that in one call a tier counts as hanging.
    double max_wait_seconds = 1.0;
    /// Whether each tier has a thread. If not, whatever there is to do is done by work().
    bool threads = true;
    /// What a namespace is called where other processes read it, too; nothing: its K/V is not
    /// stored. By default its numbers, which then mean the same in all of them.
    std::function<std::optional<std::string>(const Namespace&)> identity{};
    /// Follows what tiers hold.
    std::shared_ptr<Observer> observer{};
    /// What is kept of tokens beside their K/V: a record carries it, and is none for who has other
    /// companions. They outlive the tiers.
    KvCompanions<Sequence> companions{};
  };

  /// What one tier did since construction, in blocks.
  struct TierStats {
    std::uint64_t stored = 0;        ///< records that it took
    std::uint64_t stored_bytes = 0;  ///< their bytes
    std::uint64_t put_failed = 0;    ///< that it did not take
    std::uint64_t loaded = 0;        ///< that it gave
    std::uint64_t missed = 0;        ///< that it did not have
    std::uint64_t refused = 0;       ///< damaged, or of other tokens: not used
    std::uint64_t not_worth = 0;     ///< not asked for: computing is faster, or it hangs
  };
  /// Counts since construction: blocks, unless it says something else.
  struct Stats {
    std::uint64_t gathered = 0;       ///< copied out of the cache
    std::uint64_t dropped = 0;        ///< not stored: too much was on its way
    std::uint64_t loads = 0;          ///< sequences that something was looked for
    std::uint64_t loads_late = 0;     ///< of these, cancelled for computing: too slow
    std::uint64_t loaded_tokens = 0;  ///< tokens that came back
    std::vector<TierStats> tiers;     ///< fastest first
  };

  /// K/V of one sequence that is being loaded. Move-only; destroying it cancels it.
  class Load {
   public:
    Load() = default;
    /// Leaves the other empty.
    Load(Load&&) noexcept = default;
    /// Cancels its own.
    Load& operator=(Load&& other) noexcept {
      if (this != &other) {
        cancel();
        manager_ = std::move(other.manager_);
        load_ = std::exchange(other.load_, nullptr);
      }
      return *this;
    }
    ~Load() { cancel(); }

    /// Whether it may still bring something.
    [[nodiscard]] explicit operator bool() const noexcept { return load_ != nullptr; }
    /// Writes what has come to its slots. True: more may come, and the sequence is not to be added
    /// to a step; others that share its tokens wait for it (AddResult::waits_for()). False: what is
    /// missing is to be computed. Never waits.
    /// \param sequence  the one that it was made for, else it is cancelled
    bool poll(Sequence& sequence) {
      if (load_ != nullptr && !manager_->poll(sequence, load_)) load_ = nullptr;
      return load_ != nullptr;
    }
    /// poll() until it is over, for programs that have nothing else to do.
    void wait(Sequence& sequence) {
      while (poll(sequence)) manager_->wait(*load_);
    }
    /// Cancels what has not come.
    void cancel() noexcept {
      if (load_ != nullptr) manager_->cancel(std::exchange(load_, nullptr));
    }

   private:
    friend class Tiers;
    using Manager = detail::TierManager<Tiers, Tree, Cache>;
    Load(std::shared_ptr<Manager> manager, std::shared_ptr<detail::TierLoad> load)
        : manager_(std::move(manager)), load_(std::move(load)) {}
    std::shared_ptr<Manager> manager_;
    std::shared_ptr<detail::TierLoad> load_;
  };

  /// \param stores  fastest first; others may use them, too
  /// \throws InvalidArgument for options out of range, no stores, and a cache of another tree
  Tiers(Tree& tree, Cache& cache, std::vector<std::shared_ptr<TierStore>> stores, Options options)
      : manager_(std::make_shared<detail::TierManager<Tiers, Tree, Cache>>(
            tree, cache, std::move(stores), std::move(options))) {}
  Tiers(const Tiers&) = delete;
  Tiers& operator=(const Tiers&) = delete;
  /// What is still being offloaded is discarded: store_all() and flush() first. Waits for calls of
  /// stores that have not ended, which see by `cancelled` that they may.
  ~Tiers() { manager_->close(); }

  /// Looks in the tiers for what a sequence would have to compute, in the background. Empty if
  /// there is nothing to look for. It joined just now, is in no step, and wants no logits of its
  /// prompt (InsertOptions::max_reuse): what is loaded is not computed.
  /// \param compute_last  whether its last token is computed anyway: InsertOptions::compute_last
  [[nodiscard]] Load load(const Sequence& sequence, bool compute_last = true) {
    auto started = manager_->start(sequence, compute_last);
    return started ? Load(manager_, std::move(started)) : Load();
  }
  /// The tiers of a prompt's blocks, 0 for the fastest, from the block of position `begin` on up to
  /// the first that is in none, as far as it is known: a store that was filled before is known only
  /// by what was asked of it since. For CacheExplainer.
  [[nodiscard]] std::vector<std::size_t> find(std::span<const token_type> prompt,
                                              const InsertOptions& options,
                                              std::size_t begin) const {
    return manager_->find(prompt, options, begin);
  }
  /// Between steps: with Options::write_through copies at most `max_blocks` blocks that have become
  /// cached, which are offloaded in the background. Returns how many are left.
  std::size_t advance(std::size_t max_blocks = 4) { return manager_->advance(max_blocks); }
  /// Copies all that is cached and not known to be stored: before the tree goes.
  void store_all() { manager_->store_all(); }
  /// Waits until all that is being offloaded is there, but not for a tier that hangs: is_busy().
  void flush() { manager_->flush(); }
  /// Whether anything is being offloaded, or promoted to a faster tier.
  [[nodiscard]] bool is_busy() const { return manager_->queue().is_busy(); }
  /// A step computed so many tokens of prompts in so many seconds: what loading is compared with.
  void computed(std::size_t tokens, double seconds) { manager_->computed(tokens, seconds); }
  /// After PrefixTree::clear(), which ends storing and loading: what K/V is computed with now.
  void reopen(std::string model) { manager_->reopen(std::move(model)); }
  /// Without threads: does one job. False if there is none.
  bool work() { return manager_->queue().work(); }
  /// What has happened so far.
  [[nodiscard]] Stats stats() const { return manager_->stats(); }

 private:
  std::shared_ptr<detail::TierManager<Tiers, Tree, Cache>> manager_;
};

CHUNKATTN_NAMESPACE_END
