// Linear layers whose weights are whole numbers of 8 or 4 bits, with a scale for each output and group of inputs. The numbers
// are exact in bf16 and in fp32: only the scale rounds.
//
// Shapes.  M rows   I input features   O output features   G groups of inputs
//
// Packed weights: panels of 32 outputs, [O / 32, I, 32], or [O / 32, I / 2, 32, 2] where ``tessera_linear_quantized_together``
// says 2, padded with zeros. 8 bits: one byte each. 4 bits, as value + 8: the first half of the panel's outputs in the low halves of the
// bytes, the second half in the high ones. Scales: fp32 [O / 32, G, 32].
#include <memory>

#include "avx2.h"

namespace {

#ifdef __AVX512F__

// One step's weights of a panel in registers: those of its first sixteen outputs, then the others'.
struct FromFp32 : Fp32 {
    template <int bits>
    static void widen(const uint8_t* packed, __m512 (&out)[2]) {
        const __m128i first = _mm_loadu_si128(reinterpret_cast<const __m128i*>(packed));
        if constexpr (bits == 8) {
            const __m128i second = _mm_loadu_si128(reinterpret_cast<const __m128i*>(packed + 16));
            out[0] = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(first));
            out[1] = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(second));
        } else {
            const __m128i low = _mm_set1_epi8(15);
            const __m512i middle = _mm512_set1_epi32(8);
            const __m512i wide[2] = {_mm512_cvtepu8_epi32(_mm_and_si128(first, low)),
                                     _mm512_cvtepu8_epi32(_mm_and_si128(_mm_srli_epi16(first, 4), low))};
            for (int h = 0; h < 2; ++h) out[h] = _mm512_cvtepi32_ps(_mm512_sub_epi32(wide[h], middle));
        }
    }
    static __m512 add(__m512 sum, __m512 weights, const number* x) { return _mm512_fmadd_ps(weights, _mm512_set1_ps(*x), sum); }
};

#ifdef __AVX512BF16__
struct FromBf16 : Bf16 {
    static __m512 of_bytes(const uint8_t* bytes) {
        const __m128i* place = reinterpret_cast<const __m128i*>(bytes);
        const __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(place)));
        const __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(place + 1)));
        return (__m512)_mm512_cvtne2ps_pbh(high, low);
    }
    template <int bits>
    static void widen(const uint8_t* packed, __m512 (&out)[2]) {
        if constexpr (bits == 8) {
            out[0] = of_bytes(packed);
            out[1] = of_bytes(packed + 32);
        } else {
            // bf16 of -8 to 7, two a lane.
            const __m256i half = _mm256_setr_epi16(int16_t(0xc100), int16_t(0xc0e0), int16_t(0xc0c0), int16_t(0xc0a0), int16_t(0xc080),
                                                   int16_t(0xc040), int16_t(0xc000), int16_t(0xbf80), 0, 0x3f80, 0x4000, 0x4040, 0x4080,
                                                   0x40a0, 0x40c0, 0x40e0);
            const __m512i table = _mm512_broadcast_i64x4(half);
            const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(packed)), low = _mm256_set1_epi8(15);
            const __m256i numbers[2] = {_mm256_and_si256(bytes, low), _mm256_and_si256(_mm256_srli_epi16(bytes, 4), low)};
            for (int h = 0; h < 2; ++h) out[h] = (__m512)_mm512_permutexvar_epi16(_mm512_cvtepu8_epi16(numbers[h]), table);
        }
    }
    static __m512 add(__m512 sum, __m512 weights, const number* x) {
        int32_t pair;
        std::memcpy(&pair, x, 4);
        return _mm512_dpbf16_ps(sum, (__m512bh)weights, (__m512bh)_mm512_set1_epi32(pair));
    }
};
#endif

// Weights as they are packed, widened on the way to each product.
template <typename kind, int bits>
struct Narrow {
    const uint8_t* panel;
    void at(int64_t i, __m512 (&out)[2]) const { kind::template widen<bits>(panel + i * kPanel * bits / 8, out); }
};
// Weights that were widened before, for rows enough to use them more than once.
template <typename kind>
struct Wide {
    const typename kind::number* panel;
    void at(int64_t i, __m512 (&out)[2]) const {
        out[0] = _mm512_loadu_ps(panel + i * kPanel);
        out[1] = _mm512_loadu_ps(panel + i * kPanel + kPanel / 2 * kind::kInputs);
    }
};

struct Layer {
    const uint8_t* packed;
    const float* scales;
    const void* bias;
    Activation activation;
    int64_t O, I, group;
    int64_t groups() const { return (I + group - 1) / group; }
};

