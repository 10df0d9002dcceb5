// Linear layers. With few rows (decoding) the weights are streamed through once, as fast as memory gives them.
//
// Shapes.  M rows   I input features   O output features
//
// Packed weights: panels of 32 outputs, [O / 32, I, 32] in fp32 and [O / 32, I / 2, 32, 2] in bf16 (two neighbouring inputs
// side by side, as the processor's bf16 dot product wants them; I is even there), outputs padded with zeros. One panel is one
// stream of memory; groups of up to eight rows share what was read of it.
#include <sys/mman.h>

#include <cstdint>
#include <cstring>

#include "vectors.h"
#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace {

constexpr int64_t kPanel = 32;
constexpr int kRows = 8;             // rows that share each weight while it is in a register
constexpr int64_t kBlockRows = 128;  // rows of one work item: their inputs stay in the second-level cache
constexpr int64_t kChunk = 256;      // inputs summed before their sum joins the total: rounding errors do not pile up

int64_t panels_of(int64_t outputs) { return (outputs + kPanel - 1) / kPanel; }

// Two-mebibyte pages where the buffer holds whole ones: a stream through small pages misses the translation cache all the time.
void ask_for_huge_pages(void* begin, int64_t bytes) {
    const uintptr_t huge = uintptr_t(1) << 21;
    const uintptr_t first = (uintptr_t(begin) + huge - 1) / huge * huge, last = (uintptr_t(begin) + uintptr_t(bytes)) / huge * huge;
    if (last > first) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
}

// Where weight [o, i] lies in the packed form, in elements.
inline int64_t place_fp32(int64_t o, int64_t i, int64_t I) { return (o / kPanel * I + i) * kPanel + o % kPanel; }
inline int64_t place_bf16(int64_t o, int64_t i, int64_t I) {
    return ((o / kPanel * (I / 2) + i / 2) * kPanel + o % kPanel) * 2 + i % 2;
}

template <typename number, int64_t (*place)(int64_t, int64_t, int64_t)>
void pack(const number* plain, number* packed, int64_t O, int64_t I, int threads) {
    const int64_t panels = panels_of(O);
    ask_for_huge_pages(packed, panels * kPanel * I * int64_t(sizeof(number)));
#pragma omp parallel for num_threads(threads)
    for (int64_t p = 0; p < panels; ++p) {
        std::memset(packed + p * kPanel * I, 0, size_t(kPanel * I) * sizeof(number));
        for (int64_t o = p * kPanel; o < O && o < (p + 1) * kPanel; ++o)
            for (int64_t i = 0; i < I; ++i) packed[place(o, i, I)] = plain[o * I + i];
    }
}

#ifdef __AVX512F__

// What is done to each output before it is stored: ``ACTIVATIONS`` of serve/model/linear.py.
enum Activation { kNone, kGelu, kGeluTanh, kSilu, kRelu };

// 1 / (1 + exp(-x)) without overflow on either side.
inline vec sigmoid(vec x) {
    const vec shrunk = exp_nonpositive(x < 0.0f ? x : -x);
    return (x < 0.0f ? shrunk : all(1.0f)) / (shrunk + 1.0f);
}

// The normal distribution's mass below x, by erfc(a) = exp(-a Q(a)), a = |x| / sqrt(2). Q is a polynomial fitted for this file
// over [0, 5]: erfc within 5e-8; beyond, where it is below 2e-12, it is 0.
inline vec normal_mass(vec x) {
    const vec whole = (x < 0.0f ? -x : x) * 0.70710678118654752f;
    const vec a = whole > 5.0f ? all(5.0f) : whole;
    vec q = all(5.165622e-07f);
    q = q * a - 1.1645552e-05f;
    q = q * a + 1.1069056e-04f;
    q = q * a - 5.6475616e-04f;
    q = q * a + 1.4850782e-03f;
    q = q * a + 7.7668185e-05f;
    q = q * a - 1.9318648e-02f;
    q = q * a + 1.0283731e-01f;
    q = q * a + 6.3660970e-01f;
    q = q * a + 1.1283797f;
    const vec half_tail = whole > 5.0f ? all(0.0f) : exp_nonpositive(-a * q) * 0.5f;
    return x < 0.0f ? half_tail : 1.0f - half_tail;
}

