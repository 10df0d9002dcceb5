// What is done to each output of a product before it is stored.
//
// An output that becomes a bf16 number next has eight bits left. ``is_rounded`` says so: then it is made in
// fewer instructions, where the processor has them, with an error of less than a tenth of the last of them.
#pragma once

#include <cmath>

#include "vectors.h"
#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace {

// ``ACTIVATIONS`` of serve/model/linear.py.
enum Activation { kNone, kGelu, kGeluTanh, kSilu, kRelu };

// 1 / (1 + exp(-x)) without overflow on either side. Where it is rounded, within 1e-4 of itself.
template <bool is_rounded, typename V>
inline V sigmoid(V x) {
    const V shrunk = quick_exp_nonpositive<is_rounded>(x < 0.0f ? x : -x), upper = x < 0.0f ? shrunk : filled<V>(1.0f);
#ifdef __AVX512F__
    if constexpr (is_rounded && kByScale<V>) return upper * (V)_mm512_rcp14_ps((__m512)(shrunk + 1.0f));
#endif
    return upper / (shrunk + 1.0f);
}

#ifdef __AVX512F__

// As ``normal_mass`` below: half of erfc(a) = 2^(-|x| R(|x|) - 1), where R is Q with its coefficients in powers of |x| and of 2.
inline __m512 normal_mass_by_scale(__m512 x) {
    const __m512 most = _mm512_set1_ps(7.0710678f), size = _mm512_abs_ps(x), t = _mm512_min_ps(most, size);  // NaN stays
    __m512 q = _mm512_set1_ps(2.3288804e-08f);
    for (const float next : {-7.4250545e-07f, 9.9807949e-06f, -7.2016257e-05f, 2.6781438e-04f, 1.9808094e-05f, -6.9677294e-03f,
                             5.2454200e-02f, 4.5921680e-01f, 1.1511047f})
        q = _mm512_fmadd_ps(q, t, _mm512_set1_ps(next));
    const __m512 one = _mm512_set1_ps(1.0f), power = _mm512_fnmsub_ps(t, q, one), n = nearest_whole(power);
    const __mmask16 is_far = _mm512_cmp_ps_mask(size, most, _CMP_GT_OQ);
    const __m512 tail = _mm512_mask_mov_ps(two_to(n, _mm512_sub_ps(power, n)), is_far, _mm512_setzero_ps());
    return _mm512_mask_sub_ps(tail, _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_NLT_UQ), one, tail);
}

// The normal distribution's mass beyond t >= 0 as polynomials of degree 3, one for each of so many pieces around multiples of
// ``kWidth``: each meets it in its four Chebyshev points. Relative error below 3e-5 up to 3, 6e-4 at the end; the last piece is 0.
class NormalTail {
public:
    static constexpr int kPieces = 32;
    static constexpr float kWidth = 0.1875f;

    NormalTail() {
        for (int piece = 0; piece < kPieces - 1; ++piece) {
            double place[4], slope[4], powers[4] = {};
            for (int j = 0; j < 4; ++j) {
                place[j] = std::cos(std::acos(-1.0) * (2 * j + 1) / 8) / 2;
                slope[j] = std::erfc((piece + place[j]) * double(kWidth) / std::sqrt(2.0)) / 2;
            }
            for (int order = 1; order < 4; ++order)
                for (int j = 3; j >= order; --j) slope[j] = (slope[j] - slope[j - 1]) / (place[j] - place[j - order]);
            for (int j = 3; j >= 0; --j) {  // what there is by now, times (r - place[j]), and slope[j]
                for (int k = 3; k > 0; --k) powers[k] = powers[k - 1] - place[j] * powers[k];
                powers[0] = slope[j] - place[j] * powers[0];
            }
            for (int k = 0; k < 4; ++k) by_power_[k][piece] = float(powers[k]);
        }
    }

    // For each of sixteen pieces, as the low bits of their numbers say: the coefficient of a power.
    __m512 of(int power, __m512i pieces) const {
        return _mm512_permutex2var_ps(_mm512_load_ps(by_power_[power]), pieces, _mm512_load_ps(by_power_[power] + 16));
    }

private:
    alignas(64) float by_power_[4][kPieces] = {};
};
const NormalTail kNormalTail;

inline __m512 normal_mass_by_pieces(__m512 x) {
    const __m512 most = _mm512_set1_ps((NormalTail::kPieces - 1) * NormalTail::kWidth), t = _mm512_min_ps(most, _mm512_abs_ps(x));  // NaN stays
    const __m512 in_pieces = _mm512_set1_ps(1.0f / NormalTail::kWidth), magic = _mm512_set1_ps(12582912.0f);  // 1.5 * 2^23
    const __m512 rounded = _mm512_fmadd_ps(t, in_pieces, magic), r = _mm512_fmsub_ps(t, in_pieces, _mm512_sub_ps(rounded, magic));
    const __m512i pieces = _mm512_castps_si512(rounded);
    __m512 tail = kNormalTail.of(3, pieces);
    for (const int power : {2, 1, 0}) tail = _mm512_fmadd_ps(tail, r, kNormalTail.of(power, pieces));
    return _mm512_mask_sub_ps(tail, _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_NLT_UQ), _mm512_set1_ps(1.0f), tail);
}

#endif

// The normal distribution's mass below x, by erfc(a) = exp(-a Q(a)), a = |x| / sqrt(2). Q is a polynomial fitted for this file
// over [0, 5]: erfc within 5e-8; beyond, where it is below 2e-12, it is 0.
template <bool is_rounded, typename V>
inline V normal_mass(V x) {
#ifdef __AVX512F__
    if constexpr (kByScale<V>) return (V)(is_rounded ? normal_mass_by_pieces((__m512)x) : normal_mass_by_scale((__m512)x));
#endif
    const V whole = (x < 0.0f ? -x : x) * 0.70710678118654752f;
    const V a = whole > 5.0f ? filled<V>(5.0f) : whole;
    V q = filled<V>(5.165622e-07f);
    q = q * a - 1.1645552e-05f;
    q = q * a + 1.1069056e-04f;
    q = q * a - 5.6475616e-04f;
    q = q * a + 1.4850782e-03f;
    q = q * a + 7.7668185e-05f;
    q = q * a - 1.9318648e-02f;
    q = q * a + 1.0283731e-01f;
    q = q * a + 6.3660970e-01f;
    q = q * a + 1.1283797f;
    const V half_tail = whole > 5.0f ? filled<V>(0.0f) : exp_nonpositive(-a * q) * 0.5f;
    return x < 0.0f ? half_tail : 1.0f - half_tail;
}

template <bool is_rounded = false, typename V>
inline V activate(Activation activation, V x) {
    switch (activation) {
        case kGelu: return x * normal_mass<is_rounded>(x);
        case kGeluTanh: return x * sigmoid<is_rounded>(1.5957691216057308f * (x + 0.044715f * x * x * x));
        case kSilu: return x * sigmoid<is_rounded>(x);
        case kRelu: return x < 0.0f ? filled<V>(0.0f) : x;
        case kNone: break;
    }
    return x;
}

}  // namespace
