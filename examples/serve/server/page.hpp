// The page at /.
#pragma once

namespace serve {

/// page.html, as it was when this was built.
extern const char* const page;

}  // namespace serve
