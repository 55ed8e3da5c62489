#include "memory/tls.h"

#include <cerrno>
#include <cstring>
#include <initializer_list>

#include <dlfcn.h>
#include <sys/socket.h>

#include "platform/descriptors.h"

namespace monarch {

namespace {

// OpenSSL's types, which we only pass on, and numbers that its headers have as macros. All are part of its ABI.
using Ctx = void;
using Ssl = void;
using Bio = void;
using X509 = void;
using Key = void;
using Md = void;

constexpr int ctrl_session_cache = 44, ctrl_extra_chain_cert = 14, ctrl_mode = 33, ctrl_read_ahead = 41;
constexpr int ctrl_min_version = 123, ctrl_max_version = 124;
constexpr long tls_1_3 = 0x0304;
constexpr long mode_partial_write = 1, mode_moving_buffer = 2;
constexpr std::uint64_t no_ticket = 1U << 14, no_compression = 1U << 17, no_renegotiation = 1U << 30;
constexpr int verify_peer = 1, verify_fail_without = 2;
constexpr unsigned long partial_chain = 0x80000;
constexpr int error_ssl = 1, error_want_read = 2, error_want_write = 3, error_syscall = 5, error_zero_return = 6;
constexpr int bio_type = 0x0500 | 127;  // a source and sink with a descriptor
constexpr int bio_retry_read = 1 | 8, bio_retry_write = 2 | 8, bio_retry_all = 15;
constexpr int bio_flush = 11, bio_push = 6, bio_pop = 7;

// Bytes of a connection that are read at once: several records with one system call.
constexpr std::size_t read_buffer = 128 << 10;

struct OpenSsl {
  // libcrypto
  unsigned char* (*HMAC)(const Md*, const void*, int, const unsigned char*, std::size_t, unsigned char*, unsigned*);
  const Md* (*EVP_sha256)();
  int (*CRYPTO_memcmp)(const void*, const void*, std::size_t);
  X509* (*d2i_X509)(X509**, const unsigned char**, long);
  void (*X509_free)(X509*);
  int (*X509_up_ref)(X509*);
  int (*X509_digest)(const X509*, const Md*, unsigned char*, unsigned*);
  int (*X509_STORE_add_cert)(void*, X509*);
  int (*X509_VERIFY_PARAM_set_flags)(void*, unsigned long);
  Key* (*d2i_AutoPrivateKey)(Key**, const unsigned char**, long);
  void (*EVP_PKEY_free)(Key*);
  unsigned long (*ERR_get_error)();
  void (*ERR_clear_error)();
  const char* (*ERR_reason_error_string)(unsigned long);
  void* (*BIO_meth_new)(int, const char*);
  int (*BIO_meth_set_write)(void*, int (*)(Bio*, const char*, int));
  int (*BIO_meth_set_read)(void*, int (*)(Bio*, char*, int));
  int (*BIO_meth_set_ctrl)(void*, long (*)(Bio*, int, long, void*));
  Bio* (*BIO_new)(const void*);
  void (*BIO_set_data)(Bio*, void*);
  void* (*BIO_get_data)(Bio*);
  void (*BIO_set_init)(Bio*, int);
  void (*BIO_set_flags)(Bio*, int);
  void (*BIO_clear_flags)(Bio*, int);
  // libssl
  const void* (*TLS_method)();
  Ctx* (*SSL_CTX_new)(const void*);
  void (*SSL_CTX_free)(Ctx*);
  long (*SSL_CTX_ctrl)(Ctx*, int, long, void*);
  std::uint64_t (*SSL_CTX_set_options)(Ctx*, std::uint64_t);
  int (*SSL_CTX_set_num_tickets)(Ctx*, std::size_t);
  int (*SSL_CTX_set_ciphersuites)(Ctx*, const char*);
  void (*SSL_CTX_set_verify)(Ctx*, int, void*);
  void (*SSL_CTX_set_default_read_buffer_len)(Ctx*, std::size_t);
  int (*SSL_CTX_use_certificate)(Ctx*, X509*);
  int (*SSL_CTX_use_PrivateKey)(Ctx*, Key*);
  int (*SSL_CTX_check_private_key)(const Ctx*);
  void* (*SSL_CTX_get_cert_store)(const Ctx*);
  void* (*SSL_CTX_get0_param)(Ctx*);
  Ssl* (*SSL_new)(Ctx*);
  void (*SSL_free)(Ssl*);
  void (*SSL_set_bio)(Ssl*, Bio*, Bio*);
  void (*SSL_set_accept_state)(Ssl*);
  void (*SSL_set_connect_state)(Ssl*);
  int (*SSL_do_handshake)(Ssl*);
  int (*SSL_read_ex)(Ssl*, void*, std::size_t, std::size_t*);
  int (*SSL_write_ex)(Ssl*, const void*, std::size_t, std::size_t*);
  int (*SSL_get_error)(const Ssl*, int);
  long (*SSL_get_verify_result)(const Ssl*);
  X509* (*SSL_get_certificate)(const Ssl*);
  X509* (*peer_certificate)(const Ssl*);

