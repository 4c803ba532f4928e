// Regions of random numbers of pieces, on a pool with more threads than cores and beside threads that take the cores away: every piece is done once,
// by a worker that does nothing else meanwhile, before run() returns. Also: what a parked pool costs, and a pool after a fork.
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>
#include <vector>

#include "pool.h"

namespace {

void require(bool holds, const char* what) {
    if (holds) return;
    std::fprintf(stderr, "FAILED: %s\n", what);
    std::_Exit(1);
}

double processor_seconds() {
    rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return static_cast<double>(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) + 1e-6 * static_cast<double>(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec);
}

void stress(int num_threads, int num_regions, bool pauses) {
    kvd::Pool pool(num_threads);
    std::mt19937 random(num_threads);
    std::vector<std::atomic<int>> busy(num_threads);
    std::vector<int> visits;  // not atomic: run() alone orders them
    for (int region = 0; region < num_regions; ++region) {
        const int num_pieces = static_cast<int>(random() % (region % 50 ? 40 : 3000));
        const int work = static_cast<int>(random() % 200);
        visits.assign(num_pieces, 0);
        pool.run(num_pieces, [&](int64_t piece, int worker) {
            require(worker >= 0 && worker < num_threads, "workers are numbered");
            require(busy[worker].fetch_add(1) == 0, "a worker does one piece at a time");
            for (int i = 0; i < work; ++i) asm volatile("" ::: "memory");
            ++visits[piece];
            busy[worker].fetch_sub(1);
        });
        for (const int count : visits) require(count == 1, "each piece is done once");
        if (pauses && region % 20 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));
    }
}

}  // namespace

int main(int argc, char** argv) {
    const int num_regions = argc > 1 ? std::atoi(argv[1]) : 2000;
    for (const int num_threads : {1, 2, 3, 8}) stress(num_threads, num_regions, true);

    std::atomic<bool> stop{false};
    std::vector<std::thread> neighbours;
    for (int i = 0; i < 3; ++i) neighbours.emplace_back([&] { while (!stop.load(std::memory_order_relaxed)) {} });
    stress(4, num_regions / 4, false);
    stop.store(true);
    for (auto& neighbour : neighbours) neighbour.join();

    kvd::Pool pool(4);
    pool.run(100, [](int64_t, int) {});
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    const double before = processor_seconds();
    std::this_thread::sleep_for(std::chrono::milliseconds(500));
    require(processor_seconds() - before < 0.005, "a parked pool costs nothing");

#if !defined(__SANITIZE_THREAD__)
    const pid_t child = fork();
    if (child == 0) {
        int done = 0;
        pool.run(50, [&](int64_t, int worker) { done += worker == 0; });
        kvd::Pool own(2);
        std::atomic<int> also{0};
        own.run(50, [&](int64_t, int) { also.fetch_add(1); });
        std::_Exit(done == 50 && also.load() == 50 ? 0 : 1);
    }
    int status = 0;
    waitpid(child, &status, 0);
    require(status == 0, "after a fork the child computes alone");
#endif
    std::puts("ok");
}