template <typename kind, typename Weights, int R, int U>
void panel_times_rows(Weights weights, const Layer& layer, int64_t p, const typename kind::number* x, int64_t stride,
                      typename kind::number* y, [[maybe_unused]] Ahead ahead) {
    constexpr int64_t step = kind::kInputs;
    const float* scales = layer.scales + p * layer.groups() * kPanel;
    __m512 totals[R][2];
    for (int r = 0; r < R; ++r) totals[r][0] = totals[r][1] = _mm512_setzero_ps();
    const int64_t most = layer.group < kChunk ? layer.group : kChunk;
    for (int64_t begin = 0; begin < layer.I;) {
        const int64_t own = begin / layer.group, border = (own + 1) * layer.group < layer.I ? (own + 1) * layer.group : layer.I;
        const int64_t end = begin + most < border ? begin + most : border;
        __m512 sums[U][R][2], w[2];
        for (int u = 0; u < U; ++u)
            for (int r = 0; r < R; ++r) sums[u][r][0] = sums[u][r][1] = _mm512_setzero_ps();
        int64_t i = begin;
        for (; i + (U - 1) * step < end; i += U * step) {
            if constexpr (R == kRows) {
                _mm_prefetch(ahead.place, _MM_HINT_T1);
                ahead.place += ahead.stride;
            }
            for (int u = 0; u < U; ++u) {
                weights.at(i + u * step, w);
                for (int r = 0; r < R; ++r)
                    for (int h = 0; h < 2; ++h) sums[u][r][h] = kind::add(sums[u][r][h], w[h], x + r * stride + i + u * step);
            }
        }
        for (; i < end; i += step) {
            weights.at(i, w);
            for (int r = 0; r < R; ++r)
                for (int h = 0; h < 2; ++h) sums[0][r][h] = kind::add(sums[0][r][h], w[h], x + r * stride + i);
        }
        for (int h = 0; h < 2; ++h) {
            const __m512 scale = _mm512_loadu_ps(scales + own * kPanel + h * kPanel / 2);
            for (int r = 0; r < R; ++r) {
                for (int u = 1; u < U; ++u) sums[0][r][h] = _mm512_add_ps(sums[0][r][h], sums[u][r][h]);
                totals[r][h] = _mm512_fmadd_ps(sums[0][r][h], scale, totals[r][h]);
            }
        }
        begin = end;
    }
    for (int h = 0; h < 2; ++h) {
        const int64_t place = p * kPanel + h * 16, left = layer.O - place;
        const __mmask16 lanes = left >= 16 ? 0xffff : left <= 0 ? 0 : __mmask16((1u << left) - 1);
        const typename kind::number* bias = static_cast<const typename kind::number*>(layer.bias);
        const __m512 start = bias && left > 0 ? kind::load(bias + place, lanes) : _mm512_setzero_ps();
        for (int r = 0; r < R; ++r)
            kind::save(y + r * layer.O + place,
                       (__m512)activate<kind::kInputs == 2>(layer.activation, (vec)_mm512_add_ps(totals[r][h], start)), lanes);
    }
}

// ``behind``: the next panel, of ``bytes``, or none if nobody wants it.
template <typename kind, typename Weights>
void panel_times_all(Weights weights, const Layer& layer, int64_t p, const typename kind::number* x, int64_t first, int64_t end,
                     int64_t stride, typename kind::number* y, const uint8_t* behind, int64_t bytes) {
    const int64_t words = layer.I / kind::kInputs, groups = (end - first) / kRows;
    int64_t m = first;
    Ahead ahead = {reinterpret_cast<const char*>(layer.packed), 0};
#define TESSERA_ROWS(R, U) panel_times_rows<kind, Weights, R, U>(weights, layer, p, x + m * stride, stride, y + m * layer.O, ahead)
    for (; m + kRows <= end; m += kRows) {
        if (behind) ahead = share_of(behind, bytes, words, (m - first) / kRows, groups);
        TESSERA_ROWS(8, 1);
    }
    switch (end - m) {
        case 7: TESSERA_ROWS(7, 1); break;
        case 6: TESSERA_ROWS(6, 1); break;
        case 5: TESSERA_ROWS(5, 1); break;
        case 4: TESSERA_ROWS(4, 2); break;
        case 3: TESSERA_ROWS(3, 2); break;
        case 2: TESSERA_ROWS(2, 4); break;
        case 1: TESSERA_ROWS(1, 4); break;
    }
#undef TESSERA_ROWS
}

