// Weights that the products of avx2.h take, on processors with AVX2 and FMA: each kind widens what it holds to fp32, eight at once.
//
// Panels of 32 outputs as linear.cpp and quantized.cpp say, of 16 in fp32: what two registers multiply lies side by side then.
#pragma once

#include <immintrin.h>

#include "products.h"

namespace {

constexpr int kWidth = 8;     // floats of a register
constexpr int kMostRows = 6;  // by two registers of outputs: twelve sums, two weights and an input are what there is room for

// Weights of one panel. ``at<k>`` gives those of input i + k and the outputs from ``first`` registers on; ``chunk`` says how many inputs
// are summed before their sum is added to a total, which ``join`` does where it is scaled then: those are kept in registers, others
// where the outputs come to. Of ``stretch`` inputs, whole chunks, the weights stay in the first-level cache while all rows use them.
// Rows that share them in registers are up to ``kMostRows``, and widen them for themselves; where there are more than ``kFewRows`` in all,
// these take what was widened once. What is a number as it is, and not scaled, shares these.
struct Unscaled {
    static constexpr bool kIsScaled = false;
    int64_t chunk() const { return kChunk; }
    int64_t stretch() const { return kChunk; }
    int64_t border(int64_t, int64_t I) const { return I; }
};

struct PlainFp32 : Unscaled {
    static constexpr int kTogether = 1;  // inputs side by side
    static constexpr int kMostRows = ::kMostRows;
    static constexpr int64_t kFewRows = kBlockRows;  // what is wide already is read where it lies
    static constexpr int64_t kOutputs = kPanel / 2;
    static constexpr int64_t kBytes = kOutputs * 4;  // of an input
    typedef float number;
    const number* panel;
    explicit PlainFp32(const number* packed) : panel(packed) {}
    template <int k, int H>
    void at(int64_t i, int first, __m256 (&out)[H]) const {
#pragma GCC unroll 4
        for (int h = 0; h < H; ++h) out[h] = _mm256_loadu_ps(panel + i * kOutputs + (first + h) * kWidth);
    }
};

struct PlainBf16 : Unscaled {
    static constexpr int kTogether = 2;
    static constexpr int kMostRows = 5;  // and a mask
    static constexpr int64_t kFewRows = 20;
    static constexpr int64_t kOutputs = kPanel;
    static constexpr int64_t kBytes = kPanel * 2;
    typedef uint16_t number;
    const number* panel;
    explicit PlainBf16(const number* packed) : panel(packed) {}
    template <int k, int H>
    void at(int64_t i, int first, __m256 (&out)[H]) const {
#pragma GCC unroll 4
        for (int h = 0; h < H; ++h) {
            const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(panel + i * kPanel + (first + h) * kWidth * 2));
            const __m256i wide = k == 0 ? _mm256_slli_epi32(pairs, 16) : _mm256_and_si256(pairs, _mm256_set1_epi32(int32_t(0xffff0000)));
            out[h] = _mm256_castsi256_ps(wide);
        }
    }
};

// What whole numbers of both forms share: the scales of their groups, [G, 32].
struct Scaled {
    const float* scales;
    int64_t group;
    int64_t chunk() const { return group < kChunk ? group : kChunk; }
    int64_t stretch() const { return group <= 2 * kChunk ? 2 * kChunk / group * group : group % kChunk ? group : 2 * kChunk; }
    int64_t border(int64_t begin, int64_t I) const {
        const int64_t next = (begin / group + 1) * group;
        return next < I ? next : I;
    }
    __m256 scale(int64_t i, int place) const { return _mm256_loadu_ps(scales + i / group * kPanel + place * kWidth); }
    __m256 join(__m256 total, __m256 sum, int64_t begin, int place) const {
        return _mm256_fmadd_ps(sum, scale(begin, place), total);
    }
};

template <int bits>
struct Whole : Scaled {
    static constexpr int kTogether = 1;
    static constexpr int kMostRows = bits == 8 ? ::kMostRows : 5;  // and two constants
    static constexpr int64_t kFewRows = bits == 8 ? 24 : 12;
    static constexpr int64_t kOutputs = kPanel;
    static constexpr int64_t kBytes = kPanel * bits / 8;
    static constexpr bool kIsScaled = true;
    const uint8_t* panel;
    Whole(const uint8_t* packed, const float* factors, int64_t inputs) : Scaled{factors, inputs}, panel(packed) {}
    template <int k, int H>
    void at(int64_t i, int first, __m256 (&out)[H]) const {
        const uint8_t* step = panel + i * kPanel * bits / 8;
#pragma GCC unroll 4
        for (int h = 0; h < H; ++h) {
            const int place = first + h;
            const uint8_t* from = bits == 8 ? step + place * kWidth : step + place % 2 * kWidth;
            const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
            if constexpr (bits == 8) {
                out[h] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
            } else {
                const __m256i wide = _mm256_cvtepu8_epi32(bytes);
                const __m256i number = place < 2 ? _mm256_and_si256(wide, _mm256_set1_epi32(15)) : _mm256_srli_epi32(wide, 4);
                out[h] = _mm256_cvtepi32_ps(_mm256_sub_epi32(number, _mm256_set1_epi32(8)));
            }
        }
    }
};

// Inputs of two registers of outputs, from ``from`` on, that were widened, and scaled.
struct Widened : Unscaled {
    static constexpr int kTogether = 1;
    static constexpr int64_t kOutputs = kPanel;
    typedef float Room[kChunk][2 * kWidth];  // half of the first-level cache
    const Room& room;
    int64_t from;
    Widened(const Room& widened, int64_t begin) : room(widened), from(begin) {}
    template <int k, int H>
    void at(int64_t i, int, __m256 (&out)[H]) const {
        static_assert(H == 2);
        for (int h = 0; h < H; ++h) out[h] = _mm256_load_ps(room[i - from] + h * kWidth);
    }
};

template <int k, typename Weights>
inline void widen_input(const Weights& weights, int64_t i, int first, [[maybe_unused]] const __m256 (&scales)[2], float* out) {
    __m256 w[2];
    weights.template at<k, 2>(i, first, w);
    for (int h = 0; h < 2; ++h) {
        if constexpr (Weights::kIsScaled) w[h] = _mm256_mul_ps(w[h], scales[h]);
        _mm256_store_ps(out + h * kWidth, w[h]);
    }
}

// Inputs [from, to) of I, for the outputs from ``first`` registers on.
template <typename Weights>
void widen(const Weights& weights, int64_t from, int64_t to, int64_t I, int first, Widened::Room& room) {
    for (int64_t i = from; i < to;) {
        const int64_t border = weights.border(i, I), end = border < to ? border : to;
        __m256 scales[2] = {};
        if constexpr (Weights::kIsScaled)
            for (int h = 0; h < 2; ++h) scales[h] = weights.scale(i, first + h);
        for (; i < end; i += Weights::kTogether) {
            widen_input<0>(weights, i, first, scales, room[i - from]);
            if constexpr (Weights::kTogether == 2) widen_input<1>(weights, i, first, scales, room[i + 1 - from]);
        }
    }
}

}  // namespace
