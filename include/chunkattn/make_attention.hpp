// make_attention<Cpu, …>(): compiles the kernels that AnyAttention offers on the CPU, in one unit
// of a program. For a GPU: make_attention.cuh, in a unit of nvcc's.
#pragma once

#include "any_attention.hpp"
#include "front/make_attention.hpp"
