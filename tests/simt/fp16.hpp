// The part of cuda_fp16.h that the backend uses: another type of the same bits as half.
#pragma once

#include <cstdint>

struct __half {
  std::uint16_t x;
};
