// How weights of linear layers come to lie in panels, whichever way they lie in a file: a word at a time is moved, of one number of
// fp32 or two neighbouring ones of bf16.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>

#include "products.h"

namespace {

// Memory of one thread, which begins with a line and is kept for the next time.
class Scratch {
public:
    char* of(int64_t bytes) {
        if (bytes > bytes_) {
            memory_.reset(new char[size_t(bytes + kLine)]);
            bytes_ = bytes;
        }
        return memory_.get() + (-reinterpret_cast<uintptr_t>(memory_.get()) & uintptr_t(kLine - 1));
    }

private:
    std::unique_ptr<char[]> memory_;
    int64_t bytes_ = 0;
};

constexpr int64_t kWord = 4;

// Words [from, to) of the rows of one panel of so many outputs, wherever they lie. ``stride``: bytes from a plain row to the next.
template <int64_t width>
void pack_words(const char* plain, int64_t stride, char* panel, int64_t rows, int64_t from, int64_t to) {
    for (int64_t o = 0; o < rows; ++o)
        for (int64_t w = from; w < to; ++w) std::memcpy(panel + (w * width + o) * kWord, plain + o * stride + w * kWord, kWord);
}

#if defined(__AVX512F__)

constexpr int64_t kSquare = 16;

// 16 words of 16 rows that are ``stride`` bytes apart, transposed in registers: each line of memory is written once, whole. What is
// read next lies ``ahead`` bytes behind.
template <int64_t width>
void pack_square(const char* plain, int64_t stride, char* panel, int64_t ahead) {
    __m512i r[16], t[16];
    for (int i = 0; i < 16; ++i) {
        r[i] = _mm512_loadu_si512(plain + i * stride);
        _mm_prefetch(plain + i * stride + ahead, _MM_HINT_T1);
    }
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int i = 0; i < 4; ++i) {  // r[4 g + i] holds word i of each quarter, of rows 4 g to 4 g + 3
        t[i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88);
        t[4 + i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xdd);
        t[8 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x88);
        t[12 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xdd);
    }
    for (int i = 0; i < 4; ++i) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0x88);
        r[8 + i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0xdd);
        r[4 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0x88);
        r[12 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0xdd);
    }
    for (int w = 0; w < 16; ++w) _mm512_storeu_si512(panel + w * width * kWord, r[w]);
}

#elif defined(__AVX2__)

constexpr int64_t kSquare = 8;

// 8 words of 8 rows. Words are moved as floats, whatever they are: none is computed with.
template <int64_t width>
void pack_square(const char* plain, int64_t stride, char* panel, int64_t ahead) {
    __m256 r[8], t[8];
    for (int i = 0; i < 8; ++i) {
        r[i] = _mm256_loadu_ps(reinterpret_cast<const float*>(plain + i * stride));
        _mm_prefetch(plain + i * stride + ahead, _MM_HINT_T1);
    }
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
        r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
        r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
        r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
    }
    for (int i = 0; i < 4; ++i) {  // r[4 g + i] holds words i and 4 + i of rows 4 g to 4 g + 3
        t[i] = _mm256_permute2f128_ps(r[i], r[4 + i], 0x20);
        t[4 + i] = _mm256_permute2f128_ps(r[i], r[4 + i], 0x31);
    }
    for (int w = 0; w < 8; ++w) _mm256_storeu_ps(reinterpret_cast<float*>(panel + w * width * kWord), t[w]);
}

#endif

// Packs one panel of so many outputs: a word is one number of fp32, or two neighbouring ones of bf16. Word [o, w] of ``rows`` rows
// of W words comes to [w, o]; outputs without a row are zeros. Meanwhile the next panel's rows are asked for.
template <int64_t width>
void pack_panel(const char* plain, int64_t stride, char* panel, int64_t rows, int64_t W) {
    int64_t w = 0;
    if (rows < width) std::memset(panel, 0, size_t(width * W * kWord));
#if defined(__AVX2__)
    else
        for (; w + kSquare <= W; w += kSquare)
            for (int64_t o = 0; o < width; o += kSquare)
                pack_square<width>(plain + o * stride + w * kWord, stride, panel + (w * width + o) * kWord, width * stride);
#else
        for (; w + 16 <= W; w += 16) pack_words<width>(plain, stride, panel, rows, w, w + 16);  // what is written stays in the cache
#endif
    pack_words<width>(plain, stride, panel, rows, w, W);
}

constexpr int64_t kInputsAhead = 16;  // each is a line or two, a row of the file apart, which no processor foresees

// The same of a weight that is stored transposed: numbers of an input lie side by side, ``stride`` bytes behind those of the input
// before. Of ``rows`` outputs and I inputs.
template <int64_t width, typename number>
void pack_transposed_panel(const char* plain, int64_t stride, char* panel, int64_t rows, int64_t I) {
    constexpr int64_t together = kWord / int64_t(sizeof(number));
    if (rows < width) std::memset(panel, 0, size_t(width * I) * sizeof(number));
    for (int64_t i = 0; i < I; i += together) {
        const char* from = plain + i * stride;
        number* to = reinterpret_cast<number*>(panel) + i * width;
        for (int64_t k = 0; k < together; ++k)
            for (int64_t line = 0; line < width * int64_t(sizeof(number)); line += kLine)
                __builtin_prefetch(from + (kInputsAhead + k) * stride + line);
        if constexpr (together == 1) {
            std::memcpy(to, from, size_t(rows) * sizeof(number));
        } else if (rows == width) {
            number first[width], second[width];
            std::memcpy(first, from, sizeof first);
            std::memcpy(second, from + stride, sizeof second);
            for (int64_t o = 0; o < width; ++o) to[2 * o] = first[o], to[2 * o + 1] = second[o];
        } else {
            for (int64_t o = 0; o < rows; ++o) {
                std::memcpy(to + 2 * o, from + o * sizeof(number), sizeof(number));
                std::memcpy(to + 2 * o + 1, from + stride + o * sizeof(number), sizeof(number));
            }
        }
    }
}

// How many of a panel's outputs a weight of O has.
template <int64_t width>
int64_t rows_of(int64_t p, int64_t O) {
    const int64_t left = O - p * width;
    return left < 0 ? 0 : left < width ? left : width;
}

// Packs panel p of a weight [O, I].
template <int64_t width, typename number>
void pack_panel_of(const char* plain, int64_t stride, bool is_transposed, int64_t p, char* panel, int64_t O, int64_t I) {
    constexpr int64_t bytes = sizeof(number);
    if (is_transposed)
        pack_transposed_panel<width, number>(plain + p * width * bytes, stride, panel, rows_of<width>(p, O), I);
    else
        pack_panel<width>(plain + p * width * stride, stride, panel, rows_of<width>(p, O), I * bytes / kWord);
}

template <int64_t width, typename number>
void pack(const char* plain, int64_t stride, bool is_transposed, char* packed, int64_t O, int64_t I, int threads) {
    const int64_t panels = panels_of(O) * kPanel / width, bytes = width * I * int64_t(sizeof(number));
    stride *= int64_t(sizeof(number));
#pragma omp parallel for num_threads(threads)
    for (int64_t p = 0; p < panels; ++p) pack_panel_of<width, number>(plain, stride, is_transposed, p, packed + p * bytes, O, I);
}

}  // namespace