inline vec activate(Activation activation, vec x) {
    switch (activation) {
        case kGelu: return x * normal_mass(x);
        case kGeluTanh: return x * sigmoid(1.5957691216057308f * (x + 0.044715f * x * x * x));
        case kSilu: return x * sigmoid(x);
        case kRelu: return x < 0.0f ? all(0.0f) : x;
        case kNone: break;
    }
    return x;
}

struct Fp32 {
    typedef float number;
    static constexpr int64_t kInputs = 1;  // inputs consumed by one multiply
    static __m512 multiply(__m512 sum, const number* weights, const number* x) {
        return _mm512_fmadd_ps(_mm512_loadu_ps(weights), _mm512_set1_ps(*x), sum);
    }
    static __m512 load(const number* source, __mmask16 lanes) { return _mm512_maskz_loadu_ps(lanes, source); }
    static void save(number* target, __m512 sum, __mmask16 lanes) { _mm512_mask_storeu_ps(target, lanes, sum); }
};

#ifdef __AVX512BF16__
struct Bf16 {
    typedef uint16_t number;
    static constexpr int64_t kInputs = 2;
    static __m512 multiply(__m512 sum, const number* weights, const number* x) {
        int32_t pair;
        std::memcpy(&pair, x, 4);
        return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_loadu_si512(weights), (__m512bh)_mm512_set1_epi32(pair));
    }
    static __m512 load(const number* source, __mmask16 lanes) {
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, source)), 16));
    }
    static void save(number* target, __m512 sum, __mmask16 lanes) {
        _mm256_mask_storeu_epi16(target, lanes, (__m256i)_mm512_cvtneps_pbh(sum));
    }
};
#endif

// One panel times R rows. With few rows the sums are split U ways along the inputs, so that additions do not wait for one another.
template <typename kind, int R, int U>
void panel_times_rows(const typename kind::number* panel, const typename kind::number* x, int64_t stride, const typename kind::number* bias,
                      Activation activation, typename kind::number* y, int64_t O, int64_t I, int64_t outputs) {
    constexpr int64_t step = kind::kInputs, half = kPanel / 2 * step;
    __m512 totals[R][2];
    for (int r = 0; r < R; ++r) totals[r][0] = totals[r][1] = _mm512_setzero_ps();
    for (int64_t begin = 0; begin < I; begin += kChunk) {
        const int64_t end = begin + kChunk < I ? begin + kChunk : I;
        __m512 sums[U][R][2];
        for (int u = 0; u < U; ++u)
            for (int r = 0; r < R; ++r) sums[u][r][0] = sums[u][r][1] = _mm512_setzero_ps();
        int64_t i = begin;
        for (; i + (U - 1) * step < end; i += U * step)
            for (int u = 0; u < U; ++u) {
                const typename kind::number* weights = panel + (i + u * step) * kPanel;
                for (int r = 0; r < R; ++r) {
                    sums[u][r][0] = kind::multiply(sums[u][r][0], weights, x + r * stride + i + u * step);
                    sums[u][r][1] = kind::multiply(sums[u][r][1], weights + half, x + r * stride + i + u * step);
                }
            }
        for (; i < end; i += step)
            for (int r = 0; r < R; ++r) {
                sums[0][r][0] = kind::multiply(sums[0][r][0], panel + i * kPanel, x + r * stride + i);
                sums[0][r][1] = kind::multiply(sums[0][r][1], panel + i * kPanel + half, x + r * stride + i);
            }
        for (int r = 0; r < R; ++r)
            for (int h = 0; h < 2; ++h)
                for (int u = 0; u < U; ++u) totals[r][h] = _mm512_add_ps(totals[r][h], sums[u][r][h]);
    }
    for (int h = 0; h < 2; ++h) {
        const int64_t left = outputs - h * 16;
        const __mmask16 lanes = left >= 16 ? 0xffff : left <= 0 ? 0 : __mmask16((1u << left) - 1);
        const __m512 start = bias ? kind::load(bias + h * 16, lanes) : _mm512_setzero_ps();
        for (int r = 0; r < R; ++r)
            kind::save(y + r * O + h * 16, (__m512)activate(activation, (vec)_mm512_add_ps(totals[r][h], start)), lanes);
    }
}

