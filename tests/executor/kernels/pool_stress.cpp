// Regions of random numbers of pieces, on a pool with more threads than cores and beside threads that take the cores away: every piece is done once,
// by a worker that does nothing else meanwhile, before run() returns. Also: pieces that throw, what a parked pool costs, a pool after a fork, and one for
// which the system has no threads.
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <iterator>
#include <random>
#include <stdexcept>
#include <string>
#include <system_error>
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

// A piece that throws, on whatever thread, is told to the caller of run() when no piece runs any more; the next region knows nothing of it.
void failures(int num_threads) {
    kvd::Pool pool(num_threads);
    for (int region = 0; region < 300; ++region) {
        std::vector<int> visits(100);
        std::string told;
        try {
            pool.run(100, [&](int64_t piece, int) {
                ++visits[piece];
                if (piece % 30 == 7) throw std::runtime_error("piece");
            });
        } catch (const std::runtime_error& error) {
            told = error.what();
        }
        require(told == "piece", "run() throws what a piece threw");
        for (const int count : visits) require(count == 1 || (num_threads == 1 && count == 0), "each piece is done once beside one that throws");
        visits.assign(100, 0);
        pool.run(100, [&](int64_t piece, int) { ++visits[piece]; });
        for (const int count : visits) require(count == 1, "after a failure each piece is done once");
    }
}

#if !defined(__SANITIZE_THREAD__)
// In a child: its parent's pool computes alone, and its end leaves the child's own pool as it is, whose threads have the handles of the parent's.
void after_a_fork(kvd::Pool* inherited) {
    int done = 0;
    inherited->run(50, [&](int64_t, int worker) { done += worker == 0; });
    require(done == 50, "after a fork the child computes alone");
    kvd::Pool own(3);
    delete inherited;
    std::atomic<int> also{0};
    own.run(50, [&](int64_t, int) { also.fetch_add(1); });
    require(also.load() == 50, "a pool of the child's own computes");
}

// In a child: where threads run out, a pool is not half made.
void without_threads() {
    std::size_t pages = 0;
    std::FILE* file = std::fopen("/proc/self/statm", "r");
    require(file && std::fscanf(file, "%zu", &pages) == 1, "the size of the address space is known");
    std::fclose(file);
    rlimit limit;
    getrlimit(RLIMIT_AS, &limit);
    limit.rlim_cur = pages * static_cast<std::size_t>(sysconf(_SC_PAGESIZE)) + (std::size_t{64} << 20);
    require(setrlimit(RLIMIT_AS, &limit) == 0, "address space is limited");
    bool refused = false;
    try {
        kvd::Pool pool(1000);
    } catch (const std::system_error&) {
        refused = true;
    }
    require(refused, "a thousand stacks do not fit");
    const auto num_tasks = [] {
        const std::filesystem::directory_iterator tasks("/proc/self/task");
        return std::distance(begin(tasks), end(tasks));
    };
    for (int wait = 0; num_tasks() > 1 && wait < 1000; ++wait) std::this_thread::sleep_for(std::chrono::milliseconds(1));  // joined, but shown a moment more
    require(num_tasks() == 1, "the workers that were there have ended");
    sigset_t blocked;
    pthread_sigmask(SIG_SETMASK, nullptr, &blocked);
    require(sigisemptyset(&blocked) == 1, "signals come as before");
}

template <class Part>
void in_a_child(const Part& part) {
    const pid_t child = fork();
    if (child == 0) {
        part();
        std::_Exit(0);
    }
    int status = 0;
    waitpid(child, &status, 0);
    require(status == 0, "a forked child ends well");
}
#endif

}  // namespace

int main(int argc, char** argv) {
    const int num_regions = argc > 1 ? std::atoi(argv[1]) : 2000;
    for (const int num_threads : {1, 2, 3, 8}) stress(num_threads, num_regions, true);
    for (const int num_threads : {1, 2, 8}) failures(num_threads);

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
    auto* const inherited = new kvd::Pool(3);
    in_a_child([&] { after_a_fork(inherited); });
    in_a_child(without_threads);
    delete inherited;
#endif
    std::puts("ok");
}
