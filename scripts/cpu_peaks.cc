// What binds decode attention on an x86 processor with AVX2, in its own cycles: how many an instruction takes where
// many start one after another, and what that makes of a token's 512 multiply-adds (four query heads of 64 channels,
// keys and values).
//
//   g++ -O2 scripts/cpu_peaks.cc -o peaks && ./peaks
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <x86intrin.h>

namespace {

constexpr int TURNS = 2000, RUNS = 500;  // short turns: the fastest was not disturbed
constexpr double MULTIPLY_ADDS = 512;
alignas(64) char memory[512];

#define REGISTERS \
    "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "memory"
#define EIGHT(x) x("0") x("1") x("2") x("3") x("4") x("5") x("6") x("7")
#define LOOP(body)                                                                                               \
    [] {                                                                                                         \
        long turns = TURNS;                                                                                      \
        asm volatile(".p2align 6\n1:\n" body "dec %0\njnz 1b" : "+r"(turns) : "r"(memory) : "cc", REGISTERS);    \
    }

template <class Run>
double least(const Run& run) {
    unsigned long long best = ~0ull;
    for (int i = 0; i < RUNS; i++) {
        const unsigned long long start = __rdtsc();
        run();
        const unsigned long long taken = __rdtsc() - start;
        if (taken < best) best = taken;
    }
    return best;
}

}  // namespace

int main() {
    const double cycle = least(LOOP("")) / TURNS;  // an empty loop takes one a turn; the counter has a clock of its own
    const auto show = [&](const char* name, double ticks, double at_once) {
        const double cycles = ticks / cycle / TURNS / 8;
        std::printf("| %-39s | %6.2f |", name, cycles);
        std::printf(at_once ? " %6.0f |\n" : "        |\n", MULTIPLY_ADDS / at_once * cycles);
    };
    std::puts("| instruction                             | cycles | cycles a token |\n|---|---|---|");
#define FMA(n) "vfmadd231ps %%ymm10, %%ymm11, %%ymm" n "\n"
#define WORDS(n) "vpmaddwd %%ymm10, %%ymm11, %%ymm" n "\n"
#define BYTES(n) "vpmaddubsw %%ymm10, %%ymm11, %%ymm" n "\n"
#define WIDEN(n) "vpmovsxbd (%1), %%ymm" n "\n"
#define WIDEN_HALF(n) "vpmovsxbd (%1), %%xmm" n "\n"
#define CONVERT(n) "vcvtdq2ps %%ymm11, %%ymm" n "\n"
#define CONVERT_HALF(n) "vcvtdq2ps %%xmm11, %%xmm" n "\n"
#define ROWS(a, b, c, d)                                                                    \
    "vpmovsxbd (%1), %%ymm11\nvcvtdq2ps %%ymm11, %%ymm11\n" FMA(a) FMA(b) FMA(c) FMA(d)
#define ROWS_TWICE ROWS("0", "1", "2", "3") ROWS("4", "5", "6", "7")
    show("vfmadd231ps, 8 floats", least(LOOP(EIGHT(FMA))), 8);
    show("the same with codes that become floats", least(LOOP(ROWS_TWICE ROWS_TWICE ROWS_TWICE ROWS_TWICE)) / 4, 8);
    show("vpmaddwd, 16 numbers of 16 bits", least(LOOP(EIGHT(WORDS))), 16);
    show("vpmaddubsw, 32 digits of 7 bits", least(LOOP(EIGHT(BYTES))), 32);
    show("vpmovsxbd, 8 codes", least(LOOP(EIGHT(WIDEN))), 0);
    show("vpmovsxbd, 4 codes", least(LOOP(EIGHT(WIDEN_HALF))), 0);
    show("vcvtdq2ps, 8 codes", least(LOOP(EIGHT(CONVERT))), 0);
    show("vcvtdq2ps, 4 codes", least(LOOP(EIGHT(CONVERT_HALF))), 0);

    constexpr size_t bytes = 64 << 20, some = 1 << 18;
    char* const all = static_cast<char*>(std::aligned_alloc(64, bytes));
    if (!all) return 1;
    std::memset(all, 1, bytes);
    double read = 1e30;
    for (const char* from = all; from < all + bytes; from += some) {
        const unsigned long long start = __rdtsc();
        for (const char* at = from; at < from + some; at += 64)
            asm volatile("prefetcht0 1024(%0)\nvmovaps (%0), %%ymm0\nvmovaps 32(%0), %%ymm1" ::"r"(at) : REGISTERS);
        const double taken = static_cast<double>(__rdtsc() - start);
        if (taken < read) read = taken;
    }
    read *= 128. / some / cycle;
    std::printf("| %-39s | %6.2f | %6.0f |\n", "memory, 128 bytes: a token's codes", read, read);
    std::free(all);
}
