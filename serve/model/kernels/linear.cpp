// Linear layers. With few rows (decoding) the weights are streamed through once, as fast as memory gives them.
//
// Shapes.  M rows   I input features   O output features
//
// Packed weights: panels of 32 outputs, [O / 32, I, 32] in fp32 and [O / 32, I / 2, 32, 2] in bf16 (two neighbouring inputs
// side by side, as a processor's bf16 dot product wants them; I is even there), outputs padded with zeros. With AVX2 alone panels
// of fp32 have 16. One panel is one stream of memory; groups of up to eight rows share what was read of it. Panels of bf16 may be
// compressed: see compressed.h.
#include <cstdint>
#include <cstring>
#include <memory>
#include <type_traits>

#include "avx2.h"
#include "compressed.h"
#include "packing.h"
#include "parts.h"

namespace {

#if defined(__AVX512F__) || defined(TESSERA_AVX2)

// A panel as products read it, and where what the next one is made of lies; of a transposed weight that is in no one place.
template <typename number>
struct Panel {
    const number* numbers;
    const char* next;
};

// Where a product's weight lies that is not packed yet, or null: it may be packed at any moment.
inline const char* plain_of(const tessera::Job& job) { return job.plain ? job.plain->place.load(std::memory_order_acquire) : nullptr; }

// A panel of a weight that is not packed yet: it is packed for whoever asks, each time, so a product is the same to the last bit before
// and after. The memory is of the calling thread, until it asks for another.
template <int64_t width, typename number>
Panel<number> panel_packed_now(const tessera::Job& job, const char* plain, int64_t p) {
    thread_local Scratch scratch;
    char* panel = scratch.of(width * job.inputs * int64_t(sizeof(number)));
    const int64_t stride = job.plain->stride * int64_t(sizeof(number));
    const bool is_transposed = job.plain->is_transposed;
    pack_panel_of<width, number>(plain, stride, is_transposed, p, panel, job.width, job.inputs);
    return {reinterpret_cast<const number*>(panel), is_transposed ? panel : plain + (p + 1) * width * stride};
}

template <int64_t width, typename number>
Panel<number> panel_of(const tessera::Job& job, int64_t p) {
    if (const char* plain = plain_of(job)) return panel_packed_now<width, number>(job, plain, p);
    const int64_t bytes = width * job.inputs * int64_t(sizeof(number));
    const char* panel = static_cast<const char*>(job.weight) + p * bytes;
    return {reinterpret_cast<const number*>(panel), panel + bytes};
}

#endif

#ifdef __AVX512F__

// What is read some time later is asked for: processors look ahead within a page alone, and wait at its end where a page is small.
// A panel's end asks for the beginning of the next.
constexpr int64_t kBehind = 2048;  // bytes

// Reads a panel's weights as they are.
template <typename kind>
struct Whole {
    static constexpr int kTogether = 1;
    static constexpr bool kAsks = false;  // whether eight rows ask for what they read themselves
    const typename kind::number* panel;

    void first(int64_t i, typename kind::lanes (&out)[2]) const {
        out[0] = kind::weights_at(panel + i * kPanel), out[1] = kind::weights_at(panel + i * kPanel + kPanel / 2 * kind::kInputs);
    }
    void second(typename kind::lanes (&)[2]) const {}
    void ask_behind(int64_t i, int64_t bytes) const {
        for (int64_t line = 0; line < 2 * kLine; line += kLine)
            _mm_prefetch(reinterpret_cast<const char*>(panel + i * kPanel) + bytes + line, _MM_HINT_T0);
    }
};

// A group of rows and what becomes of it.
template <typename kind>
struct Group {
    const typename kind::number* x;
    int64_t stride;
    const typename kind::number* bias;
    Activation activation;
    typename kind::number* y;
    int64_t O, I, outputs;

