// Stress driver for the sanitizers: servers and clients of one process, many threads, changing registrations.
//
//   memory_stress ROUNDS SECRET_FOLDER   (the folder has certificate, key and ca as DER; "" for no TLS)
//
// With MONARCH_GPU_DRIVER, a fake driver (tests/rdma/pretended_gpu.c), the last registration is GPU memory.
//
// Each round has: reads, writes and atomics by several threads over few streams, drops, deadlines, cancellations,
// replies that two threads wait for, staging memory, unauthenticated connections, and a close of either side while all
// that is in progress. It fails when memory has unexpected bytes.
#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <memory>
#include <optional>
#include <random>
#include <shared_mutex>
#include <string>
#include <thread>
#include <vector>

#include <arpa/inet.h>
#include <dlfcn.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include "memory/client.h"
#include "memory/gpu.h"
#include "memory/server.h"

using namespace monarch;

namespace {

constexpr std::size_t region = 3 << 20;
constexpr int regions = 4, callers = 4;

[[noreturn]] void fail(const char* what) {
  std::fprintf(stderr, "%s\n", what);
  std::abort();
}

// Memory of the fake GPU, never freed.
char* gpu_memory() {
  void* driver = dlopen(std::getenv("MONARCH_GPU_DRIVER"), RTLD_NOW);
  const auto allocate = reinterpret_cast<std::uint64_t (*)(int, std::size_t)>(driver == nullptr ? nullptr : dlsym(driver, "pretended_allocate"));
  if (allocate == nullptr) fail("MONARCH_GPU_DRIVER is no pretended driver");
  return reinterpret_cast<char*>(allocate(0, region));
}
bool has_gpu() { return std::getenv("MONARCH_GPU_DRIVER") != nullptr; }

// A fake table of four registrations with the same bytes. A hold takes the registration's lock.
class FakeTable final : public Memory {
 public:
  FakeTable() {
    for (int i = 0; i < regions; ++i) {
      data_[i].resize(region);
      for (std::size_t k = 0; k < region; ++k) data_[i][k] = static_cast<char>(k * 31 >> 3);
    }
  }
  Refusal hold(const Ticket& ticket, std::uint64_t offset, std::uint64_t bytes, Access access, char** data) override {
    if (ticket.slot >= regions) return Refusal::dropped;
    alone = access != Access::read && device(ticket) == gpu::none;  // of a GPU, two pieces are held at a time
    alone ? locks_[ticket.slot].lock() : locks_[ticket.slot].lock_shared();
    Refusal refusal = Refusal::none;
    if (epochs_[ticket.slot] != ticket.epoch) refusal = Refusal::dropped;
    else if (offset > region || bytes > region - offset) refusal = Refusal::out_of_range;
    else if (access != Access::read && ticket.slot == 0) refusal = Refusal::read_only;
    else if (access > Access::write && device(ticket) != gpu::none) refusal = Refusal::no_atomics;
    if (refusal == Refusal::none) *data = (device(ticket) == 0 ? gpu_ : data_[ticket.slot].data()) + offset;
    else release(ticket);
    return refusal;
  }
  void release(const Ticket& ticket) override { alone ? locks_[ticket.slot].unlock() : locks_[ticket.slot].unlock_shared(); }
  int device(const Ticket& ticket) override { return gpu_ != nullptr && ticket.slot == regions - 1 ? 0 : gpu::none; }
  Ticket ticket(std::uint32_t slot) {
    const std::shared_lock lock(locks_[slot]);
    return {slot, epochs_[slot], 0};
  }
  // Like a drop and an add: the old bytes are overwritten.
  void renew(std::uint32_t slot) {
    const std::unique_lock lock(locks_[slot]);
    epochs_[slot] += 2;
    if (slot == 0) return;
    std::memset(data_[slot].data(), 0x5a, region);
  }

