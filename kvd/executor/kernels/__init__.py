"""Hand-written kernels, each with its torch reference: ``cpu`` (C++), ``triton``. They know tensors' memory, never a row or a step."""
