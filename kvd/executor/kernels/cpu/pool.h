// One pool of threads for all kernels of a process. Work is handed out in small pieces from one counter: whoever is free takes the next, the
// caller too, so that a thread that the system has taken off its core never holds back pieces that nobody has begun. There is no barrier:
// run() returns when every piece has ended, and a worker that never woke up is not waited for. Waiting spins for a bounded, short time and then
// sleeps in the kernel, which lets the system move a preempted thread onto the core that became free.
#pragma once

#include <cstdint>

namespace kvd {

class Pool {
public:
    // `num_threads` counts the caller: num_threads - 1 workers are started.
    explicit Pool(int num_threads);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int num_threads() const;

    // Calls piece(i, worker) for every i in [0, num_pieces), in any order, on any thread; `worker` in [0, num_threads) names the thread for scratch
    // memory. Not reentrant; one caller at a time. What a piece throws run() throws, the first of several, once no piece runs any more; pieces that
    // nobody had begun may then be left out.
    template <class Piece>
    void run(int64_t num_pieces, const Piece& piece) {
        run_erased(num_pieces, [](const void* context, int64_t i, int worker) { (*static_cast<const Piece*>(context))(i, worker); }, &piece);
    }

private:
    void run_erased(int64_t num_pieces, void (*call)(const void*, int64_t, int), const void* context);
    struct State;
    State* state_;
};

}  // namespace kvd
