// Records as files of one directory, which several processes may share. A file appears whole or not
// at all, under the name of its key; whoever is killed leaves at most a file that is never read,
// and that the next one who makes room removes. Whatever else lies there costs bounded time and
// memory, and is left alone unless it has the name of a record.
#pragma once

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "../../detail/support/check.hpp"
#include "../../detail/support/config.hpp"
#include "../tier_store.hpp"
#include "file.hpp"
#if defined(_WIN32)
#include "files_windows.hpp"
#else
#include "files_posix.hpp"
#endif

CHUNKATTN_NAMESPACE_BEGIN
namespace detail {

class TierDirectory {
 public:
  /// Is called with each record that came, or was removed, by this process.
  using Notify = std::function<void(const TierStore::Key&, bool is_there)>;

  /// \param lock_limit  how long a call waits for other processes that change the directory
  /// \throws InvalidArgument for a path that is no directory that can be written, and cannot be
  ///         made one, and for one that another process keeps locked
  TierDirectory(const std::string& path, std::uint64_t max_bytes, Notify notify,
                std::chrono::milliseconds lock_limit = std::chrono::seconds(5))
      : max_bytes_(max_bytes), notify_(std::move(notify)), lock_limit_(lock_limit) {
    check_argument(max_bytes > 0, "max_bytes", max_bytes, "at least 1");
    files_.open(path);
    const Locked locked(*this);
    if (!locked.is_open())
      fail_argument("path", path, "a directory that can be written, or can be made");
    if (!locked)
      fail_argument("path", path,
                    {"a directory that no process keeps locked, as one did its file .size for ",
                     lock_limit.count(), " ms"});
    (void)make_room(locked, 0);  // also counts what is there, and removes what was left behind
  }

  bool put(const TierStore::Key& key, const std::vector<std::byte>& bytes,
           const std::atomic<bool>& cancelled) {
    if (bytes.size() > max_bytes_) return false;
    const std::string name = file_of(key);
    const std::string part = ".part-" + TierFiles::process() + "-" +
                             std::to_string(reinterpret_cast<std::uintptr_t>(this)) + "-" +
                             std::to_string(++num_parts_);
    TierFile file;
    const auto fail = [&] {
      (void)file.close();
      (void)files_.remove(part);
      return false;
    };
    for (int tries = 0;; ++tries) {
      const int error = write_file(file, part, bytes, cancelled);
      if (error == 0) break;
      (void)fail();
      if (!TierFiles::is_full(error) || tries == 2) return false;
      // Others may be faster to take what becomes free: then once more.
      if (const Locked locked(*this); locked) (void)make_room(locked, bytes.size(), true);
    }
    const Locked locked(*this);
    if (!locked) return fail();
    std::uint64_t total = stored_size(locked);
    if (total > max_bytes_ || bytes.size() > max_bytes_ - total) {
      const auto left = make_room(locked, bytes.size());
      if (!left) return fail();
      total = *left;
    }
    const std::uint64_t before = size_of(name);
    // First counted, then there: who is killed in between has counted too much, which the next scan
    // puts right.
    store_size(locked, total + bytes.size());
    if (!files_.rename(file, part, name)) {
      store_size(locked, total);
      return fail();
    }
    notify_(key, true);
    store_size(locked, total + bytes.size() - (std::min)(before, total));
    return true;
  }

  /// Of a file that is longer than `most`, that many bytes and one more.
  [[nodiscard]] TierStore::Record get(const TierStore::Key& key, std::uint64_t most,
                                      const std::atomic<bool>& cancelled) const {
    const TierFile file = files_.read(file_of(key));
    const auto size = TierFiles::size(file);
    if (!size || *size > max_bytes_) return nullptr;
    auto bytes = std::make_shared<std::vector<std::byte>>(most < *size ? most + 1 : *size);
    for (std::size_t at = 0; at < bytes->size();) {
      if (cancelled) return nullptr;
      const auto n =
          TierFiles::read(file, bytes->data() + at, (std::min)(bytes->size() - at, piece));
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0) return nullptr;
      at += static_cast<std::size_t>(n);
    }
    files_.set_used_now(file);
    return bytes;
  }

  [[nodiscard]] bool contains(const TierStore::Key& key) const {
    const std::string name = file_of(key);
    const auto status = files_.status(name);
    return status && status->size <= max_bytes_ && files_.may_read(name);
  }
  void erase(const TierStore::Key& key) {
    const std::string name = file_of(key);
    const Locked locked(*this);
    const std::uint64_t size = size_of(name), total = stored_size(locked);
    // If it is locked for too long, the next scan counts.
    if (files_.remove(name) && locked) store_size(locked, total - (std::min)(size, total));
    notify_(key, false);
  }
  /// Bytes of all records, as all processes have counted them.
  [[nodiscard]] std::uint64_t num_bytes() const { return stored_size(Locked(*this)); }

 private:
  static constexpr std::size_t piece = std::size_t{1} << 20;
  static constexpr const char* suffix = ".kv";

