// The method `wait` of works that fast paths make, and the wait in the calls of messages.
#pragma once

#include <memory>

#include <pybind11/pybind11.h>

#include "shm/engine.h"

namespace monarch {

// The method `wait` for the class of their works. It takes the operation back from the progress thread and moves it. It
// calls the method `wait_at_length` for a failed operation, for one with a future, and if it has a time limit. Its
// attributes, such as its name, are those of `method`, the same in Python.
pybind11::object make_work_wait(const pybind11::object& method);

// Give a submitted operation to the progress thread, without a callback.
void hand_over(Engine& engine, const std::shared_ptr<Group>& group, const std::shared_ptr<Operation>& operation);

// Move an operation in this thread for a moment.
void wait_briefly(Group& group, Operation& operation);

// The same to its end. Throws if a signal's handler raises; the operation goes on.
void wait_on(Group& group, Operation& operation);

void set_up_work_wait();

}  // namespace monarch
