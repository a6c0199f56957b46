// TopKGather on a CPU. The k-th largest score is found a digit of its 8 bits at a time, without sorting, as in
// topk_gather.cu; a first reading counts digits, the last one keeps.
#include <cstring>

#include "cpu.h"

namespace {

constexpr int DIGIT = 8, BINS = 1 << DIGIT, TENSORS = 4;
constexpr int64_t WORTH_THREADS = 1 << 16;  // scores: fewer take less time than waking a thread

// Integers in the order of the floats: the zeros are equal, NaN of either sign is above all.
uint32_t ordered(float score) {
    uint32_t bits;
    std::memcpy(&bits, &score, sizeof bits);
    const uint32_t magnitude = bits << 1;
    if (magnitude > 0xff000000u) return 0xffffffffu;
    if (magnitude == 0) bits = 0;
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

struct Arguments {
    const float* score;
    const UnicacheRows* rows;
    int64_t *index, tokens, k;
};

void gather(void* data, size_t head) {
    const Arguments& a = *static_cast<const Arguments*>(data);
    const float* score = a.score + head * a.tokens;
    int64_t* index = a.index + head * a.k;
    uint32_t threshold = 0;
    int64_t left = a.k;  // how many are kept of the tokens that agree with the digits found so far
    for (int shift = 32 - DIGIT; shift >= 0; shift -= DIGIT) {
        int64_t count[BINS] = {}, bin = BINS - 1;
        for (int64_t i = 0; i < a.tokens; i++) {
            const uint32_t key = ordered(score[i]);
            if (static_cast<uint64_t>(key ^ threshold) >> (shift + DIGIT) == 0) count[key >> shift & (BINS - 1)]++;
        }
        while (count[bin] < left) left -= count[bin--];
        threshold |= static_cast<uint32_t>(bin) << shift;
    }
    int64_t kept = 0;
    for (int64_t i = 0; i < a.tokens; i++) {
        const uint32_t key = ordered(score[i]);
        if (key > threshold || (key == threshold && left-- > 0)) index[kept++] = i;
    }
    for (int t = 0; t < TENSORS; t++) {
        const int64_t bytes = a.rows[t].bytes;
        const char* source = static_cast<const char*>(a.rows[t].source) + head * a.tokens * bytes;
        char* target = static_cast<char*>(a.rows[t].target) + head * a.k * bytes;
        for (int64_t i = 0; i < a.k; i++) std::memcpy(target + i * bytes, source + index[i] * bytes, bytes);
    }
}

}  // namespace

int unicache_cpu_topk_gather(const float* score, const UnicacheRows* rows, int64_t* index, int64_t heads,
                             int64_t tokens, int64_t k, const UnicacheThreads* threads) {
    if (k < 0 || k > tokens) return UNICACHE_INVALID;
    if (k == 0) return 0;
    Arguments arguments{score, rows, index, tokens, k};
    if (threads && heads * tokens >= WORTH_THREADS) return threads->run(threads->context, gather, heads, &arguments);
    for (int64_t head = 0; head < heads; head++) gather(&arguments, head);
    return 0;
}
