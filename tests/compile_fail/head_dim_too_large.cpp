// expect: HeadDim must be a multiple of 8 and at most 576; pad the heads of your model
#include <chunkattn/chunk_attention.hpp>

#ifdef CHUNKATTN_CONTROL
chunkattn::ChunkAttention<chunkattn::Cpu, 576> attention;
#else
chunkattn::ChunkAttention<chunkattn::Cpu, 584> attention;
#endif
