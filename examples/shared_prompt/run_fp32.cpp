#include "run.hpp"

template int shared_prompt::run<float>(const Settings&);
