#include <chunkattn/element.hpp>
#include <chunkattn/version.hpp>

static_assert(CHUNKATTN_VERSION > 0 && sizeof(chunkattn::half) == 2);
