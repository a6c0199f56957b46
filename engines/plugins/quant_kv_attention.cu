// Kernel of the operator unicache::QuantKVAttention: a few queries over a quantized store and a full-precision window.
//
// What it computes is stated by `quant_kv_attention` in export/operators.py. To decode is to read the store once, so the
// work is cut along the tokens (split-K): a block reads one stretch of the store, or of the window, for up to ROWS rows
// (the queries of all query heads of a KV head), and leaves its largest logit, sum of weights and weighted values; a
// second kernel combines the stretches. More rows than ROWS are further blocks, next to it, that find the stretch in L2.
//
// Nothing is staged in shared memory: a lane loads 16 channels of a token and keeps those channels of the queries and of
// the sums in registers; so many `lanes` as a row has chunks, to a power of two, share a token, and the other groups of
// the warp have the next tokens. Each group of lanes has a softmax of its own, merged at the end of the stretch.
#include "quant_kv_rows.cuh"

// Tests only: tokens left out at the end of every warp's run. A build with 1 is wrong, and the parity test must say so.
#ifndef END_SHIFT
#define END_SHIFT 0
#endif

namespace {

constexpr unsigned WARP = 32, WARPS = 4, THREADS = WARP * WARPS, ALL_LANES = 0xffffffffu, NO_END = 0xffffffffu;
constexpr unsigned COMBINE_WARPS = 8, COMBINE_THREADS = WARP * COMBINE_WARPS;
constexpr unsigned MOST_DIM = WARP * CHANNELS / 2;  // 256: 16 lanes a token
constexpr unsigned GRAIN = 16 * WARPS;              // a stretch is so many tokens, or a multiple
constexpr unsigned MOST_BLOCKS = 1024, BLOCKS_PER_MULTIPROCESSOR = 4;
constexpr float LOWEST = -1e4f;    // masks are finite, so that a fully masked row stays finite
constexpr float NOTHING = -3e38f;  // below every logit
constexpr float SLACK = 8;         // weights may grow to e^8 before all sums are scaled down: it is rarely done

struct Plan {
    UnicacheAttention a;
    Scales key, value;
    unsigned rows, lanes;                   // rows: of a KV head; lanes: of a token
    unsigned stretch, store_parts, parts;   // tokens of a part; parts of the store; and with those of the window
    float* sums;                            // [heads, parts, rows, head_dim]: weighted values
    float* softmax;                         // [heads, parts, rows, 2]: largest logit, sum of weights
    float* logits;                          // [heads, rows, slots + window], or NULL where no mass is wanted
};

// A row's softmax so far: weights are relative to `top`.
template <unsigned ROWS>
struct State {
    float sum[ROWS][CHANNELS], top[ROWS], total[ROWS];

