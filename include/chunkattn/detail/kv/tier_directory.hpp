// Records as files of one directory, which several processes may share. A file appears whole or not
// at all, under the name of its key; whoever is killed leaves at most a file that nobody reads, and
// that the next one who makes room removes.
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
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <ctime>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "../../experimental/tier_store.hpp"
#include "../base/check.hpp"
#include "../base/config.hpp"

CHUNKATTN_NAMESPACE_BEGIN
namespace detail {

class TierDirectory {
 public:
  /// Is called with each record that came, or was removed, by this process.
  using Tell = std::function<void(const TierStore::Key&, bool is_there)>;

  /// \throws InvalidArgument for a path that is no directory that can be written, and cannot be
  ///         made one
  TierDirectory(const std::string& path, std::uint64_t max_bytes, Tell tell)
      : max_bytes_(max_bytes), tell_(std::move(tell)) {
    check_argument(max_bytes > 0, "max_bytes", max_bytes, "at least 1");
    (void)::mkdir(path.c_str(), 0700);
    directory_.reset(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (directory_.get() >= 0)
      lock_.reset(
          ::openat(directory_.get(), ".size", O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0600));
    if (lock_.get() < 0)
      fail_argument("path", path, "a directory that can be written, or can be made");
    const Locked locked(*this);
    (void)make_room(0);  // also counts what is there, and removes what was left behind
  }

  bool put(const TierStore::Key& key, const std::vector<std::byte>& bytes,
           const std::atomic<bool>& cancelled) {
    if (bytes.size() > max_bytes_) return false;
    const std::string name = file_of(key);
    const std::string part = ".part-" + std::to_string(::getpid()) + "-" +
                             std::to_string(reinterpret_cast<std::uintptr_t>(this)) + "-" +
                             std::to_string(++num_parts_);
    if (!write_file(part, bytes, cancelled)) {
      (void)::unlinkat(directory_.get(), part.c_str(), 0);
      return false;
    }
    const Locked locked(*this);
    std::uint64_t total = stored_size();
    if (total > max_bytes_ || bytes.size() > max_bytes_ - total) total = make_room(bytes.size());
    const std::uint64_t before = size_of(name);
    // First counted, then there: who is killed in between has counted too much, which the next scan
    // puts right.
    store_size(total + bytes.size());
    if (::renameat(directory_.get(), part.c_str(), directory_.get(), name.c_str()) != 0) {
      (void)::unlinkat(directory_.get(), part.c_str(), 0);
      store_size(total);
      return false;
    }
    tell_(key, true);
    store_size(total + bytes.size() - std::min(before, total));
    return true;
  }

  [[nodiscard]] TierStore::Record get(const TierStore::Key& key,
                                      const std::atomic<bool>& cancelled) const {
    const File file(
        ::openat(directory_.get(), file_of(key).c_str(), O_RDONLY | O_NOFOLLOW | O_CLOEXEC));
    struct stat status{};
    if (file.get() < 0 || ::fstat(file.get(), &status) != 0 || !S_ISREG(status.st_mode) ||
        status.st_size < 0 || static_cast<std::uint64_t>(status.st_size) > max_bytes_)
      return nullptr;
    auto bytes = std::make_shared<std::vector<std::byte>>(static_cast<std::size_t>(status.st_size));
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
    return ::faccessat(directory_.get(), file_of(key).c_str(), R_OK, 0) == 0;
  }
  void erase(const TierStore::Key& key) {
    const std::string name = file_of(key);
    const Locked locked(*this);
    const std::uint64_t size = size_of(name), total = stored_size();
    if (::unlinkat(directory_.get(), name.c_str(), 0) == 0)
      store_size(total - std::min(size, total));
    tell_(key, false);
  }
  /// Bytes of all records, as all processes have counted them.
  [[nodiscard]] std::uint64_t num_bytes() {
    const Locked locked(*this);
    return stored_size();
  }

 private:
  static constexpr std::size_t piece = std::size_t{1} << 20;
  static constexpr const char* suffix = ".kv";

  class File {
   public:
    explicit File(int file = -1) : file_(file) {}
    File(const File&) = delete;
    File& operator=(const File&) = delete;
    ~File() { reset(-1); }
    [[nodiscard]] int get() const noexcept { return file_; }
    void reset(int file) noexcept {
      if (file_ >= 0) ::close(file_);
      file_ = file;
    }

   private:
    int file_;
  };
  /// While it lives nobody else, in this process or another, changes the directory's records.
  class Locked {
   public:
    explicit Locked(TierDirectory& directory)
        : own_(directory.mutex_), file_(directory.lock_.get()) {
      while (::flock(file_, LOCK_EX) != 0 && errno == EINTR) {
      }
    }
    Locked(const Locked&) = delete;
    Locked& operator=(const Locked&) = delete;
    ~Locked() { (void)::flock(file_, LOCK_UN); }

   private:
    std::lock_guard<std::mutex> own_;
    int file_;
  };
  struct Entry {
    std::int64_t seconds = 0, nanoseconds = 0;
    std::uint64_t size = 0;
    std::string name;
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
  [[nodiscard]] bool write_file(const std::string& name, const std::vector<std::byte>& bytes,
                                const std::atomic<bool>& cancelled) const {
    File file(::openat(directory_.get(), name.c_str(),
                       O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600));
    if (file.get() < 0) return false;
    for (std::size_t at = 0; at < bytes.size();) {
      if (cancelled) return false;
      const ssize_t n = ::write(file.get(), bytes.data() + at, std::min(bytes.size() - at, piece));
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0) return false;  // full, over a quota, or gone
      at += static_cast<std::size_t>(n);
    }
    return true;
  }
  [[nodiscard]] std::uint64_t size_of(const std::string& name) const {
    struct stat status{};
    if (::fstatat(directory_.get(), name.c_str(), &status, AT_SYMLINK_NOFOLLOW) != 0) return 0;
    return static_cast<std::uint64_t>(status.st_size);
  }
  [[nodiscard]] std::uint64_t stored_size() const {
    std::uint64_t size = 0;
    if (::pread(lock_.get(), &size, sizeof(size), 0) != sizeof(size)) return max_bytes_ + 1;
    return size;
  }
  void store_size(std::uint64_t size) const {
    // If it cannot be written, the next who makes room counts again.
    if (::pwrite(lock_.get(), &size, sizeof(size), 0) != sizeof(size))
      (void)(::ftruncate(lock_.get(), 0) == 0);
  }
  /// Counts all records, and removes the least recently used until `bytes` more have room, and some
  /// beyond, so that this is rare. Returns the size of those that are left.
  std::uint64_t make_room(std::uint64_t bytes) {
    std::vector<Entry> entries = list();
    std::uint64_t total = 0;
    for (const Entry& entry : entries) total += entry.size;
    if (total > max_bytes_ || bytes > max_bytes_ - total) {
      std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) {
        return std::pair(a.seconds, a.nanoseconds) < std::pair(b.seconds, b.nanoseconds);
      });
      const std::uint64_t goal = std::min(max_bytes_ - max_bytes_ / 8, max_bytes_ - bytes);
      for (const Entry& entry : entries) {
        if (total <= goal) break;
        if (::unlinkat(directory_.get(), entry.name.c_str(), 0) != 0 && errno != ENOENT) continue;
        total -= entry.size;
        if (const auto key = key_of(entry.name)) tell_(*key, false);
      }
    }
    store_size(total);
    return total;
  }
  /// All records. Parts of files of processes that are no more are removed.
  std::vector<Entry> list() {
    std::vector<Entry> entries;
    const int twin = ::openat(directory_.get(), ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    struct Close {
      void operator()(DIR* directory) const { ::closedir(directory); }
    };
    const std::unique_ptr<DIR, Close> open(twin < 0 ? nullptr : ::fdopendir(twin));
    if (!open) return entries;
    while (const dirent* const found = ::readdir(open.get())) {
      const std::string name = found->d_name;
      if (name.starts_with(".part-")) remove_part(name);
      if (name.starts_with(".") || !name.ends_with(suffix)) continue;
      struct stat status{};
      if (::fstatat(directory_.get(), name.c_str(), &status, AT_SYMLINK_NOFOLLOW) != 0) continue;
#if defined(__APPLE__)
      const timespec used = status.st_mtimespec;
#else
      const timespec used = status.st_mtim;
#endif
      entries.push_back(
          {used.tv_sec, used.tv_nsec, static_cast<std::uint64_t>(status.st_size), name});
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
  const Tell tell_;
  File directory_, lock_;
  std::mutex mutex_;
  std::atomic<std::uint64_t> num_parts_ = 0;
};

}  // namespace detail
CHUNKATTN_NAMESPACE_END
