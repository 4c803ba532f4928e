#include "matrix.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "dispatch.h"
#include "formats.h"
#include "gemm.h"
#include "module.h"

namespace kvd {

namespace {

// f32 and bf16: [k / STEP][64][STEP].
template <class T, int STEP>
struct Plain {
    static int64_t panel_bytes(int64_t k) { return (k + STEP - 1) / STEP * STEP * PANEL * static_cast<int64_t>(sizeof(T)); }

    static T converted(float from) {
        if constexpr (sizeof(T) == 4) return from; else return to_bf16(from);
    }
    static T converted(bf16 from) {
        if constexpr (sizeof(T) == 4) return to_float(from); else return from;
    }

    // A step of one output is 32 bits wide: a float or a pair of bf16.
    template <class S>
    static void pack_from(uint8_t* panel, int64_t k, int64_t first, int64_t num_rows, const S* rows) {
        constexpr int64_t STEPS = 16;  // written together: 4 KiB of the panel, and about a cache line of each row
        const int64_t whole = k / STEP;
        for (int64_t begin = 0; begin < whole; begin += STEPS) {
            const int64_t num = std::min(STEPS, whole - begin);
            for (int64_t r = 0; r < num_rows; ++r) {
                const S* from = rows + r * k + begin * STEP;
                uint8_t* to = panel + (begin * PANEL + first + r) * 4;
                for (int64_t i = 0; i < num; ++i) {
                    T values[STEP];
                    for (int64_t j = 0; j < STEP; ++j) values[j] = converted(from[i * STEP + j]);
                    std::memcpy(to + i * PANEL * 4, values, 4);
                }
            }
        }
        if (whole * STEP < k)
            for (int64_t r = 0; r < num_rows; ++r) {
                const T values[2] = {converted(rows[r * k + k - 1]), {}};
                std::memcpy(panel + (whole * PANEL + first + r) * 4, values, 4);
            }
    }

    static void pack(uint8_t* panel, int64_t k, int64_t first, int64_t num_rows, const void* rows, Compute source) {
        if (source == Compute::f32) pack_from(panel, k, first, num_rows, static_cast<const float*>(rows));
        else pack_from(panel, k, first, num_rows, static_cast<const bf16*>(rows));
    }

    static void unpack_row(const uint8_t* panel, int64_t k, int64_t output, float* out) {
        const T* from = reinterpret_cast<const T*>(panel);
        for (int64_t i = 0; i < k; ++i) {
            const T value = from[(i / STEP * PANEL + output) * STEP + i % STEP];
            if constexpr (sizeof(T) == 4) out[i] = value; else out[i] = to_float(value);
        }
    }
};

PanelKernel f32_kernel(Compute compute) { return compute == Compute::f32 ? KVD_CHOOSE(gemm_table).f32_panel : nullptr; }
PanelKernel bf16_kernel(Compute compute) { return compute == Compute::bf16 ? KVD_CHOOSE(gemm_table).bf16_panel : nullptr; }

constexpr int64_t PIECES_PER_THREAD = 16;
constexpr int64_t MIN_PIECE_ROWS = 48;   // a panel is read from the second-level cache once for each group of rows
constexpr int64_t MAX_PIECE_ROWS = 516;  // rows of a piece stay in the caches while panels pass
constexpr int64_t ROW_GROUP = 6;         // rows that share a load of weights, at most

// Zeroed memory, 64-byte aligned, and its owner.
#if defined(__SANITIZE_ADDRESS__)
std::pair<std::shared_ptr<void>, uint8_t*> zeroed_memory(size_t size) {
    // Each matrix alone, so that the sanitizer sees what is read beyond its end.
    auto* data = static_cast<uint8_t*>(std::aligned_alloc(64, size));
    if (!data) throw std::bad_alloc();
    std::memset(data, 0, size);
    return {std::shared_ptr<void>(data, std::free), data};
}
#else
// A run of address space aligned to huge pages that matrices lie in one after another: most are smaller than a huge page or not a multiple of it.
struct Chunk {
    static constexpr size_t SIZE = size_t{64} << 20;
    static constexpr size_t HUGE_PAGE = size_t{2} << 20;
    void* mapped;
    size_t mapped_size;
    uint8_t* begin;
    size_t size, used = 0;

