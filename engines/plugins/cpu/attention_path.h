// The kernel in vectors of LANES floats, in namespace PATH: `attention.cc` includes it once an instruction set.
//
// A KV head's keys and values are read once, a tile of tokens at a time, for all rows: the queries of all query heads of
// its group. The softmax is online: weights are relative to the largest logit so far, and what was summed before is
// scaled down when a larger one comes. The weights are kept, for the attention that every slot received.
// No include guard: it is included several times.
namespace {
namespace PATH {

typedef float Vec __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef float Four __attribute__((vector_size(16)));

#define INLINE static inline __attribute__((always_inline))

template <class T>
INLINE T load(const void* from) {
    T x;
    __builtin_memcpy(&x, from, sizeof x);
    return x;
}

template <class T>
INLINE void store(float* to, T x) {
    __builtin_memcpy(to, &x, sizeof x);
}

INLINE Vec floats(Ints x) { return __builtin_convertvector(x, Vec); }

// The lanes' sum in four parts.
INLINE Four fold(Vec x) {
    float parts[LANES];
    __builtin_memcpy(parts, &x, sizeof x);
    Four sum = load<Four>(parts);
    for (int i = 4; i < LANES; i += 4) sum += load<Four>(parts + i);
    return sum;
}

// Four sums at once: lane i is the sum of x[i].
INLINE Four sums(const Vec (&x)[4]) {
    typedef int32_t Order __attribute__((vector_size(16)));
    const Order low = {0, 4, 1, 5}, high = {2, 6, 3, 7}, first = {0, 1, 4, 5}, second = {2, 3, 6, 7};
    const Four a = fold(x[0]), b = fold(x[1]), c = fold(x[2]), d = fold(x[3]);
    const Four ab = __builtin_shuffle(a, b, low) + __builtin_shuffle(a, b, high);
    const Four cd = __builtin_shuffle(c, d, low) + __builtin_shuffle(c, d, high);
    return __builtin_shuffle(ab, cd, first) + __builtin_shuffle(ab, cd, second);
}

// exp of numbers up to 0: 2^n times a Taylor series of the rest, at most ln(2) / 2 from 0; exactly 0 below -87.
INLINE Vec exponential(Vec x) {
    const Ints normal = x > -87.f;
    x = normal ? x : Vec{} - 87.f;
    const Ints n = __builtin_convertvector(x * 1.44269504f - 0.5f, Ints);  // rounds to the nearest, towards 0 from below
    const Vec r = (x - floats(n) * 0.693359375f) + floats(n) * 2.12194440e-4f;  // ln(2) in two parts
    Vec series = Vec{} + 1.f / 5040;
    for (float factor : {1.f / 720, 1.f / 120, 1.f / 24, 1.f / 6, 1.f / 2, 1.f, 1.f}) series = series * r + factor;
    return (Vec)((Ints)(series * (Vec)((n + 127) << 23)) & normal);
}

// Codes of one token -> floats times `by`, one a channel. Plain loops, which the compiler turns into vectors: it widens
// bytes better there than it converts vectors of them.
INLINE void unpack8(const int8_t* __restrict codes, int64_t head_dim, const float* __restrict by,
                    float* __restrict out) {
    for (int64_t d = 0; d < head_dim; d++) out[d] = codes[d] * by[d];
}

// Byte j holds the codes of channels j, in its low half, and j + bytes.
INLINE void unpack4(const int8_t* __restrict codes, int64_t bytes, int64_t head_dim, const float* __restrict by,
                    float* __restrict out) {
    for (int64_t j = 0; j < bytes; j++) out[j] = (((codes[j] + 128) & 15) - 8) * by[j];
    for (int64_t d = bytes; d < head_dim; d++) out[d] = (((codes[d - bytes] + 128) >> 4) - 8) * by[d];
}

// Tokens start .. start + TILE - 1 -> floats [TILE, width]; rows beyond the last are zeros. `by`: room for their scales.
static void unpack(const Rows& rows, int64_t start, int64_t width, float* by, float* tile) {
    const int64_t end = std::min(start + TILE, rows.count), each = rows.codes ? rows.tokens_each() : 1;
    for (int64_t c = start; c < end; c++, tile += width) {
        if (!rows.codes) {
            std::memcpy(tile, rows.floats + c * rows.head_dim, rows.head_dim * sizeof(float));
            continue;
        }
        if (c == start || c % each == 0) {
            if (rows.folds()) std::fill(by, by + rows.head_dim, 1.f);
            else rows.channel_scales(c / each, by);
        }
        const int8_t* codes = rows.codes + c * rows.bytes;
        if (rows.bits == 8) unpack8(codes, rows.head_dim, by, tile);
        else unpack4(codes, rows.bytes, rows.head_dim, by, tile);
    }
    std::fill(tile, tile + (start + TILE - end) * width, 0.f);
}

// Logits [N, TILE] of N rows of queries [N, width] and a tile of keys.
template <int N>
INLINE void logits(const float* query, const float* tile, int64_t width, float* out) {
    for (int64_t t = 0; t < TILE; t += 4) {
        Vec sum[N][4] = {};
        for (int64_t d = 0; d < width; d += LANES)
            for (int i = 0; i < 4; i++) {
                const Vec key = load<Vec>(tile + (t + i) * width + d);
                for (int n = 0; n < N; n++) sum[n][i] += key * load<Vec>(query + n * width + d);
            }
        for (int n = 0; n < N; n++) store(out + n * TILE + t, sums(sum[n]));
    }
}

// output [N, W vectors of a row] = output * shrink[N] + weights [N, TILE] @ tile.
template <int N, int W>
INLINE void mix(const float* weights, const float* tile, const float* shrink, int64_t width, float* output) {
    Vec sum[N][W];
    for (int n = 0; n < N; n++)
        for (int w = 0; w < W; w++) sum[n][w] = load<Vec>(output + n * width + w * LANES) * shrink[n];
    for (int64_t t = 0; t < TILE; t++)
        for (int w = 0; w < W; w++) {
            const Vec value = load<Vec>(tile + t * width + w * LANES);
            for (int n = 0; n < N; n++) sum[n][w] += value * weights[n * TILE + t];
        }
    for (int n = 0; n < N; n++)
        for (int w = 0; w < W; w++) store(output + n * width + w * LANES, sum[n][w]);
}

template <int N>
INLINE void mix_rows(const float* weights, const float* tile, const float* shrink, int64_t width, float* output) {
    int64_t d = 0;
    for (; d + 4 * LANES <= width; d += 4 * LANES) mix<N, 4>(weights, tile + d, shrink, width, output + d);
    for (; d < width; d += LANES) mix<N, 1>(weights, tile + d, shrink, width, output + d);
}

// Logits [TILE] of a row -> weights relative to the largest logit so far; returns what earlier sums are scaled by.
INLINE float online_softmax(const float* bias, int64_t tokens, float* row, float& largest, float& total) {
    float top = largest;
    for (int64_t t = 0; t < TILE; t++) {
        row[t] = t < tokens ? row[t] + std::max(bias[t], LOWEST) : NOTHING;
        top = std::max(top, row[t]);
    }
    const float shrink = std::exp(largest - top);
    Vec sum = {};
    for (int64_t t = 0; t < TILE; t += LANES) {
        const Vec weight = exponential(load<Vec>(row + t) - top);
        store(row + t, weight);
        sum += weight;
    }
    const Four parts = fold(sum);
    total = total * shrink + (parts[0] + parts[1]) + (parts[2] + parts[3]);
    largest = top;
    return shrink;
}

// All rows of one KV head.
struct Head {
    int64_t rows, width;
    Buffer scaled, output, tile, by, largest, total, shrink;

