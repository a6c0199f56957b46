// The path for AVX-512 with VNNI: codes are multiplied as whole numbers of 16 bits, two in each lane, and never become
// floats.
//
// What binds it: 16 dpwssd for 64 channels of a token and four rows, 8 cycles where two start in one. Of a store in the
// third-level cache a Zen 5 takes 17 cycles a token: logits 6.4, the softmax 4.1 with biases and scales, the weights'
// numbers 1.7, the output 4.8. For 4 bits with a scale for every 32 tokens of a key and 32 channels of a value it takes
// 22.5: 4.1 more for the queries' numbers, and 1.4 for the weights'. So more than half is no multiplication but waits
// and preparation, and what memory sends late comes on top, 3 cycles for 8 bits.
#if defined(__x86_64__)
#include "vnni.h"

namespace {

// Of N rows from `r` and 32 tokens at a time, or 16, each a lane of a sum. What is next of the keys is put into lanes
// before the present is multiplied, so that neither waits for the other. Not inlined: registers have room for no more.
template <int N, int BITS, int BYTES>
__attribute__((noinline)) void row_logits(const Numbers& queries, int64_t r, const Blocks<BITS, BYTES>& keys,
                                          int64_t first, int64_t last, float* out) {
    using Keys = Blocks<BITS, BYTES>;
    const int64_t bytes = keys.row_bytes();
    Whole<32> whole;
    const auto row_of = [&](int64_t t) INLINED { return whole.at(keys.rows + t * bytes, last - t, bytes); };
    const int16_t* const numbers = queries.numbers + r * STRIDE;
    Bytes next[2][4];
    const int8_t* row = row_of(first);
    repeat<2>([&](auto g) INLINED { keys.keys(row + 16 * g * bytes, next[g]); });
    in_passes<2>((last - first + 15) / 16, [&](auto m, int64_t group) INLINED {
        constexpr int M = m.value;
        const int64_t t = first + 16 * group;
        Sums sum[N][M];
        repeat<N>([&](auto i)
                      INLINED { repeat<M>([&](auto g) INLINED { sum[i][g] = everywhere(-queries.offset[r + i]); }); });
        const int8_t* ask = keys.rows + (t + TILE) * bytes;
        for (int64_t b = 0; b < bytes; b += 16, ask += M * 4 * 64) {
            Bytes key[M][4];
            repeat<M>([&](auto g) INLINED { repeat<4>([&](auto j) INLINED { key[g][j] = next[g][j]; }); });
            if (b + 16 == bytes && t + 32 < last) row = row_of(t + 32);
            const int8_t* const then = row + (b + 16 < bytes ? b + 16 : 0);
            repeat<2>([&](auto g) INLINED { keys.keys(then + 16 * g * bytes, next[g]); });
            const int16_t *low = numbers + b, *high = low + bytes;
            repeat<4>([&](auto j) INLINED {
                if (r == 0) repeat<M>([&](auto g) INLINED { __builtin_prefetch(ask + (M * j + g) * 64); });
                repeat<Keys::PAIRS>([&](auto p) INLINED {
                    Bytes codes[M];
                    repeat<M>([&](auto g) INLINED { codes[g] = Keys::template pair<p>(key[g][j]); });
                    repeat<N>([&](auto i) INLINED {
                        const Bytes of = everywhere((p < 2 ? low : high) + i * STRIDE + 4 * j + 2 * (p % 2));
                        repeat<M>([&](auto g) INLINED { sum[i][g] = dot(sum[i][g], codes[g], of); });
                    });
                });
            });
        }
        repeat<N>([&](auto i) INLINED {
            repeat<M>([&](auto g) INLINED {
                store(out + (r + i) * TILE + t + 16 * g, floats(sum[i][g]) * fill(queries.step[r + i]));
            });
        });
    });
}

template <int BITS, int BYTES>
INLINE void all_logits(const Numbers& queries, int64_t rows, const Blocks<BITS, BYTES>& keys, int64_t first,
                       int64_t last, float* out) {
    in_passes<4>(rows, [&](auto n, int64_t r) { row_logits<n.value>(queries, r, keys, first, last, out); });
}

// output = output * shrink + weights @ values, for N rows and the channels of a run. SAME: its parts have the same
// weights.
template <int N, bool SAME, int BITS, int BYTES>
__attribute__((noinline)) void mix_run(const Weights* const (&weights)[2], const Blocks<BITS, BYTES>& values,
                                       int64_t tokens, int64_t first, const float* shrink, int64_t width,
                                       float* output) {
    using Values = Blocks<BITS, BYTES>;
    constexpr int TURNS = BITS == 4 ? 2 : 1, MANY = 4 / TURNS, STEP = Values::STEP;
    constexpr int SUMS = N < 3 ? 2 : 1;  // few rows have two of each sum, which wait for one another less
    Sums sum[N][SUMS][4];
    repeat<N>([&](auto n) INLINED {
        repeat<SUMS>([&](auto s) INLINED {
            repeat<4>([&](auto c) INLINED {
                sum[n][s][c] = everywhere(BITS == 4 && c < 2 && s == 0 ? -weights[0][n].offset : 0);
            });
        });
    });
    Whole<STEP> whole;
    const uint64_t in = first_of(values.bytes - first);
    for (int64_t t = 0; t < tokens; t += STEP) {
        Bytes value[4];
        values.values(whole.at(values.rows + t * values.bytes, tokens - t, values.bytes), first, in, value);
        const int8_t* const ask = values.rows + (t + TILE) * values.bytes + first * STEP;
        repeat<4>([&](auto i) INLINED { __builtin_prefetch(ask + i * 64); });
        repeat<TURNS>([&](auto odd) INLINED {
            repeat<Values::PAIRS>([&](auto p) INLINED {
                Bytes codes[MANY];
                repeat<MANY>([&](auto i) INLINED { codes[i] = Values::template pair<p>(value[MANY * odd + i]); });
                constexpr int pair = TURNS * (p % 2) + odd, part = BITS == 4 ? p / 2 : 0;
                repeat<N>([&](auto n) INLINED {
                    Bytes weight = everywhere(weights[part][n].numbers + t + 2 * pair);
                    if constexpr (BITS == 8 && !SAME)
                        weight =
                            _mm512_mask_blend_epi32(0xff00, weight, everywhere(weights[1][n].numbers + t + 2 * pair));
                    repeat<MANY>([&](auto i) INLINED {
                        Sums& to = sum[n][p % SUMS][MANY * part + i];
                        to = dot(to, codes[i], weight);
                    });
                });
            });
        });
    }
    repeat<N>([&](auto n) INLINED {
        Sums all[4];
        repeat<4>([&](auto c) INLINED { all[c] = SUMS == 2 ? sum[n][0][c] + sum[n][SUMS - 1][c] : sum[n][0][c]; });
        Values::in_order(all);
        repeat<4>([&](auto c) INLINED {
            const int64_t byte = first + (BITS == 4 ? c % 2 : c) * LANES;
            if (byte >= values.bytes) return;
            float* const to = output + n * width + values.channel(first, c / 2) + c % 2 * LANES;
            store(to, fma(load(to), fill(shrink[n]), floats(all[c]) * fill(weights[c / 2][n].step)));
        });
    });
}

template <int BITS, int BYTES>
INLINE void mix_all(const float* weights, bool, const float* const (&by)[2], float* const (&room)[2], int64_t rows,
                    const Blocks<BITS, BYTES>& values, int64_t tokens, int64_t first, int64_t last,
                    const float* shrink, int64_t width, float* output) {
    Weights* numbers[2];
    set_all(weights, by, room, rows, numbers);
    for (int64_t d = first; d < last; d += Blocks<BITS, BYTES>::RUN)
        in_passes<4>(rows, [&](auto n, int64_t r) INLINED {
            const Weights* const of[2] = {numbers[0] + r, numbers[1] + r};
            if (BITS == 4 || by[0] == by[1])
                mix_run<n.value, true>(of, values, tokens, d, shrink + r, width, output + r * width);
            else
                mix_run<n.value, false>(of, values, tokens, d, shrink + r, width, output + r * width);
        });
}

}  // namespace

#include "attention_path.h"
#include "row_matmul_path.h"

const unicache::Path unicache::avx512vnni = {attend<Numbers>, finish, multiply};
#endif