  void* bio_method = nullptr;

  OpenSsl();
};

// Not OpenSSL's own socket BIO: that one writes with write(2), and SIGPIPE ends a process that has not chosen to ignore it.
int bio_fd(Bio* bio);
int bio_write(Bio* bio, const char* from, int bytes);
int bio_read(Bio* bio, char* to, int bytes);
long bio_ctrl(Bio*, int what, long, void*) { return what == bio_flush || what == bio_push || what == bio_pop ? 1 : 0; }

void* library() {
  // What is loaded already comes first: two copies of OpenSSL can coexist in one process, but one is enough. The
  // symbols of libcrypto are found through libssl, which depends on the right one.
  for (const int already : {RTLD_NOLOAD, 0}) {
    for (const char* name : {"libssl.so.3", "libssl.so.1.1"}) {
      if (void* handle = dlopen(name, RTLD_NOW | RTLD_LOCAL | already)) return handle;
    }
  }
  throw std::runtime_error(
      "one-sided memory between hosts needs OpenSSL 1.1.1 or 3, and neither libssl.so.3 nor libssl.so.1.1 was found: install it "
      "(Debian and Ubuntu: libssl3, Fedora: openssl-libs), or add its folder to LD_LIBRARY_PATH");
}

template <typename Function>
void find(void* handle, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(handle, name));
  if (function == nullptr) {
    throw std::runtime_error(std::string("the libssl of this process has no ") + name +
                             ": one-sided memory between hosts needs OpenSSL 1.1.1 or 3");
  }
}

OpenSsl::OpenSsl() {
  void* handle = library();
#define FIND(name) find(handle, #name, name)
  FIND(HMAC), FIND(EVP_sha256), FIND(CRYPTO_memcmp);
  FIND(d2i_X509), FIND(X509_free), FIND(X509_up_ref), FIND(X509_digest), FIND(X509_STORE_add_cert), FIND(X509_VERIFY_PARAM_set_flags);
  FIND(d2i_AutoPrivateKey), FIND(EVP_PKEY_free);
  FIND(ERR_get_error), FIND(ERR_clear_error), FIND(ERR_reason_error_string);
  FIND(BIO_meth_new), FIND(BIO_meth_set_write), FIND(BIO_meth_set_read), FIND(BIO_meth_set_ctrl), FIND(BIO_new);
  FIND(BIO_set_data), FIND(BIO_get_data), FIND(BIO_set_init), FIND(BIO_set_flags), FIND(BIO_clear_flags);
  FIND(TLS_method), FIND(SSL_CTX_new), FIND(SSL_CTX_free), FIND(SSL_CTX_ctrl), FIND(SSL_CTX_set_options);
  FIND(SSL_CTX_set_num_tickets), FIND(SSL_CTX_set_ciphersuites), FIND(SSL_CTX_set_verify);
  FIND(SSL_CTX_set_default_read_buffer_len), FIND(SSL_CTX_use_certificate), FIND(SSL_CTX_use_PrivateKey);
  FIND(SSL_CTX_check_private_key), FIND(SSL_CTX_get_cert_store), FIND(SSL_CTX_get0_param);
  FIND(SSL_new), FIND(SSL_free), FIND(SSL_set_bio), FIND(SSL_set_accept_state), FIND(SSL_set_connect_state);
  FIND(SSL_do_handshake), FIND(SSL_read_ex), FIND(SSL_write_ex), FIND(SSL_get_error), FIND(SSL_get_verify_result);
  FIND(SSL_get_certificate);
#undef FIND
  // OpenSSL 3 has renamed it.
  peer_certificate = reinterpret_cast<decltype(peer_certificate)>(dlsym(handle, "SSL_get1_peer_certificate"));
  if (peer_certificate == nullptr) find(handle, "SSL_get_peer_certificate", peer_certificate);
  bio_method = BIO_meth_new(bio_type, "monarch stream");
  if (bio_method == nullptr) throw std::runtime_error("OpenSSL has no memory for a connection");
  BIO_meth_set_write(bio_method, bio_write);
  BIO_meth_set_read(bio_method, bio_read);
  BIO_meth_set_ctrl(bio_method, bio_ctrl);
}

// Never freed: connections may live as long as the process.
OpenSsl& openssl() {
  static OpenSsl* const found = new OpenSsl;
  return *found;
}

int bio_fd(Bio* bio) { return static_cast<int>(reinterpret_cast<std::intptr_t>(openssl().BIO_get_data(bio))); }

bool again() { return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR; }

int bio_write(Bio* bio, const char* from, int bytes) {
  openssl().BIO_clear_flags(bio, bio_retry_all);
  const auto n = send(bio_fd(bio), from, static_cast<std::size_t>(bytes), no_signal | MSG_DONTWAIT);
  if (n < 0 && again()) openssl().BIO_set_flags(bio, bio_retry_write);
  return static_cast<int>(n);
}

int bio_read(Bio* bio, char* to, int bytes) {
  openssl().BIO_clear_flags(bio, bio_retry_all);
  const auto n = recv(bio_fd(bio), to, static_cast<std::size_t>(bytes), MSG_DONTWAIT);
  if (n < 0 && again()) openssl().BIO_set_flags(bio, bio_retry_read);
  return static_cast<int>(n);
}

// OpenSSL's text of this thread's first error, which contains no secrets.
std::string reason() {
  const unsigned long code = openssl().ERR_get_error();
  const char* text = code != 0 ? openssl().ERR_reason_error_string(code) : nullptr;
  openssl().ERR_clear_error();
  return text != nullptr ? text : "no reason given";
}

const unsigned char* bytes_of(std::string_view text) { return reinterpret_cast<const unsigned char*>(text.data()); }

// Calls `use` with each of the certificates that lie one after another.
template <typename Use>
void each_certificate(std::string_view ders, const char* what, Use use) {
  const unsigned char* at = bytes_of(ders);
  const unsigned char* const end = at + ders.size();
  do {
    X509* certificate = openssl().d2i_X509(nullptr, &at, end - at);
    if (certificate == nullptr) throw std::invalid_argument(std::string(what) + " is no certificate in DER: " + reason());
    const bool good = use(certificate);
    openssl().X509_free(certificate);
    if (!good) throw std::invalid_argument("OpenSSL does not take " + std::string(what) + ": " + reason());
  } while (at != end);
}

void use_certificates(Ctx* ctx, std::string_view certificate, std::string_view ca) {
  const OpenSsl& ssl = openssl();
  bool first = true;
  each_certificate(certificate, "this process's certificate", [&](X509* one) {
    if (first) {
      first = false;
      return ssl.SSL_CTX_use_certificate(ctx, one) == 1;
    }
    // The chain that we show takes over what it is given.
    return ssl.X509_up_ref(one) == 1 && ssl.SSL_CTX_ctrl(ctx, ctrl_extra_chain_cert, 0, one) == 1;
  });
  each_certificate(ca, "the CA", [&](X509* one) { return ssl.X509_STORE_add_cert(ssl.SSL_CTX_get_cert_store(ctx), one) == 1; });
}

void use_key(Ctx* ctx, std::string_view der) {
  const OpenSsl& ssl = openssl();
  const unsigned char* at = bytes_of(der);
  Key* key = ssl.d2i_AutoPrivateKey(nullptr, &at, static_cast<long>(der.size()));
  if (key == nullptr) throw std::invalid_argument("this process's key is no private key in DER");
  const bool good = ssl.SSL_CTX_use_PrivateKey(ctx, key) == 1 && ssl.SSL_CTX_check_private_key(ctx) == 1;
  ssl.EVP_PKEY_free(key);
  if (!good) throw std::invalid_argument("this process's key does not belong to its certificate");
}

// TLS 1.3 only, a certificate of that CA is required, and each connection verifies it again.
void configure(Ctx* ctx, std::string_view certificate, std::string_view key, std::string_view ca) {
  const OpenSsl& ssl = openssl();
  ssl.SSL_CTX_ctrl(ctx, ctrl_min_version, tls_1_3, nullptr);
  if (ssl.SSL_CTX_ctrl(ctx, ctrl_max_version, tls_1_3, nullptr) != 1) throw std::runtime_error("this OpenSSL has no TLS 1.3");
  // Prefer the shorter key: it is a fifth faster, and has no known weakness. A system policy that forbids it has
  // priority.
  ssl.SSL_CTX_set_ciphersuites(ctx, "TLS_AES_128_GCM_SHA256:TLS_AES_256_GCM_SHA384:TLS_CHACHA20_POLY1305_SHA256");
  ssl.SSL_CTX_set_options(ctx, no_ticket | no_compression | no_renegotiation);
  ssl.SSL_CTX_set_num_tickets(ctx, 0);
  ssl.SSL_CTX_ctrl(ctx, ctrl_session_cache, 0, nullptr);
  ssl.SSL_CTX_ctrl(ctx, ctrl_mode, mode_partial_write | mode_moving_buffer, nullptr);
  ssl.SSL_CTX_ctrl(ctx, ctrl_read_ahead, 1, nullptr);
  ssl.SSL_CTX_set_default_read_buffer_len(ctx, read_buffer);
  ssl.SSL_CTX_set_verify(ctx, verify_peer | verify_fail_without, nullptr);
  // A trusted intermediate CA does not extend trust to everything that its root has signed.
  ssl.X509_VERIFY_PARAM_set_flags(ssl.SSL_CTX_get0_param(ctx), partial_chain);
  use_certificates(ctx, certificate, ca);
  use_key(ctx, key);
}

Digest digest_of(X509* certificate) {
  Digest digest{};
  unsigned length = 0;
  if (certificate == nullptr || openssl().X509_digest(certificate, openssl().EVP_sha256(), digest.data(), &length) != 1 ||
      length != digest.size()) {
    throw std::runtime_error("a certificate is missing");
  }
  return digest;
}

}  // namespace

