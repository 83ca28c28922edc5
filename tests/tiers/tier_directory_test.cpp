// A tier's directory holds whatever was put there, on a disk that is full, under a lock that
// is held by who was stopped: all of it costs bounded time and memory, and nothing that is no
// record is touched.
#include <doctest/doctest.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "chunkattn/tiers/detail/directory.hpp"

#if defined(__linux__)
#include <sched.h>
#include <sys/mount.h>
#include <sys/syscall.h>
#endif

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "chunkattn/tiers/tiers.hpp"
#include "tests/support/file_calls.hpp"
#include "tests/support/forked.hpp"
#include "tests/support/refused.hpp"
#include "tests/support/steps.hpp"
#include "tests/support/tier_bench.hpp"
#include "tests/support/tier_folder.hpp"

using namespace chunkattn;
using detail::TierDirectory;
#if defined(__linux__)
using test::next_reads;
using test::SmallDisk;
#endif
using test::tier_folder::bytes_of;
using test::tier_folder::Folder;
using test::tier_folder::key_of;
using test::tier_folder::never;
using Clock = std::chrono::steady_clock;

namespace {

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}
std::string name_of(std::uint64_t n) {
  return "/" + key_of(n).text() + ".kv";
}
/// A file is used by now, one of these after the other, whatever the clock's steps are.
void age(const Folder& folder, std::uint64_t n, long nanoseconds) {
  const timespec then[2] = {{1000000, nanoseconds}, {1000000, nanoseconds}};
  REQUIRE(::utimensat(AT_FDCWD, (folder.path + name_of(n)).c_str(), then, 0) == 0);
}
void ignore(const TierStore::Key&, bool) {}

}  // namespace

