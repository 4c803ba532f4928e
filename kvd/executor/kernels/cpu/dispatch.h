// Which instruction set the kernels use. Each kernel source is compiled once a set, in namespace kvd::<set>, and exports one table of functions there;
// the caller asks for the table of the active set.
#pragma once

namespace kvd {

enum class Isa : int { portable = 0, avx2 = 1, avx512 = 2 };

// The best set that this processor and this build have, unless set_isa chose a lower one (tests, KVD_CPU_ISA).
Isa active_isa();
// Throws std::invalid_argument when the processor or the build lacks it. Matrices packed before stay valid: packing is the same for all sets.
void set_isa(Isa isa);
bool isa_available(Isa isa);
const char* isa_name(Isa isa);

}  // namespace kvd

// KVD_CHOOSE(gemm_table) is the table `gemm_table` of the active set; a source without x86 has the portable one alone.
#if defined(KVD_HAS_avx512)
#define KVD_CHOOSE(table) (::kvd::active_isa() == ::kvd::Isa::avx512 ? ::kvd::avx512::table : ::kvd::active_isa() == ::kvd::Isa::avx2 ? ::kvd::avx2::table : ::kvd::portable::table)
#else
#define KVD_CHOOSE(table) (::kvd::portable::table)
#endif
