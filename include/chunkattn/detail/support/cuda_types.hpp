// The 16-bit types of cuda_fp16.h and cuda_bf16.h, for programs that include these, before this or
// after it.
#pragma once

struct __half;
struct __nv_bfloat16;