TEST_CASE("what has the name of a record and is none is not found, not waited for and replaced") {
  const Folder folder;
  FileTier files(folder.path, 1 << 20);
  const auto at = [&](std::uint64_t n) { return folder.path + name_of(n); };
  int num = 0;
  std::uint64_t bytes = 0;
  const auto check = [&](bool replaced = true) {
    const auto n = static_cast<std::uint64_t>(num);
    CAPTURE(num);
    const auto start = Clock::now();
    CHECK_FALSE(files.contains(key_of(n)));
    CHECK_FALSE(files.get(key_of(n), never));
    FileTier next(folder.path, 1 << 20);  // it counts, and only records
    CHECK(next.num_bytes() == bytes);
    bytes += replaced ? 1000u : 0u;
    CHECK(files.put(key_of(n), bytes_of(n, 1000), never) == replaced);
    CHECK(files.num_bytes() == bytes);
    CHECK(files.contains(key_of(n)) == replaced);
    CHECK(seconds_since(start) < 5);
    ++num;
  };
  const auto here = [&] { return at(static_cast<std::uint64_t>(num)); };
  REQUIRE(::mkfifo(here().c_str(), 0600) == 0);
  check();
  std::filesystem::create_symlink("/dev/zero", here());
  check();
  std::filesystem::create_symlink(here(), here());
  check();
  std::filesystem::create_symlink(at(0), here());  // to a record: under that name it is another's
  check();
  const int socket = ::socket(AF_UNIX, SOCK_STREAM, 0);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  REQUIRE(here().size() < sizeof(address.sun_path));
  std::strcpy(address.sun_path, here().c_str());
  REQUIRE(::bind(socket, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0);
  check();
  ::close(socket);
  std::filesystem::create_directories(here() + "/within");
  check(/*replaced=*/false);
  CHECK(std::filesystem::exists(at(5) + "/within"));
  if (::geteuid() == 0) {
    std::printf("skipped: a file that may not be read: root may read anything\n");
  } else {
    std::ofstream(here()) << "x";
    REQUIRE(::chmod(here().c_str(), 0000) == 0);
    check();
  }
}

TEST_CASE("a directory that is made and its files are their owner's alone") {
  const Folder folder;
  const std::string path = folder.path + "/tier";
  FileTier files(path, 1000);
  REQUIRE(files.put(key_of(1), bytes_of(1, 100), never));
  const auto mode_of = [](const std::string& name) {
    struct stat status{};
    REQUIRE(::stat(name.c_str(), &status) == 0);
    return static_cast<int>(status.st_mode & 0777);
  };
  CHECK(mode_of(path) == 0700);
  CHECK(mode_of(path + name_of(1)) == 0600);
  CHECK(mode_of(path + "/.size") == 0600);
}

TEST_CASE("of a file that is too long only so much is read that this is seen") {
  const Folder folder;
  constexpr std::uint64_t huge = std::uint64_t{2} << 30;
  FileTier files(folder.path, 2 * huge);
  const std::string path = folder.path + name_of(1);
  std::ofstream(path).put('x');
  std::filesystem::resize_file(path, huge);  // a hole
  const auto cut = files.get_at_most(key_of(1), 5000, never);
  REQUIRE(cut);
  CHECK(cut->size() == 5001);
  CHECK((*cut)[0] == std::byte{'x'});
  std::filesystem::resize_file(path, 5001);
  CHECK(files.get_at_most(key_of(1), 5000, never)->size() == 5001);
  std::filesystem::resize_file(path, 5000);
  CHECK(files.get_at_most(key_of(1), 5000, never)->size() == 5000);
  std::filesystem::resize_file(path, 0);
  CHECK(files.get_at_most(key_of(1), 5000, never)->empty());
  CHECK(files.get(key_of(1), never)->empty());
  CHECK(files.put(key_of(1), bytes_of(1, 100), never));
  CHECK(*files.get(key_of(1), never) == *bytes_of(1, 100));

  // One that is longer than all records together may be goes first: it would leave no room.
  FileTier small(folder.path, 10000);
  for (const std::uint64_t n : {2u, 3u}) {
    CHECK(small.put(key_of(n), bytes_of(n, 1000), never));
    age(folder, n, static_cast<long>(n));
  }
  std::filesystem::resize_file(path, huge);
  CHECK_FALSE(small.get(key_of(1), never));
  CHECK_FALSE(small.contains(key_of(1)));
  FileTier next(folder.path, 10000);
  CHECK_FALSE(std::filesystem::exists(path));
  CHECK(next.num_bytes() == 2000);
}

TEST_CASE("tiers read no more of a file than the record of their block has") {
  const Folder folder;
  constexpr std::uint64_t huge = std::uint64_t{2} << 30;
  const auto files = std::make_shared<FileTier>(folder.path, 2 * huge);
  test::tier_bench::Bench b({files}, {.max_wait_seconds = 60});
  const auto prompt = test::iota(0, 64);
  b.run(prompt);
  b.evict_all();
  b.tiers->flush();
  for (const auto& entry : std::filesystem::directory_iterator(folder.path))
    if (entry.path().extension() == ".kv") std::filesystem::resize_file(entry.path(), huge);
  const auto most_used = [] {
    rusage used{};
    REQUIRE(::getrusage(RUSAGE_SELF, &used) == 0);
    return used.ru_maxrss;
  };
  const auto before = most_used();
  CHECK(b.load(prompt) == 0);
  CHECK(most_used() - before < (huge >> 10) / 8);
  CHECK(b.tiers->stats().tiers[0].refused == 1);
  CHECK(folder.files() == 7);  // it forgets what it was seen to have wrong
}

TEST_CASE("what has no record's name is left alone, however much of it there is") {
  const Folder folder;
  constexpr int many = 100000;
  const std::string hex(32, 'a');
  std::vector<std::string> others{"notes.kv",
                                  std::string(250, 'a') + ".kv",
                                  hex,
                                  hex + "a.kv",
                                  hex + ".kv.kv",
                                  std::string(32, 'A') + ".kv",
                                  hex + "-.kv",
                                  "x" + hex.substr(1) + ".kv",
                                  ".hidden.kv",
                                  ".part",
                                  "a.part-1-1-1.kv",
                                  ".kv"};
  for (const std::string& name : others)
    std::ofstream(folder.path + "/" + name) << std::string(1000, 'x');
  const int directory = ::open(folder.path.c_str(), O_RDONLY | O_DIRECTORY);
  for (int i = 0; i < many; ++i)
    ::close(::openat(directory, std::to_string(i).c_str(), O_WRONLY | O_CREAT, 0600));
  ::close(directory);
  const auto start = Clock::now();
  FileTier files(folder.path, 10000);
  CHECK(files.num_bytes() == 0);
  for (std::uint64_t n = 1; n <= 50; ++n) {
    CHECK(files.put(key_of(n), bytes_of(n, 1000), never));
    CHECK(files.num_bytes() <= 10000);
  }
  CHECK(seconds_since(start) < 60);
  for (const std::string& name : others) CHECK(std::filesystem::exists(folder.path + "/" + name));
  CHECK(folder.files("") == many + others.size() + 1 + files.num_bytes() / 1000);
}

TEST_CASE("a process stopped with the lock stops no other for longer than the limit") {
  const Folder folder;
  constexpr std::chrono::milliseconds limit(200);
  TierDirectory files(folder.path, 10000, &ignore, limit);
  CHECK(files.put(key_of(1), *bytes_of(1, 100), never));
  CHECK(files.put(key_of(2), *bytes_of(2, 100), never));
  int ready[2];
  REQUIRE(::pipe(ready) == 0);
  const pid_t child = ::fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    ::alarm(60);
    const int lock = ::open((folder.path + "/.size").c_str(), O_RDWR);
    const bool held = lock >= 0 && ::flock(lock, LOCK_EX) == 0;
    (void)(::write(ready[1], &held, 1) == 1);
    ::raise(SIGSTOP);
    ::_exit(0);
  }
  bool held = false;
  REQUIRE(::read(ready[0], &held, 1) == 1);
  REQUIRE(held);
  const auto start = Clock::now();
  CHECK(files.get(key_of(1), 1000, never));  // takes no lock
  CHECK(files.contains(key_of(1)));
  CHECK(seconds_since(start) < 0.2);
  CHECK_FALSE(files.put(key_of(3), *bytes_of(3, 100), never));
  CHECK(seconds_since(start) >= 0.2);
  CHECK(folder.files(".part-") == 0);
  files.erase(key_of(1));
  CHECK_FALSE(files.contains(key_of(1)));
  CHECK(test::refused([&] { TierDirectory(folder.path, 10000, &ignore, limit); }) ==
        "path = " + folder.path +
            ": expected a directory that no process keeps locked, as one did its file .size for "
            "200 ms");
  CHECK(seconds_since(start) < 30);
  REQUIRE(::kill(child, SIGKILL) == 0);
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  CHECK(files.num_bytes() == 200);  // erased while it could not be counted
  CHECK(files.put(key_of(3), *bytes_of(3, 100), never));
  TierDirectory next(folder.path, 10000, &ignore, limit);
  CHECK(next.num_bytes() == 200);
  ::close(ready[0]);
  ::close(ready[1]);
}

