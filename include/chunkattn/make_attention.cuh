// make_attention<Cuda, …>(): compiles the kernels that AnyAttention offers on a GPU, in one unit of
// nvcc's. All other units of a program may be .cpp files.
#pragma once

#include "any_attention.hpp"
#include "front/make_attention.cuh"
