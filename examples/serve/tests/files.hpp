// Files for tests: temporary ones, a GGUF writer, and where the models of the tests lie.
#pragma once

#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <string_view>
#include <vector>

namespace test {

using Bytes = std::vector<unsigned char>;

inline std::string read_text(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

/// A file that is deleted at the end of the test.
class TemporaryFile {
 public:
  explicit TemporaryFile(const std::string& name = "file")
      : path_((std::filesystem::temp_directory_path() /
               ("chunkattn-serve-" + std::to_string(::getpid()) + "-" + name))
                  .string()) {}
  explicit TemporaryFile(const Bytes& bytes) : TemporaryFile() { write(bytes); }
  ~TemporaryFile() { std::filesystem::remove(path_); }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;

  [[nodiscard]] const std::string& path() const { return path_; }
  void write(const Bytes& bytes) const {
    write(std::string_view(reinterpret_cast<const char*>(bytes.data()), bytes.size()));
  }
  void write(std::string_view text) const {
    std::ofstream(path_, std::ios::binary)
        .write(text.data(), static_cast<std::streamsize>(text.size()));
  }

 private:
  std::string path_;
};

/// Writes GGUF files of version 3, right or wrong. Remembers where each field begins.
class GgufWriter {
 public:
  template <class T>
  static void put(Bytes& to, T value) {
    const std::size_t at = to.size();
    to.resize(at + sizeof value);
    std::memcpy(to.data() + at, &value, sizeof value);
  }
  static void put_text(Bytes& to, std::string_view text) {
    put(to, static_cast<std::uint64_t>(text.size()));
    to.insert(to.end(), text.begin(), text.end());
  }

  void integer(std::string_view key, std::uint32_t value) { begin(key, 4), put(metadata_, value); }
  void real(std::string_view key, float value) { begin(key, 6), put(metadata_, value); }
  void flag(std::string_view key, bool value) {
    begin(key, 7), put(metadata_, static_cast<std::uint8_t>(value ? 1 : 0));
  }
  void text(std::string_view key, std::string_view value) {
    begin(key, 8), put_text(metadata_, value);
  }
  void texts(std::string_view key, const std::vector<std::string>& values) {
    begin_array(key, 8, values.size());
    for (const std::string& value : values) {
      starts_.push_back(metadata_.size());
      put_text(metadata_, value);
    }
  }
  template <class T>
  void numbers(std::string_view key, std::uint32_t type, const std::vector<T>& values) {
    begin_array(key, type, values.size());
    for (const T value : values) put(metadata_, value);
  }
  /// \param outputs  0 for a vector
  void tensor(std::string_view name, std::uint32_t type, std::uint64_t inputs,
              std::uint64_t outputs, const Bytes& data) {
    starts_directory_.push_back(directory_.size());
    put_text(directory_, name);
    put(directory_, std::uint32_t{outputs == 0 ? 1u : 2u});
    put(directory_, inputs);
    if (outputs != 0) put(directory_, outputs);
    put(directory_, type);
    put(directory_, static_cast<std::uint64_t>(data_.size()));
    data_.insert(data_.end(), data.begin(), data.end());
    data_.resize((data_.size() + 31) / 32 * 32);
    ++tensors_;
  }
  void floats(std::string_view name, std::uint64_t inputs, std::uint64_t outputs,
              const std::vector<float>& values) {
    Bytes data(values.size() * sizeof(float));
    std::memcpy(data.data(), values.data(), data.size());
    tensor(name, 0, inputs, outputs, data);
  }

  [[nodiscard]] Bytes bytes() const {
    Bytes all{'G', 'G', 'U', 'F'};
    put(all, std::uint32_t{3});
    put(all, std::uint64_t{tensors_});
    put(all, std::uint64_t{keys_});
    all.insert(all.end(), metadata_.begin(), metadata_.end());
    all.insert(all.end(), directory_.begin(), directory_.end());
    all.resize((all.size() + 31) / 32 * 32);
    all.insert(all.end(), data_.begin(), data_.end());
    return all;
  }
  /// Where fields begin, in bytes(); the last is where the data of tensors begin.
  [[nodiscard]] std::vector<std::size_t> boundaries() const {
    constexpr std::size_t header = 24;
    std::vector<std::size_t> all{0, 4, 8, 16};
    for (const std::size_t at : starts_) all.push_back(header + at);
    for (const std::size_t at : starts_directory_) all.push_back(header + metadata_.size() + at);
    all.push_back(header + metadata_.size() + directory_.size());
    all.push_back((all.back() + 31) / 32 * 32);
    return all;
  }

 private:
  void begin(std::string_view key, std::uint32_t type) {
    starts_.push_back(metadata_.size());
    put_text(metadata_, key);
    starts_.push_back(metadata_.size());
    put(metadata_, type);
    starts_.push_back(metadata_.size());
    ++keys_;
  }
  void begin_array(std::string_view key, std::uint32_t type, std::size_t count) {
    begin(key, 9);
    put(metadata_, type);
    put(metadata_, static_cast<std::uint64_t>(count));
  }

  Bytes metadata_, directory_, data_;
  std::vector<std::size_t> starts_, starts_directory_;
  std::uint64_t keys_ = 0, tensors_ = 0;
};

/// The folder of the recorded texts and their small model; empty, with a message, where there is
/// none.
inline std::string stories_folder() {
  const char* data = std::getenv("CHUNKATTN_DATA");
  const std::string folder =
      (data != nullptr ? std::string(data) : SERVE_REPOSITORY "/../shared") + "/models";
  if (std::filesystem::exists(folder + "/stories260K.bin") &&
      std::filesystem::exists(folder + "/tok512.bin"))
    return folder;
  std::printf("skipped: no stories260K.bin and tok512.bin in %s; set CHUNKATTN_DATA\n",
              folder.c_str());
  return "";
}

/// SmolLM2-135M-Instruct as `./dev model` fetches it; empty, with a message, where it is not.
inline std::string smollm2_file() {
  const char* models = std::getenv("CHUNKATTN_MODELS");
  const std::string file =
      (models != nullptr ? std::string(models) : SERVE_REPOSITORY "/build/models") +
      "/SmolLM2-135M-Instruct.Q4_1.gguf";
  if (std::filesystem::exists(file)) return file;
  std::printf(
      "skipped: no SmolLM2-135M-Instruct.Q4_1.gguf: ./dev model fetches it, and "
      "CHUNKATTN_MODELS names its folder\n");
  return "";
}

}  // namespace test
