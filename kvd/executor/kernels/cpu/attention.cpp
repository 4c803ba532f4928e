// Attention over tiles of the block-major pool.
namespace kvd {
namespace KVD_ISA {}
}  // namespace kvd
