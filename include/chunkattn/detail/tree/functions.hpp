// The functions of TreeCore: what CHUNKATTN_EXTERN_KERNELS leaves out of a unit. See kernels.ipp.
#pragma once

#include "add.hpp"
#include "cache.hpp"
#include "commit.hpp"
#include "copy.hpp"
#include "finish.hpp"
#include "join.hpp"
#include "leave.hpp"
#include "write.hpp"
