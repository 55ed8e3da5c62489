// What a tensor whose memory is in other processes has for an address, and the error of C++ that uses it. Knows Python,
// and of torch what it is told: where in a tensor the address stands.
#pragma once

#include <Python.h>

namespace monarch {

// Puts its functions into the module; false with an error.
bool add_tensor_address(PyObject* module);

}  // namespace monarch
