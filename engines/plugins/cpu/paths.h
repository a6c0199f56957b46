// Instruction paths of the CPU kernels: one file an instruction set. A path is compiled for its set and includes nothing
// that another file might share with it: no templates or inline functions of the standard library.
#pragma once
#include <stdint.h>

namespace unicache {

struct Job;
struct Product;

struct Path {
    // Steps of attention (attention.h): both take a head, a part and memory of `scratch` floats.
    void (*attend)(const Job&, int64_t head, int64_t part, float* scratch);
    void (*finish)(const Job&, int64_t head, int64_t part, float* scratch);
    void (*multiply)(const Product&, int64_t part);  // row_matmul.h
};

extern const Path avx512vnni, avx512, avx2, neon, plain;

// NULL: the fastest that this processor runs. Returns NULL where it does not run the one that is named.
const Path* find(const char* name);

}  // namespace unicache
