#include "verbs/queue_pairs.h"

#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <optional>
#include <system_error>
#include <vector>

namespace monarch::verbs {

namespace {

enum Opcode : int { compare_swap = 5, fetch_add = 6 };  // IBV_WR_ATOMIC_*
constexpr unsigned signaled = 2;                        // IBV_SEND_SIGNALED
constexpr std::size_t most_works = 16;                  // that need no memory of their own

// A copy of the memory at an address, or nothing if it is unmapped.
template <class T>
std::optional<T> look_at(const void* address) {
  T copy;
  if (address == nullptr || reinterpret_cast<std::uintptr_t>(address) % alignof(T) != 0) return std::nullopt;
  const iovec here{&copy, sizeof(T)}, there{const_cast<void*>(address), sizeof(T)};
  if (process_vm_readv(getpid(), &here, 1, &there, 1, 0) != static_cast<ssize_t>(sizeof(T))) return std::nullopt;
  return copy;
}

template <class T, class Is>
T* find_in(std::span<const std::uintptr_t> object, Is is) {
  for (const std::uintptr_t word : object) {
    T* const address = reinterpret_cast<T*>(word);
    const std::optional<T> found = look_at<T>(address);
    if (found && is(*found)) return address;
  }
  return nullptr;
}

// By convention it is the error; some drivers have -1 and errno.
void check(int result, const char* what) {
  if (result != 0) throw std::system_error(result > 0 ? result : errno, std::generic_category(), what);
}

}  // namespace

std::shared_ptr<CompletionQueue> CompletionQueue::find(std::span<const std::uintptr_t> object, int fd, int entries) {
  Cq* const queue = find_in<Cq>(object, [&](const Cq& found) {
    if (found.cqe != entries) return false;
    const std::optional<Channel> channel = look_at<Channel>(found.channel);
    if (!channel || channel->fd != fd || channel->context != found.context) return false;
    const std::optional<Context> context = look_at<Context>(found.context);
    return context && context->poll_cq != nullptr && context->req_notify_cq != nullptr && context->post_send != nullptr;
  });
  return queue == nullptr ? nullptr : std::shared_ptr<CompletionQueue>(new CompletionQueue(queue));
}

Cq& CompletionQueue::open() const {
  if (queue_ == nullptr) throw std::system_error(EBADF, std::generic_category(), "the completion queue is closed");
  return *queue_;
}

void CompletionQueue::arm() {
  Cq& queue = open();
  check(queue.context->req_notify_cq(&queue, 0), "ibv_req_notify_cq");
}

std::size_t CompletionQueue::poll(std::span<Wc> into) {
  Cq& queue = open();
  errno = 0;
  const int count = queue.context->poll_cq(&queue, static_cast<int>(into.size()), into.data());
  if (count < 0) throw std::system_error(errno != 0 ? errno : EIO, std::generic_category(), "ibv_poll_cq");
  return static_cast<std::size_t>(count);
}

std::shared_ptr<QueuePair> QueuePair::find(std::span<const std::uintptr_t> object, std::uint32_t number, std::shared_ptr<const CompletionQueue> queue) {
  const Cq& completes_in = queue->open();
  Qp* const pair = find_in<Qp>(object, [&](const Qp& found) {
    return found.qp_num == number && found.qp_type == reliable && found.send_cq == &completes_in && found.context == completes_in.context;
  });
  return pair == nullptr ? nullptr : std::shared_ptr<QueuePair>(new QueuePair(pair, std::move(queue)));
}

void QueuePair::post(std::span<const Work> works) {
  if (pair_ == nullptr) throw std::system_error(EBADF, std::generic_category(), "the queue pair is closed");
  queue_->open();
  if (works.empty()) return;
  struct Entry {
    SendWr request{};
    Sge memory{};
  };
  Entry few[most_works];
  std::vector<Entry> many(works.size() > most_works ? works.size() : 0);
  Entry* const entries = many.empty() ? few : many.data();
  for (std::size_t i = 0; i < works.size(); ++i) {
    const Work& work = works[i];
    SendWr& request = entries[i].request;
    entries[i].memory = {work.local, work.bytes, work.lkey};
    request.wr_id = work.id;
    request.next = i + 1 < works.size() ? &entries[i + 1].request : nullptr;
    request.sg_list = &entries[i].memory;
    request.num_sge = work.bytes != 0 ? 1 : 0;
    request.opcode = work.opcode;
    request.send_flags = work.signaled ? signaled : 0;
    if (work.opcode == compare_swap || work.opcode == fetch_add) {
      request.wr.atomic = {work.remote, work.compare_add, work.swap, work.rkey};
    } else {
      request.wr.rdma = {work.remote, work.rkey};
    }
  }
  SendWr* refused = nullptr;
  check(pair_->context->post_send(pair_, &entries[0].request, &refused), "ibv_post_send");
}

}  // namespace monarch::verbs
