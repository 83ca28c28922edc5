#include "gguf.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <utility>

#include "dequantise.hpp"

namespace serve {

namespace {

constexpr std::string_view gguf_format = "a GGUF file that this program reads";

// The numbers that the format gives to the types of values.
enum ValueType : std::uint32_t {
  u8,
  i8,
  u16,
  i16,
  u32,
  i32,
  f32,
  boolean,
  string,
  array,
  u64,
  i64,
  f64
};

std::string_view read_string(FieldReader& reader, const std::string& field) {
  const auto length = reader.number<std::uint64_t>(field + " (length)");
  return reader.text(length, field);
}

std::int64_t read_u64(FieldReader& reader, const std::string& field) {
  const auto number = reader.number<std::uint64_t>(field);
  if (number > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max()))
    reader.fail(field, std::to_string(number), "less than 2^63");
  return static_cast<std::int64_t>(number);
}

bool read_boolean(FieldReader& reader, const std::string& field) {
  const auto byte = reader.number<std::uint8_t>(field);
  if (byte > 1) reader.fail(field, std::to_string(byte), "0 or 1");
  return byte == 1;
}

/// Bytes of one number of an array; 0 for what arrays of numbers do not have.
std::size_t number_bytes(std::uint32_t type) {
  switch (type) {
    case u8:
    case i8:
    case boolean:
      return 1;
    case u16:
    case i16:
      return 2;
    case u32:
    case i32:
    case f32:
      return 4;
    case u64:
    case i64:
    case f64:
      return 8;
    default:
      return 0;
  }
}

}  // namespace

Gguf::Value Gguf::read_value(FieldReader& reader, std::uint32_t type, const std::string& field) {
  switch (type) {
    case u8:
      return std::int64_t{reader.number<std::uint8_t>(field)};
    case i8:
      return std::int64_t{reader.number<std::int8_t>(field)};
    case u16:
      return std::int64_t{reader.number<std::uint16_t>(field)};
    case i16:
      return std::int64_t{reader.number<std::int16_t>(field)};
    case u32:
      return std::int64_t{reader.number<std::uint32_t>(field)};
    case i32:
      return std::int64_t{reader.number<std::int32_t>(field)};
    case u64:
      return read_u64(reader, field);
    case i64:
      return reader.number<std::int64_t>(field);
    case f32:
      return double{reader.number<float>(field)};
    case f64:
      return reader.number<double>(field);
    case boolean:
      return read_boolean(reader, field);
    case string:
      return read_string(reader, field);
    case array:
      return read_array(reader, field);
    default:
      reader.fail(field + " (type)", std::to_string(type), "0 to 12");
  }
}

Gguf::Value Gguf::read_array(FieldReader& reader, const std::string& field) {
  const auto type = reader.number<std::uint32_t>(field + " (element type)");
  const auto count = reader.number<std::uint64_t>(field + " (elements)");
  const std::size_t least_bytes = type == string ? sizeof(std::uint64_t) : number_bytes(type);
  if (least_bytes == 0)
    reader.fail(field + " (element type)", std::to_string(type), "numbers or strings");
  if (count > reader.left() / least_bytes)
    reader.fail(field + " (elements)", std::to_string(count),
                "no more than " + std::to_string(reader.left() / least_bytes) +
                    ", which the rest of the file has room for; it may be truncated");
  if (type == string) {
    Texts texts(count);
    for (std::size_t i = 0; i < count; ++i)
      texts[i] = read_string(reader, field + "[" + std::to_string(i) + "]");
    return texts;
  }
  Numbers numbers(count);
  for (std::size_t i = 0; i < count; ++i) {
    const Value one = read_value(reader, type, field + "[" + std::to_string(i) + "]");
    if (const auto* real = std::get_if<double>(&one))
      numbers[i] = *real;
    else if (const auto* flag = std::get_if<bool>(&one))
      numbers[i] = *flag ? 1 : 0;
    else
      numbers[i] = static_cast<double>(std::get<std::int64_t>(one));
  }
  return numbers;
}

void Gguf::read_metadata(FieldReader& reader, std::uint64_t count) {
  for (std::uint64_t i = 0; i < count; ++i) {
    const std::string number = "key " + std::to_string(i);
    const std::string_view key = read_string(reader, number);
    if (key.empty() || key.size() > 65535)
      reader.fail(number + " (length)", std::to_string(key.size()), "1 to 65535");
    const std::string field(key);
    const auto type = reader.number<std::uint32_t>(field + " (type)");
    if (!values_.emplace(key, read_value(reader, type, field)).second)
      reader.fail(field, "given twice", "each key once");
  }
}

