"""Objects as bytes: pickles, tensors, arrays, buffers, exceptions."""
