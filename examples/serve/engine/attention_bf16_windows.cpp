#include "attention.hpp"

namespace serve {

SERVE_FOR_HEAD_DIMS_WITH_WINDOWS(template, chunkattn::bfloat16)

}  // namespace serve