void Gguf::read_tensors(FieldReader& reader, std::uint64_t count) {
  struct Entry {
    std::string field;
    Tensor* tensor;
    std::uint64_t offset;
  };
  std::vector<Entry> entries;
  for (std::uint64_t i = 0; i < count; ++i) {
    const std::string_view name = read_string(reader, "tensor " + std::to_string(i));
    const std::string field = "tensor " + std::string(name);
    const auto [at, is_new] = tensors_.try_emplace(name);
    if (!is_new) reader.fail(field, "given twice", "each tensor once");
    Tensor& tensor = at->second;
    const auto dimensions = reader.number<std::uint32_t>(field + " (dimensions)");
    if (dimensions < 1 || dimensions > 2)
      reader.fail(field + " (dimensions)", std::to_string(dimensions), "1 or 2");
    const auto read_size = [&](const char* which) {
      const auto size = reader.number<std::uint64_t>(field + which);
      if (size < 1 || size > (std::uint64_t{1} << 30))
        reader.fail(field + which, std::to_string(size), "1 to 2^30");
      return static_cast<std::size_t>(size);
    };
    tensor.inputs = read_size(" (first dimension)");
    tensor.outputs = dimensions == 2 ? read_size(" (second dimension)") : 1;
    const auto type = reader.number<std::uint32_t>(field + " (type)");
    if (!is_readable(type)) reader.fail(field + " (type)", std::to_string(type), readable_types);
    tensor.type = static_cast<TensorType>(type);
    if (tensor.inputs % block_of(tensor.type).elements != 0)
      reader.fail(field + " (first dimension)", std::to_string(tensor.inputs),
                  "a multiple of " + std::to_string(block_of(tensor.type).elements));
    entries.push_back({field, &tensor, reader.number<std::uint64_t>(field + " (offset)")});
  }

  const auto alignment = static_cast<std::size_t>(integer("general.alignment", 1, 65536, 32));
  if (!std::has_single_bit(alignment))
    reader.fail("general.alignment", std::to_string(alignment), "a power of two");
  const auto aligned = [alignment](std::size_t n) {
    return (n + alignment - 1) & ~(alignment - 1);
  };
  const std::size_t size = file_.bytes().size();
  const std::size_t data = std::min(aligned(reader.position()), size);
  for (const Entry& entry : entries) {
    const Block block = block_of(entry.tensor->type);
    const std::size_t bytes =
        entry.tensor->outputs * (entry.tensor->inputs / block.elements * block.bytes);
    if (entry.offset % alignment != 0)
      reader.fail(entry.field + " (offset)", std::to_string(entry.offset),
                  "a multiple of general.alignment, " + std::to_string(alignment));
    if (entry.offset > size - data || bytes > size - data - entry.offset)
      reader.fail(entry.field, std::to_string(bytes) + " bytes at " + std::to_string(entry.offset),
                  "to lie within the " + std::to_string(size - data) +
                      " bytes of data; the file may be truncated");
    entry.tensor->bytes = file_.bytes().subspan(data + entry.offset, bytes);
  }
}

/// Each part says which one it is, of how many; the first has the keys, all have tensors.
void Gguf::add_parts() {
  constexpr const char* count_key = "split.count";
  constexpr const char* number_key = "split.no";
  const auto count = integer(count_key, 1, 99999, 1);
  if (count == 1) return;
  if (const auto number = integer(number_key, 0, count - 1); number != 0)
    fail(number_key, std::to_string(number),
         "0: the first of the " + std::to_string(count) + " files");
  const auto ending = [count](std::int64_t part) {
    const auto padded = [](const char* before, std::int64_t n) {
      const std::string digits = std::to_string(n);
      return before + std::string(5 - digits.size(), '0') + digits;
    };
    return padded("-", part + 1) + padded("-of-", count) + ".gguf";
  };
  if (!path().ends_with(ending(0)))
    fail("name", "another", "one that ends with " + ending(0) + ", as " + count_key + " says");
  const std::string stem = path().substr(0, path().size() - ending(0).size());
  for (std::int64_t part = 1; part < count; ++part) {
    Gguf& added = parts_.emplace_back(Gguf(stem + ending(part), Alone()));
    if (added.integer(count_key, 0, 99999) != count || added.integer(number_key, 0, 99999) != part)
      added.fail(number_key, std::to_string(added.integer(number_key, 0, 99999)),
                 std::to_string(part) + " of " + std::to_string(count));
    for (const auto& [name, tensor] : added.tensors_)
      if (!tensors_.emplace(name, tensor).second)
        added.fail("tensor " + std::string(name), "in two of the files", "each tensor once");
  }
  const auto tensors = static_cast<std::int64_t>(tensors_.size());
  (void)integer("split.tensors.count", tensors, tensors, tensors);
}