// By all threads of the parallel region that it is called in.
template <typename kind, int bits>
void multiply(const Layer& layer, const typename kind::number* x, int64_t M, int64_t stride, typename kind::number* y,
              tessera::Hand& hand) {
    const int64_t panels = panels_of(layer.O), bytes = kPanel * layer.I * bits / 8;
    constexpr int64_t step = kind::kInputs;
    const Blocks blocks = blocks_for(M, layer.I, panels, omp_get_num_threads());
    std::unique_ptr<typename kind::number[]> scratch(M > kRows ? new typename kind::number[size_t(layer.I * kPanel)] : nullptr);
    hand.share_out(blocks.count * panels, [&](int64_t item) {
        const int64_t p = item % panels, first = item / panels * blocks.height;
        const int64_t end = first + blocks.height < M ? first + blocks.height : M;
        const uint8_t* packed = layer.packed + p * bytes;
        const Narrow<kind, bits> narrow{packed};
        if (end - first <= kRows) {
            panel_times_all<kind>(narrow, layer, p, x, first, end, stride, y, nullptr, 0);
            return;
        }
        __m512 w[2];
        for (int64_t i = 0; i < layer.I; i += step) {
            narrow.at(i, w);
            for (int h = 0; h < 2; ++h) _mm512_storeu_ps(scratch.get() + i * kPanel + h * kPanel / 2 * step, w[h]);
        }
        // The panel is in the scratch by now: the next one comes while that is multiplied.
        const uint8_t* behind = p + 1 < panels ? packed + bytes : nullptr;
        panel_times_all<kind>(Wide<kind>{scratch.get()}, layer, p, x, first, end, stride, y, behind, bytes);
    });
}

#endif

#ifdef TESSERA_AVX2

template <int bits, typename scalar>
void multiply_whole(const Call<scalar>& call, const void* packed, const void* scales, int64_t group, tessera::Hand& hand) {
    const int64_t groups = (call.I + group - 1) / group;
    multiply_rows(call, [&](int64_t p) {
        return Whole<bits>(static_cast<const uint8_t*>(packed) + p * kPanel * call.I * bits / 8,
                           static_cast<const float*>(scales) + p * groups * kPanel, group);
    }, hand);
}

#endif

}  // namespace

void tessera::multiply_quantized([[maybe_unused]] const Job& job, [[maybe_unused]] Hand& hand) {
#ifdef __AVX512F__
    const Layer layer{static_cast<const uint8_t*>(job.weight), static_cast<const float*>(job.scales), job.bias,
                      Activation(job.activation), job.width, job.inputs, job.group};
    if (!job.is_bf16)
        (job.bits == 8 ? ::multiply<FromFp32, 8> : ::multiply<FromFp32, 4>)(layer, static_cast<const float*>(job.x), job.rows, job.x_stride,
                                                                        static_cast<float*>(job.out), hand);
#endif
#ifdef __AVX512BF16__
    if (job.is_bf16)
        (job.bits == 8 ? ::multiply<FromBf16, 8> : ::multiply<FromBf16, 4>)(layer, static_cast<const uint16_t*>(job.x), job.rows,
                                                                        job.x_stride, static_cast<uint16_t*>(job.out), hand);
#endif
#ifdef TESSERA_AVX2
    if (job.is_bf16)
        (job.bits == 8 ? multiply_whole<8, bf16> : multiply_whole<4, bf16>)(call_of<bf16>(job), job.weight, job.scales, job.group, hand);
    else
        (job.bits == 8 ? multiply_whole<8, float> : multiply_whole<4, float>)(call_of<float>(job), job.weight, job.scales, job.group, hand);
#endif
}

extern "C" {

int tessera_linear_quantized_supported([[maybe_unused]] int is_bf16) {
#if defined(__AVX512BF16__)
    return 1;
#elif defined(__AVX512F__)
    return !is_bf16;
#elif defined(TESSERA_AVX2)
    return 1;
#else
    return 0;
#endif
}

// How many inputs of an output lie side by side in packed weights; I must be a multiple of it.
int tessera_linear_quantized_together([[maybe_unused]] int is_bf16) {
#ifdef __AVX512BF16__
    return is_bf16 ? 2 : 1;
#else
    return 1;
#endif
}

// x is [M, I] with rows ``stride`` apart; ``group`` is even. y is [M, O], contiguous. ``bits`` is 8 or 4.
// Supported where ``tessera_linear_quantized_supported`` says so.
void tessera_linear_quantized(int is_bf16, int bits, int threads, const void* x, int64_t M, int64_t stride, const void* packed,
                              const void* scales, const void* bias, int activation, void* y, int64_t O, int64_t I, int64_t group) {
    tessera::Job job = {};
    job.is_bf16 = is_bf16, job.bits = bits, job.x = x, job.rows = M, job.x_stride = stride, job.weight = packed;
    job.scales = scales, job.bias = bias, job.activation = activation, job.out = y, job.width = job.out_stride = O;
    job.inputs = I, job.group = group;
    tessera::Team team(threads);
#pragma omp parallel num_threads(threads)
    {
        tessera::Hand hand(team);
        tessera::multiply_quantized(job, hand);
    }
}
}
