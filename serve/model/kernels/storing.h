// What a step brings to attention: its queries, keys and values, the rotary embedding, and keys and values on the way into their
// blocks. The shapes are those of attention.h.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "factors.h"

namespace {

struct Step {
    const void* query;
    const void* key;
    const void* value;
    int64_t query_stride_token, query_stride_head;
    int64_t key_stride_token, key_stride_head;
    int64_t value_stride_token, value_stride_head;
    const void* cosines;        // [T, R], contiguous; unused where R is 0
    const void* sines;
    const int64_t* slots;       // [T]: block * S + offset of each token
    void* key_cache;
    void* value_cache;
    bf16* key_scales;           // null where the caches have the type of the queries
    bf16* value_scales;
    void* out;                  // [T, H, D], contiguous
    const float* sinks;         // [H] or null: one more score for each head, without a value
    const float* bias;          // [H, L] or null: added to the score of each head with the key at each position
    const int32_t* tiles;       // [items, 3]: row of its table, first token, number of tokens
    const int32_t* positions;   // [T]
    const int32_t* tables;      // [rows, table_width]
    int64_t tokens, num_tiles, table_width;
    int64_t query_heads, kv_heads, head_dim, block_tokens;
    int64_t rotary_dim;         // R
    int64_t window;             // 0: no window; else position p sees (p - window, p]
    int64_t bias_positions;     // L, whole blocks
    float scale;
    float softcap;              // 0: none; else scores become softcap * tanh(score / softcap)
};

// Eight numbers of a head, which the smallest rotary embeddings have on each side.
typedef float eight __attribute__((vector_size(32)));
inline eight load_eight(const float* source) { return load_as<eight>(source); }
inline eight load_eight(const bf16* source) {
    typedef uint16_t narrow __attribute__((vector_size(16)));
    typedef uint32_t whole __attribute__((vector_size(32)));
    narrow bits;
    std::memcpy(&bits, source, sizeof(bits));
    return (eight)(__builtin_convertvector(bits, whole) << 16);
}

// The first R features of one head's query or key after the rotary embedding (Su et al. 2021), as GPT-NeoX and Llama turn them.
template <typename scalar>
inline void rotate(const Step& step, const scalar* head, int64_t token, float* out) {
    const int64_t R = step.rotary_dim, half = R / 2;
    const scalar *cosines = static_cast<const scalar*>(step.cosines) + token * R, *sines = static_cast<const scalar*>(step.sines) + token * R;
    int64_t d = 0;
    for (; d + 8 <= half; d += 8) {
        const eight low = load_eight(head + d), high = load_eight(head + half + d);
        save_as(low * load_eight(cosines + d) - high * load_eight(sines + d), out + d);
        save_as(high * load_eight(cosines + half + d) + low * load_eight(sines + half + d), out + half + d);
    }
    for (; d < half; ++d) {
        const float low = to_float(head[d]), high = to_float(head[half + d]);
        out[d] = low * to_float(cosines[d]) - high * to_float(sines[d]);
        out[half + d] = high * to_float(cosines[half + d]) + low * to_float(sines[half + d]);
    }
}

// ``count`` numbers in a type that is stored. What is stored may not lie where the numbers do.
inline void round_to(const float* numbers, int64_t count, float* out) { std::memcpy(out, numbers, size_t(count) * sizeof(float)); }
inline void round_to(const float* numbers, int64_t count, bf16* out) {
    int64_t i = 0;
#ifdef __AVX512BF16__
    for (; i + kPart <= count; i += kPart)
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(numbers + i)));
#endif
    for (; i < count; ++i) from_float(numbers[i], out[i]);
}

// Numbers of one head of a token, which are read soon. The next token's lie a whole row further on, where no processor looks ahead.
template <typename scalar>
inline void ask_for_head(const scalar* head, int64_t D) {
    for (int64_t d = 0; d < D; d += kLineBytes / int64_t(sizeof(scalar))) __builtin_prefetch(head + d);
}

template <typename scalar>
const scalar* key_of(const Step& step, int64_t token, int64_t head) {
    return static_cast<const scalar*>(step.key) + token * step.key_stride_token + head * step.key_stride_head;
}
template <typename scalar>
const scalar* value_of(const Step& step, int64_t token, int64_t head) {
    return static_cast<const scalar*>(step.value) + token * step.value_stride_token + head * step.value_stride_head;
}
// A slot's block of a head, counted from the first block's first head.
inline int64_t block_of(const Step& step, int64_t slot, int64_t head) { return slot / step.block_tokens * step.kv_heads + head; }

// Numbers as whole ones between -127 and 127, ``stride`` apart, and their scale, rounded before anything is divided by it. NaN or
// infinity makes the scale NaN, and with it whatever reads the position.
inline bf16 narrow(const float* numbers, int64_t count, int8_t* out, int64_t stride) {
    float most = 0.0f, fault = 0.0f;
    for (int64_t i = 0; i < count; ++i) {
        const float size = std::fabs(numbers[i]);
        most = size > most ? size : most;
        fault += numbers[i] * 0.0f;
    }
    bf16 kept;
    from_float(most / 127.0f + fault, kept);
    const float scale = to_float(kept);
    for (int64_t i = 0; i < count; ++i) {
        const float whole = scale > 0.0f ? std::nearbyint(numbers[i] / scale) : 0.0f;
        out[i * stride] = int8_t(whole > 127.0f ? 127.0f : whole < -127.0f ? -127.0f : whole);
    }
    return kept;
}

