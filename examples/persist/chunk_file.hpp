// Saving a prefix cache to a file and loading it, in this process or another, on this machine or
// one of the same byte order.
//
// The file: a header that says what it is (magic, version, byte order, element type, token size,
// geometry, model tag, total size), then the entries, then the XXH64 of all that. An entry is a
// prompt and the K/V of those of its positions that no earlier entry has, in the layout of
// gather_kv(): position by position, so that a tree with another chunk size can load it.
#pragma once

#define XXH_INLINE_ALL  // nothing to link
#include <xxhash.h>

#include <chunkattn/chunkattn.hpp>
#include <chunkattn/transfer/transfer.hpp>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "../support/output_file.hpp"

namespace persist {

/// The file is not one of ours, is damaged, or was made for something else: nothing was loaded. Or
/// it cannot be written: what was there before is there still.
class FileError : public chunkattn::Error {
 public:
  FileError(const std::string& path, const std::string& what)
      : chunkattn::Error(path + ": " + what) {}
};

namespace detail {

inline constexpr char magic[8] = {'c', 'h', 'u', 'n', 'k', 'a', 't', 't'};
/// Of the format: 1 was written before chunkattn 0.2, 2 since then. Raise it with every change.
inline constexpr std::uint32_t version = 2;
inline constexpr std::uint32_t byte_order = 0x01020304;

struct Header {
  char magic[8];
  std::uint32_t version;
  std::uint32_t byte_order;
  std::uint32_t layout;  ///< chunkattn::kv_layout_version
  std::uint32_t token_bytes;
  char element[16];
  std::uint32_t num_layers, num_kv_heads, head_dim;
  std::uint32_t model_tag_bytes;
  std::uint64_t num_entries;
  std::uint64_t file_bytes;
};
static_assert(sizeof(Header) == 72 && std::is_trivially_copyable_v<Header>);

struct Entry {
  std::uint64_t tenant, adapter;
  std::uint64_t num_tokens;
  std::uint64_t kv_begin;  ///< first position whose K/V is stored
};

/// Finds damage, does not resist an attacker.
inline std::uint64_t checksum(std::span<const std::byte> bytes) {
  return XXH64(bytes.data(), bytes.size(), 0);
}

class Writer {
 public:
  template <class T>
  void put(const T* values, std::size_t count) {
    static_assert(std::is_trivially_copyable_v<T>);
    const auto* bytes = reinterpret_cast<const std::byte*>(values);
    bytes_.insert(bytes_.end(), bytes, bytes + count * sizeof(T));
  }
  std::span<std::byte> extend(std::size_t count) {
    bytes_.resize(bytes_.size() + count);
    return std::span(bytes_).last(count);
  }
  std::vector<std::byte>& bytes() { return bytes_; }

 private:
  std::vector<std::byte> bytes_;
};

/// Takes values off the front; false when too few bytes are left.
class Reader {
 public:
  explicit Reader(std::span<const std::byte> bytes) : left_(bytes) {}
  template <class T>
  bool get(T* values, std::size_t count) {
    if (count > left_.size() / sizeof(T)) return false;
    if (count > 0) std::memcpy(values, left_.data(), count * sizeof(T));
    left_ = left_.subspan(count * sizeof(T));
    return true;
  }
  bool get(std::span<const std::byte>& part, std::size_t count) {
    if (count > left_.size()) return false;
    part = left_.first(count);
    left_ = left_.subspan(count);
    return true;
  }
  [[nodiscard]] bool empty() const { return left_.empty(); }

