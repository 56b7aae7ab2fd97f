// Stands in for a GPU's driver: HIP's and CUDA's entry points, which check what they are given as strictly as they can,
// record it, and run what is launched on the CPU.
//
// A module is a real ELF image, in whose symbol table functions are looked up. A launch takes its argument out of the
// packed bytes, whose number must be that of the kernel's own struct, and runs the operation, compiled from the same
// .hip file, workgroup by workgroup as the grid says. There are two devices.
#include <elf.h>
#include <stdint.h>

#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "target.h"

namespace {

struct Kernel {
    size_t size;
    void (*run)(const void* argument, uint32_t groups);
};

std::map<std::string, Kernel>& kernels() {
    static std::map<std::string, Kernel> all;
    return all;
}

bool add(const char* name, size_t size, void (*run)(const void*, uint32_t)) {
    kernels()[name] = {size, run};
    return true;
}

}  // namespace

// As target.h's for a GPU, with the lanes of a team as one.
#undef MT_KERNEL
#define MT_KERNEL(NAME, ...)                                                                                  \
    static const bool NAME##_added = add(#NAME, sizeof(__VA_ARGS__), [](const void* argument, uint32_t groups) { \
        __VA_ARGS__ operation;                                                                                \
        memcpy(&operation, argument, sizeof operation);                                                       \
        for (uint32_t team = 0; team < groups * 32; team++)                                                   \
            for (uint32_t block = team; block < operation.blocks; block += groups * 32) operation.run(block); \
    });

#include "../../kernels/dequantize_rows.hip"
#include "../../kernels/pseudograd_pack.hip"
#include "../../kernels/quantize_pack.hip"
#include "../../kernels/quantize_pack_ef.hip"
#include "../../kernels/quantize_rows.hip"
#include "../../kernels/reduce_requant.hip"
#include "../../kernels/reduce_segments.hip"
#include "../../kernels/unpack.hip"

namespace {

// Codes that HIP and CUDA share, and their words for them.
enum Code { kSuccess = 0, kInvalidValue = 1, kInvalidDevice = 101, kInvalidImage = 200, kInvalidContext = 201,
            kInvalidHandle = 400, kNotFound = 500 };
const std::map<int, const char*> kTexts = {
    {kInvalidValue, "invalid argument"}, {kInvalidDevice, "invalid device ordinal"},
    {kInvalidImage, "device kernel image is invalid"}, {kInvalidContext, "invalid device context"},
    {kInvalidHandle, "invalid resource handle"}, {kNotFound, "named symbol not found"},
    {719, "unspecified launch failure"},
};

constexpr int kDevices = 2;

struct Module {
    int device;
    const char* image;  // not copied, as HIP may not
};

struct Function {
    int device;
    std::string name;
    Kernel kernel;
};

std::mutex mutex;
std::string record;
std::map<std::string, int> failures;

void write(const std::string& line) {
    const std::lock_guard<std::mutex> lock(mutex);
    record += line + "\n";
}

// Records a call; what it is told to fail with, if anything.
int enter(const char* call, const std::string& what = "") {
    write(what.empty() ? call : std::string(call) + " " + what);
    const auto found = failures.find(call);
    return found == failures.end() ? kSuccess : found->second;
}

bool has_symbol(const char* image, const std::string& name) {
    Elf64_Ehdr head;
    memcpy(&head, image, sizeof head);
    const auto* sections = reinterpret_cast<const Elf64_Shdr*>(image + head.e_shoff);
    for (int i = 0; i < head.e_shnum; i++) {
        const Elf64_Shdr& section = sections[i];
        if (section.sh_type != SHT_SYMTAB && section.sh_type != SHT_DYNSYM) continue;
        const char* names = image + sections[section.sh_link].sh_offset;
        const auto* symbols = reinterpret_cast<const Elf64_Sym*>(image + section.sh_offset);
        for (size_t j = 0; j < section.sh_size / sizeof(Elf64_Sym); j++)
            if (symbols[j].st_shndx != SHN_UNDEF && name == names + symbols[j].st_name) return true;
    }
    return false;
}

int load(void** module, const void* image, int device) {
    if (memcmp(image, ELFMAG, SELFMAG) != 0) return kInvalidImage;
    *module = new Module{device, static_cast<const char*>(image)};
    return kSuccess;
}

int find(void** function, void* module, const char* name, const std::string& symbol) {
    const auto* from = static_cast<const Module*>(module);
    const auto kernel = kernels().find(name);
    if (kernel == kernels().end() || !has_symbol(from->image, symbol)) return kNotFound;
    *function = new Function{from->device, name, kernel->second};
    return kSuccess;
}

int launch(const char* call, void* function, const unsigned (&shape)[7], void* stream, void** params, void** extra,
           int device, uintptr_t end) {
    const auto* to = static_cast<const Function*>(function);
    // Marked: 1, the bytes; 2, their number; the end.
    const bool packed = !params && extra && uintptr_t(extra[0]) == 1 && uintptr_t(extra[2]) == 2 &&
                        uintptr_t(extra[4]) == end;
    std::string line = to->name + " groups=" + std::to_string(shape[0]) + " threads=" + std::to_string(shape[3]) +
                       " stream=" + std::to_string(uintptr_t(stream)) + " argument=";
    for (size_t i = 0; packed && i < *static_cast<size_t*>(extra[3]); i++) {
        char byte[3];
        snprintf(byte, sizeof byte, "%02x", static_cast<const unsigned char*>(extra[1])[i]);
        line += byte;
    }
    if (const int code = enter(call, line)) return code;
    if (to->device != device) return kInvalidHandle;
    for (const int i : {1, 2, 4, 5})
        if (shape[i] != 1) return kInvalidValue;
    if (!packed || shape[0] == 0 || shape[3] != 256 || shape[6] != 0) return kInvalidValue;
    if (*static_cast<size_t*>(extra[3]) != to->kernel.size) return kInvalidValue;
    to->kernel.run(extra[1], shape[0]);
    return kSuccess;
}

int text(int code, const char** out) {
    const auto found = kTexts.find(code);
    *out = found == kTexts.end() ? nullptr : found->second;
    return found == kTexts.end() ? kInvalidValue : kSuccess;
}

thread_local int hip_device = 0;
thread_local std::vector<int> cuda_contexts;  // a context's handle is the device's number, from 1

}  // namespace