    explicit Chunk(size_t at_least) : size(std::max(SIZE, (at_least + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE)) {
        mapped_size = size + HUGE_PAGE;
        mapped = mmap(nullptr, mapped_size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (mapped == MAP_FAILED) throw std::bad_alloc();
        begin = static_cast<uint8_t*>(mapped) + (HUGE_PAGE - reinterpret_cast<uintptr_t>(mapped) % HUGE_PAGE) % HUGE_PAGE;
        madvise(begin, size, MADV_HUGEPAGE);
    }
    ~Chunk() { munmap(mapped, mapped_size); }
    Chunk(const Chunk&) = delete;
    Chunk& operator=(const Chunk&) = delete;
};

std::mutex& one_at_a_time() {
    static std::mutex mutex;
    // Whoever else holds it is not in a forked child, which could wait for it for ever.
    static const int watched = pthread_atfork([] { one_at_a_time().lock(); }, [] { one_at_a_time().unlock(); }, [] { one_at_a_time().unlock(); });
    (void)watched;
    return mutex;
}

std::pair<std::shared_ptr<void>, uint8_t*> zeroed_memory(size_t size) {
    static std::weak_ptr<Chunk> last;  // it goes with its last matrix
    const std::lock_guard lock(one_at_a_time());
    auto chunk = last.lock();
    if (!chunk || chunk->size - chunk->used < size) last = chunk = std::make_shared<Chunk>(size);
    uint8_t* data = chunk->begin + chunk->used;
    chunk->used += (size + 63) / 64 * 64;
    return {std::move(chunk), data};
}
#endif

const FormatOps& ops_of(Format format) { return format == Format::f32 || format == Format::bf16 ? plain_ops(format) : quantized_ops(format); }

}  // namespace

const FormatOps& plain_ops(Format format) {
    using F32 = Plain<float, 1>;
    using Bf16 = Plain<bf16, 2>;
    static const FormatOps f32{F32::panel_bytes, nullptr, 0, F32::pack, F32::unpack_row, f32_kernel};
    static const FormatOps bf16{Bf16::panel_bytes, nullptr, 0, Bf16::pack, Bf16::unpack_row, bf16_kernel};
    return format == Format::f32 ? f32 : bf16;
}

Matrix::Matrix(Format format, int64_t n, int64_t k) : format_(format), n_(n), k_(k), panel_bytes_(0) {
    if (n < 1 || k < 1) throw std::invalid_argument("a matrix has at least one output and one input");
    panel_bytes_ = ops_of(format).panel_bytes(k);
    auto [memory, data] = zeroed_memory(static_cast<size_t>(bytes()));
    data_ = {data, Free{std::move(memory)}};
}

void Matrix::pack_rows(Pool& pool, int64_t first_row, int64_t num_rows, const void* rows, Compute source) {
    if (first_row < 0 || num_rows < 0 || first_row + num_rows > n_) throw std::invalid_argument("rows outside of the matrix");
    if (num_rows == 0) return;
    const FormatOps& ops = ops_of(format_);
    const int64_t row_bytes = ops.row_bytes ? ops.row_bytes(k_) : k_ * (source == Compute::f32 ? 4 : 2);
    const int64_t first_panel = first_row / PANEL;
    const int64_t last_panel = (first_row + num_rows - 1) / PANEL;
    pool.run(last_panel - first_panel + 1, [&](int64_t i, int) {
        const int64_t panel = first_panel + i;
        const int64_t begin = std::max(first_row, panel * PANEL);
        const int64_t end = std::min(first_row + num_rows, (panel + 1) * PANEL);
        const auto* from = static_cast<const uint8_t*>(rows) + (begin - first_row) * row_bytes;
        ops.pack(data_.get() + panel * panel_bytes_, k_, begin - panel * PANEL, end - begin, from, source);
    });
}

void Matrix::unpack_row(int64_t row, float* out) const {
    if (row < 0 || row >= n_) throw std::out_of_range("row outside of the matrix");
    ops_of(format_).unpack_row(panel(row / PANEL), k_, row % PANEL, out);
}

namespace {

// The pieces of a product shared out among threads: each goes along a run of neighbours of its own, so that what a core fetches ahead of itself is what
// it reads, and takes over the second half of the longest run when its own has ended. take() may be called once for each piece.
class Shares {
public:
    Shares(int64_t num_pieces, int num_threads) : num_threads_(num_threads) {
        static thread_local std::unique_ptr<Run[]> runs;
        static thread_local int num_runs = 0;
        if (num_runs < num_threads) {
            runs = std::make_unique<Run[]>(static_cast<size_t>(num_threads));
            num_runs = num_threads;
        }
        runs_ = runs.get();
        for (int w = 0; w < num_threads; ++w) runs_[w].bounds.store(pack(begin(num_pieces, num_threads, w), begin(num_pieces, num_threads, w + 1)), std::memory_order_relaxed);
    }

