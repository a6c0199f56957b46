// RowMatMul on a CPU, inside: what row_matmul.cc, which shares out the work, and the paths know of each other.
#pragma once
#include <stdint.h>

#include "paths.h"

namespace unicache {

// y [rows, outputs] = x [rows, inputs] * w, where w is [inputs, outputs], or [outputs, inputs] if `transposed`.
struct Product {
    const float *x, *w;
    float* y;
    int64_t rows, inputs, outputs;
    bool transposed;
    int64_t in_parts, out_parts;  // a part is one of each: some inputs' share of some outputs
    float* sums;                  // [in_parts, rows, outputs]; y itself where in_parts is 1
};

}  // namespace unicache