#define ENTRY(...) \
    if (const int code = enter(__VA_ARGS__)) return code;

extern "C" {

// For the tests.
const char* driver_take_record() {
    static std::string taken;
    const std::lock_guard<std::mutex> lock(mutex);
    taken.swap(record);
    record.clear();
    return taken.c_str();
}
void driver_fail(const char* call, int code) { failures[call] = code; }
void driver_recover() { failures.clear(); }
int driver_contexts() { return int(cuda_contexts.size()); }

// HIP.
int hipDrvGetErrorString(int code, const char** out) { return text(code, out); }
int hipGetDevice(int* device) {
    ENTRY("hipGetDevice")
    *device = hip_device;
    return kSuccess;
}
int hipSetDevice(int device) {
    ENTRY("hipSetDevice", std::to_string(device))
    if (device < 0 || device >= kDevices) return kInvalidDevice;
    hip_device = device;
    return kSuccess;
}
int hipModuleLoadData(void** module, const void* image) {
    ENTRY("hipModuleLoadData")
    return load(module, image, hip_device);
}
int hipModuleGetFunction(void** function, void* module, const char* name) {
    ENTRY("hipModuleGetFunction", name)
    return find(function, module, name, std::string(name) + ".kd");  // the kernel's descriptor
}
int hipModuleLaunchKernel(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                          unsigned shared, void* stream, void** params, void** extra) {
    return launch("hipModuleLaunchKernel", function, {gx, gy, gz, bx, by, bz, shared}, stream, params, extra,
                  hip_device, 3);
}

// CUDA.
int cuGetErrorString(int code, const char** out) { return text(code, out); }
int cuInit(unsigned) {
    ENTRY("cuInit")
    return kSuccess;
}
int cuDeviceGet(int* device, int index) {
    ENTRY("cuDeviceGet", std::to_string(index))
    if (index < 0 || index >= kDevices) return kInvalidDevice;
    *device = index;
    return kSuccess;
}
int cuDevicePrimaryCtxRetain(void** context, int device) {
    ENTRY("cuDevicePrimaryCtxRetain", std::to_string(device))
    *context = reinterpret_cast<void*>(uintptr_t(device) + 1);
    return kSuccess;
}
int cuCtxPushCurrent_v2(void* context) {
    ENTRY("cuCtxPushCurrent_v2")
    cuda_contexts.push_back(int(uintptr_t(context)) - 1);
    return kSuccess;
}
int cuCtxPopCurrent_v2(void** context) {
    ENTRY("cuCtxPopCurrent_v2")
    if (cuda_contexts.empty()) return kInvalidContext;
    *context = reinterpret_cast<void*>(uintptr_t(cuda_contexts.back()) + 1);
    cuda_contexts.pop_back();
    return kSuccess;
}
int cuModuleLoadData(void** module, const void* image) {
    ENTRY("cuModuleLoadData")
    return cuda_contexts.empty() ? kInvalidContext : load(module, image, cuda_contexts.back());
}
int cuModuleGetFunction(void** function, void* module, const char* name) {
    ENTRY("cuModuleGetFunction", name)
    return find(function, module, name, name);
}
int cuLaunchKernel(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void* stream, void** params, void** extra) {
    const int device = cuda_contexts.empty() ? -1 : cuda_contexts.back();
    return launch("cuLaunchKernel", function, {gx, gy, gz, bx, by, bz, shared}, stream, params, extra, device, 0);
}

}  // extern "C"
