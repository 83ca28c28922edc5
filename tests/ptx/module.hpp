// A module of PTX text: its kernels, in the form that the machine runs.
#pragma once

#include <map>
#include <string>
#include <string_view>

#include "ptx/machine.hpp"

namespace ptxrun {

/// Reads a module. Throws a Fault that names the line for what the machine does not know: an
/// instruction, an operand that does not fit it, a state space.
std::map<std::string, Entry> read_module(std::string_view text);

}  // namespace ptxrun
