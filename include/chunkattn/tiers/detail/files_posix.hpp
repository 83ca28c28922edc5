// The files of one directory on POSIX systems, as TierDirectory asks for them.
#pragma once

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <ctime>
#include <memory>
#include <optional>
#include <string>

#include "../../detail/support/config.hpp"
#include "file.hpp"

CHUNKATTN_NAMESPACE_BEGIN
namespace detail {

class TierFiles {
 public:
  void open(const std::string& path) {
    (void)::mkdir(path.c_str(), 0700);
    directory_ = TierFile(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  }

  /// Of files alone: of no directory, device or link.
  [[nodiscard]] std::optional<TierFileStatus> status(const std::string& name) const {
    struct stat status{};
    if (::fstatat(directory_.number(), name.c_str(), &status, AT_SYMLINK_NOFOLLOW) != 0 ||
        !S_ISREG(status.st_mode))
      return std::nullopt;
#if defined(__APPLE__)
    const timespec used = status.st_mtimespec;
#else
    const timespec used = status.st_mtim;
#endif
    return TierFileStatus{static_cast<std::uint64_t>(status.st_size), {used.tv_sec, used.tv_nsec}};
  }
  [[nodiscard]] bool may_read(const std::string& name) const {
    return ::faccessat(directory_.number(), name.c_str(), R_OK, 0) == 0;
  }
  /// What has that name, open to be read, or none. Neither a FIFO nor a device is waited for.
  [[nodiscard]] TierFile read(const std::string& name) const {
    return open(name, O_RDONLY | O_NONBLOCK);
  }
  /// Of a file that is open, else nothing.
  [[nodiscard]] static std::optional<std::uint64_t> size(const TierFile& file) {
    struct stat status{};
    if (::fstat(file.number(), &status) != 0 || !S_ISREG(status.st_mode)) return std::nullopt;
    return static_cast<std::uint64_t>(status.st_size);
  }
  /// At most `size` bytes: how many, 0 at the end, or -1 with errno.
  [[nodiscard]] static std::ptrdiff_t read(const TierFile& file, void* bytes, std::size_t size) {
    return ::read(file.number(), bytes, size);
  }
  static void set_used_now(const TierFile& file) { (void)::futimens(file.number(), nullptr); }

  /// A new file, or errno says why not.
  [[nodiscard]] TierFile create(const std::string& name) const {
    return open(name, O_WRONLY | O_CREAT | O_EXCL);
  }
  [[nodiscard]] static std::ptrdiff_t write(const TierFile& file, const void* bytes,
                                            std::size_t size) {
    return ::write(file.number(), bytes, size);
  }
  /// All that was written. False if it could not be kept, and errno says why.
  [[nodiscard]] static bool finish(TierFile& file) { return file.close(); }
  [[nodiscard]] static bool is_full(int error) { return error == ENOSPC || error == EDQUOT; }
  [[nodiscard]] bool rename(TierFile&, const std::string& from, const std::string& to) const {
    return ::renameat(directory_.number(), from.c_str(), directory_.number(), to.c_str()) == 0;
  }
  /// False if it is there still.
  bool remove(const std::string& name) const {
    return ::unlinkat(directory_.number(), name.c_str(), 0) == 0 || errno == ENOENT;
  }

  /// f(name) of all that is there. False if not all could be seen.
  template <class F>
  bool for_each(const F& f) const {
    const int copy = ::openat(directory_.number(), ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    struct Close {
      void operator()(DIR* directory) const { ::closedir(directory); }
    };
    const std::unique_ptr<DIR, Close> opened(::fdopendir(copy));
    if (!opened) return false;
    for (;;) {
      errno = 0;
      const dirent* const found = ::readdir(opened.get());
      if (found == nullptr) return errno == 0;
      f(std::string(found->d_name));
    }
  }
  /// A part of a name that no other process uses now.
  [[nodiscard]] static std::string process() { return std::to_string(::getpid()); }
  /// Removes `name`, ".part-" and a process, if that is no more.
  void remove_part(const std::string& name) const {
    constexpr std::time_t hour = 3600;  // a process in another container may have the same number
    const long process = std::strtol(name.c_str() + sizeof(".part-") - 1, nullptr, 10);
    struct stat status{};
    if (::fstatat(directory_.number(), name.c_str(), &status, AT_SYMLINK_NOFOLLOW) != 0) return;
    const bool is_old = status.st_mtime + hour < std::time(nullptr);
    if (!is_old && process > 0 && (::kill(static_cast<pid_t>(process), 0) == 0 || errno != ESRCH))
      return;
    (void)::unlinkat(directory_.number(), name.c_str(), 0);
  }

  /// Opens the file of sizes, of which who has the lock may change the directory's records.
  [[nodiscard]] TierFile open_lock(const std::string& name) const {
    TierFile file = open(name, O_RDWR | O_CREAT | O_NONBLOCK);
    if (!size(file)) (void)file.close();
    return file;
  }
  /// False while somebody else has the lock. Where the file system has none, everybody has it.
  [[nodiscard]] static bool lock(const TierFile& file) {
    return ::flock(file.number(), LOCK_EX | LOCK_NB) == 0 ||
           (errno != EWOULDBLOCK && errno != EINTR);
  }
  static void unlock(const TierFile& file) { (void)::flock(file.number(), LOCK_UN); }
  [[nodiscard]] static std::optional<std::uint64_t> stored(const TierFile& file) {
    std::uint64_t size = 0;
    if (::pread(file.number(), &size, sizeof(size), 0) != sizeof(size)) return std::nullopt;
    return size;
  }
  static void store(const TierFile& file, std::uint64_t size) {
    if (::pwrite(file.number(), &size, sizeof(size), 0) != sizeof(size))
      (void)(::ftruncate(file.number(), 0) == 0);
  }

 private:
  [[nodiscard]] TierFile open(const std::string& name, int flags) const {
    return TierFile(
        ::openat(directory_.number(), name.c_str(), flags | O_NOFOLLOW | O_CLOEXEC, 0600));
  }
  TierFile directory_;
};

}  // namespace detail
CHUNKATTN_NAMESPACE_END
