// Runs a kernel on a CPU the way a GPU does, and reports where its threads part.
//
// Each of a workgroup's 256 threads is a fiber with a stack of its own. A team operation or a barrier is a rendezvous:
// a fiber that comes there waits, the others run on, and once nobody can, either all who belong together wait at the
// same call, which lets them go on, or the launch ends with a message that says who is where. On a GPU that would be a
// wrong number or a machine that hangs.
#pragma once
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <ucontext.h>

#include <memory>

#include "conversions.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

namespace fibers {

constexpr uint32_t kThreads = 256, kTeam = 8;
constexpr size_t kStack = 128 << 10;

enum State { kReady, kInTeam, kAtBarrier, kLeft };

// A call that threads must make together. The address tells two calls in one line, or in two copies of an inline
// function, from each other; file and line are for the message.
struct Call {
    const void* address;
    const char* file;
    int line;
};

struct Fiber {
    ucontext_t context;
    State state;
    Call call;
    uint32_t value;
    std::unique_ptr<char[]> stack;
};

struct Workgroup {
    Fiber fibers[kThreads];
    ucontext_t scheduler;
    void (*thread)(const void*);
    const void* operation;
    uint32_t current, group, groups;
    char fault[512];
    // What AddressSanitizer wants to know of a switch: where the scheduler's stack is.
    const void* stack;
    size_t stack_size;
};

inline Workgroup workgroup;

inline uint32_t thread() { return workgroup.current; }
inline uint32_t group() { return workgroup.group; }
inline uint32_t groups() { return workgroup.groups; }

inline void run_fiber(uint32_t index) {
    Fiber& fiber = workgroup.fibers[index];
    workgroup.current = index;
#if defined(__SANITIZE_ADDRESS__)
    void* frames;
    __sanitizer_start_switch_fiber(&frames, fiber.stack.get(), kStack);
#endif
    swapcontext(&workgroup.scheduler, &fiber.context);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(frames, nullptr, nullptr);
#endif
}

// Back to the scheduler, which returns here once the fiber is ready again: never, if it has left.
inline void leave(State state) {
    Fiber& self = workgroup.fibers[workgroup.current];
    self.state = state;
#if defined(__SANITIZE_ADDRESS__)
    void* frames = nullptr;
    __sanitizer_start_switch_fiber(state == kLeft ? nullptr : &frames, workgroup.stack, workgroup.stack_size);
#endif
    swapcontext(&self.context, &workgroup.scheduler);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(frames, nullptr, nullptr);
#endif
}

inline void begin() {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(nullptr, &workgroup.stack, &workgroup.stack_size);
#endif
    workgroup.thread(workgroup.operation);
    leave(kLeft);
}

inline uint32_t wait_at(State state, uint32_t value, Call call) {
    Fiber& self = workgroup.fibers[workgroup.current];
    self.value = value;
    self.call = call;
    leave(state);
    return self.value;
}

// The kernels' team operation; the default arguments are the caller's.
__attribute__((noinline)) inline uint32_t team_max(uint32_t value, const char* file = __builtin_FILE(),
                                                   int line = __builtin_LINE()) {
    return wait_at(kInTeam, value, Call{__builtin_return_address(0), file, line});
}

// What HIP calls so. No kernel needs one yet.
__attribute__((noinline)) inline void __syncthreads(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    wait_at(kAtBarrier, 0, Call{__builtin_return_address(0), file, line});
}

inline int describe(char* to, size_t size, uint32_t index) {
    const Fiber& fiber = workgroup.fibers[index];
    const char* name = strrchr(fiber.call.file ? fiber.call.file : "", '/');
    const char* file = name ? name + 1 : fiber.call.file;
    if (fiber.state == kLeft) return snprintf(to, size, "lane %u of team %u has left the kernel", index % kTeam, index / kTeam);
    return snprintf(to, size, "lane %u of team %u waits in a %s at %s:%d", index % kTeam, index / kTeam,
                    fiber.state == kInTeam ? "team operation" : "barrier", file, fiber.call.line);
}

inline bool together(const Fiber& one, const Fiber& other) {
    return one.state == other.state && one.call.address == other.call.address;
}

inline void report(uint32_t one, uint32_t other) {
    char* to = workgroup.fault;
    char* end = to + sizeof workgroup.fault;
    to += snprintf(to, size_t(end - to), "workgroup %u diverges: ", workgroup.group);
    to += describe(to, size_t(end - to), one);
    to += snprintf(to, size_t(end - to), ", ");
    describe(to, size_t(end - to), other);
}

// Lets threads begin .. end go on if all wait at the call at which the first that waits in `state` does. False if none
// waits so, or with a report if they are not together.
inline bool release(State state, uint32_t first, uint32_t count) {
    uint32_t waits = first;
    while (waits < first + count && workgroup.fibers[waits].state != state) waits++;
    if (waits == first + count) return false;
    uint32_t largest = 0;
    for (uint32_t index = first; index < first + count; index++) {
        const Fiber& fiber = workgroup.fibers[index];
        if (!together(fiber, workgroup.fibers[waits])) {
            report(waits, index);
            return false;
        }
        largest = largest > fiber.value ? largest : fiber.value;
    }
    for (uint32_t index = first; index < first + count; index++) {
        workgroup.fibers[index].value = largest;
        workgroup.fibers[index].state = kReady;
    }
    return true;
}

inline void run_group() {
    for (Fiber& fiber : workgroup.fibers) {
        if (!fiber.stack) fiber.stack.reset(new char[kStack]);
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.get();
        fiber.context.uc_stack.ss_size = kStack;
        fiber.context.uc_link = nullptr;
        makecontext(&fiber.context, begin, 0);
        fiber.state = kReady;
        fiber.call = Call{};
    }
    bool go_on = true;
    while (go_on) {
        for (uint32_t index = 0; index < kThreads; index++)
            if (workgroup.fibers[index].state == kReady) run_fiber(index);
        go_on = false;
        for (uint32_t first = 0; first < kThreads && !*workgroup.fault; first += kTeam)
            go_on |= release(kInTeam, first, kTeam);
        // Barriers are for the whole workgroup, once every team has done what it does before.
        if (!go_on && !*workgroup.fault) go_on = release(kAtBarrier, 0, kThreads);
        if (*workgroup.fault) return;
    }
}

// Runs a kernel and returns null, or a message that says how its threads part.
inline const char* launch(void (*thread)(const void*), const void* operation, uint32_t groups) {
    workgroup.thread = thread;
    workgroup.operation = operation;
    workgroup.groups = groups;
    *workgroup.fault = 0;
    for (uint32_t group = 0; group < groups && !*workgroup.fault; group++) {
        workgroup.group = group;
        run_group();
    }
    if (!*workgroup.fault) return nullptr;
    for (Fiber& fiber : workgroup.fibers) fiber.stack.reset();  // what was left on them is nobody's
    return workgroup.fault;
}

}  // namespace fibers
