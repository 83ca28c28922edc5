// The version of the library: the only place where it is written down.
#pragma once

#define CHUNKATTN_VERSION_MAJOR 0
#define CHUNKATTN_VERSION_MINOR 4
#define CHUNKATTN_VERSION_PATCH 0

/// One number to compare in an #if: 0.4.0 is 400.
#define CHUNKATTN_VERSION \
  (CHUNKATTN_VERSION_MAJOR * 10000 + CHUNKATTN_VERSION_MINOR * 100 + CHUNKATTN_VERSION_PATCH)