Gguf::Gguf(const std::string& path) : Gguf(path, Alone()) {
  add_parts();
}

Gguf::Gguf(const std::string& path, Alone) : file_(path) {
  FieldReader reader(file_, gguf_format);
  const std::string_view magic = reader.text(4, "magic");
  if (magic != "GGUF") reader.fail("magic", "other bytes", "GGUF");
  const auto version = reader.number<std::uint32_t>("version");
  if (version != 2 && version != 3) reader.fail("version", std::to_string(version), "2 or 3");
  const auto tensors = reader.number<std::uint64_t>("tensor_count");
  const auto keys = reader.number<std::uint64_t>("metadata_kv_count");
  constexpr std::uint64_t most = 1 << 16;  // files of the largest models have some thousands
  if (tensors > most) reader.fail("tensor_count", std::to_string(tensors), "at most 65536");
  if (keys > most) reader.fail("metadata_kv_count", std::to_string(keys), "at most 65536");
  read_metadata(reader, keys);
  read_tensors(reader, tensors);
}

void Gguf::fail(std::string_view field, const std::string& value,
                const std::string& expected) const {
  throw FileError(path() + ": " + std::string(field) + " = " + value + ": expected " + expected);
}

template <class T>
const T& Gguf::value(std::string_view key, const char* kind) const {
  const auto found = values_.find(key);
  if (found == values_.end()) fail(key, "not there", kind);
  const T* const value = std::get_if<T>(&found->second);
  if (value == nullptr) fail(key, "of another type", kind);
  return *value;
}

std::int64_t Gguf::integer(std::string_view key, std::int64_t least, std::int64_t most) const {
  const auto number = value<std::int64_t>(key, "an integer");
  if (number < least || number > most)
    fail(key, std::to_string(number), std::to_string(least) + " to " + std::to_string(most));
  return number;
}
std::int64_t Gguf::integer(std::string_view key, std::int64_t least, std::int64_t most,
                           std::int64_t otherwise) const {
  return has(key) ? integer(key, least, most) : otherwise;
}
double Gguf::real(std::string_view key, double otherwise) const {
  return has(key) ? value<double>(key, "a floating-point number") : otherwise;
}
bool Gguf::flag(std::string_view key, bool otherwise) const {
  return has(key) ? value<bool>(key, "a boolean") : otherwise;
}
std::string_view Gguf::text(std::string_view key) const {
  return value<std::string_view>(key, "a string");
}
std::string_view Gguf::text(std::string_view key, std::string_view otherwise) const {
  return has(key) ? text(key) : otherwise;
}
std::span<const std::string_view> Gguf::texts(std::string_view key) const {
  return value<Texts>(key, "an array of strings");
}
std::span<const double> Gguf::numbers(std::string_view key) const {
  return value<Numbers>(key, "an array of numbers");
}

std::vector<std::string_view> Gguf::tensor_names() const {
  std::vector<std::string_view> names;
  for (const auto& [name, tensor] : tensors_) names.push_back(name);
  return names;
}

const Tensor& Gguf::tensor(std::string_view name, std::size_t outputs, std::size_t inputs) const {
  const std::string field = "tensor " + std::string(name);
  const auto shape = [](std::size_t a, std::size_t b) {
    return std::string("[").append(std::to_string(a)) + "][" + std::to_string(b) + "]";
  };
  const auto found = tensors_.find(name);
  if (found == tensors_.end()) fail(field, "not there", shape(outputs, inputs));
  const Tensor& tensor = found->second;
  if (tensor.outputs != outputs || tensor.inputs != inputs)
    fail(field, shape(tensor.outputs, tensor.inputs), shape(outputs, inputs));
  return tensor;
}

}  // namespace serve
