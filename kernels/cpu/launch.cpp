// Runs a kernel of the library on this machine's cores, as a driver does on a GPU.
//
// On torch's own threads, where it is there and has OpenMP: between its operations they wait busily for the next one,
// so threads of ours would have to share their cores. As with torch, a process that was forked from one whose threads
// had started must not use more than one. Else on threads that are started for the launch and gone after it, about
// 20 us each.
#include <dlfcn.h>
#include <stdint.h>

#include <atomic>
#include <system_error>
#include <thread>
#include <vector>

#define MT_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

typedef void (*Kernel)(const void* operation, uint32_t begin, uint32_t end);

// What compilers call for `#pragma omp parallel`: part of OpenMP's ABI in all of its libraries.
typedef void (*OmpParallel)(void (*body)(void*), void* data, unsigned threads, unsigned flags);

constexpr uint32_t kShare = 512;  // blocks that a thread takes at a time: 65,536 elements, which outweigh its start

struct Launch {
    Kernel kernel;
    const void* operation;
    uint32_t blocks;
    std::atomic<uint64_t> next;
};

// What each thread does, whether there are as many of them as were asked for or fewer.
void take_shares(void* data) {
    Launch& launch = *static_cast<Launch*>(data);
    for (;;) {
        const uint64_t begin = launch.next.fetch_add(kShare), end = begin + kShare;
        if (begin >= launch.blocks) return;
        launch.kernel(launch.operation, uint32_t(begin), end < launch.blocks ? uint32_t(end) : launch.blocks);
    }
}

void run_on_own_threads(Launch& launch, uint32_t threads) {
    std::vector<std::thread> others;
    others.reserve(threads);
    while (others.size() + 1 < threads) {
        try {
            others.emplace_back(take_shares, &launch);
        } catch (const std::system_error&) {
            break;  // the machine gives no more threads: those that run do all of it
        }
    }
    take_shares(&launch);
    for (std::thread& other : others) other.join();
}

}  // namespace

// The name of the best variant that this machine runs.
MT_EXPORT const char* mt_best_variant() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512cd"))
        return "avx512";
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2")) return "avx2";
#endif
    return "portable";
}

// Runs all blocks of an operation on up to so many threads, this one among them, and returns when they are done.
MT_EXPORT void mt_launch(Kernel kernel, const void* operation, uint32_t blocks, uint32_t threads) {
    const uint32_t shares = blocks / kShare + (blocks % kShare != 0);
    if (threads > shares) threads = shares;
    if (threads <= 1) return kernel(operation, 0, blocks);
    static const OmpParallel omp_parallel = reinterpret_cast<OmpParallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
    Launch launch{kernel, operation, blocks, {0}};
    if (omp_parallel) {
        omp_parallel(take_shares, &launch, threads, 0);
    } else {
        run_on_own_threads(launch, threads);
    }
}