    void go_on(int64_t rows) { x += rows * stride, y += rows * O; }
};

// A chunk of one panel's inputs times R rows, added to their totals: each row's of the panel's first sixteen outputs, then of the
// others. With few rows the sums are split U ways along the inputs, so that additions do not wait for one another.
template <typename kind, int R, int U, typename Weights>
__attribute__((always_inline)) inline void add_chunk(Weights& weights, const Group<kind>& group, int64_t begin, int64_t end,
                                                     [[maybe_unused]] Ahead& ahead, __m512 (&totals)[2 * R]) {
    constexpr int64_t step = kind::kInputs;
    constexpr int together = Weights::kTogether, turn = U > together ? U : together;  // words
    const int64_t stride = group.stride;
    const typename kind::number* x = group.x;
    __m512 sums[U][2 * R];
    typename kind::lanes w[2];
#pragma GCC unroll 16
    for (int t = 0; t < 2 * R * U; ++t) sums[t / (2 * R)][t % (2 * R)] = _mm512_setzero_ps();
    int64_t i = begin;
    for (; i + (turn - 1) * step < end; i += turn * step) {
        if constexpr (R == kRows) {
#pragma GCC unroll 2
            for (int k = 0; k < together; ++k, ahead.place += ahead.stride) _mm_prefetch(ahead.place, _MM_HINT_T1);
        }
#pragma GCC unroll 8
        for (int k = 0; k < turn; ++k) {
            if (k % together) {
                weights.second(w);
            } else {
                if constexpr (R < kRows || Weights::kAsks) weights.ask_behind(i + k * step, kBehind);
                weights.first(i + k * step, w);
            }
#pragma GCC unroll 16
            for (int t = 0; t < 2 * R; ++t) sums[k % U][t] = kind::multiply(sums[k % U][t], w[t % 2], x + t / 2 * stride + i + k * step);
        }
    }
    for (int k = 0; i < end; i += step, ++k) {
        k % together ? weights.second(w) : weights.first(i, w);
#pragma GCC unroll 16
        for (int t = 0; t < 2 * R; ++t) sums[0][t] = kind::multiply(sums[0][t], w[t % 2], x + t / 2 * stride + i);
    }
#pragma GCC unroll 16
    for (int t = 0; t < 2 * R * U; ++t) totals[t / U] = _mm512_add_ps(totals[t / U], sums[t % U][t / U]);
}

// What the totals of R rows give.
template <typename kind, int R>
void finish(const Group<kind>& group, const __m512* totals) {
    for (int h = 0; h < 2; ++h) {
        const int64_t left = group.outputs - h * 16;
        const __mmask16 lanes = left >= 16 ? 0xffff : left <= 0 ? 0 : __mmask16((1u << left) - 1);
        const __m512 start = group.bias ? kind::load(group.bias + h * 16, lanes) : _mm512_setzero_ps();
        for (int r = 0; r < R; ++r)
            kind::save(group.y + r * group.O + h * 16,
                       (__m512)activate<kind::kInputs == 2>(group.activation, (vec)_mm512_add_ps(totals[2 * r + h], start)), lanes);
    }
}

// One panel times R rows.
template <typename kind, int R, int U, typename Weights>
void panel_times_group(Weights weights, const Group<kind>& group, Ahead ahead) {
    // What is stored at the end is a line or two of each row, which come meanwhile.
    if constexpr (R == kRows)
        for (int r = 0; r < R; ++r)
            for (int64_t o = 0; o < kPanel; o += kLine / int64_t(sizeof(*group.y))) __builtin_prefetch(group.y + r * group.O + o, 1);
    __m512 totals[2 * R];
#pragma GCC unroll 16
    for (int t = 0; t < 2 * R; ++t) totals[t] = _mm512_setzero_ps();
    for (int64_t begin = 0; begin < group.I; begin += kChunk)
        add_chunk<kind, R, U>(weights, group, begin, begin + kChunk < group.I ? begin + kChunk : group.I, ahead, totals);
    finish<kind, R>(group, totals);
}

template <int value>
using Number = std::integral_constant<int, value>;

// ``by(R, U)`` for as many rows as there are, fewer than eight.
template <typename By>
void by_rows(int64_t rows, const By& by) {
    switch (rows) {
        case 7: return by(Number<7>{}, Number<1>{});
        case 6: return by(Number<6>{}, Number<1>{});
        case 5: return by(Number<5>{}, Number<1>{});
        case 4: return by(Number<4>{}, Number<2>{});
        case 3: return by(Number<3>{}, Number<2>{});
        case 2: return by(Number<2>{}, Number<4>{});
        case 1: return by(Number<1>{}, Number<8>{});
    }
}

// One panel times some rows, from the first of ``group`` on, by groups of eight. ``next``: what is read behind it, of so many bytes,
// or none. ``done``: groups that have asked for their share of it.
template <typename kind, typename Weights>
void panel_times_rows(const Weights& weights, Group<kind> group, int64_t rows, const char* next, int64_t bytes, int64_t done = 0) {
    const int64_t words = group.I / kind::kInputs, groups = done + rows / kRows;
    Ahead ahead = {reinterpret_cast<const char*>(group.x), 0};
    for (; done < groups; ++done, group.go_on(kRows)) {
        if (next) ahead = share_of(next, bytes, words, done, groups);
        panel_times_group<kind, kRows, 1>(weights, group, ahead);
    }
    by_rows(rows % kRows, [&](auto R, auto U) { panel_times_group<kind, R, U>(weights, group, ahead); });
}

// By all threads of the parallel region that it is called in. ``multiply(p, group, rows, wants_next)`` for each item.
template <typename kind, typename Multiply>
void share_panels(const tessera::Job& job, tessera::Hand& hand, const Blocks& blocks, const Multiply& multiply) {
    typedef typename kind::number number;
    const auto* bias = static_cast<const number*>(job.bias);
    const int64_t M = job.rows, O = job.width;
    const int64_t panels = job.panels ? job.num_panels : panels_of(O);
    hand.share_out(blocks.count * panels, [&](int64_t item) {
        const int64_t at = item % panels, p = job.panels ? job.panels[at] : at, first = item / panels * blocks.height;
        const int64_t rows = (first + blocks.height < M ? first + blocks.height : M) - first;
        const Group<kind> group{static_cast<const number*>(job.x) + first * job.x_stride,
                                job.x_stride,
                                bias ? bias + p * kPanel : nullptr,
                                Activation(job.activation),
                                static_cast<number*>(job.out) + first * O + p * kPanel,
                                O,
                                job.inputs,
                                O - p * kPanel < kPanel ? O - p * kPanel : kPanel};
        multiply(p, group, rows, !job.panels && p + 1 < panels && rows / kRows > 1);  // a single group waits for its own
    });
}

template <typename kind>
void linear(const tessera::Job& job, tessera::Hand& hand) {
    typedef typename kind::number number;
    share_panels<kind>(job, hand, Blocks(job.rows), [&](int64_t p, const Group<kind>& group, int64_t rows, bool wants_next) {
        const auto [panel, next] = panel_of<kPanel, number>(job, p);
        const int64_t bytes = kPanel * job.inputs * int64_t(sizeof(number));
        panel_times_rows<kind>(Whole<kind>{panel}, group, rows, wants_next ? next : nullptr, bytes);
    });
}

#ifdef TESSERA_BF16_LANES

// The same of compressed panels. The first eight of many rows leave a panel as it was to the others, while they are multiplied.
void linear_compressed(const tessera::Job& job, tessera::Hand& hand) {
    const int64_t I = job.inputs, bytes = compressed_bytes(I);
    const Blocks blocks = blocks_for(job.rows, I, panels_of(job.width), omp_get_num_threads());
    share_panels<Bf16>(job, hand, blocks, [&](int64_t p, Group<Bf16> group, int64_t rows, bool wants_next) {
        const char* place = static_cast<const char*>(job.weight) + p * bytes;
        const char* next = wants_next ? place + bytes : nullptr;
        if (const char* plain = plain_of(job)) {
            const auto [panel, behind] = panel_packed_now<kPanel, uint16_t>(job, plain, p);
            panel_times_rows<Bf16>(Whole<Bf16>{panel}, group, rows, wants_next ? behind : nullptr, 2 * kPanel * I);
        } else if (const uint16_t* elsewhere = reinterpret_cast<const PanelHead*>(place)->elsewhere) {
            panel_times_rows<Bf16>(Whole<Bf16>{elsewhere}, group, rows, next, bytes);
        } else if (rows < 2 * kRows) {
            panel_times_rows<Bf16>(Compressed(place, I), group, rows, nullptr, 0);
        } else {
            thread_local Scratch scratch;
            uint16_t* whole = reinterpret_cast<uint16_t*>(scratch.of(quads_of(I) * kQuad * int64_t(sizeof(uint16_t))));
            const Ahead ahead = next ? share_of(next, bytes, I / Bf16::kInputs, 0, rows / kRows) : Ahead{place, 0};
            panel_times_group<Bf16, kRows, 1>(Keeping(place, I, whole), group, ahead);
            group.go_on(kRows);
            panel_times_rows<Bf16>(Whole<Bf16>{whole}, group, rows - kRows, next, bytes, 1);
        }
    });
}

#endif

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
    if (job.bits) linear_compressed(job, hand);
    else if (job.is_bf16) by(Bf16{});
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

// Whether panels of bf16 weights can be compressed.
int tessera_linear_compresses() {
#ifdef TESSERA_BF16_LANES
    return 1;
#else
    return 0;
#endif
}

int64_t tessera_linear_compressed_bytes([[maybe_unused]] int64_t I) {
#ifdef TESSERA_BF16_LANES
    return compressed_bytes(I);
#else
    return 0;
#endif
}

// Compresses the panels of rows as they are packed; returns how many there was no room for. ``spare``, of as many panels, none while
// that is not known, is where those go that the call before had no room for.
int64_t tessera_linear_compress([[maybe_unused]] int threads, [[maybe_unused]] const void* plain, [[maybe_unused]] int64_t stride,
                                [[maybe_unused]] int is_transposed, [[maybe_unused]] void* packed, [[maybe_unused]] int64_t O,
                                [[maybe_unused]] int64_t I, [[maybe_unused]] void* spare) {
#ifdef TESSERA_BF16_LANES
    return compress_all(threads, static_cast<const char*>(plain), stride, is_transposed, static_cast<char*>(packed), O, I,
                        static_cast<uint16_t*>(spare));
#else
    return 0;
#endif
}

// So many panels as they were before they were compressed.
void tessera_linear_decompress([[maybe_unused]] const void* packed, [[maybe_unused]] int64_t panels, [[maybe_unused]] int64_t I,
                               [[maybe_unused]] void* out) {
#ifdef TESSERA_BF16_LANES
    for (int64_t p = 0; p < panels; ++p)
        decompress(static_cast<const char*>(packed) + p * compressed_bytes(I), I, static_cast<uint16_t*>(out) + p * I * kPanel);
#endif
}

// x is [M, I] with rows ``x_stride`` apart; in bf16 I must be even. y is [M, O], contiguous. ``plain``: of a weight that may not be
// packed yet, or none. ``bits``: 12 if it is compressed where it is packed, else 0.
void tessera_linear(int is_bf16, int bits, int threads, const void* x, int64_t M, int64_t x_stride, const void* packed,
                    const tessera::PlainRows* plain, const void* bias, int activation, void* y, int64_t O, int64_t I) {
    tessera::Job job = {};
    job.is_bf16 = is_bf16, job.bits = bits, job.x = x, job.rows = M, job.x_stride = x_stride, job.weight = packed, job.plain = plain, job.bias = bias;
    job.activation = activation, job.out = y, job.width = job.out_stride = O, job.inputs = I;
    tessera::Team team(threads);
#pragma omp parallel num_threads(threads)
    {
        tessera::Hand hand(team);
        tessera::multiply(job, hand);
    }
}
}
