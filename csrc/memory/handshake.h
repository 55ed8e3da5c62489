// How two processes prove to each other, on a connection for memory, that they know the program's secret and who they are.
//
// Fixed sizes, compared and not parsed: a stranger reaches nothing that looks at a ticket. With TLS below, the proofs cover
// both certificates, so that nobody stands between. The like of _transport/network/auth.py, for native threads.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "memory/socket_connection.h"
#include "memory/wire.h"

namespace monarch {

// Who this process is. Shared by its server and its clients.
class Identity {
 public:
  // `token`: 32 hexadecimal digits. `secret`: 32 bytes. Certificate, key and CA are DER, see TlsContext; all empty: no
  // TLS. Throws std::invalid_argument, or std::runtime_error where there is no OpenSSL.
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

// The owner's side, of a stranger who has just connected. False: no host of this program, or for somebody else; hang up.
// When it returns true the caller is one, and waits for its Welcome. Throws LinkError.
bool prove_to_caller(Link& link, Reader& reader, Writer& writer, const Identity& identity, const Limits& limits);

// The caller's side, until it is welcome. `whom`: who has to be there. Throws LinkError, whose text says what to do.
void prove_to_owner(Link& link, Reader& reader, Writer& writer, const Identity& identity, const wire::Token& whom,
                    const Limits& limits);

}  // namespace monarch
