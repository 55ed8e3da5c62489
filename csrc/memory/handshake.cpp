#if defined(__APPLE__)
#define __STDC_WANT_LIB_EXT1__ 1  // for memset_s
#endif

#include "memory/handshake.h"

#include <cstring>
#include <string_view>

#include "platform/random.h"

namespace monarch {

namespace {

constexpr std::size_t secret_bytes = 32;

int digit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

template <typename Layout>
std::string_view view(const Layout& layout) {
  return {reinterpret_cast<const char*>(&layout), sizeof layout};
}

bool equal(const wire::Token& one, const wire::Token& other) {
  return std::memcmp(one.bytes, other.bytes, sizeof one.bytes) == 0;
}

template <typename Layout>
void draw_nonce(Layout& layout) {
  if (!fill_random(layout.nonce, sizeof layout.nonce)) {
    throw SocketError(Outcome::unreachable, std::string("no random numbers: ") + std::strerror(errno));
  }
}

// Over all messages so far, the role of the prover, and the certificates of the connection.
Digest proof_of(const Identity& identity, const char* role, const wire::Hello& hello, const wire::HelloReply& reply, const SocketConnection& connection) {
  std::string transcript = std::string("monarch memory ") + role;
  transcript += '\0';
  transcript += view(hello);
  transcript += view(reply);
  if (connection.tls() != nullptr) {
    for (const Digest& certificate : connection.tls()->certificates()) transcript += view(certificate);
  }
  return hmac_sha256(identity.secret(), transcript);
}

bool proves(const wire::Proof& proof, const Digest& expected) {
  Digest given;
  std::memcpy(given.data(), proof.bytes, given.size());
  return same(given, expected);
}

void send_now(Writer& writer, const void* what, std::size_t bytes, const Limits& limits) {
  writer.put(what, bytes);
  writer.flush(limits);
}

[[noreturn]] void fail_connect(const std::string& text) { throw SocketError(Outcome::unreachable, text); }

void check_hello_reply(const wire::HelloReply& reply, const wire::Token& receiver) {
  if (reply.magic != wire::hello_reply_magic) fail_connect("the process at this address does not run monarch_backend: check the address");
  if (reply.denial == wire::Denial::version || reply.version != wire::version) {
    fail_connect("it speaks version " + std::to_string(reply.version) + " of the memory protocol, and this side " +
                  std::to_string(wire::version) + ": install the same monarch_backend on both");
  }
  if (reply.denial == wire::Denial::other_process || !equal(reply.sender, receiver)) {
    fail_connect("another process listens there now: the one that registered the memory has ended");
  }
}

}  // namespace

wire::Token parse_token(const std::string& text) {
  wire::Token token{};
  bool good = text.size() == 2 * sizeof token.bytes;
  for (std::size_t i = 0; good && i < sizeof token.bytes; ++i) {
    const int high = digit(text[2 * i]), low = digit(text[2 * i + 1]);
    good = high >= 0 && low >= 0;
    token.bytes[i] = static_cast<unsigned char>(high * 16 + low);
  }
  if (!good) throw std::invalid_argument("a process's token has 32 hexadecimal digits");
  return token;
}

Identity::Identity(const std::string& token, std::string secret, const std::string& certificate, const std::string& key,
                   const std::string& ca)
    : token_(parse_token(token)), secret_(std::move(secret)) {
  need_openssl();
  if (secret_.size() != secret_bytes) throw std::invalid_argument("a program's secret has 32 bytes");
  const bool any = !certificate.empty() || !key.empty() || !ca.empty();
  if (any && (certificate.empty() || key.empty() || ca.empty())) {
    throw std::invalid_argument("a certificate, its key and a CA go together: give all three, or none for no TLS");
  }
  if (any) tls_.emplace(certificate, key, ca);
}

Identity::~Identity() {
#if defined(__APPLE__)
  memset_s(secret_.data(), secret_.size(), 0, secret_.size());
#else
  explicit_bzero(secret_.data(), secret_.size());
#endif
}

bool authenticate_caller(SocketConnection& connection, Reader& reader, Writer& writer, const Identity& identity, const Limits& limits) {
  if (identity.tls() != nullptr) connection.secure(*identity.tls(), true, limits);
  wire::Hello hello;
  reader.read(&hello, sizeof hello, limits);
  if (hello.magic != wire::hello_magic) return false;
  wire::HelloReply reply{wire::hello_reply_magic, wire::version, wire::Denial::none, {}, {}};
  wire::Proof proof{};
  if (hello.version != wire::version || hello.zero != 0) reply.denial = wire::Denial::version;
  else if (!equal(hello.receiver, identity.token())) reply.denial = wire::Denial::other_process;
  if (reply.denial == wire::Denial::none) {
    reply.sender = identity.token();
    draw_nonce(reply);
    const Digest mine = proof_of(identity, "owner", hello, reply, connection);
    std::memcpy(proof.bytes, mine.data(), sizeof proof.bytes);
  }
  writer.put(&reply, sizeof reply);
  send_now(writer, &proof, sizeof proof, limits);
  if (reply.denial != wire::Denial::none) return false;
  wire::Proof theirs;
  reader.read(&theirs, sizeof theirs, limits);
  return proves(theirs, proof_of(identity, "caller", hello, reply, connection));
}

void authenticate_to_owner(SocketConnection& connection, Reader& reader, Writer& writer, const Identity& identity, const wire::Token& receiver,
                    const Limits& limits) {
  try {
    if (identity.tls() != nullptr) connection.secure(*identity.tls(), false, limits);
    wire::Hello hello{wire::hello_magic, wire::version, 0, identity.token(), receiver, {}};
    draw_nonce(hello);
    send_now(writer, &hello, sizeof hello, limits);
    wire::HelloReply reply;
    wire::Proof proof;
    reader.read(&reply, sizeof reply, limits);
    reader.read(&proof, sizeof proof, limits);
    check_hello_reply(reply, receiver);
    if (!proves(proof, proof_of(identity, "owner", hello, reply, connection))) {
      fail_connect("it could not prove that it knows this program's secret: does it belong to another program?");
    }
    const Digest mine = proof_of(identity, "caller", hello, reply, connection);
    send_now(writer, mine.data(), mine.size(), limits);
    wire::Welcome welcome;
    reader.read(&welcome, sizeof welcome, limits);
    if (welcome.magic != wire::welcome_magic) fail_connect("its welcome is not one of monarch_backend");
    if (welcome.full != 0) {
      fail_connect("it serves as many connections as it can: give fewer streams, or close some that are not needed");
    }
  } catch (const SocketError& error) {
    if (error.outcome != Outcome::lost) throw;
    fail_connect(std::string("it broke off before both had proved who they are (") + error.what() +
                  "): do both sides have the same secret, and TLS on or off alike?");
  }
}

}  // namespace monarch
