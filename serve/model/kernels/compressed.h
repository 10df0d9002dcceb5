// Panels of bf16 weights in 12 bits a number, from which every bit comes back: few rows take the time that memory needs, and it
// needs three quarters of it.
//
// Weights of one panel differ little in size: nearly all of their exponents are among 15 neighbouring ones, or 0. So an exponent takes
// 4 bits, 0 or its distance from the one before the 15; sign and fraction stay the byte that they are. A number with another exponent
// is a patch: its place and itself. A panel with more patches than its place has room for lies elsewhere, as it is.
//
// A compressed panel: its head, its patches by place and one behind all places, up to a whole line; then for each four inputs 192
// bytes: the codes of 128 numbers, the first two inputs' in the low halves of 64 bytes, then 64 bytes of sign and fraction for the
// first two inputs, then for the others. Within 16 bytes, the first 8 are of the panel's first sixteen outputs.
#pragma once

#include <cstdint>
#include <cstring>

#include "packing.h"

#ifdef TESSERA_BF16_LANES

namespace {

constexpr int kCodes = 15;             // neighbouring exponents that have one
constexpr int64_t kQuad = 4 * kPanel;  // numbers of four inputs
constexpr int64_t kQuadBytes = kQuad * 12 / 8;

struct Patch {
    int32_t place;  // among the numbers of a panel that is not compressed
    uint16_t number, unused;
};

struct alignas(kLine) PanelHead {
    const uint16_t* elsewhere;  // the panel as it is, or null
    int32_t before;             // the exponent before those that have a code
    int32_t patches;            // -1: there is no room for all
};

inline int64_t most_patches(int64_t I) { return I / 32 + 8; }
inline int64_t quads_of(int64_t I) { return (I + 3) / 4; }

inline int64_t quads_begin(int64_t I) {
    const int64_t bytes = int64_t(sizeof(PanelHead)) + (most_patches(I) + 1) * int64_t(sizeof(Patch));
    return (bytes + kLine - 1) / kLine * kLine;
}

inline int64_t compressed_bytes(int64_t I) { return quads_begin(I) + quads_of(I) * kQuadBytes; }

inline Patch* patches_of(char* place) { return reinterpret_cast<Patch*>(place + sizeof(PanelHead)); }
inline const Patch* patches_of(const char* place) { return reinterpret_cast<const Patch*>(place + sizeof(PanelHead)); }

// The exponent before the 15 that most of a panel's numbers have, by a quarter of them.
inline int32_t exponent_before(const uint16_t* panel, int64_t numbers) {
    int32_t count[256] = {};
    for (int64_t at = 0; at < numbers; at += kQuad) {
        const int64_t quarter = at + at / kQuad % 4 * kPanel, from = quarter < numbers ? quarter : at;
        for (int64_t i = from; i < from + kPanel; ++i) ++count[panel[i] >> 7 & 255];
    }
    int32_t sum = 0, most = -1, before = 0;
    for (int e = 1; e < 256; ++e) {
        sum += count[e] - (e > kCodes ? count[e - kCodes] : 0);
        if (e >= kCodes && sum > most) most = sum, before = e - kCodes;
    }
    return before;
}

// 32 numbers as words of sign and fraction, and of codes; those that have no code are noted as patches. False: there is no room.
struct Encoder {
    Patch* patches;
    int64_t most, count;
    __m512i before;

