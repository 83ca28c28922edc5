#include "attention.hpp"

namespace llama {

LLAMA_FOR_HEAD_DIMS(template, chunkattn::half)

}  // namespace llama
