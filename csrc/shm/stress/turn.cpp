#include "shm/stress/turn.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "shm/stress/world.h"

namespace monarch::stress {

namespace {

// Data repeat after so many elements, a prime: a misplaced chunk does not look like the right one.
constexpr int period = 251;
constexpr char poison = static_cast<char>(0xa5);

bool reduces(Collective c) {
  return c == Collective::all_reduce || c == Collective::reduce || c == Collective::reduce_scatter;
}
bool rooted(Collective c) {
  return c == Collective::broadcast || c == Collective::reduce || c == Collective::gather || c == Collective::scatter;
}
bool by_pieces(Collective c) {
  return c == Collective::scatter || c == Collective::reduce_scatter || c == Collective::all_to_all;
}

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
bool is_float(Dtype d) {
  return d == Dtype::f64 || d == Dtype::f32 || d == Dtype::bf16 || d == Dtype::f16 || is_complex(d);
}

// What rank `rank` brings as piece `piece`. Floats are small whole numbers, whose sums and products are exact.
Numbers brought(const Turn& turn, int rank, int piece) {
  Numbers numbers;
  for (int i = 0; i < period; ++i) {
    const std::uint64_t noise = mix(turn.salt ^ mix(static_cast<std::uint64_t>((rank * 64 + piece) * 1024 + i)));
    if (is_float(turn.dtype)) {
      numbers.real.push_back(static_cast<double>(noise % 7) - 3);
      if (is_complex(turn.dtype)) numbers.imaginary.push_back(static_cast<double>(noise / 7 % 7) - 3);
    } else {
      numbers.bits.push_back(turn.dtype == Dtype::boolean ? noise & 1 : noise);
    }
  }
  return numbers;
}

// To the nearest number with so many digits, ties to even.
double rounded(double x, int digits) {
  if (x == 0) return x;
  int exponent = 0;
  std::frexp(x, &exponent);
  const double unit = std::ldexp(1, exponent - digits);
  return std::nearbyint(x / unit) * unit;
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
    case Dtype::f16: append(to, static_cast<_Float16>(rounded(x, 11))); break;
    default: die("no float");
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
      case ReduceOp::sum: x += y; break;
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

// Means are taken in the precision that the kernels sum in: float32 for 16-bit floats.
void divide(Dtype dtype, std::vector<double>& sums, int n) {
  const bool twice = dtype == Dtype::f64 || dtype == Dtype::c128;
  for (double& x : sums) x = twice ? x / n : static_cast<double>(static_cast<float>(x) / static_cast<float>(n));
}

std::string reduced(const Turn& turn, int piece, int ranks) {
  Numbers sum = brought(turn, 0, piece);
  for (int r = 1; r < ranks; ++r) fold(turn.dtype, turn.op, sum, brought(turn, r, piece));
  if (turn.op == ReduceOp::avg) {
    divide(turn.dtype, sum.real, ranks);
    divide(turn.dtype, sum.imaginary, ranks);
  }
  return encode(turn.dtype, sum);
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

std::string input_pattern(const Turn& turn, int rank, int piece) {
  return encode(turn.dtype, brought(turn, rank, by_pieces(turn.collective) ? piece : 0));
}

std::uint64_t piece_bytes(const Turn& turn, int from, int to, int ranks) {
  return turn.collective == Collective::all_to_all ? turn.table[from * ranks + to] : turn.bytes;
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
  // A piece lies in whole cache lines, which moves the marks of collectives with several; then one element either way.
  if (below(random, 2) != 0) bytes = bytes / 64 * 64;
  const std::uint64_t nudged = bytes / element + static_cast<std::uint64_t>(below(random, 3));
  return nudged != 0 ? (nudged - 1) * element : 0;
}

}  // namespace

std::string Turn::text() const {
  std::string text = std::string(name_of(collective)) + "(" + name_of(dtype) + ", " + name_of(op) + ", " +
                     std::to_string(bytes) + " bytes, root " + std::to_string(root) + ") on group " + std::to_string(group);
  if (in_place) text += ", in place";
  if (asynchronous) text += ", async";
  if (odd_one >= 0) text += ", rank " + std::to_string(odd_one) + " disagrees";
  return text;
}

Turn random_turn(Random& random, int group, int ranks) {
  Turn turn;
  turn.group = group;
  turn.collective = static_cast<Collective>(below(random, static_cast<int>(Collective::count)));
  turn.salt = random();
  turn.asynchronous = below(random, 100) < 60;
  turn.in_place = below(random, 2) != 0;
  if (turn.collective == Collective::barrier) return turn;
  turn.dtype = static_cast<Dtype>(below(random, static_cast<int>(Dtype::count)));
  if (reduces(turn.collective)) {
    do {
      turn.dtype = static_cast<Dtype>(below(random, static_cast<int>(Dtype::c128) + 1));  // 8-bit floats only move here
      turn.op = static_cast<ReduceOp>(1 + below(random, static_cast<int>(ReduceOp::count) - 1));
    } while (reduce_kernel(turn.dtype, turn.op) == nullptr);
  }
  if (rooted(turn.collective)) turn.root = below(random, ranks);
  const std::uint64_t element = size_of(turn.dtype), pieces = by_pieces(turn.collective) ? static_cast<std::uint64_t>(ranks) : 1;
  if (turn.collective == Collective::all_to_all) {
    turn.in_place = false;
    for (int i = 0; i < ranks * ranks; ++i) turn.table.push_back(random_bytes(random, element, pieces));
    if (below(random, 2) != 0) std::fill(turn.table.begin(), turn.table.end(), turn.table[0]);
  } else {
    turn.bytes = random_bytes(random, element, pieces);
  }
  return turn;
}

Turn another_turn(const Turn& turn, Random& random, int ranks) {
  for (;;) {
    Turn other = random_turn(random, turn.group, ranks);
    other.asynchronous = turn.asynchronous;
    other.salt = turn.salt;
    // Often only one thing is different.
    const int change = below(random, 4);
    if (change != 0) {
      other = turn;
      if (change == 1) other.bytes += size_of(turn.dtype);
      if (change == 2 && turn.root >= 0) other.root = (turn.root + 1) % ranks;
      if (change == 3 && !turn.table.empty()) other.table[static_cast<std::size_t>(below(random, ranks * ranks))] += size_of(turn.dtype);
      if (turn.collective == Collective::barrier) continue;
    }
    if (!(other.header() == turn.header())) return other;
    // A table counts where the odd one's own part of it differs from what the others expect of it.
    if (turn.collective != Collective::all_to_all || other.table.size() != turn.table.size()) continue;
    for (int r = 0; r < ranks; ++r) {
      const int a = turn.odd_one, to = a * ranks + r, from = r * ranks + a;
      if (r != a && (other.table[to] != turn.table[to] || other.table[from] != turn.table[from])) return other;
    }
  }
}

Span Buffers::make(std::uint64_t bytes, std::uint64_t skew) {
  memory_.push_back(std::make_unique<char[]>(bytes + skew));
  std::memset(memory_.back().get(), poison, bytes + skew);
  return {memory_.back().get() + skew, bytes};
}

Buffers::Buffers(const Turn& turn, int rank, int ranks) {
  const Collective c = turn.collective;
  if (c == Collective::barrier) return;
  // Tensors begin anywhere, on a multiple of their element's size.
  const std::uint64_t skew = size_of(turn.dtype) * (mix(turn.salt + static_cast<std::uint64_t>(rank)) % 5);
  const bool root = rank == turn.root;
  const int ins = c == Collective::scatter ? (root ? ranks : 0) : by_pieces(c) ? ranks : 1;
  const int outs = c == Collective::gather ? (root ? ranks : 0) : c == Collective::all_gather || c == Collective::all_to_all ? ranks : 1;
  for (int r = 0; r < ins; ++r) {
    in.push_back(make(piece_bytes(turn, rank, r, ranks), skew));
    fill(in.back(), input_pattern(turn, rank, r));
  }
  for (int r = 0; r < outs; ++r) out.push_back(make(piece_bytes(turn, r, rank, ranks), skew));
  if (c == Collective::broadcast) {
    out = in;
    if (!root) std::memset(in[0].data, poison, in[0].bytes);
  } else if (turn.in_place && c != Collective::all_to_all) {
    const std::size_t mine = static_cast<std::size_t>(rank);
    if (!in.empty() && !out.empty()) out[outs == 1 ? 0 : mine] = in[ins == 1 ? 0 : mine];
  }
}

std::string Buffers::check(const Turn& turn, int rank, int ranks) const {
  const Collective c = turn.collective;
  if (c == Collective::barrier) return "";
  const bool ours = c != Collective::reduce || rank == turn.root;
  for (std::size_t i = 0; i < out.size() && ours; ++i) {
    const int r = static_cast<int>(i);
    std::string want;
    switch (c) {
      case Collective::all_reduce:
      case Collective::reduce: want = reduced(turn, 0, ranks); break;
      case Collective::reduce_scatter: want = reduced(turn, rank, ranks); break;
      case Collective::broadcast: want = input_pattern(turn, turn.root, 0); break;
      case Collective::scatter: want = input_pattern(turn, turn.root, rank); break;
      case Collective::all_to_all: want = input_pattern(turn, r, rank); break;
      default: want = input_pattern(turn, r, 0);
    }
    if (auto wrong = differs(out[i], want, "output " + std::to_string(i)); !wrong.empty()) return wrong;
  }
  if (!ours) {
    const std::string untouched(64, poison);
    const bool same = out[0].data == in[0].data;
    if (auto wrong = differs(out[0], same ? input_pattern(turn, rank, 0) : untouched, "a reduce's output off its root"); !wrong.empty()) return wrong;
  }
  return check_inputs(turn, rank, ranks);
}

std::string Buffers::check_inputs(const Turn& turn, int rank, int) const {
  if (turn.collective == Collective::broadcast) return "";
  for (std::size_t i = 0; i < in.size(); ++i) {
    const bool output = std::any_of(out.begin(), out.end(), [&](const Span& span) { return span.data == in[i].data; });
    if (output) continue;
    if (auto wrong = differs(in[i], input_pattern(turn, rank, static_cast<int>(i)), "input " + std::to_string(i)); !wrong.empty()) return wrong;
  }
  return "";
}

std::string Buffers::check_untouched(const Turn& turn, int rank, int ranks) const {
  const bool received = turn.collective == Collective::broadcast && rank != turn.root;
  for (std::size_t i = 0; i < out.size(); ++i) {
    std::string was(64, poison);
    for (std::size_t j = 0; j < in.size() && !received; ++j) {
      if (in[j].data == out[i].data) was = input_pattern(turn, rank, static_cast<int>(j));
    }
    if (auto wrong = differs(out[i], was, "output " + std::to_string(i) + " of an operation that moves nothing"); !wrong.empty()) return wrong;
  }
  return check_inputs(turn, rank, ranks);
}

}  // namespace monarch::stress
