// ChunkAttention<Device, HeadDim>: writes K/V and computes attention for a plan's rows. This header
// brings the CPU backend; the CUDA one is in cuda/chunk_attention.cuh and needs nvcc.
#pragma once

#include "attention/options.hpp"
#include "cpu/chunk_attention.hpp"
