// Products of the kernels of linear layers on processors with AVX2 and FMA, and without AVX-512: eight floats at once, sixteen
// registers. Everything is multiplied in fp32: bf16 rows are widened once, weights on their way to the registers, or for many rows at once.
//
// Shapes.  M rows   I input features   O output features.  Panels of 32 outputs as linear.cpp and quantized.cpp say, of 16 in fp32:
// what two registers multiply lies side by side then.
#pragma once

#include "parts.h"
#include "products.h"

#if defined(__AVX2__) && defined(__FMA__) && !defined(__AVX512F__)
#define TESSERA_AVX2

#include <immintrin.h>

#include <vector>

#include "avx2_weights.h"

namespace {

constexpr int kTurn = 4;  // inputs between two jumps, of three rows and more

// Instructions that stay in the order they are written in: a compiler that moves loads forward runs out of registers.
inline __m256 everywhere(const float* input) {
    __m256 out;
    __asm__ volatile("vbroadcastss %1, %0" : "=x"(out) : "m"(*input));
    return out;
}
inline void keep(__m256& weights) { __asm__ volatile("" : "+x"(weights)); }
inline void add_product(__m256& sum, __m256 weights, __m256 input) {
    __asm__ volatile("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(weights), "x"(input));
}

template <typename Weights, int k, int R, int H>
inline void add_products(const Weights& weights, int64_t i, int first, const float* x, int64_t stride, __m256 (&sums)[R][H]) {
    __m256 w[H];
    weights.template at<k, H>(i, first, w);
    if constexpr (R > 2) {
#pragma GCC unroll 2
        for (int h = 0; h < H; ++h) keep(w[h]);
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r) {
            const __m256 input = everywhere(x + r * stride + i + k);
#pragma GCC unroll 2
            for (int h = 0; h < H; ++h) add_product(sums[r][h], w[h], input);
        }
    } else {
#pragma GCC unroll 2
        for (int r = 0; r < R; ++r) {
            const __m256 input = _mm256_broadcast_ss(x + r * stride + i + k);
#pragma GCC unroll 4
            for (int h = 0; h < H; ++h) sums[r][h] = _mm256_fmadd_ps(w[h], input, sums[r][h]);
        }
    }
}

// Inputs of a panel, [from, to) of I; what they add to goes on from ``out`` where they are not the first.
struct Inputs {
    int64_t from, to, I;
};

// What a part asks memory for while it computes: nothing, or what ``Ahead`` says, with every turn or with every input.
enum Asks { kNothing, kByTurns, kByInputs };

// H registers of a panel's outputs times R rows, the sums split U ways so that additions do not wait for one another.
//
// Where three rows and more share what was loaded, what a core decodes in a cycle is the limit, all the more where another thread runs
// on it: several inputs are multiplied in a turn, so that little but products is decoded, and the build aligns loops to lines, which it
// does where a loop is most of its function.
template <typename Weights, int R, int H, int U, Asks asks>
__attribute__((noinline)) void part_times_rows(const Weights& weights, int first, const Inputs& inputs, const float* x, int64_t stride,
                                               float (*out)[Weights::kOutputs], Ahead ahead) {
    constexpr int step = Weights::kTogether, turn = R > 2 ? kTurn : U * step;
    __m256 totals[R][H];
    if constexpr (Weights::kIsScaled) {
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
            for (int h = 0; h < H; ++h) totals[r][h] = inputs.from ? _mm256_loadu_ps(out[r] + (first + h) * kWidth) : _mm256_setzero_ps();
    }
    for (int64_t begin = inputs.from; begin < inputs.to;) {
        const int64_t most = begin + weights.chunk(), border = weights.border(begin, inputs.I), end = most < border ? most : border;
        __m256 sums[U][R][H];
        for (int u = 0; u < U; ++u)
            for (int r = 0; r < R; ++r)
                for (int h = 0; h < H; ++h) sums[u][r][h] = _mm256_setzero_ps();
        int64_t i = begin;
        for (; i + turn <= end; i += turn) {
#pragma GCC unroll 4
            for (int k = 0; k < turn; k += step) {
                if constexpr (asks != kNothing)
                    if (asks == kByInputs || k == 0) _mm_prefetch(ahead.place + k * ahead.stride, _MM_HINT_T1);
                add_products<Weights, 0, R, H>(weights, i + k, first, x, stride, sums[k / step % U]);
                if constexpr (step == 2) add_products<Weights, 1, R, H>(weights, i + k, first, x, stride, sums[k / step % U]);
            }
            if constexpr (asks != kNothing) ahead.place += turn * ahead.stride;
        }
        for (; i < end; i += step) {
            add_products<Weights, 0, R, H>(weights, i, first, x, stride, sums[0]);
            if constexpr (step == 2) add_products<Weights, 1, R, H>(weights, i, first, x, stride, sums[0]);
        }
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
            for (int h = 0; h < H; ++h) {
                for (int u = 1; u < U; ++u) sums[0][r][h] = _mm256_add_ps(sums[0][r][h], sums[u][r][h]);
                float* place = out[r] + (first + h) * kWidth;
                if constexpr (Weights::kIsScaled)
                    totals[r][h] = weights.join(totals[r][h], sums[0][r][h], begin, first + h);
                else
                    _mm256_storeu_ps(place, begin ? _mm256_add_ps(_mm256_loadu_ps(place), sums[0][r][h]) : sums[0][r][h]);
            }
        begin = end;
    }
    if constexpr (Weights::kIsScaled) {
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
            for (int h = 0; h < H; ++h) _mm256_storeu_ps(out[r] + (first + h) * kWidth, totals[r][h]);
    }
}

// One or two rows take a panel in one go, which is one stream of memory; more rows take one of 32 in two, the second from the cache.
template <Asks asks, typename Weights>
void panel_times_rows(const Weights& weights, int rows, const Inputs& inputs, const float* x, int64_t stride, float (*out)[Weights::kOutputs],
                      Ahead ahead) {
    constexpr int all = Weights::kOutputs / kWidth;
#define TESSERA_PARTS(R, U)                                                                     \
    part_times_rows<Weights, R, 2, U, asks>(weights, 0, inputs, x, stride, out, ahead);         \
    if constexpr (all == 4) {                                                                   \
        ahead.place += ahead.stride * (inputs.to - inputs.from);                                \
        part_times_rows<Weights, R, 2, U, asks>(weights, 2, inputs, x, stride, out, ahead);     \
    }
    switch (rows) {
        case 1: part_times_rows<Weights, 1, all, 2, kNothing>(weights, 0, inputs, x, stride, out, ahead); break;
        case 2: part_times_rows<Weights, 2, all, 1, kNothing>(weights, 0, inputs, x, stride, out, ahead); break;
        case 3: TESSERA_PARTS(3, (Weights::kIsScaled ? 1 : 2)) break;
        case 4: TESSERA_PARTS(4, 1) break;
        case 5: TESSERA_PARTS(5, 1) break;
        case 6:
            if constexpr (Weights::kMostRows == 6) { TESSERA_PARTS(6, 1) }
            break;
    }
#undef TESSERA_PARTS
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
    const int32_t* panels;  // of kPanel outputs: those that are computed; none: all
    int64_t num_panels;
};

typedef float eight __attribute__((vector_size(32)));

template <typename scalar>
Call<scalar> call_of(const tessera::Job& job) {
    return {static_cast<const scalar*>(job.x), job.rows,  job.x_stride, static_cast<const scalar*>(job.bias), Activation(job.activation),
            static_cast<scalar*>(job.out),     job.width, job.inputs, job.panels, job.num_panels};
}

inline void save_numbers(eight x, float* target) { save_as(x, target); }
// To the nearest, in the middle to the even one, as from_float does.
inline void save_numbers(eight x, bf16* target) {
    const __m256i bits = _mm256_castps_si256(x), is_odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), is_odd), 16);
    const __m256i no_number = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    const __m256i out = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), no_number);
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(out, out), 0xd8);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(target), _mm256_castsi256_si128(packed));
}

