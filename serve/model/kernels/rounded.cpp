// Linear layers of whole numbers times whole numbers, for bf16 models on processors that multiply bytes (AVX512-VNNI). The weights are
// those of quantized.cpp. Of a row's inputs each run of up to 64 gets a scale of its own, by which the largest becomes 127: an input
// far beyond others costs those of its own run precision, and no more. Sums of a run are exact.
//
// Shapes.  M rows   I input features   O output features   G groups of inputs   A runs of inputs
//
// Packed weights: panels of 32 outputs, [O / 32, I / 4, 32, 4], padded with zeros. 8 bits: one byte each, as value + 128. 4 bits, as
// value + 8: the panel's first sixteen outputs in the low halves of the bytes, the others in the high ones. Scales: fp32 [O / 32, G, 32].
#include <memory>

#include "parts.h"
#include "products.h"

#if defined(__AVX512VNNI__) && defined(TESSERA_BF16_LANES)
#define TESSERA_ROUNDED
#endif

namespace {

#ifdef TESSERA_ROUNDED

constexpr int64_t kQuad = 4;  // inputs consumed by one multiply
constexpr int64_t kMostRun = 64;
constexpr int64_t kBlockBytes = 384 << 10;  // a block's inputs, which stay in a core's cache beside a panel
constexpr int64_t kFewRows = 2;          // that each thread rounds for itself: nobody waits for the others
constexpr float kLeastTop = 1e-30f;      // runs of smaller numbers are zeros: 127 divided by such a number would be none

struct Layer {
    const uint8_t* packed;
    const float* scales;
    const uint16_t* bias;
    Activation activation;
    int64_t O, I, bits, group, run;
    int64_t groups() const { return (I + group - 1) / group; }
    int64_t runs() const { return (I + run - 1) / run; }
    int64_t panel_bytes() const { return kPanel * I * bits / 8; }
};

// Rows of inputs as whole numbers.
struct Rounded {
    int8_t* numbers;   // [M, I]
    float* scales;     // [M, A]
    int32_t* excess;   // [M, A]: what products with weights above zero have too much, to be added
    Rounded from(int64_t row, const Layer& layer) const {
        return {numbers + row * layer.I, scales + row * layer.runs(), excess + row * layer.runs()};
    }
    static int64_t bytes_of(int64_t rows, const Layer& layer) { return rows * (layer.I + layer.runs() * 8); }
    // The numbers come last: their count need not be a multiple of a float's size.
    static Rounded in(char* memory, int64_t rows, const Layer& layer) {
        float* scales = reinterpret_cast<float*>(memory);
        int32_t* excess = reinterpret_cast<int32_t*>(scales + rows * layer.runs());
        return {reinterpret_cast<int8_t*>(excess + rows * layer.runs()), scales, excess};
    }
};

// Rounds one run, of 64 inputs where ``is_whole``. With something in it that is no finite number it gets NaN for its scale, and all
// that is made of the row becomes NaN.
template <bool is_whole>
inline void round_run(const uint16_t* x, int64_t count, int32_t above, int8_t* numbers, float* scale, int32_t* excess) {
    constexpr int kParts = kMostRun / 16;
    const int parts = is_whole ? kParts : int((count + 15) / 16);
    __m512 inputs[kParts];
    __m512i sizes = _mm512_setzero_si512(), sum = _mm512_setzero_si512();
    const auto lanes_of = [&](int k) {
        const int64_t left = count - k * 16;
        return is_whole || left >= 16 ? __mmask16(0xffff) : __mmask16((1u << left) - 1);
    };
#pragma GCC unroll 4
    for (int k = 0; k < parts; ++k) {
        inputs[k] = Bf16::load(x + k * 16, lanes_of(k));
        sizes = _mm512_max_epu32(sizes, _mm512_and_si512(_mm512_castps_si512(inputs[k]), _mm512_set1_epi32(0x7fffffff)));
    }
    const uint32_t bits = _mm512_reduce_max_epu32(sizes);
    const bool is_finite = bits < 0x7f800000u;
    float top;
    std::memcpy(&top, &bits, sizeof(top));
    const __m512 inverse = _mm512_set1_ps(is_finite && top >= kLeastTop ? 127.0f / top : 0.0f);
#pragma GCC unroll 4
    for (int k = 0; k < parts; ++k) {
        const __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(inputs[k], inverse));
        sum = _mm512_add_epi32(sum, whole);
        const __m128i bytes = _mm512_cvtsepi32_epi8(whole);
        if (is_whole) _mm_storeu_si128(reinterpret_cast<__m128i*>(numbers + k * 16), bytes);
        else _mm_mask_storeu_epi8(numbers + k * 16, lanes_of(k), bytes);
    }
    *scale = is_finite ? top / 127.0f : __builtin_nanf("");
    *excess = is_finite ? -above * _mm512_reduce_add_epi32(sum) : 0;
}

