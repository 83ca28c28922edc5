// Which addresses of the host are memory that a kernel may use: what operator new gave (while
// watched), static data, the stack, what others have mapped.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ptxrun {

/// Begins to note what operator new gives. What it gave before is not known.
void watch_allocations();

/// Forgets what is known of memory that operator new did not give, which may have gone.
void begin_launch();

/// Throws a Fault, which says `what`, unless `bytes` at `address` are such memory and aligned.
void check_global(std::uintptr_t address, std::size_t bytes, const char* what);

}  // namespace ptxrun
