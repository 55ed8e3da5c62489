// The progress thread: moves asynchronous operations of all groups of the process while their callers do other
// things. One thread per process, started with the first asynchronous operation, asleep while there is none.
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

class Engine {
 public:
  explicit Engine(std::shared_ptr<Host> host);
  ~Engine();

  // Submits the operation and sees to it that it ends. `then` is called from the progress thread, without locks,
  // once it is done; an operation has at most one.
  void start(std::shared_ptr<Group> group, std::shared_ptr<Operation> operation, std::function<void()> then);
  void stop();

 private:
  struct Task {
    std::shared_ptr<Group> group;
    std::shared_ptr<Operation> operation;
    std::function<void()> then;
  };
  void run();
  bool look();
  void call_back();

  std::shared_ptr<Host> host_;
  std::mutex mutex_;
  std::condition_variable work_;
  std::vector<Task> tasks_;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace monarch
