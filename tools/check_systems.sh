#!/usr/bin/env bash
# check_systems.sh [FOLDER]: lists what only Linux, or only POSIX, has in the headers (include) outside of an #if that
# names a system, and fails if there is something. A file that one system alone includes says so in its name.
set -euo pipefail
cd "$(dirname "$0")/.."
from=${1:-include}
of_one_system() {  # of_one_system FILE...: such lines
  awk '
    FNR == 1 { depth = 0 }
    /^ *# *if/ { guard[++depth] = /_WIN32|__linux__|__unix__|__APPLE__|_SC_[A-Z]|CHUNKATTN_ASKS_ARM/; next }
    /^ *# *(else|elif)/ { if (/_WIN32|__linux__|__unix__|__APPLE__/) guard[depth] = 1; next }
    /^ *# *endif/ { --depth; next }
    {
      for (i = 1; i <= depth; ++i) if (guard[i]) next
      code = $0
      sub(/\/\/.*/, "", code)
      if (code ~ /#include <(sys|linux|asm)\/|#include <(unistd|pthread|fcntl|sched|dirent|dlfcn|signal|malloc|poll|semaphore|io|direct|process|windows)[.]h>/ ||
          code ~ /(^|[^a-z_])(sched_[a-z]+|pthread_[a-z_]+|getpid|mmap|munmap|madvise|mprotect|memfd_create|renameat2?|posix_[a-z]+|prctl|sysconf|getauxval|dlsym|dlopen|flock|futex|syscall|getrusage|malloc_usable_size|aligned_alloc|setenv|usleep|gettid) *\(/ ||
          code ~ /(^|[^A-Za-z0-9_])::fork *\(|"syscall|MAP_POPULATE|MADV_|O_DIRECT|RTLD_|(^|[^a-z_])(pid_t|ssize_t|cpu_set_t)([^a-z_]|$)/)
        print FILENAME ":" FNR ": " $0
    }' "$@"
}
posix=$(find "$from" -name '*_posix.hpp')
# shellcheck disable=SC2086
[ "$(of_one_system $posix | wc -l)" -ge 10 ] || { echo "FAILED: not seen in ${posix:-a file of POSIX alone}"; exit 1; }
mapfile -t files < <(find "$from" -name '*.hpp' -o -name '*.ipp' -o -name '*.cuh' -o -name '*.h' | grep -v '_posix[.]hpp$' | sort)
if of_one_system "${files[@]}" | grep .; then
  echo "FAILED: the lines above are for some systems only, and no #if says which"
  exit 1
fi
echo "no call or header of one system alone without an #if that names it (${#files[@]} files)"
