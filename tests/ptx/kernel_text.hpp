// Kernels of a few lines, for tests of the machine.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ptx/module.hpp"
#include "ptx/run.hpp"

namespace ptxrun {

/// A kernel with registers %p, %rs, %r, %rd of 32 each; %r31 is the thread's index, %rd30 and %rd31
/// hold the two arguments, %r30 the address of shared memory.
inline std::string kernel_text(const std::string& body) {
  return ".version 9.0\n.target sm_80\n.address_size 64\n.extern .shared .align 128 .b8 "
         "dynamic[];\n"
         ".visible .entry kernel(\n.param .u64 in,\n.param .u64 out\n)\n{\n"
         ".reg .pred %p<32>;\n.reg .b16 %rs<32>;\n.reg .b32 %r<32>;\n.reg .b64 %rd<32>;\n"
         "mov.u32 %r31, %tid.x;\nmov.u32 %r30, dynamic;\n"
         "ld.param.u64 %rd30, [in];\nld.param.u64 %rd31, [out];\n" +
         body + "\nret;\n}\n";
}

inline void run_text(const std::string& body, const void* in, void* out, int threads = 32,
                     std::size_t shared_bytes = 1024, std::uint64_t seed = 1) {
  const auto entries = read_module(kernel_text(body));
  const void* arguments[] = {in, out};
  run(entries.at("kernel"), {1, threads, shared_bytes, arguments, sizeof arguments, seed});
}

}  // namespace ptxrun
