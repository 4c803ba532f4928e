// What a step's attention is cut into.
#include "attention.h"

#include <stdexcept>

#include "module.h"

namespace kvd {

struct AttentionPlan::Impl {};

AttentionPlan::AttentionPlan(const KvLayout&, const StepShape&, int64_t, int64_t, int) { throw std::runtime_error("attention is not built"); }
AttentionPlan::~AttentionPlan() = default;
int64_t KvLayout::plane_bytes() const { throw std::runtime_error("attention is not built"); }
void write_kv(Pool&, const KvLayout&, uint8_t*, int64_t, const StepShape&, const float*, const float*, int64_t) { throw std::runtime_error("attention is not built"); }
void attend(Pool&, const AttentionPlan&, const uint8_t*, int64_t, float, const float*, int64_t, Compute, void*) { throw std::runtime_error("attention is not built"); }

void register_attention(nanobind::module_&) {}

}  // namespace kvd
