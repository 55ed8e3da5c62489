#include "unmapped_guard.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <mutex>
#include <system_error>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

namespace monarch {

namespace {

// Below this address Linux maps nothing (vm.mmap_min_addr), and macOS nothing in a 64-bit process.
constexpr std::uintptr_t kNeverMapped = 0x10000;
constexpr std::size_t kLongest = 1000;
// Addresses cost nothing, and a processor has 128 TiB of them or more. Half of them are given out, so that whatever a
// tensor's size is lies behind; fewer than the least are too few for that.
constexpr std::size_t kMost = std::size_t{1} << 44, kLeast = std::size_t{1} << 40;
constexpr std::size_t kPart = std::size_t{1} << 26;  // mapped at a time: zeros, which cost nothing until they are written
constexpr std::array<int, 2> kSignals = {SIGSEGV, SIGBUS};

// Written before the handler is there, and never again.
std::array<char, kLongest> note_text;
std::size_t note_length = 0;
std::array<struct sigaction, kSignals.size()> before;
bool stderr_is_open = false;  // else its number may be that of any file
std::uintptr_t absent = 0;    // where the addresses begin
std::size_t absent_size = 0;

std::array<std::atomic<bool>, kSignals.size()> has_passed{};  // whether a signal went on to the handler before
std::atomic<OnAbsentUse> on_absent_use{nullptr};
std::atomic<bool> is_open{false};  // whether anything may be mapped there
std::atomic<std::size_t> given{0};
std::mutex setting_up;  // of the addresses, and of the handler

// Only what a signal handler may do: no allocation, no stdio, no lock.
class SignalSafeText {
 public:
  void add(const char* text, std::size_t length) {
    length = std::min(length, text_.size() - length_);
    std::copy_n(text, length, text_.data() + length_);
    length_ += length;
  }
  void add_number(std::uintptr_t number, unsigned base) {
    char digits[8 * sizeof(number)];
    char* at = digits + sizeof(digits);
    do {
      *--at = "0123456789abcdef"[number % base];
      number /= base;
    } while (number != 0);
    add(at, static_cast<std::size_t>(digits + sizeof(digits) - at));
  }
  // In one write if possible, because other threads may write, too.
  void write_out() const {
    const char* text = text_.data();
    for (std::size_t left = length_; left > 0;) {
      const ssize_t written = write(STDERR_FILENO, text, left);
      if (written < 0 && errno == EINTR) continue;
      if (written <= 0) return;
      text += written;
      left -= static_cast<std::size_t>(written);
    }
  }

