// Products of the kernels of linear layers on processors with AVX2 and FMA, and without AVX-512: eight floats at once, sixteen
// registers. Everything is multiplied in fp32: bf16 rows are widened once, weights on their way to the registers.
//
// Shapes.  M rows   I input features   O output features.  Panels of 32 outputs as linear.cpp and quantized.cpp say.
#pragma once

#include "parts.h"
#include "products.h"

#if defined(__AVX2__) && defined(__FMA__) && !defined(__AVX512F__)
#define TESSERA_AVX2

#include <immintrin.h>

#include <vector>

namespace {

constexpr int kWidth = 8;        // floats of a register
constexpr int kMostRows = 6;     // by two registers of outputs: twelve sums, two weights and an input are what there is room for
constexpr int64_t kAhead = 2048; // bytes of a panel between what is used and what is asked for
constexpr int64_t kFewRows = 12; // with more it pays to widen a panel once and to use it several times

// Weights of one panel. ``at<k>`` gives those of input i + k and the outputs from ``first`` registers on; ``join`` adds sums of
// inputs from ``begin`` on to a total; ``chunk`` says how many inputs may be summed before. Of ``stretch`` inputs, whole chunks, the
// weights stay in the first-level cache while all rows use them.
struct PlainFp32 {
    static constexpr int kTogether = 1;  // inputs side by side
    static constexpr bool kIsNarrow = false;
    const float* panel;
    int64_t chunk() const { return kChunk; }
    int64_t stretch() const { return kChunk; }
    int64_t border(int64_t, int64_t I) const { return I; }
    template <int k, int H>
    void at(int64_t i, int first, __m256 (&out)[H]) const {
#pragma GCC unroll 4
        for (int h = 0; h < H; ++h) out[h] = _mm256_loadu_ps(panel + i * kPanel + (first + h) * kWidth);
    }
    __m256 join(__m256 total, __m256 sum, int64_t, int) const { return _mm256_add_ps(total, sum); }
};

struct PlainBf16 {
    static constexpr int kTogether = 2;
    static constexpr bool kIsNarrow = true;
    const uint16_t* panel;
    int64_t chunk() const { return kChunk; }
    int64_t stretch() const { return kChunk; }
    int64_t border(int64_t, int64_t I) const { return I; }
    template <int k, int H>
    void at(int64_t i, int first, __m256 (&out)[H]) const {
#pragma GCC unroll 4
        for (int h = 0; h < H; ++h) {
            const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(panel + i * kPanel + (first + h) * kWidth * 2));
            const __m256i wide = k == 0 ? _mm256_slli_epi32(pairs, 16) : _mm256_and_si256(pairs, _mm256_set1_epi32(int32_t(0xffff0000)));
            out[h] = _mm256_castsi256_ps(wide);
        }
    }
    __m256 join(__m256 total, __m256 sum, int64_t, int) const { return _mm256_add_ps(total, sum); }
};

// What whole numbers of both forms share: the scales of their groups, [G, 32].
struct Scaled {
    const float* scales;
    int64_t group;
    int64_t chunk() const { return group < kChunk ? group : kChunk; }
    int64_t stretch() const { return group < kChunk ? kChunk / group * group : group; }
    int64_t border(int64_t begin, int64_t I) const {
        const int64_t next = (begin / group + 1) * group;
        return next < I ? next : I;
    }
    __m256 join(__m256 total, __m256 sum, int64_t begin, int place) const {
        return _mm256_fmadd_ps(sum, _mm256_loadu_ps(scales + begin / group * kPanel + place * kWidth), total);
    }
};

template <int bits>
struct Whole : Scaled {
    static constexpr int kTogether = 1;
    static constexpr bool kIsNarrow = true;
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

// Whole numbers of a panel that was widened before.
struct WideScaled : Scaled {
    static constexpr int kTogether = 1;
    static constexpr bool kIsNarrow = false;
    const float* panel;
    WideScaled(const float* wide, const Scaled& scaled) : Scaled(scaled), panel(wide) {}
    template <int k, int H>
    void at(int64_t i, int first, __m256 (&out)[H]) const {
        PlainFp32{panel}.at<k, H>(i, first, out);
    }
};

inline PlainFp32 widened(const PlainBf16&, const float* wide) { return {wide}; }
inline WideScaled widened(const Scaled& scaled, const float* wide) { return {wide, scaled}; }

template <typename Weights, int k, int R, int H>
inline void add_products(const Weights& weights, int64_t i, int first, const float* x, int64_t stride, __m256 (&sums)[R][H]) {
    __m256 w[H];
    weights.template at<k, H>(i, first, w);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
        const __m256 input = _mm256_broadcast_ss(x + r * stride + i + k);
#pragma GCC unroll 4
        for (int h = 0; h < H; ++h) sums[r][h] = _mm256_fmadd_ps(w[h], input, sums[r][h]);
    }
}

