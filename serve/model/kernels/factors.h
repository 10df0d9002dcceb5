// What blocked attention multiplies, and in which pieces: the widths of registers and tiles, single numbers, pairs of bf16.
#pragma once

#include "vectors.h"
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

// Floats of a register, and how many sums of rows times registers leave room for what they are made of.
#ifndef TESSERA_WIDTH
#if defined(__AVX512F__)
#define TESSERA_WIDTH 16
#elif defined(__AVX__)
#define TESSERA_WIDTH 8
#else
#define TESSERA_WIDTH 4
#endif
#endif
#if defined(__AVX512BF16__) && !defined(TESSERA_PAIRS)
#define TESSERA_PAIRS
#endif
constexpr int kWidth = TESSERA_WIDTH;
constexpr int kMostSums = kWidth == 16 ? 24 : 12;

typedef float wide __attribute__((vector_size(4 * kWidth)));
typedef int32_t iwide __attribute__((vector_size(4 * kWidth)));

constexpr float kLowest = -3.0e38f;
constexpr int kTile = 64;
constexpr int kPart = 16;
constexpr int kParts = kTile / kPart;
constexpr int kLineBytes = 64;
constexpr int kVectors = kPart / kWidth;              // registers of a part's keys
constexpr int kPanelRows = kMostSums / (kWidth == 16 ? 2 : kVectors);
// With few rows, parts and columns are taken side by side so that enough additions are under way.
constexpr int together(int rows, int most) {
    int parts = 1;
    while (parts < most && rows * parts * 2 * kVectors <= kMostSums) parts *= 2;
    return parts;
}

inline wide load_wide(const float* source) { return load_as<wide>(source); }
inline wide load_wide(const bf16* source) {
#if defined(__AVX512F__) && TESSERA_WIDTH == 16
    return (wide)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(source))), 16);
#elif defined(__AVX2__) && TESSERA_WIDTH == 8
    return (wide)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source))), 16);
#else
    wide out;
    for (int i = 0; i < kWidth; ++i) out[i] = to_float(source[i]);
    return out;
#endif
}
inline wide load_wide(const int8_t* source) {
#if defined(__AVX512F__) && TESSERA_WIDTH == 16
    return (wide)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source))));
#elif defined(__AVX2__) && TESSERA_WIDTH == 8
    return (wide)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(source))));
#else
    wide out;
    for (int i = 0; i < kWidth; ++i) out[i] = float(source[i]);
    return out;
#endif
}

// What is multiplied, and in which pieces. A word holds kInputs neighbouring features of a query, or weights of neighbouring keys.
template <typename type>
struct Single {
    typedef type stored;
    typedef float word;
    typedef wide factors;
    static constexpr int kInputs = 1;
    static void narrow(float*, int) {}
    static void keep(wide weights, float* row, int place) { save_as(weights, row + place); }
    template <typename scalar>
    static float word_at(const scalar* features) { return to_float(*features); }
    static factors keys(const stored* feature, int v) { return load_wide(feature + v * kWidth); }
    static factors values(const stored* row, int64_t) { return load_wide(row); }
    static factors only(factors row, int) { return row; }
    static wide add(wide sum, factors row, word by) { return sum + row * by; }
};

#ifdef TESSERA_PAIRS
static_assert(kWidth == 16, "pairs of bf16 numbers are multiplied sixteen at once");

// Products of bf16 numbers, two of which are added at once: the queries are rounded to bf16 as the model's own would be, the weights too.
struct Pairs {
    typedef bf16 stored;
    typedef uint32_t word;
    typedef uint16_t factors __attribute__((vector_size(64)));
    static constexpr int kInputs = 2;
    static word word_at(const bf16* features) {
        word pair;
        std::memcpy(&pair, features, sizeof(pair));
        return pair;
    }
    // Sixteen numbers from ``place`` on, among words that begin where the numbers do.
    static void keep(wide weights, float* row, int place) {
        uint16_t* words = reinterpret_cast<uint16_t*>(row) + place;
#ifdef __AVX512BF16__
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(words), (__m256i)_mm512_cvtneps_pbh((__m512)weights));
#else
        bf16 out[kWidth];
        for (int k = 0; k < kWidth; ++k) from_float(weights[k], out[k]);
        std::memcpy(words, out, sizeof(out));
#endif
    }
    // Numbers to words in their place, sixteen at once.
    static void narrow(float* numbers, int count) {
        for (int i = 0; i < count; i += kWidth) keep(load_wide(numbers + i), numbers, i);
    }
    static factors side_by_side(factors rows) {  // rows: sixteen numbers of one, then sixteen of the next
        const factors order = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23,
                               8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
        return __builtin_shuffle(rows, order);
    }
    static factors keys(const stored* feature, int) {
        factors rows;
        std::memcpy(&rows, feature, sizeof(rows));
        return side_by_side(rows);
    }
    static factors values(const stored* row, int64_t width) {
#ifdef __AVX512F__
        // In registers: halves that are stored one after the other cannot be loaded as one before both have reached the cache.
        const __m256i first = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row));
        const __m256i second = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + width));
        return side_by_side((factors)_mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1));
#else
        factors rows;
        std::memcpy(&rows, row, 32);
        std::memcpy(reinterpret_cast<char*>(&rows) + 32, row + width, 32);
        return side_by_side(rows);
#endif
    }
    // Those of the first row, or of the second, alone.
    static factors only(factors row, int which) {
        const iwide kept = iwide{} + int32_t(which ? 0xffff0000u : 0x0000ffffu);
        return (factors)((iwide)row & kept);
    }
    static wide add(wide sum, factors row, word by) {
#ifdef __AVX512BF16__
        return (wide)_mm512_dpbf16_ps((__m512)sum, (__m512bh)row, (__m512bh)_mm512_set1_epi32(int32_t(by)));
#else
        const iwide both = (iwide)row, upper = iwide{} + int32_t(0xffff0000u);
        return sum + (wide)(both << 16) * to_float(bf16{uint16_t(by)}) + (wide)(both & upper) * to_float(bf16{uint16_t(by >> 16)});
#endif
    }
};
#endif

}  // namespace
