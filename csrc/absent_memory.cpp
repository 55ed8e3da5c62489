#include "absent_memory.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <system_error>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

namespace monarch {

namespace {

// Below it Linux maps nothing for anybody (vm.mmap_min_addr), and macOS nothing in a 64-bit process.
constexpr std::uintptr_t kNeverMapped = 0x10000;
constexpr std::size_t kLongest = 1000;
// Addresses cost nothing; a processor has 128 TiB of them or more, and no tensor is as large as this.
constexpr std::size_t kMost = std::size_t{1} << 44, kLeast = std::size_t{1} << 30;
constexpr std::size_t kPart = std::size_t{1} << 26;  // mapped at a time: pages of zeros, which cost nothing either
constexpr std::array<int, 2> kSignals = {SIGSEGV, SIGBUS};

// Written before the handler is there, and never again.
std::array<char, kLongest> note_text;
std::size_t note_length = 0;
std::array<struct sigaction, kSignals.size()> before;
bool installed = false;
bool stderr_is_open = false;  // else its number may be that of any file
std::uintptr_t absent = 0;    // where the addresses begin
std::size_t absent_size = 0;
std::atomic<OnAbsentUse> on_absent_use{nullptr};

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

bool is_absent(std::uintptr_t address) { return address - absent < absent_size; }

// Whether this thread can go on.
bool goes_on(std::uintptr_t address) {
  const OnAbsentUse on_use = on_absent_use.load();
  if (on_use == nullptr || !is_absent(address)) return false;
  void* part = reinterpret_cast<void*>(address / kPart * kPart);
  // Mapped first: who is told may unmap it at once, and then this is asked again.
  if (mprotect(part, kPart, PROT_READ | PROT_WRITE) != 0) return false;
  const Told who = on_use();
  if (who == Told::kAnotherThread) say_note(address);
  if (who == Told::kNobody) mprotect(part, kPart, PROT_NONE);
  return who != Told::kNobody;
}

void on_fault(int signal, siginfo_t* info, void*) {
  const int kept = errno;
  const auto address = reinterpret_cast<std::uintptr_t>(info->si_addr);
  if (info->si_code > 0 && goes_on(address)) {
    errno = kept;
    return;
  }
  // Not what a kill() sends, nor an address that no processor can have: that one is told as 0, with another code.
  const bool is_unmapped = signal == SIGSEGV ? info->si_code == SEGV_MAPERR : info->si_code == BUS_ADRERR;
  if ((is_unmapped && address < kNeverMapped) || (info->si_code > 0 && is_absent(address))) say_note(address);
  const auto which = static_cast<std::size_t>(std::find(kSignals.begin(), kSignals.end(), signal) - kSignals.begin());
  sigaction(signal, &before[which], nullptr);
  // The instruction runs again and meets the handler that was there before; what somebody sent has to be sent again.
  if (info->si_code <= 0) raise(signal);
  errno = kept;
}

void* map_absent(void* where, std::size_t size) {
  int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  if (where != nullptr) flags |= MAP_FIXED;
  void* mapped = mmap(where, size, PROT_NONE, flags, -1, 0);
  return mapped == MAP_FAILED ? nullptr : mapped;
}

// Of a process that may have only so many addresses (ulimit -v) a small part.
std::size_t most_addresses() {
  struct rlimit limit = {};
  if (getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return kMost;
  return std::min<std::size_t>(kMost, limit.rlim_cur / 16);
}

}  // namespace

void* absent_memory(OnAbsentUse on_use) {
  const std::size_t most = most_addresses();
  for (std::size_t size = kMost; absent == 0 && size >= kLeast; size /= 2) {
    void* mapped = size <= most ? map_absent(nullptr, size) : nullptr;
    if (mapped == nullptr) continue;
    // Whole parts, so that what is mapped at a time lies inside.
    absent = (reinterpret_cast<std::uintptr_t>(mapped) + kPart - 1) / kPart * kPart;
    absent_size = size - kPart;
    on_absent_use = on_use;
  }
  return absent == 0 ? nullptr : reinterpret_cast<void*>(absent + kPart);
}

void close_absent_memory() {
  if (absent != 0) map_absent(reinterpret_cast<void*>(absent), absent_size);
}

void explain_absent_memory(const std::string& note) {
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
