// Included first in every source of a portable build on Linux: from here on the names of what only Linux has are errors.
//
// The system's headers declare them, so these come before. Not SO_PEERCRED and futex: csrc/platform/ uses them in place
// of calls that only macOS has.
#pragma once

#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/timerfd.h>
#include <sys/uio.h>
#include <unistd.h>

#include <thread>

#undef MFD_CLOEXEC
#undef F_ADD_SEALS
#undef MADV_REMOVE
#undef POLLRDHUP
#undef SYS_memfd_create
#undef SYS_pidfd_open
#undef CPU_COUNT
#undef SOCK_CLOEXEC
#undef SOCK_NONBLOCK
#undef MSG_CMSG_CLOEXEC
#undef MSG_NOSIGNAL
#pragma GCC poison MFD_CLOEXEC F_ADD_SEALS MADV_REMOVE POLLRDHUP SYS_memfd_create SYS_pidfd_open CPU_COUNT
#pragma GCC poison SOCK_CLOEXEC SOCK_NONBLOCK MSG_CMSG_CLOEXEC MSG_NOSIGNAL
#pragma GCC poison memfd_create eventfd timerfd_create timerfd_settime epoll_create1 epoll_ctl epoll_wait
#pragma GCC poison process_vm_readv process_vm_writev prctl sched_getaffinity getrandom accept4 pipe2
