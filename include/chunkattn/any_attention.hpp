// AnyAttention: attention whose head size, types and variant are chosen at run time. No kernel is
// compiled by whoever includes this; make_attention.hpp does that, in one unit of the program.
#pragma once

#include "front/any_attention.hpp"
