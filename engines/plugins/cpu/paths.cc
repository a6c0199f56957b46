// Which instruction paths this processor runs.
#include "paths.h"

#include <cstring>

#include "cpu.h"

namespace {

using namespace unicache;

struct Known {
    const char* name;
    const Path& path;
    bool runs;
};

#if defined(__x86_64__)
bool has_avx512() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#endif

// Fastest first.
const Known known[] = {
#if defined(__x86_64__)
    {"avx512vnni", avx512vnni, has_avx512() && __builtin_cpu_supports("avx512vnni")},
    {"avx512", avx512, has_avx512()},
    {"avx2", avx2, __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")},  // which have F16C too
#elif defined(__aarch64__)
    {"neon", neon, true},
#endif
    {"plain", plain, true},
};

}  // namespace

const Path* unicache::find(const char* name) {
    for (const Known& each : known)
        if (each.runs && (!name || !std::strcmp(name, each.name))) return &each.path;
    return nullptr;
}

int unicache_cpu_runs(const char* path) { return path && find(path); }
