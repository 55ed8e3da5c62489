// The reductions for any processor of the architecture; on aarch64 that has NEON already.
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <complex>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "shm/reduce.h"

#define MONARCH_ISA isa_base
#include "shm/reduce_kernels.inc"
