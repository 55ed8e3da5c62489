#include "shm/engine.h"

#include <algorithm>
#include <chrono>
#include <deque>
#include <iterator>

#include <pthread.h>
#include <signal.h>

#include "native_thread.h"

namespace monarch {

namespace {

// Longer than a small operation with a caller that waits, shorter than what a large one takes. The system adds about as
// much to it.
constexpr std::chrono::microseconds nap_time{50};
constexpr int most_naps = 20;  // without an operation

}  // namespace

struct Callbacks::State {
  std::mutex mutex;
  std::condition_variable more;
  std::deque<std::function<void()>> waiting;
  std::size_t idle = 0;
  bool stop = false;
};

Callbacks::Callbacks() : state_(std::make_shared<State>()) {}

Callbacks::~Callbacks() {
  const std::lock_guard lock(state_->mutex);
  state_->stop = true;
  state_->more.notify_all();
}

void Callbacks::post(std::function<void()> callback) {
  bool hire = false;
  {
    const std::lock_guard lock(state_->mutex);
    state_->waiting.push_back(std::move(callback));
    hire = state_->idle < state_->waiting.size();
    state_->more.notify_one();
  }
  if (hire) std::thread(serve, state_).detach();
}

void Callbacks::serve(std::shared_ptr<State> state) {
  begin_native_thread("monarch_call");
  std::unique_lock lock(state->mutex);
  for (;;) {
    ++state->idle;
    const bool called = state->more.wait_for(lock, std::chrono::seconds(5), [&] { return state->stop || !state->waiting.empty(); });
    --state->idle;
    if (!called || state->stop) return;
    auto callback = std::move(state->waiting.front());
    state->waiting.pop_front();
    lock.unlock();
    callback();
    callback = nullptr;  // takes the GIL: not under the lock
    lock.lock();
  }
}

Engine::Engine(std::shared_ptr<Host> host) : host_(std::move(host)) {}

Engine::~Engine() { stop(); }

void Engine::submit_async(std::shared_ptr<Group> group, std::shared_ptr<Operation> operation, std::function<void()> then) {
  const std::lock_guard lock(mutex_);
  tasks_.push_back({std::move(group), std::move(operation), std::move(then), Clock::now()});
  if (!thread_.joinable() && !stop_) {
    thread_ = std::thread([this] {
      begin_native_thread("monarch_engine");
      run();
    });
  }
  if (asleep_) work_.notify_one();
  host_->doorbell().ring();  // the thread may sleep for another operation
  host_->local_doorbell().ring();
}

bool Engine::take_back(const Operation& operation) {
  Task taken;  // its `then` may take the GIL: not under the lock
  const std::lock_guard lock(mutex_);
  const auto found = std::find_if(tasks_.begin(), tasks_.end(), [&](const Task& task) { return task.operation.get() == &operation; });
  if (found == tasks_.end()) return false;
  std::swap(taken, *found);
  tasks_.erase(found);
  return true;
}

void Engine::stop() {
  const std::lock_guard stopping(stopping_);
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  work_.notify_one();
  host_->doorbell().wake();
  host_->local_doorbell().wake();
  if (thread_.joinable()) thread_.join();
}

// True if anything moved or ended, or if there is something to move when nothing was left to (`idle`).
bool Engine::look(bool idle, bool before_sleep) {
  std::vector<std::shared_ptr<Group>> groups;
  bool ended = false;
  {
    const std::lock_guard lock(mutex_);
    if (stop_) return true;
    for (const Task& task : tasks_) {
      ended |= task.operation->done.load(std::memory_order_acquire);
      if (task.operation->waiters.load(std::memory_order_relaxed) != 0) continue;  // its waiting thread moves it
      if (std::find(groups.begin(), groups.end(), task.group) == groups.end()) groups.push_back(task.group);
    }
  }
  bool moved = idle && !groups.empty();
  for (const auto& group : groups) moved |= group->advance(before_sleep);
  return moved || ended;
}

void Engine::call_back() {
  std::vector<Task> ended;
  {
    const std::lock_guard lock(mutex_);
    const auto open = [](const Task& task) { return !task.operation->done.load(std::memory_order_acquire); };
    const auto first = std::stable_partition(tasks_.begin(), tasks_.end(), open);
    std::move(first, tasks_.end(), std::back_inserter(ended));
    tasks_.erase(first, tasks_.end());
  }
  for (Task& task : ended) {
    if (task.then) callbacks_.post(std::move(task.then));
  }
}

// Wait until there is an operation to move that is older than a nap. False if the engine stops.
bool Engine::nap(std::unique_lock<std::mutex>& lock) {
  for (int naps = 0; !stop_; naps = tasks_.empty() ? naps + 1 : 0) {
    const auto now = Clock::now();
    if (std::any_of(tasks_.begin(), tasks_.end(), [&](const Task& task) { return now - task.since >= nap_time; })) return true;
    if (naps > most_naps) {
      asleep_ = true;
      work_.wait(lock, [this] { return stop_ || !tasks_.empty(); });
      asleep_ = false;
    }
    work_.wait_for(lock, nap_time, [this] { return stop_; });
  }
  return false;
}

void Engine::run() {
  for (;;) {
    Clock::time_point deadline = Clock::time_point::max();
    bool idle = true;
    {
      std::unique_lock lock(mutex_);
      if (!nap(lock)) return;
      for (const Task& task : tasks_) {
        deadline = std::min(deadline, task.operation->deadline);
        idle &= task.operation->waiters.load(std::memory_order_relaxed) != 0;
      }
    }
    // Never spins: the processor belongs to the computation that the operation hides behind. While other threads
    // move all there is, the peers need not wake this one.
    FutexWaiter waiter(idle ? host_->local_doorbell() : host_->doorbell(), true);
    while (!look(idle, false)) {
      if (waiter.wait([&] { return look(idle, true); }, deadline)) continue;
      // Not whole tasks: a copy of `then` takes the GIL, which the caller of take_back may hold.
      std::vector<std::pair<std::shared_ptr<Group>, std::shared_ptr<Operation>>> due;
      {
        const std::lock_guard lock(mutex_);
        for (const Task& task : tasks_) due.emplace_back(task.group, task.operation);
      }
      for (const auto& [group, operation] : due) group->expire_if_due(*operation);
      break;
    }
    call_back();
  }
}

}  // namespace monarch
