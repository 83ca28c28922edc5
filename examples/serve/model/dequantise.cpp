#include "dequantise.hpp"

#include <chunkattn/chunkattn.hpp>
#include <cstring>

namespace serve {

namespace {

float half_at(const std::byte* bytes) {
  chunkattn::half value;
  std::memcpy(&value.bits, bytes, sizeof value.bits);
  return chunkattn::to_float(value);
}

// Each of these makes the floats of one block.

void from_f32(const std::byte* in, float* out) {
  std::memcpy(out, in, sizeof *out);
}

void from_f16(const std::byte* in, float* out) {
  *out = half_at(in);
}

void from_bf16(const std::byte* in, float* out) {
  chunkattn::bfloat16 value;
  std::memcpy(&value.bits, in, sizeof value.bits);
  *out = chunkattn::to_float(value);
}

/// Low nibbles are elements 0 to 15, high ones 16 to 31.
void from_nibbles(const std::byte* in, float scale, float offset, float* out) {
  for (int i = 0; i < 16; ++i) {
    const auto pair = std::to_integer<int>(in[i]);
    out[i] = scale * static_cast<float>(pair & 15) + offset;
    out[i + 16] = scale * static_cast<float>(pair >> 4) + offset;
  }
}

void from_q4_0(const std::byte* in, float* out) {
  const float scale = half_at(in);
  from_nibbles(in + 2, scale, -8 * scale, out);
}

void from_q4_1(const std::byte* in, float* out) {
  from_nibbles(in + 4, half_at(in), half_at(in + 2), out);
}

void from_q8_0(const std::byte* in, float* out) {
  const float scale = half_at(in);
  for (int i = 0; i < 32; ++i)
    out[i] = scale * static_cast<float>(static_cast<std::int8_t>(in[2 + i]));
}

/// As from_nibbles(), with a fifth bit each in the four bytes before the nibbles.
void from_fives(const std::byte* in, float scale, float offset, float* out) {
  for (int i = 0; i < 16; ++i) {
    const auto pair = std::to_integer<int>(in[4 + i]);
    const auto bit = [in](int n) { return std::to_integer<int>(in[n / 8]) >> n % 8 & 1; };
    out[i] = scale * static_cast<float>((pair & 15) | bit(i) << 4) + offset;
    out[i + 16] = scale * static_cast<float>(pair >> 4 | bit(i + 16) << 4) + offset;
  }
}

void from_q5_0(const std::byte* in, float* out) {
  const float scale = half_at(in);
  from_fives(in + 2, scale, -16 * scale, out);
}

void from_q5_1(const std::byte* in, float* out) {
  from_fives(in + 4, half_at(in), half_at(in + 2), out);
}

/// As Q4_0, but nibbles are names of these, which are closer where weights are more frequent.
void from_iq4_nl(const std::byte* in, float* out) {
  constexpr float values[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                1,    13,   25,  38,  53,  69,  89,  113};
  const float scale = half_at(in);
  for (int i = 0; i < 16; ++i) {
    const auto pair = std::to_integer<unsigned>(in[2 + i]);
    out[i] = scale * values[pair & 15];
    out[i + 16] = scale * values[pair >> 4];
  }
}

/// Scales and offsets of the eight runs of 32 elements in a block of Q4_K or Q5_K. They have six
/// bits each, in 12 bytes: those of the first four runs in the low bits of the first eight bytes;
/// of the others four bits in the last four bytes, and two above those of the first.
struct RunScales {
  float scale[8], offset[8];

