// Products of the kernels of linear layers on processors with AVX2 and FMA, and without AVX-512: eight floats at once, sixteen
// registers. Everything is multiplied in fp32: bf16 rows are widened once, weights on their way to the registers.
//
// Shapes.  M rows   I input features   O output features.  Panels of 32 outputs as linear.cpp and quantized.cpp say, of 16 in fp32:
// what two registers multiply lies side by side then.
#pragma once

#include "parts.h"
#include "products.h"

#if defined(__AVX2__) && defined(__FMA__) && !defined(__AVX512F__)
#define TESSERA_AVX2

#include <immintrin.h>

#include <type_traits>
#include <vector>

namespace {

constexpr int kWidth = 8;         // floats of a register
constexpr int kMostRows = 6;      // by two registers of outputs: twelve sums, two weights and an input are what there is room for
constexpr int64_t kAhead = 2048;  // bytes of a panel between what is used and what is asked for
constexpr int64_t kMostAhead = 8; // groups of rows: with more, what they read of memory is a small part of the time

// Weights of one panel. ``at<k>`` gives those of input i + k and the outputs from ``first`` registers on; ``chunk`` says how many inputs
// are summed before their sum is added to a total, which ``join`` does where it is scaled then: those are kept in registers, others
// where the outputs come to. Of ``stretch`` inputs, whole chunks, the weights stay in the first-level cache while all rows use them.
// Each group of rows widens them anew: at 16 and 32 rows that costs less than the room that wide ones would take there, and a pass.
// With many rows those of bf16 are widened once for all of them.
struct PlainFp32 {
    static constexpr int kTogether = 1;  // inputs side by side
    static constexpr int64_t kOutputs = kPanel / 2;
    static constexpr int64_t kBytes = kOutputs * 4;  // of an input
    static constexpr bool kJoinsOften = false;
    const float* panel;
    int64_t chunk() const { return kChunk; }
    int64_t stretch() const { return kChunk; }
    int64_t border(int64_t, int64_t I) const { return I; }
    template <int k, int R, int H>
    void at(int64_t i, int first, __m256 (&out)[H]) const {
#pragma GCC unroll 4
        for (int h = 0; h < H; ++h) {
            out[h] = _mm256_loadu_ps(panel + i * kOutputs + (first + h) * kWidth);
            if constexpr (R > 3) __asm__("" : "+x"(out[h]));  // loaded once, not by the product of each row
        }
    }
};

struct PlainBf16 {
    static constexpr int kTogether = 2;
    static constexpr int64_t kOutputs = kPanel;
    static constexpr int64_t kBytes = kPanel * 2;
    static constexpr bool kJoinsOften = false;
    const uint16_t* panel;
    int64_t chunk() const { return kChunk; }
    int64_t stretch() const { return kChunk; }
    int64_t border(int64_t, int64_t I) const { return I; }
    template <int k, int, int H>
    void at(int64_t i, int first, __m256 (&out)[H]) const {
#pragma GCC unroll 4
        for (int h = 0; h < H; ++h) {
            const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(panel + i * kPanel + (first + h) * kWidth * 2));
            const __m256i wide = k == 0 ? _mm256_slli_epi32(pairs, 16) : _mm256_and_si256(pairs, _mm256_set1_epi32(int32_t(0xffff0000)));
            out[h] = _mm256_castsi256_ps(wide);
        }
    }
};

