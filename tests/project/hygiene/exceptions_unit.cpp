// Compiled with -fno-exceptions: failures go to the handler.
#include <chunkattn/chunkattn.hpp>
#include <cstdlib>

#if CHUNKATTN_EXCEPTIONS
#error "this unit is to be compiled with -fno-exceptions"
#endif

void fail_without_exceptions() {
  chunkattn::set_failure_handler([](const chunkattn::Error&) { std::_Exit(3); });
  chunkattn::ThreadPool pool(-1);
}
