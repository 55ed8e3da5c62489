// Program of call_comparison.py: two processes run batches of all_reduces of 8 bytes. It prints each batch's mean in ns.
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <memory>
#include <new>

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "shm/group.h"

using namespace monarch;

namespace {

struct Meeting {
  std::array<std::array<char, 33>, 2> tokens;
  std::array<std::uint64_t, 2> control_blocks;
  std::array<std::atomic<int>, 4> steps;

  void meet(int step) {
    steps[step].fetch_add(1);
    while (steps[step].load() < 2) usleep(100);
  }
};

int play(Meeting& meeting, int rank, int batches, int calls) {
  auto host = std::make_shared<Host>(16 << 20);
  std::memcpy(meeting.tokens[rank].data(), host->token().c_str(), host->token().size());
  meeting.control_blocks[rank] = Group::allocate_control_block(*host, 2);
  meeting.meet(0);
  const std::string other(meeting.tokens[1 - rank].data(), 32);
  auto peer = rank == 0 ? host->connect(other) : host->accepted(other, 10);
  if (!peer) return 1;
  std::vector<std::shared_ptr<Peer>> peers(2);
  peers[1 - rank] = peer;
  meeting.meet(1);
  auto group = std::make_shared<Group>(host, rank, peers, std::vector<std::uint64_t>(meeting.control_blocks.begin(), meeting.control_blocks.end()), 0, "");
  float x[2] = {0, 0};
  for (int batch = 0; batch < batches; ++batch) {
    const auto start = Clock::now();
    for (int call = 0; call < calls; ++call) {
      auto op = std::make_shared<Operation>();
      op->header = {8, -1, Collective::all_reduce, Dtype::f32, ReduceOp::sum, Offer::stage};
      op->in = op->out = {{reinterpret_cast<char*>(x), 8}};
      group->submit(op);
      group->wait(*op);
      if (op->failure) return 1;
    }
    if (rank == 0) std::printf("%.1f\n", std::chrono::duration<double, std::nano>(Clock::now() - start).count() / calls);
  }
  meeting.meet(2);
  group->close();
  meeting.meet(3);
  return 0;
}

}  // namespace

int main() {
  void* memory = mmap(nullptr, sizeof(Meeting), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  auto* meeting = new (memory) Meeting{};
  const pid_t child = fork();
  if (child == 0) _exit(play(*meeting, 1, 20, 20000));
  const int failed = play(*meeting, 0, 20, 20000);
  int status = 0;
  waitpid(child, &status, 0);
  return failed != 0 || status != 0;
}
