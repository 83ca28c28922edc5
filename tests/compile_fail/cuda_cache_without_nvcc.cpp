// expect: KvCache<Cuda, T> needs nvcc: compile the file that uses it as CUDA (.cu)
// lines: 25
#include <chunkattn/chunkattn.hpp>

#ifdef CHUNKATTN_CONTROL
using Device = chunkattn::Cpu;
#else
using Device = chunkattn::Cuda;
#endif

chunkattn::PrefixTree<int> tree;
chunkattn::KvCache<Device, chunkattn::half> cache(tree, {1, 1, 64});
