// The files of one directory on Windows, as TierDirectory asks for them. Of the system it declares
// seven functions itself: <windows.h> would bring its macros to users.
#pragma once

#if defined(_WIN32)
#include <direct.h>
#include <fcntl.h>
#include <io.h>
#include <process.h>
#include <sys/locking.h>
#include <sys/stat.h>

#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <ratio>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "../../detail/support/config.hpp"
#include "file.hpp"

CHUNKATTN_NAMESPACE_BEGIN
namespace detail {
namespace windows {

struct Time {  // since 1601, in units of 100 ns
  std::uint32_t low, high;
};
/// WIN32_FIND_DATAW, whose beginning is WIN32_FILE_ATTRIBUTE_DATA.
struct Found {
  static constexpr std::uint32_t directory = 0x10, device = 0x40, link = 0x400;

  std::uint32_t attributes;
  Time created, accessed, written;
  std::uint32_t size_high, size_low, reserved[2];
  wchar_t name[260], short_name[14];
};
void* find_first(const wchar_t* pattern, Found* found) __asm__("FindFirstFileW");
int find_next(void* search, Found* found) __asm__("FindNextFileW");
int find_close(void* search) __asm__("FindClose");
int attributes(const wchar_t* path, int level, Found* found) __asm__("GetFileAttributesExW");
int set_time(void* file, const Time* created, const Time* accessed,
             const Time* written) __asm__("SetFileTime");
int move(const wchar_t* from, const wchar_t* to, std::uint32_t flags) __asm__("MoveFileExW");
int to_wide(std::uint32_t code_page, std::uint32_t flags, const char* text, int size, wchar_t* wide,
            int wide_size) __asm__("MultiByteToWideChar");

}  // namespace windows

/// Names are ASCII. A file that somebody has open is neither removed nor replaced: whoever tries
/// does so again for a while.
class TierFiles {
 public:
  /// A path in UTF-8. Below one that is empty, or something else, nothing can be opened.
  void open(const std::string& path) {
    constexpr std::uint32_t utf8 = 65001, or_nothing = 8;
    const int size = static_cast<int>(path.size());
    std::wstring wide(path.size(), L'\0');
    wide.resize(static_cast<std::size_t>(
        windows::to_wide(utf8, or_nothing, path.data(), size, wide.data(), size)));
    std::error_code ignored;
    // It stays where it is if the process changes its own directory, and may be as long as Windows
    // can: without this beginning, to which \\server\share has no right, 260 characters.
    path_ = std::filesystem::absolute(wide, ignored).lexically_normal().wstring();
    path_.resize(path_.find_last_not_of(L'\\') + 1);
    if (!path_.starts_with(L"\\\\")) path_ = L"\\\\?\\" + path_;
    (void)::_wmkdir(path_.c_str());
  }

  /// Of files alone: of no directory, device or link.
  [[nodiscard]] std::optional<TierFileStatus> status(const std::string& name) const {
    using windows::Found;
    Found file{};
    if (windows::attributes(at(name).c_str(), 0, &file) == 0 ||
        (file.attributes & (Found::directory | Found::device | Found::link)) != 0)
      return std::nullopt;
    return TierFileStatus{(std::uint64_t{file.size_high} << 32) | file.size_low,
                          {file.written.high, file.written.low}};
  }
  [[nodiscard]] bool may_read(const std::string& name) const {
    return open(name, _O_RDONLY).is_open();
  }
  /// A file, open to be read, or none.
  [[nodiscard]] TierFile read(const std::string& name) const {
    if (!status(name)) return TierFile();
    TierFile file = open(name, _O_RDWR);  // or its time could not be set
    return file.is_open() ? std::move(file) : open(name, _O_RDONLY);
  }
  /// Of a file that is open, else nothing.
  [[nodiscard]] static std::optional<std::uint64_t> size(const TierFile& file) {
    if (!file.is_open()) return std::nullopt;
    return static_cast<std::uint64_t>(::_filelengthi64(file.number()));
  }
  /// At most `size` bytes: how many, 0 at the end, or -1 with errno.
  [[nodiscard]] static std::ptrdiff_t read(const TierFile& file, void* bytes, std::size_t size) {
    return ::_read(file.number(), bytes, static_cast<unsigned>(size));
  }
  static void set_used_now(const TierFile& file) {
    using Ticks = std::chrono::duration<std::int64_t, std::ratio<1, 10000000>>;
    constexpr Ticks from_1601_to_1970 = std::chrono::seconds(11644473600);
    const auto now = std::chrono::system_clock::now().time_since_epoch();
    const auto ticks = static_cast<std::uint64_t>(
        (std::chrono::duration_cast<Ticks>(now) + from_1601_to_1970).count());
    const windows::Time used{static_cast<std::uint32_t>(ticks),
                             static_cast<std::uint32_t>(ticks >> 32)};
    (void)windows::set_time(reinterpret_cast<void*>(::_get_osfhandle(file.number())), nullptr,
                            nullptr, &used);
  }

