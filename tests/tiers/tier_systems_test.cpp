// A tier's directory on every system: any path, files that somebody has open, names that are
// others', and a lock under which two tiers count together.
#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <thread>

#include "chunkattn/tiers/tiers.hpp"
#include "tests/support/refused.hpp"
#include "tests/support/tier_folder.hpp"

using namespace chunkattn;
using detail::TierDirectory;
using test::tier_folder::bytes_of;
using test::tier_folder::Folder;
using test::tier_folder::key_of;
using test::tier_folder::never;

namespace {

std::filesystem::path file_of(const std::filesystem::path& folder, std::uint64_t n) {
  return folder / (key_of(n).text() + ".kv");
}
/// As the tiers take paths.
std::string utf8(const std::filesystem::path& path) {
  const std::u8string text = path.u8string();
  return {text.begin(), text.end()};
}
void puts_and_gets(const std::string& path) {
  FileTier files(path, 1000);
  CHECK(files.put(key_of(1), bytes_of(1, 100), never));
  REQUIRE(files.get(key_of(1), never));
  CHECK(*files.get(key_of(1), never) == *bytes_of(1, 100));
}

}  // namespace

TEST_CASE("any path") {
  const Folder folder;
  const std::filesystem::path name = u8"a b, Käse \U0001F9C0";
  puts_and_gets(utf8(folder.path / name));
  CHECK(std::filesystem::exists(file_of(folder.path / name, 1)));
  puts_and_gets(folder.path + "//./" + utf8(name) + "//");

  const std::filesystem::path before = std::filesystem::current_path();
  std::filesystem::current_path(folder.path);
  {
    FileTier files("within", 1000);
    std::filesystem::current_path(before);
    CHECK(files.put(key_of(1), bytes_of(1, 100), never));
    CHECK(files.get(key_of(1), never));
  }
  CHECK(std::filesystem::exists(file_of(folder.path + "/within", 1)));

  for (const char* const path : {"", "/no/such/folder"})
    CHECK(test::refused([&] { FileTier(path, 1000); }) ==
          std::string("path = ") + path +
              ": expected a directory that can be written, or can be made");
}

#if defined(_WIN32)
TEST_CASE("paths of Windows: longer than 260 characters, and no UTF-8") {
  const Folder folder;
  const std::string outer = folder.path + "/" + std::string(150, 'a');
  const std::string inner = outer + "/" + std::string(150, 'b');
  puts_and_gets(outer);
  puts_and_gets(inner);
  for (const std::string& path : {inner, outer}) {  // which remove_all() cannot
    const std::filesystem::path whole =
        L"\\\\?\\" + std::filesystem::absolute(path).make_preferred().wstring();
    CHECK(std::filesystem::remove(whole / ".size"));
    CHECK(std::filesystem::remove(file_of(whole, 1)));
    CHECK(std::filesystem::remove(whole));
  }
  CHECK(test::refused([&] {
          FileTier(folder.path + "/\xff", 1000);
        }).find("expected a directory that can be written") != std::string::npos);
}
#endif

TEST_CASE("others' names are left alone, whatever their letters are") {
  const Folder folder;
  const std::filesystem::path others = folder.path / std::filesystem::path(u8"Käse \U0001F9C0.kv");
  std::ofstream(others) << "here";
  FileTier files(folder.path, 1000);
  for (std::uint64_t n = 1; n < 20; ++n) CHECK(files.put(key_of(n), bytes_of(n, 100), never));
  CHECK(std::filesystem::file_size(others) == 4);
  CHECK(files.num_bytes() <= 1000);
}

TEST_CASE("a file that somebody reads is replaced and removed, if not for long") {
  const Folder folder;
  FileTier files(folder.path, 1000);
  REQUIRE(files.put(key_of(1), bytes_of(1, 100), never));
  for (const bool put : {true, false}) {
    std::ifstream reader(file_of(folder.path, 1), std::ios::binary);
    REQUIRE(reader.get() != EOF);
    std::thread closes([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      reader.close();
    });
    if (put)
      CHECK(files.put(key_of(1), bytes_of(2, 200), never));
    else
      files.erase(key_of(1));
    closes.join();
    CHECK(files.num_bytes() == (put ? 200 : 0));
    CHECK(files.contains(key_of(1)) == put);
    if (put) CHECK(*files.get(key_of(1), never) == *bytes_of(2, 200));
  }
  CHECK(folder.files() == 0);
}

TEST_CASE("what has the name of a record and is none is not found, and no room is made by it") {
  const Folder folder;
  std::filesystem::create_directory(file_of(folder.path, 1));
  FileTier files(folder.path, 1000);
  CHECK_FALSE(files.contains(key_of(1)));
  CHECK_FALSE(files.get(key_of(1), never));
  CHECK_FALSE(files.put(key_of(1), bytes_of(1, 100), never));
  files.erase(key_of(1));
  CHECK(std::filesystem::is_directory(file_of(folder.path, 1)));
  CHECK(files.num_bytes() == 0);
  CHECK(folder.files(".part-") == 0);
}

