// Where launches of kernels go: to the emulator, unless the program has another executor that knows
// the kernel. (tests/ptx is one: it runs what nvcc has made of it.)
#pragma once

#include <cstddef>

#include "simt/block.hpp"

namespace simt {

struct KernelCall {
  const void* kernel;  ///< the emulator's; its symbol is the compiled kernel's name
  int grid, threads;
  std::size_t shared_bytes;
  const void* arguments;  ///< one struct
  std::size_t argument_bytes;
};

/// Runs a call to its end. False: it does not know the kernel.
using Executor = bool (*)(const KernelCall&);

/// Null: the emulator runs everything.
inline Executor& executor() {
  static Executor chosen = nullptr;
  return chosen;
}

/// Whether the emulator runs what is launched, and counts what it does.
inline bool is_emulated() {
  return executor() == nullptr;
}

template <class Arguments>
bool executed_elsewhere(void (*kernel)(Arguments), int grid, int threads, std::size_t shared_bytes,
                        const Arguments& arguments) {
  return executor() != nullptr && executor()({reinterpret_cast<const void*>(kernel), grid, threads,
                                              shared_bytes, &arguments, sizeof arguments});
}

/// Runs a kernel of `grid` blocks.
template <class Arguments>
void launch_kernel(void (*kernel)(Arguments), int grid, int threads, std::size_t shared_bytes,
                   const Arguments& arguments) {
  if (!executed_elsewhere(kernel, grid, threads, shared_bytes, arguments))
    launch(grid, threads, shared_bytes, [&] { kernel(arguments); });
}

}  // namespace simt
