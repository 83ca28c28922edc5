// expect: ChunkAttention<Cuda, HeadDim> needs nvcc: compile the file that uses it as CUDA (.cu)
// lines: 12
#include <chunkattn/chunkattn.hpp>

#ifdef CHUNKATTN_CONTROL
using Device = chunkattn::Cpu;
#else
using Device = chunkattn::Cuda;
#endif

chunkattn::ChunkAttention<Device, 64> attention;