void need_openssl() { openssl(); }

Digest hmac_sha256(std::string_view key, std::string_view message) {
  Digest digest{};
  unsigned length = 0;
  if (openssl().HMAC(openssl().EVP_sha256(), key.data(), static_cast<int>(key.size()), bytes_of(message), message.size(),
                     digest.data(), &length) == nullptr ||
      length != digest.size()) {
    throw std::runtime_error("OpenSSL does not compute HMAC-SHA256 here: " + reason());
  }
  return digest;
}

bool same(const Digest& one, const Digest& other) {
  return openssl().CRYPTO_memcmp(one.data(), other.data(), one.size()) == 0;
}

TlsContext::TlsContext(std::string_view certificate, std::string_view key, std::string_view ca) {
  openssl().ERR_clear_error();
  try {
    for (void** ctx : {&server_, &client_}) {
      *ctx = openssl().SSL_CTX_new(openssl().TLS_method());
      if (*ctx == nullptr) throw std::runtime_error("OpenSSL does not start: " + reason());
      configure(*ctx, certificate, key, ca);
    }
  } catch (...) {
    openssl().SSL_CTX_free(server_);
    openssl().SSL_CTX_free(client_);
    openssl().ERR_clear_error();
    throw;
  }
}

TlsContext::~TlsContext() {
  openssl().SSL_CTX_free(server_);
  openssl().SSL_CTX_free(client_);
}