 private:
  std::array<char, kLongest + 200> text_;
  std::size_t length_ = 0;
};

void write_note(std::uintptr_t address) {
  if (!stderr_is_open) return;
  SignalSafeText words;
  words.add("monarch_backend: pid ", 21);
  words.add_number(static_cast<std::uintptr_t>(getpid()), 10);
  words.add(" used address 0x", 16);
  words.add_number(address, 16);
  words.add(note_text.data(), note_length);
  words.add("\n", 1);
  words.write_out();
}

bool is_absent(std::uintptr_t address) { return address - absent < absent_size; }

// Whether this thread can go on.
bool goes_on(std::uintptr_t address) {
  const OnAbsentUse on_use = on_absent_use.load();
  if (on_use == nullptr || !is_absent(address)) return false;
  void* part = reinterpret_cast<void*>(address / kPart * kPart);
  // Mapped first: the callback may lead to an unmapping at once, and then the fault occurs again.
  if (mprotect(part, kPart, PROT_READ | PROT_WRITE) != 0) return false;
  is_open = true;
  const ErrorTarget who = on_use();
  if (who == ErrorTarget::kAnotherThread) write_note(address);
  if (who == ErrorTarget::kNone) mprotect(part, kPart, PROT_NONE);
  return who != ErrorTarget::kNone;
}

// Restore the previous handler. The instruction runs again and reaches it; a signal from kill() is sent again. If a
// later handler has ours as its previous one, ours is not called twice.
void pass_on(int signal, bool is_sent) {
  const auto which = static_cast<std::size_t>(std::find(kSignals.begin(), kSignals.end(), signal) - kSignals.begin());
  struct sigaction next = before[which];
  if (has_passed[which].exchange(true)) {
    next = {};
    next.sa_handler = SIG_DFL;
  }
  sigaction(signal, &next, nullptr);
  if (is_sent) raise(signal);
}

void on_fault(int signal, siginfo_t* info, void*) {
  const int kept = errno;
  const auto address = reinterpret_cast<std::uintptr_t>(info->si_addr);
  const bool is_sent = info->si_code <= 0;  // by a kill()
  if (is_sent || !goes_on(address)) {
    // An address that no CPU can have is reported as 0, with another code.
    const bool is_unmapped = signal == SIGSEGV ? info->si_code == SEGV_MAPERR : info->si_code == BUS_ADRERR;
    if ((is_unmapped && address < kNeverMapped) || (!is_sent && is_absent(address))) write_note(address);
    pass_on(signal, is_sent);
  }
  errno = kept;
}

void* map_absent(void* where, std::size_t size) {
  int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  if (where != nullptr) flags |= MAP_FIXED;
  void* mapped = mmap(where, size, PROT_NONE, flags, -1, 0);
  return mapped == MAP_FAILED ? nullptr : mapped;
}

// A small part of the limit, if the address space is limited (ulimit -v).
std::size_t most_addresses() {
  struct rlimit limit = {};
  if (getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return kMost;
  return std::min<std::size_t>(kMost, limit.rlim_cur / 16);
}

}  // namespace

bool reserve_absent_memory(OnAbsentUse on_use) {
  const std::lock_guard lock(setting_up);
  const std::size_t most = most_addresses();
  for (std::size_t size = kMost; absent == 0 && size >= kLeast; size /= 2) {
    void* mapped = size <= most ? map_absent(nullptr, size) : nullptr;
    if (mapped == nullptr) continue;
    // Whole parts, so that what is mapped at a time lies inside.
    absent = (reinterpret_cast<std::uintptr_t>(mapped) + kPart - 1) / kPart * kPart;
    absent_size = size - kPart;
    on_absent_use = on_use;
  }
  return absent != 0;
}

void* absent_address() {
  const std::size_t part = 1 + given.fetch_add(1, std::memory_order_relaxed) % (absent_size / 2 / kPart);
  return reinterpret_cast<void*>(absent + part * kPart);
}

bool is_absent_address(const void* address) { return is_absent(reinterpret_cast<std::uintptr_t>(address)); }

void close_absent_memory() {
  if (!is_open.load(std::memory_order_relaxed) || !is_open.exchange(false)) return;
  map_absent(reinterpret_cast<void*>(absent), absent_size);
}

void explain_absent_memory(const std::string& note) {
  const std::lock_guard lock(setting_up);
  if (note_length == 0) {
    note_length = note.copy(note_text.data(), kLongest);
    stderr_is_open = fcntl(STDERR_FILENO, F_GETFD) >= 0;
  }
  struct sigaction ours = {};
  ours.sa_sigaction = on_fault;
  ours.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  sigemptyset(&ours.sa_mask);
  for (std::size_t which = 0; which < kSignals.size(); ++which) {
    struct sigaction there = {};
    if (sigaction(kSignals[which], nullptr, &there) == 0 && (there.sa_flags & SA_SIGINFO) != 0 &&
        there.sa_sigaction == on_fault) {
      continue;
    }
    before[which] = there;
    has_passed[which] = false;
    if (sigaction(kSignals[which], &ours, nullptr) != 0) {
      throw std::system_error(errno, std::generic_category(), "sigaction");
    }
  }
}

}  // namespace monarch