    __device__ __forceinline__ void shrink(unsigned r, float new_top) {
        const float by = __expf(top[r] - new_top);
        top[r] = new_top, total[r] *= by;
        SIMT_FOR(i, CHANNELS) sum[r][i] *= by;
    }
};

__device__ __forceinline__ unsigned least(unsigned x, unsigned y) { return x < y ? x : y; }

// One warp's run of tokens; KEY and VALUE: bits of the numbers, of codes in the store or of floats in the window.
template <unsigned KEY, unsigned VALUE, unsigned ROWS, bool WIDE>
__device__ __forceinline__ void attend(const Plan& plan, const float (&queries)[ROWS][MOST_DIM], State<ROWS>& state) {
    constexpr bool STORE = KEY <= 8;
    constexpr unsigned TOKENS = !WIDE || !STORE ? 1 : ROWS == 1 ? 4 : 2;  // of a lane at a time: what registers allow
    const UnicacheAttention& a = plan.a;
    const unsigned lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, head = blockIdx.z, row0 = blockIdx.x * ROWS;
    const unsigned chunk = lane % plan.lanes, group = lane / plan.lanes, groups = WARP / plan.lanes;
    const unsigned head_dim = static_cast<unsigned>(a.head_dim);

    const unsigned count = static_cast<unsigned>(STORE ? a.slots : a.window);
    const unsigned part = blockIdx.y - (STORE ? 0 : plan.store_parts), run = plan.stretch / WARPS;
    const unsigned begin = least(part * plan.stretch + warp * run, count), end = least(begin + run, count);

    const unsigned key_bytes = (head_dim * KEY + 7) / 8, value_bytes = (head_dim * VALUE + 7) / 8;
    const int64_t tokens_before = static_cast<int64_t>(head) * count;
    const uint8_t* keys = static_cast<const uint8_t*>(STORE ? a.key.codes : a.key_window) + tokens_before * key_bytes;
    const uint8_t* values =
        static_cast<const uint8_t*>(STORE ? a.value.codes : a.value_window) + tokens_before * value_bytes;
    const Numbers all_bias{STORE ? a.store_bias : a.window_bias,
                           (STORE ? a.store_bias_type : a.window_bias_type) == UNICACHE_FLOAT16};
    const unsigned in_batch = head / static_cast<unsigned>(a.kv_heads), asked = static_cast<unsigned>(a.queries);
    const Numbers bias = all_bias.from(STORE ? tokens_before : static_cast<int64_t>(in_batch) * asked * count);
    float* logits = nullptr;
    if (plan.logits)
        logits = plan.logits + (static_cast<int64_t>(head) * plan.rows + row0) * (a.slots + a.window) + (STORE ? 0 : a.slots);

    const Numbers key_scale = plan.key.of(head), value_scale = plan.value.of(head);
    const bool scaled_logits = STORE && plan.key.per_token(), scaled_queries = STORE && !scaled_logits;
    const bool scaled_weights = STORE && plan.value.per_token();
    const bool scaled_values = STORE && !scaled_weights && !plan.value.folded();
    // The rows' queries, times the scale of keys of a block of tokens, which ends before token q_end.
    float q[ROWS][CHANNELS];
    unsigned q_end = 0;
    auto load_queries = [&](unsigned token) {
        const unsigned block = scaled_queries ? plan.key.tokens(token) : 0, here = opaque(chunk);
        q_end = scaled_queries ? (block + 1) * static_cast<unsigned>(plan.key.tokens.by) : NO_END;
        SIMT_FOR(i, CHANNELS) {
            const unsigned channel = channel_of(KEY, here, i, head_dim);
            float scale = 0;
            if (channel < head_dim) scale = scaled_queries ? key_scale[plan.key.index(block, channel)] : 1;
            SIMT_FOR(r, ROWS) q[r][i] = channel < head_dim ? queries[r][channel] * scale : 0;
        }
    };

    Chunk<KEY> key[TOKENS];
    Chunk<VALUE> value[TOKENS];
    auto token_of = [&](unsigned first, unsigned t) { return least(first + t * groups + group, end - 1); };
    auto load_keys = [&](unsigned first) {
        SIMT_FOR(t, TOKENS)
            key[t].template load<WIDE>(keys + static_cast<int64_t>(token_of(first, t)) * key_bytes, key_bytes, chunk);
    };
    auto load_values = [&](unsigned first) {
        SIMT_FOR(t, TOKENS)
            value[t].template load<WIDE>(values + static_cast<int64_t>(token_of(first, t)) * value_bytes, value_bytes, chunk);
    };
    if (begin < end) load_keys(begin), load_values(begin);

    const unsigned step = groups * TOKENS;
    for (unsigned first = begin; first < end; first += step) {
        unsigned token[TOKENS];
        bool live[TOKENS];
        float added[TOKENS], logit_scale[TOKENS], weight_scale[TOKENS];
        SIMT_FOR(t, TOKENS) {
            token[t] = token_of(first, t);
            live[t] = first + t * groups + group + END_SHIFT < end;
            added[t] = STORE ? fmaxf(bias[token[t]], LOWEST) : 0;
            logit_scale[t] = scaled_logits ? key_scale[plan.key.tokens(token[t])] : 1;
            weight_scale[t] = scaled_weights ? value_scale[plan.value.tokens(token[t])] : 1;
        }

        float logit[ROWS][TOKENS];
        SIMT_FOR(t, TOKENS) {
            if (token[t] >= q_end) load_queries(token[t]);
            float x[CHANNELS];
            key[t].numbers(x);
            SIMT_FOR(r, ROWS) {
                logit[r][t] = 0;
                SIMT_FOR(i, CHANNELS) logit[r][t] += q[r][i] * x[i];
            }
        }
        if (first + step < end) load_keys(first + step);  // keys travel while values are worked on, and the reverse
        for (unsigned by = 1; by < plan.lanes; by *= 2)
            SIMT_FOR(r, ROWS) SIMT_FOR(t, TOKENS) logit[r][t] += __shfl_xor_sync(ALL_LANES, logit[r][t], by);
        bool grows = false;
        SIMT_FOR(r, ROWS) SIMT_FOR(t, TOKENS) {
            if (!STORE) added[t] = fmaxf(bias[(row0 + r) % asked * count + token[t]], LOWEST);
            logit[r][t] = live[t] ? logit[r][t] * logit_scale[t] + added[t] : NOTHING;
            grows |= logit[r][t] > state.top[r] + SLACK;
            if (logits && live[t] && chunk == 0 && row0 + r < plan.rows)
                logits[r * (a.slots + a.window) + token[t]] = logit[r][t];
        }
        if (__any_sync(ALL_LANES, grows)) {
            SIMT_FOR(r, ROWS) {
                float top = state.top[r];
                SIMT_FOR(t, TOKENS) top = fmaxf(top, logit[r][t]);
                state.shrink(r, top);
            }
        }

        SIMT_FOR(t, TOKENS) {
            float x[CHANNELS];
            value[t].numbers(x);
            if (scaled_values) {
                const unsigned block = plan.value.tokens(token[t]), here = opaque(chunk);
                float scale = 0;
                SIMT_FOR(i, CHANNELS) {
                    const unsigned channel = channel_of(VALUE, here, i, head_dim);
                    if ((i % 8 == 0 || !plan.value.eights) && channel < head_dim)
                        scale = value_scale[plan.value.index(block, channel)];
                    x[i] *= scale;
                }
            }
            SIMT_FOR(r, ROWS) {
                float weight = live[t] ? __expf(logit[r][t] - state.top[r]) : 0;
                state.total[r] += weight;
                weight *= weight_scale[t];
                SIMT_FOR(i, CHANNELS) state.sum[r][i] += weight * x[i];
            }
        }
        if (first + step < end) load_values(first + step);
    }
}

// Grid: chunks of rows, parts of the tokens, heads (batch * kv_heads).
template <unsigned ROWS, bool WIDE>
__global__ void __launch_bounds__(THREADS, ROWS == 1 && WIDE ? 3 : 2)
attend_part(const __grid_constant__ Plan plan) {
    __shared__ float queries[ROWS][MOST_DIM], sums[WARPS][ROWS][MOST_DIM], tops[WARPS][ROWS], totals[WARPS][ROWS];
    const UnicacheAttention& a = plan.a;
    const unsigned lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, part = blockIdx.y, head = blockIdx.z;
    const unsigned row0 = blockIdx.x * ROWS, head_dim = static_cast<unsigned>(a.head_dim);
    const bool store = part < plan.store_parts;

    const Numbers query =
        Numbers{a.query, a.type == UNICACHE_FLOAT16}.from((static_cast<int64_t>(head) * plan.rows + row0) * head_dim);
    const unsigned own = least(ROWS, plan.rows - row0) * head_dim;
    for (unsigned i = threadIdx.x; i < ROWS * head_dim; i += THREADS)
        queries[i / head_dim][i % head_dim] = i < own ? query[i] * a.softmax_scale : 0;
    __syncthreads();

    State<ROWS> state;
    SIMT_FOR(r, ROWS) {
        state.top[r] = NOTHING, state.total[r] = 0;
        SIMT_FOR(i, CHANNELS) state.sum[r][i] = 0;
    }
    if (!store) {
        if (a.type == UNICACHE_FLOAT16) attend<16, 16, ROWS, WIDE>(plan, queries, state);
        else attend<32, 32, ROWS, WIDE>(plan, queries, state);
    } else if (a.key.bits == 8) {
        if (a.value.bits == 8) attend<8, 8, ROWS, WIDE>(plan, queries, state);
        else attend<8, 4, ROWS, WIDE>(plan, queries, state);
    } else {
        if (a.value.bits == 8) attend<4, 8, ROWS, WIDE>(plan, queries, state);
        else attend<4, 4, ROWS, WIDE>(plan, queries, state);
    }

    // Merge the groups of lanes by shuffles, then the warps through shared memory.
    SIMT_FOR(r, ROWS) {
        float top = state.top[r];
        for (unsigned by = plan.lanes; by < WARP; by *= 2) top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, by));
        state.shrink(r, top);
        for (unsigned by = plan.lanes; by < WARP; by *= 2) {
            state.total[r] += __shfl_xor_sync(ALL_LANES, state.total[r], by);
            SIMT_FOR(i, CHANNELS) state.sum[r][i] += __shfl_xor_sync(ALL_LANES, state.sum[r][i], by);
        }
        if (lane == 0) tops[warp][r] = top, totals[warp][r] = state.total[r];
    }
    if (lane < plan.lanes) {
        const Numbers value_scale = plan.value.of(head);
        SIMT_FOR(i, CHANNELS) {
            const unsigned channel = channel_of(store ? static_cast<unsigned>(a.value.bits) : 32, lane, i, head_dim);
            if (channel == head_dim) continue;
            const float scale = store && plan.value.folded() ? value_scale[plan.value.index(0, channel)] : 1;
            SIMT_FOR(r, ROWS) sums[warp][r][channel] = state.sum[r][i] * scale;
        }
    }
    __syncthreads();
    const int64_t row = (static_cast<int64_t>(head) * plan.parts + part) * plan.rows + row0;
    for (unsigned i = threadIdx.x; i < own; i += THREADS) {
        const unsigned r = i / head_dim, channel = i % head_dim;
        float top = NOTHING, sum = 0, total = 0;
        for (unsigned w = 0; w < WARPS; ++w) top = fmaxf(top, tops[w][r]);
        for (unsigned w = 0; w < WARPS; ++w) {
            const float shrink = __expf(tops[w][r] - top);
            sum += sums[w][r][channel] * shrink, total += totals[w][r] * shrink;
        }
        plan.sums[row * head_dim + i] = sum;
        if (channel == 0) plan.softmax[2 * (row + r)] = top, plan.softmax[2 * (row + r) + 1] = total;
    }
}

