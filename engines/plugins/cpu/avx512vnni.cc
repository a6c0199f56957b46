// The path for AVX-512 with VNNI: codes are multiplied as whole numbers of 16 bits, two in each lane, and never become
// floats.
//
// Queries, times their keys' scales, and weights, times their values', become whole numbers of 16 bits, of which the
// largest of a row is TOP. So a logit is off by at most 2^-16 of the row's largest number times the sum of the token's
// codes, and a tile's part of the output by 2^-16 of the tile's largest weight times the sum of its codes, as
// tests/engines/attention_inputs.py states (`rounding`): far less than what the codes' own rounding takes.
//
// What binds it: 16 dpwssd for 64 channels of a token and four rows, 8 cycles where two start in one. Of a store in the
// third-level cache a Zen 5 takes 17 cycles a token: logits 6.4, the softmax 4.1 with biases and scales, the weights'
// numbers 1.7, the output 4.8. For 4 bits with a scale for every 32 tokens of a key and 32 channels of a value it takes
// 22.5: 4.1 more for the queries' numbers, and 1.4 for the weights'. So more than half is no multiplication but waits
// and preparation, and what memory sends late comes on top, 3 cycles for 8 bits.
#if defined(__x86_64__)
#include "vnni.h"

namespace {

// Query rows as whole numbers, of which the largest of a row is TOP.
struct Numbers : Queries {
    const int64_t bytes;     // of a row of keys
    const bool four, taken;  // codes of 4 bits; whether this path multiplies them
    int16_t* const sets;
    int16_t* numbers;  // [rows, STRIDE]: channels as `packed` has them
    float* step;       // [rows]
    int32_t* offset;   // [rows]: what a product has too much, for codes that are larger by 8

    static int64_t room(int64_t rows, int64_t width) {
        return Queries::room(rows, width) + SETS * rows * (STRIDE / 2 + 2);
    }
    Numbers(float* memory, int64_t rows, int64_t width, const Rows& keys, Scales scales)
        : Queries(memory, rows, width, keys, scales),
          bytes(keys.bytes),
          four(keys.bits == 4),
          taken(takes(keys, scales)),
          sets(reinterpret_cast<int16_t*>(memory + Queries::room(rows, width))) {
        use(0);
    }
    void use(int64_t set) {
        Queries::use(set);
        numbers = sets + set * count * (STRIDE + 4);
        step = reinterpret_cast<float*>(numbers + count * STRIDE);
        offset = reinterpret_cast<int32_t*>(step + count);
    }

    template <class F>
    static void with_blocks(const Rows& rows, int64_t start, const F& f) {
        const int8_t* codes = rows.codes + start * rows.bytes;
        if (rows.bits == 8)
            f(Blocks<8, 0>{codes, rows.bytes, rows.bytes});
        else if (rows.bytes == 32)
            f(Blocks<4, 32>{codes, rows.bytes, rows.bytes});
        else
            f(Blocks<4, 0>{codes, rows.bytes, rows.bytes});
    }
    static bool takes(const Rows& rows, Scales scales) {
        if (!rows.codes || scales == Scales::unpacked || rows.head_dim > MOST_CHANNELS) return false;
        const bool whole = rows.head_dim % (rows.bits == 8 ? 16 : 32) == 0;
        const int64_t each = rows.channels_each, run = rows.bits == 8 ? 64 : 32;
        const bool runs = each == 32 || (each % run == 0 && (rows.bits == 8 || rows.bytes % each == 0));
        return whole && (scales != Scales::factors || rows.channel_blocks == 1 || runs);
    }

