// Files that appear whole or not at all, and say why when they do not.
#pragma once

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

namespace examples {

class OutputError : public std::runtime_error {
 public:
  OutputError(const std::string& path, std::string why)
      : std::runtime_error(path + ": " + why), reason(std::move(why)) {}
  std::string reason;  ///< without the path
};

/// What becomes of a path that is a device or a pipe. Never is it replaced by a file.
enum class Devices { refuse, write };

/// Writes beside the path and renames at the end, so that whatever goes wrong leaves the old file.
/// A link leads to the same file as before, and the file has the permissions that it had.
class OutputFile {
 public:
  /// \throws OutputError, as all of them do
  explicit OutputFile(std::string path, Devices devices = Devices::refuse)
      : path_(std::move(path)), target_(path_) {
    struct stat found{};
    const bool exists = ::stat(path_.c_str(), &found) == 0;
    if (!exists && errno != ENOENT) fail(errno);
    if (exists && S_ISDIR(found.st_mode)) fail(EISDIR);
    if (exists && !S_ISREG(found.st_mode) && devices == Devices::refuse)
      throw OutputError(path_, "cannot be written: not a regular file");
    if (exists && ::access(path_.c_str(), W_OK) != 0) fail(errno);
    // Also a regular file that is somebody's open stdout: no other may take its place.
    if ((exists && !S_ISREG(found.st_mode)) || path_.starts_with("/dev/")) {
      file_ = ::open(path_.c_str(), O_WRONLY | O_APPEND | O_CLOEXEC);
      if (file_ < 0) fail(errno);
      return;
    }
    std::error_code error;
    if (exists) target_ = std::filesystem::canonical(path_, error).string();
    if (error) fail(error.value());
    for (int n = 0; file_ < 0; ++n) {  // a name that is not taken
      part_ = target_ + "." + std::to_string(::getpid()) + "-" + std::to_string(n) + ".part";
      file_ = ::open(part_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
      if (file_ >= 0) break;
      if (errno != EEXIST) {
        part_.clear();
        fail(errno);
      }
    }
    if (exists && ::fchmod(file_, found.st_mode & 07777) != 0) fail(errno);
  }
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;
  ~OutputFile() { discard(); }

  void write(const void* data, std::size_t bytes) {
    const auto* at = static_cast<const char*>(data);
    while (bytes > 0) {
      const ssize_t written = ::write(file_, at, bytes);
      if (written < 0) {
        if (errno == EINTR) continue;
        fail(errno);
      }
      at += written;
      bytes -= static_cast<std::size_t>(written);
    }
  }

  /// All is written: renames it to its name.
  void commit() {
    if (!part_.empty() && ::fsync(file_) != 0) fail(errno);
    if (::close(std::exchange(file_, -1)) != 0) fail(errno);
    if (!part_.empty() && ::rename(part_.c_str(), target_.c_str()) != 0) fail(errno);
    part_.clear();
  }

 private:
  // The destructor of a half-made object does not run: this clears up.
  [[noreturn]] void fail(int error) {
    discard();
    throw OutputError(path_, "cannot be written: " + std::generic_category().message(error));
  }
  void discard() {
    if (file_ >= 0) ::close(std::exchange(file_, -1));
    if (!part_.empty()) ::unlink(part_.c_str());
    part_.clear();
  }

  std::string path_, target_;
  std::string part_;  // what is renamed in the end; empty for a device
  int file_ = -1;
};

/// For programs that write at the end of long work. \throws OutputError if it could not be done now
inline void require_writable(const std::string& path, Devices devices = Devices::refuse) {
  struct stat found{};
  if (devices == Devices::write && ::stat(path.c_str(), &found) == 0 && !S_ISREG(found.st_mode) &&
      !S_ISDIR(found.st_mode)) {
    // Opening a pipe and closing it would end the reader's work.
    if (::access(path.c_str(), W_OK) == 0) return;
  }
  OutputFile(path, devices);
}

}  // namespace examples
