// Loads, stores, asynchronous copies, atomics, fences.
#include <cstring>

#include "ptx/allocations.hpp"
#include "ptx/forms.hpp"

namespace ptxrun {
namespace {

enum class Space { global, shared, param };

// The first operand's slot is the address's for stores, for loads it follows the elements.
template <Space S>
u64 address(Warp& w, const Instruction& i, u32 slot, int lane) {
  const u64 base = S == Space::shared ? w.reg<u32>(slot)[lane] : w.reg<u64>(slot)[lane];
  return base + static_cast<u64>(i.offset);
}

template <Space S>
const unsigned char* read(Warp& w, u64 at, u32 bytes, int lane) {
  if constexpr (S == Space::shared) {
    return w.block->shared.read(static_cast<u32>(at), bytes, w.thread(lane));
  } else if constexpr (S == Space::param) {
    if (at % bytes != 0 || at + bytes > w.block->entry.param_bytes)
      throw Fault("ld.param: beyond the arguments");
    return w.block->params + at;
  } else {
    check_global(at, bytes, "load");
    return reinterpret_cast<const unsigned char*>(at);
  }
}

template <Space S, class Stored, class Register>
void load(Warp& w, const Instruction& i) {
  const u32 n = i.vector;
  for_lanes(w.mask, [&](int l) {
    Stored elements[4];
    std::memcpy(elements, read<S>(w, address<S>(w, i, i.operand[n], l), n * sizeof(Stored), l),
                n * sizeof(Stored));
    for (u32 k = 0; k < n; ++k)
      w.reg<Register>(i.operand[k])[l] = static_cast<Register>(elements[k]);
  });
}

template <Space S, class Stored, class Register>
void store(Warp& w, const Instruction& i) {
  const u32 n = i.vector;
  for_lanes(w.mask, [&](int l) {
    Stored elements[4];
    for (u32 k = 0; k < n; ++k)
      elements[k] = static_cast<Stored>(w.reg<Register>(i.operand[1 + k])[l]);
    const u64 at = address<S>(w, i, i.operand[0], l);
    if constexpr (S == Space::shared) {
      w.block->shared.write(static_cast<u32>(at), elements, n * sizeof(Stored), w.thread(l));
    } else {
      check_global(at, n * sizeof(Stored), "store");
      std::memcpy(reinterpret_cast<void*>(at), elements, n * sizeof(Stored));
    }
  });
}

void add(Warp& w, const Instruction& i) {  // d, [a], b
  for_lanes(w.mask, [&](int l) {
    const u64 at = address<Space::global>(w, i, i.operand[1], l);
    check_global(at, 4, "atom");
    auto* word = reinterpret_cast<u32*>(at);
    if (w.block->last_atomic != nullptr && w.block->last_atomic != word)
      throw Fault("atomics of two words without a fence between them");
    w.block->last_atomic = word;
    w.reg<u32>(i.operand[0])[l] = std::exchange(*word, *word + w.reg<u32>(i.operand[2])[l]);
  });
}

// Each lands when its thread waits for its group, which is as late as that may be.
void begin_copy(Warp& w, const Instruction& i) {  // [to], [from], 16, bytes that are read
  for_lanes(w.mask, [&](int l) {
    const Copy copy{
        w.reg<u32>(i.operand[0])[l], w.reg<u32>(i.operand[3])[l],
        reinterpret_cast<const unsigned char*>(address<Space::global>(w, i, i.operand[1], l))};
    if (i.operand[2] != 16 || copy.bytes > 16) throw Fault("cp.async: not of 16 bytes");
    if (copy.bytes > 0) check_global(reinterpret_cast<u64>(copy.source), 16, "cp.async");
    w.block->shared.begin_copy(copy.target, w.thread(l));
    w.open[static_cast<std::size_t>(l)].push_back(copy);
  });
}
void commit_group(Warp& w, const Instruction&) {
  for_lanes(w.mask, [&](int lane) {
    const auto l = static_cast<std::size_t>(lane);
    w.groups[l].push_back(std::exchange(w.open[l], {}));
  });
}
void wait_group(Warp& w, const Instruction& i) {
  for_lanes(w.mask, [&](int l) {
    auto& groups = w.groups[static_cast<std::size_t>(l)];
    for (; groups.size() > i.operand[0]; groups.pop_front())
      for (const Copy& copy : groups.front())
        w.block->shared.land_copy(copy.target, copy.source, copy.bytes, w.thread(l));
  });
}

// A load or store of `Stored`, of one, two and four elements, from or to registers of the width
// `k`.
template <class Stored, class Register>
void add_type(Forms& f, const std::string& type, char k) {
  const auto push = [&](const std::string& name, const std::string& operands, Handler run) {
    f.push_back({name + "/" + k, operands, run});
  };
  for (const int n : {1, 2, 4}) {
    if (n * sizeof(Stored) > 16) continue;
    const std::string t = (n == 1 ? "." : ".v" + std::to_string(n) + ".") + type;
    const std::string elements(static_cast<std::size_t>(n), k);
    for (const char* how :
         {"ld", "ld.global",
          "ld.acquire.gpu.global"})  // generic addresses of global memory are the same
      push(how + t, elements + "A", load<Space::global, Stored, Register>);
    push("ld.param" + t, elements + "A", load<Space::param, Stored, Register>);
    push("ld.shared" + t, elements + "S", load<Space::shared, Stored, Register>);
    for (const char* how : {"st", "st.global", "st.release.gpu.global"})
      push(how + t, "A" + elements, store<Space::global, Stored, Register>);
    push("st.shared" + t, "S" + elements, store<Space::shared, Stored, Register>);
  }
}

}  // namespace

void add_memory_forms(Forms& f) {
  for (const char* type : {"b32", "u32", "s32", "f32"}) add_type<u32, u32>(f, type, 'R');
  for (const char* type : {"b64", "u64", "s64"}) add_type<u64, u64>(f, type, 'L');
  // Registers may be wider than what is loaded, which is extended, or stored, which is cut.
  add_type<s32, s64>(f, "s32", 'L');
  add_type<u32, u64>(f, "u32", 'L');
  for (const char* type : {"b16", "u16"}) {
    add_type<u16, u16>(f, type, 'H');
    add_type<u16, u32>(f, type, 'R');
  }
  add_type<s16, s16>(f, "s16", 'H');
  add_type<s16, s32>(f, "s16", 'R');
  for (const char* type : {"b8", "u8"}) {
    add_type<u8, u16>(f, type, 'H');
    add_type<u8, u32>(f, type, 'R');
  }
  add_type<s8, s16>(f, "s8", 'H');
  add_type<s8, s32>(f, "s8", 'R');
  f.push_back({"atom.global.add.u32", "RAR", add});
  f.push_back(
      {"membar.gl", "", [](Warp& w, const Instruction&) { w.block->last_atomic = nullptr; }});
  f.push_back({"cp.async.cg.shared.global.L2::128B", "SAIR", begin_copy});
  f.push_back({"cp.async.commit_group", "", commit_group});
  f.push_back({"cp.async.wait_group", "I", wait_group});
}

}  // namespace ptxrun
