#include "pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <cstdio>
#include <exception>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace kvd {

namespace {

using Clock = std::chrono::steady_clock;

// How long a thread looks for work, or for the end of others' pieces, before it sleeps: longer than the gaps between the operations of a step,
// and short beside a scheduler's time slice, so that waiting never starves a preempted thread.
constexpr auto SPIN = std::chrono::microseconds(50);

void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#else
    std::atomic_signal_fence(std::memory_order_seq_cst);
#endif
}

void futex_wait(const void* address, uint32_t seen) { syscall(SYS_futex, address, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0); }
void futex_wake(const void* address, int count) { syscall(SYS_futex, address, FUTEX_WAKE_PRIVATE, count, nullptr, nullptr, 0); }

// A forked child has none of its parent's workers: pools made before the fork compute on the calling thread there.
std::atomic<int> num_forks{0};

void watch_forks() {
    static const int watched = pthread_atfork(nullptr, nullptr, [] { num_forks.fetch_add(1, std::memory_order_relaxed); });
    (void)watched;
}

// Spins until `ready()` or until SPIN has passed; whether it is ready.
template <class Ready>
bool spin_until(const Ready& ready) {
    const auto end = Clock::now() + SPIN;
    do {
        for (int i = 0; i < 32; ++i) {
            if (ready()) return true;
            relax();
        }
    } while (Clock::now() < end);
    return ready();
}

}  // namespace

struct Pool::State {
    // The region (high 32 bits) and its next piece (low 32 bits) in one word: taking a piece proves that the region that it is of still runs, hence
    // that the description read before is its own.
    alignas(64) std::atomic<uint64_t> next{0};
    std::atomic<uint32_t> region{0};  // the same number, for sleeping: a futex is 32 bits wide
    std::atomic<void (*)(const void*, int64_t, int)> call{nullptr};
    std::atomic<const void*> context{nullptr};
    std::atomic<uint32_t> num_pieces{0};
    alignas(64) std::atomic<uint32_t> num_done{0};
    std::atomic<uint32_t> caller_sleeps{0};
    alignas(64) std::atomic<uint32_t> num_asleep{0};
    std::atomic<bool> stopping{false};
    std::mutex one_caller;
    int num_threads = 1;
    int fork = 0;
    std::vector<std::thread> workers;
    std::mutex failing;
    std::exception_ptr failure;  // the first of the running region; read by its caller once all pieces are done

    // Takes and does one piece of the running region, if there is one that nobody has begun.
    bool do_piece(int worker) {
        uint64_t seen = next.load(std::memory_order_acquire);
        for (;;) {
            const auto index = static_cast<uint32_t>(seen);
            const uint32_t total = num_pieces.load(std::memory_order_acquire);
            const auto call_now = call.load(std::memory_order_relaxed);
            const void* context_now = context.load(std::memory_order_relaxed);
            if (index >= total) return false;
            if (!next.compare_exchange_weak(seen, seen + 1, std::memory_order_acq_rel, std::memory_order_acquire)) continue;
            try {
                call_now(context_now, index, worker);
            } catch (...) {
                const std::lock_guard lock(failing);
                if (!failure) failure = std::current_exception();
            }
            if (num_done.fetch_add(1, std::memory_order_seq_cst) + 1 == total && caller_sleeps.load(std::memory_order_seq_cst)) futex_wake(&num_done, 1);
            return true;
        }
    }

    bool has_piece() const { return static_cast<uint32_t>(next.load(std::memory_order_acquire)) < num_pieces.load(std::memory_order_relaxed); }

    void work(int worker) {
        for (;;) {
            const uint32_t seen = region.load(std::memory_order_acquire);
            while (do_piece(worker)) {}
            if (stopping.load(std::memory_order_acquire)) return;
            if (spin_until([&] { return has_piece() || stopping.load(std::memory_order_relaxed); })) continue;
            num_asleep.fetch_add(1, std::memory_order_seq_cst);
            if (region.load(std::memory_order_seq_cst) == seen) futex_wait(&region, seen);
            num_asleep.fetch_sub(1, std::memory_order_seq_cst);
        }
    }

    void begin_region() {
        region.fetch_add(1, std::memory_order_seq_cst);
        if (num_asleep.load(std::memory_order_seq_cst)) futex_wake(&region, INT_MAX);
    }

    void stop() {
        stopping.store(true, std::memory_order_release);
        begin_region();
        for (auto& worker : workers) worker.join();
    }
};

Pool::Pool(int num_threads) {
    if (num_threads < 1 || num_threads > 1024) throw std::invalid_argument("a pool has 1 to 1024 threads, not " + std::to_string(num_threads));
    watch_forks();
    auto state = std::make_unique<State>();
    state->num_threads = num_threads;
    state->fork = num_forks.load(std::memory_order_relaxed);
    sigset_t all, before;  // signals go to the threads of the interpreter
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
        for (int worker = 1; worker < num_threads; ++worker) {
            state->workers.emplace_back([state = state.get(), worker] {
                char name[16];
                std::snprintf(name, sizeof name, "kvd-cpu-%d", worker);
                pthread_setname_np(pthread_self(), name);
                state->work(worker);
            });
        }
    } catch (...) {  // the system has no more threads for us: those that are there end
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        state->stop();
        throw;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    state_ = state.release();
}

Pool::~Pool() {
    // The workers live in the parent, and their handles name nothing here, or threads that this process started since; the parent may have held
    // the state's locks. It is left as it is.
    if (state_->fork != num_forks.load(std::memory_order_relaxed)) return;
    state_->stop();
    delete state_;
}

int Pool::num_threads() const { return state_->num_threads; }

void Pool::run_erased(int64_t num_pieces, void (*call)(const void*, int64_t, int), const void* context) {
    if (num_pieces <= 0) return;
    State& state = *state_;
    if (state.fork != num_forks.load(std::memory_order_relaxed)) {
        for (int64_t i = 0; i < num_pieces; ++i) call(context, i, 0);
        return;
    }
    const std::lock_guard lock(state.one_caller);
    if (num_pieces == 1 || state.num_threads == 1) {
        for (int64_t i = 0; i < num_pieces; ++i) call(context, i, 0);
        return;
    }
    if (num_pieces > INT_MAX) throw std::invalid_argument("too many pieces");
    // All pieces of the last region are taken: nobody enters before `next` says so, and whoever read an old description fails to take a piece by it.
    const uint64_t number = (state.next.load(std::memory_order_relaxed) >> 32) + 1;
    state.num_done.store(0, std::memory_order_relaxed);
    state.call.store(call, std::memory_order_relaxed);
    state.context.store(context, std::memory_order_relaxed);
    state.next.store(number << 32 | 0xffffffffu, std::memory_order_release);
    state.num_pieces.store(static_cast<uint32_t>(num_pieces), std::memory_order_release);
    state.next.store(number << 32, std::memory_order_release);
    state.begin_region();
    while (state.do_piece(0)) {}
    const auto total = static_cast<uint32_t>(num_pieces);
    if (!spin_until([&] { return state.num_done.load(std::memory_order_acquire) == total; })) {
        state.caller_sleeps.store(1, std::memory_order_seq_cst);
        for (uint32_t done; (done = state.num_done.load(std::memory_order_seq_cst)) != total;) futex_wait(&state.num_done, done);
        state.caller_sleeps.store(0, std::memory_order_relaxed);
    }
    if (state.failure) std::rethrow_exception(std::exchange(state.failure, nullptr));
}

}  // namespace kvd
