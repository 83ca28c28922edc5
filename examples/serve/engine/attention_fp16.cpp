#include "attention.hpp"

namespace serve {

SERVE_FOR_HEAD_DIMS(template, chunkattn::half)

}  // namespace serve
