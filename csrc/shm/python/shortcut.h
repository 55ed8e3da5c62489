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

// What it must know of torch (which this library is built without), from process_group/_torch.py.
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

// A callable for `owner`'s method `name`, whose options have the type `options`. It returns None when all is done (what
// torch calls "synced at C++ level"); `finish(operation, outputs, options)` makes the work of an operation that has not
// ended yet, or not well.
pybind11::object make_shortcut(std::shared_ptr<Group> group, Collective collective, Form form, const pybind11::object& owner,
                               std::string name, pybind11::object options, pybind11::object finish, TorchNames torch);

// Runs it in this thread, if it ends soon: null then. What takes longer, or has failed, comes back to be finished;
// only then does Python look up the time limit, which costs as much as a small operation. Holds the GIL when called.
std::shared_ptr<Operation> run_at_once(Group& group, std::shared_ptr<Operation> operation);

}  // namespace monarch
