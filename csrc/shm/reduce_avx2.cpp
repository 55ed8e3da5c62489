// The reductions for x86-64 processors with AVX2; reduce.cpp asks the processor first.
#if defined(__x86_64__)
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <complex>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include <immintrin.h>

#include "shm/reduce.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,f16c")
#endif
#define MONARCH_ISA isa_avx2
#define MONARCH_F16C 1
#include "shm/reduce_kernels.inc"
#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif  // __x86_64__