// Called by a warp: the largest logit of a row over all parts, and the sum of its weights relative to that.
__device__ void softmax_of_row(const Plan& plan, unsigned head, unsigned row, float* top, float* total) {
    const float* softmax = plan.softmax + 2 * (static_cast<int64_t>(head) * plan.parts * plan.rows + row);
    *top = NOTHING, *total = 0;
    for (unsigned part = threadIdx.x % WARP; part < plan.parts; part += WARP)
        *top = fmaxf(*top, softmax[2 * static_cast<int64_t>(part) * plan.rows]);
    for (unsigned by = 1; by < WARP; by *= 2) *top = fmaxf(*top, __shfl_xor_sync(ALL_LANES, *top, by));
    for (unsigned part = threadIdx.x % WARP; part < plan.parts; part += WARP) {
        const float* of_part = softmax + 2 * static_cast<int64_t>(part) * plan.rows;
        *total += of_part[1] * __expf(of_part[0] - *top);
    }
    for (unsigned by = 1; by < WARP; by *= 2) *total += __shfl_xor_sync(ALL_LANES, *total, by);
}

// Grid: one block a row, for its output, and then one for every COMBINE_THREADS tokens, for their masses; heads.
__global__ void __launch_bounds__(COMBINE_THREADS)
combine_parts(const __grid_constant__ Plan plan) {
    __shared__ float sums[COMBINE_WARPS][MOST_DIM];
    const UnicacheAttention& a = plan.a;
    const unsigned lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, head = blockIdx.y;
    const unsigned head_dim = static_cast<unsigned>(a.head_dim);
    const bool half = a.type == UNICACHE_FLOAT16;
    float top, total;
    if (blockIdx.x < plan.rows) {
        const unsigned row = blockIdx.x;
        softmax_of_row(plan, head, row, &top, &total);
        float sum[MOST_DIM / WARP] = {};
        for (unsigned part = warp; part < plan.parts; part += COMBINE_WARPS) {
            const int64_t of_part = (static_cast<int64_t>(head) * plan.parts + part) * plan.rows + row;
            const float shrink = __expf(plan.softmax[2 * of_part] - top);
            SIMT_FOR(i, MOST_DIM / WARP) {
                const unsigned channel = i * WARP + lane;
                if (channel < head_dim) sum[i] += plan.sums[of_part * head_dim + channel] * shrink;
            }
        }
        SIMT_FOR(i, MOST_DIM / WARP) sums[warp][i * WARP + lane] = sum[i];
        __syncthreads();
        if (threadIdx.x < head_dim) {
            float all = 0;
            for (unsigned w = 0; w < COMBINE_WARPS; ++w) all += sums[w][threadIdx.x];
            const int64_t at = (static_cast<int64_t>(head) * plan.rows + row) * head_dim + threadIdx.x;
            Numbers{a.output, half}.set(at, total > 0 ? all / total : 0);  // total is 0 where there is no token at all
        }
        return;
    }
    const unsigned slots = static_cast<unsigned>(a.slots), window = static_cast<unsigned>(a.window);
    const unsigned token = (blockIdx.x - plan.rows) * COMBINE_THREADS + threadIdx.x;
    float mass = 0;
    for (unsigned row = 0; row < plan.rows; ++row) {
        softmax_of_row(plan, head, row, &top, &total);
        const float* logits = plan.logits + (static_cast<int64_t>(head) * plan.rows + row) * (slots + window);
        if (token < slots + window) mass += __expf(logits[token] - top) / total;
    }
    mass /= static_cast<float>(a.group);
    if (token < slots) {
        if (a.store_mass) Numbers{a.store_mass, half}.set(static_cast<int64_t>(head) * slots + token, mass);
    } else if (token < slots + window && a.window_mass) {
        Numbers{a.window_mass, half}.set(static_cast<int64_t>(head) * window + token - slots, mass);
    }
}