void round_row(const uint16_t* x, const Layer& layer, const Rounded& out) {
    const int32_t above = layer.bits == 8 ? 128 : 8;
    for (int64_t begin = 0, a = 0; begin < layer.I; begin += layer.run, ++a) {
        const int64_t left = layer.I - begin, count = left < layer.run ? left : layer.run;
        (count == kMostRun ? round_run<true> : round_run<false>)(x + begin, count, above, out.numbers + begin, out.scales + a, out.excess + a);
    }
}

// Four inputs' weights of a panel in registers: those of its first sixteen outputs, then the others'.
template <int bits>
inline void load_quad(const uint8_t* packed, __m512i (&out)[2]) {
    if constexpr (bits == 8) {
        out[0] = _mm512_loadu_si512(packed);
        out[1] = _mm512_loadu_si512(packed + 64);
    } else {
        const __m512i both = _mm512_loadu_si512(packed), low = _mm512_set1_epi8(15);
        out[0] = _mm512_and_si512(both, low);
        out[1] = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
    }
}

inline __m512i quad_of(const int8_t* numbers) {
    int32_t quad;
    std::memcpy(&quad, numbers, sizeof(quad));
    return _mm512_set1_epi32(quad);
}

// Of bytes of weights, none below zero, and of inputs. By its name: of the intrinsic gcc (12) copies the sum before and after.
inline void add_products(__m512i& sum, __m512i weights, __m512i quad) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(weights), "v"(quad));
}

template <int bits, int R, int U>
void panel_times_rows(const Layer& layer, int64_t p, const Rounded& x, uint16_t* y, [[maybe_unused]] Ahead ahead) {
    constexpr int64_t line = kPanel * kQuad * bits / 8;
    const uint8_t* packed = layer.packed + p * layer.panel_bytes();
    const float* scales = layer.scales + p * layer.groups() * kPanel;
    const int8_t* numbers = x.numbers;
    const int64_t I = layer.I, A = layer.runs();
    __m512 totals[R][2];
    for (int r = 0; r < R; ++r) totals[r][0] = totals[r][1] = _mm512_setzero_ps();
    for (int64_t begin = 0, a = 0; begin < I; begin += layer.run, ++a) {
        int64_t quads = (begin + layer.run < I ? layer.run : I - begin) / kQuad;
        __m512i sums[U][R][2], w[2];
        for (int r = 0; r < R; ++r) sums[0][r][0] = sums[0][r][1] = _mm512_set1_epi32(x.excess[r * A + a]);
        for (int u = 1; u < U; ++u)
            for (int r = 0; r < R; ++r) sums[u][r][0] = sums[u][r][1] = _mm512_setzero_si512();
        for (; quads >= U; quads -= U) {
            if constexpr (R == kRows) {
                _mm_prefetch(ahead.place, _MM_HINT_T1);
                ahead.place += ahead.stride;
            }
            for (int u = 0; u < U; ++u, packed += line, numbers += kQuad) {
                load_quad<bits>(packed, w);
                for (int r = 0; r < R; ++r) {
                    const __m512i quad = quad_of(numbers + r * I);
                    for (int h = 0; h < 2; ++h) add_products(sums[u][r][h], w[h], quad);
                }
            }
        }
        if constexpr (U > 1)
            for (; quads > 0; --quads, packed += line, numbers += kQuad) {
                load_quad<bits>(packed, w);
                for (int r = 0; r < R; ++r) {
                    const __m512i quad = quad_of(numbers + r * I);
                    for (int h = 0; h < 2; ++h) add_products(sums[0][r][h], w[h], quad);
                }
            }
        const float* own = scales + begin / layer.group * kPanel;
        for (int h = 0; h < 2; ++h)
            for (int r = 0; r < R; ++r) {
                for (int u = 1; u < U; ++u) sums[0][r][h] = _mm512_add_epi32(sums[0][r][h], sums[u][r][h]);
                __m512 scale = _mm512_set1_ps(x.scales[r * A + a]);
                if constexpr (bits == 4) scale = _mm512_mul_ps(scale, _mm512_loadu_ps(own + h * 16));
                totals[r][h] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[0][r][h]), scale, totals[r][h]);
            }
    }
    for (int h = 0; h < 2; ++h) {
        const int64_t place = p * kPanel + h * 16, left = layer.O - place;
        const __mmask16 lanes = left >= 16 ? 0xffff : left <= 0 ? 0 : __mmask16((1u << left) - 1);
        const __m512 start = layer.bias && left > 0 ? Bf16::load(layer.bias + place, lanes) : _mm512_setzero_ps();
        const __m512 scale = bits == 8 ? _mm512_loadu_ps(scales + h * 16) : _mm512_set1_ps(1.0f);
        for (int r = 0; r < R; ++r) {
            const __m512 sum = _mm512_fmadd_ps(totals[r][h], scale, start);
            Bf16::save(y + r * layer.O + place, (__m512)activate<true>(layer.activation, (vec)sum), lanes);
        }
    }
}

