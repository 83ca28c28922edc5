// Records of a tier: the K/V of a block of tokens, with all that it was computed from. A reader
// that expects anything else rejects it: each byte of what it says of itself is compared.
//
// [header][head: model, shape, whose tokens][tokens from the start of the prompt to the block's
// end][K/V][rows of companions]
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "../../detail/kv/quantized.hpp"
#include "../../detail/support/bit_cast.hpp"
#include "../../detail/support/config.hpp"
#include "../../element.hpp"
#include "../tier_store.hpp"
#include "hash.hpp"
#include "rows.hpp"

CHUNKATTN_NAMESPACE_BEGIN
namespace detail {

/// How the K/V of a block goes into a record and out of it. `raw` is what gather_kv() writes, then
/// rows of companions, which are stored as they are.
struct TierCodec {
  std::size_t raw_bytes = 0, stored_bytes = 0;
  std::size_t layers = 0, rows = 0;  ///< rows: of K of one layer, and of V
  std::size_t k_dim = 0, v_dim = 0;  ///< elements; v_dim 0: V lies in K
  TierRowShapes companions{};
  /// False where there are values that cannot be stored. Null: the bytes as they are.
  bool (*encode)(const TierCodec&, const std::byte* raw, std::byte* stored) = nullptr;
  void (*decode)(const TierCodec&, const std::byte* stored, std::byte* raw) = nullptr;
};

/// Calls f(row, dim, element of raw where it begins): K and V of all layers, as they lie there.
template <class F>
bool for_each_tier_row(const TierCodec& codec, const F& f) {
  std::size_t at = 0, row = 0;
  for (std::size_t part = 0; part < 2 * codec.layers; ++part) {
    const std::size_t dim = part % 2 == 0 ? codec.k_dim : codec.v_dim;
    if (dim == 0) continue;
    for (std::size_t i = 0; i < codec.rows; ++i, at += dim)
      if (!f(row++, dim, at)) return false;
  }
  return true;
}

/// Elements of 8 bits, as many as raw has, then a float scale for each row.
template <class T, class To>
bool encode_tier_rows(const TierCodec& codec, const std::byte* raw, std::byte* stored) {
  const std::size_t elements = codec.raw_bytes / sizeof(T);
  std::vector<float> values((std::max)(codec.k_dim, codec.v_dim));
  return for_each_tier_row(codec, [&](std::size_t row, std::size_t dim, std::size_t at) {
    float largest = 0;
    bool finite = true;
    for (std::size_t i = 0; i < dim; ++i) {
      T element;
      std::memcpy(&element, raw + (at + i) * sizeof(T), sizeof(T));
      values[i] = to_float(element);
      finite = finite && is_finite(values[i]);
      largest = (std::max)(largest, std::fabs(values[i]));
    }
    if (!finite) return false;
    // Of a row that is all but zero, the inverse would not be finite.
    const float scale =
        (std::max)(largest / largest_stored<To>, (std::numeric_limits<float>::min)() * 4);
    for (std::size_t i = 0; i < dim; ++i) {
      To element;
      store_nearest(values[i] / scale, element);
      std::memcpy(stored + at + i, &element, 1);
    }
    std::memcpy(stored + elements + row * sizeof(float), &scale, sizeof(scale));
    return true;
  });
}
template <class T, class To>
void decode_tier_rows(const TierCodec& codec, const std::byte* stored, std::byte* raw) {
  const std::size_t elements = codec.raw_bytes / sizeof(T);
  for_each_tier_row(codec, [&](std::size_t row, std::size_t dim, std::size_t at) {
    float scale = 0;
    std::memcpy(&scale, stored + elements + row * sizeof(float), sizeof(scale));
    for (std::size_t i = 0; i < dim; ++i) {
      To value;
      std::memcpy(&value, stored + at + i, sizeof(value));
      float x = 0;
      if constexpr (std::is_same_v<To, std::int8_t>)
        x = static_cast<float>(value) * scale;
      else
        x = to_float(value) * scale;
      const T element = from_float<T>(x);
      std::memcpy(raw + (at + i) * sizeof(T), &element, sizeof(T));
    }
    return true;
  });
}

/// What a record says first.
struct TierHeader {
  static constexpr std::uint64_t expected_magic =
      0x3130524549544b43;  // "CKTIER01" where little-endian
  std::uint64_t magic = expected_magic;
  std::uint64_t head_bytes = 0, token_bytes = 0, kv_bytes = 0;  ///< kv: with rows of companions
  std::uint64_t sum[2] = {};                                    ///< of all after the header
};

/// The parts of a record that it is asked for by.
struct TierContent {
  std::span<const std::byte> head, tokens;
};

/// How long the record of a content is, without rows of companions.
[[nodiscard]] inline std::size_t tier_record_bytes(const TierContent& content,
                                                   const TierCodec& codec) noexcept {
  return sizeof(TierHeader) + content.head.size() + content.tokens.size() + codec.stored_bytes;
}

/// A record of K/V that was gathered; empty where it cannot be stored.
[[nodiscard]] inline TierStore::Record make_tier_record(const TierContent& content,
                                                        std::span<const std::byte> raw,
                                                        const TierCodec& codec) {
  const std::span<const std::byte> kv = raw.first(codec.raw_bytes);
  const std::span<const std::byte> rows = raw.subspan(codec.raw_bytes);
  TierHeader header;
  header.head_bytes = content.head.size();
  header.token_bytes = content.tokens.size();
  header.kv_bytes = codec.stored_bytes + rows.size();
  auto record =
      std::make_shared<std::vector<std::byte>>(tier_record_bytes(content, codec) + rows.size());
  std::byte* at = record->data() + sizeof(header);
  at = std::copy(content.head.begin(), content.head.end(), at);
  at = std::copy(content.tokens.begin(), content.tokens.end(), at);
  if (codec.encode == nullptr)
    std::copy(kv.begin(), kv.end(), at);
  else if (!codec.encode(codec, kv.data(), at))
    return nullptr;
  std::copy(rows.begin(), rows.end(), at + codec.stored_bytes);
  const TierStore::Key sum = TierHash::of(std::span(*record).subspan(sizeof(header)));
  header.sum[0] = sum.high;
  header.sum[1] = sum.low;
  std::memcpy(record->data(), &header, sizeof(header));
  return record;
}

/// Whether a record is whole and holds the K/V of just these tokens; then `raw` is that.
[[nodiscard]] inline bool read_tier_record(const std::vector<std::byte>& record,
                                           const TierContent& content, const TierCodec& codec,
                                           std::vector<std::byte>& raw) {
  TierHeader header;
  const std::size_t least = tier_record_bytes(content, codec);
  if (record.size() < least) return false;
  const std::size_t row_bytes = record.size() - least;
  std::memcpy(&header, record.data(), sizeof(header));
  if (header.magic != TierHeader::expected_magic || header.head_bytes != content.head.size() ||
      header.token_bytes != content.tokens.size() ||
      header.kv_bytes != codec.stored_bytes + row_bytes)
    return false;
  const std::span<const std::byte> body = std::span(record).subspan(sizeof(header));
  if (!std::equal(content.head.begin(), content.head.end(), body.begin())) return false;
  const std::span<const std::byte> rest = body.subspan(content.head.size());
  if (!std::equal(content.tokens.begin(), content.tokens.end(), rest.begin())) return false;
  const TierStore::Key sum = TierHash::of(body);
  if (sum.high != header.sum[0] || sum.low != header.sum[1]) return false;
  const std::span<const std::byte> kv = rest.subspan(content.tokens.size(), codec.stored_bytes);
  const std::span<const std::byte> rows = rest.last(row_bytes);
  raw.resize(codec.raw_bytes + row_bytes);
  if (codec.decode == nullptr)
    std::copy(kv.begin(), kv.end(), raw.begin());
  else
    codec.decode(codec, kv.data(), raw.data());
  std::copy(rows.begin(), rows.end(), raw.end() - static_cast<std::ptrdiff_t>(row_bytes));
  return for_each_tier_row_of(codec.companions, rows, [](auto...) {});
}

/// Bytes one after the other.
class TierBytes {
 public:
  template <class T>
  void put(const T& value) {
    static_assert(std::is_trivially_copyable_v<T>);
    put(std::as_bytes(std::span(&value, 1)));
  }
  void put(std::string_view text) {
    put(std::uint64_t{text.size()});
    put(std::as_bytes(std::span(text)));
  }
  void put(std::span<const std::byte> more) { bytes.insert(bytes.end(), more.begin(), more.end()); }

  std::vector<std::byte> bytes;
};

}  // namespace detail
CHUNKATTN_NAMESPACE_END
