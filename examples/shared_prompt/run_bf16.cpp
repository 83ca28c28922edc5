#include "run.hpp"

template int shared_prompt::run<chunkattn::bfloat16>(const Settings&);
