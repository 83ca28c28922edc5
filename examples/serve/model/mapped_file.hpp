// A file as memory, and what is said of one that is not what it should be.
#pragma once

#include <cstddef>
#include <cstring>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>

namespace serve {

/// A file that cannot be read, or that is not what it should be: names the file, the field, its
/// value and what was expected.
class FileError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// A regular file, mapped for reading. Whoever shortens it meanwhile ends the program (SIGBUS), as
/// with every mapping.
class MappedFile {
 public:
  /// \throws FileError if it cannot be opened
  explicit MappedFile(std::string path);
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&&) = delete;
  ~MappedFile();

  [[nodiscard]] const std::string& path() const { return path_; }
  [[nodiscard]] std::span<const std::byte> bytes() const { return bytes_; }

 private:
  std::string path_;
  std::span<const std::byte> bytes_;
};

/// Reads little-endian fields one after the other; each read says for which field it is.
class FieldReader {
 public:
  /// \param format  what the file is taken for, in messages: "a GGUF file"
  FieldReader(const MappedFile& file, std::string_view format) : file_(&file), format_(format) {}

  [[nodiscard]] std::size_t position() const { return at_; }
  [[nodiscard]] std::size_t left() const { return file_->bytes().size() - at_; }

  /// The next `count` bytes.
  std::span<const std::byte> take(std::size_t count, std::string_view field) {
    if (count > left())
      fail(field, std::to_string(count) + " bytes from byte " + std::to_string(at_) + " on",
           "a file that goes on; it is truncated after " + std::to_string(file_->bytes().size()));
    const auto taken = file_->bytes().subspan(at_, count);
    at_ += count;
    return taken;
  }
  template <class T>
    requires std::is_arithmetic_v<T>
  T number(std::string_view field) {
    T value;
    std::memcpy(&value, take(sizeof value, field).data(), sizeof value);
    return value;
  }
  std::string_view text(std::size_t length, std::string_view field) {
    const auto bytes = take(length, field);
    return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
  }

  [[noreturn]] void fail(std::string_view field, const std::string& value,
                         const std::string& expected) const {
    throw FileError(file_->path() + ": not " + format_ + ": " + std::string(field) + " = " + value +
                    ": expected " + expected);
  }

 private:
  const MappedFile* file_;
  std::string format_;
  std::size_t at_ = 0;
};

}  // namespace serve