TEST_CASE("a lock that was inherited by a child of fork() is its parent's alone") {
  const Folder folder;
  FileTier files(folder.path, 100000);
  // Parent and child count in turns: neither has the lock while the other does.
  constexpr int rounds = 300;
  const auto work = [&](std::uint64_t first) {
    for (std::uint64_t i = 0; i < rounds; ++i)
      if (!files.put(key_of(first + i % 20), bytes_of(i, 100), never)) return 1;
    return 0;
  };
  const pid_t child = ::fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    ::alarm(60);
    ::_exit(work(100));
  }
  CHECK(work(200) == 0);
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
  CHECK(files.num_bytes() == 40 * 100);
}

TEST_CASE("a child that was made while the lock was held keeps it from no other") {
  const Folder folder;
  pid_t child = -1;
  TierDirectory files(folder.path, 1000, [&](const TierStore::Key&, bool) {
    child = ::fork();
    if (child == 0) {
      ::alarm(60);
      for (;;) ::pause();
    }
  });
  CHECK(files.put(key_of(1), *bytes_of(1, 100), never));
  REQUIRE(child > 0);
  TierDirectory other(folder.path, 1000, ignore, std::chrono::milliseconds(100));
  CHECK(other.put(key_of(2), *bytes_of(2, 100), never));
  CHECK(other.num_bytes() == 200);
  (void)::kill(child, SIGKILL);
  (void)::waitpid(child, nullptr, 0);
}

TEST_CASE("the lock's file may be the process's first") {
  const Folder folder;
  const int result = test::in_child([&] {
    FileTier files(folder.path, 1000);
    ::close(0);
    return files.put(key_of(1), bytes_of(1, 100), never) && files.num_bytes() == 100 ? 0 : 1;
  });
  CHECK(result == 0);
}

TEST_CASE("a file of sizes that is none") {
  for (const bool is_fifo : {true, false}) {
    const Folder folder;
    const std::string size = folder.path + "/.size";
    if (is_fifo)
      REQUIRE(::mkfifo(size.c_str(), 0600) == 0);
    else
      std::filesystem::create_directory(size);
    CHECK(test::refused([&] { FileTier(folder.path, 1000); }) ==
          "path = " + folder.path + ": expected a directory that can be written, or can be made");
  }
}

