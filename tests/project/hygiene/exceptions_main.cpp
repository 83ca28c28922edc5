// A unit with exceptions, linked with one without: a failure here is caught here.
#include <chunkattn/chunkattn.hpp>
#include <cstdio>
#include <cstring>

void fail_without_exceptions();  // ends the program with status 3, by that unit's handler

int main(int argc, char** argv) {
  if (argc > 1 && std::strcmp(argv[1], "without") == 0) {
    fail_without_exceptions();
    std::puts("FAILED: the unit without exceptions continues after a failure");
    return 1;
  }
  try {
    chunkattn::ThreadPool pool(-1);
  } catch (const chunkattn::InvalidArgument& error) {
    std::printf("caught: %s\n", error.what());
    return 0;
  }
  std::puts("FAILED: num_threads = -1 is not refused");
  return 1;
}
