// The Python module `_cpu`: each part registers its own classes and functions.
#include <nanobind/nanobind.h>

#include "module.h"

NB_MODULE(_cpu, m) {
    nanobind::set_leak_warnings(false);  // a process ends with its model in memory: that is no leak, and its log no place to say so
    kvd::register_pool(m);
    kvd::register_matrix(m);
    kvd::register_loading(m);
    kvd::register_attention(m);
    kvd::register_elementwise(m);
    kvd::register_decoder(m);
    kvd::register_shaping(m);
    kvd::register_step_queue(m);
}
