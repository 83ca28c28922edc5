#include "attention.hpp"

namespace llama {

LLAMA_FOR_HEAD_DIMS(template, chunkattn::bfloat16)

}  // namespace llama