template <Activation activation, int64_t width, typename scalar>
void finish_by(const Call<scalar>& call, int64_t p, int64_t m, int64_t rows, float (*sums)[width]) {
    const int64_t place = p * width, outputs = call.O - place < width ? call.O - place : width;
    float bias[width] = {};
    if (call.bias)
        for (int64_t o = 0; o < outputs; ++o) bias[o] = to_float(call.bias[place + o]);
    const auto of = [&](int64_t r, int64_t o) { return activate(activation, load_as<eight>(sums[r] + o) + load_as<eight>(bias + o)); };
    scalar* target = call.y + m * call.O + place;
    if (outputs == width) {
        for (int64_t r = 0; r < rows; ++r, target += call.O)
            for (int64_t o = 0; o < width; o += kWidth) save_numbers(of(r, o), target + o);
    } else {
        for (int64_t r = 0; r < rows; ++r, target += call.O) {
            for (int64_t o = 0; o < width; o += kWidth) save_as(of(r, o), sums[r] + o);
            for (int64_t o = 0; o < outputs; ++o) from_float(sums[r][o], target[o]);
        }
    }
}

// Sums become outputs.
template <int64_t width, typename scalar>
void finish(const Call<scalar>& call, int64_t p, int64_t m, int64_t rows, float (*sums)[width]) {
    switch (call.activation) {
        case kNone: return finish_by<kNone, width>(call, p, m, rows, sums);
        case kGelu: return finish_by<kGelu, width>(call, p, m, rows, sums);
        case kGeluTanh: return finish_by<kGeluTanh, width>(call, p, m, rows, sums);
        case kSilu: return finish_by<kSilu, width>(call, p, m, rows, sums);
        case kRelu: return finish_by<kRelu, width>(call, p, m, rows, sums);
    }
}