bool in_range(const UnicacheAttention& a) {
    constexpr int64_t MOST_HEADS = 65535, MOST_ROWS = 4096, MOST_TOKENS = 1 << 20;
    auto type = [](int64_t x) { return x == UNICACHE_FLOAT32 || x == UNICACHE_FLOAT16; };
    auto within = [](int64_t x, int64_t low, int64_t high) { return low <= x && x <= high; };
    auto store = [&](const UnicacheStore& s) {
        return (s.bits == 8 || s.bits == 4) && type(s.scale_type) &&
               (a.slots == 0 || ((s.scale_batch == 1 || s.scale_batch == a.batch) && within(s.token_blocks, 1, a.slots) &&
                                 within(s.channel_blocks, 1, a.head_dim)));
    };
    return within(a.batch, 1, MOST_HEADS) && within(a.kv_heads, 1, MOST_HEADS) &&
           a.batch * a.kv_heads <= MOST_HEADS && within(a.group, 1, MOST_ROWS) && within(a.queries, 1, MOST_ROWS) &&
           a.group * a.queries <= MOST_ROWS && within(a.slots, 0, MOST_TOKENS) && within(a.window, 0, MOST_TOKENS) &&
           a.queries * a.window <= UINT32_MAX && within(a.head_dim, 1, MOST_DIM) && type(a.type) &&
           type(a.store_bias_type) && type(a.window_bias_type) && store(a.key) && store(a.value);
}

