// The address of a tensor whose memory is in other processes, and the error of C++ code that uses it. Depends on
// Python; the layout of torch's tensors is passed in.
#pragma once

#include <Python.h>

namespace monarch {

// Puts its functions into the module; false with an error.
bool add_tensor_address(PyObject* module);

}  // namespace monarch
