#include "mapped_file.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <bit>
#include <cerrno>
#include <system_error>
#include <utility>

namespace serve {

static_assert(std::endian::native == std::endian::little,
              "the formats read here are little-endian");

MappedFile::MappedFile(std::string path) : path_(std::move(path)) {
  const auto fail = [this](const std::string& why) { throw FileError(path_ + ": " + why); };
  const auto reason = [] { return std::generic_category().message(errno); };
  const int file = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) fail("cannot be opened: " + reason());
  struct Closed {
    int file;
    ~Closed() { ::close(file); }
  } const closed{file};
  struct stat status{};
  if (::fstat(file, &status) != 0) fail("cannot be read: " + reason());
  if (!S_ISREG(status.st_mode)) fail("not a regular file");
  const auto size = static_cast<std::size_t>(status.st_size);
  if (size == 0) return;  // mmap() refuses an empty range
  void* const memory = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file, 0);
  if (memory == MAP_FAILED) fail("cannot be mapped: " + reason());
  bytes_ = {static_cast<const std::byte*>(memory), size};
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : path_(std::move(other.path_)), bytes_(std::exchange(other.bytes_, {})) {}

MappedFile::~MappedFile() {
  if (!bytes_.empty()) ::munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
}

}  // namespace serve
