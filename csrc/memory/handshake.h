// Mutual authentication on a connection for memory: both processes prove their identity and that they know the
// program's secret.
//
// Messages have fixed sizes and are compared, not parsed: unauthenticated peers reach no code that handles tickets.
// With TLS the proofs cover both certificates, which excludes a man in the middle. The protocol is similar to
// _transport/network/auth.py, for native threads.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "memory/socket_connection.h"
#include "memory/wire.h"

namespace monarch {

// Identity of this process. Shared by its server and its clients.
class Identity {
 public:
  // `token`: 32 hexadecimal digits. `secret`: 32 bytes. Certificate, key and CA are DER, see TlsContext; all empty: no
  // TLS. Throws std::invalid_argument, or std::runtime_error if there is no OpenSSL.
  Identity(const std::string& token, std::string secret, const std::string& certificate, const std::string& key,
           const std::string& ca);
  ~Identity();
  Identity(const Identity&) = delete;
  Identity& operator=(const Identity&) = delete;

  const wire::Token& token() const { return token_; }
  const std::string& secret() const { return secret_; }
  const TlsContext* tls() const { return tls_ ? &*tls_ : nullptr; }

 private:
  wire::Token token_;
  std::string secret_;
  std::optional<TlsContext> tls_;
};

wire::Token parse_token(const std::string& text);  // throws std::invalid_argument

// The owner's side of a new connection. Return false if the peer belongs to another program or expects another process;
// then close the connection. After true the caller waits for its Welcome. Throws SocketError.
bool authenticate_caller(SocketConnection& connection, Reader& reader, Writer& writer, const Identity& identity, const Limits& limits);

// The caller's side, until its Welcome. `receiver`: the expected process. Throws SocketError with a text that says what
// to do.
void authenticate_to_owner(SocketConnection& connection, Reader& reader, Writer& writer, const Identity& identity, const wire::Token& receiver,
                    const Limits& limits);

}  // namespace monarch
