// Fast path of nearly every call: a collective of one plain tensor, from Python's arguments to the core without
// interpreted code. Interpreted code costs more than all the rest of a small operation.
//
// A fast path is a callable that replaces a method in a process group's instance. It forwards calls that it does not
// recognise to the method, unchanged: all calls keep their meaning.
#pragma once

#include <memory>
#include <string>

#include <pybind11/pybind11.h>

#include "shm/engine.h"
#include "shm/python/compiled_method.h"

namespace monarch {

// The arguments of a method, before the options.
enum class Form : std::uint8_t {
  in_place,   // [tensor]
  pair,       // output, input
  gathering,  // [[output for each rank]], [input]
  exchange,   // output, input, [], []
  nothing,
};

// A callable for `owner`'s method `name`, whose options have the type `options`.
struct FastPath {
  std::shared_ptr<Group> group;
  Collective collective;
  Form form;
  pybind11::object owner;
  std::string name;
  pybind11::object options;
  pybind11::object work;     // a class: work() is the work of an operation, with its state to be set
  pybind11::object failed;   // failed(operation, outputs): the work of one that has failed
  pybind11::object pending;  // pending(operation, outputs, options, is_small): the work of an asynchronous one that is not done
  pybind11::object seconds;  // seconds(options): the time limit
  pybind11::object backend;  // the `_group` of works; its `_deferred` is None or an operation that `pending` must see
  pybind11::object engine;
  TorchNames torch;
};
pybind11::object make_fast_path(FastPath fast_path);
// Make what all fast paths share. When the module is made: Python code that runs in the initialisation of a static
// variable could wait for a thread that waits for the same variable.
void set_up_fast_paths();

// Run it in this thread, to its end. Return null if it succeeded. Python is called for the time limit only when it is
// late, because that call costs as much as a small operation. Call with the GIL. An exception of `seconds` is raised
// after the operation has ended, because the other ranks may be reading the data.
std::shared_ptr<Operation> run_to_end(Group& group, std::shared_ptr<Operation> operation, const pybind11::object& seconds,
                                      const pybind11::object& options);

// Submit an asynchronous operation. A small one is tried for some microseconds: it is done at once if the other ranks have
// called it, too. Return whether it is small: then the other ranks need nothing more of this one. Call with the GIL.
bool begin(Group& group, const std::shared_ptr<Operation>& operation);

// Drop what an operation that is done keeps.
void forget(Operation& operation);

// A reference that may end on any thread.
std::shared_ptr<void> shared_reference(pybind11::object object);

Clock::time_point after(double seconds);

}  // namespace monarch
