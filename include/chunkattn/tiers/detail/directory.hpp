// Records as files of one directory, which several processes may share. A file appears whole or not
// at all, under the name of its key; whoever is killed leaves at most a file that is never read,
// and that the next one who makes room removes. Whatever else lies there costs bounded time and
// memory, and is left alone unless it has the name of a record.
#pragma once

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <ctime>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "../../detail/support/check.hpp"
#include "../../detail/support/config.hpp"
#include "../tier_store.hpp"

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
    (void)::mkdir(path.c_str(), 0700);
    directory_.reset(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
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
    const std::string part = ".part-" + std::to_string(::getpid()) + "-" +
                             std::to_string(reinterpret_cast<std::uintptr_t>(this)) + "-" +
                             std::to_string(++num_parts_);
    const auto fail = [&] {
      (void)::unlinkat(directory_.get(), part.c_str(), 0);
      return false;
    };
    for (int tries = 0;; ++tries) {
      const int error = write_file(part, bytes, cancelled);
      if (error == 0) break;
      (void)fail();
      if ((error != ENOSPC && error != EDQUOT) || tries == 2) return false;
      // Others may be faster to take what becomes free: then once more.
      if (const Locked locked(*this); locked) (void)make_room(locked, bytes.size(), true);
    }
    const Locked locked(*this);
    if (!locked) return fail();
    std::uint64_t total = stored_size(locked);
    if (total > max_bytes_ || bytes.size() > max_bytes_ - total)
      total = make_room(locked, bytes.size());
    const std::uint64_t before = size_of(name);
    // First counted, then there: who is killed in between has counted too much, which the next scan
    // puts right.
    store_size(locked, total + bytes.size());
    if (::renameat(directory_.get(), part.c_str(), directory_.get(), name.c_str()) != 0) {
      store_size(locked, total);
      return fail();
    }
    notify_(key, true);
    store_size(locked, total + bytes.size() - std::min(before, total));
    return true;
  }

  /// Of a file that is longer than `most`, that many bytes and one more.
  [[nodiscard]] TierStore::Record get(const TierStore::Key& key, std::uint64_t most,
                                      const std::atomic<bool>& cancelled) const {
    // Neither a FIFO nor a device is waited for.
    const File file(::openat(directory_.get(), file_of(key).c_str(),
                             O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
    struct stat status{};
    if (file.get() < 0 || ::fstat(file.get(), &status) != 0 || !is_record(status)) return nullptr;
    const auto size = static_cast<std::uint64_t>(status.st_size);
    auto bytes = std::make_shared<std::vector<std::byte>>(
        static_cast<std::size_t>(most < size ? most + 1 : size));
    for (std::size_t at = 0; at < bytes->size();) {
      if (cancelled) return nullptr;
      const ssize_t n = ::read(file.get(), bytes->data() + at, std::min(bytes->size() - at, piece));
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0) return nullptr;
      at += static_cast<std::size_t>(n);
    }
    (void)::futimens(file.get(), nullptr);  // used now
    return bytes;
  }

  [[nodiscard]] bool contains(const TierStore::Key& key) const {
    const std::string name = file_of(key);
    struct stat status{};
    return ::fstatat(directory_.get(), name.c_str(), &status, AT_SYMLINK_NOFOLLOW) == 0 &&
           is_record(status) && ::faccessat(directory_.get(), name.c_str(), R_OK, 0) == 0;
  }
  void erase(const TierStore::Key& key) {
    const std::string name = file_of(key);
    const Locked locked(*this);
    const std::uint64_t size = size_of(name), total = stored_size(locked);
    // If it is locked for too long, the next scan counts.
    if (::unlinkat(directory_.get(), name.c_str(), 0) == 0 && locked)
      store_size(locked, total - std::min(size, total));
    notify_(key, false);
  }
  /// Bytes of all records, as all processes have counted them.
  [[nodiscard]] std::uint64_t num_bytes() const { return stored_size(Locked(*this)); }

 private:
  static constexpr std::size_t piece = std::size_t{1} << 20;
  static constexpr const char* suffix = ".kv";

  class File {
   public:
    explicit File(int file = -1) : file_(file) {}
    File(const File&) = delete;
    File& operator=(const File&) = delete;
    ~File() { (void)reset(-1); }
    [[nodiscard]] int get() const noexcept { return file_; }
    /// False if what was written could not be kept.
    bool reset(int file) noexcept {
      const int old = std::exchange(file_, file);
      return old < 0 || ::close(old) == 0;
    }

   private:
    int file_;
  };
  /// While it holds the lock no other thread or process changes the directory's
  /// records. Each opens the file again: of one that a child of fork() shares, it would get the
  /// lock that its parent has.
  class Locked {
   public:
    explicit Locked(const TierDirectory& directory)
        : file_(::openat(directory.directory_.get(), ".size",
                         O_RDWR | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0600)) {
      struct stat status{};
      if (is_open() && (::fstat(get(), &status) != 0 || !S_ISREG(status.st_mode)))
        (void)file_.reset(-1);
      if (!is_open()) return;
      const auto end = std::chrono::steady_clock::now() + directory.lock_limit_;
      while (::flock(get(), LOCK_EX | LOCK_NB) != 0 && (errno == EWOULDBLOCK || errno == EINTR)) {
        if (std::chrono::steady_clock::now() >= end) return;
        std::this_thread::sleep_for(std::chrono::microseconds(200));
      }
      is_held_ = true;  // or the file system has no locks
    }
    Locked(const Locked&) = delete;
    Locked& operator=(const Locked&) = delete;
    ~Locked() {
      if (is_held_) (void)::flock(get(), LOCK_UN);
    }
    /// Whether it holds the lock; else somebody had it for too long.
    [[nodiscard]] explicit operator bool() const noexcept { return is_held_; }
    [[nodiscard]] bool is_open() const noexcept { return get() >= 0; }
    [[nodiscard]] int get() const noexcept { return file_.get(); }

   private:
    File file_;
    bool is_held_ = false;
  };
  struct Entry {
    std::int64_t seconds = 0, nanoseconds = 0;
    std::uint64_t size = 0;
    TierStore::Key key{};
  };

  [[nodiscard]] bool is_record(const struct stat& status) const noexcept {
    return S_ISREG(status.st_mode) && static_cast<std::uint64_t>(status.st_size) <= max_bytes_;
  }
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
  [[nodiscard]] int write_file(const std::string& name, const std::vector<std::byte>& bytes,
                               const std::atomic<bool>& cancelled) const {
    File file(::openat(directory_.get(), name.c_str(),
                       O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600));
    if (file.get() < 0) return errno;
    for (std::size_t at = 0; at < bytes.size();) {
      if (cancelled) return ECANCELED;
      const ssize_t n = ::write(file.get(), bytes.data() + at, std::min(bytes.size() - at, piece));
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0) return n < 0 ? errno : EIO;
      at += static_cast<std::size_t>(n);
    }
    return file.reset(-1) ? 0 : errno;
  }
  /// Of what is counted: files.
  [[nodiscard]] std::uint64_t size_of(const std::string& name) const {
    struct stat status{};
    if (::fstatat(directory_.get(), name.c_str(), &status, AT_SYMLINK_NOFOLLOW) != 0 ||
        !S_ISREG(status.st_mode))
      return 0;
    return static_cast<std::uint64_t>(status.st_size);
  }
  [[nodiscard]] std::uint64_t stored_size(const Locked& locked) const {
    std::uint64_t size = 0;
    if (::pread(locked.get(), &size, sizeof(size), 0) != sizeof(size)) return max_bytes_ + 1;
    return size;
  }
  static void store_size(const Locked& locked, std::uint64_t size) {
    // If it cannot be written, the next who makes room counts again.
    if (::pwrite(locked.get(), &size, sizeof(size), 0) != sizeof(size))
      (void)(::ftruncate(locked.get(), 0) == 0);
  }
  /// Counts all records, and removes the least recently used until `bytes` more have room, and some
  /// beyond, so that this is rare. On a disk that is full only as many bytes: it may be others' who
  /// fill it. Returns the size of those that are left.
  std::uint64_t make_room(const Locked& locked, std::uint64_t bytes, bool is_disk_full = false) {
    std::vector<Entry> entries = list();
    std::uint64_t total = 0;
    for (const Entry& entry : entries) total += entry.size;
    std::uint64_t goal = total;
    if (is_disk_full)
      goal = total - std::min(bytes, total);
    else if (total > max_bytes_ || bytes > max_bytes_ - total)
      goal = std::min(max_bytes_ - max_bytes_ / 8, max_bytes_ - bytes);
    if (goal < total) {
      // First of all what is longer than any record: it would leave no room for others.
      const auto rank = [this](const Entry& entry) {
        return std::tuple(entry.size <= max_bytes_, entry.seconds, entry.nanoseconds);
      };
      std::sort(entries.begin(), entries.end(),
                [&](const Entry& a, const Entry& b) { return rank(a) < rank(b); });
    }
    for (const Entry& entry : entries) {
      if (total <= goal) break;
      if (::unlinkat(directory_.get(), file_of(entry.key).c_str(), 0) != 0 && errno != ENOENT)
        continue;
      total -= entry.size;
      notify_(entry.key, false);
    }
    store_size(locked, total);
    return total;
  }
  /// All records. Parts of files of processes that are no more are removed.
  std::vector<Entry> list() {
    std::vector<Entry> entries;
    const int copy = ::openat(directory_.get(), ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    struct Close {
      void operator()(DIR* directory) const { ::closedir(directory); }
    };
    const std::unique_ptr<DIR, Close> open(::fdopendir(copy));
    if (!open) return entries;
    while (const dirent* const found = ::readdir(open.get())) {
      const std::string name = found->d_name;
      if (name.starts_with(".part-")) remove_part(name);
      const auto key = key_of(name);
      struct stat status{};
      if (!key || ::fstatat(directory_.get(), name.c_str(), &status, AT_SYMLINK_NOFOLLOW) != 0 ||
          !S_ISREG(status.st_mode))
        continue;
#if defined(__APPLE__)
      const timespec used = status.st_mtimespec;
#else
      const timespec used = status.st_mtim;
#endif
      entries.push_back(
          {used.tv_sec, used.tv_nsec, static_cast<std::uint64_t>(status.st_size), *key});
    }
    return entries;
  }
  void remove_part(const std::string& name) const {
    constexpr std::time_t hour = 3600;  // a process in another container may have the same number
    const long process = std::strtol(name.c_str() + sizeof(".part-") - 1, nullptr, 10);
    struct stat status{};
    if (::fstatat(directory_.get(), name.c_str(), &status, AT_SYMLINK_NOFOLLOW) != 0) return;
    const bool is_old = status.st_mtime + hour < std::time(nullptr);
    if (!is_old && process > 0 && (::kill(static_cast<pid_t>(process), 0) == 0 || errno != ESRCH))
      return;
    (void)::unlinkat(directory_.get(), name.c_str(), 0);
  }

  const std::uint64_t max_bytes_;
  const Notify notify_;
  const std::chrono::milliseconds lock_limit_;
  File directory_;
  std::atomic<std::uint64_t> num_parts_ = 0;
};

}  // namespace detail
CHUNKATTN_NAMESPACE_END