TlsSession::TlsSession(const TlsContext& context, int fd, bool server) : fd_(fd), server_(server) {
  const OpenSsl& ssl = openssl();
  ssl_ = ssl.SSL_new(server ? context.server_ : context.client_);
  Bio* bio = ssl_ != nullptr ? ssl.BIO_new(ssl.bio_method) : nullptr;
  if (bio == nullptr) {
    ssl.SSL_free(ssl_);
    throw std::runtime_error("OpenSSL has no memory for a connection");
  }
  ssl.BIO_set_data(bio, reinterpret_cast<void*>(static_cast<std::intptr_t>(fd_)));
  ssl.BIO_set_init(bio, 1);
  ssl.SSL_set_bio(ssl_, bio, bio);
  server ? ssl.SSL_set_accept_state(ssl_) : ssl.SSL_set_connect_state(ssl_);
}

TlsSession::~TlsSession() { openssl().SSL_free(ssl_); }

void TlsSession::fail(const char* what, int error) const {
  const int number = errno;
  if (error == error_zero_return) throw std::runtime_error("the other side hung up");
  if (error == error_syscall) throw std::runtime_error(number != 0 ? std::strerror(number) : "the other side hung up");
  const std::string why = reason();
  // OpenSSL 3's name for an end without close_notify.
  if (error == error_ssl && why == "unexpected eof while reading") throw std::runtime_error("the other side hung up");
  throw std::runtime_error(std::string(what) + ": " + why);
}