template <int bits>
void panel_times_all(const Layer& layer, int64_t p, const Rounded& x, int64_t first, int64_t end, uint16_t* y) {
    const int64_t words = layer.I / kQuad, groups = (end - first) / kRows, bytes = layer.panel_bytes();
    const uint8_t* behind = p + 1 < panels_of(layer.O) ? layer.packed + (p + 1) * bytes : nullptr;
    int64_t m = first;
    Ahead ahead = {reinterpret_cast<const char*>(layer.packed), 0};
#define TESSERA_ROWS(R, U) panel_times_rows<bits, R, U>(layer, p, x.from(m, layer), y + m * layer.O, ahead)
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

template <int bits>
void multiply(const Layer& layer, const uint16_t* x, int64_t M, int64_t stride, uint16_t* y, tessera::Hand& hand) {
    const bool is_alone = M <= kFewRows;
    std::unique_ptr<char[]> own(is_alone ? new char[size_t(Rounded::bytes_of(M, layer))] : nullptr);
    const Rounded rounded = Rounded::in(is_alone ? own.get() : hand.shared(Rounded::bytes_of(M, layer)), M, layer);
    if (is_alone) {
        for (int64_t m = 0; m < M; ++m) round_row(x + m * stride, layer, rounded.from(m, layer));
    } else {
#pragma omp for schedule(static)
        for (int64_t m = 0; m < M; ++m) round_row(x + m * stride, layer, rounded.from(m, layer));
    }
    const int64_t panels = panels_of(layer.O);
    int64_t most = kBlockBytes / layer.I < kRows ? kRows : kBlockBytes / layer.I;
    while (most > kBlockRows && Blocks(M, most).count * panels < kItemsPerThread * omp_get_num_threads()) most /= 2;
    const Blocks blocks(M, most);
    hand.share_out(blocks.count * panels, [&](int64_t item) {
        const int64_t first = item / panels * blocks.height;
        panel_times_all<bits>(layer, item % panels, rounded, first, first + blocks.height < M ? first + blocks.height : M, y);
    });
}

#endif

}  // namespace

void tessera::multiply_rounded([[maybe_unused]] const Job& job, [[maybe_unused]] Hand& hand) {
#ifdef TESSERA_ROUNDED
    const int64_t run = job.bits == 8 || job.group % kMostRun == 0 ? kMostRun : kMostRun / 2;
    const Layer layer{static_cast<const uint8_t*>(job.weight), static_cast<const float*>(job.scales), static_cast<const uint16_t*>(job.bias),
                      Activation(job.activation), job.width, job.inputs, job.bits, job.group, run};
    (job.bits == 8 ? ::multiply<8> : ::multiply<4>)(layer, static_cast<const uint16_t*>(job.x), job.rows, job.x_stride,
                                                   static_cast<uint16_t*>(job.out), hand);
#endif
}

extern "C" {

int tessera_linear_rounded_supported() {
#ifdef TESSERA_ROUNDED
    return 1;
#else
    return 0;
#endif
}

// As ``tessera_linear_quantized``, of bf16 numbers. I is a multiple of 4; ``group`` is one of 32, or no less than I.
// Supported where ``tessera_linear_rounded_supported`` says so.
void tessera_linear_rounded(int is_bf16, int bits, int threads, const void* x, int64_t M, int64_t stride, const void* packed, const void* scales,
                            const void* bias, int activation, void* y, int64_t O, int64_t I, int64_t group) {
    tessera::Job job = {};
    job.is_bf16 = is_bf16, job.bits = bits, job.x = x, job.rows = M, job.x_stride = stride, job.weight = packed;
    job.scales = scales, job.bias = bias, job.activation = activation, job.out = y, job.width = job.out_stride = O;
    job.inputs = I, job.group = group;
    tessera::Team team(threads);
#pragma omp parallel num_threads(threads)
    {
        tessera::Hand hand(team);
        tessera::multiply_rounded(job, hand);
    }
}
}