  /// \param in  both scales of the scales, then the 12 bytes
  explicit RunScales(const std::byte* in) {
    const float all = half_at(in), all_offsets = half_at(in + 2);
    const auto byte = [in](int i) { return std::to_integer<int>(in[4 + i]); };
    for (int run = 0; run < 8; ++run) {
      const int i = run % 4;
      const int s = run < 4 ? byte(i) & 63 : (byte(8 + i) & 15) | byte(i) >> 6 << 4;
      const int o = run < 4 ? byte(4 + i) & 63 : byte(8 + i) >> 4 | byte(4 + i) >> 6 << 4;
      scale[run] = all * static_cast<float>(s);
      offset[run] = all_offsets * static_cast<float>(o);
    }
  }
};

/// Two runs share 32 bytes, the first has the low nibbles.
void from_q4_k(const std::byte* in, float* out) {
  const RunScales runs(in);
  for (int run = 0; run < 8; ++run)
    for (int i = 0; i < 32; ++i) {
      const int pair = std::to_integer<int>(in[16 + run / 2 * 32 + i]);
      const int number = run % 2 == 0 ? pair & 15 : pair >> 4;
      out[run * 32 + i] = runs.scale[run] * static_cast<float>(number) - runs.offset[run];
    }
}

/// The same with a fifth bit: byte i of 32 has that of element i of each run.
void from_q5_k(const std::byte* in, float* out) {
  const RunScales runs(in);
  for (int run = 0; run < 8; ++run)
    for (int i = 0; i < 32; ++i) {
      const int pair = std::to_integer<int>(in[48 + run / 2 * 32 + i]);
      const int bit = std::to_integer<int>(in[16 + i]) >> run & 1;
      const int number = (run % 2 == 0 ? pair & 15 : pair >> 4) | bit << 4;
      out[run * 32 + i] = runs.scale[run] * static_cast<float>(number) - runs.offset[run];
    }
}

/// 256 elements: 128 bytes of low nibbles, 64 of the two bits above, 16 scales of 16 elements each,
/// and the scale of the scales. Each half of 128 elements is four runs of 32 that share bytes.
void from_q6_k(const std::byte* in, float* out) {
  const std::byte* low = in;
  const std::byte* high = in + 128;
  const std::byte* scales = in + 192;
  const float scale = half_at(in + 208);
  for (int half = 0; half < 2; ++half, low += 64, high += 32, scales += 8, out += 128)
    for (int run = 0; run < 4; ++run)
      for (int i = 0; i < 32; ++i) {
        const int nibbles = std::to_integer<int>(low[i + run % 2 * 32]);
        const int nibble = run < 2 ? nibbles & 15 : nibbles >> 4;
        const int bits = std::to_integer<int>(high[i]) >> (2 * run) & 3;
        const auto step = static_cast<std::int8_t>(scales[run * 2 + i / 16]);
        out[run * 32 + i] =
            scale * static_cast<float>(step) * static_cast<float>((bits << 4 | nibble) - 32);
      }
}

template <auto one_block, std::size_t elements, std::size_t bytes>
void convert(const std::byte* in, float* out, std::size_t blocks) {
  for (std::size_t b = 0; b < blocks; ++b) one_block(in + b * bytes, out + b * elements);
}

struct Format {
  TensorType type;
  Block block;
  void (*to_floats)(const std::byte* in, float* out, std::size_t blocks);
};

template <auto one_block, std::size_t elements, std::size_t bytes>
constexpr Format format_of(TensorType type) {
  return {type, {elements, bytes}, convert<one_block, elements, bytes>};
}

constexpr Format formats[] = {format_of<from_f32, 1, 4>(TensorType::f32),
                              format_of<from_f16, 1, 2>(TensorType::f16),
                              format_of<from_bf16, 1, 2>(TensorType::bf16),
                              format_of<from_q4_0, 32, 18>(TensorType::q4_0),
                              format_of<from_q4_1, 32, 20>(TensorType::q4_1),
                              format_of<from_q5_0, 32, 22>(TensorType::q5_0),
                              format_of<from_q5_1, 32, 24>(TensorType::q5_1),
                              format_of<from_q8_0, 32, 34>(TensorType::q8_0),
                              format_of<from_iq4_nl, 32, 18>(TensorType::iq4_nl),
                              format_of<from_q4_k, 256, 144>(TensorType::q4_k),
                              format_of<from_q5_k, 256, 176>(TensorType::q5_k),
                              format_of<from_q6_k, 256, 210>(TensorType::q6_k)};

const Format* find(std::uint32_t type) {
  for (const Format& format : formats)
    if (static_cast<std::uint32_t>(format.type) == type) return &format;
  return nullptr;
}

}  // namespace

bool is_readable(std::uint32_t type) {
  return find(type) != nullptr;
}

Block block_of(TensorType type) {
  return find(static_cast<std::uint32_t>(type))->block;
}

void dequantise(const Tensor& tensor, std::size_t output, std::span<float> to) {
  const Format& format = *find(static_cast<std::uint32_t>(tensor.type));
  const std::size_t blocks = tensor.inputs / format.block.elements;
  format.to_floats(tensor.bytes.data() + output * blocks * format.block.bytes, to.data(), blocks);
}

}  // namespace serve
