#include "attention.hpp"

namespace serve {

SERVE_FOR_HEAD_DIMS(template, chunkattn::bfloat16)

}  // namespace serve
