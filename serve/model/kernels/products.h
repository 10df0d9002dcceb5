// What the kernels of linear layers share: panels of outputs, the two types of numbers, and the activations on the way out.
#pragma once

#include <cstdint>
#include <cstring>

#include "vectors.h"
#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace {

constexpr int64_t kPanel = 32;
constexpr int kRows = 8;             // rows that share each weight while it is in a register
constexpr int64_t kBlockRows = 128;  // rows of one work item at most: their inputs stay in the second-level cache
constexpr int64_t kChunk = 256;      // inputs summed before their sum joins the total: rounding errors do not pile up
constexpr int64_t kLine = 64;        // bytes that memory gives at once

inline int64_t panels_of(int64_t outputs) { return (outputs + kPanel - 1) / kPanel; }

// M rows in blocks of the same height but for the last, each of whole groups of eight. A thread multiplies a block by one panel
// after the other: a block's inputs stay in its cache, where those of all rows would not.
struct Blocks {
    int64_t count, height;
    explicit Blocks(int64_t M, int64_t most = kBlockRows) : count((M + most - 1) / most), height(0) {
        if (count > 0) height = (M + count * kRows - 1) / (count * kRows) * kRows;
    }
};

constexpr int64_t kItemsPerThread = 8;  // at least, or smaller blocks are made

// Blocks for a weight whose panels are widened once for each.
inline Blocks blocks_for(int64_t M, int64_t I, int64_t panels, int threads) {
    int64_t most = (I <= 1024 ? 4 : 2) * kBlockRows;
    while (most > kBlockRows && Blocks(M, most).count * panels < kItemsPerThread * threads) most /= 2;
    return Blocks(M, most);
}

// Memory that is asked for while something else is computed, ``stride`` bytes on with every input or word of inputs; a line may be
// asked for more than once.
struct Ahead {
    const char* place;
    int64_t stride;  // 0: nothing is wanted, and ``place`` is there already
};

// What a group of eight rows asks for of the ``bytes`` of the panel behind its own: of as many groups each a share, spread over all
// its words of inputs. What is asked for in a burst comes no sooner, and the products would wait behind it for their own.
inline Ahead share_of(const void* behind, int64_t bytes, int64_t words, int64_t group, int64_t groups) {
    const int64_t stride = bytes / (words * groups);  // of narrow weights among many groups 0: they are soon read
    return {static_cast<const char*>(behind) + group * words * stride, stride};
}

// What is done to each output before it is stored: ``ACTIVATIONS`` of serve/model/linear.py.
enum Activation { kNone, kGelu, kGeluTanh, kSilu, kRelu };

// 1 / (1 + exp(-x)) without overflow on either side.
template <typename V>
inline V sigmoid(V x) {
    const V shrunk = quick_exp_nonpositive(x < 0.0f ? x : -x);
    return (x < 0.0f ? shrunk : filled<V>(1.0f)) / (shrunk + 1.0f);
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

#endif

// The normal distribution's mass below x, by erfc(a) = exp(-a Q(a)), a = |x| / sqrt(2). Q is a polynomial fitted for this file
// over [0, 5]: erfc within 5e-8; beyond, where it is below 2e-12, it is 0.
template <typename V>
inline V normal_mass(V x) {
#ifdef __AVX512F__
    if constexpr (kByScale<V>) return (V)normal_mass_by_scale((__m512)x);
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

template <typename V>
inline V activate(Activation activation, V x) {
    switch (activation) {
        case kGelu: return x * normal_mass(x);
        case kGeluTanh: return x * sigmoid(1.5957691216057308f * (x + 0.044715f * x * x * x));
        case kSilu: return x * sigmoid(x);
        case kRelu: return x < 0.0f ? filled<V>(0.0f) : x;
        case kNone: break;
    }
    return x;
}

#ifdef __AVX512F__

struct Fp32 {
    typedef float number;
    static constexpr int64_t kInputs = 1;  // inputs consumed by one multiply
    typedef __m512 lanes;  // weights of sixteen outputs
    static lanes weights_at(const number* weights) { return _mm512_loadu_ps(weights); }
    static __m512 multiply(__m512 sum, lanes weights, const number* x) { return _mm512_fmadd_ps(weights, _mm512_set1_ps(*x), sum); }
    static __m512 load(const number* source, __mmask16 lanes) { return _mm512_maskz_loadu_ps(lanes, source); }
    static void save(number* target, __m512 sum, __mmask16 lanes) { _mm512_mask_storeu_ps(target, lanes, sum); }
};

#if defined(__AVX512BW__) && defined(__AVX512VL__)
#define TESSERA_BF16_LANES

struct Bf16 {
    typedef uint16_t number;
    static constexpr int64_t kInputs = 2;
    typedef __m512i lanes;
    static lanes weights_at(const number* weights) { return _mm512_loadu_si512(weights); }
#ifdef __AVX512BF16__
    static __m512 multiply(__m512 sum, lanes weights, const number* x) {
        int32_t pair;
        std::memcpy(&pair, x, 4);
        return _mm512_dpbf16_ps(sum, (__m512bh)weights, (__m512bh)_mm512_set1_epi32(pair));
    }
    static __m256i round(__m512 x) { return (__m256i)_mm512_cvtneps_pbh(x); }
#else
    // Without an instruction for it: a bf16 number is the upper half of an fp32 one, so a shift or a mask makes it one.
    static __m512 multiply(__m512 sum, lanes both, const number* x) {
        uint32_t pair;
        std::memcpy(&pair, x, 4);
        const __m512 even = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
        const __m512 odd = _mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32(int32_t(0xffff0000u))));
        sum = _mm512_fmadd_ps(even, _mm512_castsi512_ps(_mm512_set1_epi32(int32_t(pair << 16))), sum);
        return _mm512_fmadd_ps(odd, _mm512_castsi512_ps(_mm512_set1_epi32(int32_t(pair & 0xffff0000u))), sum);
    }
    // To the nearest, in the middle to the even one; what is no number stays none, whichever of its bits are set.
    static __m256i round(__m512 x) {
        const __m512i bits = _mm512_castps_si512(x), upper = _mm512_srli_epi32(bits, 16);
        const __m512i is_odd = _mm512_and_si512(upper, _mm512_set1_epi32(1));
        __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(is_odd, _mm512_set1_epi32(0x7fff))), 16);
        rounded = _mm512_mask_or_epi32(rounded, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), upper, _mm512_set1_epi32(0x40));
        return _mm512_cvtepi32_epi16(rounded);
    }
#endif
    static __m512 load(const number* source, __mmask16 lanes) {
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, source)), 16));
    }
    static void save(number* target, __m512 sum, __mmask16 lanes) { _mm256_mask_storeu_epi16(target, lanes, round(sum)); }
};
#endif

#endif

}  // namespace