TEST_CASE("a file of sizes that is replaced by something else") {
  const Folder folder;
  const std::string size = folder.path + "/.size";
  FileTier files(folder.path, 1000);
  for (const std::uint64_t n : {1u, 2u}) REQUIRE(files.put(key_of(n), bytes_of(n, 100), never));
  std::filesystem::remove(size);
  std::filesystem::create_directories(size + "/within");
  CHECK_FALSE(files.put(key_of(3), bytes_of(3, 100), never));  // it could not be counted
  CHECK_FALSE(files.contains(key_of(3)));
  CHECK(folder.files(".part-") == 0);
  CHECK(*files.get(key_of(1), never) == *bytes_of(1, 100));
  files.erase(key_of(1));
  CHECK_FALSE(files.contains(key_of(1)));
  CHECK(files.num_bytes() > 1000);  // as many as make the next who can count do so
  std::filesystem::remove_all(size);
  CHECK(files.put(key_of(3), bytes_of(3, 100), never));
  CHECK(files.num_bytes() == 200);
}

TEST_CASE("what could not be counted is counted again") {
  const Folder folder;
  FileTier files(folder.path, 1000);
  for (const std::uint64_t n : {1u, 2u}) REQUIRE(files.put(key_of(n), bytes_of(n, 100), never));
  rlimit before{};
  REQUIRE(::getrlimit(RLIMIT_FSIZE, &before) == 0);
  const rlimit none{0, before.rlim_max};
  const auto handler = ::signal(SIGXFSZ, SIG_IGN);
  REQUIRE(::setrlimit(RLIMIT_FSIZE, &none) == 0);  // no byte can be written
  files.erase(key_of(1));
  REQUIRE(::setrlimit(RLIMIT_FSIZE, &before) == 0);
  (void)::signal(SIGXFSZ, handler);
  CHECK_FALSE(files.contains(key_of(1)));
  CHECK(files.put(key_of(3), bytes_of(3, 100), never));
  CHECK(files.num_bytes() == 200);
}

TEST_CASE("files that another process removes meanwhile make room as well, others do not") {
  for (const bool is_gone : {true, false}) {
    const Folder folder;
    const std::string path = folder.path + name_of(2);
    TierDirectory files(folder.path, 1000, [&](const TierStore::Key& key, bool is_there) {
      if (is_there || key != key_of(1)) return;
      std::filesystem::remove(path);
      if (!is_gone) std::filesystem::create_directory(path);  // which is not removed as a file is
    });
    for (std::uint64_t n = 1; n <= 10; ++n) {
      REQUIRE(files.put(key_of(n), *bytes_of(n, 100), never));
      age(folder, n, static_cast<long>(n));
    }
    CHECK(files.put(key_of(11), *bytes_of(11, 100), never));
    CHECK(files.num_bytes() == 900);
    CHECK(folder.files() == 9);
    CHECK(files.contains(key_of(3)) == is_gone);
    CHECK(files.contains(key_of(4)));
  }
}

TEST_CASE("what was used in an earlier second goes first") {
  const Folder folder;
  FileTier files(folder.path, 1000);
  for (const std::uint64_t n : {1u, 2u}) {
    REQUIRE(files.put(key_of(n), bytes_of(n, 400), never));
    const auto second = static_cast<std::time_t>(1000000 - n);
    const timespec then[2] = {{second, 10 + static_cast<long>(n)},
                              {second, 10 + static_cast<long>(n)}};
    REQUIRE(::utimensat(AT_FDCWD, (folder.path + name_of(n)).c_str(), then, 0) == 0);
  }
  REQUIRE(files.put(key_of(3), bytes_of(3, 400), never));
  CHECK(files.contains(key_of(1)));
  CHECK_FALSE(files.contains(key_of(2)));
}

// ---- a disk that is full
// -------------------------------------------------------------------------

