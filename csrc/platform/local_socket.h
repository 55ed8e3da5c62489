// Unix sockets that processes of this host and this user find by a token of 32 hexadecimal digits.
//
// On Linux the name is abstract: it is no file, and is gone with the process. Elsewhere it is a file in a folder of the
// user's; files of processes that were killed are removed by the next process that listens.
#pragma once

#include <cstddef>
#include <string>

#include <sys/types.h>

namespace monarch {

// Return the listening socket. Throws std::system_error.
int listen_at_token(const std::string& token);
// Remove the name, not the socket. Not for a forked child, which has its parent's socket.
void remove_token(const std::string& token);
// Return false, with errno, if no process listens there.
bool connect_to_token(int socket, const std::string& token);

// Whether the other side is a process of this user; then `pid` is that process.
bool is_same_user(int socket, int& pid);

// Send these bytes with a descriptor. False: not all of them.
bool send_with_descriptor(int socket, const void* data, std::size_t bytes, int descriptor);
// Return the number of bytes as recvmsg does, and the descriptor that came with them, or -1.
ssize_t receive_with_descriptor(int socket, void* data, std::size_t bytes, int& descriptor);

}  // namespace monarch
