// Where attention runs: tags that choose a backend at compile time.
#pragma once

#include "config.hpp"

CHUNKATTN_NAMESPACE_BEGIN

/// The host's processor: plain C++, vector units by the compiler's target options.
struct Cpu {};

/// An NVIDIA GPU: the headers under cuda/ need nvcc.
struct Cuda {};

CHUNKATTN_NAMESPACE_END
