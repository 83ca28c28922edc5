#include "run.hpp"

template int shared_prompt::run<chunkattn::half>(const Settings&);
