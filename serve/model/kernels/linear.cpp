// Linear layers. With few rows (decoding) the weights are streamed through once, as fast as memory gives them.
//
// Shapes.  M rows   I input features   O output features
//
// Packed weights: panels of 32 outputs, [O / 32, I, 32] in fp32 and [O / 32, I / 2, 32, 2] in bf16 (two neighbouring inputs
// side by side, as a processor's bf16 dot product wants them; I is even there), outputs padded with zeros. With AVX2 alone panels
// of fp32 have 16. One panel is one stream of memory; groups of up to eight rows share what was read of it.
#include <cstdint>
#include <cstring>
#include <memory>

#include "avx2.h"
#include "parts.h"

namespace {

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

#if defined(__AVX512F__) || defined(TESSERA_AVX2)

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

// A panel as products read it, and where what the next one is made of lies; of a transposed weight that is in no one place.
template <typename number>
struct Panel {
    const number* numbers;
    const char* next;
};

// A panel of a product's weight. One that is not packed yet is packed for whoever asks, each time: so a product is the same to the
// last bit before and after. The memory is of the calling thread, until it asks for another.
template <int64_t width, typename number>
Panel<number> panel_of(const tessera::Job& job, int64_t p) {
    const int64_t bytes = width * job.inputs * int64_t(sizeof(number));
    const char* plain = job.plain ? job.plain->place.load(std::memory_order_acquire) : nullptr;
    if (!plain) {
        const char* panel = static_cast<const char*>(job.weight) + p * bytes;
        return {reinterpret_cast<const number*>(panel), panel + bytes};
    }
    thread_local Scratch scratch;
    char* panel = scratch.of(bytes);
    const int64_t stride = job.plain->stride * int64_t(sizeof(number));
    const bool is_transposed = job.plain->is_transposed;
    pack_panel_of<width, number>(plain, stride, is_transposed, p, panel, job.width, job.inputs);
    return {reinterpret_cast<const number*>(panel), is_transposed ? panel : plain + (p + 1) * width * stride};
}

#endif

#ifdef __AVX512F__

constexpr int64_t kBehind = 2048;  // bytes; a panel's end asks for the beginning of the next

// A word's weights of further on: processors look ahead within a page alone, and wait at its end where a page is small.
template <typename number>
void ask_behind(const number* weights) {
    for (int64_t line = 0; line < 2 * kLine; line += kLine)
        _mm_prefetch(reinterpret_cast<const char*>(weights) + kBehind + line, _MM_HINT_T0);
}

// One panel times R rows. With few rows the sums are split U ways along the inputs, so that additions do not wait for one another.
template <typename kind, int R, int U>
void panel_times_rows(const typename kind::number* panel, const typename kind::number* x, int64_t stride, const typename kind::number* bias,
                      Activation activation, typename kind::number* y, int64_t O, int64_t I, int64_t outputs, [[maybe_unused]] Ahead ahead) {
    constexpr int64_t step = kind::kInputs, half = kPanel / 2 * step;
    __m512 totals[R][2];
    for (int r = 0; r < R; ++r) totals[r][0] = totals[r][1] = _mm512_setzero_ps();
    for (int64_t begin = 0; begin < I; begin += kChunk) {
        const int64_t end = begin + kChunk < I ? begin + kChunk : I;
        __m512 sums[U][R][2];
        for (int u = 0; u < U; ++u)
            for (int r = 0; r < R; ++r) sums[u][r][0] = sums[u][r][1] = _mm512_setzero_ps();
        int64_t i = begin;
        for (; i + (U - 1) * step < end; i += U * step) {
            if constexpr (R == kRows) {
                _mm_prefetch(ahead.place, _MM_HINT_T1);
                ahead.place += ahead.stride;
            }
            for (int u = 0; u < U; ++u) {
                const typename kind::number* weights = panel + (i + u * step) * kPanel;
                if constexpr (R < kRows) ask_behind(weights);
                for (int r = 0; r < R; ++r) {
                    sums[u][r][0] = kind::multiply(sums[u][r][0], weights, x + r * stride + i + u * step);
                    sums[u][r][1] = kind::multiply(sums[u][r][1], weights + half, x + r * stride + i + u * step);
                }
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

// By all threads of the parallel region that it is called in.
template <typename kind>
void linear(const tessera::Job& job, tessera::Hand& hand) {
    typedef typename kind::number number;
    const auto* x = static_cast<const number*>(job.x);
    const auto* bias = static_cast<const number*>(job.bias);
    auto* y = static_cast<number*>(job.out);
    const int64_t M = job.rows, stride = job.x_stride, O = job.width, I = job.inputs;
    const Activation activation = Activation(job.activation);
    const int64_t panels = job.panels ? job.num_panels : panels_of(O), words = I / kind::kInputs;
    const Blocks blocks(M);
    hand.share_out(blocks.count * panels, [&](int64_t item) {
        const int64_t at = item % panels, p = job.panels ? job.panels[at] : at, first = item / panels * blocks.height;
        const int64_t end = first + blocks.height < M ? first + blocks.height : M;
        const auto [panel, next] = panel_of<kPanel, number>(job, p);
        const number* own_bias = bias ? bias + p * kPanel : nullptr;
        const int64_t outputs = O - p * kPanel < kPanel ? O - p * kPanel : kPanel;
        const int64_t groups = (end - first) / kRows;
        const bool wants_next = !job.panels && p + 1 < panels && groups > 1;  // a single group waits for its own
        int64_t m = first;
        Ahead ahead = {reinterpret_cast<const char*>(panel), 0};
#define TESSERA_ROWS(R, U) \
    panel_times_rows<kind, R, U>(panel, x + m * stride, stride, own_bias, activation, y + m * O + p * kPanel, O, I, outputs, ahead)
        for (; m + kRows <= end; m += kRows) {
            if (wants_next) ahead = share_of(next, kPanel * I * int64_t(sizeof(number)), words, (m - first) / kRows, groups);
            TESSERA_ROWS(8, 1);
        }
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
    });
}

#endif

#ifdef TESSERA_AVX2

template <typename Plain, typename scalar>
void multiply_plain(const tessera::Job& job, tessera::Hand& hand) {
    const auto weights_of = [&](int64_t p) { return Plain(panel_of<Plain::kOutputs, typename Plain::number>(job, p).numbers); };
    multiply_rows(call_of<scalar>(job), weights_of, hand);
}

#endif

}  // namespace

void tessera::multiply([[maybe_unused]] const Job& job, [[maybe_unused]] Hand& hand) {
#ifdef __AVX512F__
    const auto by = [&](auto kind) { linear<decltype(kind)>(job, hand); };
    if (!job.is_bf16) by(Fp32{});
#endif
#ifdef TESSERA_BF16_LANES
    if (job.is_bf16) by(Bf16{});
#endif
#ifdef TESSERA_AVX2
    if (job.is_bf16)
        multiply_plain<PlainBf16, bf16>(job, hand);
    else
        multiply_plain<PlainFp32, float>(job, hand);
#endif
}

extern "C" {

int tessera_linear_supported([[maybe_unused]] int is_bf16) {
#if defined(TESSERA_BF16_LANES)
    return 1;
#elif defined(__AVX512F__)
    return !is_bf16;
#elif defined(TESSERA_AVX2)
    return 1;
#else
    return 0;
#endif
}

// How many outputs lie side by side in a packed weight.
int tessera_linear_panel_outputs([[maybe_unused]] int is_bf16) {
#ifdef TESSERA_AVX2
    if (!is_bf16) return int(PlainFp32::kOutputs);
#endif
    return int(kPanel);
}

int64_t tessera_linear_packed_numbers(int64_t O, int64_t I) { return panels_of(O) * kPanel * I; }

// The plain rows are ``stride`` numbers apart; of a weight that is stored transposed the columns are.
void tessera_linear_pack(int is_bf16, int threads, const void* plain, int64_t stride, int is_transposed, void* packed, int64_t O, int64_t I) {
    const char* from = static_cast<const char*>(plain);
    char* to = static_cast<char*>(packed);
    if (is_bf16) return pack<kPanel, uint16_t>(from, stride, is_transposed, to, O, I, threads);
#ifdef TESSERA_AVX2
    pack<PlainFp32::kOutputs, float>(from, stride, is_transposed, to, O, I, threads);
#else
    pack<kPanel, float>(from, stride, is_transposed, to, O, I, threads);
#endif
}

// x is [M, I] with rows ``x_stride`` apart; in bf16 I must be even. y is [M, O], contiguous. ``plain``: of a weight that may not be
// packed yet, or none.
void tessera_linear(int is_bf16, int threads, const void* x, int64_t M, int64_t x_stride, const void* packed,
                    const tessera::PlainRows* plain, const void* bias, int activation, void* y, int64_t O, int64_t I) {
    tessera::Job job = {};
    job.is_bf16 = is_bf16, job.x = x, job.rows = M, job.x_stride = x_stride, job.weight = packed, job.plain = plain, job.bias = bias;
    job.activation = activation, job.out = y, job.width = job.out_stride = O, job.inputs = I;
    tessera::Team team(threads);
#pragma omp parallel num_threads(threads)
    {
        tessera::Hand hand(team);
        tessera::multiply(job, hand);
    }
}
}
