// The path for AVX2, FMA and F16C. Its 16 registers hold the sums of four rows and two tokens, or of
// four rows and two vectors of channels. Codes are multiplied as whole numbers (avx2_words.h) where that is possible.
#if defined(__x86_64__)
#include <immintrin.h>
#include <stdint.h>

#include "attention.h"

namespace {

constexpr int LANES = 8, ROWS = 4, DIRECT = 4, KEPT = 8;
typedef float Vec __attribute__((vector_size(32)));  // not __m256, arrays of which GCC keeps in memory
constexpr float WHOLE = 12582912;                    // 1.5 * 2^23, where floats are whole numbers

INLINE Vec load(const float* from) { return _mm256_loadu_ps(from); }
INLINE void store(float* to, Vec x) { _mm256_storeu_ps(to, x); }
INLINE Vec fill(float x) { return _mm256_set1_ps(x); }
INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
INLINE Vec maximum(Vec a, Vec b) { return _mm256_max_ps(a, b); }
INLINE Vec nearest(Vec x) { return x + fill(WHOLE) - fill(WHOLE); }
INLINE Vec scale(Vec x, Vec n) {
    const Vec power = maximum(fill(-127), n) + fill(WHOLE + 127);
    return x * (Vec)_mm256_slli_epi32((__m256i)power, 23);
}
INLINE float top(Vec x) {
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}
// [a0 + a2, a1 + a3, b0 + b2, b1 + b3] of each half.
template <class T>
INLINE T of_pairs(T a, T b) {
    return (T)_mm256_shuffle_ps((Vec)a, (Vec)b, 0x4e) + (T)_mm256_blend_ps((Vec)a, (Vec)b, 0xcc);
}
// Of each half the sums of a, b, c and d.
template <class T>
INLINE T of_halves(T a, T b, T c, T d) {
    const Vec ab = (Vec)of_pairs(a, b), cd = (Vec)of_pairs(c, d);
    return (T)_mm256_shuffle_ps(ab, cd, 0x88) + (T)_mm256_shuffle_ps(ab, cd, 0xdd);
}
INLINE __m128 sums_of_four(Vec a, Vec b, Vec c, Vec d) {
    const Vec all = of_halves(a, b, c, d);
    return _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
}
template <int N, int T>
INLINE void sums(const Vec (&x)[N][T], float* out, int64_t stride) {
    if constexpr (T == 4) {
        for (int n = 0; n < N; n++)
            _mm_storeu_ps(out + n * stride, sums_of_four(x[n][0], x[n][1], x[n][2], x[n][3]));
    } else {  // two tokens of two rows at a time
        for (int n = 0; n < N; n += 2) {
            const int other = n + 1 < N ? n + 1 : n;
            const __m128 all = sums_of_four(x[n][0], x[n][1], x[other][0], x[other][1]);
            _mm_storel_pi(reinterpret_cast<__m64*>(out + n * stride), all);
            _mm_storeh_pi(reinterpret_cast<__m64*>(out + other * stride), all);
        }
    }
}
INLINE __m256i widened(const int8_t* from) {
    return _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
}
INLINE Vec codes8(const int8_t* from) { return _mm256_cvtepi32_ps(widened(from)); }
INLINE void codes4(const int8_t* from, Vec& low, Vec& high) {
    const __m256i bytes = widened(from);
    low = _mm256_cvtepi32_ps(_mm256_sub_epi32(_mm256_and_si256(bytes, _mm256_set1_epi32(15)), _mm256_set1_epi32(8)));
    high = _mm256_cvtepi32_ps(_mm256_srai_epi32(bytes, 4));
}
INLINE Vec halves(const uint16_t* from) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
INLINE void to_halves(uint16_t* to, Vec x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}

}  // namespace

#include "avx2_words.h"

#include "attention_path.h"
#include "row_matmul_path.h"

const unicache::Path unicache::avx2 = {attend<Numbers>, finish, multiply};
#endif
