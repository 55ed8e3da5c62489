// The way of nearly every call: a collective of one plain tensor that is waited for, from Python's arguments to the core
// with no interpreted line in between. An interpreted way costs more than all the rest of a small operation.
//
// A shortcut is a callable that stands in a process group's instance in the place of a method. What it does not
// recognise it passes on to the method, unchanged: no call means anything here that it does not mean there.
#pragma once

#include <memory>
#include <string>

#include <pybind11/pybind11.h>

#include "shm/group.h"

namespace monarch {

// What it must know of torch (which this library is built without), from process_group/_c10d_internals.py.
struct TorchNames {
  pybind11::object tensor, parameter;  // the types of plain tensors
  pybind11::object strided;            // the layout
  pybind11::object sum;                // the ReduceOp
  pybind11::dict ops;                  // value of any ReduceOp.RedOpType -> ReduceOp
  pybind11::dict dtypes;               // dtype -> Dtype, of those that the core takes as they are
  pybind11::list watches;              // callables that are falsy while nobody listens on torch's dispatcher
  pybind11::dict profiler;             // a module's, with `_is_profiler_enabled`
};

// The arguments of a method, before the options.
enum class Form : std::uint8_t {
  in_place,   // [tensor]
  pair,       // output, input
  gathering,  // [[output for each rank]], [input]
  exchange,   // output, input, [], []
  nothing,
};

// A callable for `owner`'s method `name`, whose options have the type `options`.
struct Shortcut {
  std::shared_ptr<Group> group;
  Collective collective;
  Form form;
  pybind11::object owner;
  std::string name;
  pybind11::object options;
  pybind11::object work;     // a class: work() is the work of an operation that has ended well, with its `_outputs` to be set
  pybind11::object failed;   // failed(operation, outputs): the work of one that has not
  pybind11::object seconds;  // seconds(options): the time limit
  TorchNames torch;
};
pybind11::object make_shortcut(Shortcut shortcut);

// Runs it in this thread, to its end; null if it ended well. Only when it is late is Python asked for the time limit, which
// costs as much as a small operation. Holds the GIL when called. What `seconds` raises is raised when the operation has
// ended: nobody can take back what the others may be reading.
std::shared_ptr<Operation> run_to_end(Group& group, std::shared_ptr<Operation> operation, const pybind11::object& seconds,
                                      const pybind11::object& options);

Clock::time_point after(double seconds);

}  // namespace monarch
