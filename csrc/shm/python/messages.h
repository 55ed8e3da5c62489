// Fast path of messages: send, recv and recv_anysource of one plain tensor.
//
// A message that can be moved at once is done when the call returns. Another one is given to the progress thread, unless
// the caller of torch's function waits at once.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include <pybind11/pybind11.h>

#include "shm/engine.h"
#include "shm/python/compiled_method.h"

namespace monarch {

enum class MessageKind : std::uint8_t { send, recv, recv_any };

// A callable for `owner`'s method `name`.
struct MessagePath {
  std::shared_ptr<Group> group;
  MessageKind kind;
  pybind11::object owner;
  std::string name;
  pybind11::object work;     // a class: work() is the work of a message, with its state to be set
  pybind11::object failed;   // failed(operation, outputs): the work of one that has failed
  pybind11::object seconds;  // seconds(): the time limit
  pybind11::object backend;  // the `_group` of works
  pybind11::object engine;
  pybind11::tuple waiting;   // code objects of functions that wait at once for what they request ...
  pybind11::tuple passing;   // ... by these functions
  TorchNames torch;
};
pybind11::object make_message_path(MessagePath path);

void set_up_messages();

}  // namespace monarch