    static int64_t begin(int64_t num_pieces, int num_threads, int worker) { return num_pieces * worker / num_threads; }

    struct Taken {
        int64_t piece;
        bool more;  // of the own run: the one after it is most likely this thread's next
    };
    Taken take(int worker) {
        std::atomic<uint64_t>& own = runs_[worker].bounds;
        for (uint64_t seen = own.load(std::memory_order_relaxed); first(seen) < last(seen);) {
            if (own.compare_exchange_weak(seen, pack(first(seen) + 1, last(seen)), std::memory_order_relaxed)) return {first(seen), first(seen) + 1 < last(seen)};
        }
        for (;;) {
            Run* longest = nullptr;
            uint64_t bounds = 0;
            for (int w = 0; w < num_threads_; ++w) {
                const uint64_t seen = runs_[w].bounds.load(std::memory_order_relaxed);
                if (last(seen) - first(seen) > last(bounds) - first(bounds)) longest = runs_ + w, bounds = seen;
            }
            if (!longest) continue;  // somebody is about to say what was taken over
            const int64_t middle = (first(bounds) + last(bounds)) / 2;
            if (!longest->bounds.compare_exchange_strong(bounds, pack(first(bounds), middle), std::memory_order_relaxed)) continue;
            own.store(pack(middle + 1, last(bounds)), std::memory_order_relaxed);
            return {middle, middle + 1 < last(bounds)};
        }
    }

private:
    struct alignas(64) Run {
        std::atomic<uint64_t> bounds{0};  // the first piece that is left, in the low half, and the end
    };
    static uint64_t pack(int64_t first, int64_t last) { return static_cast<uint64_t>(first) | static_cast<uint64_t>(last) << 32; }
    static int64_t first(uint64_t bounds) { return static_cast<uint32_t>(bounds); }
    static int64_t last(uint64_t bounds) { return static_cast<int64_t>(bounds >> 32); }

