#include "shm/stress/step.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "shm/stress/fixture.h"

namespace monarch::stress {

namespace {

// Data repeat after a prime number of elements, so that a misplaced chunk is detected.
constexpr int period = 251;

std::uint64_t mix(std::uint64_t x) {  // splitmix64
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

// Elements ------------------------------------------------------------------------------------------------------------

// A period of elements as numbers: floats (two for a complex number) or integers as bits.
struct Numbers {
  std::vector<double> real, imaginary;
  std::vector<std::uint64_t> bits;
};

bool is_complex(Dtype d) { return d == Dtype::c64 || d == Dtype::c128; }
bool is_float8(Dtype d) { return d >= Dtype::f8_e4m3fn && d <= Dtype::f8_e5m2fnuz; }
bool is_float(Dtype d) {
  return d == Dtype::f64 || d == Dtype::f32 || d == Dtype::bf16 || d == Dtype::f16 || is_complex(d) || is_float8(d);
}

// What rank `rank` brings as piece `piece`. Floats are small whole numbers, whose sums and products are exact.
Numbers brought(const Step& step, int rank, int piece) {
  Numbers numbers;
  for (int i = 0; i < period; ++i) {
    const std::uint64_t noise = mix(step.salt ^ mix(static_cast<std::uint64_t>((rank * 64 + piece) * 1024 + i)));
    if (is_float(step.dtype)) {
      numbers.real.push_back(static_cast<double>(noise % 7) - 3);
      if (is_complex(step.dtype)) numbers.imaginary.push_back(static_cast<double>(noise / 7 % 7) - 3);
    } else {
      numbers.bits.push_back(step.dtype == Dtype::boolean ? noise & 1 : noise);
    }
  }
  return numbers;
}

// Round to the nearest number with this many binary digits, ties to even.
double rounded(double x, int digits) {
  if (x == 0) return x;
  int exponent = 0;
  std::frexp(x, &exponent);
  const double unit = std::ldexp(1, exponent - digits);
  return std::nearbyint(x / unit) * unit;
}

// The code of a float8, found by a search of all finite numbers, which are larger than the steps' numbers. The kernels
// compute it instead.
char float8(Dtype dtype, double x) {
  const bool five = dtype == Dtype::f8_e5m2 || dtype == Dtype::f8_e5m2fnuz;
  const bool one_zero = dtype == Dtype::f8_e4m3fnuz || dtype == Dtype::f8_e5m2fnuz;
  const int mantissa = five ? 2 : 3, bias = (five ? 15 : 7) + (one_zero ? 1 : 0);
  int best = 0;
  double error = std::abs(x);
  for (int code = 1; code < 0x78; ++code) {
    const int exponent = code >> mantissa, fraction = code & ((1 << mantissa) - 1);
    const double whole = exponent == 0 ? fraction : fraction + (1 << mantissa);
    const double off = std::abs(std::abs(x) - std::ldexp(whole, std::max(exponent, 1) - bias - mantissa));
    if (off < error || (off == error && code % 2 == 0)) best = code, error = off;
  }
  return static_cast<char>(best | (std::signbit(x) && !(one_zero && best == 0) ? 0x80 : 0));
}

// The code of a float16 that equals x: 0, or a normal number.
std::uint16_t float16(double x) {
  int exponent = 0;
  const double fraction = std::frexp(std::abs(x), &exponent);
  const int code = x == 0 ? 0 : ((exponent + 14) << 10) + static_cast<int>(fraction * 2048) - 1024;
  return static_cast<std::uint16_t>(code | (std::signbit(x) ? 0x8000 : 0));
}

template <class T>
void append(std::string& to, T value) {
  to.append(reinterpret_cast<const char*>(&value), sizeof value);
}

void append_float(std::string& to, Dtype dtype, double x) {
  switch (dtype) {
    case Dtype::f64:
    case Dtype::c128: append(to, x); break;
    case Dtype::f32:
    case Dtype::c64: append(to, static_cast<float>(x)); break;
    case Dtype::bf16:
      append(to, static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(static_cast<float>(rounded(x, 8))) >> 16));
      break;
    case Dtype::f16: append(to, float16(rounded(x, 11))); break;
    default: to += float8(dtype, x);
  }
}

std::string encode(Dtype dtype, const Numbers& numbers) {
  std::string bytes;
  for (int i = 0; i < period; ++i) {
    if (is_float(dtype)) {
      append_float(bytes, dtype, numbers.real[i]);
      if (is_complex(dtype)) append_float(bytes, dtype, numbers.imaginary[i]);
    } else {
      bytes.append(reinterpret_cast<const char*>(&numbers.bits[i]), size_of(dtype));  // little end first
    }
  }
  return bytes;
}

// Reduction -----------------------------------------------------------------------------------------------------------

void fold_floats(ReduceOp op, Numbers& a, const Numbers& b) {
  for (int i = 0; i < period; ++i) {
    double& x = a.real[i];
    const double y = b.real[i];
    if (!a.imaginary.empty()) {
      double& xi = a.imaginary[i];
      const double yi = b.imaginary[i], re = x * y - xi * yi, im = x * yi + xi * y;
      const bool product = op == ReduceOp::product;
      x = product ? re : x + y;
      xi = product ? im : xi + yi;
    } else if (op == ReduceOp::product) {
      x *= y;
    } else if (op == ReduceOp::min) {
      x = std::min(x, y);
    } else if (op == ReduceOp::max) {
      x = std::max(x, y);
    } else {
      x += y;
    }
  }
}

template <class T>
void fold_integers(ReduceOp op, Numbers& a, const Numbers& b) {
  for (int i = 0; i < period; ++i) {
    std::uint64_t& x = a.bits[i];
    const std::uint64_t y = b.bits[i];
    const T tx = static_cast<T>(x), ty = static_cast<T>(y);
    switch (op) {
      case ReduceOp::sum:
      case ReduceOp::avg: x += y; break;
      case ReduceOp::product: x *= y; break;
      case ReduceOp::min: x = ty < tx ? y : x; break;
      case ReduceOp::max: x = ty > tx ? y : x; break;
      case ReduceOp::band: x &= y; break;
      case ReduceOp::bor: x |= y; break;
      case ReduceOp::bxor: x ^= y; break;
      default: die("no integer op");
    }
  }
}

// Bools: the sum is "any", the product "all".
void fold_bools(ReduceOp op, Numbers& a, const Numbers& b) {
  for (int i = 0; i < period; ++i) {
    const std::uint64_t y = b.bits[i];
    std::uint64_t& x = a.bits[i];
    if (op == ReduceOp::bxor) x ^= y;
    else if (op == ReduceOp::sum || op == ReduceOp::max || op == ReduceOp::bor) x |= y;
    else x &= y;
  }
}

void fold(Dtype dtype, ReduceOp op, Numbers& a, const Numbers& b) {
  switch (dtype) {
    case Dtype::boolean: return fold_bools(op, a, b);
    case Dtype::i8: return fold_integers<std::int8_t>(op, a, b);
    case Dtype::u8: return fold_integers<std::uint8_t>(op, a, b);
    case Dtype::i16: return fold_integers<std::int16_t>(op, a, b);
    case Dtype::u16: return fold_integers<std::uint16_t>(op, a, b);
    case Dtype::i32: return fold_integers<std::int32_t>(op, a, b);
    case Dtype::u32: return fold_integers<std::uint32_t>(op, a, b);
    case Dtype::i64: return fold_integers<std::int64_t>(op, a, b);
    case Dtype::u64: return fold_integers<std::uint64_t>(op, a, b);
    default: return fold_floats(op, a, b);
  }
}

// Means are taken in the precision that the kernels sum in: float32 for smaller floats.
void divide_floats(Dtype dtype, std::vector<double>& sums, int n) {
  const bool twice = dtype == Dtype::f64 || dtype == Dtype::c128;
  for (double& x : sums) x = twice ? x / n : static_cast<double>(static_cast<float>(x) / static_cast<float>(n));
}

// Sums wrap around in T, and their quotients are truncated towards zero.
template <class T>
void divide_integers(std::vector<std::uint64_t>& sums, int n) {
  for (std::uint64_t& x : sums) x = static_cast<std::uint64_t>(static_cast<T>(x) / n);
}

void divide(Dtype dtype, Numbers& sums, int n) {
  switch (dtype) {
    case Dtype::i8: return divide_integers<std::int8_t>(sums.bits, n);
    case Dtype::u8: return divide_integers<std::uint8_t>(sums.bits, n);
    case Dtype::i16: return divide_integers<std::int16_t>(sums.bits, n);
    case Dtype::u16: return divide_integers<std::uint16_t>(sums.bits, n);
    case Dtype::i32: return divide_integers<std::int32_t>(sums.bits, n);
    case Dtype::u32: return divide_integers<std::uint32_t>(sums.bits, n);
    case Dtype::i64: return divide_integers<std::int64_t>(sums.bits, n);
    case Dtype::u64: return divide_integers<std::uint64_t>(sums.bits, n);
    default:
      divide_floats(dtype, sums.real, n);
      divide_floats(dtype, sums.imaginary, n);
  }
}

std::string reduced(const Step& step, int piece, int ranks) {
  Numbers sum = brought(step, 0, piece);
  for (int r = 1; r < ranks; ++r) fold(step.dtype, step.op, sum, brought(step, r, piece));
  if (step.op == ReduceOp::avg) divide(step.dtype, sum, ranks);
  return encode(step.dtype, sum);
}

// Memory --------------------------------------------------------------------------------------------------------------

void fill(const Span& span, const std::string& pattern) {
  for (std::uint64_t at = 0; at < span.bytes; at += pattern.size()) {
    std::memcpy(span.data + at, pattern.data(), std::min<std::uint64_t>(pattern.size(), span.bytes - at));
  }
}

std::string differs(const Span& span, const std::string& pattern, const std::string& what) {
  for (std::uint64_t at = 0; at < span.bytes; at += pattern.size()) {
    const std::uint64_t n = std::min<std::uint64_t>(pattern.size(), span.bytes - at);
    if (std::memcmp(span.data + at, pattern.data(), n) == 0) continue;
    std::uint64_t i = 0;
    while (span.data[at + i] == pattern[i]) ++i;
    return what + " is wrong at byte " + std::to_string(at + i) + " of " + std::to_string(span.bytes);
  }
  return "";
}

std::string input_pattern(const Step& step, int rank, int piece) {
  return encode(step.dtype, brought(step, rank, by_pieces(step.collective) ? piece : 0));
}

std::uint64_t piece_bytes(const Step& step, int from, int to, int ranks) {
  return step.collective == Collective::all_to_all ? step.table[from * ranks + to] : step.bytes;
}

// Piece sizes around what changes the route: a cache line, a slot, a chunk, the stage and more than that.
std::uint64_t random_bytes(Random& random, std::uint64_t element, std::uint64_t pieces) {
  constexpr std::uint64_t kib = 1 << 10;
  const std::uint64_t all[] = {0, 64, 4 * kib, slot_bytes, slot_bytes, 32 * kib, 64 * kib, 128 * kib, 256 * kib, 512 * kib, 1024 * kib};
  // Large ones are few: the sanitizers look at every byte of them.
  const int which = below(random, 100);
  std::uint64_t bytes = 0;
  if (which < 40) {
    bytes = static_cast<std::uint64_t>(below(random, 600));
  } else if (which < 60) {
    bytes = static_cast<std::uint64_t>(below(random, 3 * static_cast<int>(slot_bytes))) / pieces;
  } else if (which < 85) {
    bytes = all[below(random, 7)] / pieces;
  } else {
    bytes = all[7 + below(random, 4)] / pieces;
  }
  // Pieces occupy whole cache lines, which moves the size limits of collectives with several pieces; then one element
  // more or less.
  if (below(random, 2) != 0) bytes = bytes / 64 * 64;
  const std::uint64_t nudged = bytes / element + static_cast<std::uint64_t>(below(random, 3));
  return nudged != 0 ? (nudged - 1) * element : 0;
}

}  // namespace

Header Step::header(int rank) const {
  if (!is_message()) return {collective == Collective::all_to_all ? 0 : bytes, root, collective, dtype, op, Offer::stage};
  const bool sends = rank == root;
  return {bytes, sends ? to : from_any ? -1 : root, sends ? Collective::send : Collective::recv, dtype, op, Offer::stage};
}

std::string Step::text() const {
  std::string text = std::string(name_of(collective)) + "(" + name_of(dtype) + ", " + name_of(op) + ", " +
                     std::to_string(bytes) + " bytes, root " + std::to_string(root) + ") on group " + std::to_string(group);
  if (is_message()) text += ", to " + std::to_string(to) + ", tag " + std::to_string(tag);
  if (from_any) text += ", from any";
  if (crossed) text += ", crossed";
  text += std::string(", in ") + name_of(location);
  if (in_place) text += ", in place";
  if (asynchronous) text += ", async";
  if (mismatched_rank >= 0) text += ", rank " + std::to_string(mismatched_rank) + " disagrees";
  return text;
}

Step random_step(Random& random, int group, int ranks) {
  Step step;
  step.group = group;
  step.collective = static_cast<Collective>(below(random, static_cast<int>(Collective::send) + (ranks > 1 ? 2 : 0)));
  step.salt = random();
  step.asynchronous = below(random, 100) < 60;
  step.in_place = below(random, 2) != 0;
  constexpr Location locations[] = {Location::heap, Location::heap, Location::pages, Location::arena, Location::arena, Location::mixed};
  step.location = locations[below(random, 6)];
  if (step.collective == Collective::barrier) return step;
  step.dtype = static_cast<Dtype>(below(random, static_cast<int>(Dtype::count)));
  if (reduces(step.collective)) {
    do {
      step.dtype = static_cast<Dtype>(below(random, static_cast<int>(Dtype::bytes)));
      step.op = static_cast<ReduceOp>(1 + below(random, static_cast<int>(ReduceOp::count) - 1));
    } while (reduce_kernel(step.dtype, step.op) == nullptr);
  }
  if (has_root(step.collective)) step.root = below(random, ranks);
  const std::uint64_t element = size_of(step.dtype), pieces = by_pieces(step.collective) ? static_cast<std::uint64_t>(ranks) : 1;
  if (step.collective >= Collective::send) {
    step.collective = Collective::send;
    step.root = below(random, ranks);
    step.to = (step.root + 1 + below(random, ranks - 1)) % ranks;
    step.tag = below(random, 3);
    step.from_any = below(random, 5) == 0;
    step.bytes = random_bytes(random, element, 1);
  } else if (step.collective == Collective::all_to_all) {
    for (int i = 0; i < ranks * ranks; ++i) step.table.push_back(random_bytes(random, element, pieces));
    if (below(random, 2) != 0) std::fill(step.table.begin(), step.table.end(), step.table[0]);
    else step.in_place = false;
  } else {
    step.bytes = random_bytes(random, element, pieces);
  }
  return step;
}

std::vector<Step> steps_for_every_algorithm(Random& random, int group, int ranks) {
  std::vector<Step> steps;
  const auto add = [&](Collective collective, Location location, std::uint64_t bytes) -> Step& {
    Step step;
    step.group = group;
    step.collective = collective;
    step.dtype = Dtype::f32;
    if (reduces(collective)) step.op = ReduceOp::sum;
    if (has_root(collective)) step.root = below(random, ranks);
    step.bytes = bytes;
    if (collective == Collective::all_to_all) step.table.assign(static_cast<std::size_t>(ranks * ranks), bytes);
    step.location = location;
    step.asynchronous = below(random, 2) != 0;
    step.salt = random();
    return steps.emplace_back(std::move(step));
  };
  // More than a slot holds, on either side of where reading begins (main.cpp).
  constexpr std::uint64_t little = 24'000, some = 40'000;
  for (int c = static_cast<int>(Collective::all_reduce); c < static_cast<int>(Collective::send); ++c) {
    const auto collective = static_cast<Collective>(c);
    add(collective, Location::heap, 256);
    add(collective, Location::heap, little);
    add(collective, Location::heap, some);
    if (collective == Collective::all_reduce) add(collective, Location::arena, largest_pooled).in_place = true;
    else add(collective, Location::arena, some);
    if (collective == Collective::all_to_all) add(collective, Location::arena, some).in_place = true;
    if (reduces(collective) || collective == Collective::broadcast) continue;
    add(collective, Location::pages, some);
    if (collective != Collective::scatter) add(collective, Location::mixed, some);
  }
  for (int d = 0; d < static_cast<int>(Dtype::bytes); ++d) {
    add(Collective::all_reduce, Location::heap, 256).dtype = static_cast<Dtype>(d);
  }
  for (const std::uint64_t bytes : {std::uint64_t{0}, some, 10 * some, std::uint64_t{largest_p2p_ring} + some}) {
    for (int i = 0; i < 4; ++i) {
      Step& step = add(Collective::send, Location::heap, bytes);
      step.root = below(random, ranks);
      step.to = (step.root + 1 + below(random, ranks - 1)) % ranks;
      step.from_any = i == 1;
      step.crossed = i == 2;
      step.asynchronous = i == 0;
      if (i == 3) step.mismatched_rank = step.to;
    }
  }
  return steps;
}

Step different_step(const Step& step, Random& random, int ranks) {
  if (step.is_message()) {
    Step other = step;
    other.bytes += size_of(step.dtype);
    return other;
  }
  for (;;) {
    Step other = random_step(random, step.group, ranks);
    other.asynchronous = step.asynchronous;
    other.salt = step.salt;
    // Often only one thing is different.
    const int change = below(random, 4);
    if (change != 0) {
      other = step;
      if (change == 1) other.bytes += size_of(step.dtype);
      if (change == 2 && step.root >= 0) other.root = (step.root + 1) % ranks;
      if (change == 3 && !step.table.empty()) {
        other.table[static_cast<std::size_t>(below(random, ranks * ranks))] += size_of(step.dtype);
        other.in_place = false;
      }
      if (step.collective == Collective::barrier) continue;
    }
    if (other.is_message()) continue;
    if (!(other.header(0) == step.header(0))) return other;
    // A table counts where the odd one's own part of it differs from what the others expect of it.
    if (step.collective != Collective::all_to_all || other.table.size() != step.table.size()) continue;
    for (int r = 0; r < ranks; ++r) {
      const int a = step.mismatched_rank, to = a * ranks + r, from = r * ranks + a;
      if (r != a && (other.table[to] != step.table[to] || other.table[from] != step.table[from])) return other;
    }
  }
}

Buffers::Buffers(const Step& step, int rank, int ranks, const std::shared_ptr<ArenaPool>& pool) {
  const Collective c = step.collective;
  if (c == Collective::barrier) return;
  // Tensors begin anywhere, on a multiple of their element's size.
  const std::uint64_t skew = size_of(step.dtype) * (mix(step.salt + static_cast<std::uint64_t>(rank)) % 5);
  Location location = step.location;
  if (location == Location::mixed) location = (rank + step.salt) % 2 != 0 ? Location::arena : Location::heap;
  const auto make = [&](std::uint64_t bytes) { return memory_.emplace_back(location, bytes, skew, pool).span(); };
  const bool root = rank == step.root;
  const int ins = c == Collective::scatter ? (root ? ranks : 0) : step.is_message() ? (root ? 1 : 0) : by_pieces(c) ? ranks : 1;
  const bool all = c == Collective::all_gather || c == Collective::all_to_all;
  const int outs = c == Collective::gather ? (root ? ranks : 0) : step.is_message() ? (root ? 0 : 1) : all ? ranks : 1;
  for (int r = 0; r < ins; ++r) {
    in.push_back(make(piece_bytes(step, rank, r, ranks)));
    fill(in.back(), input_pattern(step, rank, r));
  }
  if (c == Collective::broadcast) {
    out = in;
    if (!root) std::memset(in[0].data, poison, in[0].bytes);
    return;
  }
  const std::size_t mine = static_cast<std::size_t>(rank);
  for (int r = 0; r < outs; ++r) {
    const bool same = step.in_place && !in.empty() && (outs == 1 || r == rank);
    if (c == Collective::all_to_all && step.in_place) out.push_back(in[static_cast<std::size_t>(r)]);  // others still read it
    else out.push_back(same ? in[ins == 1 ? 0 : mine] : make(piece_bytes(step, r, rank, ranks)));
  }
}

std::string Buffers::check(const Step& step, int rank, int ranks) const {
  const Collective c = step.collective;
  if (c == Collective::barrier) return "";
  const bool ours = c != Collective::reduce || rank == step.root;
  for (std::size_t i = 0; i < out.size() && ours; ++i) {
    const int r = static_cast<int>(i);
    std::string want;
    switch (c) {
      case Collective::all_reduce:
      case Collective::reduce: want = reduced(step, 0, ranks); break;
      case Collective::reduce_scatter: want = reduced(step, rank, ranks); break;
      case Collective::send:
      case Collective::broadcast: want = input_pattern(step, step.root, 0); break;
      case Collective::scatter: want = input_pattern(step, step.root, rank); break;
      case Collective::all_to_all: want = input_pattern(step, r, rank); break;
      default: want = input_pattern(step, r, 0);
    }
    if (auto wrong = differs(out[i], want, "output " + std::to_string(i)); !wrong.empty()) return wrong;
  }
  if (!ours) {
    const std::string untouched(64, poison);
    const bool same = out[0].data == in[0].data;
    if (auto wrong = differs(out[0], same ? input_pattern(step, rank, 0) : untouched, "a reduce's output off its root"); !wrong.empty()) return wrong;
  }
  return check_inputs(step, rank, ranks);
}

std::string Buffers::check_inputs(const Step& step, int rank, int) const {
  for (const Memory& memory : memory_) {
    if (!memory.edges_untouched()) return "memory beside a buffer was written to";
  }
  if (step.collective == Collective::broadcast) return "";
  for (std::size_t i = 0; i < in.size(); ++i) {
    const bool output = std::any_of(out.begin(), out.end(), [&](const Span& span) { return span.data == in[i].data; });
    if (output) continue;
    if (auto wrong = differs(in[i], input_pattern(step, rank, static_cast<int>(i)), "input " + std::to_string(i)); !wrong.empty()) return wrong;
  }
  return "";
}

std::string Buffers::check_untouched(const Step& step, int rank, int ranks) const {
  const bool received = step.collective == Collective::broadcast && rank != step.root;
  for (std::size_t i = 0; i < out.size(); ++i) {
    std::string was(64, poison);
    for (std::size_t j = 0; j < in.size() && !received; ++j) {
      if (in[j].data == out[i].data) was = input_pattern(step, rank, static_cast<int>(j));
    }
    if (auto wrong = differs(out[i], was, "output " + std::to_string(i) + " of an operation that moves nothing"); !wrong.empty()) return wrong;
  }
  return check_inputs(step, rank, ranks);
}

}  // namespace monarch::stress