    // Four rows at a time, so that what is one number a row takes as many steps as one row would.
    void set(const float* queries, const float* by) {
        if (!taken) return Queries::set(queries, by);
        in_passes<4>(count, [&](auto n, int64_t first) {
            constexpr int N = n.value;
            const float* const row = queries + first * width;
            const auto scaled = [&](int64_t r, int64_t d) INLINED {
                return by ? load(row + r * width + d) * load(by + d) : load(row + r * width + d);
            };
            Sums most[4] = {}, sums[4] = {};
            for (int64_t d = 0; d < width; d += LANES)
                repeat<N>([&](auto r) INLINED { most[r] = larger(most[r], (Sums)_mm512_abs_ps(scaled(r, d))); });
            const Vec tops = finite_or_nan(fold<Sums>(most, larger)), inverse = fill(TOP) / tops;
            for (int64_t d = 0; d < width; d += 2 * LANES)
                repeat<N>([&](auto r) INLINED {
                    const auto number = [&](int64_t d) INLINED {
                        return (Bytes)_mm512_cvtps_epi32(scaled(r, d) * of_four<r>(inverse));
                    };
                    const Bytes all = packed(number(d), d + LANES < width ? number(d + LANES) : Bytes{});
                    const Bytes eights = _mm512_maskz_set1_epi16(static_cast<__mmask32>(first_of(bytes - d)), 8);
                    if (four) sums[r] = dot(sums[r], all, eights);
                    _mm512_storeu_si512(numbers + (first + r) * STRIDE + d, all);
                });
            store_four<N>(step + first, tops * fill(1 / TOP));
            store_four<N>(offset + first, fold<Sums>(sums, [](Sums a, Sums b) INLINED { return a + b; }));
        });
    }
};

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

// A tile's weights as whole numbers, each row of its own step: one scale of a store, be it of a masked token, leaves
// the others as exact as they were.
struct Weights {
    int16_t numbers[TILE];
    float step;
    int32_t offset;  // what a sum has too much, for codes that are larger by 8
};

// Of N rows of weights * by[part], for each of PARTS; side by side, as each waits for its own largest weight.
template <int N, int PARTS>
INLINE void set(const float* weights, const float* const (&by)[2], Weights* const (&out)[2]) {
    const auto scaled = [&](int part, int64_t r, int64_t t)
                            INLINED { return load(weights + r * TILE + t) * load(by[part] + t); };
    Vec tops[PARTS];
    repeat<PARTS>([&](auto part) INLINED {
        Sums most[4] = {};
        repeat<N>([&](auto r) INLINED {
            repeat<TILE / LANES>(
                [&](auto i) INLINED { most[r] = larger(most[r], (Sums)_mm512_abs_ps(scaled(part, r, i * LANES))); });
        });
        tops[part] = finite_or_nan(fold<Sums>(most, larger));
    });
    repeat<PARTS>([&](auto part) INLINED {
        const Vec inverse = fill(TOP) / tops[part], steps = tops[part] * fill(1 / TOP);
        Sums sums[4] = {};
        repeat<N>([&](auto r) INLINED {
            repeat<TILE / 32>([&](auto run) INLINED {
                const auto number = [&](int64_t t) INLINED {
                    return (Bytes)_mm512_cvtps_epi32(scaled(part, r, t) * of_four<r>(inverse));
                };
                const Bytes all = packed(number(32 * run), number(32 * run + LANES));
                sums[r] = dot(sums[r], all, _mm512_set1_epi16(8));
                _mm512_storeu_si512(out[part][r].numbers + 32 * run, all);
            });
        });
        const Sums offsets = fold<Sums>(sums, [](Sums a, Sums b) INLINED { return a + b; });
        repeat<N>([&](auto r) INLINED { out[part][r].step = steps[int{r}], out[part][r].offset = offsets[int{r}]; });
    });
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
    const bool same = by[0] == by[1];
    Weights* const numbers[2] = {reinterpret_cast<Weights*>(room[0]), reinterpret_cast<Weights*>(room[same ? 0 : 1])};
    in_passes<4>(rows, [&](auto n, int64_t r) INLINED {
        constexpr int N = n.value;
        Weights* const of[2] = {numbers[0] + r, numbers[1] + r};
        if (same)
            set<N, 1>(weights + r * TILE, by, of);
        else
            set<N, 2>(weights + r * TILE, by, of);
    });
    for (int64_t d = first; d < last; d += Blocks<BITS, BYTES>::RUN)
        in_passes<4>(rows, [&](auto n, int64_t r) INLINED {
            const Weights* const of[2] = {numbers[0] + r, numbers[1] + r};
            if (BITS == 4 || same)
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