    bool encode(const uint16_t* panel, int64_t place, __m512i& rest, __m512i& codes) {
        const __m512i number = _mm512_loadu_si512(panel + place), byte = _mm512_set1_epi16(0xff);
        const __m512i exponent = _mm512_and_si512(_mm512_srli_epi16(number, 7), byte);
        const __m512i sign = _mm512_and_si512(_mm512_srli_epi16(number, 8), _mm512_set1_epi16(0x80));
        rest = _mm512_or_si512(sign, _mm512_and_si512(number, _mm512_set1_epi16(0x7f)));
        const __m512i code = _mm512_sub_epi16(exponent, before);
        const __mmask32 has_exponent = _mm512_test_epi16_mask(exponent, exponent);
        const __mmask32 has_code = _mm512_cmple_epu16_mask(_mm512_sub_epi16(code, _mm512_set1_epi16(1)), _mm512_set1_epi16(kCodes - 1));
        codes = _mm512_maskz_mov_epi16(has_exponent & has_code, code);
        for (uint32_t left = has_exponent & ~has_code; left; left &= left - 1) {
            if (count == most) return false;
            const int32_t own = int32_t(place) + __builtin_ctz(left);
            patches[count++] = {own, panel[own], 0};
        }
        return true;
    }
};

// Whether the panel had room there. It is compressed where it had, and ``elsewhere`` is for the caller to set where it had not.
inline bool compress(const uint16_t* panel, int64_t I, char* place) {
    PanelHead head = {};
    head.before = exponent_before(panel, I * kPanel);
    Encoder encoder{patches_of(place), most_patches(I), 0, _mm512_set1_epi16(int16_t(head.before))};
    char* out = place + quads_begin(I);
    bool fits = true;
    for (int64_t at = 0; fits && at < I * kPanel; at += kQuad, out += kQuadBytes) {
        __m512i codes[2] = {};
        for (int w = 0; fits && w < 2; ++w) {
            __m512i rests = {};
            if (const int64_t own = at + w * kQuad / 2; own < I * kPanel) {
                __m512i rest[2], code[2];
                fits = encoder.encode(panel, own, rest[0], code[0]) && encoder.encode(panel, own + kPanel, rest[1], code[1]);
                rests = _mm512_packus_epi16(rest[0], rest[1]), codes[w] = _mm512_packus_epi16(code[0], code[1]);
            }
            _mm512_storeu_si512(out + (1 + w) * kLine, rests);
        }
        _mm512_storeu_si512(out, _mm512_or_si512(codes[0], _mm512_slli_epi16(codes[1], 4)));
    }
    head.patches = fits ? int32_t(encoder.count) : -1;
    encoder.patches[encoder.count] = {INT32_MAX, 0, 0};
    std::memcpy(place, &head, sizeof head);
    return fits;
}

// Reads a compressed panel's weights from the first input to the last.
class Compressed {
public:
    static constexpr int kTogether = 2;  // words at once
    static constexpr bool kAsks = true;  // eight rows ask for what they read, too

    Compressed(const char* place, int64_t I) : quads_(place + quads_begin(I)), next_(patches_of(place)) {
        const int32_t before = reinterpret_cast<const PanelHead*>(place)->before;
        const __m512i code = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
        const __mmask64 is_zero = _mm512_testn_epi8_mask(code, code);
        const __m512i exponent = _mm512_mask_mov_epi8(_mm512_add_epi8(code, _mm512_set1_epi8(char(before))), is_zero, code);
        const __m512i odd = _mm512_and_si512(exponent, _mm512_set1_epi8(1));
        high_ = _mm512_and_si512(_mm512_srli_epi16(exponent, 1), _mm512_set1_epi8(0x7f));
        low_ = _mm512_and_si512(_mm512_slli_epi16(odd, 7), _mm512_set1_epi8(char(0x80)));
    }

    // The weights of inputs i and i + 1, where 4 divides i: of the panel's first sixteen outputs, then of the others.
    __attribute__((always_inline)) void first(int64_t i, __m512i (&out)[2]) {
        const char* quad = quads_ + (i >> 2) * kQuadBytes;
        const __m512i codes = _mm512_loadu_si512(quad);
        widen(codes, quad + kLine, out);
        widen(_mm512_srli_epi16(codes, 4), quad + 2 * kLine, later_);
        if (__builtin_expect(next_->place < ((i >> 2) + 1) * kQuad, 0)) {
            uint16_t numbers[kQuad];
            for (int h = 0; h < 2; ++h) {
                _mm512_storeu_si512(numbers + h * kPanel, out[h]);
                _mm512_storeu_si512(numbers + kQuad / 2 + h * kPanel, later_[h]);
            }
            next_ = patched(next_, (i >> 2) * kQuad, numbers);
            for (int h = 0; h < 2; ++h) {
                out[h] = _mm512_loadu_si512(numbers + h * kPanel);
                later_[h] = _mm512_loadu_si512(numbers + kQuad / 2 + h * kPanel);
            }
        }
    }
    // Those of the two inputs behind them.
    void second(__m512i (&out)[2]) const { out[0] = later_[0], out[1] = later_[1]; }

