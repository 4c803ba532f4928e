// Products with quantised matrices.
namespace kvd {
namespace KVD_ISA {}
}  // namespace kvd
