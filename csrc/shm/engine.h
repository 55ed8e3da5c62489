// The progress thread: moves asynchronous operations of all groups of the process while their callers do other
// things. One thread per process, started with the first asynchronous operation.
//
// It naps before it moves a new operation. A caller that waits soon moves the operation itself, which needs no switch of
// threads. While operations come, the naps follow each other and no caller has to wake the thread. After some naps
// without an operation it sleeps.
#pragma once

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "shm/group.h"

namespace monarch {

// Runs callbacks, each on a thread that may block: one that waits for another operation must not keep the progress
// thread from moving it, nor the callback that ends it from running. Threads are made when all others are busy.
class Callbacks {
 public:
  Callbacks();
  ~Callbacks();  // running callbacks continue; callbacks that have not started are dropped
  void post(std::function<void()> callback);

 private:
  struct State;
  static void serve(std::shared_ptr<State> state);
  std::shared_ptr<State> state_;
};

class Engine {
 public:
  explicit Engine(std::shared_ptr<Host> host);
  ~Engine();

  // Drives an operation that its group has to its end. `then` is called once it is done, from a thread of its own and
  // without locks; an operation has at most one.
  void submit_async(std::shared_ptr<Group> group, std::shared_ptr<Operation> operation, std::function<void()> then);
  // Forget an operation whose end the caller handles: `then` is not called. False if it was called, or will be.
  bool take_back(const Operation& operation);
  void stop();

 private:
  struct Task {
    std::shared_ptr<Group> group;
    std::shared_ptr<Operation> operation;
    std::function<void()> then;
    Clock::time_point since;
  };
  void run();
  bool nap(std::unique_lock<std::mutex>& lock);
  bool look(bool idle, bool before_sleep);
  void call_back();

  std::shared_ptr<Host> host_;
  Callbacks callbacks_;
  std::mutex stopping_;  // one thread joins
  std::mutex mutex_;
  std::condition_variable work_;
  std::vector<Task> tasks_;
  bool asleep_ = false;  // not in a nap
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace monarch
