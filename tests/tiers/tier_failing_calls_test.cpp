// Every call of the system that a tier's directory makes fails once: no record is half, none is
// lost track of, and what comes later works.
#include <doctest/doctest.h>

#include "tests/support/file_calls.hpp"

#if defined(__linux__)
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "chunkattn/error.hpp"
#include "chunkattn/tiers/detail/directory.hpp"
#include "chunkattn/tiers/tier_store.hpp"
#include "tests/support/tier_folder.hpp"

using namespace chunkattn;
using detail::TierDirectory;
using test::failing_call;
using test::tier_folder::bytes_of;
using test::tier_folder::Folder;
using test::tier_folder::key_of;
using test::tier_folder::never;

namespace {

constexpr std::size_t size = 400, most = 1000;  // two records, and not three

struct Directory {
  Folder folder;
  std::set<std::string> seen;  // as it said
  std::unique_ptr<TierDirectory> files;

  void open() {
    files = std::make_unique<TierDirectory>(folder.path, most,
                                            [this](const TierStore::Key& key, bool is_there) {
                                              if (is_there)
                                                seen.insert(key.text());
                                              else
                                                seen.erase(key.text());
                                            });
  }
  bool put(std::uint64_t n, std::uint64_t version = 0) const {
    return files->put(key_of(n), *bytes_of(n + version, size), never);
  }
  [[nodiscard]] std::string name(std::uint64_t n) const {
    return folder.path + "/" + key_of(n).text() + ".kv";
  }
  /// The bytes of all that are there, each a record as it was put.
  std::size_t check_whole() const {
    std::size_t bytes = 0;
    for (const auto& entry : std::filesystem::directory_iterator(folder.path)) {
      if (entry.path().extension() != ".kv") continue;
      std::ifstream in(entry.path(), std::ios::binary);
      const std::string text{std::istreambuf_iterator<char>(in), {}};
      bytes += text.size();
      bool is_known = false;
      for (std::uint64_t n = 1; n < 10; ++n)
        for (const std::uint64_t version : {0u, 50u}) {
          const auto whole = bytes_of(n + version, size);
          is_known |=
              entry.path().string() == name(n) && text.size() == size &&
              std::equal(text.begin(), text.end(), reinterpret_cast<const char*>(whole->data()));
        }
      CHECK(is_known);
    }
    return bytes;
  }
};

/// What the operation does, of a directory that has records 1 and 2, where one call fails.
template <class Operation>
void fail_each(int error, const Operation& operation) {
  CAPTURE(error);
  for (int n = 0;; ++n) {
    CAPTURE(n);
    Directory d;
    d.open();
    REQUIRE(d.put(1));
    REQUIRE(d.put(2));
    failing_call = {n, error, ""};
    const auto check = operation(d);  // ends with failing_call.countdown = -1
    const std::string failed = failing_call.name;
    CAPTURE(failed);
    check(failed);
    CHECK((d.folder.files(".part-") == 0 || failed.starts_with("unlinkat")));
    const std::size_t bytes = d.check_whole();
    if (!failed.starts_with("unlinkat")) CHECK(bytes <= most);
    if (!d.files) d.open();
    for (const std::uint64_t later : {8u, 9u}) {
      CHECK(d.put(later));
      CHECK(d.files->get(key_of(later), size, never));
    }
    CHECK(d.check_whole() == d.files->num_bytes());
    CHECK(d.files->num_bytes() <= most);
    for (std::uint64_t i = 1; i < 10; ++i)
      CHECK(std::filesystem::exists(d.name(i)) == d.files->contains(key_of(i)));
    if (failed.empty()) break;
  }
}
template <class F>
auto attempt(const F& f) {
  auto result = f();
  failing_call.countdown = -1;
  return result;
}

}  // namespace

TEST_CASE("where a call fails in a put, its record is there as a whole, or is not") {
  for (const int error : {EIO, EACCES, ENOSPC, EMFILE})
    for (const std::uint64_t n : {2u, 3u}) {  // replaces one; makes room
      CAPTURE(n);
      fail_each(error, [&](Directory& d) {
        const bool kept = attempt([&] { return d.put(n, 50); });
        return [&d, n, kept, error](const std::string& failed) {
          const auto found = d.files->get(key_of(n), size, never);
          CHECK((!kept || (found && *found == *bytes_of(n + 50, size))));
          const bool is_lost =
              failed.starts_with("renameat") || failed.find(".part-") != failed.npos;
          if (is_lost && error != ENOSPC) CHECK(!kept);
          if (is_lost && error == ENOSPC && !failed.starts_with("renameat")) CHECK(kept);
          if (failed.empty()) CHECK(kept);
          if (!kept && n == 3) CHECK(!found);
          if (!kept && n == 2 && found) CHECK(*found == *bytes_of(2, size));
          for (std::uint64_t i = 1; i < 4; ++i)
            CHECK(d.seen.contains(key_of(i).text()) == d.files->contains(key_of(i)));
        };
      });
    }
}

TEST_CASE("where others take what became free on a full disk, room is made once more") {
  for (const int times : {1, 2, 3}) {
    CAPTURE(times);
    Directory d;
    d.open();
    REQUIRE(d.put(1));
    failing_call = {.countdown = 0, .error = ENOSPC, .only = "write ", .times = times};
    CHECK(attempt([&] { return d.put(2); }) == (times < 3));
    CHECK(d.files->contains(key_of(2)) == (times < 3));
    CHECK(d.folder.files(".part-") == 0);
  }
}

TEST_CASE("where a call fails in a get, what is given is whole, and what is there stays") {
  for (const int error : {EIO, EACCES, EMFILE})
    fail_each(error, [&](Directory& d) {
      const auto found = attempt([&] { return d.files->get(key_of(1), size, never); });
      return [&d, found](const std::string& failed) {
        CHECK((!found || *found == *bytes_of(1, size)));
        CHECK((found || !failed.empty()));
        CHECK(d.files->contains(key_of(1)));
      };
    });
}

TEST_CASE("where a call fails in an erase, the others stay, and what is there is counted") {
  for (const int error : {EIO, EACCES, EMFILE})
    fail_each(error, [&](Directory& d) {
      attempt([&] { return d.files->erase(key_of(1)), 0; });
      return [&d](const std::string& failed) {
        CHECK(d.files->contains(key_of(1)) == failed.starts_with("unlinkat"));
        CHECK(d.files->contains(key_of(2)));
      };
    });
}

TEST_CASE("where a call fails as a directory is opened, it is refused or works") {
  for (const int error : {EIO, EACCES, EMFILE})
    fail_each(error, [&](Directory& d) {
      d.files.reset();
      std::ofstream(d.folder.path + "/.part-0-1") << "left behind";
      std::filesystem::last_write_time(
          d.folder.path + "/.part-0-1",
          std::filesystem::file_time_type::clock::now() - std::chrono::hours(2));
      const bool opened = attempt([&] {
        try {
          d.open();
          return true;
        } catch (const InvalidArgument&) {
          return false;
        }
      });
      return [&d, opened](const std::string& failed) {
        CHECK((opened || !failed.empty()));
        const bool cannot =
            failed == "openat ." || failed.starts_with("readdir") || failed.starts_with("unlinkat");
        if (opened && !cannot) CHECK(d.folder.files(".part-") == 0);
        (void)std::filesystem::remove(d.folder.path + "/.part-0-1");
      };
    });
}
#endif