// One token's key and value of one head, into their slot.
template <typename scalar, typename stored>
void store_token(const Step& step, int64_t token, int64_t head) {
    const int64_t D = step.head_dim, S = step.block_tokens, offset = step.slots[token] % S;
    const int64_t base = block_of(step, step.slots[token], head) * D * S;
    const scalar *key = key_of<scalar>(step, token, head), *value = value_of<scalar>(step, token, head);
    stored* keys = static_cast<stored*>(step.key_cache) + base + offset;
    stored* values = static_cast<stored*>(step.value_cache) + base + offset * D;
    thread_local std::vector<float> turned;
    turned.resize(size_t(D));
    rotate(step, key, token, turned.data());
    if constexpr (std::is_same_v<stored, int8_t>) {
        for (int64_t d = step.rotary_dim; d < D; ++d) turned[size_t(d)] = to_float(key[d]);
        step.key_scales[base / D + offset] = narrow(turned.data(), D, keys, S);
        for (int64_t d = 0; d < D; ++d) turned[size_t(d)] = to_float(value[d]);
        step.value_scales[base / D + offset] = narrow(turned.data(), D, values, 1);
    } else {
        thread_local std::vector<stored> rounded;  // as those of a whole block, to the last bit
        rounded.resize(size_t(step.rotary_dim));
        round_to(turned.data(), step.rotary_dim, rounded.data());
        for (int64_t d = 0; d < step.rotary_dim; ++d) keys[d * S] = rounded[size_t(d)];
        for (int64_t d = step.rotary_dim; d < D; ++d) keys[d * S] = key[d];
        std::memcpy(values, value, size_t(D) * sizeof(scalar));
    }
}

#if defined(__AVX512BW__) && defined(__AVX512VL__)

// Rows of sixteen numbers as registers, and two of them laid together number by number: the first halves, or the second.
inline __m256i row_of(const bf16* row) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row)); }
inline __m512i row_of(const float* row) { return _mm512_loadu_si512(row); }
inline void keep(bf16* out, __m256i row) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), row); }
inline void keep(float* out, __m512i row) { _mm512_storeu_si512(out, row); }
inline __m256i laid_together(__m256i a, __m256i b, int half) {
    const __m256i low = _mm256_setr_epi16(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    return _mm256_permutex2var_epi16(a, half ? _mm256_add_epi16(low, _mm256_set1_epi16(8)) : low, b);
}
inline __m512i laid_together(__m512i a, __m512i b, int half) {
    const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    return _mm512_permutex2var_epi32(a, half ? _mm512_add_epi32(low, _mm512_set1_epi32(8)) : low, b);
}

// Sixteen rows of sixteen numbers, transposed: four times, rows eight apart are laid together.
template <typename scalar>
inline void transpose(const scalar* rows, int64_t stride, scalar* out) {
    decltype(row_of(rows)) own[16], next[16];
    for (int i = 0; i < 16; ++i) own[i] = row_of(rows + i * stride);
#pragma GCC unroll 4
    for (int turn = 0; turn < 4; ++turn) {
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) next[i] = laid_together(own[i / 2], own[i / 2 + 8], i % 2);
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) own[i] = next[i];
    }
    for (int i = 0; i < 16; ++i) keep(out + i * 16, own[i]);
}

// Whether these tokens fill a block of sixteen positions, one after the other.
inline bool is_block(const Step& step, int64_t first, int64_t end) {
    if (end - first != 16 || step.block_tokens != 16 || step.slots[first] % 16 != 0) return false;
    for (int64_t i = 1; i < 16; ++i)
        if (step.slots[first + i] != step.slots[first] + i) return false;
    return true;
}

// Sixteen tokens' keys and values of one head, which are a block, of a head of whole sixteens.
template <typename scalar>
void store_block(const Step& step, int64_t first, int64_t head) {
    const int64_t D = step.head_dim, base = block_of(step, step.slots[first], head) * D * 16;
    thread_local std::vector<float> memory;
    memory.resize(size_t(step.rotary_dim + 16 * D));
    float* turned = memory.data();
    scalar* rows = reinterpret_cast<scalar*>(turned + step.rotary_dim);
    for (int64_t i = 0; i < 16; ++i) {
        const scalar* key = key_of<scalar>(step, first + i, head);
        std::memcpy(rows + i * D, key, size_t(D) * sizeof(scalar));
        rotate(step, key, first + i, turned);
        round_to(turned, step.rotary_dim, rows + i * D);
        std::memcpy(static_cast<scalar*>(step.value_cache) + base + i * D, value_of<scalar>(step, first + i, head),
                    size_t(D) * sizeof(scalar));
    }
    for (int64_t d = 0; d < D; d += 16) transpose(rows + d, D, static_cast<scalar*>(step.key_cache) + base + d * 16);
}

#endif

// Keys and values of one head of tokens [first, end), which share lines of a block where they follow one another. What is stored
// next is asked for: the same tokens' next head, or those behind them.
template <typename scalar, typename stored>
void store_run(const Step& step, int64_t first, int64_t end, int64_t head) {
    const bool has_next = head + 1 < step.kv_heads;
    for (int64_t token = first; token < end; ++token) {
        const int64_t then = has_next ? token : token + end - first;
        if (then >= step.tokens) break;
        ask_for_head(key_of<scalar>(step, then, has_next ? head + 1 : 0), step.head_dim);
        ask_for_head(value_of<scalar>(step, then, has_next ? head + 1 : 0), step.head_dim);
    }
#if defined(__AVX512BW__) && defined(__AVX512VL__)
    if constexpr (std::is_same_v<scalar, stored>)
        if (step.head_dim % 16 == 0 && is_block(step, first, end)) return store_block<scalar>(step, first, head);
#endif
    for (int64_t token = first; token < end; ++token) store_token<scalar, stored>(step, token, head);
}

}  // namespace