  /// While it holds the lock no other thread or process changes the directory's
  /// records. Each opens the file again: of one that a child of fork() shares, it would get the
  /// lock that its parent has.
  class Locked {
   public:
    explicit Locked(const TierDirectory& directory) : file_(directory.files_.open_lock(".size")) {
      if (!is_open()) return;
      const auto end = std::chrono::steady_clock::now() + directory.lock_limit_;
      while (!TierFiles::lock(file_)) {
        if (std::chrono::steady_clock::now() >= end) return;
        std::this_thread::sleep_for(std::chrono::microseconds(200));
      }
      is_held_ = true;  // or the file system has no locks
    }
    Locked(const Locked&) = delete;
    Locked& operator=(const Locked&) = delete;
    ~Locked() {
      if (is_held_) TierFiles::unlock(file_);
    }
    /// Whether it holds the lock; else somebody had it for too long.
    [[nodiscard]] explicit operator bool() const noexcept { return is_held_; }
    [[nodiscard]] bool is_open() const noexcept { return file_.is_open(); }
    [[nodiscard]] const TierFile& file() const noexcept { return file_; }

   private:
    TierFile file_;
    bool is_held_ = false;
  };
  struct Entry {
    TierFileStatus status;
    TierStore::Key key;
  };

  [[nodiscard]] static std::string file_of(const TierStore::Key& key) {
    return key.text() + suffix;
  }
  /// Nothing for a file that has another name than those of records.
  [[nodiscard]] static std::optional<TierStore::Key> key_of(const std::string& name) {
    TierStore::Key key;
    const char* const half = name.data() + 16;
    if (name.size() < 32 || std::from_chars(name.data(), half, key.high, 16).ptr != half ||
        std::from_chars(half, half + 16, key.low, 16).ptr != half + 16 || file_of(key) != name)
      return std::nullopt;
    return key;
  }
  /// 0, or the error: full, over a quota, gone, cancelled.
  [[nodiscard]] int write_file(TierFile& file, const std::string& name,
                               const std::vector<std::byte>& bytes,
                               const std::atomic<bool>& cancelled) const {
    file = files_.create(name);
    if (!file.is_open()) return errno;
    for (std::size_t at = 0; at < bytes.size();) {
      if (cancelled) return ECANCELED;
      const auto n =
          TierFiles::write(file, bytes.data() + at, (std::min)(bytes.size() - at, piece));
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0) return n < 0 ? errno : EIO;
      at += static_cast<std::size_t>(n);
    }
    return TierFiles::finish(file) ? 0 : errno;
  }
  /// Of what is counted: files.
  [[nodiscard]] std::uint64_t size_of(const std::string& name) const {
    const auto status = files_.status(name);
    return status ? status->size : 0;
  }
  [[nodiscard]] std::uint64_t stored_size(const Locked& locked) const {
    return TierFiles::stored(locked.file()).value_or(max_bytes_ + 1);
  }
  static void store_size(const Locked& locked, std::uint64_t size) {
    // If it cannot be written, the next who makes room counts again.
    TierFiles::store(locked.file(), size);
  }
  /// Counts all records, and removes the least recently used until `bytes` more have room, and some
  /// beyond, so that this is rare. On a disk that is full only as many bytes: it may be others' who
  /// fill it. Returns the size of those that are left; nothing where they cannot be listed.
  std::optional<std::uint64_t> make_room(const Locked& locked, std::uint64_t bytes,
                                         bool is_disk_full = false) {
    std::vector<Entry> entries;
    if (!list(entries)) return std::nullopt;
    std::uint64_t total = 0;
    for (const Entry& entry : entries) total += entry.status.size;
    std::uint64_t goal = total;
    if (is_disk_full)
      goal = total - (std::min)(bytes, total);
    else if (total > max_bytes_ || bytes > max_bytes_ - total)
      goal = (std::min)(max_bytes_ - max_bytes_ / 8, max_bytes_ - bytes);
    if (goal < total) {
      // First of all what is longer than any record: it would leave no room for others.
      const auto rank = [this](const Entry& entry) {
        return std::pair(entry.status.size <= max_bytes_, entry.status.used);
      };
      std::sort(entries.begin(), entries.end(),
                [&](const Entry& a, const Entry& b) { return rank(a) < rank(b); });
    }
    for (const Entry& entry : entries) {
      if (total <= goal) break;
      if (!files_.remove(file_of(entry.key))) continue;
      total -= entry.status.size;
      notify_(entry.key, false);
    }
    store_size(locked, total);
    return total;
  }
  /// All records, or false. Parts of files of processes that are no more are removed.
  bool list(std::vector<Entry>& entries) {
    return files_.for_each([&](const std::string& name) {
      if (name.starts_with(".part-")) files_.remove_part(name);
      const auto key = key_of(name);
      if (!key) return;
      if (const auto status = files_.status(name)) entries.push_back({*status, *key});
    });
  }

  const std::uint64_t max_bytes_;
  const Notify notify_;
  const std::chrono::milliseconds lock_limit_;
  TierFiles files_;
  std::atomic<std::uint64_t> num_parts_ = 0;
};

}  // namespace detail
CHUNKATTN_NAMESPACE_END
