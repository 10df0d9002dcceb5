// Vectors of sixteen floats and 16-bit floats, for the kernels beside this file.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <type_traits>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace {

struct bf16 {
    uint16_t bits;
};

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) {
    uint32_t wide = uint32_t(x.bits) << 16;
    float out;
    std::memcpy(&out, &wide, 4);
    return out;
}
// A block's numbers as fp32: in place for fp32, widened into scratch for others. A loop of its own, so that it becomes vector code.
inline const float* widen(const float* source, float*, int64_t) { return source; }
inline const float* widen(const bf16* source, float* scratch, int64_t count) {
    uint32_t* wide = reinterpret_cast<uint32_t*>(scratch);
    for (int64_t i = 0; i < count; ++i) wide[i] = uint32_t(source[i].bits) << 16;
    return scratch;
}
inline const float* widen(const int8_t* source, float* scratch, int64_t count) {
    for (int64_t i = 0; i < count; ++i) scratch[i] = float(source[i]);
    return scratch;
}
inline void from_float(float x, float& out) { out = x; }
inline void from_float(float x, bf16& out) {
    uint32_t wide;
    std::memcpy(&wide, &x, 4);
    // Round to nearest even; a NaN stays one.
    out.bits = std::isnan(x) ? uint16_t(0x7fc0) : uint16_t((wide + 0x7fffu + ((wide >> 16) & 1u)) >> 16);
}

// Sixteen floats at once; the compiler maps them to whatever vectors the processor has.
constexpr int kLanes = 16;
typedef float vec __attribute__((vector_size(64)));

// Vectors of any size.
template <typename V>
inline V load_as(const float* source) {
    V out;
    std::memcpy(&out, source, sizeof(out));
    return out;
}
template <typename V>
inline void save_as(V value, float* target) {
    std::memcpy(target, &value, sizeof(value));
}
template <typename V>
inline V filled(float x) {
    return x - V{};
}

// exp(x) for x <= 0, relative error about 2e-7: 2^n times a polynomial of the remainder (Cephes' coefficients).
template <typename V>
__attribute__((always_inline)) inline V exp_nonpositive(V x) {
    typedef decltype(x < x) I;  // whole numbers of the same size
    x = x < filled<V>(-87.0f) ? filled<V>(-87.0f) : x;
    const V magic = filled<V>(12582912.0f);  // 1.5 * 2^23: adding it rounds to the nearest integer
    const V n = (x * 1.44269504088896341f + magic) - magic;
    const V r = x - n * 0.693359375f + n * 2.12194440e-4f;
    V p = filled<V>(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    const I bits = (__builtin_convertvector(n, I) + 127) << 23;
    V scale;
    std::memcpy(&scale, &bits, sizeof(scale));
    return p * scale;
}
inline float exp_nonpositive(float x) { return exp_nonpositive(filled<vec>(x))[0]; }

#ifdef __AVX512F__

// Whether a processor's own instructions round and scale such vectors.
template <typename V>
constexpr bool kByScale = sizeof(V) == 64 && std::is_same_v<decltype(V{}[0] + 0.0f), float>;

// 2^(n + r), r in [-1/2, 1/2], relative error 1e-7. 2^r is a polynomial that was fitted for this file, within 2e-9, and 1 at 0.
inline __m512 two_to(__m512 n, __m512 r) {
    __m512 p = _mm512_set1_ps(1.5353360504e-4f);
    for (const float next : {1.3398875017e-3f, 9.6184369177e-3f, 5.5503323674e-2f, 2.4022647738e-1f, 6.9314718246e-1f, 1.0f})
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(next));
    return _mm512_scalef_ps(p, n);
}
// The same in fewer instructions, relative error 4e-6.
inline __m512 nearly_two_to(__m512 n, __m512 r) {
    __m512 p = _mm512_set1_ps(9.5828530e-3f);
    for (const float next : {5.5906425e-2f, 2.4024099e-1f, 6.9312419e-1f, 1.0f}) p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(next));
    return _mm512_scalef_ps(p, n);
}
inline __m512 nearest_whole(__m512 x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

#else

template <typename V>
constexpr bool kByScale = false;

#endif

// As ``exp_nonpositive``, in half as many instructions where the processor has them: relative error 2e-7 near 0, 1.3e-6 at -87.
// ``is_rounded``: to be made a bf16 number, so that 4e-6 does, too.
template <bool is_rounded = false, typename V>
inline V quick_exp_nonpositive(V x) {
#ifdef __AVX512F__
    if constexpr (kByScale<V>) {
        const __m512 base = _mm512_set1_ps(1.44269504088896341f);
        const __m512 kept = _mm512_max_ps(_mm512_set1_ps(-87.0f), (__m512)x);  // in this order NaN stays
        const __m512 n = nearest_whole(_mm512_mul_ps(kept, base)), r = _mm512_fmsub_ps(kept, base, n);
        return (V)(is_rounded ? nearly_two_to(n, r) : two_to(n, r));
    }
#endif
    return exp_nonpositive(x);
}

// tanh(x), relative error about 3e-7: by exp where it is far from 0, by its series where that difference would cancel.
template <typename V>
inline V tanh_of(V x) {
    const V size = x < filled<V>(0.0f) ? -x : x;
    const V e = exp_nonpositive(-2.0f * size);
    const V far = (1.0f - e) / (1.0f + e);
    const V square = size * size;
    V p = filled<V>(62.0f / 2835.0f);
    p = p * square - 17.0f / 315.0f;
    p = p * square + 2.0f / 15.0f;
    p = p * square - 1.0f / 3.0f;
    p = p * square + 1.0f;
    const V out = size < filled<V>(0.25f) ? p * size : far;
    return x < filled<V>(0.0f) ? -out : out;
}

}  // namespace