// Whether pointers are there, and to whole numbers.
bool in_place(const UnicacheAttention& a) {
    auto at = [](const void* x, int64_t type) {
        return x && reinterpret_cast<uintptr_t>(x) % (type == UNICACHE_FLOAT16 ? 2 : 4) == 0;
    };
    auto store = [&](const UnicacheStore& s) { return s.codes && at(s.scale, s.scale_type); };
    return at(a.query, a.type) && at(a.output, a.type) &&
           (a.slots == 0 || (store(a.key) && store(a.value) && at(a.store_bias, a.store_bias_type))) &&
           (a.window == 0 ||
            (at(a.key_window, a.type) && at(a.value_window, a.type) && at(a.window_bias, a.window_bias_type))) &&
           (!a.store_mass || at(a.store_mass, a.type)) && (!a.window_mass || at(a.window_mass, a.type));
}

// Whether all rows are whole chunks of 16 channels, aligned for their loads.
bool wide(const UnicacheAttention& a) {
    auto aligned = [](const void* at, int64_t bytes) { return reinterpret_cast<uintptr_t>(at) % bytes == 0; };
    return a.head_dim % CHANNELS == 0 && aligned(a.key.codes, 2 * a.key.bits) &&
           aligned(a.value.codes, 2 * a.value.bits) && aligned(a.key_window, 16) && aligned(a.value_window, 16);
}

unsigned rows_at_a_time(const UnicacheAttention& a) { return wide(a) && a.group * a.queries > 1 ? 4 : 1; }

// Cuts the tokens so that there are about `blocks` blocks.
void cut(Plan& plan, int64_t blocks) {
    const UnicacheAttention& a = plan.a;
    const int64_t apart = a.batch * a.kv_heads * ((plan.rows + 3) / 4);
    const int64_t most = blocks > apart ? blocks / apart : 1, stretch = (a.slots + a.window + most - 1) / most;
    plan.stretch = static_cast<unsigned>(stretch < 1 ? GRAIN : (stretch + GRAIN - 1) / GRAIN * GRAIN);
    plan.store_parts = static_cast<unsigned>((a.slots + plan.stretch - 1) / plan.stretch);
    plan.parts = static_cast<unsigned>(plan.store_parts + (a.window + plan.stretch - 1) / plan.stretch);
}

