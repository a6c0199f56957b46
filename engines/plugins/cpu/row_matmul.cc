// RowMatMul on a CPU: its work shared out among threads.
#include "row_matmul.h"

#include <algorithm>
#include <cstdlib>

#include "cpu.h"

namespace {

using namespace unicache;

constexpr int64_t WIDE = 4096;       // outputs that are worth a part of their own
constexpr int64_t LEAST = 1 << 16;   // weights of a part: fewer take less time than waking a thread
constexpr int64_t MOST_PARTS = 8;

struct Work {
    const Product& product;
    decltype(Path::multiply) step;
};

void run(void* data, size_t part) {
    const Work& work = *static_cast<const Work*>(data);
    work.step(work.product, part);
}

}  // namespace

int unicache_cpu_row_matmul(const float* x, const float* w, float* y, int64_t rows, int64_t inputs, int64_t outputs,
                            int transposed, const char* name, const UnicacheThreads* threads) {
    const Path* path = find(name);
    if (!path || rows < 0 || inputs < 0 || outputs < 0) return UNICACHE_INVALID;
    Product p{x, w, y, rows, inputs, outputs, transposed != 0, 1, 1, y};
    // The same parts for any number of threads, so that sums are the same. Parts of the inputs keep rows whole.
    const int64_t parts = std::clamp<int64_t>(inputs * outputs / LEAST, 1, MOST_PARTS);
    p.out_parts = transposed ? parts : std::clamp<int64_t>(outputs / WIDE, 1, parts);
    p.in_parts = transposed ? 1 : parts / p.out_parts;
    if (p.in_parts > 1) {
        p.sums = static_cast<float*>(std::malloc(p.in_parts * rows * outputs * sizeof(float)));
        if (!p.sums) return UNICACHE_NO_MEMORY;
    }
    Work work{p, path->multiply};
    int error = 0;
    if (threads && parts > 1) {
        error = threads->run(threads->context, run, p.in_parts * p.out_parts, &work);
    } else {
        for (int64_t part = 0; part < p.in_parts * p.out_parts; part++) run(&work, part);
    }
    if (p.in_parts > 1) {
        std::copy_n(p.sums, rows * outputs, y);
        for (int64_t part = 1; part < p.in_parts; part++)
            for (int64_t i = 0; i < rows * outputs; i++) y[i] += p.sums[part * rows * outputs + i];
        std::free(p.sums);
    }
    return error;
}
