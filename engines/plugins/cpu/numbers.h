// Queries and weights as whole numbers of 16 bits: what the paths are made of that multiply codes without making floats
// of them. The file that includes this one defines, besides what attention_path.h tells of:
//   Bytes, Sums (vectors of bits, and of LANES whole numbers); dot (a sum, plus products of the low and of the high
//   halves of every lane), everywhere, whole (a Vec's nearest whole numbers), magnitude (a Vec's bits without its sign),
//   larger, fold (Sums or Vecs of four rows to one, all lanes of row i put together in lane i of every four), of_four
//   (such a lane everywhere), packed (LANES whole numbers twice to 16 bits), store_packed, some (16 bits each, a number
//   in the first of them), and multiplies (whether it multiplies such codes) with with_codes (and calls f with them).
//
// Queries, times their keys' scales, and weights, times their values', become whole numbers of 16 bits, of which the
// largest of a row is TOP. So a logit is off by at most 2^-16 of the row's largest number times the sum of the token's
// codes, and a tile's part of the output by 2^-16 of the tile's largest weight times the sum of its codes, as
// tests/engines/attention_inputs.py states (`rounding`): far less than what the codes' own rounding takes.
#pragma once
#include "attention_rows.h"

namespace {

constexpr float TOP = 32767;     // the largest number of 16 bits
constexpr float LEAST = 1e-30f;  // of a row's largest number: its inverse is finite

// What has no finite inverse is taken for a little that has.
INLINE Vec finite_or_nan(Sums x) {
    const Vec largest = (Vec)larger(x, (Sums)fill(LEAST));
    return fma(largest, fill(0), largest);
}

// Of the result of `fold`: what is one number a row.
template <int N, class T>
INLINE void store_four(void* to, T x) {
    memcpy(to, &x, N * sizeof(float));
}

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

    static bool takes(const Rows& rows, Scales scales) {
        return rows.codes && scales != Scales::unpacked && rows.head_dim <= MOST_CHANNELS && multiplies(rows, scales);
    }
    template <class F>
    static void with_blocks(const Rows& rows, int64_t start, const F& f) {
        with_codes(rows, rows.codes + start * rows.bytes, f);
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
                repeat<N>([&](auto r) INLINED { most[r] = larger(most[r], magnitude(scaled(r, d))); });
            const Vec tops = finite_or_nan(fold<Sums>(most, larger)), inverse = fill(TOP) / tops;
            for (int64_t d = 0; d < width; d += 2 * LANES)
                repeat<N>([&](auto r) INLINED {
                    const auto number =
                        [&](int64_t d) INLINED { return whole(scaled(r, d) * of_four<r>(inverse)); };
                    const Bytes all = packed(number(d), d + LANES < width ? number(d + LANES) : Bytes{});
                    if (four) sums[r] = dot(sums[r], all, some(bytes - d, 8));
                    store_packed(numbers + (first + r) * STRIDE + d, all);
                });
            store_four<N>(step + first, tops * fill(1 / TOP));
            store_four<N>(offset + first, fold<Sums>(sums, [](Sums a, Sums b) INLINED { return a + b; }));
        });
    }
};

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
                [&](auto i) INLINED { most[r] = larger(most[r], magnitude(scaled(part, r, i * LANES))); });
        });
        tops[part] = finite_or_nan(fold<Sums>(most, larger));
    });
    repeat<PARTS>([&](auto part) INLINED {
        const Vec inverse = fill(TOP) / tops[part], steps = tops[part] * fill(1 / TOP);
        Sums sums[4] = {};
        repeat<N>([&](auto r) INLINED {
            repeat<TILE / (2 * LANES)>([&](auto run) INLINED {
                const int64_t t = 2 * LANES * run;
                const auto number =
                    [&](int64_t t) INLINED { return whole(scaled(part, r, t) * of_four<r>(inverse)); };
                const Bytes all = packed(number(t), number(t + LANES));
                sums[r] = dot(sums[r], all, some(2 * LANES, 8));
                store_packed(out[part][r].numbers + t, all);
            });
        });
        const Sums offsets = fold<Sums>(sums, [](Sums a, Sums b) INLINED { return a + b; });
        repeat<N>([&](auto r) INLINED { out[part][r].step = steps[int{r}], out[part][r].offset = offsets[int{r}]; });
    });
}

// Those of all rows, in `room`: of both parts, or of the first where their weights are the same.
INLINE void set_all(const float* weights, const float* const (&by)[2], float* const (&room)[2], int64_t rows,
                    Weights* (&out)[2]) {
    const bool same = by[0] == by[1];
    repeat<2>([&](auto part) INLINED { out[part] = reinterpret_cast<Weights*>(room[same ? 0 : int{part}]); });
    in_passes<4>(rows, [&](auto n, int64_t r) INLINED {
        Weights* const of[2] = {out[0] + r, out[1] + r};
        if (same)
            set<n.value, 1>(weights + r * TILE, by, of);
        else
            set<n.value, 2>(weights + r * TILE, by, of);
    });
}

}  // namespace
