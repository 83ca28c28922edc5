// The functions of TreeCore, see CHUNKATTN_BODIES (support/config.hpp).
#pragma once

#include "add.hpp"
#include "commit.hpp"
#include "copy.hpp"
#include "finish.hpp"
#include "join.hpp"
#include "leave.hpp"
#include "write.hpp"
