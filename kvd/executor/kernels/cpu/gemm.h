// The tables of the plain products' kernels, one for each instruction set.
#pragma once

#include "formats.h"

namespace kvd {

struct GemmTable {
    PanelKernel bf16_panel;  // bf16 panel, bf16 rows
    PanelKernel f32_panel;   // f32 panel, f32 rows
};

namespace portable { extern const GemmTable gemm_table; }
namespace avx2 { extern const GemmTable gemm_table; }
namespace avx512 { extern const GemmTable gemm_table; }

}  // namespace kvd
