// Runs a kernel of the library on this machine's cores, as a driver does on a GPU.
//
// Threads are started for each launch and gone after it: about 20 us each, which kFewest blocks outweigh, and there is
// no pool that would be missing in a forked process or compete with torch's.
#include <stdint.h>

#include <system_error>
#include <thread>
#include <vector>

#define MT_EXPORT extern "C" __attribute__((visibility("default")))

namespace {
typedef void (*Kernel)(const void* operation, uint32_t begin, uint32_t end);
constexpr uint32_t kFewest = 1024;  // blocks a thread: 131,072 elements
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
    const uint32_t useful = blocks / kFewest + 1;
    if (threads > useful) threads = useful;
    if (threads < 1) threads = 1;
    const uint32_t share = blocks / threads + 1;
    std::vector<std::thread> others;
    others.reserve(threads);
    uint32_t done = 0;
    while (others.size() + 1 < threads && done + share < blocks) {
        try {
            others.emplace_back(kernel, operation, done, done + share);
        } catch (const std::system_error&) {
            break;  // the machine gives no more threads: this one does the rest
        }
        done += share;
    }
    kernel(operation, done, blocks);
    for (std::thread& other : others) other.join();
}