 private:
  std::span<const std::byte> left_;
};

struct CloseFile {
  void operator()(std::FILE* file) const { std::fclose(file); }
};
using File = std::unique_ptr<std::FILE, CloseFile>;

template <class Token, class T>
Header make_header(const chunkattn::KvCacheOptions& geometry, const std::string& model_tag) {
  Header header{};
  std::memcpy(header.magic, magic, sizeof(magic));
  header.version = version;
  header.byte_order = byte_order;
  header.layout = chunkattn::kv_layout_version;
  header.token_bytes = sizeof(Token);
  std::snprintf(header.element, sizeof(header.element), "%s", chunkattn::element_name<T>());
  header.num_layers = static_cast<std::uint32_t>(geometry.num_layers);
  header.num_kv_heads = static_cast<std::uint32_t>(geometry.num_kv_heads);
  header.head_dim = static_cast<std::uint32_t>(geometry.head_dim);
  header.model_tag_bytes = static_cast<std::uint32_t>(model_tag.size());
  return header;
}

}  // namespace detail

/// A prompt whose K/V is in a cache.
template <class Token>
struct CachedPrompt {
  std::vector<Token> tokens;
  chunkattn::Namespace name_space{};
};

/// Writes the cached prefixes of `prompts` to `path`, each chunk once however many prompts share
/// it. `model_tag` names what the K/V was computed with (weights, adapter, position encoding): only
/// a loader with the same tag accepts it. Returns the number of tokens whose K/V was stored. The
/// file appears whole or not at all; a device or a pipe is refused.
template <class Tree, class T>
std::size_t save(const std::string& path, Tree& tree, chunkattn::KvCache<chunkattn::Cpu, T>& cache,
                 const std::string& model_tag,
                 std::span<const CachedPrompt<typename Tree::token_type>> prompts) {
  using Token = typename Tree::token_type;
  static_assert(std::is_trivially_copyable_v<Token>, "tokens are stored byte for byte");
  detail::Writer out;
  detail::Header header = detail::make_header<Token, T>(cache.options(), model_tag);
  out.put(&header, 1);
  out.put(model_tag.data(), model_tag.size());
  chunkattn::PrefixTree<Token, 64> stored;  // knows what earlier entries hold
  std::vector<typename decltype(stored)::Sequence> entries;
  std::size_t saved = 0;
  for (const auto& prompt : prompts) {
    // Nothing is to be computed here, the last token no more than the others.
    const chunkattn::InsertOptions options{.name_space = prompt.name_space, .compute_last = false};
    const std::size_t cached = tree.match_prefix(prompt.tokens, options).cached;
    const std::size_t known =
        stored.match_prefix(std::span(prompt.tokens).first(cached), options).cached;
    if (known == cached) continue;
    // Cached prefixes stay while a sequence uses them: nothing is evicted under the copy.
    const auto tokens = std::span(prompt.tokens).first(cached);
    auto sequence = tree.insert(tokens, options);
    const detail::Entry entry{prompt.name_space.tenant, prompt.name_space.adapter, cached, known};
    out.put(&entry, 1);
    out.put(tokens.data(), tokens.size());
    gather_kv(sequence,
              {static_cast<std::int32_t>(known), static_cast<std::int32_t>(cached - known)}, cache,
              out.extend(kv_bytes(cache, cached - known)));
    entries.push_back(stored.insert(tokens, options));
    entries.back().mark_loaded(entries.back().loadable());
    saved += cached - known;
  }
  header.num_entries = entries.size();
  header.file_bytes = out.bytes().size() + sizeof(std::uint64_t);
  std::memcpy(out.bytes().data(), &header, sizeof(header));
  const std::uint64_t sum = detail::checksum(out.bytes());
  out.put(&sum, 1);

  try {
    examples::OutputFile file(path);
    file.write(out.bytes().data(), out.bytes().size());
    file.commit();
  } catch (const examples::OutputError& error) {
    throw FileError(path, error.reason);
  }
  return saved;
}

/// Loads what save() wrote into a tree with a retention policy and a pool with a limit (or a high
/// watermark), as cache. Throws FileError, with
/// tree and cache untouched, unless every byte of the file is as it was written and it was made for
/// this element type, token type, geometry and model tag. Returns the number of tokens whose K/V
/// was copied in; what is cached already is kept, and what does not fit into the budget is left
/// out.
template <class Tree, class T>
std::size_t load(const std::string& path, Tree& tree, chunkattn::KvCache<chunkattn::Cpu, T>& cache,
                 const std::string& model_tag) {
  using Token = typename Tree::token_type;
  std::vector<std::byte> bytes;
  {
    const detail::File file{std::fopen(path.c_str(), "rb")};
    if (!file) throw FileError(path, "cannot be opened");
    std::byte buffer[1 << 16];
    for (std::size_t n; (n = std::fread(buffer, 1, sizeof(buffer), file.get())) > 0;)
      bytes.insert(bytes.end(), buffer, buffer + n);
    if (std::ferror(file.get()) != 0) throw FileError(path, "cannot be read");
  }
  const auto refuse = [&](bool condition, const std::string& what) {
    if (condition) throw FileError(path, what);
  };

  // 1. Is it whole, and is it one of ours?
  detail::Header header{};
  detail::Reader reader(bytes);
  refuse(!reader.get(&header, 1), "too short for a chunk file");
  refuse(std::memcmp(header.magic, detail::magic, sizeof(detail::magic)) != 0, "not a chunk file");
  refuse(header.byte_order != detail::byte_order, "written with another byte order");
  refuse(header.version != detail::version,
         "of format version " + std::to_string(header.version) + " where this program reads " +
             std::to_string(detail::version) +
             (header.version < detail::version ? ": save it again" : ""));
  refuse(header.file_bytes != bytes.size(),
         "truncated or extended: " + std::to_string(bytes.size()) + " bytes, expected " +
             std::to_string(header.file_bytes));
  std::uint64_t sum = 0;
  const auto body = std::span<const std::byte>(bytes).first(bytes.size() - sizeof(sum));
  std::memcpy(&sum, bytes.data() + body.size(), sizeof(sum));
  refuse(sum != detail::checksum(body), "damaged: the checksum differs");

  // 2. Was it made for this cache?
  const detail::Header own = detail::make_header<Token, T>(cache.options(), model_tag);
  reader = detail::Reader(body);
  (void)reader.get(&header, 1);
  std::string tag(header.model_tag_bytes <= body.size() ? header.model_tag_bytes : 0, '\0');
  refuse(tag.size() != header.model_tag_bytes || !reader.get(tag.data(), tag.size()),
         "malformed model tag");
  refuse(tag != model_tag, "made for model \"" + tag + "\", expected \"" + model_tag + "\"");
  refuse(header.layout != own.layout, "K/V in layout " + std::to_string(header.layout) +
                                          ", expected " + std::to_string(own.layout));
  refuse(std::memcmp(header.element, own.element, sizeof(own.element)) != 0,
         "K/V in another element type, expected " + std::string(own.element));
  refuse(header.token_bytes != own.token_bytes, "tokens of another size");
  refuse(header.num_layers != own.num_layers || header.num_kv_heads != own.num_kv_heads ||
             header.head_dim != own.head_dim,
         "another geometry (layers, KV heads or head_dim)");

  // 3. Are the entries well-formed? Only then is anything loaded.
  struct Parsed {
    detail::Entry entry{};
    std::vector<Token> tokens;
    std::span<const std::byte> kv;
  };
  std::vector<Parsed> entries;
  for (std::uint64_t i = 0; i < header.num_entries; ++i) {
    Parsed& e = entries.emplace_back();
    refuse(!reader.get(&e.entry, 1) || e.entry.num_tokens > body.size() / sizeof(Token) ||
               e.entry.kv_begin >= e.entry.num_tokens,
           "malformed entry " + std::to_string(i));
    e.tokens.resize(e.entry.num_tokens);
    refuse(!reader.get(e.tokens.data(), e.tokens.size()) ||
               !reader.get(e.kv, kv_bytes(cache, e.entry.num_tokens - e.entry.kv_begin)),
           "malformed entry " + std::to_string(i));
  }
  refuse(!reader.empty(), "bytes after the last entry");

  std::size_t loaded = 0;
  for (const Parsed& e : entries) {
    auto sequence = tree.try_insert(
        e.tokens, {.name_space = {.tenant = e.entry.tenant, .adapter = e.entry.adapter},
                   .compute_last = false});
    if (!sequence) continue;  // the budget is spent
    const auto begin = static_cast<std::int32_t>(e.entry.kv_begin);
    const auto end = static_cast<std::int32_t>(e.tokens.size());
    // What is cached already, or what another sequence is about to compute, is not ours to load.
    // And an earlier entry's part may have been left out: then this one cannot stand on it.
    for (chunkattn::TokenRange missing = sequence->loadable();
         !missing.empty() && missing.begin >= begin; missing = sequence->loadable()) {
      scatter_kv(*sequence, missing, cache, e.kv, {begin, end - begin});
      sequence->mark_loaded(missing);
      loaded += static_cast<std::size_t>(missing.length);
    }
  }
  return loaded;
}

}  // namespace persist
