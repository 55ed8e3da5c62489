// Random bytes of the system, for keys.
#pragma once

#include <cstddef>

#include <sys/random.h>
#include <unistd.h>

#include "platform/system.h"

namespace monarch {

// At most 256 bytes. False: errno says why.
inline bool fill_random(void* to, std::size_t bytes) {
#if defined(MONARCH_PORTABLE)
  return getentropy(to, bytes) == 0;
#else
  return getrandom(to, bytes, 0) == static_cast<ssize_t>(bytes);
#endif
}

}  // namespace monarch
