// The library for C: c++ -std=c++20 -O2 -march=native -shared -fPIC -I ../../include kernels.cpp
#define CHUNKATTN_C_KERNELS(X) X(64, 64, float, float)
#include <chunkattn/c/chunkattn.ipp>