// Rows of the next group, where as many groups share what is left as evenly as can be.
inline int rows_of_group(int64_t left, int64_t groups) { return int((left + groups - 1) / groups); }

// A panel times many rows: two registers of a stretch after the other are widened, and all rows take them.
template <typename Weights>
void widened_times_all(const Weights& weights, int64_t I, int64_t rows, const float* x, int64_t stride, float (*sums)[kPanel]) {
    alignas(64) Widened::Room room;
    const int64_t groups = (rows + kMostRows - 1) / kMostRows;
    for (int64_t from = 0; from < I; from += kChunk) {
        const Inputs inputs{from, from + kChunk < I ? from + kChunk : I, I};
        // What lies behind comes to the second-level cache meanwhile, a part before each group.
        const int64_t lines = (inputs.to - inputs.from) * Weights::kBytes / kLine, passes = groups * (kPanel / kWidth / 2);
        const char* behind = reinterpret_cast<const char*>(weights.panel) + inputs.to * Weights::kBytes;
        for (int first = 0; first < kPanel / kWidth; first += 2) {
            widen(weights, from, inputs.to, I, first, room);
            const Widened wide(room, from);
            for (int64_t done = 0, group = 0; group < groups; ++group) {
                const int count = rows_of_group(rows - done, groups - group);
                const float* rows_x = x + done * stride;
                for (int64_t line = 0; line < lines; line += passes, behind += kLine) _mm_prefetch(behind, _MM_HINT_T1);
#define TESSERA_PART(R) part_times_rows<Widened, R, 2, 1, kNothing>(wide, first, inputs, rows_x, stride, sums + done, Ahead{})
                switch (count) {  // more than kFewRows are no smaller groups
                    case 4: TESSERA_PART(4); break;
                    case 5: TESSERA_PART(5); break;
                    case 6: TESSERA_PART(6); break;
                }
#undef TESSERA_PART
                done += count;
            }
        }
    }
}

