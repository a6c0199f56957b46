// The kernels on a CPU: the two operators, `export/operators.py` states what they compute, kernels.h their arguments;
// and the product of a few rows with a matrix.
#pragma once
#include "../kernels.h"

extern "C" {
#pragma GCC visibility push(default)

enum { UNICACHE_INVALID = 1, UNICACHE_NO_MEMORY = 2 };

// Runs task(data, 0) .. task(data, count - 1) on any threads in any order and returns when all are done: 0, or an
// error. NULL instead of it: the caller's thread does all.
struct UnicacheThreads {
    int (*run)(void* context, void (*task)(void* data, size_t index), size_t count, void* data);
    void* context;
};

// Whether this processor runs an instruction path: "plain", "avx2", "avx512", "avx512vnni" or "neon".
int unicache_cpu_runs(const char* path);

// `path`: NULL is the fastest that runs here. Results do not depend on the number of threads. Returns 0,
// UNICACHE_INVALID where the path does not run here, or UNICACHE_NO_MEMORY.
int unicache_cpu_quant_kv_attention(const UnicacheAttention*, const char* path, const UnicacheThreads*);

// rows: key, value, positions and bias. index: [heads, k]. Returns 0, or UNICACHE_INVALID where k is out of range.
int unicache_cpu_topk_gather(const float* score, const UnicacheRows* rows, int64_t* index, int64_t heads,
                             int64_t tokens, int64_t k, const UnicacheThreads*);

// y [rows, outputs] = x [rows, inputs] * w; w is [inputs, outputs], or [outputs, inputs] if `transposed`. For few rows.
// `path` and what is returned: as of attention.
int unicache_cpu_row_matmul(const float* x, const float* w, float* y, int64_t rows, int64_t inputs, int64_t outputs,
                            int transposed, const char* path, const UnicacheThreads*);
#pragma GCC visibility pop
}
