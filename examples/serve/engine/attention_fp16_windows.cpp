#include "attention.hpp"

namespace serve {

SERVE_FOR_HEAD_DIMS_WITH_WINDOWS(template, chunkattn::half)

}  // namespace serve
