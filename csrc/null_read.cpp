#include "null_read.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <system_error>

#include <fcntl.h>
#include <unistd.h>

namespace monarch {

namespace {

// Below it Linux maps nothing for anybody (vm.mmap_min_addr), and macOS nothing in a 64-bit process.
constexpr std::uintptr_t kNeverMapped = 0x10000;
constexpr std::size_t kLongest = 1000;
constexpr std::array<int, 2> kSignals = {SIGSEGV, SIGBUS};

// Written before the handler is there, and never again.
std::array<char, kLongest> note_text;
std::size_t note_length = 0;
std::array<struct sigaction, kSignals.size()> before;
bool installed = false;
bool stderr_is_open = false;  // else its number may be that of any file

// Only what a signal handler may do: no allocation, no stdio, no lock.
void say(const char* text, std::size_t length) {
  while (stderr_is_open && length > 0) {
    const ssize_t written = write(STDERR_FILENO, text, length);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return;
    text += written;
    length -= static_cast<std::size_t>(written);
  }
}

void say_number(std::uintptr_t number, unsigned base) {
  char digits[8 * sizeof(number)];
  char* at = digits + sizeof(digits);
  do {
    *--at = "0123456789abcdef"[number % base];
    number /= base;
  } while (number != 0);
  say(at, static_cast<std::size_t>(digits + sizeof(digits) - at));
}

void say_note(std::uintptr_t address) {
  say("monarch_backend: pid ", 21);
  say_number(static_cast<std::uintptr_t>(getpid()), 10);
  say(" used address 0x", 16);
  say_number(address, 16);
  say(note_text.data(), note_length);
  say("\n", 1);
}

void on_fault(int signal, siginfo_t* info, void*) {
  const int kept = errno;
  const auto address = reinterpret_cast<std::uintptr_t>(info->si_addr);
  // Not what a kill() sends, nor an address that no processor can have: that one is told as 0, with another code.
  const bool is_unmapped = signal == SIGSEGV ? info->si_code == SEGV_MAPERR : info->si_code == BUS_ADRERR;
  if (is_unmapped && address < kNeverMapped) say_note(address);
  const auto which = static_cast<std::size_t>(std::find(kSignals.begin(), kSignals.end(), signal) - kSignals.begin());
  sigaction(signal, &before[which], nullptr);
  // The instruction runs again and meets the handler that was there before; what somebody sent has to be sent again.
  if (info->si_code <= 0) raise(signal);
  errno = kept;
}

}  // namespace

void explain_null_reads(const std::string& note) {
  if (installed) return;
  note_length = note.copy(note_text.data(), kLongest);
  stderr_is_open = fcntl(STDERR_FILENO, F_GETFD) >= 0;
  struct sigaction ours = {};
  ours.sa_sigaction = on_fault;
  ours.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  sigemptyset(&ours.sa_mask);
  for (std::size_t which = 0; which < kSignals.size(); ++which) {
    if (sigaction(kSignals[which], &ours, &before[which]) != 0) {
      throw std::system_error(errno, std::generic_category(), "sigaction");
    }
  }
  installed = true;
}

}  // namespace monarch