TEST_CASE("what is erased is not counted, nor what was not there") {
  const Folder folder;
  FileTier files(folder.path, 1000);
  for (const std::uint64_t n : {1u, 2u}) REQUIRE(files.put(key_of(n), bytes_of(n, 100), never));
  files.erase(key_of(3));
  CHECK(files.num_bytes() == 200);
  files.erase(key_of(1));
  CHECK(files.num_bytes() == 100);
  files.erase(key_of(2));
  CHECK(files.num_bytes() == 0);
}

TEST_CASE("a tier is full to its last byte, also of one record") {
  const Folder folder;
  FileTier files(folder.path, 1000);
  for (const std::uint64_t n : {1u, 2u}) REQUIRE(files.put(key_of(n), bytes_of(n, 500), never));
  CHECK(files.num_bytes() == 1000);  // neither made room for the other
  for (const std::uint64_t n : {3u, 4u}) {
    CAPTURE(n);
    REQUIRE(files.put(key_of(n), bytes_of(n, 1000), never));
    CHECK(files.num_bytes() == 1000);
    CHECK(files.contains(key_of(n)));
    CHECK(files.get(key_of(n), never) != nullptr);
    for (std::uint64_t before = 1; before < n; ++before)
      CHECK_FALSE(std::filesystem::exists(file_of(folder.path, before)));
  }
}

TEST_CASE("what was read is used, and an eighth goes at once") {
  const Folder folder;
  FileTier files(folder.path, 80000);
  const auto then = std::filesystem::file_time_type::clock::now() - std::chrono::hours(1);
  for (std::uint64_t n = 1; n <= 80; ++n) {
    REQUIRE(files.put(key_of(n), bytes_of(n, 1000), never));
    // whatever the order is that the system lists them in
    std::filesystem::last_write_time(file_of(folder.path, n),
                                     then + std::chrono::seconds(2 * (n * 7 % 81)));
  }
  CHECK(files.num_bytes() == 80000);
  REQUIRE(files.get(key_of(1), never));
  REQUIRE(files.put(key_of(81), bytes_of(81, 1000), never));
  CHECK(files.num_bytes() == 71000);
  for (std::uint64_t n = 1; n <= 81; ++n) {
    CAPTURE(n);
    CHECK(files.contains(key_of(n)) == (n == 1 || n == 81 || n * 7 % 81 > 11));
  }
  FileTier few(folder.path + "/within", 16);
  for (std::uint64_t n = 1; n <= 16; ++n) REQUIRE(few.put(key_of(n), bytes_of(n, 1), never));
  CHECK(FileTier(folder.path + "/within", 16).num_bytes() == 16);
  REQUIRE(few.put(key_of(17), bytes_of(17, 1), never));
  CHECK(few.num_bytes() == 15);
}

TEST_CASE("a record is counted before it is there") {
  const Folder folder;
  std::uint64_t counted = 0;
  TierDirectory files(folder.path, 1000, [&](const TierStore::Key&, bool is_there) {
    if (is_there)
      std::ifstream(folder.path + "/.size", std::ios::binary)
          .read(reinterpret_cast<char*>(&counted), sizeof(counted));
  });
  for (const std::uint64_t n : {1u, 2u}) {
    CHECK(files.put(key_of(n), *bytes_of(n, 100), never));
    CHECK(counted == 100 * n);
  }
}

TEST_CASE("a file of sizes that is empty is counted again") {
  const Folder folder;
  FileTier files(folder.path, 1000);
  CHECK(files.put(key_of(1), bytes_of(1, 100), never));
  std::filesystem::resize_file(folder.path + "/.size", 0);
  CHECK(files.put(key_of(2), bytes_of(2, 100), never));
  CHECK(files.num_bytes() == 200);
}

TEST_CASE("tiers of one directory count together") {
  const Folder folder;
  constexpr std::uint64_t each = 150;
  FileTier first(folder.path, 1 << 20), second(folder.path, 1 << 20);
  const auto puts = [](FileTier& files, std::uint64_t begin) {
    for (std::uint64_t n = begin; n < begin + each; ++n)
      (void)files.put(key_of(n), bytes_of(n, 100), never);
  };
  std::thread other(puts, std::ref(second), 1000);
  puts(first, 1);
  other.join();
  CHECK(folder.files() == 2 * each);
  CHECK(first.num_bytes() == 2 * each * 100);
  CHECK(second.num_bytes() == 2 * each * 100);
}

TEST_CASE("what is being written is no leftover, what is left behind is removed") {
  const Folder folder;
  std::ofstream(folder.path + "/.part-999999999-1-1") << "left";
  FileTier files(folder.path, 100000);
  CHECK(folder.files(".part-") == 0);
  std::atomic<bool> done = false;
  std::thread scans([&] {
    while (!done) FileTier(folder.path, 100000);  // looks for leftovers
  });
  for (std::uint64_t n = 1; n <= 100; ++n) CHECK(files.put(key_of(n), bytes_of(n, 500), never));
  done = true;
  scans.join();
  CHECK(folder.files() == 100);
  CHECK(folder.files(".part-") == 0);
}