// Inputs of two registers of bf16 outputs, from ``from`` on, that were widened.
struct WidenedBf16 {
    static constexpr int kTogether = 2;
    static constexpr int64_t kOutputs = kPanel;
    static constexpr int64_t kBytes = kPanel * 4;
    static constexpr bool kJoinsOften = false;
    typedef float Room[kChunk][2 * kWidth];  // half of the first-level cache
    const Room& room;
    int64_t from;
    int64_t chunk() const { return kChunk; }
    int64_t border(int64_t, int64_t I) const { return I; }
    template <int k, int, int H>
    void at(int64_t i, int, __m256 (&out)[H]) const {
        static_assert(H == 2);
        for (int h = 0; h < H; ++h) {
            out[h] = _mm256_load_ps(room[i + k - from] + h * kWidth);
            __asm__("" : "+x"(out[h]));  // loaded once, not by the product of each row
        }
    }
    // Those of [from, to) and of the outputs from ``first`` registers on.
    static void widen(const PlainBf16& weights, int64_t from, int64_t to, int first, Room& room) {
        for (int64_t i = from; i < to; i += PlainBf16::kTogether) {
            __m256 even[2], odd[2];
            weights.at<0, 1, 2>(i, first, even);
            weights.at<1, 1, 2>(i, first, odd);
            for (int h = 0; h < 2; ++h) {
                _mm256_store_ps(room[i - from] + h * kWidth, even[h]);
                _mm256_store_ps(room[i + 1 - from] + h * kWidth, odd[h]);
            }
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
    __m256 join(__m256 total, __m256 sum, int64_t begin, int place) const {
        return _mm256_fmadd_ps(sum, _mm256_loadu_ps(scales + begin / group * kPanel + place * kWidth), total);
    }
};

template <int bits>
struct Whole : Scaled {
    static constexpr int kTogether = 1;
    static constexpr int64_t kOutputs = kPanel;
    static constexpr int64_t kBytes = kPanel * bits / 8;
    static constexpr bool kJoinsOften = true;
    const uint8_t* panel;
    Whole(const uint8_t* packed, const float* factors, int64_t inputs) : Scaled{factors, inputs}, panel(packed) {}
    template <int k, int, int H>
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

template <typename Weights, int k, int R, int H>
inline void add_products(const Weights& weights, int64_t i, int first, const float* x, int64_t stride, __m256 (&sums)[R][H]) {
    __m256 w[H];
    weights.template at<k, R, H>(i, first, w);
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

// Memory that is asked for while something else is computed, ``stride`` bytes on with every input.
struct Ahead {
    const char* place;
    int64_t stride;
};

// What a part asks memory for while it computes: nothing, what comes of its panel, or what ``Ahead`` says.
enum Asks { kNothing, kOwn, kBehind };

// H registers of a panel's outputs times R rows, the sums split U ways so that additions do not wait for one another.
template <typename Weights, int R, int H, int U, Asks asks>
void part_times_rows(const Weights& weights, int first, Inputs inputs, const float* x, int64_t stride, float (*out)[Weights::kOutputs], Ahead ahead) {
    constexpr int step = Weights::kTogether;
    __m256 totals[R][H];
    if constexpr (Weights::kJoinsOften) {
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
        for (; i + U * step <= end; i += U * step)
#pragma GCC unroll 4
            for (int u = 0; u < U; ++u) {
                if constexpr (asks == kBehind) {
                    _mm_prefetch(ahead.place, _MM_HINT_T1);
                    ahead.place += ahead.stride * step;
                }
                if constexpr (asks == kOwn && Weights::kBytes * step == 128) {
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
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
            for (int h = 0; h < H; ++h) {
                for (int u = 1; u < U; ++u) sums[0][r][h] = _mm256_add_ps(sums[0][r][h], sums[u][r][h]);
                float* place = out[r] + (first + h) * kWidth;
                if constexpr (Weights::kJoinsOften)
                    totals[r][h] = weights.join(totals[r][h], sums[0][r][h], begin, first + h);
                else
                    _mm256_storeu_ps(place, begin ? _mm256_add_ps(_mm256_loadu_ps(place), sums[0][r][h]) : sums[0][r][h]);
            }
        begin = end;
    }
    if constexpr (Weights::kJoinsOften) {
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
            for (int h = 0; h < H; ++h) _mm256_storeu_ps(out[r] + (first + h) * kWidth, totals[r][h]);
    }
}

// One or two rows take a panel in one go, which is one stream of memory; more rows take one of 32 in two, the second from the cache.
// Processors do not foresee well that the first skips every other line: what comes is to be asked for, unless that was done before.
template <Asks asks, typename Weights>
void panel_times_rows(const Weights& weights, int rows, Inputs inputs, const float* x, int64_t stride, float (*out)[Weights::kOutputs], Ahead ahead) {
    [[maybe_unused]] constexpr Asks then = asks == kBehind ? kBehind : kNothing;
    constexpr int all = Weights::kOutputs / kWidth;
#define TESSERA_PARTS(R, U)                                                                     \
    part_times_rows<Weights, R, 2, U, asks>(weights, 0, inputs, x, stride, out, ahead);         \
    if constexpr (all == 4) {                                                                   \
        ahead.place += ahead.stride * (inputs.to - inputs.from);                                \
        part_times_rows<Weights, R, 2, U, then>(weights, 2, inputs, x, stride, out, ahead);     \
    }
    switch (rows) {
        case 1: part_times_rows<Weights, 1, all, 2, kNothing>(weights, 0, inputs, x, stride, out, ahead); break;
        case 2: part_times_rows<Weights, 2, all, 1, kNothing>(weights, 0, inputs, x, stride, out, ahead); break;
        case 3: TESSERA_PARTS(3, 2) break;
        case 4: TESSERA_PARTS(4, 1) break;
        case 5: TESSERA_PARTS(5, 1) break;
        case 6: TESSERA_PARTS(6, 1) break;
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
};

typedef float eight __attribute__((vector_size(32)));

template <typename scalar>
Call<scalar> call_of(const tessera::Job& job) {
    return {static_cast<const scalar*>(job.x), job.rows,  job.x_stride, static_cast<const scalar*>(job.bias), Activation(job.activation),
            static_cast<scalar*>(job.out),     job.width, job.inputs};
}

template <Activation activation, int64_t width, typename scalar>
void finish_by(const Call<scalar>& call, int64_t p, int64_t m, int64_t rows, float (*sums)[width]) {
    const int64_t place = p * width, outputs = call.O - place < width ? call.O - place : width;
    float bias[width] = {};
    if (call.bias)
        for (int64_t o = 0; o < outputs; ++o) bias[o] = to_float(call.bias[place + o]);
    for (int64_t r = 0; r < rows; ++r) {
        float* row = sums[r];
        for (int o = 0; o < width; o += kWidth)
            save_as(activate(activation, load_as<eight>(row + o) + load_as<eight>(bias + o)), row + o);
        scalar* target = call.y + (m + r) * call.O + place;
        if (outputs == width)
            for (int o = 0; o < width; ++o) from_float(row[o], target[o]);
        else
            for (int64_t o = 0; o < outputs; ++o) from_float(row[o], target[o]);
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

// A panel of bf16 times many rows: half of a stretch after the other is widened, and all rows take it.
inline void widened_times_all(const PlainBf16& weights, int64_t I, int64_t rows, const float* x, int64_t stride, float (*sums)[kPanel]) {
    alignas(64) WidenedBf16::Room room;
    const int64_t groups = (rows + kMostRows - 1) / kMostRows;
    for (int64_t from = 0; from < I; from += kChunk) {
        const Inputs inputs{from, from + kChunk < I ? from + kChunk : I, I};
        // What lies behind comes to the second-level cache meanwhile, a part before each group.
        const int64_t lines = (inputs.to - inputs.from) * PlainBf16::kBytes / kLine, passes = groups * (kPanel / kWidth / 2);
        const char* behind = reinterpret_cast<const char*>(weights.panel) + inputs.to * PlainBf16::kBytes;
        for (int first = 0; first < kPanel / kWidth; first += 2) {
            WidenedBf16::widen(weights, from, inputs.to, first, room);
            const WidenedBf16 wide{room, from};
            for (int64_t done = 0, group = 0; group < groups; ++group) {
                const int count = rows_of_group(rows - done, groups - group);  // 5 or 6, of so many
                const float* rows_x = x + done * stride;
                for (int64_t line = 0; line < lines; line += passes, behind += kLine) _mm_prefetch(behind, _MM_HINT_T1);
                if (count == 5) part_times_rows<WidenedBf16, 5, 2, 1, kNothing>(wide, first, inputs, rows_x, stride, sums + done, Ahead{});
                else part_times_rows<WidenedBf16, 6, 2, 1, kNothing>(wide, first, inputs, rows_x, stride, sums + done, Ahead{});
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
    const int64_t groups = (rows + kMostRows - 1) / kMostRows;
    if constexpr (std::is_same_v<Weights, PlainBf16>)
        if (groups > kMostAhead) {
            widened_times_all(weights, call.I, rows, x, stride, sums);
            return finish<Weights::kOutputs>(call, p, m, rows, sums);
        }
    const int64_t length = rows > 2 ? weights.stretch() : call.I;
    const bool looks_ahead = Weights::kBytes >= 64 && rows > 2 && groups <= kMostAhead;
    for (int64_t from = 0; from < call.I; from += length) {
        const Inputs inputs{from, from + length < call.I ? from + length : call.I, call.I};
        constexpr int64_t parts = Weights::kOutputs / (2 * kWidth);  // of three rows and more
        const int64_t passes = parts * groups;
        const char* behind = reinterpret_cast<const char*>(weights.panel) + inputs.to * Weights::kBytes;
        Ahead ahead{behind, (Weights::kBytes + passes - 1) / passes};
        for (int64_t done = 0, group = 0; done < rows; ++group) {
            const int count = rows_of_group(rows - done, groups - group);
            const float* rows_x = x + done * stride;
            if (looks_ahead) panel_times_rows<kBehind>(weights, count, inputs, rows_x, stride, sums + done, ahead);
            else if (done) panel_times_rows<kNothing>(weights, count, inputs, rows_x, stride, sums + done, ahead);
            else panel_times_rows<kOwn>(weights, count, inputs, rows_x, stride, sums + done, ahead);
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
    const int64_t panels = (call.O + Weights::kOutputs - 1) / Weights::kOutputs;
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
        hand.share_out(panels, [&](int64_t p) { panel_times_all(weights_of(p), call, p, m, rows, x, stride); });
    }
}

}  // namespace

#endif
