// What the kernels of linear layers share: panels of outputs, and the two types of numbers.
#pragma once

#include <cstdint>
#include <cstring>

#include "activations.h"
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
