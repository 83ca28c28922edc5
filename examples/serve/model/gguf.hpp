// GGUF: metadata by key and tensors by name, in a file that is mapped and not copied.
//
// Every length and offset of the file is checked against the file before it is used: nothing here
// reads past the mapping, and nothing is allocated that the file does not have the bytes for.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "mapped_file.hpp"

namespace serve {

/// How a tensor's elements are stored, by the numbers of the format.
enum class TensorType : std::uint32_t {
  f32 = 0,
  f16 = 1,
  q4_0 = 2,
  q4_1 = 3,
  q5_0 = 6,
  q5_1 = 7,
  q8_0 = 8,
  q4_k = 12,
  q5_k = 13,
  q6_k = 14,
  iq4_nl = 20,
  bf16 = 30
};

/// A matrix [outputs][inputs] as it lies in the file; a vector has one output.
struct Tensor {
  TensorType type = TensorType::f32;
  std::size_t outputs = 0, inputs = 0;
  std::span<const std::byte> bytes;
};

class Gguf {
 public:
  /// \param path  of a file, or of the first of those that a model was split into,
  ///              "NAME-00001-of-00003.gguf": the others are looked for beside it
  /// \throws FileError that names the field which is wrong
  explicit Gguf(const std::string& path);

  [[nodiscard]] const std::string& path() const { return file_.path(); }
  [[nodiscard]] bool has(std::string_view key) const { return values_.find(key) != values_.end(); }

  // Each of these throws FileError, which names the key, where the value is of another kind or out
  // of range; those without a default also where there is none.
  [[nodiscard]] std::int64_t integer(std::string_view key, std::int64_t least,
                                     std::int64_t most) const;
  [[nodiscard]] std::int64_t integer(std::string_view key, std::int64_t least, std::int64_t most,
                                     std::int64_t otherwise) const;
  [[nodiscard]] double real(std::string_view key, double otherwise) const;
  [[nodiscard]] bool flag(std::string_view key, bool otherwise) const;
  [[nodiscard]] std::string_view text(std::string_view key) const;
  [[nodiscard]] std::string_view text(std::string_view key, std::string_view otherwise) const;
  [[nodiscard]] std::span<const std::string_view> texts(std::string_view key) const;
  [[nodiscard]] std::span<const double> numbers(std::string_view key) const;

  [[nodiscard]] bool has_tensor(std::string_view name) const {
    return tensors_.find(name) != tensors_.end();
  }
  /// \throws FileError unless there is one of this name and shape
  [[nodiscard]] const Tensor& tensor(std::string_view name, std::size_t outputs,
                                     std::size_t inputs) const;

  /// All of them, in alphabetical order.
  [[nodiscard]] std::vector<std::string_view> tensor_names() const;

  [[noreturn]] void fail(std::string_view field, const std::string& value,
                         const std::string& expected) const;

 private:
  using Texts = std::vector<std::string_view>;
  using Numbers = std::vector<double>;  // integers up to 2^53 exactly, more than any array here has
  using Value = std::variant<std::int64_t, double, bool, std::string_view, Texts, Numbers>;

  struct Alone {};  // without the other parts
  Gguf(const std::string& path, Alone);
  void add_parts();
  void read_metadata(FieldReader& reader, std::uint64_t count);
  void read_tensors(FieldReader& reader, std::uint64_t count);
  static Value read_value(FieldReader& reader, std::uint32_t type, const std::string& field);
  static Value read_array(FieldReader& reader, const std::string& field);
  template <class T>
  const T& value(std::string_view key, const char* kind) const;

  MappedFile file_;
  std::map<std::string_view, Value, std::less<>> values_;
  std::map<std::string_view, Tensor, std::less<>> tensors_;  // of all parts
  std::vector<Gguf> parts_;                                  // after this one
};

}  // namespace serve
