// What we use of OpenSSL: TLS 1.3 over sockets that do not block, HMAC and SHA-256.
//
// Found when the program runs, never when it is built: the copy that Python's _ssl has loaded, else the system's, 1.1.1 or
// 3.x. No headers of OpenSSL's: its functions are declared in tls.cpp. Nothing here knows memory, requests or Python.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>

namespace monarch {

using Digest = std::array<unsigned char, 32>;

// Throws std::runtime_error, with what to do, if this machine has no OpenSSL that we know. All else here throws it, too.
void need_openssl();

Digest hmac_sha256(std::string_view key, std::string_view message);
// Compare in constant time.
bool same(const Digest& one, const Digest& other);

// One process's certificate, its key, and the trusted CAs. All DER; `certificate` may be followed by intermediate ones,
// `ca` may be several. For both roles; shared by all connections and threads.
class TlsContext {
 public:
  TlsContext(std::string_view certificate, std::string_view key, std::string_view ca);  // throws std::invalid_argument
  ~TlsContext();
  TlsContext(const TlsContext&) = delete;
  TlsContext& operator=(const TlsContext&) = delete;

 private:
  friend class TlsSession;
  void* server_ = nullptr;  // SSL_CTX
  void* client_ = nullptr;
};

// One connection, over a non-blocking socket that the caller owns. For one thread at a time.
class TlsSession {
 public:
  enum class Wants { nothing, to_read, to_write };  // what to wait for before the same is tried again

  TlsSession(const TlsContext& context, int fd, bool server);
  ~TlsSession();
  TlsSession(const TlsSession&) = delete;
  TlsSession& operator=(const TlsSession&) = delete;

  // Each does what is possible without waiting. Reads and writes return the number of bytes; 0 if `wants` says what to
  // wait for. The end of the stream is an exception, as any other failure. After a write of 0 bytes the next one must
  // have at least as many bytes; they may lie elsewhere, and the earlier ones may be sent.
  Wants handshake();
  std::size_t read(char* to, std::size_t bytes, Wants& wants);
  std::size_t write(const char* from, std::size_t bytes, Wants& wants);

  // SHA-256 of the server's and the client's certificate: both ends of this connection know them, and a man in the
  // middle has others.
  std::array<Digest, 2> certificates() const;

 private:
  template <class Step>
  std::size_t move(std::size_t bytes, Wants& wants, Step&& step);

  [[noreturn]] void fail(const char* what, int error) const;
  Wants what_next(const char* what, int error) const;

  void* ssl_ = nullptr;
  int fd_;
  bool server_;
};

}  // namespace monarch