// Inputs of a panel, [from, to) of I; what they add to goes on from ``out`` where they are not the first.
struct Inputs {
    int64_t from, to, I;
};

// H registers of a panel's outputs times R rows, the sums split U ways so that additions do not wait for one another.
template <typename Weights, int R, int H, int U>
void part_times_rows(const Weights& weights, int first, Inputs inputs, const float* x, int64_t stride, float (*out)[kPanel], bool asks) {
    constexpr int step = Weights::kTogether;
    constexpr int64_t bytes = sizeof(*weights.panel) * kPanel * step;
    __m256 totals[R][H];
    for (int r = 0; r < R; ++r)
        for (int h = 0; h < H; ++h) totals[r][h] = inputs.from ? _mm256_loadu_ps(out[r] + (first + h) * kWidth) : _mm256_setzero_ps();
    for (int64_t begin = inputs.from; begin < inputs.to;) {
        const int64_t most = begin + weights.chunk(), border = weights.border(begin, inputs.I), end = most < border ? most : border;
        __m256 sums[U][R][H];
        for (int u = 0; u < U; ++u)
            for (int r = 0; r < R; ++r)
                for (int h = 0; h < H; ++h) sums[u][r][h] = _mm256_setzero_ps();
        int64_t i = begin;
        for (; i + U * step <= end; i += U * step)
#pragma GCC unroll 4
            for (int u = 0; u < U; ++u) {
                if (asks && bytes == 128) {
                    const char* coming = reinterpret_cast<const char*>(weights.panel + (i + u * step) * kPanel) + kAhead;
                    _mm_prefetch(coming, _MM_HINT_T0);
                    _mm_prefetch(coming + 64, _MM_HINT_T0);
                }
                add_products<Weights, 0, R, H>(weights, i + u * step, first, x, stride, sums[u]);
                if constexpr (step == 2) add_products<Weights, 1, R, H>(weights, i + u * step, first, x, stride, sums[u]);
            }
        for (; i < end; i += step) {
            add_products<Weights, 0, R, H>(weights, i, first, x, stride, sums[0]);
            if constexpr (step == 2) add_products<Weights, 1, R, H>(weights, i, first, x, stride, sums[0]);
        }
        for (int r = 0; r < R; ++r)
            for (int h = 0; h < H; ++h) {
                for (int u = 1; u < U; ++u) sums[0][r][h] = _mm256_add_ps(sums[0][r][h], sums[u][r][h]);
                totals[r][h] = weights.join(totals[r][h], sums[0][r][h], begin, first + h);
            }
        begin = end;
    }
    for (int r = 0; r < R; ++r)
        for (int h = 0; h < H; ++h) _mm256_storeu_ps(out[r] + (first + h) * kWidth, totals[r][h]);
}

// One or two rows take a panel in one go, which is one stream of memory; more rows take it in two, the second from the cache.
// Processors do not foresee well that the first skips every other line: what comes is asked for where ``is_first`` says so.
template <typename Weights>
void panel_times_rows(const Weights& weights, int rows, Inputs inputs, const float* x, int64_t stride, float (*out)[kPanel], bool is_first) {
#define TESSERA_HALVES(R, U)                                                          \
    part_times_rows<Weights, R, 2, U>(weights, 0, inputs, x, stride, out, is_first); \
    part_times_rows<Weights, R, 2, U>(weights, 2, inputs, x, stride, out, false)
    switch (rows) {
        case 1: part_times_rows<Weights, 1, 4, 2>(weights, 0, inputs, x, stride, out, false); break;
        case 2: part_times_rows<Weights, 2, 4, 1>(weights, 0, inputs, x, stride, out, false); break;
        case 3: TESSERA_HALVES(3, 2); break;
        case 4: TESSERA_HALVES(4, 1); break;
        case 5: TESSERA_HALVES(5, 1); break;
        case 6: TESSERA_HALVES(6, 1); break;
    }
#undef TESSERA_HALVES
}

// Rows, bias, activation and outputs of one call.
template <typename scalar>
struct Call {
    const scalar* x;
    int64_t M, stride;
    const scalar* bias;
    Activation activation;
    scalar* y;
    int64_t O, I;
};

typedef float eight __attribute__((vector_size(32)));

template <typename scalar>
Call<scalar> call_of(const tessera::Job& job) {
    return {static_cast<const scalar*>(job.x), job.rows,  job.x_stride, static_cast<const scalar*>(job.bias), Activation(job.activation),
            static_cast<scalar*>(job.out),     job.width, job.inputs};
}

