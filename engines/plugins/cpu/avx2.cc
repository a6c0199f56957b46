// The path for AVX2, FMA and F16C.
#if defined(__x86_64__)
#include <immintrin.h>
#include <stdint.h>

#include "attention.h"

namespace {

constexpr int LANES = 8, ROWS = 2, DIRECT = 2;
typedef float Vec __attribute__((vector_size(32)));  // not __m256, arrays of which GCC keeps in memory

INLINE Vec load(const float* from) { return _mm256_loadu_ps(from); }
INLINE void store(float* to, Vec x) { _mm256_storeu_ps(to, x); }
INLINE Vec fill(float x) { return _mm256_set1_ps(x); }
INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
INLINE Vec maximum(Vec a, Vec b) { return _mm256_max_ps(a, b); }
INLINE Vec nearest(Vec x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE Vec scale(Vec x, Vec n) {
    const __m256i power = _mm256_max_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), __m256i{});
    return x * _mm256_castsi256_ps(_mm256_slli_epi32(power, 23));
}
INLINE float top(Vec x) {
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}
template <int N>
INLINE void sums(const Vec (&x)[N][4], float* out, int64_t stride) {
    for (int n = 0; n < N; n++) {
        const Vec halves = _mm256_hadd_ps(_mm256_hadd_ps(x[n][0], x[n][1]), _mm256_hadd_ps(x[n][2], x[n][3]));
        _mm_storeu_ps(out + n * stride, _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1)));
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

#include "attention_path.h"

const unicache::Path unicache::avx2 = {attend<Queries>, finish};
#endif
