// The reductions of bfloat16 and float16 for x86-64 processors with AVX-512; reduce.cpp asks the processor first. Those of
// other types wait for memory and are no faster.
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
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,f16c"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,f16c,prefer-vector-width=512")
#endif
#define MONARCH_ISA isa_avx512
#define MONARCH_F16C 1
#define MONARCH_ONLY_16_BITS 1
#include "shm/reduce_kernels.inc"
#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif  // __x86_64__