template <typename scalar>
void finish(const Call<scalar>& call, int64_t p, int64_t m, int64_t rows, float (*sums)[kPanel]) {
    const int64_t place = p * kPanel, outputs = call.O - place < kPanel ? call.O - place : kPanel;
    float bias[kPanel] = {};
    if (call.bias)
        for (int64_t o = 0; o < outputs; ++o) bias[o] = to_float(call.bias[place + o]);
    for (int64_t r = 0; r < rows; ++r) {
        for (int o = 0; o < kPanel; o += kWidth)
            save_as(activate(call.activation, load_as<eight>(sums[r] + o) + load_as<eight>(bias + o)), sums[r] + o);
        scalar* target = call.y + (m + r) * call.O + place;
        for (int64_t o = 0; o < outputs; ++o) from_float(sums[r][o], target[o]);
    }
}

// A panel times ``rows`` rows from m on, by groups of as equal a size as can be. Many rows take a stretch of its inputs after the other,
// before each of which ``ready`` is told of it.
template <typename scalar, typename Weights, typename Ready>
void panel_times_all(const Weights& weights, const Call<scalar>& call, int64_t p, int64_t m, int64_t rows, const float* x, int64_t stride,
                     const Ready& ready) {
    alignas(64) float sums[kBlockRows][kPanel];
    const int64_t length = rows > kMostRows ? weights.stretch() : call.I;
    for (int64_t from = 0; from < call.I; from += length) {
        const Inputs inputs{from, from + length < call.I ? from + length : call.I, call.I};
        ready(inputs);
        for (int64_t done = 0; done < rows;) {
            const int64_t left = rows - done, groups = (left + kMostRows - 1) / kMostRows;
            const int count = int((left + groups - 1) / groups);
            panel_times_rows(weights, count, inputs, x + done * stride, stride, sums + done, done == 0);
            done += count;
        }
    }
    finish(call, p, m, rows, sums);
}

template <typename Weights>
void widen_panel(const Weights& weights, Inputs inputs, float* wide) {
    for (int64_t i = inputs.from; i < inputs.to; i += Weights::kTogether) {
        __m256 w[4];
        weights.template at<0, 4>(i, 0, w);
        for (int h = 0; h < 4; ++h) _mm256_storeu_ps(wide + i * kPanel + h * kWidth, w[h]);
        if constexpr (Weights::kTogether == 2) {
            weights.template at<1, 4>(i, 0, w);
            for (int h = 0; h < 4; ++h) _mm256_storeu_ps(wide + (i + 1) * kPanel + h * kWidth, w[h]);
        }
    }
}

// By all threads of the parallel region that it is called in. ``weights_of(p)`` gives the weights of a panel.
template <typename scalar, typename Make>
void multiply_rows(const Call<scalar>& call, const Make& weights_of) {
    constexpr bool is_wide = sizeof(scalar) == sizeof(float), is_narrow = decltype(weights_of(0))::kIsNarrow;
    const int64_t panels = panels_of(call.O);
    thread_local std::vector<float> inputs, scratch;
    for (int64_t m = 0; m < call.M; m += kBlockRows) {
        const int64_t rows = call.M - m < kBlockRows ? call.M - m : kBlockRows;
        const int64_t stride = is_wide ? call.stride : call.I;
        const bool widens = is_narrow && rows > kFewRows;
        if (widens && scratch.size() < size_t(call.I * kPanel)) scratch.resize(size_t(call.I * kPanel));
        const float* x;
        if constexpr (is_wide) {
            x = call.x + m * stride;
        } else {  // each thread for itself: next to nothing beside the products, and nobody waits
            if (inputs.size() < size_t(rows * call.I)) inputs.resize(size_t(rows * call.I));
            for (int64_t r = 0; r < rows; ++r) widen(call.x + (m + r) * call.stride, inputs.data() + r * call.I, call.I);
            x = inputs.data();
        }
        float* const wide = scratch.data();
// Dynamic, since another thread of the machine may hold one of ours up: the others then take over its panels.
#pragma omp for schedule(dynamic, 4)
        for (int64_t p = 0; p < panels; ++p) {
            const auto weights = weights_of(p);
            if constexpr (is_narrow) {
                if (widens) {
                    panel_times_all(widened(weights, wide), call, p, m, rows, x, stride,
                                    [&](Inputs inputs) { widen_panel(weights, inputs, wide); });
                    continue;
                }
            }
            panel_times_all(weights, call, p, m, rows, x, stride, [](Inputs) {});
        }
    }
}

}  // namespace

#endif