  /// A new file, or errno says why not.
  [[nodiscard]] TierFile create(const std::string& name) const {
    return open(name, _O_WRONLY | _O_CREAT | _O_EXCL);
  }
  [[nodiscard]] static std::ptrdiff_t write(const TierFile& file, const void* bytes,
                                            std::size_t size) {
    return ::_write(file.number(), bytes, static_cast<unsigned>(size));
  }
  /// All that was written. It stays open, so that nobody takes it for what somebody left behind;
  /// rename(), which is called under the lock, closes it.
  [[nodiscard]] static bool finish(TierFile&) { return true; }
  [[nodiscard]] static bool is_full(int error) { return error == ENOSPC; }
  [[nodiscard]] bool rename(TierFile& file, const std::string& from, const std::string& to) const {
    constexpr std::uint32_t replace = 1;
    return file.close() &&
           again([&] { return windows::move(at(from).c_str(), at(to).c_str(), replace) != 0; });
  }
  /// False if it is there still.
  bool remove(const std::string& name) const {
    windows::Found file{};
    if (windows::attributes(at(name).c_str(), 0, &file) != 0 &&
        (file.attributes & windows::Found::directory) != 0)
      return false;
    return again([&] { return ::_wunlink(at(name).c_str()) == 0 || errno == ENOENT; });
  }

  /// f(name) of all that is there, with ? for what is not ASCII.
  template <class F>
  bool for_each(const F& f) const {
    windows::Found found{};
    void* const search = windows::find_first(at("*").c_str(), &found);
    if (reinterpret_cast<std::intptr_t>(search) == -1) return false;
    do {
      std::string name;
      for (const wchar_t* c = found.name; *c != 0; ++c)
        name += *c < 128 ? static_cast<char>(*c) : '?';
      f(name);
    } while (windows::find_next(search, &found) != 0);
    windows::find_close(search);
    return true;
  }
  /// A part of a name that no other process uses now.
  [[nodiscard]] static std::string process() { return std::to_string(::_getpid()); }
  /// Removes what a process left behind that was at writing it: who still is has it open.
  void remove_part(const std::string& name) const { (void)::_wunlink(at(name).c_str()); }

  /// Opens the file of sizes, of which who has the lock may change the directory's records.
  [[nodiscard]] TierFile open_lock(const std::string& name) const {
    return open(name, _O_RDWR | _O_CREAT);
  }
  /// False while somebody else has the lock.
  [[nodiscard]] static bool lock(const TierFile& file) { return lock(file, _LK_NBLCK); }
  static void unlock(const TierFile& file) { (void)lock(file, _LK_UNLCK); }
  [[nodiscard]] static std::optional<std::uint64_t> stored(const TierFile& file) {
    std::uint64_t size = 0;
    if (::_lseeki64(file.number(), 0, 0) != 0 || read(file, &size, sizeof(size)) != sizeof(size))
      return std::nullopt;
    return size;
  }
  static void store(const TierFile& file, std::uint64_t size) {
    if (::_lseeki64(file.number(), 0, 0) != 0 || write(file, &size, sizeof(size)) != sizeof(size))
      (void)::_chsize_s(file.number(), 0);
  }

 private:
  [[nodiscard]] std::wstring at(const std::string& name) const {
    return path_ + L'\\' + std::wstring(name.begin(), name.end());
  }
  [[nodiscard]] TierFile open(const std::string& name, int flags) const {
    return TierFile(
        ::_wopen(at(name).c_str(), flags | _O_BINARY | _O_NOINHERIT, _S_IREAD | _S_IWRITE));
  }
  /// The lock is of a byte behind all that is read: Windows' keep others from reading.
  static bool lock(const TierFile& file, int mode) {
    return ::_lseeki64(file.number(), 1 << 20, 0) >= 0 && ::_locking(file.number(), mode, 1) == 0;
  }
  template <class F>
  static bool again(const F& f) {
    for (int tries = 0; tries < 100; ++tries) {
      if (f()) return true;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return false;
  }

  std::wstring path_;
};

}  // namespace detail
CHUNKATTN_NAMESPACE_END
#endif
