// The system's calls about files, as this program makes them: any of them fails when a test says
// so, and writes stop where a disk of a chosen size would be full. Linux alone.
#pragma once

#if defined(__linux__)
#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdarg>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

namespace test {

/// Where the test's writes stop, as on a disk of that size.
struct SmallDisk {
  std::string path;
  std::uint64_t bytes = 0;
  int error = ENOSPC;
  static inline SmallDisk* current = nullptr;

  [[nodiscard]] std::uint64_t used() const {
    std::uint64_t all = 0;
    for (const auto& entry : std::filesystem::directory_iterator(path))
      if (entry.path().filename() != ".size") all += entry.file_size();
    return all;
  }
};

/// The next reads fail with these errors, the last one first, or if negative, give nothing.
inline std::vector<int> next_reads;

/// The call of this thread that fails, counted down to 0; below 0 none does.
struct FailingCall {
  int countdown = -1;
  int error = EIO;
  std::string name{};  ///< of the one that failed, and of its file
  std::string only{};  ///< those whose name begins like this
  int times = 1;       ///< as many one after the other
};
inline thread_local FailingCall failing_call;

/// The name of an open file.
inline std::string file_name(int file) {
  char path[4096];
  const std::string link = "/proc/self/fd/" + std::to_string(file);
  const ssize_t length = ::readlink(link.c_str(), path, sizeof(path));
  return {path, length > 0 ? static_cast<std::size_t>(length) : 0};
}
/// Whether this call fails now, with errno.
inline bool fails(const char* call, int file, const char* name = nullptr) {
  FailingCall& failing = failing_call;
  if (failing.countdown < 0) return false;
  const std::string what = call + std::string(" ") + (name != nullptr ? name : file_name(file));
  if (!what.starts_with(failing.only) || failing.countdown-- > 0) return false;
  if (--failing.times > 0) failing.countdown = 0;
  failing.name = what;
  errno = failing.error;
  return true;
}

}  // namespace test

// So also those of the library's headers in it.
extern "C" {
ssize_t write(int file, const void* bytes, size_t count) {
  if (test::fails("write", file)) return -1;
  if (const test::SmallDisk* const disk = test::SmallDisk::current;
      disk != nullptr && test::file_name(file).starts_with(disk->path)) {
    const std::uint64_t used = disk->used();
    if (used >= disk->bytes) {
      errno = disk->error;
      return disk->error == 0 ? 0 : -1;
    }
    count = std::min<std::size_t>(count, disk->bytes - used);
  }
  return static_cast<ssize_t>(::syscall(SYS_write, file, bytes, count));
}
ssize_t read(int file, void* bytes, size_t count) {
  if (test::fails("read", file)) return -1;
  if (!test::next_reads.empty()) {
    const int error = test::next_reads.back();
    test::next_reads.pop_back();
    errno = std::abs(error);
    return error < 0 ? 0 : -1;
  }
  return static_cast<ssize_t>(::syscall(SYS_read, file, bytes, count));
}
/// As where a file system keeps what was written only then: the file is closed in any case.
int close(int file) {
  const bool failed = test::fails("close", file);
  const int error = errno;
  const auto result = static_cast<int>(::syscall(SYS_close, file));
  if (failed) errno = error;
  return failed ? -1 : result;
}
ssize_t pread(int file, void* bytes, size_t count, off_t at) {
  if (test::fails("pread", file)) return -1;
  return static_cast<ssize_t>(::syscall(SYS_pread64, file, bytes, count, at));
}
ssize_t pwrite(int file, const void* bytes, size_t count, off_t at) {
  if (test::fails("pwrite", file)) return -1;
  return static_cast<ssize_t>(::syscall(SYS_pwrite64, file, bytes, count, at));
}
int flock(int file, int operation) noexcept {
  if (test::fails("flock", file)) return -1;
  return static_cast<int>(::syscall(SYS_flock, file, operation));
}
int renameat(int from, const char* name, int to, const char* new_name) noexcept {
  if (test::fails("renameat", from, new_name)) return -1;
  return static_cast<int>(::syscall(SYS_renameat2, from, name, to, new_name, 0));
}
int unlinkat(int folder, const char* name, int flags) noexcept {
  if (test::fails("unlinkat", folder, name)) return -1;
  return static_cast<int>(::syscall(SYS_unlinkat, folder, name, flags));
}
dirent* readdir(DIR* folder) {
  if (test::fails("readdir", ::dirfd(folder))) return nullptr;
  static const auto next = reinterpret_cast<dirent* (*)(DIR*)>(::dlsym(RTLD_NEXT, "readdir"));
  return next(folder);
}
int openat(int folder, const char* name, int flags, ...) {
  mode_t mode = 0;
  if ((flags & O_CREAT) != 0) {
    va_list rest;
    va_start(rest, flags);
    mode = va_arg(rest, mode_t);
    va_end(rest);
  }
  if (test::fails("openat", folder, name)) return -1;
  return static_cast<int>(::syscall(SYS_openat, folder, name, flags, mode));
}
}
#endif
