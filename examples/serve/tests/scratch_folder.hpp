// A folder for a test's files, which goes with it.
#pragma once

#include <doctest/doctest.h>
#include <stdlib.h>

#include <filesystem>
#include <string>

namespace test {

struct ScratchFolder {
  ScratchFolder() : path((std::filesystem::temp_directory_path() / "serve-tiers-XXXXXX").string()) {
    REQUIRE(::mkdtemp(path.data()) != nullptr);
  }
  ScratchFolder(const ScratchFolder&) = delete;
  ScratchFolder& operator=(const ScratchFolder&) = delete;
  ~ScratchFolder() { std::filesystem::remove_all(path); }
  std::string path;
};

}  // namespace test
