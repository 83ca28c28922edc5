#include "ptx/counts.hpp"

#include <algorithm>
#include <string>
#include <vector>

#include "ptx/forms.hpp"

namespace ptxrun {
namespace {

Counts* target = nullptr;

// What has to be known of a form to count it.
struct Meaning {
  Kind kind{};
  u32 bytes = 0;                              // of an element
  int shared = -1, global = -1, copied = -1;  // operands: addresses; bytes that a copy reads
};

u32 bytes_of_elements(std::string_view name) {  // "ld.shared.v2.f32/R"
  const std::string_view type = name.substr(name.rfind('.') + 1);
  const std::string digits(type.substr(1, type.find('/') - 1));
  return static_cast<u32>(std::stoi(digits)) / 8;
}

Meaning meaning_of(const Form& form) {
  Meaning made;
  made.kind = kind_of(form.name);
  switch (made.kind) {
    case Kind::ldmatrix:
      made.shared = 4;
      made.bytes = 16;
      break;
    case Kind::copy:
      if (form.operands.empty() || form.operands[0] != 'S') break;
      made.shared = 0;
      made.global = 1;
      made.copied = 3;
      made.bytes = 16;
      break;
    case Kind::load_shared:
    case Kind::store_shared:
      made.shared = static_cast<int>(form.operands.find('S'));
      made.bytes = bytes_of_elements(form.name);
      break;
    case Kind::load_global:
    case Kind::store_global:
    case Kind::atomic:
      if (form.operands.empty()) break;  // a fence
      made.global = static_cast<int>(form.operands.find('A'));
      made.bytes = bytes_of_elements(form.name);
      break;
    default:
      break;
  }
  return made;
}

// By the number of a form.
const Meaning& meaning(const Form& form) {
  static std::vector<Meaning> known(static_cast<std::size_t>(num_forms()));
  static std::vector<bool> is_known(known.size());
  const auto n = static_cast<std::size_t>(form.number);
  if (!is_known[n]) {
    known[n] = meaning_of(form);
    is_known[n] = true;
  }
  return known[n];
}

template <class Register>
std::array<u64, 32> addresses_of(Warp& warp, const Instruction& i, int operand) {
  std::array<u64, 32> addresses;
  const Register* base = warp.reg<Register>(i.operand[static_cast<std::size_t>(operand)]);
  for (std::size_t l = 0; l < 32; ++l) addresses[l] = base[l] + static_cast<u64>(i.offset);
  return addresses;
}

}  // namespace

const char* name_of(Kind kind) {
  constexpr const char* names[num_kinds] = {"mma",       "ldmatrix",   "cp.async",  "ld.shared",
                                            "st.shared", "ld.global",  "st.global", "atom",
                                            "shfl",      "arithmetic", "exp2",      "cvt",
                                            "integer",   "select",     "mov",       "control"};
  return names[static_cast<int>(kind)];
}

Kind kind_of(std::string_view form) {
  const auto is = [&](std::string_view begin) { return form.substr(0, begin.size()) == begin; };
  const std::string_view opcode = form.substr(0, form.find('.'));
  if (is("mma.")) return Kind::mma;
  if (is("ldmatrix")) return Kind::ldmatrix;
  if (is("cp.async")) return Kind::copy;
  if (is("ld.param") || opcode == "mov" || opcode == "cvta") return Kind::move;
  if (is("ld.shared")) return Kind::load_shared;
  if (is("st.shared")) return Kind::store_shared;
  if (opcode == "ld") return Kind::load_global;
  if (opcode == "st") return Kind::store_global;
  if (opcode == "atom" || opcode == "membar") return Kind::atomic;
  if (opcode == "shfl" || opcode == "vote") return Kind::shuffle;
  if (opcode == "ex2" || opcode == "lg2" || opcode == "rcp" || is("div.approx")) return Kind::exp2;
  if (opcode == "cvt") return Kind::convert;
  if (opcode == "setp" || opcode == "selp" || form.find(".pred") != form.npos) return Kind::choose;
  if (opcode == "bra" || opcode == "ret" || opcode == "bar" || opcode == "nanosleep")
    return Kind::control;
  const bool real = form.find(".f32") != form.npos || form.find(".f16") != form.npos ||
                    form.find(".bf16") != form.npos;
  return real ? Kind::arithmetic : Kind::integer;
}

Wavefronts wavefronts_of(std::span<const u64, 32> addresses, u32 on, u32 bytes) {
  const int together = bytes <= 4 ? 32 : static_cast<int>(128 / bytes);
  Wavefronts found{0, 0};
  for (int first = 0; first < 32; first += together) {
    std::array<std::array<u64, 32>, 32> words;  // asked for, by bank
    std::array<std::size_t, 32> num_words{};
    std::size_t most = 0;
    for (int l = first; l < first + together; ++l) {
      if ((on >> l & 1) == 0) continue;
      const u64 at = addresses[static_cast<std::size_t>(l)];
      for (u64 word = at / 4; word <= (at + bytes - 1) / 4; ++word) {
        auto& of_bank = words[word % 32];
        std::size_t& n = num_words[word % 32];
        if (std::find(of_bank.begin(), of_bank.begin() + n, word) == of_bank.begin() + n)
          of_bank[n++] = word;
        most = std::max(most, n);
      }
    }
    found.all += most;
    found.least += most > 0 ? 1 : 0;
  }
  return found;
}

Sectors sectors_of(std::span<const u64, 32> addresses, u32 on, u32 bytes) {
  std::array<u64, 32> sorted;
  std::size_t n = 0;
  for_lanes(on, [&](int l) { sorted[n++] = addresses[static_cast<std::size_t>(l)]; });
  std::sort(sorted.begin(), sorted.begin() + n);
  // Each element lies within a sector, and elements are the same or apart.
  u64 sectors = 0, wanted = 0;
  for (std::size_t i = 0; i < n; ++i) {
    wanted += i == 0 || sorted[i] != sorted[i - 1] ? bytes : 0;
    sectors += i == 0 || sorted[i] / 32 != sorted[i - 1] / 32 ? 1 : 0;
  }
  return {sectors, (wanted + 31) / 32};
}

void count_into(Counts* counts) {
  target = counts;
}

void count(Warp& warp, const Instruction& instruction, u32 on) {
  if (target == nullptr) return;
  const Meaning& means = meaning(*instruction.form);
  Count& into = (*target)[means.kind];
  ++into.instructions;
  if (on == 0) return;
  const u32 bytes = means.bytes * (means.kind == Kind::ldmatrix ? 1 : instruction.vector);
  if (means.shared >= 0) {
    const auto found = wavefronts_of(addresses_of<u32>(warp, instruction, means.shared), on, bytes);
    into.wavefronts += found.all;
    into.least_wavefronts += found.least;
  }
  if (means.global >= 0) {
    if (means.copied >= 0) {  // those that write zeros read nothing
      const u32* read = warp.reg<u32>(instruction.operand[static_cast<std::size_t>(means.copied)]);
      u32 reading = 0;
      for_lanes(on, [&](int l) { reading |= u32{read[l] > 0} << l; });
      on = reading;
    }
    const auto found = sectors_of(addresses_of<u64>(warp, instruction, means.global), on, bytes);
    into.sectors += found.all;
    into.least_sectors += found.least;
  }
}

Count& Count::operator+=(const Count& other) {
  instructions += other.instructions;
  wavefronts += other.wavefronts;
  least_wavefronts += other.least_wavefronts;
  sectors += other.sectors;
  least_sectors += other.least_sectors;
  return *this;
}
Count& Count::operator-=(const Count& other) {
  return *this += other * ~u64{0};  // modulo 2^64
}
Count operator*(Count count, u64 times) {
  for (u64* n : {&count.instructions, &count.wavefronts, &count.least_wavefronts, &count.sectors,
                 &count.least_sectors})
    *n *= times;
  return count;
}

Count Counts::total() const {
  Count sum;
  for (const Count& kind : kinds) sum += kind;
  return sum;
}
Counts& Counts::operator+=(const Counts& other) {
  for (std::size_t k = 0; k < kinds.size(); ++k) kinds[k] += other.kinds[k];
  return *this;
}
Counts& Counts::operator-=(const Counts& other) {
  for (std::size_t k = 0; k < kinds.size(); ++k) kinds[k] -= other.kinds[k];
  return *this;
}
Counts operator*(Counts counts, u64 times) {
  for (Count& kind : counts.kinds) kind = kind * times;
  return counts;
}

}  // namespace ptxrun
