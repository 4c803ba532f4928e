"""Steps on an NVIDIA GPU: the model in Triton kernels, decoding in captured graphs, tokens that stay on the device, copies on side streams."""
