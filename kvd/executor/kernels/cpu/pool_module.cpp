// The pool for Python.
#include "module.h"
#include "pool.h"

namespace kvd {

void register_pool(nanobind::module_& m) {
    namespace nb = nanobind;
    nb::class_<Pool>(m, "Pool", "Threads that share the work of all kernels.")
        .def(nb::init<int>(), nb::arg("num_threads"), "`num_threads` counts the caller.")
        .def_prop_ro("num_threads", &Pool::num_threads);
}

}  // namespace kvd
