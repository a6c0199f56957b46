// RowMatMul of a path, with the vectors that attention_path.h tells of.
//
// One row times a matrix is bound by reading the matrix. A core fetches ahead in every stream of addresses that it sees,
// and four streams far apart come faster from memory than one: each of four stretches of the matrix is read through from
// its start, a row of each in turn.
#include "row_matmul.h"

namespace {

constexpr int STREAMS = 4;
constexpr int64_t BLOCK = 4096;  // outputs whose sums stay in the first-level cache

// y [M, count] += x [M, S] * w [S, count], the rows of each by themselves.
template <int M, int S>
INLINE void add(const float* const (&x)[S], int64_t x_stride, const float* const (&w)[S], float* y, int64_t y_stride,
                int64_t count) {
    Vec factors[M][S];
    unicache::repeat<M>([&](auto m) INLINED {
        unicache::repeat<S>([&](auto s) INLINED { factors[m][s] = fill(x[s][m * x_stride]); });
    });
    int64_t n = 0;
    for (; n + 2 * LANES <= count; n += 2 * LANES) {
        Vec sums[M][2];
        unicache::repeat<M>([&](auto m) INLINED {
            sums[m][0] = load(y + m * y_stride + n), sums[m][1] = load(y + m * y_stride + n + LANES);
        });
        unicache::repeat<S>([&](auto s) INLINED {
            const Vec first = load(w[s] + n), second = load(w[s] + n + LANES);
            unicache::repeat<M>([&](auto m) INLINED {
                sums[m][0] = fma(factors[m][s], first, sums[m][0]);
                sums[m][1] = fma(factors[m][s], second, sums[m][1]);
            });
        });
        unicache::repeat<M>([&](auto m) INLINED {
            store(y + m * y_stride + n, sums[m][0]), store(y + m * y_stride + n + LANES, sums[m][1]);
        });
    }
    for (; n < count; n++)
        for (int m = 0; m < M; m++)
            for (int s = 0; s < S; s++) y[m * y_stride + n] += x[s][m * x_stride] * w[s][n];
}

template <int S>
INLINE void add_all(const unicache::Product& p, int64_t input, int64_t stride, float* y, int64_t first, int64_t count) {
    const float *w[S], *x[S];
    for (int s = 0; s < S; s++) {
        w[s] = p.w + (input + s * stride) * p.outputs + first;
        x[s] = p.x + input + s * stride;
    }
    int64_t m = 0;
    const auto go = [&](auto rows) INLINED {
        constexpr int M = rows.value;
        for (; m + M <= p.rows; m += M) {
            add<M, S>(x, p.inputs, w, y + m * p.outputs + first, p.outputs, count);
            for (int s = 0; s < S; s++) x[s] += M * p.inputs;
        }
    };
    go(std::integral_constant<int, 4>{});
    go(std::integral_constant<int, 1>{});
}

// y of S outputs, `stride` apart, of every row.
template <int S>
INLINE void dot(const unicache::Product& p, int64_t output, int64_t stride) {
    for (int64_t m = 0; m < p.rows; m++) {
        const float* const x = p.x + m * p.inputs;
        const float* w[S];
        Vec sums_of[2][4] = {};
        for (int s = 0; s < S; s++) w[s] = p.w + (output + s * stride) * p.inputs;
        int64_t k = 0;
        for (; k + 2 * LANES <= p.inputs; k += 2 * LANES) {
            const Vec first = load(x + k), second = load(x + k + LANES);
            unicache::repeat<S>([&](auto s) INLINED {
                sums_of[0][s] = fma(first, load(w[s] + k), sums_of[0][s]);
                sums_of[1][s] = fma(second, load(w[s] + k + LANES), sums_of[1][s]);
            });
        }
        Vec both[1][4];
        unicache::repeat<4>([&](auto s) INLINED { both[0][s] = sums_of[0][s] + sums_of[1][s]; });
        float four[4];
        sums(both, four, 4);
        for (int s = 0; s < S; s++) {
            float rest = 0;
            for (int64_t i = k; i < p.inputs; i++) rest += x[i] * w[s][i];
            p.y[m * p.outputs + output + s * stride] = four[s] + rest;
        }
    }
}

void multiply(const unicache::Product& p, int64_t part) {
    const int64_t in = part % p.in_parts, out = part / p.in_parts;
    const int64_t first = p.outputs * out / p.out_parts, last = p.outputs * (out + 1) / p.out_parts;
    if (p.transposed) {
        const int64_t stride = (last - first) / STREAMS;
        for (int64_t n = first; n < first + stride; n++) dot<STREAMS>(p, n, stride);
        for (int64_t n = first + STREAMS * stride; n < last; n++) dot<1>(p, n, 0);
        return;
    }
    const int64_t start = p.inputs * in / p.in_parts, end = p.inputs * (in + 1) / p.in_parts;
    const int64_t stride = (end - start) / STREAMS;
    float* const y = p.sums + in * p.rows * p.outputs;
    for (int64_t m = 0; m < p.rows; m++)
        for (int64_t n = first; n < last; n++) y[m * p.outputs + n] = 0;
    for (int64_t n = first; n < last; n += BLOCK) {
        const int64_t count = last - n < BLOCK ? last - n : BLOCK;
        for (int64_t k = start; k < start + stride; k++) add_all<STREAMS>(p, k, stride, y, n, count);
        for (int64_t k = start + STREAMS * stride; k < end; k++) add_all<1>(p, k, 0, y, n, count);
    }
}

}  // namespace