// Floats of the workspace.
int64_t sums_size(const Plan& plan) { return plan.a.batch * plan.a.kv_heads * plan.parts * plan.rows * plan.a.head_dim; }
int64_t softmax_size(const Plan& plan) { return plan.a.batch * plan.a.kv_heads * plan.parts * plan.rows * 2; }
int64_t logits_size(const Plan& plan) {
    return plan.a.batch * plan.a.kv_heads * plan.rows * (plan.a.slots + plan.a.window);
}

Scales scales_of(const UnicacheAttention& a, const UnicacheStore& store) {
    if (a.slots == 0) return {{}, true, 1, 1, 1, Divisor::of(1), Divisor::of(1), false};
    const int64_t token_each = (a.slots + store.token_blocks - 1) / store.token_blocks;
    const int64_t channel_each = (a.head_dim + store.channel_blocks - 1) / store.channel_blocks;
    const bool eights = channel_each % 8 == 0 && (store.bits == 8 || a.head_dim % 16 == 0);
    return {{store.scale, store.scale_type == UNICACHE_FLOAT16},
            store.scale_batch == 1,
            static_cast<unsigned>(a.kv_heads),
            static_cast<unsigned>(store.token_blocks),
            static_cast<unsigned>(store.channel_blocks),
            Divisor::of(token_each),
            Divisor::of(channel_each),
            eights};
}

Plan plan_of(const UnicacheAttention& a, int64_t blocks) {
    Plan plan{};
    plan.a = a;
    plan.rows = static_cast<unsigned>(a.group * a.queries);
    plan.lanes = 1;
    while (plan.lanes * CHANNELS < a.head_dim) plan.lanes *= 2;
    cut(plan, blocks);
    return plan;
}

}  // namespace

// Bytes; of the shapes alone, on any device, whether masses are wanted or not. 0 where the arguments are out of range.
extern "C" size_t unicache_quant_kv_attention_workspace(const UnicacheAttention* arguments) {
    if (!in_range(*arguments)) return 0;
    const Plan plan = plan_of(*arguments, MOST_BLOCKS);
    return sizeof(float) * static_cast<size_t>(sums_size(plan) + softmax_size(plan) + logits_size(plan));
}

// Pointers are to the device. Returns a cudaError_t: 0 where the work is on the stream, 1 (invalid value) where an
// argument is out of range.
extern "C" int unicache_quant_kv_attention(const UnicacheAttention* arguments, void* workspace, cudaStream_t stream) {
    constexpr int INVALID_VALUE = 1;
    const UnicacheAttention& a = *arguments;
    if (!in_range(a) || !in_place(a) || !workspace) return INVALID_VALUE;
    const int64_t blocks = static_cast<int64_t>(multiprocessors()) * BLOCKS_PER_MULTIPROCESSOR;
    Plan plan = plan_of(a, blocks < MOST_BLOCKS ? blocks : MOST_BLOCKS);
    plan.key = scales_of(a, a.key), plan.value = scales_of(a, a.value);
    plan.sums = static_cast<float*>(workspace);
    plan.softmax = plan.sums + sums_size(plan);
    const bool masses = a.store_mass || a.window_mass;
    if (masses) plan.logits = plan.softmax + softmax_size(plan);

    const unsigned heads = static_cast<unsigned>(a.batch * a.kv_heads), at_a_time = rows_at_a_time(a);
    if (plan.parts) {
        const dim3 grid((plan.rows + at_a_time - 1) / at_a_time, plan.parts, heads), block(THREADS);
        if (!wide(a)) SIMT_LAUNCH((attend_part<1, false>), grid, block, stream, plan);
        else if (at_a_time == 1) SIMT_LAUNCH((attend_part<1, true>), grid, block, stream, plan);
        else SIMT_LAUNCH((attend_part<4, true>), grid, block, stream, plan);
        if (int error = last_error()) return error;
    }
    const int64_t tokens = masses ? a.slots + a.window : 0;
    const dim3 grid(static_cast<unsigned>(plan.rows + (tokens + COMBINE_THREADS - 1) / COMBINE_THREADS), heads);
    SIMT_LAUNCH(combine_parts, grid, dim3(COMBINE_THREADS), stream, plan);
    return last_error();
}
