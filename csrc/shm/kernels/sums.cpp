// What the reduction kernels of one instruction set compute, as one checksum for each dtype, op and number of sources:
// all sets and processors must print the same. tests/shm/test_aarch64.py compares them.
//
//   sums base|avx2|avx512
//
// With avx512 only bfloat16 and float16 have kernels.
// Exits with 3 where the processor has no such instructions. The inputs are the same everywhere: NaNs, infinities,
// subnormal numbers, zeros of both signs, numbers of all sizes. Which NaN a result is, is the processor's own choice
// (inf - inf is a negative one on x86-64, a positive one on aarch64): every NaN counts as the same one.
#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

#include "shm/reduce.h"

namespace monarch {

namespace isa_base {
ReduceKernel kernel(Dtype dtype, ReduceOp op);
}
namespace isa_avx2 {
ReduceKernel kernel(Dtype dtype, ReduceOp op);
}
namespace isa_avx512 {
ReduceKernel kernel(Dtype dtype, ReduceOp op);
}

namespace {

// Odd ones: less than a vector, some vectors and a rest, more than the kernels' block of accumulators.
constexpr std::size_t sizes[] = {1, 3, 31, 257, 1021, 9001};
constexpr std::size_t largest = 9001;

std::uint64_t mix(std::uint64_t x) {  // splitmix64
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

// A floating-point format; of complex numbers, that of a part.
struct Format {
  int bytes = 0, exponent = 0, mantissa = 0;
};

Format format_of(Dtype dtype) {
  switch (dtype) {
    case Dtype::f64:
    case Dtype::c128: return {8, 11, 52};
    case Dtype::f32:
    case Dtype::c64: return {4, 8, 23};
    case Dtype::bf16: return {2, 8, 7};
    case Dtype::f16: return {2, 5, 10};
    default: return {};  // 8 bits take every value at random anyway
  }
}

std::uint64_t number(Dtype dtype, std::uint64_t noise) {
  if (dtype == Dtype::boolean) return noise & 1;
  const Format format = format_of(dtype);
  if (format.bytes == 0) return noise;
  const std::uint64_t one = 1, fraction = (one << format.mantissa) - 1, exponents = (one << format.exponent) - 1;
  const std::uint64_t sign = (noise & 1) << (format.exponent + format.mantissa), random = noise >> 8;
  const auto make = [&](std::uint64_t exponent, std::uint64_t rest) { return sign | exponent << format.mantissa | (rest & fraction); };
  switch (noise >> 1 & 15) {
    case 0: return make(0, 0);
    case 1: return make(0, 1);
    case 2: return make(0, fraction);
    case 3: return make(0, random);
    case 4: return make(exponents, 0);
    case 5: return make(exponents, fraction / 2 + 1);
    case 6: return make(exponents - 1, fraction);
    case 7: return make(1, random);
    case 8:
    case 9: return make(random % exponents, random >> 12);
    // Near one, so that sums have to round.
    default: return make(exponents / 2 - 6 + random % 12, random >> 12);
  }
}

std::vector<char> source(Dtype dtype, int which) {
  const int part = format_of(dtype).bytes != 0 ? format_of(dtype).bytes : static_cast<int>(size_of(dtype));
  std::vector<char> bytes(largest * size_of(dtype));
  std::uint64_t at = static_cast<std::uint64_t>(which + 1) << 32 | static_cast<std::uint64_t>(dtype) << 24;
  for (std::size_t i = 0; i < bytes.size(); i += static_cast<std::size_t>(part)) {
    const std::uint64_t value = number(dtype, mix(at++));
    std::memcpy(bytes.data() + i, &value, static_cast<std::size_t>(part));  // little end first
  }
  return bytes;
}

bool is_nan(Dtype dtype, std::uint64_t bits) {
  switch (dtype) {
    case Dtype::f8_e4m3fn: return (bits & 0x7f) == 0x7f;
    case Dtype::f8_e5m2: return (bits & 0x7f) > 0x7c;
    case Dtype::f8_e4m3fnuz:
    case Dtype::f8_e5m2fnuz: return bits == 0x80;
    default: break;
  }
  const Format format = format_of(dtype);
  if (format.bytes == 0) return false;
  const std::uint64_t magnitude = bits & ((std::uint64_t{1} << (format.exponent + format.mantissa)) - 1);
  return magnitude > ((std::uint64_t{1} << format.exponent) - 1) << format.mantissa;
}

std::uint64_t checksum(Dtype dtype, const std::vector<char>& bytes, std::uint64_t sum) {
  const std::size_t part = format_of(dtype).bytes != 0 ? static_cast<std::size_t>(format_of(dtype).bytes) : size_of(dtype);
  for (std::size_t i = 0; i < bytes.size(); i += part) {
    std::uint64_t bits = 0;
    std::memcpy(&bits, bytes.data() + i, part);
    sum = mix(sum ^ (is_nan(dtype, bits) ? 0x7ff8dead : bits));
  }
  return sum;
}

void print_all(ReduceKernel (*kernel)(Dtype, ReduceOp)) {
  for (int d = 0; d < static_cast<int>(Dtype::count); ++d) {
    const auto dtype = static_cast<Dtype>(d);
    const std::array<std::vector<char>, 3> sources{source(dtype, 0), source(dtype, 1), source(dtype, 2)};
    const std::array<const void*, 3> from{sources[0].data(), sources[1].data(), sources[2].data()};
    for (int o = 1; o < static_cast<int>(ReduceOp::count); ++o) {
      const ReduceKernel reduce = kernel(dtype, static_cast<ReduceOp>(o));
      if (reduce == nullptr) continue;
      for (int n = 2; n <= 3; ++n) {
        std::uint64_t sum = 0;
        for (const std::size_t size : sizes) {
          std::vector<char> to(size * size_of(dtype));
          reduce(to.data(), from.data(), n, size);
          sum = checksum(dtype, to, sum);
        }
        std::printf("%s %s of %d: %016llx\n", name_of(dtype), name_of(static_cast<ReduceOp>(o)), n, static_cast<unsigned long long>(sum));
      }
    }
  }
}

}  // namespace

}  // namespace monarch

int main(int argc, char** argv) {
  using namespace monarch;
  if (argc == 2 && std::strcmp(argv[1], "base") == 0) {
    print_all(isa_base::kernel);
    return 0;
  }
  if (argc == 2 && std::strcmp(argv[1], "avx2") == 0) {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) {
      print_all(isa_avx2::kernel);
      return 0;
    }
#endif
    std::fputs("sums: this processor has no AVX2\n", stderr);
    return 3;
  }
  if (argc == 2 && std::strcmp(argv[1], "avx512") == 0) {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("f16c")) {
      print_all(isa_avx512::kernel);
      return 0;
    }
#endif
    std::fputs("sums: this processor has no AVX-512\n", stderr);
    return 3;
  }
  std::fputs("usage: sums base|avx2|avx512\n", stderr);
  return 2;
}
