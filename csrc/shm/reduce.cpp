#include "shm/reduce.h"

#include <array>

namespace monarch {

namespace isa_base {
ReduceKernel kernel(Dtype dtype, ReduceOp op);
}
namespace isa_avx2 {
ReduceKernel kernel(Dtype dtype, ReduceOp op);
}
namespace isa_avx512 {
ReduceKernel kernel(Dtype dtype, ReduceOp op);  // only those that it makes faster
}

namespace {

struct Named {
  const char* name;
  std::size_t size;
};
constexpr std::array<Named, static_cast<std::size_t>(Dtype::count)> dtypes{{
    {"float64", 8}, {"float32", 4}, {"bfloat16", 2}, {"float16", 2}, {"int8", 1},
    {"uint8", 1}, {"int16", 2}, {"uint16", 2}, {"int32", 4}, {"uint32", 4},
    {"int64", 8}, {"uint64", 8}, {"bool", 1}, {"complex64", 8}, {"complex128", 16}, {"float8_e4m3fn", 1},
    {"float8_e5m2", 1}, {"float8_e4m3fnuz", 1}, {"float8_e5m2fnuz", 1}, {"bytes", 1},
}};
constexpr std::array<const char*, static_cast<std::size_t>(ReduceOp::count)> ops{
    "no op", "SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"};

#if defined(__x86_64__)
bool has_avx2() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
}

bool has_avx512() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("f16c");
}
#endif

}  // namespace

const char* name_of(Dtype dtype) { return dtypes.at(static_cast<std::size_t>(dtype)).name; }
const char* name_of(ReduceOp op) { return ops.at(static_cast<std::size_t>(op)); }
std::size_t size_of(Dtype dtype) { return dtypes.at(static_cast<std::size_t>(dtype)).size; }

ReduceKernel reduce_kernel(Dtype dtype, ReduceOp op) {
#if defined(__x86_64__)
  static const bool avx2 = has_avx2(), avx512 = has_avx512();
  if (avx512) {
    if (const ReduceKernel kernel = isa_avx512::kernel(dtype, op)) return kernel;
  }
  if (avx2) return isa_avx2::kernel(dtype, op);
#endif
  return isa_base::kernel(dtype, op);
}

}  // namespace monarch