namespace {

/// Puts of records of mixed sizes on a disk that holds about ten of them.
void fill(const Folder& folder, FileTier& files, std::uint64_t largest_disk) {
  for (std::uint64_t n = 1; n <= 60; ++n) {
    CAPTURE(n);
    const std::size_t size = n % 5 == 0 ? 20000 : 9000;
    const std::size_t files_before = folder.files();
    const std::uint64_t bytes_before = files.num_bytes();
    CHECK(files.put(key_of(n), bytes_of(n, size), never));
    age(folder, n, static_cast<long>(n));
    CHECK(*files.get(key_of(n), never) == *bytes_of(n, size));
    age(folder, n, static_cast<long>(n));
    CHECK(files.num_bytes() <= largest_disk);
    // No more goes than what has to: less than the record and one more.
    CHECK(files.num_bytes() + 20000 >= bytes_before);
    CHECK(folder.files() + 3 >= files_before);
    CHECK(folder.files(".part-") == 0);
    std::uint64_t counted = 0;
    for (const auto& entry : std::filesystem::directory_iterator(folder.path))
      if (entry.path().extension() == ".kv") counted += entry.file_size();
    CHECK(files.num_bytes() == counted);
    // Those that are there are the last ones.
    bool seen = false;
    for (std::uint64_t m = 1; m <= n; ++m) {
      CHECK((files.contains(key_of(m)) || !seen));
      seen = seen || files.contains(key_of(m));
    }
  }
  CHECK(folder.files() >= 4);
}

}  // namespace

#if defined(__linux__)
TEST_CASE("what is read or written in part only is nothing") {
  const Folder folder;
  FileTier files(folder.path, 1000);
  REQUIRE(files.put(key_of(1), bytes_of(1, 100), never));
  next_reads = {EIO, EINTR};  // the last one first
  CHECK_FALSE(files.get(key_of(1), never));
  CHECK(next_reads.empty());
  next_reads = {-EINTR};  // it has become shorter
  CHECK_FALSE(files.get(key_of(1), never));
  next_reads = {EINTR, EINTR};
  CHECK(*files.get(key_of(1), never) == *bytes_of(1, 100));
  SmallDisk full{folder.path, 0, 0};  // its writes write nothing, for no reason
  SmallDisk::current = &full;
  CHECK_FALSE(files.put(key_of(2), bytes_of(2, 100), never));
  SmallDisk::current = nullptr;
  CHECK_FALSE(files.contains(key_of(2)));
  CHECK(files.num_bytes() == 100);
}

TEST_CASE("where the disk is full, the least recently used make room") {
  for (const int error : {ENOSPC, EDQUOT}) {
    const Folder folder;
    FileTier files(folder.path, std::uint64_t{1} << 30);
    SmallDisk disk{folder.path, 100000, error};
    SmallDisk::current = &disk;
    fill(folder, files, 100000);
    // Nothing goes for a record that another error stops, or that no room would be enough for.
    const std::size_t before = folder.files();
    disk.error = EIO;
    CHECK_FALSE(files.put(key_of(1000), bytes_of(0, 50000), never));
    CHECK(folder.files() == before);
    disk.error = error;
    CHECK(files.put(key_of(1001), bytes_of(0, 100000), never));
    CHECK(folder.files() == 1);
    CHECK_FALSE(files.put(key_of(1002), bytes_of(0, 100001), never));
    CHECK(folder.files(".part-") == 0);
    // A foreign file leaves room for nothing: that ends, too.
    std::filesystem::remove(folder.path + name_of(1001));
    std::filesystem::resize_file(folder.path + "/.size", 0);
    std::ofstream(folder.path + "/others") << std::string(100000, 'x') << std::flush;
    SmallDisk::current = nullptr;
    std::filesystem::resize_file(folder.path + "/others", 100000);
    SmallDisk::current = &disk;
    CHECK_FALSE(files.put(key_of(1003), bytes_of(0, 10), never));
    CHECK(std::filesystem::exists(folder.path + "/others"));
    SmallDisk::current = nullptr;
  }
}

TEST_CASE("a file system that is full") {
  const int result = test::in_child([] {
    if (::unshare(CLONE_NEWNS) != 0 && ::unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0) return 77;
    const Folder mount;
    if (::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0) return 77;
    if (::mount("none", mount.path.c_str(), "tmpfs", 0, "size=131072") != 0) return 77;
    FileTier files(mount.path, std::uint64_t{1} << 30);
    std::size_t kept = 0;
    for (std::uint64_t n = 1; n <= 200; ++n) {
      if (!files.put(key_of(n), bytes_of(n, 10000), never)) return 1;
      if (!files.contains(key_of(n))) return 2;
      if (mount.files() < kept) return 3;
      kept = mount.files();
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    if (kept < 8 || mount.files(".part-") != 0) return 4;
    if (files.contains(key_of(1)) || !files.contains(key_of(200 - 6))) return 5;
    (void)::umount2(mount.path.c_str(), MNT_DETACH);
    return 0;
  });
  if (result == 77)
    std::printf("skipped: a file system that is full: this user may not mount one\n");
  else
    CHECK(result == 0);
}
#endif
