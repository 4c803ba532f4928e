// The parts of the Python module, each defined beside what it exposes.
#pragma once

#include <nanobind/nanobind.h>

namespace kvd {

void register_pool(nanobind::module_& m);
void register_matrix(nanobind::module_& m);
void register_loading(nanobind::module_& m);
void register_attention(nanobind::module_& m);
void register_elementwise(nanobind::module_& m);
void register_decoder(nanobind::module_& m);
void register_shaping(nanobind::module_& m);
void register_step_queue(nanobind::module_& m);

}  // namespace kvd