 private:
  static inline thread_local bool alone = false;  // of the thread's hold: writers do, or what they write would be a race
  char* const gpu_ = has_gpu() ? gpu_memory() : nullptr;
  std::vector<char> data_[regions];
  std::uint64_t epochs_[regions] = {1, 1, 1, 1};
  std::shared_mutex locks_[regions];
};

std::string file(const std::string& folder, const char* name) {
  std::ifstream in(folder + "/" + name, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

std::shared_ptr<Identity> identity(char digit, const std::string& folder) {
  const std::string token(32, digit), secret(32, 's');
  if (folder.empty()) return std::make_shared<Identity>(token, secret, "", "", "");
  return std::make_shared<Identity>(token, secret, file(folder, "certificate"), file(folder, "key"), file(folder, "ca"));
}

void send_junk(std::uint16_t port, unsigned seed) {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in to{};
  to.sin_family = AF_INET, to.sin_port = htons(port), to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (connect(fd, reinterpret_cast<sockaddr*>(&to), sizeof to) == 0) {
    std::minstd_rand random(seed);
    char junk[200];
    for (char& byte : junk) byte = static_cast<char>(random());
    (void)!send(fd, junk, random() % sizeof junk, no_signal);
  }
  close(fd);
}

std::atomic<int> outcomes[static_cast<int>(Outcome::unreachable) + 1];

// A read whose answer two threads look for; nothing where there was no idle connection for it.
std::optional<Result> small_request(Client& client, const Ticket& ticket, const std::vector<Segment>& segments, TimePoint deadline, const Cancel& cancel) {
  const std::unique_ptr<SmallRequest> sent = client.begin(Access::read, ticket, segments, 0, 0, deadline, &cancel);
  if (sent == nullptr) return {};
  std::optional<Result> mine, others;
  std::thread other([&] {
    while (!sent->is_over()) {
      if (auto result = sent->fetch(TimePoint::max(), true)) others = result;
    }
  });
  while (!sent->is_over()) {
    if (auto result = sent->fetch(std::chrono::steady_clock::now() + std::chrono::milliseconds(1), false)) mine = result;
  }
  other.join();
  if (mine.has_value() == others.has_value()) fail("a result is told once");
  return mine ? mine : others;
}

// Staging memory of a server, with a slot for each caller.
struct Staging {
  static constexpr std::uint64_t key = 7, slot_bytes = region / 2;
  Staging() : memory(std::make_shared<std::vector<char>>(callers * slot_bytes)) {}
  char* slot(std::uint32_t number) const { return memory->data() + number * slot_bytes; }

  const std::shared_ptr<std::vector<char>> memory;
};
std::atomic<std::uint64_t> sequences{0};

// Like a peer whose NIC moves the bytes: no other thread accesses the slot after the reply. Some callers leave before
// it.
Result staged(Client& client, Staging& staging, std::uint32_t mine, bool write, const Ticket& ticket, std::vector<Segment> ranges, bool waits,
              TimePoint deadline, const Cancel& cancel) {
  Result result;
  const std::unique_ptr<StagingConnection> connection = client.open_staging_connection(deadline, &cancel, result);
  if (connection == nullptr) return result;
  const auto send_request = [&](bool writes, const std::vector<Segment>& of) {
    return connection->send_request({writes, ticket, Staging::key, mine, ++sequences}, of);
  };
  if (write) {
    result = send_request(false, {{0, nullptr, 0}});
    if (result.outcome == Outcome::done) result = connection->receive_reply();
    if (result.outcome != Outcome::done) return result;
    std::memset(staging.slot(mine), 'w', Staging::slot_bytes);
  }
  result = send_request(write, ranges);
  if (result.outcome != Outcome::done || !waits) return result.outcome == Outcome::done ? Result{Outcome::cancelled} : result;
  result = connection->receive_reply();
  if (result.outcome != Outcome::done || write || ticket.slot != 0) return result;
  const char* at = staging.slot(mine);
  for (const Segment& range : ranges) {
    for (std::uint64_t k = range.offset; k < range.offset + range.bytes; ++k) {
      if (*at++ != static_cast<char>(k * 31 >> 3)) fail("other bytes than were put there are staged");
    }
  }
  return result;
}

void call(Client& client, FakeTable& table, Staging& staging, std::uint32_t mine_is, unsigned seed, const std::atomic<bool>& end) {
  std::minstd_rand random(seed);
  std::vector<char> mine(region, 'm');
  char* const on_gpu = has_gpu() ? gpu_memory() : mine.data();
  const std::size_t sizes[] = {0, 8, 3000, 100'000, region / 2, region};
  while (!end) {
    const std::uint32_t slot = random() % regions;
    const std::uint64_t bytes = sizes[random() % std::size(sizes)], offset = random() % (region - bytes + 1);
    const TimePoint deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(random() % 8 == 0 ? 1 : 5000);
    Cancel cancel;
    std::thread canceller;
    if (random() % 8 == 0) canceller = std::thread([&] { cancel.set(); });
    const std::uint64_t half = bytes / 2;
    char* const to = slot == regions - 1 ? on_gpu : mine.data();
    const std::vector<Segment> segments{{offset, to + offset, half}, {offset + half, to + offset + half, bytes - half}};
    Result result;
    const auto kind = random() % 6;
    std::optional<Result> small;
    if (kind == 0) small = small_request(client, table.ticket(slot), segments, deadline, cancel);
    if (small) result = *small;
    else if (kind < 2) result = client.read(table.ticket(slot), segments, deadline, &cancel);
    else if (kind > 3 && bytes <= Staging::slot_bytes) result = staged(client, staging, mine_is, kind == 5, table.ticket(slot), segments, random() % 4 != 0, deadline, cancel);
    else if (kind == 2) result = client.write(table.ticket(slot), segments, deadline, &cancel);
    else result = client.atomic(table.ticket(slot), offset / 8 * 8 % (region - 8), Access::fetch_add, 1, 0, deadline, &cancel);
    if (canceller.joinable()) canceller.join();
    ++outcomes[static_cast<int>(result.outcome)];
    if (slot == 0 && kind < 2 && result.outcome == Outcome::done) {
      for (std::uint64_t k = offset; k < offset + bytes; ++k) {
        if (mine[k] != static_cast<char>(k * 31 >> 3)) fail("other bytes than were put there");
      }
    }
    if (result.outcome == Outcome::done && slot == 0 && kind >= 2 && kind != 4) fail("what is for reading only was written");
  }
}

void play(unsigned seed, const std::string& folder) {
  std::minstd_rand random(seed);
  const auto table = std::make_shared<FakeTable>();
  auto server = std::make_unique<Server>(table, identity('a', folder), 3);
  Staging staging;
  server->staging().add(Staging::key, std::make_shared<StagingBuffer>(staging.memory, staging.slot(0), Staging::slot_bytes, callers));
  const std::uint16_t port = server->listen("127.0.0.1");
  Client client("127.0.0.1", port, identity('b', folder), std::string(32, 'a'), 2 + seed % 3);
  std::atomic<bool> end{false};
  std::vector<std::thread> threads;
  for (int i = 0; i < callers; ++i) threads.emplace_back([&, i] { call(client, *table, staging, i, seed * 100 + i, end); });
  for (int i = 0; i < 20; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    table->renew(random() % regions);
    send_junk(port, random());
  }
  if (seed % 2 == 0) {
    server->close();
    server.reset();
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  } else {
    client.close();
  }
  end = true;
  for (std::thread& thread : threads) thread.join();
}

}  // namespace

int main(int count, char** words) {
  if (count != 3) fail("memory_stress ROUNDS FOLDER");
#if defined(MONARCH_PORTABLE) && !defined(SO_NOSIGPIPE)
  std::signal(SIGPIPE, SIG_IGN);  // as Python does; on macOS the sockets have an option
#endif
  if (has_gpu()) gpu::open({std::getenv("MONARCH_GPU_DRIVER")});
  for (int round = 1; round <= std::atoi(words[1]); ++round) play(static_cast<unsigned>(round), words[2]);
  const auto times = [](Outcome outcome) { return outcomes[static_cast<int>(outcome)].load(); };
  std::printf("done %d, refused %d, unreachable %d, lost %d, timed out %d, cancelled %d\n", times(Outcome::done), times(Outcome::refused),
              times(Outcome::unreachable), times(Outcome::lost), times(Outcome::late), times(Outcome::cancelled));
  return outcomes[0] > 0 && outcomes[1] > 0 ? 0 : 1;
}
