// Shared memory without a name: only processes that get its descriptor can map it.
#pragma once

#include <cstddef>

#include "platform/system.h"

namespace monarch {

// The size of shared memory is a multiple of this: the page of every supported processor and system.
inline constexpr std::size_t shared_memory_unit = is_portable ? 16384 : 4096;

// Return a descriptor of zeroed memory whose size cannot change, so that no peer gets SIGBUS. Throws std::system_error.
int new_shared_memory(std::size_t size);

// Give the pages of a mapping back to the system; they are zero when they are used again. The portable implementation
// keeps them, because macOS has no such call for memory that several processes map.
void discard_pages(char* start, std::size_t bytes);

// Allow huge pages for the given part of a mapping, if the system allows them for shared memory at all.
void prefer_huge_pages(char* start, std::size_t bytes);

}  // namespace monarch
