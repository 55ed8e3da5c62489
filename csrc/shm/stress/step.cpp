#include "shm/stress/step.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "shm/stress/fixture.h"

namespace monarch::stress {

namespace {

// Data repeat after so many elements, a prime: a misplaced chunk does not look like the right one.
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

// The code of a float8, found among all of its finite numbers, which are too small for the turns' numbers to leave. The
// kernels compute it instead.
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

// The code of a float16 of which x is an exact value: 0, or a normal number.
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

std::string reduced(const Turn& turn, int piece, int ranks) {
  Numbers sum = brought(turn, 0, piece);
  for (int r = 1; r < ranks; ++r) fold(turn.dtype, turn.op, sum, brought(turn, r, piece));
  if (turn.op == ReduceOp::avg) divide(turn.dtype, sum, ranks);
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

Header Turn::header(int rank) const {
  if (!is_message()) return {collective == Collective::all_to_all ? 0 : bytes, root, collective, dtype, op, Offer::stage};
  const bool sends = rank == root;
  return {bytes, sends ? to : from_any ? -1 : root, sends ? Collective::send : Collective::recv, dtype, op, Offer::stage};
}

std::string Turn::text() const {
  std::string text = std::string(name_of(collective)) + "(" + name_of(dtype) + ", " + name_of(op) + ", " +
                     std::to_string(bytes) + " bytes, root " + std::to_string(root) + ") on group " + std::to_string(group);
  if (is_message()) text += ", to " + std::to_string(to) + ", tag " + std::to_string(tag);
  if (from_any) text += ", from any";
  if (crossed) text += ", crossed";
  text += std::string(", in ") + name_of(place);
  if (in_place) text += ", in place";
  if (asynchronous) text += ", async";
  if (odd_one >= 0) text += ", rank " + std::to_string(odd_one) + " disagrees";
  return text;
}

Turn random_turn(Random& random, int group, int ranks) {
  Turn turn;
  turn.group = group;
  turn.collective = static_cast<Collective>(below(random, static_cast<int>(Collective::send) + (ranks > 1 ? 2 : 0)));
  turn.salt = random();
  turn.asynchronous = below(random, 100) < 60;
  turn.in_place = below(random, 2) != 0;
  constexpr Place places[] = {Place::heap, Place::heap, Place::pages, Place::arena, Place::arena, Place::mixed};
  turn.place = places[below(random, 6)];
  if (turn.collective == Collective::barrier) return turn;
  turn.dtype = static_cast<Dtype>(below(random, static_cast<int>(Dtype::count)));
  if (reduces(turn.collective)) {
    do {
      turn.dtype = static_cast<Dtype>(below(random, static_cast<int>(Dtype::bytes)));
      turn.op = static_cast<ReduceOp>(1 + below(random, static_cast<int>(ReduceOp::count) - 1));
    } while (reduce_kernel(turn.dtype, turn.op) == nullptr);
  }
  if (has_root(turn.collective)) turn.root = below(random, ranks);
  const std::uint64_t element = size_of(turn.dtype), pieces = by_pieces(turn.collective) ? static_cast<std::uint64_t>(ranks) : 1;
  if (turn.collective >= Collective::send) {
    turn.collective = Collective::send;
    turn.root = below(random, ranks);
    turn.to = (turn.root + 1 + below(random, ranks - 1)) % ranks;
    turn.tag = below(random, 3);
    turn.from_any = below(random, 5) == 0;
    turn.bytes = random_bytes(random, element, 1);
  } else if (turn.collective == Collective::all_to_all) {
    for (int i = 0; i < ranks * ranks; ++i) turn.table.push_back(random_bytes(random, element, pieces));
    if (below(random, 2) != 0) std::fill(turn.table.begin(), turn.table.end(), turn.table[0]);
    else turn.in_place = false;
  } else {
    turn.bytes = random_bytes(random, element, pieces);
  }
  return turn;
}

std::vector<Turn> every_way(Random& random, int group, int ranks) {
  std::vector<Turn> turns;
  const auto add = [&](Collective collective, Place place, std::uint64_t bytes) -> Turn& {
    Turn turn;
    turn.group = group;
    turn.collective = collective;
    turn.dtype = Dtype::f32;
    if (reduces(collective)) turn.op = ReduceOp::sum;
    if (has_root(collective)) turn.root = below(random, ranks);
    turn.bytes = bytes;
    if (collective == Collective::all_to_all) turn.table.assign(static_cast<std::size_t>(ranks * ranks), bytes);
    turn.place = place;
    turn.asynchronous = below(random, 2) != 0;
    turn.salt = random();
    return turns.emplace_back(std::move(turn));
  };
  // More than a slot holds, on either side of where reading begins (main.cpp).
  constexpr std::uint64_t little = 24'000, some = 40'000;
  for (int c = static_cast<int>(Collective::all_reduce); c < static_cast<int>(Collective::send); ++c) {
    const auto collective = static_cast<Collective>(c);
    add(collective, Place::heap, 256);
    add(collective, Place::heap, little);
    add(collective, Place::heap, some);
    if (collective == Collective::all_reduce) add(collective, Place::arena, largest_shelved).in_place = true;
    else add(collective, Place::arena, some);
    if (collective == Collective::all_to_all) add(collective, Place::arena, some).in_place = true;
    if (reduces(collective) || collective == Collective::broadcast) continue;
    add(collective, Place::pages, some);
    if (collective != Collective::scatter) add(collective, Place::mixed, some);
  }
  for (int d = 0; d < static_cast<int>(Dtype::bytes); ++d) {
    add(Collective::all_reduce, Place::heap, 256).dtype = static_cast<Dtype>(d);
  }
  for (const std::uint64_t bytes : {std::uint64_t{0}, some, 10 * some, std::uint64_t{largest_lane} + some}) {
    for (int i = 0; i < 4; ++i) {
      Turn& turn = add(Collective::send, Place::heap, bytes);
      turn.root = below(random, ranks);
      turn.to = (turn.root + 1 + below(random, ranks - 1)) % ranks;
      turn.from_any = i == 1;
      turn.crossed = i == 2;
      turn.asynchronous = i == 0;
      if (i == 3) turn.odd_one = turn.to;
    }
  }
  return turns;
}

Turn another_turn(const Turn& turn, Random& random, int ranks) {
  if (turn.is_message()) {
    Turn other = turn;
    other.bytes += size_of(turn.dtype);
    return other;
  }
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
      if (change == 3 && !turn.table.empty()) {
        other.table[static_cast<std::size_t>(below(random, ranks * ranks))] += size_of(turn.dtype);
        other.in_place = false;
      }
      if (turn.collective == Collective::barrier) continue;
    }
    if (other.is_message()) continue;
    if (!(other.header(0) == turn.header(0))) return other;
    // A table counts where the odd one's own part of it differs from what the others expect of it.
    if (turn.collective != Collective::all_to_all || other.table.size() != turn.table.size()) continue;
    for (int r = 0; r < ranks; ++r) {
      const int a = turn.odd_one, to = a * ranks + r, from = r * ranks + a;
      if (r != a && (other.table[to] != turn.table[to] || other.table[from] != turn.table[from])) return other;
    }
  }
}

Buffers::Buffers(const Turn& turn, int rank, int ranks, const std::shared_ptr<Shelf>& shelf) {
  const Collective c = turn.collective;
  if (c == Collective::barrier) return;
  // Tensors begin anywhere, on a multiple of their element's size.
  const std::uint64_t skew = size_of(turn.dtype) * (mix(turn.salt + static_cast<std::uint64_t>(rank)) % 5);
  Place place = turn.place;
  if (place == Place::mixed) place = (rank + turn.salt) % 2 != 0 ? Place::arena : Place::heap;
  const auto make = [&](std::uint64_t bytes) { return memory_.emplace_back(place, bytes, skew, shelf).span(); };
  const bool root = rank == turn.root;
  const int ins = c == Collective::scatter ? (root ? ranks : 0) : turn.is_message() ? (root ? 1 : 0) : by_pieces(c) ? ranks : 1;
  const bool all = c == Collective::all_gather || c == Collective::all_to_all;
  const int outs = c == Collective::gather ? (root ? ranks : 0) : turn.is_message() ? (root ? 0 : 1) : all ? ranks : 1;
  for (int r = 0; r < ins; ++r) {
    in.push_back(make(piece_bytes(turn, rank, r, ranks)));
    fill(in.back(), input_pattern(turn, rank, r));
  }
  if (c == Collective::broadcast) {
    out = in;
    if (!root) std::memset(in[0].data, poison, in[0].bytes);
    return;
  }
  const std::size_t mine = static_cast<std::size_t>(rank);
  for (int r = 0; r < outs; ++r) {
    const bool same = turn.in_place && !in.empty() && (outs == 1 || r == rank);
    if (c == Collective::all_to_all && turn.in_place) out.push_back(in[static_cast<std::size_t>(r)]);  // others want it still
    else out.push_back(same ? in[ins == 1 ? 0 : mine] : make(piece_bytes(turn, r, rank, ranks)));
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
      case Collective::send:
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
  for (const Memory& memory : memory_) {
    if (!memory.edges_untouched()) return "memory beside a buffer was written to";
  }
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
