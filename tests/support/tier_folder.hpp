// A directory for records, and records to put there.
#pragma once

#include <doctest/doctest.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "chunkattn/tiers/tier_store.hpp"

namespace test::tier_folder {

inline const std::atomic<bool> never = false;

/// A directory of a test's own.
struct Folder {
  Folder() {
    do {
      path =
          (std::filesystem::temp_directory_path() / ("tiers-" + std::to_string(random()))).string();
    } while (!std::filesystem::create_directory(path));
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  ~Folder() { std::filesystem::remove_all(path); }
  /// How many have this in their names.
  [[nodiscard]] std::size_t files(const std::string& with = ".kv") const {
    std::size_t n = 0;
    for (const auto& entry : std::filesystem::directory_iterator(path))
      n += entry.path().filename().string().find(with) != std::string::npos ? 1u : 0u;
    return n;
  }
  std::string path;

 private:
  std::random_device random;
};

inline chunkattn::TierStore::Record bytes_of(std::uint64_t n, std::size_t size) {
  std::vector<std::byte> bytes(size);
  for (std::size_t i = 0; i < size; ++i) bytes[i] = static_cast<std::byte>((n * 31 + i) & 255);
  return std::make_shared<const std::vector<std::byte>>(std::move(bytes));
}
inline chunkattn::TierStore::Key key_of(std::uint64_t n) {
  return {n * 0x9e3779b97f4a7c15u, n};
}

}  // namespace test::tier_folder
