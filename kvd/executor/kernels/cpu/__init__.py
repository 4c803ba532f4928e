"""Native CPU kernels (C++): packed matrices, paged attention and a whole decoder step over one thread pool.

The compiled module ``_cpu`` may be absent (no compiler at installation): ``kvd.executor.kernels.cpu.native`` says so, and torch serves.
"""