TlsSession::Wants TlsSession::what_next(const char* what, int error) const {
  if (error == error_want_read) return Wants::to_read;
  if (error == error_want_write) return Wants::to_write;
  fail(what, error);
}

TlsSession::Wants TlsSession::handshake() {
  const OpenSsl& ssl = openssl();
  ssl.ERR_clear_error();
  errno = 0;
  const int done = ssl.SSL_do_handshake(ssl_);
  if (done == 1 && ssl.SSL_get_verify_result(ssl_) == 0) return Wants::nothing;
  return what_next("TLS", ssl.SSL_get_error(ssl_, done));
}

// A record at a time, by `step(at, left, &n)`, until all of it has moved or nothing more does now.
template <class Step>
std::size_t TlsSession::move(std::size_t bytes, Wants& wants, Step&& step) {
  const OpenSsl& ssl = openssl();
  wants = Wants::nothing;
  std::size_t all = 0;
  while (all < bytes) {
    ssl.ERR_clear_error();
    errno = 0;
    std::size_t n = 0;
    const int done = step(all, bytes - all, &n);
    if (done != 1) {
      const int error = ssl.SSL_get_error(ssl_, done);
      // What came before an end counts; the next call finds the end again.
      const bool over = error != error_want_read && error != error_want_write;
      if (!over || all == 0) wants = what_next("TLS", error);
      break;
    }
    all += n;
  }
  return all;
}

std::size_t TlsSession::read(char* to, std::size_t bytes, Wants& wants) {
  return move(bytes, wants, [&](std::size_t at, std::size_t left, std::size_t* n) { return openssl().SSL_read_ex(ssl_, to + at, left, n); });
}

std::size_t TlsSession::write(const char* from, std::size_t bytes, Wants& wants) {
  return move(bytes, wants, [&](std::size_t at, std::size_t left, std::size_t* n) { return openssl().SSL_write_ex(ssl_, from + at, left, n); });
}

std::array<Digest, 2> TlsSession::certificates() const {
  X509* certificate = openssl().peer_certificate(ssl_);
  const Digest theirs = digest_of(certificate);
  openssl().X509_free(certificate);
  const Digest ours = digest_of(openssl().SSL_get_certificate(ssl_));
  return server_ ? std::array{ours, theirs} : std::array{theirs, ours};
}

}  // namespace monarch