    Head(int64_t rows, int64_t head_dim)
        : rows(rows), width((head_dim + LANES - 1) / LANES * LANES), scaled(rows * width), output(rows * width),
          tile(TILE * width), by(width), largest(rows), total(rows), shrink(rows) {
        std::fill(largest.data(), largest.data() + rows, NOTHING);
    }

    // Attend to some keys and values. `bias`: row r's is at (r % queries) * stride. Of every tile it leaves the weights
    // [rows, TILE] and the logits [rows] that they are relative to.
    void attend(const Rows& keys, const Rows& values, const float* query, float scale, const float* bias,
                int64_t queries, int64_t stride, float* weights, float* tops) {
        if (!keys.count) return;
        const int64_t head_dim = keys.head_dim;
        float *q = scaled.data(), *x = tile.data(), *o = output.data();
        std::fill(by.data(), by.data() + head_dim, 1.f);
        if (keys.folds()) keys.channel_scales(0, by.data());
        for (int64_t r = 0; r < rows; r++)
            for (int64_t d = 0; d < head_dim; d++) q[r * width + d] = query[r * head_dim + d] * scale * by.data()[d];

        for (int64_t start = 0; start < keys.count; start += TILE, weights += rows * TILE, tops += rows) {
            unpack(keys, start, width, by.data(), x);
            int64_t r = 0;
            for (; r + 2 <= rows; r += 2) logits<2>(q + r * width, x, width, weights + r * TILE);
            for (; r < rows; r++) logits<1>(q + r * width, x, width, weights + r * TILE);
            for (r = 0; r < rows; r++) {
                shrink.data()[r] = online_softmax(bias + r % queries * stride + start, keys.count - start,
                                                  weights + r * TILE, largest.data()[r], total.data()[r]);
                tops[r] = largest.data()[r];
            }
            unpack(values, start, width, by.data(), x);
            for (r = 0; r + 2 <= rows; r += 2)
                mix_rows<2>(weights + r * TILE, x, shrink.data() + r, width, o + r * width);
            for (; r < rows; r++) mix_rows<1>(weights + r * TILE, x, shrink.data() + r, width, o + r * width);
        }
        if (!values.folds()) return;
        values.channel_scales(0, by.data());
        for (int64_t r = 0; r < rows; r++)
            for (int64_t d = 0; d < head_dim; d++) o[r * width + d] *= by.data()[d];
    }