    // Has memory bring what is read ``bytes`` behind the weights of input i.
    __attribute__((always_inline)) void ask_behind(int64_t i, int64_t bytes) const {
#pragma GCC unroll 3
        for (int64_t line = 0; line < kQuadBytes; line += kLine) _mm_prefetch(quads_ + (i >> 2) * kQuadBytes + bytes + line, _MM_HINT_T0);
    }

private:
    // What the table has for the low halves of bytes.
    static __m512i look_up(__m512i table, __m512i codes) {
#ifdef __AVX512VBMI__
        return _mm512_permutexvar_epi8(codes, table);  // by six bits, two of which make no difference
#else
        return _mm512_shuffle_epi8(table, _mm512_and_si512(codes, _mm512_set1_epi8(15)));
#endif
    }

    void widen(__m512i codes, const char* rests, __m512i (&out)[2]) const {
        const __m512i rest = _mm512_loadu_si512(rests), sign = _mm512_set1_epi8(char(0x80));
        constexpr int or_where = 0xf8, or_elsewhere = 0xf4;  // a | (b & c), a | (b & ~c)
        const __m512i high = _mm512_ternarylogic_epi32(look_up(high_, codes), rest, sign, or_where);
        const __m512i low = _mm512_ternarylogic_epi32(look_up(low_, codes), rest, sign, or_elsewhere);
        out[0] = _mm512_unpacklo_epi8(low, high), out[1] = _mm512_unpackhi_epi8(low, high);
    }

    __attribute__((noinline)) static const Patch* patched(const Patch* next, int64_t begin, uint16_t* numbers) {
        for (; next->place < begin + kQuad; ++next) numbers[next->place - begin] = next->number;
        return next;
    }

    const char* quads_;
    const Patch* next_;
    __m512i high_, low_;  // of an exponent by its code: all bits but the last, and the last as a byte's highest

protected:
    __m512i later_[2] = {};
};

// The same, which leaves the panel as it was in ``whole``, quad by quad.
class Keeping : public Compressed {
public:
    Keeping(const char* place, int64_t I, uint16_t* whole) : Compressed(place, I), whole_(whole) {}

    __attribute__((always_inline)) void first(int64_t i, __m512i (&out)[2]) {
        Compressed::first(i, out);
        uint16_t* own = whole_ + i * kPanel;
        for (int h = 0; h < 2; ++h) {
            _mm512_storeu_si512(own + h * kPanel, out[h]);
            _mm512_storeu_si512(own + kQuad / 2 + h * kPanel, later_[h]);
        }
    }

private:
    uint16_t* whole_;
};

// The panel as it was, all I inputs of it.
inline void decompress(const char* place, int64_t I, uint16_t* panel) {
    if (const uint16_t* elsewhere = reinterpret_cast<const PanelHead*>(place)->elsewhere) {
        std::memcpy(panel, elsewhere, size_t(I * kPanel) * sizeof *panel);
        return;
    }
    Compressed weights(place, I);
    for (int64_t i = 0; i < I; i += 2) {
        __m512i out[2];
        i % 4 ? weights.second(out) : weights.first(i, out);
        for (int h = 0; h < 2; ++h) _mm512_storeu_si512(panel + i * kPanel + h * kPanel, out[h]);
    }
}

// Compresses the panels of O rows, ``stride`` numbers apart; returns how many there was no room for. With ``spare``, of as many panels,
// those that the call before had no room for are left there as they are, and none is compressed.
int64_t compress_all(int threads, const char* plain, int64_t stride, bool is_transposed, char* packed, int64_t O, int64_t I, uint16_t* spare) {
    const int64_t panels = panels_of(O), bytes = compressed_bytes(I);
    stride *= int64_t(sizeof(uint16_t));
    int64_t lost = 0;
    if (spare) {
        for (int64_t p = 0; p < panels; ++p) {
            PanelHead& head = *reinterpret_cast<PanelHead*>(packed + p * bytes);
            if (head.patches >= 0) continue;
            head.elsewhere = spare + lost++ * I * kPanel;
            pack_panel_of<kPanel, uint16_t>(plain, stride, is_transposed, p, const_cast<char*>(reinterpret_cast<const char*>(head.elsewhere)), O, I);
        }
        return lost;
    }
#pragma omp parallel for num_threads(threads) reduction(+ : lost)
    for (int64_t p = 0; p < panels; ++p) {
        thread_local Scratch scratch;
        char* panel = scratch.of(I * kPanel * int64_t(sizeof(uint16_t)));
        pack_panel_of<kPanel, uint16_t>(plain, stride, is_transposed, p, panel, O, I);
        lost += !compress(reinterpret_cast<const uint16_t*>(panel), I, packed + p * bytes);
    }
    return lost;
}

}  // namespace

#endif
