"""Kernels for NVIDIA GPUs in Triton (Tillet et al. 2019), each beside its torch reference. Imported on cuda alone, and by tests under Triton's interpreter."""