    Run* runs_;
    int num_threads_;
};

// What the thread `worker` reads after a panel, most likely: the one beside it, or where its run of the next product begins.
const uint8_t* next_panel(const Product& product, int64_t panel, bool more, int worker, int num_threads) {
    if (more) return product.matrix->panel(panel + 1);
    if (!product.next) return nullptr;
    const int64_t first = Shares::begin(product.next->num_panels(), num_threads, worker);
    return first < product.next->num_panels() ? product.next->panel(first) : nullptr;
}

}  // namespace

void multiply(Pool& pool, const Product& product) {
    const Matrix& matrix = *product.matrix;
    if (product.num_rows <= 0) return;
    const FormatOps& ops = ops_of(matrix.format());
    const PanelKernel kernel = ops.kernel(product.compute);
    if (!kernel) throw std::invalid_argument("this matrix does not take rows of this type");
    const int64_t num_panels = matrix.num_panels();
    const int64_t scratch_stride = (ops.scratch_bytes + 127) / 128 * 128;
    static thread_local std::vector<uint8_t> scratch;  // of the calling thread, shared out among the pool's
    if (const auto size = static_cast<size_t>(scratch_stride * pool.num_threads() + 64); scratch_stride && scratch.size() < size) scratch.resize(size);
    uint8_t* const scratch_begin = scratch.data() + (64 - reinterpret_cast<uintptr_t>(scratch.data()) % 64);
    static thread_local std::vector<float> prepared;
    const int64_t prepared_floats = ops.prepare ? ops.prepared_floats(matrix.k()) : 0;
    const int64_t element = product.compute == Compute::f32 ? 4 : 2;
    if (ops.prepare) {
        if (const auto size = static_cast<size_t>(product.num_rows * prepared_floats); prepared.size() < size) prepared.resize(size);
        float* const to = prepared.data();
        const auto prepare = [&](int64_t row, int64_t num_rows) {
            ops.prepare(product.compute, static_cast<const uint8_t*>(product.x) + row * product.ldx * element, product.ldx, num_rows, matrix.k(), to + row * prepared_floats);
        };
        constexpr int64_t PIECE = 32;  // rows that are too little work to wake a thread for
        if (product.num_rows <= PIECE) prepare(0, product.num_rows);
        else pool.run((product.num_rows + PIECE - 1) / PIECE, [&](int64_t i, int) { prepare(i * PIECE, std::min(PIECE, product.num_rows - i * PIECE)); });
    }
    const float* const prepared_begin = prepared.data();
    // Few rows: a piece is a panel. Many: panels are divided by rows too, into enough pieces to keep all threads busy to the end.
    int64_t piece_rows = product.num_rows;
    if (product.num_rows > MIN_PIECE_ROWS) {
        const int64_t wanted = (PIECES_PER_THREAD * pool.num_threads() + num_panels - 1) / num_panels;
        piece_rows = std::max((product.num_rows + wanted - 1) / wanted, MIN_PIECE_ROWS);
        piece_rows = std::min((piece_rows + ROW_GROUP - 1) / ROW_GROUP * ROW_GROUP, MAX_PIECE_ROWS);
    }
    const int64_t row_pieces = (product.num_rows + piece_rows - 1) / piece_rows;
    const int num_threads = pool.num_threads();
    Shares shares(num_panels * row_pieces, num_threads);
    pool.run(num_panels * row_pieces, [&](int64_t, int worker) {
        const auto [piece, more] = shares.take(worker);
        const int64_t p = piece / row_pieces;
        const int64_t row = piece % row_pieces * piece_rows;
        PanelWork work;
        work.panel = matrix.panel(p);
        work.next_panel = row_pieces == 1 ? next_panel(product, p, more, worker, num_threads) : nullptr;
        work.k = matrix.k();
        work.num_outputs = std::min(PANEL, matrix.n() - p * PANEL);
        work.x = static_cast<const uint8_t*>(product.x) + row * product.ldx * element;
        work.ldx = product.ldx;
        work.num_rows = std::min(piece_rows, product.num_rows - row);
        work.out = product.out + row * product.ldo + p * PANEL;
        work.ldo = product.ldo;
        work.bias = product.bias ? product.bias + p * PANEL : nullptr;
        work.accumulate = product.accumulate;
        work.scratch = scratch_stride ? scratch_begin + worker * scratch_stride : nullptr;
        work.prepared = ops.prepare ? prepared_begin + row * prepared_floats : nullptr;
        kernel(work);
    });
}

namespace nb = nanobind;

namespace {

using Array = nb::ndarray<nb::c_contig, nb::device::cpu>;

bool is_f32(const Array& array) { return array.dtype() == nb::dtype<float>(); }
// bfloat16, or 16-bit integers that hold its bits (NumPy has no bfloat16).
bool is_bf16(const Array& array) {
    const auto dtype = array.dtype();
    return dtype.bits == 16 && dtype.lanes == 1 && (dtype.code == static_cast<uint8_t>(nb::dlpack::dtype_code::Bfloat) || dtype.code == static_cast<uint8_t>(nb::dlpack::dtype_code::UInt));
}

Compute compute_of(const Array& array) {
    if (is_f32(array)) return Compute::f32;
    if (is_bf16(array)) return Compute::bf16;
    throw std::invalid_argument("float32 or bfloat16 values are wanted");
}

Format format_of(const std::string& name) {
    const char* names[] = {"f32", "bf16", "q8_0", "q4_0", "q4_1", "q4_k", "q6_k"};
    for (int i = 0; i < 7; ++i)
        if (name == names[i]) return static_cast<Format>(i);
    throw std::invalid_argument("no such matrix format: " + name);
}

void pack_rows(Matrix& matrix, Pool& pool, int64_t first_row, const Array& rows) {
    if (rows.ndim() != 2) throw std::invalid_argument("rows have two dimensions");
    const FormatOps& ops = ops_of(matrix.format());
    Compute source = Compute::f32;
    if (ops.row_bytes) {
        if (rows.dtype() != nb::dtype<uint8_t>() || static_cast<int64_t>(rows.shape(1)) != ops.row_bytes(matrix.k()))
            throw std::invalid_argument("rows of a quantised matrix are bytes, " + std::to_string(ops.row_bytes(matrix.k())) + " each");
    } else {
        source = compute_of(rows);
        if (static_cast<int64_t>(rows.shape(1)) != matrix.k()) throw std::invalid_argument("rows have " + std::to_string(matrix.k()) + " inputs");
    }
    const nb::gil_scoped_release release;
    matrix.pack_rows(pool, first_row, static_cast<int64_t>(rows.shape(0)), rows.data(), source);
}

void unpack_row(const Matrix& matrix, int64_t row, const nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>& out) {
    if (static_cast<int64_t>(out.shape(0)) != matrix.k()) throw std::invalid_argument("out has one element for each input");
    matrix.unpack_row(row, out.data());
}

void multiply_arrays(Pool& pool, const Matrix& matrix, const Array& x, const nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>& out,
                     const std::optional<nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>>& bias, bool accumulate) {
    if (x.ndim() != 2 || static_cast<int64_t>(x.shape(1)) != matrix.k()) throw std::invalid_argument("x is [rows, " + std::to_string(matrix.k()) + "]");
    if (out.shape(0) != x.shape(0) || static_cast<int64_t>(out.shape(1)) != matrix.n()) throw std::invalid_argument("out is [rows, " + std::to_string(matrix.n()) + "]");
    if (bias && static_cast<int64_t>(bias->shape(0)) != matrix.n()) throw std::invalid_argument("bias is [" + std::to_string(matrix.n()) + "]");
    Product product{&matrix, compute_of(x), x.data(), matrix.k(), static_cast<int64_t>(x.shape(0)), out.data(), matrix.n()};
    product.bias = bias ? bias->data() : nullptr;
    product.accumulate = accumulate;
    const nb::gil_scoped_release release;
    multiply(pool, product);
}

}  // namespace

void register_matrix(nb::module_& m) {
    m.attr("MANY_ROWS") = MIN_PIECE_ROWS;  // products of more rows are divided by rows too
    m.def("isa", [] { return std::string(isa_name(active_isa())); }, "The instruction set that the kernels use: portable, avx2 or avx512.");
    m.def("available_isas", [] {
        nb::list names;
        for (const Isa isa : {Isa::portable, Isa::avx2, Isa::avx512})
            if (isa_available(isa)) names.append(isa_name(isa));
        return names;
    }, "What this processor and this build have, the best one last.");
    m.def("set_isa", [](const std::string& name) {
        for (const Isa isa : {Isa::portable, Isa::avx2, Isa::avx512})
            if (name == isa_name(isa)) return set_isa(isa);
        throw std::invalid_argument("no such instruction set: " + name);
    }, nb::arg("name"), "Uses another instruction set; ValueError where it is not available.");
    nb::class_<Matrix>(m, "Matrix", "A weight matrix [n outputs, k inputs] packed for products.")
        .def("__init__", [](Matrix* self, const std::string& format, int64_t n, int64_t k) { new (self) Matrix(format_of(format), n, k); },
             nb::arg("format"), nb::arg("n"), nb::arg("k"), "`format`: f32, bf16, q8_0, q4_0, q4_1, q4_k or q6_k.")
        .def_prop_ro("n", &Matrix::n)
        .def_prop_ro("k", &Matrix::k)
        .def_prop_ro("bytes", &Matrix::bytes)
        .def("pack_rows", &pack_rows, nb::arg("pool"), nb::arg("first_row"), nb::arg("rows").noconvert(),
             "Rows [m, k] of float32 or bfloat16 values, or [m, bytes] of a quantised file's blocks, become outputs from `first_row` on.")
        .def("unpack_row", &unpack_row, nb::arg("row"), nb::arg("out").noconvert(), "Writes one row as float32 [k].");
    m.def("multiply", &multiply_arrays, nb::arg("pool"), nb::arg("matrix"), nb::arg("x").noconvert(), nb::arg("out").noconvert(), nb::arg("bias").none() = nb::none(),
          nb::arg("accumulate") = false, "out [rows, n] (+)= x [rows, k] . W^T (+ bias [n]); out and bias are float32.");
}

}  // namespace kvd
