// TierStore: a lower tier of a prefix tree, which stores K/V by the tokens that it is of.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "../detail/support/config.hpp"

CHUNKATTN_NAMESPACE_BEGIN

/// A lower tier of a tree: holds records (the K/V of a block of tokens, and what it is of) by their
/// keys. MemoryTier, FileTier, or your own, for a remote store: see Tiers, which calls it,
/// on a thread of its own: where several Tiers have it, on several at once. It may lose records,
/// fail, or give what was never put: what it gives is checked, so that this costs time only.
///
/// A call may take as long as it does; `cancelled` becomes true when its result is no longer
/// needed. It may throw: that counts as a failure (put: false, get: null).
///
/// One that loses records by itself says so: notify(). Otherwise subscribers learn of it, and the
/// record is stored again, only after it was asked for.
class TierStore {
 public:
  /// Names a block by its tokens, all before them, and whose they are: a hash of these.
  struct Key {
    std::uint64_t high = 0;  ///< 64 bits of it
    std::uint64_t low = 0;   ///< the others
    friend constexpr bool operator==(const Key&, const Key&) = default;
    /// 32 hexadecimal digits: for names of files, keys of remote stores.
    [[nodiscard]] std::string text() const {
      std::string digits(32, '0');
      for (std::size_t i = 0; i < 16; ++i) {
        digits[15 - i] = "0123456789abcdef"[(high >> (4 * i)) & 15];
        digits[31 - i] = "0123456789abcdef"[(low >> (4 * i)) & 15];
      }
      return digits;
    }
  };
  /// Bytes that no longer change.
  using Record = std::shared_ptr<const std::vector<std::byte>>;
  /// Is notified of the records that a store gets and loses.
  struct Subscriber {
    virtual ~Subscriber() = default;
    /// On any thread, within a call of the store, in the order in which it happened. It does not
    /// call the store.
    virtual void changed(const Key& key, bool is_there) noexcept = 0;
  };

  TierStore() = default;
  TierStore(const TierStore&) = delete;
  TierStore& operator=(const TierStore&) = delete;
  virtual ~TierStore() = default;

  /// Keeps a record, in place of one that it has with this key. False if it could not.
  virtual bool put(const Key& key, const Record& record, const std::atomic<bool>& cancelled) = 0;
  /// The record with this key; null if there is none.
  [[nodiscard]] virtual Record get(const Key& key, const std::atomic<bool>& cancelled) = 0;
  /// The same for whom a record of more than `bytes` bytes is of no use: all after these may be
  /// cut off but for one, which says that there were more. What Tiers calls; by default get().
  [[nodiscard]] virtual Record get_at_most(const Key& key, std::size_t bytes,
                                           const std::atomic<bool>& cancelled) {
    static_cast<void>(bytes);
    return get(key, cancelled);
  }
  /// Whether it has a record with this key.
  [[nodiscard]] virtual bool contains(const Key& key) = 0;
  /// Forgets it: it was damaged, or another's.
  virtual void erase(const Key& key) = 0;

  /// From now on `subscriber` is notified of changes, for as long as it lives.
  void subscribe(std::weak_ptr<Subscriber> subscriber) {
    const std::lock_guard lock(subscribers_mutex_);
    std::erase_if(subscribers_, [](const auto& one) { return one.expired(); });
    subscribers_.push_back(std::move(subscriber));
  }

 protected:
  /// A record came, or is no longer there. Under the lock that orders the store's changes, so that
  /// subscribers know which was the last.
  void notify(const Key& key, bool is_there) noexcept {
    const std::lock_guard lock(subscribers_mutex_);
    for (const auto& one : subscribers_)
      if (const auto subscriber = one.lock()) subscriber->changed(key, is_there);
  }

 private:
  std::mutex subscribers_mutex_;
  std::vector<std::weak_ptr<Subscriber>> subscribers_;
};

CHUNKATTN_NAMESPACE_END