    // The attention that each of `count` tokens received: summed over the queries, averaged over the group.
    void mass(int64_t count, int64_t group, const float* weights, const float* tops, float* out) {
        std::fill(out, out + count, 0.f);
        for (int64_t start = 0; start < count; start += TILE)
            for (int64_t r = 0; r < rows; r++, tops++, weights += TILE) {
                const float factor = std::exp(*tops - largest.data()[r]) / (total.data()[r] * group);
                for (int64_t t = 0; t < std::min(TILE, count - start); t++) out[start + t] += weights[t] * factor;
            }
    }
};

static void attend(const UnicacheAttention& a, int64_t head) {
    const int64_t b = head / a.kv_heads, rows = a.group * a.queries;
    const int64_t store_tiles = (a.slots + TILE - 1) / TILE, tiles = store_tiles + (a.window + TILE - 1) / TILE;
    const float* query = a.query + head * rows * a.head_dim;
    Head state(rows, a.head_dim);
    Buffer weights(tiles * rows * TILE), tops(tiles * rows);
    float *recent = weights.data() + store_tiles * rows * TILE, *recent_tops = tops.data() + store_tiles * rows;

    state.attend(store_rows(a, a.key, b, head), store_rows(a, a.value, b, head), query, a.softmax_scale,
                 a.store_bias + head * a.slots, a.queries, 0, weights.data(), tops.data());
    // After the store: a scale of its values that is folded into the output must not touch the window's.
    state.attend(window_rows(a, a.key_window, head), window_rows(a, a.value_window, head), query, a.softmax_scale,
                 a.window_bias + b * a.queries * a.window, a.queries, a.window, recent, recent_tops);

    float* out = a.output + head * rows * a.head_dim;
    for (int64_t r = 0; r < rows; r++) {
        const float total = state.total.data()[r];  // 0 where there is no token at all
        for (int64_t d = 0; d < a.head_dim; d++)
            out[r * a.head_dim + d] = total > 0 ? state.output.data()[r * state.width + d] / total : 0.f;
    }
    state.mass(a.slots, a.group, weights.data(), tops.data(), a.store_mass + head * a.slots);
    state.mass(a.window, a.group, recent, recent_tops, a.window_mass + head * a.window);
}

}  // namespace PATH
}  // namespace

#undef INLINE
#undef PATH
#undef LANES