template <typename kind>
void linear(const typename kind::number* x, int64_t M, int64_t stride, const typename kind::number* packed,
            const typename kind::number* bias, Activation activation, typename kind::number* y, int64_t O, int64_t I, int threads) {
    const int64_t panels = panels_of(O), blocks = (M + kBlockRows - 1) / kBlockRows;
// Dynamic, since another thread of the machine may hold one of ours up: the others then take over its panels.
#pragma omp parallel for schedule(dynamic, 4) num_threads(threads)
    for (int64_t item = 0; item < blocks * panels; ++item) {
        const int64_t p = item / blocks, first = item % blocks * kBlockRows;
        const int64_t end = first + kBlockRows < M ? first + kBlockRows : M;
        const typename kind::number* panel = packed + p * kPanel * I;
        const typename kind::number* own_bias = bias ? bias + p * kPanel : nullptr;
        const int64_t outputs = O - p * kPanel < kPanel ? O - p * kPanel : kPanel;
        int64_t m = first;
#define TESSERA_ROWS(R, U) \
    panel_times_rows<kind, R, U>(panel, x + m * stride, stride, own_bias, activation, y + m * O + p * kPanel, O, I, outputs)
        for (; m + kRows <= end; m += kRows) TESSERA_ROWS(8, 1);
        switch (end - m) {
            case 7: TESSERA_ROWS(7, 1); break;
            case 6: TESSERA_ROWS(6, 1); break;
            case 5: TESSERA_ROWS(5, 1); break;
            case 4: TESSERA_ROWS(4, 2); break;
            case 3: TESSERA_ROWS(3, 2); break;
            case 2: TESSERA_ROWS(2, 4); break;
            case 1: TESSERA_ROWS(1, 8); break;
        }
#undef TESSERA_ROWS
    }
}

#endif

}  // namespace

extern "C" {

int tessera_linear_supported([[maybe_unused]] int is_bf16) {
#if defined(__AVX512BF16__)
    return 1;
#elif defined(__AVX512F__)
    return !is_bf16;
#else
    return 0;
#endif
}

int64_t tessera_linear_packed_numbers(int64_t O, int64_t I) { return panels_of(O) * kPanel * I; }

void tessera_linear_pack(int is_bf16, int threads, const void* plain, void* packed, int64_t O, int64_t I) {
    if (is_bf16)
        pack<uint16_t, place_bf16>(static_cast<const uint16_t*>(plain), static_cast<uint16_t*>(packed), O, I, threads);
    else
        pack<float, place_fp32>(static_cast<const float*>(plain), static_cast<float*>(packed), O, I, threads);
}

// x is [M, I] with rows ``stride`` apart; in bf16 I must be even. y is [M, O], contiguous.
void tessera_linear(int is_bf16, int threads, const void* x, int64_t M, int64_t stride, const void* packed, const void* bias,
                    int activation, void* y, int64_t O, int64_t I) {
#ifdef __AVX512F__
    if (!is_bf16)
        linear<Fp32>(static_cast<const float*>(x), M, stride, static_cast<const float*>(packed), static_cast<const float*>(bias),
                     Activation(activation), static_cast<float*>(y), O, I, threads);
#endif
#ifdef __AVX512BF16__
    if (is_bf16)
        linear<Bf16>(static_cast<const uint16_t*>(x), M, stride, static_cast<const uint16_t*>(packed),
                     static_cast<const uint16_t*>(bias), Activation(activation), static_cast<uint16_t*>(y), O, I, threads);
#endif
}
}
