#include "dispatch.h"

#include <atomic>
#include <stdexcept>
#include <string>

namespace kvd {

namespace {

bool has(Isa isa) {
#if defined(KVD_HAS_avx512)
    switch (isa) {
        case Isa::portable:
            return true;
        case Isa::avx2:
            return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
        case Isa::avx512:
            return has(Isa::avx2) && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                   __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512bf16") &&
                   __builtin_cpu_supports("avx512vnni");
    }
    return false;
#else
    return isa == Isa::portable;
#endif
}

Isa best() { return has(Isa::avx512) ? Isa::avx512 : has(Isa::avx2) ? Isa::avx2 : Isa::portable; }

std::atomic<Isa>& active() {
    static std::atomic<Isa> isa{best()};
    return isa;
}

}  // namespace

Isa active_isa() { return active().load(std::memory_order_relaxed); }

bool isa_available(Isa isa) { return has(isa); }

void set_isa(Isa isa) {
    if (!has(isa)) throw std::invalid_argument(std::string("this processor or this build has no ") + isa_name(isa));
    active().store(isa, std::memory_order_relaxed);
}

const char* isa_name(Isa isa) {
    switch (isa) {
        case Isa::portable:
            return "portable";
        case Isa::avx2:
            return "avx2";
        case Isa::avx512:
            return "avx512";
    }
    return "unknown";
}

}  // namespace kvd
