// expect: ValueDim must be a multiple of 8 and at most 576
#include <chunkattn/chunk_attention.hpp>

#ifdef CHUNKATTN_CONTROL
chunkattn::ChunkAttention<chunkattn::Cpu, 16, 8> attention;
#else
chunkattn::ChunkAttention<chunkattn::Cpu, 16, 12> attention;
#endif
