// Element-wise reduction of n buffers into one, in rank order. Knows memory and numbers; no groups, no waiting.
#pragma once

#include <cstddef>
#include <cstdint>

namespace monarch {

// The codes cross the Python boundary and the wire between ranks: append, never renumber.
enum class Dtype : std::uint8_t {
  f64, f32, bf16, f16, i8, u8, i16, u16, i32, u32, i64, u64, boolean, c64, c128,
  f8_e4m3fn, f8_e5m2, f8_e4m3fnuz, f8_e5m2fnuz,
  bytes,  // anything else, which only moves
  count
};
enum class ReduceOp : std::uint8_t { none, sum, avg, product, min, max, band, bor, bxor, count };

const char* name_of(Dtype dtype);
const char* name_of(ReduceOp op);
std::size_t size_of(Dtype dtype);

// dst[i] = src[0][i] op src[1][i] op ... op src[n-1][i], from left to right; 16-bit and 8-bit floats are combined in
// float32 and rounded once. A mean of integers is their sum, which wraps around, divided by n and truncated towards zero.
// dst may be one of the sources, and may not overlap one in any other way.
using ReduceKernel = void (*)(void* dst, const void* const* src, int n, std::size_t elements);

// The fastest one for this processor; nullptr where the pair makes no sense (band of floats).
ReduceKernel reduce_kernel(Dtype dtype, ReduceOp op);

}  // namespace monarch
