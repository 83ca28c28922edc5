// expect: HeadDim must be a multiple of 8 and at most 576; pad the heads of your model
#include <chunkattn/chunk_attention.hpp>

#ifdef CHUNKATTN_CONTROL
chunkattn::ChunkAttention<chunkattn::Cpu, 256> attention;
#else
chunkattn::ChunkAttention<chunkattn::Cpu, 264> attention;
#endif