// A panel times ``rows`` rows from m on, by groups of as equal a size as can be. All but very few rows take a stretch of its inputs after
// the other, and while they compute, what lies behind it comes to the second-level cache, a part with each group: memory would
// otherwise wait for the products, and these for memory. What is narrow comes soon enough by itself.
template <typename scalar, typename Weights>
void panel_times_all(const Weights& weights, const Call<scalar>& call, int64_t p, int64_t m, int64_t rows, const float* x, int64_t stride) {
    alignas(64) float sums[kBlockRows][Weights::kOutputs];
    if constexpr (Weights::kFewRows < kBlockRows)
        if (rows > Weights::kFewRows) {
            widened_times_all(weights, call.I, rows, x, stride, sums);
            return finish<Weights::kOutputs>(call, p, m, rows, sums);
        }
    const int64_t groups = (rows + Weights::kMostRows - 1) / Weights::kMostRows;
    const int64_t length = rows > 2 ? weights.stretch() : call.I;
    constexpr int64_t parts = Weights::kOutputs / (2 * kWidth);  // of three rows and more
    const int64_t passes = parts * groups;
    const Asks asks = Weights::kBytes < kLine || rows < 3 ? kNothing : passes < kTurn ? kByInputs : kByTurns;
    for (int64_t from = 0; from < call.I; from += length) {
        const Inputs inputs{from, from + length < call.I ? from + length : call.I, call.I};
        const char* behind = reinterpret_cast<const char*>(weights.panel) + inputs.to * Weights::kBytes;
        Ahead ahead{behind, (Weights::kBytes + passes - 1) / passes};
        for (int64_t done = 0, group = 0; done < rows; ++group) {
            const int count = rows_of_group(rows - done, groups - group);
            const float* rows_x = x + done * stride;
            if (asks == kByTurns) panel_times_rows<kByTurns>(weights, count, inputs, rows_x, stride, sums + done, ahead);
            else if (asks == kByInputs) panel_times_rows<kByInputs>(weights, count, inputs, rows_x, stride, sums + done, ahead);
            else panel_times_rows<kNothing>(weights, count, inputs, rows_x, stride, sums + done, ahead);
            ahead.place += ahead.stride * parts * (inputs.to - inputs.from);
            done += count;
        }
    }
    finish<Weights::kOutputs>(call, p, m, rows, sums);
}

// By all threads of the parallel region that it is called in. ``weights_of(p)`` gives the weights of a panel.
template <typename scalar, typename Make>
void multiply_rows(const Call<scalar>& call, const Make& weights_of, tessera::Hand& hand) {
    constexpr bool is_wide = sizeof(scalar) == sizeof(float);
    typedef decltype(weights_of(0)) Weights;
    constexpr int64_t kParts = kPanel / Weights::kOutputs;
    const int64_t all = (call.O + Weights::kOutputs - 1) / Weights::kOutputs, panels = call.panels ? call.num_panels * kParts : all;
    thread_local std::vector<float> inputs;
    for (int64_t m = 0; m < call.M; m += kBlockRows) {
        const int64_t rows = call.M - m < kBlockRows ? call.M - m : kBlockRows;
        const int64_t stride = is_wide ? call.stride : call.I;
        const float* x;
        if constexpr (is_wide) {
            x = call.x + m * stride;
        } else {  // each thread for itself: next to nothing beside the products, and nobody waits
            if (inputs.size() < size_t(rows * call.I)) inputs.resize(size_t(rows * call.I));
            for (int64_t r = 0; r < rows; ++r) widen(call.x + (m + r) * call.stride, inputs.data() + r * call.I, call.I);
            x = inputs.data();
        }
        hand.share_out(panels, [&](int64_t item) {
            const int64_t p = call.panels ? call.panels[item / kParts] * kParts + item % kParts : item;
            if (p < all) panel_times_all(weights_of(p), call, p, m, rows, x, stride);
        });
    }
}

}  // namespace

#endif
